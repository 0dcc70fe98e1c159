"""One right answer to each exercise of chapters 01 to 04. Try first: ``ladder.chapters.ch01_05_rungs.exercises.hint``
gives away less."""

import torch


def safe_softmax(scores):
    """Softmax over the last dimension of (..., n); rows that are all -inf give 0."""
    top = scores.amax(dim=-1, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


def naive_bytes(batch, heads, seqlen_q, seqlen_k, head_dim, itemsize, causal):
    """Bytes that step 01 loads and stores for q (B, H, Sq, D) and k, v (B, H, Sk, D)."""
    queries = batch * heads * seqlen_q * head_dim
    keys = batch * heads * seqlen_k * head_dim
    scores = batch * heads * seqlen_q * seqlen_k
    passes = 6 if causal else 4  # product stores; mask loads, stores; softmax loads, stores; product loads
    return itemsize * (4 * queries + 2 * keys + passes * scores)


def tiled_row_max(q, k, tile_k):
    """Largest score of each query (Sq,), for q (Sq, D) and k (Sk, D), one tile of keys at a time."""
    top = torch.full((q.shape[0],), float("-inf"))
    for k0 in range(0, k.shape[0], tile_k):
        scores = q @ k[k0 : k0 + tile_k].T
        top = torch.maximum(top, scores.amax(dim=-1))
    return top


def two_pass(q, k, v, tile_k):
    """softmax(q k^T) v (Sq, Dv) in two passes over tiles of keys, for q (Sq, D), k (Sk, D), v (Sk, Dv)."""
    q = q.float()
    top = tiled_row_max(q, k.float(), tile_k)
    total = torch.zeros(q.shape[0])
    acc = torch.zeros(q.shape[0], v.shape[1])
    for k0 in range(0, k.shape[0], tile_k):
        weights = torch.exp(q @ k[k0 : k0 + tile_k].float().T - top[:, None])
        total += weights.sum(dim=-1)
        acc += weights @ v[k0 : k0 + tile_k].float()
    return (acc / total[:, None]).to(v.dtype)


def fold(m, l, acc, scores, v):  # noqa: E741
    """Fold scores (R, T) and values v (T, Dv) into the running maximum
    m (R,), sum l (R,) and accumulator acc (R, Dv)."""
    new_m = torch.maximum(m, scores.amax(dim=-1))
    finite = new_m.masked_fill(new_m == float("-inf"), 0.0)
    rescale = torch.exp(m - finite)
    weights = torch.exp(scores - finite[:, None])
    return new_m, l * rescale + weights.sum(dim=-1), acc * rescale[:, None] + weights @ v


def merge(out_a, lse_a, out_b, lse_b):
    """Attention over two sets of keys together, from out (R, Dv) and lse (R,) of each; returns (out, lse)."""
    top = torch.maximum(lse_a, lse_b)
    top = top.masked_fill(top == float("-inf"), 0.0)
    share_a, share_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = share_a + share_b
    out = share_a[:, None] * out_a + share_b[:, None] * out_b
    return out / total.masked_fill(total == 0, 1.0)[:, None], top + torch.log(total)


def hidden(seqlen_q, seqlen_k):
    """(Sq, Sk) bool, True where causal attention hides a key; aligned to the bottom right."""
    query, key = torch.arange(seqlen_q), torch.arange(seqlen_k)
    return key[None, :] > query[:, None] + seqlen_k - seqlen_q


def grouped_scores(q, k):
    """Scores (Hq, Sq, Sk) of q (Hq, Sq, D) and k (Hkv, Sk, D); K is read once a group and never copied."""
    num_heads, seqlen_q, head_dim = q.shape
    num_kv_heads, seqlen_k, _ = k.shape
    rows = q.reshape(num_kv_heads, num_heads // num_kv_heads * seqlen_q, head_dim)
    return (rows @ k.transpose(-2, -1)).view(num_heads, seqlen_q, seqlen_k)


def tile_kind(q0, q1, k0, k1, seqlen_q, seqlen_k):
    """Whether rows q0..q1-1 see all, some or none of keys k0..k1-1: "whole", "cut" or "skipped"."""
    offset = seqlen_k - seqlen_q
    if k1 - 1 <= q0 + offset:
        return "whole"
    return "cut" if k0 <= q1 - 1 + offset else "skipped"
