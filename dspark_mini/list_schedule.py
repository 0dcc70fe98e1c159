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

CLOSE = 1.005  # times the lower bound: a plan this good is not improved further
RETRY_GAP = 0.03  # a plan that is further than this above the lower bound gets a second attempt
SWAPS = 200  # step 4 makes at most this many moves and swaps


def best_schedule(problem, bound):
    """The best of a few list schedules: workers filled to the bound, and to somewhat above it.

    Whole requests seldom fill a worker exactly to the bound, and what is left over then opens workers that pay for a
    prefix or a fetch. A large batch gets one second attempt, a small one a bisection for the lowest level that holds.
    """
    best, low, high = None, 1.0, None
    for attempt in range(2 if len(problem.requests) > 256 else 9):
        large = len(problem.requests) > 256
        level = 1.0 if high is None else 1 + 0.75 * (high - 1) if large else (low + high) / 2
        worker = schedule(problem, bound, level)
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


def schedule(problem, bound, slack=1.0):
    """Steps 1 to 4 of the module's docstring, with T = slack * bound; returns worker (requests,) int64."""
    s = _Schedule(problem, slack * bound * (1 + 1e-9))
    s.place_large(bound / 4)
    s.keep_caches_at_home()
    s.fill_by_prefix()
    s.place_the_rest()
    _improve(problem, s.worker, bound)
    return s.worker


class _Schedule:
    """A list schedule under construction. Its steps run once for each request, so it works on plain lists.

    worker  (requests,) int64, -1 where a request has no place yet
    time    finish time of each worker so far, in seconds; free: its memory that is left, in tokens
    holds   for each prefix, the set of workers that hold it now
    """

    def __init__(self, problem, limit):
        p = self.problem = problem
        self.limit, self.worker = limit, np.full(len(p.requests), -1, dtype=np.int64)
        self.time, self.free = p.load.tolist(), p.free.tolist()
        self.token_s, self.prefix_tokens = p.token_s.tolist(), p.prefix_tokens.tolist()
        self.tokens, self.kv_tokens, self.kv_bytes = p.tokens.tolist(), p.kv_tokens.tolist(), p.kv_bytes.tolist()
        self.home, self.prefix, self.per_node = p.home.tolist(), p.prefix.tolist(), p.topology.gpus_per_node
        self.holds = [set(np.flatnonzero(row).tolist()) for row in p.cached]
        self.uniform = max(self.token_s) == min(self.token_s)
        self.largest_first = np.lexsort((np.arange(len(p.requests)), -p.tokens)).tolist()

    def price(self, r, w):
        """Seconds and memory that request r adds to worker w now."""
        token_s, prefix = self.token_s[w], self.prefix[r]
        seconds, memory = self.tokens[r] * token_s, self.tokens[r]
        if self.kv_tokens[r] and self.home[r] != w:
            link = self.problem.topology.link(self.home[r], w)
            seconds += min(link.seconds(self.kv_bytes[r]), self.kv_tokens[r] * token_s)
            memory += self.kv_tokens[r]
        if prefix >= 0 and w not in self.holds[prefix]:
            seconds += self.prefix_tokens[prefix] * token_s
            memory += self.prefix_tokens[prefix]
        return seconds, memory

    def assign(self, r, w, seconds, memory):
        """Give request r to worker w, to which it adds `seconds` and `memory`."""
        self.worker[r] = w
        self.time[w] += seconds
        self.free[w] -= memory
        if self.prefix[r] >= 0:
            self.holds[self.prefix[r]].add(w)

    def candidates(self, r):
        """The workers where request r can finish first: at most four with equal speeds and room everywhere."""
        prefix, time = self.prefix[r], self.time
        most = self.tokens[r] + self.kv_tokens[r] + (self.prefix_tokens[prefix] if prefix >= 0 else 0)
        if not self.uniform or min(self.free) < most:
            return range(len(time))
        found = {time.index(min(time))}
        if self.kv_tokens[r]:
            node = self.home[r] // self.per_node * self.per_node
            neighbours = range(node, min(node + self.per_node, len(time)))
            found |= {self.home[r], min(neighbours, key=time.__getitem__)}
        if prefix >= 0 and self.holds[prefix]:
            found.add(min(sorted(self.holds[prefix]), key=time.__getitem__))
        return found

    def place(self, r):
        """Put request r where it finishes first, if it fits anywhere."""
        prices = ((w, *self.price(r, w)) for w in self.candidates(r))
        options = [(self.time[w] + seconds, w, seconds, m) for w, seconds, m in prices if m <= self.free[w]]
        if options:
            self.assign(r, *min(options)[1:])

    def place_large(self, seconds):
        """What fills a quarter of a step by itself chooses first, while there is room everywhere."""
        slowest = max(self.token_s)
        for r in self.largest_first:
            if self.tokens[r] * slowest < seconds:
                break
            self.place(r)

    def keep_caches_at_home(self):
        """Step 1: KV caches stay at home, dearest to move (per second of own work) first, until the home is full."""
        p = self.problem
        homed = np.flatnonzero((p.kv_tokens > 0) & (self.worker < 0))
        link = p.topology.inter if p.topology.num_nodes > 1 else p.topology.intra
        leave = np.minimum(p.kv_tokens * p.token_s.min(), link.seconds(p.kv_bytes))[homed]
        evicted = []
        for r in homed[np.lexsort((homed, -leave / p.tokens[homed], p.home[homed]))].tolist():
            w, own, prefix = self.home[r], self.tokens[r], self.prefix[r]
            fits = self.time[w] + own * self.token_s[w] <= self.limit and own <= self.free[w]
            if fits and (prefix < 0 or w in self.holds[prefix]):
                self.assign(r, w, own * self.token_s[w], own)
            else:
                evicted.append(r)
        for r in sorted(evicted, key=lambda r: (-self.tokens[r], r)):
            self.place(r)

    def fill_by_prefix(self):
        """Step 2: requests with a shared prefix and no KV cache, the group with the most work first."""
        groups = [[] for _ in self.prefix_tokens]
        for r in self.largest_first:
            if self.worker[r] < 0 and self.prefix[r] >= 0 and not self.kv_tokens[r]:
                groups[self.prefix[r]].append(r)
        for g in sorted(range(len(groups)), key=lambda g: (-sum(self.tokens[r] for r in groups[g]), g)):
            self.fill(g, groups[g])

    def fill(self, g, queue):
        """Fill the workers that hold prefix g to the limit, then new ones one by one; `queue` has the largest first."""
        sizes = [-self.tokens[r] for r in queue]  # they ascend, so that bisect finds the largest that still fits
        opened, unopened = sorted(self.holds[g], key=lambda w: (self.time[w], w)), None
        while queue:
            if opened:
                w = opened.pop(0)
            else:
                if unopened is None:
                    others = set(range(len(self.time))) - self.holds[g]
                    unopened = sorted(others, key=lambda w: (-self.time[w], -w))
                if not unopened:
                    break
                w = unopened.pop()
            start = 0
            while queue:
                extra = 0 if w in self.holds[g] else self.prefix_tokens[g]
                room = min(int((self.limit - self.time[w]) / self.token_s[w]), self.free[w]) - extra
                start = bisect.bisect_left(sizes, -room, start)
                if room < 1 or start == len(queue):
                    break
                r = queue.pop(start)
                self.assign(r, w, (self.tokens[r] + extra) * self.token_s[w], self.tokens[r] + extra)
                del sizes[start]

    def place_the_rest(self):
        """Step 3: all others, longest first, to the worker that finishes them first; a heap finds it."""
        heap = None
        for r in self.largest_first:
            if self.worker[r] >= 0:
                continue
            if not self.uniform or self.kv_tokens[r] or self.prefix[r] >= 0:
                self.place(r)
                heap = None  # its entries may be out of date now
                continue
            if heap is None:
                heap = [(t, w) for w, t in enumerate(self.time)]
                heapq.heapify(heap)
            full = []
            while heap:
                w = heap[0][1]
                if self.tokens[r] <= self.free[w]:
                    self.assign(r, w, self.tokens[r] * self.token_s[0], self.tokens[r])
                    heapq.heapreplace(heap, (self.time[w], w))
                    break
                full.append(heapq.heappop(heap))
            for entry in full:
                heapq.heappush(heap, entry)


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
