"""Figures of the chapters. Each function returns a matplotlib Figure; ``Picture`` shows one in a notebook.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; whatever colour says, a hatch, a marker or a
word says too, so that a black-and-white print loses nothing.
"""

import functools
import io
import math
import textwrap

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

BLUE, ORANGE, RED, GREEN, SKY, PINK = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#56B4E9", "#CC79A7"
INK, GREY, PALE, PAPER = "#222222", "#767676", "#E4E4E4", "#FFFFFF"
RUNG_COLOURS = {1: GREY, 2: ORANGE, 3: GREEN, 4: PINK, 5: BLUE, 6: SKY, 7: RED, 8: INK}
RUNG_MARKERS = {1: "s", 2: "D", 3: "^", 4: "v", 5: "o", 6: "P", 7: "X", 8: "*"}

WIDTH = 7.6  # inches of a full-width figure
SHOWN_DPI, DRAWN_DPI = 100, 150  # drawn finer than shown: sharp on good screens and on paper
STYLE = {
    "font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.edgecolor": GREY, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "grid.color": PALE,
    "legend.frameon": False, "legend.fontsize": 9, "figure.facecolor": PAPER, "hatch.linewidth": 0.6,
}  # fmt: skip


def styled(function):
    """Run a drawing function under the house style."""

    @functools.wraps(function)
    def inside(*args, **kwargs):
        with rc_context(STYLE):
            return function(*args, **kwargs)

    return inside


class Picture:
    """A figure as a notebook shows it: PNG, and one line of text for whoever cannot see it."""

    def __init__(self, figure, text):
        self.figure, self.text = figure, text

    def __repr__(self):
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None):
        width = round(self.figure.get_figwidth() * SHOWN_DPI)
        return {"image/png": png(self.figure), "text/plain": self.text}, {"image/png": {"width": width}}


def png(figure):
    """The figure as PNG bytes, the same bytes for the same figure."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    with rc_context(STYLE):
        figure.savefig(buffer, format="png", dpi=DRAWN_DPI, metadata={"Software": None})
    return buffer.getvalue()


def canvas(height=3.2, columns=1, rows=1, **options):
    """(figure, axes) in the house style; ``options`` go to ``Figure.subplots``."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.subplots(rows, columns, **options)


def caption(figure, text):
    """Write what to look at under the figure."""
    lines = "\n".join(textwrap.fill(line, 108) for line in text.splitlines())
    figure.supxlabel(lines, x=0.01, ha="left", fontsize=9, color=INK)
    return figure


def size(num_bytes):
    """Bytes as a reader says them: 8.59 GB, 512 kB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} B"


def tokens(n):
    """A length as a reader says it: 16384 is 16k."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


# ---------------------------------------------------------------- roofline, speed, memory


@styled
def roofline(limits, points, *, lines=(), reach=None, title="Roofline", note=""):
    """The limits of a machine and what each implementation reached on one problem.

    Args:
        limits: {"matmul_tflops", "read_tbs"}.
        points: (label, FLOPs per byte, TFLOP/s, rung number) each; the newest last, drawn larger.
        lines: (label, TFLOP/s) of peers, drawn as dotted levels.
        reach: {rung number: FLOPs per byte if caches served every repeated load}; an arrow leads there.
    """
    peak, rate = limits["matmul_tflops"], limits["read_tbs"]
    figure, axes = canvas(4.3)
    low = min([1.0, peak / rate / 30] + [x / 2 for _, x, _, _ in points])
    high = max([4 * peak / rate] + [3 * x for _, x, _, _ in points])
    floor = min([rate * low / 2] + [y / 3 for _, _, y, _ in points])
    x = np.geomspace(low, high, 200)
    axes.plot(x, np.minimum(peak, rate * x), color=INK, lw=1.8)
    axes.fill_between(x, np.minimum(peak, rate * x), floor, color=PALE, alpha=0.45, lw=0)
    axes.text(high, peak * 1.12, f"matrix product {peak:.3g} TFLOP/s", ha="right", fontsize=9)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(floor, peak * 2.4))
    axes.set_xlabel("FLOPs per byte that the kernels move")
    axes.set_ylabel("TFLOP/s")
    anchor = low * 1.35
    axes.annotate(
        f"read {rate:.3g} TB/s", (anchor, rate * anchor), xytext=(0, 7), textcoords="offset points", fontsize=9,
        rotation=_slope(axes, figure), rotation_mode="anchor",
    )  # fmt: skip
    below, place = 0.0, 0
    for label, level in sorted(lines, key=lambda line: line[1]):
        axes.axhline(level, color=GREY, lw=1, ls=":")
        # each label on its own line; those of close levels side by side
        place = place + 1 if level < 1.4 * below else 0
        below = level
        axes.text(
            low * 1.1 * (high / low) ** (0.2 * place), level, f"{label} {level:.3g}", fontsize=8.5, color=GREY,
            va="center",
            bbox=dict(fc="white", ec="none", pad=0.8),
        )  # fmt: skip
    for _, intensity, speed, number in points:
        if number in (reach or {}):
            end = min(reach[number], high * 0.97)
            arrow = dict(arrowstyle="-|>", color=RUNG_COLOURS[number], lw=2)
            axes.annotate("", (end, speed), (intensity, speed), arrowprops=arrow)
    for i, (label, intensity, speed, number) in enumerate(points):
        newest = i == len(points) - 1
        axes.plot(
            intensity, speed, RUNG_MARKERS[number], color=RUNG_COLOURS[number], ms=11 if newest else 8,
            mec=INK, mew=1.2 if newest else 0.6, label=f"{label}: {speed:.3g} TFLOP/s",
        )  # fmt: skip
        if i:
            axes.annotate(
                "", (intensity, speed), points[i - 1][1:3], arrowprops=dict(arrowstyle="->", color=GREY, lw=0.8)
            )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", lw=0.6)
    if points:
        axes.legend(loc="lower right")
    axes.set_title(title)
    return caption(figure, note) if note else figure


def _slope(axes, figure):
    """Degrees of a line of slope 1 in these log-log axes."""
    (x0, x1), (y0, y1) = np.log10(axes.get_xlim()), np.log10(axes.get_ylim())
    return math.degrees(math.atan2((figure.get_figheight() - 1.1) / (y1 - y0), (WIDTH - 1.0) / (x1 - x0)))


@styled
def bars(entries, *, unit, title="", note="", log=False, highlight=None):
    """Horizontal bars with their values. entries: (label, value,
    colour) each; ``highlight`` names the one to look at."""
    figure, axes = canvas(1.15 + 0.34 * len(entries))
    labels, values, colours = zip(*entries)
    position = np.arange(len(entries))[::-1]
    for y, label, value, colour in zip(position, labels, values, colours):
        newest = label == highlight
        axes.barh(
            y, value, color=colour, edgecolor=INK, lw=1.4 if newest else 0.5, hatch="" if newest else None, height=0.68
        )
        axes.text(
            value * (1.06 if log else 1) + (0 if log else max(values) * 0.012),
            y,
            f"{value:.3g}",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(position, labels)
    for text, label in zip(axes.get_yticklabels(), labels):
        text.set_fontweight("bold" if label == highlight else "normal")
    axes.set_xlabel(unit + (" (logarithmic)" if log else ""))
    if log:
        axes.set_xscale("log")
        axes.set_xlim(min(values) / 2.5, max(values) * 2.5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    else:
        axes.set_xlim(0, max(values) * 1.14)
    axes.grid(True, axis="x", lw=0.6)
    axes.set_title(title)
    return caption(figure, note) if note else figure


@styled
def memory_curves(curves, *, title="Peak memory on top of the inputs", note=""):
    """Peak bytes against sequence length. curves: (label, [S], [bytes], rung number) each."""
    figure, axes = canvas(3.7)
    for label, lengths, peaks, number in curves:
        axes.plot(
            lengths, peaks, RUNG_MARKERS[number] + "-", color=RUNG_COLOURS[number], mec=INK, mew=0.5, ms=7, lw=1.6,
            label=label,
        )  # fmt: skip
    ticks = sorted({s for _, lengths, _, _ in curves for s in lengths})
    axes.set(xscale="log", yscale="log", xlabel="sequence length S (tokens)", ylabel="peak bytes")
    axes.set_xticks(ticks, [tokens(s) for s in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: size(v)))
    axes.grid(True, which="major", lw=0.6)
    axes.legend(loc="upper left")
    axes.set_title(title)
    return caption(figure, note) if note else figure


@styled
def traffic(operations, *, title, note=""):
    """Bytes that each operation of a call loads and stores. operations: (name, loaded, stored) in order."""
    figure, axes = canvas(1.25 + 0.34 * len(operations))
    unit, name = next(
        ((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if max(a + b for _, a, b in operations) >= u)
    )
    position = np.arange(len(operations))[::-1]
    loaded, stored = (np.array([op[i] / unit for op in operations]) for i in (1, 2))
    axes.barh(position, loaded, color=SKY, edgecolor=INK, lw=0.5, height=0.68, label="loaded")
    axes.barh(
        position, stored, left=loaded, color=ORANGE, edgecolor=INK, lw=0.5, height=0.68, hatch="///", label="stored"
    )
    for y, a, b in zip(position, loaded, stored):
        axes.text(a + b + max(loaded + stored) * 0.012, y, f"{a + b:.3g}", va="center", fontsize=9)
    axes.set_yticks(position, [op[0] for op in operations])
    axes.set(xlabel=name, xlim=(0, max(loaded + stored) * 1.12))
    axes.legend(loc="lower right")
    axes.grid(True, axis="x", lw=0.6)
    axes.set_title(title)
    return caption(figure, note) if note else figure


# ---------------------------------------------------------------- tiles and masks

KINDS = {"whole": dict(facecolor=SKY), "cut": dict(facecolor=ORANGE, hatch="///"), "skipped": dict(facecolor=PAPER)}


def tile_kind(q0, q1, k0, k1, offset, causal):
    """What rows q0..q1 see of keys k0..k1: "whole", "cut" or
    "skipped"; row i sees keys up to i + offset when causal."""
    if not causal or k1 - 1 <= q0 + offset:
        return "whole"
    return "cut" if k0 <= q1 - 1 + offset else "skipped"


def tile_kinds(seqlen_q, seqlen_k, tile_q, tile_k, causal):
    """{(q0, k0): kind} over all tiles of one head."""
    return {
        (q0, k0): tile_kind(q0, min(q0 + tile_q, seqlen_q), k0, min(k0 + tile_k, seqlen_k), seqlen_k - seqlen_q, causal)
        for q0 in range(0, seqlen_q, tile_q)
        for k0 in range(0, seqlen_k, tile_k)
    }


def tile_map(axes, seqlen_q, seqlen_k, tile_q, tile_k, causal):
    """Draw which tiles of one head are whole, cut by the mask, skipped; return the counts of each."""
    kinds = tile_kinds(seqlen_q, seqlen_k, tile_q, tile_k, causal)
    for (q0, k0), kind in kinds.items():
        size_ = min(tile_k, seqlen_k - k0), min(tile_q, seqlen_q - q0)
        axes.add_patch(Rectangle((k0, q0), *size_, edgecolor=GREY, lw=0.7, **KINDS[kind]))
    if causal:
        _diagonal(axes, seqlen_q, seqlen_k)
    _matrix_axes(axes, seqlen_q, seqlen_k)
    return {kind: sum(k == kind for k in kinds.values()) for kind in KINDS}


def _diagonal(axes, seqlen_q, seqlen_k):
    """The staircase that ends each row's visible keys."""
    ends = np.clip(np.arange(seqlen_q) + 1 + seqlen_k - seqlen_q, 0, seqlen_k)
    axes.step(np.r_[ends, ends[-1:]], np.arange(seqlen_q + 1), where="pre", color=RED, lw=2.2)


def _matrix_axes(axes, seqlen_q, seqlen_k):
    axes.set(xlim=(-0.02 * seqlen_k, seqlen_k * 1.02), ylim=(seqlen_q * 1.02, -0.02 * seqlen_q), aspect="equal")
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.spines[["left", "bottom"]].set_visible(False)


def kinds_legend(axes, **options):
    """A legend for whole, cut and skipped tiles."""
    patches = [Rectangle((0, 0), 1, 1, edgecolor=GREY, lw=0.7, **style) for style in KINDS.values()]
    axes.legend(patches, KINDS, **options)


@styled
def causal_alignment(shapes, note=""):
    """Bottom-right causal masks side by side. shapes: (title, Sq, Sk) each."""
    figure, all_axes = canvas(3.0, columns=len(shapes))
    for axes, (title, seqlen_q, seqlen_k) in zip(all_axes, shapes):
        for i in range(seqlen_q):
            for j in range(seqlen_k):
                seen = j <= i + seqlen_k - seqlen_q
                axes.add_patch(Rectangle((j, i), 1, 1, facecolor=SKY if seen else PAPER, edgecolor=GREY, lw=0.6))
        for i in range(min(seqlen_q, max(0, seqlen_q - seqlen_k))):
            axes.text(seqlen_k / 2, i + 0.5, "sees no key: 0", ha="center", va="center", fontsize=8.5)
        _matrix_axes(axes, seqlen_q, seqlen_k)
        axes.set_xticks(np.arange(seqlen_k) + 0.5, range(seqlen_k))
        axes.set_yticks(np.arange(seqlen_q) + 0.5, range(seqlen_q))
        axes.tick_params(length=0)
        axes.set_title(title, fontsize=10)
    return caption(figure, note) if note else figure


@styled
def two_passes(note=""):
    """Which tiles a query tile walks: twice over the keys (step 02) and once (step 03)."""
    figure, all_axes = canvas(2.75, columns=2)
    for axes, title, passes in zip(all_axes, ("Step 02: the keys twice", "Step 03: the keys once"), (2, 1)):
        for row in range(4):
            for column in range(6):
                live = row == 1
                axes.add_patch(Rectangle((column, row), 1, 1, facecolor=SKY if live else PAPER, edgecolor=GREY, lw=0.8))
        for n in range(passes):
            y = 1.5 if passes == 1 else 1.3 + 0.4 * n
            axes.annotate(
                "", (6.3, y), (-0.3, y), arrowprops=dict(arrowstyle="-|>", color=BLUE if n == passes - 1 else RED, lw=2)
            )
            word = (
                "max"
                if n < passes - 1
                else "exp, sum, product with V"
                if passes == 2
                else "max, rescale, exp, sum, product"
            )
            axes.text(6.4, y + 0.02, word if passes == 2 else "", va="center", fontsize=8.5)
        if passes == 1:
            axes.text(3.2, 2.25, "max, rescale, exp, sum, product with V", ha="center", fontsize=9)
        axes.set(xlim=(-0.5, 9.6 if passes == 2 else 7), ylim=(4.1, -0.1), xticks=[], yticks=[])
        axes.set_ylabel("query tiles" if passes == 2 else "")
        axes.text(3, 4.25, "key tiles", ha="center", va="top", fontsize=10)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_title(title, fontsize=10.5)
    return caption(figure, note) if note else figure


@styled
def grouped_heads(layouts, note=""):
    """Which KV head each query head reads. layouts: (title, Hq, Hkv) each."""
    figure, all_axes = canvas(2.6, columns=len(layouts))
    colours = [BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY, INK]
    for axes, (title, num_heads, num_kv_heads) in zip(all_axes, layouts):
        group = num_heads // num_kv_heads
        for head in range(num_heads):
            kv = head // group
            centre = (kv + 0.5) * group - 0.5
            axes.plot([head, centre], [1, 0], color=GREY, lw=1)
            axes.plot(head, 1, "o", ms=15, color=colours[kv % 8], mec=INK, mew=0.7)
            axes.text(head, 1, head, ha="center", va="center", fontsize=8, color=PAPER, fontweight="bold")
        for kv in range(num_kv_heads):
            centre = (kv + 0.5) * group - 0.5
            axes.plot(centre, 0, "s", ms=16, color=colours[kv % 8], mec=INK, mew=0.7)
            axes.text(centre, 0, kv, ha="center", va="center", fontsize=8, color=PAPER, fontweight="bold")
        axes.set(xlim=(-0.8, num_heads - 0.2), ylim=(-0.45, 1.4), xticks=[], yticks=[0, 1])
        axes.set_yticklabels(["KV", "query"])
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_title(title, fontsize=10)
    return caption(figure, note) if note else figure


@styled
def ragged_batch(lengths, note=""):
    """Work of a padded batch (every sequence as long as the longest) beside that of a packed one."""
    figure, all_axes = canvas(2.5, columns=len(lengths))
    longest = max(lengths)
    for axes, length in zip(np.atleast_1d(all_axes), lengths):
        axes.add_patch(Rectangle((0, 0), longest, longest, facecolor=PAPER, edgecolor=GREY, hatch="....", lw=0.8))
        axes.add_patch(Rectangle((0, 0), length, length, facecolor=SKY, edgecolor=INK, lw=0.8))
        _matrix_axes(axes, longest, longest)
        axes.set(xticks=[length], yticks=[], xlabel="", ylabel="")
        axes.set_title(f"{length} tokens", fontsize=9.5, fontweight="normal")
    return caption(figure, note) if note else figure


# ---------------------------------------------------------------- boxes and arrows


@styled
def levels(columns, note=""):
    """Where each tensor lives while a rung runs.

    columns: (title, {"registers": [...], "shared memory": [...], "device memory": [...]}) each; a name that starts
    with "*" is one that must travel once per tile and is marked.
    """
    names = ["registers", "shared memory", "device memory"]
    figure, all_axes = canvas(3.4, columns=len(columns))
    for number, (axes, (title, where)) in enumerate(zip(all_axes, columns)):
        for level, name in enumerate(names):
            y = 2 - level
            chip = name != "device memory"
            axes.add_patch(
                FancyBboxPatch(
                    (0, y + 0.08),
                    6,
                    0.8,
                    boxstyle="round,pad=0.02",
                    facecolor="#F3F8FC" if chip else "#FDF3E3",
                    edgecolor=GREY,
                )
            )
            axes.text(0.12, y + 0.80, name, fontsize=8.5, color=GREY, va="top")
            items = where.get(name, [])
            for i, item in enumerate(items):
                travels = item.startswith("*")
                axes.text(
                    3.1 + (i - (len(items) - 1) / 2) * (5.6 / max(len(items), 1)), y + 0.36, item.lstrip("*"),
                    ha="center", va="center", fontsize=9, fontweight="bold" if travels else "normal",
                    bbox=dict(boxstyle="round,pad=0.25", fc=ORANGE if travels else SKY, ec=INK, lw=0.6),
                )  # fmt: skip
        axes.set(xlim=(-0.1, 6.1), ylim=(0, 3), xticks=[], yticks=[])
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_title(title, fontsize=10.5)
    return caption(figure, note) if note else figure


@styled
def pipeline(stages, note=""):
    """A row of boxes with arrows between them. stages: (text, note under it, colour) each."""
    figure, axes = canvas(1.75)
    step = 10 / len(stages)
    for i, (text, below, colour) in enumerate(stages):
        x = i * step
        width = step * 0.72
        axes.add_patch(
            FancyBboxPatch((x, 0.55), width, 0.7, boxstyle="round,pad=0.03", facecolor=colour, edgecolor=INK, lw=0.8)
        )
        axes.text(x + width / 2, 0.9, text, ha="center", va="center", fontsize=9.5, fontweight="bold")
        axes.text(x + width / 2, 0.38, below, ha="center", va="top", fontsize=8.5)
        if i + 1 < len(stages):
            axes.add_patch(
                FancyArrowPatch(
                    (x + width + 0.06, 0.9), (x + step - 0.06, 0.9), arrowstyle="-|>", mutation_scale=12, color=INK
                )
            )
    axes.set(xlim=(-0.1, 10), ylim=(-0.2, 1.35), xticks=[], yticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    return caption(figure, note) if note else figure
