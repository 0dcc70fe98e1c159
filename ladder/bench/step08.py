"""Measure rung 08 beside its peers on a GPU: ``python -m ladder.bench step08 --json FILE [--only prefill,decode] [--cells REGEX]``.

Every cell of step 08's targets: prefill at three head sizes and four head layouts, paged decode, MLA decode, range windows,
chunked prefill, memory and the first call. All implementations of a cell are measured in turn, round after round, in this
process, so that a clock that drifts meets them all; each is checked against the float64 oracle before and after. A cell that
fails is recorded with its error and does not stop the others. The file is written after every cell: stopped or out of time
it says so (``"complete": false`` and what was not run).
"""

import argparse
import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from ladder.lab import results
from ladder.lab.cells import LENGTHS, OURS, V1, by_cell, faster, geometric_mean
from ladder.lab.decode_problem import DecodeOracle, DecodeProblem
from ladder.lab.memory import peak_bytes
from ladder.lab.parity import Oracle
from ladder.lab.peers import PEERS, contiguous_peers, decode_peers
from ladder.lab.problem import AttentionProblem
from ladder.lab.roofline import Limits, measure_limits
from ladder.lab.window_oracle import WindowOracle

from .harness import Cell, Measure, Work

SECTIONS = ("prefill", "decode", "mla_decode", "windows", "chunked", "memory", "first_call")


# Cells


def _scaled(dry, length, least=1):
    """The length to run: a thousandth of it in a dry run."""
    return max(least, length // 1024) if dry else length


def prefill_problems(dry=False):
    """{name: (problem, peers)}: B * S is 16k tokens up to 16k; heads such that a call stays under 150 ms.

    Head layouts: as many KV heads as query heads (16, or 32 of 64), and 8, 3 or 6 query heads to a KV head; the last two
    at three lengths. At 128k dense half the heads.
    """
    problems = {}
    for D, Dv in ((128, 128), (64, 64), (192, 128)):
        for layout, group, most in (("MHA", 1, 16), ("GQA 8", 8, 16), ("group 3", 3, 12), ("group 6", 6, 12)):
            for causal in (False, True):
                for S in LENGTHS if group in (1, 8) else LENGTHS[1:4]:
                    heads = most * (2 if D == 64 else 1) // (2 if S > 32768 and not causal else 1)
                    run, peers = _scaled(dry, S, 16), ["fa3", "sdpa_cudnn"]
                    if group == 1 and D == Dv and S <= 16384:
                        peers.append("sdpa_flash")
                    if group == 1 and S >= 16384 and (causal or S <= 32768):
                        peers.append(V1)
                    batch = 1 if dry else max(1, 16384 // S)
                    problem = AttentionProblem(
                        B=batch, Hq=heads, Hkv=heads // group, Sq=run, Sk=run, D=D, Dv=Dv, causal=causal, dtype=_dtype(dry)
                    )
                    size = f"d{D}" if D == Dv else f"d{D}/{Dv}"
                    problems[f"prefill {size} {'causal' if causal else 'dense'} {S // 1024}k {layout}"] = problem, tuple(peers)
    return problems


def decode_problems(dry=False):
    """{name: problem}: the published table, then new tokens, groups, ragged batches and page sizes. 32 query and 8 KV heads of 128."""
    page = 4 if dry else 64

    def cell(B, context, **changes):
        shape = dict(B=min(B, 2) if dry else B, context=_scaled(dry, context, 8), page_size=page, dtype=_dtype(dry))
        return DecodeProblem(**{**shape, **changes})

    def ragged(lengths):
        lengths = tuple(_scaled(dry, n, 1) for n in lengths)
        return DecodeProblem(B=len(lengths), lengths=lengths, page_size=page, dtype=_dtype(dry))

    generator = torch.Generator().manual_seed(1)
    random = torch.randint(64, 16384, (64,), generator=generator).tolist()
    table = {
        f"decode B{b} {n // 1024}k": cell(b, n)
        for b, n in ((1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 32768), (64, 4096), (64, 16384))
    }
    return {
        **table,
        "decode B64 4k q_len 4": cell(64, 4096, q_len=4),
        "decode B8 32k q_len 4": cell(8, 32768, q_len=4),
        "decode B64 4k group 7": cell(64, 4096, Hq=28, Hkv=4),
        "decode B64 4k d64 group 8": cell(64, 4096, Hq=64, Hkv=8, D=64, Dv=64),
        "decode B64 4k page 16": cell(64, 4096, page_size=2 if dry else 16),
        "decode B64 ragged to 16k": ragged(random),
        "decode B16 ragged, one of 128k among 1k": ragged((131072, *[1024] * 15)),
    }


def mla_problems(dry=False):
    """{name: problem}: absorbed MLA decode, 576 / 512."""
    shape = dict(Hkv=1, D=576, Dv=512, latent=True, scale=192**-0.5, dtype=_dtype(dry), page_size=4 if dry else 64)
    cells = ((16, 64, 4096), (16, 128, 8192), (128, 64, 4096), (128, 128, 8192), (16, 1, 32768))
    return {
        f"mla_decode {h} heads B{b} {n // 1024}k": DecodeProblem(B=min(b, 2) if dry else b, Hq=h, context=_scaled(dry, n, 8), **shape)
        for h, b, n in cells
    }


def _dtype(dry):
    return "float16" if dry else "bfloat16"


def cells(dry=False):
    """Every cell, in the order in which a run that is cut short should have measured them."""
    found = [
        Cell("prefill", name, lambda device, peers, args=args: prefill_work(*args, device, peers))
        for name, args in prefill_problems(dry).items()
    ]
    last = [cell for cell in found if "group" in cell.name]  # after everything else, should time run out
    found = [cell for cell in found if "group" not in cell.name]
    for section, problems in (("decode", decode_problems(dry)), ("mla_decode", mla_problems(dry))):
        found += [Cell(section, name, lambda device, peers, p=p: decode_work(p, device, peers)) for name, p in problems.items()]
    for name, S, ranges, names in window_cases(dry):
        found.append(Cell("windows", name, lambda device, peers, a=(S, ranges, names, dry): window_work(*a, device, peers)))
    for name, B, Hq, Hkv, context, new in (
        ("1 x 128k", 1, 32, 8, 131072, 512),
        ("1 x 128k MHA", 1, 16, 16, 131072, 512),
        ("8 x 32k", 8, 32, 8, 32768, 512),
    ):
        context, new = (_scaled(dry, context), 4) if dry else (context, new)
        problem = DecodeProblem(B=B, Hq=Hq, Hkv=Hkv, context=context + new, q_len=new, dtype=_dtype(dry), page_size=4 if dry else 64)
        found.append(Cell("chunked", f"chunked 512 on {name}", lambda device, peers, p=problem: chunked_work(p, device, peers)))
    found.append(Cell("memory", "memory 128k causal", lambda device, peers: []))
    found += last
    found.append(Cell("first_call", "first call", lambda device, peers: []))
    return found


# What a cell runs


def prefill_work(problem, wanted, device, peers=True):
    from ladder.step07_dflash1 import attention as v1
    from ladder.step08_dflash2 import dflash2_attention

    q, k, v = problem.make(device) if peers else _empty(problem, device)
    outs = {name: q.new_empty(*q.shape[:3], problem.Dv) for name in (OURS, *([V1] if V1 in wanted else []))}
    impls = {OURS: lambda: dflash2_attention(q, k, v, causal=problem.causal, out=outs[OURS])}
    if V1 in wanted and device.type == "cuda":
        impls[V1] = lambda: v1(q, k, v, causal=problem.causal, out=outs[V1])
    for peer in PEERS if peers else ():
        if peer.name in (*wanted, "sdpa") and peer.why_not(problem, device) is None:
            impls[peer.name] = lambda run=peer.build(problem): run(q, k, v)
    rows = 512 if problem.Sq <= 4096 else 64
    return [Work(problem.case(), impls, lambda: Oracle(q, k, v, causal=problem.causal, sample_rows=rows), outs, flops=problem.flops)]


def _empty(problem, device):
    """Tensors of a problem with nothing in them: what a kernel is compiled for."""
    shapes = ((problem.Hq, problem.Sq, problem.D), (problem.Hkv, problem.Sk, problem.D), (problem.Hkv, problem.Sk, problem.Dv))
    return [torch.zeros(problem.B, *shape, dtype=getattr(torch, problem.dtype), device=device) for shape in shapes]


def decode_work(problem, device, peers=True):
    from ladder import step07_dflash1
    from ladder.step08_dflash2 import dflash2_decode, dflash2_mla_decode

    if not peers:  # short sequences under the same block table: the host never sees lengths, so the same kernels
        problem = problem.replace(context=2 * problem.page_size, lengths=None, max_context=problem.capacity)
    inputs = problem.make(device, poison=peers)
    q, k_cache, v_cache, table, lens = inputs
    names = [OURS, V1, "step08_contiguous"]
    outs = {name: q.new_empty(*q.shape[:3], problem.Dv) for name in names}
    workspace = step07_dflash1.DecodeWorkspace(device)
    ours, impls = decode_workspace(problem, device), {}
    if problem.latent:
        latent = k_cache[:, :, 0]
        options = dict(scale=problem.scale, head_dim_v=problem.Dv)
        impls[OURS] = lambda: dflash2_mla_decode(q, latent, table, lens, out=outs[OURS], workspace=ours, **options)
        v1 = lambda: step07_dflash1.mla_decode(q, latent, table, lens, out=outs[V1], workspace=workspace, **options)  # noqa: E731
    else:
        impls[OURS] = lambda: dflash2_decode(q, k_cache, v_cache, table, lens, scale=problem.scale, out=outs[OURS], workspace=ours)
        options = dict(scale=problem.scale, out=outs[V1], workspace=workspace)
        v1 = lambda: step07_dflash1.paged_decode(q, k_cache, v_cache, table, lens, **options)  # noqa: E731
        if problem.lengths is None:  # one page a sequence: what the pages cost
            if peers:
                k, v = (x.transpose(1, 2).contiguous() for x in inputs.contiguous())
            else:
                k, v = (q.new_zeros(1, problem.capacity, problem.Hkv, width) for width in (problem.D, problem.Dv))
            whole = torch.arange(problem.B, dtype=torch.int32, device=device)[:, None] % len(k)
            impls["step08_contiguous"] = lambda: dflash2_decode(
                q, k, v, whole, lens, scale=problem.scale, out=outs["step08_contiguous"], workspace=ours
            )
    if device.type == "cuda":
        impls[V1] = v1
        if peers:
            others = {name: run for name, run in decode_peers(problem, inputs).items() if name != "fa3"}
            impls |= {**others, **contiguous_peers(problem, inputs)}
    flops = problem.flops if problem.latent else None
    return [Work(problem.case(), impls, lambda: DecodeOracle(inputs, scale=problem.scale), outs, flops, problem.kv_bytes, graph=True)]


def decode_workspace(problem, device):
    """A workspace of rung 08's own, kept between calls as a server keeps it; None where rung 08 has no class for it."""
    from ladder import step08_dflash2

    make = getattr(step08_dflash2, "DecodeWorkspace", None)
    return make(device) if make else None


def window_cases(dry=False):
    """[(name, S, ranges, names)]: ranges as (start, stop, sink, window), and what to compare with."""
    sink, window, long, short = (1, 4, 128, 32) if dry else (128, 4096, 131072, 32768)
    both = [(0, None, sink, window)]
    return [
        ("windows 128k sink 128 + 4096", long, both, ("causal", "dense")),
        ("windows 128k all but the last 4k", long, [(0, -window, sink, window)], ()),
        ("windows 32k sink 128 + 4096", short, both, ("causal", "flex")),
        ("windows 32k last 4096", short, [(0, None, 0, window)], ("fa3",)),
        ("windows 128k last 4096", long, [(0, None, 0, window)], ("fa3",)),
    ]


def window_work(S, ranges, names, dry, device, peers=True):
    from ladder.step08_dflash2 import RangeWindows, dflash2_attention

    heads = 2 if dry else 16
    problem = AttentionProblem(Hq=heads, Hkv=heads, Sq=S, Sk=S, causal=True, dtype=_dtype(dry))
    windows = RangeWindows(ranges)
    q, k, v = problem.make(device) if peers else _empty(problem, device)
    outs = {name: torch.empty_like(q) for name in (OURS, "full")}
    impls = {OURS: lambda: dflash2_attention(q, k, v, causal=True, windows=windows, out=outs[OURS])}
    (_, _, sink, window), *_ = ranges
    if "flex" in names and device.type == "cuda" and peers:
        impls["flex"] = _flex_window(S, sink, window)(q, k, v)
    if "fa3" in names and peers and next(p for p in PEERS if p.name == "fa3").why_not(problem, device) is None:
        impls["fa3"] = _fa3_window(q, k, v, window)
    case = {**problem.case(), "mode": "window", "windows": [list(r) for r in ranges]}
    pairs = _visible_pairs(ranges, S)
    oracle = lambda: WindowOracle(q, k, v, ranges, sample_rows=64)  # noqa: E731
    work = [
        Work(
            case, impls, oracle, outs, flops=4 * heads * problem.D * pairs, extra={"visible_share": round(pairs / problem.visible_pairs, 5)}
        )
    ]
    for name in ("causal", "dense"):
        if name in names:  # everything that a causal mask, or none, leaves: what the windows save time against
            base = problem.replace(causal=name == "causal")
            run = {OURS: lambda base=base: dflash2_attention(q, k, v, causal=base.causal, out=outs["full"])}
            judge = lambda base=base: Oracle(q, k, v, causal=base.causal, sample_rows=64)  # noqa: E731
            full = {**base.case(), "mode": "window", "windows": None}
            work.append(Work(full, run, judge, {OURS: outs["full"]}, flops=base.flops, suffix=f", {name}"))
    return work


def _visible_pairs(ranges, S):
    """(query, key) pairs that a causal square of length S has under the ranges."""
    position = torch.arange(S, dtype=torch.int64)
    seen = position + 1
    for start, stop, sink, window in ranges:
        first, last = (start + S if start < 0 else start), (S if stop is None else stop + S if stop < 0 else stop)
        inside = (position >= first) & (position < last)
        seen = torch.where(inside, torch.minimum(seen, torch.full_like(seen, sink + window)), seen)
    return int(seen.sum())


def _fa3_window(q, k, v, window):
    """FlashAttention-3 with the ``window`` newest keys of each query; it counts those to the left of the query's own."""
    from ladder.lab.peers import _fa3_module

    interface = __import__(_fa3_module())

    def run():
        out = interface.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, window_size=(window - 1, 0))
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def _flex_window(S, sink, window):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: (j <= i) & ((j > i - window) | (j < sink)), None, None, S, S, device="cuda")
    return lambda q, k, v: lambda: compiled(q, k, v, block_mask=mask)


def chunked_work(problem, device, peers=True):
    from ladder import step07_dflash1
    from ladder.step08_dflash2 import dflash2_attention, dflash2_paged_prefill

    inputs = problem.make(device, poison=peers)
    q, k_cache, v_cache, table, lens = inputs
    cu = torch.arange(problem.B + 1, dtype=torch.int32, device=device) * problem.q_len
    packed = q.flatten(0, 1)
    outs = {OURS: torch.empty_like(q)}
    k, v = inputs.contiguous()
    impls = {
        OURS: lambda: dflash2_paged_prefill(packed, k_cache, v_cache, table, lens, cu, problem.q_len, out=outs[OURS].flatten(0, 1)).view(
            q.shape
        ),
        "step08_contiguous": lambda: dflash2_attention(q.transpose(1, 2), k, v, causal=True).transpose(1, 2),
    }
    if device.type == "cuda":
        impls[V1] = lambda: step07_dflash1.paged_prefill(packed, k_cache, v_cache, table, lens, cu).view(q.shape)
        if peers:
            impls |= contiguous_peers(problem, inputs)
    case = {**problem.case(), "mode": "chunked"}
    return [Work(case, impls, lambda: DecodeOracle(inputs, most_sequences=1), outs, flops=problem.flops, num_bytes=problem.kv_bytes)]


def run_memory(bench):
    """Peak memory of a 128k causal prefill on top of its inputs, output included: rung 08 against rung 07."""
    from ladder.step07_dflash1 import attention as v1
    from ladder.step08_dflash2 import dflash2_attention

    length = _scaled(bench.dry, 131072)
    problem = AttentionProblem(Hq=16, Hkv=16, Sq=length, Sk=length, causal=True, dtype=_dtype(bench.dry))
    q, k, v = problem.make(bench.device)
    impls = {OURS: lambda q, k, v: dflash2_attention(q, k, v, causal=True)}
    if bench.device.type == "cuda":
        impls[V1] = lambda q, k, v: v1(q, k, v, causal=True)
    for name, run in impls.items():

        def one(name=name, run=run):
            run(q[:, :, :512], k[:, :, :512], v[:, :, :512])  # compiled before it is measured
            bench.add({**problem.case(), "mode": "memory"}, name, peak_bytes=peak_bytes(run, q, k, v))

        bench.guard(f"memory {name}", one)


FIRST_CALL = """
import json, sys, time
import torch
device, dtype, warm = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3] == "warmup"
sync = torch.cuda.synchronize if device == "cuda" else lambda: None
q, k, v = (torch.randn(1, 16, 1024, 128, device=device).to(dtype) for _ in range(3))
cache = torch.randn(64, 64, 8, 128, device=device).to(dtype)
table = torch.arange(64, dtype=torch.int32, device=device)[None]
lens = torch.tensor([4000], dtype=torch.int32, device=device)
q_new = torch.randn(1, 32, 128, device=device).to(dtype)
from ladder.lab.decode_problem import DecodeProblem
from ladder.lab.problem import AttentionProblem
shapes = [AttentionProblem(causal=True, dtype=sys.argv[2]), DecodeProblem(dtype=sys.argv[2])]
sync()
start = time.perf_counter()
from ladder.step08_dflash2 import dflash2_attention, dflash2_decode, warmup
imported = time.perf_counter()
if warm:
    warmup(shapes)
    sync()
warmed = time.perf_counter()
dflash2_attention(q, k, v, causal=True)
sync()
first = time.perf_counter()
dflash2_decode(q_new, cache, cache, table, lens)
sync()
last = time.perf_counter()
seconds = dict(import_=imported - start, warmup=warmed - imported, prefill=first - warmed, decode=last - first)
print(json.dumps({"seconds_" + name.rstrip("_"): value for name, value in seconds.items()}))
"""


def run_first_call(bench):
    """Import, first prefill and first decode in a fresh process: compiled code cached, and with an empty cache.

    Python's own bytecode is cached in both, as an installation leaves it; some images have none and forbid to write it.
    """
    import json

    bytecode = tempfile.TemporaryDirectory()

    def one(cache, warm):
        with tempfile.TemporaryDirectory() as folder:
            env = dict(os.environ, PYTHONPYCACHEPREFIX=bytecode.name, **({"TRITON_CACHE_DIR": folder} if cache == "empty" else {}))
            env.pop("PYTHONDONTWRITEBYTECODE", None)
            arguments = [bench.device.type, _dtype(bench.dry), "warmup" if warm else "-"]
            root = str(Path(__file__).resolve().parents[2])
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
            run = subprocess.run([sys.executable, "-c", FIRST_CALL, *arguments], capture_output=True, text=True, env=env, timeout=180)
        if run.returncode:
            raise RuntimeError(run.stderr.strip().splitlines()[-1])
        seconds = {name: round(value, 4) for name, value in json.loads(run.stdout.splitlines()[-1]).items()}
        bench.add({"mode": "first_call", "cache": cache, "warmup": warm}, OURS, **seconds)

    if bench.device.type == "cuda":  # fill the cache; the next process finds it warm
        bench.guard("first call, cache filling", lambda: one("warm", False))
        bench.rows[:] = [row for row in bench.rows if row["case"].get("mode") != "first_call"]
        bench.guard("first call, cache empty", lambda: one("empty", False))
    bench.guard("first call, cache warm", lambda: one("warm", False))
    bench.guard("first call, cache empty, warmup", lambda: one("empty", True))
    bytecode.cleanup()


# Measuring


def run_cell(bench, cell):
    """Measure one cell into ``bench.rows``."""
    if cell.section == "memory":
        run_memory(bench)
    elif cell.section == "first_call":
        run_first_call(bench)
    else:
        for work in cell.build(bench.device, True):
            bench.guard(cell.name, bench.work, work, cell.name + work.suffix)
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


# Ratios and targets


def ratio_summary(rows, peer="fa3"):
    """[(what, number of cases, geometric mean, smallest, where)]: speed over ``peer`` by head size, mask, layout and length."""
    found = [(impls[OURS], ratio) for impls in by_cell(rows, "prefill") if (ratio := faster(impls, peer)) is not None]
    kinds = {
        "all prefill": lambda c: "all",
        "head size": lambda c: f"d{c['D']}" + (f"/{c['Dv']}" if c["D"] != c["Dv"] else ""),
        "mask": lambda c: "causal" if c["causal"] else "dense",
        "heads per KV head": lambda c: c["Hq"] // c["Hkv"],
        "tokens": lambda c: c["Sq"],
    }
    lines = []
    for kind, key in kinds.items():
        for value in sorted({key(entry["case"]) for entry, _ in found}, key=str if kind != "tokens" else int):
            chosen = [(ratio, entry.get("cell", "")) for entry, ratio in found if key(entry["case"]) == value]
            low, where = min(chosen)
            lines.append((f"{kind}: {value}" if value != "all" else kind, len(chosen), geometric_mean(r for r, _ in chosen), low, where))
    for mode in ("decode", "mla_decode", "chunked", "window"):
        chosen = [(r, impls[OURS].get("cell", "")) for impls in by_cell(rows, mode) if (r := faster(impls, peer)) is not None]
        if chosen:
            lines.append((mode, len(chosen), geometric_mean(r for r, _ in chosen), *min(chosen)))
    return lines


def targets(rows, limits):
    """Step 08's targets beside what the rows say: [{"what", "value", "want", "ok"}]; ``most`` marks an upper bound."""
    lines = []

    def line(what, value, want, most=False):
        if value is not None:
            lines.append(
                {
                    "what": what,
                    "value": round(value, 4),
                    "want": want,
                    "ok": value <= want if most else value >= want,
                    **({"most": True} if most else {}),
                }
            )

    def limit(row, name):  # of its own run, for a row that is kept
        return row["limits"][name] if row.get("limits") else getattr(limits, name)

    prefill = by_cell(rows, "prefill")
    ratios = [r for impls in prefill if (r := faster(impls, "fa3")) is not None]
    line("prefill, geometric mean over fa3", geometric_mean(ratios), 1.05)
    for impls in prefill:
        if OURS not in impls:
            continue
        ours, case = impls[OURS], impls[OURS]["case"]
        line(f"{ours['cell']}: over fa3", faster(impls, "fa3"), 1.0)
        if case["D"] == 128 and case["Hq"] == case["Hkv"] and not case["causal"] and case["Sq"] >= 16384:
            line(f"{ours['cell']}: share of the matrix-product limit", ours["tflops"] / limit(ours, "matmul_tflops"), 0.85)
        if case["causal"] and case["Sq"] == 131072:
            line(f"{ours['cell']}: over step 07", faster(impls, V1), 1.40)
    for impls in by_cell(rows, "decode"):
        if OURS not in impls:
            continue
        ours, name = impls[OURS], impls[OURS]["cell"]
        if ours["tbs"] * ours["ms"]["median"] >= 1:  # GB
            line(f"{name}: share of the read limit", ours["tbs"] / limit(ours, "read_tbs"), 0.95)
        peers = {p: r for p in impls if not p.startswith("step") and (r := faster(impls, p)) is not None}
        if peers:
            best = min(peers, key=peers.get)
            line(f"{name}: over the best peer, {best}", peers[best], 1.0)
        line(f"{name}: contiguous over paged time", faster(impls, "step08_contiguous"), 0.97)
    for impls in by_cell(rows, "mla_decode"):
        if OURS not in impls:
            continue
        ours, case = impls[OURS], impls[OURS]["case"]
        if case["B"] > 1:
            few = case["Hq"] < 64
            line(f"{ours['cell']}: {'TB/s' if few else 'TFLOP/s'}", ours["tbs"] if few else ours["tflops"], 4.2 if few else 600)
        line(f"{ours['cell']}: over fa3", faster(impls, "fa3"), 1.0)
    windows = by_cell(rows, "window")
    full = {
        (impls[OURS]["case"]["Sq"], impls[OURS]["case"]["causal"]): impls[OURS]
        for impls in windows
        if OURS in impls and impls[OURS]["case"]["windows"] is None
    }
    for impls in windows:
        ours = impls.get(OURS)
        if ours and ours["case"]["windows"] is not None:
            Sq = ours["case"]["Sq"]
            over = {causal: faster({"full": full[Sq, causal], OURS: ours}, "full") for causal in (False, True) if (Sq, causal) in full}
            if ours["case"]["windows"][0][1] is None:
                line(f"{ours['cell']}: over dense", over.get(False), 20)
                line(
                    f"{ours['cell']}: over causal, as a share of what the pairs left promise",
                    over[True] * ours["visible_share"] if over.get(True) else None,
                    0.8,
                )
            line(f"{ours['cell']}: over flex_attention", faster(impls, "flex"), 1.5)
            line(f"{ours['cell']}: over fa3", faster(impls, "fa3"), 1.0)
    for impls in by_cell(rows, "chunked"):
        if OURS in impls:
            line(f"{impls[OURS]['cell']}: over fa3", faster(impls, "fa3"), 1.0)
    peaks = {e["impl"]: e["peak_bytes"] for e in rows if e["case"].get("mode") == "memory"}
    if {OURS, V1} <= set(peaks):
        line("128k causal prefill: peak memory over step 07's", peaks[OURS] / peaks[V1], 0.9999, most=True)
    for entry in rows:
        if entry["case"].get("mode") == "first_call":
            case = entry["case"]
            if case["cache"] == "warm" or case["warmup"]:
                how = "cache warm" if case["cache"] == "warm" else "after warmup"
                line(f"first prefill after import, {how}: seconds", entry["seconds_import"] + entry["seconds_prefill"], 1.0, most=True)
                line(f"first decode after that, {how}: seconds", entry["seconds_decode"], 1.0, most=True)
    timed = [e for e in rows if e["impl"].startswith("step08") and "ok" in e]
    if timed:
        line("share of answers that are right", sum(e["ok"] for e in timed) / len(timed), 1.0)
    return lines


# The command


def warm(share, shares, dry):
    """Compile what every ``shares``-th cell launches, from ``share`` on; says nothing, the measuring process will."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for cell in chosen_cells(None, None, dry)[share::shares]:
            with contextlib.suppress(Exception):
                for work in cell.build(device, False):
                    for run in work.impls.values():
                        with contextlib.suppress(Exception):
                            run()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def chosen_cells(only, patterns, dry):
    """The cells of some sections whose names match one of the patterns."""
    return [
        cell for cell in cells(dry)
        if (only is None or cell.section in only) and (patterns is None or any(re.search(p, cell.name) for p in patterns))
    ]  # fmt: skip


@results.names_what_it_cannot_write
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m ladder.bench step08", description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="bench_v2.json", help="file for the results")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--cells", action="append", help="regular expression on the names of cells; may be given again")
    parser.add_argument("--peers", help="implementations to compare with, as fa3,sdpa_cudnn; default all that run here")
    parser.add_argument("--minutes", type=float, default=6.0, help="start no new cell after this long")
    parser.add_argument("--keep", action="store_true", help="keep rows of the file for cases that this run does not measure")
    parser.add_argument("--list", action="store_true", help="print the names of the cells and stop")
    parser.add_argument(
        "--dry", action="store_true", help="every cell at a thousandth of its length, on any device: a rehearsal, no result"
    )
    parser.add_argument("--no-warm", action="store_true", help="do not compile ahead in other processes")
    parser.add_argument("--warm", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    only = args.only.split(",")
    if unknown := [name for name in only if name not in SECTIONS]:
        parser.error(f"--only: {unknown[0]!r} is no section; want some of {', '.join(SECTIONS)}")
    try:
        todo = chosen_cells(only, args.cells, args.dry)
    except re.error as error:
        parser.error(f"argument --cells: {error.pattern!r} is no regular expression: {error}")
    if not 0 <= args.minutes < math.inf:
        parser.error(f"argument --minutes: {args.minutes}; want a number of at least 0")
    known = {OURS, V1, "step08_contiguous", "flex", *(peer.name for peer in PEERS)}
    if unknown := set((args.peers or OURS).split(",")) - known:
        parser.error(f"argument --peers: {sorted(unknown)[0]!r} is none; want some of {', '.join(sorted(known))}")
    if args.json != "-" and not Path(args.json).absolute().parent.is_dir():
        parser.error(f"argument --json: cannot write {args.json}; want a file in a folder that exists")
    if not todo:
        parser.error(f"--cells: nothing matches {args.cells}; --list prints the names")
    if args.list:
        print("\n".join(cell.name for cell in todo))
        return 0
    if not torch.cuda.is_available() and not args.dry:
        parser.error("needs a CUDA device; --dry rehearses on any")
    if args.warm:
        return warm(*args.warm, args.dry)

    start = time.time()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if args.keep and args.json != "-":  # a file that cannot be added to is refused before anything is measured
        try:
            results.kept_rows(args.json, [], results.machine(device))
        except ValueError as error:
            parser.error(f"argument --json: {error}")
    if device.type == "cuda" and not args.no_warm:
        _warm_all(args.dry, start)
    torch.manual_seed(0)
    limits = measure_limits(device, quick=True) if args.dry else measure_limits(device)
    print(f"limits {limits.as_dict()}", flush=True)
    bench = Measure(device, start + 60 * args.minutes, dry=args.dry, only_impls=args.peers.split(",") if args.peers else None)
    return _measure(bench, todo, limits, args)


def _warm_all(dry, start):
    workers = min(14, max(1, (os.cpu_count() or 2) - 2))
    command = [sys.executable, "-m", "ladder.bench", "step08", *(["--dry"] if dry else [])]
    running = [subprocess.Popen([*command, "--warm", str(i), str(workers)]) for i in range(workers)]
    for process in running:
        process.wait()
    print(f"compiled in {time.time() - start:.0f} s with {workers} processes", flush=True)


def _measure(bench, todo, limits: Limits, args):
    """Run the cells; write the file after each, and whatever there is when stopped."""
    machine, left, stopped = results.machine(bench.device), list(todo), None

    def save():
        kept = results.kept_rows(args.json, bench.rows, machine) if args.keep and args.json != "-" else []
        rows = bench.rows + kept
        not_run = [cell.name for cell in left]
        if args.keep and args.json != "-":
            not_run = results.still_not_run(args.json, not_run, [cell.name for cell in todo if cell not in left])
        doc = results.document(
            rows, device=bench.device, limits=limits, complete=not not_run and stopped is None, not_run=not_run,
            must_reach=targets(rows, limits), failures=bench.failures, **({"dry": True} if bench.dry else {}),
            **(results.kept_note(args.json) if kept else {}),
        )  # fmt: skip
        if stopped:
            doc["stopped"] = stopped
        if not bench.rows and args.json != "-" and Path(args.json).exists():
            print(f"nothing was measured: {args.json} is left as it is")
        elif args.json != "-" or not left or stopped:
            results.write(doc, args.json)
        return doc

    def interrupt(number, frame):
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        while left:
            if time.time() > bench.stop_at:
                stopped = "out of time"
                break
            begin = time.time()
            bench.guard(left[0].name, run_cell, bench, left[0])
            print(f"    {time.time() - begin:.1f} s", flush=True)
            del left[0]
            save()
    except KeyboardInterrupt as error:
        stopped = f"interrupted {error}".strip()
    finally:
        signal.signal(signal.SIGTERM, before)
    report(save())
    return 1 if stopped and stopped.startswith("interrupted") else 0


def report(doc):
    """Print ratios, targets and failures of a results document."""
    for peer in ("fa3", "sdpa_cudnn", V1):
        for what, count, mean, low, where in ratio_summary(doc["rows"], peer):
            print(f"x {peer:15} {what:28} {count:3} cases, geometric mean {mean:6.3f}, least {low:6.3f} at {where}")
    for entry in doc["must_reach"]:
        print(
            f"{'ok  ' if entry['ok'] else 'MISS'} {entry['value']:9.3f} (want {'<=' if entry.get('most') else '>='} {entry['want']}) {entry['what']}"
        )
    for failure in doc["failures"]:
        print("failed:", failure)
    if not doc["complete"]:
        print(f"PARTIAL ({doc.get('stopped', 'not finished')}): {len(doc['not_run'])} cells not run: {', '.join(doc['not_run'])}")


if __name__ == "__main__":
    sys.exit(main())
