"""Device code of the kernels for sm_90: the hardware barriers that Triton leaves unused, and how warps meet at them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .shape import FIRST_BARRIER, TURN_BARRIERS

FREE = gl.constexpr(FIRST_BARRIER)
TURN = gl.constexpr(TURN_BARRIERS)
PLACES = gl.constexpr(3)  # works that are told of before the first of them is done


@gluon.jit
def dflash2_sync(anchor, ids, THREADS: gl.constexpr):
    """Wait at hardware barrier ``ids`` until THREADS threads have come. ``anchor`` has one element for each thread."""
    gl.inline_asm_elementwise(f"bar.sync $1, {THREADS}; mov.b32 $0, $1;", "=r,r", [anchor + ids], gl.int32, False, 1)


@gluon.jit
def dflash2_arrive(anchor, ids, THREADS: gl.constexpr):
    """Come to hardware barrier ``ids`` and go on. An mbarrier would cost the warp group a barrier of its own first."""
    gl.inline_asm_elementwise(f"bar.arrive $1, {THREADS}; mov.b32 $0, $1;", "=r,r", [anchor + ids], gl.int32, False, 1)


@gluon.jit
def dflash2_arrive_if(anchor, yes, ids, THREADS: gl.constexpr):
    """``dflash2_arrive`` without a branch, which would part the loop's instructions."""
    asm: gl.constexpr = f"{{.reg .pred p; setp.ne.s32 p, $2, 0; @p bar.arrive $1, {THREADS}; mov.b32 $0, $1;}}"
    gl.inline_asm_elementwise(asm, "=r,r,r", [anchor + ids, anchor + yes.to(gl.int32)], gl.int32, False, 1)
