"""Committed notebooks are what a reader should find: executed in order, no errors, nothing local, numbers from the record."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest
from support import ROOT

from ladder.chapters.source import diff_lines
from ladder.lab import interpret, results
from ladder.rungs import RUNGS, find

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
RUNG_CHAPTERS = [p for p in NOTEBOOKS if any(p.stem == rung.name.removeprefix("step") for rung in RUNGS)]
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def read(path):
    return json.loads(path.read_text())


def source(cell):
    return "".join(cell["source"])


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def markdown(notebook):
    return "\n".join(source(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


def texts(notebook):
    """All text that outputs show, as (MIME type, text)."""
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                yield output["name"], "".join(output["text"])
            for kind, value in output.get("data", {}).items():
                if kind.startswith("text/"):
                    yield kind, "".join(value)


def each(function):
    return pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)(function)


def test_there_is_a_chapter_for_each_rung():
    names = {path.stem for path in NOTEBOOKS}
    assert {"00_orientation", *(rung.name.removeprefix("step") for rung in RUNGS)} <= names


@each
def test_executed_in_order_without_errors(path):
    notebook = read(path)
    counts = [cell["execution_count"] for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "run `python -m ladder.chapters.run` before committing"
    for cell in code_cells(notebook):
        assert all(output["output_type"] != "error" for output in cell["outputs"]), source(cell)
        assert not any(output.get("name") == "stderr" for output in cell["outputs"]), source(cell)


@each
def test_nothing_local_is_kept(path):
    notebook = read(path)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert set(cell["metadata"]) <= {"tags", "jupyter"}
        for output in cell.get("outputs", []):
            assert WIDGET_VIEW not in output.get("data", {}), "an explorer is committed as its still picture"
    for kind, text in texts(notebook):
        assert not re.search(r"/(home|root|tmp|work|Users|usr)/", text), f"a local path in {kind}: {text[:200]}"
        assert not re.search(r"0x[0-9a-f]{6,}", text), text[:200]
        assert not re.search(r"(?i)\bwarning\b", text), text[:200]
    assert path.stat().st_size < 1_200_000  # forges still render it


@each
def test_no_output_that_differs_from_run_to_run(path):
    for cell in code_cells(read(path)):
        tree = ast.parse("\n".join(line for line in source(cell).splitlines() if not line.startswith("%")))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        forbidden = names & {"interact", "interactive", "Output", "clear_output", "tqdm", "perf_counter", "timeit"}
        assert not forbidden, source(cell)


@each
def test_links_lead_somewhere(path):
    prose = re.sub(r"`[^`]*`", "", markdown(read(path)))
    for target in re.findall(r"\]\(([^)#]+)", prose):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


@each
def test_measured_numbers_are_computed_not_typed(path):
    """Milliseconds and rates may stand in outputs, which come from the recorded files, never in the prose itself."""
    typed = re.findall(r"\d[\d.,]*\s*(?:ms\b|TFLOP/s|TB/s|GB/s|tokens? a second)", markdown(read(path)))
    assert not typed


def captions():
    """What a figure of the ladder must say of its source: one caption a recorded file of its schema."""
    for file in results.FOLDER.glob("*.json"):
        doc = json.loads(file.read_text())
        if "limits" in doc:  # the scheduler records in a form of its own
            results.validate(doc)
            yield results.caption(doc)


@each
def test_recorded_numbers_say_where_they_come_from(path):
    notebook = read(path)
    if ".numbers(" not in "".join(map(source, code_cells(notebook))):
        return
    text = "\n".join(text for _, text in texts(notebook))
    shown = set(re.findall(r"recorded on [^<,.]+, \d{4}-\d\d-\d\d", text))
    assert shown and shown <= set(captions())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_minutes_and_further_reading(path):
    """Nobody reads for more than 45 minutes, the scheduler's chapter apart, and every chapter says where to read on."""
    prose = markdown(read(path))
    minutes = int(re.search(r"^\*\*(\d\d) minutes\b", prose, re.MULTILINE)[1])
    assert 10 <= minutes <= (60 if path.stem.startswith("10") else 45)
    reading = prose[prose.index("## Further reading") :]
    assert len(re.findall(r"\]\(https://", reading)) >= 3


@pytest.mark.parametrize("path", RUNG_CHAPTERS, ids=lambda p: p.stem)
def test_shape_of_a_rung_chapter(path):
    notebook = read(path)
    prose = markdown(notebook)
    number = int(path.stem[:2])
    assert re.search(r"\*\*\d\d minutes\*\*[^·]* · you need: .* · GPU: ", prose)
    for part in ("You will be able to", "## Recap", "**Still slow because**", "## Exercises", "## The roofline"):
        assert part in prose, part
    code = "\n".join(map(source, code_cells(notebook)))
    for part in (
        "PredictThenMeasure",
        f".parity({number})",
        f".speed(recorded, {number}",
        f"upto={number}",
        "live.compare(",
    ):
        assert part in code, part
    outputs = "\n".join(text for _, text in texts(notebook))
    assert "FAILS" not in outputs and "within budget" in outputs
    stubs = [cell for cell in code_cells(notebook) if "stub" in cell["metadata"].get("tags", [])]
    assert 2 <= len(stubs) <= (6 if number == 5 else 3)  # a first Triton kernel wants small steps
    for cell in stubs:
        assert re.match(r"\w+ visible: not yet: ", "".join(cell["outputs"][0]["text"])), "a stub is not the solution"


@pytest.mark.parametrize("old, new, most", [(1, 2, 30), (2, 3, 18), (3, 4, 24)])
def test_one_rung_is_one_idea(old, new, most):
    """How many lines of the attention function may be new from one rung to the next."""
    lines = diff_lines(find(old).attention, find(new).attention)
    assert 0 < sum(sign in "+~" and b.strip() != "" for sign, _, b in lines) <= most


def test_kernel_loop_is_the_loop_of_step_04():
    """Step 05's tile body updates the same state in the same order as step 04's loop."""
    text = (FOLDER.parent / "ladder" / "step05_fused" / "kernel.py").read_text()
    body = text[text.index("def fused_attention_tile") : text.index("def fused_attention_forward")]
    order = [body.index(f"{name} = ") for name in ("scores", "new_max", "finite_max", "rescale", "probs", "row_sum")]
    assert order == sorted(order)


@pytest.mark.skipif(not interpret.has_triton(), reason="Triton is not installed")
def test_recorded_compiler_output_is_of_this_kernel():
    """Compiling now gives the verdicts that the chapter tells and that the recorded sweep holds."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "ladder.lab.compile.sweep", "--lesson"]
    done = subprocess.run(command, cwd=FOLDER.parent, env=env, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    units = ["hgmma" if row["hgmma"] else "hmma" if row["hmma"] else "ffma" for row in rows]
    assert units == ["hmma", "hgmma", "hgmma", "ffma", "hmma", "hgmma"]
    assert [bool(row["spill_loads"] + row["local"]) for row in rows] == [False, False, True, False, False, False]
    sweep = results.load("step05_compile")
    for row in rows[1:3]:
        case = {
            name: row["case"][name] for name in ("D", "Dv", "dtype", "BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
        }
        recorded = results.one(sweep, "step05_fused", target="sm_90", **case)
        assert recorded["shared"] == row["shared"]
        assert bool(recorded["hgmma"]) == bool(row["hgmma"]) and bool(recorded["local"]) == bool(row["local"])
