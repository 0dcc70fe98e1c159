"""Calls of the FlashAttention interface against float64, on any device: shared by the CPU and the GPU tests."""

import math

import torch

from ladder.integrations import flash_attn as fa

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def oracle(q, k, v, *, causal=False, window=(-1, -1), softcap=0.0, scale=None, sinks=None, dtype=torch.float64):
    """One sequence, eager in ``dtype``: q (Sq, Hq, D), k (Sk, Hkv, D), v (Sk, Hkv, Dv) -> (Sq, Hq, Dv), (Hq, Sq)."""
    seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_kv_heads, _ = k.shape
    q, k, v = (x.detach().to(dtype).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * (1 / math.sqrt(head_dim) if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=q.device)[None]
    left, right = window
    if causal:
        right = 0
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if left >= 0:
        hidden |= key < position - left
    if right >= 0:
        hidden |= key > position + right
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(dtype)[:, None, None].expand(-1, seqlen_q, 1)), dim=2)
    lse = scores.logsumexp(2)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)[..., :seqlen_k]  # -inf - -inf: a row that sees nothing
    return (weights @ v).transpose(0, 1), lse


def check_sequence(out, lse, q, k, v, **mask):
    """FlashAttention's own rule: at most twice the error of eager attention in the same dtype, and a rounding or two."""
    wanted, wanted_lse = oracle(q, k, v, **mask)
    rounded, _ = oracle(q, k, v, dtype=out.dtype, **mask)
    assert out.isfinite().all()
    if wanted.numel():
        error, allowed = (float((x.double() - wanted).abs().max()) for x in (out, rounded))
        assert error <= 2 * allowed + TOLERANCE[out.dtype], f"error {error}, eager's {allowed}"
    # scores are products of exact inputs summed in float32, whatever the dtype; tanh is approximate on a GPU
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-3, rtol=1e-4)


def make(*shape, device, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


MASKS = {
    "dense": dict(),
    "causal": dict(causal=True),
    "left": dict(window=(5, -1)),
    "right": dict(window=(-1, 3)),
    "both": dict(window=(4, 2)),
    "causal window": dict(causal=True, window=(6, 9)),
    "wide": dict(window=(1000, 1000)),
    "self": dict(window=(0, 0)),
    "softcap": dict(causal=True, softcap=3.0),
    "scale": dict(causal=True, scale=-0.3),
    "sinks": dict(causal=True, sinks=True),
    "all": dict(window=(7, 1), softcap=5.0, sinks=True, scale=0.5),
}


def options(mask, num_heads, device):
    """(arguments of the oracle, arguments of the interface) of a mask by name."""
    wanted = dict(MASKS[mask])
    if wanted.get("sinks"):
        wanted["sinks"] = torch.linspace(-1.0, 2.0, num_heads, device=device)
    names = {"window": "window_size", "scale": "softmax_scale", "sinks": "learnable_sink"}
    return wanted, {names.get(name, name): value for name, value in wanted.items()}


def check_dense(mask, shape, device, dtype):
    """``shape``: (B, Hq, Hkv, Sq, Sk, D, Dv)."""
    batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v = shape
    wanted, asked = options(mask, num_heads, device)
    q = make(batch, seqlen_q, num_heads, head_dim, device=device, dtype=dtype)
    k = make(batch, seqlen_k, num_kv_heads, head_dim, device=device, dtype=dtype, seed=1)
    v = make(batch, seqlen_k, num_kv_heads, head_dim_v, device=device, dtype=dtype, seed=2)
    out, lse = fa.flash_attn_func(q, k, v, return_attn_probs=True, **asked)
    assert out.shape == (batch, seqlen_q, num_heads, head_dim_v) and out.is_contiguous() and out.dtype == dtype
    for b in range(batch):
        check_sequence(out[b], lse[b], q[b], k[b], v[b], **wanted)


def check_varlen(mask, lengths_q, lengths_k, device, dtype, *, used=False, heads=(4, 2), dims=(16, 16)):
    """Sequences in slots of these lengths; ``used``: only a part of each slot counts, the rest is NaN."""
    num_heads, num_kv_heads = heads
    wanted, asked = options(mask, num_heads, device)
    starts_q, starts_k = ([0, *torch.tensor(x).cumsum(0).tolist()] for x in (lengths_q, lengths_k))
    q = make(starts_q[-1], num_heads, dims[0], device=device, dtype=dtype)
    k = make(starts_k[-1], num_kv_heads, dims[0], device=device, dtype=dtype, seed=1)
    v = make(starts_k[-1], num_kv_heads, dims[1], device=device, dtype=dtype, seed=2)
    if used:
        lengths_q = [n - n // 3 for n in lengths_q]
        lengths_k = [n - n // 2 for n in lengths_k]
        for x, starts, lengths in ((q, starts_q, lengths_q), (k, starts_k, lengths_k), (v, starts_k, lengths_k)):
            for start, length, end in zip(starts, lengths, starts[1:], strict=False):
                x[start + length : end] = float("nan")
        asked["seqused_q"], asked["seqused_k"] = (
            torch.tensor(x, dtype=torch.int32, device=device) for x in (lengths_q, lengths_k)
        )
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts_q, starts_k))
    out, lse = fa.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max(lengths_q, default=0), max(lengths_k, default=0), return_attn_probs=True, **asked
    )
    assert out.shape == (*q.shape[:2], dims[1])
    live = torch.zeros(len(q), dtype=torch.bool, device=device)
    for start_q, start_k, n_q, n_k in zip(starts_q, starts_k, lengths_q, lengths_k, strict=False):
        rows, keys = slice(start_q, start_q + n_q), slice(start_k, start_k + n_k)
        live[rows] = True
        check_sequence(out[rows], lse[:, rows], q[rows], k[keys], v[keys], **wanted)
    assert not out[~live].any() and (lse[:, ~live] == -math.inf).all()


def rotate(x, cos, sin, positions, interleaved):
    """Rotary embedding as complex numbers in float64: x (S, H, D), positions (S,)."""
    half = cos.shape[1]
    part = x[..., : 2 * half].double()
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    turned = torch.complex(a, b) * torch.complex(cos.double(), sin.double())[positions][:, None]
    pair = (turned.real, turned.imag)
    part = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((part, x[..., 2 * half :].double()), dim=-1)


def check_kvcache(
    mask, device, dtype, *, seqlen_q=3, seqlen_new=None, capacity=24, page_size=None, batch_idx=False, leftpad=False,
    ragged=False, rotary=None, num_splits=0, metadata=False, heads=(6, 2), dims=(32, 32), lengths=(0, 5, 11),
):  # fmt: skip
    """One call over a cache whose unused slots are NaN.

    ``seqlen_new``: tokens to append. ``rotary``: None or (columns, interleaved). ``ragged``: q and new tokens packed, with
    lengths that differ. ``lengths``: tokens in the cache before the call.
    """
    num_heads, num_kv_heads = heads
    wanted, asked = options(mask, num_heads, device)
    batch, rows = len(lengths), len(lengths) * (2 if batch_idx else 1)
    counts_q = [max(1, seqlen_q - b) for b in range(batch)] if ragged else [seqlen_q] * batch
    counts_new = [0] * batch if seqlen_new is None else [max(1, seqlen_new - b) for b in range(batch)] if ragged else [seqlen_new] * batch
    pads = [n // 2 for n in lengths] if leftpad else [0] * batch
    chosen = [(2 * b + 1) % rows for b in range(batch)] if batch_idx else list(range(batch))
    ints = dict(dtype=torch.int32, device=device)

    contents = [
        (make(capacity, num_kv_heads, dims[0], device=device, dtype=dtype, seed=10 + b),
         make(capacity, num_kv_heads, dims[1], device=device, dtype=dtype, seed=20 + b)) for b in range(batch)
    ]  # fmt: skip
    pages = 1 if page_size is None else -(-capacity // page_size)
    size = capacity if page_size is None else page_size
    if page_size is None:
        table = torch.arange(rows)[:, None]
    else:
        table = torch.randperm(3 * rows * pages, generator=torch.Generator().manual_seed(0))[: rows * pages].view(rows, pages)
    k_cache, v_cache = (
        torch.full((3 * rows * pages if page_size else rows, size, num_kv_heads, dim), float("nan"), device=device, dtype=dtype)
        for dim in dims
    )
    for b, (keys, values) in enumerate(contents):
        for token in range(pads[b], lengths[b]):
            page, slot = int(table[chosen[b], token // size]), token % size
            k_cache[page, slot], v_cache[page, slot] = keys[token], values[token]

    qs = [make(n, num_heads, dims[0], device=device, dtype=dtype, seed=30 + b) for b, n in enumerate(counts_q)]
    news = [(make(n, num_kv_heads, dims[0], device=device, dtype=dtype, seed=40 + b),
             make(n, num_kv_heads, dims[1], device=device, dtype=dtype, seed=50 + b)) for b, n in enumerate(counts_new)]  # fmt: skip
    join = torch.cat if ragged else torch.stack
    asked |= dict(cache_seqlens=torch.tensor(lengths, **ints), num_splits=num_splits, return_softmax_lse=True)
    if page_size is not None:
        asked["page_table"] = table.to(**ints)
    if batch_idx:
        asked["cache_batch_idx"] = torch.tensor(chosen, **ints)
    if leftpad:
        asked["cache_leftpad"] = torch.tensor(pads, **ints)
    if ragged:
        asked["cu_seqlens_q"] = torch.tensor([0, *torch.tensor(counts_q).cumsum(0).tolist()], **ints)
        asked["max_seqlen_q"] = max(counts_q)
    if seqlen_new is not None:
        asked["k"], asked["v"] = (join([new[i] for new in news]) for i in (0, 1))
        if ragged:
            asked["cu_seqlens_k_new"] = torch.tensor([0, *torch.tensor(counts_new).cumsum(0).tolist()], **ints)
    if rotary is not None:
        angles = make(2 * capacity, rotary[0] // 2, device=device, dtype=torch.float32, seed=60)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        asked |= dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=rotary[1])
    if metadata:
        asked["scheduler_metadata"] = fa.get_scheduler_metadata(
            batch, max(counts_q), pages * size, *heads, dims[0], asked["cache_seqlens"], dtype, headdim_v=dims[1],
            cu_seqlens_q=asked.get("cu_seqlens_q"), cu_seqlens_k_new=asked.get("cu_seqlens_k_new"),
            cache_leftpad=asked.get("cache_leftpad"), page_size=page_size, max_seqlen_k_new=seqlen_new or 0,
            causal=asked.get("causal", False), window_size=asked.get("window_size", (-1, -1)), num_splits=num_splits,
        )  # fmt: skip

    out, lse = fa.flash_attn_with_kvcache(join(qs), k_cache, v_cache, **asked)
    outs = out.split(counts_q) if ragged else out
    lses = lse.split(counts_q, dim=1) if ragged else lse
    local = wanted.get("causal") or any(side >= 0 for side in wanted.get("window", ()))
    for b, (keys, values) in enumerate(contents):
        q, (new_k, new_v) = qs[b].double(), news[b]
        if rotary is not None:
            first = torch.full((counts_q[b],), lengths[b], device=device)
            q = rotate(qs[b], cos, sin, first + torch.arange(counts_q[b], device=device) * bool(local), rotary[1])
            q = q.to(dtype)  # the kernels read what was rounded
            new_k = rotate(new_k, cos, sin, lengths[b] + torch.arange(counts_new[b], device=device), rotary[1]).to(dtype)
        keys = torch.cat((keys[pads[b] : lengths[b]], new_k))
        values = torch.cat((values[pads[b] : lengths[b]], new_v))
        check_sequence(outs[b], lses[b], q, keys, values, **wanted)
        for token in range(counts_new[b]):  # what was appended
            where = lengths[b] + token
            page, slot = int(table[chosen[b], where // size]), where % size
            assert torch.equal(v_cache[page, slot], new_v[token])
            torch.testing.assert_close(k_cache[page, slot], new_k[token], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    filled = sum(n - p + new for n, p, new in zip(lengths, pads, counts_new, strict=True))
    assert int((~v_cache.isnan()).all(-1).all(-1).sum()) == filled  # nothing else was written
