"""Ragged batches: lengths, packed tensors and their starts."""

import torch

from support.checks import DEVICE

LENGTHS = {
    "mixed": ([5, 1, 17, 40], [9, 1, 30, 3]),
    "zeros": ([0, 4, 0, 1, 0], [3, 0, 0, 6, 2]),
    "one": ([1], [1]),
    "empty batch": ([], []),
    "only empty sequences": ([0, 0], [0, 0]),
    "decode": ([1, 1, 1], [7, 300, 1]),
}


def packed(lengths_q, lengths_k, Hq=6, Hkv=2, D=16, Dv=8):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(sum(lengths), heads, dim, generator=generator).half().to(DEVICE)
        for lengths, heads, dim in ((lengths_q, Hq, D), (lengths_k, Hkv, D), (lengths_k, Hkv, Dv))
    ]


def starts(lengths, dtype=torch.int32):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0)], dtype=dtype, device=DEVICE)
