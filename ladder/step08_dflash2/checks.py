"""What the entries of step 08 check before anything runs; the messages name the argument, what came and what is wanted."""

import math
import numbers

import torch

from ladder.contract import (
    check_attention,
    check_cu_seqlens,
    check_flag,
    check_integer,
    check_no_overlap,
    merge_config,
)
from ladder.step07_dflash1.attention import DecodeWorkspace

from .dispatch import RUNG
from .windows import RangeWindows

MAX_HEAD_DIM = 256
FAR_RIGHT = 1 << 29  # keys to the right that no sequence has: as many as all
_CHECKED = {}  # arguments that passed -> scale: the same shapes come again thousands of times a second


def check_dense(q, k, v, causal, scale, packed=False):
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


def check_packed(q, k, v, causal, scale):
    for name, x, wanted in (("q", q, "(total_q, Hq, D)"), ("k", k, "(total_k, Hkv, D)"), ("v", v, "(total_k, Hkv, Dv)")):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{RUNG}: {name} is a {type(x).__name__}; want a torch.Tensor of shape {wanted}")
        if x.ndim != 3:
            raise ValueError(f"{RUNG}: {name} has shape {tuple(x.shape)}; want three dimensions {wanted}")
    return check_dense(q, k, v, causal, scale, packed=True)


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


def check_most(name, value):
    return None if value is None else check_integer(RUNG, name, value, 0, optional=True)


def check_out(out, q, shape, **keys):
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


def check_decode_options(tensors, causal, windows, softcap, sinks, num_kv_splits, return_lse, workspace, schedule, config, right):
    """Check what the shapes of ``tensors`` (q, k_cache, v_cache) do not show; returns the keywords of the launch."""
    q = tensors[0]
    if not isinstance(causal, bool):
        raise TypeError(f"{RUNG}: causal is {causal!r}; want True or False")
    if sinks is not None and not isinstance(sinks, torch.Tensor):
        raise unlike("sinks", sinks, f"a torch.Tensor ({q.shape[2]},), or None")
    windows, softcap, right = check_options(tensors, q.shape[2], causal, windows, softcap, sinks, return_lse, right)
    if num_kv_splits is not None:
        num_kv_splits = check_integer(RUNG, "num_kv_splits", num_kv_splits, 1, optional=True)
    if workspace is not None and not isinstance(workspace, DecodeWorkspace):
        raise TypeError(f"{RUNG}: workspace is a {type(workspace).__name__}; want a DecodeWorkspace on {q.device}, or None")
    merge_config(RUNG, {}, config)
    if schedule is not None:
        if num_kv_splits is not None:
            raise ValueError(f"{RUNG}: schedule and num_kv_splits are both given; want one of them")
        if not isinstance(schedule, torch.Tensor) or schedule.ndim != 2 or schedule.shape[1] != 4 or schedule.dtype != torch.int32 \
                or schedule.device != q.device or not schedule.is_contiguous():  # fmt: skip
            raise unlike("schedule", schedule, f"a contiguous int32 torch.Tensor (num_slots, 4) on {q.device}, of get_decode_schedule")
    return dict(right=right, windows=windows, softcap=softcap, sinks=sinks, num_kv_splits=num_kv_splits)


def check_latent(latent_cache, q):
    """What ``check_paged`` would say of a k_cache, which the caller of MLA does not have."""
    if latent_cache.dtype != q.dtype or latent_cache.device != q.device:
        raise unlike("latent_cache", latent_cache, f"{q.dtype} on {q.device}, as q")
    if latent_cache.shape[1] == 0 or latent_cache.shape[2] != q.shape[3]:
        wanted = f"(num_pages, page_size, {q.shape[3]}), the columns of q, and pages of at least one token"
        raise ValueError(f"{RUNG}: latent_cache has shape {tuple(latent_cache.shape)}; want {wanted}")


def check_windows(windows):
    if windows is not None and not isinstance(windows, RangeWindows):
        raise TypeError(f"{RUNG}: windows is a {type(windows).__name__}; want a RangeWindows, or None")
    return windows if windows is not None and len(windows) else None


def unlike(name, given, wanted):
    """The error that ``given`` is not what is wanted: TypeError when it is no tensor, else ValueError."""
    if not isinstance(given, torch.Tensor):
        return TypeError(f"{RUNG}: {name} is a {type(given).__name__}; want {wanted}")
    return ValueError(f"{RUNG}: {name} is {tuple(given.shape)} {given.dtype} on {given.device}; want {wanted}")
