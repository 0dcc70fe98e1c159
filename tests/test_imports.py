"""What importing costs and needs: no Triton for steps 01 to 04, no CUDA context, no change to the environment."""

import ast

import pytest
from support import ROOT
from support.process import WITHOUT_TRITON, python


def test_steps_01_to_04_run_without_triton():
    out = python(
        WITHOUT_TRITON
        + """
import torch
from ladder.lab.parity import Oracle
from ladder.lab.problem import MINILM
from ladder.rungs import RUNGS, find

q, k, v = MINILM.replace(B=1, Sq=64, Sk=64, causal=True).make()
oracle = Oracle(q, k, v, causal=True)
for rung in RUNGS[:4]:
    assert oracle.check(rung.attention(q, k, v, causal=True)), rung.name
starts = torch.tensor([0, 30, 64])
find(4).module.attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), starts, starts)
assert not [name for name in sys.modules if name.split(".")[0] == "triton"]
try:
    find(5).attention(q, k, v)
except ImportError as error:
    print(error)
"""
    )
    assert out.strip() == "step05_fused: needs Triton (pip install triton); steps 01 to 04 run without it"


def test_the_instruments_import_without_triton():
    names = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts)
        for folder in ("lab", "chapters")
        for p in (ROOT / "ladder" / folder).rglob("*.py")
        if p.stem not in ("__init__", "solutions_triton")
    ]
    lab = {"compile.compiler", "compile.matrix", "interpret", "parity", "peers", "problem", "timing"}
    assert {f"ladder.lab.{name}" for name in lab} <= set(names)
    code = "\n".join(f"import {name}" for name in names)
    python(WITHOUT_TRITON + code + "\nfrom ladder.lab.interpret import has_triton\nprint('imported')")


def test_import_changes_nothing():
    out = python(
        """
import os, sys
import torch  # what torch itself does is not ours
def process():
    switches = torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    return dict(os.environ), switches, torch.random.get_rng_state().tolist()
before = process()
import ladder, ladder.rungs, ladder.step05_fused
for rung in ladder.rungs.RUNGS:
    rung.module
    rung.story()
import ladder.lab.problem, ladder.lab.parity, ladder.lab.timing, ladder.lab.compile.compiler, ladder.lab.interpret
assert before == process(), "importing changed the process, or drew random numbers"
assert not torch.cuda.is_initialized(), "importing initialised CUDA"
print("same")
"""
    )
    assert out.strip() == "same"


def test_import_ladder_needs_not_even_torch():
    found = python("import sys, ladder, ladder.rungs; print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))")
    assert found.strip() == "[]"


def test_step05_on_the_cpu_without_the_interpreter_says_what_to_do():
    pytest.importorskip("triton")
    out = python(
        """
import torch
from ladder.rungs import find
q = torch.zeros(1, 1, 4, 16)
try:
    find(5).attention(q, q, q)
except ValueError as error:
    print(error)
"""
    )
    wanted = "want a CUDA tensor, or Triton's interpreter: set TRITON_INTERPRET=1"
    assert out.startswith(f"step05_fused: q is on cpu; {wanted}")


def test_every_module_has_a_docstring():
    for path in sorted((ROOT / "ladder").rglob("*.py")):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)} has no docstring"


def test_step_08_brings_all_its_names_without_triton_or_the_lab():
    """A server wants the kernels, not the instruments they were measured with."""
    out = python(
        WITHOUT_TRITON
        + """
import ladder.step08_dflash2 as step08
for name in step08.__all__:
    getattr(step08, name)
print([name for name in sys.modules if name.startswith("ladder.lab") or name.split(".")[0] == "triton"])
"""
    )
    assert out.strip() == "[]"


def test_data_files_are_shipped():
    """setuptools installs no file beside the modules that ``package-data`` does not name."""
    tomllib = pytest.importorskip("tomllib")
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for folder in (ROOT / "ladder").rglob("data"):
        package = folder.parent
        patterns = shipped.get(".".join(package.relative_to(ROOT).parts), [])
        found = {path for pattern in patterns for path in package.glob(pattern)}
        assert found >= {path for path in folder.iterdir() if path.is_file()}, folder
