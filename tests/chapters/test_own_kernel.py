"""Chapter 05's own kernel: what is copied out of the notebook, what is measured, and what a broken kernel is told."""

import json
import linecache

import pytest
import torch
from support import ROOT

pytest.importorskip("ipywidgets")
pytest.importorskip("triton")

from ladder.chapters import plots
from ladder.chapters.ch01_05_rungs import own_kernel
from ladder.lab.problem import AttentionProblem

PROBLEMS = [AttentionProblem(B=1, Hq=2, Hkv=2, Sq=s, Sk=s, D=d, Dv=d, dtype="float16") for s, d in ((70, 16), (64, 32))]


def cell(text):
    """The source of the chapter's one cell that holds ``text``."""
    cells = json.loads((ROOT / "notebooks" / "05_fused.ipynb").read_text())["cells"]
    found = ["".join(c["source"]) for c in cells if c["cell_type"] == "code" and text in "".join(c["source"])]
    assert len(found) == 1
    return found[0]


def notebook(source, name="<cell 1>"):
    """What a notebook has after a cell with this source: its functions, whose text linecache knows."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope = {"__name__": "__main__"}
    exec(compile("import torch, triton\nimport triton.language as tl\n", "<setup>", "exec"), scope)
    exec(compile(source, name, "exec"), scope)
    return scope


def measured(source, tmp_path, name="attend", problems=PROBLEMS):
    path = tmp_path / "reader.py"
    path.write_text(source)
    return own_kernel.OwnKernel(json.loads(json.dumps(own_kernel.measure(path, name, lambda *what: None, "cpu", problems))))


def test_the_chapters_kernel_is_copied_and_right(tmp_path):
    source = own_kernel.source(notebook(cell("def my_attention("))["attend"])
    assert source.count("@triton.jit") == 1 and source.startswith("import torch\n") and "def attend(" in source
    shown = measured(source, tmp_path)
    assert shown.ok and shown.verdict().startswith("Parity ok on 2 problems. Your kernel reaches ")
    headings, lines = shown.table()
    assert len(lines) == 4 and all(len(line) == len(headings) for line in lines)
    assert "<table>" in shown._repr_mimebundle_()["text/html"] and plots.png(shown.figure()).startswith(b"\x89PNG")


def test_numbers_and_helpers_of_the_reader_come_along():
    source = "BLOCK = 64\n\n@triton.jit\ndef double(x):\n    return x + x\n\n@triton.jit\ndef kernel(x):\n    double(x)\n\ndef attend(q, k, v):\n    kernel[(BLOCK,)](q)\n"
    text = own_kernel.source(notebook(source, "<cell 2>")["attend"])
    assert "BLOCK = 64" in text and text.index("def double") < text.index("def kernel") < text.index("def attend")


@pytest.mark.parametrize("right, wrong, said", [
    ("acc * rescale[:, None] +", "acc +", "Parity FAILED on 1 x 70"),
    ("return out", "return out[0]", "Your kernel does not run here. ValueError: attend returned (70, 16); want a tensor of shape (2, 70, 16)"),
    ("tl.maximum(row_max, ", "tl.maximal(row_max, ", "Your kernel does not run here. "),
])
def test_a_broken_kernel_is_told_in_a_sentence(right, wrong, said, tmp_path):
    source = own_kernel.source(notebook(cell("def my_attention("))["attend"])
    shown = measured(source.replace(right, wrong), tmp_path)
    assert shown.verdict().startswith(said) and "\n" not in shown.verdict()
    shown._repr_mimebundle_()


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="attend is a Tensor; want the function that launches your kernel"):
        own_kernel.time(torch.ones(3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_which_the_chapter_holds(capsys):
    attend = notebook(cell("def my_attention("))["attend"]
    capsys.readouterr()
    assert own_kernel.time(attend) is None
    line = capsys.readouterr().out
    assert line.startswith("There is no CUDA device here. On one, this cell tests your kernel") and line.count("\n") == 1
    cells = json.loads((ROOT / "notebooks" / "05_fused.ipynb").read_text())["cells"]
    found = [c for c in cells if "own_kernel.time(attend)" in "".join(c["source"])]
    assert found[0]["metadata"]["tags"] == ["nbval-ignore-output"] and "".join(found[0]["outputs"][0]["text"]) == line


def test_the_program_measures_what_its_arguments_name(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(own_kernel, "measure", lambda *a: seen.append(a[:2]) or {"rows": []})
    own_kernel.main(["own-1", "a.py", "attend"])
    assert seen == [("a.py", "attend")] and '"document"' in capsys.readouterr().out
