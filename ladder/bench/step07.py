"""Measure rungs 06 and 07 on a GPU: ``python -m ladder.bench step07 --json FILE [--sweep] [--only decode,mla]``.

Decode is timed as servers run it, in CUDA graphs: one graph launch between two events, L2 filled with other data
before. ``--sweep`` also times candidate tile sizes and splits and records them all.
"""

import functools
import itertools
import os
import sys
import time
from pathlib import Path

import torch

from ladder.lab.cells import decode_problems, mla_problems
from ladder.lab.decode_problem import DecodeOracle, DecodeProblem
from ladder.lab.memory import peak_bytes
from ladder.lab.parity import Oracle, poison
from ladder.lab.peers import decode_peers, peers_for
from ladder.lab.problem import AttentionProblem
from ladder.lab.results import by_case, timed, typed
from ladder.rungs import find

from . import harness
from .harness import Cell, Suite, Work, target

SECTIONS = ("decode", "prefill", "mla", "chunked", "groups", "memory", "promises")
TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
EXPERTS, WIDTH, HIDDEN = 64, 2048, 1408  # of the expert product


def prefill_problems():
    """Cells that steps 05 and 07 share; B * S is 16k tokens up to 16k."""

    def cell(S, D=128, Dv=None, Hq=16, Hkv=None, causal=True):
        batch = max(1, 16384 // S)
        return AttentionProblem(
            B=batch, Hq=Hq, Hkv=Hkv or Hq, Sq=S, Sk=S, D=D, Dv=Dv or D, causal=causal, dtype="bfloat16"
        )

    return [
        cell(1024, causal=False), cell(4096, causal=False), cell(16384, causal=False), cell(32768, causal=False),
        cell(1024), cell(4096), cell(16384), cell(32768),
        cell(4096, D=64, Hq=32), cell(16384, D=64, Hq=32), cell(16384, D=64, Hq=32, causal=False),
        cell(16384, Hq=32, Hkv=8), cell(4096, Hq=28, Hkv=4), cell(4096, D=80), cell(4096, D=96),
        cell(4096, D=256, Hq=8),
        cell(4096, D=192, Dv=128), cell(16384, D=192, Dv=128), cell(32768, D=192, Dv=128),
    ]  # fmt: skip


def other_decode_problems():
    """Page sizes, a ragged batch, a large group, several new tokens."""
    generator = torch.Generator().manual_seed(1)
    ragged = tuple(torch.randint(64, 16384, (64,), generator=generator).tolist())
    one = DecodeProblem(B=64, context=4096)
    return [
        one.replace(page_size=16), one.replace(page_size=256), one.replace(lengths=ragged, max_context=16384),
        one.replace(Hq=28, Hkv=4), one.replace(q_len=4), one.replace(Hq=64, Hkv=8, D=64, Dv=64),
    ]  # fmt: skip


def _configs(names, rows):
    return [dict(zip(names.split(), row)) for row in rows]


PREFILL_CANDIDATES = _configs("BLOCK_M BLOCK_N num_warps num_stages", [
    (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 2),
    (128, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 3), (128, 32, 8, 4), (128, 32, 4, 4),
])  # fmt: skip
DECODE_CANDIDATES = _configs("BLOCK_N num_warps num_stages", [
    (64, 4, 3), (64, 4, 5), (64, 4, 7), (32, 4, 5), (32, 4, 7), (32, 2, 5), (64, 2, 5), (64, 8, 5), (16, 2, 7),
])  # fmt: skip
FEW_CANDIDATES = [DECODE_CANDIDATES[i] for i in (1, 2, 4, 5)]
MLA_CANDIDATES = {
    16: _configs("BLOCK_M BLOCK_N num_warps num_stages", [
        (16, 32, 4, 3), (16, 32, 4, 5), (16, 64, 8, 3), (16, 64, 8, 5), (16, 16, 4, 5), (16, 16, 4, 7),
        (16, 32, 8, 5)]),
    128: _configs("BLOCK_M BLOCK_N num_warps num_stages", [
        (64, 64, 8, 2), (64, 32, 8, 2), (64, 64, 4, 2), (32, 32, 8, 3), (32, 32, 4, 3)]),
}  # fmt: skip
MATMUL_CANDIDATES = _configs("BLOCK_M BLOCK_N BLOCK_K num_warps num_stages", [
    (64, 128, 64, 4, 4), (64, 128, 64, 4, 3), (64, 256, 64, 8, 3), (64, 256, 64, 4, 3), (128, 128, 64, 8, 3),
    (128, 256, 64, 8, 3),
])  # fmt: skip


def sweep_prefill_problems():
    """Problems of the prefill sweep."""
    pick = [(16384, 128, 128, 16, True), (4096, 128, 128, 16, False), (16384, 64, 64, 32, True),
            (16384, 192, 128, 16, True),
            (4096, 256, 256, 8, True)]  # fmt: skip
    return [
        AttentionProblem(B=max(1, 16384 // s), Hq=h, Hkv=h, Sq=s, Sk=s, D=d, Dv=dv, causal=c, dtype="bfloat16")
        for s, d, dv, h, c in pick
    ]


def sweep_decode_problems():
    """(problem, candidates, splits): how many programs and which tiles, small batches to large."""
    one, some, few = DecodeProblem(context=4096), DECODE_CANDIDATES, FEW_CANDIDATES
    mla = dict(Hkv=1, D=576, Dv=512, latent=True, scale=192**-0.5)
    return [
        (one, some, (16, 32, 64)),
        (one.replace(context=32768), few, (16, 32, 48, 64)),
        (one.replace(context=131072), few, (16, 32, 48, 64)),
        (one.replace(B=8), few, (4, 8, 16)),
        (one.replace(B=8, context=32768), some, (2, 4, 8)),
        (one.replace(B=64), some, (1, 2, 4)),
        (one.replace(B=64, context=16384), few, (1, 2)),
        (one.replace(B=64, page_size=16), [*some, dict(BLOCK_N=16, num_warps=4, num_stages=9)], (1,)),
        (DecodeProblem(B=64, Hq=16, context=4096, **mla), MLA_CANDIDATES[16], (1, 2, 4, 8)),
        (DecodeProblem(B=64, Hq=128, context=4096, **mla), MLA_CANDIDATES[128], (1, 2)),
    ]  # fmt: skip


# Prefill


def prefill_work(problem, device, peers):
    """Steps 05 and 07, FlashAttention-3 and cuDNN on one problem."""
    q, k, v = problem.make(device) if peers else problem.empty(device)
    out = q.new_empty(*q.shape[:3], problem.Dv)
    old, new = (find(name).attention for name in ("step05_fused", "step07_dflash1"))
    impls = {
        "step05_fused": lambda: old(q, k, v, causal=problem.causal),
        "step07_dflash1": lambda: new(q, k, v, causal=problem.causal, out=out),
    }
    for peer in peers_for(problem, device) if peers else ():
        if peer.name in ("fa3", "sdpa_cudnn"):
            impls[peer.name] = lambda run=peer.build(problem): run(q, k, v)
    oracle = lambda: Oracle(q, k, v, causal=problem.causal)  # noqa: E731
    return [Work(problem.case(), impls, oracle, {"step07_dflash1": [out]}, flops=problem.flops)]


def sweep_prefill_works(problem, device, peers):
    """Step 07 with every candidate configuration."""
    q, k, v = problem.make(device) if peers else problem.empty(device)
    oracle = functools.cache(lambda: Oracle(q, k, v, causal=problem.causal, sample_rows=64))
    attention = find("step07_dflash1").attention

    def run(config):
        return lambda: attention(q, k, v, causal=problem.causal, config=config)

    return [
        Work(
            problem.case(), {"sweep": run(c)}, oracle, flops=problem.flops, rounds=1, extra={"config": c},
            suffix=f" {c}",
        )  # fmt: skip
        for c in PREFILL_CANDIDATES
    ]


def chunked_work(context, device, peers):
    """512 new tokens on cached context, dense on pages, beside the same from contiguous memory."""
    from ladder.step07_dflash1 import attention, paged_prefill

    problem = DecodeProblem(B=8, context=context, q_len=512, Hq=32, Hkv=8)
    inputs = problem.make(device, poison=peers)
    cu = torch.arange(problem.B + 1, dtype=torch.int32, device=device) * problem.q_len
    packed, (k, v) = inputs.q.flatten(0, 1), inputs.contiguous()
    impls = {
        "step07_dflash1": lambda: paged_prefill(packed, *list(inputs)[1:], cu).view(inputs.q.shape),
        "step07_contiguous": lambda: attention(inputs.q.transpose(1, 2), k, v, causal=True).transpose(1, 2),
    }
    if peers and "fa3" in (others := decode_peers(problem, inputs)):
        impls["fa3"] = others["fa3"]
    return [
        Work(
            {**problem.case(), "mode": "chunked"},
            impls,
            lambda: DecodeOracle(inputs, most_sequences=1),
            flops=problem.flops,
        )
    ]


# Decode


def decode_works(problem, device, peers, tries=None):
    """Steps 06 and 07 and their peers on one problem; with ``tries``, (configuration, splits) each, step 07 alone in
    each of them."""
    if not peers:  # short sequences under the same block table: the host never sees lengths, so the same kernels
        problem = problem.replace(context=problem.page_size * 2, lengths=None, max_context=problem.capacity)
    inputs = problem.make(device, poison=peers)
    size = dict(flops=problem.flops if problem.latent else None, num_bytes=problem.kv_bytes, graph=True)
    if tries:
        oracle = functools.cache(lambda: DecodeOracle(inputs, scale=problem.scale, most_sequences=1))
        works = []
        for config, splits in tries:
            fn, out = decode_rungs(problem, inputs, config=config, num_kv_splits=splits)["step07_dflash1"]
            said = {"config": config, "num_kv_splits": splits}
            works.append(
                Work(
                    problem.case(),
                    {"sweep": fn},
                    oracle,
                    {"sweep": [out]},
                    rounds=1,
                    extra=said,
                    suffix=f" {said}",
                    **size,
                )
            )
        return works
    rungs = decode_rungs(problem, inputs)
    impls = {name: fn for name, (fn, _) in rungs.items()} | (decode_peers(problem, inputs) if peers else {})
    outs = {name: [out] for name, (_, out) in rungs.items()}
    return [Work(problem.case(), impls, lambda: DecodeOracle(inputs, scale=problem.scale), outs, eager=True, **size)]


def decode_rungs(problem, inputs, **options):
    """{rung: (function of no arguments, the output that it writes)}; ``options`` are step 07's."""
    from ladder import step06_paged, step07_dflash1

    q, k_cache, v_cache, table, lens = inputs
    workspace = step07_dflash1.DecodeWorkspace(q.device)

    def one(call, k, *v, **more):
        out = q.new_empty(*q.shape[:3], problem.Dv)
        return lambda: call(q, k, *v, table, lens, scale=problem.scale, out=out, **more), out

    options = dict(workspace=workspace, **options)
    if problem.latent:
        return {"step07_dflash1": one(step07_dflash1.mla_decode, k_cache[:, :, 0], head_dim_v=problem.Dv, **options)}
    return {
        "step06_paged": one(step06_paged.paged_decode, k_cache, v_cache),
        "step07_dflash1": one(step07_dflash1.paged_decode, k_cache, v_cache, **options),
    }


# Groups


def routing(folder, task, layer):
    """Real expert choices of one layer, (tokens, 6) int64, and where its sequences start."""
    import numpy as np

    path = Path(folder, f"esft_dsv2lite_{task}.npz")
    if not path.exists():
        raise FileNotFoundError(f"no traces in {folder}")
    with np.load(path) as data:
        return torch.from_numpy(data["topk_ids"][layer].astype("int64")), torch.from_numpy(data["seq_offsets"])


def groups_work(folder, task, layer, device, peers):
    """Grouped against capacity-padded execution of one expert product (2048 x 1408), on real routing."""
    from ladder.step07_dflash1 import capacity_offsets, group_tokens, grouped_matmul, tile_map
    from ladder.step07_dflash1.groups import matmul_config

    ids = routing(folder, task, layer)[0].to(device)
    weight = torch.randn(EXPERTS, WIDTH, HIDDEN, device=device, dtype=torch.bfloat16) / 45
    x = torch.randn(len(ids), WIDTH, device=device, dtype=torch.bfloat16)
    groups = group_tokens(ids, EXPERTS)
    counts = groups.offsets.diff().tolist()
    total, capacity = sum(counts), max(counts)
    case = {"mode": "groups", "task": task, "layer": layer, "tokens": len(ids), "experts": EXPERTS, "top_k": 6,
            "rows": total,
            "padded_rows": EXPERTS * capacity, "K": WIDTH, "N": HIDDEN, "dtype": "bfloat16"}  # fmt: skip
    sorted_x = x[groups.order.long() // 6]
    # What lies in the padding of a reused buffer is an earlier batch, not zeros: numbers cost as much power there.
    padded_x = torch.randn(EXPERTS * capacity, WIDTH, device=device, dtype=torch.bfloat16)
    for e in range(EXPERTS):
        padded_x[e * capacity : e * capacity + counts[e]] = sorted_x[groups.offsets[e] : groups.offsets[e + 1]]
    padded, block = capacity_offsets(EXPERTS, capacity, device), matmul_config(2)["BLOCK_M"]
    tiles, padded_tiles = tile_map(groups.offsets, block, total), tile_map(padded, block, EXPERTS * capacity)
    out, padded_out = x.new_empty(total, HIDDEN), x.new_empty(EXPERTS * capacity, HIDDEN)
    poison(out, padded_out)
    gather = dict(order=groups.order, top_k=6, out=out, tiles=tiles)
    impls = {
        "compact": lambda: grouped_matmul(sorted_x, weight, groups.offsets, out=out, tiles=tiles),
        "padded": lambda: grouped_matmul(padded_x, weight, padded, out=padded_out, tiles=padded_tiles),
        "compact_gather": lambda: grouped_matmul(x, weight, groups.offsets, **gather),
        "bmm_padded": lambda: torch.bmm(padded_x.view(EXPERTS, capacity, WIDTH), weight),
        "sort": lambda: group_tokens(ids, EXPERTS),
    }
    rows = {"compact": total, "padded": EXPERTS * capacity, "compact_gather": total, "bmm_padded": EXPERTS * capacity}

    def same_and_right():
        for e in (0, 17, 63):
            a, b = int(groups.offsets[e]), int(groups.offsets[e + 1])
            want = sorted_x[a:b].double() @ weight[e].double()
            assert torch.equal(out[a:b], padded_out[e * capacity : e * capacity + b - a]), (
                f"expert {e}: compact and padded differ"
            )
            assert a == b or (out[a:b] - want).abs().max() <= 0.02 * want.abs().max(), f"expert {e}: wrong product"

    about = lambda name, fn: same_and_right() or {} if name == "compact_gather" else {}  # noqa: E731
    flops = {name: 2 * n * WIDTH * HIDDEN for name, n in rows.items()}
    return [Work(case, impls, flops=flops, graph=True, extra={"config": {}}, about=about)]


def sweep_groups_works(folder, device, peers):
    """The expert product with every candidate configuration, compact and padded."""
    from ladder.step07_dflash1 import capacity_offsets, group_tokens, grouped_matmul

    ids = routing(folder, "law", 13)[0].to(device)
    weight = torch.randn(EXPERTS, WIDTH, HIDDEN, device=device, dtype=torch.bfloat16) / 45
    groups = group_tokens(ids, EXPERTS)
    capacity = int(groups.offsets.diff().max())
    rows = {"sweep_compact": ids.numel(), "sweep_padded": EXPERTS * capacity}
    case = {"mode": "groups", "task": "law", "layer": 13, "padded_rows": EXPERTS * capacity, "rows": ids.numel()}
    offsets = {"sweep_compact": groups.offsets, "sweep_padded": capacity_offsets(EXPERTS, capacity, device)}
    inputs = {name: torch.randn(n, WIDTH, device=device, dtype=torch.bfloat16) for name, n in rows.items()}
    flops = {name: 2 * n * WIDTH * HIDDEN for name, n in rows.items()}

    def run(name, config):
        return lambda: grouped_matmul(inputs[name], weight, offsets[name], config=config)

    return [
        Work(
            case, {name: run(name, c) for name in rows}, flops=flops, graph=True, rounds=1, extra={"config": c},
            suffix=f" {c}",
        )  # fmt: skip
        for c in MATMUL_CANDIDATES
    ]


def permute_work(folder, top_k, device, peers):
    """Attention, then a pass that permutes its output into expert order, against attention that writes it there."""
    from ladder.step07_dflash1 import attention_varlen, group_tokens, permute_rows

    ids, starts = routing(folder, "law", 13)
    cu, lengths = starts.to(device, torch.int32), starts.diff().tolist()
    groups = group_tokens(ids[:, :top_k].contiguous().to(device), EXPERTS)
    q, k, v = (torch.randn(len(ids), 16, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    out = torch.empty_like(q)
    sorted_out = torch.empty(len(ids) * top_k, 16 * 128, device=device, dtype=torch.bfloat16)
    direct = torch.empty_like(sorted_out)
    attend = functools.partial(attention_varlen, q, k, v, cu, cu, causal=True)

    def then_permute():
        attend(out=out)
        return permute_rows(out.flatten(1), groups, out=sorted_out)

    def same():
        assert torch.equal(sorted_out, direct), "expert order changes the numbers of attention"

    impls = {
        "attention": lambda: attend(out=out), "attention_then_permute": then_permute,
        "attention_in_expert_order": lambda: attend(out=direct.view(-1, 16, 128), out_index=groups.places),
    }  # fmt: skip
    outs = {"attention": [out], "attention_then_permute": [out, sorted_out], "attention_in_expert_order": [direct]}
    case = {"mode": "permute", "task": "law", "layer": 13, "tokens": len(ids), "top_k": top_k, "Hq": 16, "D": 128,
            "sequences": len(lengths), "longest": max(lengths), "dtype": "bfloat16"}  # fmt: skip
    about = lambda name, fn: same() or {} if name == "attention_in_expert_order" else {}  # noqa: E731
    return [Work(case, impls, outs=outs, graph=True, about=about)]


# Memory and promises


def run_memory(bench):
    """Peak memory of a dense 32k prefill, 4 heads of 128: what a call holds above its inputs, output included."""
    problem = AttentionProblem(Hq=4, Hkv=4, Sq=32768, Sk=32768, D=128, Dv=128, dtype="bfloat16")
    q, k, v = problem.make(bench.device)

    def one(rung):
        rung.attention(q[:, :, :256], k[:, :, :256], v[:, :, :256])  # compiled before it is measured
        torch.cuda.synchronize()
        begin = time.perf_counter()
        peak = peak_bytes(rung.attention, q, k, v)
        bench.add(problem.case(), rung.name, peak_bytes=peak, seconds=round(time.perf_counter() - begin, 4))

    for number in range(1, 8):
        bench.guard(f"memory {find(number).name}", one, find(number))
        torch.cuda.empty_cache()


def run_promises(bench):
    """What a table of speeds does not show: graphs replayed at other
    lengths, the same bits, rows that ignore their mates."""
    from ladder import step06_paged, step07_dflash1
    from ladder.step07_dflash1 import paged_decode

    problem = DecodeProblem(B=3, lengths=(9000, 1, 4097), max_context=16384)
    inputs = problem.make(bench.device)
    workspace = step07_dflash1.DecodeWorkspace(bench.device)

    def check(name, value):
        bench.add({"mode": "promise", "promise": name}, "step07_dflash1", promise=name, kept=bool(value))

    def same_bits(inputs, splits):
        first = paged_decode(*inputs, workspace=workspace, num_kv_splits=splits)
        return all(
            torch.equal(first, paged_decode(*inputs, workspace=workspace, num_kv_splits=splits)) for _ in range(100)
        )

    check("same bits on 100 runs, 40 splits", same_bits(inputs, 40))
    check("same bits on 100 runs, B64, 8 splits", same_bits(DecodeProblem(B=64, context=4096).make(bench.device), 8))
    check("counters are zero after every launch", not workspace.counters.any())
    q, k_cache, v_cache, table, seq_lens = inputs
    fixed = paged_decode(*inputs, workspace=workspace, num_kv_splits=8)
    alone = [
        paged_decode(
            q[b : b + 1], k_cache, v_cache, table[b : b + 1], seq_lens[b : b + 1], num_kv_splits=8, workspace=workspace
        )
        for b in range(3)
    ]
    check("fixed splits: a row is the same alone and in a batch", torch.equal(fixed, torch.cat(alone)))
    for rung, options in ((step06_paged, {}), (step07_dflash1, dict(workspace=workspace))):
        out, lens = torch.empty_like(q), torch.ones_like(seq_lens)
        run = functools.partial(rung.paged_decode, q, k_cache, v_cache, table, lens, out=out, **options)
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        lens.copy_(seq_lens)
        poison(out)
        graph.replay()
        parity = DecodeOracle(inputs).check(out)
        name = rung.__name__.split(".")[-1]
        check(f"{name}: graph captured at length 1, replayed at 9000: {parity.reason or 'right'}", parity.ok)
    lens = seq_lens.clone()
    lens[1] = 10**6
    loud = paged_decode(q, k_cache, v_cache, table, lens, workspace=workspace)
    check(
        "a length beyond the block table gives NaN in its own rows only",
        loud[1].isnan().all() and loud[[0, 2]].isfinite().all(),
    )


# What must be reached


def _decode_targets(impls, limits):
    if (ours := impls.get("step07_dflash1")) is None:
        return []
    c = ours.case
    name = f"decode B{c['B']} {c['Sk']} {c['Hq']}/{c['Hkv']} page {c['page_size']} q{c['Sq']}"
    if ours.tbs * ours.ms >= 1:  # GB
        return target(f"{name}: share of the read limit", ours.tbs / limits.read_tbs, 0.85)
    peers = {n: e.ms for n, e in impls.items() if not n.startswith("step0")}
    best = min(peers, key=peers.get, default=None)
    return target(f"{name}: speed over the best peer, {best}", peers[best] / ours.ms, 0.9) if best else []


def _prefill_targets(impls, limits):
    if not {"step05_fused", "step07_dflash1"} <= set(impls):
        return []
    ours = impls["step07_dflash1"]
    c = ours.case
    name = (
        f"prefill B{c['B']} {c['Sq']} {c['Hq']}/{c['Hkv']} d{c['D']}/{c['Dv']} {'causal' if c['causal'] else 'dense'}"
    )
    lines = target(f"{name}: speed over step 05", impls["step05_fused"].ms / ours.ms, 1.0)
    if (c["D"], c["Sq"]) == (192, 16384) and "fa3" in impls:
        lines += target(f"{name}: speed over fa3", impls["fa3"].ms / ours.ms, 0.6)
    return lines


def _groups_targets(impls, limits):
    if not {"compact", "padded"} <= set(impls):
        return []
    c, saved = impls["compact"].case, impls["padded"].ms / impls["compact"].ms
    what = f"groups {c['task']} layer {c['layer']}: time ratio over row ratio"
    return target(what, saved * c["rows"] / c["padded_rows"], 0.9)


def _permute_targets(impls, limits):
    if len(impls) < 3:
        return []
    ratio = impls["attention_then_permute"].ms / impls["attention_in_expert_order"].ms
    return target(f"permute top_k {impls['attention'].case['top_k']}: speed of writing in expert order", ratio, 1.0)


def targets(rows, limits):
    """The figures that rungs 06 and 07 are held to, from the rows: [{"what", "value", "want", "ok"}]."""
    rows, lines = typed(rows), []
    for mode, make in (
        ("decode", _decode_targets), ("prefill", _prefill_targets), ("groups", _groups_targets),
        ("permute", _permute_targets),
    ):  # fmt: skip
        for impls in by_case(timed(rows, mode)):
            lines += make(impls, limits)
    peaks = {row.impl: row.peak_bytes for row in rows if row.peak_bytes}
    if {"step01_naive", "step07_dflash1"} <= set(peaks):
        lines += target(
            "memory of a 32k prefill: share saved against eager",
            1 - peaks["step07_dflash1"] / peaks["step01_naive"],
            0.2,
        )
    for row in rows:
        if "kept" in row:
            lines += target(f"promise: {row['promise']}", float(row["kept"]), 1.0)
    wrong = [row for row in rows if row.ok is False and not row.impl.startswith(("sweep", "fa3", "sdpa"))]
    return lines + target("no wrong answer", float(not wrong), 1.0)


# The cells


def cells(args):
    """Every cell; with ``args.sweep`` also the candidates."""
    bind, traces = functools.partial, args.traces
    found = [Cell("promises", "promises", run=run_promises)]
    for section, problems in (("decode", [*decode_problems(), *other_decode_problems()]), ("mla", mla_problems())):
        found += [Cell(section, f"decode {p.label()}", bind(decode_works, p)) for p in problems]
    found += [Cell("prefill", f"prefill {p.label()}", bind(prefill_work, p)) for p in prefill_problems()]
    found += [Cell("chunked", f"chunked 512 on {n // 1024}k", bind(chunked_work, n)) for n in (8192, 32768)]
    for task, layer in (("law", 0), ("law", 13), ("law", 25), ("intent", 4), ("intent", 22)):
        found.append(Cell("groups", f"groups {task} layer {layer}", bind(groups_work, traces, task, layer)))
    found += [Cell("groups", f"permute top {n}", bind(permute_work, traces, n)) for n in (1, 6)]
    found.append(Cell("memory", "memory 32k dense", run=run_memory))
    if args.sweep:
        for p, configs, splits in sweep_decode_problems():
            tries = list(itertools.product(configs, splits))
            found.append(
                Cell("mla" if p.latent else "decode", f"sweep {p.label()}", bind(decode_works, p, tries=tries))
            )
        found += [Cell("prefill", f"sweep {p.label()}", bind(sweep_prefill_works, p)) for p in sweep_prefill_problems()]
        found.append(Cell("groups", "sweep groups", bind(sweep_groups_works, traces)))
    return found


def options(parser):
    """--sweep and --traces."""
    parser.add_argument("--sweep", action="store_true", help="also time candidate tile sizes and splits")
    parser.add_argument(
        "--traces", default=os.environ.get("LADDER_TRACES", TRACES), help="folder of routing traces (*.npz)"
    )


main = functools.partial(
    harness.main, Suite("step07", __doc__, "bench_v1.json", 6.0, SECTIONS, cells, targets, options=options)
)

if __name__ == "__main__":
    sys.exit(main())
