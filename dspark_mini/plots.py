"""Figures as matplotlib `Figure` objects; nothing here touches pyplot's global state."""

from __future__ import annotations

import numpy as np

__all__ = ["BLUE", "GREEN", "GREY", "ORANGE", "four_way_figure", "utilisation_figure"]

# Okabe and Ito's palette: distinct for colour-blind readers, and of different lightness in print.
BLUE, ORANGE, GREEN, GREY, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#7F7F7F", "#56B4E9", "#D55E00"


def _figure(width=8.0, height=3.6, columns=1, **keywords):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    axes = figure.subplots(1, columns, **keywords)
    for axis in np.atleast_1d(axes).ravel():
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=11)
    return figure, axes


def utilisation_figure(before, after, title="", unit="GPU"):
    """Bars of utilisation (0 .. 1) per GPU, before and after; returns a Figure."""
    figure, axes = _figure(8.0, 3.6, 2, sharey=True)
    for axis, values, colour, name in ((axes[0], before, ORANGE, "before"), (axes[1], after, BLUE, "after")):
        values = np.asarray(values, dtype=float)
        axis.bar(np.arange(len(values)), 100 * values, color=colour, width=0.8)
        axis.axhline(100 * values.mean(), color="black", linewidth=1, linestyle="--")
        axis.set_title(f"{name}: {100 * values.min():.0f} % to {100 * values.max():.0f} %", fontsize=12)
        axis.set_xlabel(unit, fontsize=11)
        if len(values) <= 16:
            axis.set_xticks(np.arange(len(values)))
    axes[0].set_ylabel("utilisation, %", fontsize=11)
    axes[0].set_ylim(0, 105)
    if title:
        figure.suptitle(title, fontsize=12)
    return figure


def four_way_figure(speedups, title=""):
    """Bars of throughput relative to `neither` for kernel, scheduler, both, and what sum and product would be."""
    figure, axis = _figure(7.0, 3.6)
    kernel, scheduler, both = (speedups[name] for name in ("kernel", "scheduler", "both"))
    names = ["neither", "kernel\nonly", "scheduler\nonly", "both", "if gains\nadded", "if they\nmultiplied"]
    values = [1.0, kernel, scheduler, both, kernel + scheduler - 1, kernel * scheduler]
    bars = axis.bar(
        names, values, color=[GREY, SKY, ORANGE, BLUE, "white", "white"], edgecolor="black", width=0.7
    )
    for bar in bars[4:]:
        bar.set_hatch("//")
    axis.bar_label(bars, [f"{v:.2f}" for v in values], fontsize=11, padding=2)
    axis.set_ylabel("throughput, neither = 1", fontsize=11)
    axis.set_ylim(0, max(values) * 1.15)
    if title:
        axis.set_title(title, fontsize=12)
    return figure
