"""Prefill of step 08: arguments checked, the implementation chosen, one kernel launched for each call."""

import functools
import importlib.util
import math
import numbers
import os

import torch

from ladder.contract import (
    check_attention,
    check_cu_seqlens,
    check_flag,
    check_integer,
    check_no_overlap,
    kernel_entry,
)
from ladder.step05_fused.attention import LOG2_E
from ladder.step06_paged.cache import check_paged
from ladder.step07_dflash1.attention import arch as capability
from ladder.step07_dflash1.attention import layout

from . import eager, ops
from .plan import launch_config
from .windows import RangeWindows

RUNG = "step08_dflash2"
MAX_HEAD_DIM = 256
arch = functools.cache(capability)
LARGE_SOFTCAP = 256.0
FAR_RIGHT = 1 << 29  # keys to the right that no sequence has: as many as all


def dflash2_attention(
    q, k, v, *, causal=False, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None
):  # fmt: skip
    """softmax(scale * q k^T) v in one kernel launch, under a causal mask, range windows, a softcap, learned sinks.

    Args:
        q: (B, Hq, Sq, D). k: (B, Hkv, Sk, D). v: (B, Hkv, Sk, Dv). float16, bfloat16 or float32, any strides, head sizes
            up to 256. Hq is any multiple of Hkv; query head h reads KV head h // (Hq // Hkv). On a CUDA device, or on the
            CPU: by the kernels when Triton's interpreter is on, by PyTorch otherwise. Their dtype decides, under
            ``torch.autocast`` too.
        causal: query i sees keys j <= i + Sk - Sq (aligned to the bottom right).
        scale: factor on the scores; None is 1/sqrt(D).
        windows: ``RangeWindows``, which keys each range of queries sees; tiles outside are neither loaded nor computed.
            None: all.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c), before the mask; 0 leaves it.
        sinks: (Hq,) float: one more logit a row, with no value, in the softmax's denominator; None for none.
        return_lse: also return the natural log-sum-exp of each row's scores, the sink's included.
        out: tensor (B, Hq, Sq, Dv) for the result, any strides; not the memory of k or v. None allocates.

    Returns:
        (B, Hq, Sq, Dv) in the dtype of q; with return_lse also (B, Hq, Sq) float32. A row that sees no key is 0, and its
        log-sum-exp -inf, or sinks[h].

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted.
        NotImplementedError: head sizes above 256; gradients, forward-mode derivatives and ``torch.func`` transforms (step 04
            is differentiable).

    Source: Dao, "FlashAttention-2", algorithm 1; softcap: Gemma Team, "Gemma 2", section 2; learned sinks: OpenAI,
    "gpt-oss-120b & gpt-oss-20b Model Card", section 2.2.
    """
    return dense(q, k, v, causal=causal, scale=scale, windows=windows, softcap=softcap, sinks=sinks, return_lse=return_lse, out=out)


def dflash2_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, *,
    causal=False, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None,
):  # fmt: skip
    """Attention over a ragged batch: sequences of different lengths packed one after another, no padding.

    The lengths stay on the device: the grid has a slot for every tile that total_q tokens in that many sequences can
    need, and each program finds its sequence by a binary search.

    Args:
        q: (total_q, Hq, D). k: (total_k, Hkv, D). v: (total_k, Hkv, Dv). As in ``dflash2_attention``.
        cu_seqlens_q, cu_seqlens_k: (num_seqs + 1,) int32 or int64, where each sequence starts. Checked on a CPU only.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths in tokens, or None. A small max_seqlen_q chooses tiles for
            short chunks; max_seqlen_k is accepted for FlashAttention's sake.
        out: tensor (total_q, Hq, Dv) for the result, any strides. None allocates.
        The others as in ``dflash2_attention``; causal and windows are aligned to the bottom right of each sequence.

    Returns:
        (total_q, Hq, Dv); with return_lse also (Hq, total_q) float32.

    Raises:
        As ``dflash2_attention``.

    Source: the packed layout of FlashAttention's ``flash_attn_varlen_func``.
    """
    return varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, scale=scale, windows=windows,
        softcap=softcap, sinks=sinks, return_lse=return_lse, out=out,
    )  # fmt: skip


def dflash2_paged_prefill(
    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q=None, *,
    causal=True, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None,
):  # fmt: skip
    """Attention of a chunk of new tokens of each sequence over its pages, where the chunk's keys already are.

    Args:
        q: (total_q, Hq, D), the newest tokens of all sequences packed.
        k_cache: (num_pages, page_size, Hkv, D). v_cache: (num_pages, page_size, Hkv, Dv). Any strides.
        block_table: (B, max_pages) int32, the pages of each sequence in order. Entries past a sequence's pages may be
            anything. Checked on a CPU only.
        seq_lens: (B,) int32, keys of each sequence, the chunk's included.
        cu_seqlens_q: (B + 1,) int32 or int64, where each sequence's chunk starts in q.
        max_seqlen_q: as in ``dflash2_varlen``. causal: True unless said otherwise.
        The others as in ``dflash2_varlen``.

    Returns:
        As ``dflash2_varlen``. The rows of a sequence whose length is negative, or more than its row of the block table
        can address, are NaN on a GPU, an error on a CPU.

    Raises:
        As ``dflash2_attention``.

    Source: pages are Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    section 4.1; chunks are Agrawal et al., "Sarathi-Serve", section 4.
    """
    return paged_prefill(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, causal=causal, scale=scale,
        windows=windows, softcap=softcap, sinks=sinks, return_lse=return_lse, out=out,
    )  # fmt: skip


attention = dflash2_attention  # the contract that every rung keeps


# The same entries with ``right``: how many keys after its own position a query sees, for FlashAttention's
# window_size=(left, right) and for bidirectional models; None is 0 under a causal mask and all without one.


@kernel_entry
def dense(
    q, k, v, *, causal=False, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None
):  # fmt: skip
    """As ``dflash2_attention``, with ``right`` keys to the right visible."""
    if torch.compiler.is_compiling():
        return ops.dense(q, k, v, causal, scale, windows, softcap, sinks, return_lse, out, right)
    scale = _check_dense(q, k, v, causal, scale)
    windows, softcap, right = check_options((q, k, v), q.shape[1], causal, windows, softcap, sinks, return_lse, right)
    out = _check_out(out, q, (*q.shape[:3], v.shape[3]), k=k, v=v)
    options = dict(scale=scale, windows=windows, softcap=softcap, sinks=sinks, right=right)
    kernels = device_code(q)
    if kernels is None:
        return eager.attention(q, k, v, causal=causal, return_lse=return_lse, out=out, **options)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    if out.numel() and not _on_hopper(q, k, v, out, lse, causal=causal, **options):
        _launch(kernels, q, k, v, out, lse, None, None, None, None, q.shape[2], causal, **options)
    return (out, lse) if return_lse else out


@kernel_entry
def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, *,
    causal=False, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None,
):  # fmt: skip
    """As ``dflash2_varlen``, with ``right`` keys to the right visible."""
    if torch.compiler.is_compiling():
        return ops.varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, causal, scale, windows, softcap, sinks, return_lse, out, right
        )
    scale = _check_packed(q, k, v, causal, scale)
    num_seqs = check_cu("cu_seqlens_q", cu_seqlens_q, q)
    if check_cu("cu_seqlens_k", cu_seqlens_k, k) != num_seqs:
        raise ValueError(
            f"{RUNG}: cu_seqlens_k has {cu_seqlens_k.numel() - 1} sequences; want {num_seqs}, those of cu_seqlens_q"
        )
    max_seqlen_q = _check_most("max_seqlen_q", max_seqlen_q)
    _check_most("max_seqlen_k", max_seqlen_k)
    windows, softcap, right = check_options((q, k, v), q.shape[1], causal, windows, softcap, sinks, return_lse, right)
    out = _check_out(out, q, (*q.shape[:2], v.shape[2]), k=k, v=v)
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


@kernel_entry
def paged_prefill(
    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q=None, *,
    causal=True, scale=None, windows=None, softcap=0.0, sinks=None, return_lse=False, out=None, right=None,
):  # fmt: skip
    """As ``dflash2_paged_prefill``, with ``right`` keys to the right visible."""
    if torch.compiler.is_compiling():
        return ops.paged_prefill(
            q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q,
            causal, scale, windows, softcap, sinks, return_lse, out, right,
        )  # fmt: skip
    scale = check_paged(
        RUNG, q, k_cache, v_cache, block_table, seq_lens,
        scale=scale, max_head_dim=MAX_HEAD_DIM, q_layout="(total_q, Hq, D)", batch_of_q=False,
    )  # fmt: skip
    check_flag(RUNG, "causal", causal)
    if check_cu("cu_seqlens_q", cu_seqlens_q, q) != seq_lens.shape[0]:
        raise ValueError(
            f"{RUNG}: cu_seqlens_q has {cu_seqlens_q.numel() - 1} sequences; want {seq_lens.shape[0]}, those of seq_lens"
        )
    max_seqlen_q = _check_most("max_seqlen_q", max_seqlen_q)
    windows, softcap, right = check_options(
        (q, k_cache, v_cache), q.shape[1], causal, windows, softcap, sinks, return_lse, right
    )
    out = _check_out(out, q, (*q.shape[:2], v_cache.shape[3]), k_cache=k_cache, v_cache=v_cache)
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


# Which implementation


def device_code(q, module="prefill_kernel", name="q"):
    """The module of Triton kernels that runs on the device of q, or None for the eager path.

    CUDA: the kernels. A CPU: the kernels when TRITON_INTERPRET is set, but for bfloat16, which the interpreter multiplies
    wrongly; else PyTorch, as on any other device.
    """
    device_type = q.device.type
    if device_type != "cuda":
        if device_type == "meta":
            raise ValueError(f"{RUNG}: {name} is on meta; want a tensor with elements, on a CUDA device or a CPU")
        if device_type != "cpu" or not interpreting() or q.dtype == torch.bfloat16:
            return None
    try:
        return _kernels(module)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        if device_type == "cpu":
            return None
        raise ImportError(f"{RUNG}: needs Triton (pip install triton) for tensors on {q.device}") from error


def interpreting():
    """Whether this process asks for Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def _kernels(module):
    return importlib.import_module(f"{__package__}.{module}")


@functools.cache
def hopper_code(device):
    """The module ``hopper`` when ``device`` is a processor of compute capability 9.0 and this Triton brings Gluon."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    if importlib.util.find_spec(f"{__package__}.hopper") is None:
        return None
    from . import hopper

    return hopper


def _on_hopper(
    q, k, v, out, lse, *, causal, right, scale, windows, softcap, sinks,
    cu_seqlens_q=None, cu_seqlens_k=None, block_table=None, seq_lens=None, max_seqlen_q=None,
):  # fmt: skip
    """Launch the sm_90 kernel where it is built for this call; whether it was."""
    hopper = hopper_code(q.device)
    if hopper is None:
        return False
    paged = block_table is not None
    what = dict(causal=causal, right=right, scale=scale, windows=windows, softcap=softcap, sinks=sinks)
    if hopper.supports_prefill(q, k, v, out=out, paged=paged, **what) is not None:
        return False
    hopper.launch_prefill(
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


def layout_of(k, v):
    """``layout`` of step 07, remembered: the strides of a model's tensors are the same call after call."""
    aligned = (k.data_ptr() | v.data_ptr()) % 16 == 0
    return _layout_of(k.dtype, aligned, k.stride(), v.stride(), k.shape[-1], v.shape[-1])


@functools.lru_cache(maxsize=4096)
def _layout_of(dtype, aligned, k_strides, v_strides, head_dim, head_dim_v):
    k, v = (torch.empty_strided((*[1] * (len(s) - 1), d), s, dtype=dtype, device="meta") for s, d in ((k_strides, head_dim), (v_strides, head_dim_v)))
    found = layout(k, v)
    return found if aligned else {**found, "ALIGNED": 0}


def scale_factors(scale, softcap):
    """(sign, scale_log2, cap_scale): the kernel computes exp2(scale_log2 * x) of x = sign * q.k, with a softcap of
    x = tanh(cap_scale * sign * q.k). Both factors are positive; a zero scale is a zero q.
    """
    sign = 0 if abs(scale) < 1e-37 else 1 if scale > 0 else -1  # below that, float32 rounds the scale to 0
    size = abs(scale) if sign else 1.0
    return (sign, softcap * LOG2_E, size / softcap) if softcap > 0 else (sign, size * LOG2_E, 1.0)


def softcap_kind(softcap, dtype):
    """What a kernel does about a softcap: 0 nothing, 1 a tanh that is exact to a unit of 1, 2 one that is exact where it is small.

    The cap multiplies the error of its tanh, 1e-7: up to ``LARGE_SOFTCAP`` no 16-bit result shows that. Models' caps are 30 and 50.
    """
    return 0 if softcap == 0 else 1 if softcap <= LARGE_SOFTCAP and dtype != torch.float32 else 2


# Checks


_CHECKED = {}  # arguments that passed -> scale: the same shapes come again thousands of times a second


def _check_dense(q, k, v, causal, scale, packed=False):
    try:
        key = (
            q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            type(causal), causal, type(scale), scale, packed,
        )  # fmt: skip
        return _CHECKED[key]
    except (AttributeError, KeyError, TypeError):
        pass
    batched = tuple(x.transpose(0, 1)[None] for x in (q, k, v)) if packed else (q, k, v)
    value = check_attention(
        RUNG, *batched, causal=causal, scale=scale, grouped_heads=True, unequal_head_dims=True, max_head_dim=MAX_HEAD_DIM
    )
    if len(_CHECKED) >= 4096:
        _CHECKED.clear()
    _CHECKED[key] = value
    return value


def _check_packed(q, k, v, causal, scale):
    for name, x, wanted in (("q", q, "(total_q, Hq, D)"), ("k", k, "(total_k, Hkv, D)"), ("v", v, "(total_k, Hkv, Dv)")):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{RUNG}: {name} is a {type(x).__name__}; want a torch.Tensor of shape {wanted}")
        if x.ndim != 3:
            raise ValueError(f"{RUNG}: {name} has shape {tuple(x.shape)}; want three dimensions {wanted}")
    return _check_dense(q, k, v, causal, scale, packed=True)


def check_cu(name, cu_seqlens, packed):
    """Check cumulative lengths, their values on a CPU only; returns the number of sequences."""
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.device != packed.device:
        raise ValueError(f"{RUNG}: {name} is on {cu_seqlens.device}; want {packed.device}, the device of q")
    if isinstance(cu_seqlens, torch.Tensor) and not cu_seqlens.is_contiguous():
        raise ValueError(f"{RUNG}: {name} has stride {cu_seqlens.stride()}; want a contiguous tensor")
    if packed.device.type == "cpu" or not isinstance(cu_seqlens, torch.Tensor):
        return len(check_cu_seqlens(RUNG, name, cu_seqlens, packed.shape[0])) - 1
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{RUNG}: {name} is {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; want (num_seqs + 1,) int32 or int64")
    if cu_seqlens.numel() == 1 and packed.shape[0]:  # the kernels would look for a first sequence
        raise ValueError(f"{RUNG}: {name} has no sequence; want one at least for the {packed.shape[0]} packed tokens")
    return cu_seqlens.numel() - 1


def check_options(tensors, num_heads, causal, windows, softcap, sinks, return_lse, right):
    """Check what every entry of step 08 takes beside its tensors; returns (windows or None, softcap, right or None).

    tensors: q, k, v, of which q names dtype and device. right: as ``dense`` takes it; None comes back for all keys.
    """
    q = tensors[0]
    check_flag(RUNG, "return_lse", return_lse)
    if windows is not None:
        if not isinstance(windows, RangeWindows):
            raise TypeError(f"{RUNG}: windows is a {type(windows).__name__}; want a RangeWindows, or None")
        windows = windows if len(windows) else None
    if type(softcap) is not float or softcap != 0.0:  # the type first: an array has no truth
        if isinstance(softcap, bool) or not isinstance(softcap, numbers.Real):
            raise TypeError(f"{RUNG}: softcap is {softcap!r}; want a real number, 0 for none")
        if not 0 <= softcap < math.inf:
            raise ValueError(f"{RUNG}: softcap is {softcap}; want a finite number of at least 0, 0 for none")
        softcap = min(max(float(softcap), 1e-10), 1e20) if softcap else 0.0  # beyond, float32 scores cannot tell the difference
    if sinks is not None:
        if not isinstance(sinks, torch.Tensor):
            raise TypeError(f"{RUNG}: sinks is a {type(sinks).__name__}; want a torch.Tensor ({num_heads},), or None")
        if sinks.shape != (num_heads,) or sinks.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"{RUNG}: sinks is {tuple(sinks.shape)} {sinks.dtype}; want ({num_heads},) float32, float16 or bfloat16")
        if sinks.device != q.device:
            raise ValueError(f"{RUNG}: sinks is on {sinks.device}; want {q.device}, the device of q")
    if right is None:
        return windows, softcap, 0 if causal else None
    right = check_integer(RUNG, "right", right, 0, optional=True)
    if causal and right:
        raise ValueError(f"{RUNG}: right is {right} under a causal mask; want 0 or None")
    return windows, softcap, min(right, FAR_RIGHT)


def _check_most(name, value):
    return None if value is None else check_integer(RUNG, name, value, 0, optional=True)


def _check_out(out, q, shape, **keys):
    """A fresh tensor of ``shape``, or ``out`` after a check. keys: the tensors read beside q, by name."""
    if out is None:
        return q.new_empty(shape)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"{RUNG}: out is a {type(out).__name__}; want a torch.Tensor {tuple(shape)} {q.dtype}, or None")
    if out.shape != shape or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(f"{RUNG}: out is {tuple(out.shape)} {out.dtype} on {out.device}; want {tuple(shape)} {q.dtype} on {q.device}")
    check_no_overlap(RUNG, "out", out)
    check_written(out, q=q, **keys)
    return out


def check_written(out, **inputs):
    """Refuse an ``out`` of the caller's that lies over what other rows still read.

    Over q itself it may lie, element for element: a program has read its rows when it writes them. Only tensors without
    gaps are compared, for others may interleave in one allocation without touching.
    """
    first, size = out.data_ptr(), out.nbytes
    for name, x in inputs.items():
        start = x.data_ptr()
        if size and x.nbytes and start < first + size and first < start + x.nbytes and _dense(out) and _dense(x):
            if name != "q" or start != first or x.shape != out.shape or x.stride() != out.stride():
                raise ValueError(f"{RUNG}: out shares memory with {name}; want memory of its own")


def _dense(x):
    """Whether the elements fill a range of memory without gaps."""
    return sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) + 1 == x.numel()


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
