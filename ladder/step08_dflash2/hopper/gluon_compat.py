"""The names that Gluon changed between Triton 3.6 and 3.9, in one place."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core as triton_core

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

aggregate = getattr(gluon, "aggregate", None) or triton_core._aggregate


def record(cls):
    """An aggregate whose fields are given in the order of their annotations, whatever values of a kernel they are."""
    names = tuple(cls.__annotations__)

    def __init__(self, *values):
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value if isinstance(value, triton_core.base_value) else triton_core.constexpr(value))

    __init__.__triton_builtin__ = True  # it is no device code, so nothing of it counts for the cache of kernels
    cls.__init__ = __init__
    cls.__annotations__ = dict.fromkeys(names, triton_core.base_value)
    return aggregate(cls)
