"""One-pass tiled attention for real models: grouped heads, unequal head sizes, causal skipping, ragged batches."""

import torch

from ladder.contract import check_attention, check_cu_seqlens

TILE_Q = 4096  # large: every tile costs PyTorch a dozen launches or more
TILE_K = 256


def attention(q, k, v, *, causal=False, scale=None, return_lse=False, tile_q=TILE_Q, tile_k=TILE_K):
    """softmax(scale * q k^T) v in one pass, with grouped heads.

    Args:
        q: (B, Hq, Sq, D). k: (B, Hkv, Sk, D). v: (B, Hkv, Sk, Dv). Same float dtype and device, any strides.
            Hq is a multiple of Hkv; query head h reads KV head h // (Hq // Hkv).
        causal: query i sees keys j <= i + Sk - Sq (aligned to the bottom right).
        scale: factor on the scores; None is 1/sqrt(D).
        return_lse: also return the natural log-sum-exp of each row's scaled scores.
        tile_q, tile_k: query positions and keys of a tile of scores; each head of a group brings its own rows.

    Returns:
        (B, Hq, Sq, Dv) in the dtype of q; with return_lse also (B, Hq, Sq) float32.
        Rows that see no key are 0 with log-sum-exp -inf.

    Raises:
        TypeError, ValueError: see ``ladder.contract``.

    Source: Ainslie et al., "GQA"; the packing of a group into one tile is FlashAttention's and FlashInfer's.
    """
    scale = check_attention("step04_gqa", q, k, v, causal=causal, scale=scale)
    (batch, num_heads, seqlen_q, head_dim), (_, num_kv_heads, seqlen_k, _) = q.shape, k.shape
    group = num_heads // num_kv_heads if num_kv_heads else 1
    head_dim_v, offset = v.shape[3], seqlen_k - seqlen_q
    out = q.new_empty(batch, num_heads, seqlen_q, head_dim_v)
    lse = q.new_empty(batch, num_heads, seqlen_q, dtype=torch.float32)

    for q0 in range(0, seqlen_q, tile_q):
        q1 = min(q0 + tile_q, seqlen_q)
        q_tile = q[:, :, q0:q1].float() * scale
        q_tile = q_tile.reshape(batch, num_kv_heads, group * (q1 - q0), head_dim)  # heads become rows
        rows = q_tile.shape[:3]

        row_max = q.new_full(rows, float("-inf"), dtype=torch.float32)
        row_sum = q.new_zeros(rows, dtype=torch.float32)
        acc = q.new_zeros(*rows, head_dim_v, dtype=torch.float32)
        last_key = min(seqlen_k, q1 + offset) if causal else seqlen_k  # beyond it nobody in this tile looks
        for k0 in range(0, last_key, tile_k):
            k_tile, v_tile = k[:, :, k0 : k0 + tile_k], v[:, :, k0 : k0 + tile_k]
            scores = tile_scores(q_tile, k_tile, q0, k0, group, causal, offset)
            new_max = torch.maximum(row_max, scores.amax(dim=-1))
            finite_max = new_max.masked_fill(new_max == float("-inf"), 0.0)  # -inf - -inf would be NaN
            rescale = torch.exp(row_max - finite_max)
            probs = torch.exp(scores - finite_max[..., None])
            row_sum = row_sum * rescale + probs.sum(dim=-1)
            acc *= rescale[..., None]
            acc += probs @ v_tile.float()
            row_max = new_max

        tile_out = acc / row_sum.masked_fill(row_sum == 0, 1.0)[..., None]
        out[:, :, q0:q1] = tile_out.view(batch, num_heads, q1 - q0, head_dim_v)
        lse[:, :, q0:q1] = (row_max + torch.log(row_sum)).view(batch, num_heads, q1 - q0)
    return (out, lse) if return_lse else out


def tile_scores(q_tile, k_tile, q0, k0, group, causal, offset):
    """Masked float32 scores (B, Hkv, group * tile_q, tile_k); rows are head-major: all positions of head 0, then 1."""
    scores = q_tile @ k_tile.float().transpose(-2, -1)
    if causal:
        query = torch.arange(q0, q0 + q_tile.shape[2] // group, device=k_tile.device).repeat(group)
        key = torch.arange(k0, k0 + k_tile.shape[2], device=k_tile.device)
        scores.masked_fill_(key > query[:, None] + offset, float("-inf"))
    return scores


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, causal=False, scale=None, return_lse=False):
    """Attention over a ragged batch: sequences of different lengths packed one after another, no padding.

    Args:
        q: (total_q, Hq, D). k: (total_k, Hkv, D). v: (total_k, Hkv, Dv). Same float dtype and device, any strides.
        cu_seqlens_q, cu_seqlens_k: (num_seqs + 1,) int32 or int64, where each sequence starts; read on the host.
        causal, scale, return_lse: as in ``attention``; causal is aligned to the bottom right of each sequence.

    Returns:
        (total_q, Hq, Dv) in the dtype of q; with return_lse also (Hq, total_q) float32.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted.

    Source: the packed layout of FlashAttention's ``flash_attn_varlen_func``.
    """
    rung = "step04_gqa"
    check_attention(rung, q, k, v, causal=causal, scale=scale, packed=True)
    starts_q = check_cu_seqlens(rung, "cu_seqlens_q", cu_seqlens_q, q.shape[0])
    starts_k = check_cu_seqlens(rung, "cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if len(starts_q) != len(starts_k):
        raise ValueError(
            f"{rung}: cu_seqlens_k has {len(starts_k) - 1} sequences; want {len(starts_q) - 1}, those of cu_seqlens_q"
        )

    def as_batch(packed):
        return packed.transpose(0, 1)[None]  # (tokens, H, D) -> (1, H, tokens, D), a view

    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        seq_out, seq_lse = attention(
            as_batch(q[q0:q1]), as_batch(k[k0:k1]), as_batch(v[k0:k1]), causal=causal, scale=scale, return_lse=True
        )
        out[q0:q1] = seq_out[0].transpose(0, 1)
        lse[:, q0:q1] = seq_lse[0]
    return (out, lse) if return_lse else out


def bytes_moved(problem):
    """Bytes that the kernels of one call load and store; needs B, Hq, Hkv, Sq, Sk, D, Dv, itemsize, causal."""
    p, total = problem, 0
    for q0 in range(0, p.Sq, TILE_Q):
        q1 = min(q0 + TILE_Q, p.Sq)
        keys = max(0, min(p.Sk, q1 + p.Sk - p.Sq)) if p.causal else p.Sk
        rows, k_tiles = p.B * p.Hq * (q1 - q0), -(-keys // TILE_K)
        make = 4 + (8 if p.causal else 0)  # product writes; mask reads and writes
        use = 4 + 8 + 8 + 4 + 4  # maximum, subtract, exp, sum, product reads
        total += rows * keys * (make + use)
        total += p.B * p.Hkv * keys * (p.D + p.Dv) * (p.itemsize + 8)  # K and V: cast, then read by the product
        total += rows * p.D * (p.itemsize + 4 + 8 + k_tiles * 4)  # Q: cast, scale, then read by every product
        total += rows * p.Dv * (4 + k_tiles * 24 + 12 + p.itemsize)  # zero; rescale, product, add; divide; store
    return total
