"""Device code of step 08's coarse fusion: what stands before attention
and after it, with no intermediate result in memory.

A product with few rows is bound by the bytes of its weight, so it is cut into many programs:
tiles of columns times splits of the inner dimension. Each leaves a float32 partial sum;
whoever arrives last at a unit (a head, a latent, a tile of rows) adds the partial sums in a
fixed order and finishes the unit: norm, rotation, cache; or scores and choice. Bits repeat.
"""

import triton
import triton.language as tl

# What changes from call to call: its value must not make another kernel.
ANY_LENGTH = [
    "tokens", "splits", "row_tiles", "max_positions", "num_slots", "page_size", "heads_in_turn", "scaling", "eps",
]  # fmt: skip


@triton.jit
def dflash2_partial_product(
    x_ptr, weight_ptr, partials_ptr, stride_xt, stride_xk, stride_wn, stride_wk,
    tokens, columns, inner, row_tile, first_column, last_column, split, per_split,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """partials[split, rows, columns] = x[rows, k] @ weight[columns, k]^T over the split's part of k, in float32."""
    row = row_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    column = first_column + tl.arange(0, BLOCK_N)
    row_ok, column_ok = row < tokens, column < last_column
    start = split * per_split
    k = start + tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * stride_xt + k.to(tl.int64)[None, :] * stride_xk
    w_ptrs = weight_ptr + column.to(tl.int64)[None, :] * stride_wn + k.to(tl.int64)[:, None] * stride_wk
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for offset in range(start, tl.minimum(start + per_split, inner), BLOCK_K):
        if EVEN:
            x = tl.load(x_ptrs, mask=row_ok[:, None], other=0.0)
            w = tl.load(w_ptrs, mask=column_ok[None, :], other=0.0)
        else:
            inside = offset + tl.arange(0, BLOCK_K) < inner
            x = tl.load(x_ptrs, mask=row_ok[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=column_ok[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_xk
        w_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_wk
    place = (split.to(tl.int64) * tokens + row)[:, None] * columns + column[None, :]
    tl.store(partials_ptr + place, acc, mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def dflash2_last_to_arrive(counters_ptr, index, wanted):
    """Whether this program is the last of ``wanted``; the counter is then 0 again, ready for the next launch."""
    tl.debug_barrier()  # every warp has stored before one thread announces it
    last = wanted == 1  # nobody to wait for: no counter, so nobody has to zero one
    if not last:
        last = tl.atomic_add(counters_ptr + index, 1, sem="acq_rel", scope="gpu") == wanted - 1
        if last:
            tl.store(counters_ptr + index, 0)
    return last


@triton.jit
def dflash2_gather(ptr, offsets, mask, stride_split, splits, PARTIAL: tl.constexpr):
    """The float32 values at ``offsets``: one load, or with PARTIAL the sum of the splits, always in the same order."""
    if not PARTIAL:
        x = tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    else:
        x = tl.zeros(mask.shape, tl.float32)
        for first in range(0, splits, 4):  # four loads in flight: more would not fit the registers
            for split in tl.static_range(4):
                ptrs = ptr + (first + split) * stride_split + offsets
                # Past L1, which never saw what the other programs stored.
                x += tl.load(ptrs, mask=mask & (first + split < splits), other=0.0, cache_modifier=".cg")
    return x


@triton.jit
def dflash2_load_pairs(
    ptr, row_offsets, row_ok, first, stride_c, stride_split, splits,
    ROT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """(a, b), both (rows, HALF) float32: what the rotation turns into each other, columns first .. first + ROT."""
    if INTERLEAVED:  # neighbours: loaded side by side, then told apart
        column = tl.arange(0, 2 * HALF)
        offsets = row_offsets[:, None] + (first + column).to(tl.int64)[None, :] * stride_c
        both = dflash2_gather(ptr, offsets, row_ok[:, None] & (column < ROT)[None, :], stride_split, splits, PARTIAL)
        a, b = tl.split(tl.reshape(both, [both.shape[0], HALF, 2]))
    else:
        column = tl.arange(0, HALF)
        mask = row_ok[:, None] & (column < ROT // 2)[None, :]
        offsets = row_offsets[:, None] + (first + column).to(tl.int64)[None, :] * stride_c
        a = dflash2_gather(ptr, offsets, mask, stride_split, splits, PARTIAL)
        b = dflash2_gather(ptr, offsets + tl.cast(ROT // 2, tl.int64) * stride_c, mask, stride_split, splits, PARTIAL)
    return a, b


@triton.jit
def dflash2_store_pairs(
    ptr, row_offsets, row_ok, a, b, first, stride_c,
    ROT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The inverse of ``dflash2_load_pairs``."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)
        both = tl.reshape(tl.join(a, b), [a.shape[0], 2 * HALF]).to(ptr.dtype.element_ty)
        offsets = row_offsets[:, None] + (first + column).to(tl.int64)[None, :] * stride_c
        tl.store(ptr + offsets, both, mask=row_ok[:, None] & (column < ROT)[None, :])
    else:
        column = tl.arange(0, HALF)
        mask = row_ok[:, None] & (column < ROT // 2)[None, :]
        offsets = row_offsets[:, None] + (first + column).to(tl.int64)[None, :] * stride_c
        tl.store(ptr + offsets, a.to(ptr.dtype.element_ty), mask=mask)
        offsets += tl.cast(ROT // 2, tl.int64) * stride_c
        tl.store(ptr + offsets, b.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def dflash2_angles(
    cos_ptr, sin_ptr, positions_ptr, token, token_ok, max_positions, ROT: tl.constexpr, HALF: tl.constexpr
):
    """cos and sin, (rows, HALF) float32, of each token's position; NaN for a position that the tables do not hold."""
    position = tl.load(positions_ptr + token, mask=token_ok, other=0).to(tl.int64)
    pair = tl.arange(0, HALF)
    known = ((position >= 0) & (position < max_positions))[:, None]
    mask = known & (pair < ROT // 2)[None, :]
    place = position[:, None] * (ROT // 2) + pair[None, :]
    cos = tl.load(cos_ptr + place, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + place, mask=mask, other=0.0).to(tl.float32)
    return tl.where(known, cos, float("nan")), tl.where(known, sin, float("nan"))


@triton.jit
def dflash2_scale_head(
    a, b, rest, weight_ptr, eps,
    ROT: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """RMSNorm over the columns of one head, held as pairs and the rest."""
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(rest * rest, axis=1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    pair, other = tl.arange(0, HALF), tl.arange(0, REST)
    step: tl.constexpr = 2 if INTERLEAVED else 1
    gap: tl.constexpr = 1 if INTERLEAVED else ROT // 2
    weight_a = tl.load(weight_ptr + pair * step, mask=pair < ROT // 2, other=0.0).to(tl.float32)
    weight_b = tl.load(weight_ptr + pair * step + gap, mask=pair < ROT // 2, other=0.0).to(tl.float32)
    weight_rest = tl.load(weight_ptr + ROT + other, mask=other < HEAD_DIM - ROT, other=0.0).to(tl.float32)
    return a * scale * weight_a[None, :], b * scale * weight_b[None, :], rest * scale * weight_rest[None, :]


@triton.jit
def dflash2_cache_rows(slots_ptr, token, token_ok, num_slots, page_size, stride_page, stride_slot):
    """(offset of each token's row in the cache, whether to write it)."""
    slot = tl.load(slots_ptr + token, mask=token_ok, other=-1).to(tl.int64)
    page = slot // page_size
    return page * stride_page + (slot - page * page_size) * stride_slot, (slot >= 0) & (slot < num_slots)


@triton.jit
def dflash2_finish_head(
    src_ptr, row_offsets, stride_c, stride_split, splits, bias_ptr, q_norm_ptr, k_norm_ptr, cos, sin,
    q_ptr, k_ptr, v_ptr, slots_ptr, token, token_ok, unit,
    stride_qt, stride_qh, stride_qd, stride_kp, stride_ks, stride_kh, stride_kd, stride_vp, stride_vs, stride_vh,
    stride_vd,
    num_heads, num_kv_heads, num_slots, page_size, eps,
    HEAD_DIM: tl.constexpr, ROT: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """One head of some tokens: (bias,) norm, rotation, and to q, or to its slot of the cache."""
    first = unit * HEAD_DIM
    a, b = dflash2_load_pairs(
        src_ptr, row_offsets, token_ok, first, stride_c, stride_split, splits, ROT, HALF, INTERLEAVED, PARTIAL
    )
    other = tl.arange(0, REST)
    rest_ok = token_ok[:, None] & (other < HEAD_DIM - ROT)[None, :]
    offsets = row_offsets[:, None] + (first + ROT + other).to(tl.int64)[None, :] * stride_c
    rest = dflash2_gather(src_ptr, offsets, rest_ok, stride_split, splits, PARTIAL)
    if bias_ptr is not None:
        pair = tl.arange(0, HALF)
        step: tl.constexpr = 2 if INTERLEAVED else 1
        gap: tl.constexpr = 1 if INTERLEAVED else ROT // 2
        a += tl.load(bias_ptr + first + pair * step, mask=pair < ROT // 2, other=0.0).to(tl.float32)[None, :]
        b += tl.load(bias_ptr + first + pair * step + gap, mask=pair < ROT // 2, other=0.0).to(tl.float32)[None, :]
        rest += tl.load(bias_ptr + first + ROT + other, mask=other < HEAD_DIM - ROT, other=0.0).to(tl.float32)[None, :]
    if unit < num_heads:
        if q_norm_ptr is not None:
            a, b, rest = dflash2_scale_head(a, b, rest, q_norm_ptr, eps, ROT, HALF, REST, HEAD_DIM, INTERLEAVED)
    elif unit < num_heads + num_kv_heads:
        if k_norm_ptr is not None:
            a, b, rest = dflash2_scale_head(a, b, rest, k_norm_ptr, eps, ROT, HALF, REST, HEAD_DIM, INTERLEAVED)
    if unit < num_heads + num_kv_heads:  # values are not turned
        a, b = a * cos - b * sin, b * cos + a * sin

    if unit < num_heads:
        slot = tl.load(slots_ptr + token, mask=token_ok, other=-1)
        poison = tl.where(slot < num_slots, 0.0, float("nan"))[:, None]  # a slot outside the cache must not pass unseen
        rows = token.to(tl.int64) * stride_qt + tl.cast(unit, tl.int64) * stride_qh
        dflash2_store_pairs(q_ptr, rows, token_ok, a + poison, b + poison, 0, stride_qd, ROT, HALF, INTERLEAVED)
        columns = (ROT + other).to(tl.int64)[None, :] * stride_qd
        tl.store(q_ptr + rows[:, None] + columns, (rest + poison).to(q_ptr.dtype.element_ty), mask=rest_ok)
    elif unit < num_heads + num_kv_heads:
        rows, write = dflash2_cache_rows(slots_ptr, token, token_ok, num_slots, page_size, stride_kp, stride_ks)
        rows += tl.cast(unit - num_heads, tl.int64) * stride_kh
        dflash2_store_pairs(k_ptr, rows, write, a, b, 0, stride_kd, ROT, HALF, INTERLEAVED)
        columns = (ROT + other).to(tl.int64)[None, :] * stride_kd
        tl.store(k_ptr + rows[:, None] + columns, rest.to(k_ptr.dtype.element_ty), mask=rest_ok & write[:, None])
    else:
        rows, write = dflash2_cache_rows(slots_ptr, token, token_ok, num_slots, page_size, stride_vp, stride_vs)
        rows += tl.cast(unit - num_heads - num_kv_heads, tl.int64) * stride_vh
        dflash2_store_pairs(v_ptr, rows, write, a, b, 0, stride_vd, ROT, HALF, INTERLEAVED)
        columns = (ROT + other).to(tl.int64)[None, :] * stride_vd
        tl.store(v_ptr + rows[:, None] + columns, rest.to(v_ptr.dtype.element_ty), mask=rest_ok & write[:, None])


@triton.jit(do_not_specialize=ANY_LENGTH)
def dflash2_rope_append(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr, k_ptr, v_ptr,
    stride_xt, stride_xc,
    stride_qt, stride_qh, stride_qd, stride_kp, stride_ks, stride_kh, stride_kd, stride_vp, stride_vs, stride_vh,
    stride_vd,
    tokens, num_heads, num_kv_heads, max_positions, num_slots, page_size, eps, heads_in_turn,
    HEAD_DIM: tl.constexpr, ROT: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Many tokens: the pass behind a library's product; heads in turn
    share the angles; grid (token tiles, head tiles)."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_ok = token < tokens
    cos, sin = dflash2_angles(cos_ptr, sin_ptr, positions_ptr, token, token_ok, max_positions, ROT, HALF)
    first = tl.program_id(1) * heads_in_turn
    for unit in range(first, tl.minimum(first + heads_in_turn, num_heads + 2 * num_kv_heads)):
        dflash2_finish_head(
            qkv_ptr, token.to(tl.int64) * stride_xt, stride_xc, 0, 1, None, q_norm_ptr, k_norm_ptr, cos, sin,
            q_ptr, k_ptr, v_ptr, slots_ptr, token, token_ok, unit,
            stride_qt, stride_qh, stride_qd, stride_kp, stride_ks, stride_kh, stride_kd,
            stride_vp, stride_vs, stride_vh, stride_vd, num_heads, num_kv_heads, num_slots, page_size, eps,
            HEAD_DIM, ROT, HALF, REST, INTERLEAVED, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=ANY_LENGTH)
def dflash2_qkv_rope_append(
    x_ptr, weight_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr, k_ptr,
    v_ptr,
    partials_ptr, counters_ptr, stride_xt, stride_xk, stride_wn, stride_wk,
    stride_qt, stride_qh, stride_qd, stride_kp, stride_ks, stride_kh, stride_kd, stride_vp, stride_vs, stride_vh,
    stride_vd,
    tokens, inner, per_split, splits, row_tiles, num_heads, num_kv_heads, max_positions, num_slots, page_size, eps,
    HEAD_DIM: tl.constexpr, ROT: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    TILES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FINISH_T: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Few tokens: projection and all that follows, one launch; grid (row tiles * heads * TILES * splits,)."""
    pid = tl.program_id(0)
    row_tile, pid = pid % row_tiles, pid // row_tiles  # row tiles side by side: they share a weight tile in L2
    split, pid = pid % splits, pid // splits
    tile, unit = pid % TILES, pid // TILES
    columns = (num_heads + 2 * num_kv_heads) * HEAD_DIM
    dflash2_partial_product(
        x_ptr, weight_ptr, partials_ptr, stride_xt, stride_xk, stride_wn, stride_wk,
        tokens, columns, inner, row_tile, unit * HEAD_DIM + tile * BLOCK_N, (unit + 1) * HEAD_DIM, split, per_split,
        BLOCK_T, BLOCK_N, BLOCK_K, EVEN, PRECISION,
    )  # fmt: skip
    if dflash2_last_to_arrive(counters_ptr, unit * row_tiles + row_tile, TILES * splits):
        first = row_tile * BLOCK_T
        for start in range(first, tl.minimum(first + BLOCK_T, tokens), FINISH_T):
            token = start + tl.arange(0, FINISH_T)
            token_ok = token < tokens
            cos, sin = dflash2_angles(cos_ptr, sin_ptr, positions_ptr, token, token_ok, max_positions, ROT, HALF)
            dflash2_finish_head(
                partials_ptr, token.to(tl.int64) * columns, 1, tl.cast(tokens, tl.int64) * columns, splits, bias_ptr,
                q_norm_ptr, k_norm_ptr, cos, sin, q_ptr, k_ptr, v_ptr, slots_ptr, token, token_ok, unit,
                stride_qt, stride_qh, stride_qd, stride_kp, stride_ks, stride_kh, stride_kd,
                stride_vp, stride_vs, stride_vh, stride_vd, num_heads, num_kv_heads, num_slots, page_size, eps,
                HEAD_DIM, ROT, HALF, REST, INTERLEAVED, True,
            )  # fmt: skip


@triton.jit
def dflash2_finish_latent(
    src_ptr, row_offsets, stride_c, stride_split, splits, norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr,
    cache_ptr, token, token_ok,
    stride_cp, stride_cs, stride_cd, max_positions, num_slots, page_size, eps,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, ROT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """The latents of some tokens: norm of the first RANK columns,
    rotation of the others, to their slots of the cache."""
    column = tl.arange(0, BLOCK_R)
    mask = token_ok[:, None] & (column < RANK)[None, :]
    offsets = row_offsets[:, None] + column.to(tl.int64)[None, :] * stride_c
    latent = dflash2_gather(src_ptr, offsets, mask, stride_split, splits, PARTIAL)
    scale = tl.rsqrt(tl.sum(latent * latent, axis=1) / RANK + eps)
    weight = tl.load(norm_ptr + column, mask=column < RANK, other=0.0).to(tl.float32)
    rows, write = dflash2_cache_rows(slots_ptr, token, token_ok, num_slots, page_size, stride_cp, stride_cs)
    latent = (latent * scale[:, None] * weight[None, :]).to(cache_ptr.dtype.element_ty)
    tl.store(cache_ptr + rows[:, None] + column.to(tl.int64)[None, :] * stride_cd, latent, mask=mask & write[:, None])
    a, b = dflash2_load_pairs(
        src_ptr, row_offsets, token_ok, RANK, stride_c, stride_split, splits, ROT, HALF, INTERLEAVED, PARTIAL
    )
    cos, sin = dflash2_angles(cos_ptr, sin_ptr, positions_ptr, token, token_ok, max_positions, ROT, HALF)
    dflash2_store_pairs(
        cache_ptr, rows, write, a * cos - b * sin, b * cos + a * sin, RANK, stride_cd, ROT, HALF, INTERLEAVED
    )


@triton.jit
def dflash2_finish_queries(
    q_pe_ptr, q_nope_ptr, q_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, tile,
    stride_pt, stride_ph, stride_pd, stride_nt, stride_nh, stride_nd, stride_qt, stride_qh, stride_qd,
    tokens, num_heads, max_positions, num_slots,
    ROT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, NOPE: tl.constexpr, BLOCK_NOPE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """BLOCK_Q rows (token, head) of the queries: the absorbed columns copied, the rotary ones turned behind them."""
    row = tile.to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    token, head = row // num_heads, row % num_heads
    row_ok = token < tokens
    cos, sin = dflash2_angles(cos_ptr, sin_ptr, positions_ptr, token, row_ok, max_positions, ROT, HALF)
    a, b = dflash2_load_pairs(
        q_pe_ptr, token * stride_pt + head * stride_ph, row_ok, 0, stride_pd, 0, 1, ROT, HALF, INTERLEAVED, False
    )
    slot = tl.load(slots_ptr + token, mask=row_ok, other=-1)
    poison = tl.where(slot < num_slots, 0.0, float("nan"))[:, None]  # a slot outside the cache must not pass unseen
    rows = token * stride_qt + head * stride_qh
    tl.debug_barrier()  # q may be q_pe: all have read
    a, b = a * cos - b * sin + poison, b * cos + a * sin + poison
    dflash2_store_pairs(q_ptr, rows, row_ok, a, b, NOPE, stride_qd, ROT, HALF, INTERLEAVED)
    if NOPE:
        column = tl.arange(0, BLOCK_NOPE)
        mask = row_ok[:, None] & (column < NOPE)[None, :]
        source = (token * stride_nt + head * stride_nh)[:, None] + column.to(tl.int64)[None, :] * stride_nd
        target = rows[:, None] + column.to(tl.int64)[None, :] * stride_qd
        tl.store(q_ptr + target, tl.load(q_nope_ptr + source, mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=ANY_LENGTH)
def dflash2_mla_append(
    x_ptr, weight_ptr, norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, cache_ptr, q_pe_ptr, q_nope_ptr, q_ptr,
    partials_ptr, counters_ptr, stride_xt, stride_xk, stride_wn, stride_wk, stride_cp, stride_cs, stride_cd,
    stride_pt, stride_ph, stride_pd, stride_nt, stride_nh, stride_nd, stride_qt, stride_qh, stride_qd,
    tokens, num_heads, inner, per_split, splits, row_tiles, max_positions, num_slots, page_size, eps,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, ROT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    NOPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, PROJECT: tl.constexpr, TILES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FINISH_T: tl.constexpr, BLOCK_Q: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """MLA before attention, keys and queries in one launch; grid (latent programs + tiles of BLOCK_Q query rows,).

    With PROJECT x is the hidden state, which the latent programs multiply first; without it is the product.
    """
    pid = tl.program_id(0)
    latent_programs = row_tiles * TILES * splits
    if pid >= latent_programs:  # rows of q: (token, head)
        dflash2_finish_queries(
            q_pe_ptr, q_nope_ptr, q_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, pid - latent_programs,
            stride_pt, stride_ph, stride_pd, stride_nt, stride_nh, stride_nd, stride_qt, stride_qh, stride_qd,
            tokens, num_heads, max_positions, num_slots, ROT, HALF, INTERLEAVED, NOPE, BLOCK_NOPE, BLOCK_Q,
        )  # fmt: skip
    elif not PROJECT:
        token = pid * BLOCK_T + tl.arange(0, BLOCK_T)
        dflash2_finish_latent(
            x_ptr, token.to(tl.int64) * stride_xt, stride_xk, 0, 1, norm_ptr, cos_ptr, sin_ptr, positions_ptr,
            slots_ptr,
            cache_ptr, token, token < tokens, stride_cp, stride_cs, stride_cd, max_positions, num_slots, page_size, eps,
            RANK, BLOCK_R, ROT, HALF, INTERLEAVED, False,
        )  # fmt: skip
    else:
        row_tile, pid = pid % row_tiles, pid // row_tiles
        split, tile = pid % splits, pid // splits
        dflash2_partial_product(
            x_ptr, weight_ptr, partials_ptr, stride_xt, stride_xk, stride_wn, stride_wk,
            tokens, RANK + ROT, inner, row_tile, tile * BLOCK_N, RANK + ROT, split, per_split,
            BLOCK_T, BLOCK_N, BLOCK_K, EVEN, PRECISION,
        )  # fmt: skip
        if dflash2_last_to_arrive(counters_ptr, row_tile, TILES * splits):
            first = row_tile * BLOCK_T
            for start in range(first, tl.minimum(first + BLOCK_T, tokens), FINISH_T):
                token = start + tl.arange(0, FINISH_T)
                dflash2_finish_latent(
                    partials_ptr, token.to(tl.int64) * (RANK + ROT), 1, tl.cast(tokens, tl.int64) * (RANK + ROT),
                    splits,
                    norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, cache_ptr, token, token < tokens,
                    stride_cp, stride_cs, stride_cd, max_positions, num_slots, page_size, eps,
                    RANK, BLOCK_R, ROT, HALF, INTERLEAVED, True,
                )  # fmt: skip


@triton.jit(do_not_specialize=ANY_LENGTH)
def dflash2_add_norm(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, residual_out_ptr, counts_ptr,
    stride_xt, stride_xk, stride_rt, stride_rk, tokens, hidden, eps, num_experts,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """normed = RMSNorm(x + residual), rows held in registers: every byte moves once; grid (row tiles,)."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_H)
    mask = (row < tokens)[:, None] & (column < hidden)[None, :]
    row64, column64 = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
    x = tl.load(x_ptr + row64 * stride_xt + column64 * stride_xk, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row64 * stride_rt + column64 * stride_rk, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)  # the norm is of what the next layer will add to
        tl.store(residual_out_ptr + row64 * hidden + column64, x, mask=mask)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=1) / hidden + eps)
    weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    normed = x32 * scale[:, None] * weight[None, :]
    tl.store(normed_ptr + row64 * hidden + column64, normed.to(normed_ptr.dtype.element_ty), mask=mask)
    if counts_ptr is not None:
        if tl.program_id(0) == 0:  # the router that follows adds to them
            expert = tl.arange(0, BLOCK_E)
            tl.store(counts_ptr + expert, tl.zeros([BLOCK_E], tl.int32), mask=expert < num_experts)


@triton.jit
def dflash2_choose(
    logits, bias_ptr, weights_ptr, ids_ptr, token, token_ok, num_experts, scaling,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, PER_GROUP: tl.constexpr, BLOCK_P: tl.constexpr,
    TOPK_GROUPS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_TOPK: tl.constexpr,
    SIGMOID: tl.constexpr, TOP2: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Score, rank and store the choice of some tokens; returns how many chose each column, (BLOCK_G * BLOCK_P,) int32.

    A column is expert (column // BLOCK_P) * PER_GROUP + column % BLOCK_P: groups padded to powers of two, in order, so
    that the lowest column of a tie is the lowest expert.
    """
    column = tl.arange(0, BLOCK_G * BLOCK_P)
    real = (column // BLOCK_P < GROUPS) & (column % BLOCK_P < PER_GROUP)
    expert = column // BLOCK_P * PER_GROUP + column % BLOCK_P
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        shifted = tl.exp(logits - tl.max(tl.where(real[None, :], logits, float("-inf")), axis=1)[:, None])
        shifted = tl.where(real[None, :], shifted, 0.0)
        scores = shifted / tl.sum(shifted, axis=1)[:, None]
    key = logits  # same order as the scores, but without ties where they saturate
    if bias_ptr is not None:
        key = scores + tl.load(bias_ptr + expert, mask=real, other=0.0).to(tl.float32)[None, :]
    elif TOP2:
        key = scores
    key = tl.where(key == key, tl.minimum(tl.maximum(key, -1e38), 1e38), 1e38)  # NaN ranks first, as in torch.topk
    key = tl.where(real[None, :], key, float("-inf"))
    if TOPK_GROUPS < GROUPS:
        grouped = tl.reshape(key, [key.shape[0], BLOCK_G, BLOCK_P])
        group_key = tl.max(grouped, axis=2)
        if TOP2:
            first = tl.argmax(grouped, axis=2)
            others = tl.where(tl.arange(0, BLOCK_P)[None, None, :] == first[:, :, None], float("-inf"), grouped)
            group_key += tl.max(others, axis=2)
        group = tl.arange(0, BLOCK_G)
        kept = tl.zeros([key.shape[0], BLOCK_G], tl.int32)
        for _ in tl.static_range(TOPK_GROUPS):
            best = group[None, :] == tl.argmax(group_key, axis=1)[:, None]
            kept = tl.where(best, 1, kept)
            group_key = tl.where(best, float("-inf"), group_key)
        grouped = tl.where(kept[:, :, None] == 1, grouped, float("-inf"))
        key = tl.reshape(grouped, [key.shape[0], BLOCK_G * BLOCK_P])
    place = tl.arange(0, BLOCK_TOPK)
    weights = tl.zeros([key.shape[0], BLOCK_TOPK], tl.float32)
    ids = tl.zeros([key.shape[0], BLOCK_TOPK], tl.int32)
    chosen = tl.zeros([key.shape[0], BLOCK_G * BLOCK_P], tl.int32)
    for j in tl.static_range(TOP_K):
        winner = tl.argmax(key, axis=1)
        best = column[None, :] == winner[:, None]
        weight = tl.sum(tl.where(best, scores, 0.0), axis=1)
        weights = tl.where(place[None, :] == j, weight[:, None], weights)
        ids = tl.where(place[None, :] == j, (winner // BLOCK_P * PER_GROUP + winner % BLOCK_P)[:, None], ids)
        chosen = tl.where(best, 1, chosen)
        key = tl.where(best, float("-inf"), key)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=1)[:, None] + 1e-20)
    weights *= scaling
    offsets = token.to(tl.int64)[:, None] * TOP_K + place[None, :]
    mask = token_ok[:, None] & (place < TOP_K)[None, :]
    tl.store(weights_ptr + offsets, weights, mask=mask)
    tl.store(ids_ptr + offsets, ids, mask=mask)
    return tl.sum(tl.where(token_ok[:, None], chosen, 0), axis=0)


@triton.jit(do_not_specialize=ANY_LENGTH)
def dflash2_norm_router(
    x_ptr, residual_ptr, norm_ptr, gate_ptr, bias_ptr, normed_ptr, residual_out_ptr, weights_ptr, ids_ptr, counts_ptr,
    partials_ptr, counters_ptr, stride_xt, stride_xk, stride_rt, stride_rk, stride_ge, stride_gk,
    tokens, hidden, per_split, splits, row_tiles, num_experts, eps, scaling,
    NORM: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, FINISH_T: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, PER_GROUP: tl.constexpr, BLOCK_P: tl.constexpr,
    TOPK_GROUPS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_TOPK: tl.constexpr, SIGMOID: tl.constexpr, TOP2: tl.constexpr,
    RENORMALIZE: tl.constexpr, ONE_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gate product, scores, choice and counts, with NORM the add and
    norm before; grid (row tiles * expert TILES * splits,).

    With NORM every program reads its rows whole for the sum of squares
    (few rows: they lie in L2), but stores only its split.
    """
    pid = tl.program_id(0)
    row_tile, pid = pid % row_tiles, pid // row_tiles
    tile, split = pid % TILES, pid // TILES
    row = row_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    row_ok = row < tokens
    row64 = row.to(tl.int64)[:, None]
    k = tl.arange(0, BLOCK_K)
    expert = tile * BLOCK_E + tl.arange(0, BLOCK_E)
    if NORM:
        squares = tl.zeros([BLOCK_T], tl.float32)
        wide = tl.arange(0, BLOCK_S)
        for offset in range(0, hidden, BLOCK_S):  # wider than the product's tiles: each round waits for memory once
            mask = row_ok[:, None] & (offset + wide < hidden)[None, :]
            k64 = (offset + wide).to(tl.int64)[None, :]
            x = tl.load(x_ptr + row64 * stride_xt + k64 * stride_xk, mask=mask, other=0.0)
            if residual_ptr is not None:
                residual = tl.load(residual_ptr + row64 * stride_rt + k64 * stride_rk, mask=mask, other=0.0)
                x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        scale = tl.rsqrt(squares / hidden + eps)
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    start = split * per_split
    for offset in range(start, tl.minimum(start + per_split, hidden), BLOCK_K):
        inside = offset + k < hidden
        mask = row_ok[:, None] & inside[None, :]
        k64 = (offset + k).to(tl.int64)
        gate_ptrs = gate_ptr + k64[:, None] * stride_gk + expert.to(tl.int64)[None, :] * stride_ge
        gate = tl.load(gate_ptrs, mask=inside[:, None] & (expert < num_experts)[None, :], other=0.0)
        x = tl.load(x_ptr + row64 * stride_xt + k64[None, :] * stride_xk, mask=mask, other=0.0)
        if NORM:
            if residual_ptr is not None:
                residual = tl.load(residual_ptr + row64 * stride_rt + k64[None, :] * stride_rk, mask=mask, other=0.0)
                x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
                tl.store(residual_out_ptr + row64 * hidden + k64[None, :], x, mask=mask & (tile == 0))
            weight = tl.load(norm_ptr + offset + k, mask=inside, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) * scale[:, None] * weight[None, :]).to(x.dtype)
            tl.store(normed_ptr + row64 * hidden + k64[None, :], x, mask=mask & (tile == 0))
        # of the rounded rows, which the experts see
        acc = tl.dot(x.to(gate.dtype), gate, acc, input_precision=PRECISION)
    place = (split.to(tl.int64) * tokens + row)[:, None] * num_experts + expert[None, :]
    tl.store(partials_ptr + place, acc, mask=row_ok[:, None] & (expert < num_experts)[None, :])

    if dflash2_last_to_arrive(counters_ptr, row_tile, TILES * splits):
        column = tl.arange(0, BLOCK_G * BLOCK_P)
        real = (column // BLOCK_P < GROUPS) & (column % BLOCK_P < PER_GROUP)
        column_expert = column // BLOCK_P * PER_GROUP + column % BLOCK_P
        counts = tl.zeros([BLOCK_G * BLOCK_P], tl.int32)
        first = row_tile * BLOCK_T
        for begin in range(first, tl.minimum(first + BLOCK_T, tokens), FINISH_T):
            token = begin + tl.arange(0, FINISH_T)
            token_ok = token < tokens
            offsets = token.to(tl.int64)[:, None] * num_experts + column_expert[None, :]
            mask = token_ok[:, None] & real[None, :]
            logits = dflash2_gather(partials_ptr, offsets, mask, tl.cast(tokens, tl.int64) * num_experts, splits, True)
            counts += dflash2_choose(
                logits, bias_ptr, weights_ptr, ids_ptr, token, token_ok, num_experts, scaling,
                GROUPS, BLOCK_G, PER_GROUP, BLOCK_P, TOPK_GROUPS, TOP_K, BLOCK_TOPK, SIGMOID, TOP2, RENORMALIZE,
            )  # fmt: skip
        if ONE_TILE:
            tl.store(counts_ptr + column_expert, counts, mask=real)
        else:
            tl.atomic_add(counts_ptr + column_expert, counts, mask=real & (counts > 0))
