"""Ragged batches: lengths, packed tensors and their starts."""

import torch

from ladder.lab.parity import Oracle, inside_nan, nan_allocations
from support.checks import DEVICE

LENGTHS = {
    "mixed": ([5, 1, 17, 40], [9, 1, 30, 3]),
    "zeros": ([0, 4, 0, 1, 0], [3, 0, 0, 6, 2]),
    "one": ([1], [1]),
    "empty batch": ([], []),
    "only empty sequences": ([0, 0], [0, 0]),
    "decode": ([1, 1, 1], [7, 300, 1]),
    "many short": ([1, 2, 3] * 9, [3, 2, 1] * 9),
    "tile edges": ([5, 17, 16, 33, 1], [9, 17, 40, 33, 1]),
}


def packed(lengths_q, lengths_k, Hq=6, Hkv=2, D=16, Dv=8):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(sum(lengths), heads, dim, generator=generator).half().to(DEVICE)
        for lengths, heads, dim in ((lengths_q, Hq, D), (lengths_k, Hkv, D), (lengths_k, Hkv, Dv))
    ]


def starts(lengths, dtype=torch.int32):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0)], dtype=dtype, device=DEVICE)


def check_ragged(attention_varlen, lengths_q, lengths_k, causal, index_dtype=torch.int32, **sizes):
    """Assert that each sequence of a batch comes out as it does alone, log-sum-exp too, with NaN around the tensors."""
    q, k, v = (inside_nan(x) for x in packed(lengths_q, lengths_k, **sizes))
    bounds = [starts(lengths, index_dtype) for lengths in (lengths_q, lengths_k)]
    with nan_allocations():
        out, lse = attention_varlen(q, k, v, *bounds, causal=causal, return_lse=True)
    assert out.shape == (*q.shape[:2], v.shape[2]) and out.dtype == q.dtype
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.dtype == torch.float32
    i = j = 0
    for Sq, Sk in zip(lengths_q, lengths_k):
        one = [x.transpose(0, 1)[None] for x in (q[i : i + Sq], k[j : j + Sk], v[j : j + Sk])]
        parity = Oracle(*one, causal=causal).check(out[i : i + Sq].transpose(0, 1)[None], lse[None, :, i : i + Sq])
        assert parity, f"sequence of {Sq} x {Sk}: {parity.reason}"
        i, j = i + Sq, j + Sk
