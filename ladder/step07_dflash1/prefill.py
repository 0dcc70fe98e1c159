"""Prefill of step 07: dense, ragged and over pages, one kernel a call."""

import torch

from ladder.contract import (
    check_attention,
    check_flag,
    check_out,
    check_paged,
    check_starts,
    kernel_entry,
    merge_config,
)  # fmt: skip
from ladder.step05_fused.attention import scale_factors

from .checks import RUNG, check_out_index, check_rows, device_code
from .tiles import arch, layout, prefill_config


@kernel_entry
def attention(q, k, v, *, causal=False, scale=None, return_lse=False, out=None, config=None):
    """softmax(scale * q k^T) v in one kernel launch.

    Args:
        q: (B, Hq, Sq, D). k: (B, Hkv, Sk, D). v: (B, Hkv, Sk, Dv). float16, bfloat16 or float32, any strides, on a
            CUDA device, or on the CPU when Triton's interpreter is on. Head sizes up to 256.
            Hq is any multiple of Hkv; query head h reads KV head h // (Hq // Hkv).
        causal: query i sees keys j <= i + Sk - Sq (aligned to the bottom right).
        scale: factor on the scores; None is 1/sqrt(D).
        return_lse: also return the natural log-sum-exp of each row's scaled scores.
        out: tensor (B, Hq, Sq, Dv) for the result, any strides. None allocates.
        config: launch parameters that replace those of ``prefill_config``, for tuning.

    Returns:
        (B, Hq, Sq, Dv) in the dtype of q; with return_lse also (B, Hq, Sq) float32.
        Rows that see no key are 0 with log-sum-exp -inf.

    Raises:
        TypeError, ValueError: see ``ladder.contract``; also bfloat16 in the interpreter, which multiplies it wrongly.
        NotImplementedError: head sizes above 256; gradients (step 04 is differentiable).

    Source: Dao, "FlashAttention-2", algorithm 1; the exponent as one multiply-add is its section 3.1.
    """
    scale = check_attention(RUNG, q, k, v, causal=causal, scale=scale)
    return _prefill(q, k, v, causal, scale, return_lse, out, config)


@kernel_entry
def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, *,
    causal=False, scale=None, return_lse=False, out=None, out_index=None, config=None,
):  # fmt: skip
    """Attention over a ragged batch: sequences of different lengths packed one after another, no padding.

    The lengths stay on the device: the grid has a slot for every tile that total_q tokens in that many sequences can
    need, and each program finds its sequence by a binary search.

    Args:
        q: (total_q, Hq, D). k: (total_k, Hkv, D). v: (total_k, Hkv, Dv). As in ``attention``.
        cu_seqlens_q, cu_seqlens_k: (num_seqs + 1,) int32 or int64, where each sequence starts. Checked on a CPU only.
        causal, scale, return_lse, config: as in ``attention``; causal is aligned to the bottom right of each sequence.
        out: tensor for the result. With ``out_index`` it may have more rows than that writes. None allocates.
        out_index: (total_q, top_k) int32 or int64: token t's row is stored at rows out_index[t], not at t; a negative
            entry is stored nowhere. ``group_tokens(...).places`` puts every token behind each of its experts, which
            saves the pass that would permute the output. Rows that no entry names are left as they were. That entries
            are rows of out is checked on a CPU only.

    Returns:
        (total_q, Hq, Dv), or (total_q * top_k, Hq, Dv) with out_index; with return_lse also (Hq, total_q) float32.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted. NotImplementedError: as ``attention``.

    Source: the packed layout of FlashAttention's ``flash_attn_varlen_func``.
    """
    scale = check_attention(RUNG, q, k, v, causal=causal, scale=scale, packed=True)
    num_seqs = check_starts(RUNG, "cu_seqlens_q", cu_seqlens_q, q)
    check_starts(RUNG, "cu_seqlens_k", cu_seqlens_k, k, num_seqs)
    packed = dict(cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, out_index=out_index)
    return _prefill(q, k, v, causal, scale, return_lse, out, config, **packed)


@kernel_entry
def paged_prefill(
    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, *,
    scale=None, return_lse=False, out=None, out_index=None, config=None,
):  # fmt: skip
    """Causal attention of a chunk of new tokens of each sequence over its pages, where the chunk's keys already are.

    Args:
        q: (total_q, Hq, D), the newest tokens of all sequences packed.
        k_cache, v_cache, block_table, seq_lens: as in ``paged_decode``; seq_lens counts the chunk too.
        cu_seqlens_q: (B + 1,) int32 or int64, where each sequence's chunk starts in q.
        scale, return_lse, out, out_index, config: as in ``attention_varlen``.

    Returns, Raises: as ``attention_varlen``; lengths beyond the block table as ``paged_decode``.
    """
    scale = check_paged(RUNG, q, k_cache, v_cache, block_table, seq_lens, scale=scale, packed=True)
    check_starts(RUNG, "cu_seqlens_q", cu_seqlens_q, q, seq_lens.shape[0], "seq_lens")
    packed = dict(cu_q=cu_seqlens_q, out_index=out_index, block_table=block_table, seq_lens=seq_lens)
    return _prefill(q, k_cache, v_cache, True, scale, return_lse, out, config, **packed)


def _prefill(
    q, k, v, causal, scale, return_lse, out, config, *,
    cu_q=None, cu_k=None, out_index=None, block_table=None, seq_lens=None,
):  # fmt: skip
    """Launch ``dflash1_prefill`` on checked arguments: packed tokens with ``cu_q``, pages with a ``block_table``."""
    check_flag(RUNG, "return_lse", return_lse)
    kernel = device_code(q).dflash1_prefill
    ragged, paged = cu_q is not None, block_table is not None
    num_heads, head_dim, head_dim_v = q.shape[1], q.shape[-1], v.shape[-1]
    num_kv_heads, page_size = (k.shape[2], k.shape[1]) if paged else (k.shape[1], 0)
    top_k = 0 if out_index is None else check_out_index(out_index, q)
    out = check_out(RUNG, out, q, (q.shape[0] * (top_k or 1), *q.shape[1:-1], head_dim_v), more_rows=top_k > 0)
    if top_k:
        check_rows("out_index", out_index, out.shape[0])
    chosen = prefill_config(head_dim, head_dim_v, q.element_size(), arch(q.device), page_size, ragged)
    config = merge_config(RUNG, chosen, config)
    if ragged:
        total_q, batch, num_seqs, seqlen_q = q.shape[0], 1, cu_q.numel() - 1, 0
        num_tiles, seqlen_k = total_q // config["BLOCK_M"] + num_seqs, block_table.shape[1] * page_size if paged else 0
        lse_shape = num_heads, total_q
    else:
        batch, _, seqlen_q = lse_shape = q.shape[:3]
        num_tiles, seqlen_k, num_seqs = -(-seqlen_q // config["BLOCK_M"]), k.shape[2], batch
    lse = q.new_empty(lse_shape, dtype=torch.float32) if return_lse else None
    sign, scale_log2 = scale_factors(scale)
    if q.numel():
        with torch.cuda.device_of(q):  # the launch goes to the current device
            kernel[(num_tiles * num_heads * batch,)](
                q, k, v, out, lse, cu_q, cu_k, block_table, seq_lens, out_index,
                *_strides(q, ragged), *_strides(k, ragged, paged), *_strides(v, ragged, paged), *_strides(out, ragged),
                *(block_table.stride() if paged else (0, 0)),
                num_tiles, num_heads, num_heads // num_kv_heads, num_seqs, seqlen_q, seqlen_k, lse_shape[-1],
                scale_log2,
                HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, PAGE_SIZE=page_size, CAUSAL=causal, SIGN=sign,
                HAS_LSE=return_lse, RAGGED=ragged, TOP_K=top_k, **layout(k, v), **config,
            )  # fmt: skip
    return (out, lse) if return_lse else out


def _strides(x, ragged, paged=False):
    """In the order of the kernel: sequence or page, head, token, column."""
    if paged:
        return x.stride(0), x.stride(2), x.stride(1), x.stride(3)
    return (0, x.stride(1), x.stride(0), x.stride(2)) if ragged else x.stride()


def bytes_moved(problem):
    """Bytes that one prefill loads and stores outside the chip's registers and shared memory: Q and the output once, K
    and V once per query tile; L2 serves most of the repeats. Needs B, Hq, Hkv, Sq, Sk, D, Dv, itemsize, causal.
    """
    p, keys_loaded = problem, 0
    block_m = prefill_config(p.D, p.Dv, p.itemsize, 90)["BLOCK_M"]
    for q1 in range(block_m, p.Sq + block_m, block_m):
        keys_loaded += max(0, min(p.Sk, q1 + p.Sk - p.Sq)) if p.causal else p.Sk
    return p.itemsize * p.B * p.Hq * (p.Sq * (p.D + p.Dv) + keys_loaded * (p.D + p.Dv))
