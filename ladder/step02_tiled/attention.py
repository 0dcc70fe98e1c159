"""Tiled attention in two passes: find each row's maximum, then exponentials, sum and product."""

import torch

from ladder.contract import check_attention

TILE_Q = 4096  # large: every tile costs PyTorch a dozen launches or more
TILE_K = 256


def attention(q, k, v, *, causal=False, scale=None, tile_q=TILE_Q, tile_k=TILE_K):
    """softmax(scale * q k^T) v without an Sq x Sk matrix in memory.

    Args:
        q: (B, H, Sq, D). k: (B, H, Sk, D). v: (B, H, Sk, D). Same float dtype and device, any strides.
        causal: query i sees keys j <= i + Sk - Sq (aligned to the bottom right).
        scale: factor on the scores; None is 1/sqrt(D).
        tile_q, tile_k: rows and columns of a tile of scores.

    Returns:
        (B, H, Sq, D) in the dtype of q. Rows that see no key are 0.

    Raises:
        TypeError, ValueError: see ``ladder.contract``. NotImplementedError: grouped heads, unequal head sizes.

    Source: the tiling of Dao et al., "FlashAttention", section 3.1, before its online softmax.
    """
    scale = check_attention("step02_tiled", q, k, v, causal=causal, scale=scale)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)

    for q0 in range(0, seqlen_q, tile_q):
        q_tile = q[:, :, q0 : q0 + tile_q].float() * scale
        rows = q_tile.shape[:3]

        row_max = q.new_full(rows, float("-inf"), dtype=torch.float32)
        for k0 in range(0, seqlen_k, tile_k):  # pass one: the maximum of each row
            scores = tile_scores(q_tile, k[:, :, k0 : k0 + tile_k], q0, k0, causal, seqlen_k - seqlen_q)
            row_max = torch.maximum(row_max, scores.amax(dim=-1))
        row_max = row_max.masked_fill(row_max == float("-inf"), 0.0)  # no key seen: any finite maximum will do

        row_sum = q.new_zeros(rows, dtype=torch.float32)
        acc = q.new_zeros(q_tile.shape, dtype=torch.float32)
        for k0 in range(0, seqlen_k, tile_k):  # pass two: exponentials, their sum, their product with V
            scores = tile_scores(q_tile, k[:, :, k0 : k0 + tile_k], q0, k0, causal, seqlen_k - seqlen_q)
            probs = torch.exp(scores - row_max[..., None])
            row_sum += probs.sum(dim=-1)
            acc += probs @ v[:, :, k0 : k0 + tile_k].float()

        row_sum = row_sum.masked_fill(row_sum == 0, 1.0)  # no key seen: acc is 0 and stays 0
        out[:, :, q0 : q0 + tile_q] = acc / row_sum[..., None]
    return out


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
    first = make + 4  # maximum reads
    second = make + 8 + 8 + 4 + 4  # subtract, exp, sum, product reads
    kv_tiles = 3 * q_tiles * kv_elems * (p.itemsize + 8)  # K twice, V once: cast to float32, then read by the product
    q_tile = q_elems * (p.itemsize + 4 + 8 + 2 * k_tiles * 4)  # cast, scale, then read by every product
    acc = q_elems * (4 + k_tiles * 16 + 12 + p.itemsize)  # zero; product writes, add updates; divide; store
    return score_elems * (first + second) + kv_tiles + q_tile + acc
