"""Exercises of chapter 05: small kernels, run by Triton's interpreter on a CPU."""

import math

import torch

from ladder.chapters.exercise import NotYet, _close, _exercise, _noise


def _guarded(tensor, margin=64, outside=math.nan):
    """A flat buffer with ``outside`` before and after a copy of ``tensor``; returns (buffer, view of the copy)."""
    buffer = torch.full((tensor.numel() + 2 * margin,), outside, dtype=tensor.dtype)
    view = buffer[margin : margin + tensor.numel()].view(tensor.shape)
    view.copy_(tensor)
    return buffer, view


def _written(buffer, view, case):
    """Refuse a kernel that left outputs unwritten or wrote outside them."""
    missing = int(torch.isnan(view).sum())
    if missing:
        raise NotYet(f"{case}: {missing} of {view.numel()} outputs are NaN: never written, or computed from NaN")
    inside = view.storage_offset(), view.storage_offset() + view.numel()
    outside = torch.cat([buffer[: inside[0]], buffer[inside[1] :]])
    if not torch.isnan(outside).all():
        raise NotYet(f"{case}: {int((~torch.isnan(outside)).sum())} elements outside the output were overwritten")


def _empty(*shape, margin=64):
    return _guarded(torch.full(shape, math.nan), margin)


def _scale_case(kernel, n, block, factor):
    _, x = _guarded(_noise(n), outside=5.0)  # a store past the end then shows
    buffer, out = _empty(n)
    kernel[(-(-n // block),)](x, out, n, factor, BLOCK=block)
    _written(buffer, out, f"{n} elements, BLOCK {block}")
    _close(out, x * factor, f"{n} elements, BLOCK {block}")


def _scale_visible(kernel):
    _scale_case(kernel, 128, 32, 3.0)


def _scale_strict(kernel):
    for n in (1, 100, 33):
        _scale_case(kernel, n, 32, -0.5)


_exercise(
    "05a", "A first program",
    (
        "Program p owns elements p * BLOCK to (p + 1) * BLOCK - 1. tl.program_id(0) is p, tl.arange(0, BLOCK) counts "
        "within it.",
        "Pointers are numbers: x_ptr + offsets is a block of BLOCK addresses. What does the last program point at?",
        "offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK); inside = offsets < n; load and store with "
        "mask=inside.",
    ),
    _scale_visible, _scale_strict, "ladder.chapters.ch01_05_rungs.solutions_triton:scale_kernel",
)  # fmt: skip


def _rows_case(kernel, x, block, case):
    rows, n = x.shape
    buffer, out = _empty(rows, n)
    kernel[(rows,)](x, out, x.stride(0), x.stride(1), n, BLOCK=block)
    _written(buffer, out, case)
    _close(out, torch.softmax(x.double(), -1), case)


def _rows_visible(kernel):
    _rows_case(kernel, _guarded(_noise(4, 16))[1], 16, "4 rows of 16, BLOCK 16")


def _rows_strict(kernel):
    _rows_case(kernel, _guarded(_noise(4, 11, shift=-30.0))[1], 16, "4 rows of 11 near -30, BLOCK 16")
    _rows_case(kernel, _guarded(_noise(11, 4))[1].T, 16, "a transposed view, 4 rows of 11")
    _rows_case(kernel, _guarded(_noise(3, 16, scale=2e4))[1], 16, "scores of +-50,000")


_exercise(
    "05b", "One program, one row",
    (
        "A row's address is x_ptr + row * stride_row; its columns are stride_col apart, which need not be 1.",
        "Columns at or past n need a value that cannot change the maximum or the sum.",
        "x = tl.load(x_ptr + row * stride_row + cols * stride_col, mask=cols < n, other=-inf); e = tl.exp(x - "
        "tl.max(x, 0)); store e / tl.sum(e, 0) at out_ptr + row * n + cols.",
    ),
    _rows_visible, _rows_strict, "ladder.chapters.ch01_05_rungs.solutions_triton:row_softmax_kernel",
)  # fmt: skip


def _transpose_case(kernel, x, block, case):
    rows, cols = x.shape
    buffer, out = _empty(cols, rows, margin=2 * block * (rows + cols))  # room for a store without a mask
    kernel[(-(-rows // block), -(-cols // block))](x, out, rows, cols, x.stride(0), x.stride(1), BLOCK=block)
    _written(buffer, out, case)
    _close(out, x.T, case, tolerance=0.0)


def _transpose_visible(kernel):
    _transpose_case(kernel, _guarded(_noise(32, 32))[1], 16, "a matrix of 32 x 32, BLOCK 16")


def _transpose_strict(kernel):
    _transpose_case(kernel, _guarded(_noise(20, 40), 2000)[1], 16, "a matrix of 20 x 40, BLOCK 16")
    _transpose_case(kernel, _guarded(_noise(7, 50), 2000)[1][:, ::3], 16, "every third column of a matrix of 7 x 50")


_exercise(
    "05c", "A mask with two sides",
    (
        "A program owns a tile: rows from program_id(0), columns from program_id(1). Element (i, j) of x goes to (j, "
        "i) of out, and out has rows of `rows` elements.",
        "A tile of pointers is x_ptr + i[:, None] * stride_row + j[None, :] * stride_col. Its mask needs both sides: "
        "(i < rows)[:, None] & (j < cols)[None, :].",
        "tile = tl.load(x_ptr + i[:, None] * stride_row + j[None, :] * stride_col, mask=inside); tl.store(out_ptr + "
        "j[None, :] * rows + i[:, None], tile, mask=inside): the same tile, other addresses.",
    ),
    _transpose_visible, _transpose_strict, "ladder.chapters.ch01_05_rungs.solutions_triton:transpose_kernel",
)  # fmt: skip


def _product_case(kernel, rows, cols, inner, case, block=16):
    margin = 2 * block * (rows + cols + inner)
    _, a = _guarded(_noise(rows, inner), margin)
    _, b = _guarded(_noise(inner, cols, seed=1), margin)
    buffer, out = _empty(rows, cols, margin=margin)
    kernel[(-(-rows // block), -(-cols // block))](a, b, out, rows, cols, inner, BLOCK=block)
    _written(buffer, out, case)
    _close(out, a.double() @ b.double(), case, tolerance=1e-3)


def _product_visible(kernel):
    _product_case(kernel, 32, 32, 16, "32 x 16 times 16 x 32: one tile of the inner dimension")


def _product_strict(kernel):
    _product_case(kernel, 16, 16, 64, "16 x 64 times 64 x 16: four tiles of the inner dimension")
    _product_case(kernel, 20, 37, 45, "20 x 45 times 45 x 37, with NaN around both")


_exercise(
    "05d", "A product larger than a tile",
    (
        "A program computes one tile of the output. It walks along the inner dimension and adds up: acc = tl.dot(a, b, "
        "acc, input_precision='ieee').",
        "Where a tile sticks out, both a and b must be 0 along the inner dimension: 0 x NaN is NaN, so one of them is "
        "not enough.",
        "for start in range(0, inner, BLOCK): k = start + tl.arange(0, BLOCK); a = tl.load(a_ptr + i[:, None] * inner "
        "+ k[None, :], mask=(i < rows)[:, None] & (k < inner)[None, :], other=0.0); b likewise at k[:, None] * cols + "
        "j[None, :].",
    ),
    _product_visible, _product_strict, "ladder.chapters.ch01_05_rungs.solutions_triton:product_kernel",
)  # fmt: skip


def _sum_case(kernel, rows, cols, case, block=16):
    x = _guarded(_noise(rows, cols), margin=2 * block * cols)[1]
    buffer, out = _guarded(torch.zeros(cols))
    kernel[(-(-cols // block), -(-rows // block))](x, out, rows, cols, BLOCK=block)
    if not out.any():
        raise NotYet(f"{case}: every output is still 0: never written")
    _written(buffer, out, case)
    _close(out, x.double().sum(0), case, tolerance=1e-3)


def _sum_visible(kernel):
    _sum_case(kernel, 16, 32, "the columns of 16 x 32: one program a column tile")


def _sum_strict(kernel):
    _sum_case(kernel, 64, 32, "the columns of 64 x 32: four programs share each sum")
    _sum_case(kernel, 41, 19, "the columns of 41 x 19")


_exercise(
    "05e", "Several programs, one sum",
    (
        "Program (c, r) owns columns c * BLOCK .. and rows r * BLOCK .. of x. It can add up its own tile with "
        "tl.sum(tile, axis=0); who adds up the tiles?",
        "Programs share nothing but memory, and they run at the same time. Loading out, adding and storing loses what "
        "another program stored in between.",
        "tl.atomic_add(out_ptr + cols, tl.sum(tile, axis=0), mask=cols < num_cols), where masked elements of the tile "
        "were loaded as 0.",
    ),
    _sum_visible, _sum_strict, "ladder.chapters.ch01_05_rungs.solutions_triton:column_sum_kernel",
)  # fmt: skip


def _causal_case(kernel, seqlen, case, order=None, head_dim=16, block=16, programs=None):
    q, k, v = (_noise(seqlen, head_dim, seed=seed) for seed in range(3))
    if order == "rising":
        k = k[(k @ q[-1]).argsort()]
    margin = 2 * block * head_dim  # past the last key lies NaN
    views = [_guarded(x, margin)[1] for x in (q, k, v)]
    rows = min(seqlen, programs * block) if programs else seqlen
    for view in views[1:]:
        view[rows:] = math.nan  # keys that no started program may look at
    buffer, out = _empty(seqlen, head_dim, margin=margin)
    grid = (programs or -(-seqlen // block),)
    kernel[grid](*views, out, seqlen, head_dim**-0.5, BLOCK_M=block, BLOCK_N=block, HEAD_DIM=head_dim)
    if not programs:
        _written(buffer, out, case)
    scores = (q[:rows].double() @ k[:rows].double().T) * head_dim**-0.5
    scores.masked_fill_(torch.ones(rows, rows, dtype=torch.bool).triu(1), -math.inf)
    _close(out[:rows], scores.softmax(-1) @ v[:rows].double(), case, tolerance=1e-3)


def _causal_visible(kernel):
    _causal_case(kernel, 16, "16 tokens: one tile")


def _causal_strict(kernel):
    _causal_case(kernel, 64, "64 keys in rising order: every tile raises the maximum", order="rising")
    _causal_case(kernel, 41, "41 tokens with NaN behind them")
    _causal_case(kernel, 64, "the first program alone: it must stop at its diagonal", programs=1)


_exercise(
    "05f", "Your kernel, causal",
    (
        "Two things change: the mask of the scores, and the end of the loop. Query i sees keys j <= i.",
        "The last query of program p is (p + 1) * BLOCK_M - 1, so no key from (p + 1) * BLOCK_M on is needed. Ending "
        "the loop there also halves the work.",
        "for start in range(0, tl.minimum((tl.program_id(0) + 1) * BLOCK_M, seqlen), BLOCK_N): ... scores = "
        "tl.where((keys < seqlen)[None, :] & (keys[None, :] <= rows[:, None]), scores, -inf); everything else stays.",
    ),
    _causal_visible, _causal_strict, "ladder.chapters.ch01_05_rungs.solutions_triton:causal_kernel",
)  # fmt: skip
