"""FlashAttention-3's Python interface on step 08: change the import, keep the calls.

    from ladder.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Signatures, layouts (batch, seqlen, heads, head size), masks and return values are those of FlashAttention-3
(``hopper/flash_attn_interface.py``): causal and windows are aligned to the bottom right, ``window_size=(left, right)`` is
inclusive, -1 is infinite, a row that sees no key is 0 with log-sum-exp -inf. Three differences:

- Forward only. A result may be part of a graph, as in FlashAttention; its backward raises ``NotImplementedError``.
  ``flash_attn_with_kvcache`` records no graph, there as here.
- ``qv``, ``attention_chunk``, float8 and its descales raise ``NotImplementedError`` that names the argument.
- ``learnable_sink`` (FlashAttention-4's name; ``s_aux`` in vLLM's fork): one logit per query head, in the denominator only.

Hints that may change speed but no value are accepted: ``pack_gqa`` (groups are always packed in decode), ``deterministic``
(always), ``sm_margin``, and ``num_splits`` outside decode. CPU tensors work too, through step 08's own rules.
"""

import torch

from ladder.contract import check_cu_seqlens, check_flag, check_integer, check_strided, graph_entry
from ladder.step06_paged.cache import check_paged
from ladder.step08_dflash2 import (
    RangeWindows,
    dflash2_attention,
    dflash2_decode,
    dflash2_paged_prefill,
    dflash2_varlen,
)
from ladder.step08_dflash2.checks import check_options
from ladder.step08_dflash2.dispatch import RUNG
from ladder.step08_dflash2.schedule import get_decode_schedule

__all__ = [
    "flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata",
]  # fmt: skip

MAX_HEAD_DIM = 256  # of step 08; wider values are computed in column blocks of so many
MAX_DECODE_TOKENS = 16
INTEGERS = (torch.int32, torch.int64)


@graph_entry
def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False, *, learnable_sink=None, s_aux=None,
):  # fmt: skip
    """Attention of a batch of sequences of one length.

    Args:
        q: (B, Sq, Hq, D). k: (B, Sk, Hkv, D). v: (B, Sk, Hkv, Dv). float16 or bfloat16 (float32 through portable kernels).
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
    _refuse(name, qv, q_descale, k_descale, v_descale, attention_chunk, q)
    _tensor(name, "q", q, "B", "Sq", "Hq", "D")
    _tensor(name, "k", k, q.shape[0], "Sk", "Hkv", q.shape[3], like=q)
    _tensor(name, "v", v, *k.shape[:3], "Dv", like=q)
    check_flag(name, "return_attn_probs", return_attn_probs)
    sinks = _sinks(name, learnable_sink, s_aux)
    causal, windows, right = _mask(name, causal, window_size, q.shape[1], k.shape[1])

    def run(q, k, v, sinks):
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = _by_columns(
            lambda v, out: dflash2_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal, scale=softmax_scale, windows=windows,
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
            attended to; its output rows are 0 (FlashAttention leaves them undefined). Costs one copy of q, or of k and v.
        The others as in ``flash_attn_func``.

    Returns:
        (total_q, Hq, Dv); with return_attn_probs also (Hq, total_q) float32.

    Raises:
        As ``flash_attn_func``.
    """
    name = "flash_attn_varlen_func"
    _refuse(name, qv, q_descale, k_descale, v_descale, attention_chunk, q)
    _tensor(name, "q", q, "total_q", "Hq", "D")
    _tensor(name, "k", k, "total_k", "Hkv", q.shape[2], like=q)
    _tensor(name, "v", v, *k.shape[:2], "Dv", like=q)
    batch = _starts(name, "cu_seqlens_q", cu_seqlens_q, "B + 1", q, q.shape[0] if seqused_q is not None else None)
    _starts(name, "cu_seqlens_k", cu_seqlens_k, batch + 1, q, k.shape[0] if seqused_k is not None else None)
    _used(name, "seqused_q", seqused_q, cu_seqlens_q, batch, q)
    _used(name, "seqused_k", seqused_k, cu_seqlens_k, batch, q)
    max_seqlen_q, max_seqlen_k = (
        None if most is None else check_integer(name, argument, most, 0, optional=True)
        for argument, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
    )
    _bounded(name, "max_seqlen_q", max_seqlen_q, cu_seqlens_q, seqused_q)
    _bounded(name, "max_seqlen_k", max_seqlen_k, cu_seqlens_k, seqused_k)
    check_flag(name, "return_attn_probs", return_attn_probs)
    sinks = _sinks(name, learnable_sink, s_aux)
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
            lse = lse.masked_fill(torch.arange(len(rows), device=q.device) >= cu_q[-1], float("-inf"))  # no sequence's rows
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
        q: (B, Sq, Hq, D), or (total_q, Hq, D) with cu_seqlens_q (B + 1,) int32, which ends at total_q, and max_seqlen_q.
        k_cache, v_cache: (B_cache, capacity, Hkv, D) and (..., Dv); with page_table (num_pages, page_size, Hkv, D), any
            page size.
        k, v: (B, S_new, Hkv, D) and (..., Dv), or packed (total_new, Hkv, D) with cu_seqlens_k_new, which ends at total_new:
            written into the cache behind cache_seqlens, in place. A sequence whose cache row or page table has no room for
            all of them is a ValueError on a CPU; on a GPU nothing is written for it and its output is NaN.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), rotate k and q in float32. k[i] is at position
            rotary_seqlens + i, so is q[i] when causal or with a window; else all of q is at rotary_seqlens.
        rotary_seqlens: (B,) int32; None is cache_seqlens.
        cache_seqlens: int or (B,) int32, tokens in the cache before this call's k. None: the cache is full.
        cache_batch_idx: (B,) int32, which row of the cache (or of page_table) is each sequence's.
        cache_leftpad: (B,) int32, where each sequence starts in its cache row. Costs a block table with an entry per token.
        page_table: (B, pages) int32.
        scheduler_metadata: what ``get_scheduler_metadata`` returned for such calls. num_splits: parts of the keys in decode (up to 16
            new tokens); 0 lets step 08 choose. A fixed number makes a sequence's bits independent of its batch.
        The others as in ``flash_attn_func``.

    Returns:
        (B, Sq, Hq, Dv), or (total_q, Hq, Dv); with return_softmax_lse also (B, Hq, Sq), or (Hq, total_q), float32.

    Raises:
        As ``flash_attn_func``. On a CPU values are looked at too, before anything is written into the cache.
    """
    name = "flash_attn_with_kvcache"
    _refuse(name, qv, q_descale, k_descale, v_descale, attention_chunk, q)
    sinks = _sinks(name, learnable_sink, s_aux)
    check_flag(name, "return_softmax_lse", return_softmax_lse)
    check_flag(name, "rotary_interleaved", rotary_interleaved)
    num_splits = 0 if num_splits is None else check_integer(name, "num_splits", num_splits, 0)
    if scheduler_metadata is not None:
        _tensor(name, "scheduler_metadata", scheduler_metadata, "slots", 4, dtypes=INTEGERS[:1])
    if (k is None) != (v is None):
        raise ValueError(f"{name}: {'k' if k is None else 'v'} is None; want k and v, or neither")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError(f"{name}: {'rotary_cos' if rotary_cos is None else 'rotary_sin'} is None; want both tables, or neither")
    if rotary_cos is not None and k is None:
        raise ValueError(f"{name}: rotary_cos is given without k and v; want new keys to rotate")
    if cu_seqlens_q is None and q.ndim != 4 or cu_seqlens_q is not None and (q.ndim != 3 or max_seqlen_q is None):
        raise ValueError(
            f"{name}: q is {tuple(q.shape)}, max_seqlen_q {max_seqlen_q}; want (B, Sq, Hq, D), or (total_q, Hq, D) with "
            "cu_seqlens_q and max_seqlen_q"
        )
    _tensor(name, "k_cache", k_cache, "num_pages" if page_table is not None else "B_cache", "page_size", "Hkv", q.shape[-1], like=q)
    _tensor(name, "v_cache", v_cache, *k_cache.shape[:3], "Dv", like=q)
    if cu_seqlens_q is not None:
        _starts(name, "cu_seqlens_q", cu_seqlens_q, "B + 1", q, q.shape[0])
        max_seqlen_q = check_integer(name, "max_seqlen_q", max_seqlen_q, 0)
        _bounded(name, "max_seqlen_q", max_seqlen_q, cu_seqlens_q)
    with torch.no_grad():  # FlashAttention has no gradient here either
        ragged = cu_seqlens_q is not None
        batch = cu_seqlens_q.numel() - 1 if ragged else q.shape[0]
        seqlen_q = max_seqlen_q if ragged else q.shape[1]
        if k is not None:
            new = (batch, "S_new") if cu_seqlens_k_new is None else ("total_new",)
            _tensor(name, "k", k, *new, *k_cache.shape[2:], like=q)
            _tensor(name, "v", v, *k.shape[:-1], v_cache.shape[3], like=q)
            if cu_seqlens_k_new is not None:
                _starts(name, "cu_seqlens_k_new", cu_seqlens_k_new, batch + 1, q, k.shape[0])
        if rotary_cos is not None:
            _check_rotary(name, rotary_cos, rotary_sin, q)
        table = _pages_of_sequences(name, k_cache, page_table, cache_batch_idx, batch)
        capacity = table.shape[1] * k_cache.shape[1]
        lengths = _lengths(name, "cache_seqlens", capacity if cache_seqlens is None else cache_seqlens, batch, q.device)
        if cache_batch_idx is not None and not _readable(table):  # a row that is not there: NaN, as for any length without pages
            rows = len(k_cache if page_table is None else page_table)
            lengths = lengths.masked_fill((cache_batch_idx < 0) | (cache_batch_idx >= rows), -1)
        causal, windows, right = _mask(name, causal, window_size, seqlen_q, capacity)
        local = causal or max(_sides(name, window_size)) >= 0
        if cache_leftpad is not None:
            cache_leftpad = _lengths(name, "cache_leftpad", cache_leftpad, batch, q.device)
        if k is not None:
            _check_room(name, k_cache, k, table, lengths, cu_seqlens_k_new)
            if rotary_cos is not None:
                first = lengths if rotary_seqlens is None else _lengths(name, "rotary_seqlens", rotary_seqlens, batch, q.device)
                rotary = (rotary_cos, rotary_sin, rotary_interleaved)
                seq, token = _places(q, cu_seqlens_q)
                q = _rotate(name, q, first[seq] + token * local, *rotary)
                seq, token = _places(k, cu_seqlens_k_new)
                k = _rotate(name, k, first[seq] + token, *rotary)
            old, lengths = lengths, (lengths + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())).to(torch.int32)
        if cache_leftpad is not None and _readable(lengths) and bool(((cache_leftpad < 0) | (cache_leftpad > lengths)).any()):
            raise ValueError(f"{name}: cache_leftpad is {cache_leftpad.tolist()}; want 0 .. {lengths.tolist()}, the lengths")
        if k is not None:
            if _readable(lengths):
                cache = (k_cache, v_cache, table, lengths)
                _check_before_append(q, *(cache if cache_leftpad is None else _skip_leftpad(*cache, cache_leftpad)), softmax_scale)
                check_options((q, k_cache, v_cache), q.shape[-2], causal, windows, softcap, sinks, True, right)
            lost = _append(k_cache, v_cache, k, v, table, old, cu_seqlens_k_new)
            lengths = lengths.masked_fill(lost, -1)  # of which attention makes NaN
        if cache_leftpad is not None:
            k_cache, v_cache, table, lengths = _skip_leftpad(k_cache, v_cache, table, lengths, cache_leftpad)

        common = dict(causal=causal, scale=softmax_scale, windows=windows, softcap=softcap, sinks=sinks, return_lse=True)
        out = q.new_empty(*q.shape[:-1], v_cache.shape[-1])
        one_each = ragged and max_seqlen_q == 1 and q.shape[0] == batch  # no sequence has two, so each has its one
        if right is None and (one_each or not ragged and seqlen_q <= MAX_DECODE_TOKENS):
            if scheduler_metadata is not None and not num_splits and scheduler_metadata.numel():
                common["schedule"] = scheduler_metadata
            lse = _by_columns(
                lambda v, out: dflash2_decode(
                    q, k_cache, v, table, lengths, out=out, num_kv_splits=num_splits or None, **common
                )[1],
                v_cache, out,
            )  # fmt: skip
            lse = lse.reshape(batch, -1).transpose(0, 1) if ragged else lse
        else:
            packed, cu_q = q, cu_seqlens_q.contiguous() if ragged else None
            if not ragged:
                packed = q.reshape(-1, *q.shape[2:])
                cu_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
            lse = _by_columns(
                lambda v, out: dflash2_paged_prefill(
                    packed, k_cache, v, table, lengths, cu_q, seqlen_q, out=out, right=right, **common
                )[1],
                v_cache, out if ragged else out.flatten(0, 1),
            )  # fmt: skip
            lse = lse if ragged else lse.view(-1, batch, seqlen_q).transpose(0, 1)
    return (out, lse) if return_softmax_lse else out


@graph_entry
def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Merge partial results over disjoint sets of keys.

    Args:
        out_partial: (parts, B, S, H, D) or (parts, total, H, D), float32. lse_partial: (parts, B, S, H) or (parts, total, H),
            natural log. A part that saw no key has -inf, and its output is not read.
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
            raise ValueError(f"flash_attn_combine: {argument} is {x.dtype} on {x.device}; want floating point, both on one device")
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
        raise TypeError(f"flash_attn_combine: out is a {type(out).__name__}; want a torch.Tensor {tuple(merged.shape)}, or None")
    if out_dtype is not None and out.dtype != out_dtype:
        raise ValueError(f"flash_attn_combine: out_dtype is {out_dtype}; want {out.dtype}, the dtype of out, or None")
    if out.shape != merged.shape or out.device != merged.device or not out.is_floating_point():
        raise ValueError(f"flash_attn_combine: out is {tuple(out.shape)} {out.dtype} on {out.device}; want {tuple(merged.shape)}, "
                         f"floating point on {merged.device}")  # fmt: skip
    return out.copy_(merged), lse


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0,
    causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """How decode cuts the batch into parts of about equal length, found once for the calls of all layers.

    Args:
        batch_size, max_seqlen_q, num_heads_q, num_heads_kv, headdim, headdim_v, qkv_dtype, page_size, causal, window_size,
            num_splits: of the calls to come. max_seqlen_k: keys that the cache has room for in a row, or page_table in all.
        cache_seqlens: (B,) int32, tokens in the cache; cu_seqlens_k_new (B + 1,), or max_seqlen_k_new, those to append;
            cache_leftpad (B,), those to leave out.
        The others are accepted as ``flash_attn_with_kvcache`` accepts them.

    Returns:
        (slots, 4) int32 on the device, for ``scheduler_metadata``; of no slots when the calls will have nothing to schedule:
        more than 16 new tokens, or a fixed num_splits. See ``ladder.step08_dflash2.get_decode_schedule``.
    """
    name = "get_scheduler_metadata"
    if attention_chunk:
        raise NotImplementedError(f"{name}: attention_chunk is {attention_chunk}; want 0")
    batch_size = check_integer(name, "batch_size", batch_size, 0)
    max_seqlen_q, max_seqlen_k = check_integer(name, "max_seqlen_q", max_seqlen_q, 0), check_integer(name, "max_seqlen_k", max_seqlen_k, 0)
    num_splits = 0 if num_splits is None else check_integer(name, "num_splits", num_splits, 0)
    max_seqlen_k_new = check_integer(name, "max_seqlen_k_new", max_seqlen_k_new, 0)
    for argument, lengths, count in (
        ("cache_seqlens", cache_seqlens, batch_size), ("cu_seqlens_k_new", cu_seqlens_k_new, batch_size + 1), ("cache_leftpad", cache_leftpad, batch_size),
    ):  # fmt: skip
        if lengths is not None or argument == "cache_seqlens":
            _tensor(name, argument, lengths, count, dtypes=INTEGERS)
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


def _refuse(name, qv, q_descale, k_descale, v_descale, attention_chunk, q):
    """NotImplementedError for what step 08 does not compute."""
    given = {"qv": qv, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    for argument, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name}: {argument} is given; want None, step 08 has no such product")
    if attention_chunk:
        raise NotImplementedError(f"{name}: attention_chunk is {attention_chunk}; want 0, step 08 has windows instead")
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"{name}: q is a {type(q).__name__}; want a torch.Tensor")
    check_strided(f"{name}: q", q)
    if q.is_floating_point() and q.element_size() == 1:
        raise NotImplementedError(f"{name}: q is {q.dtype}; want float16 or bfloat16")


def _tensor(name, argument, x, *shape, like=None, dtypes=None):
    """Check one tensor: names in ``shape`` stand for any size; ``like`` has its dtype and device."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: {argument} is a {type(x).__name__}; want a torch.Tensor {_written(shape)}")
    check_strided(f"{name}: {argument}", x)
    if x.ndim != len(shape) or any(not isinstance(n, str) and n != m for n, m in zip(shape, x.shape)):
        raise ValueError(f"{name}: {argument} has shape {tuple(x.shape)}; want {_written(shape)}")
    if like is not None and (x.dtype != like.dtype or x.device != like.device):
        raise ValueError(f"{name}: {argument} is {x.dtype} on {x.device}; want {like.dtype} on {like.device}, as q")
    if dtypes is not None and x.dtype not in dtypes:
        raise ValueError(f"{name}: {argument} has dtype {x.dtype}; want {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}")


def _written(shape):
    """A shape in words. Only for an error: torch.compile cannot write down a size that is a symbol."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _readable(x):
    """Whether values may be looked at: on a GPU that would wait for it, and a compiler has none yet."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _starts(name, argument, cu_seqlens, count, q, total=None):
    """Check cumulative lengths, their values on a CPU and with ``total`` only; returns the number of sequences."""
    _tensor(name, argument, cu_seqlens, count, dtypes=INTEGERS)
    if cu_seqlens.device != q.device or not len(cu_seqlens):
        raise ValueError(f"{name}: {argument} is {tuple(cu_seqlens.shape)} on {cu_seqlens.device}; want (B + 1,) on {q.device}")
    if total is not None and _readable(q):
        check_cu_seqlens(name, argument, cu_seqlens, total)
    return len(cu_seqlens) - 1


def _bounded(name, argument, most, cu_seqlens, used=None):
    """On a CPU only: ``most`` is an upper bound of the lengths. A window that reaches as far as it counts as none."""
    if most is None or not _readable(cu_seqlens) or len(cu_seqlens) < 2:
        return
    longest = int((cu_seqlens.diff() if used is None else used).max())
    if longest > most:
        raise ValueError(f"{name}: {argument} is {most}; want at least {longest}, the longest sequence")


def _used(name, argument, used, cu_seqlens, batch, q):
    """Check how many tokens of each slot count; on a CPU also that its slot has so many."""
    if used is None:
        return
    _tensor(name, argument, used, batch, dtypes=INTEGERS)
    if used.device != q.device:
        raise ValueError(f"{name}: {argument} is on {used.device}; want {q.device}, the device of q")
    if _readable(q) and bool(((used < 0) | (used > cu_seqlens.diff())).any()):
        raise ValueError(f"{name}: {argument} is {used.tolist()}; want 0 .. {cu_seqlens.diff().tolist()}, the slots of each sequence")


def _check_rotary(name, cos, sin, q):
    """Check the rotary tables, whose values are taken as they are."""
    _tensor(name, "rotary_cos", cos, "positions", "rotary_dim / 2")
    _tensor(name, "rotary_sin", sin, *cos.shape, like=cos)
    if not cos.is_floating_point() or cos.device != q.device or not 0 < 2 * cos.shape[1] <= q.shape[-1]:
        raise ValueError(f"{name}: rotary_cos is {tuple(cos.shape)} {cos.dtype} on {cos.device}; want floating point on {q.device}, "
                         f"1 to {q.shape[-1] // 2} columns")  # fmt: skip


def _sinks(name, learnable_sink, s_aux):
    """The sink logits under whichever name."""
    if learnable_sink is not None and s_aux is not None:
        raise ValueError(f"{name}: learnable_sink and s_aux are both given; want one of the two names")
    return s_aux if learnable_sink is None else learnable_sink


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

    Values of 512 (FlashAttention's limit) are wider than step 08's accumulator; the weights do not depend on the column.
    """
    blocks = zip(v.split(MAX_HEAD_DIM, -1), out.split(MAX_HEAD_DIM, -1), strict=True)
    return [run(v, out) for v, out in blocks][0]


def _places(x, cu_seqlens):
    """(sequence, token within it) of each row: (B, S) of a batch, (total,) of packed tokens."""
    if cu_seqlens is None:
        batch, tokens = x.shape[:2]
        return torch.arange(batch, device=x.device)[:, None], torch.arange(tokens, device=x.device)[None]
    rows = torch.arange(x.shape[0], device=x.device)
    cu_seqlens = cu_seqlens.long()
    seq = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    seq = seq.clamp(max=max(0, cu_seqlens.numel() - 2))  # rows behind the last sequence
    return seq, rows - cu_seqlens[seq]


def _used_rows(cu_seqlens, used, total):
    """Rows in use first and in order, then the others; and the cumulative lengths of those in use. No host sync on CUDA."""
    row = torch.arange(total, device=used.device)
    seq = torch.searchsorted(cu_seqlens.long(), row, right=True) - 1
    inside = (seq >= 0) & (seq < used.numel())
    seq = seq.clamp(0, max(0, used.numel() - 1))
    inside &= row - cu_seqlens.long()[seq] < used[seq]
    cu = torch.zeros_like(cu_seqlens)
    cu[1:] = used.cumsum(0)
    rows = torch.argsort((~inside).to(torch.uint8), stable=True)
    return rows[: int(cu[-1])] if rows.device.type == "cpu" else rows, cu


def _rotate(name, x, positions, cos, sin, interleaved):
    """Rotary embedding of the first 2 * cos.shape[1] columns of x (..., H, D) at ``positions`` (...)."""
    if _readable(positions) and positions.numel():
        low, high = (int(n) for n in positions.aminmax())
        if low < 0 or high >= cos.shape[0]:
            raise ValueError(f"{name}: rotary_cos has {cos.shape[0]} positions; want one for {low if low < 0 else high}")
    half = cos.shape[1]
    outside = (positions < 0) | (positions >= cos.shape[0])  # on a GPU: NaN shows it, an assertion would end the process
    row = positions.long().clamp(0, cos.shape[0] - 1)
    cos, sin = (table[row].float().masked_fill(outside[..., None], float("nan")).unsqueeze(-2) for table in (cos, sin))
    rotated, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = rotated.split(half, dim=-1)
        rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def _pages_of_sequences(name, k_cache, page_table, cache_batch_idx, batch):
    """(B, pages) int32. A cache without pages is one with a page as long as a row."""
    table = page_table
    if table is not None:
        _tensor(name, "page_table", table, "B", "pages", dtypes=INTEGERS[:1])
        if table.device != k_cache.device:
            raise ValueError(f"{name}: page_table is on {table.device}; want {k_cache.device}, the device of k_cache")
    else:
        table = torch.arange(k_cache.shape[0], dtype=torch.int32, device=k_cache.device)[:, None]
    if cache_batch_idx is not None:
        _tensor(name, "cache_batch_idx", cache_batch_idx, batch, dtypes=INTEGERS)
        if cache_batch_idx.device != table.device:
            raise ValueError(f"{name}: cache_batch_idx is on {cache_batch_idx.device}; want {table.device}, the device of q")
        if batch and _readable(table):
            low, high = (int(n) for n in cache_batch_idx.aminmax())
            if low < 0 or high >= len(table):
                raise ValueError(f"{name}: cache_batch_idx holds {low if low < 0 else high}; want 0 .. {len(table) - 1}")
        table = table[cache_batch_idx.long().clamp(0, max(0, len(table) - 1))]
    if table.shape[0] != batch:
        owner = "page_table" if page_table is not None else "k_cache"
        raise ValueError(f"{name}: {owner} has {table.shape[0]} sequences; want {batch}, those of q, or cache_batch_idx")
    return table


def _lengths(name, argument, lengths, batch, device):
    """(B,) int32 from an int or a tensor."""
    if isinstance(lengths, int) and not isinstance(lengths, bool):
        return torch.full((batch,), min(check_integer(name, argument, lengths, 0), 2**31 - 1), dtype=torch.int32, device=device)
    if not isinstance(lengths, torch.Tensor) or lengths.shape != (batch,) or lengths.dtype != torch.int32:
        came = f"{tuple(lengths.shape)} {lengths.dtype}" if isinstance(lengths, torch.Tensor) else type(lengths).__name__
        raise ValueError(f"{name}: {argument} is {came}; want an int or ({batch},) torch.int32")
    if lengths.device != device:
        raise ValueError(f"{name}: {argument} is on {lengths.device}; want {device}, the device of q")
    return lengths.contiguous()


def _check_before_append(q, k_cache, v_cache, table, lengths, scale):
    """What attention would refuse once the new keys are written."""
    check_paged(
        RUNG, q, k_cache, v_cache[..., :MAX_HEAD_DIM], table, lengths, scale=scale, max_head_dim=MAX_HEAD_DIM,
        q_layout="(B, Sq, Hq, D)" if q.ndim == 4 else "(total_q, Hq, D)", batch_of_q=q.ndim == 4,
    )  # fmt: skip


def _append(k_cache, v_cache, k, v, table, lengths, cu_seqlens_new):
    """Write new keys and values behind each sequence, in place. Returns (B,) bool: sequences without room for all of theirs.

    Nothing is written for those, and nothing waits for the device: where a token has no place of its own, its row repeats
    the write of a token that has one, or writes back what the cache holds.
    """
    (num_pages, page_size), num_tokens = k_cache.shape[:2], k.shape[:-2].numel()
    if not num_tokens or not table.shape[1] or not num_pages:
        return torch.full_like(lengths, num_tokens > 0, dtype=torch.bool)
    seq, token = (x.expand(k.shape[:-2]).flatten() for x in _places(k, cu_seqlens_new))
    position = lengths[seq].long() + token
    page = table[seq, (position // page_size).clamp(0, table.shape[1] - 1)].long()
    inside = (position >= 0) & (position < table.shape[1] * page_size) & (page >= 0) & (page < num_pages)
    lost = torch.zeros_like(lengths).index_add_(0, seq, (~inside).to(lengths.dtype)) > 0
    written = ~lost[seq]
    donor = written.int().argmax(0, keepdim=True)  # a token that is written, if there is one
    some = written[donor]
    page = torch.where(written, page, torch.where(some, page[donor], 0))
    slot = torch.where(written, position % page_size, torch.where(some, position[donor] % page_size, 0))
    for cache, rows in ((k_cache, k), (v_cache, v)):
        rows = rows.reshape(num_tokens, *rows.shape[-2:])
        cache[page, slot] = torch.where(written[:, None, None], rows, torch.where(some[:, None, None], rows[donor], cache[0, 0]))
    return lost


def _check_room(name, k_cache, k, table, lengths, cu_seqlens_new):
    """Before anything is written, on a CPU only: every new token has a slot."""
    seq, token = _places(k, cu_seqlens_new)
    position, page_size = lengths[seq].long() + token, k_cache.shape[1]
    if not _readable(position) or not position.numel():
        return
    low, high = (int(n) for n in position.aminmax())
    if low < 0 or high >= table.shape[1] * page_size:
        raise ValueError(f"{name}: cache_seqlens puts a new token at {low if low < 0 else high}; want room for it, "
                         f"0 .. {table.shape[1] * page_size - 1}")  # fmt: skip
    page = table[seq, position // page_size]
    low, high = (int(n) for n in page.aminmax())
    if low < 0 or high >= len(k_cache):
        raise ValueError(f"{name}: page_table has page {low if low < 0 else high} for a new token; want 0 .. {len(k_cache) - 1}")


def _skip_leftpad(k_cache, v_cache, table, lengths, leftpad):
    """The cache as pages of one token, and a table that starts behind each sequence's padding."""
    page_size = k_cache.shape[1]
    position = leftpad[:, None].long() + torch.arange(table.shape[1] * page_size, device=table.device)
    position.clamp_(0, table.shape[1] * page_size - 1)  # entries behind the end are not followed
    table = table.gather(1, position // page_size) * page_size + (position % page_size).to(torch.int32)
    return k_cache.flatten(0, 1)[:, None], v_cache.flatten(0, 1)[:, None], table.to(torch.int32), torch.where(leftpad < 0, -1, lengths - leftpad)
