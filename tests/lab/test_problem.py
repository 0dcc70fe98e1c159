"""AttentionProblem: counts against brute force, the same numbers everywhere, the oracle against PyTorch in float64."""

import pytest
import torch
from support.checks import DEVICE

from ladder.lab.problem import MINILM, SHAPES, AttentionProblem, reference


def visible(p):
    return sum(j <= i + p.Sk - p.Sq for i in range(p.Sq) for j in range(p.Sk)) if p.causal else p.Sq * p.Sk


@pytest.mark.parametrize("Sq", (0, 1, 2, 5, 9))
@pytest.mark.parametrize("Sk", (0, 1, 2, 5, 9))
@pytest.mark.parametrize("causal", (False, True))
def test_visible_pairs(Sq, Sk, causal):
    p = AttentionProblem(B=2, Hq=6, Hkv=3, Sq=Sq, Sk=Sk, D=10, Dv=4, causal=causal)
    assert p.visible_pairs == visible(p)
    assert p.flops == 2 * 2 * 6 * visible(p) * 14


def test_min_bytes_are_those_of_the_tensors():
    for p in (
        AttentionProblem(B=2, Hq=6, Hkv=3, Sq=5, Sk=7, D=10, Dv=4),
        AttentionProblem(dtype="float32", Sq=3, Sk=9),
    ):
        tensors = p.make()
        out = p.B * p.Hq * p.Sq * p.Dv * p.itemsize
        assert p.min_bytes == sum(x.numel() * x.element_size() for x in tensors) + out


def test_make_is_reproducible():
    p = AttentionProblem(Hq=4, Hkv=2, Sq=5, Sk=7, D=10, Dv=4, dtype="float32")
    first, again = p.make(), p.make()
    assert [x.shape for x in first] == [(1, 4, 5, 10), (1, 2, 7, 10), (1, 2, 7, 4)]
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    for other in (p.make(copy=1), p.replace(seed=1).make()):
        assert not any(torch.equal(a, b) for a, b in zip(first, other))
    assert all(torch.equal(a.half(), b) for a, b in zip(first, p.replace(dtype="float16").make()))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(first, p.make(DEVICE)))


def test_minilm_is_real_and_checked():
    q, k, v = MINILM.make()
    assert q.shape == k.shape == v.shape == (3, 12, 512, 32) and q.dtype == torch.float16
    assert all(torch.isfinite(x).all() and x.float().std() > 0.05 for x in (q, k, v))
    assert not torch.equal(q[0], q[1]) and not torch.equal(q, k)
    short = MINILM.replace(B=2, Sq=7, Sk=11).make()
    assert torch.equal(short[0], q[:2, :, :7]) and torch.equal(short[2], v[:2, :, :11])
    for bad, words in ((dict(Hq=6, Hkv=6), "12 heads of size 32"), (dict(D=64), "size 32"), (dict(B=4), "up to 3 layers"),
                       (dict(Sk=513), "512 tokens; Sq = 512, Sk = 513 is more")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            MINILM.replace(**bad).make()


@pytest.mark.parametrize("bad, words", [
    (dict(dtype="int8"), "dtype is 'int8'; want one of float16, bfloat16, float32"),
    (dict(input="noise"), "input is 'noise'; want 'randn' or 'minilm' or 'tiny-moe'"),
    (dict(Hq=5, Hkv=2), "Hq is 5; want a multiple of Hkv = 2"),
    (dict(Hkv=0), "Hq is 16; want a multiple of Hkv = 0"),
])  # fmt: skip
def test_bad_problem(bad, words):
    with pytest.raises(ValueError, match=words):
        AttentionProblem(**bad)


def test_case_and_label():
    p = AttentionProblem(**SHAPES["deepseek-v2-lite"], Sq=4096, Sk=4096, causal=True, dtype="bfloat16")
    assert p.label() == "4k 16h d192/128 causal bfloat16"
    assert p.case() == {"mode": "prefill", "B": 1, "Hq": 16, "Hkv": 16, "Sq": 4096, "Sk": 4096, "D": 192, "Dv": 128,
                        "causal": True, "dtype": "bfloat16"}  # fmt: skip
    q = AttentionProblem(**SHAPES["qwen3-moe"], B=2, Sq=100, Sk=2048, scale=0.5)
    assert q.label() == "B2 100x2k 32/4h d128 dense float16"
    assert q.case()["scale"] == 0.5 and "input" not in q.case()
    assert MINILM.case()["input"] == "minilm" and MINILM.label().startswith("minilm B3 512 12h d32")


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("heads", ((4, 4), (6, 2)))
def test_reference_is_sdpa_in_float64(causal, heads):
    p = AttentionProblem(Hq=heads[0], Hkv=heads[1], Sq=9, Sk=14, D=8, Dv=6, causal=causal, dtype="float32")
    q, k, v = p.make(DEVICE)
    out, lse = reference(q, k, v, causal=causal, scale=0.3)
    k64, v64 = (x.double().repeat_interleave(heads[0] // heads[1], dim=1) for x in (k, v))
    mask = torch.ones(9, 14, dtype=torch.bool, device=DEVICE).tril(5) if causal else None
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k64, v64, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    scores = 0.3 * q.double() @ k64.transpose(2, 3)
    if causal:
        scores = scores.masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_reference_in_chunks_and_rows():
    p = AttentionProblem(Hq=4, Hkv=2, Sq=30, Sk=20, D=8, Dv=8, causal=True, dtype="float32")
    q, k, v = p.make(DEVICE)
    whole, whole_lse = reference(q, k, v, causal=True)
    chunks, chunks_lse = reference(q, k, v, causal=True, chunk_bytes=1)
    torch.testing.assert_close(chunks, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(chunks_lse, whole_lse, rtol=1e-12, atol=1e-12)
    rows = torch.tensor([0, 10, 29])
    some, some_lse = reference(q, k, v, causal=True, rows=rows)
    torch.testing.assert_close(some, whole[:, :, rows.to(DEVICE)], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(some_lse, whole_lse[:, :, rows.to(DEVICE)], rtol=1e-12, atol=1e-12)
    assert (whole[:, :, :10] == 0).all() and torch.isneginf(whole_lse[:, :, :10]).all()
    assert torch.isfinite(whole_lse[:, :, 10:]).all()
