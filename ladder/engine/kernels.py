"""Device code around the experts' products: where rows go, the gate, and the weighted sum on the way back.

The products themselves are the library's (or step 07's for a handful of rows); these are the passes in between, each
one launch where plain operations take three to ten.
"""

import triton
import triton.language as tl


@triton.jit
def _expert_of(
    ids, table, assignment, total, num_experts, everyone, TURNS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """The expert of an assignment, numbered token by token: the
    router's choices, then the shared ones; big behind the end.

    table: (TURNS, everyone) int32, a router's expert as a number here,
    big where another rank has it; None: numbers are the same.
    """
    token, choice = assignment // (TOP_K + SHARED), assignment % (TOP_K + SHARED)
    routed = (assignment < total) & (choice < TOP_K)
    expert = tl.load(ids + token * TOP_K + choice, mask=routed, other=0).to(tl.int32)
    if table is not None:
        expert = tl.load(table + token % TURNS * everyone + expert, mask=routed, other=0)
    expert = tl.where(choice < TOP_K, expert, num_experts + choice - TOP_K)
    return tl.where(assignment < total, expert, 1 << 30)


@triton.jit
def engine_place(
    ids, table, order, source, places, offsets, total, num_experts, all_experts,
    TURNS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    """A stable counting sort of up to ALL assignments without a second
    launch: each program ranks BLOCK of them among all.

    Quadratic in the assignments, and for a decode batch still less than a launch.
    """
    everyone = tl.arange(0, ALL)
    experts = _expert_of(ids, table, everyone, total, num_experts, all_experts, TURNS, TOP_K, SHARED)
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = _expert_of(ids, table, mine, total, num_experts, all_experts, TURNS, TOP_K, SHARED)
    before = (experts[None, :] < own[:, None]) | (
        (experts[None, :] == own[:, None]) & (everyone[None, :] < mine[:, None])
    )
    row = tl.sum(before.to(tl.int32), axis=1)
    live = mine < total
    tl.store(places + mine, row, mask=live)
    tl.store(order + row, mine, mask=live)
    tl.store(source + row, mine // (TOP_K + SHARED), mask=live)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, EXPERTS)
        count = tl.sum((experts[None, :] < expert[:, None]).to(tl.int32), axis=1)
        tl.store(offsets + expert, count, mask=expert <= num_experts + SHARED)


@triton.jit
def engine_swiglu(gate_up, out, rows, hidden, stride, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = silu(gate_up[row, :hidden]) * gate_up[row, hidden:], in float32; grid (row tiles * column tiles,)."""
    tiles = tl.cdiv(hidden, BLOCK)
    row = tl.program_id(0) // tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    column = (tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK))[None, :]
    live = (row < rows)[:, None] & (column < hidden)
    row = row.to(tl.int64)[:, None]
    gate = tl.load(gate_up + row * stride + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + hidden + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, gate / (1.0 + tl.exp(-gate)) * up, mask=live)


@triton.jit(do_not_specialize=["first", "last"])
def engine_dispatch(x, places, out, width, first, last, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """out[places[t, k] - first] = x[t] where first <= places[t, k] < last; grid (tokens, column tiles).

    A token is read once and written behind each of its experts; gathered, it would be read from memory each time.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    value = tl.load(x + token * width + column, mask=live, other=0.0)
    for k in tl.static_range(EACH):
        row = tl.load(places + token * EACH + k)
        here = live & (row >= first) & (row < last)
        tl.store(out + (row - first).to(tl.int64) * width + column, value, mask=here)


@triton.jit
def _combined(
    rows, behind, split, places, weights, base, offsets, token, column, live, width, last,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns of what the experts say of a token, float32; see ``engine_combine``.

    behind: rows from ``split`` on, or None where ``rows`` holds all.
    """
    total = tl.zeros([BLOCK], tl.float32)
    if base is not None:
        total += tl.load(base + token * width + column, mask=live, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K + SHARED):
        row = tl.load(places + token * (TOP_K + SHARED) + k).to(tl.int64)
        here = live
        if offsets is not None:
            here = live & (row < tl.load(offsets + last))
        if behind is None:
            value = tl.load(rows + row * width + column, mask=here, other=0.0).to(tl.float32)
        else:  # one of the two is read
            value = tl.load(rows + row * width + column, mask=here & (row < split), other=0.0).to(tl.float32)
            value += tl.load(behind + (row - split) * width + column, mask=here & (row >= split), other=0.0).to(
                tl.float32
            )
        if k < TOP_K:
            value *= tl.load(weights + token * TOP_K + k)
        total += value
    return total


@triton.jit
def engine_combine(
    rows, places, weights, base, offsets, out, width, last, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """out[t] = base[t] + sum of weights[t, k] * rows[places[t, k]], shared experts with weight 1; in float32, in order.

    base: what was computed without rows, or None for 0. offsets: where other ranks compute some experts, rows from
    offsets[last] on are theirs and count as 0; else None.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    total = _combined(
        rows, None, 0, places, weights, base, offsets, token, column, live, width, last, TOP_K, SHARED, BLOCK
    )
    tl.store(out + token * width + column, total, mask=live)


@triton.jit(do_not_specialize=["split"])
def engine_combine_norm(
    rows, behind, split, places, weights, base, residual, norm, normed, residual_out, width, eps,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``engine_combine``, the residual add and the next layer's RMSNorm, a row held in registers: grid (tokens,).
    Rounded where the three launches round, so the same bits. behind, split: see ``_combined``.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < width
    total = _combined(
        rows, behind, split, places, weights, base, None, token, column, live, width, 0, TOP_K, SHARED, BLOCK
    )
    total = total.to(normed.dtype.element_ty).to(tl.float32)
    total += tl.load(residual + token * width + column, mask=live, other=0.0).to(tl.float32)
    total = total.to(normed.dtype.element_ty)
    tl.store(residual_out + token * width + column, total, mask=live)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
    weight = tl.load(norm + column, mask=live, other=0.0).to(tl.float32)
    tl.store(normed + token * width + column, total * scale * weight, mask=live)


@triton.jit
def engine_spread(
    source, out, tokens, stride_s, stride_t, stride_h, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """out[t, h] = source[t] for all heads, rows of WIDTH columns; grid (blocks of tokens,)."""
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = tl.arange(0, WIDTH)
    live = (token < tokens)[:, None]
    value = tl.load(source + token[:, None] * stride_s + column[None, :], mask=live, other=0.0)
    for head in tl.static_range(HEADS):
        tl.store(out + token[:, None] * stride_t + head * stride_h + column[None, :], value, mask=live)


@triton.jit
def engine_experts_up(
    x, weight, out, source, offsets, width, hidden,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[row] = swiglu(x[source[row]] @ weight[expert].T) for an
    expert's rows: gather, product and gate in one launch.

    A program streams BLOCK_N gate and up columns of one expert; an expert that no token chose costs it two loads. Grid
    (experts * column tiles,). Made for the few rows of decode, where reading the weight is the whole cost.
    """
    column_tiles = tl.cdiv(hidden, BLOCK_N)
    expert = tl.program_id(0) // column_tiles
    column = tl.program_id(0) % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    first, last = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    gate_rows = weight + expert.to(tl.int64) * 2 * hidden * width + column[None, :] * width
    up_rows = gate_rows + hidden.to(tl.int64) * width
    k = tl.arange(0, BLOCK_K)
    for start in range(first, last, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        live = row < last
        token = tl.load(source + row, mask=live, other=0).to(tl.int64)
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k0 in range(0, width, BLOCK_K):
            inside = k0 + k
            if EVEN:
                a = tl.load(x + token[:, None] * width + inside[None, :])
                w_gate, w_up = tl.load(gate_rows + inside[:, None]), tl.load(up_rows + inside[:, None])
            else:
                a = tl.load(x + token[:, None] * width + inside[None, :], mask=inside[None, :] < width, other=0.0)
                mask = (inside[:, None] < width) & (column[None, :] < hidden)
                w_gate = tl.load(gate_rows + inside[:, None], mask=mask, other=0.0)
                w_up = tl.load(up_rows + inside[:, None], mask=mask, other=0.0)
            gate = tl.dot(a, w_gate, gate, input_precision=PRECISION)
            up = tl.dot(a, w_up, up, input_precision=PRECISION)
        value = gate / (1.0 + tl.exp(-gate)) * up
        spot = out + row.to(tl.int64)[:, None] * hidden + column[None, :]
        tl.store(spot, value.to(out.dtype.element_ty), mask=live[:, None] & (column[None, :] < hidden))


@triton.jit
def engine_experts_down(
    x, weight, out, offsets, hidden, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[row] = x[row] @ weight[expert].T for an expert's rows, as
    ``engine_experts_up``; grid (experts * column tiles,)."""
    column_tiles = tl.cdiv(width, BLOCK_N)
    expert = tl.program_id(0) // column_tiles
    column = tl.program_id(0) % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    first, last = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    weight_rows = weight + expert.to(tl.int64) * width * hidden + column[None, :] * hidden
    k = tl.arange(0, BLOCK_K)
    for start in range(first, last, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        live = row < last
        a_rows = x + row.to(tl.int64)[:, None] * hidden
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k0 in range(0, hidden, BLOCK_K):
            inside = k0 + k
            if EVEN:
                a = tl.load(a_rows + inside[None, :], mask=live[:, None], other=0.0)
                w = tl.load(weight_rows + inside[:, None])
            else:
                a = tl.load(a_rows + inside[None, :], mask=live[:, None] & (inside[None, :] < hidden), other=0.0)
                w = tl.load(
                    weight_rows + inside[:, None],
                    mask=(inside[:, None] < hidden) & (column[None, :] < width),
                    other=0.0,
                )
            total = tl.dot(a, w, total, input_precision=PRECISION)
        spot = out + row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(spot, total.to(out.dtype.element_ty), mask=live[:, None] & (column[None, :] < width))
