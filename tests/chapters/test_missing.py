"""Records that lack rows: every chapter runs to its end, and says in sentences what is missing."""

import ast
import json
import os

import pytest
from support import ROOT

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

import nbformat
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient

from ladder.chapters import missing
from ladder.lab import results

CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What takes seconds and reads no record.
SLOW = (".parity(", "lesson_compiles(", ".accepts(", "memory_picture(", "split_picture(", "profiling.measured(", "profiling.report(",
        "profiling.held(", "= command(", "quality_here(", "exercises.check(", "spoiled_k", "Engine(", "memory_over_time(", "shares_picture(",
        "paged_decode(")  # fmt: skip


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A folder with every record, without its rows."""
    folder = tmp_path_factory.mktemp("results")
    for path in sorted((ROOT / "notebooks" / "results").glob("*.json")):
        (folder / path.name).write_text(json.dumps({**json.loads(path.read_text()), "rows": []}))
    return folder


def without_slow_cells(notebook):
    """The notebook without the slow cells, and without those that need a name which only such a cell makes."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    left_out = {cell.id for cell in cells if any(mark in cell.source for mark in SLOW)}
    for cell in cells:
        made = {name for other in cells if other.id in left_out for name in missing.assigned(other.source)}
        made -= {name for other in cells if other.id not in left_out for name in missing.assigned(other.source)}
        used = {node.id for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)}
        left_out |= {cell.id} if made & used else set()
    notebook.cells = [cell for cell in cells if cell.id not in left_out]
    return notebook


@pytest.mark.slow
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_runs_without_recorded_rows(path, empty):
    notebook = without_slow_cells(nbformat.read(path, as_version=4))
    client = NotebookClient(notebook, kernel_name="python3", timeout=600, resources={"metadata": {"path": str(path.parent)}})
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LADDER_RESULTS": str(empty)}
    client.execute(env=env)  # raises where a cell fails
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error"]
    said = "\n".join(output.get("text", "") + str(output.get("data", {}).get("text/markdown", "")) for output in outputs)
    if "PredictThenMeasure" in json.dumps(notebook.cells) and path.stem > "01":
        assert "ot recorded" in said


@pytest.fixture
def shell():
    shell = InteractiveShell()
    missing.install(shell)
    missing.install(shell)  # a second import changes nothing
    shell.user_ns["results"] = results
    yield shell
    InteractiveShell.clear_instance()


def test_a_cell_says_what_is_missing_and_those_after_it_why(shell, capsys):
    wanted = "x = 1\nrow = results.one({'rows': [], 'command': 'make record'}, 'step05_fused', Sq=64)\ny = row['ms']"
    assert shell.run_cell(wanted).success
    assert capsys.readouterr().out == "Not recorded: step05_fused with Sq 64. `make record` records it.\n"
    assert shell.run_cell("print(y)").success
    said = capsys.readouterr().out
    assert said.startswith("This cell needs `y`, which an earlier cell did not compute. Not recorded: step05_fused")
    assert shell.run_cell("z = y + 1").success and shell.run_cell("z").success
    assert "needs `z`, which an earlier cell did not compute. Not recorded" in capsys.readouterr().out
    assert shell.run_cell("print(x)").success and capsys.readouterr().out == "1\n"


@pytest.mark.parametrize("source", ["1 / 0", "print(nowhere)", "results.one({'rows': [1]}, 'a')"])
def test_other_errors_are_shown_as_ever(shell, source, capsys):
    result = shell.run_cell(source)
    assert not result.success and "Traceback" in capsys.readouterr().out


def test_outside_of_a_notebook_nothing_is_installed():
    missing.install_here()
    assert missing.assigned("%matplotlib inline") == set() and missing.assigned("a, b = 1, 2\nfor c in (): d = 3") == {"a", "b", "c", "d"}
