"""Which expert copies to move when the load shifts, or when GPUs are lost.

A search by single steps, each the best of three kinds: swap two copies; turn a spare copy elsewhere into one of
the busiest GPU's experts; give up a spare copy there. Of these steps it keeps as many as pay.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .checks import check_integer, check_load, check_number
from .placement import (
    GOAL,
    Placement,
    check_placement,
    count_rows,
    gpu_slots,
    moves_between,
    plan_load,
    replicate,
)

__all__ = ["rebalance", "rebuild", "shrink"]

MIN_GAIN = 0.005  # a rebalancing that wins less than this part of the busiest GPU's load is noise


def rebalance(placement, load, *, max_moves=None, target=None, move_cost=0.0):
    """Adapt `placement` to a new `load` with few moved copies; returns (Placement, list of Move).

    load       (layers, experts), same shape as the placement's own
    max_moves  most copies to move per layer (None: no limit)
    target     stop in every layer that has reached this balancedness, 0 < target <= 1 (None: go on while it pays)
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
    load = _check_like(load, placement)
    if max_moves is not None:
        check_integer(max_moves, "max_moves, if not None,", low=0)
    if target is not None and check_number(target, "target, if not None,", positive=True) > 1:
        raise ValueError(f"target must lie in (0, 1], got {target!r}")
    check_number(move_cost, "move_cost")
    size = gpu_slots(placement.num_slots, placement.num_gpus)
    real = np.arange(size.max()) < size[:, None]  # (gpus, k)
    before = np.full((placement.num_layers, *real.shape), -1)
    before[:, real] = placement.slot_expert
    after = _stay(before, _descend(before, load, max_moves, target, move_cost))
    new = Placement(after[:, real], load, placement.num_gpus, placement.num_nodes)
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
    load = placement.load if load is None else _check_like(load, placement)
    num_experts, layers = placement.num_experts, placement.num_layers
    needed = -(-num_experts // len(alive))
    k = max(-(-placement.num_slots // placement.num_gpus), needed) if slots_per_gpu is None else int(slots_per_gpu)
    held = gpu_slots(placement.num_slots, placement.num_gpus)[alive]
    if k < max(needed, held.max()):
        raise ValueError(f"slots_per_gpu must be at least {max(needed, held.max())} for {len(alive)} GPUs, got {k}")
    kept = np.full((layers, len(alive), k), -1)
    for new, old in enumerate(alive):
        kept[:, new, : held[new]] = placement.slot_expert[:, placement.slot_gpu == old]
    return rebuild(kept, load)


def _check_like(load, placement):
    load = check_load(load)
    if load.shape != placement.load.shape:
        raise ValueError(f"load must have the placement's shape {placement.load.shape}, got {load.shape}")
    return load


def rebuild(held, load):
    """Complete what GPUs hold now, `held` (layers, gpus, slots) with -1 for a free slot, to a full plan for `load`.

    Returns (Placement, list of Move); slots in the moves are numbered in the new placement, before and after alike.
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
        else:  # take the hottest copy that some GPU with room does not hold yet
            order = np.argsort(-per_copy, kind="stable")
            expert = next((e for e in order if (free & ~(rows == e).any(axis=1)).any()), order[0])
        if free.any():
            able = free & ~(rows == expert).any(axis=1)
            gpu = np.where(able if able.any() else free, gpu_load, np.inf).argmin()
            rows[gpu, np.flatnonzero(rows[gpu] < 0)[0]] = expert
        else:  # replace the spare copy whose loss leaves its sisters lightest
            spare = np.where(copies[rows] > 1, load[rows] / np.maximum(copies[rows] - 1, 1), np.inf)
            gpu, slot = np.unravel_index(spare.argmin(), rows.shape)
            rows[gpu, slot] = expert


def _descend(before, load, max_moves, target, move_cost):
    """The search of `rebalance`; plans are (layers, gpus, k) with -1 for missing slots."""
    layers, num_gpus, _ = before.shape
    num_experts = load.shape[1]
    budget = np.inf if max_moves is None else max_moves
    plan, result = before.copy(), before.copy()
    mean = load.sum(axis=1) / num_gpus
    num_slots = int((before[0] >= 0).sum())
    useful = min(num_slots, num_gpus * num_experts)
    lowest = np.maximum(mean, (load / replicate(load, useful, num_gpus)).max(axis=1)) / GOAL
    goal = lowest if target is None else np.maximum(lowest, mean / target)
    first = plan_load(before, load).max(axis=1)
    best = MIN_GAIN * first  # the net gain of `result`; a gain below the noise is not taken
    at_home = np.zeros((layers, num_experts + 1, num_gpus), dtype=bool)
    at_home[np.arange(layers)[:, None, None], before, np.arange(num_gpus)[None, :, None]] = True  # -1 is the extra row

    def moved(trial):
        """(active layers,): how many copies of `trial` were not on their GPU before."""
        return (~at_home[act[:, None, None], trial, np.arange(num_gpus)[None, :, None]]).sum(axis=(1, 2))

    act = np.flatnonzero((mean > 0) & (first > goal))
    for _ in range(4 * num_slots):
        if len(act) == 0 or budget == 0:
            break
        trial = plan[act]
        step = _best_step(trial, load[act], goal[act], budget - moved(trial))
        plan[act] = trial
        peak = plan_load(trial, load[act]).max(axis=1)
        moves = moved(trial)
        net = first[act] - peak - move_cost * moves
        better = step & (net > best[act] * (1 + 1e-12)) & (moves <= budget)
        result[act[better]], best[act[better]] = trial[better], net[better]
        act = act[step & (peak > goal[act]) & (moves <= budget)]
    for layer in np.flatnonzero((result != before).any(axis=(1, 2))):
        limit = max(goal[layer], plan_load(result[layer][None], load[layer][None]).max())
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
            if plan_load(after[None], load[None]).max() <= limit:
                copies[old] += 1
                copies[new] -= 1
            else:
                after[gpu, slot] = new


class _Steps:
    """What every single step from `plan` (layers, gpus, k) would add to the potential, the summed load above the goal.

    The busiest GPU of a layer is its hot one. Arrays over slots are (layers, gpus, k); an extra expert of no load
    stands in missing slots. Each of the three kinds returns a table with inf where the step is not possible.
    """

    def __init__(self, plan, load, goal):
        layers, _, self.k = plan.shape
        self.num_experts = load.shape[1]
        self.row = np.arange(layers)
        layer = self.row[:, None, None]
        self.slots, self.real = np.where(plan < 0, self.num_experts, plan), plan >= 0
        copies = np.maximum(count_rows(self.slots.reshape(layers, -1), self.num_experts + 1), 1)
        wide = np.concatenate([load, np.zeros((layers, 1))], axis=1)
        self.weight = (wide / copies)[layer, self.slots]
        self.over = self.weight.sum(axis=2) - goal[:, None]  # (layers, gpus)
        self.potential = _above(self.over)
        self.hot = self.over.argmax(axis=1)

        # When an expert has one copy fewer, or one more, the load of every other GPU that holds it rises, or falls.
        fewer = (wide / copies / np.maximum(copies - 1, 1))[layer, self.slots]
        more = (wide / copies / (copies + 1))[layer, self.slots]
        rise = np.where(self.real, _above(self.over[..., None] + fewer) - self.potential[..., None], 0.0)
        fall = np.where(self.real, _above(self.over[..., None] - more) - self.potential[..., None], 0.0)
        flat = (self.slots + layer * (self.num_experts + 1)).ravel()
        rise_of, self.fall_of = (
            np.bincount(flat, change.ravel(), layers * (self.num_experts + 1)).reshape(layers, -1)
            for change in (rise, fall)
        )
        self.cost_of_loss = rise_of[layer, self.slots] - rise
        self.can_lose = self.real & (copies[layer, self.slots] > 1)
        self.arrival = wide / (copies + 1)  # load of a new copy

        self.hot_slots, self.hot_weight, self.hot_real, self.hot_over = (
            array[self.row, self.hot] for array in (self.slots, self.weight, self.real, self.over)
        )
        same = self.hot_slots[:, :, None, None] == self.slots[:, None, :, :]
        self.there = same.any(axis=3)  # (layers, k, gpus): the hot GPU's copy i has a sister on that GPU
        self.here = same.any(axis=1)  # (layers, gpus, k): that copy has a sister on the hot GPU

    def swaps(self):
        """(layers, k, gpus, k): swap copy i of the hot GPU with any copy elsewhere. Two moves."""
        shift = self.hot_weight[:, :, None, None] - self.weight[:, None, :, :]
        swap = _above(self.hot_over[:, None, None, None] - shift) + _above(self.over[:, None, :, None] + shift)
        swap -= _above(self.hot_over)[:, None, None, None] + self.potential[:, None, :, None]
        wrong = self.there[..., None] | self.here[:, None] | ~self.real[:, None] | ~self.hot_real[:, :, None, None]
        swap[wrong] = np.inf
        return swap

    def shares(self):
        """(layers, k, gpus, k): a spare copy elsewhere makes room for another copy of the hot GPU's i. One move."""
        new = self.arrival[self.row[:, None], self.hot_slots][:, :, None, None]
        share = _above(self.over[:, None, :, None] - self.weight[:, None] + new) - self.potential[:, None, :, None]
        share += self.cost_of_loss[:, None] + self.fall_of[self.row[:, None], self.hot_slots][:, :, None, None]
        share[self.there[..., None] | ~self.can_lose[:, None] | ~self.hot_real[:, :, None, None]] = np.inf
        return share

    def drops(self):
        """(layers, k, experts): the hot GPU gives up its spare copy i for any expert that it lacks. One move."""
        n, hot_over = self.num_experts, self.hot_over
        drop = _above(hot_over[:, None, None] - self.hot_weight[:, :, None] + self.arrival[:, None, :n])
        loss = self.cost_of_loss[self.row, self.hot][:, :, None]
        drop += self.fall_of[:, None, :n] - _above(hot_over)[:, None, None] + loss
        present = np.zeros((len(self.row), n + 1), dtype=bool)
        present[self.row[:, None], self.hot_slots] = True
        drop[present[:, None, :n] | ~self.can_lose[self.row, self.hot][:, :, None]] = np.inf
        return drop

    def apply(self, plan, layer, kind, index):
        """Make one step in one layer of `plan`, in place: `index` into the flat table of its kind."""
        hot = self.hot[layer]
        if kind == 2:
            i, expert = divmod(int(index), self.num_experts)
            plan[layer, hot, i] = expert
            return
        i, gpu, j = np.unravel_index(index, (self.k, plan.shape[1], self.k))
        mine, other = plan[layer, hot, i], plan[layer, gpu, j]
        plan[layer, gpu, j] = mine
        if kind == 0:
            plan[layer, hot, i] = other


def _above(x):
    return np.maximum(x, 0.0)


def _best_step(plan, load, goal, budget):
    """Make the best step in every layer, in place; returns (layers,) bool, False where none lowers the potential."""
    steps = _Steps(plan, load, goal)
    swap, share, drop = steps.swaps(), steps.shares(), steps.drops()
    swap[budget < 2], share[budget < 1], drop[budget < 1] = np.inf, np.inf, np.inf
    tables = [table.reshape(len(plan), -1) for table in (swap / 2, share, drop)]  # per move
    best = [table.argmin(axis=1) for table in tables]
    value = np.stack([table[steps.row, index] for table, index in zip(tables, best)])
    kind, total = value.argmin(axis=0), steps.potential.sum(axis=1)
    done = np.zeros(len(plan), dtype=bool)
    for layer in steps.row:
        # A swap gets a second chance: unlike the values of the other two kinds, its value is exact.
        for choice in dict.fromkeys((int(kind[layer]), 0)):
            if not value[choice, layer] < -1e-12 * (total[layer] + 1e-300):
                continue
            old = plan[layer].copy()
            steps.apply(plan, layer, choice, best[choice][layer])
            now = plan_load(plan[layer][None], load[layer][None])[0]
            if _above(now - goal[layer]).sum() < total[layer]:
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
