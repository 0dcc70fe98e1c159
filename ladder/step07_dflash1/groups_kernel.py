"""Device code of step 07's second half: counting sort of tokens by expert, and work launched for real rows only."""

import triton
import triton.language as tl


@triton.jit
def dflash1_group_count(
    expert_ids_ptr, counts_ptr, num_assignments, num_experts, num_blocks,
    BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """counts[e, block] = how many of this block's assignments go to expert e; grid (num_blocks,)."""
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(expert_ids_ptr + index, mask=index < num_assignments, other=-1).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < num_experts), expert, num_experts)  # the last bin: no expert
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + bins * num_blocks + block, tl.histogram(expert, BINS), mask=bins < num_experts)


@triton.jit
def dflash1_group_place(
    expert_ids_ptr, starts_ptr, order_ptr, places_ptr, num_assignments, num_experts, num_blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Move each assignment to starts[e, block] + its rank among the block's earlier ones; grid (num_blocks,)."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    index = block * BLOCK + lane
    expert = tl.load(expert_ids_ptr + index, mask=index < num_assignments, other=-1).to(tl.int32)
    kept = (expert >= 0) & (expert < num_experts)
    other = tl.load(  # the same numbers again, along the columns
        expert_ids_ptr + block * BLOCK + lane, mask=block * BLOCK + lane < num_assignments, other=-1
    ).to(tl.int32)
    same_and_earlier = (expert[:, None] == other[None, :]) & (lane[None, :] < lane[:, None])
    rank = tl.sum(same_and_earlier.to(tl.int32), axis=1)  # counting, not racing: the order is stable
    start = tl.load(starts_ptr + expert.to(tl.int64) * num_blocks + block, mask=kept, other=0)
    place = start + rank
    tl.store(order_ptr + place, index, mask=kept)
    tl.store(places_ptr + index, tl.where(kept, place, -1), mask=index < num_assignments)


@triton.jit
def dflash1_tile_map(offsets_ptr, tiles_ptr, num_experts, BLOCK_ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """tiles[t] = (expert, first row) for the tiles of one expert, behind those of earlier experts; grid (experts,)."""
    expert = tl.program_id(0)
    others = tl.arange(0, EXPERTS)
    before = others < expert
    starts = tl.load(offsets_ptr + others, mask=before, other=0)
    ends = tl.load(offsets_ptr + others + 1, mask=before, other=0)
    tile = tl.sum(tl.cdiv(ends - starts, BLOCK_ROWS), axis=0)
    last = tl.load(offsets_ptr + expert + 1)
    for row in range(tl.load(offsets_ptr + expert), last, BLOCK_ROWS):
        tl.store(tiles_ptr + 2 * tile, expert)
        tl.store(tiles_ptr + 2 * tile + 1, row)
        tile += 1


@triton.jit
def dflash1_grouped_matmul(
    x_ptr, weight_ptr, out_ptr, tiles_ptr, offsets_ptr, order_ptr,
    stride_xm, stride_xk, stride_we, stride_wk, stride_wn, stride_om, stride_on,
    inner, columns, column_tiles, top_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[rows of a tile] = x[their tokens] @ weight[expert]; grid (tiles * column tiles,)."""
    pid = tl.program_id(0)
    tile = pid // column_tiles
    expert = tl.load(tiles_ptr + 2 * tile)
    if expert < 0:
        return  # behind the last tile: the grid is sized without knowing the counts
    first_row = tl.load(tiles_ptr + 2 * tile + 1)
    last_row = tl.load(offsets_ptr + expert + 1)
    row = first_row + tl.arange(0, BLOCK_M)
    live = row < last_row
    source = row.to(tl.int64)
    if order_ptr is not None:  # the permutation happens in the load
        source = tl.load(order_ptr + row, mask=live, other=0).to(tl.int64) // top_k
    column = pid % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + source[:, None] * stride_xm + k.to(tl.int64)[None, :] * stride_xk
    w_ptrs = weight_ptr + expert.to(tl.int64) * stride_we
    w_ptrs += k.to(tl.int64)[:, None] * stride_wk + column.to(tl.int64)[None, :] * stride_wn
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        inside = start + k < inner
        x = tl.load(x_ptrs, mask=live[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=inside[:, None] & (column < columns)[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_xk
        w_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_wk
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * stride_om + column.to(tl.int64)[None, :] * stride_on
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (column < columns)[None, :])


@triton.jit
def dflash1_permute_rows(
    x_ptr, out_ptr, places_ptr, stride_xm, stride_om, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[places[t, j]] = x[t] for every choice j: what writing in expert order saves; grid (tokens, tiles)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * stride_xm + column, mask=column < width, other=0.0)
    for choice in tl.static_range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + choice).to(tl.int64)
        tl.store(out_ptr + place * stride_om + column, x, mask=(column < width) & (place >= 0))
