"""Which worker runs each request of the next step.

A worker is a GPU with some work already queued, some free KV memory, and some prompt prefixes cached. Running
request r on worker w costs

    c(r, w) = tokens_r * token_s_w  +  0    if r has no KV cache, or has it on w
                                    +  min(transfer of the KV to w, kv_tokens_r * token_s_w)    otherwise

seconds, where the second case takes the cheaper of copying the KV cache over the links of the topology and
computing it again. A worker that serves requests with prefix p and does not hold p pays prefix_tokens_p *
token_s_w once. The step takes as long as its busiest worker, so the plan minimises

    max over w of  load_w + sum of c(r, w) over its requests + its new prefixes,     memory permitting,

and, among equals, the total. This is scheduling on unrelated machines, NP-hard.

**The recurrence.** With t = (t_1 .. t_W) the finish times, m the free memory and h the workers that now hold
the current request's prefix, let F_0 = {(load, free, cached)} and

    F_i = prune { (t + (c(r_i, w) + prefix_w) * e_w,  m - need * e_w,  h + {w})
                  :  (t, m, h) in F_{i-1},  w fits }

and the answer is the smallest max(t) in F_N. Requests are ordered by prefix, so h is one set at a time.
`prune` drops duplicates and states whose own lower bound is not below the best plan known. Small problems are
solved this way (`Plan.exact`), and the tests compare the result with a mixed-integer program. The number of
states grows like W^N, so for a thousand requests this is *not* what runs. There the set F_i is cut to one
state, which is list scheduling: a single pass t <- t + c(r_i, w_i) e_{w_i}, whose whole art is the order and
the choice of w_i:

1. after the few requests that are a quarter of a step by themselves, a request with a KV cache stays with it
   while that worker is below the lower bound T of the step; over T, those that lose least by moving, per
   second of work, leave;
2. requests that share a prefix fill a worker to T before the next worker has to compute the prefix too: a hot
   prefix spills to as many workers as it needs, and to no more;
3. all others, longest first, go where they finish first (LPT), which evens out what 1 and 2 left uneven;
4. moves and swaps between the busiest and the idlest workers, as long as they shorten the step.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np

from .checks import INT64, check_integer, check_number
from .topology import Topology

__all__ = ["Plan", "Request", "Worker", "plan_batch"]

EXACT_REQUESTS = 12  # try the full recurrence up to this many requests,
EXACT_STATES = 20_000  # and give up when this many states are alive
CLOSE = 1.005  # of the lower bound: a plan this good is not improved further
RETRY_GAP = 0.03  # above the lower bound: worth a second attempt
SWAPS = 200  # most moves or swaps of step 4


@dataclass(frozen=True)
class Request:
    """Work for one step.

    tokens        tokens to compute in this step (the new part of a prompt, or 1 for a decode step), >= 1
    kv_tokens     tokens whose KV cache exists already, on `kv_worker`; kv_bytes is its size
    prefix        any hashable name of a shared prompt prefix that must be present, of `prefix_tokens` tokens;
                  these are not part of `tokens`
    """

    tokens: int
    kv_tokens: int = 0
    kv_bytes: int = 0
    kv_worker: int | None = None
    prefix: Hashable | None = None
    prefix_tokens: int = 0

    def __post_init__(self):
        # Ranges depend on the workers and are checked by `plan_batch`. A step has thousands of requests, so
        # plain ints, the common case, pass at once.
        for name in ("tokens", "kv_tokens", "kv_worker", "prefix_tokens"):
            value = getattr(self, name)
            if (type(value) is not int or not -INT64 <= value <= INT64) and not (
                value is None and name == "kv_worker"
            ):
                check_integer(value, f"{name} of a Request")
        if type(self.kv_bytes) is not int or self.kv_bytes < 0:
            check_number(self.kv_bytes, "kv_bytes of a Request")
        if self.prefix is not None and not isinstance(self.prefix, Hashable):
            raise ValueError(f"prefix of a Request must be hashable or None, got {self.prefix!r}")


@dataclass(frozen=True)
class Worker:
    """A GPU that runs requests: queued work, free KV memory in tokens, speed, and the prefixes it holds."""

    free_tokens: int
    load_s: float = 0.0
    token_s: float = 25e-6
    prefixes: frozenset = field(default_factory=frozenset)


@dataclass(frozen=True, eq=False)
class Plan:
    """The result of `plan_batch`.

    worker         (requests,) int64: worker of each request, -1 where no worker has memory for it in this
                   step
    busy_s         (workers,) float64: predicted finish time of each worker, queued work included
    lower_bound_s  no plan that serves these requests has a shorter step
    exact          True if the full recurrence was solved: then the step is optimal
    moved          requests whose KV cache leaves its worker; `copied` of them over the links, the others
                   recomputed
    """

    worker: np.ndarray
    busy_s: np.ndarray
    lower_bound_s: float
    exact: bool
    moved: tuple = ()
    copied: tuple = ()

    @property
    def step_s(self):
        return float(self.busy_s.max())

    @property
    def deferred(self):
        """Indices of requests that must wait for memory."""
        return tuple(np.flatnonzero(self.worker < 0).tolist())

    @property
    def gap(self):
        """step_s / lower_bound_s - 1: how far from optimal the plan can be at most."""
        return self.step_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0


class _Problem:
    """The batch as arrays, and c(r, w)."""

    def __init__(self, requests, workers, topology):
        if not isinstance(topology, Topology):
            raise ValueError(f"topology must be a Topology, got {topology!r}")
        for name, items in (("requests", requests), ("workers", workers)):
            if not isinstance(items, Iterable):
                raise ValueError(f"{name} must be a sequence, got {items!r}")
        self.requests, self.workers, self.topology = list(requests), list(workers), topology
        for name, items, kind in (("requests", self.requests, Request), ("workers", self.workers, Worker)):
            for i, item in enumerate(items):
                if not isinstance(item, kind):
                    raise ValueError(f"{name}[{i}] must be a {kind.__name__}, got {item!r}")
        n, w = len(self.requests), len(self.workers)
        if w == 0:
            raise ValueError("workers must not be empty")
        if w > topology.num_gpus:
            raise ValueError(f"workers must not outnumber the topology's GPUs ({topology.num_gpus}), got {w}")
        for i, x in enumerate(self.workers):
            check_number(x.load_s, f"workers[{i}].load_s")
            check_integer(x.free_tokens, f"workers[{i}].free_tokens", low=0)
            check_number(x.token_s, f"workers[{i}].token_s", positive=True)
        self.load = np.array([x.load_s for x in self.workers], dtype=np.float64)
        self.free = np.array([x.free_tokens for x in self.workers], dtype=np.int64)
        self.token_s = np.array([x.token_s for x in self.workers], dtype=np.float64)
        self.tokens = np.array([r.tokens for r in self.requests], dtype=np.int64).reshape(n)
        self.kv_tokens = np.array([r.kv_tokens for r in self.requests], dtype=np.int64).reshape(n)
        self.kv_bytes = np.array([r.kv_bytes for r in self.requests], dtype=np.float64).reshape(n)
        self.home = np.array(
            [-1 if r.kv_worker is None else r.kv_worker for r in self.requests], dtype=np.int64
        )
        self.home = self.home.reshape(n)
        for name, array, low in (
            ("tokens", self.tokens, 1),
            ("kv_tokens", self.kv_tokens, 0),
            ("kv_bytes", self.kv_bytes, 0),
        ):
            if (array < low).any():
                r = int(np.flatnonzero(array < low)[0])
                raise ValueError(f"requests[{r}].{name} must be at least {low}, got {array[r]}")
        wrong = (self.home < -1) | (self.home >= w) | ((self.kv_tokens > 0) & (self.home < 0))
        if wrong.any():
            r = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"requests[{r}].kv_worker must be a worker in 0 .. {w - 1} where there are KV tokens, "
                f"got {self.requests[r].kv_worker}"
            )
        # Prefixes get numbers in order of first use.
        self.prefix = np.full(n, -1, dtype=np.int64)
        self.prefix_names, sizes = {}, []
        for i, r in enumerate(self.requests):
            if r.prefix is not None:
                p = self.prefix_names.setdefault(r.prefix, len(sizes))
                if p == len(sizes):
                    sizes.append(r.prefix_tokens)
                if r.prefix_tokens != sizes[p] or r.prefix_tokens < 0:
                    raise ValueError(
                        f"requests[{i}].prefix_tokens must be the same >= 0 for every request with prefix "
                        f"{r.prefix!r}, got {r.prefix_tokens} and {sizes[p]}"
                    )
                self.prefix[i] = p
        self.prefix_tokens = np.array(sizes, dtype=np.int64)
        self.cached = np.array(
            [[name in x.prefixes for x in self.workers] for name in self.prefix_names], dtype=bool
        ).reshape(len(sizes), w)

    def fetch(self, r, w):
        """Seconds to have the KV cache of requests r on workers w (arrays), and where it is copied, not
        recomputed."""
        link = [self.topology.intra, self.topology.inter]
        across = (self.topology.node_of(self.home[r]) != self.topology.node_of(w)).astype(int)
        latency, rate = (
            np.array([getattr(x, name) for x in link])[across] for name in ("latency_s", "bytes_per_s")
        )
        copy = latency + self.kv_bytes[r] / rate
        again = self.kv_tokens[r] * self.token_s[w]
        away = (self.home[r] != w) & (self.kv_tokens[r] > 0)
        return np.where(away, np.minimum(copy, again), 0.0), away & (copy <= again)

    def cost_matrix(self):
        """c(r, w) and the memory need, both (requests, workers); for small problems and for checking."""
        n, workers = len(self.requests), len(self.workers)
        r, w = np.divmod(np.arange(n * workers), workers)
        cost = self.tokens[r] * self.token_s[w] + self.fetch(r, w)[0]
        need = self.tokens[r] + np.where(self.home[r] != w, self.kv_tokens[r], 0)
        return cost.reshape(n, workers), need.reshape(n, workers)

    def evaluate(self, worker):
        """Finish times and memory used (workers,) of an assignment, -1 for deferred requests."""
        workers = len(self.workers)
        r = np.flatnonzero(worker >= 0)
        w = worker[r]
        busy = self.load + np.bincount(w, self.tokens[r] * self.token_s[w] + self.fetch(r, w)[0], workers)
        used = np.bincount(w, self.tokens[r] + np.where(self.home[r] != w, self.kv_tokens[r], 0), workers)
        shared = self.prefix[r] >= 0
        group, holder = np.divmod(np.unique(self.prefix[r][shared] * workers + w[shared]), workers)
        new = ~self.cached[group, holder]
        group, holder = group[new], holder[new]
        busy += np.bincount(holder, self.prefix_tokens[group] * self.token_s[holder], workers)
        used += np.bincount(holder, self.prefix_tokens[group], workers)
        return busy, used.astype(np.int64)


def plan_batch(requests, workers, topology):
    """Assign every request to a worker so that the step ends as early as possible.

    requests  sequence of `Request`; workers: sequence of `Worker`, worker w being GPU w of `topology`
    topology  a `Topology`: what it costs to move a KV cache

    Returns a `Plan`. Memory is never exceeded; requests that fit nowhere are deferred (worker -1). KV caches
    stay where they are unless moving shortens the step. Ties go to the lower index. Raises ValueError for bad
    input.
    """
    problem = _Problem(requests, workers, topology)
    if not problem.requests:
        return Plan(np.zeros(0, dtype=np.int64), problem.load, float(problem.load.max()), True)
    bound = _lower_bound(problem)
    worker, exact = _best_schedule(problem, bound), False
    if len(problem.requests) <= EXACT_REQUESTS:
        solved = _recurrence(problem, worker)
        if solved is not None:
            worker, exact = solved, True
    busy, _ = problem.evaluate(worker)
    served = worker >= 0
    if not served.all():  # the bound holds for the requests that this step serves
        kept = [r for r, ok in zip(problem.requests, served) if ok]
        bound = _lower_bound(_Problem(kept, workers, topology)) if kept else float(problem.load.max())
    moved = np.flatnonzero(served & (problem.kv_tokens > 0) & (worker != problem.home))
    copied = moved[problem.fetch(moved, worker[moved])[1]]
    return Plan(
        worker,
        busy,
        float(busy.max()) if exact else bound,
        exact,
        tuple(moved.tolist()),
        tuple(copied.tolist()),
    )


def _lower_bound(problem):
    """A step time that no assignment beats, memory aside: bisection on a necessary condition.

    If the step ends by T, worker w can take at most T - load_w of work, and the work is at least the sum of
    all requests' own compute, plus the cheapest way out for KV caches whose home has no room for them, plus
    one copy of a prefix for every worker that its requests cannot do without.
    """
    p = problem
    fast, workers = p.token_s.min(), len(p.workers)
    own = p.tokens * fast
    link = p.topology.intra if p.topology.gpus_per_node > 1 else p.topology.inter
    leave = np.minimum(link.latency_s + p.kv_bytes / link.bytes_per_s, p.kv_tokens * fast)
    leave = np.where(p.kv_tokens > 0, leave, 0.0)
    # A single request needs the prefix, if nobody has it, and its own tokens, on the least busy worker.
    alone = own + np.where(
        p.prefix >= 0, np.append(p.prefix_tokens * ~p.cached.any(axis=1), 0)[p.prefix] * fast, 0.0
    )
    alone = p.load.min() + alone + leave
    alone = np.where(p.kv_tokens > 0, np.minimum(alone, p.load[p.home] + own), alone)
    low = max(float(p.load.max()), float(alone.max()))

    homed = np.flatnonzero(p.kv_tokens > 0)
    order = homed[np.lexsort((leave[homed] / own[homed], p.home[homed]))]  # per home, cheapest to move first
    work = np.concatenate([[0.0], np.cumsum(own[order])])
    price = np.concatenate([[0.0], np.cumsum(leave[order])])
    first = np.searchsorted(p.home[order], np.arange(workers))
    last = np.searchsorted(p.home[order], np.arange(workers), side="right")
    group = np.bincount(p.prefix[p.prefix >= 0], own[p.prefix >= 0], len(p.prefix_tokens))
    once = p.prefix_tokens * fast
    others_load = np.sort(
        np.where(p.cached, np.inf, p.load), axis=1
    )  # per prefix, workers without it, roomiest first
    nobody = ~p.cached.any(axis=1)
    total = own.sum()

    def fits(step):
        room = np.maximum(step - p.load, 0.0)
        needed = total
        if len(order):
            excess = np.clip(work[last] - work[first] - room, 0.0, None)
            needed += (np.interp(work[first] + excess, work, price) - price[first]).sum()
        if len(group):
            left = group - p.cached @ room  # seconds of work that workers without the prefix must take
            outside = np.maximum(step - once[:, None] - others_load, 0.0).cumsum(axis=1)
            count = (outside < left[:, None] * (1 - 1e-12)).sum(axis=1) + 1
            count[(left <= 0) & ~nobody] = 0
            if (count > (~p.cached).sum(axis=1)).any():
                return False
            needed += count @ once
        return needed <= room.sum() * (1 + 1e-12)

    if fits(low):
        return low
    high = next((low * x for x in (1.01, 1.1, 1.5, 3.0) if fits(low * x)), None)
    high = low + total + once.sum() * workers + leave.sum() if high is None else high
    for _ in range(40):
        middle = (low + high) / 2
        if fits(middle):
            high = middle
        else:
            low = middle
        if high - low < 5e-4 * low:
            break
    return low


def _best_schedule(problem, bound):
    """The best of a few list schedules: workers filled to the bound, and to somewhat above it.

    Whole requests seldom fill a worker exactly to the bound, and what is left over then opens workers that
    pay for a prefix or a fetch. A large batch gets one second attempt, a small one a bisection for the lowest
    level that holds.
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
        leave = np.minimum(p.kv_tokens * p.token_s.min(), link.latency_s + p.kv_bytes / link.bytes_per_s)[
            homed
        ]
        order = homed[np.lexsort((homed, -leave / p.tokens[homed], p.home[homed]))]
        evicted = []
        for r in order.tolist():
            w, seconds = home[r], tokens[r] * token_s[home[r]]
            if (
                time[w] + seconds <= limit
                and tokens[r] <= free[w]
                and (prefix[r] < 0 or w in holds[prefix[r]])
            ):
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
    """Step 4, in place: relieve the busiest worker by a move or a swap with one of the idlest, while that
    helps.

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
            after = np.maximum(
                busy[top] - (give - take) * p.token_s[top], busy[low] + (give - take) * p.token_s[low]
            )
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


def _recurrence(problem, known):
    """Solve F_i exactly; returns the best assignment, or None where more than EXACT_STATES states stay alive.

    `known` is any assignment, from which states are cut. Fewer deferred requests come first, then a shorter
    step, then less total work. Deferring is allowed only as often as memory makes necessary.
    """
    p = problem
    n, workers = len(p.requests), len(p.workers)
    cost, need = p.cost_matrix()
    order = np.lexsort((np.arange(n), -p.tokens, p.prefix))
    cheapest = np.append(cost[order].min(axis=1)[::-1].cumsum()[::-1], 0.0)
    busy, _ = p.evaluate(known)
    given_up = int((known < 0).sum())
    for deferrals in range(given_up + 1):
        # With as many deferrals as the known plan, its step is an upper bound; with fewer, nothing is known.
        limit = float(busy.max()) * (1 + 1e-12) if deferrals == given_up else np.inf
        time, free = p.load[None].copy(), p.free[None].copy()
        waits = np.zeros(1, dtype=np.int64)
        holds = np.zeros((1, workers), dtype=bool)
        choices, current = [], -1
        for step, r in enumerate(order.tolist()):
            if p.prefix[r] != current:  # requests come prefix by prefix: a new set of holders begins
                current = int(p.prefix[r])
                holds = np.repeat(
                    p.cached[current][None] if current >= 0 else np.ones((1, workers), bool), len(time), 0
                )
            size = int(p.prefix_tokens[current]) if current >= 0 else 0
            parts = []
            for w in range(workers):
                extra = ~holds[:, w] * size
                t, m, h = time.copy(), free.copy(), holds.copy()
                t[:, w] += cost[r, w] + extra * p.token_s[w]
                m[:, w] -= need[r, w] + extra
                h[:, w] = True
                ok = (m[:, w] >= 0) & (t[:, w] <= limit)
                # What is left needs at least `cheapest` in all: not even perfect spreading would save other
                # states.
                if deferrals == 0:
                    ok &= (t.sum(axis=1) + cheapest[step + 1]) / workers <= limit
                at = np.flatnonzero(ok)
                parts.append((t[at], m[at], h[at], waits[at], at, np.full(len(at), w)))
            if deferrals:
                at = np.flatnonzero(waits < deferrals)
                parts.append((time[at], free[at], holds[at], waits[at] + 1, at, np.full(len(at), -1)))
            time, free, holds, waits, parent, choice = (np.concatenate(x) for x in zip(*parts))
            if len(time) == 0:
                break
            key = np.concatenate([time, free, holds, waits[:, None]], axis=1)
            _, first = np.unique(key, axis=0, return_index=True)
            first.sort()
            if len(first) > EXACT_STATES:
                return None
            time, free, holds, waits = time[first], free[first], holds[first], waits[first]
            choices.append((parent[first], choice[first]))
        if len(time) == 0:
            continue
        peak = time.max(axis=1)
        best = np.flatnonzero(peak <= peak.min() * (1 + 1e-12))
        state = int(best[time[best].sum(axis=1).argmin()])
        worker = np.full(n, -1, dtype=np.int64)
        for r, (parent, choice) in zip(order[::-1].tolist(), choices[::-1]):
            worker[r], state = choice[state], parent[state]
        return worker
    return None
