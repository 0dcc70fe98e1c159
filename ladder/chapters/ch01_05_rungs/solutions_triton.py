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
def attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, seqlen_k, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """softmax(scale * q k^T) v for BLOCK_M queries and seqlen_k keys of one head, all contiguous; grid (1,)."""
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + rows[:, None] * HEAD_DIM + dims[None, :])
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start in range(0, seqlen_k, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < seqlen_k
        k = tl.load(k_ptr + keys[None, :] * HEAD_DIM + dims[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, axis=1))
        rescale = tl.exp(m - new_m)
        weights = tl.exp(scores - new_m[:, None])
        l = l * rescale + tl.sum(weights, axis=1)  # noqa: E741
        v = tl.load(v_ptr + keys[:, None] * HEAD_DIM + dims[None, :], mask=inside[:, None], other=0.0)
        acc = acc * rescale[:, None] + tl.dot(weights, v, input_precision="ieee")
        m = new_m
    tl.store(out_ptr + rows[:, None] * HEAD_DIM + dims[None, :], acc / l[:, None])
