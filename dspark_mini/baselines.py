"""The simple schedulers that every result is measured against, in the same run.

Nothing here is used for planning, except that `place` promises never to be below `replicate_and_pack`.
"""

from __future__ import annotations

import numpy as np

from .checks import check_load
from .placement import Placement, count_rows, replicate
from .placing import pack
from .split import split_batch

__all__ = ["contiguous", "equal_split", "least_loaded", "replicate_and_pack", "round_robin"]


def contiguous(load, *, num_gpus):
    """No placement at all: expert ids in order, as many per GPU as divide evenly. One copy each."""
    load = check_load(load)
    return Placement(np.tile(np.arange(load.shape[1]), (len(load), 1)), load, num_gpus)


def round_robin(load, *, num_gpus, num_slots):
    """Deal experts out like cards, blind to load: slot i of GPU g holds expert (i * num_gpus + g) mod experts."""
    load = check_load(load)
    size = num_slots // num_gpus + (np.arange(num_gpus) < num_slots % num_gpus)
    slots = [i * num_gpus + gpu for gpu in range(num_gpus) for i in range(size[gpu])]
    return Placement(np.tile(np.array(slots) % load.shape[1], (len(load), 1)), load, num_gpus)


def least_loaded(load, *, num_gpus, num_slots):
    """Experts in id order, each copy to the GPU that has least so far; spare slots repeat the hottest experts."""
    load = check_load(load)
    rows = []
    for layer in load:
        extra = np.argsort(-layer, kind="stable")
        order = np.concatenate([np.arange(len(layer)), np.resize(extra, num_slots - len(layer))])
        copies = np.bincount(order, minlength=len(layer))
        free = num_slots // num_gpus + (np.arange(num_gpus) < num_slots % num_gpus)
        held, done = [[] for _ in range(num_gpus)], np.zeros(num_gpus)
        for expert in order:
            gpu = int(np.where(free > 0, done, np.inf).argmin())
            held[gpu].append(expert)
            done[gpu] += layer[expert] / copies[expert]
            free[gpu] -= 1
        rows.append(np.concatenate([np.array(h, dtype=np.int64) for h in held]))
    return Placement(np.stack(rows), load, num_gpus)


def replicate_and_pack(load, *, num_gpus, num_slots, num_nodes=1, num_groups=1):
    """Greedy replicate-and-pack, the algorithm of DeepSeek's EPLB, written from its description.

    Each spare slot goes to the expert whose copies are heaviest; copies, heaviest first, go to the least-loaded GPU
    with room. With groups on nodes, groups are packed to nodes first, in the same way, and each node is planned alone.
    """
    load = check_load(load)
    layers, num_experts = load.shape
    if num_groups % num_nodes or num_nodes == 1:
        num_nodes = num_groups = 1
    size = num_experts // num_groups
    group_load = load.reshape(layers, num_groups, size).sum(axis=2)
    groups = pack(group_load, np.ones_like(group_load, dtype=np.int64), num_nodes)
    experts = (groups[..., None] * size + np.arange(size)).reshape(layers * num_nodes, -1)
    local = np.take_along_axis(np.repeat(load, num_nodes, axis=0), experts, 1)
    copies = replicate(local, num_slots // num_nodes, num_slots)
    plan = pack(local, copies, num_gpus // num_nodes)
    slots = plan[plan >= 0].reshape(layers * num_nodes, -1)
    slots = np.take_along_axis(experts, slots, 1).reshape(layers, num_slots)
    return Placement(slots, load, num_gpus)


def equal_split(counts, placement, layer):
    """Tokens per slot (slots,) int64 when every copy of an expert serves the same number, remainders to low slots."""
    counts = np.asarray(counts, dtype=np.int64)
    slots = placement.slot_expert[layer]
    copies = count_rows(slots[None], placement.num_experts)[0]
    rank = np.zeros(len(slots), dtype=np.int64)
    for expert_slots in placement.slots_of(layer):
        rank[list(expert_slots)] = np.arange(len(expert_slots))
    return counts[slots] // copies[slots] + (rank < counts[slots] % copies[slots])


# for `moe_forward(split=...)` and the benchmark
DIVISION_RULES = {"split_batch": split_batch, "equal_split": equal_split}
