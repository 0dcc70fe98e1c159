"""Expert load: what counts as load, and how it is counted.

The load of an expert is the number of tokens routed to it. A token that is routed to `top_k` experts counts
once for each. Warm-up batches and padding tokens are nobody's work, so they are never counted.

Shapes used through the package: L layers, E experts per layer, G GPUs, S expert slots over all GPUs.
"""

from __future__ import annotations

import numpy as np

from .checks import check_counts, check_integer, check_number, plain

__all__ = ["LoadTracker", "balancedness", "count_tokens"]


def count_tokens(topk_ids, num_experts, mask=None):
    """Count the tokens each expert receives.

    `topk_ids` (tokens, top_k) integer expert ids, -1 where a position is padding; `mask` (tokens,) bool,
    False for tokens that are not to be counted (padding, warm-up). Returns (num_experts,) int64. Raises
    ValueError for ids outside -1 .. num_experts - 1 and for a mask of the wrong shape.
    """
    ids = plain(topk_ids)
    if ids.ndim != 2:
        raise ValueError(f"topk_ids must have shape (tokens, top_k), got {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"topk_ids must hold integer expert ids, got dtype {ids.dtype}")
    if mask is not None:
        mask = plain(mask)
        if mask.shape != ids.shape[:1] or mask.dtype != bool:
            raise ValueError(f"mask must be bool of shape ({ids.shape[0]},), got {mask.dtype} {mask.shape}")
        ids = ids[mask]
    ids = ids.astype(np.int64).ravel()
    if ids.size and (ids.min() < -1 or ids.max() >= num_experts):
        raise ValueError(f"topk_ids must lie in -1 .. {num_experts - 1}, got {ids.min()} .. {ids.max()}")
    return np.bincount(ids[ids >= 0], minlength=num_experts).astype(np.int64)


def balancedness(gpu_load):
    """Mean GPU load divided by the largest GPU load, over the last axis; 1 is perfect, and so is no load at all.

    Raises ValueError unless all loads are finite and not negative, and there is at least one GPU.
    """
    gpu_load = np.asarray(gpu_load, dtype=np.float64)
    if gpu_load.ndim == 0 or gpu_load.shape[-1] == 0:
        raise ValueError(f"gpu_load must have shape (..., gpus) with at least one GPU, got {gpu_load.shape}")
    good = np.isfinite(gpu_load) & (gpu_load >= 0)
    if not good.all():
        raise ValueError(f"gpu_load must be finite and not negative, got {gpu_load[~good][0]}")
    top = gpu_load.max(axis=-1, keepdims=True)
    power = -np.frexp(top)[1]  # scaling by a power of two rounds nothing, and sums of huge loads stay finite
    top = np.ldexp(np.where(top > 0, top, 1.0), power)[..., 0]
    return np.where(gpu_load.any(axis=-1), np.ldexp(gpu_load, power).mean(axis=-1) / top, 1.0)


class LoadTracker:
    """Running expert load of every layer: exact int64 totals, and a decayed estimate that follows the traffic.

    `half_life` is the number of counted tokens after which an observation weighs half (None: it never fades). Decay by
    tokens, not by steps, makes one large prefill weigh as much as the many decode steps that equal it.
    """

    def __init__(self, num_layers, num_experts, *, half_life=None, warmup_steps=0):
        shape = check_integer(num_layers, "num_layers", 1), check_integer(num_experts, "num_experts", 1)
        if half_life is not None:
            check_number(half_life, "half_life, if not None,", positive=True)
        self.counts = np.zeros(shape, dtype=np.int64)
        self._decayed = np.zeros(shape)
        self._half_life = half_life
        self._warmup_steps = warmup_steps
        self.steps = 0

    def update(self, counts):
        """Add one step's `counts` (layers, experts), whole numbers of tokens; the first `warmup_steps` are ignored."""
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
