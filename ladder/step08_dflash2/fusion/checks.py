"""What the fused functions check before anything runs; the messages name the argument, what came and what is wanted."""

import math
import numbers

from ladder import contract
from ladder.contract import FLOATS, INTEGERS, check_flag, check_no_overlap
from ladder.step07_dflash1 import DecodeWorkspace

from ..dispatch import RUNG

MAX_HIDDEN = 32768  # columns of a row that the norm holds in registers
MAX_EXPERTS = 1024


def expect(name, x, shape, dtypes, device=None, **keys):
    """``contract.expect`` of an argument of the fused functions, whose dtypes and devices are those of x."""
    contract.expect(RUNG, name, x, shape, dtypes, device, owner="x", **keys)


def check_cache(name, cache):
    if cache.shape[1] == 0:
        raise ValueError(f"{RUNG}: {name} has shape {tuple(cache.shape)}, pages of no tokens; want at least 1")
    check_no_overlap(RUNG, name, cache)


def check_rotation(cos, sin, positions, tokens, columns, what, device, *, whole=False):
    expect("cos", cos, ("max_positions", "rot_dim / 2"), FLOATS, device, contiguous=True)
    expect("sin", sin, tuple(cos.shape), (cos.dtype,), device, contiguous=True)
    if (2 * cos.shape[1] != columns) if whole else not 0 < 2 * cos.shape[1] <= columns:
        wanted = f"{columns // 2}" if whole else f"1 to {columns // 2}"
        raise ValueError(
            f"{RUNG}: cos has {cos.shape[1]} columns; want {wanted}, pairs of the {columns} columns of {what}"
        )
    expect("positions", positions, (tokens,), INTEGERS, device, contiguous=True)


def check_values(cos, positions, slots, num_slots):
    """Positions and slots within bounds, on a CPU only: on a GPU reading them would wait for it."""
    if positions.device.type != "cpu" or positions.numel() == 0:
        return
    low, high = (int(n) for n in positions.aminmax())
    if low < 0 or high >= cos.shape[0]:
        raise ValueError(
            f"{RUNG}: positions holds {low if low < 0 else high}; want 0 .. {cos.shape[0] - 1}, the rows of cos"
        )
    if int(slots.max()) >= num_slots:
        raise ValueError(
            f"{RUNG}: slot_mapping holds {int(slots.max())}; want at most {num_slots - 1}, the last slot of the cache"
        )


def check_options(workspace, device, *, fused, **flags):
    for name, value in flags.items():
        check_flag(RUNG, name, value)
    if fused is not None:
        check_flag(RUNG, "fused", fused)
    if workspace is not None and not isinstance(workspace, DecodeWorkspace):
        raise TypeError(
            f"{RUNG}: workspace is a {type(workspace).__name__}; want a DecodeWorkspace on {device}, or None"
        )
    if workspace is not None and workspace.partials.device != device:
        raise ValueError(f"{RUNG}: workspace is on {workspace.partials.device}; want a DecodeWorkspace on {device}")


def check_number(name, value, signed=False):
    """A finite float, not negative unless ``signed``."""
    wanted = "a finite number" if signed else "a finite number, 0 or more"
    if isinstance(value, bool) or not isinstance(value, (int, float)) and not isinstance(value, numbers.Real):
        raise TypeError(f"{RUNG}: {name} is {value!r}; want {wanted}")
    if not -math.inf < value < math.inf or (value < 0 and not signed):  # comparisons, which torch.compile can follow
        raise ValueError(f"{RUNG}: {name} is {value}; want {wanted}")
    return float(value)


def check_hidden(x):
    if x.shape[1] == 0:
        raise ValueError(f"{RUNG}: x has shape {tuple(x.shape)}, no columns; want at least 1")
    if x.shape[1] > MAX_HIDDEN:
        raise NotImplementedError(f"{RUNG}: x has {x.shape[1]} columns; the norm holds up to {MAX_HIDDEN}")


def output(name, out, x, shape):
    if out is None:
        return x.new_empty(shape)
    expect(name, out, shape, (x.dtype,), x.device, optional=True)
    check_no_overlap(RUNG, name, out)
    return out
