"""What the launches of all Hopper kernels share: TMA descriptors, the ticket counter, how finely keys are split."""

import functools

import torch


@functools.cache
def _layout(rank, columns):
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=rank)


def _describe(x, rows, columns):
    """A TMA descriptor of boxes of (rows, columns) of a (batch, heads, tokens, D) view that ``supports_prefill``."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    descriptor = object.__new__(TensorDescriptor)  # its own checks repeat ours and cost more than the launch
    descriptor.__dict__.update(
        base=x, shape=list(x.shape), strides=list(x.stride()), block_shape=[1, 1, rows, columns], layout=_layout(4, columns), padding="zero"
    )
    return descriptor


def _describe_parts(x, rows, columns, more):
    """Descriptors of the first ``columns`` of a head and of the ``more`` behind them."""
    first = _describe(x, rows, columns)
    return first, _describe(x, rows, more) if more else first


@functools.cache
def _processors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


_counters = {}


def _counter(device):
    """The ticket counter of this stream: zero between launches. A graph being captured gets one of its own."""
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    if (device, stream) not in _counters:
        _counters[device, stream] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[device, stream]


def _describe_rows(x, rows, columns):
    """A TMA descriptor of boxes of (rows, columns) of a (batch, rows, D) view."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(
        base=x, shape=list(x.shape), strides=list(x.stride()), block_shape=[1, rows, columns], layout=_layout(3, 64), padding="zero"
    )
    return descriptor


def most_splits(tiles, min_tiles):
    """Splits of a sequence of so many tiles when cut as finely as allowed: to the nearest, as the device does it."""
    return max(1, (2 * tiles + min_tiles) // (2 * min_tiles))
