"""Recorded results as a README shows them: Markdown tables and the headline figure, made from the JSON files.

``python -m ladder.chapters.readme`` rewrites everything between ``<!-- name -->`` and ``<!-- /name -->`` in README.md
and the figures beside the results. ``--check`` only says whether they are up to date, and exits with 1 when they are
not, and with 2 when it cannot tell: a marker without its partner, a record or a figure that is missing or damaged. A
figure carries the digest of the record that it was drawn from; that the drawing code has changed since is not noticed.
"""

import argparse
import hashlib
import json
import re
import sys
import zlib
from pathlib import Path

from ladder import rungs
from ladder.lab import results
from ladder.lab.cells import LENGTHS, OURS, by_cell, faster, geometric_mean
from ladder.lab.names import in_order, title
from ladder.lab.results import select

ROOT = Path(__file__).resolve().parents[2]
LAST_RUNG = "step08_dflash2"
HEADLINE = dict(mode="prefill", Hq=16, Hkv=16, D=128, Dv=128, Sq=16384, B=1, dtype="bfloat16")

# Okabe-Ito colours: told apart by colour-blind readers and in print.
RUNG_COLOUR, PEER_COLOUR, TEXT_COLOUR = "#0072B2", "#B0B0B0", "#333333"
LINE_COLOURS = ("#D55E00", "#E69F00", "#009E73", "#56B4E9", "#0072B2", "#CC79A7", "#F0E442", "#000000")


def ladder_table(doc):
    """The headline table: one row an implementation, dense and causal, speed, traffic, memory, share of the limit."""
    dense, causal = (in_order(select(doc, causal=c, **HEADLINE)) for c in (False, True))
    by_impl = {row["impl"]: row for row in causal}
    shown = []
    lines = [
        "| | dense | causal | of the matrix-product limit | moved | peak memory | max error / budget |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in dense:
        other = by_impl.get(row["impl"], {})
        if "ms" not in row:
            continue
        name = title(row["impl"])
        shown += [row] + [other] * ("ms" in other)
        lines.append(
            f"| {'**' + name + '**' if row['impl'].startswith('step') else name} "
            f"| {_speed(row)} | {_speed(other)} | {row['tflops'] / results.limit(doc, row, 'matmul_tflops'):.0%} "
            f"| {_bytes(row.get('bytes_moved'))} | {_bytes(row.get('peak_bytes'))} "
            f"| {row['max_error']:.1e} / {row['budget']:.1e} |"
        )
    later = "" if by_impl.get(LAST_RUNG) else _row_of_its_own_record(lines)
    limits = doc["limits"]
    lines += [
        "",
        f"16 heads of 128, 16,384 tokens, bf16; {results.caption(doc, shown)}, torch {doc['machine']['torch']}, Triton "
        f"{doc['machine']['triton']}, {results.sources(doc, shown)}. Limits measured in the same run: "
        f"{limits['matmul_tflops']:.0f} TFLOP/s matrix product, {limits['read_tbs']:.2f} TB/s "
        f"read.{results.limits_note(doc, shown)} "
        "Moved: bytes that the kernels load and store, counted from the algorithm. "
        f"Peak memory: on top of the inputs.{later}"
        + ("" if doc.get("complete", True) else f" The run was cut short: {len(doc['not_run'])} problems are missing."),
    ]
    return "\n".join(lines)


def _row_of_its_own_record(lines):
    """Put the last rung behind the others in a table that was recorded
    before it; says in a sentence where its numbers come from."""
    from ladder.lab.problem import AttentionProblem

    doc = results.load(LAST_RUNG)
    found = [select(doc, LAST_RUNG, causal=c, **HEADLINE) for c in (False, True)]
    if not all(found):
        return ""
    [dense, *_], [causal, *_] = found
    moved = rungs.find(LAST_RUNG).bytes_moved(
        AttentionProblem(**{k: v for k, v in dense["case"].items() if k != "mode"})
    )
    limit = results.limit(doc, dense, "matmul_tflops")
    at = max(n for n, line in enumerate(lines) if line.startswith("| **")) + 1
    lines.insert(
        at, f"| **{title(LAST_RUNG)}** | {_speed(dense)} | {_speed(causal)} | {dense['tflops'] / limit:.0%} | "
            f"{_bytes(moved)} | "
        f"| {dense['max_error']:.1e} / {dense['budget']:.1e} |",
    )  # fmt: skip
    return f" {title(LAST_RUNG)} is from a record of its own, of another day and commit ({results.origin(doc, dense)['commit']}), whose limit was {limit:.0f} TFLOP/s."  # noqa: E501


def decode_table(doc):
    """Decode over a paged cache: TB/s of K and V read, one column an implementation."""
    columns = ("step06_paged", "step07_dflash1", "sdpa_flash", "sdpa_cudnn")
    rows = [r for r in doc["rows"] if r["case"].get("mode") == "decode" and r["impl"] in columns and "tbs" in r]
    wanted = dict(Hq=32, Hkv=8, D=128, Sq=1, page_size=64)
    table, read = {}, doc["limits"]["read_tbs"]
    for row in rows:
        case = row["case"]
        if all(case.get(k) == v for k, v in wanted.items()) and "lengths" not in case:
            table.setdefault((case["B"], case["Sk"]), {})[row["impl"]] = row
    table = {key: found for key, found in sorted(table.items()) if set(found) == set(columns)}
    lines = [
        "| sequences x context | K + V | "
        + " | ".join(f"**{title(c)}**" if c.startswith("step") else title(c) for c in columns)
        + " |",
        "|---|--:|" + "--:|" * len(columns),
    ]
    for (batch, context), found in table.items():
        kv = 2 * batch * context * wanted["Hkv"] * wanted["D"] * 2
        cells = [
            f"{found[c]['tbs']:.2f} ({found[c]['tbs'] / results.limit(doc, found[c], 'read_tbs'):.0%})" for c in columns
        ]
        lines.append(f"| {batch} x {context // 1024}k | {_bytes(kv)} | " + " | ".join(cells) + " |")
    shown = [row for found in table.values() for row in found.values()]
    lines += [
        "",
        f"TB/s of K and V read, and the share of the {read:.2f} TB/s that reading reaches here; 32 query and 8 KV "
        f"heads of 128, "
        f"one new token, bf16, pages of 64 for the rungs, contiguous K and V for the peers, replayed from CUDA graphs. "
        f"The best "
        "kernels read a per cent or two faster than the reduction that measures the limit; "
        f"{results.caption(doc, shown)}, {results.sources(doc, shown)}.{results.limits_note(doc, shown)}",
    ]
    return "\n".join(lines)


def scheduler_table(doc):
    """What dspark_mini reaches beside DeepSeek's greedy EPLB and a plan without copies."""
    loads, shown = ("Zipf 1.2", "Zipf 0.8", "R1-like (generated)"), []
    lines = [
        "| load | GPUs / slots | no copies | replicate and pack (EPLB) | **dspark_mini** | bound |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for load in loads:
        found = {}
        for row in doc["rows"]:
            case = row["case"]
            if row["target_no"] == 1 and case.get("load") == load and row["metric"] == "balancedness, median":
                found.setdefault((case["gpus"], case["slots"]), {})[row["impl"]] = row["value"]
                shown.append(row)
        for (gpus, slots), values in found.items():
            if {"none", "replicate_and_pack", "place", "bound"} <= set(values):
                lines.append(
                    f"| {load} | {gpus} / {slots} | {values['none']:.3f} | {values['replicate_and_pack']:.3f} | "
                    f"{values['place']:.4f} | {values['bound']:.4f} |"
                )
    lines += [
        "",
        "Balancedness: mean GPU load / largest GPU load, median over layers, 256 experts; 1 is perfect; "
        f"{results.caption(doc, shown)}, {results.sources(doc, shown)}.",
    ]
    return "\n".join(lines)


def _timed(doc, *modes):
    return [row for row in doc["rows"] if row["case"].get("mode") in modes and "ms" in row]


def dflash2_table(doc):
    """Step 08 beside its peers: prefill in TFLOP/s and as a multiple
    of FlashAttention-3, decode in TB/s against the best peer."""
    lengths = [f"{n // 1024}k" for n in LENGTHS]
    prefill, ratios = {}, []
    for impls in by_cell(doc["rows"], "prefill"):
        if OURS in impls:
            _, size, mask, length, layout = impls[OURS]["cell"].split(" ", 4)
            ratio = faster(impls, "fa3")
            ratios += [ratio] if ratio else []
            prefill.setdefault(f"{size} {mask}, {layout}", {})[length] = f"{impls[OURS]['tflops']:.0f}" + (
                f" ({ratio:.2f})" if ratio else ""
            )
    lines = ["| prefill | " + " | ".join(lengths) + " |", "|---|" + "--:|" * len(lengths)]
    lines += [f"| {name} | " + " | ".join(cells.get(n, "") for n in lengths) + " |" for name, cells in prefill.items()]
    lines += [
        "",
        "TFLOP/s of step 08 and, in brackets, its speed over FlashAttention-3's"
        + (f": geometric mean {geometric_mean(ratios):.2f} over {len(ratios)} cells, least {min(ratios):.2f}." if ratios else "."),  # noqa: E501
        "",
        "| decode, sequences x context | K + V | step 08 | best peer | over it | step 07 |",
        "|---|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for mode in ("decode", "mla_decode"):
        for impls in by_cell(doc["rows"], mode):
            if (ours := impls.get(OURS)) is None:
                continue
            peers = {name: r for name in impls if not name.startswith("step") and (r := faster(impls, name))}
            best = min(peers, key=peers.get) if peers else None
            peer = f"{title(best)} {impls[best]['tbs']:.2f} | {peers[best]:.2f}" if best else "- | -"
            old = f"{impls['step07_dflash1']['tbs']:.2f}" if "step07_dflash1" in impls else "-"
            name = ours["cell"].removeprefix("decode ").replace("mla_decode", "MLA,")
            lines.append(
                f"| {name} | {_bytes(ours['tbs'] * ours['ms']['median'] * 1e9)} | {ours['tbs']:.2f} | {peer} | {old} |"
            )
    prefill, decode = _timed(doc, "prefill"), _timed(doc, "decode", "mla_decode")
    lines += [
        "",
        f"TB/s of live K and V; reading reaches {doc['limits']['read_tbs']:.2f} TB/s here. Pages of 64 for the rungs, "
        f"contiguous K and V for the "
        f"peers, CUDA graphs. All implementations of a cell in turn in one run, bf16; "
        f"{results.caption(doc, prefill + decode)}, torch {doc['machine']['torch']}, Triton "
        f"{doc['machine']['triton']}. Prefill: {results.sources(doc, prefill)}. Decode: {results.sources(doc, decode)}."
        + ("" if doc.get("complete", True) else f" The run was cut short: {len(doc['not_run'])} cells are missing."),
    ]
    return "\n".join(lines)


def engine_table(doc):
    """The served model beside transformers, and the article's ratios beside ours: chapter 11's tables."""
    from .ch11_end_to_end import tables as end_to_end  # which takes its titles from here

    rows = end_to_end.served_rows(doc)
    said = f"\n\nBoth tables: {results.sources(doc, rows)}." if rows else ""
    return f"{end_to_end.backends_table(doc).data}\n\n{end_to_end.results_table(doc).data}{said}"


def multi_gpu_table(doc):
    """Two GPUs: tensor parallel serving and the four ways, beside the
    simulator's predictions, as chapters 10 and 11 show them."""
    from .ch10_scheduling import tables as multi_gpu

    rows = multi_gpu.rows(doc, "engine") + multi_gpu.rows(doc, "four_way")
    said = f"\n\nBoth tables: {results.sources(doc, rows)}." if rows else ""
    return f"{multi_gpu.engine_table(doc).data}\n\n{multi_gpu.four_way_table(doc).data}{said}"


def climb_figure(doc):
    """Time of every implementation on the largest case they share, and peak memory against sequence length.

    Args:
        doc: a results document of schema 1, from a recorded file or from a climb just made.

    Returns:
        A matplotlib Figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    drawn = _time_bars(speed, doc) + _memory_lines(memory, doc)
    figure.supxlabel(results.caption(doc, drawn), fontsize=9, color=TEXT_COLOUR, x=0.995, ha="right")
    return figure


def _time_bars(axes, doc):
    measured = [r for r in doc["rows"] if "ms" in r and not r.get("interpreted")]
    cases = {_key(r["case"]): r["case"] for r in measured}
    if not cases:
        axes.set_title("nothing was timed")
        return []
    count = {key: sum(_key(r["case"]) == key for r in measured) for key in cases}
    best = max(cases, key=lambda key: (count[key], cases[key]["Sq"] == 16384, cases[key]["Sq"] * cases[key]["B"]))
    rows, case = in_order(r for r in measured if _key(r["case"]) == best), cases[best]
    times = [r["ms"]["median"] for r in rows]
    colours = [RUNG_COLOUR if r["impl"].startswith("step") else PEER_COLOUR for r in rows]
    axes.hlines(range(len(rows)), min(times) / 3, times, color=colours, linewidth=1)  # dots: a log axis has no zero
    axes.scatter(times, range(len(rows)), color=colours, s=70, zorder=3)
    axes.set_yticks(range(len(rows)), [title(r["impl"]) for r in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(min(times) / 3, max(times) * 12)
    for i, row in enumerate(rows):
        rate = f"{row['tflops']:.0f} TFLOP/s" if row["tflops"] >= 1 else f"{row['tflops'] * 1e3:.0f} GFLOP/s"
        axes.text(times[i] * 1.25, i, f"{times[i]:.3g} ms · {rate}", va="center", fontsize=9, color=TEXT_COLOUR)
    mask = "causal" if case["causal"] else "dense"
    axes.set_xlabel("time of one call, ms (log scale; shorter is better)")
    axes.set_title(
        f"{case['Hq']} heads of {case['D']}, {case['Sq']:,} tokens, {mask}, {case['dtype']}", loc="left", fontsize=11
    )
    _plain(axes)
    return rows


def _memory_lines(axes, doc):
    """Peak bytes of a dense call on one sequence, by length; where one
    length was measured, bars. Gives the rows it shows."""
    rungs = in_order(r for r in doc["rows"] if r["impl"].startswith("step") and "peak_bytes" in r)
    series, shown = {}, {}
    for row in rungs:
        case = row["case"]
        if (
            case["B"] == 1
            and not case["causal"]
            and "input" not in case
            and case["Hq"] == case["Hkv"]
            and case["D"] == case["Dv"]
        ):
            series.setdefault(row["impl"], {})[case["Sq"]] = row["peak_bytes"]
            shown.setdefault(row["impl"], []).append(row)
    series = {impl: dict(sorted(points.items())) for impl, points in series.items() if len(points) >= 3}
    if not series:
        return _memory_bars(axes, rungs)
    for number, (impls, points) in enumerate(_alike(series)):
        lengths, peaks = list(points), [b / 1e9 for b in points.values()]
        label = title(impls[0]) if len(impls) == 1 else ", ".join(title(i)[:2] for i in impls)
        axes.plot(lengths, peaks, marker="o", markersize=5, linewidth=2, color=LINE_COLOURS[number], label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({length for points in series.values() for length in points})
    axes.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("sequence length, tokens")
    axes.set_ylabel("peak memory on top of the inputs, GB")
    axes.set_title("memory: S² for the first rung, S for the others", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9)
    _plain(axes)
    return [row for impl in series for row in shown[impl]]


def _alike(series):
    """Merge neighbours whose curves lie on each other: [([names], {length: bytes})]."""
    merged = []
    for impl, points in series.items():
        last = merged[-1][1] if merged else {}
        if points.keys() == last.keys() and all(abs(points[n] / last[n] - 1) < 0.1 for n in points):
            merged[-1][0].append(impl)
        else:
            merged.append(([impl], points))
    return merged


def _memory_bars(axes, rows):
    if not rows:
        axes.set_title("no memory was measured")
        return []
    last = (
        _key(rows[-1]["case"])
        if all(_key(r["case"]) == _key(rows[-1]["case"]) for r in rows)
        else _key(rows[0]["case"])
    )
    rows = [r for r in rows if _key(r["case"]) == last]
    axes.barh(range(len(rows)), [max(r["peak_bytes"], 1) / 1e6 for r in rows], color=RUNG_COLOUR, height=0.72)
    axes.set_yticks(range(len(rows)), [title(r["impl"]) for r in rows])
    axes.invert_yaxis()
    axes.set_xlabel("peak memory on top of the inputs, MB")
    axes.set_title("memory", loc="left", fontsize=11)
    _plain(axes)
    return rows


def _plain(axes):
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def _key(case):
    return tuple(sorted((k, str(v)) for k, v in case.items()))


def _speed(row):
    if "ms" not in row:
        return "-"
    ms = row["ms"]["median"]
    return f"{ms:.3g} ms, {row['tflops']:.0f} TFLOP/s" if ms < 100 else f"{ms:.0f} ms, {row['tflops']:.0f} TFLOP/s"


def _bytes(count):
    if count is None:
        return ""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


SECTIONS = {
    "ladder-table": ("ladder", ladder_table),
    "decode-table": ("step07_dflash1", decode_table),
    "scheduler-table": ("dspark", scheduler_table),
    "dflash2-table": ("step08_dflash2", dflash2_table),
    "engine-table": ("engine", engine_table),
    "multi-gpu-table": ("multi_gpu", multi_gpu_table),
}
OPTIONAL = {"dflash2-table", "engine-table", "multi-gpu-table"}  # a README may hold these before they are recorded
NOT_RECORDED = "*Not recorded yet.*"
FIGURES = {"ladder.png": ("ladder", climb_figure)}
DIGEST = "Drawn from"  # the name of the digest in a figure's metadata
MARKER = re.compile(r"<!--\s*(/?)([\w-]+)\s*-->")


def render(text):
    """README text with every section made anew from its recorded file.

    Raises:
        ValueError: a marker is unknown, or has no partner, or a record that is shown is missing; says which.
    """
    pieces, end = [], 0
    for name, start, stop in _sections(text):
        pieces += [text[end:start], f"\n{_section(name, text[start:stop].strip())}\n"]
        end = stop
    return "".join(pieces) + text[end:]


def _sections(text):
    """(name, start, stop) of what stands between each pair of markers."""
    found, opened = [], None
    for marker in MARKER.finditer(text):
        closes, name = marker[1], marker[2]
        if name not in SECTIONS:
            raise ValueError(f"README.md: {marker[0]} marks no table; want one of {', '.join(SECTIONS)}")
        if closes and (opened is None or opened[0] != name):
            raise ValueError(
                f"README.md: {marker[0]} closes a table that was not opened; want <!-- {name} --> before it"
            )
        if not closes and opened:
            raise ValueError(
                f"README.md: <!-- {opened[0]} --> is not closed before {marker[0]}; want <!-- /{opened[0]} -->"
            )
        if closes:
            found.append((*opened, marker.start()))
            opened = None
        elif name in [section[0] for section in found]:
            raise ValueError(f"README.md: {marker[0]} stands there twice")
        else:
            opened = name, marker.end()
    if opened:
        raise ValueError(f"README.md: <!-- {opened[0]} --> is never closed; want <!-- /{opened[0]} -->")
    return found


def _section(name, before):
    """What stands between the markers of a section; ``before`` stood there."""
    source, make = SECTIONS[name]
    path = results.FOLDER / f"{source}.json"
    if not path.exists() and name in OPTIONAL and before in ("", NOT_RECORDED):
        return NOT_RECORDED
    return _made(source, make, f"<!-- {name} --> of README.md")


def _made(source, make, what):
    """``make`` of a recorded file; ValueError names the file that is missing or lacks what ``what`` shows."""
    path = results.FOLDER / f"{source}.json"
    if not path.exists():
        raise ValueError(f"{path} is missing, which {what} shows; restore it or record it anew")
    doc = results.read(path)
    try:
        return make(doc)
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise ValueError(f"{path} lacks something that {what} shows: {type(error).__name__}: {error}") from error


def digest(doc):
    """A fingerprint of a document, which a figure drawn from it carries in its metadata."""
    return hashlib.sha256(json.dumps(doc, sort_keys=True).encode()).hexdigest()


def drawn_from(path):
    """The digest that a PNG says it was drawn from, None where it says nothing.

    Raises:
        ValueError: the file is missing, is no PNG, or was damaged; says which.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError(f"{path} is no PNG")
    at, said, kind = 8, None, None
    while kind != b"IEND":  # chunks: length, kind, content and the checksum of both
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        body, check = data[at + 8 : at + 8 + size], data[at + 8 + size : at + 12 + size]
        if len(check) < 4 or int.from_bytes(check, "big") != zlib.crc32(kind + body):
            raise ValueError(f"{path} is damaged after {at:,} of {len(data):,} bytes")
        if kind == b"tEXt" and body.startswith(DIGEST.encode() + b"\0"):
            said = body.split(b"\0")[1].decode("latin-1")
        at += 12 + size
    if at != len(data):
        raise ValueError(f"{path} is damaged after {at:,} of {len(data):,} bytes")
    return said


def outdated(before, after):
    """What differs from the recorded results: README.md, figures. ValueError names a figure that cannot be read."""
    names = ["README.md"] if before != after else []
    for name, (source, _) in FIGURES.items():
        path = results.FOLDER / name
        said = drawn_from(path)
        if said != _made(source, digest, str(path)):
            names.append(str(path))
    return names


@results.names_what_it_cannot_write
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m ladder.chapters.readme", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 when README.md or a figure is out of date"
    )
    args = parser.parse_args(argv)
    readme = ROOT / "README.md"
    if not readme.is_file() or not results.FOLDER.is_dir():
        lacks = readme if not readme.is_file() else results.FOLDER
        print(
            f"{lacks} is missing: the report is made in a checkout of the repository, not in an installed package",
            file=sys.stderr,
        )
        return 2
    try:
        before = readme.read_text(encoding="utf-8")
        marked = [name for name, _, _ in _sections(before)]
        recorded = [
            name
            for name, (source, _) in SECTIONS.items()
            if name not in OPTIONAL or (results.FOLDER / f"{source}.json").exists()
        ]
        if lost := [name for name in recorded if name not in marked]:
            raise ValueError(f"README.md has no <!-- {lost[0]} -->, where its table belongs")
        after = render(before)
        if args.check:
            names = outdated(before, after)
            for name in names:
                print(
                    f"{name} differs from the recorded results; run python -m ladder.chapters.readme", file=sys.stderr
                )
            return int(bool(names))
        figures = {
            name: (_made(source, make, name), _made(source, digest, name)) for name, (source, make) in FIGURES.items()
        }
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    results.write_text(readme, after)
    for name, (figure, data) in figures.items():
        results.write_figure(results.FOLDER / name, figure, dpi=130, metadata={DIGEST: data})
    return 0


if __name__ == "__main__":
    sys.exit(main())
