"""The one place that turns Triton's interpreter on: kernels run on the CPU, slowly, one program after another.

Triton reads ``TRITON_INTERPRET`` when a kernel is decorated, so the choice has to be made before triton is imported.
Programs run in sequence in the interpreter: it shows values, never races or speed. Its bfloat16 products are wrong.
"""

import importlib.util
import os
import sys

import torch


def enable():
    """Turn the interpreter on for this process.

    Raises:
        RuntimeError: triton was imported without it, so kernels may already be compiled-mode functions.
    """
    if is_enabled():
        return
    if "triton" in sys.modules:
        raise RuntimeError(
            "Triton's interpreter must be chosen before triton is imported: call ladder.lab.interpret.enable() first, "
            "or start Python with TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"


def enable_without_gpu():
    """Turn the interpreter on where no CUDA device is present; return whether kernels are interpreted."""
    if not torch.cuda.is_available():
        enable()
    return is_enabled()


def is_enabled():
    """Whether kernels imported now run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def has_triton():
    """Whether Triton is installed; does not import it."""
    return importlib.util.find_spec("triton") is not None
