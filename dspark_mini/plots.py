"""Figures as matplotlib `Figure` objects; nothing here touches pyplot's global state."""

from __future__ import annotations

import io

import numpy as np

__all__ = [
    "BLUE", "GREEN", "GREY", "ORANGE", "RED", "SKY", "curve_figure", "four_way_figure", "heat_figure",
    "levels_figure", "png", "regimes_figure", "survival_figure", "utilisation_figure",
]  # fmt: skip

# Okabe and Ito's palette: distinct for colour-blind readers, and of different lightness in print.
BLUE, ORANGE, GREEN, GREY, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#7F7F7F", "#56B4E9", "#D55E00"
CYCLE = (BLUE, ORANGE, GREEN, SKY, RED, "#CC79A7", "#F0E442", GREY)


def _figure(width=8.0, height=3.6, columns=1, **keywords):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    axes = figure.subplots(1, columns, **keywords)
    for axis in np.atleast_1d(axes).ravel():
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=11)
        for text, size in ((axis.xaxis.label, 11), (axis.yaxis.label, 11), (axis.title, 12)):
            text.set_size(size)
    return figure, axes


def png(figure):
    """PNG bytes of a figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def utilisation_figure(before, after, title="", unit="GPU"):
    """Bars of utilisation (0 .. 1) per GPU, before and after; returns a Figure."""
    figure, axes = _figure(8.0, 3.6, 2, sharey=True)
    for axis, values, colour, name in ((axes[0], before, ORANGE, "before"), (axes[1], after, BLUE, "after")):
        values = np.asarray(values, dtype=float)
        axis.bar(np.arange(len(values)), 100 * values, color=colour, width=0.8)
        axis.axhline(100 * values.mean(), color="black", linewidth=1, linestyle="--")
        axis.set(title=f"{name}: {100 * values.min():.0f} % to {100 * values.max():.0f} %", xlabel=unit)
        if len(values) <= 16:
            axis.set_xticks(np.arange(len(values)))
    axes[0].set(ylabel="utilisation, %", ylim=(0, 105))
    if title:
        figure.suptitle(title, fontsize=12)
    return figure


def four_way_figure(speedups, title=""):
    """Bars of throughput relative to `neither`, and what adding and multiplying the single gains would give."""
    figure, axis = _figure(7.0, 3.6)
    kernel, scheduler, both = (speedups[name] for name in ("kernel", "scheduler", "both"))
    names = ["neither", "kernel\nonly", "scheduler\nonly", "both", "if gains\nadded", "if they\nmultiplied"]
    values = [1.0, kernel, scheduler, both, kernel + scheduler - 1, kernel * scheduler]
    bars = axis.bar(names, values, color=[GREY, SKY, ORANGE, BLUE, "white", "white"], edgecolor="black", width=0.7)
    for bar in bars[4:]:
        bar.set_hatch("//")
    axis.bar_label(bars, [f"{v:.2f}" for v in values], fontsize=11, padding=2)
    axis.axhspan(1.2, 1.3, color=GREEN, alpha=0.2, linewidth=0, zorder=0, label="the article: 20-30 % for each alone")
    axis.legend(fontsize=10, loc="upper left", frameon=False)
    axis.set(ylabel="throughput, neither = 1", ylim=(0, max(values) * 1.3), title=title)
    return figure


def regimes_figure(cases):
    """Throughput of kernel, scheduler, both for several kinds of step: {name: {impl: value}}."""
    figure, axis = _figure(8.0, 4.2)
    width, place = 0.26, np.arange(len(cases))
    for i, (impl, colour) in enumerate((("kernel", SKY), ("scheduler", ORANGE), ("both", BLUE))):
        values = [c[impl] for c in cases.values()]
        gains = [v - 1 for v in values]
        bars = axis.barh(place + (i - 1) * width, gains, width, left=1, color=colour, label=impl, edgecolor="black")
        axis.bar_label(bars, [f"{v:.2f}" for v in values], fontsize=10, padding=2)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(place, list(cases))
    axis.invert_yaxis()
    axis.set(xlim=(0.98, max(c["both"] for c in cases.values()) * 1.08), xlabel="throughput, neither = 1")
    axis.legend(fontsize=10, loc="lower right", frameon=False)
    return figure


def heat_figure(counts, title=""):
    """Load of every expert (columns, hottest first) in every layer (rows), in multiples of the layer's mean."""
    figure, axis = _figure(8.0, 3.8)
    relative = -np.sort(-counts / counts.mean(axis=1, keepdims=True), axis=1)
    image = axis.imshow(relative, aspect="auto", cmap="cividis", vmin=0, vmax=4)
    axis.set(xlabel="experts of a layer, hottest first", ylabel="layer", title=title)
    bar = figure.colorbar(image, ax=axis, extend="max")
    bar.set_label("load, mean = 1", fontsize=11)
    bar.ax.tick_params(labelsize=11)
    return figure


def levels_figure(parts, labels, level=None, title="", marked=None, ylabel="tokens"):
    """Stacked bars: parts[gpu] is a list of (label index, amount); `level` draws a line, `marked` outlines a label."""
    figure, axis = _figure(8.0, 3.8)
    white, centred = {"facecolor": "white", "edgecolor": "none", "pad": 1}, {"ha": "center", "va": "center"}
    for gpu, stack in enumerate(parts):
        base = 0.0
        for index, amount in stack:
            if amount <= 0:
                continue
            colour, chosen = CYCLE[index % len(CYCLE)], index == marked
            outline = {"edgecolor": "black", "linewidth": 2.5 if chosen else 0.8, "hatch": "//" if chosen else None}
            axis.bar(gpu, amount, bottom=base, color=colour, width=0.7, **outline)
            axis.text(gpu, base + amount / 2, labels[index], **centred, fontsize=10, bbox={**white, "alpha": 0.75})
            base += amount
        place = {"xy": (gpu, base), "xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
        axis.annotate(f"{base:.4g}", **place, fontsize=11, bbox=white)
    if level is not None:
        axis.axhline(level, color="black", linestyle="--", linewidth=1)
        axis.text(len(parts) - 0.5, level, " bound", fontsize=11, va="center")
    axis.set_xticks(range(len(parts)), [f"GPU {g}" for g in range(len(parts))])
    axis.margins(y=0.12)
    axis.set(ylabel=ylabel, title=title)
    return figure


def curve_figure(curves, xlabel, ylabel, title=""):
    """Lines {name: (x, y)}."""
    figure, axis = _figure(8.0, 3.8)
    for (name, (x, y)), colour, style in zip(curves.items(), (BLUE, ORANGE, GREEN), ("-", "--", ":")):
        axis.plot(x, y, style, color=colour, label=name, linewidth=2)
    axis.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axis.grid(alpha=0.3)
    if len(curves) > 1:
        axis.legend(fontsize=11, frameon=False)
    return figure


def survival_figure(history, ranks, lost):
    """Tokens per rank and step, from the history of a run in which `lost` disappears."""
    figure, axis = _figure(8.0, 3.8)
    steps = [h["step"] for h in history]
    base = np.zeros(len(history))
    for rank in range(ranks):
        rows = [h["rank_tokens"][h["members"].index(rank)] if rank in h["members"] else 0 for h in history]
        tokens, gone = np.array(rows, dtype=float), rank == lost
        style = {"color": CYCLE[rank], "edgecolor": "black", "linewidth": 0.6, "hatch": "//" if gone else None}
        label = f"rank {rank} (lost)" if gone else f"rank {rank}"
        axis.bar(steps, tokens, bottom=base, width=0.85, label=label, **style)
        base += tokens
    at = next(s for s, h in zip(steps, history) if lost not in h["members"])
    axis.axvline(at - 0.5, color="black", linestyle="--")
    axis.text(at - 0.4, base.max() * 1.02, f"rank {lost} dies", fontsize=11)
    axis.set(ylim=(0, base.max() * 1.12), xlabel="step", ylabel="rows computed by each rank's experts")
    axis.legend(fontsize=11, frameon=False, ncols=2)
    return figure
