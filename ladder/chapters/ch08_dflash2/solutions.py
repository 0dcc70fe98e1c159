"""One right answer to each exercise of chapter 08. Try first:
``ladder.chapters.ch01_05_rungs.exercises.hint`` gives away less."""

import heapq

import torch


def finish(costs, programs):
    """When the last of ``programs`` programs is done, if whoever is free first takes the next tile of ``costs``."""
    free = [0] * programs
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def visited(first, last, sink, window, block_n):
    """[(key tile, masked)] that rows at positions first..last visit under a sink and a window, by rising tile."""
    tiles = []
    for tile in range(last // block_n + 1):
        k0, k1 = tile * block_n, (tile + 1) * block_n - 1  # its first and last key
        if k0 >= sink and k1 <= first - window:
            continue  # between the sinks and the oldest key of the first row's window
        whole = k1 <= first and (k0 > last - window or k1 < sink or last - window < sink)
        tiles.append((tile, not whole))
    return tiles


def merge_with_sink(outs, lses, sink):
    """(out (R, Dv), lse (R,)) of n splits, outs (n, R, Dv) and lses
    (n, R), with one more logit sink (R,) that has no value."""
    logits = torch.cat([lses, sink[None]])
    top = logits.amax(0)
    finite = top.masked_fill(top == float("-inf"), 0.0)
    shares = torch.exp(logits - finite)
    total = shares.sum(0)
    out = (shares[:-1, :, None] * outs).sum(0) / total.masked_fill(total == 0, 1.0)[:, None]
    return out, finite + torch.log(total)
