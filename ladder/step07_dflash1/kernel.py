"""Device code of step 07: prefill (dense, ragged, or on a paged cache) and packed decode with the merge inside."""

import triton
import triton.language as tl


@triton.jit
def dflash1_key_rows(
    table, start, end, stride_kp, stride_kn, stride_vp, stride_vn, stride_tp,
    BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Where keys start .. start + BLOCK_N lie: the offset of a first element, int64, and (BLOCK_N,) rows from there.

    Returns k_first, v_first, k_rows, v_rows. Rows are int32 unless WIDE, half the registers of a tile's addresses.
    PAGE_SIZE 0: no pages.
    """
    row = tl.arange(0, BLOCK_N)
    if WIDE:
        row = row.to(tl.int64)
    if PAGE_SIZE == 0:
        k_first, v_first = tl.cast(start, tl.int64) * stride_kn, tl.cast(start, tl.int64) * stride_vn
        k_rows, v_rows = row * stride_kn, row * stride_vn
    elif PAGE_SIZE % BLOCK_N == 0:  # the tile lies in one page: one lookup
        page = tl.load(table + start // PAGE_SIZE * stride_tp).to(tl.int64)
        slot = tl.cast(start % PAGE_SIZE, tl.int64)
        k_first, v_first = page * stride_kp + slot * stride_kn, page * stride_vp + slot * stride_vn
        k_rows, v_rows = row * stride_kn, row * stride_vn
    else:  # a lookup per key; entries past the length may be anything and are not followed
        key = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + key // PAGE_SIZE * stride_tp, mask=key < end, other=0).to(tl.int64)
        slot = (key % PAGE_SIZE).to(tl.int64)
        k_first, v_first = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
        k_rows, v_rows = page * stride_kp + slot * stride_kn, page * stride_vp + slot * stride_vn
    if ALIGNED:  # whole 16-byte words in a row, which a stride like 72 does not show the compiler
        k_first, v_first = tl.multiple_of(k_first, ALIGNED), tl.multiple_of(v_first, ALIGNED)
        k_rows, v_rows = tl.multiple_of(k_rows, ALIGNED), tl.multiple_of(v_rows, ALIGNED)
    return k_first, v_first, k_rows, v_rows


@triton.jit
def dflash1_tile(
    q, q_tail, acc, row_max, row_sum, k_base, v_base, k_rows, v_rows, stride_kd, stride_vd,
    key, end, last_visible, scale_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, V_IS_K: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys into (acc, row_max, row_sum). Row r sees the keys below ``end`` up to ``last_visible[r]``.

    A head of 192 or 576 is BLOCK_D = 128 or 512 columns and TAIL_D = 64 more, not 256 or 1024 with a third empty.
    With V_IS_K (MLA's latent cache) the value is the first BLOCK_D columns of the key: the tile is loaded once.
    """
    dim = tl.arange(0, BLOCK_D)
    live = (key < end)[:, None]
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
    if TAIL_D > 0:
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

    # The maximum is kept scaled, so that one multiply-add prepares each exponent.
    if MASKED:
        visible = (key < end)[None, :]
        if CAUSAL:
            visible = visible & (key[None, :] <= last_visible[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max  # -inf - -inf would be NaN
    rescale = tl.exp2(row_max - finite_max)
    probs = tl.exp2(scores * scale_log2 - finite_max[:, None])
    row_sum = row_sum * rescale + tl.sum(probs, axis=1)
    acc = acc * rescale[:, None]

    if V_IS_K:
        v = k
    else:
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
def dflash1_find(cu_ptr, slot, num_seqs, BLOCK: tl.constexpr):
    """The sequence that owns tile slot ``slot``, when sequence s owns slots cu[s] // BLOCK + s and on.

    Every sequence gets at least as many slots as it has tiles, all of them together cu[-1] // BLOCK + num_seqs: a grid
    for ragged lengths that the host can size without knowing them.
    """
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(cu_ptr + middle) // BLOCK + middle <= slot
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def dflash1_prefill(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, table_ptr, seq_lens_ptr, out_index_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od, stride_tb, stride_tp,
    num_tiles, num_heads, group_size, num_seqs, seqlen_q, seqlen_k, lse_stride, scale_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, SIGN: tl.constexpr, HAS_LSE: tl.constexpr, RAGGED: tl.constexpr, TOP_K: tl.constexpr,
    ALIGNED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M queries of one head; grid (num_tiles * heads * batch,).

    RAGGED: q and out are packed (tokens, heads, D), and K too unless PAGE_SIZE says that it lies in pages; then
    ``seqlen_k`` is what a row of the block table can address, and stride_kb is from page to page.
    TOP_K > 0: the row of token t is stored at out_index[t, 0 .. TOP_K), in expert order, instead of at t.
    """
    pid = tl.program_id(0)
    tile = num_tiles - 1 - pid % num_tiles  # causal: the last tiles have the most keys, so they start first
    head = pid // num_tiles % num_heads
    head64 = head.to(tl.int64)
    kv_head = (head // group_size).to(tl.int64)
    seq = pid // num_tiles // num_heads
    first_token = 0  # of this sequence among the packed ones
    if RAGGED:
        seq = dflash1_find(cu_q_ptr, tile, num_seqs, BLOCK_M)
        first_token = tl.load(cu_q_ptr + seq).to(tl.int32)
        seqlen_q = tl.load(cu_q_ptr + seq + 1).to(tl.int32) - first_token
        tile = tile - (first_token // BLOCK_M + seq)
        if tile * BLOCK_M >= seqlen_q:
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
        first_key = tl.load(cu_k_ptr + seq)
        seqlen_k = (tl.load(cu_k_ptr + seq + 1) - first_key).to(tl.int32)
        k_start += first_key.to(tl.int64) * stride_kn
        v_start += first_key.to(tl.int64) * stride_vn
    else:
        k_start += seq64 * stride_kb
        v_start += seq64 * stride_vb
    if ALIGNED:
        k_start, v_start = tl.multiple_of(k_start, ALIGNED), tl.multiple_of(v_start, ALIGNED)
    k_base, v_base = k_ptr + k_start, v_ptr + v_start

    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_range = (query < seqlen_q)[:, None]
    dim = tl.arange(0, BLOCK_D)
    q_base = q_ptr + head64 * stride_qh
    if not RAGGED:
        q_base += seq64 * stride_qb
    q_rows = (first_token + query).to(tl.int64)[:, None] * stride_qm
    q_ptrs = q_base + q_rows + dim.to(tl.int64)[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=in_range & (dim < HEAD_DIM)[None, :], other=0.0)
    q_tail = q
    if TAIL_D > 0:
        tail = BLOCK_D + tl.arange(0, TAIL_D)
        tail_ptrs = q_base + q_rows + tail.to(tl.int64)[None, :] * stride_qd
        q_tail = tl.load(tail_ptrs, mask=in_range & (tail < HEAD_DIM)[None, :], other=0.0)
    if SIGN < 0:  # exact; lets scale_log2 stay positive
        q = -q
        q_tail = -q_tail
    elif SIGN == 0:
        q = tl.zeros_like(q)
        q_tail = tl.zeros_like(q_tail)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    last_visible = query + (seqlen_k - seqlen_q)
    end = seqlen_k  # keys that some row of this tile sees
    whole = seqlen_k  # keys that every row of this tile sees
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(seqlen_k, (tile + 1) * BLOCK_M + seqlen_k - seqlen_q))
        whole = tl.maximum(0, tl.minimum(seqlen_k, tile * BLOCK_M + seqlen_k - seqlen_q + 1))
    # Without the maximum, which changes no value, ptxas takes another shape of loop and runs the wgmmas one by one.
    whole = tl.maximum(0, whole // BLOCK_N * BLOCK_N)
    for start in range(0, whole, BLOCK_N):
        k_first, v_first, k_rows, v_rows = dflash1_key_rows(
            table, start, seqlen_k, stride_kb, stride_kn, stride_vb, stride_vn, stride_tp,
            BLOCK_N, PAGE_SIZE, ALIGNED, WIDE,
        )  # fmt: skip
        acc, row_max, row_sum = dflash1_tile(
            q, q_tail, acc, row_max, row_sum, k_base + k_first, v_base + v_first, k_rows, v_rows, stride_kd, stride_vd,
            start + tl.arange(0, BLOCK_N), seqlen_k, last_visible, scale_log2,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, TAIL_D, BLOCK_DV, False, False, CAUSAL, WIDE, PRECISION,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):  # the diagonal, and the tile that the end of K cuts
        k_first, v_first, k_rows, v_rows = dflash1_key_rows(
            table, start, seqlen_k, stride_kb, stride_kn, stride_vb, stride_vn, stride_tp,
            BLOCK_N, PAGE_SIZE, ALIGNED, WIDE,
        )  # fmt: skip
        acc, row_max, row_sum = dflash1_tile(
            q, q_tail, acc, row_max, row_sum, k_base + k_first, v_base + v_first, k_rows, v_rows, stride_kd, stride_vd,
            start + tl.arange(0, BLOCK_N), seqlen_k, last_visible, scale_log2,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, TAIL_D, BLOCK_DV, False, True, CAUSAL, WIDE, PRECISION,
        )  # fmt: skip

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # no key seen: 0 stays 0, and the log-sum-exp -inf
    acc = acc / row_sum[:, None]
    if PAGE_SIZE > 0:
        acc = tl.where(beyond, float("nan"), acc)  # a length that no page holds: loud, not wrong
    dim_v = tl.arange(0, BLOCK_DV)
    writable = in_range & (dim_v < HEAD_DIM_V)[None, :]
    out_base = out_ptr + head64 * stride_oh
    if not RAGGED:
        out_base += seq64 * stride_ob
    columns = dim_v.to(tl.int64)[None, :] * stride_od
    result = acc.to(out_ptr.dtype.element_ty)
    if TOP_K > 0:
        for choice in range(TOP_K):
            entry = out_index_ptr + (first_token + query).to(tl.int64) * TOP_K + choice
            place = tl.load(entry, mask=query < seqlen_q, other=-1).to(tl.int64)
            tl.store(out_base + place[:, None] * stride_om + columns, result, mask=writable & (place >= 0)[:, None])
    else:
        tl.store(out_base + (first_token + query).to(tl.int64)[:, None] * stride_om + columns, result, mask=writable)
    if HAS_LSE:
        lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453
        if PAGE_SIZE > 0:
            lse = tl.where(beyond, float("nan"), lse)
        lse_row = head64 * lse_stride + first_token + query
        if not RAGGED:
            lse_row += seq64 * num_heads * lse_stride
        tl.store(lse_ptr + lse_row, lse, mask=query < seqlen_q)


@triton.jit
def dflash1_merge(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, first_lse, first_row, rows, q_len, used,
    stride_om, stride_oh, stride_od,
    GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_DV: tl.constexpr, MERGE_SPLITS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """out = sum_s 2^(lse_s - lse) out_s, lse = log2 sum_s 2^lse_s, for the rows of a tile; partials lie split by split.

    Splits are added in their order, not in that of arrival: the same bits on every run. They are read past L1 (.cg),
    which may hold what the workspace was before.
    """
    part_row = tl.arange(0, MERGE_ROWS)
    row = first_row + part_row
    row_ok = row < rows
    top = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
    for s in range(0, used, MERGE_SPLITS):
        split = s + tl.arange(0, MERGE_SPLITS)
        mask = (split < used)[:, None] & row_ok[None, :]
        lse_ptrs = part_lse_ptr + split[:, None] * BLOCK_M + part_row[None, :]
        top = tl.maximum(top, tl.max(tl.load(lse_ptrs, mask=mask, other=float("-inf"), cache_modifier=".cg"), axis=0))
    finite_top = tl.where(top == float("-inf"), 0.0, top)

    token, head = row // GROUP, row % GROUP
    out_rows = token.to(tl.int64) * stride_om + head.to(tl.int64) * stride_oh
    for first_column in range(0, HEAD_DIM_V, MERGE_DV):
        dim_v = first_column + tl.arange(0, MERGE_DV)
        total = tl.zeros([MERGE_ROWS], tl.float32)
        acc = tl.zeros([MERGE_ROWS, MERGE_DV], tl.float32)
        for s in range(0, used, MERGE_SPLITS):
            split = s + tl.arange(0, MERGE_SPLITS)
            mask = (split < used)[:, None] & row_ok[None, :]
            lse_ptrs = part_lse_ptr + split[:, None] * BLOCK_M + part_row[None, :]
            part_lse = tl.load(lse_ptrs, mask=mask, other=float("-inf"), cache_modifier=".cg")
            weight = tl.exp2(part_lse - finite_top[None, :])
            part_rows = (split[:, None] * BLOCK_M + part_row[None, :])[:, :, None] * HEAD_DIM_V
            part_mask = mask[:, :, None] & (dim_v < HEAD_DIM_V)[None, None, :]
            part_ptrs = part_out_ptr + part_rows + dim_v[None, None, :]
            part = tl.load(part_ptrs, mask=part_mask, other=0.0, cache_modifier=".cg")
            acc += tl.sum(part * weight[:, :, None], axis=0)
            total += tl.sum(weight, axis=0)

        total = tl.where(total == 0.0, 1.0, total)
        out_ptrs = out_ptr + out_rows[:, None] + dim_v.to(tl.int64)[None, :] * stride_od
        acc = acc / total[:, None]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & (dim_v < HEAD_DIM_V)[None, :])
        if HAS_LSE and first_column == 0:
            lse = (top + tl.log2(total)) * 0.6931471805599453
            tl.store(lse_ptr + first_lse + head * q_len + token, lse, mask=row_ok)


@triton.jit
def dflash1_decode(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, out_ptr, lse_ptr, part_out_ptr, part_lse_ptr, counter_ptr,
    stride_qb, stride_qm, stride_qh, stride_qd,
    stride_kp, stride_kn, stride_kh, stride_kd,
    stride_vp, stride_vn, stride_vh, stride_vd,
    stride_ob, stride_om, stride_oh, stride_od, stride_tb, stride_tp,
    num_kv_heads, q_len, capacity, num_splits, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    TAIL_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, V_IS_K: tl.constexpr, SPLIT: tl.constexpr, MERGE_ROWS: tl.constexpr,
    MERGE_DV: tl.constexpr, MERGE_SPLITS: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr, SIGN: tl.constexpr,
    HAS_LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The new tokens of all heads of one KV group over one split of their sequence; the last split to finish merges.

    Rows of a tile are (token, head of the group), so K and V are loaded once per group.
    Grid (KV heads * row tiles * splits * batch,).
    """
    rows = q_len * GROUP
    row_tiles = tl.cdiv(rows, BLOCK_M)
    pid = tl.program_id(0)
    kv_head = pid % num_kv_heads  # neighbours in memory run side by side
    row_tile = pid // num_kv_heads % row_tiles
    split = pid // num_kv_heads // row_tiles % num_splits
    batch = pid // num_kv_heads // row_tiles // num_splits
    batch64, kv_head64 = batch.to(tl.int64), kv_head.to(tl.int64)

    # Read here and not on the host: a captured graph replays this launch at any length.
    length = tl.load(seq_lens_ptr + batch)
    beyond = (length < 0) | (length > capacity)
    length = tl.where(beyond, 0, length)
    tiles_per_split = tl.cdiv(tl.cdiv(length, BLOCK_N), num_splits)
    used = tl.maximum(1, tl.cdiv(length, tl.maximum(1, tiles_per_split * BLOCK_N)))  # splits that have keys
    if split >= used:
        return
    first = split * tiles_per_split * BLOCK_N
    last = tl.minimum(length, first + tiles_per_split * BLOCK_N)

    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // GROUP, row % GROUP
    in_range = (row < rows)[:, None]
    dim = tl.arange(0, BLOCK_D)
    q_base = q_ptr + batch64 * stride_qb + kv_head64 * GROUP * stride_qh
    q_rows = (token.to(tl.int64) * stride_qm + head.to(tl.int64) * stride_qh)[:, None]
    q_ptrs = q_base + q_rows + dim.to(tl.int64)[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=in_range & (dim < HEAD_DIM)[None, :], other=0.0)
    q_tail = q
    if TAIL_D > 0:
        tail = BLOCK_D + tl.arange(0, TAIL_D)
        tail_ptrs = q_base + q_rows + tail.to(tl.int64)[None, :] * stride_qd
        q_tail = tl.load(tail_ptrs, mask=in_range & (tail < HEAD_DIM)[None, :], other=0.0)
    if SIGN < 0:
        q = -q
        q_tail = -q_tail
    elif SIGN == 0:
        q = tl.zeros_like(q)
        q_tail = tl.zeros_like(q_tail)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table = table_ptr + batch64 * stride_tb
    k_start, v_start = kv_head64 * stride_kh, kv_head64 * stride_vh
    if ALIGNED:
        k_start, v_start = tl.multiple_of(k_start, ALIGNED), tl.multiple_of(v_start, ALIGNED)
    k_base, v_base = k_ptr + k_start, v_ptr + v_start
    for start in range(first, last, BLOCK_N):  # memory binds, so every tile may afford a mask
        k_first, v_first, k_rows, v_rows = dflash1_key_rows(
            table, start, last, stride_kp, stride_kn, stride_vp, stride_vn, stride_tp, BLOCK_N, PAGE_SIZE, ALIGNED, WIDE
        )
        acc, row_max, row_sum = dflash1_tile(
            q, q_tail, acc, row_max, row_sum, k_base + k_first, v_base + v_first, k_rows, v_rows, stride_kd, stride_vd,
            start + tl.arange(0, BLOCK_N), last, length - q_len + token, scale_log2,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, TAIL_D, BLOCK_DV, V_IS_K, True, True, WIDE, PRECISION,
        )  # fmt: skip

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # no key seen: 0 stays 0, and the log-sum-exp -inf
    acc = acc / row_sum[:, None]
    row_lse = row_max + tl.log2(row_sum)
    dim_v = tl.arange(0, BLOCK_DV)
    writable = in_range & (dim_v < HEAD_DIM_V)[None, :]
    group = (batch64 * num_kv_heads + kv_head) * row_tiles + row_tile  # the programs that share this output tile
    if used == 1:
        out_rows = batch64 * stride_ob + token.to(tl.int64) * stride_om + (kv_head64 * GROUP + head) * stride_oh
        out_ptrs = out_ptr + out_rows[:, None] + dim_v.to(tl.int64)[None, :] * stride_od
        acc = tl.where(beyond, float("nan"), acc)  # a length that no page holds: loud, not wrong
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=writable)
        if HAS_LSE:
            lse_row = ((batch64 * num_kv_heads + kv_head) * GROUP + head) * q_len + token
            tl.store(lse_ptr + lse_row, tl.where(beyond, float("nan"), row_lse * 0.6931471805599453), mask=row < rows)
    elif SPLIT:
        part_row = (group * num_splits + split) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(part_lse_ptr + part_row, row_lse, mask=row < rows)
        tl.store(part_out_ptr + part_row[:, None] * HEAD_DIM_V + dim_v[None, :], acc, mask=writable)
        tl.debug_barrier()  # every warp has stored before one thread announces it
        arrived = tl.atomic_add(counter_ptr + group, 1, sem="acq_rel", scope="gpu")
        if arrived == used - 1:
            tl.store(counter_ptr + group, 0)  # ready for the next launch
            dflash1_merge(
                part_out_ptr + group * num_splits * BLOCK_M * HEAD_DIM_V, part_lse_ptr + group * num_splits * BLOCK_M,
                out_ptr + batch64 * stride_ob + kv_head64 * GROUP * stride_oh, lse_ptr,
                (batch64 * num_kv_heads + kv_head) * GROUP * q_len, row_tile * BLOCK_M, rows, q_len, used,
                stride_om, stride_oh, stride_od,
                GROUP, HEAD_DIM_V, BLOCK_M, MERGE_ROWS, MERGE_DV, MERGE_SPLITS, HAS_LSE,
            )  # fmt: skip
