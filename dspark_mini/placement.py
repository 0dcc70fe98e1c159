"""Which expert copies live on which GPU, and which of them to move when the load shifts.

Every GPU has a few *slots*, one expert copy each. A hot expert gets several copies, each serving an equal
part of its load; then the copies are packed so that the busiest GPU does as little as possible above the
mean. Both halves are NP-hard to do perfectly, and cheap to do nearly perfectly:

1. *Replicate*: give the next spare slot to the expert whose copies are heaviest.
2. *Pack*: heaviest copy first, into the least-loaded GPU with a free slot.
3. *Swap*: pair heavy GPUs with light ones, and in every pair exchange the two copies whose difference in load
   is closest to half the difference between the GPUs. All pairs of all layers take one numpy step.
4. *Replicate again*, with other rounding, where a layer is still short of its bound, and keep the better
   plan.
5. *Explore*, in small problems that are still short: give one expert a copy less and another one more, in all
   ways, pack and swap each, and go on from the best.

Steps 1 and 2 are what DeepSeek's EPLB does (see `baselines.py`). The others only ever improve, so the plan is
never below it. Everything is vectorised over layers: 58 layers take tens of milliseconds, not a second.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from .checks import check_integer, check_load, check_number
from .load import balancedness

__all__ = ["Move", "Placement", "place", "rebalance", "shrink"]

GOAL = 0.9992  # of the bound: closer than this a plan is finished, routing noise is larger
RETRY = 0.9985  # of the bound: below this another way to replicate is worth its time
ROUNDS = 24  # of pairwise swaps for the first way, twice as many for the layers that need another
OFFSETS = (-0.5, -0.25, 1.0, -0.8)  # rounding rules tried in turn by step 4
SMALL = 128  # slots; up to here step 5 is quick, and with so few copies it is often needed
EXPLORE = 0.995  # of the bound: below this, step 5 is worth its time
TRIALS = 100  # most copy counts that one round of step 5 tries
MIN_GAIN = 0.005  # a rebalancing that wins less than this part of the busiest GPU's load is noise


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
        slots = np.array(self.slot_expert)  # a copy: the plan must not change under its owner
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
            raise ValueError(
                f"slot_expert must lie in 0 .. {load.shape[1] - 1}, got {slots.min()} .. {slots.max()}"
            )
        copies = _count_rows(slots, load.shape[1])
        if (copies == 0).any():
            layer, expert = np.argwhere(copies == 0)[0]
            raise ValueError(f"slot_expert must hold every expert, but layer {layer} lacks expert {expert}")
        share = (
            1.0 / np.take_along_axis(copies, slots, 1) if self.share is None else np.array(self.share, float)
        )
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
        return np.repeat(np.arange(self.num_gpus), _slots_per_gpu(self.num_slots, self.num_gpus))

    @property
    def gpu_load(self):
        """(layers, gpus) float64, the planned load of every GPU, in the units of `load`."""
        return self.gpu_load_of(self.load)

    def gpu_load_of(self, load, share=None):
        """GPU loads (layers, gpus) under another `load` (layers, experts), each expert split by `share`."""
        slot_load = np.take_along_axis(check_load(load), self.slot_expert, 1) * (
            self.share if share is None else share
        )
        return np.add.reduceat(slot_load, np.searchsorted(self.slot_gpu, np.arange(self.num_gpus)), axis=1)

    @property
    def balancedness(self):
        """(layers,) float64: mean GPU load / max GPU load, for the load the plan was made for. 1 is perfect."""
        return balancedness(self.gpu_load)

    @property
    def bound(self):
        """(layers,) float64: no placement of these experts in as many slots has a higher balancedness.

        The busiest GPU does at least the mean. It also does at least what the heaviest copy does, and the
        heaviest copy is lightest when spare slots go, one by one, to the expert whose copies are heaviest
        (exact for this min-max apportionment). Holds for equal and for unequal splits of an expert over its
        copies.
        """
        mean = self.load.sum(axis=1) / self.num_gpus
        slots = min(self.num_slots, self.num_gpus * self.num_experts)  # further ones repeat what a GPU holds
        heaviest = (self.load / _replicate(self.load, slots, self.num_gpus)).max(axis=1)
        return np.where(mean > 0, mean / np.maximum(np.maximum(mean, heaviest), 1e-300), 1.0)

    def slots_of(self, layer):
        """For every expert of `layer`, the tuple of its slots in ascending order (computed once per layer)."""
        if layer not in self._cache:
            table = [[] for _ in range(self.num_experts)]
            for slot, expert in enumerate(self.slot_expert[layer].tolist()):
                table[expert].append(slot)
            self._cache[layer] = tuple(map(tuple, table))
        return self._cache[layer]

    def digest(self):
        """A 63-bit fingerprint of (slot_expert, num_gpus, num_nodes): ranks compare it before they exchange
        data."""
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
        return cls(**data)


def place(load, *, num_gpus, num_slots, num_nodes=1, num_groups=1):
    """Choose how many copies each expert gets and which GPU holds each copy.

    load       (layers, experts): tokens, seconds, or any measure of work per expert; a layer with no load at
               all is planned as if every expert had the same
    num_gpus   GPUs that share the experts of every layer
    num_slots  expert slots over all GPUs, at least one per expert; need not divide by num_gpus (see
               `Placement`)
    num_nodes, num_groups
               group-limited routing (DeepSeek-V3): with more than one of each, and groups divisible by nodes,
               all the experts of a group stay on one node, and each node is planned by itself; otherwise
               nodes play no part

    Copies of one expert are on distinct GPUs as long as there are GPUs enough. `balancedness` is never below
    that of greedy replicate-and-pack. With equal splits the two promises can contradict each other (loads 3,
    2, 1 on two GPUs of two slots: the greedy plan wins by putting both copies of the first expert on one
    GPU); there the plan carries unequal shares, which `split_batch` also finds by itself. Raises ValueError
    for impossible arguments.
    """
    load = check_load(load)
    num_experts = load.shape[1]
    _check_positive(num_gpus=num_gpus, num_slots=num_slots, num_nodes=num_nodes, num_groups=num_groups)
    if num_slots < max(num_experts, num_gpus):
        raise ValueError(
            f"num_slots must be at least one per expert ({num_experts}) and per GPU ({num_gpus}), got {num_slots}"
        )
    if num_gpus % num_nodes:
        raise ValueError(f"num_nodes must divide num_gpus ({num_gpus}), got {num_nodes}")
    if num_experts % num_groups:
        raise ValueError(f"num_groups must divide the number of experts ({num_experts}), got {num_groups}")
    planned = np.where(load.sum(axis=1, keepdims=True) > 0, load, 1.0)
    # Scaling keeps tiny and huge loads away from the ends of float64; by a power of two, it changes no tie.
    planned = np.ldexp(planned, -np.frexp(planned.max(axis=1, keepdims=True))[1])
    if num_nodes > 1 and num_groups > 1 and num_groups % num_nodes == 0:
        if num_slots % num_nodes:
            raise ValueError(
                f"num_slots must divide by num_nodes ({num_nodes}) for group-limited routing, got {num_slots}"
            )
        slots, share = _place_by_group(planned, num_gpus, num_slots, num_nodes, num_groups)
    else:
        slots, share = _place_flat(planned, num_gpus, num_slots)
    return Placement(slots, load, num_gpus, num_nodes, share)


def check_placement(placement, name="placement"):
    """Raise ValueError unless `placement` is a `Placement`."""
    if not isinstance(placement, Placement):
        raise ValueError(f"{name} must be a Placement (of `place`, for example), got {placement!r}")


def _check_positive(**values):
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _slots_per_gpu(num_slots, num_gpus):
    return num_slots // num_gpus + (np.arange(num_gpus) < num_slots % num_gpus)


def _count_rows(index, size):
    """Bincount of every row of `index`: (rows, n) -> (rows, size)."""
    rows = len(index)
    flat = (index + np.arange(rows)[:, None] * size).ravel()
    return np.bincount(flat, minlength=rows * size).reshape(rows, size)


def _place_flat(load, num_gpus, num_slots):
    """Steps 1 to 5 for loads (layers, experts) > 0 in sum; returns slot_expert and share, both (layers,
    slots)."""
    num_experts = load.shape[1]
    if num_slots >= num_experts * num_gpus:
        return _everything_everywhere(*load.shape, num_gpus, num_slots)
    cap = num_gpus
    mean = load.sum(axis=1) / num_gpus
    copies = _replicate(load, num_slots, cap)
    heaviest = (load / copies).max(axis=1)
    goal = np.maximum(mean, heaviest) / GOAL  # a busiest GPU below this is good enough

    plan = _pack(load, copies, num_gpus)
    greedy = _replicate(load, num_slots, num_slots)
    start = plan.copy() if (greedy == copies).all() else _pack(load, greedy, num_gpus)
    baseline = _gpu_load(start, load).max(axis=1)  # what greedy replicate-and-pack reaches

    plan = _separate(plan, load, num_gpus)
    peak = _swap(plan, load, goal, ROUNDS)
    for offset in OFFSETS:
        short = np.flatnonzero(peak * RETRY > goal * GOAL)
        if len(short) == 0:
            break
        other = _pack(load[short], _replicate(load[short], num_slots, cap, offset), num_gpus)
        other = _separate(other, load[short], num_gpus)
        other_peak = _swap(other, load[short], goal[short], 2 * ROUNDS)
        better = other_peak < peak[short]
        plan[short[better]], peak[short[better]] = other[better], other_peak[better]

    if num_slots <= SMALL:
        for layer in np.flatnonzero(peak * EXPLORE > goal * GOAL):
            plan[layer], peak[layer] = _explore(plan[layer], peak[layer], load[layer], goal[layer])

    slots = plan[plan >= 0].reshape(len(load), num_slots)
    share = 1.0 / np.take_along_axis(_count_rows(slots, num_experts), slots, 1)
    for layer in np.flatnonzero(peak > baseline * (1 + 1e-12)):
        slots[layer], share[layer] = _unequal(start[layer], load[layer], num_gpus)
    return slots, share


def _everything_everywhere(layers, num_experts, num_gpus, num_slots):
    """Slots enough for every expert on every GPU; what is left over repeats experts and serves nothing."""
    row, share = [], []
    for size in _slots_per_gpu(num_slots, num_gpus).tolist():
        row += [i % num_experts for i in range(size)]
        share += [1.0 / num_gpus if i < num_experts else 0.0 for i in range(size)]
    return np.tile(row, (layers, 1)), np.tile(share, (layers, 1))


def _explore(plan, peak, load, goal):
    """Step 5 for one layer: `plan` (gpus, k) and its peak, replaced by better ones while there are."""
    num_gpus, num_experts = len(plan), len(load)
    copies = np.bincount(plan[plan >= 0], minlength=num_experts)
    tried = {copies.tobytes()}
    centre, centre_peak = copies, np.inf
    for _ in range(8):
        lighter = np.argsort(-load / copies, kind="stable")
        trials = []
        for more in lighter:
            for less in lighter[::-1]:
                new = centre.copy()
                new[more] += 1
                new[less] -= 1
                if more != less and new[less] >= 1 and new[more] <= num_gpus and new.tobytes() not in tried:
                    tried.add(new.tobytes())
                    trials.append(new)
        trials = np.array(trials[:TRIALS])
        if len(trials) == 0:
            break
        loads = np.tile(load, (len(trials), 1))
        plans = _separate(_pack(loads, trials, num_gpus), loads, num_gpus)
        peaks = _swap(plans, loads, np.full(len(trials), goal), ROUNDS)
        best = int(peaks.argmin())
        if peaks[best] >= centre_peak:
            break
        centre, centre_peak = trials[best], peaks[best]
        if centre_peak < peak:
            plan, peak = plans[best], peaks[best]
        if peak <= goal:
            break
    return plan, peak


def _place_by_group(load, num_gpus, num_slots, num_nodes, num_groups):
    """Whole groups to nodes first (as balanced as swaps make them), then each node as a small cluster of its
    own."""
    layers, num_experts = load.shape
    size = num_experts // num_groups
    group_load = load.reshape(layers, num_groups, size).sum(axis=2)
    greedy = _pack(group_load, np.ones((layers, num_groups), np.int64), num_nodes)
    swapped = greedy.copy()
    _swap(swapped, group_load, np.zeros(layers), ROUNDS)
    best = None
    for groups in (
        swapped,
        greedy,
    ):  # the greedy assignment last: its plan is never below the hierarchical baseline
        experts = (groups[..., None] * size + np.arange(size)).reshape(layers * num_nodes, -1)
        local = np.take_along_axis(np.repeat(load, num_nodes, axis=0), experts, 1)
        local = np.where(local.sum(axis=1, keepdims=True) > 0, local, 1e-12)
        slots, share = _place_flat(local, num_gpus // num_nodes, num_slots // num_nodes)
        slots = np.take_along_axis(experts, slots, 1).reshape(layers, num_slots)
        share = share.reshape(layers, num_slots)
        peak = _peak(slots, share, load, num_gpus)
        if best is None:
            best = slots, share, peak
        else:
            better = peak < best[2]
            best[0][better], best[1][better] = slots[better], share[better]
    return best[:2]


def _peak(slots, share, load, num_gpus):
    slot_load = np.take_along_axis(load, slots, 1) * share
    first = np.concatenate([[0], np.cumsum(_slots_per_gpu(slots.shape[1], num_gpus))[:-1]])
    return np.add.reduceat(slot_load, first, axis=1).max(axis=1)


def _replicate(load, num_slots, cap, offset=0.0):
    """Copies (layers, experts) that use all slots: each spare goes to the expert with the largest load /
    (copies + offset).

    Offset 0 makes the heaviest copy as light as any rule can. Negative offsets give the hottest experts fewer
    copies and the warm ones more: the heaviest copy grows, but fewer GPUs hold a copy so heavy that nothing
    fits beside it.
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


def _pack(load, copies, num_gpus):
    """Heaviest copy first into the least-loaded GPU with a free slot; ties by expert id, then by GPU id.

    Returns (layers, gpus, slots per GPU) expert ids, sorted by weight, -1 where a GPU has one slot less.
    """
    layers, num_experts = load.shape
    num_slots = int(copies[0].sum())
    rows = np.arange(layers)
    expert = np.repeat(np.tile(np.arange(num_experts), layers), copies.ravel()).reshape(layers, num_slots)
    weight = np.take_along_axis(load / copies, expert, 1)
    order = np.argsort(-weight, axis=1, kind="stable")
    expert, weight = np.take_along_axis(expert, order, 1), np.take_along_axis(weight, order, 1).T.copy()

    size = _slots_per_gpu(num_slots, num_gpus)
    free = np.tile(size, layers)
    gpu_load = np.zeros((layers, num_gpus))
    flat, base = gpu_load.ravel(), rows * num_gpus  # `flat` is a view: one index per layer updates it
    chosen = np.empty((num_slots, layers), np.int64)
    for i in range(num_slots):
        gpu = gpu_load.argmin(axis=1)
        chosen[i] = gpu
        at = base + gpu
        flat[at] += weight[i]
        left = free[at] - 1
        free[at] = left
        if not left.all():
            flat[at[left == 0]] = np.inf  # full
    order = np.argsort(chosen.T, axis=1, kind="stable")
    plan = np.full((layers, num_gpus, size.max()), -1)
    plan[:, np.arange(size.max()) < size[:, None]] = np.take_along_axis(expert, order, 1)
    return plan


def _weights(plan, load):
    """Load of every slot of `plan` (layers, gpus, k) under equal splits; 0 for the missing slots."""
    layers, num_experts = load.shape
    slots = np.where(plan < 0, num_experts, plan)  # an extra expert of no load stands for "no slot"
    copies = np.maximum(_count_rows(slots.reshape(layers, -1), num_experts + 1), 1)
    per_copy = np.concatenate([load, np.zeros((layers, 1))], axis=1) / copies
    return per_copy[np.arange(layers)[:, None, None], slots]


def _gpu_load(plan, load):
    return _weights(plan, load).sum(axis=2)


def _swap(plan, load, goal, rounds):
    """Pairwise exchanges, in place, until no GPU is above `goal` (layers,) or the rounds are used up; returns
    the peak.

    The heavier GPU of a pair gives copy i and takes copy j. That moves w_i - w_j of load; the pair is level
    when this is half its difference d, and the pair's maximum falls whenever 0 < w_i - w_j < 2 * d / 2. So a
    swap never hurts.
    """
    _, num_gpus, k = plan.shape
    weight = _weights(plan, load)
    gpu_load = weight.sum(axis=2)
    peak = gpu_load.max(axis=1)
    pairs = num_gpus // 2
    if pairs == 0:
        return peak
    missing = plan < 0
    for turn in range(rounds):
        # Eight turns pair everyone with eight partners; a layer still far off needs other copies, not more
        # swaps.
        act = np.flatnonzero((peak > goal) & ((turn < 8) | (peak < 1.03 * goal)))
        if len(act) == 0:
            break
        order = np.argsort(gpu_load[act], axis=1, kind="stable")
        # Heaviest with lightest first; then every heavy GPU meets a different light one each turn.
        heavy, light = order[:, ::-1][:, :pairs], np.roll(order[:, :pairs], turn, axis=1)
        row, column = np.nonzero(
            np.take_along_axis(gpu_load[act], heavy, 1) > goal[act, None]
        )  # the others are done
        layer, h, g = act[row], heavy[row, column], light[row, column]
        half = (gpu_load[layer, h] - gpu_load[layer, g]) / 2
        give, take = weight[layer, h] - half[:, None], weight[layer, g]
        give[missing[layer, h]], take[missing[layer, g]] = np.inf, -np.inf
        miss = np.abs(give[:, :, None] - take[:, None, :]).reshape(len(layer), k * k)
        best = miss.argmin(axis=1)
        i, j = best // k, best % k
        x, y = plan[layer, h, i], plan[layer, g, j]
        # The pair gets lighter at the top, and no copy joins another copy of its expert.
        fits = miss[np.arange(len(layer)), best] < half * (1 - 1e-9)
        fits &= ~((plan[layer, g] == x[:, None]).any(axis=1) | (plan[layer, h] == y[:, None]).any(axis=1))
        layer, h, g, i, j = layer[fits], h[fits], g[fits], i[fits], j[fits]
        plan[layer, h, i], plan[layer, g, j] = y[fits], x[fits]
        weight[layer, h, i], weight[layer, g, j] = weight[layer, g, j], weight[layer, h, i]
        gpu_load[layer, h], gpu_load[layer, g] = weight[layer, h].sum(axis=1), weight[layer, g].sum(axis=1)
        peak[act] = gpu_load[act].max(axis=1)
    return peak


def _separate(plan, load, num_gpus):
    """Swap away second copies of an expert on one GPU wherever a GPU without that expert can take one."""
    ordered = np.sort(plan, axis=2)
    twice = ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)).any(axis=(1, 2))
    weights = _weights(plan, load) if twice.any() else None
    for layer in np.flatnonzero(twice):
        rows, weight = plan[layer], weights[layer]
        for _ in range(4 * rows.size):
            pair = _next_duplicate(rows)
            if pair is None:
                break
            gpu, slot = pair
            expert = rows[gpu, slot]
            gpu_load = weight.sum(axis=1)
            # Candidates: any copy, new to this GPU, on a GPU that lacks the expert.
            new = (rows >= 0) & ~np.isin(rows, rows[gpu]) & ~(rows == expert).any(axis=1)[:, None]
            if not new.any():
                break
            delta = weight[gpu, slot] - weight
            result = np.where(new, np.maximum(gpu_load[gpu] - delta, gpu_load[:, None] + delta), np.inf)
            other, j = np.unravel_index(result.argmin(), result.shape)
            rows[gpu, slot], rows[other, j] = rows[other, j], expert
            weight[gpu, slot], weight[other, j] = weight[other, j], weight[gpu, slot]
        if _next_duplicate(rows) is not None:
            plan[layer] = _distinct(rows, load[layer])
    return plan


def _distinct(rows, load):
    """The copies of `rows` (gpus, k) dealt anew, so that no GPU gets two of one expert, wherever that can be
    done at all.

    Most copies first, each expert to the GPUs with the most free slots (Havel and Hakimi's rule, which never
    gets stuck); among those with equally many, to the least loaded.
    """
    copies = np.bincount(rows[rows >= 0], minlength=len(load))
    free = (rows >= 0).sum(axis=1)
    gpu_load = np.zeros(len(rows))
    dealt = [[] for _ in rows]
    for expert in np.lexsort((np.arange(len(load)), -load / np.maximum(copies, 1), -copies)).tolist():
        for gpu in np.lexsort((np.arange(len(rows)), gpu_load, -free))[: copies[expert]].tolist():
            dealt[gpu].append(expert)
            free[gpu] -= 1
            gpu_load[gpu] += load[expert] / copies[expert]
    return np.array([row + [-1] * (rows.shape[1] - len(row)) for row in dealt])


def _next_duplicate(rows):
    """(gpu, slot) of the first copy that shares its GPU with another copy of its expert, while a GPU lacks
    that expert."""
    before = np.tri(rows.shape[1], k=-1, dtype=bool)
    again = ((rows[:, :, None] == rows[:, None, :]) & before).any(axis=2) & (rows >= 0)
    for gpu, slot in np.argwhere(again):
        if not (rows == rows[gpu, slot]).any(axis=1).all():
            return gpu, slot
    return None


def _unequal(plan, load, num_gpus):
    """A plan of one layer with distinct copies and unequal shares, no worse than `plan` (gpus, k) with
    duplicates.

    Two copies on one GPU become one copy with both shares; the slot that falls free takes another expert's
    copy with share 0. The GPU loads have not changed, and now that shares may differ, water-filling can only
    lower the peak.
    """
    num_experts = len(load)
    copies = np.bincount(plan[plan >= 0], minlength=num_experts)
    slots, shares = [], []
    for row in plan:
        row = row[row >= 0].tolist()
        kept = {}
        for expert in row:
            kept[expert] = kept.get(expert, 0.0) + 1.0 / copies[expert]
        if len(kept) < len(row):
            spare = sorted(set(range(num_experts)) - set(kept), key=lambda e: (-load[e] / copies[e], e))
            kept.update(dict.fromkeys(spare[: len(row) - len(kept)], 0.0))
        slots.extend(kept)
        shares.extend(kept.values())
    slots, shares = np.array(slots), np.array(shares)
    gpu = np.repeat(np.arange(num_gpus), (plan >= 0).sum(axis=1))
    gpu_load = np.bincount(gpu, shares * load[slots], num_gpus)
    for _ in range(8):
        for expert in np.flatnonzero((np.bincount(slots, minlength=num_experts) > 1) & (load > 0)):
            at = np.flatnonzero(slots == expert)
            _, first = np.unique(gpu[at], return_index=True)
            rest = gpu_load.copy()
            np.subtract.at(rest, gpu[at], shares[at] * load[expert])
            shares[at] = 0.0
            at = at[first]
            level = np.sort(rest[gpu[at]])
            top = (load[expert] + np.cumsum(level)) / np.arange(1, len(at) + 1)
            height = top[np.flatnonzero(top > level)[-1]]
            shares[at] = np.maximum(height - rest[gpu[at]], 0.0) / load[expert]
            gpu_load = rest + np.bincount(gpu[at], shares[at] * load[expert], num_gpus)
    return slots, shares


def rebalance(placement, load, *, max_moves=None, target=None, move_cost=0.0):
    """Adapt `placement` to a new `load` with few moved copies; returns (Placement, list of Move).

    load       (layers, experts), same shape as the placement's own
    max_moves  most copies to move per layer (None: no limit)
    target     stop in every layer that has reached this balancedness, 0 < target <= 1 (None: go on while it
               pays)
    move_cost  what one moved copy costs, in the units of `load`: a layer's moves are made only if they lower
               the load of its busiest GPU by more than `move_cost` times their number

    Moves are found by steepest descent on the summed GPU load above the goal, per moved copy. One step swaps
    two copies (two moves), or lets a slot that holds a spare copy take another expert (one move). Every layer
    keeps the prefix of its steps with the largest net gain; gains below MIN_GAIN of the busiest GPU's load
    are routing noise and move nothing. A layer with no load keeps its plan. The moves of one call are
    simultaneous: every `source` is a slot of the old placement, on the target's node where possible. Loads
    are compared under equal splits, and the group limits of `place` are not kept.
    """
    check_placement(placement)
    load = check_load(load)
    if load.shape != placement.load.shape:
        raise ValueError(f"load must have the placement's shape {placement.load.shape}, got {load.shape}")
    if max_moves is not None:
        check_integer(max_moves, "max_moves, if not None,", low=0)
    if target is not None and check_number(target, "target, if not None,", positive=True) > 1:
        raise ValueError(f"target must lie in (0, 1], got {target!r}")
    check_number(move_cost, "move_cost")
    size = _slots_per_gpu(placement.num_slots, placement.num_gpus)
    before = np.full((placement.num_layers, placement.num_gpus, size.max()), -1)
    before[:, np.arange(size.max()) < size[:, None]] = placement.slot_expert
    after = _descend(before, load, max_moves, target, move_cost)
    new = Placement(
        _stay(before, after).reshape(placement.num_layers, -1)[:, _real(size)],
        load,
        placement.num_gpus,
        placement.num_nodes,
    )
    kept = (new.slot_expert == placement.slot_expert).all(axis=1)
    share = np.where(kept[:, None], placement.share, new.share)
    new = replace(new, share=share, _cache={})
    return new, moves_between(placement.slot_expert, new)


def shrink(placement, lost_gpus, load=None, *, slots_per_gpu=None):
    """Plan for the GPUs that are left when `lost_gpus` are gone; returns (Placement, list of Move).

    Survivors keep their order and become GPUs 0, 1, ...; each has `slots_per_gpu` slots (default: as many as
    now, or more where that is not enough to hold every expert), the first of which are its old ones. Experts
    that were lost with all their copies go first, hottest first, to the least-loaded GPU: into a free slot,
    or over a spare copy. Free slots that remain take more copies of the hottest experts, and a last descent
    evens out the load. Slots in the moves are numbered in the new placement; the result has one node
    (survivors per node may differ). Raises ValueError if no GPU is left or the slots cannot hold all experts.
    """
    check_placement(placement)
    lost = sorted({check_integer(g, "every entry of lost_gpus") for g in lost_gpus})
    if lost and not 0 <= lost[0] <= lost[-1] < placement.num_gpus:
        raise ValueError(f"lost_gpus must lie in 0 .. {placement.num_gpus - 1}, got {lost}")
    alive = [g for g in range(placement.num_gpus) if g not in lost]
    if not alive:
        raise ValueError("lost_gpus names every GPU; at least one must be left")
    load = placement.load if load is None else check_load(load)
    if load.shape != placement.load.shape:
        raise ValueError(f"load must have the placement's shape {placement.load.shape}, got {load.shape}")
    num_experts, layers = placement.num_experts, placement.num_layers
    needed = -(-num_experts // len(alive))
    k = (
        max(-(-placement.num_slots // placement.num_gpus), needed)
        if slots_per_gpu is None
        else int(slots_per_gpu)
    )
    held = _slots_per_gpu(placement.num_slots, placement.num_gpus)[alive]
    if k < max(needed, held.max()):
        raise ValueError(
            f"slots_per_gpu must be at least {max(needed, held.max())} for {len(alive)} GPUs, got {k}"
        )
    kept = np.full((layers, len(alive), k), -1)
    for new, old in enumerate(alive):
        kept[:, new, : held[new]] = placement.slot_expert[:, placement.slot_gpu == old]
    return rebuild(kept, load)


def rebuild(held, load):
    """Complete what GPUs hold now, `held` (layers, gpus, slots) with -1 for a free slot, to a full plan for
    `load`.

    Returns (Placement, list of Move); slots in the moves are numbered in the new placement, before and after
    alike.
    """
    layers, num_gpus, _ = held.shape
    plan = held.copy()
    for layer in range(layers):
        _fill(plan[layer], load[layer] if load[layer].any() else np.ones(load.shape[1]))
    plan = _stay(held, _descend(plan, load, None, 0.99, 0.0))
    new = Placement(plan.reshape(layers, -1), load, num_gpus)
    return new, moves_between(held.reshape(layers, -1), new)


def _fill(rows, load):
    """Put every missing expert, then spare copies, into `rows` (gpus, k) in place; -1 marks a free slot."""
    num_experts = len(load)
    for _ in range(num_experts + rows.size):
        copies = np.bincount(rows[rows >= 0], minlength=num_experts)
        missing = np.flatnonzero(copies == 0)
        free = (rows < 0).any(axis=1)
        if len(missing) == 0 and not free.any():
            return
        per_copy = load / np.maximum(copies, 1)
        gpu_load = np.where(rows >= 0, per_copy[rows], 0.0).sum(axis=1)
        if len(missing):
            expert = missing[load[missing].argmax()]
        else:  # the hottest copy that some GPU with room does not hold yet
            order = np.argsort(-per_copy, kind="stable")
            expert = next((e for e in order if (free & ~(rows == e).any(axis=1)).any()), order[0])
        if free.any():
            able = free & ~(rows == expert).any(axis=1)
            gpu = np.where(able if able.any() else free, gpu_load, np.inf).argmin()
            rows[gpu, np.flatnonzero(rows[gpu] < 0)[0]] = expert
        else:  # over the spare copy whose loss leaves its sisters lightest
            spare = np.where(copies[rows] > 1, load[rows] / np.maximum(copies[rows] - 1, 1), np.inf)
            gpu, slot = np.unravel_index(spare.argmin(), rows.shape)
            rows[gpu, slot] = expert


def _real(size):
    return (np.arange(size.max()) < size[:, None]).ravel()


def _descend(before, load, max_moves, target, move_cost):
    """The search of `rebalance`; plans are (layers, gpus, k) with -1 for missing slots."""
    layers, num_gpus, _ = before.shape
    num_experts = load.shape[1]
    budget = np.inf if max_moves is None else max_moves
    plan, result = before.copy(), before.copy()
    mean = load.sum(axis=1) / num_gpus
    num_slots = int((before[0] >= 0).sum())
    useful = min(num_slots, num_gpus * num_experts)
    lowest = np.maximum(mean, (load / _replicate(load, useful, num_gpus)).max(axis=1)) / GOAL
    goal = lowest if target is None else np.maximum(lowest, mean / target)
    first = _gpu_load(before, load).max(axis=1)
    best = MIN_GAIN * first  # net gain of `result`; nothing is taken below the noise
    at_home = np.zeros((layers, num_experts + 1, num_gpus), dtype=bool)
    at_home[np.arange(layers)[:, None, None], before, np.arange(num_gpus)[None, :, None]] = (
        True  # -1 is the extra row
    )
    act = np.flatnonzero((mean > 0) & (first > goal))
    for _ in range(4 * num_slots):
        if len(act) == 0 or budget == 0:
            break
        trial = plan[act]
        moved = ~at_home[act[:, None, None], trial, np.arange(num_gpus)[None, :, None]]
        step = _best_step(trial, load[act], goal[act], budget - moved.sum(axis=(1, 2)))
        plan[act] = trial
        peak = _gpu_load(trial, load[act]).max(axis=1)
        moved = (~at_home[act[:, None, None], trial, np.arange(num_gpus)[None, :, None]]).sum(axis=(1, 2))
        net = first[act] - peak - move_cost * moved
        better = step & (net > best[act] * (1 + 1e-12)) & (moved <= budget)
        result[act[better]], best[act[better]] = trial[better], net[better]
        act = act[step & (peak > goal[act]) & (moved <= budget)]
    for layer in np.flatnonzero((result != before).any(axis=(1, 2))):
        limit = max(goal[layer], _gpu_load(result[layer][None], load[layer][None]).max())
        _take_back(before[layer], result[layer], load[layer], limit * (1 + 1e-12))
    return result


def _take_back(before, after, load, limit):
    """Undo, in place, the moves of one layer that later ones made unnecessary: no GPU may end above `limit`."""
    after[:] = _stay(before[None], after[None])[0]
    copies = np.bincount(after[after >= 0], minlength=len(load))
    for gpu, slot in np.argwhere((before != after) & (before >= 0)):
        old, new = before[gpu, slot], after[gpu, slot]
        if copies[new] > 1 and old not in after[gpu]:
            after[gpu, slot] = old
            if _gpu_load(after[None], load[None]).max() <= limit:
                copies[old] += 1
                copies[new] -= 1
            else:
                after[gpu, slot] = new


def _best_step(plan, load, goal, budget):
    """Make the best step in every layer, in place; returns (layers,) bool, False where none lowers the
    potential."""
    layers, num_gpus, k = plan.shape
    num_experts = load.shape[1]
    row = np.arange(layers)
    above = lambda x: np.maximum(x, 0.0)
    slots = np.where(plan < 0, num_experts, plan)
    real = plan >= 0
    copies = np.maximum(_count_rows(slots.reshape(layers, -1), num_experts + 1), 1)
    wide = np.concatenate([load, np.zeros((layers, 1))], axis=1)
    weight = (wide / copies)[row[:, None, None], slots]
    over = weight.sum(axis=2) - goal[:, None]  # (layers, gpus)
    potential = above(over)
    total = potential.sum(axis=1)
    hot = over.argmax(axis=1)

    # What every other GPU with a copy gains or loses when an expert has one copy fewer, or one more.
    fewer = (wide / copies / np.maximum(copies - 1, 1))[row[:, None, None], slots]
    more = (wide / copies / (copies + 1))[row[:, None, None], slots]
    rise = np.where(real, above(over[..., None] + fewer) - potential[..., None], 0.0)
    fall = np.where(real, above(over[..., None] - more) - potential[..., None], 0.0)
    flat = (slots + row[:, None, None] * (num_experts + 1)).ravel()
    rise_of = np.bincount(flat, rise.ravel(), layers * (num_experts + 1)).reshape(layers, -1)
    fall_of = np.bincount(flat, fall.ravel(), layers * (num_experts + 1)).reshape(layers, -1)
    cost_of_loss = rise_of[row[:, None, None], slots] - rise
    can_lose = real & (copies[row[:, None, None], slots] > 1)
    arrival = wide / (copies + 1)  # load of a new copy

    hot_slots, hot_weight = slots[row, hot], weight[row, hot]  # (layers, k)
    hot_real = real[row, hot]
    same = hot_slots[:, :, None, None] == slots[:, None, :, :]
    there = same.any(axis=3)  # (layers, k, gpus): the hot GPU's copy i has a sister on that GPU
    here = same.any(axis=1)  # (layers, gpus, k): that copy has a sister on the hot GPU

    # Swap copy i of the hot GPU with any copy elsewhere: two moves.
    shift = hot_weight[:, :, None, None] - weight[:, None, :, :]
    hot_over = over[row, hot]
    swap = above(hot_over[:, None, None, None] - shift) + above(over[:, None, :, None] + shift)
    swap -= above(hot_over)[:, None, None, None] + potential[:, None, :, None]
    swap[there[..., None] | here[:, None] | ~real[:, None] | ~hot_real[:, :, None, None]] = np.inf
    swap[budget < 2] = np.inf

    # A spare copy elsewhere makes room for one more copy of the hot GPU's expert i: one move.
    new = arrival[row[:, None], hot_slots][:, :, None, None]
    share = above(over[:, None, :, None] - weight[:, None] + new) - potential[:, None, :, None]
    share += cost_of_loss[:, None] + fall_of[row[:, None], hot_slots][:, :, None, None]
    share[there[..., None] | ~can_lose[:, None] | ~hot_real[:, :, None, None]] = np.inf

    # The hot GPU gives up a spare copy for a copy of any expert it lacks: one move.
    drop = above(hot_over[:, None, None] - hot_weight[:, :, None] + arrival[:, None, :num_experts])
    drop += (
        fall_of[:, None, :num_experts] - above(hot_over)[:, None, None] + cost_of_loss[row, hot][:, :, None]
    )
    present = np.zeros((layers, num_experts + 1), dtype=bool)
    present[row[:, None], hot_slots] = True
    drop[present[:, None, :num_experts] | ~can_lose[row, hot][:, :, None]] = np.inf
    share[budget < 1], drop[budget < 1] = np.inf, np.inf

    swap, share, drop = (array.reshape(layers, -1) for array in (swap / 2, share, drop))
    best = [array.argmin(axis=1) for array in (swap, share, drop)]
    value = np.stack([array[row, index] for array, index in zip((swap, share, drop), best)])
    kind = value.argmin(axis=0)
    done = np.zeros(layers, dtype=bool)
    for layer in row:
        # Second chance for a swap: unlike the other two, its value is exact.
        for choice in dict.fromkeys((int(kind[layer]), 0)):
            if not value[choice, layer] < -1e-12 * (total[layer] + 1e-300):
                continue
            old = plan[layer].copy()
            if choice == 2:
                i, expert = divmod(int(best[2][layer]), num_experts)
                plan[layer, hot[layer], i] = expert
            else:
                i, gpu, j = np.unravel_index(best[choice][layer], (k, num_gpus, k))
                if choice == 0:
                    plan[layer, hot[layer], i], plan[layer, gpu, j] = (
                        plan[layer, gpu, j],
                        plan[layer, hot[layer], i],
                    )
                else:
                    plan[layer, gpu, j] = plan[layer, hot[layer], i]
            now = _gpu_load(plan[layer][None], load[layer][None])[0]
            if above(now - goal[layer]).sum() < total[layer]:
                done[layer] = True
                break
            plan[layer] = old
    return done


def _stay(before, after):
    """Reorder every GPU's slots so that an expert it already held stays in its slot."""
    result = after.copy()
    for layer, gpu in np.argwhere((before != after).any(axis=2)):
        old, new = before[layer, gpu].tolist(), after[layer, gpu].tolist()
        row = [None] * len(old)
        for slot, expert in enumerate(old):
            if expert in new:
                new.remove(expert)
                row[slot] = expert
        result[layer, gpu] = [new.pop(0) if expert is None else expert for expert in row]
    return result


def moves_between(held, new):
    """The copies that `new` (a Placement) adds to `held` (layers, slots; -1 for a free slot of the same
    layout).

    Each comes from a slot of `held`, on the target's node where possible, else the lowest; -1 if nobody holds
    it.
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
