"""The one place that turns Triton's interpreter on: kernels run on the CPU, slowly, one program after another.

Triton reads ``TRITON_INTERPRET`` when a kernel is decorated, so the choice has to be made before triton is imported.
Programs run in sequence in the interpreter: it shows values, never races or speed. Its bfloat16 products are wrong.
"""

import functools
import importlib.util
import os
import re
import sys
from importlib import metadata

import torch


def enable():
    """Turn the interpreter on for this process.

    Raises:
        RuntimeError: triton was imported without it, so kernels may already be compiled-mode functions.
    """
    if not is_enabled():
        if "triton" in sys.modules:
            raise RuntimeError(
                "Triton's interpreter must be chosen before triton is imported: call "
                "ladder.lab.interpret.enable() first, or start Python with TRITON_INTERPRET=1"
            )
        os.environ["TRITON_INTERPRET"] = "1"
    if has_triton():
        _accept_scalars_of_new_numpy()


def _accept_scalars_of_new_numpy():
    """Let the interpreter of Triton before 3.7 count loops under NumPy 1.25 and newer.

    It holds a scalar as an array of one element and asks ``int()`` for its value. NumPy warns of that since 1.25 and
    refuses it since 2.4.
    """
    if not (_release("triton") < (3, 7) and _release("numpy") >= (1, 25)):
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if patch.__module__ == __name__:  # done before
        return

    @functools.wraps(patch, assigned=())
    def patch_lang_tensor(tensor, *scope):
        patch(tensor, *scope)
        put = scope[0].set_attr if scope else setattr  # Triton 3.5 has no scope that puts the old function back
        put(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _release(package):
    return tuple(int(number) for number in re.findall(r"\d+", metadata.version(package))[:2])


def enable_without_gpu():
    """Turn the interpreter on where no CUDA device is present; return whether kernels are interpreted."""
    if is_enabled() or not torch.cuda.is_available():
        enable()
    return is_enabled()


def is_enabled():
    """Whether kernels imported now run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def has_triton():
    """Whether Triton is installed; does not import it."""
    return importlib.util.find_spec("triton") is not None
