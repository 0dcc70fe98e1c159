"""The live cell of a chapter: this rung beside the rung before it, checked and timed on the reader's own GPU.

``live.compare("step05_fused")`` starts ``ladder.chapters.live_measure`` in a process of its own, shows what it
does, and keeps what it found in a cache, so that the next run shows it at once. Without a GPU it says one line.
"""

import base64
import hashlib
import html
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ladder.chapters import plots
from ladder.lab import results
from ladder.lab.names import title
from ladder.rungs import find

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ("ladder", "step07_dflash1", "step08_dflash2")  # where a case's published row may stand, oldest first


def compare(rung, *, again=False):
    """Check ``rung`` on this GPU against float64 and the rung before it, and time both in turns.

    Args:
        rung: number or name. again: measure also where the cache has this GPU's numbers for this code.

    Returns:
        A Comparison to display; None where there is no CUDA device or the measurement failed, with the reason printed.
    """
    import torch

    rung = find(rung)
    if not torch.cuda.is_available():
        print(_without_gpu(rung))
        return None
    path = cache_path(rung)
    if not again and path.exists():
        return Comparison(rung, results.read(path))
    doc, error = _run(rung, Progress(rung))
    if doc is None:
        print(f"This machine's GPU could not be measured: {error}")
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    results.write(doc, path)
    return Comparison(rung, doc)


def _without_gpu(rung):
    below = f"{find(rung.number - 1).name} and " if rung.number > 1 else ""
    return (
        f"There is no CUDA device here. On one, this cell checks {rung.name} against {below}float64 in bf16, "
        "times it, and shows your GPU beside the record, which follows below."
    )


def cache_path(rung):
    """The file that keeps this rung's numbers for this GPU, driver, torch, Triton and source."""
    digest = hashlib.sha256(json.dumps(results.machine("cuda")).encode())
    for pattern in ("step0*/**/*.py", "lab/**/*.py", "chapters/live*.py", "contract.py"):
        for path in sorted((ROOT / "ladder").glob(pattern)):
            digest.update(path.read_bytes())
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder, "attention-ladder", "live", f"{rung.name}-{digest.hexdigest()[:16]}.json")


def program(rung):
    """The command line that measures a rung."""
    return [sys.executable, "-m", "ladder.chapters.live_measure", rung.name]


def _run(rung, progress):
    """(document, None), or (None, what went wrong in one line)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    document = None
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(program(rung), env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                thing = json.loads(line)
                document = thing.get("document", document)
                if "doing" in thing:
                    progress.show(thing["done"], thing["of"], thing["doing"])
            process.wait()
        finally:  # also when the reader interrupts the cell
            process.kill()
            process.communicate()
        progress.done()
        errors.seek(0)
        said = [line for line in errors.read().splitlines() if line.strip()]
    if document is None:
        return None, said[-1] if said else f"the process ended with status {process.returncode}"
    return document, None


class Progress:
    """A line under the cell that says what is being measured, and goes when all is done."""

    def __init__(self, rung):
        self.rung, self.handle = rung, None

    def show(self, done, of, doing):
        """Say that ``done`` of ``of`` parts are done and what comes now."""
        from IPython.display import HTML, display

        bar = f'<progress value="{done}" max="{of}" style="width: 16em"></progress>'
        shown = HTML(f"{bar} {html.escape(doing)}")
        if self.handle is None:
            self.handle = display(shown, display_id=True)
        elif self.handle:
            self.handle.update(shown)

    def done(self):
        """Take the line away."""
        from IPython.display import HTML

        if self.handle:
            self.handle.update(HTML(""))


class Comparison:
    """What was measured here, as a notebook shows it: a table, and bars beside the record of the same cases."""

    def __init__(self, rung, doc):
        self.rung, self.doc = rung, doc

    @property
    def measured(self):
        """Rows that were not left out."""
        return [row for row in self.doc["rows"] if "skipped" not in row]

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
        axes.set_xlabel("milliseconds (logarithmic); hatched: the record")
        axes.margins(x=0.12)
        axes.set_title(f"{self.rung.title} on this machine: {self.doc['machine']['gpu'] or 'CPU'}")
        return figure

    def __repr__(self):
        headings, lines = self.table()
        return "\n".join([self.verdict(), *(" | ".join(cells) for cells in (headings, *lines))])

    def _repr_mimebundle_(self, include=None, exclude=None):
        headings, lines = self.table()
        parts = [f"<p><b>{html.escape(self.verdict())}</b></p><table>", _html_row(headings, "th")]
        parts += [_html_row(cells, "td") for cells in lines] + ["</table>"]
        if self.measured:
            picture = base64.b64encode(plots.png(self.figure())).decode()
            parts.append(f'<img style="max-width: 760px" src="data:image/png;base64,{picture}">')
        here = self.doc["machine"]
        versions = f"torch {here['torch']}, Triton {here['triton']}"
        parts.append(f"<p>{html.escape(here['gpu'] or here['cpu'])}, {versions}; the limits are this run's.</p>")
        return {"text/html": "".join(parts), "text/plain": repr(self)}


def _html_row(cells, tag):
    inside = "".join(f'<{tag} style="text-align: left">{html.escape(cell)}</{tag}>' for cell in cells)
    return f"<tr>{inside}</tr>"


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
