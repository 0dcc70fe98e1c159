"""Device code that merges the partial results of split keys for sm_90.

Of prefill and of MLA decode by a launch of its own, in Triton; of MLA decode also inside its kernels, by those of their
programs that finish last, in Gluon.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import barrier

TOGETHER = gl.constexpr(8)  # parts that one program merges


@triton.jit
def dflash2_merge_splits(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, used_ptr, stride_ob, stride_oh, stride_om, stride_od,
    rows, num_heads, seqlen_q, num_splits,
    HEAD_V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, RAGGED: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of (batch, head, query), the splits in their order: the same bits on every run.

    RAGGED: only the first of the seqlen_q packed queries, as many as ``used_ptr`` says, belong to a sequence; the other
    rows of out stay as they are.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    if RAGGED:
        live = live & (row % seqlen_q < tl.load(used_ptr))
    column = tl.arange(0, BLOCK_V)
    head = row // seqlen_q % num_heads
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for s in range(num_splits):
        top = tl.maximum(top, tl.load(part_lse_ptr + tl.cast(s, tl.int64) * rows + row, mask=live, other=float("-inf")))
    sink = tl.full([BLOCK], float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32)
        top = tl.maximum(top, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    total = tl.exp(sink - shift)
    acc = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    for s in range(num_splits):
        place = tl.cast(s, tl.int64) * rows + row
        weight = tl.exp(tl.load(part_lse_ptr + place, mask=live, other=float("-inf")) - shift)
        part = tl.load(
            part_out_ptr + place[:, None] * HEAD_V + column[None, :],
            mask=live[:, None] & (column < HEAD_V)[None, :],
            other=0.0,
        )
        acc += part * weight[:, None]
        total += weight
    safe = tl.where(total == 0.0, 1.0, total)
    out_rows = row // seqlen_q // num_heads * stride_ob + head * stride_oh + row % seqlen_q * stride_om
    tl.store(
        out_ptr + out_rows[:, None] + column.to(tl.int64)[None, :] * stride_od,
        (acc / safe[:, None]).to(out_ptr.dtype.element_ty),
        mask=live[:, None] & (column < HEAD_V)[None, :],
    )  # fmt: skip
    if HAS_LSE:
        tl.store(lse_ptr + row, top + tl.log(safe), mask=live)


@triton.jit(do_not_specialize=["programs"])  # a value, never a reason to compile again
def dflash2_mla_merge_parts(
    part_out_ptr, part_lse_ptr, meta_ptr, out_ptr, lse_ptr, sinks_ptr, stride_ob, stride_om, stride_oh, num_heads,
    q_len, num_slots, programs,
    PART_ROWS: tl.constexpr, HEAD_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Add up the splits of the MLA kernels for sm_90: BLOCK_M rows and BLOCK_V columns of one sequence at a time, by
    ``programs`` of each sequence; grid (batch * programs, column blocks). A sequence in one split was stored by the
    kernel itself. The splits are added in their order.
    """
    rows = q_len * num_heads
    seq = tl.program_id(0) // programs
    first_slot = tl.load(meta_ptr + 2 * seq).to(tl.int32)
    splits = tl.load(meta_ptr + 2 * seq + 1).to(tl.int32)
    if splits == 1:
        return
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    for block in range(tl.program_id(0) % programs, tl.cdiv(rows, BLOCK_M), programs):
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        parts = (row // PART_ROWS * num_slots + first_slot).to(tl.int64) * PART_ROWS + row % PART_ROWS
        live = row < rows
        head = row % num_heads
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if HAS_SINKS:
            top = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        total_weight = tl.where(top == float("-inf"), 0.0, 1.0)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        for s in range(0, splits, BLOCK_S):
            split = s + tl.arange(0, BLOCK_S)
            mask = (split < splits)[:, None] & live[None, :]
            place = parts[None, :] + split[:, None] * PART_ROWS
            part_lse = tl.load(part_lse_ptr + place, mask=mask, other=float("-inf"))
            part = tl.load(
                part_out_ptr + place[:, :, None] * HEAD_V + column[None, None, :], mask=mask[:, :, None], other=0.0
            )
            new_top = tl.maximum(top, tl.max(part_lse, axis=0))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(part_lse - shift[None, :])
            rescale = tl.exp2(top - shift)
            acc = acc * rescale[:, None] + tl.sum(part * weight[:, :, None], axis=0)
            total_weight = total_weight * rescale + tl.sum(weight, axis=0)
            top = new_top
        safe = tl.where(total_weight == 0.0, 1.0, total_weight)
        out_rows = (
            seq.to(tl.int64) * stride_ob + (row // num_heads).to(tl.int64) * stride_om + head.to(tl.int64) * stride_oh
        )
        tl.store(
            out_ptr + out_rows[:, None] + column[None, :],
            (acc / safe[:, None]).to(out_ptr.dtype.element_ty),
            mask=live[:, None],
        )
        if HAS_LSE:
            if tl.program_id(1) == 0:
                lse_row = (seq.to(tl.int64) * num_heads + head) * q_len + row // num_heads
                tl.store(lse_ptr + lse_row, (top + tl.log2(safe)) * 0.6931471805599453, mask=live)


@gluon.jit
def dflash2_mla_merge_arrive(arrivals_ptr, number):
    """Whether this program is the last of ``number`` to come; it leaves the counter at zero."""
    barrier()  # every warp has stored before one thread announces it
    is_last = gl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == number - 1
    if is_last:
        gl.store(arrivals_ptr, 0)  # ready for the next launch
    return is_last


@gluon.jit
def dflash2_mla_merge(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, arrivals_ptr, first_part, split, splits, seq,
    num_heads, q_len, first_row, stride_ob, stride_om, stride_oh, ROWS: gl.constexpr, COLUMN: gl.constexpr,
    COLUMNS: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """The last of eight neighbouring splits to finish merges the
    eight, and the last of a sequence's eights all of them.

    So no program has much to merge, even where one long sequence has
    most of the splits. One warp group's work, of its COLUMNS.
    """
    groups = (splits + TOGETHER - 1) // TOGETHER
    start = split // TOGETHER * TOGETHER
    number = gl.minimum(TOGETHER, splits - start)
    stride = groups * 0 + 1
    final = groups == 1
    mine = dflash2_mla_merge_arrive(arrivals_ptr + first_part + start, number)
    while mine:
        dflash2_mla_merge_add(
            part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, first_part + start, number, stride, final, seq,
            num_heads, q_len, first_row, stride_ob, stride_om, stride_oh, ROWS, COLUMN, COLUMNS, HAS_SINKS, HAS_LSE,
        )  # fmt: skip
        mine = final == 0
        if mine:
            mine = dflash2_mla_merge_arrive(arrivals_ptr + first_part + 1, groups)  # no eight starts there
            start = start * 0
            number = groups
            stride = stride * TOGETHER
            final = groups > 1


@gluon.jit
def dflash2_mla_merge_add(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, start, number, stride, final, seq,
    num_heads, q_len, first_row, stride_ob, stride_om, stride_oh, ROWS: gl.constexpr, COLUMN: gl.constexpr,
    COLUMNS: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Add up ``number`` parts, ``stride`` apart, in their order: into the output, or into the first of them.

    Parts are read past L1 (.cg), which may hold what the workspace was before. A sink is one more part, of no value.
    """
    PARTS: gl.constexpr = 2  # under way together: with one more, registers run out
    SOME: gl.constexpr = 16  # rows
    L3: gl.constexpr = gl.BlockedLayout([PARTS, 1, 4], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    L2: gl.constexpr = gl.SliceLayout(2, L3)
    OUT: gl.constexpr = gl.SliceLayout(0, L3)
    ROW: gl.constexpr = gl.SliceLayout(0, L2)
    rows = q_len * num_heads
    column = COLUMN + gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
    # a zero that the compiler does not know: it would find all places before the works, and spill them
    if COLUMNS < 512:
        column += gl.multiple_of(number >> 30, 16)
    for some in gl.static_range(ROWS // SOME):
        place_row = some * SOME + gl.arange(0, SOME, ROW)
        row = first_row + place_row
        top = gl.full([SOME], float("-inf"), gl.float32, ROW)
        total = gl.zeros([SOME], gl.float32, ROW)
        if HAS_SINKS:
            top = gl.where(
                final, gl.load(sinks_ptr + row % num_heads).to(gl.float32) * 1.4426950408889634, float("-inf")
            )
            total = gl.where(top == float("-inf"), 0.0, 1.0)
        acc = gl.zeros([SOME, COLUMNS], gl.float32, OUT)
        for s in range(0, number, PARTS):
            part = s + gl.arange(0, PARTS, gl.SliceLayout(1, L2))
            mask = (part < number)[:, None] & (row < rows)[None, :]
            place = (start + part[:, None].to(gl.int64) * stride) * ROWS + place_row[None, :]
            lse = gl.load(part_lse_ptr + place, mask=mask, other=float("-inf"), cache_modifier=".cg")
            ptrs = part_out_ptr + gl.expand_dims(place, 2) * 512 + gl.expand_dims(gl.expand_dims(column, 0), 0)
            out = gl.load(ptrs, mask=gl.expand_dims(mask, 2), other=0.0, cache_modifier=".cg")
            new_top = gl.maximum(top, gl.max(lse, 0))
            shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
            rescale = gl.exp2(top - shift)
            weight = gl.exp2(lse - shift[None, :])
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None] + gl.sum(
                out * gl.expand_dims(weight, 2), 0
            )
            total = total * rescale + gl.sum(weight, 0)
            top = new_top
        total = gl.where(total == 0.0, 1.0, total)
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, OUT))[:, None]
        o_row = some * SOME + gl.arange(0, SOME, gl.SliceLayout(1, OUT))
        if final:
            all_row = first_row + o_row
            place_o = (
                seq.to(gl.int64) * stride_ob
                + (all_row // num_heads).to(gl.int64) * stride_om
                + (all_row % num_heads).to(gl.int64) * stride_oh
            )
            gl.store(
                out_ptr + place_o[:, None] + column[None, :],
                acc.to(out_ptr.dtype.element_ty),
                mask=(all_row < rows)[:, None],
            )
            if HAS_LSE:
                place_l = (seq.to(gl.int64) * num_heads + row % num_heads) * q_len + row // num_heads
                gl.store(lse_ptr + place_l, (top + gl.log2(total)) * 0.6931471805599453, mask=row < rows)
        else:
            barrier()  # all have read what is now written over
            gl.store(
                part_out_ptr + (start * ROWS + o_row)[:, None] * 512 + column[None, :],
                acc,
                mask=(first_row + o_row < rows)[:, None],
            )
            gl.store(part_lse_ptr + start * ROWS + place_row, top + gl.log2(total), mask=row < rows)
