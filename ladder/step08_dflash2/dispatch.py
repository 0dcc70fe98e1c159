"""Which code runs where: the Triton kernels of a device, the kernels of sm_90, or PyTorch."""

import functools
import importlib
import os

import torch

from ladder.step07_dflash1.tiles import arch as capability

RUNG = "step08_dflash2"
arch = functools.cache(capability)


def device_code(q, module="portable.prefill_kernel", name="q"):
    """The module of Triton kernels that runs on the device of q, or None for the eager path.

    CUDA: the kernels. A CPU: the kernels when TRITON_INTERPRET is set, but for bfloat16, which the interpreter multiplies
    wrongly; else PyTorch, as on any other device.
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


@functools.cache
def hopper_runs(device):
    """Whether the kernels of sm_90 run on ``device``: a GPU of compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
