"""Device code that merges the partial results of split keys, for prefill."""

import triton
import triton.language as tl


@triton.jit
def dflash2_merge_splits(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, stride_ob, stride_oh, stride_om, stride_od,
    rows, num_heads, seqlen_q, num_splits,
    HEAD_V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of (batch, head, query), the splits in their order: the same bits on every run."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    column = tl.arange(0, BLOCK_V)
    head = row // seqlen_q % num_heads
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for s in range(num_splits):
        top = tl.maximum(top, tl.load(part_lse_ptr + s.to(tl.int64) * rows + row, mask=live, other=float("-inf")))
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32)
        top = tl.maximum(top, sink)
        total = tl.exp(sink - top)
    shift = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    acc = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    for s in range(num_splits):
        place = s.to(tl.int64) * rows + row
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
        tl.store(lse_ptr + row, shift + tl.log(total), mask=live)
