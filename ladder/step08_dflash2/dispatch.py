"""What a device is, and whether Triton's kernels or PyTorch run on it."""

import functools
import importlib
import os
from typing import NamedTuple

import torch

from ladder.step06_paged.attention import processors
from ladder.step07_dflash1.decode import DecodeWorkspace
from ladder.step07_dflash1.tiles import arch

RUNG = "step08_dflash2"


class Machine(NamedTuple):
    """What a device is: 10 * major + minor of its compute capability,
    its processors, and whether sm_90's kernels run on it.

    A CPU has a Hopper's capability, so that the interpreter walks a Hopper's tiles, and few processors.
    """

    arch: int
    processors: int
    hopper: bool


@functools.cache
def machine(device):
    """``Machine`` of a device; a CUDA device needs its index."""
    return Machine(arch(device), processors(device), device.type == "cuda" and arch(device) == 90)


def device_code(q, module="portable.prefill_kernel", name="q"):
    """The module of Triton kernels that runs on the device of q, or None for the eager path.

    CUDA: the kernels. A CPU: the kernels when TRITON_INTERPRET is set, but for bfloat16, which the interpreter
    multiplies wrongly; else PyTorch, as on any other device.
    """
    device_type = q.device.type
    if device_type != "cuda":
        if device_type == "meta":
            raise ValueError(f"{RUNG}: {name} is on meta; want a tensor with elements, on a CUDA device or a CPU")
        if device_type != "cpu" or not interpreting() or q.dtype == torch.bfloat16:
            return None
    try:
        return _kernels(module)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        if device_type == "cpu":
            return None
        raise ImportError(f"{RUNG}: needs Triton (pip install triton) for tensors on {q.device}") from error


def interpreting():
    """Whether this process asks for Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def _kernels(module):
    return importlib.import_module(f"{__package__}.{module}")


def workspace_on(device, workspace):
    """``workspace`` once it is known to lie on ``device``; a new one for None."""
    if workspace is None:
        return DecodeWorkspace(device)
    if workspace.partials.device != device:
        raise ValueError(f"{RUNG}: workspace is on {workspace.partials.device}; want a DecodeWorkspace on {device}")
    return workspace
