"""What Nsight Compute counted in the ladder's kernels, as chapter 09 shows it: ``notebooks/results/ncu.json``."""

from IPython.display import Markdown

from ladder import profile
from ladder.chapters import plots
from ladder.lab import results
from ladder.lab.names import title

HOW = "python -m ladder.bench ncu --json notebooks/results/ncu.json"
UNITS = (
    ("tensor_cores", "tensor cores"), ("exponentials", "exponentials"), ("instructions", "instructions issued"),
    ("device_memory", "device memory"), ("l2_hits", "L2 hits"),
)  # fmt: skip
REASONS = {  # Nsight Compute's name of a stall -> what the warp waits for
    "barrier": "other warps, at a barrier",
    "wait": "a fixed number of cycles after its last instruction",
    "selected": "nothing: it issues an instruction",
    "not_selected": "nothing: another warp issues in this cycle",
    "mio_throttle": "room in the queue of shared memory and special functions",
    "short_scoreboard": "shared memory or an exponential",
    "long_scoreboard": "data from L2 or device memory",
    "dispatch_stall": "the dispatch of its instruction",
    "math_pipe_throttle": "an arithmetic unit that is busy",
    "gmma": "a warp group's matrix product",
}


def rows(kind):
    """Recorded rows of "prefill" or "decode", by rung; an empty list while there are none."""
    try:
        return results.select(results.load("ncu"), mode=f"ncu_{kind}")
    except FileNotFoundError:
        return []


def described():
    """What ``ladder.profile`` says to the two throughputs of the recorded kernels."""
    found = [
        {"kernel": row["kernel"], "launches": row["launches"], "us": row["us"], "memory": row["shares"]["memory"],
         "compute": row["shares"]["compute"]}
        for kind in ("prefill", "decode") for row in rows(kind)
    ]  # fmt: skip
    return profile.describe_ncu(found) if found else f"Not recorded yet: `{HOW}` does."


def table(kind):
    """How much of each unit the kernels of a kind used, and what their warps waited for, as a Markdown table."""
    found = rows(kind)
    if not found:
        return Markdown(f"*Not recorded yet: `{HOW}` does.*")
    lines = [
        "| kernel | us | " + " | ".join(name for _, name in UNITS) + " | registers | its warps mostly wait for |",
        "|:--|--:|" + "--:|" * (len(UNITS) + 1) + ":--|",
    ]
    for row in found:
        shares = " | ".join(f"{100 * row['shares'][unit]:.0f} %" for unit, _ in UNITS)
        waits = [item for item in row["stalls"].items() if item[0] not in ("selected", "not_selected")]
        most = ", ".join(f"{REASONS.get(reason, reason)} ({100 * share:.0f} %)" for reason, share in waits[:2])
        lines.append(f"| {title(row['impl'])} | {row['us']:,.0f} | {shares} | {row['registers']} | {most} |")
    doc = results.load("ncu")
    lines.append(f"\n*Nsight Compute {doc['ncu']}, {results.caption(doc)}, by `{doc['command']}`; shares of the peak.*")
    return Markdown("\n".join(lines))


def cycles_and_clock():
    """From rung 05 to rung 08: the gain in time, in cycles, and what the clock took back, as a sentence.

    Both do the same products, so that the tensor cores are busy for the same number of cycles, and the kernel's
    cycles are in inverse proportion to the share of them in which the tensor cores are busy.
    """
    found = {row["impl"]: row for row in rows("prefill")}
    if not {"step05_fused", "step08_dflash2"} <= set(found):
        return Markdown(f"*Not recorded yet: `{HOW}` does.*")
    old, new = found["step05_fused"], found["step08_dflash2"]
    cycles, time = new["shares"]["tensor_cores"] / old["shares"]["tensor_cores"], old["us"] / new["us"]
    return Markdown(
        f"From rung 05 to rung 08 the number of cycles falls by **{cycles:.2f} x** and the time by **{time:.2f} x**. "
        f"So the clock is {100 * (1 - time / cycles):.0f} % slower while the tensor cores are busier: the card reaches "
        "its power limit."
    )


@plots.styled
def picture():
    """The recorded kernels by use of memory and of compute, as a Picture; the area of a dot is its time."""
    kinds = {"prefill": plots.SKY, "decode": plots.ORANGE}
    figure, axes = plots.canvas(3.9)
    corners = ((2, 95, "limited by compute"), (98, 95, "both"), (2, 3, "neither: it waits"), (98, 3, "by memory"))
    for x, y, what in corners:
        across, up = "left" if x < 50 else "right", "top" if y > 50 else "bottom"
        axes.text(x, y, what, ha=across, va=up, color=plots.GREY, fontsize=10)
    for limit in (axes.axvline, axes.axhline):
        limit(100 * profile.FULL, color=plots.GREY, lw=1.0, ls="--")
    for kind, colour in kinds.items():
        for place, row in enumerate(rows(kind)):
            x, y = 100 * row["shares"]["memory"], 100 * row["shares"]["compute"]
            axes.scatter(x, y, s=130, color=colour, edgecolor=plots.INK, zorder=3, label=None if place else kind)
            below = place % 2 == 1
            axes.annotate(
                f"{title(row['impl'])}, {row['us']:,.0f} us", (x, y), xytext=(0, -17 if below else 10),
                textcoords="offset points", ha="center", fontsize=9, bbox=dict(fc="white", ec="none", pad=0.6),
            )  # fmt: skip
    axes.set(
        xlim=(0, 100), ylim=(0, 100), xlabel="memory throughput, per cent of the peak",
        ylabel="compute throughput, per cent",
    )  # fmt: skip
    axes.legend(loc="center left")
    plots.caption(
        figure,
        "16k tokens and 16 heads without a mask (prefill); 8 sequences of 32k tokens (decode). Look at how far each "
        "dot is from its own edge: prefill wants to go up, decode to the right.",
    )
    return plots.Picture(figure, f"{sum(len(rows(kind)) for kind in kinds)} kernels by use of memory and compute")
