"""A variant of rung 02 that tells two causes of its slowness apart; chapter 02 shows it. It is no rung.

``python -m ladder.chapters.ch01_05_rungs.variants --json notebooks/results/step02_16bit.json`` times it on a GPU.
"""

import argparse
import functools
import itertools

import torch

from ladder import step01_naive, step02_tiled
from ladder.contract import check_attention
from ladder.lab import results, timing
from ladder.lab.parity import Oracle, nan_allocations
from ladder.lab.problem import AttentionProblem
from ladder.step02_tiled.attention import TILE_K, TILE_Q

NAME = "step02_tiled_16bit"  # as recorded results call it
RECORD = "step02_16bit"
TURNS = 3


def tiled_16bit(q, k, v, *, causal=False, scale=None, tile_q=TILE_Q, tile_k=TILE_K):
    """Rung 02 with products of operands in the inputs' dtype, so that 16-bit inputs use tensor cores.

    Arguments, result and errors are those of ``step02_tiled.attention``. Scores, maximum, sum and accumulator stay
    float32. Two values are rounded that rung 02 keeps in float32: the scaled queries and the weights.
    On CUDA 16-bit inputs need PyTorch 2.8 or newer (``torch.bmm`` with ``out_dtype``).
    """
    scale = check_attention("step02_tiled", q, k, v, causal=causal, scale=scale)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)

    for q0 in range(0, seqlen_q, tile_q):
        q_tile = q[:, :, q0 : q0 + tile_q] * scale
        rows = q_tile.shape[:3]

        row_max = q.new_full(rows, float("-inf"), dtype=torch.float32)
        for k0 in range(0, seqlen_k, tile_k):  # pass one: the maximum of each row
            scores = _scores(q_tile, k[:, :, k0 : k0 + tile_k], q0, k0, causal, seqlen_k - seqlen_q)
            row_max = torch.maximum(row_max, scores.amax(dim=-1))
        row_max = row_max.masked_fill(row_max == float("-inf"), 0.0)

        row_sum = q.new_zeros(rows, dtype=torch.float32)
        acc = q.new_zeros(q_tile.shape, dtype=torch.float32)
        for k0 in range(0, seqlen_k, tile_k):  # pass two: exponentials, their sum, their product with V
            scores = _scores(q_tile, k[:, :, k0 : k0 + tile_k], q0, k0, causal, seqlen_k - seqlen_q)
            probs = torch.exp(scores - row_max[..., None])
            row_sum += probs.sum(dim=-1)
            acc += _product(probs.to(v.dtype), v[:, :, k0 : k0 + tile_k])

        row_sum = row_sum.masked_fill(row_sum == 0, 1.0)
        out[:, :, q0 : q0 + tile_q] = acc / row_sum[..., None]
    return out


def _scores(q_tile, k_tile, q0, k0, causal, offset):
    """Masked float32 scores (B, H, tile_q, tile_k) of scaled queries from row q0 on, keys from k0 on."""
    scores = _product(q_tile, k_tile.transpose(-2, -1))
    if causal:
        query = torch.arange(q0, q0 + q_tile.shape[2], device=k_tile.device)
        key = torch.arange(k0, k0 + k_tile.shape[2], device=k_tile.device)
        scores.masked_fill_(key > query[:, None] + offset, float("-inf"))
    return scores


def _product(a, b):
    """a @ b in float32 for (B, H, m, n) and (B, H, n, p). A CUDA product of 16-bit operands stores float32 directly."""
    if a.is_cuda and a.dtype != torch.float32:
        result = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return result.view(*a.shape[:2], *result.shape[1:])
    return a.float() @ b.float()


def bytes_moved(problem):
    """Bytes that the kernels of one ``tiled_16bit`` call on CUDA load and store (see ``step02_tiled.bytes_moved``)."""
    p = problem
    q_elems = p.B * p.Hq * p.Sq * p.D
    kv_elems = p.B * p.Hq * p.Sk * p.D
    score_elems = p.B * p.Hq * p.Sq * p.Sk
    q_tiles, k_tiles = -(-p.Sq // TILE_Q), -(-p.Sk // TILE_K)

    make = 4 + (8 if p.causal else 0)  # product writes; mask reads and writes
    first = make + 4  # maximum reads
    second = make + 8 + 8 + 4 + (4 + p.itemsize) + p.itemsize  # subtract, exp, sum, rounding, product reads
    kv_tiles = 3 * q_tiles * kv_elems * p.itemsize  # K twice, V once
    q_tile = q_elems * (2 * p.itemsize + 2 * k_tiles * p.itemsize)  # scale, then read by every product
    acc = q_elems * (4 + k_tiles * 16 + 12 + p.itemsize)  # zero; product writes, add updates; divide; store
    return score_elems * (first + second) + kv_tiles + q_tile + acc


def measure(device="cuda", lengths=(16384, 1024), budget_ms=300.0, dtype="bfloat16"):
    """Results rows of rungs 01, 02 and the variant on 16 heads of 128, dense and causal; checked, timed in turns."""
    device, rows = torch.device(device), []
    calls = {"step01_naive": step01_naive.attention, "step02_tiled": step02_tiled.attention, NAME: tiled_16bit}
    for length, causal in itertools.product(lengths, (False, True)):
        problem = AttentionProblem(
            B=max(1, 16384 // length), Hq=16, Hkv=16, Sq=length, Sk=length, D=128, Dv=128, causal=causal, dtype=dtype
        )
        inputs = problem.make(device)
        oracle = Oracle(*inputs, causal=causal, sample_rows=512)
        times = {name: [] for name in calls}
        for _ in range(TURNS):
            for name, call in calls.items():
                run = functools.partial(call, causal=causal)
                times[name].append(timing.measure(run, [inputs], device=device, budget_ms=budget_ms))
        for name, call in calls.items():
            with nan_allocations():
                parity = oracle.check(call(*inputs, causal=causal))
            took = sorted(times[name], key=lambda timing: timing.median)[TURNS // 2]
            rows.append(results.row(problem.case(), name, timing=took, flops=problem.flops, parity=parity))
            print(problem.label(), name, f"{took.median:.4g} ms", "ok" if parity else parity.reason, flush=True)
    return rows


def main(argv=None):
    parser = argparse.ArgumentParser(description="Time rung 02 with 16-bit products beside rungs 01 and 02.")
    parser.add_argument("--json", required=True, metavar="FILE", help="write the record here")
    args = parser.parse_args(argv)
    results.write(results.document(measure(), device="cuda"), args.json)


if __name__ == "__main__":
    main()
