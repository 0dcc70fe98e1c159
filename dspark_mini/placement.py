"""Which expert copies live on which GPU: what `place` makes and `rebalance` and `shrink` change.

Every GPU has a few *slots*, one expert copy each. What both sides of planning share is here too: copies counted,
the load of GPUs under a plan, the moves from one plan to the next.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .checks import check_load
from .load import balancedness

__all__ = ["Move", "Placement", "check_placement", "moves_between"]

GOAL = 0.9992  # of the bound: a plan this close to it is finished, since routing noise is larger


class Move(NamedTuple):
    """Copy the weights of `expert` of `layer` from slot `source` (before any move) into slot `target`.

    `source` is -1 where no GPU holds the expert any more (`shrink`): the weights must come from storage.
    """

    layer: int
    expert: int
    source: int
    target: int


@dataclass(frozen=True, eq=False)
class Placement:
    """Which expert every slot of every layer holds.

    slot_expert  (layers, slots) int64, slots ordered by GPU
    load         (layers, experts) float64, the load the plan was made for
    share        (layers, slots) float64, the part of its expert's load that each slot is planned to serve;
                 1 / copies everywhere, except where an unequal split was needed (see `place`)
    num_gpus     GPU g owns slots // num_gpus slots, and one more if g < slots % num_gpus
    num_nodes    GPUs are divided evenly over nodes, in order
    """

    slot_expert: np.ndarray
    load: np.ndarray
    num_gpus: int
    num_nodes: int = 1
    share: np.ndarray | None = None
    _cache: dict = field(default_factory=dict, repr=False)

    def __post_init__(self):
        load = check_load(self.load)
        slots = np.array(self.slot_expert)  # it is copied, so that nobody changes the plan from outside
        if slots.dtype.kind not in "iu" or slots.ndim != 2 or len(slots) != len(load):
            raise ValueError(
                f"slot_expert must be integer of shape ({len(load)}, slots), got {slots.dtype} {slots.shape}"
            )
        slots = slots.astype(np.int64)
        if self.num_gpus < 1 or slots.shape[1] < self.num_gpus:
            raise ValueError(f"num_gpus must lie in 1 .. {slots.shape[1]} (slots), got {self.num_gpus}")
        if self.num_nodes < 1 or self.num_gpus % self.num_nodes:
            raise ValueError(f"num_nodes must divide num_gpus ({self.num_gpus}), got {self.num_nodes}")
        if slots.min() < 0 or slots.max() >= load.shape[1]:
            raise ValueError(f"slot_expert must lie in 0 .. {load.shape[1] - 1}, got {slots.min()} .. {slots.max()}")
        copies = count_rows(slots, load.shape[1])
        if (copies == 0).any():
            layer, expert = np.argwhere(copies == 0)[0]
            raise ValueError(f"slot_expert must hold every expert, but layer {layer} lacks expert {expert}")
        share = 1.0 / np.take_along_axis(copies, slots, 1) if self.share is None else np.array(self.share, float)
        if share.shape != slots.shape:
            raise ValueError(f"share must have shape {slots.shape}, got {share.shape}")
        for array, name in ((slots, "slot_expert"), (load, "load"), (share, "share"), (copies, "_copies")):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    num_layers = property(lambda self: self.slot_expert.shape[0])
    num_slots = property(lambda self: self.slot_expert.shape[1])
    num_experts = property(lambda self: self.load.shape[1])
    copies = property(lambda self: self._copies, doc="(layers, experts) int64, copies of every expert")

    @property
    def slot_gpu(self):
        """(slots,) int64, the GPU of every slot."""
        return np.repeat(np.arange(self.num_gpus), gpu_slots(self.num_slots, self.num_gpus))

    @property
    def gpu_load(self):
        """(layers, gpus) float64, the planned load of every GPU, in the units of `load`."""
        return self.gpu_load_of(self.load)

    def gpu_load_of(self, load, share=None):
        """GPU loads (layers, gpus) under another `load` (layers, experts), each expert split by `share`."""
        slot_load = np.take_along_axis(check_load(load), self.slot_expert, 1) * (self.share if share is None else share)
        return np.add.reduceat(slot_load, np.searchsorted(self.slot_gpu, np.arange(self.num_gpus)), axis=1)

    @property
    def balancedness(self):
        """(layers,) float64: mean GPU load / max GPU load, for the load the plan was made for. 1 is perfect."""
        return balancedness(self.gpu_load)

    @property
    def bound(self):
        """(layers,) float64: no placement of these experts in as many slots has a higher balancedness.

        The busiest GPU does at least the mean. It also does at least what the heaviest copy does, and the heaviest copy
        is lightest when spare slots go, one by one, to the expert whose copies are heaviest (exact for this min-max
        apportionment). Holds for equal and for unequal splits of an expert over its copies.
        """
        mean = self.load.sum(axis=1) / self.num_gpus
        slots = min(self.num_slots, self.num_gpus * self.num_experts)  # a further slot would repeat what its GPU holds
        heaviest = (self.load / replicate(self.load, slots, self.num_gpus)).max(axis=1)
        return np.where(mean > 0, mean / np.maximum(np.maximum(mean, heaviest), 1e-300), 1.0)

    def slots_of(self, layer):
        """For every expert of `layer`, the tuple of its slots in ascending order (computed once per layer)."""
        if layer not in self._cache:
            table = [[] for _ in range(self.num_experts)]
            for slot, expert in enumerate(self.slot_expert[layer].tolist()):
                table[expert].append(slot)
            self._cache[layer] = tuple(map(tuple, table))
        return self._cache[layer]

    def gpus_of(self, layer):
        """For every expert of `layer`, the ascending list of GPUs that hold it, once each (computed once per layer)."""
        key = ("gpus", layer)
        if key not in self._cache:
            gpu_of = self.slot_gpu.tolist()
            self._cache[key] = [sorted({gpu_of[s] for s in slots}) for slots in self.slots_of(layer)]
        return self._cache[key]

    def digest(self):
        """A 63-bit fingerprint of (slot_expert, num_gpus, num_nodes): ranks compare it before they exchange data."""
        if "digest" not in self._cache:
            hashed = hashlib.sha256(self.slot_expert.astype("<i8").tobytes())
            hashed.update(repr((self.slot_expert.shape, self.num_gpus, self.num_nodes)).encode())
            self._cache["digest"] = int.from_bytes(hashed.digest()[:8], "little") >> 1
        return self._cache["digest"]

    def to_json(self):
        """A dict of plain lists and numbers, which `from_json` reads back."""
        return {
            "num_gpus": self.num_gpus,
            "num_nodes": self.num_nodes,
            "slot_expert": self.slot_expert.tolist(),
            "load": self.load.tolist(),
            "share": self.share.tolist(),
        }

    @classmethod
    def from_json(cls, data):
        """The placement that `to_json` wrote."""
        return cls(**data)


def check_placement(placement, name="placement"):
    """Raise ValueError unless `placement` is a `Placement`."""
    if not isinstance(placement, Placement):
        raise ValueError(f"{name} must be a Placement (of `place`, for example), got {placement!r}")


def gpu_slots(num_slots, num_gpus):
    """(gpus,) int64: how many slots each GPU has."""
    return num_slots // num_gpus + (np.arange(num_gpus) < num_slots % num_gpus)


def count_rows(index, size):
    """Bincount of every row of `index`: (rows, n) -> (rows, size)."""
    rows = len(index)
    flat = (index + np.arange(rows)[:, None] * size).ravel()
    return np.bincount(flat, minlength=rows * size).reshape(rows, size)


def replicate(load, num_slots, cap, offset=0.0):
    """Copies (layers, experts) that use all slots: each spare goes to the expert with the largest load /
    (copies + offset).

    Offset 0 makes the heaviest copy as light as any rule can. Negative offsets give the hottest experts fewer copies
    and the warm ones more: the heaviest copy grows, but fewer GPUs hold a copy so heavy that nothing fits beside it.
    """
    layers, num_experts = load.shape
    rows = np.arange(layers)
    copies = np.ones((layers, num_experts), np.int64)
    ratio = load / (1 + offset) if cap > 1 else np.full_like(load, -1.0)
    for _ in range(num_slots - num_experts):  # at most num_experts * (cap - 1) spares
        expert = ratio.argmax(axis=1)
        n = copies[rows, expert] + 1
        copies[rows, expert] = n
        ratio[rows, expert] = np.where(n < cap, load[rows, expert] / (n + offset), -1.0)
    return copies


def slot_weights(plan, load):
    """Load of every slot of `plan` (layers, gpus, k) under equal splits; 0 for the missing slots."""
    layers, num_experts = load.shape
    slots = np.where(plan < 0, num_experts, plan)  # an extra expert of no load stands for "no slot"
    copies = np.maximum(count_rows(slots.reshape(layers, -1), num_experts + 1), 1)
    per_copy = np.concatenate([load, np.zeros((layers, 1))], axis=1) / copies
    return per_copy[np.arange(layers)[:, None, None], slots]


def plan_load(plan, load):
    """(layers, gpus) float64: the load of every GPU of `plan` (layers, gpus, k) under equal splits."""
    return slot_weights(plan, load).sum(axis=2)


def moves_between(held, new):
    """The copies that `new` (a Placement) adds to `held` (layers, slots; -1 for a free slot of the same layout).

    Each comes from a slot of `held`, on the target's node where possible, else the lowest; -1 if nobody holds it.
    """
    node = new.slot_gpu // (new.num_gpus // new.num_nodes)
    moves = []
    for layer in np.flatnonzero((held != new.slot_expert).any(axis=1)):
        where = {}
        for slot, expert in enumerate(held[layer].tolist()):
            where.setdefault(expert, []).append(slot)
        for slot in np.flatnonzero(held[layer] != new.slot_expert[layer]):
            expert = int(new.slot_expert[layer, slot])
            source = min(where.get(expert, [-1]), key=lambda s: (s < 0 or node[s] != node[slot], s))
            moves.append(Move(int(layer), expert, int(source), int(slot)))
    return moves
