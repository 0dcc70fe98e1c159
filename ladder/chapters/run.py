"""Run the chapters and keep what they print: ``python -m ladder.chapters.run [notebooks/03_online_softmax.ipynb ...]``.

Each notebook runs from top to bottom in a fresh kernel and is written back in place, in the form in which it is
committed: execution counts in order, no timestamps, no widget state,
no local paths; an explorer keeps its still picture.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {
        "name": "python",
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "pygments_lexer": "ipython3",
    },
}


def executed(path, **environment):
    """A notebook after all of its cells ran in a fresh kernel; raises nbclient's CellExecutionError when one fails.

    environment: variables that the kernel gets besides this process's.
    """
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    paths = [str(FOLDER.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=600, record_timing=False, store_widget_state=False,
        resources={"metadata": {"path": str(Path(path).parent)}},
    )  # fmt: skip
    client.execute(env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment})
    return notebook


def execute(path):
    """Run one notebook and write it back; raises nbclient's CellExecutionError when a cell fails."""
    notebook = executed(path)
    tidy(notebook)
    nbformat.write(notebook, path)


def tidy(notebook):
    """Drop what differs from run to run or means nothing without this kernel."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k in ("tags", "jupyter")})
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if WIDGET_VIEW in data and len(data) > 1:
                del data[WIDGET_VIEW]
                output.metadata.pop(WIDGET_VIEW, None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="which; all by default")
    args = parser.parse_args()
    for path in args.notebooks or sorted(FOLDER.glob("*.ipynb")):
        start = time.perf_counter()
        execute(path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
