"""What the FlashAttention interface checks of its arguments; every error names the function and the argument."""

import torch

from ladder.contract import INTEGERS, check_cu_seqlens, check_integer, check_strided


def check_pairs(name, k, v, rotary_cos, rotary_sin):
    if (k is None) != (v is None):
        raise ValueError(f"{name}: {'k' if k is None else 'v'} is None; want k and v, or neither")
    if (rotary_cos is None) != (rotary_sin is None):
        missing = "rotary_cos" if rotary_cos is None else "rotary_sin"
        raise ValueError(f"{name}: {missing} is None; want both tables, or neither")
    if rotary_cos is not None and k is None:
        raise ValueError(f"{name}: rotary_cos is given without k and v; want new keys to rotate")


def check_queries(name, q, cu_seqlens_q, max_seqlen_q):
    """Return ``max_seqlen_q`` as an int, or None where q is (B, Sq, Hq, D)."""
    if cu_seqlens_q is None and q.ndim != 4 or cu_seqlens_q is not None and (q.ndim != 3 or max_seqlen_q is None):
        raise ValueError(
            f"{name}: q is {tuple(q.shape)}, max_seqlen_q {max_seqlen_q}; want (B, Sq, Hq, D), or (total_q, Hq, D) "
            f"with "
            "cu_seqlens_q and max_seqlen_q"
        )
    if cu_seqlens_q is not None:
        check_starts_of(name, "cu_seqlens_q", cu_seqlens_q, "B + 1", q, q.shape[0])
        max_seqlen_q = check_integer(name, "max_seqlen_q", max_seqlen_q, 0)
        check_bounded(name, "max_seqlen_q", max_seqlen_q, cu_seqlens_q)
    return max_seqlen_q


def check_new_keys(name, k, v, k_cache, v_cache, cu_seqlens_k_new, batch, q):
    new = (batch, "S_new") if cu_seqlens_k_new is None else ("total_new",)
    check_tensor(name, "k", k, *new, *k_cache.shape[2:], like=q)
    check_tensor(name, "v", v, *k.shape[:-1], v_cache.shape[3], like=q)
    if cu_seqlens_k_new is not None:
        check_starts_of(name, "cu_seqlens_k_new", cu_seqlens_k_new, batch + 1, q, k.shape[0])


def refuse(name, qv, q_descale, k_descale, v_descale, attention_chunk, q):
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


def check_tensor(name, argument, x, *shape, like=None, dtypes=None):
    """Check one tensor: names in ``shape`` stand for any size; ``like`` has its dtype and device."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: {argument} is a {type(x).__name__}; want a torch.Tensor {written(shape)}")
    check_strided(f"{name}: {argument}", x)
    if x.ndim != len(shape) or any(not isinstance(n, str) and n != m for n, m in zip(shape, x.shape)):
        raise ValueError(f"{name}: {argument} has shape {tuple(x.shape)}; want {written(shape)}")
    if like is not None and (x.dtype != like.dtype or x.device != like.device):
        raise ValueError(f"{name}: {argument} is {x.dtype} on {x.device}; want {like.dtype} on {like.device}, as q")
    if dtypes is not None and x.dtype not in dtypes:
        raise ValueError(
            f"{name}: {argument} has dtype {x.dtype}; want {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}"
        )


def written(shape):
    """A shape in words. Only for an error: torch.compile cannot write down a size that is a symbol."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def readable(x):
    """Whether values may be looked at: on a GPU that would wait for it, and a compiler has none yet."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_starts_of(name, argument, cu_seqlens, count, q, total=None):
    """Check cumulative lengths, their values on a CPU and with ``total`` only; returns the number of sequences."""
    check_tensor(name, argument, cu_seqlens, count, dtypes=INTEGERS)
    if cu_seqlens.device != q.device or not len(cu_seqlens):
        raise ValueError(
            f"{name}: {argument} is {tuple(cu_seqlens.shape)} on {cu_seqlens.device}; want (B + 1,) on {q.device}"
        )
    if total is not None and readable(q):
        check_cu_seqlens(name, argument, cu_seqlens, total)
    return len(cu_seqlens) - 1


def check_bounded(name, argument, most, cu_seqlens, used=None):
    """On a CPU only: ``most`` is an upper bound of the lengths. A window that reaches as far as it counts as none."""
    if most is None or not readable(cu_seqlens) or len(cu_seqlens) < 2:
        return
    longest = int((cu_seqlens.diff() if used is None else used).max())
    if longest > most:
        raise ValueError(f"{name}: {argument} is {most}; want at least {longest}, the longest sequence")


def check_used(name, argument, used, cu_seqlens, batch, q):
    """Check how many tokens of each slot count; on a CPU also that its slot has so many."""
    if used is None:
        return
    check_tensor(name, argument, used, batch, dtypes=INTEGERS)
    if used.device != q.device:
        raise ValueError(f"{name}: {argument} is on {used.device}; want {q.device}, the device of q")
    if readable(q) and bool(((used < 0) | (used > cu_seqlens.diff())).any()):
        raise ValueError(
            f"{name}: {argument} is {used.tolist()}; want 0 .. {cu_seqlens.diff().tolist()}, the slots of each sequence"
        )


def check_rotary(name, cos, sin, q):
    """Check the rotary tables, whose values are taken as they are."""
    check_tensor(name, "rotary_cos", cos, "positions", "rotary_dim / 2")
    check_tensor(name, "rotary_sin", sin, *cos.shape, like=cos)
    if not cos.is_floating_point() or cos.device != q.device or not 0 < 2 * cos.shape[1] <= q.shape[-1]:
        raise ValueError(f"{name}: rotary_cos is {tuple(cos.shape)} {cos.dtype} on {cos.device}; want floating point "
            f"on {q.device}, "
                         f"1 to {q.shape[-1] // 2} columns")  # fmt: skip


def one_sinks(name, learnable_sink, s_aux):
    """The sink logits under whichever name."""
    if learnable_sink is not None and s_aux is not None:
        raise ValueError(f"{name}: learnable_sink and s_aux are both given; want one of the two names")
    return s_aux if learnable_sink is None else learnable_sink


def lengths_of(name, argument, lengths, batch, device):
    """(B,) int32 from an int or a tensor."""
    if isinstance(lengths, int) and not isinstance(lengths, bool):
        return torch.full(
            (batch,), min(check_integer(name, argument, lengths, 0), 2**31 - 1), dtype=torch.int32, device=device
        )
    if not isinstance(lengths, torch.Tensor) or lengths.shape != (batch,) or lengths.dtype != torch.int32:
        came = (
            f"{tuple(lengths.shape)} {lengths.dtype}" if isinstance(lengths, torch.Tensor) else type(lengths).__name__
        )
        raise ValueError(f"{name}: {argument} is {came}; want an int or ({batch},) torch.int32")
    if lengths.device != device:
        raise ValueError(f"{name}: {argument} is on {lengths.device}; want {device}, the device of q")
    return lengths.contiguous()
