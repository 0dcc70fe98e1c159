"""Errors name the argument, what came and what is wanted: every branch of the contract, and each rung's own."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.checks import DEVICE

from ladder import contract
from ladder.lab.interpret import is_enabled
from ladder.rungs import RUNGS, find, parse

CLIMBED = [rung for rung in RUNGS if rung.number <= 5 or rung.number == 8]


def tensors(Hq=2, Hkv=2, Sq=4, Sk=5, D=8, Dv=8, B=1, dtype=torch.float16):
    return [
        torch.zeros(B, heads, length, dim, dtype=dtype, device=DEVICE)
        for heads, length, dim in ((Hq, Sq, D), (Hkv, Sk, D), (Hkv, Sk, Dv))
    ]


Q, K, V = tensors()

# what differs from a good call, the exception, words that its message must hold
BAD_CALLS = {
    "q is a list": (dict(q=[1.0]), TypeError, ("q is a list", "torch.Tensor", "(B, Hq, Sq, D)")),
    "k is None": (dict(k=None), TypeError, ("k is a NoneType", "(B, Hkv, Sk, D)")),
    "v is an array": (dict(v=np.zeros((1, 2, 5, 8))), TypeError, ("v is a ndarray", "(B, Hkv, Sk, Dv)")),
    "q has three dimensions": (dict(q=Q[0]), ValueError, ("q has shape (2, 4, 8)", "four dimensions (B, Hq, Sq, D)")),
    "v has five dimensions": (dict(v=V[None]), ValueError, ("v has shape (1, 1, 2, 5, 8)", "four dimensions")),
    "q is int": (dict(q=Q.int()), ValueError, ("q has dtype torch.int32", "float16, bfloat16, float32")),
    "k is double": (dict(k=K.double()), ValueError, ("k has dtype torch.float64", "want one of float16")),
    "k has another dtype": (dict(k=K.float()), ValueError, ("k has dtype torch.float32", "want torch.float16, the dtype of q")),
    "v has another dtype": (dict(v=V.bfloat16()), ValueError, ("v has dtype torch.bfloat16", "the dtype of q")),
    "k is elsewhere": (dict(k=K.to("meta")), ValueError, ("k is on meta", "the device of q")),
    "v is elsewhere": (dict(v=V.to("meta")), ValueError, ("v is on meta", f"want {DEVICE.type}")),
    "k has another batch": (dict(k=K.expand(3, -1, -1, -1)), ValueError, ("k has batch size 3", "want 1, the batch size of q")),
    "v has another batch": (dict(v=V[:0]), ValueError, ("v has batch size 0", "want 1")),
    "head size 0": (dict(q=Q[..., :0], k=K[..., :0]), ValueError, ("q has shape (1, 2, 4, 0)", "head size 0", "at least 1")),
    "value head size 0": (dict(v=V[..., :0]), ValueError, ("v has shape (1, 2, 5, 0)", "head size 0")),
    "k has another head size": (dict(k=K[..., :7]), ValueError, ("k has head size 7", "want 8, the head size of q")),
    "v has other heads": (dict(v=V[:, :1]), ValueError, ("v has 1 heads", "want 2, the heads of k")),
    "v has another length": (dict(v=V[:, :, :3]), ValueError, ("v has length 3", "want 5, the length of k")),
    "heads do not divide": (
        dict(zip("qkv", tensors(Hq=5, Hkv=2))), ValueError, ("q has 5 heads", "multiple of the 2 heads of k and v")
    ),
    "more KV heads than query heads": (dict(q=Q[:, :1]), ValueError, ("q has 1 heads", "multiple of the 2 heads")),
    "no KV heads": (dict(k=K[:, :0], v=V[:, :0]), ValueError, ("q has 2 heads", "multiple of the 0 heads")),
    "causal is 1": (dict(causal=1), TypeError, ("causal is 1", "True or False")),
    "causal is None": (dict(causal=None), TypeError, ("causal is None", "True or False")),
    "scale is text": (dict(scale="0.5"), TypeError, ("scale is '0.5'", "a real number or None for 1/sqrt(D)")),
    "scale is True": (dict(scale=True), TypeError, ("scale is True", "a real number")),
    "scale is complex": (dict(scale=1j), TypeError, ("scale is 1j", "a real number")),
    "scale is NaN": (dict(scale=math.nan), ValueError, ("scale is nan", "a finite number")),
    "scale is infinite": (dict(scale=-math.inf), ValueError, ("scale is -inf", "a finite number")),
}  # fmt: skip


def message(error, call):
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    return str(caught.value)


@pytest.mark.parametrize("rung", CLIMBED, ids=lambda rung: rung.name)
@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call(rung, name):
    changes, error, words = BAD_CALLS[name]
    call = {"q": Q, "k": K, "v": V, "causal": False, "scale": None, **changes}
    options = {key: call[key] for key in ("causal", "scale")}
    text = message(error, lambda: rung.attention(call["q"], call["k"], call["v"], **options))
    assert text.startswith(f"{rung.name}: ")
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("rung", CLIMBED[:3], ids=lambda rung: rung.name)
def test_features_of_later_rungs(rung):
    text = message(NotImplementedError, lambda: rung.attention(*tensors(Hq=4, Hkv=2)))
    assert text == f"{rung.name}: grouped heads (4 query heads on 2 KV heads) arrive with step04_gqa"
    text = message(NotImplementedError, lambda: rung.attention(*tensors(Dv=4)))
    assert text == f"{rung.name}: unequal head sizes (qk 8, v 4) arrive with step04_gqa"


def test_good_arguments_give_the_scale():
    assert contract.check_attention("rung", Q, K, V, causal=True, scale=None) == 1 / math.sqrt(8)
    for scale in (0.25, -3, Fraction(1, 3), np.float32(0.5), 0):
        assert contract.check_attention("rung", Q, K, V, causal=False, scale=scale) == float(scale)


def test_dtypes_of_a_rung():
    text = message(
        ValueError,
        lambda: contract.check_attention("rung", Q, K, V, causal=False, scale=None, dtypes=(torch.bfloat16,)),
    )
    assert text == "rung: q has dtype torch.float16; want one of bfloat16"


def test_only_the_order_of_checks_decides_which_error():
    """The first thing wrong is named, q before k before v."""
    text = message(ValueError, lambda: find(4).attention(Q.int(), K[0], V[0]))
    assert text.startswith("step04_gqa: q has dtype")


# step 04: ragged batches


def ragged(**changes):
    q, k, v = (x[0].transpose(0, 1) for x in (Q, K, V))
    call = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": torch.tensor([0, 1, 4]),
        "cu_seqlens_k": torch.tensor([0, 0, 5]),
    }
    call.update(changes)
    return lambda: find(4).module.attention_varlen(**call)


BAD_RAGGED = {
    "q is a list": (dict(q=[]), TypeError, ("q is a list", "(total_q, Hq, D)")),
    "v is text": (dict(v="v"), TypeError, ("v is a str", "(total_k, Hkv, Dv)")),
    "k has four dimensions": (dict(k=K), ValueError, ("k has shape (1, 2, 5, 8)", "three dimensions (total_k, Hkv, D)")),
    "cu_seqlens_q is a list": (dict(cu_seqlens_q=[0, 4]), TypeError, ("cu_seqlens_q is a list", "(num_seqs + 1,)")),
    "cu_seqlens_q has two dimensions": (
        dict(cu_seqlens_q=torch.zeros(1, 2, dtype=torch.int32)), ValueError, ("cu_seqlens_q has shape (1, 2)", "(num_seqs + 1,)")
    ),
    "cu_seqlens_k is empty": (dict(cu_seqlens_k=torch.tensor([], dtype=torch.int32)), ValueError, ("cu_seqlens_k has shape (0,)",)),
    "cu_seqlens_k is float": (
        dict(cu_seqlens_k=torch.tensor([0.0, 5.0])), ValueError, ("cu_seqlens_k has dtype torch.float32", "int32 or int64")
    ),
    "starts late": (dict(cu_seqlens_q=torch.tensor([1, 4])), ValueError, ("cu_seqlens_q is [1, 4]", "want 0", "4 packed tokens")),
    "ends early": (dict(cu_seqlens_k=torch.tensor([0, 2, 4])), ValueError, ("cu_seqlens_k is [0, 2, 4]", "5 packed tokens")),
    "falls": (dict(cu_seqlens_q=torch.tensor([0, 3, 2, 4])), ValueError, ("[0, 3, 2, 4]", "never falling")),
    "is long": (
        dict(cu_seqlens_q=torch.tensor([0, 1, 2, 3, 4, 4, 4, 4, 3])), ValueError, ("[0, 1, 2, 3, '...', 4, 4, 3]",)
    ),
    "differ in number": (
        dict(cu_seqlens_k=torch.tensor([0, 2, 3, 5])), ValueError, ("cu_seqlens_k has 3 sequences", "want 2, those of cu_seqlens_q")
    ),
    "dtype of k": (dict(k=torch.zeros(5, 2, 8, device=DEVICE)), ValueError, ("k has dtype torch.float32", "dtype of q")),
    "heads of v": (dict(v=V[0, :1].transpose(0, 1)), ValueError, ("v has 1 heads", "want 2")),
    "causal": (dict(causal="yes"), TypeError, ("causal is 'yes'",)),
    "scale": (dict(scale=[1]), TypeError, ("scale is [1]",)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_RAGGED)
def test_bad_ragged_call(name):
    changes, error, words = BAD_RAGGED[name]
    text = message(error, ragged(**changes))
    assert text.startswith("step04_gqa: ")
    for word in words:
        assert word in text, text


def test_good_ragged_call():
    assert ragged()().shape == (4, 2, 8)


# step 05's own


def test_step05_head_size_above_256():
    text = message(NotImplementedError, lambda: find(5).attention(*tensors(D=257)))
    assert text == "step05_fused: head size 257 is above 256; step04_gqa has no limit"
    text = message(NotImplementedError, lambda: find(5).attention(*tensors(D=8, Dv=512)))
    assert text == "step05_fused: head size 512 is above 256; step04_gqa has no limit"


@pytest.mark.parametrize("which", range(3))
def test_step05_has_no_gradient(which):
    q, k, v = tensors()
    (q, k, v)[which].requires_grad_()
    text = message(NotImplementedError, lambda: find(5).attention(q, k, v))
    assert text.startswith(f"step05_fused: {'qkv'[which]} requires gradients; forward only") and "step04_gqa" in text and "no_grad" in text
    with torch.no_grad():
        assert find(5).attention(q, k, v).shape == q.shape


def test_step05_device_without_kernel():
    text = message(ValueError, lambda: find(5).attention(*(x.to("meta") for x in tensors())))
    assert text == "step05_fused: q is on meta; want a CUDA tensor"


@pytest.mark.skipif(not is_enabled(), reason="the interpreter is off")
def test_step05_bfloat16_in_the_interpreter():
    text = message(ValueError, lambda: find(5).attention(*tensors(dtype=torch.bfloat16)))
    assert "q has dtype bfloat16" in text and "interpreter" in text and "float16 or float32" in text


# the list of rungs


def test_find_and_parse():
    assert find(5) is find("05") is find("step05_fused") is find("fused") is RUNGS[4]
    assert [r.number for r in parse("1-3,5")] == [1, 2, 3, 5]
    assert [r.number for r in parse("5, 2")] == [2, 5]
    assert parse("all") == list(RUNGS)
    for bad in ("0", "step05", "fast", "", "1-99", "1,,2"):
        text = message(ValueError, lambda bad=bad: parse(bad))
        assert "want one of step01_naive, step02_tiled" in text


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_every_rung_tells_its_story(rung):
    assert list(rung.story()) == ["Changed", "Why", "Predict", "Still slow because"]
    assert all(len(text) > 20 for text in rung.story().values())
