"""The live cell of a chapter: this rung beside the rung before it, checked and timed on the reader's own GPU.

``live.compare("step05_fused")`` runs ``ladder.chapters.live_measure`` (see ``live_process``) and shows what it found.
"""

from ladder.chapters import live_process, plots
from ladder.lab import results
from ladder.lab.names import title
from ladder.rungs import find

RECORDS = ("ladder", "step07_dflash1", "step08_dflash2")  # where a case's published row may stand, oldest first


def compare(rung, *, again=False):
    """Check ``rung`` on this GPU against float64 and the rung before it, and time both in turns.

    Args:
        rung: number or name. again: measure also where the cache has this GPU's numbers for this code.

    Returns:
        A Comparison to display; None where there is no CUDA device or the measurement failed, with the reason printed.
    """
    rung = find(rung)
    doc = live_process.document(topic(rung), again)
    return doc and Comparison(rung, doc)


def topic(rung):
    """What the live cell of a rung's chapter measures."""
    below = f"{find(rung.number - 1).name} and " if rung.number > 1 else ""
    does = (
        f"checks {rung.name} against {below}float64 in bf16, times it, and shows your GPU beside the record, which "
        "follows below."
    )
    sources = ("step0*/**/*.py", "lab/**/*.py", "contract.py")
    return live_process.Topic(rung.name, "ladder.chapters.live_measure", does, sources)


class Comparison(live_process.Shown):
    """What was measured here, as a notebook shows it: a table, and bars beside the record of the same cases."""

    def __init__(self, rung, doc):
        super().__init__(doc)
        self.rung = rung

    @property
    def ok(self):
        """Whether every row that was measured passed parity, against float64 and against the rung before."""
        return all(row["ok"] and row.get("agrees", True) for row in self.measured)

    def recorded(self, row):
        """The published milliseconds of the same case and implementation, or None."""
        for name in reversed(RECORDS):
            for entry in results.select(results.load(name), row["impl"], **row["case"]):
                if "ms" in entry:
                    return entry["ms"]["median"]
        return None

    def verdict(self):
        """One sentence: which checks passed."""
        wrong = [row for row in self.measured if not row["ok"] or not row.get("agrees", True)]
        if wrong:
            why = "differs from the rung before"
            failures = [f"{title(r['impl'])} on {label(r['case'])}: {r.get('reason') or why}" for r in wrong]
            return f"Parity FAILED. {'; '.join(failures)}"
        if not self.measured:
            return "Nothing could be measured here."
        pairs = sum("agrees" in row for row in self.measured)
        between = f", and {pairs} times the two rungs agree" if pairs else ""
        done = f"{len(self.measured)} results are within the error budget around float64"
        return f"Parity ok: {done}{between}. Every output held NaN before."

    def table(self):
        """(headings, rows of text)."""
        headings = (
            "case", "rung", "parity", "error / budget", "from the rung before", "ms", "TFLOP/s", "of the limit",
            "recorded ms", "longest kernel",
        )  # fmt: skip
        lines, limits = [], self.doc["limits"]
        for row in self.doc["rows"]:
            if "skipped" in row:
                lines.append((label(row["case"]), title(row["impl"]), row["skipped"], *[""] * 7))
                continue
            recorded = self.recorded(row)
            bound = max(row.get("tflops", 0) / limits["matmul_tflops"], row.get("tbs", 0) / limits["read_tbs"])
            lines.append((
                label(row["case"]), title(row["impl"]), "ok" if row["ok"] else "FAILED",
                f"{row['max_error']:.1e} / {row['budget']:.1e}", f"{row['distance']:.1e}" if "distance" in row else "",
                f"{row['ms']['median']:.3g}", f"{row['tflops']:.3g}", f"{100 * bound:.0f} %",
                f"{recorded:.3g}" if recorded else "", short(row.get("kernel")),
            ))  # fmt: skip
        return headings, lines

    @plots.styled
    def figure(self):
        """Milliseconds here of both rungs, and the record's, a group of bars a case."""
        rows = self.measured
        figure, axes = plots.canvas(1.3 + 0.42 * len(rows))
        places = range(len(rows))[::-1]
        for place, row in zip(places, rows):
            ours, recorded = row["impl"] == self.rung.name, self.recorded(row)
            here = row["ms"]["median"]
            colour, width = (plots.BLUE, 1.2) if ours else (plots.SKY, 0.5)
            axes.barh(place + 0.16, here, height=0.32, color=colour, edgecolor=plots.INK, lw=width)
            axes.text(here, place + 0.16, f" {here:.3g}", va="center", fontsize=8)
            if recorded:
                axes.barh(place - 0.16, recorded, height=0.32, color="none", edgecolor=plots.INK, lw=0.5, hatch="///")
                axes.text(recorded, place - 0.16, f" {recorded:.3g}", va="center", fontsize=8)
        axes.set_yticks(list(places), [f"{title(row['impl'])}\n{label(row['case'])}" for row in rows], fontsize=8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("milliseconds (logarithmic); hatched: the record")
        axes.margins(x=0.12)
        axes.set_title(f"{self.rung.title} on this machine: {self.where}")
        return figure


def label(case):
    """A case in a few words: "4 x 4k causal, 16 heads of 128"."""
    heads = f"{case['Hq']} heads" if case["Hq"] == case["Hkv"] else f"{case['Hq']}/{case['Hkv']} heads"
    mask = "causal" if case["causal"] else "dense"
    kind = mask if case["mode"] == "prefill" else case["mode"].replace("_", " ").replace("mla", "MLA")
    return f"{case['B']} x {plots.tokens(case['Sk'])} {kind}, {heads} of {case['D']}"


def short(kernel):
    """A kernel's name without its template arguments."""
    name = (kernel or "").split("<")[0].removeprefix("void ")
    return name if len(name) <= 40 else name[:37] + "..."
