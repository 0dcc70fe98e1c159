"""The engine's models: DeepSeek-V2 against its formulas and the public checkpoint's layout, tiny-moe's training and files."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.engine_models import MLA, checkpoint_tensors, engine, greedy, prompts, write_checkpoint

from dspark_mini.trace import read_trace
from ladder.engine import corpus, layers, quality
from ladder.engine.context import Batch
from ladder.engine.models import Spec, deepseek_v2, find, tiny_moe
from ladder.engine.train_tiny_moe import main as train

CONFIG = MLA.config


def by_formula(tensors, c, tokens):
    """Logits (S, vocab) straight from the paper's formulas: heads unabsorbed, neighbouring rotary pairs, experts one by one."""
    S, w = len(tokens), lambda name: tensors[name + ".weight"].double()

    def norm(x, weight, eps=c.eps):
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def mlp(x, name):
        return (F.silu(x @ w(name + "gate_proj").T) * (x @ w(name + "up_proj").T)) @ w(name + "down_proj").T

    cos, sin = deepseek_v2.rope_table(c, S).double().chunk(2, -1)

    def turn(x):  # (S, ..., rope_dim), pairs are neighbours
        shape = (S,) + (1,) * (x.ndim - 2) + (-1,)
        a, b, co, si = x[..., 0::2], x[..., 1::2], cos.view(shape), sin.view(shape)
        return torch.stack([a * co - b * si, b * co + a * si], -1).flatten(-2)

    x = w("model.embed_tokens")[tokens]
    for n in range(c.num_layers):
        layer = f"model.layers.{n}."
        h = norm(x, w(layer + "input_layernorm"))
        q = (h @ w(layer + "self_attn.q_proj").T).view(S, c.num_heads, c.qk_dim)
        latent = h @ w(layer + "self_attn.kv_a_proj_with_mqa").T
        compressed = norm(latent[:, : c.latent], w(layer + "self_attn.kv_a_layernorm"), 1e-6)
        kv = (compressed @ w(layer + "self_attn.kv_b_proj").T).view(S, c.num_heads, c.nope_dim + c.v_dim)
        q = torch.cat([q[..., : c.nope_dim], turn(q[..., c.nope_dim :])], -1)
        rope = turn(latent[:, None, c.latent :]).expand(-1, c.num_heads, -1)
        k, v = torch.cat([kv[..., : c.nope_dim], rope], -1), kv[..., c.nope_dim :]
        mscale = 0.1 * c.rope["mscale_all_dim"] * math.log(c.rope["factor"]) + 1
        scores = torch.einsum("qhd,khd->hqk", q, k) * c.qk_dim**-0.5 * mscale**2
        scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
        x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ w(layer + "self_attn.o_proj").T
        h = norm(x, w(layer + "post_attention_layernorm"))
        if n < c.num_dense:
            x = x + mlp(h, layer + "mlp.")
            continue
        weights, ids = (h @ w(layer + "mlp.gate").T).softmax(-1).topk(c.top_k)
        out = mlp(h, layer + "mlp.shared_experts.")
        for t in range(S):
            for weight, expert in zip(weights[t], ids[t].tolist()):
                out[t] = out[t] + weight * mlp(h[t], f"{layer}mlp.experts.{expert}.")
        x = x + out
    return norm(x, w("model.norm")) @ w("lm_head").T


def served_logits(served, tokens):
    """Logits (S, vocab) of a prompt, one prefill step."""
    from ladder.engine.scheduler import Request

    request = Request(0, tokens, greedy(1))
    served.pool.grow(request.pages, len(tokens))
    batch = served.runner.batch([(request, len(tokens))], False)
    served.runner.context.begin(batch)
    with torch.inference_mode():
        return served.runner.model.logits(served.runner.model(batch.tokens, served.runner.context))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tensors = checkpoint_tensors(CONFIG)
    write_checkpoint(folder, tensors, CONFIG)
    return folder, tensors


def test_a_sharded_checkpoint_computes_the_paper(checkpoint):
    folder, tensors = checkpoint
    spec = find("deepseek-v2-lite", folder)
    assert spec.config == CONFIG and spec.end == (7,)
    tokens = prompts((40,))[0]
    want = by_formula(tensors, CONFIG, tokens)
    served = engine(spec, "step04", kv_tokens=256)
    assert (served_logits(served, tokens).double() - want).abs().max() < 2e-4 * want.abs().max()
    # decode runs on the latents, absorbed: each token it adds must be the one the formulas choose
    answer = engine(spec, "step04", chunk_tokens=17).generate([tokens], greedy(4))[0]
    for n, token in enumerate(answer):
        assert by_formula(tensors, CONFIG, tokens + answer[:n])[-1].argmax() == token


def test_one_file_and_other_dtypes(checkpoint, tmp_path):
    folder, tensors = checkpoint
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    one = deepseek_v2.load(tmp_path, torch.float32)
    for name, weight in deepseek_v2.load(folder, torch.float32).state_dict().items():
        assert torch.equal(weight, one.state_dict()[name]), name
    assert deepseek_v2.load(folder, torch.bfloat16).head.dtype == torch.bfloat16


def test_a_broken_checkpoint_is_named(checkpoint, tmp_path):
    folder, tensors = checkpoint
    with pytest.raises(FileNotFoundError, match="no config.json"):
        find("deepseek-v2-lite", tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match="no model.safetensors"):
        find("deepseek-v2-lite", tmp_path)
    lacking = {n: t for n, t in tensors.items() if "experts.3.up_proj" not in n}
    for changed, message in (
        (lacking, "lacks all or part of blocks.1.mlp.gate_up"),
        ({**tensors, "model.layers.0.self_attn.q_a_proj.weight": torch.zeros(2)}, "q_a_proj.weight, which this architecture has no place"),
        ({**tensors, "lm_head.weight": torch.zeros(5, 32)}, r"lm_head.weight in model.safetensors has shape \(5, 32\); want \(96, 32\)"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            deepseek_v2.load(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for field, value in (("q_lora_rank", 1536), ("topk_method", "group_limited_greedy"), ("model_type", "llama")):
        (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
        with pytest.raises(ValueError, match=f"{field} in .* is {value!r}"):
            find("deepseek-v2-lite", tmp_path)


def test_the_real_architecture_has_its_public_size():
    c = deepseek_v2.DeepseekV2Config()
    assert find("deepseek-v2-lite").parameters == sum(
        math.prod(s) for s in ((c.vocab, 2048), (c.vocab, 2048), (2048,))
    ) + 27 * (2 * 2048 + 16 * 192 * 2048 + 576 * 2048 + 512 + 16 * 256 * 512 + 2048 * 2048) + 3 * 2048 * 10944 + 26 * (
        64 * 2048 + 66 * 3 * 2048 * 1408
    )
    assert abs(c.scale - 192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2) < 1e-12


def test_the_dense_control_has_no_experts():
    spec = find("mla-dense")
    assert spec.parameters == 2 * 102400 * 2048 + 2048 + 27 * (
        2 * 2048 + 16 * 192 * 2048 + 576 * 2048 + 512 + 16 * 256 * 512 + 2048 * 2048 + 3 * 2048 * 10944
    )
    with pytest.raises(ValueError, match="random weights only"):
        find("mla-dense", "folder")


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
THEIR_CONFIGS = {  # what differs from the test's checkpoint, as its ``config.json`` says it; a None takes the key out
    "as published": {},
    "no scaling": {"rope_scaling": None},
    "theta": {"rope_scaling": None, "rope_theta": 500.0},
    "theta of transformers 5": {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "yarn with no mscale": {"rope_scaling": {"type": "yarn", **YARN}},
    "yarn with mscale alone": {"rope_scaling": {"type": "yarn", **YARN, "mscale": 0.5}},
    "yarn with mscale_all_dim alone": {"rope_scaling": {"type": "yarn", **YARN, "mscale_all_dim": 0.5}},
    "yarn with two mscales": {"rope_scaling": {"type": "yarn", **YARN, "mscale": 2.0, "mscale_all_dim": 0.5}},
    "yarn, not truncated": {"rope_scaling": None, "rope_parameters": {
        "rope_type": "yarn", "type": "yarn", **YARN, "truncate": False, "rope_theta": 500.0, "beta_fast": 8, "beta_slow": 2}},
    "yarn with attention_factor": {"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.5, "mscale_all_dim": 0.5}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "epsilon": {"rms_norm_eps": 0.05},
    "weights of experts": {"routed_scaling_factor": 2.5},
    "defaults": {"rope_theta": None, "rms_norm_eps": None, "routed_scaling_factor": None, "norm_topk_prob": None, "scoring_func": None,
                 "moe_layer_freq": None, "topk_method": None, "hidden_act": None, "attention_bias": None, "n_shared_experts": None,
                 "num_key_value_heads": None},
}  # fmt: skip


@pytest.mark.parametrize("saved", [False, True], ids=["as written", "as transformers saves it"])
@pytest.mark.parametrize("changes", THEIR_CONFIGS.values(), ids=list(THEIR_CONFIGS))
def test_transformers_agrees(changes, saved, checkpoint, tmp_path):
    """The model of Hugging Face's library on the same folder, where it is installed."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = {**json.loads((checkpoint[0] / "config.json").read_text()), **changes}
    written = {name: value for name, value in config.items() if value is not None or name == "q_lora_rank"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    save_file(checkpoint[1], tmp_path / "model.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa", dtype=torch.float32).eval()
    if saved:
        theirs.config.save_pretrained(tmp_path)
        assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    tokens = prompts((100,))[0]
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0]
    spec = find("deepseek-v2-lite", tmp_path)
    assert (served_logits(engine(spec, "step04", kv_tokens=256), tokens) - want).abs().max() < 1e-4 * want.abs().max()
    if saved:  # the same model, of which the kernels' part is shown by the file as written
        return
    answer = engine(spec, "step08", kv_tokens=256).generate([tokens], greedy(3))[0]  # decode: absorbed, by the fused entries
    for n, token in enumerate(answer):
        with torch.no_grad():
            assert theirs(torch.tensor([tokens + answer[:n]])).logits[0, -1].argmax() == token


def test_the_defaults_are_those_of_transformers():
    theirs = pytest.importorskip("transformers", minversion="5.0").DeepseekV2Config()
    for name, default in deepseek_v2.FORMAT.values():
        if name != "rope_theta":  # which lies in rope_parameters
            assert getattr(theirs, name) == default, name
    for name, (default, _) in deepseek_v2.FIXED.items():  # model_type is there always
        assert name == "model_type" or getattr(theirs, name, default) == default, name


@pytest.mark.parametrize(("changes", "words"), [
    ({"model_type": "llama"}, "model_type in .* is 'llama'; want 'deepseek_v2'"),
    ({"model_type": ...}, "model_type in .* is missing, which means None; want 'deepseek_v2'"),
    ({"q_lora_rank": ...}, "q_lora_rank in .* is missing, which means 1536; want None"),
    ({"hidden_act": "gelu"}, "hidden_act in .* is 'gelu'; want 'silu'"),
    ({"norm_topk_prob": True}, "norm_topk_prob in .* is True; want False"),
    ({"attention_bias": True}, "attention_bias in .* is True"),
    ({"mlp_bias": True}, "mlp_bias in .* is True"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings in .* is True"),
    ({"moe_layer_freq": 2}, "moe_layer_freq in .* is 2; want 1"),
    ({"scoring_func": "sigmoid"}, "scoring_func in .* is 'sigmoid'"),
    ({"num_key_value_heads": 2}, "num_key_value_heads in .* is 2"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config in .* want None"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor in .* is 0.5"),
    ({"num_experts_per_tok": ...}, "num_experts_per_tok in config.json.* is None; want an integer"),
    ({"num_experts_per_tok": 9}, "top_k is 9; want at most 8"),
    ({"hidden_size": "32"}, "hidden_size in config.json.* is '32'; want an integer"),
    ({"n_routed_experts": None}, "n_routed_experts in config.json.* is None"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps in config.json.* is -1.0; want a number above 0"),
    ({"rope_theta": 500.0, "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0}}, "theta is 500.0 and .*10000.0"),
    ({"rope_parameters": {"rope_type": "default"}}, "rope_scaling .* and rope_parameters .*; want one of them"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type 'dynamic'; want 'default'"),
    ({"rope_scaling": {"type": "yarn", **YARN, "low_freq_factor": 1.0}}, "low_freq_factor.* is 1.0; want no such key"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings.* is None; want a positive number"),
    ({"rope_scaling": {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}}, "mscale_all_dim.* is 1.0; want no such key"),
    ({"rope_scaling": "yarn"}, "scaling is a str"),
])  # fmt: skip
def test_a_configuration_that_the_model_lacks_is_refused(changes, words, checkpoint, tmp_path):
    config = {**json.loads((checkpoint[0] / "config.json").read_text()), **changes}
    (tmp_path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    with pytest.raises(ValueError, match=words):
        deepseek_v2.DeepseekV2Config.from_json(tmp_path / "config.json")


@pytest.mark.parametrize(("ours", "generation", "end"), [
    ({"eos_token_id": 7}, {"eos_token_id": [2, 5]}, (2, 5)),
    ({}, {"eos_token_id": 5}, (5,)),
    ({"eos_token_id": [7, 8]}, {"temperature": 0.3}, (7, 8)),
    ({"eos_token_id": 7}, None, (7,)),
    ({"eos_token_id": None}, {"eos_token_id": None}, ()),
    ({"eos_token_id": 7}, {"eos_token_id": "</s>"}, r"eos_token_id in .*generation_config.json is '</s>'; want a token id"),
    ({"eos_token_id": 7}, {"eos_token_id": [2, -1]}, r"eos_token_id in .*generation_config.json is \[2, -1\]; want a token id"),
    ({"eos_token_id": True}, None, r"eos_token_id in .*/config.json is True; want a token id"),
    ({"eos_token_id": 7}, [2, 5], "generation_config.json holds a list; want a JSON object"),
    ({"eos_token_id": 7}, "{", "generation_config.json is no JSON"),
])  # fmt: skip
def test_what_ends_a_text(ours, generation, end, checkpoint, tmp_path):
    """The ids of generation_config.json, which is what transformers' ``generate`` stops at, before those of config.json."""
    save_file(checkpoint[1], tmp_path / "model.safetensors")
    config = json.loads((checkpoint[0] / "config.json").read_text())
    del config["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps({**config, **ours}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation if isinstance(generation, str) else json.dumps(generation))
    if isinstance(end, str):
        with pytest.raises(ValueError, match=end):
            find("deepseek-v2-lite", tmp_path)
    else:
        assert find("deepseek-v2-lite", tmp_path).end == end


# Experts


def test_experts_and_their_gradients():
    """Against one expert at a time; the hand-written gradients of dispatch and collect against autograd's."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x, gate_up, down, logits = (t.requires_grad_() for t in (draw(9, 8), draw(4, 12, 8), draw(4, 8, 6), draw(9, 3)))

    def run(one_by_one):
        weights, ids, _ = layers.choose_experts(logits, 2, True)
        if not one_by_one:
            return layers.run_experts(x, ids, weights, gate_up, down, num_shared=1)
        rows = []
        for t in range(9):
            chosen = [(w, e) for w, e in zip(weights[t], ids[t].tolist())] + [(1.0, 3)]
            rows.append(sum(w * (down[e] @ layers.swiglu(gate_up[e] @ x[t])) for w, e in chosen))
        return torch.stack(rows)

    torch.testing.assert_close(run(False), run(True))
    probe = draw(9, 8)
    for ours, theirs in zip(*(torch.autograd.grad((run(way) * probe).sum(), (x, gate_up, down, logits)) for way in (False, True))):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("tokens", "experts", "top_k", "shared", "width", "hidden"), (
    (5, 8, 2, 2, 48, 32), (3, 16, 2, 0, 64, 16), (1, 4, 2, 1, 16, 8), (19, 2, 1, 1, 24, 20),
))  # fmt: skip
def test_the_gpu_path_of_experts_in_the_interpreter(tokens, experts, top_k, shared, width, hidden, monkeypatch):
    generator = torch.Generator().manual_seed(tokens)
    x, weights = torch.randn(tokens, width, generator=generator), torch.rand(tokens, top_k, generator=generator)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    ids[:, 0] = 1  # more rows than a tile in one expert, none in another
    gate_up = torch.randn(experts + shared, 2 * hidden, width, generator=generator) * 0.3
    down = torch.randn(experts + shared, width, hidden, generator=generator) * 0.3
    if top_k > 1:
        ids[:, 1] = torch.where(ids[:, 1] == 1, 0, ids[:, 1])
    want = layers.run_experts(x, ids, weights, gate_up, down, shared)
    for product in ("library", "streamed"):
        torch.testing.assert_close(layers.fast_experts(x, ids, weights, gate_up, down, shared, product), want)
        parts = layers.fast_experts(x, ids, weights, gate_up, down, shared, product, later=True)
        residual, norm = torch.randn(tokens, width, generator=generator), torch.rand(width, generator=generator)
        for ours, theirs in zip(parts.add_norm(residual, norm, 1e-6), layers.add_norm(want, residual, norm, 1e-6)):
            torch.testing.assert_close(ours, theirs)
    monkeypatch.setattr(layers, "FEW_ASSIGNMENTS", 0)  # as many tokens have it: another sort, shared experts as plain products
    torch.testing.assert_close(layers.fast_experts(x, ids, weights, gate_up, down, shared, "library"), want)
    whole = layers.fast_experts(x, ids, weights, gate_up, down, shared, "library", later=True)
    monkeypatch.setattr(layers, "MOST_ROWS", 0)  # still more: experts in two halves, where two have rows
    parts = layers.fast_experts(x, ids, weights, gate_up, down, shared, "library", later=True)
    assert (parts.behind is None) == (top_k == 1) and whole.behind is None
    for ours, theirs in zip(parts.add_norm(residual, norm, 1e-6), whole.add_norm(residual, norm, 1e-6)):
        assert torch.equal(ours, theirs)


def test_the_middle_of_experts():
    assert layers.middle([0, 2, 4, 6, 8]) == (2, 4)
    assert layers.middle([0, 0, 7, 8]) == (2, 7)
    assert layers.middle([0, 0, 8, 8]) is None


def test_both_sorts_agree(monkeypatch):
    ids = torch.randint(0, 6, (37, 3), generator=torch.Generator().manual_seed(0))
    few = layers.place_rows(ids, 6, 2)
    monkeypatch.setattr(layers, "FEW_ASSIGNMENTS", 0)
    for ours, theirs in zip(few, layers.place_rows(ids, 6, 2)):
        assert torch.equal(ours, theirs)
    order, source, places, offsets = few
    assert torch.equal(order[places.flatten().long()], torch.arange(37 * 5, dtype=torch.int32))
    assert offsets[-1] == 37 * 5 and offsets[7] - offsets[6] == 37


def test_the_whole_model_on_the_gpu_path(monkeypatch):
    """What a GPU would run of norms, router and experts, in the interpreter: the same tokens."""
    tokens = prompts((5,), seed=4)[0]
    want = engine(MLA, "step04").generate([tokens], greedy(2))
    monkeypatch.setattr(layers, "serving_on_gpu", lambda x: torch.is_inference_mode_enabled())
    monkeypatch.setattr(layers, "_fastest", {(torch.Size((10, 32, 32)), 1): "streamed"})
    assert engine(MLA, "step04").generate([tokens], greedy(2)) == want
    monkeypatch.setattr("ladder.engine.context.ServingContext.sums_later", True)
    monkeypatch.setattr("ladder.engine.models.deepseek_v2.serving_on_gpu", layers.serving_on_gpu)
    monkeypatch.setattr("ladder.engine.models.deepseek_v2.MLP_TOKENS", 2)  # a dense layer in three parts
    assert engine(MLA, "step04").generate([tokens], greedy(2)) == want


@pytest.mark.parametrize("backend", ("sdpa", "step03", "step08"))
def test_the_last_layer_attends_for_the_last_tokens_only(backend, monkeypatch):
    """Where each prompt of a step ends in it; else for all, as before: the same tokens."""
    asked, batches, only = prompts((5, 11, 30, 70)), [], Batch.only

    def spy(batch, rows, cu_seqlens_q):
        batches.append(batch.lengths)
        return only(batch, rows, cu_seqlens_q)

    monkeypatch.setattr(Batch, "only", spy)
    answers = engine(MLA, backend).generate(asked, greedy(3))
    assert batches and all(len(lengths) < 4 for lengths in batches)
    monkeypatch.setattr(Batch, "only", lambda *_: None)
    assert engine(MLA, backend).generate(asked, greedy(3)) == answers


COMPILE = """
import json, sys
from unittest import mock
import torch
from ladder.engine import kernels, layers
from ladder.lab.compile.compiler import compile_for

launches = []
class Recorder:
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid): return lambda *args, **options: launches.append((self.kernel, args, options))

for experts, width, hidden, top_k, shared, tokens in ((66, 2048, 1408, 6, 2, 8), (16, 256, 64, 2, 0, 3)):
    stand_ins = {name: Recorder(getattr(kernels, name)) for name in dir(kernels) if name.startswith("engine_")}
    with mock.patch.multiple(kernels, **stand_ins):
        half = dict(dtype=torch.bfloat16)
        layers.fast_experts(torch.empty(tokens, width, **half), torch.zeros(tokens, top_k, dtype=torch.int32), torch.empty(tokens, top_k),
                            torch.empty(experts, 2 * hidden, width, **half), torch.empty(experts, width, hidden, **half), shared, "streamed")
        layers.fast_swiglu(torch.empty(tokens, 2 * hidden, **half))
        layers.fast_swiglu(torch.empty(4096, 2 * hidden, **half))
        layers.dispatch(torch.empty(tokens, width, **half), torch.zeros(tokens, top_k, dtype=torch.int32), 0, tokens * top_k)
        with torch.inference_mode(), mock.patch.object(layers, "serving_on_gpu", lambda x: True):
            layers.spread(torch.empty(tokens, 64, **half), torch.empty(tokens, 16, 64, **half))
            parts = layers.Parts(torch.empty(tokens * (top_k + shared), width, **half), torch.zeros(tokens, top_k + shared, dtype=torch.int32),
                                 torch.empty(tokens, top_k), None)
            parts.add_norm(torch.empty(tokens, width, **half), torch.empty(width, **half), 1e-6)
            parts.rows = parts.behind = torch.empty(tokens * (top_k + shared), width, **half)
            parts.add_norm(torch.empty(tokens, width, **half), torch.empty(width, **half), 1e-6)
for target in ("sm_80", "sm_90"):
    for kernel, args, options in launches:
        done = compile_for(target, kernel, *args, **options)
        print(json.dumps([target, done.name, done.spills, done.shared, done.count("HMMA")]))
"""


def test_kernels_compile_without_spills():
    import os

    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 40 and {name for _, name, *_ in rows} == {
        "engine_place", "engine_swiglu", "engine_combine", "engine_experts_up", "engine_experts_down", "engine_combine_norm", "engine_spread",
        "engine_dispatch",
    }  # fmt: skip
    for target, name, spills, shared, products in rows:
        assert spills == 0 and shared <= 100 << 10, (target, name)
        assert (products > 0) == name.startswith("engine_experts"), (target, name)


# tiny-moe

SMALL = dict(num_layers=2, width=32, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=8, expert_width=16, shared_width=16, context=64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A very short training run, stopped by its step count, on a corpus of this repository's tests."""
    out = tmp_path_factory.mktemp("trained")
    arguments = [
        "--minutes", "5", "--steps", "30", "--config", json.dumps(SMALL), "--batch-tokens", "512", "--short", "32", "--warmup", "5",
        "--log-every", "5", "--evaluate-tokens", "1024", "--device", "cpu", "--corpus", str(quality.__file__).rsplit("/engine/", 1)[0],
        "--keep-state", "--out", str(out),
    ]  # fmt: skip
    assert train(arguments) == 0
    return out, arguments


def test_training_learns_and_records(trained):
    out, arguments = trained
    record = json.loads((out / "tiny_moe_training.json").read_text())
    assert record["finished"] and record["steps"] == 30 and record["tokens"] == 30 * 512
    assert record["curve"][0]["bits_per_byte"] > record["curve"][-1]["bits_per_byte"] + 1
    assert record["curve"][-1]["seq_len"] == 64 and record["curve"][0]["seq_len"] == 32
    best = min(e["held_out_bits_per_byte"] for e in record["evaluations"])
    assert abs(record["held_out_bits_per_byte"]["64"] - best) < 0.01
    assert record["settings"]["seed"] == 0 and record["corpus"]["held_out"]["files"] > 0
    weights = load_file(out / "tiny_moe.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.float16}
    assert tiny_moe.read_config(out / "tiny_moe.safetensors") == tiny_moe.TinyMoEConfig(**SMALL)


def test_the_trace_and_inputs_are_real(trained):
    out, _ = trained
    trace = read_trace(out / "routing_trace.npz")
    assert (trace.num_layers, trace.num_experts, trace.top_k, trace.generated) == (2, 8, 2, False)
    assert (trace.topk_ids[..., 0] != trace.topk_ids[..., 1]).all() and len(trace.seq_offsets) == 5
    inputs = load_file(out / "tiny_moe_qkv.safetensors")
    assert inputs["layer0.q"].shape == (4, 64, 16) and inputs["layer0.k"].shape == inputs["layer0.v"].shape == (2, 64, 16)
    # the inputs are those of the stored weights on the first held-out tokens: recompute layer 0's values
    docs = corpus.documents(str(quality.__file__).rsplit("/engine/", 1)[0])
    order = np.random.default_rng(0).permutation(len(docs))
    text = corpus.join([docs[i] for i in order if docs[i][2]])[:64]
    model = tiny_moe.load(out / "tiny_moe.safetensors")
    x = layers.rms_norm(model.embedding[torch.tensor(list(text))], model.blocks[0].attention_norm, 1e-6)
    v = model.blocks[0].attention.project(x, model.cos_sin[:64])[2]
    torch.testing.assert_close(v.transpose(0, 1), inputs["layer0.v"].float(), atol=2e-3, rtol=2e-3)


def test_training_resumes_where_it_stopped(trained, tmp_path):
    out, arguments = trained
    for name in ("state.pt",):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    more = [a if a != "30" else "40" for a in arguments]
    more[more.index("--out") + 1] = str(tmp_path)
    assert train([*more, "--resume"]) == 0
    record = json.loads((tmp_path / "tiny_moe_training.json").read_text())
    assert record["steps"] == 40 and [p["step"] for p in record["curve"]][:2] == [1, 5]


def test_the_corpus_is_split_by_file(tmp_path):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("x = 1")
    for n in range(200):
        (tmp_path / f"m{n}.py").write_text(f"value = {n}\n")
    (tmp_path / "latin.py").write_bytes(b"\xff\xfe")
    docs = corpus.documents(tmp_path)
    assert len(docs) == 200 and docs == corpus.documents(tmp_path)
    held = [d for d in docs if d[2]]
    assert 3 <= len(held) <= 20
    described = corpus.describe(docs)
    assert described["held_out"]["files"] + described["train"]["files"] == 200
    with pytest.raises(ValueError, match="no Python sources"):
        corpus.documents(tmp_path / "nowhere")


def test_missing_weights_say_how_to_train(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m ladder.engine.train_tiny_moe"):
        find("tiny-moe", tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="model is 'gpt'"):
        find("gpt")


def test_quality_of_policies(trained):
    """Bits per byte, exact, are those of one dense forward; narrower windows hide more."""
    out, _ = trained
    root = str(quality.__file__).rsplit("/engine/", 1)[0]
    rows = quality.table(weights=out / "tiny_moe.safetensors", sequences=2, root=root, names={"exact", "last quarter exact, before it window 512"})
    by = {r["case"]["policy"]: r for r in rows}
    assert by["exact"]["visible_pairs"] == 1.0
    # 512 keys are more than the context of 64: the policy hides nothing
    assert abs(by["exact"]["bits_per_byte"] - by["last quarter exact, before it window 512"]["bits_per_byte"]) < 1e-3
    spec = Spec("tiny-moe", tiny_moe.TinyMoEConfig(**SMALL), out / "tiny_moe.safetensors")
    text = corpus.join([d for d in corpus.documents(root) if d[2]])
    total = 0.0
    for start in (0, len(text) - 65):
        row = list(text[start : start + 65])
        logits = served_logits(engine(spec, "sdpa", kv_tokens=64, max_len=64), row[:-1])
        total += F.cross_entropy(logits[32:], torch.tensor(row[33:])).item() / math.log(2)
    assert abs(total / 2 - by["exact"]["bits_per_byte"]) < 1e-3
