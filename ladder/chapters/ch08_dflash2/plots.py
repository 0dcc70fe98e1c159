"""Figures of chapter 08: who computes which tile when, two units side by side, visited tiles, ratios to a peer."""

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LogNorm
from matplotlib.patches import Patch, Rectangle

from ladder.chapters import plots

from . import simulate as schedules

GROUP_COLOURS = (plots.SKY, plots.ORANGE)


def schedule_image(pieces, programs, columns=640):
    """(programs, columns) array: steps of the tile that a program works on at each moment, NaN where it idles."""
    end = schedules.makespan(pieces) or 1.0
    image = np.full((programs, columns), np.nan)
    for piece in pieces:
        first, last = int(piece.start / end * columns), int(np.ceil(piece.end / end * columns))
        image[piece.program, first:last] = piece.tile.steps
    return image


def draw_schedule(figure, axes, pieces, programs, colourbar=True):
    """Programs downwards, time to the right; darker is a lighter tile, white is idle."""
    image = schedule_image(pieces, programs)
    colours = colormaps["cividis"].with_extremes(bad=plots.PAPER)
    end = schedules.makespan(pieces)
    low, high = np.nanmin(image), np.nanmax(image)
    shown = axes.imshow(
        image, aspect="auto", interpolation="nearest", cmap=colours, extent=(0, end, programs, 0),
        vmin=min(low, high * 0.999), vmax=high,
    )  # fmt: skip
    ideal = sum(p.tile.steps for p in pieces) / programs
    axes.axvline(ideal, color=plots.RED, lw=1.6, ls="--")
    axes.annotate("perfect", (ideal, 0), xytext=(-3, -3), textcoords="offset points", ha="right", va="top",
                  fontsize=8.5, color=plots.PAPER,
                  bbox=dict(boxstyle="round,pad=0.15", fc=plots.RED, ec="none"))  # fmt: skip
    axes.set(xlabel="time, in tiles of keys", ylabel="program", xlim=(0, end * 1.01), yticks=[0, programs])
    if colourbar:
        bar = figure.colorbar(shown, ax=axes, fraction=0.05, pad=0.02)
        bar.set_label("tiles of keys of the tile at work", fontsize=8.5)
        bar.ax.tick_params(labelsize=8.5)
    return axes


def draw_balances(axes, values, chosen):
    """Bars of {label: balance}, the chosen one marked."""
    labels = list(values)
    place = np.arange(len(labels))[::-1]
    for y, label in zip(place, labels):
        mark = label == chosen
        axes.barh(
            y,
            100 * values[label],
            color=plots.BLUE if mark else plots.SKY,
            hatch="///" if mark else None,
            edgecolor=plots.INK,
            lw=0.6,
            height=0.7,
        )
        axes.text(100 * values[label] + 1, y, f"{100 * values[label]:.0f}", va="center", fontsize=8.5)
    axes.set_yticks(place, labels, fontsize=8.5)
    for text, label in zip(axes.get_yticklabels(), labels):
        text.set_fontweight("bold" if label == chosen else "normal")
    axes.set(xlim=(0, 114), xlabel="% of the programs' time spent on keys")


@plots.styled
def pipelines(step_clocks, kinds=schedules.PIPELINES, steps=5, title="", note=""):
    """The first steps of each kind of loop on two lanes, tensor cores
    and softmax; the share of time the former work."""
    figure, axes = plots.canvas(1.25 + 1.12 * len(kinds), rows=len(kinds), sharex=True)
    axes = np.atleast_1d(axes)
    for axis, kind in zip(axes, kinds):
        bursts = schedules.pipeline(step_clocks, kind, steps)
        for b in bursts:
            lane = 0 if b.unit == "softmax" else 1
            hatch = "///" if b.group else None
            axis.add_patch(
                Rectangle(
                    (b.start, lane),
                    b.end - b.start,
                    0.82,
                    facecolor=GROUP_COLOURS[b.group],
                    edgecolor=plots.INK,
                    lw=0.6,
                    hatch=hatch,
                )
            )
            name = {"scores": "S", "softmax": "e", "values": "V"}[b.what]
            if b.end - b.start > 0.016 * steps * (step_clocks.products + step_clocks.softmax):
                style = dict(boxstyle="round,pad=0.08", fc=plots.PAPER, ec="none", alpha=0.85) if hatch else None
                axis.text(
                    (b.start + b.end) / 2, lane + 0.41, f"{name}{b.step}", ha="center", va="center", fontsize=7.5,
                    bbox=style,
                )  # fmt: skip
        share = schedules.tensor_share(schedules.pipeline(step_clocks, kind, 256))
        axis.set(
            ylim=(-0.1, 2), yticks=[0.41, 1.41], xlim=(0, steps * (step_clocks.products + step_clocks.softmax) * 1.01)
        )
        axis.set_yticklabels(["softmax", "tensor cores"], fontsize=9)
        axis.tick_params(axis="y", length=0)
        axis.set_title(f"{kind}: tensor cores busy {100 * share:.0f} % of a long loop", fontsize=9.5)
    axes[-1].set_xlabel("clocks of one processor")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return plots.caption(figure, note) if note else figure


def draw_windows(axes, seqlen, ranges_, block_m, block_n, causal):
    """Which tiles of a square the kernel visits under windows: whole, masked, or not at all."""
    visited = ranges_.visited_tiles(seqlen, seqlen, causal, block_m, block_n)
    rows, cols = -(-seqlen // block_m), -(-seqlen // block_n)
    kinds = {(row, col): masked for row, col, masked in visited.tiles}
    for row in range(rows):
        for col in range(cols):
            if (row, col) not in kinds:
                style = dict(facecolor=plots.PAPER, edgecolor=plots.PALE)
            elif kinds[row, col]:
                style = dict(facecolor=plots.ORANGE, edgecolor=plots.INK, hatch="///")
            else:
                style = dict(facecolor=plots.SKY, edgecolor=plots.INK)
            axes.add_patch(Rectangle((col * block_n, row * block_m), block_n, block_m, lw=0.4, **style))
    axes.set(xlim=(0, cols * block_n), ylim=(rows * block_m, 0), aspect="equal", xlabel="key", ylabel="query")
    axes.set_xticks([0, seqlen // 2, seqlen])
    axes.set_yticks([0, seqlen // 2, seqlen])
    axes.legend(
        handles=[
            Patch(facecolor=plots.SKY, edgecolor=plots.INK, label="whole"),
            Patch(facecolor=plots.ORANGE, edgecolor=plots.INK, hatch="///", label="masked"),
            Patch(facecolor=plots.PAPER, edgecolor=plots.GREY, label="never loaded"),
        ],
        loc="upper right", fontsize=8, frameon=True, framealpha=0.95, handlelength=1.2, borderpad=0.3,
    )  # fmt: skip
    return visited.count


def draw_mass(axes, dropped, labels):
    """Probability mass that each head loses, a strip of dots for each layer. dropped: (layers, heads)."""
    for layer, values in enumerate(dropped):
        values = np.sort(np.asarray(values, dtype=float))
        axes.plot(
            100 * values, np.linspace(layer - 0.25, layer + 0.25, len(values)), "o", ms=5, mfc=plots.SKY,
            mec=plots.INK, mew=0.5,
        )  # fmt: skip
        axes.plot([100 * values.mean()] * 2, [layer - 0.36, layer + 0.36], color=plots.RED, lw=2)
    axes.set_yticks(range(len(dropped)), labels)
    axes.set(xlim=(-3, 103), ylim=(len(dropped) - 0.4, -0.6), xlabel="% of a head's probability on hidden keys")
    axes.grid(True, axis="x", lw=0.6)


@plots.styled
def ratio_grid(ratios, rows, columns, title="", note="", height=None):
    """Numbers in a grid, purple above 1, orange and bold below; cells without a number stay empty.

    ratios: {(row, column): ratio}.
    """
    figure, axes = plots.canvas(height or 1.0 + 0.29 * len(rows))
    grid = np.full((len(rows), len(columns)), np.nan)
    for (row, column), value in ratios.items():
        grid[rows.index(row), columns.index(column)] = value
    spread = max(1.15, np.nanmax(np.maximum(grid, 1 / grid)) if np.isfinite(grid).any() else 1.15)
    axes.imshow(
        grid, cmap=colormaps["PuOr"], norm=LogNorm(1 / spread**2.6, spread**2.6), aspect="auto"
    )  # the ends stay light enough for black text
    for (i, j), value in np.ndenumerate(grid):
        if np.isfinite(value):
            axes.text(
                j, i, f"{value:.2f}", ha="center", va="center", fontsize=9, fontweight="bold" if value < 1 else "normal"
            )
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_xticks(np.arange(len(columns) - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(len(rows) - 1) + 0.5, minor=True)
    axes.grid(which="minor", color=plots.PAPER, lw=2)
    axes.tick_params(which="minor", length=0)
    axes.set_title(title)
    return plots.caption(figure, note) if note else figure


@plots.styled
def predicted_and_measured(entries, *, unit, title="", note="", line=None):
    """Pairs of bars: what a change was predicted to give and what it gave.

    entries: (label, predicted or None, measured) each, as factors; 1 is no change. ``line``: (label, factor) of a peer.
    """
    figure, axes = plots.canvas(1.2 + 0.5 * len(entries))
    place = np.arange(len(entries))[::-1] * 1.0
    high = max([m for *_, m in entries] + [p for _, p, _ in entries if p] + [1.0])
    low = min([m for *_, m in entries] + [p for _, p, _ in entries if p] + [1.0])
    for y, (label, predicted, measured) in zip(place, entries):
        axes.plot([1, measured], [y - 0.17] * 2, color=plots.BLUE, lw=7, solid_capstyle="butt")
        axes.plot(measured, y - 0.17, "o", color=plots.BLUE, mec=plots.INK, ms=8)
        axes.text(
            high + 0.02 * (high - low + 0.1),
            y - 0.17,
            f"{measured:.2f}",
            va="center",
            fontsize=9,
            fontweight="bold",
            color=plots.BLUE,
        )
        if predicted is not None:
            axes.plot(predicted, y + 0.17, "D", color=plots.ORANGE, mec=plots.INK, ms=7)
            axes.plot([1, predicted], [y + 0.17] * 2, color=plots.ORANGE, lw=1.5, ls=":")
            axes.text(high + 0.02 * (high - low + 0.1), y + 0.17, f"{predicted:.2f}", va="center", fontsize=9)
    axes.axvline(1, color=plots.INK, lw=1)
    if line:
        axes.axvline(line[1], color=plots.GREY, lw=1.2, ls="--")
        axes.text(line[1], len(entries) - 0.45, line[0], ha="center", fontsize=8.5, color=plots.GREY)
    axes.set_yticks(place, [label for label, *_ in entries])
    axes.set(
        xlabel=unit,
        xlim=(low - 0.05 * (high - low + 0.1), high + 0.16 * (high - low + 0.1)),
        ylim=(-0.6, len(entries) - 0.3),
    )
    axes.plot([], [], "D", color=plots.ORANGE, mec=plots.INK, ls=":", label="predicted (upper number)")
    axes.plot([], [], "o", color=plots.BLUE, mec=plots.INK, label="measured (lower number)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16 - 0.25 / len(entries)), ncols=2)
    axes.grid(True, axis="x", lw=0.6)
    axes.set_title(title)
    return plots.caption(figure, note) if note else figure


@plots.styled
def split_schedules(lengths, kv_heads, plans, programs=schedules.PROCESSORS, note=""):
    """A ragged decode batch under several numbers of splits: programs downwards, time to the right.

    plans: {title: splits} as in ``schedules.split_tiles``.
    """
    figure, axes = plots.canvas(3.3, columns=len(plans), sharey=True)
    axes = np.atleast_1d(axes)
    runs = {
        title: schedules.take_next(schedules.split_tiles(lengths, kv_heads, splits), programs, 1.0)
        for title, splits in plans.items()
    }
    ideal = min(sum(p.tile.steps for p in run) for run in runs.values()) / programs
    shown = min(max(schedules.makespan(run) for run in runs.values()), 2.6 * ideal)  # one bar may be ten times as long
    rank = {seq: i for i, seq in enumerate(sorted(range(len(lengths)), key=lambda s: -lengths[s]))}
    for axis, (title, run) in zip(axes, runs.items()):
        for piece in run:
            long = rank[piece.tile.seq] == 0
            axis.add_patch(Rectangle(
                (piece.start, piece.program), piece.end - piece.start, 1, facecolor=plots.ORANGE if long else plots.SKY,
                edgecolor=plots.PAPER, lw=0.3,
            ))  # fmt: skip
        if (end := schedules.makespan(run)) > shown:
            axis.annotate(
                f"to {end:.0f}",
                (shown, 4),
                xytext=(-34, -26),
                textcoords="offset points",
                fontsize=9,
                arrowprops=dict(arrowstyle="->"),
            )
        axis.axvline(ideal, color=plots.RED, lw=1.6, ls="--")
        axis.set(xlim=(0, shown * 1.02), ylim=(programs, 0), yticks=[0, programs], xlabel="time, in tiles of 64 keys")
        axis.set_title(
            f"{title}\n{len(run)} programs, busy {100 * schedules.balance(run, programs):.0f} %", fontsize=9.5
        )
    axes[0].set_ylabel("processor")
    return plots.caption(figure, note) if note else figure
