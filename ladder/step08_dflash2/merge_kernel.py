"""Device code that merges the partial results of split keys, of prefill and of MLA decode for sm_90."""

import triton
import triton.language as tl


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
        part = tl.load(part_out_ptr + place[:, None] * HEAD_V + column[None, :], mask=live[:, None] & (column < HEAD_V)[None, :], other=0.0)
        acc += part * weight[:, None]
        total += weight
    safe = tl.where(total == 0.0, 1.0, total)
    out_rows = row // seqlen_q // num_heads * stride_ob + head * stride_oh + row % seqlen_q * stride_om
    tl.store(
        out_ptr + out_rows[:, None] + column.to(tl.int64)[None, :] * stride_od, (acc / safe[:, None]).to(out_ptr.dtype.element_ty),
        mask=live[:, None] & (column < HEAD_V)[None, :],
    )  # fmt: skip
    if HAS_LSE:
        tl.store(lse_ptr + row, top + tl.log(safe), mask=live)


@triton.jit(do_not_specialize=["programs"])  # a value, never a reason to compile again
def dflash2_mla_merge_parts(
    part_out_ptr, part_lse_ptr, meta_ptr, out_ptr, lse_ptr, sinks_ptr, stride_ob, stride_om, stride_oh, num_heads, q_len, num_slots, programs,
    PART_ROWS: tl.constexpr, HEAD_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Add up the splits of the MLA kernels for sm_90: BLOCK_M rows and BLOCK_V columns of one sequence at a time, by ``programs`` of
    each sequence; grid (batch * programs, column blocks). A sequence in one split was stored by the kernel itself. The splits
    are added in their order.
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
            part = tl.load(part_out_ptr + place[:, :, None] * HEAD_V + column[None, None, :], mask=mask[:, :, None], other=0.0)
            new_top = tl.maximum(top, tl.max(part_lse, axis=0))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(part_lse - shift[None, :])
            rescale = tl.exp2(top - shift)
            acc = acc * rescale[:, None] + tl.sum(part * weight[:, :, None], axis=0)
            total_weight = total_weight * rescale + tl.sum(weight, axis=0)
            top = new_top
        safe = tl.where(total_weight == 0.0, 1.0, total_weight)
        out_rows = seq.to(tl.int64) * stride_ob + (row // num_heads).to(tl.int64) * stride_om + head.to(tl.int64) * stride_oh
        tl.store(out_ptr + out_rows[:, None] + column[None, :], (acc / safe[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None])
        if HAS_LSE:
            if tl.program_id(1) == 0:
                lse_row = (seq.to(tl.int64) * num_heads + head) * q_len + row // num_heads
                tl.store(lse_ptr + lse_row, (top + tl.log2(safe)) * 0.6931471805599453, mask=live)
