# ruff: noqa: E501  (rows of a table)
"""Errors name the argument, what came and what is wanted: every branch of the contract, in every rung that promises it."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.checks import DEVICE

from ladder import contract
from ladder.lab.interpret import is_enabled
from ladder.rungs import RUNGS, find, parse

EMPTY = torch.tensor([], dtype=torch.int32)


def tensors(Hq=2, Hkv=2, Sq=4, Sk=5, D=8, Dv=8, B=1, dtype=torch.float16):
    shapes = ((Hq, Sq, D), (Hkv, Sk, D), (Hkv, Sk, Dv))
    return [torch.zeros(B, *shape, dtype=dtype, device=DEVICE) for shape in shapes]


Q, K, V = tensors()
DENSE = dict(q=Q, k=K, v=V)
RAGGED = {
    **{name: x[0].transpose(0, 1) for name, x in DENSE.items()},
    "cu_seqlens_q": torch.tensor([0, 1, 4]), "cu_seqlens_k": torch.tensor([0, 0, 5]),
}  # fmt: skip
ENTRIES = {rung.name: (rung.attention, DENSE, rung.name) for rung in RUNGS if rung.number != 6}  # step 06 has that of step 05
VARLEN = {
    "04 varlen": (find(4).module.attention_varlen, RAGGED, "step04_gqa"),
    "07 varlen": (find(7).module.attention_varlen, RAGGED, "step07_dflash1"),
    "08 varlen": (find(8).module.dflash2_varlen, RAGGED, "step08_dflash2"),
}
GQA = ("step04_gqa", "step05_fused", "step07_dflash1", "step08_dflash2")

# what differs from a good call, the exception, words that its message must hold
DENSE_BAD = {
    "q is a list": (dict(q=[1.0]), TypeError, ("q is a list", "torch.Tensor (B, Hq, Sq, D)")),
    "k is None": (dict(k=None), TypeError, ("k is a NoneType", "(1, Hkv, Sk, 8)")),
    "v is an array": (dict(v=np.zeros((1, 2, 5, 8))), TypeError, ("v is a ndarray", "(1, 2, 5, Dv)")),
    "q has three dimensions": (dict(q=Q[0]), ValueError, ("q has shape (2, 4, 8)", "(B, Hq, Sq, D)")),
    "v has five dimensions": (dict(v=V[None]), ValueError, ("v has shape (1, 1, 2, 5, 8)", "(1, 2, 5, Dv)")),
    "q is int": (dict(q=Q.int()), ValueError, ("q has dtype torch.int32", "float16 or bfloat16 or float32")),
    "k has another dtype": (dict(k=K.double()), ValueError, ("k has dtype torch.float64; want torch.float16, the dtype of q",)),
    "v has another dtype": (dict(v=V.bfloat16()), ValueError, ("v has dtype torch.bfloat16", "the dtype of q")),
    "k is elsewhere": (dict(k=K.to("meta")), ValueError, ("k is on meta", "the device of q")),
    "v is elsewhere": (dict(v=V.to("meta")), ValueError, ("v is on meta", f"want {DEVICE.type}")),
    "k has another batch": (dict(k=K.expand(3, -1, -1, -1)), ValueError, ("k has shape (3, 2, 5, 8); want (1, Hkv, Sk, 8)",)),
    "k has another head size": (dict(k=K[..., :7]), ValueError, ("k has shape (1, 2, 5, 7); want (1, Hkv, Sk, 8)",)),
    "v has another batch": (dict(v=V[:0]), ValueError, ("v has shape (0, 2, 5, 8); want (1, 2, 5, Dv)",)),
    "v has other heads": (dict(v=V[:, :1]), ValueError, ("v has shape (1, 1, 5, 8); want (1, 2, 5, Dv)",)),
    "v has another length": (dict(v=V[:, :, :3]), ValueError, ("v has shape (1, 2, 3, 8); want (1, 2, 5, Dv)",)),
    "head size 0": (dict(q=Q[..., :0], k=K[..., :0]), ValueError, ("q has head size 0; want at least 1",)),
    "value head size 0": (dict(v=V[..., :0]), ValueError, ("v has head size 0",)),
    "heads do not divide": (dict(zip("qkv", tensors(Hq=5))), ValueError, ("q has 5 heads", "multiple of the 2 heads of k and v")),
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
LATER = {
    "grouped heads": (dict(zip("qkv", tensors(Hq=4))), NotImplementedError,
                      ("grouped heads (4 query heads on 2 KV heads) arrive with step04_gqa",)),
    "unequal head sizes": (dict(v=V[..., :4]), NotImplementedError, ("unequal head sizes (qk 8, v 4) arrive with step04_gqa",)),
}  # fmt: skip
TOO_WIDE = {
    "head size 257": (dict(zip("qkv", tensors(D=257))), NotImplementedError, ("head size 257 is above 256; step04_gqa has no limit",)),
    "head size 512": (dict(zip("qkv", tensors(Dv=512))), NotImplementedError, ("head size 512 is above 256; step04_gqa has no limit",)),
}  # fmt: skip
RAGGED_BAD = {
    "q is a list": (dict(q=[]), TypeError, ("q is a list", "(total_q, Hq, D)")),
    "v is text": (dict(v="v"), TypeError, ("v is a str", "(5, 2, Dv)")),
    "q has four dimensions": (dict(q=Q), ValueError, ("q has shape (1, 2, 4, 8); want (total_q, Hq, D)",)),
    "k has four dimensions": (dict(k=K), ValueError, ("k has shape (1, 2, 5, 8); want (total_k, Hkv, 8)",)),
    "k has another dtype": (dict(k=torch.zeros(5, 2, 8, device=DEVICE)), ValueError, ("k has dtype torch.float32", "dtype of q")),
    "v has other heads": (dict(v=V[0, :1].transpose(0, 1)), ValueError, ("v has shape (5, 1, 8); want (5, 2, Dv)",)),
    "heads do not divide": (dict(q=Q[0, :1].transpose(0, 1)), ValueError, ("q has 1 heads; want a multiple of the 2 heads",)),
    "causal": (dict(causal="yes"), TypeError, ("causal is 'yes'",)),
    "scale": (dict(scale=[1]), TypeError, ("scale is [1]",)),
    "starts are a list": (dict(cu_seqlens_q=[0, 4]), TypeError, ("cu_seqlens_q is a list", "(num_seqs + 1,)")),
    "starts have two dimensions": (dict(cu_seqlens_q=torch.zeros(1, 2, dtype=torch.int32)), ValueError,
                                   ("cu_seqlens_q has shape (1, 2)", "(num_seqs + 1,)")),
    "starts are float": (dict(cu_seqlens_k=torch.tensor([0.0, 5.0])), ValueError, ("cu_seqlens_k has dtype torch.float32", "int32 or int64")),
    "no start": (dict(cu_seqlens_k=EMPTY), ValueError, ("cu_seqlens_k has ",)),
    "differ in number": (dict(cu_seqlens_k=torch.tensor([0, 2, 3, 5])), ValueError,
                         ("cu_seqlens_k has 3 sequences; want 2, those of cu_seqlens_q",)),
}  # fmt: skip
VALUES_BAD = {  # of a tensor on a GPU only step 04 reads the values
    "starts late": (dict(cu_seqlens_q=torch.tensor([1, 4])), ValueError, ("cu_seqlens_q is [1, 4]", "want 0", "4 packed tokens")),
    "ends early": (dict(cu_seqlens_k=torch.tensor([0, 2, 4])), ValueError, ("cu_seqlens_k is [0, 2, 4]", "5 packed tokens")),
    "falls": (dict(cu_seqlens_q=torch.tensor([0, 3, 2, 4])), ValueError, ("[0, 3, 2, 4]", "never falling")),
    "is long": (dict(cu_seqlens_q=torch.tensor([0, 1, 2, 3, 4, 4, 4, 4, 3])), ValueError, ("[0, 1, 2, 3, '...', 4, 4, 3]",)),
}  # fmt: skip


def message(error, call):
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    return str(caught.value)


def cases():
    """(entry, its good arguments, its rung, a bad call) for every promise that an entry makes."""
    tables = [(ENTRIES, ENTRIES, DENSE_BAD), (ENTRIES, list(ENTRIES)[:3], LATER), (ENTRIES, GQA[1:], TOO_WIDE), (VARLEN, VARLEN, RAGGED_BAD),
              (VARLEN, [n for n in VARLEN if DEVICE.type == "cpu" or n[:2] == "04"], VALUES_BAD)]  # fmt: skip
    for entries, names, bad in tables:
        for name in names:
            for case, expected in bad.items():
                yield pytest.param(*entries[name], *expected, id=f"{name}-{case}")


@pytest.mark.parametrize("entry, good, rung, changes, error, words", list(cases()))
def test_bad_call(entry, good, rung, changes, error, words):
    on_device = entry is not VARLEN["04 varlen"][0]  # whose starts are read on the host
    call = {n: x.to(DEVICE) if on_device and n.startswith("cu_") and isinstance(x, torch.Tensor) else x for n, x in {**good, **changes}.items()}
    text = message(error, lambda: entry(**call))
    assert text.startswith(f"{rung}: ")
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("name", VARLEN)
def test_good_ragged_call(name):
    entry, good, _ = VARLEN[name]
    assert entry(**{n: x.to(DEVICE) if n.startswith("cu_") else x for n, x in good.items()}).shape == (4, 2, 8)


def test_good_arguments_give_the_scale():
    assert contract.check_attention("step04_gqa", Q, K, V, causal=True, scale=None) == 1 / math.sqrt(8)
    for scale in (0.25, -3, Fraction(1, 3), np.float32(0.5), 0):
        assert contract.check_attention("step04_gqa", Q, K, V, causal=False, scale=scale) == float(scale)


def test_the_order_of_checks_decides_which_error():
    """The first thing wrong is named, q before k before v."""
    assert message(ValueError, lambda: find(4).attention(Q.int(), K[0], V[0])).startswith("step04_gqa: q has dtype")


def test_expect():
    x = torch.zeros(3, 4)
    good = dict(shape=("n", 4), dtypes=torch.float32, device=x.device, contiguous=True)
    contract.expect("rung", "x", x, **good)
    contract.expect("rung", "x", None, **good, optional=True)
    for wrong, given, text in (
        (TypeError, dict(x=None), "x is a NoneType; want a torch.Tensor (n, 4)"),
        (TypeError, dict(x=3, optional=True), "x is a int; want a torch.Tensor (n, 4), or None"),
        (ValueError, dict(shape=(4,)), "x has shape (3, 4); want (4,)"),
        (ValueError, dict(shape=(3, 5)), "x has shape (3, 4); want (3, 5)"),
        (ValueError, dict(dtypes=contract.INTEGERS), "x has dtype torch.float32; want int32 or int64"),
        (ValueError, dict(dtypes=torch.int32, owner="y"), "x has dtype torch.float32; want torch.int32, the dtype of y"),
        (ValueError, dict(device=torch.device("meta"), owner="y"), "x is on cpu; want meta, the device of y"),
        (ValueError, dict(x=x[:, ::2], shape=("n", 2)), "x has strides (4, 2); want a contiguous tensor"),
        (ValueError, dict(x=x.to_sparse()), "x is a sparse_coo tensor; want a dense one"),
    ):
        assert message(wrong, lambda: contract.expect("rung", "x", **{**dict(x=x), **good, **given})).startswith(f"rung: {text}")  # noqa: B023


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
        assert "want one of step01_naive, step02_tiled" in message(ValueError, lambda: parse(bad))  # noqa: B023


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_every_rung_tells_its_story(rung):
    assert list(rung.story()) == ["Changed", "Why", "Predict", "Still slow because"]
    assert all(len(text) > 20 for text in rung.story().values())
