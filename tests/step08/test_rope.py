"""Step 08's tables of the rotary embedding: every scaling as transformers has it, and what is refused."""

import itertools
import math

import pytest
import torch

from ladder.step08_dflash2.fusion.rope import frequencies, rope_tables, yarn_mscale

YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}


def test_rope_tables():
    cos, sin = rope_tables(8, 5, theta=100.0)
    assert cos.shape == sin.shape == (5, 4) and cos.dtype == sin.dtype == torch.float32
    for position, pair in itertools.product(range(5), range(4)):
        angle = position * 100.0 ** (-2 * pair / 8)
        assert float(cos[position, pair]) == pytest.approx(math.cos(angle), abs=1e-7)
        assert float(sin[position, pair]) == pytest.approx(math.sin(angle), abs=1e-7)


def test_rope_tables_are_made_where_they_are_asked_for():
    """Also while a model is made on another device."""
    want = rope_tables(16, 9, scaling=YARN)
    with torch.device("meta"):
        found = rope_tables(16, 9, scaling=YARN)
    assert all(torch.equal(*pair) for pair in zip(found, want))


def test_rope_tables_linear():
    plain, stretched = rope_tables(16, 41), rope_tables(16, 161, scaling={"type": "linear", "factor": 4.0})
    for a, b in zip(plain, stretched):
        torch.testing.assert_close(b[::4], a)


def test_rope_tables_yarn():
    """DeepSeek-V2's: fast pairs as trained, slow ones stretched by the factor, a ramp between; the factors cancel."""
    scaling = dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1)
    scaling |= dict(mscale=0.707, mscale_all_dim=0.707)
    plain, _ = frequencies(64, 10000.0, None)
    radians, factor = frequencies(64, 10000.0, scaling)
    ratio = radians / plain
    assert factor == 1.0 and float(ratio[0]) == 1.0 and float(ratio[-1]) == pytest.approx(1 / 40)
    turns = 4096 * plain / (2 * math.pi)
    assert (ratio[turns > 40] == 1).all() and torch.allclose(ratio[turns < 0.7], torch.tensor(1 / 40, dtype=torch.float64))
    assert (ratio.diff() < 1e-12).all()
    del scaling["mscale"]
    assert frequencies(64, 10000.0, scaling)[1] == pytest.approx(0.1 * math.log(40) + 1)
    cos, _ = rope_tables(64, 3, scaling={**scaling, "attention_factor": 2.0})
    assert (cos[0] == 2).all()
    assert yarn_mscale(40, 0.707) == pytest.approx(0.1 * 0.707 * math.log(40) + 1) and yarn_mscale(0.5) == 1


def test_rope_tables_llama3():
    """Llama 3.1's: pairs that turn more than 4 times in the trained context as they were, fewer than once stretched."""
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    plain, _ = frequencies(128, 5e5, None)
    radians, factor = frequencies(128, 5e5, scaling)
    ratio, turns = radians / plain, 8192 * plain / (2 * math.pi)
    between = (turns > 1) & (turns < 4)
    assert factor == 1.0 and (ratio[turns >= 4] == 1).all() and torch.allclose(ratio[turns <= 1], torch.full_like(ratio[turns <= 1], 1 / 8))
    torch.testing.assert_close(ratio[between], 1 / 8 + 7 / 8 * (turns[between] - 1) / 3)
    assert between.any()


ROPE_SCALINGS = [
    {"rope_type": "default"},
    {},
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "rope_type": "linear", "factor": 3.0, "attention_factor": None},
    {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 16, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_slow": 2, "attention_factor": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "mscale_all_dim": 0.7, "partial_rotary_factor": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
]  # fmt: skip


@pytest.mark.parametrize("theta", [None, 1e6])
@pytest.mark.parametrize("scaling", ROPE_SCALINGS, ids=lambda s: s.get("rope_type", s.get("type", "none")))
def test_rope_tables_as_transformers_has_them(scaling, theta):
    """From the dictionary that transformers 5 makes of it, which has the base of the frequencies too."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=1, head_dim=128, max_position_embeddings=131072,
        rope_parameters=dict(scaling) if theta is None else {**scaling, "rope_theta": theta},
    )  # fmt: skip
    assert config.rope_parameters["rope_theta"] == (theta or 10000.0)
    theirs = LlamaRotaryEmbedding(config)  # what the model runs: by ROPE_INIT_FUNCTIONS, but for the default type
    positions = torch.arange(64)
    want = [x[0, :, :64] for x in theirs(torch.zeros(1), positions[None])]
    for ours, table in zip(rope_tables(128, 64, scaling=config.rope_parameters), want):
        torch.testing.assert_close(ours, table, atol=2e-5, rtol=0)
    radians, factor = frequencies(128, theta, scaling)  # and from one without the base
    torch.testing.assert_close(radians.float(), theirs.inv_freq)
    assert factor == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize("arguments, words", [
    (dict(head_dim=7), "head_dim is 7; want an even number"),
    (dict(theta=-1.0), "theta is -1.0; want a positive number"),
    (dict(scaling={"type": "dynamic"}), "type 'dynamic'; want 'default', 'linear', 'yarn' or 'llama3'"),
    (dict(scaling={"type": ["yarn"]}), r"type \['yarn'\]; want 'default'"),
    (dict(scaling={"factor": 2.0}), r"scaling\['factor'\] is 2.0; want no such key: type 'default' does not read it"),
    (dict(scaling={"type": "linear"}), r"scaling\['factor'\] is None; want a positive number for type 'linear'"),
    (dict(scaling={"type": "linear", "factor": True}), r"scaling\['factor'\] is True; want a positive number for type 'linear'"),
    (dict(scaling={"type": "yarn", "factor": 4}), r"scaling\['original_max_position_embeddings'\] is None"),
    (dict(scaling="yarn"), "scaling is a str; want a dict"),
    (dict(theta=500.0, scaling={"rope_type": "default", "rope_theta": 1e6}), r"theta is 500.0 and scaling\['rope_theta'\] is 1000000.0"),
    (dict(scaling={"rope_theta": "1e6"}), r"scaling\['rope_theta'\] is '1e6'; want a positive number"),
    (dict(scaling={"rope_type": "default", "type": "linear"}), "rope_type 'default' and type 'linear'; want one of them"),
    (dict(scaling={"partial_rotary_factor": 0.5}), "partial_rotary_factor other than 1; want none: head_dim is the number of"),
    (dict(scaling={"full_attention": {"rope_theta": 1e6}}), r"scaling\['full_attention'\] is .*; want no such key"),
    (dict(scaling={"rope_type": "linear", "factor": 2.0, "mscale": 0.7}), r"scaling\['mscale'\] is 0.7; want no such key: type 'linear'"),
    (dict(scaling={**YARN, "low_freq_factor": 1.0}), r"scaling\['low_freq_factor'\] is 1.0; want no such key: type 'yarn'"),
    (dict(scaling={**YARN, "truncate": None}), r"scaling\['truncate'\] is None; want True or False"),
    (dict(scaling={**YARN, "attention_factor": "2"}), r"scaling\['attention_factor'\] is '2'; want a positive number"),
])  # fmt: skip
def test_rope_tables_refuse(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        rope_tables(**{"head_dim": 8, "max_positions": 4, **arguments})
