"""Device code of step 05: one program computes BLOCK_M query rows of one head, start to finish."""

import triton
import triton.language as tl


@triton.jit
def fused_attention_tile(
    q, acc, row_max, row_sum, k_base, v_base, stride_kn, stride_kd, stride_vn, stride_vd,
    query, start, seqlen_k, causal_offset, scale_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold keys start .. start + BLOCK_N into (acc, row_max, row_sum): the body of step 04's loop."""
    key = start + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    dim_v = tl.arange(0, BLOCK_DV)
    k_ptrs = k_base + key.to(tl.int64)[None, :] * stride_kn + dim.to(tl.int64)[:, None] * stride_kd
    v_ptrs = v_base + key.to(tl.int64)[:, None] * stride_vn + dim_v.to(tl.int64)[None, :] * stride_vd

    # Never read past the tensor: what lies there may be NaN, and 0 x NaN is NaN.
    if MASKED:
        k = tl.load(k_ptrs, mask=(key < seqlen_k)[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
    elif BLOCK_D != HEAD_DIM:
        k = tl.load(k_ptrs, mask=(dim < HEAD_DIM)[:, None], other=0.0)
    else:
        k = tl.load(k_ptrs)
    scores = tl.dot(q, k, input_precision=PRECISION)
    if MASKED:
        visible = (key < seqlen_k)[None, :]
        if IS_CAUSAL:
            visible = visible & (key[None, :] <= query[:, None] + causal_offset)
        scores = tl.where(visible, scores, float("-inf"))

    # Scaling happens inside the exponent, as one fused multiply-add; scale_log2 > 0, so the maximum may come first.
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
    rescale = tl.exp2(row_max - finite_max)
    probs = tl.exp2(scores * scale_log2 - finite_max[:, None])
    row_sum = row_sum * rescale + tl.sum(probs, axis=1)
    acc = acc * rescale[:, None]

    if MASKED:
        v = tl.load(v_ptrs, mask=(key < seqlen_k)[:, None] & (dim_v < HEAD_DIM_V)[None, :], other=0.0)
    elif BLOCK_DV != HEAD_DIM_V:
        v = tl.load(v_ptrs, mask=(dim_v < HEAD_DIM_V)[None, :], other=0.0)
    else:
        v = tl.load(v_ptrs)
    acc = tl.dot(probs.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit
def fused_attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    num_heads, group_size, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    IS_CAUSAL: tl.constexpr, SCALE_SIGN: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """softmax(scale * q k^T) v for one tile of BLOCK_M query rows; grid (query tiles * heads * batch,)."""
    num_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    tile = num_tiles - 1 - pid % num_tiles  # causal: the last tiles have the most keys, so they start first
    head = pid // num_tiles % num_heads
    batch = (pid // num_tiles // num_heads).to(tl.int64)  # int64: a tensor may span more than 2^31 elements
    kv_head = (head // group_size).to(tl.int64)
    head64 = head.to(tl.int64)

    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    q_ptrs = q_ptr + batch * stride_qb + head64 * stride_qh
    q_ptrs += query.to(tl.int64)[:, None] * stride_qm + dim.to(tl.int64)[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=(query < seqlen_q)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    if SCALE_SIGN < 0:
        q = -q  # exact, and scale_log2 stays positive
    if SCALE_SIGN == 0:
        q = tl.zeros_like(q)  # every score is 0; scale_log2 is 1, since 0 * -inf would be NaN

    k_base = k_ptr + batch * stride_kb + kv_head * stride_kh
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vh
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    causal_offset = seqlen_k - seqlen_q
    last_key = seqlen_k  # keys that some row of this tile sees
    whole = seqlen_k  # keys that every row of this tile sees
    if IS_CAUSAL:
        last_key = tl.maximum(0, tl.minimum(seqlen_k, (tile + 1) * BLOCK_M + causal_offset))
        whole = tl.maximum(0, tl.minimum(seqlen_k, tile * BLOCK_M + causal_offset + 1))
    whole = whole // BLOCK_N * BLOCK_N

    for start in range(0, whole, BLOCK_N):
        acc, row_max, row_sum = fused_attention_tile(
            q, acc, row_max, row_sum, k_base, v_base, stride_kn, stride_kd, stride_vn, stride_vd,
            query, start, seqlen_k, causal_offset, scale_log2,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, IS_CAUSAL, PRECISION, MASKED=False,
        )  # fmt: skip
    for start in range(whole, last_key, BLOCK_N):  # the diagonal, and the tile that the end of K cuts
        acc, row_max, row_sum = fused_attention_tile(
            q, acc, row_max, row_sum, k_base, v_base, stride_kn, stride_kd, stride_vn, stride_vd,
            query, start, seqlen_k, causal_offset, scale_log2,
            HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_N, IS_CAUSAL, PRECISION, MASKED=True,
        )  # fmt: skip

    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]  # no key seen: 0 stays 0
    dim_v = tl.arange(0, BLOCK_DV)
    out_ptrs = out_ptr + batch * stride_ob + head64 * stride_oh
    out_ptrs += query.to(tl.int64)[:, None] * stride_om + dim_v.to(tl.int64)[None, :] * stride_od
    inside = (query < seqlen_q)[:, None] & (dim_v < HEAD_DIM_V)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)
    if HAS_LSE:
        # From base 2 to e. A row that sees no key gets -inf.
        lse = (row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum))) * 0.6931471805599453
        tl.store(lse_ptr + (batch * num_heads + head) * seqlen_q + query, lse, mask=query < seqlen_q)
