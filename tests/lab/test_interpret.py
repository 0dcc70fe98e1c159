"""Choosing the interpreter: before triton is imported, or an error that says so."""

import pytest
from support.process import python

from ladder.lab import interpret


@pytest.mark.parametrize(
    "value, on", [("1", True), ("true", True), ("ON", True), ("0", False), ("", False), ("no", False)]
)
def test_is_enabled(monkeypatch, value, on):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert interpret.is_enabled() is on


def test_is_enabled_when_unset(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert interpret.is_enabled() is False


def test_enable_makes_kernels_interpreted():
    pytest.importorskip("triton")
    out = python(
        """
from ladder.lab import interpret
interpret.enable()
interpret.enable()
from ladder.step05_fused.kernel import fused_attention_forward
print(type(fused_attention_forward).__name__, interpret.is_enabled())
"""
    )
    assert out.split() == ["InterpretedFunction", "True"]


def test_enable_too_late():
    pytest.importorskip("triton")
    out = python(
        """
import triton
from ladder.lab import interpret
try:
    interpret.enable()
except RuntimeError as error:
    print(error)
assert not interpret.is_enabled()
"""
    )
    assert "before triton is imported" in out and "TRITON_INTERPRET=1" in out


def test_enable_is_no_error_when_the_user_chose_it_already():
    pytest.importorskip("triton")
    assert python(
        "import triton; from ladder.lab import interpret; interpret.enable(); print('fine')", TRITON_INTERPRET="1"
    )


def test_without_gpu():
    pytest.importorskip("triton")
    out = python(
        "import torch; from ladder.lab import interpret; print(interpret.enable_without_gpu(), torch.cuda.is_available())"
    )
    assert out.split() in (["True", "False"], ["False", "True"])


def test_has_triton_does_not_import_it():
    assert (
        python(
            "import sys; from ladder.lab.interpret import has_triton; has_triton(); print('triton' in sys.modules)"
        ).strip()
        == "False"
    )


def test_an_older_triton_counts_loops_under_a_newer_numpy():
    """The pair is played: the mended function must do its work with the Triton that is installed too."""
    pytest.importorskip("triton")
    out = python(
        """
from ladder.lab import interpret
interpret._release = {"triton": (3, 6), "numpy": (1, 25)}.get
interpret.enable()
interpret.enable()
import torch
from triton.runtime import interpreter
from ladder.step05_fused import attention
q = torch.randn(1, 2, 40, 16)
print(interpreter._patch_lang_tensor.__wrapped__.__module__, attention(q, q, q, causal=True).isfinite().all().item())
"""
    )
    assert out.split() == ["triton.runtime.interpreter", "True"]
