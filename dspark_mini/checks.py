"""Checks of what a caller hands in: each returns it in its plain form, or raises a ValueError that names it."""

from __future__ import annotations

import numpy as np

__all__ = ["check_counts", "check_integer", "check_load", "check_number", "plain"]

INT64 = 2**63 - 1


def plain(x):
    """`x` as a numpy array; a tensor comes from its device."""
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)


def check_integer(value, name, low=None, high=INT64):
    """Return `value` as an int in low .. high, or raise ValueError; numpy integers are fine, bools are not."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    low = -INT64 - 1 if low is None else low
    if not low <= value <= high:
        wanted = f"at least {low}" if high == INT64 and value < low else f"in {low} .. {high}"
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return int(value)


def check_number(value, name, *, positive=False):
    """Return `value` as a finite float >= 0 (> 0 if `positive`), or raise ValueError."""
    wanted = "positive" if positive else "not negative"
    number = not isinstance(value, bool) and isinstance(value, (int, float, np.integer, np.floating))
    if not number or not (0 < value if positive else 0 <= value) or not value < np.inf:
        raise ValueError(f"{name} must be a finite number and {wanted}, got {value!r}")
    return float(value)


def check_load(load, name="load"):
    """Return `load` as a (layers, experts) float64 array, or raise ValueError that says what is wrong.

    A single layer may be given as (experts,). Loads are any non-negative finite numbers: token counts, rates
    or seconds, whose sum in a layer is finite too. Integers above 2**31 are fine; above 2**53 they are
    rounded as float64 rounds them.
    """
    try:
        array = plain(load)
    except ValueError as error:
        raise ValueError(f"{name} must be one rectangular (layers, experts) array: {error}") from None
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must hold numbers, got dtype {array.dtype}")
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"{name} must have shape (layers, experts) with at least one of each, got {array.shape}")
    array = array.astype(np.float64)
    for bad, wanted in ((~np.isfinite(array), "be finite"), (array < 0, "not be negative")):
        if bad.any():
            layer, expert = np.argwhere(bad)[0]
            raise ValueError(f"{name} must {wanted}, got {array[layer, expert]} at layer {layer}, expert {expert}")
    with np.errstate(over="ignore"):
        total = array.sum(axis=1)
    if not np.isfinite(total).all():
        layer = int(np.flatnonzero(~np.isfinite(total))[0])
        raise ValueError(
            f"{name} must have a finite sum in every layer, got one above float64's largest number in layer {layer}"
        )
    return array


def check_counts(counts, num_experts, name="counts"):
    """Return `counts` as an (experts,) int64 array of tokens per expert, or raise ValueError.

    Their sum must fit into int64 as well, so that no count of tokens later on can overflow.
    """
    try:
        array = plain(counts)
    except ValueError as error:
        raise ValueError(f"{name} must be one array of shape ({num_experts},): {error}") from None
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or (array != np.floor(array)).any():
            raise ValueError(f"{name} must be whole numbers of tokens, got non-integer or non-finite values")
    elif array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold whole numbers of tokens, got dtype {array.dtype}")
    if array.shape != (num_experts,):
        raise ValueError(f"{name} must have shape ({num_experts},), one entry per expert, got {array.shape}")
    if (array < 0).any():
        raise ValueError(f"{name} must not be negative, got {array.min()} at expert {int(array.argmin())}")
    if array.size and int(array.max()) > INT64 // array.size:  # else the sum cannot be too large
        total = sum(map(int, array.tolist()))
        if total > INT64:
            raise ValueError(f"{name} must add up to at most 2**63 - 1 tokens (int64), got {total}")
    return array.astype(np.int64)
