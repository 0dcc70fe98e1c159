"""Expert load: what counts as load, and how it is counted.

The load of an expert is the number of tokens routed to it. A token that is routed to `top_k` experts counts
once for each. Warm-up batches and padding tokens are nobody's work, so they are never counted.

Shapes used through the package: L layers, E experts per layer, G GPUs, S expert slots over all GPUs.
"""

from __future__ import annotations

import numpy as np

INT64 = 2**63 - 1

__all__ = ["LoadTracker", "balancedness", "check_counts", "check_load", "count_tokens"]


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
        array = np.asarray(load.detach().cpu() if hasattr(load, "detach") else load)
    except ValueError as error:
        raise ValueError(f"{name} must be one rectangular (layers, experts) array: {error}") from None
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must hold numbers, got dtype {array.dtype}")
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or array.size == 0:
        raise ValueError(
            f"{name} must have shape (layers, experts) with at least one of each, got {array.shape}"
        )
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        layer, expert = np.argwhere(~np.isfinite(array))[0]
        raise ValueError(
            f"{name} must be finite, got {array[layer, expert]} at layer {layer}, expert {expert}"
        )
    if (array < 0).any():
        layer, expert = np.argwhere(array < 0)[0]
        raise ValueError(
            f"{name} must not be negative, got {array[layer, expert]} at layer {layer}, expert {expert}"
        )
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
        array = np.asarray(counts.detach().cpu() if hasattr(counts, "detach") else counts)
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
    if array.size and int(array.max()) > INT64 // array.size:  # only then can the sum be too large
        total = sum(map(int, array.tolist()))
        if total > INT64:
            raise ValueError(f"{name} must add up to at most 2**63 - 1 tokens (int64), got {total}")
    return array.astype(np.int64)


def count_tokens(topk_ids, num_experts, mask=None):
    """Count the tokens each expert receives.

    `topk_ids` (tokens, top_k) integer expert ids, -1 where a position is padding; `mask` (tokens,) bool,
    False for tokens that are not to be counted (padding, warm-up). Returns (num_experts,) int64. Raises
    ValueError for ids outside -1 .. num_experts - 1 and for a mask of the wrong shape.
    """
    ids = np.asarray(topk_ids.detach().cpu() if hasattr(topk_ids, "detach") else topk_ids)
    if ids.ndim != 2:
        raise ValueError(f"topk_ids must have shape (tokens, top_k), got {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"topk_ids must hold integer expert ids, got dtype {ids.dtype}")
    if mask is not None:
        mask = np.asarray(mask.detach().cpu() if hasattr(mask, "detach") else mask)
        if mask.shape != ids.shape[:1] or mask.dtype != bool:
            raise ValueError(f"mask must be bool of shape ({ids.shape[0]},), got {mask.dtype} {mask.shape}")
        ids = ids[mask]
    ids = ids.astype(np.int64).ravel()
    if ids.size and (ids.min() < -1 or ids.max() >= num_experts):
        raise ValueError(f"topk_ids must lie in -1 .. {num_experts - 1}, got {ids.min()} .. {ids.max()}")
    return np.bincount(ids[ids >= 0], minlength=num_experts).astype(np.int64)


def balancedness(gpu_load):
    """Mean GPU load divided by the largest GPU load, over the last axis; 1 is perfect, and so is no load at
    all.

    Raises ValueError unless all loads are finite and not negative, and there is at least one GPU.
    """
    gpu_load = np.asarray(gpu_load, dtype=np.float64)
    if gpu_load.ndim == 0 or gpu_load.shape[-1] == 0:
        raise ValueError(f"gpu_load must have shape (..., gpus) with at least one GPU, got {gpu_load.shape}")
    good = np.isfinite(gpu_load) & (gpu_load >= 0)
    if not good.all():
        raise ValueError(f"gpu_load must be finite and not negative, got {gpu_load[~good][0]}")
    top = gpu_load.max(axis=-1, keepdims=True)
    power = -np.frexp(top)[1]  # a power of two rounds nothing, and sums of huge loads stay finite
    top = np.ldexp(np.where(top > 0, top, 1.0), power)[..., 0]
    return np.where(gpu_load.any(axis=-1), np.ldexp(gpu_load, power).mean(axis=-1) / top, 1.0)


class LoadTracker:
    """Running expert load of every layer: exact int64 totals, and a decayed estimate that follows the
    traffic.

    `half_life` is the number of counted tokens after which an observation weighs half (None: it never fades).
    Decay by tokens, not by steps, makes one large prefill weigh as much as the many decode steps that equal
    it.
    """

    def __init__(self, num_layers, num_experts, *, half_life=None, warmup_steps=0):
        if num_layers < 1 or num_experts < 1:
            raise ValueError(
                f"num_layers and num_experts must be positive, got {num_layers} and {num_experts}"
            )
        if half_life is not None and not half_life > 0:
            raise ValueError(f"half_life must be a positive number of tokens or None, got {half_life}")
        self.counts = np.zeros((num_layers, num_experts), dtype=np.int64)
        self._decayed = np.zeros((num_layers, num_experts))
        self._half_life = half_life
        self._warmup_steps = warmup_steps
        self.steps = 0

    def update(self, counts):
        """Add one step's `counts` (layers, experts), whole numbers of tokens; the first `warmup_steps` are
        ignored."""
        counts = np.asarray(counts)
        if counts.shape != self.counts.shape:
            raise ValueError(f"counts must have shape {self.counts.shape}, got {counts.shape}")
        counts = np.stack([check_counts(row, self.counts.shape[1]) for row in counts])
        self.steps += 1
        if self.steps <= self._warmup_steps:
            return
        self.counts += counts
        if self._half_life is not None:
            # Each layer sees every token, so the busiest layer tells how many routed tokens passed.
            self._decayed *= 0.5 ** (counts.sum(axis=1).max() / self._half_life)
        self._decayed += counts

    @property
    def load(self):
        """Decayed load (layers, experts) float64, ready for `place` and `rebalance`."""
        return self._decayed.copy()
