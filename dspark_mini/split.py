"""Which copy serves how many tokens of this batch.

A placement is made for the load of the last minutes; the next batch differs, and a small batch differs a lot. When an
expert has copies on several GPUs, its tokens may be divided between them in any proportion, so part of the difference
can be evened out at once, without moving a single weight. The best division is a small linear program:

    minimise the tokens of the busiest GPU, where every expert's tokens go to GPUs that hold a copy of it.

`split_batch` solves it exactly in whole tokens, in two steps.

*Water-filling.* One expert at a time, take its tokens back and pour them over its GPUs until those are level,
the lowest first. This never raises the maximum, and sweeps over all experts end near the optimum.

*Paths.* What is left is at most a few tokens, stuck because relief needs a chain: one token of expert a from
GPU 1 to GPU 2, and one of expert b on from GPU 2 to GPU 3. A breadth-first search from the busiest GPUs finds
such a chain, or proves that none exists: the GPUs it reached then form a set S whose tokens cannot leave, and
no division can be better than ceil(tokens bound to S / |S|). That certificate is what `split_bound` returns.

Everything is integer arithmetic on Python ints in a fixed order, so ranks that see the same counts agree to the token.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from .checks import check_counts, check_integer
from .placement import check_placement

__all__ = ["assign_sources", "balance", "gpu_tokens", "split_batch", "split_bound"]

SWEEPS = 8
EXACT_GPUS = 128  # with more GPUs a search for chains takes too long, and a token more matters less


def split_batch(counts, placement, layer):
    """Divide every expert's tokens over its copies so that the busiest GPU has as few tokens as possible.

    counts     (experts,) whole numbers, the tokens of this batch routed to each expert, over all ranks
    placement  a `Placement`; layer is the row of it to use

    Returns (slots,) int64: tokens each slot serves; they add up to `counts` exactly. Of two copies on one GPU
    the lower slot serves all. With up to EXACT_GPUS GPUs the maximum is optimal among all whole-token
    divisions; with more it is what water-filling reaches. It is never above the equal split's. Raises
    ValueError for counts that are negative, not whole, or of the wrong length, and for a layer out of range.
    """
    _, tokens, homes = balance(counts, placement, layer)
    result = np.zeros(placement.num_slots, dtype=np.int64)
    slots = placement.slots_of(layer)
    gpu_of = placement.slot_gpu.tolist()
    for expert, gpus in enumerate(homes):
        lowest = {}
        for slot in slots[expert]:
            lowest.setdefault(gpu_of[slot], slot)
        for gpu, n in zip(gpus, tokens[expert]):
            result[lowest[gpu]] = n
    return result


def split_bound(counts, placement, layer):
    """No division gives the busiest GPU fewer tokens than this; with its proof: returns (bound, gpus).

    `gpus` is a tuple of GPUs: the experts whose copies all lie in it bring ceil(tokens / len(gpus)) == bound
    tokens per GPU. It is checked here by counting those tokens anew, not taken from the solver's state. With
    up to EXACT_GPUS GPUs `split_batch` reaches the bound.
    """
    total, tokens, homes = balance(counts, placement, layer)
    counts = check_counts(counts, placement.num_experts).tolist()
    # Perhaps only one of several busiest GPUs is stuck, so the search starts from each by itself.
    busiest = [gpu for gpu, n in enumerate(total) if n == max(total)]
    best = (-1, ())
    for stuck in (*(_reach(total, tokens, homes, [gpu])[0] for gpu in busiest), set(range(len(total)))):
        inside = sum(n for n, gpus in zip(counts, homes) if set(gpus) <= stuck)
        best = max(best, (-(-inside // len(stuck)), tuple(sorted(stuck))), key=lambda b: b[0])
    return best


def gpu_tokens(slot_tokens, placement):
    """Sum tokens per slot (slots,) to tokens per GPU (gpus,) int64."""
    return np.bincount(placement.slot_gpu, np.asarray(slot_tokens), placement.num_gpus).astype(np.int64)


def assign_sources(rank_counts, slot_tokens, placement, layer):
    """Say how many tokens each rank sends to each slot, keeping tokens at home where the split allows it.

    rank_counts  (ranks, experts) whole numbers: tokens that rank r routes to expert e; rank r is GPU r
    slot_tokens  (slots,) from `split_batch` of the summed counts

    Returns (ranks, slots) int64 whose row sums per expert are `rank_counts` and whose column sums are
    `slot_tokens`. First every rank fills its own copy, then copies on its node, then the rest, always in rank
    and slot order. Raises ValueError where the two do not add up to the same.
    """
    need = np.array(rank_counts, dtype=np.int64)
    room = np.array(slot_tokens, dtype=np.int64)
    ranks = len(need)
    gpu_of = placement.slot_gpu
    per_node = placement.num_gpus // placement.num_nodes
    result = np.zeros((ranks, placement.num_slots), dtype=np.int64)
    totals = need.sum(axis=0)
    served = np.bincount(placement.slot_expert[layer], room, placement.num_experts).astype(np.int64)
    if (totals != served).any():
        expert = int(np.flatnonzero(totals != served)[0])
        raise ValueError(
            f"slot_tokens must add up to rank_counts, but expert {expert} has {totals[expert]} tokens and "
            f"{served[expert]} places"
        )
    for expert, slots in enumerate(placement.slots_of(layer)):
        if len(slots) == 1:  # there is no choice
            result[:, slots[0]] = need[:, expert]
            continue
        wanted = need[:, expert].tolist()
        if not any(wanted):
            continue
        for near in (
            lambda rank, gpu: rank == gpu,
            lambda rank, gpu: rank // per_node == gpu // per_node,
            lambda rank, gpu: True,
        ):
            for rank, left in enumerate(wanted):
                if not left:
                    continue
                for slot in slots:
                    if room[slot] and near(rank, int(gpu_of[slot])):
                        n = min(left, int(room[slot]))
                        result[rank, slot] += n
                        room[slot] -= n
                        left -= n
                wanted[rank] = left
    return result


def balance(counts, placement, layer, watch=None):
    """The division that `split_batch` returns: (tokens per GPU, tokens[expert][i] on homes[expert][i], homes).

    homes[expert] are the GPUs that hold it. `watch(what, expert, tokens, total)` is called after every change, for
    those who want to see it happen.
    """
    check_placement(placement)
    homes = placement.gpus_of(check_integer(layer, "layer", 0, placement.num_layers - 1))
    counts = check_counts(counts, placement.num_experts).tolist()
    total = [0] * placement.num_gpus
    tokens = [None] * len(counts)
    movable = []
    for expert, (n, gpus) in enumerate(zip(counts, homes)):
        size = len(gpus)
        if size == 1:
            tokens[expert] = [n]
            total[gpus[0]] += n
            continue
        each, more = divmod(n, size)
        tokens[expert] = [each + (i < more) for i in range(size)]
        for gpu, part in zip(gpus, tokens[expert]):
            total[gpu] += part
        if n:
            movable.append(expert)
    fixed = max((counts[e] for e, gpus in enumerate(homes) if len(gpus) == 1), default=0)
    floor = max(-(-sum(counts) // len(total)), fixed)  # no division goes below the mean, or below a lone expert
    movable.sort(key=lambda expert: (-counts[expert], expert))
    if watch:
        watch("equal split", None, tokens, total)
    for sweep in range(SWEEPS):
        if max(total) <= floor:
            break
        changed = False
        for expert in movable:
            if _pour(counts[expert], homes[expert], tokens[expert], total):
                changed = True
                if watch:
                    watch(f"sweep {sweep + 1}, pour", expert, tokens, total)
        if not changed:
            break
    if len(total) <= EXACT_GPUS:
        while max(total) > floor and _relieve(total, tokens, homes):
            if watch:
                watch("chain", None, tokens, total)
    return total, tokens, homes


def _pour(n, gpus, part, total):
    """Water-fill n tokens of one expert over its `gpus`, in place; returns whether anything changed."""
    if len(gpus) == 2:  # this is by far the most common case
        a, b = gpus
        low, high = total[a] - part[0], total[b] - part[1]
        first = min(max((n + high - low + 1) // 2, 0), n)
        if first == part[0]:
            return False
        part[0], part[1] = first, n - first
        total[a], total[b] = low + first, high + n - first
        return True
    rest = [total[gpu] - p for gpu, p in zip(gpus, part)]
    order = sorted(range(len(gpus)), key=lambda i: (rest[i], i))
    water, filled = n, 0
    for filled in range(1, len(order) + 1):  # how many GPUs lie below the water
        water += rest[order[filled - 1]]
        if filled == len(order) or water <= rest[order[filled]] * filled:
            break
    level, more = divmod(water, filled)
    new = [0] * len(gpus)
    for i in order[:filled]:
        new[i] = level - rest[i]
    for i in sorted(order[:filled])[:more]:
        new[i] += 1
    if new == part:
        return False
    part[:] = new
    for gpu, base, p in zip(gpus, rest, new):
        total[gpu] = base + p
    return True


def _reach(total, tokens, homes, start):
    """Breadth-first from the busiest GPUs `start`, along experts that could hand tokens on.

    Stops at the first GPU that has at least two tokens less: there is relief.

    Returns (reached GPUs, relief GPU or None, how each GPU was reached: gpu -> (previous gpu, expert)).
    """
    holders = [[] for _ in total]
    for expert, gpus in enumerate(homes):
        if len(gpus) > 1:
            for i, gpu in enumerate(gpus):
                if tokens[expert][i]:
                    holders[gpu].append(expert)
    top = total[start[0]]
    queue = deque(start)
    came = {gpu: None for gpu in queue}
    while queue:
        gpu = queue.popleft()
        for expert in holders[gpu]:
            for other in homes[expert]:
                if other not in came:
                    came[other] = (gpu, expert)
                    if total[other] < top - 1:
                        return set(came), other, came
                    queue.append(other)
    return set(came), None, came


def _relieve(total, tokens, homes):
    """Hand tokens along one chain from a busiest GPU to one at least two below it; False if there is no chain."""
    top = max(total)
    _, gpu, came = _reach(total, tokens, homes, [gpu for gpu, n in enumerate(total) if n == top])
    if gpu is None:
        return False
    path = []
    while came[gpu] is not None:
        previous, expert = came[gpu]
        path.append((previous, expert, gpu))
        gpu = previous
    amount = (total[path[-1][0]] - total[path[0][2]]) // 2
    for previous, expert, _ in path:
        amount = min(amount, tokens[expert][homes[expert].index(previous)])
    for previous, expert, target in path:
        tokens[expert][homes[expert].index(previous)] -= amount
        tokens[expert][homes[expert].index(target)] += amount
        total[previous] -= amount
        total[target] += amount
    return True
