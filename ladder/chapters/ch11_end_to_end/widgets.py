"""Explorers of chapters 09 and 11: the decision, Amdahl's law, the
scheduler's timeline, the KV pool, attention's share."""

import math

import ipywidgets as ipw

from ladder import profile
from ladder.chapters import plots
from ladder.chapters.ch09_profiling import tables as profiling
from ladder.chapters.explorer import Explorer, choice, slider

from . import tables as end_to_end


def _log_slider(description, value, low, high, **options):
    """Powers of two from ``low`` to ``high``."""
    lengths = [(plots.tokens(1 << n), 1 << n) for n in range(int(math.log2(low)), int(math.log2(high)) + 1)]
    return ipw.SelectionSlider(
        options=lengths, value=value, description=description, style={"description_width": "initial"},
        layout=ipw.Layout(width=options.pop("width", "360px")),
    )  # fmt: skip


class DecisionExplorer(Explorer):
    """Is a better attention kernel worth it? The rule of ``python -m
    ladder.profile`` on numbers that the reader sets."""

    title = "decision"
    EXPERTS = {"mixture of experts": True, "dense": False, "I do not know": None}

    def __init__(
        self, share=45, communication=10, busy=92, step_ms=60, target_ms=40, context=32768,
        experts="mixture of experts", gpus=1,
    ):  # fmt: skip
        super().__init__()
        self.share = slider("attention, % of kernel time", share, 0, 100)
        self.communication = slider("communication, %", communication, 0, 100)
        self.busy = slider("a kernel runs, % of the time", busy, 0, 100)
        self.step_ms = slider("a batch takes, ms", step_ms, 1, 200)
        self.target_ms = slider("it should take, ms", target_ms, 1, 200)
        self.context = _log_slider("longest context", context, 512, 131072)
        self.experts = choice("model", list(self.EXPERTS.items()), self.EXPERTS[experts])
        self.gpus = choice("GPUs", [1, 2, 8], gpus)
        self.start(
            [self.share, self.communication], [self.busy, self.context], [self.step_ms, self.target_ms],
            [self.experts, self.gpus],
        )  # fmt: skip

    def found(self):
        """The controls as the measurement that ``ladder.profile`` would have made."""
        share = self.share.value / 100
        communication = min(self.communication.value / 100, 1 - share)
        work = self.step_ms.value * self.busy.value / 100
        return profile.Found(
            device="a GPU", gpus=self.gpus.value, steps=1, step_ms=float(self.step_ms.value), work_ms=work,
            attention_share=share,
            communication_share=communication, busy_share=self.busy.value / 100, dflash_names=[],
            attention_names={"attention": share * work},
            other_names={"matrix products": (1 - share - communication) * work}, memory={}, memory_curve=[],
            moe=self.experts.value,
            moe_because="as you said" if self.experts.value is not None else "", context=self.context.value,
            context_because="as you said",
        )  # fmt: skip

    def answer(self):
        """``profile.Answer`` to the controls."""
        return profile.decide(self.found(), float(self.target_ms.value))

    def end_to_end(self, gain):
        """x as fast, a whole batch, when attention becomes ``gain`` x
        as fast: what no kernel fills is not shortened."""
        found = self.found()
        return profiling.end_to_end(found.attention_share * found.busy_share, gain)

    def draw(self):
        found, answer = self.found(), self.answer()
        figure, (bar, chart) = plots.canvas(3.0, columns=2, width_ratios=[1.5, 1])
        busy = 100 * found.busy_share
        parts = [
            ("attention", found.attention_share * busy, plots.BLUE, None),
            ("communication", found.communication_share * busy, plots.ORANGE, "\\\\\\"),
            ("other kernels", (1 - found.attention_share - found.communication_share) * busy, plots.SKY, "..."),
            ("no kernel", 100 - busy, plots.PAPER, "//"),
        ]
        left = 0.0
        for name, width, colour, hatch in parts:
            bar.barh(
                0, width, left=left, color=colour, edgecolor=plots.INK, lw=0.7, hatch=hatch,
                label=f"{name}, {width:.0f} %", height=0.5,
            )  # fmt: skip
            left += width
        threshold = 100 * profile.SHARE * found.busy_share
        bar.axvline(threshold, ymin=0.15, ymax=0.85, color=plots.RED, lw=2.2, ls="--")
        bar.text(threshold, 0.36, "30 % of kernel time", ha="center", fontsize=8.5, color=plots.RED)
        bar.set(xlim=(0, 100), ylim=(-0.5, 0.5), yticks=[], xlabel="per cent of a batch")
        bar.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2)
        gains = [self.end_to_end(g) for g in profiling.GAINS]
        for y, (gain, value) in enumerate(zip(profiling.GAINS, gains)):
            chart.barh(
                y, value - 1, color=plots.GREEN, edgecolor=plots.INK, lw=0.6, hatch="xx" if gain == math.inf else None
            )
            chart.text(value - 1 + 0.03 * max(g - 1 for g in gains), y, f" {value:.2f} x", va="center", fontsize=9)
        chart.set_yticks(range(len(gains)), ["in no time" if g == math.inf else f"{g:g} x" for g in profiling.GAINS])
        top = max(0.1, max(gains) - 1)
        chart.set(xlim=(0, 1.5 * top), xticks=[], ylabel="attention becomes")
        chart.set_title("end to end", fontsize=10.5)
        share, *questions, verdict = answer.lines[:5]
        return figure, "<br>".join([share, *questions, f"<b>{verdict}</b>", *answer.lines[5:]])


class AmdahlExplorer(Explorer):
    """End to end from a kernel's gain and its share of the time."""

    title = "Amdahl's law"

    def __init__(self, share=30, gain=2.0):
        super().__init__()
        self.share = slider("share of the time, %", share, 0, 99)
        self.gain = slider("the kernel becomes x as fast", gain, 0.5, 8.0, 0.1)
        self.start([self.share, self.gain])

    def value(self):
        """x as fast, end to end."""
        return profiling.end_to_end(self.share.value / 100, self.gain.value)

    def draw(self):
        figure, axes = plots.canvas(3.6)
        share = self.share.value / 100
        profiling.draw_amdahl(axes, share, self.gain.value)
        value, best = self.value(), profiling.end_to_end(share, math.inf)
        part = self.gain.value * (1 - share) / (self.gain.value * (1 - share) + share)
        text = (
            f"A part that takes {self.share.value} % of the time and becomes {self.gain.value:.1f} x as fast makes the "
            f"whole <b>{value:.2f} x</b> as fast; "
            f"no kernel for it can give more than {best:.2f} x. Afterwards it takes {100 * (1 - part):.0f} % of what "
            f"is left, "
            "which is the share that the next kernel starts from."
        )
        return figure, text


class TimelineExplorer(Explorer):
    """Continuous batching as it happens: the engine's own scheduler
    and page pool, with tokens counted and not computed."""

    title = "timeline of the scheduler"
    # name: (step of arrival, prompt tokens, answer tokens) of each request
    WORK = {
        "six prompts at once": [(0, 40, 14), (0, 120, 10), (0, 30, 18), (0, 70, 8), (0, 55, 12), (0, 24, 16)],
        "one long prompt among short ones": [(0, 24, 16), (0, 30, 16), (2, 320, 6), (3, 20, 14), (6, 20, 14)],
        "a trickle": [(0, 60, 10), (3, 60, 10), (6, 60, 10), (9, 60, 10), (12, 60, 10)],
        "short prompts, long answers": [(0, 40, 30), (0, 24, 36), (1, 60, 24), (2, 16, 36), (6, 90, 12)],
    }

    def __init__(self, work="short prompts, long answers", pages=14, chunk_tokens=64, decode_every=4):
        super().__init__()
        self.work = choice("requests", list(self.WORK), work)
        self.pages = slider("pages of 16 tokens", pages, 4, 48)
        self.chunk_tokens = slider("most prompt tokens in a step", chunk_tokens, 16, 384, 16)
        self.decode_every = slider("decode after so many prefills", decode_every, 1, 8)
        self.start([self.work, self.pages], [self.chunk_tokens, self.decode_every])

    def run(self):
        """The ``end_to_end.Run`` of the controls; raises ValueError when a request can never fit."""
        return end_to_end.serve(
            self.WORK[self.work.value],
            pages=self.pages.value,
            chunk_tokens=self.chunk_tokens.value,
            decode_every=self.decode_every.value,
        )

    def draw(self):
        try:
            run = self.run()
        except ValueError as error:
            figure, axes = plots.canvas(1.4)
            axes.axis("off")
            axes.text(0.5, 0.5, "refused before anything runs", ha="center", va="center", fontsize=13, color=plots.RED)
            return figure, f"The pool has {16 * self.pages.value} tokens, and there is {error}."
        work, used = self.WORK[self.work.value], run.used
        figure, (chart, pool) = plots.canvas(4.4, rows=2, height_ratios=[2.6, 1], sharex=True)
        end_to_end.draw_timeline(chart, run.marks, len(work))
        pool.fill_between(range(len(used) + 1), [*used, 0], step="post", color=plots.SKY, edgecolor=plots.INK, lw=0.8)
        pool.axhline(self.pages.value, color=plots.RED, ls="--", lw=1.4)
        pool.set(ylim=(0, 1.15 * self.pages.value), xlabel="step", ylabel="pages in use")
        waits = [request.times[0] + 1 - came for request, (came, _, _) in zip(run.requests, work)]
        gaps = [b - a for request in run.requests for a, b in zip(request.times, request.times[1:])]
        redone = sum(m.tokens for m in run.marks if m.what == "prefill") - sum(prompt for _, prompt, _ in work)
        text = (
            f"{len(used)} steps. First tokens come after {min(waits)} to {max(waits)} steps; between two tokens of an "
            f"answer lie at most {max(gaps)}. "
            f"<b>{run.preemptions} preemption{'' if run.preemptions == 1 else 's'}</b>" + (f", which cost {redone} "
                f"tokens computed twice" if redone else "")
            + f"; the pool was {100 * sum(used) / (len(used) * self.pages.value):.0f} % full on average and never "
                f"overfull."
        )  # fmt: skip
        return figure, text


class PoolExplorer(Explorer):
    """Memory of a GPU that serves DeepSeek-V2-Lite: what is left for
    the KV pool, and how many requests that holds. Arithmetic."""

    title = "KV pool and concurrency"

    def __init__(self, gpu="H200, 141 GB", fraction=0.9, tokens=4608, steps=65536):
        super().__init__()
        self.weights = 2 * end_to_end.find("deepseek-v2-lite").parameters
        self.gpu = choice("GPU", list(end_to_end.GPUS.items()), end_to_end.GPUS[gpu])
        self.fraction = slider("memory fraction", fraction, 0.5, 0.99, 0.01)
        self.tokens = slider("tokens of a request", tokens, 512, 131072, 512)
        self.step_keys = choice(
            "keys of a prefill step", [(plots.tokens(n), n) for n in (8192, 65536, 131072, 262144)], steps
        )
        self.start([self.gpu, self.fraction], [self.tokens, self.step_keys])

    def plan(self, fraction=None):
        """The ``MemoryPlan`` of the controls."""
        return end_to_end.memory_plan(
            self.gpu.value,
            fraction or self.fraction.value,
            chunk_keys=self.step_keys.value,
            longest=self.tokens.value,
            weights=self.weights,
        )

    def requests(self, fraction=None):
        """Most requests at once."""
        return end_to_end.concurrency(self.plan(fraction), self.tokens.value)

    def draw(self):
        plan = self.plan()
        pool = max(0, plan.pool)
        figure, (bar, curve) = plots.canvas(3.3, columns=2, width_ratios=[1, 1.35])
        bottom = 0.0
        outside = plan.total * (1 - plan.fraction)
        for name, size, colour, hatch in (
            ("weights", plan.weights, plots.GREY, None),
            ("activations", plan.activations + plan.reserve, plots.ORANGE, "\\\\\\"),
            ("KV pool", pool, plots.BLUE, None), ("left alone", outside, plots.PAPER, "//"),
        ):  # fmt: skip
            bar.bar(
                0, size / 1e9, bottom=bottom / 1e9, color=colour, edgecolor=plots.INK, lw=0.7, hatch=hatch, width=0.6
            )
            if size > 0.005 * plan.total:
                bar.text(0.36, (bottom + size / 2) / 1e9, f"{name}, {plots.size(size)}", va="center", fontsize=9)
            bottom += size
        bar.set(xlim=(-0.4, 1.9), xticks=[], ylabel="GB")
        fractions = [0.5 + 0.01 * n for n in range(50)]
        curve.plot(fractions, [self.requests(f) for f in fractions], color=plots.BLUE, lw=1.8)
        for f in (0.85, 0.90, 0.95):
            curve.plot(f, self.requests(f), "s", color=plots.SKY, mec=plots.INK, ms=7)
            curve.annotate(
                f"{self.requests(f):,}", (f, self.requests(f)), xytext=(-6, 5), textcoords="offset points", ha="right",
                fontsize=9,
            )  # fmt: skip
        curve.plot(self.fraction.value, self.requests(), "o", color=plots.RED, mec=plots.INK, ms=9, zorder=5)
        curve.set(xlabel="memory fraction", xlim=(0.5, 1.0), ylim=(0, None))
        curve.set_title(f"requests of {self.tokens.value:,} tokens at once", fontsize=10.5)
        curve.grid(True, lw=0.6)
        if pool == 0:
            text = "<b>Does not fit</b>: weights and activations leave nothing for the pool. The engine says so before it allocates anything."  # noqa: E501
        else:
            per_point = (self.plan(min(0.99, plan.fraction + 0.01)).pool - plan.pool) / max(1, plan.pool)
            text = (
                f"The pool holds {plan.pages * 64:,} tokens: <b>{self.requests():,} requests</b> of "
                f"{self.tokens.value:,}. One point of the fraction more is "
                f"{100 * per_point:.1f} % more pool here; and the activations of a step are "
                f"{plots.size(plan.activations)}, whatever the pool."
            )
        return figure, text


class ShareExplorer(Explorer):
    """Attention's share of the time against context, from FLOPs
    (prefill) and bytes (decode), and what a kernel then gives."""

    title = "attention's share by arithmetic"

    def __init__(self, phase="prefill", context=16384, batch=8, efficiency=0.7, gain=1.4):
        super().__init__()
        self.phase = choice("phase", ["prefill", "decode"], phase)
        self.context = _log_slider("context", context, 128, 262144)
        self.batch = slider("requests of a decode step", batch, 1, 128)
        self.efficiency = slider("attention's speed, relative to the rest", efficiency, 0.2, 1.0, 0.05, width="420px")
        self.gain = slider("kernel gain, x", gain, 1.0, 4.0, 0.1)
        self.start([self.phase, self.context], [self.efficiency], [self.batch, self.gain])

    def shares(self, context=None):
        """{model: share 0 .. 1}."""
        return {
            name: model.share(
                self.phase.value, context or self.context.value, batch=self.batch.value,
                efficiency=self.efficiency.value,
            )  # fmt: skip
            for name, model in end_to_end.models().items()
        }

    def draw(self):
        figure, axes = plots.canvas(3.6)
        lengths = [2 ** (7 + n / 4) for n in range(45)]
        models = end_to_end.models()
        options = dict(batch=self.batch.value, efficiency=self.efficiency.value)
        for (name, model), (style, colour) in zip(
            models.items(), (("-", plots.BLUE), ("--", plots.ORANGE), (":", plots.INK))
        ):
            axes.plot(
                lengths, [100 * model.share(self.phase.value, n, **options) for n in lengths], style, color=colour,
                lw=2.0, label=name,
            )  # fmt: skip
        axes.axhline(100 * profile.SHARE, color=plots.RED, ls="--", lw=1.2)
        axes.axvline(self.context.value, color=plots.GREY, lw=1.2)
        axes.set(
            xscale="log", xlim=(128, 262144), ylim=(0, 100), xlabel="context, tokens",
            ylabel="attention, per cent of the time",
        )  # fmt: skip
        ticks = [1 << n for n in range(7, 19)]
        axes.set_xticks(ticks, [plots.tokens(n) for n in ticks])
        axes.minorticks_off()
        axes.grid(True, lw=0.6)
        axes.legend(loc="upper left")
        parts = []
        for name, share in self.shares().items():
            first = end_to_end.crossing(models[name], self.phase.value, profile.SHARE, **options)
            parts.append(
                f"{name}: {100 * share:.0f} %, <b>{profiling.end_to_end(share, self.gain.value):.2f} x</b> end to end; "
                f"30 % from "
                + (f"{first:,} tokens" if first else "no length of practice")
            )
        return (
            figure,
            f"At {plots.tokens(self.context.value)}, with a kernel {self.gain.value:.1f} x as fast:<br>"
            + "<br>".join(parts),
        )
