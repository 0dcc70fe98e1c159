"""The plan of a large batch: list scheduling.

The set F_i of the exact recurrence (`recurrence.py`) is cut to one state: a single pass t <- t + c(r_i, w_i)
e_{w_i}, whose whole art is the order and the choice of w_i:

1. after the few requests that are a quarter of a step by themselves, a request with a KV cache stays with it while that
   worker is below the lower bound T of the step; over T, those that lose least by moving, per second of work, leave;
2. requests that share a prefix fill a worker to T before the next worker has to compute the prefix too: a hot
   prefix spills to as many workers as it needs, and to no more;
3. all others, longest first, go where they finish first (LPT), which evens out what 1 and 2 left uneven;
4. moves and swaps between the busiest and the idlest workers, as long as they shorten the step.
"""

from __future__ import annotations

import bisect
import heapq

import numpy as np

CLOSE = 1.005  # of the lower bound: a plan this good is not improved further
RETRY_GAP = 0.03  # above the lower bound: worth a second attempt
SWAPS = 200  # most moves or swaps of step 4


def _best_schedule(problem, bound):
    """The best of a few list schedules: workers filled to the bound, and to somewhat above it.

    Whole requests seldom fill a worker exactly to the bound, and what is left over then opens workers that pay for a
    prefix or a fetch. A large batch gets one second attempt, a small one a bisection for the lowest level that holds.
    """
    best, low, high = None, 1.0, None
    for attempt in range(2 if len(problem.requests) > 256 else 9):
        large = len(problem.requests) > 256
        level = 1.0 if high is None else 1 + 0.75 * (high - 1) if large else (low + high) / 2
        worker = _list_schedule(problem, bound, level)
        rank = (int((worker < 0).sum()), float(problem.evaluate(worker)[0].max()))
        if best is None or rank < best[0]:
            best = (rank, worker)
        step = rank[1] / bound if bound > 0 else 1.0
        if high is None or step <= level * (1 + 1e-9):
            high = step
        else:
            low = level
        if best[0][1] <= bound * (1 + RETRY_GAP) or high - low < 0.002:
            break
    return best[1]


def _list_schedule(problem, bound, slack=1.0):
    """Steps 1 to 4 of the module's docstring, with T = slack * bound; returns worker (requests,) int64."""
    p = problem
    n, workers = len(p.requests), len(p.workers)
    worker = np.full(n, -1, dtype=np.int64)
    time, free = p.load.tolist(), p.free.tolist()
    token_s, prefix_tokens = p.token_s.tolist(), p.prefix_tokens.tolist()
    tokens, kv_tokens, kv_bytes = p.tokens.tolist(), p.kv_tokens.tolist(), p.kv_bytes.tolist()
    home, prefix, per_node = p.home.tolist(), p.prefix.tolist(), p.topology.gpus_per_node
    holds = [set(np.flatnonzero(row).tolist()) for row in p.cached]
    limit = slack * bound * (1 + 1e-9)

    def price(r, w):
        """Seconds and memory that request r adds to worker w now."""
        seconds, memory = tokens[r] * token_s[w], tokens[r]
        if kv_tokens[r] and home[r] != w:
            link = p.topology.intra if home[r] // per_node == w // per_node else p.topology.inter
            seconds += min(link.latency_s + kv_bytes[r] / link.bytes_per_s, kv_tokens[r] * token_s[w])
            memory += kv_tokens[r]
        if prefix[r] >= 0 and w not in holds[prefix[r]]:
            seconds += prefix_tokens[prefix[r]] * token_s[w]
            memory += prefix_tokens[prefix[r]]
        return seconds, memory

    def assign(r, w, seconds, memory):
        worker[r] = w
        time[w] += seconds
        free[w] -= memory
        if prefix[r] >= 0:
            holds[prefix[r]].add(w)

    uniform = max(token_s) == min(token_s)

    def place(r):
        """Put request r where it finishes first. With equal speeds only four workers can be that one."""
        most = tokens[r] + kv_tokens[r] + (prefix_tokens[prefix[r]] if prefix[r] >= 0 else 0)
        candidates = range(workers)
        if uniform and min(free) >= most:
            candidates = {time.index(min(time))}
            if kv_tokens[r]:
                node = home[r] // per_node * per_node
                candidates |= {home[r], min(range(node, min(node + per_node, workers)), key=time.__getitem__)}
            if prefix[r] >= 0 and holds[prefix[r]]:
                candidates.add(min(sorted(holds[prefix[r]]), key=time.__getitem__))
        options = [
            (time[w] + seconds, w, seconds, memory)
            for w, (seconds, memory) in ((w, price(r, w)) for w in candidates)
            if memory <= free[w]
        ]
        if options:
            _, w, seconds, memory = min(options)
            assign(r, w, seconds, memory)

    # 0. Whatever fills a quarter of a step by itself chooses first, while there is room everywhere.
    largest_first = np.lexsort((np.arange(n), -p.tokens)).tolist()
    for r in largest_first:
        if tokens[r] * max(token_s) < bound / 4:
            break
        place(r)

    # 1. KV caches stay at home, dearest to move (per second of own work) first, until the home is full.
    homed = np.flatnonzero((p.kv_tokens > 0) & (worker < 0))
    if len(homed):
        link = p.topology.inter if p.topology.num_nodes > 1 else p.topology.intra
        leave = np.minimum(p.kv_tokens * p.token_s.min(), link.latency_s + p.kv_bytes / link.bytes_per_s)[homed]
        order = homed[np.lexsort((homed, -leave / p.tokens[homed], p.home[homed]))]
        evicted = []
        for r in order.tolist():
            w, seconds = home[r], tokens[r] * token_s[home[r]]
            if time[w] + seconds <= limit and tokens[r] <= free[w] and (prefix[r] < 0 or w in holds[prefix[r]]):
                assign(r, w, seconds, tokens[r])
            else:
                evicted.append(r)
        for r in sorted(evicted, key=lambda r: (-tokens[r], r)):
            place(r)

    # 2. Requests with a shared prefix and no KV cache: holders first, then one new worker at a time, each
    # filled to the bound.
    groups = [[] for _ in prefix_tokens]
    for r in largest_first:
        if worker[r] < 0 and prefix[r] >= 0 and not kv_tokens[r]:
            groups[prefix[r]].append(r)
    for g in sorted(range(len(groups)), key=lambda g: (-sum(tokens[r] for r in groups[g]), g)):
        queue = groups[g]
        sizes = [-tokens[r] for r in queue]  # ascending, so that bisect finds the largest that still fits
        opened, unopened = sorted(holds[g], key=lambda w: (time[w], w)), None
        while queue:
            if opened:
                w = opened.pop(0)
            else:
                if unopened is None:
                    unopened = sorted(set(range(workers)) - holds[g], key=lambda w: (-time[w], -w))
                if not unopened:
                    break
                w = unopened.pop()
            start = 0
            while queue:
                extra = 0 if w in holds[g] else prefix_tokens[g]
                room = min(int((limit - time[w]) / token_s[w]), free[w]) - extra
                start = bisect.bisect_left(sizes, -room, start)
                if room < 1 or start == len(queue):
                    break
                r = queue.pop(start)
                assign(r, w, (tokens[r] + extra) * token_s[w], tokens[r] + extra)
                del sizes[start]

    # 3. All others, longest first, to the worker that finishes them first; a heap finds it.
    heap = None
    for r in largest_first:
        if worker[r] >= 0:
            continue
        if not uniform or kv_tokens[r] or prefix[r] >= 0:
            place(r)
            heap = None  # its entries may be out of date now
            continue
        if heap is None:
            heap = [(t, w) for w, t in enumerate(time)]
            heapq.heapify(heap)
        full, seconds, memory = [], tokens[r] * token_s[0], tokens[r]
        while heap:
            t, w = heap[0]
            if memory <= free[w]:
                worker[r] = w
                time[w] = t + seconds
                free[w] -= memory
                heapq.heapreplace(heap, (time[w], w))
                break
            full.append(heapq.heappop(heap))
        for entry in full:
            heapq.heappush(heap, entry)
    _improve(p, worker, bound)
    return worker


def _improve(problem, worker, bound):
    """Step 4, in place: relieve the busiest worker by a move or a swap with one of the idlest, while that helps.

    Only requests whose cost does not depend on who shares the worker (no prefix) and that are not held by a
    KV cache take part; the others are where they are for a reason that this step does not see.
    """
    p = problem
    busy, used = p.evaluate(worker)
    if busy.max() <= bound * CLOSE or len(busy) == 1:
        return
    free = p.free - used
    loose = (p.prefix < 0) & (p.kv_tokens == 0) & (worker >= 0)
    known = {}

    def members(w):
        if w not in known:
            known[w] = np.flatnonzero(loose & (worker == w))
        return known[w]

    for _ in range(SWAPS):
        top = int(busy.argmax())
        if busy[top] <= bound * CLOSE or len(members(top)) == 0:
            return
        best = None
        for low in np.argsort(busy, kind="stable")[:4].tolist():
            if low == top:
                continue
            mine, other = p.tokens[members(top)], p.tokens[members(low)]
            give, take = mine[:, None], np.concatenate([[0], other])[None, :]
            after = np.maximum(busy[top] - (give - take) * p.token_s[top], busy[low] + (give - take) * p.token_s[low])
            after = np.where((give - take <= free[low]) & (take - give <= free[top]), after, np.inf)
            i, j = np.unravel_index(after.argmin(), after.shape)
            if after[i, j] < busy[top] * (1 - 1e-9) and (best is None or after[i, j] < best[0]):
                best = (after[i, j], low, int(i), int(j))
        if best is None:
            return
        _, low, i, j = best
        a = members(top)[i]
        moved = [(a, top, low)] + ([(members(low)[j - 1], low, top)] if j else [])
        for r, source, target in moved:
            worker[r] = target
            known[source] = known[source][known[source] != r]
            known[target] = np.append(known[target], r)
            busy[source] -= p.tokens[r] * p.token_s[source]
            busy[target] += p.tokens[r] * p.token_s[target]
            free[source] += p.tokens[r]
            free[target] -= p.tokens[r]
