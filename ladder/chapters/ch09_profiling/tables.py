"""What chapter 09 runs and reads: batches to profile, Amdahl's law, names of kernels, a sample of Nsight Compute.

Everything that needs torch.profiler runs in a process of its own (``report``, ``measured``): the profiler may write to
the process's standard error, and its times belong in a figure, never in the text of a notebook.
"""

import functools
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from IPython.display import Markdown

from ladder import profile
from ladder.chapters import plots
from ladder.lab import memory, results
from ladder.lab.names import title as implementation_title
from ladder.lab.problem import AttentionProblem
from ladder.rungs import RUNGS

PACKAGE = Path(__file__).resolve().parents[2]
TOKENS = 512  # of a profiled prompt
GAINS = (1.5, 2.0, 4.0, math.inf)  # of a kernel, as the figures show them


# ---------------------------------------------------------------- Amdahl


def end_to_end(share, gain):
    """How many times as fast the whole is when a part that takes
    ``share`` (0 .. 1) of its time becomes ``gain`` x as fast.

    Amdahl, "Validity of the single processor approach" (1967). ``gain`` may be infinite, and below 1 for a slower part.

    Raises:
        ValueError: a share outside 0 .. 1, a gain that is not positive.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}; want 0 to 1")
    if not gain > 0:
        raise ValueError(f"gain is {gain}; want above 0")
    left = 1 - share + share / gain
    return 1 / left if left else math.inf


def share_of(total, gain):
    """The share of the time that a part must have had when making it
    ``gain`` x as fast made the whole ``total`` x as fast."""
    return (1 - 1 / total) / (1 - 1 / gain)


def kernel_gain(doc, seqlen=16384, old="step07_dflash1", new="step08_dflash2"):
    """Recorded gain of a rung over another on one causal prompt of 16
    heads of 128 in bf16; None where one is missing."""
    problem = AttentionProblem(
        B=max(1, 16384 // seqlen), Sq=seqlen, Sk=seqlen, Hq=16, Hkv=16, D=128, Dv=128, causal=True, dtype="bfloat16"
    )
    found = {e["impl"]: e["ms"]["median"] for e in results.select(doc, **problem.case()) if "ms" in e}
    return found[old] / found[new] if {old, new} <= set(found) else None


def forecast(
    doc, old="step07_dflash1", new="step08_dflash2", lengths=(4096, 16384, 131072), shares=(0.1, 0.3, 0.5, 0.7)
):
    """What recorded kernel gains promise end to end at several shares of attention, as a Markdown table."""
    lines = [
        f"| causal prefill, 16 heads of 128 | {implementation_title(new)} over {implementation_title(old)} | "
        + " | ".join(f"attention {100 * s:.0f} %" for s in shares) + " |",
        "|:--|--:|" + "--:|" * len(shares),
    ]  # fmt: skip
    for seqlen in lengths:
        gain = kernel_gain(doc, seqlen, old, new)
        if gain is not None:
            cells = " | ".join(f"{end_to_end(s, gain):.2f} x" for s in shares)
            lines.append(f"| {plots.tokens(seqlen)} tokens | **{gain:.2f} x** | {cells} |")
    lines.append(
        f"\n*The first factor is {results.caption(doc)}; the others follow from it. It is the gain of the kernel "
        f"alone, without the rest of a server.*"
    )
    return Markdown("\n".join(lines))


@plots.styled
def draw_amdahl(axes, share, gain):
    """End-to-end gain against the share of the part, a line for each kernel gain; the point of the controls on top."""
    x = [n / 200 for n in range(200)]
    styles = ((":", plots.GREY), ("-.", plots.SKY), ("--", plots.BLUE), ("-", plots.INK))
    for other, (style, colour) in zip(GAINS, styles):
        label = "infinitely fast" if other == math.inf else f"kernel {other:g} x"
        axes.plot([100 * s for s in x], [end_to_end(s, other) for s in x], style, color=colour, lw=1.7, label=label)
    axes.axvline(100 * profile.SHARE, color=plots.RED, lw=1.2, ls="--")
    axes.text(100 * profile.SHARE - 1, 3.35, "30 %", ha="right", color=plots.RED, fontsize=9)
    axes.plot(100 * share, min(3.7, end_to_end(share, gain)), "o", color=plots.ORANGE, mec=plots.INK, ms=10, zorder=5)
    axes.set(
        xlim=(0, 100), ylim=(0.9, 3.7), xlabel="share of the time in attention, per cent",
        ylabel="x as fast, end to end",
    )  # fmt: skip
    axes.grid(True, lw=0.6)
    axes.legend(loc="upper left")
    return axes


# ---------------------------------------------------------------- batches to profile


def _text():
    """The same bytes for every reader: a source file of a rung that no longer changes."""
    return list((PACKAGE / "step07_dflash1" / "kernel.py").read_bytes())


def _prefill(backend, named=False):
    """A function that runs one prompt of ``TOKENS`` bytes through tiny-moe; ``named`` puts attention into a range."""
    from ladder.engine.engine import Engine
    from ladder.engine.models import find
    from ladder.engine.sampling import SamplingParams

    engine = Engine(find("tiny-moe"), backend, device="cpu", kv_tokens=TOKENS + 64, max_seqs=1)
    if named:
        attend = engine.runner.backend.varlen

        def in_a_range(*args):
            with torch.profiler.record_function("attention"):
                return attend(*args)

        engine.runner.backend.varlen = in_a_range
    return lambda: engine.generate([_text()[:TOKENS]], SamplingParams(max_tokens=1))


def fused():
    """A loader for ``python -m ladder.profile``: tiny-moe with PyTorch's fused attention."""
    return _prefill("sdpa")


def eager():
    """The same with rung 01, whose attention is matrix products and a softmax."""
    return _prefill("step01")


def eager_named():
    """The same, its attention inside ``torch.profiler.record_function("attention")``."""
    return _prefill("step01", named=True)


def scheduled():
    """{operator: calls} of three profiled batches out of five: one is skipped, one warms the profiler up."""
    batch = fused()
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as prof:
        for _ in range(5):
            batch()
            prof.step()
    return {average.key: average.count for average in prof.key_averages()}


def command(name="fused"):
    """The arguments of ``python`` that profile one of the loaders above."""
    return ["-m", "ladder.profile", "--module", f"{__name__}:{name}", "--steps", "1", "--warmup", "1", "--json", "-"]


@functools.cache
def report():
    """What ``python -m ladder.profile`` records of ``fused``, run as a process."""
    return json.loads(_python(command()))


@functools.cache
def measured():
    """{"calls": ``scheduled``, "eager" and "eager_named": fields of ``profile.Found``}, from a process of its own."""
    return json.loads(_python(["-m", __name__]))


def _measure():
    found = {"calls": scheduled()}
    for loader in (eager, eager_named):
        found[loader.__name__] = asdict(profile.measure(loader, steps=1, warmup=1))
    return found


def _python(arguments):
    # Triton's interpreter, where this process has it on, would be profiled in place of the code.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), *filter(None, [env.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout


@plots.styled
def shares_picture(names=("fused", "eager", "eager_named")):
    """Where the time of a batch went under each name, measured here and now on this CPU, as a Picture."""
    titles = {"fused": "fused attention", "eager": "rung 01, no range", "eager_named": "rung 01 in a range"}
    figure, axes = plots.canvas(2.5)
    for y, name in enumerate(reversed(names)):
        found = report()["measured"] if name == "fused" else measured()[name]
        share = 100 * found["attention_share"]
        axes.barh(
            y, share, color=plots.BLUE, edgecolor=plots.INK, lw=0.6, label="counted as attention" if y == 0 else None
        )
        axes.barh(
            y, 100 - share, left=share, color=plots.PALE, edgecolor=plots.INK, lw=0.6, hatch="//",
            label="the rest" if y == 0 else None,
        )  # fmt: skip
        axes.text(101, y, f"{share:.0f} %", va="center", fontsize=9)
    axes.axvline(100 * profile.SHARE, color=plots.RED, ls="--", lw=1.4)
    axes.set_yticks(range(len(names)), [titles[n] for n in reversed(names)])
    axes.set(xlim=(0, 108), xlabel="per cent of the operators' time")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, 1.3), ncol=2)
    plots.caption(
        figure,
        f"Measured on this CPU: tiny-moe, one prompt of {TOKENS} tokens. Look at the middle bar: it is the same "
        "work as the bar below it, but no operator has a name that counts as attention. Dashed: the threshold of 30 %.",
    )
    return plots.Picture(figure, f"shares of attention of {len(names)} batches")


# ---------------------------------------------------------------- names of kernels


def launched():
    """{rung number: [names of Triton kernels that it launches]}, read
    from the sources: no GPU, and no Triton, is needed.

    A kernel is launched by ``name[grid](...)``, or through a variable that an attribute of the module of kernels, or an
    import into a host file, was given to.
    """
    found = {}
    for rung in RUNGS:
        if not rung.needs_triton:
            continue
        text = "\n".join(p.read_text() for p in sorted((PACKAGE / rung.name).rglob("*.py")))
        defined = set(re.findall(r"@(?:triton|gluon)\.jit[^\n]*\ndef (\w+)", text))
        direct = set(re.findall(r"\b(\w+)\[", text))
        attributes = set(re.findall(r"(?:\bkernels|\))\.(\w+)\b", text))
        imported = set(
            re.findall(r"\w+", " ".join(re.findall(r"^    from \.kernel import ([\w, ]+)$", text, re.MULTILINE)))
        )
        found[rung.number] = sorted(defined & (direct | attributes | imported))
    return found


def names_table(regex="dflash"):
    """Which kernels of the ladder ``ncu --kernel-name regex:...`` would profile, as a Markdown table."""
    lines = ["| rung | kernels it launches | matched by `regex:" + regex + "` |", "|:--|:--|--:|"]
    for number, names in launched().items():
        rung = next(r for r in RUNGS if r.number == number)
        matched = sum(bool(re.search(regex, name)) for name in names)
        lines.append(
            f"| {number:02d} {rung.title} | {', '.join(f'`{n}`' for n in names)} | {matched} of {len(names)} |"
        )
    return Markdown("\n".join(lines))


# ---------------------------------------------------------------- memory


def held(lengths=(512, 1024, 2048)):
    """{rung title: [most bytes held at once beyond the inputs]} of rungs 01 and 03, counted on the CPU."""
    found = {}
    for rung in (RUNGS[0], RUNGS[2]):
        peaks = []
        for s in lengths:
            inputs = AttentionProblem(Hq=4, Hkv=4, Sq=s, Sk=s, D=32, Dv=32, dtype="float32").make()
            peaks.append(memory.peak_bytes(lambda q, k, v, run=rung.attention: run(q, k, v), *inputs))
        found[rung.title] = peaks
    return found


@plots.styled
def memory_over_time(seqlen=2048):
    """Memory of this process while rungs 01 and 03 run one after the
    other, read every few milliseconds, as a Picture."""
    q, k, v = AttentionProblem(Hq=8, Hkv=8, Sq=seqlen, Sk=seqlen, D=32, Dv=32, dtype="float32").make()
    figure, axes = plots.canvas(3.0)
    for rung, colour, style in ((RUNGS[0], plots.ORANGE, "-"), (RUNGS[2], plots.BLUE, "--")):
        with profile.MemoryCurve(False, interval=0.004) as curve:
            for _ in range(3):
                rung.attention(q, k, v, **({} if rung.number == 1 else dict(tile_q=256, tile_k=256)))
        first, end = curve.samples[0][1], curve.samples[-1][0]
        axes.plot([t / end for t, _ in curve.samples], [max(1, b - first) / 1e6 for _, b in curve.samples], style,
                  color=colour, lw=1.8,
                  label=f"{rung.number:02d} {rung.title}")  # fmt: skip
    axes.set(xlabel="three calls, from start to end", ylabel="MB above the start", xlim=(0, 1))
    axes.grid(True, lw=0.6)
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 1.17), ncol=2)
    axes.set_title("A spike for each call")
    plots.caption(
        figure,
        f"8 heads, {seqlen} tokens, this CPU. Look at the shape: a spike is a temporary buffer, and the KV pool "
        "cannot have its memory. The tiles of rung 03 fit into memory that the process holds anyway.",
    )
    return plots.Picture(figure, "memory over time of rungs 01 and 03")


if __name__ == "__main__":
    print(json.dumps(_measure()))
