"""One right answer to each exercise of chapter 05. Choose Triton's interpreter (or a GPU) before importing this."""

import triton
import triton.language as tl


@triton.jit
def scale_kernel(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr):
    """out[i] = x[i] * factor for n elements; grid (ceil(n / BLOCK),)."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, x * factor, mask=inside)


@triton.jit
def row_softmax_kernel(x_ptr, out_ptr, stride_row, stride_col, n, BLOCK: tl.constexpr):
    """Softmax of each row of x (rows, n), any strides, into a contiguous out; grid (rows,), BLOCK >= n."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_row + cols * stride_col, mask=cols < n, other=float("-inf"))
    weights = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * n + cols, weights / tl.sum(weights, axis=0), mask=cols < n)


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, cols, stride_row, stride_col, BLOCK: tl.constexpr):
    """out (cols, rows), contiguous, = the transpose of x (rows, cols) with any strides; grid of tiles (rows, cols)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (i < rows)[:, None] & (j < cols)[None, :]
    tile = tl.load(x_ptr + i[:, None] * stride_row + j[None, :] * stride_col, mask=inside)
    tl.store(out_ptr + j[None, :] * rows + i[:, None], tile, mask=inside)


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, rows, cols, inner, BLOCK: tl.constexpr):
    """out = a (rows, inner) @ b (inner, cols), all contiguous; grid of output tiles."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, inner, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a_mask = (i < rows)[:, None] & (k < inner)[None, :]
        b_mask = (k < inner)[:, None] & (j < cols)[None, :]
        a = tl.load(a_ptr + i[:, None] * inner + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * cols + j[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(out_ptr + i[:, None] * cols + j[None, :], acc, mask=(i < rows)[:, None] & (j < cols)[None, :])


@triton.jit
def column_sum_kernel(x_ptr, out_ptr, num_rows, num_cols, BLOCK: tl.constexpr):
    """out (num_cols,), which holds zeros, = the sums of the columns of x, contiguous; grid of tiles (cols, rows)."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    tile = tl.load(x_ptr + rows[:, None] * num_cols + cols[None, :], mask=inside, other=0.0)
    tl.atomic_add(out_ptr + cols, tl.sum(tile, axis=0), mask=cols < num_cols)


@triton.jit
def causal_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, seqlen, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Causal attention of one head, q, k, v and out (seqlen, HEAD_DIM), contiguous; grid of query tiles."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    q_offsets = rows[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=(rows < seqlen)[:, None], other=0.0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * BLOCK_M, seqlen), BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < seqlen
        k = tl.load(k_ptr + keys[None, :] * HEAD_DIM + dims[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(inside[None, :] & (keys[None, :] <= rows[:, None]), scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        rescale = tl.exp(row_max - new_max)
        weights = tl.exp(scores - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + keys[:, None] * HEAD_DIM + dims[None, :], mask=inside[:, None], other=0.0)
        acc = acc * rescale[:, None] + tl.dot(weights, v, input_precision="ieee")
        row_max = new_max
    tl.store(out_ptr + q_offsets, acc / row_sum[:, None], mask=(rows < seqlen)[:, None])
