"""Portable device code of step 08's prefill: dense, ragged or paged, under range windows, softcap and learned sinks."""

import triton
import triton.language as tl

from ladder.step07_dflash1.kernel import dflash1_find, dflash1_key_rows


@triton.jit
def dflash2_tanh(x, EXACT: tl.constexpr):
    """tanh by one exponential, which never overflows; its error is a unit in the last place of 1.

    EXACT: also relative to a small result, by a polynomial there.
    """
    y = 2.0 / (1.0 + tl.exp2(tl.abs(x) * -2.8853900817779268)) - 1.0  # 2 log2(e)
    y = tl.where(x < 0, -y, y)
    if EXACT:
        square = tl.minimum(x * x, 1.0)  # or the polynomial of a large x overflows, though nobody takes it
        y = tl.where(square < 0.01, x * (1.0 + square * (-0.33333333 + square * 0.13333333)), y)
    return y


@triton.jit
def dflash2_tile(
    q, q_tail, acc, row_max, row_sum, k_base, v_base, table, start,
    stride_kp, stride_kn, stride_kd, stride_vp, stride_vn, stride_vd, stride_tp,
    end, first_key, last_sink, last_visible, low, sink, scale_log2, cap_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold keys start .. start + BLOCK_N into (acc, row_max, row_sum), the maximum kept scaled.

    Some row sees the keys first_key .. end and those below last_sink; row r those of them up to last_visible[r] that
    lie at low[r] or after, or below sink[r]. Without MASKED every row sees every key of the tile.
    """
    key = start + tl.arange(0, BLOCK_N)
    k_first, v_first, k_rows, v_rows = dflash1_key_rows(
        table, start, end, stride_kp, stride_kn, stride_vp, stride_vn, stride_tp, BLOCK_N, PAGE_SIZE, ALIGNED, WIDE
    )
    k_base += k_first
    v_base += v_first
    live = key < end
    if WINDOWED:
        live = live & ((key >= first_key) | (key < last_sink))
    live = live[:, None]
    dim = tl.arange(0, BLOCK_D)
    if WIDE:
        dim = dim.to(tl.int64)
    k_ptrs = k_base + (k_rows[:, None] + dim[None, :] * stride_kd)
    if MASKED and BLOCK_D > HEAD_DIM:  # never load what is dead: it may be NaN, and 0 x NaN is NaN
        k = tl.load(k_ptrs, mask=live & (dim < HEAD_DIM)[None, :], other=0.0)
    elif MASKED:
        k = tl.load(k_ptrs, mask=live, other=0.0)
    elif BLOCK_D > HEAD_DIM:
        k = tl.load(k_ptrs, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_ptrs)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if TAIL_D > 0:  # a head of 192 is 128 columns and 64 more
        tail = BLOCK_D + tl.arange(0, TAIL_D)
        if WIDE:
            tail = tail.to(tl.int64)
        t_ptrs = k_base + (k_rows[:, None] + tail[None, :] * stride_kd)
        if MASKED:
            k_tail = tl.load(t_ptrs, mask=live & (tail < HEAD_DIM)[None, :], other=0.0)
        elif BLOCK_D + TAIL_D > HEAD_DIM:
            k_tail = tl.load(t_ptrs, mask=(tail < HEAD_DIM)[None, :], other=0.0)
        else:
            k_tail = tl.load(t_ptrs)
        scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision=PRECISION)

    if SOFTCAP:
        scores = dflash2_tanh(scores * cap_scale, SOFTCAP == 2)
    if MASKED:
        visible = (key < end)[None, :]
        if HAS_RIGHT:
            visible = visible & (key[None, :] <= last_visible[:, None])
        if WINDOWED:
            visible = visible & ((key[None, :] >= low[:, None]) | (key[None, :] < sink[:, None]))
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max  # -inf - -inf would be NaN
    rescale = tl.exp2(row_max - finite_max)
    probs = tl.exp2(scores * scale_log2 - finite_max[:, None])
    row_sum = row_sum * rescale + tl.sum(probs, axis=1)
    acc = acc * rescale[:, None]

    dim_v = tl.arange(0, BLOCK_DV)
    if WIDE:
        dim_v = dim_v.to(tl.int64)
    v_ptrs = v_base + (v_rows[:, None] + dim_v[None, :] * stride_vd)
    if MASKED and BLOCK_DV > HEAD_DIM_V:
        v = tl.load(v_ptrs, mask=live & (dim_v < HEAD_DIM_V)[None, :], other=0.0)
    elif MASKED:
        v = tl.load(v_ptrs, mask=live, other=0.0)
    elif BLOCK_DV > HEAD_DIM_V:
        v = tl.load(v_ptrs, mask=(dim_v < HEAD_DIM_V)[None, :], other=0.0)
    else:
        v = tl.load(v_ptrs)
    acc = tl.dot(probs.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit
def dflash2_range_limits(windows_ptr, position, seqlen_k, NUM_RANGES: tl.constexpr):
    """(low, sink) of queries at ``position``: they see keys from low on, and keys below sink.

    A row of the table is start, stop, sink, left = window - 1; negative positions count from seqlen_k.
    """
    left = tl.full(position.shape, 1 << 30, tl.int32)
    sink = tl.zeros(position.shape, tl.int32)
    for i in tl.static_range(NUM_RANGES):
        row = windows_ptr + 4 * (NUM_RANGES - 1 - i)  # backwards: in a sequence too short for both, the earlier counts
        start, stop = tl.load(row), tl.load(row + 1)
        start += tl.where(start < 0, seqlen_k, 0)
        stop += tl.where(stop < 0, seqlen_k, 0)
        inside = (position >= start) & (position < stop)
        sink = tl.where(inside, tl.load(row + 2), sink)
        left = tl.where(inside, tl.load(row + 3), left)
    low = position - left
    return tl.where(low <= sink, 0, low), sink  # sinks that meet the window: everything from the start


PLAIN = (  # lengths and counts: values, never reasons to compile again
    "num_tiles", "num_heads", "group_size", "num_seqs", "seqlen_q", "seqlen_k", "lse_stride", "right",
)  # fmt: skip


@triton.jit(do_not_specialize=PLAIN)
def dflash2_prefill(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, table_ptr, seq_lens_ptr, windows_ptr, sinks_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od, stride_tb, stride_tp, stride_sink,
    num_tiles, num_heads, group_size, num_seqs, seqlen_q, seqlen_k, lse_stride, right, scale_log2, cap_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, PACK: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_RIGHT: tl.constexpr, NUM_RANGES: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SIGN: tl.constexpr, HAS_LSE: tl.constexpr, RAGGED: tl.constexpr,
    ALIGNED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries; grid (num_tiles * heads / PACK * batch,).

    A tile is BLOCK_M // PACK tokens, each with PACK heads of one KV group as rows beside each other: a short chunk
    fills its tile with heads that read the same keys. RAGGED: q and out are packed (tokens, heads, D), and K too unless
    PAGE_SIZE says that it lies in pages; then ``seqlen_k`` is what a row of the block table can address, and stride_kb
    is from page to page. HAS_RIGHT: a query sees ``right`` keys after its own position, 0 of them when CAUSAL.
    """
    BLOCK_T: tl.constexpr = BLOCK_M // PACK
    WINDOWED: tl.constexpr = NUM_RANGES > 0
    pid = tl.program_id(0)
    tile = num_tiles - 1 - pid % num_tiles  # causal: the last tiles have the most keys, so they start first
    head = pid // num_tiles % (num_heads // PACK) * PACK
    head64 = head.to(tl.int64)
    kv_head = (head // group_size).to(tl.int64)
    seq = pid // num_tiles // (num_heads // PACK)
    first_token = 0  # of this sequence among the packed ones
    if RAGGED:
        seq = dflash1_find(cu_q_ptr, tile, num_seqs, BLOCK_T)
        first_token = tl.load(cu_q_ptr + seq).to(tl.int32)
        seqlen_q = tl.load(cu_q_ptr + seq + 1).to(tl.int32) - first_token
        tile = tile - (first_token // BLOCK_T + seq)
        if tile * BLOCK_T >= seqlen_q:
            return  # a slot that this sequence does not need
    seq64 = seq.to(tl.int64)
    table = table_ptr
    k_start, v_start = kv_head * stride_kh, kv_head * stride_vh
    beyond = False
    if PAGE_SIZE > 0:
        table = table_ptr + seq64 * stride_tb
        capacity = seqlen_k
        seqlen_k = tl.load(seq_lens_ptr + seq)
        beyond = (seqlen_k < 0) | (seqlen_k > capacity)
        seqlen_k = tl.where(beyond, 0, seqlen_k)
    elif RAGGED:
        start_k = tl.load(cu_k_ptr + seq)
        seqlen_k = (tl.load(cu_k_ptr + seq + 1) - start_k).to(tl.int32)
        k_start += start_k.to(tl.int64) * stride_kn
        v_start += start_k.to(tl.int64) * stride_vn
    else:
        k_start += seq64 * stride_kb
        v_start += seq64 * stride_vb
    if ALIGNED:
        k_start, v_start = tl.multiple_of(k_start, ALIGNED), tl.multiple_of(v_start, ALIGNED)
    k_base, v_base = k_ptr + k_start, v_ptr + v_start
    if CAUSAL:
        right = 0

    row = tl.arange(0, BLOCK_M)
    query = tile * BLOCK_T + row // PACK
    row_ok = query < tl.minimum(seqlen_q, (tile + 1) * BLOCK_T)  # the second where PACK does not divide BLOCK_M
    in_range = row_ok[:, None]
    dim = tl.arange(0, BLOCK_D)
    q_base = q_ptr + head64 * stride_qh
    if not RAGGED:
        q_base += seq64 * stride_qb
    q_rows = ((first_token + query).to(tl.int64) * stride_qm)[:, None]
    if PACK > 1:
        q_rows += ((row % PACK).to(tl.int64) * stride_qh)[:, None]
    q = tl.load(
        q_base + q_rows + dim.to(tl.int64)[None, :] * stride_qd, mask=in_range & (dim < HEAD_DIM)[None, :], other=0.0
    )
    q_tail = q
    if TAIL_D > 0:
        tail = BLOCK_D + tl.arange(0, TAIL_D)
        q_tail = tl.load(
            q_base + q_rows + tail.to(tl.int64)[None, :] * stride_qd,
            mask=in_range & (tail < HEAD_DIM)[None, :],
            other=0.0,
        )
    if SIGN < 0:  # exact; lets scale_log2 stay positive
        q = -q
        q_tail = -q_tail
    elif SIGN == 0:
        q = tl.zeros_like(q)
        q_tail = tl.zeros_like(q_tail)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if HAS_SINKS:  # a key that is already folded in: a logit of its own and no value
        sink_ptrs = sinks_ptr + (head + row % PACK) * stride_sink
        row_max = tl.load(sink_ptrs).to(tl.float32) * 1.4426950408889634
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)

    offset = seqlen_k - seqlen_q
    position = query + offset
    last_visible = position + right
    first_position = tile * BLOCK_T + offset
    last_position = tl.minimum(seqlen_q, (tile + 1) * BLOCK_T) - 1 + offset
    end = seqlen_k  # keys that some row of this tile sees
    whole = seqlen_k  # keys that every row of this tile sees, but for windows
    if HAS_RIGHT:
        end = tl.maximum(0, tl.minimum(seqlen_k, last_position + right + 1))
        whole = tl.maximum(0, tl.minimum(seqlen_k, first_position + right + 1))
    if WINDOWED:
        low, sink = dflash2_range_limits(windows_ptr, tl.minimum(position, last_position), seqlen_k, NUM_RANGES)
        first_key = tl.maximum(0, tl.min(low, axis=0))
        last_sink = tl.max(sink, axis=0)
        # In tiles: sinks 0 .. sink_end, of which all rows see the first sink_whole; the window window .. last, of which
        # all rows see body .. body_end.
        last = (end + BLOCK_N - 1) // BLOCK_N
        window = tl.minimum(last, first_key // BLOCK_N)
        body = tl.maximum(window, tl.minimum(last, (tl.maximum(0, tl.max(low, axis=0)) + BLOCK_N - 1) // BLOCK_N))
        body_end = tl.maximum(body, whole // BLOCK_N)
        sink_end = tl.minimum(window, (tl.minimum(end, last_sink) + BLOCK_N - 1) // BLOCK_N)
        sink_whole = tl.minimum(sink_end, tl.minimum(whole, tl.min(sink, axis=0)) // BLOCK_N)
        num_whole = tl.maximum(0, sink_whole + body_end - body)
        num_masked = sink_end - sink_whole + body - window + last - body_end
    else:
        low, sink, first_key, last_sink = position, position, 0, 0
        # Without the maximum, which changes no value, ptxas takes another shape of loop and runs the wgmmas one by one.
        num_whole = tl.maximum(0, whole // BLOCK_N)
        num_masked = (end + BLOCK_N - 1) // BLOCK_N - num_whole
    for i in range(0, num_whole):
        start = i * BLOCK_N
        if WINDOWED:
            start = tl.where(i < sink_whole, i, i - sink_whole + body) * BLOCK_N
        acc, row_max, row_sum = dflash2_tile(
            q, q_tail, acc, row_max, row_sum, k_base, v_base, table, start,
            stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_vd, stride_tp,
            seqlen_k, first_key, last_sink, last_visible, low, sink, scale_log2, cap_scale,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, TAIL_D, BLOCK_DV, BLOCK_N, PAGE_SIZE, False, HAS_RIGHT,
            WINDOWED, SOFTCAP, ALIGNED, WIDE, PRECISION,
        )  # fmt: skip
    for i in range(0, num_masked):  # tiles that an edge crosses: of the sinks, the window, the diagonal, the end of K
        start = (num_whole + i) * BLOCK_N
        if WINDOWED:
            from_window = i - (sink_end - sink_whole)
            from_body = from_window - (body - window)
            start = (
                tl.where(from_window < 0, sink_end + from_window, tl.where(from_body < 0, body, body_end) + from_body)
                * BLOCK_N
            )
        acc, row_max, row_sum = dflash2_tile(
            q, q_tail, acc, row_max, row_sum, k_base, v_base, table, start,
            stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_vd, stride_tp,
            end, first_key, last_sink, last_visible, low, sink, scale_log2, cap_scale,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, TAIL_D, BLOCK_DV, BLOCK_N, PAGE_SIZE, True, HAS_RIGHT,
            WINDOWED, SOFTCAP, ALIGNED, WIDE, PRECISION,
        )  # fmt: skip

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # no key seen: 0 stays 0, and the log-sum-exp -inf
    acc = acc / row_sum[:, None]
    if PAGE_SIZE > 0:
        acc = tl.where(beyond, float("nan"), acc)  # a length that no page holds: loud, not wrong
    dim_v = tl.arange(0, BLOCK_DV)
    out_base = out_ptr + head64 * stride_oh
    if not RAGGED:
        out_base += seq64 * stride_ob
    out_rows = ((first_token + query).to(tl.int64) * stride_om)[:, None]
    if PACK > 1:
        out_rows += ((row % PACK).to(tl.int64) * stride_oh)[:, None]
    out_ptrs = out_base + out_rows + dim_v.to(tl.int64)[None, :] * stride_od
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_range & (dim_v < HEAD_DIM_V)[None, :])
    if HAS_LSE:
        lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453
        if PAGE_SIZE > 0:
            lse = tl.where(beyond, float("nan"), lse)
        lse_row = (head64 + row % PACK) * lse_stride + first_token + query
        if not RAGGED:
            lse_row += seq64 * num_heads * lse_stride
        tl.store(lse_ptr + lse_row, lse, mask=row_ok)
