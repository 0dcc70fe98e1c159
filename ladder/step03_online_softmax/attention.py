"""Tiled attention in one pass: a running maximum, a running sum, and a rescale when the maximum grows."""

import torch

from ladder.contract import check_attention

TILE_Q = 4096  # large: every tile costs PyTorch a dozen launches or more
TILE_K = 256


def attention(q, k, v, *, causal=False, scale=None, return_lse=False, tile_q=TILE_Q, tile_k=TILE_K):
    """softmax(scale * q k^T) v in one pass over the keys.

    Args:
        q: (B, H, Sq, D). k: (B, H, Sk, D). v: (B, H, Sk, D). Same float dtype and device, any strides.
        causal: query i sees keys j <= i + Sk - Sq (aligned to the bottom right).
        scale: factor on the scores; None is 1/sqrt(D).
        tile_q, tile_k: rows and columns of a tile of scores.
        return_lse: also return the natural log-sum-exp of each row's scaled scores.

    Returns:
        (B, H, Sq, D) in the dtype of q; with return_lse also (B, H, Sq) float32.
        Rows that see no key are 0 with log-sum-exp -inf.

    Raises:
        TypeError, ValueError: see ``ladder.contract``. NotImplementedError: grouped heads, unequal head sizes.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax"; Dao et al., "FlashAttention",
    algorithm 1; the late division is FlashAttention-2's, section 3.1.
    """
    scale = check_attention("step03_online_softmax", q, k, v, causal=causal, scale=scale)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)

    for q0 in range(0, seqlen_q, tile_q):
        q_tile = q[:, :, q0 : q0 + tile_q].float() * scale
        rows = q_tile.shape[:3]

        row_max = q.new_full(rows, float("-inf"), dtype=torch.float32)
        row_sum = q.new_zeros(rows, dtype=torch.float32)
        acc = q.new_zeros(q_tile.shape, dtype=torch.float32)
        for k0 in range(0, seqlen_k, tile_k):
            scores = tile_scores(q_tile, k[:, :, k0 : k0 + tile_k], q0, k0, causal, seqlen_k - seqlen_q)
            new_max = torch.maximum(row_max, scores.amax(dim=-1))
            finite_max = new_max.masked_fill(new_max == float("-inf"), 0.0)  # -inf - -inf would be NaN
            rescale = torch.exp(row_max - finite_max)  # what the old maximum overstated; 0 on the first tile
            probs = torch.exp(scores - finite_max[..., None])
            row_sum = row_sum * rescale + probs.sum(dim=-1)
            acc *= rescale[..., None]
            acc += probs @ v[:, :, k0 : k0 + tile_k].float()
            row_max = new_max

        out[:, :, q0 : q0 + tile_q] = acc / row_sum.masked_fill(row_sum == 0, 1.0)[..., None]
        lse[:, :, q0 : q0 + tile_q] = row_max + torch.log(row_sum)  # no key seen: -inf + log 0 = -inf
    return (out, lse) if return_lse else out


def tile_scores(q_tile, k_tile, q0, k0, causal, offset):
    """Masked float32 scores (B, H, tile_q, tile_k) of scaled queries from row q0 on, keys from k0 on."""
    scores = q_tile @ k_tile.float().transpose(-2, -1)
    if causal:
        query = torch.arange(q0, q0 + q_tile.shape[2], device=k_tile.device)
        key = torch.arange(k0, k0 + k_tile.shape[2], device=k_tile.device)
        scores.masked_fill_(key > query[:, None] + offset, float("-inf"))
    return scores


def bytes_moved(problem):
    """Bytes that the kernels of one call load and store, for a problem with B, Hq, Sq, Sk, D, itemsize, causal."""
    p = problem
    q_elems = p.B * p.Hq * p.Sq * p.D
    kv_elems = p.B * p.Hq * p.Sk * p.D
    score_elems = p.B * p.Hq * p.Sq * p.Sk
    q_tiles, k_tiles = -(-p.Sq // TILE_Q), -(-p.Sk // TILE_K)

    make = 4 + (8 if p.causal else 0)  # product writes; mask reads and writes
    use = 4 + 8 + 8 + 4 + 4  # maximum, subtract, exp, sum, product reads
    kv_tiles = 2 * q_tiles * kv_elems * (p.itemsize + 8)  # K and V: cast to float32, then read by the product
    q_tile = q_elems * (p.itemsize + 4 + 8 + k_tiles * 4)  # cast, scale, then read by every product
    acc = q_elems * (4 + k_tiles * 24 + 12 + p.itemsize)  # zero; rescale, product writes, add updates; divide; store
    return score_elems * (make + use) + kv_tiles + q_tile + acc
