"""Measure rungs 06 and 07 on a GPU: ``python -m ladder.bench step07 --json FILE [--sweep] [--only decode,mla]``.

Every case is checked against the float64 oracle before and after its timing, with NaN in the outputs beforehand and in
every dead slot of the caches, and is timed beside its peers in the same process. Decode is timed as servers run it, in
CUDA graphs: one graph launch between two events, L2 filled with other data before. A case that fails is recorded with its error
and does not stop the others. ``--sweep`` first times candidate tile sizes and splits and records them all.
"""

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from ladder.lab import results
from ladder.lab.cells import decode_problems, mla_problems
from ladder.lab.decode_problem import DecodeOracle, DecodeProblem
from ladder.lab.memory import peak_bytes
from ladder.lab.parity import Oracle, poison
from ladder.lab.peers import decode_peers, peers_for
from ladder.lab.problem import AttentionProblem
from ladder.lab.roofline import measure_limits
from ladder.lab.timing import measure
from ladder.rungs import find

from .harness import Bench, DryRun

SECTIONS = ("decode", "prefill", "mla", "chunked", "groups", "memory", "promises")
TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"


def prefill_problems():
    """Cells that steps 05 and 07 share; B * S is 16k tokens up to 16k."""

    def cell(S, D=128, Dv=None, Hq=16, Hkv=None, causal=True):
        batch = max(1, 16384 // S)
        return AttentionProblem(B=batch, Hq=Hq, Hkv=Hkv or Hq, Sq=S, Sk=S, D=D, Dv=Dv or D, causal=causal, dtype="bfloat16")

    return [
        cell(1024, causal=False), cell(4096, causal=False), cell(16384, causal=False), cell(32768, causal=False),
        cell(1024), cell(4096), cell(16384), cell(32768),
        cell(4096, D=64, Hq=32), cell(16384, D=64, Hq=32), cell(16384, D=64, Hq=32, causal=False),
        cell(16384, Hq=32, Hkv=8), cell(4096, Hq=28, Hkv=4), cell(4096, D=80), cell(4096, D=96), cell(4096, D=256, Hq=8),
        cell(4096, D=192, Dv=128), cell(16384, D=192, Dv=128), cell(32768, D=192, Dv=128),
    ]  # fmt: skip


def other_decode_problems():
    """Page sizes, a ragged batch, a large group, several new tokens."""
    generator = torch.Generator().manual_seed(1)
    ragged = tuple(torch.randint(64, 16384, (64,), generator=generator).tolist())
    return [
        DecodeProblem(B=64, context=4096, page_size=16), DecodeProblem(B=64, context=4096, page_size=256),
        DecodeProblem(B=64, lengths=ragged, max_context=16384), DecodeProblem(B=64, context=4096, Hq=28, Hkv=4),
        DecodeProblem(B=64, context=4096, q_len=4), DecodeProblem(B=64, context=4096, Hq=64, Hkv=8, D=64, Dv=64),
    ]  # fmt: skip


PREFILL_CANDIDATES = [
    dict(BLOCK_M=m, BLOCK_N=n, num_warps=w, num_stages=s)
    for m, n, w, s in [
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 2),
        (128, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 3), (128, 32, 8, 4), (128, 32, 4, 4),
    ]
]  # fmt: skip
DECODE_CANDIDATES = [
    dict(BLOCK_N=n, num_warps=w, num_stages=s)
    for n, w, s in [(64, 4, 3), (64, 4, 5), (64, 4, 7), (32, 4, 5), (32, 4, 7), (32, 2, 5), (64, 2, 5), (64, 8, 5), (16, 2, 7)]
]  # fmt: skip
MLA_CANDIDATES = {
    16: [dict(BLOCK_M=16, BLOCK_N=n, num_warps=w, num_stages=s)
         for n, w, s in [(32, 4, 3), (32, 4, 5), (64, 8, 3), (64, 8, 5), (16, 4, 5), (16, 4, 7), (32, 8, 5)]],
    128: [dict(BLOCK_M=m, BLOCK_N=n, num_warps=w, num_stages=s)
          for m, n, w, s in [(64, 64, 8, 2), (64, 32, 8, 2), (64, 64, 4, 2), (32, 32, 8, 3), (32, 32, 4, 3)]],
}  # fmt: skip
MATMUL_CANDIDATES = [
    dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=w, num_stages=s)
    for m, n, k, w, s in [(64, 128, 64, 4, 4), (64, 128, 64, 4, 3), (64, 256, 64, 8, 3), (64, 256, 64, 4, 3), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3)]
]  # fmt: skip


# Prefill


def run_prefill(bench, problem, with_peers=True):
    print(problem.label(), flush=True)
    q, k, v = problem.make(bench.device)
    oracle = Oracle(q, k, v, causal=problem.causal)
    rungs = {name: find(name).attention for name in ("step05_fused", "step07_dflash1")}
    timings = {name: [] for name in rungs}
    parity = {name: oracle.check(*fn(q, k, v, causal=problem.causal, return_lse=True)) for name, fn in rungs.items()}
    out = torch.empty(problem.B, problem.Hq, problem.Sq, problem.Dv, dtype=q.dtype, device=bench.device)
    for _ in range(3):  # in turn, so that a clock that drifts meets both
        for name, fn in rungs.items():
            timings[name].append(bench.events(lambda a, b, c: fn(a, b, c, causal=problem.causal), (q, k, v)))
    poison(out)
    after = oracle.check(rungs["step07_dflash1"](q, k, v, causal=problem.causal, out=out))
    for name in rungs:
        best = sorted(timings[name], key=lambda t: t.median)[1]
        check = parity[name] if parity[name].ok and name != "step07_dflash1" else parity[name] and after
        bench.add(problem.case(), name, timing=best, flops=problem.flops, parity=check)
    for peer in peers_for(problem, bench.device) if with_peers else ():
        if peer.name in ("fa3", "sdpa_cudnn"):
            bench.guard(f"{peer.name} {problem.label()}", _prefill_peer, bench, problem, peer, oracle, (q, k, v))


def _prefill_peer(bench, problem, peer, oracle, args):
    fn = peer.build(problem)
    check = oracle.check(fn(*args).contiguous())
    bench.add(problem.case(), peer.name, timing=bench.events(fn, args), flops=problem.flops, parity=check)


def sweep_prefill(bench, problem, candidates):
    print("sweep", problem.label(), flush=True)
    attention = find("step07_dflash1").attention
    q, k, v = problem.make(bench.device)
    oracle = Oracle(q, k, v, causal=problem.causal, sample_rows=64)

    def one(config):
        fn = lambda a, b, c: attention(a, b, c, causal=problem.causal, config=config)  # noqa: E731
        check = oracle.check(fn(q, k, v))
        timing = measure(fn, [(q, k, v)], device=bench.device, budget_ms=50, max_runs=30)
        bench.add(problem.case(), "sweep", timing=timing, flops=problem.flops, parity=check, config=config)

    for config in candidates:
        bench.guard(f"sweep {problem.label()} {config}", one, config)


def sweep_prefill_problems():
    pick = [(16384, 128, 128, 16, True), (4096, 128, 128, 16, False), (16384, 64, 64, 32, True), (16384, 192, 128, 16, True), (4096, 256, 256, 8, True)]
    return [AttentionProblem(B=max(1, 16384 // s), Hq=h, Hkv=h, Sq=s, Sk=s, D=d, Dv=dv, causal=c, dtype="bfloat16") for s, d, dv, h, c in pick]


def run_chunked(bench):
    """512 new tokens on cached context, dense on pages, beside the same from contiguous memory."""
    for context in (8192, 32768):
        problem = DecodeProblem(B=8, context=context, q_len=512, Hq=32, Hkv=8)
        print("chunked", problem.label(), flush=True)
        inputs = problem.make(bench.device)
        from ladder.step07_dflash1 import attention, paged_prefill

        cu = torch.arange(problem.B + 1, dtype=torch.int32, device=bench.device) * problem.q_len
        packed = inputs.q.flatten(0, 1)
        run = lambda: paged_prefill(packed, *list(inputs)[1:], cu)  # noqa: E731
        check = DecodeOracle(inputs, most_sequences=1).check(run().view(inputs.q.shape))
        case = {**problem.case(), "mode": "chunked"}
        bench.add(case, "step07_dflash1", timing=bench.events(run), flops=problem.flops, parity=check)
        k, v = inputs.contiguous()
        bench.add(case, "step07_contiguous", timing=bench.events(lambda: attention(inputs.q.transpose(1, 2), k, v, causal=True)), flops=problem.flops)
        peers = decode_peers(problem, inputs)
        if "fa3" in peers:
            bench.guard("fa3 chunked", lambda: bench.add(case, "fa3", timing=bench.events(peers["fa3"]), flops=problem.flops))


# Decode


def run_decode(bench, problem):
    print(problem.label(), flush=True)
    inputs = problem.make(bench.device)
    oracle = DecodeOracle(inputs, scale=problem.scale)
    impls = _decode_rungs(problem, inputs, bench.device)
    for name, (fn, out) in impls.items():

        def one(name=name, fn=fn, out=out):
            poison(out)
            fn()
            before = oracle.check(out)
            timing = bench.graph(fn)
            after = oracle.check(out)
            poison(out)
            eager = bench.events(fn)
            bench.add(problem.case(), name, timing=timing, flops=problem.flops if problem.latent else None, num_bytes=problem.kv_bytes,
                      parity=before and after and oracle.check(out), ms_eager=round(eager.median, 6), timed="graph")  # fmt: skip

        bench.guard(f"{name} {problem.label()}", one)
    for name, fn in decode_peers(problem, inputs).items():

        def one(name=name, fn=fn):
            check = oracle.check(fn().contiguous())
            eager = bench.events(fn)
            extra = dict(ms_eager=round(eager.median, 6), timed="graph")
            try:
                timing = bench.graph(fn)
            except Exception as error:
                timing, extra = eager, dict(timed="events", graph_error=str(error)[:120])
            bench.add(problem.case(), name, timing=timing, flops=problem.flops if problem.latent else None, num_bytes=problem.kv_bytes, parity=check, **extra)

        bench.guard(f"{name} {problem.label()}", one)


def _decode_rungs(problem, inputs, device, **options):
    from ladder import step06_paged, step07_dflash1

    q, k_cache, v_cache, table, lens = inputs
    shape = (*q.shape[:3], problem.Dv)
    workspace = step07_dflash1.DecodeWorkspace(device)
    impls = {}
    if problem.latent:
        out, latent = torch.empty(shape, dtype=q.dtype, device=device), k_cache[:, :, 0]
        impls["step07_dflash1"] = (
            lambda: step07_dflash1.mla_decode(q, latent, table, lens, scale=problem.scale, head_dim_v=problem.Dv, out=out, workspace=workspace, **options), out,
        )  # fmt: skip
        return impls
    for rung in (step06_paged, step07_dflash1):
        out = torch.empty(shape, dtype=q.dtype, device=device)
        extra = dict(workspace=workspace, **options) if rung is step07_dflash1 else {}
        impls[rung.__name__.split(".")[-1]] = (
            lambda rung=rung, out=out, extra=extra: rung.paged_decode(q, k_cache, v_cache, table, lens, scale=problem.scale, out=out, **extra), out,
        )  # fmt: skip
    return impls


def sweep_decode(bench, problem, candidates, splits):
    print("sweep", problem.label(), flush=True)
    inputs = problem.make(bench.device)
    oracle = DecodeOracle(inputs, scale=problem.scale, most_sequences=1)

    def one(config, split):
        fn, out = _decode_rungs(problem, inputs, bench.device, config=config, num_kv_splits=split)["step07_dflash1"]
        poison(out)
        fn()
        check = oracle.check(out)
        bench.add(problem.case(), "sweep", timing=bench.graph(fn, runs=15), flops=problem.flops if problem.latent else None,
                  num_bytes=problem.kv_bytes, parity=check, config=config, num_kv_splits=split)  # fmt: skip

    for config, split in itertools.product(candidates, splits):
        bench.guard(f"sweep {problem.label()} {config} splits {split}", one, config, split)


def sweep_decode_problems():
    """(problem, candidates, splits): how many programs and which tiles, small batches to large."""
    one = DecodeProblem(context=4096)
    some = DECODE_CANDIDATES
    few = [c for c in some if (c["BLOCK_N"], c["num_warps"], c["num_stages"]) in ((64, 4, 5), (64, 4, 7), (32, 4, 7), (32, 2, 5))]
    mla = dict(Hkv=1, D=576, Dv=512, latent=True, scale=192**-0.5)
    return [
        (one, some, (16, 32, 64)),
        (one.replace(context=32768), few, (16, 32, 48, 64)),
        (one.replace(context=131072), few, (16, 32, 48, 64)),
        (one.replace(B=8), few, (4, 8, 16)),
        (one.replace(B=8, context=32768), some, (2, 4, 8)),
        (one.replace(B=64), some, (1, 2, 4)),
        (one.replace(B=64, context=16384), few, (1, 2)),
        (one.replace(B=64, page_size=16), DECODE_CANDIDATES + [dict(BLOCK_N=16, num_warps=4, num_stages=9)], (1,)),
        (DecodeProblem(B=64, Hq=16, context=4096, **mla), MLA_CANDIDATES[16], (1, 2, 4, 8)),
        (DecodeProblem(B=64, Hq=128, context=4096, **mla), MLA_CANDIDATES[128], (1, 2)),
    ]  # fmt: skip


# Groups


def routing(folder, task, layer):
    """Real expert choices of one layer, (tokens, 6) int64, and where its sequences start; None where the file is absent."""
    import numpy as np

    path = Path(folder, f"esft_dsv2lite_{task}.npz")
    if not path.exists():
        return None
    with np.load(path) as data:
        return torch.from_numpy(data["topk_ids"][layer].astype("int64")), torch.from_numpy(data["seq_offsets"])


def run_groups(bench, folder, config=None):
    """Grouped against capacity-padded execution of one expert product (2048 x 1408), on real routing."""
    from ladder.step07_dflash1 import capacity_offsets, group_tokens, grouped_matmul, tile_map
    from ladder.step07_dflash1.groups import matmul_config

    device, experts = bench.device, 64
    config = config or {}
    weight = torch.randn(experts, 2048, 1408, device=device, dtype=torch.bfloat16) / 45
    block = {**matmul_config(2), **config}["BLOCK_M"]
    for task, layer in (("law", 0), ("law", 13), ("law", 25), ("intent", 4), ("intent", 22)):
        found = routing(folder, task, layer)
        if found is None:
            bench.failures.append({"what": f"groups {task}", "error": f"no traces in {folder}"})
            return
        ids, _ = found
        ids = ids.to(device)
        x = torch.randn(len(ids), 2048, device=device, dtype=torch.bfloat16)
        groups = group_tokens(ids, experts)
        counts = groups.offsets.diff().tolist()
        total, capacity = sum(counts), max(counts)
        case = {"mode": "groups", "task": task, "layer": layer, "tokens": len(ids), "experts": experts, "top_k": 6,
                "rows": total, "padded_rows": experts * capacity, "K": 2048, "N": 1408, "dtype": "bfloat16"}  # fmt: skip
        print(f"groups {task} layer {layer}: {total} rows, {experts * capacity} padded", flush=True)
        sorted_x = x[groups.order.long() // 6]
        # What lies in the padding of a reused buffer is an earlier batch, not zeros: numbers cost as much power there.
        padded_x = torch.randn(experts * capacity, 2048, device=device, dtype=torch.bfloat16)
        for e in range(experts):
            padded_x[e * capacity : e * capacity + counts[e]] = sorted_x[groups.offsets[e] : groups.offsets[e + 1]]
        padded = capacity_offsets(experts, capacity, device)
        tiles, padded_tiles = tile_map(groups.offsets, block, total), tile_map(padded, block, experts * capacity)
        out, padded_out = x.new_empty(total, 1408), x.new_empty(experts * capacity, 1408)
        poison(out, padded_out)
        runs = {
            "compact": (lambda: grouped_matmul(sorted_x, weight, groups.offsets, out=out, tiles=tiles, config=config), total),
            "padded": (lambda: grouped_matmul(padded_x, weight, padded, out=padded_out, tiles=padded_tiles, config=config), experts * capacity),
            "compact_gather": (lambda: grouped_matmul(x, weight, groups.offsets, order=groups.order, top_k=6, out=out, tiles=tiles, config=config), total),
            "bmm_padded": (lambda: torch.bmm(padded_x.view(experts, capacity, 2048), weight), experts * capacity),
            "sort": (lambda: group_tokens(ids, experts), 0),
        }
        for name, (fn, rows) in runs.items():
            timing = bench.graph(fn)
            bench.add(case, name, timing=timing, flops=2 * rows * 2048 * 1408 or None, timed="graph", config=config)
        for e in (0, 17, 63):  # the same rows, the same numbers, and right
            a, b = int(groups.offsets[e]), int(groups.offsets[e + 1])
            want = sorted_x[a:b].double() @ weight[e].double()
            assert torch.equal(out[a:b], padded_out[e * capacity : e * capacity + b - a]), f"expert {e}: compact and padded differ"
            assert a == b or (out[a:b] - want).abs().max() <= 0.02 * want.abs().max(), f"expert {e}: wrong product"


def sweep_groups(bench, folder):
    for config in MATMUL_CANDIDATES:
        bench.guard(f"sweep groups {config}", run_groups_one, bench, folder, config)


def run_groups_one(bench, folder, config):
    from ladder.step07_dflash1 import capacity_offsets, group_tokens, grouped_matmul

    found = routing(folder, "law", 13)
    if found is None:
        raise FileNotFoundError(f"no traces in {folder}")
    ids = found[0].to(bench.device)
    weight = torch.randn(64, 2048, 1408, device=bench.device, dtype=torch.bfloat16) / 45
    groups = group_tokens(ids, 64)
    capacity = int(groups.offsets.diff().max())
    case = {"mode": "groups", "task": "law", "layer": 13, "padded_rows": 64 * capacity, "rows": ids.numel()}
    for name, offsets, rows in (("sweep_compact", groups.offsets, ids.numel()), ("sweep_padded", capacity_offsets(64, capacity, bench.device), 64 * capacity)):
        x = torch.randn(rows, 2048, device=bench.device, dtype=torch.bfloat16)
        timing = bench.graph(lambda: grouped_matmul(x, weight, offsets, config=config), runs=15)
        bench.add(case, name, timing=timing, flops=2 * rows * 2048 * 1408, config=config)


def run_permute(bench, folder):
    """Attention, then a pass that permutes its output into expert order, against attention that writes it there."""
    from ladder.step07_dflash1 import attention_varlen, group_tokens, permute_rows

    found = routing(folder, "law", 13)
    if found is None:
        raise FileNotFoundError(f"no traces in {folder}")
    ids, starts = found
    cu = starts.to(bench.device, torch.int32)
    lengths = starts.diff().tolist()
    for top_k in (1, 6):
        groups = group_tokens(ids[:, :top_k].contiguous().to(bench.device), 64)
        q, k, v = (torch.randn(len(ids), 16, 128, device=bench.device, dtype=torch.bfloat16) for _ in range(3))
        out = torch.empty_like(q)
        sorted_out = torch.empty(len(ids) * top_k, 16 * 128, device=bench.device, dtype=torch.bfloat16)
        direct = torch.empty_like(sorted_out)
        poison(out, sorted_out, direct)

        def attend():
            attention_varlen(q, k, v, cu, cu, causal=True, out=out)

        def then_permute():
            attend()
            permute_rows(out.flatten(1), groups, out=sorted_out)

        def in_order():
            attention_varlen(q, k, v, cu, cu, causal=True, out=direct.view(-1, 16, 128), out_index=groups.places)

        case = {"mode": "permute", "task": "law", "layer": 13, "tokens": len(ids), "top_k": top_k, "Hq": 16, "D": 128,
                "sequences": len(lengths), "longest": max(lengths), "dtype": "bfloat16"}  # fmt: skip
        for name, fn in (("attention", attend), ("attention_then_permute", then_permute), ("attention_in_expert_order", in_order)):
            bench.add(case, name, timing=bench.graph(fn), timed="graph")
        assert torch.equal(sorted_out, direct), "expert order changes the numbers of attention"


# Memory and promises


def run_memory(bench):
    """Peak memory of a dense 32k prefill, 4 heads of 128: what a call holds above its inputs, output included."""
    problem = AttentionProblem(Hq=4, Hkv=4, Sq=32768, Sk=32768, D=128, Dv=128, dtype="bfloat16")
    q, k, v = problem.make(bench.device)
    for number in range(1, 8):
        rung = find(number)

        def one(rung=rung):
            rung.attention(q[:, :, :256], k[:, :, :256], v[:, :, :256])  # compiled before it is measured
            torch.cuda.synchronize()
            begin = time.perf_counter()
            peak = peak_bytes(rung.attention, q, k, v)
            bench.add(problem.case(), rung.name, peak_bytes=peak, seconds=round(time.perf_counter() - begin, 4))

        bench.guard(f"memory {rung.name}", one)
        torch.cuda.empty_cache()


def run_promises(bench):
    """What a table of speeds does not show: graphs replayed at other lengths, the same bits, rows that ignore their mates."""
    from ladder import step06_paged
    from ladder.step07_dflash1 import DecodeWorkspace, paged_decode

    problem = DecodeProblem(B=3, lengths=(9000, 1, 4097), max_context=16384)
    inputs = problem.make(bench.device)
    workspace = DecodeWorkspace(bench.device)

    def check(name, value):
        bench.add({"mode": "promise", "promise": name}, "step07_dflash1", promise=name, kept=bool(value))
        print(f"    {name}: {'kept' if value else 'BROKEN'}", flush=True)

    first = paged_decode(*inputs, workspace=workspace, num_kv_splits=40)
    same = all(torch.equal(first, paged_decode(*inputs, workspace=workspace, num_kv_splits=40)) for _ in range(100))
    check("same bits on 100 runs, 40 splits", same)
    big = DecodeProblem(B=64, context=4096)
    big_inputs = big.make(bench.device)
    first = paged_decode(*big_inputs, workspace=workspace, num_kv_splits=8)
    check("same bits on 100 runs, B64, 8 splits", all(torch.equal(first, paged_decode(*big_inputs, workspace=workspace, num_kv_splits=8)) for _ in range(100)))
    check("counters are zero after every launch", not workspace.counters.any())
    fixed = paged_decode(*inputs, workspace=workspace, num_kv_splits=8)
    alone = [paged_decode(inputs.q[b : b + 1], inputs.k_cache, inputs.v_cache, inputs.block_table[b : b + 1], inputs.seq_lens[b : b + 1], num_kv_splits=8, workspace=workspace) for b in range(3)]
    check("fixed splits: a row is the same alone and in a batch", torch.equal(fixed, torch.cat(alone)))
    for rung, options in ((step06_paged, {}), (sys.modules["ladder.step07_dflash1"], dict(workspace=workspace))):
        out = torch.empty_like(inputs.q)
        lens = torch.ones_like(inputs.seq_lens)
        run = lambda: rung.paged_decode(inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_table, lens, out=out, **options)  # noqa: B023,E731
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        lens.copy_(inputs.seq_lens)
        poison(out)
        graph.replay()
        parity = DecodeOracle(inputs).check(out)
        check(f"{rung.__name__.split('.')[-1]}: graph captured at length 1, replayed at 9000: {parity.reason or 'right'}", parity.ok)
    lens = inputs.seq_lens.clone()
    lens[1] = 10**6
    loud = paged_decode(inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_table, lens, workspace=workspace)
    check("a length beyond the block table gives NaN in its own rows only", loud[1].isnan().all() and loud[[0, 2]].isfinite().all())


# What must be reached


def must_reach(bench, limits):
    """The figures that rungs 06 and 07 are held to, from the rows: [{"what", "value", "want", "ok"}]."""
    lines = []

    def line(what, value, want):
        lines.append({"what": what, "value": round(value, 4), "want": want, "ok": value >= want})

    def find_rows(mode):
        cases = {}
        for entry in bench.rows:
            if entry["case"].get("mode") == mode and "ms" in entry and not entry["impl"].startswith("sweep"):
                key = tuple(sorted((k, str(v)) for k, v in entry["case"].items()))
                cases.setdefault(key, {})[entry["impl"]] = entry
        return cases.values()

    for by_impl in find_rows("decode"):
        ours = by_impl.get("step07_dflash1")
        if not ours:
            continue
        case = ours["case"]
        name = f"decode B{case['B']} {case['Sk']} {case['Hq']}/{case['Hkv']} page {case['page_size']} q{case['Sq']}"
        size = ours["tbs"] * ours["ms"]["median"]  # GB
        if size >= 1:
            line(f"{name}: share of the read limit", ours["tbs"] / limits.read_tbs, 0.85)
        elif peers := {n: e for n, e in by_impl.items() if not n.startswith("step0")}:
            best = min(peers, key=lambda n: peers[n]["ms"]["median"])
            line(f"{name}: speed over the best peer, {best}", peers[best]["ms"]["median"] / ours["ms"]["median"], 0.9)
    for by_impl in find_rows("prefill"):
        if {"step05_fused", "step07_dflash1"} <= set(by_impl):
            ours, case = by_impl["step07_dflash1"], by_impl["step07_dflash1"]["case"]
            name = f"prefill B{case['B']} {case['Sq']} {case['Hq']}/{case['Hkv']} d{case['D']}/{case['Dv']} {'causal' if case['causal'] else 'dense'}"
            line(f"{name}: speed over step 05", by_impl["step05_fused"]["ms"]["median"] / ours["ms"]["median"], 1.0)
            if (case["D"], case["Sq"]) == (192, 16384) and "fa3" in by_impl:
                line(f"{name}: speed over fa3", by_impl["fa3"]["ms"]["median"] / ours["ms"]["median"], 0.6)
    for by_impl in find_rows("groups"):
        if {"compact", "padded"} <= set(by_impl):
            case = by_impl["compact"]["case"]
            saved = by_impl["padded"]["ms"]["median"] / by_impl["compact"]["ms"]["median"]
            line(f"groups {case['task']} layer {case['layer']}: time ratio over row ratio", saved * case["rows"] / case["padded_rows"], 0.9)
    for by_impl in find_rows("permute"):
        if len(by_impl) == 3:
            separate, direct = by_impl["attention_then_permute"]["ms"]["median"], by_impl["attention_in_expert_order"]["ms"]["median"]
            line(f"permute top_k {by_impl['attention']['case']['top_k']}: speed of writing in expert order", separate / direct, 1.0)
    peaks = {e["impl"]: e["peak_bytes"] for e in bench.rows if "peak_bytes" in e}
    if {"step01_naive", "step07_dflash1"} <= set(peaks):
        line("memory of a 32k prefill: share saved against eager", 1 - peaks["step07_dflash1"] / peaks["step01_naive"], 0.2)
    for entry in bench.rows:
        if "kept" in entry:
            line(f"promise: {entry['promise']}", float(entry["kept"]), 1.0)
    wrong = [e for e in bench.rows if e.get("ok") is False and not e["impl"].startswith(("sweep", "fa3", "sdpa"))]
    line("no wrong answer", float(not wrong), 1.0)
    return lines


# Compiling ahead: one process per share of the launches, all at once, so that the measuring process finds them cached


def launches(sweep, traces):
    """Every kind of launch, as functions of (device) that compile a kernel or a few."""

    def prefill(problem, config=None):
        def run(device):
            q, k, v = (torch.empty(s, dtype=torch.bfloat16, device=device) for s in (
                (problem.B, problem.Hq, problem.Sq, problem.D), (problem.B, problem.Hkv, problem.Sk, problem.D), (problem.B, problem.Hkv, problem.Sk, problem.Dv)))  # fmt: skip
            find("step07_dflash1").attention(q, k, v, causal=problem.causal, config=config)
            if config is None:
                find("step05_fused").attention(q, k, v, causal=problem.causal)

        return run

    def decode(problem, config=None, splits=None):
        def run(device):
            inputs = problem.replace(context=problem.page_size * 2, lengths=None, max_context=problem.capacity).make(device, poison=False)
            options = {} if config is None else dict(config=config, num_kv_splits=splits)
            for fn, _ in _decode_rungs(problem, inputs, device, **options).values():
                fn()

        return run

    work = [
        lambda device: run_chunked(DryRun(device)), lambda device: run_permute(DryRun(device), traces),
        lambda device: run_groups(DryRun(device), traces),
    ]  # fmt: skip
    work += [prefill(p) for p in prefill_problems()]
    work += [decode(p) for p in (*decode_problems(), *other_decode_problems(), *mla_problems())]
    if sweep:
        work += [prefill(p, c) for p in sweep_prefill_problems() for c in PREFILL_CANDIDATES]
        work += [decode(p, c, s) for p, cs, ss in sweep_decode_problems() for c in cs for s in sorted({min(ss), max(ss)})]
        work += [lambda device, c=c: run_groups_one(DryRun(device), traces, c) for c in MATMUL_CANDIDATES]
    return work


def warm(share, shares, sweep, traces):
    """Compile every ``shares``-th launch, starting with number ``share``; says nothing, the measuring process will."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for run in launches(sweep, traces)[share::shares]:
            with contextlib.suppress(Exception):
                run(torch.device("cuda"))


@results.names_what_it_cannot_write
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m ladder.bench step07", description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="bench_v1.json", help="file for the results")
    parser.add_argument("--sweep", action="store_true", help="also time candidate tile sizes and splits")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--traces", default=os.environ.get("LADDER_TRACES", TRACES), help="folder of routing traces (*.npz)")
    parser.add_argument("--minutes", type=float, default=6.0, help="stop starting new cases after this long")
    parser.add_argument("--warm", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    if args.warm:
        return warm(*args.warm, args.sweep, args.traces)
    start = time.time()
    workers = min(14, max(1, (os.cpu_count() or 2) - 2))
    command = [sys.executable, "-m", "ladder.bench", "step07", "--traces", str(args.traces), *(["--sweep"] if args.sweep else [])]
    running = [subprocess.Popen([*command, "--warm", str(i), str(workers)]) for i in range(workers)]
    for process in running:
        process.wait()
    print(f"compiled in {time.time() - start:.0f} s with {workers} processes", flush=True)

    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    bench = Bench(device, start + 60 * args.minutes)
    limits = measure_limits(device)
    print(f"limits {limits.as_dict()}", flush=True)
    only = args.only.split(",")
    doc = None

    def save():
        lines = must_reach(bench, limits)
        doc = results.document(bench.rows, device=device, limits=limits, must_reach=lines, failures=bench.failures)
        results.write(doc, args.json)
        return doc

    sections = {
        "promises": lambda: bench.guard("promises", run_promises, bench),
        "decode": lambda: [bench.guard(p.label(), run_decode, bench, p) for p in (*decode_problems(), *other_decode_problems())],
        "prefill": lambda: [bench.guard(p.label(), run_prefill, bench, p) for p in prefill_problems()],
        "mla": lambda: [bench.guard(p.label(), run_decode, bench, p) for p in mla_problems()],
        "chunked": lambda: bench.guard("chunked", run_chunked, bench),
        "groups": lambda: (bench.guard("groups", run_groups, bench, args.traces), bench.guard("permute", run_permute, bench, args.traces)),
        "memory": lambda: bench.guard("memory", run_memory, bench),
    }  # fmt: skip
    sweeps = {
        "decode": lambda: [bench.guard(p.label(), sweep_decode, bench, p, c, s) for p, c, s in sweep_decode_problems() if not p.latent],
        "mla": lambda: [bench.guard(p.label(), sweep_decode, bench, p, c, s) for p, c, s in sweep_decode_problems() if p.latent],
        "prefill": lambda: [bench.guard(p.label(), sweep_prefill, bench, p, PREFILL_CANDIDATES) for p in sweep_prefill_problems()],
        "groups": lambda: sweep_groups(bench, args.traces),
    }  # fmt: skip
    for table in (sections, sweeps if args.sweep else {}):
        for name, run in table.items():
            if name in only:
                begin = time.time()
                run()
                torch.cuda.empty_cache()
                print(f"== {name}: {time.time() - begin:.0f} s, {time.time() - start:.0f} s in all", flush=True)
                doc = save()
    for entry in doc["must_reach"] if doc else ():
        print(f"{'ok  ' if entry['ok'] else 'MISS'} {entry['value']:8.3f} (want {entry['want']}) {entry['what']}")
    for failure in bench.failures:
        print("failed:", failure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
