"""Measure rung 08 beside its peers on a GPU: ``python -m ladder.bench
step08 --json FILE [--only prefill,decode] [--cells REGEX]``.

Every cell of step 08's targets: prefill at three head sizes and four head layouts, paged decode, MLA decode, range
windows, chunked prefill, memory and the first call.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from ladder.lab.cells import LENGTHS, OURS, V1, by_cell, faster, geometric_mean
from ladder.lab.decode_problem import DecodeOracle, DecodeProblem
from ladder.lab.memory import peak_bytes
from ladder.lab.parity import Oracle
from ladder.lab.peers import PEERS, contiguous_peers, decode_peers, fa3_function
from ladder.lab.problem import AttentionProblem
from ladder.lab.results import typed
from ladder.lab.window_oracle import WindowOracle

from . import harness
from .harness import Cell, Suite, Work, target

SECTIONS = ("prefill", "decode", "mla_decode", "windows", "chunked", "memory", "first_call")


# Cells


def _scaled(dry, length, least=1):
    """The length to run: a thousandth of it in a dry run."""
    return max(least, length // 1024) if dry else length


def prefill_problems(dry=False):
    """{name: (problem, peers)}: B * S is 16k tokens up to 16k; heads such that a call stays under 150 ms.

    Head layouts: as many KV heads as query heads (16, or 32 of 64), and 8, 3 or 6 query heads to a KV head; the last
    two at three lengths. At 128k dense half the heads.
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
                        B=batch,
                        Hq=heads,
                        Hkv=heads // group,
                        Sq=run,
                        Sk=run,
                        D=D,
                        Dv=Dv,
                        causal=causal,
                        dtype=_dtype(dry),
                    )
                    size = f"d{D}" if D == Dv else f"d{D}/{Dv}"
                    problems[f"prefill {size} {'causal' if causal else 'dense'} {S // 1024}k {layout}"] = (
                        problem,
                        tuple(peers),
                    )
    return problems


def decode_problems(dry=False):
    """{name: problem}: the published table, then new tokens, groups, ragged batches and page sizes. 32 query and 8 KV
    heads of 128."""
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
        f"mla_decode {h} heads B{b} {n // 1024}k": DecodeProblem(
            B=min(b, 2) if dry else b, Hq=h, context=_scaled(dry, n, 8), **shape
        )
        for h, b, n in cells
    }


def _dtype(dry):
    return "float16" if dry else "bfloat16"


def cells(dry=False):
    """Every cell, in the order in which a run that is cut short should have measured them."""
    bind = functools.partial
    prefill = [Cell("prefill", name, bind(prefill_work, *args)) for name, args in prefill_problems(dry).items()]
    last = [cell for cell in prefill if "group" in cell.name]  # after everything else, should time run out
    found = [cell for cell in prefill if "group" not in cell.name]
    for section, problems in (("decode", decode_problems(dry)), ("mla_decode", mla_problems(dry))):
        found += [Cell(section, name, bind(decode_work, p)) for name, p in problems.items()]
    found += [Cell("windows", name, bind(window_work, *case, dry)) for name, *case in window_cases(dry)]
    page, dtype = 4 if dry else 64, _dtype(dry)
    for name, B, Hq, Hkv, context in (
        ("1 x 128k", 1, 32, 8, 131072),
        ("1 x 128k MHA", 1, 16, 16, 131072),
        ("8 x 32k", 8, 32, 8, 32768),
    ):
        context, new = (_scaled(dry, context), 4) if dry else (context, 512)
        problem = DecodeProblem(B=B, Hq=Hq, Hkv=Hkv, context=context + new, q_len=new, dtype=dtype, page_size=page)
        found.append(Cell("chunked", f"chunked 512 on {name}", bind(chunked_work, problem)))
    found.append(Cell("memory", "memory 128k causal", run=run_memory))
    return [*found, *last, Cell("first_call", "first call", run=run_first_call)]


# What a cell runs


def prefill_work(problem, wanted, device, peers=True):
    """Steps 08 and, where ``wanted`` names it, 07, and the wanted peers on one problem."""
    from ladder.step07_dflash1 import attention as v1
    from ladder.step08_dflash2 import dflash2_attention

    q, k, v = problem.make(device) if peers else problem.empty(device)
    outs = {name: q.new_empty(*q.shape[:3], problem.Dv) for name in (OURS, *([V1] if V1 in wanted else []))}
    impls = {OURS: lambda: dflash2_attention(q, k, v, causal=problem.causal, out=outs[OURS])}
    if V1 in wanted and device.type == "cuda":
        impls[V1] = lambda: v1(q, k, v, causal=problem.causal, out=outs[V1])
    for peer in PEERS if peers else ():
        if peer.name in (*wanted, "sdpa") and peer.why_not(problem, device) is None:
            impls[peer.name] = lambda run=peer.build(problem): run(q, k, v)
    rows = 512 if problem.Sq <= 4096 else 64
    oracle = lambda: Oracle(q, k, v, causal=problem.causal, sample_rows=rows)  # noqa: E731
    return [Work(problem.case(), impls, oracle, _each(outs), flops=problem.flops)]


def _each(outs):
    return {name: [out] for name, out in outs.items()}


def decode_work(problem, device, peers=True):
    """Steps 08 and 07 on pages, step 08 on one page a sequence, and the peers, on one problem."""
    from ladder import step07_dflash1
    from ladder.step08_dflash2 import DecodeWorkspace, dflash2_decode, dflash2_mla_decode

    if not peers:  # short sequences under the same block table: the host never sees lengths, so the same kernels
        problem = problem.replace(context=2 * problem.page_size, lengths=None, max_context=problem.capacity)
    inputs = problem.make(device, poison=peers)
    q, k_cache, v_cache, table, lens = inputs
    outs = {name: q.new_empty(*q.shape[:3], problem.Dv) for name in (OURS, V1, "step08_contiguous")}
    options = {OURS: dict(out=outs[OURS], workspace=DecodeWorkspace(device)),  # kept between calls as a server keeps it
               V1: dict(out=outs[V1], workspace=step07_dflash1.DecodeWorkspace(device))}  # fmt: skip
    if problem.latent:
        args, size = (q, k_cache[:, :, 0], table, lens), dict(scale=problem.scale, head_dim_v=problem.Dv)
        calls = {OURS: dflash2_mla_decode, V1: step07_dflash1.mla_decode}
    else:
        args, size = (q, k_cache, v_cache, table, lens), dict(scale=problem.scale)
        calls = {OURS: dflash2_decode, V1: step07_dflash1.paged_decode}
    impls = {name: functools.partial(call, *args, **size, **options[name]) for name, call in calls.items()}
    if device.type != "cuda":
        del impls[V1]
    if not problem.latent and problem.lengths is None:  # one page a sequence: what the pages cost
        if peers:
            k, v = (x.transpose(1, 2).contiguous() for x in inputs.contiguous())
        else:
            k, v = (q.new_zeros(1, problem.capacity, problem.Hkv, width) for width in (problem.D, problem.Dv))
        whole = torch.arange(problem.B, dtype=torch.int32, device=device)[:, None] % len(k)
        same = {**options[OURS], "out": outs["step08_contiguous"]}
        impls["step08_contiguous"] = functools.partial(
            dflash2_decode, q, k, v, whole, lens, scale=problem.scale, **same
        )
    if device.type == "cuda" and peers:
        impls |= {name: run for name, run in decode_peers(problem, inputs).items() if name != "fa3"}
        impls |= contiguous_peers(problem, inputs)
    oracle = lambda: DecodeOracle(inputs, scale=problem.scale)  # noqa: E731
    return [
        Work(
            problem.case(),
            impls,
            oracle,
            _each(outs),
            problem.flops if problem.latent else None,
            problem.kv_bytes,
            graph=True,
        )
    ]


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
    """Step 08 under range windows, the peers of ``names`` that have such windows, and step 08 without any."""
    from ladder.step08_dflash2 import RangeWindows, dflash2_attention

    heads = 2 if dry else 16
    problem = AttentionProblem(Hq=heads, Hkv=heads, Sq=S, Sk=S, causal=True, dtype=_dtype(dry))
    windows = RangeWindows(ranges)
    q, k, v = problem.make(device) if peers else problem.empty(device)
    outs = {name: torch.empty_like(q) for name in (OURS, "full")}
    impls = {OURS: lambda: dflash2_attention(q, k, v, causal=True, windows=windows, out=outs[OURS])}
    (_, _, sink, window), *_ = ranges
    if "flex" in names and device.type == "cuda" and peers:
        impls["flex"] = _flex_window(q, k, v, sink, window)
    if "fa3" in names and peers and next(p for p in PEERS if p.name == "fa3").why_not(problem, device) is None:
        impls["fa3"] = fa3_window(q, k, v, window)
    case, pairs = {**problem.case(), "mode": "window", "windows": [list(r) for r in ranges]}, visible_pairs(ranges, S)
    oracle = lambda: WindowOracle(q, k, v, ranges, sample_rows=64)  # noqa: E731
    share = {"visible_share": round(pairs / problem.visible_pairs, 5)}
    work = [Work(case, impls, oracle, _each({OURS: outs[OURS]}), flops=4 * heads * problem.D * pairs, extra=share)]
    for name in ("causal", "dense"):
        if name in names:  # everything that a causal mask, or none, leaves: what the windows save time against
            base = problem.replace(causal=name == "causal")
            run = {OURS: lambda base=base: dflash2_attention(q, k, v, causal=base.causal, out=outs["full"])}
            judge = lambda base=base: Oracle(q, k, v, causal=base.causal, sample_rows=64)  # noqa: E731
            full = {**base.case(), "mode": "window", "windows": None}
            work.append(Work(full, run, judge, {OURS: [outs["full"]]}, flops=base.flops, suffix=f", {name}"))
    return work


def visible_pairs(ranges, S):
    """(query, key) pairs that a causal square of length S has under the ranges."""
    position = torch.arange(S, dtype=torch.int64)
    seen = position + 1
    for start, stop, sink, window in ranges:
        first, last = (start + S if start < 0 else start), (S if stop is None else stop + S if stop < 0 else stop)
        inside = (position >= first) & (position < last)
        seen = torch.where(inside, torch.minimum(seen, torch.full_like(seen, sink + window)), seen)
    return int(seen.sum())


def fa3_window(q, k, v, window):
    """FlashAttention-3 with the ``window`` newest keys of each query;
    it counts those to the left of the query's own."""
    return functools.partial(fa3_function(causal=True, window_size=(window - 1, 0)), q, k, v)


def _flex_window(q, k, v, sink, window):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    S = q.shape[2]
    mask = create_block_mask(
        lambda b, h, i, j: (j <= i) & ((j > i - window) | (j < sink)), None, None, S, S, device="cuda"
    )
    return functools.partial(torch.compile(flex_attention, dynamic=False), q, k, v, block_mask=mask)


def chunked_work(problem, device, peers=True):
    from ladder import step07_dflash1
    from ladder.step08_dflash2 import dflash2_attention, dflash2_paged_prefill

    inputs = problem.make(device, poison=peers)
    q, k_cache, v_cache, table, lens = inputs
    cu = torch.arange(problem.B + 1, dtype=torch.int32, device=device) * problem.q_len
    packed = q.flatten(0, 1)
    out, (k, v) = torch.empty_like(q), inputs.contiguous()
    pages = (packed, k_cache, v_cache, table, lens, cu)
    impls = {
        OURS: lambda: dflash2_paged_prefill(*pages, problem.q_len, out=out.flatten(0, 1)).view(q.shape),
        "step08_contiguous": lambda: dflash2_attention(q.transpose(1, 2), k, v, causal=True).transpose(1, 2),
    }
    if device.type == "cuda":
        impls[V1] = lambda: step07_dflash1.paged_prefill(*pages).view(q.shape)
        if peers:
            impls |= contiguous_peers(problem, inputs)
    case = {**problem.case(), "mode": "chunked"}
    oracle = lambda: DecodeOracle(inputs, most_sequences=1)  # noqa: E731
    return [Work(case, impls, oracle, {OURS: [out]}, flops=problem.flops, num_bytes=problem.kv_bytes)]


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
    bytecode = tempfile.TemporaryDirectory()

    def one(cache, warm):
        with tempfile.TemporaryDirectory() as folder:
            env = dict(
                os.environ,
                PYTHONPYCACHEPREFIX=bytecode.name,
                **({"TRITON_CACHE_DIR": folder} if cache == "empty" else {}),
            )
            env.pop("PYTHONDONTWRITEBYTECODE", None)
            arguments = [bench.device.type, _dtype(bench.dry), "warmup" if warm else "-"]
            root = str(Path(__file__).resolve().parents[2])
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
            run = subprocess.run(
                [sys.executable, "-c", FIRST_CALL, *arguments], capture_output=True, text=True, env=env, timeout=180
            )
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


# Ratios and targets


def ratio_summary(rows, peer="fa3"):
    """[(what, number of cases, geometric mean, smallest, where)]:
    speed over ``peer`` by head size, mask, layout and length."""
    found = [(impls[OURS], ratio) for impls in by_cell(rows, "prefill") if (ratio := faster(impls, peer)) is not None]
    kinds = {
        "all prefill": lambda c: "all",
        "head size": lambda c: f"d{c['D']}" + (f"/{c['Dv']}" if c["D"] != c["Dv"] else ""),
        "mask": lambda c: "causal" if c["causal"] else "dense",
        "heads per KV head": lambda c: c["Hq"] // c["Hkv"],
        "tokens": lambda c: c["Sq"],
    }
    lines = []

    def line(what, chosen):
        if chosen:
            lines.append((what, len(chosen), geometric_mean(ratio for ratio, _ in chosen), *min(chosen)))

    for kind, key in kinds.items():
        for value in sorted({key(row.case) for row, _ in found}, key=str if kind != "tokens" else int):
            chosen = [(ratio, row.get("cell", "")) for row, ratio in found if key(row.case) == value]
            line(f"{kind}: {value}" if value != "all" else kind, chosen)
    for mode in ("decode", "mla_decode", "chunked", "window"):
        line(mode, [(r, c[OURS].get("cell", "")) for c in by_cell(rows, mode) if (r := faster(c, peer)) is not None])
    return lines


def _limit(row, limits, name):
    """A limit of the run that a row comes from: its own for a row that was kept."""
    return row["limits"][name] if row.get("limits") else getattr(limits, name)


def _prefill_targets(ours, impls, limits):
    c, name = ours.case, ours["cell"]
    lines = target(f"{name}: over fa3", faster(impls, "fa3"), 1.0)
    if c["D"] == 128 and c["Hq"] == c["Hkv"] and not c["causal"] and c["Sq"] >= 16384:
        share = ours.tflops / _limit(ours, limits, "matmul_tflops")
        lines += target(f"{name}: share of the matrix-product limit", share, 0.85)
    if c["causal"] and c["Sq"] == 131072:
        lines += target(f"{name}: over step 07", faster(impls, V1), 1.40)
    return lines


def _decode_targets(ours, impls, limits):
    lines, name = [], ours["cell"]
    if ours.tbs * ours.ms >= 1:  # GB
        lines += target(f"{name}: share of the read limit", ours.tbs / _limit(ours, limits, "read_tbs"), 0.95)
    peers = {p: r for p in impls if not p.startswith("step") and (r := faster(impls, p)) is not None}
    if peers:
        best = min(peers, key=peers.get)
        lines += target(f"{name}: over the best peer, {best}", peers[best], 1.0)
    return lines + target(f"{name}: contiguous over paged time", faster(impls, "step08_contiguous"), 0.97)


def _mla_targets(ours, impls, limits):
    c, lines = ours.case, []
    if c["B"] > 1:
        unit, value, want = ("TB/s", ours.tbs, 4.2) if c["Hq"] < 64 else ("TFLOP/s", ours.tflops, 600)
        lines = target(f"{ours['cell']}: {unit}", value, want)
    return lines + target(f"{ours['cell']}: over fa3", faster(impls, "fa3"), 1.0)


def _window_targets(rows):
    lines, cells = [], by_cell(rows, "window")
    ours = [(c[OURS], c) for c in cells if OURS in c]
    full = {(row.case["Sq"], row.case["causal"]): row for row, _ in ours if row.case["windows"] is None}
    for row, impls in ours:
        if row.case["windows"] is None:
            continue
        over = {m: faster({"full": base, OURS: row}, "full") for (S, m), base in full.items() if S == row.case["Sq"]}
        name = row["cell"]
        if row.case["windows"][0][1] is None:
            lines += target(f"{name}: over dense", over.get(False), 20)
            share = over[True] * row["visible_share"] if over.get(True) else None
            lines += target(f"{name}: over causal, as a share of what the pairs left promise", share, 0.8)
        lines += target(f"{name}: over flex_attention", faster(impls, "flex"), 1.5)
        lines += target(f"{name}: over fa3", faster(impls, "fa3"), 1.0)
    return lines


def _memory_targets(rows):
    peaks = {row.impl: row.peak_bytes for row in rows if row.mode == "memory"}
    if not {OURS, V1} <= set(peaks):
        return []
    return target("128k causal prefill: peak memory over step 07's", peaks[OURS] / peaks[V1], 0.9999, most=True)


def _first_call_targets(rows):
    lines = []
    for row in rows:
        if row.mode == "first_call" and (row.case["cache"] == "warm" or row.case["warmup"]):
            how = "cache warm" if row.case["cache"] == "warm" else "after warmup"
            first = row["seconds_import"] + row["seconds_prefill"]
            lines += target(f"first prefill after import, {how}: seconds", first, 1.0, most=True)
            lines += target(f"first decode after that, {how}: seconds", row["seconds_decode"], 1.0, most=True)
    return lines


def targets(rows, limits):
    """Step 08's targets beside what the rows say: [{"what", "value", "want", "ok"}]; ``most`` marks an upper bound."""
    rows = typed(rows)
    ratios = [r for impls in by_cell(rows, "prefill") if (r := faster(impls, "fa3")) is not None]
    lines = target("prefill, geometric mean over fa3", geometric_mean(ratios), 1.05)
    for mode, make in (("prefill", _prefill_targets), ("decode", _decode_targets), ("mla_decode", _mla_targets)):
        for impls in by_cell(rows, mode):
            lines += make(impls[OURS], impls, limits) if OURS in impls else []
    lines += _window_targets(rows)
    for impls in by_cell(rows, "chunked"):
        lines += target(f"{impls[OURS]['cell']}: over fa3", faster(impls, "fa3"), 1.0) if OURS in impls else []
    lines += _memory_targets(rows) + _first_call_targets(rows)
    timed = [row for row in rows if row.impl.startswith("step08") and "ok" in row]
    right = sum(row.ok for row in timed) / len(timed) if timed else None
    return lines + target("share of answers that are right", right, 1.0)


def summary(rows):
    """Lines that say how much faster than its peers rung 08 is."""
    return [
        f"x {peer:15} {what:28} {count:3} cases, geometric mean {mean:6.3f}, least {low:6.3f} at {where}"
        for peer in ("fa3", "sdpa_cudnn", V1) for what, count, mean, low, where in ratio_summary(rows, peer)
    ]  # fmt: skip


main = functools.partial(harness.main, Suite(
    "step08", __doc__, "bench_v2.json", 6.0, SECTIONS, lambda args: cells(args.dry), targets, summary,
    impls=(OURS, V1, "step08_contiguous"), dry=True,
))  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
