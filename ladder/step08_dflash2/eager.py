"""Step 08 in plain PyTorch: the same semantics as the kernels, vectorised, for tensors on a CPU without Triton.

Every function takes the arguments of the public entry of its name, already checked, and computes in float32. ``right``
is how many keys after its own position a query sees: None is 0 under a causal mask and all without one.
"""

import torch

MAX_SCORES = 1 << 24  # float32 scores held at a time


def attention(
    q, k, v, *, causal=False, scale, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None
):
    """As ``dflash2_attention``: (B, Hq, Sq, Dv), and with return_lse (B, Hq, Sq) float32."""
    out = q.new_empty(*q.shape[:3], v.shape[3]) if out is None else out
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    _attend(q, k, v, out, lse, None, _right(causal, right), scale, windows, softcap, sinks)
    return (out, lse) if return_lse else out


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, *,
    causal=False, scale, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None,
):  # fmt: skip
    """As ``dflash2_varlen``: (total_q, Hq, Dv), and with return_lse (Hq, total_q) float32."""
    out, lse = _packed_results(q, v.shape[2], out, return_lse)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:]):
        one = (x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1], out[q0:q1]))
        some_lse = None if lse is None else lse[None, :, q0:q1]
        _attend(*one, some_lse, None, _right(causal, right), scale, windows, softcap, sinks)
    return (out, lse) if return_lse else out


def paged_prefill(
    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q=None, *,
    causal=True, scale, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None,
):  # fmt: skip
    """As ``dflash2_paged_prefill``: (total_q, Hq, Dv), and with return_lse (Hq, total_q) float32."""
    out, lse = _packed_results(q, v_cache.shape[3], out, return_lse)
    starts = cu_seqlens_q.tolist()
    for b, (q0, q1) in enumerate(zip(starts, starts[1:])):
        k, v, length = _gather(k_cache, v_cache, block_table[b : b + 1], seq_lens[b : b + 1])
        some_q, some_out = (x.transpose(0, 1)[None] for x in (q[q0:q1], out[q0:q1]))
        some_lse = None if lse is None else lse[None, :, q0:q1]
        _attend(some_q, k, v, some_out, some_lse, length, _right(causal, right), scale, windows, softcap, sinks)
    return (out, lse) if return_lse else out


def decode(
    q, k_cache, v_cache, block_table, seq_lens, *,
    causal=True, scale, windows=None, softcap=0.0, sinks=None, num_kv_splits=None, return_lse=False, out=None,
    workspace=None,
    right=None,
):  # fmt: skip
    """As ``dflash2_decode``: the shape of q with Dv columns, and with
    return_lse (B, Hq, q_len) float32, (B, Hq) for 3-D q."""
    one_token = q.ndim == 3
    out = q.new_empty(*q.shape[:-1], v_cache.shape[3]) if out is None else out
    some_q, some_out = (x[:, :, None] if one_token else x.transpose(1, 2) for x in (q, out))
    lse = q.new_empty(some_q.shape[:3], dtype=torch.float32) if return_lse else None
    k, v, lengths = _gather(k_cache, v_cache, block_table, seq_lens)
    _attend(some_q, k, v, some_out, lse, lengths, _right(causal, right), scale, windows, softcap, sinks)
    if return_lse:
        return out, lse[..., 0] if one_token else lse
    return out


def mla_decode(
    q, latent_cache, block_table, seq_lens, *,
    scale, head_dim_v=512, causal=True, windows=None, softcap=0.0, sinks=None, num_kv_splits=None, return_lse=False,
    out=None,
    workspace=None, right=None,
):  # fmt: skip
    """As ``dflash2_mla_decode``: every head reads one latent key, whose first ``head_dim_v`` columns are the value."""
    k_cache = latent_cache[:, :, None]
    return decode(
        q, k_cache, k_cache[..., :head_dim_v], block_table, seq_lens, causal=causal, scale=scale, windows=windows,
        softcap=softcap, sinks=sinks, return_lse=return_lse, out=out, right=right,
    )  # fmt: skip


def _right(causal, right):
    return 0 if causal and right is None else right


def _packed_results(q, head_dim_v, out, return_lse):
    out = q.new_empty(*q.shape[:2], head_dim_v) if out is None else out
    return out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32) if return_lse else None


def _gather(k_cache, v_cache, block_table, seq_lens):
    """The pages of every sequence side by side: k (B, Hkv, N, D), v,
    and lengths (B,), -1 where no page holds the length.

    N is the longest length; what lies behind a shorter one is whatever the first page holds, for the caller to hide.
    """
    page_size, capacity = k_cache.shape[1], block_table.shape[1] * k_cache.shape[1]
    lengths = torch.where((seq_lens < 0) | (seq_lens > capacity), -1, seq_lens).long()
    longest = max(0, int(lengths.max())) if lengths.numel() else 0
    pages = -(-longest // page_size)
    reached = torch.arange(pages, device=lengths.device) * page_size < lengths[:, None]
    table = block_table[:, :pages].long()
    followed = reached & (table >= 0) & (table < k_cache.shape[0])  # entries that no visible key needs may be anything
    table = table.masked_fill(~followed, 0)
    k, v = (x[table].flatten(1, 2)[:, :longest].transpose(1, 2) for x in (k_cache, v_cache))
    return k, v, lengths


def _attend(q, k, v, out, lse, lengths, right, scale, windows, softcap, sinks):
    """Attention of q (B, Hq, Sq, D) over k (B, Hkv, N, D), v (B, Hkv,
    N, Dv), into out (B, Hq, Sq, Dv) and lse (B, Hq, Sq).

    lengths: (B,) keys of each sequence, of which -1 asks for NaN; None when all have N. Rows are taken some at a time,
    and keys that none of them sees are neither multiplied nor looked at.
    """
    (batch, num_heads, seqlen_q, _), (_, num_kv_heads, seqlen_k, _) = q.shape, v.shape
    if not out.numel():
        return
    group = num_heads // num_kv_heads
    step = max(1, MAX_SCORES // max(1, batch * num_heads * seqlen_k))
    for first in range(0, seqlen_q, step):
        rows = slice(first, min(first + step, seqlen_q))
        seen = _visible(rows, seqlen_q, seqlen_k, lengths, right, windows, q.device)  # (B or 1, rows, N)
        some = seen.any(dim=1)  # (B or 1, N)
        used = some.any(dim=0)
        some_k, some_v = k, v
        if not bool(used.all()):
            used = used.nonzero()[:, 0]
            some_k, some_v, seen, some = k[:, :, used], v[:, :, used], seen[:, :, used], some[:, used]
        some_v = some_v.float()
        if lengths is not None:  # dead slots hold anything, and 0 x NaN is NaN
            some_v = some_v.masked_fill(~some[:, None, :, None], 0.0)

        packed = q[:, :, rows].float().reshape(batch, num_kv_heads, -1, q.shape[3])  # the heads of a group as rows
        scores = (packed @ some_k.float().transpose(2, 3)).unflatten(2, (group, -1)) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        top = scores.amax(dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], float("-inf"))
        if sinks is not None:
            extra = sinks.float().view(1, num_kv_heads, group, 1)
            top = torch.maximum(top, extra)
        finite_top = top.masked_fill(top == float("-inf"), 0.0)
        probs = torch.exp(scores - finite_top[..., None])
        total = probs.sum(dim=-1)
        if sinks is not None:
            total = total + torch.exp(extra - finite_top)
        row_lse = top + torch.log(total.masked_fill(total == 0, 1.0))
        result = (probs.flatten(2, 3) @ some_v).unflatten(2, (group, -1)) / total.masked_fill(total == 0, 1.0)[
            ..., None
        ]
        if lengths is not None:
            lost = (lengths < 0).view(-1, 1, 1, 1)
            result, row_lse = result.masked_fill(lost[..., None], float("nan")), row_lse.masked_fill(lost, float("nan"))
        out[:, :, rows] = result.flatten(1, 2).to(out.dtype)
        if lse is not None:
            lse[:, :, rows] = row_lse.flatten(1, 2)


def _visible(rows, seqlen_q, seqlen_k, lengths, right, windows, device):
    """Which keys the queries ``rows`` see: bool (B, rows, N), or (1, rows, N) when all sequences have N keys."""
    length = torch.tensor([seqlen_k], device=device) if lengths is None else lengths
    length = length[:, None, None]
    position = torch.arange(rows.start, rows.stop, device=device)[None, :, None] + (length - seqlen_q)
    key = torch.arange(seqlen_k, device=device)
    seen = (key < length).expand(-1, rows.stop - rows.start, -1)
    if right is not None:
        seen = seen & (key <= position + right)
    if windows is not None:
        sink, left = windows.limits(position, length)
        seen = seen & ((key >= position - left) | (key < sink))
    return seen
