"""Device code of step 06: one split of one head's keys per program, and the merge of the splits."""

import triton
import triton.language as tl


@triton.jit
def paged_decode_split(
    q_ptr, k_ptr, v_ptr, block_table_ptr, seq_lens_ptr, part_out_ptr, part_lse_ptr,
    stride_qb, stride_qm, stride_qh, stride_qd,
    stride_kp, stride_kn, stride_kh, stride_kd,
    stride_vp, stride_vn, stride_vh, stride_vd, stride_tb, stride_tp,
    num_heads, group_size, q_len, capacity, num_splits, scale_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    NEGATE: tl.constexpr,
):  # fmt: skip
    """Attention of one head's new tokens over one split of its sequence; grid (heads * splits * row tiles * batch,)."""
    pid = tl.program_id(0)
    head = pid % num_heads  # heads of a group run side by side: one fetches from memory, the others find L2 warm
    split = pid // num_heads % num_splits
    row_tiles = tl.cdiv(q_len, BLOCK_M)
    row_tile = pid // num_heads // num_splits % row_tiles
    batch = pid // num_heads // num_splits // row_tiles
    batch64, head64 = batch.to(tl.int64), head.to(tl.int64)  # int64: a cache may span more than 2^31 elements
    kv_head = (head // group_size).to(tl.int64)

    # The length is read here and not on the host: a captured graph replays this launch at any length.
    length = tl.load(seq_lens_ptr + batch)
    length = tl.where((length < 0) | (length > capacity), 0, length)
    tiles_per_split = tl.cdiv(tl.cdiv(length, BLOCK_N), num_splits)
    first = split * tiles_per_split * BLOCK_N
    last = tl.minimum(length, first + tiles_per_split * BLOCK_N)
    if first >= last:
        return  # an empty split leaves nothing; the merge knows how many are not

    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    dim_v = tl.arange(0, BLOCK_DV)
    q_ptrs = q_ptr + batch64 * stride_qb + head64 * stride_qh
    q_ptrs += row.to(tl.int64)[:, None] * stride_qm + dim.to(tl.int64)[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=(row < q_len)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    if NEGATE:
        q = -q  # exact; lets scale_log2 stay positive
    last_visible = length - q_len + row  # the new tokens are the last q_len of the sequence

    k_base = k_ptr + kv_head * stride_kh
    v_base = v_ptr + kv_head * stride_vh
    table = block_table_ptr + batch64 * stride_tb
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        live = key < last
        if PAGE_SIZE % BLOCK_N == 0:  # the tile lies in one page: one lookup
            page = tl.load(table + start // PAGE_SIZE * stride_tp).to(tl.int64)
            slot = (start % PAGE_SIZE + tl.arange(0, BLOCK_N)).to(tl.int64)
            k_rows = page * stride_kp + slot * stride_kn
            v_rows = page * stride_vp + slot * stride_vn
        else:  # a lookup per key; entries past the length may be anything and are not read
            page = tl.load(table + (key // PAGE_SIZE).to(tl.int64) * stride_tp, mask=live, other=0).to(tl.int64)
            slot = (key % PAGE_SIZE).to(tl.int64)
            k_rows = page * stride_kp + slot * stride_kn
            v_rows = page * stride_vp + slot * stride_vn

        # Dead slots of a page may hold NaN, and 0 x NaN is NaN: they are never loaded.
        k_ptrs = k_base + k_rows[:, None] + dim.to(tl.int64)[None, :] * stride_kd
        k = tl.load(k_ptrs, mask=live[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        visible = live[None, :] & (key[None, :] <= last_visible[:, None])
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - finite_max)
        probs = tl.exp2(scores - finite_max[:, None])
        row_sum = row_sum * rescale + tl.sum(probs, axis=1)
        acc = acc * rescale[:, None]
        v_ptrs = v_base + v_rows[:, None] + dim_v.to(tl.int64)[None, :] * stride_vd
        v = tl.load(v_ptrs, mask=live[:, None] & (dim_v < HEAD_DIM_V)[None, :], other=0.0)
        acc = tl.dot(probs.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # no key seen: 0 stays 0, and the log-sum-exp -inf
    part_row = ((batch64 * num_heads + head) * q_len + row) * num_splits + split
    tl.store(part_lse_ptr + part_row, row_max + tl.log2(row_sum), mask=row < q_len)
    part_ptrs = part_out_ptr + part_row[:, None] * HEAD_DIM_V + dim_v[None, :]
    tl.store(part_ptrs, acc / row_sum[:, None], mask=(row < q_len)[:, None] & (dim_v < HEAD_DIM_V)[None, :])


@triton.jit
def paged_decode_merge(
    part_out_ptr, part_lse_ptr, seq_lens_ptr, out_ptr, lse_ptr,
    stride_ob, stride_om, stride_oh, stride_od,
    num_heads, q_len, capacity, num_splits,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_LSE: tl.constexpr,
):  # fmt: skip
    """out = sum_s 2^(lse_s - lse) out_s, lse = log2 sum_s 2^lse_s, for one row; grid (q_len * heads * batch,)."""
    pid = tl.program_id(0)  # = (batch * num_heads + head) * q_len + row
    row = pid % q_len
    head = pid // q_len % num_heads
    batch = pid // q_len // num_heads
    length = tl.load(seq_lens_ptr + batch)
    too_long = (length < 0) | (length > capacity)
    length = tl.where(too_long, 0, length)
    tiles_per_split = tl.cdiv(tl.cdiv(length, BLOCK_N), num_splits)
    used = tl.cdiv(length, tl.maximum(1, tiles_per_split * BLOCK_N))  # the rest were empty and wrote nothing

    first_part = pid.to(tl.int64) * num_splits
    top = float("-inf")
    for s in range(0, used, BLOCK_S):
        split = s + tl.arange(0, BLOCK_S)
        part_lse = tl.load(part_lse_ptr + first_part + split, mask=split < used, other=float("-inf"))
        top = tl.maximum(top, tl.max(part_lse, axis=0))
    finite_top = tl.where(top == float("-inf"), 0.0, top)

    dim_v = tl.arange(0, BLOCK_DV)
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for s in range(0, used, BLOCK_S):
        split = s + tl.arange(0, BLOCK_S)
        part_lse = tl.load(part_lse_ptr + first_part + split, mask=split < used, other=float("-inf"))
        weight = tl.exp2(part_lse - finite_top)
        part_ptrs = part_out_ptr + (first_part + split)[:, None] * HEAD_DIM_V + dim_v[None, :]
        part = tl.load(part_ptrs, mask=(split < used)[:, None] & (dim_v < HEAD_DIM_V)[None, :], other=0.0)
        acc += tl.sum(part * weight[:, None], axis=0)
        total += tl.sum(weight, axis=0)

    acc = acc / tl.where(total == 0.0, 1.0, total)
    acc = tl.where(too_long, float("nan"), acc)  # a length that no page holds: loud, not wrong
    out_ptrs = out_ptr + batch.to(tl.int64) * stride_ob + row.to(tl.int64) * stride_om + head.to(tl.int64) * stride_oh
    tl.store(out_ptrs + dim_v.to(tl.int64) * stride_od, acc.to(out_ptr.dtype.element_ty), mask=dim_v < HEAD_DIM_V)
    if HAS_LSE:
        lse = (top + tl.log2(tl.where(total == 0.0, 1.0, total))) * 0.6931471805599453
        tl.store(lse_ptr + pid, tl.where(too_long, float("nan"), lse))
