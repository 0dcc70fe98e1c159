"""Eager attention: three lines of mathematics, and an S x S matrix in memory."""

import torch

from ladder.contract import check_attention


def attention(q, k, v, *, causal=False, scale=None):
    """softmax(scale * q k^T) v.

    Args:
        q: (B, H, Sq, D). k: (B, H, Sk, D). v: (B, H, Sk, D). Same float dtype and device, any strides.
        causal: query i sees keys j <= i + Sk - Sq (aligned to the bottom right).
        scale: factor on the scores; None is 1/sqrt(D).

    Returns:
        (B, H, Sq, D) in the dtype of q. Rows that see no key are 0.

    Raises:
        TypeError, ValueError: see ``ladder.contract``. NotImplementedError: grouped heads, unequal head sizes.

    Source: Vaswani et al., "Attention Is All You Need", section 3.2.1.
    """
    scale = check_attention("step01_naive", q, k, v, causal=causal, scale=scale)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]

    scores = (q * scale) @ k.transpose(-2, -1)  # (B, H, Sq, Sk): the matrix that the next rungs get rid of
    if causal:
        hidden = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device).triu(seqlen_k - seqlen_q + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    if causal and seqlen_q > seqlen_k:
        probs = probs.masked_fill(hidden, 0.0)  # rows that see no key are 0/0 = NaN so far
    return probs @ v


def bytes_moved(problem):
    """Bytes that the kernels of one call load and store, for a problem with B, Hq, Sq, Sk, D, itemsize, causal."""
    p = problem
    q_elems = p.B * p.Hq * p.Sq * p.D
    kv_elems = p.B * p.Hq * p.Sk * p.D
    score_elems = p.B * p.Hq * p.Sq * p.Sk
    passes = 4 + (2 if p.causal else 0)  # product writes; mask reads, writes; softmax reads, writes; product reads
    return p.itemsize * (4 * q_elems + 2 * kv_elems + passes * score_elems)  # q: scaled copy, its re-read, out
