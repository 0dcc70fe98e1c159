"""Prefill of step 08: arguments checked, the implementation chosen, one kernel launched for each call."""

import torch

from ladder.contract import check_flag, check_integer, check_paged, check_starts

from . import eager
from .checks import check_dense, check_options, check_out
from .dispatch import RUNG, arch, device_code, hopper_runs
from .hopper import prefill as hopper_prefill
from .tiles import launch_config, layout_of, scale_factors, softcap_kind


def dense(
    q, k, v, *, causal=False, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None
):  # fmt: skip
    """``api.dense`` outside torch.compile."""
    scale = check_dense(q, k, v, causal, scale)
    windows, softcap, right = check_options((q, k, v), q.shape[1], causal, windows, softcap, sinks, return_lse, right)
    out = check_out(out, q, (*q.shape[:3], v.shape[3]), k=k, v=v)
    options = dict(scale=scale, windows=windows, softcap=softcap, sinks=sinks, right=right)
    kernels = device_code(q)
    if kernels is None:
        return eager.attention(q, k, v, causal=causal, return_lse=return_lse, out=out, **options)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    if out.numel() and not _on_hopper(q, k, v, out, lse, causal=causal, **options):
        _launch(kernels, q, k, v, out, lse, None, None, None, None, q.shape[2], causal, **options)
    return (out, lse) if return_lse else out


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, *,
    causal=False, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None,
):  # fmt: skip
    """``api.varlen`` outside torch.compile."""
    scale = check_dense(q, k, v, causal, scale, packed=True)
    num_seqs = check_starts(RUNG, "cu_seqlens_q", cu_seqlens_q, q)
    check_starts(RUNG, "cu_seqlens_k", cu_seqlens_k, k, num_seqs)
    max_seqlen_q = check_integer(RUNG, "max_seqlen_q", max_seqlen_q, 0, optional=True)
    check_integer(RUNG, "max_seqlen_k", max_seqlen_k, 0, optional=True)
    windows, softcap, right = check_options((q, k, v), q.shape[1], causal, windows, softcap, sinks, return_lse, right)
    out = check_out(out, q, (*q.shape[:2], v.shape[2]), k=k, v=v)
    options = dict(scale=scale, windows=windows, softcap=softcap, sinks=sinks, right=right)
    kernels = device_code(q)
    if kernels is None:
        return eager.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, return_lse=return_lse, out=out, **options)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32) if return_lse else None
    if out.numel():
        packed = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q)
        if not _on_hopper(q, k, v, out, lse, causal=causal, **packed, **options):
            _launch(kernels, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, causal, **options)
    return (out, lse) if return_lse else out


def paged_prefill(
    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q=None, *,
    causal=True, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None,
):  # fmt: skip
    """``api.paged_prefill`` outside torch.compile."""
    scale = check_paged(RUNG, q, k_cache, v_cache, block_table, seq_lens, scale=scale, packed=True)
    check_flag(RUNG, "causal", causal)
    check_starts(RUNG, "cu_seqlens_q", cu_seqlens_q, q, seq_lens.shape[0], "seq_lens")
    max_seqlen_q = check_integer(RUNG, "max_seqlen_q", max_seqlen_q, 0, optional=True)
    windows, softcap, right = check_options(
        (q, k_cache, v_cache), q.shape[1], causal, windows, softcap, sinks, return_lse, right
    )
    out = check_out(out, q, (*q.shape[:2], v_cache.shape[3]), k_cache=k_cache, v_cache=v_cache)
    options = dict(scale=scale, windows=windows, softcap=softcap, sinks=sinks, right=right)
    kernels = device_code(q)
    if kernels is None:
        return eager.paged_prefill(
            q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, causal=causal, return_lse=return_lse, out=out, **options
        )
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32) if return_lse else None
    if out.numel():
        packed = dict(cu_seqlens_q=cu_seqlens_q, block_table=block_table, seq_lens=seq_lens, max_seqlen_q=max_seqlen_q)
        if not _on_hopper(q, k_cache, v_cache, out, lse, causal=causal, **packed, **options):
            _launch(kernels, q, k_cache, v_cache, out, lse, cu_seqlens_q, None, block_table, seq_lens, max_seqlen_q, causal, **options)
    return (out, lse) if return_lse else out


def _on_hopper(
    q, k, v, out, lse, *, causal, right, scale, windows, softcap, sinks,
    cu_seqlens_q=None, cu_seqlens_k=None, block_table=None, seq_lens=None, max_seqlen_q=None,
):  # fmt: skip
    """Launch the sm_90 kernel where it is built for this call; whether it was."""
    if not hopper_runs(q.device):
        return False
    paged = block_table is not None
    what = dict(causal=causal, right=right, scale=scale, windows=windows, softcap=softcap, sinks=sinks)
    if hopper_prefill.supports_prefill(q, k, v, out=out, paged=paged, **what) is not None:
        return False
    hopper_prefill.launch_prefill(
        q, k, v, out, lse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_table=block_table,
        seq_lens=seq_lens, max_seqlen_q=max_seqlen_q, **what,
    )  # fmt: skip
    return True


def _launch(
    kernels, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, block_table, seq_lens, most_tokens, causal, *,
    scale, windows, softcap, sinks, right,
):  # fmt: skip
    """Launch ``dflash2_prefill`` on checked arguments; q packed when there is cu_seqlens_q, K in pages with a table."""
    ragged, paged = cu_seqlens_q is not None, block_table is not None
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    num_heads, num_kv_heads = q.shape[1], k.shape[2] if paged else k.shape[1]
    page_size = k.shape[1] if paged else 0
    group = num_heads // num_kv_heads
    sign, scale_log2, cap_scale = scale_factors(scale, softcap)
    if ragged:
        total_q, num_seqs = q.shape[0], cu_seqlens_q.shape[0] - 1
        tokens = max(1, total_q // num_seqs) if num_seqs else None
        if most_tokens is not None:
            tokens = min(tokens or 0, most_tokens)
    else:
        tokens = most_tokens
    config = launch_config(
        head_dim, head_dim_v, q.element_size(), arch(q.device), page_size, ragged, group, tokens, most_tokens,
        0 if windows is None else len(windows), softcap > 0,
    )  # fmt: skip
    block_t = config["BLOCK_M"] // config["PACK"]
    if ragged:
        num_tiles, batch, seqlen_q, lse_stride = total_q // block_t + num_seqs, 1, 0, total_q
        q_strides, out_strides = ((0, x.stride(1), x.stride(0), x.stride(2)) for x in (q, out))
        seqlen_k = block_table.shape[1] * page_size if paged else 0
    else:
        batch, _, seqlen_q, _ = q.shape
        num_tiles, num_seqs, seqlen_k, lse_stride = -(-seqlen_q // block_t), batch, k.shape[2], seqlen_q
        q_strides, out_strides = q.stride(), out.stride()
    if paged:  # (page, head, slot, dim)
        k_strides, v_strides = ((x.stride(0), x.stride(2), x.stride(1), x.stride(3)) for x in (k, v))
    elif ragged:
        k_strides, v_strides = ((0, x.stride(1), x.stride(0), x.stride(2)) for x in (k, v))
    else:
        k_strides, v_strides = k.stride(), v.stride()
    with torch.cuda.device_of(q):  # the launch goes to the current device
        kernels.dflash2_prefill[(num_tiles * (num_heads // config["PACK"]) * batch,)](
            q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, block_table, seq_lens,
            None if windows is None else windows.table(q.device), sinks,
            *q_strides, *k_strides, *v_strides, *out_strides, *(block_table.stride() if paged else (0, 0)),
            0 if sinks is None else sinks.stride(0),
            num_tiles, num_heads, group, num_seqs, seqlen_q, seqlen_k, lse_stride, right or 0, scale_log2, cap_scale,
            HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, PAGE_SIZE=page_size,
            CAUSAL=right == 0, HAS_RIGHT=right is not None, NUM_RANGES=0 if windows is None else len(windows),
            SOFTCAP=softcap_kind(softcap, q.dtype), HAS_SINKS=sinks is not None, SIGN=sign, HAS_LSE=lse is not None, RAGGED=ragged,
            **layout_of(k, v), **config,
        )  # fmt: skip


def bytes_moved(problem):
    """Bytes that one prefill loads and stores outside the chip's registers and shared memory: Q and the output once, K
    and V once per query tile; L2 serves most of the repeats. Needs B, Hq, Hkv, Sq, Sk, D, Dv, itemsize, causal.
    """
    p, keys_loaded = problem, 0
    config = launch_config(p.D, p.Dv, p.itemsize, 90, group=p.Hq // p.Hkv, tokens=p.Sq, most_tokens=p.Sq)
    block_t = config["BLOCK_M"] // config["PACK"]
    for q1 in range(block_t, p.Sq + block_t, block_t):
        keys_loaded += max(0, min(p.Sk, q1 + p.Sk - p.Sq)) if p.causal else p.Sk
    return p.itemsize * p.B * p.Hq * (p.D + p.Dv) * (p.Sq + keys_loaded // config["PACK"])
