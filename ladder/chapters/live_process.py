"""How a chapter measures on the reader's GPU: a process of its own, a progress line, a cache, and what is shown.

A chapter's own process may run kernels in Triton's interpreter, so a live cell starts a program (``Topic.module``) that
prints one JSON object a line: what it is about to do (``doing``), and at last the results document (``document``).
"""

import argparse
import base64
import contextlib
import fcntl
import functools
import hashlib
import html
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ladder.chapters import plots
from ladder.lab import results

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Topic:
    """Something that a live cell measures.

    name: of its file in the cache, and the program's argument. module: the program. does: what the cell does, as the
    end of a sentence that begins with "On one, this cell". sources: files whose change makes cached numbers stale, as
    patterns below ``ladder/`` ("../" leads to the other packages). arguments: more of the program's arguments.
    """

    name: str
    module: str
    does: str
    sources: tuple
    arguments: tuple = ()

    @property
    def without_gpu(self):
        """The line that the cell prints where there is no GPU."""
        return f"There is no CUDA device here. On one, this cell {self.does}"

    @property
    def cache(self):
        """The file that keeps the numbers of this GPU, driver, torch, Triton and source (its name begins with ours)."""
        digest = hashlib.sha256(json.dumps(results.machine("cuda")).encode())
        for pattern in ("chapters/live*.py", *self.sources):
            for path in sorted((ROOT / "ladder").glob(pattern)):
                digest.update(path.read_bytes())
        return _folder() / f"{self.name}-{digest.hexdigest()[:16]}.json"

    @property
    def program(self):
        """The command line that measures."""
        return [sys.executable, "-m", self.module, self.name, *self.arguments]


def _folder():
    """Where numbers are kept: ``LADDER_LIVE_CACHE``, or a folder in the user's cache."""
    if os.environ.get("LADDER_LIVE_CACHE"):
        return Path(os.environ["LADDER_LIVE_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "attention-ladder", "live")


def document(topic, again=False):
    """The results document of a topic on this machine's GPU, from the cache or measured now.

    Args:
        again: measure also where the cache has this GPU's numbers for this code.

    Returns:
        The document; None where there is no CUDA device or the measurement failed, with the reason printed in a line.
    """
    import torch

    if not torch.cuda.is_available():
        print(topic.without_gpu)
        return None
    path = topic.cache
    with _alone():
        if not again and path.exists():  # measured while this process waited
            return results.read(path)
        doc, error = _run(topic, Progress())
    if doc is None:
        print(f"This machine's GPU could not be measured: {error}")
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    results.write(doc, path)
    return doc


@contextlib.contextmanager
def _alone():
    """Wait until no other chapter of this user measures: two at a time would slow each other down."""
    with open(Path(tempfile.gettempdir(), f"attention-ladder-{os.getuid()}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(topic, progress):
    """(document, None), or (None, what went wrong in one line)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    found = None
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(topic.program, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                thing = json.loads(line)
                found = thing.get("document", found)
                if "doing" in thing:
                    progress.show(thing["done"], thing["of"], thing["doing"])
            process.wait()
        finally:  # also when the reader interrupts the cell
            process.kill()
            process.communicate()
        progress.done()
        errors.seek(0)
        said = [line for line in errors.read().splitlines() if line.strip()]
    if found is None:
        return None, said[-1] if said else f"the process ended with status {process.returncode}"
    return found, None


def serve(measure, names, argv=None):
    """The main function of a topic's program: ``measure(name, doing)`` returns the document, see ``report``."""
    parser = argparse.ArgumentParser(description="Measure what a chapter shows live; prints one JSON object a line.")
    parser.add_argument("name", choices=names)
    report(functools.partial(measure, parser.parse_args(argv).name))


def report(measure):
    """Print the document that ``measure(doing)`` returns, and before it what is being done.

    ``doing(done, of, what)`` says that ``done`` of ``of`` parts are done and what comes now.
    """

    def say(thing):
        print(json.dumps(thing), flush=True)

    start = time.perf_counter()
    found = measure(lambda done, of, what: say({"doing": what, "done": done, "of": of}))
    say({"document": {**found, "seconds": round(time.perf_counter() - start, 1)}})


class Progress:
    """A line under the cell that says what is being measured, and goes when all is done."""

    handle = None

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


class Shown:
    """A measured document as a notebook shows it: a sentence, a table and a picture.

    A subclass has ``verdict()`` (the sentence), ``table()`` (headings, rows of text) and ``figure()``; ``ok`` says
    whether all checks passed, and ``measured`` holds the rows that were not left out.
    """

    def __init__(self, doc):
        self.doc = doc

    @property
    def measured(self):
        """Rows that were not left out."""
        return [row for row in self.doc["rows"] if "skipped" not in row]

    @property
    def ok(self):
        """Whether every check of every measured row passed."""
        return all(row.get("ok", True) for row in self.measured)

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
        parts.append(f"<p>{html.escape(self.where)}, torch {here['torch']}, Triton {here['triton']}.</p>")
        return {"text/html": "".join(parts), "text/plain": repr(self)}

    @property
    def where(self):
        """The name of the GPU, or of the CPU where there is none."""
        return self.doc["machine"]["gpu"] or self.doc["machine"]["cpu"]


def _html_row(cells, tag):
    inside = "".join(f'<{tag} style="text-align: left">{html.escape(cell)}</{tag}>' for cell in cells)
    return f"<tr>{inside}</tr>"
