"""What every chapter does the same way: recorded or fresh numbers, parity tables, speed tables, sentences with numbers.

Text that goes into a notebook's output holds booleans, shapes and numbers of recorded files only, so that a run on
another machine prints the same.
"""

import json
import os
import subprocess
import sys

from IPython.display import Markdown
from torch.utils._python_dispatch import TorchDispatchMode

from ladder.chapters import plots
from ladder.lab import memory, results
from ladder.lab.names import title as implementation_title
from ladder.lab.parity import Oracle
from ladder.lab.problem import MINILM, SHAPES, AttentionProblem
from ladder.rungs import RUNGS, find


def plain(seqlen, causal=False):
    """The headline problem: 16 heads of 128 in bf16, 16k tokens in all."""
    return AttentionProblem(
        B=max(1, 16384 // seqlen), **SHAPES["plain"], Sq=seqlen, Sk=seqlen, causal=causal, dtype="bfloat16"
    )


def model(shape, seqlen=16384):
    """A causal prefill of ``seqlen`` tokens in the head layout of a model (a key of ``SHAPES``)."""
    return AttentionProblem(**SHAPES[shape], Sq=seqlen, Sk=seqlen, causal=True, dtype="bfloat16")


CASES = {
    "16k tokens, dense": plain(16384),
    "16k tokens, causal": plain(16384, True),
    "16 x 1k tokens, dense": plain(1024),
    "16 x 1k tokens, causal": plain(1024, True),
    "Qwen3-MoE heads, 16k, causal": model("qwen3-moe"),
    "DeepSeek-V2-Lite heads, 16k, causal": model("deepseek-v2-lite"),
}


def fields(problem):
    """The fields of ``problem`` that pick its rows out of recorded results."""
    return {k: v for k, v in problem.case().items() if k != "mode"}


PLAIN = {name: fields(p) for name, p in CASES.items() if p.Hq == p.Hkv and p.D == p.Dv}  # what every rung computes
PYTORCH = tuple(rung.name for rung in RUNGS if not rung.needs_triton)
ALL = {name: fields(p) for name, p in CASES.items()}


def numbers():
    """The recorded results of the ladder."""
    return results.load("ladder")


def source_line(doc):
    """Where the numbers of a figure come from."""
    return results.caption(doc)


def ms(doc, impl, problem):
    """Median milliseconds of one recorded row."""
    return results.one(doc, impl, **fields(problem))["ms"]["median"]


def rows(doc, impl, problem):
    """Recorded rows of an implementation on ``problem`` that were measured, not skipped."""
    return [row for row in results.select(doc, impl, **fields(problem)) if "ms" in row]


def value(doc, impl, problem, name):
    """Another field of one recorded row: "tflops", "peak_bytes", "bytes_moved", ..."""
    return results.one(doc, impl, **fields(problem))[name]


def say(text):
    """A sentence whose numbers were computed, as Markdown output."""
    return Markdown(text)


# ---------------------------------------------------------------- parity


def small_problems(rung):
    """Problems that a CPU, and Triton's interpreter, finish in seconds: real input first."""
    length = 512 if not rung.needs_triton else 160
    minilm = MINILM.replace(B=3 if not rung.needs_triton else 1, Sq=length, Sk=length)
    problems = [
        ("MiniLM, real input", minilm),
        ("MiniLM, causal", minilm.replace(causal=True)),
        ("noise, float32", AttentionProblem(Hq=4, Hkv=4, Sq=200, Sk=200, D=64, Dv=64, dtype="float32")),
        ("noise, Sq > Sk, causal", AttentionProblem(Hq=4, Hkv=4, Sq=96, Sk=40, D=32, Dv=32, causal=True)),
        ("one token", AttentionProblem(Hq=4, Hkv=4, Sq=1, Sk=333, D=64, Dv=64)),
    ]
    if "grouped_heads" in rung.features:
        problems += [
            ("Qwen3-MoE heads, causal", AttentionProblem(**SHAPES["qwen3-moe"], Sq=48, Sk=80, causal=True)),
            (
                "DeepSeek-V2-Lite heads, causal",
                AttentionProblem(**SHAPES["deepseek-v2-lite"], Sq=64, Sk=64, causal=True),
            ),
        ]
    return problems


def parity(number):
    """Check rung ``number`` on the CPU against the float64 oracle and the rung before; a Markdown table of verdicts."""
    rung = find(number)
    before = find(number - 1) if number > 1 else None
    lines = [
        f"| input | shapes: q, k, v if unlike k | float64 oracle | {before.name if before else 'previous rung'} |",
        "|:--|:--|:--|:--|",
    ]
    for name, problem in small_problems(rung):
        q, k, v = problem.make()
        options = dict(causal=problem.causal, scale=problem.scale)
        oracle = Oracle(q, k, v, **options)
        out = rung.attention(q, k, v, **options)
        verdict = oracle.check(out)
        if before is None:
            agrees = "first rung"
        elif (reason := before.why_not(problem)) is not None:
            agrees = f"cannot: {reason}"
        else:
            agrees = _word(oracle.agree(out, before.attention(q, k, v, **options)))
        shapes = " ".join(str(tuple(x.shape)) for x in ((q, k) if v.shape == k.shape else (q, k, v)))
        lines.append(f"| {name}, {problem.dtype} | `{shapes}` | {_word(verdict)} | {agrees} |")
    return Markdown("\n".join(lines))


def _word(verdict):
    return "within budget" if verdict else f"**FAILS**: {verdict.reason}"


# ---------------------------------------------------------------- speed and memory


def speed(doc, upto, problems=None):
    """Recorded milliseconds, TFLOP/s and peak memory of rungs 1 to ``upto`` on some problems, as a Markdown table."""
    problems = problems or {name: CASES[name] for name in list(CASES)[:2]}
    lines = [
        "| problem | rung | ms | TFLOP/s | x the rung before | bytes moved | peak memory | max error / budget |",
        "|:--|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for name, problem in problems.items():
        last = None
        for rung in RUNGS[:upto]:
            found = rows(doc, rung.name, problem)
            if not found:
                continue
            row = found[0]
            time = row["ms"]["median"]
            faster = f"{last / time:.2f}" if last else "-"
            error = f"{row['max_error'] / row['budget']:.2f}" if row.get("budget") else "-"
            bold = "**" if rung.number == upto else ""
            lines.append(
                f"| {name} | {bold}{rung.number:02d} {rung.title}{bold} | {time:.3g} | {row['tflops']:.3g} | {faster} "
                f"| {plots.size(row['bytes_moved'])} | {plots.size(row['peak_bytes'])} | {error} |"
            )
            last = time
    lines.append(f"\n*{results.caption(doc)}; times are medians.*")
    return Markdown("\n".join(lines))


# ---------------------------------------------------------------- two recorded times that want an explanation


FLOAT32_TFLOPS = 67  # ordinary float32 of an H200 (SXM) by NVIDIA's data sheet: no tensor core


def naive_kernel_bytes(problem):
    """Bytes of one call of rung 01 counted by kernel: ``masked_fill`` copies the scores, then fills the copy in place.

    ``step01_naive.bytes_moved`` counts it as one operation, which loads the scores and stores the result. Here the copy
    is loaded and stored once more, and each head loads the mask, a byte for each pair.
    """
    moved = find(1).bytes_moved(problem)
    pairs = problem.B * problem.Hq * problem.Sq * problem.Sk
    return moved + (pairs * (2 * problem.itemsize + 1) if problem.causal else 0)


def masking(doc, lengths=(1024, 4096, 16384, 32768)):
    """Recorded times of rung 01 with and without the causal mask, beside the ratio of bytes, as a Markdown table."""
    lines = [
        "| problem | dense | causal | ratio of times | ratio of bytes, by operation | ratio of bytes, by kernel |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for length in lengths:
        dense, causal = plain(length), plain(length, True)
        if not (rows(doc, "step01_naive", dense) and rows(doc, "step01_naive", causal)):
            continue
        times = [ms(doc, "step01_naive", problem) for problem in (dense, causal)]
        by_operation, by_kernel = (count(causal) / count(dense) for count in (find(1).bytes_moved, naive_kernel_bytes))
        batch = f"{dense.B} x " if dense.B > 1 else ""
        lines.append(
            f"| {batch}{plots.tokens(length)} tokens | {times[0]:.3g} ms | {times[1]:.3g} ms "
            f"| **{times[1] / times[0]:.1f}** | {by_operation:.1f} | {by_kernel:.1f} |"
        )
    results.wanted(lines[2:], doc, "times of step01_naive with and without a mask")
    lines.append(f"\n*Times {results.caption(doc)}; bytes counted from the algorithm.*")
    return Markdown("\n".join(lines))


class _Products(TorchDispatchMode):
    """Collects the dtypes of the operands of every matrix product under it."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::bmm"):
            self.dtypes |= {x.dtype for x in args[:2]}
        return func(*args, **(kwargs or {}))


def product_dtypes(attention, *inputs):
    """The dtypes that ``attention(*inputs)`` multiplies, as text: what its matrix products got while it ran."""
    with _Products() as seen:
        attention(*inputs)
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in seen.dtypes))


def tiled_causes(doc):
    """Estimated milliseconds of what rung 02 spends on 16k tokens, dense: its float32 products and its bytes.

    The difference between rungs 02 and 03 is one product and a few bytes, so that it gives the time of one product.
    """
    problem, limits = plain(16384), doc["limits"]
    naive, two, three = (ms(doc, find(n).name, problem) for n in (1, 2, 3))
    spared = (find(2).bytes_moved(problem) - find(3).bytes_moved(problem)) / limits["read_tbs"] / 1e9
    product = problem.flops / 2  # of the two that count as useful
    one = two - three - spared
    fast = 3 * product / limits["matmul_tflops"] / 1e9
    return {
        "total": two,
        "naive": naive,
        "products, data sheet": 3 * product / FLOAT32_TFLOPS / 1e9,
        "products, from 02 and 03": 3 * one,
        "float32 TFLOP/s": product / one / 1e9,
        "products, 16 bits": fast,
        "bytes": find(2).bytes_moved(problem) / limits["read_tbs"] / 1e9,
        "bytes of 01": find(1).bytes_moved(problem) / limits["read_tbs"] / 1e9,
        "with 16-bit products": two - 3 * one + fast,
    }


def tiled_costs(doc):
    """What the time of rung 02 consists of, estimated from the record, as Markdown: a table and what follows."""
    c = tiled_causes(doc)
    share = 100 * c["products, from 02 and 03"] / c["total"]
    rest = c["total"] - c["products, from 02 and 03"] - c["bytes"]
    lines = [
        "| part of rung 02's time, 16k tokens, dense | how it is estimated | ms |",
        "|:--|:--|--:|",
        f"| three float32 products | data sheet, {FLOAT32_TFLOPS} TFLOP/s: a lower bound "
        f"| {c['products, data sheet']:.0f} |",
        f"| three float32 products | rung 02 minus rung 03 is one product: {c['float32 TFLOP/s']:.0f} TFLOP/s "
        f"| **{c['products, from 02 and 03']:.0f}** |",
        f"| its bytes | at the reading limit; products hide a part of theirs | **{c['bytes']:.0f}** |",
        f"| the rest | passes over memory that stay below the limit | {rest:.0f} |",
        f"| all | measured | {c['total']:.0f} |",
        "",
        f"So the float32 products take about **{share:.0f} %** of the {c['total']:.0f} ms, and moving bytes takes most "
        f"of the rest. Products of 16-bit operands would take {c['products, 16 bits']:.0f} ms at the tensor cores' "
        f"limit. Rung 02 would then need about {c['with 16-bit products']:.0f} ms, still "
        f"**{c['with 16-bit products'] / c['naive']:.1f} times** the {c['naive']:.1f} ms of rung 01. That is close to "
        f"the ratio of the bytes that the two rungs move, {c['bytes'] / c['bytes of 01']:.1f}.",
        f"\n*Estimated from times and limits {results.caption(doc)}.*",
    ]
    return Markdown("\n".join(lines))


def sixteen_bit():
    """Recorded times of rung 02 with 16-bit products beside rungs 01 and 02, as Markdown; a sentence without them."""
    from .variants import NAME, RECORD

    doc = results.load(RECORD) if (results.FOLDER / f"{RECORD}.json").exists() else {"rows": []}
    cases = [(n, p) for n, p in list(CASES.items())[:2] if rows(doc, NAME, p)]
    if not cases:
        return Markdown(
            "This variant is not recorded yet: the record of the H200 has no row for it, so that the estimate above is "
            "all that this page can show."
        )
    lines = ["| problem | 01 Naive | 02 Tiled | 02 with 16-bit products |", "|:--|--:|--:|--:|"]
    said = []
    for name, problem in cases:
        naive, tiled, variant = (ms(doc, impl, problem) for impl in ("step01_naive", "step02_tiled", NAME))
        lines.append(f"| {name} | {naive:.3g} ms | {tiled:.3g} ms | **{variant:.3g} ms** |")
        said.append(
            f"On {name}, the float32 products cost {tiled - variant:.0f} of {tiled:.0f} ms; with 16-bit products the "
            f"tiled rung takes {variant / naive:.1f} times as long as rung 01."
        )
    lines += ["", " ".join(said), f"\n*{results.caption(doc)}; times are medians.*"]
    return Markdown("\n".join(lines))


def speed_bars(doc, upto, problem, *, with_peers=False, note="", title=""):
    """Recorded times of rungs 1 to ``upto`` (and the peers) on one problem, as a Picture."""
    entries = [
        (f"{r.number:02d} {r.title}", ms(doc, r.name, problem), plots.RUNG_COLOURS[r.number])
        for r in RUNGS[:upto] if rows(doc, r.name, problem)
    ]  # fmt: skip
    highlight = results.wanted(entries, doc, f"times on {problem.label()}")[-1][0]
    if with_peers:
        for row in rows(doc, None, problem):
            if not row["impl"].startswith("step"):
                entries.append((implementation_title(row["impl"]), row["ms"]["median"], plots.PALE))
    spread = max(v for _, v, _ in entries) / min(v for _, v, _ in entries)
    figure = plots.bars(
        entries, unit="milliseconds", log=spread > 8, title=title or problem.label(), highlight=highlight,
        note=f"{note} Medians, {results.caption(doc)}.",
    )  # fmt: skip
    return plots.Picture(figure, f"bars: milliseconds of {len(entries)} implementations on {problem.label()}")


def against_peers(doc, impl, problems):
    """Recorded TFLOP/s of ``impl`` and of every peer on some problems, as a Markdown table."""
    peers = list(
        dict.fromkeys(row["impl"] for row in doc["rows"] if not row["impl"].startswith("step") and "ms" in row)
    )
    lines = [
        f"| problem | **{implementation_title(impl)}** | {' | '.join(map(implementation_title, peers))} |",
        "|:--|" + "--:|" * (1 + len(peers)),
    ]
    for name, problem in problems.items():
        speeds = {row["impl"]: row["tflops"] for row in rows(doc, None, problem)}
        cells = [f"{speeds[p]:.0f}" if p in speeds else "-" for p in peers]
        ours = f"**{speeds[impl]:.0f}**" if impl in speeds else "-"
        lines.append(f"| {name} | {ours} | {' | '.join(cells)} |")
    lines.append(f"\n*TFLOP/s, {results.caption(doc)}.*")
    return Markdown("\n".join(lines))


def memory_picture(upto, lengths=(128, 256, 512, 1024, 2048)):
    """Peak bytes of the PyTorch rungs 1 to ``upto`` against S, measured here and now on the CPU, as a Picture."""
    tiles = dict(tile_q=256, tile_k=256)
    curves = memory_curves(upto, lengths, **tiles)
    growth = {number: peaks[-1] / peaks[-2] for _, _, peaks, number in curves}
    note = (
        f"Measured on this CPU: 4 heads of 32 in float16, tiles of {tiles['tile_q']} x {tiles['tile_k']}. Look at the "
        f"slopes: "
        "S x S multiplies by 4 whenever S doubles; a tile does not grow at all, and an output doubles."
    )
    factors = ", ".join(f"{find(n).name} x {factor:.1f}" for n, factor in growth.items())
    return plots.Picture(
        plots.memory_curves(curves, note=note),
        f"peak memory when S doubles from {lengths[-2]} to {lengths[-1]}: {factors}",
    )


def memory_curves(upto, lengths, **tiles):
    """(label, [S], [peak bytes], number) of each PyTorch rung up to ``upto``, measured on the CPU."""
    curves = []
    for rung in [r for r in RUNGS[:upto] if not r.needs_triton]:
        options, peaks = tiles if rung.number > 1 else {}, []
        for s in lengths:
            inputs = AttentionProblem(Hq=4, Hkv=4, Sq=s, Sk=s, D=32, Dv=32).make()
            peaks.append(
                memory.peak_bytes(lambda q, k, v, run=rung.attention, options=options: run(q, k, v, **options), *inputs)
            )
        curves.append((f"{rung.number:02d} {rung.title}", list(lengths), peaks, rung.number))
    return curves


def recorded_memory(doc, upto):
    """Recorded peak bytes of rungs 1 to ``upto`` against S, one dense sequence of 16 heads of 128, as a Picture."""
    curves = []
    for rung in RUNGS[:upto]:
        found = {
            row["case"]["Sq"]: row["peak_bytes"]
            for row in results.select(doc, rung.name, B=1, causal=False, input=None, **SHAPES["plain"])
            if "peak_bytes" in row
        }
        lengths = sorted(found)
        curves.append((f"{rung.number:02d} {rung.title}", lengths, [found[s] for s in lengths], rung.number))
    longest = [max(results.wanted(c[1], doc, f"peak memory of {c[0]}")) for c in curves]
    longest = longest[0], max(longest)
    note = f"One sequence, 16 heads of 128, bf16; {results.caption(doc)}."
    if longest[0] < longest[1]:
        note += (
            f" Look at where the first line ends: beyond {plots.tokens(longest[0])} tokens step 01 ran out of memory."
        )
    return plots.Picture(
        plots.memory_curves(curves, note=note), f"recorded peak memory of {len(curves)} rungs"
    )


def compared(old, new, pairs):
    """A Markdown table of lines that do the same in two rungs.

    Raises:
        ValueError: a line is not in the source of its function, so that the table cannot go stale.
    """
    from ladder.chapters.source import source_of, where

    sources = source_of(old), source_of(new)
    lines = [f"| {where(old)} | {where(new)} | |", "|:--|:--|:--|"]
    for left, right, what in pairs:
        for line, source, function in ((left, sources[0], old), (right, sources[1], new)):
            if line and line not in source:
                raise ValueError(f"line {line!r} is not in {where(function)}")
        cells = (f"`{line}`".replace("|", "\\|") if line else "" for line in (left, right))
        lines.append(f"| {' | '.join(cells)} | {what} |")
    return Markdown("\n".join(lines))


def lesson_compiles():
    """What the compiler makes of step 05 in a few settings, as a Markdown table of verdicts; needs no GPU.

    Runs in a process of its own, because this one may have Triton's interpreter on.
    """
    command = [sys.executable, "-m", "ladder.lab.compile.sweep", "--lesson"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = ["| processor | elements | tile, warps | products run on | spills |", "|:--|:--|:--|:--|:--|"]
    for row in map(json.loads, done.stdout.splitlines()):
        case = row["case"]
        unit = (
            "wgmma (`HGMMA`)"
            if row["hgmma"]
            else "older tensor cores (`HMMA`)"
            if row["hmma"]
            else "ordinary multipliers (`FFMA`)"
        )
        spills = "**yes**" if row["spill_loads"] + row["spill_stores"] + row["local"] else "no"
        precision = f", {case['precision']}" if case["dtype"] == "float32" else ""
        tile = f"{case['BLOCK_M']} x {case['BLOCK_N']}, {case['num_warps']}"
        lines.append(f"| {case['target']} | {case['dtype']}{precision} | {tile} | {unit} | {spills} |")
    return Markdown("\n".join(lines))
