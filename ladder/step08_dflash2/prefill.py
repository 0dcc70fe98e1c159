"""Prefill of step 08: arguments checked, the implementation chosen, one kernel launched for each call."""

import torch

from ladder.contract import check_flag, check_integer, check_paged, check_starts

from . import eager
from .checks import check_dense, check_options, check_out
from .decision import decide, prefill_call
from .dispatch import RUNG, device_code
from .hopper import prefill as hopper_prefill
from .tiles import launch_config, scale_factors, softcap_kind


def dense(
    q, k, v, *, causal=False, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None
):  # fmt: skip
    """``dflash2_attention`` outside torch.compile."""
    scale = check_dense(q, k, v, causal, scale)
    windows, softcap, right = check_options((q, k, v), q.shape[1], causal, windows, softcap, sinks, return_lse, right)
    out = check_out(out, q, (*q.shape[:3], v.shape[3]), k=k, v=v)
    options = dict(scale=scale, windows=windows, softcap=softcap, sinks=sinks, right=right)
    kernels = device_code(q)
    if kernels is None:
        return eager.attention(q, k, v, causal=causal, return_lse=return_lse, out=out, **options)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    if out.numel():
        _launch(kernels, q, k, v, out, lse, causal=causal, **options)
    return (out, lse) if return_lse else out


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, *,
    causal=False, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None,
):  # fmt: skip
    """``dflash2_varlen`` outside torch.compile."""
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
        return eager.varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, return_lse=return_lse, out=out, **options
        )
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32) if return_lse else None
    if out.numel():
        packed = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q)
        _launch(kernels, q, k, v, out, lse, causal=causal, **packed, **options)
    return (out, lse) if return_lse else out


def paged_prefill(
    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q=None, *,
    causal=True, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None,
):  # fmt: skip
    """``dflash2_paged_prefill`` outside torch.compile."""
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
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            cu_seqlens_q,
            causal=causal,
            return_lse=return_lse,
            out=out,
            **options,
        )
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32) if return_lse else None
    if out.numel():
        packed = dict(cu_seqlens_q=cu_seqlens_q, block_table=block_table, seq_lens=seq_lens, max_seqlen_q=max_seqlen_q)
        _launch(kernels, q, k_cache, v_cache, out, lse, causal=causal, **packed, **options)
    return (out, lse) if return_lse else out


def _launch(
    kernels, q, k, v, out, lse, *, causal, scale, windows, softcap, sinks, right,
    cu_seqlens_q=None, cu_seqlens_k=None, block_table=None, seq_lens=None, max_seqlen_q=None,
):  # fmt: skip
    """Launch the kernel that ``decide`` chooses on checked arguments; q packed when there is cu_seqlens_q, K in pages
    with a table."""
    ragged, paged = cu_seqlens_q is not None, block_table is not None
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    num_heads, num_kv_heads = q.shape[1], k.shape[2] if paged else k.shape[1]
    page_size = k.shape[1] if paged else 0
    num_seqs = cu_seqlens_q.shape[0] - 1 if ragged else None
    capacity = block_table.shape[1] * page_size if paged else None
    call = prefill_call(
        q, k, v, out, right=right, windows=windows, softcap=softcap, scale=scale, num_seqs=num_seqs,
        capacity=capacity, longest=max_seqlen_q,
    )  # fmt: skip
    decision = decide(call, q.device)
    if decision.kernel == "dflash2_prefill_hopper":
        hopper_prefill.launch_prefill(
            q, k, v, out, lse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_table=block_table,
            seq_lens=seq_lens,
            max_seqlen_q=max_seqlen_q, causal=causal, right=right, scale=scale, windows=windows, softcap=softcap,
            sinks=sinks,
            plan=decision.plan,
        )  # fmt: skip
        return
    config = decision.plan
    block_t = config["BLOCK_M"] // config["PACK"]
    sign, scale_log2, cap_scale = scale_factors(scale, softcap)
    if ragged:
        num_tiles, batch, seqlen_q, lse_stride, seqlen_k = (
            q.shape[0] // block_t + num_seqs,
            1,
            0,
            q.shape[0],
            capacity or 0,
        )
        q_strides, out_strides = ((0, x.stride(1), x.stride(0), x.stride(2)) for x in (q, out))
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
            num_tiles, num_heads, num_heads // num_kv_heads, num_seqs, seqlen_q, seqlen_k, lse_stride, right or 0,
            scale_log2, cap_scale,
            HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, PAGE_SIZE=page_size,
            CAUSAL=right == 0, HAS_RIGHT=right is not None, NUM_RANGES=0 if windows is None else len(windows),
            SOFTCAP=softcap_kind(softcap, q.dtype), HAS_SINKS=sinks is not None, SIGN=sign, HAS_LSE=lse is not None,
            RAGGED=ragged, **config,
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
