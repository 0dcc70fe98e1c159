"""Choose a placement: how many copies every expert gets, and which GPU holds each.

Every GPU has a few *slots*, one expert copy each. A hot expert gets several copies, each serving an equal
part of its load; then the copies are packed so that the busiest GPU does as little as possible above the
mean. Both halves are NP-hard to do perfectly, and cheap to do nearly perfectly:

1. *Replicate*: give the next spare slot to the expert whose copies are heaviest.
2. *Pack*: heaviest copy first, into the least-loaded GPU with a free slot.
3. *Swap*: pair heavy GPUs with light ones, and in every pair exchange the two copies whose difference in load
   is closest to half the difference between the GPUs. All pairs of all layers take one numpy step.
4. *Replicate again*, with other rounding, where a layer is still short of its bound, and keep the better plan.
5. *Explore*, in small problems that are still short: give one expert a copy less and another one more, in all
   ways, pack and swap each, and go on from the best.

Steps 1 and 2 are what DeepSeek's EPLB does (see `baselines.py`). The others only ever improve, so the plan is
never below it. Everything is vectorised over layers: 58 layers take tens of milliseconds, not a second.
"""

from __future__ import annotations

import numpy as np

from .checks import check_integer, check_load
from .placement import GOAL, Placement, count_rows, gpu_slots, plan_load, replicate, slot_weights

__all__ = ["place"]

RETRY = 0.9985  # of the bound: below this, another way to replicate is worth its time
ROUNDS = 24  # rounds of pairwise swaps; a layer that needs another way to replicate gets twice as many
OFFSETS = (-0.5, -0.25, 1.0, -0.8)  # step 4 tries these rounding rules in turn
SMALL = 128  # slots: up to here step 5 is quick, and with so few copies it is often needed
EXPLORE = 0.995  # of the bound: below this, step 5 is worth its time
TRIALS = 100  # one round of step 5 tries at most this many copy counts


def place(load, *, num_gpus, num_slots, num_nodes=1, num_groups=1):
    """Choose how many copies each expert gets and which GPU holds each copy.

    load       (layers, experts): tokens, seconds, or any measure of work per expert; a layer with no load at
               all is planned as if every expert had the same
    num_gpus   GPUs that share the experts of every layer
    num_slots  expert slots over all GPUs, at least one per expert; need not divide by num_gpus (see `Placement`)
    num_nodes, num_groups
               group-limited routing (DeepSeek-V3): with more than one of each, and groups divisible by nodes, all the
               experts of a group stay on one node, and each node is planned by itself; otherwise nodes play no part

    Copies of one expert are on distinct GPUs as long as there are GPUs enough. `balancedness` is never below that of
    greedy replicate-and-pack. With equal splits the two promises can contradict each other (loads 3, 2, 1 on two GPUs
    of two slots: the greedy plan wins by putting both copies of the first expert on one GPU); there the plan carries
    unequal shares, which `split_batch` also finds by itself. Raises ValueError for impossible arguments.
    """
    load = check_load(load)
    num_experts = load.shape[1]
    sizes = {"num_gpus": num_gpus, "num_slots": num_slots, "num_nodes": num_nodes, "num_groups": num_groups}
    for name, value in sizes.items():
        check_integer(value, name, 1)
    if num_slots < max(num_experts, num_gpus):
        raise ValueError(
            f"num_slots must be at least one per expert ({num_experts}) and per GPU ({num_gpus}), got {num_slots}"
        )
    if num_gpus % num_nodes:
        raise ValueError(f"num_nodes must divide num_gpus ({num_gpus}), got {num_nodes}")
    if num_experts % num_groups:
        raise ValueError(f"num_groups must divide the number of experts ({num_experts}), got {num_groups}")
    planned = np.where(load.sum(axis=1, keepdims=True) > 0, load, 1.0)
    # Scaling keeps tiny and huge loads away from the ends of float64. By a power of two, it rounds nothing.
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


def _place_flat(load, num_gpus, num_slots):
    """Steps 1 to 5 for loads (layers, experts) > 0 in sum; returns slot_expert and share, both (layers, slots)."""
    num_experts = load.shape[1]
    if num_slots >= num_experts * num_gpus:
        return _everything_everywhere(*load.shape, num_gpus, num_slots)
    copies = replicate(load, num_slots, num_gpus)
    heaviest = (load / copies).max(axis=1)
    goal = np.maximum(load.sum(axis=1) / num_gpus, heaviest) / GOAL  # a busiest GPU below this is good enough

    plan = pack(load, copies, num_gpus)
    greedy = replicate(load, num_slots, num_slots)
    start = plan.copy() if (greedy == copies).all() else pack(load, greedy, num_gpus)
    baseline = plan_load(start, load).max(axis=1)  # what greedy replicate-and-pack reaches

    plan = _separate(plan, load)
    peak = _swap(plan, load, goal, ROUNDS)
    for offset in OFFSETS:
        short = np.flatnonzero(peak * RETRY > goal * GOAL)
        if len(short) == 0:
            break
        other = pack(load[short], replicate(load[short], num_slots, num_gpus, offset), num_gpus)
        other = _separate(other, load[short])
        other_peak = _swap(other, load[short], goal[short], 2 * ROUNDS)
        better = other_peak < peak[short]
        plan[short[better]], peak[short[better]] = other[better], other_peak[better]

    if num_slots <= SMALL:
        for layer in np.flatnonzero(peak * EXPLORE > goal * GOAL):
            plan[layer], peak[layer] = _explore(plan[layer], peak[layer], load[layer], goal[layer])

    slots = plan[plan >= 0].reshape(len(load), num_slots)
    share = 1.0 / np.take_along_axis(count_rows(slots, num_experts), slots, 1)
    for layer in np.flatnonzero(peak > baseline * (1 + 1e-12)):
        slots[layer], share[layer] = _unequal(start[layer], load[layer], num_gpus)
    return slots, share


def _everything_everywhere(layers, num_experts, num_gpus, num_slots):
    """Slots enough for every expert on every GPU; what is left over repeats experts and serves nothing."""
    row, share = [], []
    for size in gpu_slots(num_slots, num_gpus).tolist():
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
        plans = _separate(pack(loads, trials, num_gpus), loads)
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
    """Whole groups to nodes first (as balanced as swaps make them), then each node as a small cluster of its own."""
    layers, num_experts = load.shape
    size = num_experts // num_groups
    group_load = load.reshape(layers, num_groups, size).sum(axis=2)
    greedy = pack(group_load, np.ones((layers, num_groups), np.int64), num_nodes)
    swapped = greedy.copy()
    _swap(swapped, group_load, np.zeros(layers), ROUNDS)
    found = []
    for groups in (swapped, greedy):  # a plan on the greedy one is never below the baseline
        experts = (groups[..., None] * size + np.arange(size)).reshape(layers * num_nodes, -1)
        local = np.take_along_axis(np.repeat(load, num_nodes, axis=0), experts, 1)
        local = np.where(local.sum(axis=1, keepdims=True) > 0, local, 1e-12)
        slots, share = _place_flat(local, num_gpus // num_nodes, num_slots // num_nodes)
        slots = np.take_along_axis(experts, slots, 1).reshape(layers, num_slots)
        share = share.reshape(layers, num_slots)
        found.append((slots, share, _peak(slots, share, load, num_gpus)[:, None]))
    better = found[1][2] < found[0][2]
    return tuple(np.where(better, found[1][i], found[0][i]) for i in (0, 1))


def _peak(slots, share, load, num_gpus):
    slot_load = np.take_along_axis(load, slots, 1) * share
    first = np.concatenate([[0], np.cumsum(gpu_slots(slots.shape[1], num_gpus))[:-1]])
    return np.add.reduceat(slot_load, first, axis=1).max(axis=1)


def pack(load, copies, num_gpus):
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

    size = gpu_slots(num_slots, num_gpus)
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
            flat[at[left == 0]] = np.inf  # this GPU is full
    order = np.argsort(chosen.T, axis=1, kind="stable")
    plan = np.full((layers, num_gpus, size.max()), -1)
    plan[:, np.arange(size.max()) < size[:, None]] = np.take_along_axis(expert, order, 1)
    return plan


def _swap(plan, load, goal, rounds):
    """Pairwise exchanges, in place, until no GPU is above `goal` (layers,) or the rounds are used up; returns the peak.

    The heavier GPU of a pair gives copy i and takes copy j. That moves w_i - w_j of load; the pair is level when this
    is half its difference d, and the pair's maximum falls whenever 0 < w_i - w_j < 2 * d / 2. So a swap never hurts.
    """
    _, num_gpus, k = plan.shape
    weight = slot_weights(plan, load)
    gpu_load = weight.sum(axis=2)
    peak = gpu_load.max(axis=1)
    pairs = num_gpus // 2
    if pairs == 0:
        return peak
    missing = plan < 0
    for turn in range(rounds):
        # After eight turns every GPU met eight partners. A layer that is still far off needs other copies.
        act = np.flatnonzero((peak > goal) & ((turn < 8) | (peak < 1.03 * goal)))
        if len(act) == 0:
            break
        order = np.argsort(gpu_load[act], axis=1, kind="stable")
        # The heaviest GPU meets the lightest first; in each turn every heavy GPU meets another light one.
        heavy, light = order[:, ::-1][:, :pairs], np.roll(order[:, :pairs], turn, axis=1)
        row, column = np.nonzero(np.take_along_axis(gpu_load[act], heavy, 1) > goal[act, None])  # the others are done
        layer, h, g = act[row], heavy[row, column], light[row, column]
        half = (gpu_load[layer, h] - gpu_load[layer, g]) / 2
        give, take = weight[layer, h] - half[:, None], weight[layer, g]
        give[missing[layer, h]], take[missing[layer, g]] = np.inf, -np.inf
        miss = np.abs(give[:, :, None] - take[:, None, :]).reshape(len(layer), k * k)
        best = miss.argmin(axis=1)
        i, j = best // k, best % k
        x, y = plan[layer, h, i], plan[layer, g, j]
        # A swap must lower the busier GPU of the pair, and must not put two copies of an expert on one GPU.
        fits = miss[np.arange(len(layer)), best] < half * (1 - 1e-9)
        fits &= ~((plan[layer, g] == x[:, None]).any(axis=1) | (plan[layer, h] == y[:, None]).any(axis=1))
        layer, h, g, i, j = layer[fits], h[fits], g[fits], i[fits], j[fits]
        plan[layer, h, i], plan[layer, g, j] = y[fits], x[fits]
        weight[layer, h, i], weight[layer, g, j] = weight[layer, g, j], weight[layer, h, i]
        gpu_load[layer, h], gpu_load[layer, g] = weight[layer, h].sum(axis=1), weight[layer, g].sum(axis=1)
        peak[act] = gpu_load[act].max(axis=1)
    return peak


def _separate(plan, load):
    """Swap away second copies of an expert on one GPU wherever a GPU without that expert can take one."""
    ordered = np.sort(plan, axis=2)
    twice = ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)).any(axis=(1, 2))
    weights = slot_weights(plan, load) if twice.any() else None
    for layer in np.flatnonzero(twice):
        rows, weight = plan[layer], weights[layer]
        for _ in range(4 * rows.size):
            pair = _next_duplicate(rows)
            if pair is None:
                break
            gpu, slot = pair
            expert = rows[gpu, slot]
            gpu_load = weight.sum(axis=1)
            # A candidate is a copy of an expert that this GPU lacks, on a GPU that lacks this expert.
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
    """(gpu, slot) of the first copy that shares its GPU with another
    copy of its expert, while a GPU lacks that expert."""
    before = np.tri(rows.shape[1], k=-1, dtype=bool)
    again = ((rows[:, :, None] == rows[:, None, :]) & before).any(axis=2) & (rows >= 0)
    for gpu, slot in np.argwhere(again):
        if not (rows == rows[gpu, slot]).any(axis=1).all():
            return gpu, slot
    return None


def _unequal(plan, load, num_gpus):
    """A plan of one layer with distinct copies and unequal shares, no worse than `plan` (gpus, k) with duplicates.

    Two copies on one GPU become one copy with both shares; the slot that falls free takes another expert's copy with
    share 0. The GPU loads have not changed, and now that shares may differ, water-filling can only lower the peak.
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
