"""FlashAttention-3's Python interface on step 08: change the import, keep the calls.

    from ladder.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Signatures, layouts (batch, seqlen, heads, head size), masks and return values are those of FlashAttention-3
(``hopper/flash_attn_interface.py``): causal and windows are aligned to the bottom right, ``window_size=(left, right)``
is inclusive, -1 is infinite, a row that sees no key is 0 with log-sum-exp -inf. Three differences:

- Forward only. A result may be part of a graph, as in FlashAttention; its backward raises ``NotImplementedError``.
  ``flash_attn_with_kvcache`` records no graph, there as here.
- ``qv``, ``attention_chunk``, float8 and its descales raise ``NotImplementedError``
that names the argument. - ``learnable_sink`` (FlashAttention-4's name; ``s_aux`` in
vLLM's fork): one logit per query head, in the denominator only.

Hints that may change speed but no value are accepted: ``pack_gqa`` (groups are
always packed in decode), ``deterministic`` (always), ``sm_margin``, and
``num_splits`` outside decode. CPU tensors work too, through step 08's own rules.
"""

import torch

from ladder.contract import INTEGERS, check_flag, check_integer, graph_entry
from ladder.rungs import MAX_HEAD_DIM
from ladder.step08_dflash2 import (
    RangeWindows,
    dflash2_attention,
    dflash2_decode,
    dflash2_paged_prefill,
    dflash2_varlen,
)
from ladder.step08_dflash2.checks import check_options
from ladder.step08_dflash2.schedule import get_decode_schedule

from .flash_attn_cache import (
    append_rows,
    check_before_append,
    check_room,
    pages_of_sequences,
    places,
    rotate,
    skip_leftpad,
)
from .flash_attn_checks import (
    check_bounded,
    check_new_keys,
    check_pairs,
    check_queries,
    check_rotary,
    check_starts_of,
    check_tensor,
    check_used,
    lengths_of,
    one_sinks,
    readable,
    refuse,
)

__all__ = [
    "flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]  # fmt: skip

MAX_DECODE_TOKENS = 16


@graph_entry
def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False, *, learnable_sink=None, s_aux=None,
):  # fmt: skip
    """Attention of a batch of sequences of one length.

    Args:
        q: (B, Sq, Hq, D). k: (B, Sk, Hkv, D). v: (B, Sk, Hkv, Dv). float16 or bfloat16 (float32 through portable
            kernels).
        softmax_scale: factor on the scores; None is 1/sqrt(D).
        causal: query i sees keys j <= i + Sk - Sq.
        window_size: (left, right): query i sees keys i + Sk - Sq - left .. i + Sk - Sq + right; -1 is infinite.
        softcap: scores become softcap * tanh(scores / softcap); 0 is off.
        return_attn_probs: also return the log-sum-exp (FlashAttention-3 kept the older name).
        learnable_sink, s_aux: (Hq,), one more logit in each row's denominator; either name.

    Returns:
        (B, Sq, Hq, Dv) contiguous; with return_attn_probs also (B, Hq, Sq) float32.

    Raises:
        NotImplementedError: naming the argument. TypeError, ValueError: as ``ladder.step08_dflash2.dflash2_attention``.
    """
    name = "flash_attn_func"
    refuse(name, qv, q_descale, k_descale, v_descale, attention_chunk, q)
    check_tensor(name, "q", q, "B", "Sq", "Hq", "D")
    check_tensor(name, "k", k, q.shape[0], "Sk", "Hkv", q.shape[3], like=q)
    check_tensor(name, "v", v, *k.shape[:3], "Dv", like=q)
    check_flag(name, "return_attn_probs", return_attn_probs)
    sinks = one_sinks(name, learnable_sink, s_aux)
    causal, windows, right = _mask(name, causal, window_size, q.shape[1], k.shape[1])

    def run(q, k, v, sinks):
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = _by_columns(
            lambda v, out: dflash2_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal, scale=softmax_scale,
                windows=windows,
                softcap=softcap, sinks=sinks, return_lse=True, out=out.transpose(1, 2), right=right,
            )[1],
            v, out,
        )  # fmt: skip
        return out, lse

    out, lse = _forward_only(name, run, q, k, v, sinks)
    return (out, lse) if return_attn_probs else out


@graph_entry
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False, *, learnable_sink=None, s_aux=None,
):  # fmt: skip
    """Attention of sequences of different lengths, packed one after another.

    Args:
        q: (total_q, Hq, D). k: (total_k, Hkv, D). v: (total_k, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, where each sequence's slot starts.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        seqused_q, seqused_k: (B,) int32 or None: how many tokens of each slot count. The rest is neither read nor
            attended to; its output rows are 0 (FlashAttention leaves them undefined). Costs one copy of q, or of k and
            v.
        The others as in ``flash_attn_func``.

    Returns:
        (total_q, Hq, Dv); with return_attn_probs also (Hq, total_q) float32.

    Raises:
        As ``flash_attn_func``.
    """
    name = "flash_attn_varlen_func"
    refuse(name, qv, q_descale, k_descale, v_descale, attention_chunk, q)
    check_tensor(name, "q", q, "total_q", "Hq", "D")
    check_tensor(name, "k", k, "total_k", "Hkv", q.shape[2], like=q)
    check_tensor(name, "v", v, *k.shape[:2], "Dv", like=q)
    batch = check_starts_of(
        name, "cu_seqlens_q", cu_seqlens_q, "B + 1", q, q.shape[0] if seqused_q is not None else None
    )
    check_starts_of(name, "cu_seqlens_k", cu_seqlens_k, batch + 1, q, k.shape[0] if seqused_k is not None else None)
    check_used(name, "seqused_q", seqused_q, cu_seqlens_q, batch, q)
    check_used(name, "seqused_k", seqused_k, cu_seqlens_k, batch, q)
    max_seqlen_q, max_seqlen_k = (
        None if most is None else check_integer(name, argument, most, 0, optional=True)
        for argument, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
    )
    check_bounded(name, "max_seqlen_q", max_seqlen_q, cu_seqlens_q, seqused_q)
    check_bounded(name, "max_seqlen_k", max_seqlen_k, cu_seqlens_k, seqused_k)
    check_flag(name, "return_attn_probs", return_attn_probs)
    sinks = one_sinks(name, learnable_sink, s_aux)
    causal, windows, right = _mask(name, causal, window_size, max_seqlen_q, max_seqlen_k)

    def run(q, k, v, sinks):
        total_q, cu_q, cu_k, rows = q.shape[0], cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), None
        if seqused_q is not None:
            rows, cu_q = _used_rows(cu_seqlens_q, seqused_q, total_q)
            q = q[rows]
        if seqused_k is not None:
            keys, cu_k = _used_rows(cu_seqlens_k, seqused_k, k.shape[0])
            k, v = k[keys], v[keys]
        out = (q.new_empty if rows is None else q.new_zeros)(*q.shape[:2], v.shape[2])
        lse = _by_columns(
            lambda v, out: dflash2_varlen(
                q, k, v, cu_q, cu_k, max_seqlen_q, max_seqlen_k, causal=causal, scale=softmax_scale, windows=windows,
                softcap=softcap, sinks=sinks, return_lse=True, out=out, right=right,
            )[1],
            v, out,
        )  # fmt: skip
        if rows is not None:
            # no sequence's rows
            lse = lse.masked_fill(torch.arange(len(rows), device=q.device) >= cu_q[-1], float("-inf"))
            out = out.new_zeros(total_q, *out.shape[1:]).index_copy(0, rows, out)
            lse = lse.new_full((lse.shape[0], total_q), float("-inf")).index_copy(1, rows, lse)
        return out, lse

    out, lse = _forward_only(name, run, q, k, v, sinks)
    return (out, lse) if return_attn_probs else out


@graph_entry
def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    *, learnable_sink=None, s_aux=None,
):  # fmt: skip
    """Attention over a cache of keys and values, to which this call may append.

    Args:
        q: (B, Sq, Hq, D), or (total_q, Hq, D) with cu_seqlens_q (B + 1,) int32, which ends at total_q, and
        max_seqlen_q. k_cache, v_cache: (B_cache, capacity, Hkv, D) and (..., Dv); with page_table (num_pages,
        page_size, Hkv, D), any
            page size.
        k, v: (B, S_new, Hkv, D) and (..., Dv), or packed (total_new, Hkv, D) with cu_seqlens_k_new, which ends at
        total_new:
            written into the cache behind cache_seqlens, in place. A sequence whose cache row or page table has no room
            for all of them is a ValueError on a CPU; on a GPU nothing is written for it and its output is NaN.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), rotate k and q in float32. k[i] is at position
            rotary_seqlens + i, so is q[i] when causal or with a window; else all of q is at rotary_seqlens.
        rotary_seqlens: (B,) int32; None is cache_seqlens.
        cache_seqlens: int or (B,) int32, tokens in the cache before this call's k. None: the cache is full.
        cache_batch_idx: (B,) int32, which row of the cache (or of page_table) is each sequence's.
        cache_leftpad: (B,) int32, where each sequence starts in its cache row. Costs a block table with an entry per
            token.
        page_table: (B, pages) int32.
        scheduler_metadata: what ``get_scheduler_metadata`` returned for such calls. num_splits: parts of the keys in
            decode (up to 16 new tokens); 0 lets step 08 choose. A fixed number makes a sequence's bits independent of
            its batch.
        The others as in ``flash_attn_func``.

    Returns:
        (B, Sq, Hq, Dv), or (total_q, Hq, Dv); with return_softmax_lse also (B, Hq, Sq), or (Hq, total_q), float32.

    Raises:
        As ``flash_attn_func``. On a CPU values are looked at too, before anything is written into the cache.
    """
    name = "flash_attn_with_kvcache"
    # 1. What does not depend on the batch.
    refuse(name, qv, q_descale, k_descale, v_descale, attention_chunk, q)
    sinks = one_sinks(name, learnable_sink, s_aux)
    check_flag(name, "return_softmax_lse", return_softmax_lse)
    check_flag(name, "rotary_interleaved", rotary_interleaved)
    num_splits = 0 if num_splits is None else check_integer(name, "num_splits", num_splits, 0)
    if scheduler_metadata is not None:
        check_tensor(name, "scheduler_metadata", scheduler_metadata, "slots", 4, dtypes=INTEGERS[:1])
    check_pairs(name, k, v, rotary_cos, rotary_sin)
    max_seqlen_q = check_queries(name, q, cu_seqlens_q, max_seqlen_q)
    pages = "num_pages" if page_table is not None else "B_cache"
    check_tensor(name, "k_cache", k_cache, pages, "page_size", "Hkv", q.shape[-1], like=q)
    check_tensor(name, "v_cache", v_cache, *k_cache.shape[:3], "Dv", like=q)
    with torch.no_grad():  # FlashAttention has no gradient here either
        # 2. What does.
        ragged = cu_seqlens_q is not None
        batch = cu_seqlens_q.numel() - 1 if ragged else q.shape[0]
        seqlen_q = max_seqlen_q if ragged else q.shape[1]
        if k is not None:
            check_new_keys(name, k, v, k_cache, v_cache, cu_seqlens_k_new, batch, q)
        if rotary_cos is not None:
            check_rotary(name, rotary_cos, rotary_sin, q)
        table = pages_of_sequences(name, k_cache, page_table, cache_batch_idx, batch)
        capacity = table.shape[1] * k_cache.shape[1]
        cache_seqlens = capacity if cache_seqlens is None else cache_seqlens
        lengths = lengths_of(name, "cache_seqlens", cache_seqlens, batch, q.device)
        if cache_batch_idx is not None and not readable(table):
            # A row that is not there makes NaN, as any length without pages does.
            rows = len(k_cache if page_table is None else page_table)
            lengths = lengths.masked_fill((cache_batch_idx < 0) | (cache_batch_idx >= rows), -1)
        causal, windows, right = _mask(name, causal, window_size, seqlen_q, capacity)
        if cache_leftpad is not None:
            cache_leftpad = lengths_of(name, "cache_leftpad", cache_leftpad, batch, q.device)
        # 3. New keys are rotated, and appended when everything else has been checked.
        old = lengths
        if k is not None:
            check_room(name, k_cache, k, table, lengths, cu_seqlens_k_new)
            if rotary_cos is not None:
                first = lengths
                if rotary_seqlens is not None:
                    first = lengths_of(name, "rotary_seqlens", rotary_seqlens, batch, q.device)
                rotary = (rotary_cos, rotary_sin, rotary_interleaved)
                local = causal or max(_sides(name, window_size)) >= 0
                seq, token = places(q, cu_seqlens_q)
                q = rotate(name, q, first[seq] + token * local, *rotary)
                seq, token = places(k, cu_seqlens_k_new)
                k = rotate(name, k, first[seq] + token, *rotary)
            new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
            lengths = (lengths + new).to(torch.int32)
        if cache_leftpad is not None and readable(lengths):
            if bool(((cache_leftpad < 0) | (cache_leftpad > lengths)).any()):
                pads, most = cache_leftpad.tolist(), lengths.tolist()
                raise ValueError(f"{name}: cache_leftpad is {pads}; want 0 .. {most}, the lengths")
        if k is not None:
            if readable(lengths):
                cache = (k_cache, v_cache, table, lengths)
                cache = cache if cache_leftpad is None else skip_leftpad(*cache, cache_leftpad)
                check_before_append(q, *cache, softmax_scale)
                check_options((q, k_cache, v_cache), q.shape[-2], causal, windows, softcap, sinks, True, right)
            lost = append_rows(k_cache, v_cache, k, v, table, old, cu_seqlens_k_new)
            lengths = lengths.masked_fill(lost, -1)  # of which attention makes NaN
        if cache_leftpad is not None:
            k_cache, v_cache, table, lengths = skip_leftpad(k_cache, v_cache, table, lengths, cache_leftpad)
        # 4. Attention.
        options = dict(
            causal=causal, scale=softmax_scale, windows=windows, softcap=softcap, sinks=sinks, return_lse=True
        )
        cache = (k_cache, v_cache, table, lengths)
        out, lse = _attend(q, cache, cu_seqlens_q, batch, seqlen_q, right, num_splits, scheduler_metadata, options)
    return (out, lse) if return_softmax_lse else out


def _attend(q, cache, cu_seqlens_q, batch, seqlen_q, right, num_splits, scheduler_metadata, options):
    """(out like q, log-sum-exp (B, Hq, Sq) or (Hq, total_q)): by
    decode's kernel for few new tokens, else by prefill's."""
    k_cache, v_cache, table, lengths = cache
    ragged = cu_seqlens_q is not None
    out = q.new_empty(*q.shape[:-1], v_cache.shape[-1])
    one_each = ragged and seqlen_q == 1 and q.shape[0] == batch  # no sequence has two, so each has its one
    if right is None and (one_each or not ragged and seqlen_q <= MAX_DECODE_TOKENS):
        if scheduler_metadata is not None and not num_splits and scheduler_metadata.numel():
            options["schedule"] = scheduler_metadata
        options["num_kv_splits"] = num_splits or None
        lse = _by_columns(
            lambda v, out: dflash2_decode(q, k_cache, v, table, lengths, out=out, **options)[1], v_cache, out
        )
        return out, lse.reshape(batch, -1).transpose(0, 1) if ragged else lse
    packed, cu_q, packed_out = q, cu_seqlens_q.contiguous() if ragged else None, out
    if not ragged:
        packed, packed_out = q.reshape(-1, *q.shape[2:]), out.flatten(0, 1)
        cu_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
    lse = _by_columns(
        lambda v, out: dflash2_paged_prefill(
            packed, k_cache, v, table, lengths, cu_q, seqlen_q, out=out, right=right, **options
        )[1],
        v_cache, packed_out,
    )  # fmt: skip
    return out, lse if ragged else lse.view(-1, batch, seqlen_q).transpose(0, 1)


@graph_entry
def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Merge partial results over disjoint sets of keys.

    Args:
        out_partial: (parts, B, S, H, D) or (parts, total, H, D), float32. lse_partial: (parts, B, S, H) or (parts,
            total, H), natural log. A part that saw no key has -inf, and its output is not read.
        out: tensor for the result. out_dtype: its dtype; None is that of out, or of out_partial.

    Returns:
        (B, S, H, D) and the merged log-sum-exp (B, S, H) float32.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted.
    """
    for argument, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"flash_attn_combine: {argument} is a {type(x).__name__}; want a torch.Tensor")
        if not x.is_floating_point() or x.device != out_partial.device:
            raise ValueError(
                f"flash_attn_combine: {argument} is {x.dtype} on {x.device}; want floating point, both on one device"
            )
    if out_dtype is not None and (not isinstance(out_dtype, torch.dtype) or not out_dtype.is_floating_point):
        raise TypeError(f"flash_attn_combine: out_dtype is {out_dtype!r}; want a floating torch.dtype, or None")
    if out_partial.ndim != lse_partial.ndim + 1 or out_partial.shape[:-1] != lse_partial.shape:
        raise ValueError(
            f"flash_attn_combine: lse_partial is {tuple(lse_partial.shape)}; want {tuple(out_partial.shape[:-1])}, "
            "out_partial without its last dimension"
        )
    lse_partial = lse_partial.float()
    lse = torch.logsumexp(lse_partial, dim=0)
    empty = lse_partial == float("-inf")
    weights = (lse_partial - lse).exp().masked_fill(empty, 0)[..., None]
    merged = (weights * out_partial.masked_fill(empty[..., None], 0)).sum(0)
    if out is None:
        return merged.to(out_dtype or out_partial.dtype), lse
    if not isinstance(out, torch.Tensor):
        raise TypeError(
            f"flash_attn_combine: out is a {type(out).__name__}; want a torch.Tensor {tuple(merged.shape)}, or None"
        )
    if out_dtype is not None and out.dtype != out_dtype:
        raise ValueError(f"flash_attn_combine: out_dtype is {out_dtype}; want {out.dtype}, the dtype of out, or None")
    if out.shape != merged.shape or out.device != merged.device or not out.is_floating_point():
        raise ValueError(f"flash_attn_combine: out is {tuple(out.shape)} {out.dtype} on {out.device}; want "
            f"{tuple(merged.shape)}, "
                         f"floating point on {merged.device}")  # fmt: skip
    return out.copy_(merged), lse


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0,
    causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """How decode cuts the batch into parts of about equal length, found once for the calls of all layers.

    Args:
        batch_size, max_seqlen_q, num_heads_q, num_heads_kv, headdim, headdim_v, qkv_dtype, page_size, causal,
        window_size,
            num_splits: of the calls to come. max_seqlen_k: keys that the cache has room for in a row, or page_table in
            all.
        cache_seqlens: (B,) int32, tokens in the cache; cu_seqlens_k_new (B + 1,), or max_seqlen_k_new, those to append;
            cache_leftpad (B,), those to leave out.
        The others are accepted as ``flash_attn_with_kvcache`` accepts them.

    Returns:
        (slots, 4) int32 on the device, for ``scheduler_metadata``; of no slots when the calls will have nothing to
        schedule: more than 16 new tokens, or a fixed num_splits. See ``ladder.step08_dflash2.get_decode_schedule``.
    """
    name = "get_scheduler_metadata"
    if attention_chunk:
        raise NotImplementedError(f"{name}: attention_chunk is {attention_chunk}; want 0")
    batch_size = check_integer(name, "batch_size", batch_size, 0)
    max_seqlen_q, max_seqlen_k = (
        check_integer(name, "max_seqlen_q", max_seqlen_q, 0),
        check_integer(name, "max_seqlen_k", max_seqlen_k, 0),
    )
    num_splits = 0 if num_splits is None else check_integer(name, "num_splits", num_splits, 0)
    max_seqlen_k_new = check_integer(name, "max_seqlen_k_new", max_seqlen_k_new, 0)
    for argument, lengths, count in (
        ("cache_seqlens", cache_seqlens, batch_size), ("cu_seqlens_k_new", cu_seqlens_k_new, batch_size + 1),
        ("cache_leftpad", cache_leftpad, batch_size),
    ):  # fmt: skip
        if lengths is not None or argument == "cache_seqlens":
            check_tensor(name, argument, lengths, count, dtypes=INTEGERS)
    causal, windows, right = _mask(name, causal, window_size, max_seqlen_q, max_seqlen_k)
    tokens = 1 if cu_seqlens_q is not None else max_seqlen_q  # of ragged queries decode takes one each
    if num_splits or right is not None or max_seqlen_q > (1 if cu_seqlens_q is not None else MAX_DECODE_TOKENS):
        return torch.empty(0, 4, dtype=torch.int32, device=cache_seqlens.device)
    lengths = cache_seqlens + (max_seqlen_k_new if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())
    if cache_leftpad is not None:
        lengths, page_size = lengths - cache_leftpad, 1
    return get_decode_schedule(
        lengths.to(torch.int32).contiguous(), num_heads=num_heads_q, num_kv_heads=num_heads_kv, head_dim=headdim,
        head_dim_v=None if headdim_v is None else min(MAX_HEAD_DIM, check_integer(name, "headdim_v", headdim_v, 1)),
        page_size=max(1, max_seqlen_k) if page_size is None else page_size, max_seq_len=max_seqlen_k, q_len=tokens,
        dtype=qkv_dtype, windows=windows,
    )  # fmt: skip


def _mask(name, causal, window_size, max_seqlen_q, max_seqlen_k):
    """(causal, windows, right) of step 08 for FlashAttention's causal and window_size; right None is without bound."""
    if not isinstance(causal, (bool, int)):  # FlashAttention's callers pass 0 and 1
        raise TypeError(f"{name}: causal is {causal!r}; want True or False")
    left, right = _sides(name, window_size)
    if causal or right == 0:
        causal, right = True, -1
    if max_seqlen_k is not None and left >= max_seqlen_k - 1:
        left = -1
    if max_seqlen_q is not None and right >= max_seqlen_q - 1:  # the first query already reaches the last key
        right = -1
    return bool(causal), RangeWindows.sliding(left + 1) if left >= 0 else None, right if right >= 0 else None


def _sides(name, window_size):
    """(left, right) of a window, -1 for no bound, from a pair of any kind: tuple, list, tensor or array."""
    if hasattr(window_size, "tolist"):  # a tensor or NumPy's array
        window_size = window_size.tolist()
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(f"{name}: window_size is {window_size!r}; want (left, right)")
    if len(window_size) != 2:
        raise ValueError(f"{name}: window_size has {len(window_size)} entries; want (left, right)")
    return tuple(check_integer(name, "window_size", -1 if side is None else side, -1) for side in window_size)


class _ForwardOnly(torch.autograd.Function):
    """Results that may sit in a graph, as FlashAttention's do, and say why when somebody asks for gradients."""

    @staticmethod
    def forward(ctx, name, run, q, k, v, sinks):
        ctx.name = name
        out, lse = run(q.detach(), k.detach(), v.detach(), None if sinks is None else sinks.detach())
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(f"{ctx.name}: gradients; step 08 is forward only, step 04 is differentiable")


def _forward_only(name, run, *tensors):
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
        return _ForwardOnly.apply(name, run, *tensors)
    return run(*tensors)


def _by_columns(run, v, out):
    """Call ``run(v, out)`` on blocks of at most 256 value columns; returns the log-sum-exp of the first.

    Values of 512 (FlashAttention's limit) are wider than step 08's
    accumulator; the weights do not depend on the column.
    """
    blocks = zip(v.split(MAX_HEAD_DIM, -1), out.split(MAX_HEAD_DIM, -1), strict=True)
    return [run(v, out) for v, out in blocks][0]


def _used_rows(cu_seqlens, used, total):
    """Rows in use first and in order, then the others; and the
    cumulative lengths of those in use. No host sync on CUDA."""
    row = torch.arange(total, device=used.device)
    seq = torch.searchsorted(cu_seqlens.long(), row, right=True) - 1
    inside = (seq >= 0) & (seq < used.numel())
    seq = seq.clamp(0, max(0, used.numel() - 1))
    inside &= row - cu_seqlens.long()[seq] < used[seq]
    cu = torch.zeros_like(cu_seqlens)
    cu[1:] = used.cumsum(0)
    rows = torch.argsort((~inside).to(torch.uint8), stable=True)
    return rows[: int(cu[-1])] if rows.device.type == "cpu" else rows, cu


