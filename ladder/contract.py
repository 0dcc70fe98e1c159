"""The argument contract that every rung shares: one place that turns bad input into an error that helps.

Every rung exports ``attention(q, k, v, *, causal=False, scale=None)`` in the layout of
``torch.nn.functional.scaled_dot_product_attention``; the rungs differ in what they compute with it, not in what they
accept. A rung calls ``check_attention`` first; what it cannot do, which ``ladder.rungs`` knows, raises
``NotImplementedError`` naming the rung that can.
"""

import functools
import inspect
import itertools
import math
import numbers

import torch
from torch.autograd import forward_ad

from .rungs import find

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INT32 = (torch.int32,)
INTEGERS = (torch.int32, torch.int64)


def outside_autocast(function):
    """Decorate a function so that it computes in the dtypes of its arguments, whatever ``torch.autocast`` says.

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

    The entry runs outside autocast. It raises, naming its rung (itself outside one) and the argument: ValueError for a
    nested or sparse tensor; NotImplementedError for a tensor whose gradients are recorded, for one with a forward-mode
    tangent, which would be lost, and for any inside ``torch.func`` transforms (vmap, jvp, grad).
    """
    return _guarded(function, True)


def graph_entry(function):
    """``kernel_entry`` for a function whose arguments may require gradients: its own code says what becomes of them."""
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
        raise NotImplementedError(
            f"{argument} requires gradients; forward only: use torch.no_grad(), or step04_gqa, which is differentiable"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise NotImplementedError(
            f"{argument} is inside a torch.func transform; want a plain tensor: kernels cannot be transformed"
        )
    if forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(f"{argument} has a forward-mode tangent; forward only: step04_gqa is differentiable")


def check_strided(argument: str, x: torch.Tensor) -> None:
    """ValueError, a message that begins with ``argument``, unless ``x`` has a shape and strides as dense tensors do."""
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise ValueError(f"{argument} is a {kind} tensor; want a dense one (pack sequences, with cu_seqlens)")


def expect(
    rung: str, name: str, x: torch.Tensor, shape: tuple, dtypes=FLOATS, device=None, *,
    owner: str = "q", optional: bool = False, contiguous: bool = False,
) -> None:  # fmt: skip
    """Check one tensor.

    Args:
        rung, name: of the caller and the argument, for the messages.
        x: what came.
        shape: a size for each dimension; a string names a dimension of any size. None for any shape.
        dtypes: a tuple of the dtypes that fit, or one dtype alone: that of ``owner``; None for any.
        device: that of ``owner``; None for any.
        owner: the argument whose dtype and device are wanted.
        optional: ``x`` may be None.
        contiguous: the elements must lie in order, without gaps.

    Raises:
        TypeError: ``x`` is no tensor. ValueError: it does not fit; the message says what came and what is wanted.
    """
    if x is None and optional:
        return
    if not isinstance(x, torch.Tensor):
        or_none = ", or None" if optional else ""
        raise TypeError(f"{rung}: {name} is a {type(x).__name__}; want a torch.Tensor {_layout(shape)}{or_none}")
    if x.layout is not torch.strided or x.is_nested:
        check_strided(f"{rung}: {name}", x)
    if shape is not None:
        sizes = x.shape
        fits = len(shape) == len(sizes)
        for wanted, size in zip(shape, sizes):  # a plain loop: every launch waits for these checks
            if wanted != size and not isinstance(wanted, str):
                fits = False
        if not fits:
            raise ValueError(f"{rung}: {name} has shape {tuple(sizes)}; want {_layout(shape)}")
    if isinstance(dtypes, torch.dtype):
        if x.dtype != dtypes:
            raise ValueError(f"{rung}: {name} has dtype {x.dtype}; want {dtypes}, the dtype of {owner}")
    elif dtypes is not None and x.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{rung}: {name} has dtype {x.dtype}; want {wanted}")
    if device is not None and x.device != device:
        raise ValueError(f"{rung}: {name} is on {x.device}; want {device}, the device of {owner}")
    if contiguous and not x.is_contiguous():
        raise ValueError(f"{rung}: {name} has strides {x.stride()}; want a contiguous tensor")


def _layout(shape):
    """A shape as messages show it: tuples of numbers and names, without quotes."""
    return "of any shape" if shape is None else f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"


def check_attention(
    rung: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    causal: bool, scale: float | None, packed: bool = False, any_heads: bool = False,
) -> float:  # fmt: skip
    """Check ``attention`` arguments and return the softmax scale to use.

    Args:
        rung: name of the calling rung; ``ladder.rungs`` knows what it computes.
        q: (B, Hq, Sq, D). k: (B, Hkv, Sk, D). v: (B, Hkv, Sk, Dv). One floating dtype, one device, any strides.
        causal, scale: as the caller of ``attention`` gave them.
        packed: q is (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv): sequences one after another.
        any_heads: grouped heads, unequal sizes and sizes above the rung's limit are no error.

    Returns:
        ``scale``, or 1/sqrt(D) when it is None.

    Raises:
        TypeError: an argument is no tensor, ``causal`` is no bool, ``scale`` is no real number.
        ValueError: a shape, dtype or device does not fit; the message names the argument, what came, what is wanted.
        NotImplementedError: valid attention that this rung does not compute; the message names the rung that does.
    """
    if packed:
        expect(rung, "q", q, ("total_q", "Hq", "D"))
        expect(rung, "k", k, ("total_k", "Hkv", q.shape[2]), q.dtype, q.device)
        expect(rung, "v", v, (*k.shape[:2], "Dv"), q.dtype, q.device)
    else:
        expect(rung, "q", q, ("B", "Hq", "Sq", "D"))
        expect(rung, "k", k, (q.shape[0], "Hkv", "Sk", q.shape[3]), q.dtype, q.device)
        expect(rung, "v", v, (*k.shape[:3], "Dv"), q.dtype, q.device)
    _check_heads(rung, "k and v", q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], any_heads)
    check_flag(rung, "causal", causal)
    return check_scale(rung, scale, q.shape[-1])


def _check_heads(rung, keys, num_heads, num_kv_heads, head_dim, head_dim_v, any_heads):
    """Refuse heads that make no attention, or none that ``rung`` computes; ``keys`` is what messages call K and V."""
    if not head_dim or not head_dim_v:
        raise ValueError(f"{rung}: {'v' if head_dim else 'q'} has head size 0; want at least 1")
    if num_heads != num_kv_heads and (num_kv_heads == 0 or num_heads % num_kv_heads):
        raise ValueError(f"{rung}: q has {num_heads} heads; want a multiple of the {num_kv_heads} heads of {keys}")
    lacking = None if any_heads else find(rung).lacks(num_heads, num_kv_heads, head_dim, head_dim_v)
    if lacking:
        raise NotImplementedError(f"{rung}: {lacking}")


def check_paged(rung, q, k_cache, v_cache, block_table, seq_lens, *, scale, packed=False, any_heads=False):
    """Check what every kernel over a paged cache is given, and return the softmax scale to use.

    On a CPU the lengths and the pages that they reach are checked too. On a GPU that would wait for the device, so the
    kernels themselves write NaN for a sequence whose length is negative or beyond its block table; pages are trusted.

    Args:
        q: (B, q_len, Hq, D), or (total_q, Hq, D) when ``packed``.
        k_cache: (num_pages, page_size, Hkv, D). v_cache: (num_pages, page_size, Hkv, Dv).
        block_table: (B, max_pages) int32. seq_lens: (B,) int32.
        scale, any_heads: as in ``check_attention``.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted. NotImplementedError: head size.
    """
    expect(rung, "q", q, ("total_q", "Hq", "D") if packed else ("B", "q_len", "Hq", "D"))
    expect(rung, "k_cache", k_cache, ("num_pages", "page_size", "Hkv", q.shape[-1]), q.dtype, q.device)
    expect(rung, "v_cache", v_cache, (*k_cache.shape[:3], "Dv"), q.dtype, q.device)
    num_pages, page_size, num_kv_heads, head_dim = shape = tuple(k_cache.shape)
    if not page_size or not num_kv_heads:
        raise ValueError(f"{rung}: k_cache has shape {shape}; want pages of at least one token and one head")
    _check_heads(rung, "the cache", q.shape[-2], num_kv_heads, head_dim, v_cache.shape[3], any_heads)
    expect(rung, "seq_lens", seq_lens, ("B" if packed else q.shape[0],), INT32, q.device, contiguous=True)
    expect(rung, "block_table", block_table, (seq_lens.shape[0], "max_pages"), INT32, q.device)
    if seq_lens.device.type == "cpu" and seq_lens.numel():
        _check_pages(rung, block_table, seq_lens, num_pages, page_size)
    return check_scale(rung, scale, head_dim)


def _check_pages(rung, block_table, seq_lens, num_pages, page_size):
    """Check lengths, and the entries of the block table that they reach: those behind may be anything."""
    capacity = block_table.shape[1] * page_size
    shortest, longest = int(seq_lens.min()), int(seq_lens.max())
    if shortest < 0 or longest > capacity:
        wrong = shortest if shortest < 0 else longest
        raise ValueError(f"{rung}: seq_lens holds {wrong}; want 0 .. {capacity}, what a row of block_table can address")
    live = torch.arange(block_table.shape[1])[None] * page_size < seq_lens[:, None]
    wrong = (live & ((block_table < 0) | (block_table >= num_pages))).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        pages = f"0 .. {num_pages - 1}" if num_pages else "no live entry: the cache has no page"
        raise ValueError(
            f"{rung}: block_table[{row}, {column}] is {int(block_table[row, column])}, and seq_lens[{row}] = "
            f"{int(seq_lens[row])} reaches it; want {pages}"
        )


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
    expect(rung, name, cu_seqlens, ("num_seqs + 1",), INTEGERS)
    if not cu_seqlens.numel():
        raise ValueError(f"{rung}: {name} has shape (0,); want (num_seqs + 1,)")
    return check_bounds(rung, name, cu_seqlens.tolist(), total, f"up to the {total} packed tokens")


def check_bounds(rung: str, name: str, bounds: list[int], total: int, wanted: str) -> list[int]:
    """``bounds`` that start at 0, never fall and end at ``total``; for others ValueError, which ends in ``wanted``."""
    if bounds[0] != 0 or bounds[-1] != total or any(a > b for a, b in itertools.pairwise(bounds)):
        shown = bounds if len(bounds) <= 8 else [*bounds[:4], "...", *bounds[-3:]]
        raise ValueError(f"{rung}: {name} is {shown}; want 0, then never falling, {wanted}")
    return bounds


def check_starts(
    rung: str, name: str, cu_seqlens: torch.Tensor, packed: torch.Tensor, num_seqs: int | None = None,
    owner: str = "cu_seqlens_q",
) -> int:  # fmt: skip
    """``check_cu_seqlens`` for a kernel over the ``packed`` tokens, which reads values on a CPU only.

    Returns the number of sequences; ``num_seqs`` is how many there must be, those of the argument ``owner``.
    """
    expect(rung, name, cu_seqlens, ("num_seqs + 1",), INTEGERS, packed.device, contiguous=True)
    found, total = cu_seqlens.numel() - 1, packed.shape[0]
    if packed.device.type == "cpu":
        check_cu_seqlens(rung, name, cu_seqlens, total)
    elif found < 0 or found == 0 < total:  # the kernels would look for a first sequence
        raise ValueError(f"{rung}: {name} has no sequence; want one at least for the {total} packed tokens")
    if num_seqs is not None and found != num_seqs:
        raise ValueError(f"{rung}: {name} has {found} sequences; want {num_seqs}, those of {owner}")
    return found


def check_out(
    rung: str, out: torch.Tensor | None, q: torch.Tensor, shape: tuple, *,
    owner: str = "q", one_token: bool = False, more_rows: bool = False,
) -> torch.Tensor:  # fmt: skip
    """A new tensor of ``shape`` with dtype and device of ``q``, whose name is ``owner``, or ``out`` after a check.

    one_token: the caller knows no dimension of tokens: (B, H, Dv) comes and (B, 1, H, Dv) returns.
    more_rows: ``out`` may be longer than ``shape`` says.
    """
    if out is None:
        return q.new_empty(shape)
    wanted = (shape[0], *shape[2:]) if one_token else (f"at least {shape[0]}", *shape[1:]) if more_rows else shape
    expect(rung, "out", out, wanted, q.dtype, q.device, owner=owner, optional=True)
    if more_rows and out.shape[0] < shape[0]:
        raise ValueError(f"{rung}: out has shape {tuple(out.shape)}; want {_layout(wanted)}")
    check_no_overlap(rung, "out", out)
    return out[:, None] if one_token else out


def check_integer(rung: str, name: str, value: int | None, least: int, optional: bool = False) -> int | None:
    """``value`` as an int; TypeError when it is no integer (a bool is none, numpy's are), ValueError below ``least``.

    optional: None is no error, and is what returns.
    """
    if value is None and optional:
        return None
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
    # With g the greatest common divisor of two strides a and b, index b/g along one and a/g along the other coincide.
    if any(stride == 0 for _, stride in dims) or any(
        b // math.gcd(a, b) < size_a and a // math.gcd(a, b) < size_b
        for (size_a, a), (size_b, b) in itertools.combinations(dims, 2)
    ):
        raise ValueError(
            f"{rung}: {name} has shape {tuple(x.shape)} and strides {x.stride()}, elements on top of each other; "
            "want memory of its own for every element"
        )
