"""The argument contract that every rung shares: one place that turns bad input into an error that helps.

Every rung exports ``attention(q, k, v, *, causal=False, scale=None)`` in the layout of
``torch.nn.functional.scaled_dot_product_attention``; the rungs differ in what they compute with it, not in what they
accept. A rung calls ``check_attention`` first and passes what it can do; what it cannot do raises
``NotImplementedError`` naming the rung that can.
"""

import functools
import inspect
import math
import numbers

import torch
from torch.autograd import forward_ad

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def outside_autocast(function):
    """Decorate a function so that it computes in the dtypes of its arguments, whatever ``torch.autocast`` says around it.

    Under autocast ``@`` and ``linear`` round float32 arguments to 16 bits, so that a float32 result would be wrong by
    percents. The device is that of the first tensor among the arguments.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Tensor):
                if x.is_meta or not torch.is_autocast_enabled(x.device.type):
                    break
                with torch.autocast(x.device.type, enabled=False):
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def kernel_entry(function):
    """Decorate an entry that hands tensors to a kernel, which reads plain memory and can be followed by no derivative.

    The entry runs outside autocast. It raises, naming its rung (itself outside one) and the argument: ValueError for a nested
    or sparse tensor; NotImplementedError for a tensor whose gradients are recorded, for one with a forward-mode tangent, which
    would be lost, and for any inside ``torch.func`` transforms (vmap, jvp, grad).
    """
    return _guarded(function, True)


def graph_entry(function):
    """``kernel_entry`` for a function whose arguments may require gradients, because its own code says what becomes of them."""
    return _guarded(function, False)


def _guarded(function, refuses_gradients):
    run = outside_autocast(function)
    owner = next((part for part in function.__module__.split(".") if part.startswith("step")), function.__name__)

    @functools.wraps(function)
    def call(*args, **kwargs):
        recording = refuses_gradients and torch.is_grad_enabled()
        transformed = forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None
        for place, x in enumerate((*args, *kwargs.values())):
            if isinstance(x, torch.Tensor) and (
                transformed or recording and x.requires_grad or x.layout is not torch.strided or x.is_nested
            ):
                names = (*list(inspect.signature(function).parameters)[: len(args)], *kwargs)
                _refuse(f"{owner}: {names[place]}", x, recording)
        return run(*args, **kwargs)

    return call


def _refuse(argument, x, recording):
    """Raise what ``kernel_entry`` promises if no kernel can read ``x``."""
    check_strided(argument, x)
    if recording and x.requires_grad:
        raise NotImplementedError(f"{argument} requires gradients; forward only: use torch.no_grad(), or step04_gqa, which is differentiable")
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise NotImplementedError(f"{argument} is inside a torch.func transform; want a plain tensor: kernels cannot be transformed")
    if forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(f"{argument} has a forward-mode tangent; forward only: step04_gqa is differentiable")


def check_strided(argument: str, x: torch.Tensor) -> None:
    """ValueError unless ``x`` has a shape and strides: nested and sparse tensors do not. ``argument`` begins the message."""
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise ValueError(f"{argument} is a {kind} tensor; want a dense one (pack sequences of different lengths, with cu_seqlens)")


def check_attention(
    rung: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    grouped_heads: bool = False,
    unequal_head_dims: bool = False,
    max_head_dim: int | None = None,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
) -> float:
    """Check ``attention`` arguments and return the softmax scale to use.

    Args:
        rung: name of the calling rung, for the messages.
        q: (B, Hq, Sq, D). k: (B, Hkv, Sk, D). v: (B, Hkv, Sk, Dv). One floating dtype, one device, any strides.
        causal, scale: as the caller of ``attention`` gave them.
        grouped_heads: the rung computes Hq != Hkv.
        unequal_head_dims: the rung computes D != Dv.
        max_head_dim: largest D or Dv the rung computes; None for no limit.
        dtypes: element types the rung computes.

    Returns:
        ``scale``, or 1/sqrt(D) when it is None.

    Raises:
        TypeError: an argument is no tensor, ``causal`` is no bool, ``scale`` is no real number.
        ValueError: a shape, dtype or device does not fit; the message names the argument, what came, what is wanted.
        NotImplementedError: valid attention that this rung does not compute; the message names the rung that does.
    """
    for name, tensor, layout in (("q", q, "(B, Hq, Sq, D)"), ("k", k, "(B, Hkv, Sk, D)"), ("v", v, "(B, Hkv, Sk, Dv)")):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{rung}: {name} is a {type(tensor).__name__}; want a torch.Tensor of shape {layout}")
        check_strided(f"{rung}: {name}", tensor)
        if tensor.ndim != 4:
            raise ValueError(f"{rung}: {name} has shape {tuple(tensor.shape)}; want four dimensions {layout}")
        if tensor.dtype not in dtypes:
            wanted = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise ValueError(f"{rung}: {name} has dtype {tensor.dtype}; want one of {wanted}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{rung}: {name} has dtype {tensor.dtype}; want {q.dtype}, the dtype of q")
        if tensor.device != q.device:
            raise ValueError(f"{rung}: {name} is on {tensor.device}; want {q.device}, the device of q")
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{rung}: {name} has batch size {tensor.shape[0]}; want {q.shape[0]}, the batch size of q")

    (_, num_heads, _, head_dim), (_, num_kv_heads, seqlen_k, _) = q.shape, k.shape
    head_dim_v = v.shape[3]
    if head_dim == 0 or head_dim_v == 0:
        name, tensor = ("q", q) if head_dim == 0 else ("v", v)
        raise ValueError(f"{rung}: {name} has shape {tuple(tensor.shape)}, head size 0; want at least 1")
    if k.shape[3] != head_dim:
        raise ValueError(f"{rung}: k has head size {k.shape[3]}; want {head_dim}, the head size of q")
    if v.shape[1] != num_kv_heads:
        raise ValueError(f"{rung}: v has {v.shape[1]} heads; want {num_kv_heads}, the heads of k")
    if v.shape[2] != seqlen_k:
        raise ValueError(f"{rung}: v has length {v.shape[2]}; want {seqlen_k}, the length of k")
    if num_heads != num_kv_heads and (num_kv_heads == 0 or num_heads % num_kv_heads):
        raise ValueError(f"{rung}: q has {num_heads} heads; want a multiple of the {num_kv_heads} heads of k and v")

    if num_heads != num_kv_heads and not grouped_heads:
        raise NotImplementedError(
            f"{rung}: grouped heads ({num_heads} query heads on {num_kv_heads} KV heads) arrive with step04_gqa"
        )
    if head_dim != head_dim_v and not unequal_head_dims:
        raise NotImplementedError(
            f"{rung}: unequal head sizes (qk {head_dim}, v {head_dim_v}) arrive with step04_gqa"
        )
    if max_head_dim is not None and max(head_dim, head_dim_v) > max_head_dim:
        raise NotImplementedError(
            f"{rung}: head size {max(head_dim, head_dim_v)} is above {max_head_dim}; step04_gqa has no limit"
        )

    if not isinstance(causal, bool):
        raise TypeError(f"{rung}: causal is {causal!r}; want True or False")
    return check_scale(rung, scale, head_dim)


def check_scale(rung: str, scale: float | None, head_dim: int) -> float:
    """Return ``scale`` as a float, 1/sqrt(head_dim) for None; TypeError or ValueError when it is no finite real."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"{rung}: scale is {scale!r}; want a real number or None for 1/sqrt(D)")
    if not math.isfinite(scale):
        raise ValueError(f"{rung}: scale is {scale}; want a finite number")
    return float(scale)


def check_cu_seqlens(rung: str, name: str, cu_seqlens: torch.Tensor, total: int) -> list[int]:
    """Check cumulative sequence lengths and return them as a list.

    Args:
        cu_seqlens: (num_seqs + 1,) int32 or int64; starts at 0, never falls, ends at ``total``.
        total: number of packed tokens.

    Raises:
        TypeError, ValueError: naming ``name``, what came and what is wanted.
    """
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"{rung}: {name} is a {type(cu_seqlens).__name__}; want an int32 torch.Tensor (num_seqs + 1,)")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"{rung}: {name} has shape {tuple(cu_seqlens.shape)}; want (num_seqs + 1,)")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{rung}: {name} has dtype {cu_seqlens.dtype}; want int32 or int64")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != total or any(a > b for a, b in zip(bounds, bounds[1:])):
        shown = bounds if len(bounds) <= 8 else [*bounds[:4], "...", *bounds[-3:]]
        raise ValueError(f"{rung}: {name} is {shown}; want 0, then never falling, up to the {total} packed tokens")
    return bounds


def check_integer(rung: str, name: str, value: int, least: int, optional: bool = False) -> int:
    """Return ``value`` as an int; TypeError when it is no integer (a bool is none, numpy's are), ValueError below ``least``."""
    wanted = f"an integer of at least {least}" + (", or None" if optional else "")
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{rung}: {name} is {value!r}; want {wanted}")
    if value < least:
        raise ValueError(f"{rung}: {name} is {value}; want {wanted}")
    return int(value)


def check_flag(rung: str, name: str, value: bool) -> None:
    """TypeError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{rung}: {name} is {value!r}; want True or False")


def merge_config(rung: str, chosen: dict, config: dict | None) -> dict:
    """``chosen`` launch parameters with those of ``config`` in their place; TypeError when that is no dict."""
    if config is None:
        return chosen
    if not isinstance(config, dict):
        raise TypeError(f"{rung}: config is a {type(config).__name__}; want a dict of launch parameters, or None")
    return {**chosen, **config}


def check_no_overlap(rung: str, name: str, x: torch.Tensor) -> None:
    """ValueError when two elements of ``x``, along one dimension or two, share an address, as after ``expand``."""
    if x.is_contiguous() or x.numel() == 0:
        return
    dims = [(size, stride) for size, stride in zip(x.shape, x.stride()) if size > 1]
    for i, (size_a, a) in enumerate(dims):
        # Index b/g along one dimension and a/g along the other are the same number of elements apart.
        if a == 0 or any(b == 0 or b // math.gcd(a, b) < size_a and a // math.gcd(a, b) < size_b for size_b, b in dims[i + 1 :]):
            raise ValueError(f"{rung}: {name} has shape {tuple(x.shape)} and strides {x.stride()}, elements on top of each other; "
                             "want memory of its own for every element")  # fmt: skip
