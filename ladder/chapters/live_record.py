"""Run every chapter on this GPU and record what its live cell measured: ``python -m ladder.chapters.live_record``.

Nothing is read from the reader's cache, and no notebook is written back.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from ladder.chapters.run import FOLDER, executed
from ladder.lab import results

TAG = "nbval-ignore-output"  # of live cells: what they show differs from machine to machine


def live_cells(notebook):
    """The live cells of a notebook: those whose output shows this machine's GPU."""
    return [cell for cell in notebook.cells if TAG in cell.metadata.get("tags", [])]


def shown(cell):
    """What a cell shows, as text; empty when it only printed, or showed no more than its progress."""
    outputs = [output["data"] for output in cell.outputs if "text/html" in output.get("data", {})]
    return "\n".join(data["text/plain"] for data in outputs if not data["text/plain"].startswith("<IPython")).strip()


def chapter(path, cache):
    """Run one chapter with its live cells measuring into the folder ``cache``.

    Returns:
        (the results row of the chapter, the rows that its live cell measured). The row has ``seconds`` of the whole
        notebook, ``live_seconds`` of the measurement, ``verdict``, ``ok`` and ``measured``.

    Raises:
        nbclient's CellExecutionError: a cell failed. RuntimeError: a live cell showed nothing.
    """
    Path(cache).mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    notebook = executed(path, LADDER_LIVE_CACHE=str(cache))
    seconds = time.perf_counter() - start
    said = [shown(cell) for cell in live_cells(notebook)]
    if not said or not all(said):
        raise RuntimeError(f"{Path(path).name}: a live cell showed no measurement")
    docs = [results.read(file) for file in sorted(Path(cache).glob("*.json"))]
    rows = [row for doc in docs for row in doc["rows"]]
    measured = [row for row in rows if "skipped" not in row]
    verdicts = [text.splitlines()[0] for text in said]
    right = all(row.get("ok", True) and row.get("agrees", True) for row in measured)
    entry = results.row(
        {"mode": "chapter", "chapter": Path(path).stem}, "notebook", seconds=round(seconds, 1),
        live_seconds=round(sum(doc["seconds"] for doc in docs), 1), verdict=" ".join(verdicts),
        ok=bool(right and not any("FAILED" in verdict for verdict in verdicts)), measured=len(measured),
    )  # fmt: skip
    return entry, [{**row, "chapter": Path(path).stem} for row in rows]


def attempt(path):
    """``chapter`` with a cache of its own; ("failed", row) where it raises, since it must not cost the others."""
    with tempfile.TemporaryDirectory() as cache:
        try:
            return "ran", *chapter(path, cache)
        except Exception as error:
            return "failed", {"chapter": Path(path).stem, "error": str(error)[-600:]}, []


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m ladder.chapters.live_record", description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="which; all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--jobs", type=int, default=4, help="chapters at a time; one measures at a time (default 4)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("want a CUDA device")
    paths = args.notebooks or sorted(FOLDER.glob("*.ipynb"))
    return record(paths, args.jobs, args.json)


def record(paths, jobs, target=None):
    """Run the chapters, print a line for each, and keep the record written as they end. Returns the exit code."""
    chapters, measured, failed = [], [], []
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for future in concurrent.futures.as_completed([pool.submit(attempt, path) for path in paths]):
            how, entry, rows = future.result()
            if how == "failed":
                failed.append(entry)
                print(f"{entry['chapter']}: FAILED {entry['error']}", file=sys.stderr, flush=True)
            else:
                chapters.append(entry)
                measured += rows
                live = f"{entry['seconds']:.0f} s, of which live {entry['live_seconds']:.0f} s"
                print(f"{entry['case']['chapter']}: {live}: {entry['verdict']}", flush=True)
            if target:
                chapters.sort(key=lambda entry: entry["case"]["chapter"])
                measured.sort(key=lambda row: row["chapter"])
                results.write(results.document(chapters + measured, device="cuda", failures=failed), target)
    return int(bool(failed) or not all(entry["ok"] for entry in chapters))


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
