"""The names that Gluon changed between Triton 3.6 and 3.9, in one place."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core as triton_core

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

aggregate = getattr(gluon, "aggregate", None) or triton_core._aggregate


def record(name, fields):
    """An aggregate called ``name`` whose ``fields``, a string of
    names, are given in that order: any values of a kernel."""
    fields = fields.split()

    def __init__(self, *values):
        for field, value in zip(fields, values, strict=True):
            setattr(self, field, value if isinstance(value, triton_core.base_value) else triton_core.constexpr(value))

    __init__.__triton_builtin__ = True  # it is no device code, so nothing of it counts for the cache of kernels
    kinds = dict.fromkeys(fields, triton_core.base_value)
    return aggregate(type(name, (), {"__init__": __init__, "__annotations__": kinds, "__module__": __name__}))
