"""What the entries of step 08 check before anything runs; messages name the argument, what came and what is wanted."""

import math
import numbers

import torch

from ladder import contract
from ladder.contract import FLOATS, INT32, check_attention, check_flag, check_integer, expect, merge_config
from ladder.step07_dflash1.decode import check_workspace

from .dispatch import RUNG
from .windows import RangeWindows

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
    value = check_attention(RUNG, q, k, v, causal=causal, scale=scale, packed=packed)
    if len(_CHECKED) >= 4096:
        _CHECKED.clear()
    _CHECKED[key] = value
    return value


def check_options(tensors, num_heads, causal, windows, softcap, sinks, return_lse, right):
    """Check what every entry of step 08 takes beside its tensors; returns (windows or None, softcap, right or None).

    tensors: q, k, v, of which q names dtype and device. right: as ``dense`` takes it; None comes back for all keys.
    """
    q = tensors[0]
    check_flag(RUNG, "return_lse", return_lse)
    windows = check_windows(windows)
    if type(softcap) is not float or softcap != 0.0:  # the type first: an array has no truth
        if isinstance(softcap, bool) or not isinstance(softcap, numbers.Real):
            raise TypeError(f"{RUNG}: softcap is {softcap!r}; want a real number, 0 for none")
        if not 0 <= softcap < math.inf:
            raise ValueError(f"{RUNG}: softcap is {softcap}; want a finite number of at least 0, 0 for none")
        softcap = min(max(float(softcap), 1e-10), 1e20) if softcap else 0.0  # float32 scores show no difference beyond
    expect(RUNG, "sinks", sinks, (num_heads,), FLOATS, q.device, optional=True)
    if right is None:
        return windows, softcap, 0 if causal else None
    right = check_integer(RUNG, "right", right, 0)
    if causal and right:
        raise ValueError(f"{RUNG}: right is {right} under a causal mask; want 0 or None")
    return windows, softcap, min(right, FAR_RIGHT)


def check_out(out, q, shape, **keys):
    """A fresh tensor of ``shape``, or ``out`` after a check. keys: the tensors read beside q, by name."""
    if out is None:
        return q.new_empty(shape)
    contract.check_out(RUNG, out, q, shape)
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


def check_decode_options(
    tensors, causal, windows, softcap, sinks, num_kv_splits, return_lse, workspace, schedule, config, right
):
    """Check what the shapes of ``tensors`` (q, k_cache, v_cache) do not show; returns the keywords of the launch."""
    q = tensors[0]
    check_flag(RUNG, "causal", causal)
    windows, softcap, right = check_options(tensors, q.shape[2], causal, windows, softcap, sinks, return_lse, right)
    num_kv_splits = check_integer(RUNG, "num_kv_splits", num_kv_splits, 1, optional=True)
    check_workspace(RUNG, workspace, q.device)
    merge_config(RUNG, {}, config)
    if schedule is not None:
        if num_kv_splits is not None:
            raise ValueError(f"{RUNG}: schedule and num_kv_splits are both given; want one of them")
        expect(RUNG, "schedule", schedule, ("num_slots", 4), INT32, q.device, optional=True, contiguous=True)
    return dict(right=right, windows=windows, softcap=softcap, sinks=sinks, num_kv_splits=num_kv_splits)


def check_latent(latent_cache, q):
    """What ``check_paged`` would say of a k_cache, which the caller of MLA does not have."""
    expect(RUNG, "latent_cache", latent_cache, ("num_pages", "page_size", q.shape[3]), q.dtype, q.device)
    if latent_cache.shape[1] == 0:
        shape = tuple(latent_cache.shape)
        raise ValueError(f"{RUNG}: latent_cache has shape {shape}; want pages of at least one token")


def check_windows(windows):
    if windows is not None and not isinstance(windows, RangeWindows):
        raise TypeError(f"{RUNG}: windows is a {type(windows).__name__}; want a RangeWindows, or None")
    return windows if windows is not None and len(windows) else None


def unlike(name, given, wanted):
    """The error that ``given`` is not what is wanted: TypeError when it is no tensor, else ValueError."""
    if not isinstance(given, torch.Tensor):
        return TypeError(f"{RUNG}: {name} is a {type(given).__name__}; want {wanted}")
    return ValueError(f"{RUNG}: {name} is {tuple(given.shape)} {given.dtype} on {given.device}; want {wanted}")
