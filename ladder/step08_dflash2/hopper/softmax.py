"""Device code of the kernels for sm_90: from scores to probabilities, packed as the tensor cores take them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def dflash2_pack(p, N: gl.constexpr, DT: gl.constexpr):
    """(64, N) float32 to pairs of half-precision numbers in int32. Carried through the loop as 16-bit values they would
    cost two instructions a pair, one element in eight of the loop."""
    even, odd = gl.split(gl.reshape(p, [64, N // 2, 2]))
    if DT == gl.bfloat16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], gl.int32, False, 1)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], gl.int32, False, 1)


@gluon.jit
def dflash2_unpack(packed, N: gl.constexpr, DT: gl.constexpr, P_LAYOUT: gl.constexpr):
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], (gl.int16, gl.int16), True, 1)
    p = gl.reshape(gl.join(low, high), [64, N]).to(DT, bitcast=True)
    return gl.convert_layout(p, P_LAYOUT, assert_trivial=True)


@gluon.jit
def dflash2_tanh(x, EXACT: gl.constexpr):
    """tanh of x / (2 log2(e)): two units in the last place of 1, which tanh.approx is far from.

    EXACT: also relative to a small result, by a polynomial there, which makes heads of 64 and 128 14 to 26 % slower.
    """
    y = 1.0 - 2.0 / (gl.exp2(x) + 1.0)
    if EXACT:
        y = gl.where(gl.abs(x) < 0.0866, x * (0.34657359 - 0.013876027 * (x * x)), y)
    return y


@gluon.jit
def dflash2_logits(s, first_key, sight, call, COLUMNS: gl.constexpr, shape: gl.constexpr, MASKED: gl.constexpr):
    """Scores (64, COLUMNS) after softcap and mask: -inf where row r does not see the key, which is beyond last_row[r],
    or below low_row[r] and not below sink_row[r].

    Columns are compared, not keys: their numbers are constants, so a compare and a select are all it costs.
    """
    LAYOUT: gl.constexpr = s.type.layout
    if shape.NEGATIVE:
        s = -s
    if shape.CAP:
        s = call.cap * dflash2_tanh(s * call.scale_log2, shape.CAP == 2)
    if MASKED:
        ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
        ok = column <= gl.convert_layout(sight.last_row - first_key, ROW)[:, None]
        if shape.NUM_RANGES > 0:
            low = gl.convert_layout(sight.low_row - first_key, ROW)[:, None]
            ok = ok & ((column >= low) | (column < gl.convert_layout(sight.sink_row - first_key, ROW)[:, None]))
        s = gl.where(ok, s, float("-inf"))
    return s


@gluon.jit
def dflash2_softmax(
    s, row_max, scale_log2, N: gl.constexpr, MASKED: gl.constexpr, CHAINS: gl.constexpr, HALVES: gl.constexpr
):
    """Probabilities of one tile against the running maximum, the factor for what came before, and sums by lane.

    Each lane sums its own columns; the lanes are added up once, after the last tile.
    """
    if CHAINS:  # four chains of comparisons a row instead of one, which would wait for itself
        top = gl.max(gl.reshape(s, [64, 2, N // 16, 4, 2]), 2)
        top = gl.convert_layout(gl.max(gl.max(gl.max(top, 3), 1), 1), row_max.type.layout)
    else:
        top = gl.convert_layout(gl.max(s, 1), row_max.type.layout)
    new_max = gl.maximum(row_max, top)
    shift = new_max * scale_log2
    if MASKED:
        shift = gl.where(new_max == float("-inf"), 0.0, shift)  # -inf - -inf would be NaN
    alpha = gl.exp2(row_max * scale_log2 - shift)
    if HALVES:  # of the columns, between them the factor: the product before is rescaled under the second
        left, right = gl.split(gl.permute(gl.reshape(s, [64, 2, N // 2]), (0, 2, 1)))
        first = gl.exp2(left * scale_log2 - gl.convert_layout(shift, gl.SliceLayout(1, left.type.layout))[:, None])
        part = gl.sum(gl.sum(gl.reshape(first, [64, N // 16, 4, 2]), 3), 1)
        shift = gl.fma(alpha, 0.0, shift)  # the factor is known before the second half, says this to ptxas
        second = gl.exp2(right * scale_log2 - gl.convert_layout(shift, gl.SliceLayout(1, right.type.layout))[:, None])
        p = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [64, N])
        more = gl.sum(gl.sum(gl.reshape(second, [64, N // 16, 4, 2]), 3), 1)
        return (
            gl.convert_layout(p, s.type.layout, assert_trivial=True),
            new_max,
            alpha,
            gl.convert_layout(part, more.type.layout) + more,
        )
    else:
        p = gl.exp2(s * scale_log2 - gl.convert_layout(shift, gl.SliceLayout(1, s.type.layout))[:, None])
        return p, new_max, alpha, gl.sum(gl.sum(gl.reshape(p, [64, N // 8, 4, 2]), 3), 1)


@gluon.jit
def dflash2_first_softmax(s, first_key, sight, call, COLUMNS: gl.constexpr, shape: gl.constexpr):
    """Probabilities, maximum and sums by lane of the first tile, which is always masked."""
    N: gl.constexpr = shape.N
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    s = dflash2_logits(s, first_key, sight, call, COLUMNS, shape, True)
    p, row_max, alpha, part = dflash2_softmax(
        s, row_max, 1.0 if shape.CAP else call.scale_log2, COLUMNS, True, shape.CHAINS, False
    )
    none = gl.sum(gl.sum(gl.reshape(gl.zeros([64, N], gl.float32, S_LAYOUT), [64, N // 8, 4, 2]), 3), 1)
    return p, row_max, gl.convert_layout(part, none.type.layout)


@gluon.jit
def dflash2_first_pack(p, N: gl.constexpr, COLUMNS: gl.constexpr, DT: gl.constexpr):
    """``dflash2_pack`` of the first tile's COLUMNS probabilities; the
    columns that it was not computed for are zeros."""
    packed = dflash2_pack(p, COLUMNS, DT)
    if COLUMNS < N:
        none = gl.zeros([64, N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))
        even, odd = gl.split(gl.reshape(none, [64, N // 2, 2]))
        packed = gl.reshape(gl.permute(gl.join(packed, gl.zeros_like(packed)), (0, 2, 1)), [64, N // 2])
        packed = gl.convert_layout(packed, even.type.layout, assert_trivial=True)
    return packed
