"""Device code of step 08's decode: a schedule that knows the lengths, packed groups over pages, the merge inside."""

import triton
import triton.language as tl

from .prefill_kernel import dflash2_tanh

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FIXED, FOUND, GIVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # where a program learns its part of the work


@triton.jit
def dflash2_limits(position, length, windows_ptr, NUM_RANGES: tl.constexpr):
    """(sink, left) of queries at ``position``, of any shape, a scalar's too: they see
    the keys below sink, and those from position - left on."""
    sink, left = position * 0, position * 0 + 1073741824
    for i in tl.static_range(NUM_RANGES):  # backwards, so that the earlier of two counts
        entry = windows_ptr + (NUM_RANGES - 1 - i) * 4
        start, stop = tl.load(entry), tl.load(entry + 1)
        start, stop = tl.where(start < 0, start + length, start), tl.where(stop < 0, stop + length, stop)
        inside = (position >= start) & (position < stop)
        sink, left = tl.where(inside, tl.load(entry + 2), sink), tl.where(inside, tl.load(entry + 3), left)
    return sink, left


@triton.jit
def dflash2_visited(length, q_len, windows_ptr, NUM_RANGES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which tiles of keys the new tokens of sequences of ``length`` keys, any shape, see: those of the sinks, then
    those from the window on.

    Returns (tiles, sink_tiles, gap, sink_end, low): visited tile t is tile t of the sequence, or t + gap from
    sink_tiles on; keys in sink_end .. low are seen by none.
    """
    end = (length + BLOCK_N - 1) // BLOCK_N
    sink_end, low, sink_tiles, gap = length * 0, length * 0, length * 0, length * 0
    if NUM_RANGES > 0:
        low = length
        for token in range(0, q_len):
            position = length - q_len + token
            sink, left = dflash2_limits(position, length, windows_ptr, NUM_RANGES)
            sink_end, low = tl.maximum(sink_end, sink), tl.minimum(low, position - left)
        sink_end, low = tl.minimum(sink_end, length), tl.maximum(low, 0)
        sink_tiles = (sink_end + BLOCK_N - 1) // BLOCK_N
        gap = tl.maximum(0, low // BLOCK_N - sink_tiles)
    return end - gap, sink_tiles, gap, sink_end, low


@triton.jit
def dflash2_chunk(total, longest, batch, target, most, min_tiles):
    """Tiles that a split should have, of ``total`` tiles in ``batch`` sequences.

    ``target`` splits keep the chip busy. Sequences of about one length get no more, and fewer programs start and
    finish; where the longest stands out, ``most`` splits let the others' programs fill in beside it.
    """
    mean = (total + batch - 1) // batch
    splits = tl.where(longest * 4 > mean * 5, most, target)
    return tl.maximum(min_tiles, (total + splits - 1) // splits)


@triton.jit
def dflash2_splits(tiles, chunk):
    """Splits of a sequence of ``tiles`` tiles: to the nearest, so that a length just above a chunk makes no second."""
    return tl.maximum(1, (2 * tiles + chunk) // (2 * chunk))


@triton.jit
def dflash2_find(
    slot, seq_lens_ptr, windows_ptr, batch, q_len, capacity, target, most, min_tiles,
    NUM_RANGES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """(sequence, split, chunk) of a slot, when sequence b owns
    dflash2_splits(tiles of b, chunk) slots after those of b - 1.

    Every program adds up the whole batch: a few hundred nanoseconds, less than a launch of its own would take. A slot
    that no sequence needs gets sequence ``batch``.
    """
    if BLOCK_B == 1:
        length = tl.load(seq_lens_ptr)
        length = tl.where((length < 0) | (length > capacity), 0, length)
        tiles, _, _, _, _ = dflash2_visited(length, q_len, windows_ptr, NUM_RANGES, BLOCK_N)
        chunk = dflash2_chunk(tiles, tiles, 1, target, most, min_tiles)
        seq, before = slot * 0, slot * 0
    else:
        total, longest = 0, 0
        for first in range(0, batch, BLOCK_B):
            b = first + tl.arange(0, BLOCK_B)
            length = tl.load(seq_lens_ptr + b, mask=b < batch, other=0)
            length = tl.where((length < 0) | (length > capacity), 0, length)
            tiles, _, _, _, _ = dflash2_visited(length, q_len, windows_ptr, NUM_RANGES, BLOCK_N)
            total, longest = total + tl.sum(tiles), tl.maximum(longest, tl.max(tiles))
        chunk = dflash2_chunk(total, longest, batch, target, most, min_tiles)
        seq, before, used = 0, 0, 0
        if longest * batch == total:  # as many tiles in every sequence: no need to look at each
            each = dflash2_splits(longest, chunk)
            seq = slot // each
            before = seq * each
        else:
            for first in range(0, batch, BLOCK_B):
                b = first + tl.arange(0, BLOCK_B)
                length = tl.load(seq_lens_ptr + b, mask=b < batch, other=0)
                length = tl.where((length < 0) | (length > capacity), 0, length)
                tiles, _, _, _, _ = dflash2_visited(length, q_len, windows_ptr, NUM_RANGES, BLOCK_N)
                splits = tl.where(b < batch, dflash2_splits(tiles, chunk), 0)
                done = (b < batch) & (used + tl.cumsum(splits) <= slot)  # sequences whose slots all come before
                seq, before = seq + tl.sum(done.to(tl.int32)), before + tl.sum(tl.where(done, splits, 0))
                used += tl.sum(splits)
    return seq, slot - before, chunk


@triton.jit(do_not_specialize=["batch", "capacity", "target", "most", "min_tiles"])
def dflash2_schedule(
    schedule_ptr, seq_lens_ptr, windows_ptr, batch, q_len, capacity, target, most, min_tiles,
    NUM_RANGES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Write down what each slot of ``dflash2_decode`` would find:
    (sequence, split, splits of it, 0), -1 for no work."""
    slot = tl.program_id(0)
    seq, split, chunk = dflash2_find(
        slot, seq_lens_ptr, windows_ptr, batch, q_len, capacity, target, most, min_tiles, NUM_RANGES, BLOCK_N, BLOCK_B
    )
    length = tl.load(seq_lens_ptr + seq, mask=seq < batch, other=0)
    length = tl.where((length < 0) | (length > capacity), 0, length)
    tiles, _, _, _, _ = dflash2_visited(length, q_len, windows_ptr, NUM_RANGES, BLOCK_N)
    entry = schedule_ptr + slot * 4
    tl.store(entry, tl.where(seq < batch, seq, -1))
    tl.store(entry + 1, split)
    tl.store(entry + 2, dflash2_splits(tiles, chunk))
    tl.store(entry + 3, 0)


@triton.jit
def dflash2_decode_tile(
    q, q_tail, acc, row_max, row_sum, k_base, v_base, k_rows, v_rows, stride_kd, stride_vd,
    live, visible, scale_log2, cap_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    V_IS_K: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys into (acc, row_max, row_sum).

    live: (keys,) those that some row sees. No other is loaded: it may be NaN, and 0 x NaN is NaN.
    visible: (rows or 1, keys), which row sees which.
    A head of 192 or 576 is BLOCK_D = 128 or 512 columns and TAIL_D = 64 more. With V_IS_K (MLA's latent cache) the
    value is the first BLOCK_D columns of the key: the tile is loaded once.
    """
    dim = tl.arange(0, BLOCK_D)
    if WIDE:
        dim = dim.to(tl.int64)
    k_ptrs = k_base + (k_rows[:, None] + dim[None, :] * stride_kd)
    if BLOCK_D > HEAD_DIM:
        k = tl.load(k_ptrs, mask=live[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_ptrs, mask=live[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if TAIL_D > 0:
        tail = BLOCK_D + tl.arange(0, TAIL_D)
        if WIDE:
            tail = tail.to(tl.int64)
        t_ptrs = k_base + (k_rows[:, None] + tail[None, :] * stride_kd)
        if BLOCK_D + TAIL_D > HEAD_DIM:
            k_tail = tl.load(t_ptrs, mask=live[:, None] & (tail < HEAD_DIM)[None, :], other=0.0)
        else:
            k_tail = tl.load(t_ptrs, mask=live[:, None], other=0.0)
        scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision=PRECISION)

    if SOFTCAP:  # scale_log2 is then the cap, in powers of 2
        scores = dflash2_tanh(scores * cap_scale, SOFTCAP == 2)
    scores = tl.where(visible, scores, float("-inf"))
    # The maximum is kept scaled, so that one multiply-add prepares each exponent.
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
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
        if BLOCK_DV > HEAD_DIM_V:
            v = tl.load(v_ptrs, mask=live[:, None] & (dim_v < HEAD_DIM_V)[None, :], other=0.0)
        else:
            v = tl.load(v_ptrs, mask=live[:, None], other=0.0)
    acc = tl.dot(probs.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit
def dflash2_merge(
    part_out_ptr, part_lse_ptr, sinks_ptr, out_ptr, lse_ptr, first_head, first_lse, first_row, rows, q_len, splits,
    stride_sink, stride_om, stride_oh, stride_od,
    GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_DV: tl.constexpr,
    MERGE_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """out = sum_s 2^(lse_s - lse) out_s, lse = log2 sum_s 2^lse_s, for the rows of one tile, in one pass.

    Outputs and log-sum-exps of MERGE_SPLITS splits are under way together: one wait, where a pass for the maximum
    before would make it two. Splits are added in their order, not in that of arrival: the same bits on every run. They
    are read past L1 (.cg), which may hold what the workspace was before. A sink is one more split, of no value.
    """
    part_row = tl.arange(0, MERGE_ROWS)
    row = first_row + part_row
    row_ok = row < rows
    token, head = row // GROUP, row % GROUP
    out_rows = token.to(tl.int64) * stride_om + head.to(tl.int64) * stride_oh
    for first_column in range(0, HEAD_DIM_V, MERGE_DV):
        dim_v = first_column + tl.arange(0, MERGE_DV)
        top = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
        if HAS_SINKS:
            top = tl.load(sinks_ptr + (first_head + head) * stride_sink, mask=row_ok, other=0.0).to(tl.float32) * LOG2_E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        acc = tl.zeros([MERGE_ROWS, MERGE_DV], tl.float32)
        for s in range(0, splits, MERGE_SPLITS):
            split = s + tl.arange(0, MERGE_SPLITS)
            mask = (split < splits)[:, None] & row_ok[None, :]
            part = split[:, None] * MERGE_ROWS + part_row[None, :]
            lse = tl.load(part_lse_ptr + part, mask=mask, other=float("-inf"), cache_modifier=".cg")
            ptrs = part_out_ptr + part[:, :, None] * HEAD_DIM_V + dim_v[None, None, :]
            out = tl.load(
                ptrs, mask=mask[:, :, None] & (dim_v < HEAD_DIM_V)[None, None, :], other=0.0, cache_modifier=".cg"
            )
            new_top = tl.maximum(top, tl.max(lse, axis=0))
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            rescale = tl.exp2(top - finite_top)
            weight = tl.exp2(lse - finite_top[None, :])
            acc = acc * rescale[:, None] + tl.sum(out * weight[:, :, None], axis=0)
            total = total * rescale + tl.sum(weight, axis=0)
            top = new_top

        total = tl.where(total == 0.0, 1.0, total)
        acc = acc / total[:, None]
        out_ptrs = out_ptr + out_rows[:, None] + dim_v.to(tl.int64)[None, :] * stride_od
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & (dim_v < HEAD_DIM_V)[None, :])
        if HAS_LSE and first_column == 0:
            tl.store(lse_ptr + first_lse + head * q_len + token, (top + tl.log2(total)) * LN_2, mask=row_ok)


@triton.jit(do_not_specialize=["batch", "capacity", "num_slots", "num_splits", "target", "most", "min_tiles", "right"])
def dflash2_decode(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, windows_ptr, sinks_ptr, schedule_ptr, out_ptr, lse_ptr,
    part_out_ptr, part_lse_ptr, counter_ptr,
    stride_qb, stride_qm, stride_qh, stride_qd,
    stride_kp, stride_kn, stride_kh, stride_kd,
    stride_vp, stride_vn, stride_vh, stride_vd,
    stride_ob, stride_om, stride_oh, stride_od, stride_tb, stride_tp, stride_sink,
    batch, num_kv_heads, q_len, capacity, num_slots, num_splits, target, most, min_tiles, right, scale_log2, cap_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    TAIL_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, V_IS_K: tl.constexpr, SCHEDULE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_B: tl.constexpr,
    NUM_RANGES: tl.constexpr, LIMIT_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_DV: tl.constexpr, MERGE_SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr, WIDE: tl.constexpr, SIGN: tl.constexpr, HAS_LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The new tokens of all heads of one KV group over one split of their sequence; the last split to finish merges.

    Rows of a tile are (token, head of the group), so K and V are loaded once per group.
    Grid (KV heads * row tiles * slots,). A slot is one split of one sequence: slot // num_splits and the rest (FIXED),
    what ``dflash2_find`` says (FOUND), or what the schedule does (GIVEN).
    """
    rows = q_len * GROUP
    row_tiles = tl.cdiv(rows, BLOCK_M)
    pid = tl.program_id(0)
    kv_head = pid % num_kv_heads  # neighbours in memory run side by side
    row_tile = pid // num_kv_heads % row_tiles
    slot = pid // num_kv_heads // row_tiles
    chunk, splits = 1, 1
    if SCHEDULE == GIVEN:
        entry = schedule_ptr + slot * 4
        seq, split, splits = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        if (seq < 0) | (seq >= batch):
            return
    elif SCHEDULE == FOUND:
        seq, split, chunk = dflash2_find(
            slot, seq_lens_ptr, windows_ptr, batch, q_len, capacity, target, most, min_tiles, NUM_RANGES, BLOCK_N,
            BLOCK_B,
        )  # fmt: skip
        if seq >= batch:
            return
    else:
        seq, split = slot // num_splits, slot % num_splits
    seq64, kv_head64 = seq.to(tl.int64), kv_head.to(tl.int64)

    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = row // GROUP, row % GROUP
    in_range = (row < rows)[:, None]
    dim = tl.arange(0, BLOCK_D)
    q_base = q_ptr + seq64 * stride_qb + kv_head64 * GROUP * stride_qh
    q_rows = (token.to(tl.int64) * stride_qm + head.to(tl.int64) * stride_qh)[:, None]
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

    # Read here and not on the host: a captured graph replays this launch at any length.
    length = tl.load(seq_lens_ptr + seq)
    beyond = (length < 0) | (length > capacity)
    length = tl.where(beyond, 0, length)
    tiles, sink_tiles, gap, sink_end, low = dflash2_visited(length, q_len, windows_ptr, NUM_RANGES, BLOCK_N)
    if SCHEDULE == FOUND:
        splits = dflash2_splits(tiles, chunk)
    elif SCHEDULE == FIXED:
        splits = tl.maximum(1, tl.minimum(num_splits, tiles))
    if split >= splits:
        return
    # Equal shares, the first ones a tile larger: programs that start earlier have more to do.
    share, extra = tiles // splits, tiles % splits
    first = split * share + tl.minimum(split, extra)
    last = first + share + tl.where(split < extra, 1, 0)

    position = length - q_len + token
    row_sink, row_left = dflash2_limits(position, length, windows_ptr, NUM_RANGES)
    row_low, row_last = position - row_left, tl.minimum(position + right, length - 1)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table = table_ptr + seq64 * stride_tb
    k_start, v_start = kv_head64 * stride_kh, kv_head64 * stride_vh
    if ALIGNED:  # whole 16-byte words in a row, which a stride like 72 does not show the compiler
        k_start, v_start = tl.multiple_of(k_start, ALIGNED), tl.multiple_of(v_start, ALIGNED)
    k_base, v_base = k_ptr + k_start, v_ptr + v_start
    in_tile = tl.arange(0, BLOCK_N)
    tile_rows = in_tile.to(tl.int64) if WIDE else in_tile
    next_page = 0
    if PAGE_SIZE % BLOCK_N == 0:
        start = (first + tl.where(first >= sink_tiles, gap, 0)) * BLOCK_N
        next_page = tl.load(table + start // PAGE_SIZE * stride_tp, mask=first < last, other=0)
    for tile in range(first, last):  # memory binds, so every tile may afford a mask
        start = (tile + tl.where(tile >= sink_tiles, gap, 0)) * BLOCK_N
        key = start + in_tile
        live = key < length
        if NUM_RANGES > 0:
            live = live & ((key >= low) | (key < sink_end))
        if LIMIT_RIGHT:
            visible = in_tile[None, :] <= (row_last - start)[:, None]
        else:
            visible = live[None, :]
        if NUM_RANGES > 0:
            visible = visible & ((key[None, :] >= row_low[:, None]) | (key[None, :] < row_sink[:, None]))
        if PAGE_SIZE % BLOCK_N == 0:  # the tile lies in one page, looked up a tile ahead: its keys do not wait for it
            page = next_page.to(tl.int64)
            after = (tile + 1 + tl.where(tile + 1 >= sink_tiles, gap, 0)) * BLOCK_N
            next_page = tl.load(table + after // PAGE_SIZE * stride_tp, mask=tile + 1 < last, other=0)
            in_page = tl.cast(start % PAGE_SIZE, tl.int64)
            k_first, v_first = page * stride_kp + in_page * stride_kn, page * stride_vp + in_page * stride_vn
            k_rows, v_rows = tile_rows * stride_kn, tile_rows * stride_vn
        else:  # a lookup per key; entries that no key needs may be anything and are not followed
            pages = tl.load(table + key // PAGE_SIZE * stride_tp, mask=live, other=0).to(tl.int64)
            in_page = (key % PAGE_SIZE).to(tl.int64)
            k_first, v_first = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
            k_rows, v_rows = pages * stride_kp + in_page * stride_kn, pages * stride_vp + in_page * stride_vn
        if ALIGNED:
            k_first, v_first = tl.multiple_of(k_first, ALIGNED), tl.multiple_of(v_first, ALIGNED)
            k_rows, v_rows = tl.multiple_of(k_rows, ALIGNED), tl.multiple_of(v_rows, ALIGNED)
        acc, row_max, row_sum = dflash2_decode_tile(
            q, q_tail, acc, row_max, row_sum, k_base + k_first, v_base + v_first, k_rows, v_rows, stride_kd, stride_vd,
            live, visible, scale_log2, cap_scale,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, TAIL_D, BLOCK_DV, V_IS_K, SOFTCAP, WIDE, PRECISION,
        )  # fmt: skip

    dim_v = tl.arange(0, BLOCK_DV)
    writable = in_range & (dim_v < HEAD_DIM_V)[None, :]
    first_head = kv_head * GROUP
    if HAS_SINKS:
        if splits == 1:  # else the merge counts it
            sink = (
                tl.load(sinks_ptr + (first_head + head) * stride_sink, mask=row < rows, other=0.0).to(tl.float32)
                * LOG2_E
            )
            top = tl.maximum(row_max, sink)
            finite_top = tl.where(top == float("-inf"), 0.0, top)
            rescale = tl.exp2(row_max - finite_top)
            row_sum = row_sum * rescale + tl.exp2(sink - finite_top)
            acc = acc * rescale[:, None]
            row_max = top
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # no key seen: 0 stays 0, and the log-sum-exp -inf
    acc = acc / row_sum[:, None]
    row_lse = tl.where(beyond, float("nan"), row_max + tl.log2(row_sum))  # a length that no page holds: loud, not wrong
    if splits == 1:
        out_rows = seq64 * stride_ob + token.to(tl.int64) * stride_om + (kv_head64 * GROUP + head) * stride_oh
        out_ptrs = out_ptr + out_rows[:, None] + dim_v.to(tl.int64)[None, :] * stride_od
        acc = tl.where(beyond, float("nan"), acc)
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=writable)
        if HAS_LSE:
            lse_row = ((seq64 * num_kv_heads + kv_head) * GROUP + head) * q_len + token
            tl.store(lse_ptr + lse_row, row_lse * LN_2, mask=row < rows)
    elif SPLIT:
        head_tile = (kv_head64 * row_tiles + row_tile) * num_slots  # the parts of one output lie slot by slot
        part_row = (head_tile + slot) * MERGE_ROWS + tl.arange(0, BLOCK_M)
        stored = (row < rows) & (tl.arange(0, BLOCK_M) < MERGE_ROWS)
        tl.store(part_lse_ptr + part_row, row_lse, mask=stored)
        tl.store(part_out_ptr + part_row[:, None] * HEAD_DIM_V + dim_v[None, :], acc, mask=stored[:, None] & writable)
        tl.debug_barrier()  # every warp has stored before one thread announces it
        counter = counter_ptr + (seq64 * num_kv_heads + kv_head) * row_tiles + row_tile
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            tl.store(counter, 0)  # ready for the next launch
            first_part = (head_tile + slot - split) * MERGE_ROWS
            dflash2_merge(
                part_out_ptr + first_part * HEAD_DIM_V, part_lse_ptr + first_part, sinks_ptr,
                out_ptr + seq64 * stride_ob + kv_head64 * GROUP * stride_oh, lse_ptr,
                first_head, (seq64 * num_kv_heads + kv_head) * GROUP * q_len, row_tile * BLOCK_M, rows, q_len, splits,
                stride_sink, stride_om, stride_oh, stride_od,
                GROUP, HEAD_DIM_V, MERGE_ROWS, MERGE_DV, MERGE_SPLITS, HAS_SINKS, HAS_LSE,
            )  # fmt: skip
