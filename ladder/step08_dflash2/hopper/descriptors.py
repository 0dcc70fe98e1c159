"""What the launches of all Hopper kernels share: TMA descriptors, what
they cannot describe, the ticket counter, and splits."""

import functools

import torch

HALVES = (torch.bfloat16, torch.float16)
_counters = {}


def place(x):
    """What the copy engine asks of a tensor: its shape, its strides,
    and whether it begins at a multiple of 16 bytes."""
    return x.shape, x.stride(), x.data_ptr() % 16 == 0


def refuse(call, page_size, **places):
    """Why no Hopper kernel takes ``call`` (see ``decision``), in words, or None.

    page_size: None without pages. places: ``place`` of each tensor that the copy engine reads or writes.
    """
    if call.dtype not in HALVES:
        return (
            f"dtype {str(call.dtype).removeprefix('torch.')}: the tensor cores of this kernel take bfloat16 and float16"
        )
    if call.zero_scale:
        return "a scale of zero"
    for name, (shape, strides, aligned) in places.items():
        if strides[-1] != 1 or not aligned or any(s % 8 or s <= 0 for s in strides[:-1]):
            return f"{name} has strides {strides}; the copy engine wants rows of neighbours and strides of 16 bytes"
        if 0 in shape:
            return f"{name} is empty"
    if page_size is not None and (page_size < 16 or page_size & (page_size - 1)):
        return f"page_size {page_size} is no power of two of at least 16"
    return None


@functools.cache
def _layout(rank, columns):
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=rank)


def describe(x, rows, columns, swizzled=None):
    """A TMA descriptor of boxes of (rows, columns) of x, (batch, heads, tokens, D) or (batch, rows, D).

    swizzled: columns that lie together in shared memory; None is all.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    descriptor = object.__new__(TensorDescriptor)  # its own checks repeat ours and cost more than the launch
    descriptor.__dict__.update(
        base=x, shape=list(x.shape), strides=list(x.stride()), block_shape=[*[1] * (x.ndim - 2), rows, columns],
        layout=_layout(x.ndim, swizzled or columns), padding="zero",
    )  # fmt: skip
    return descriptor


def describe_parts(x, rows, columns, more):
    """Descriptors of the first ``columns`` of a head and of the ``more`` behind them."""
    first = describe(x, rows, columns)
    return first, describe(x, rows, more) if more else first


def counter(device):
    """The ticket counter of this stream: zero between launches. A graph being captured gets one of its own."""
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    if (device, stream) not in _counters:
        _counters[device, stream] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[device, stream]


def most_splits(tiles, min_tiles):
    """Splits of a sequence of so many tiles when it is cut as finely
    as allowed: to the nearest, as the device does it."""
    return max(1, (2 * tiles + min_tiles) // (2 * min_tiles))


def contiguous(*tensors):
    """The tensors, copied where they are not contiguous."""
    return (x if x is None or x.is_contiguous() else x.contiguous() for x in tensors)
