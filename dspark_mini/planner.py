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

A list schedule is always made (`list_schedule.py`), and a small
problem is solved exactly on top of it (`recurrence.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np

from .checks import INT64, check_integer, check_number
from .list_schedule import best_schedule
from .recurrence import solve_exactly
from .topology import Topology

__all__ = ["Plan", "Request", "Worker", "plan_batch"]

EXACT_REQUESTS = 12  # up to this many requests, the full recurrence is tried


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
            if (type(value) is not int or not -INT64 <= value <= INT64) and not (value is None and name == "kv_worker"):
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

    worker         (requests,) int64: worker of each request, -1 where no worker has memory for it in this step
    busy_s         (workers,) float64: predicted finish time of each worker, queued work included
    lower_bound_s  no plan that serves these requests has a shorter step
    exact          True if the full recurrence was solved: then the step is optimal
    moved          requests whose KV cache leaves its worker; `copied` of them over the links, the others recomputed
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


def _check_sequence(items, name, kind):
    if not isinstance(items, Iterable):
        raise ValueError(f"{name} must be a sequence, got {items!r}")
    items = list(items)
    for i, item in enumerate(items):
        if not isinstance(item, kind):
            raise ValueError(f"{name}[{i}] must be a {kind.__name__}, got {item!r}")
    return items


class Problem:
    """The batch as arrays, and c(r, w)."""

    def __init__(self, requests, workers, topology):
        if not isinstance(topology, Topology):
            raise ValueError(f"topology must be a Topology, got {topology!r}")
        self.requests = _check_sequence(requests, "requests", Request)
        self.workers, self.topology = _check_sequence(workers, "workers", Worker), topology
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
        for name, low, dtype in (("tokens", 1, np.int64), ("kv_tokens", 0, np.int64), ("kv_bytes", 0, np.float64)):
            array = np.array([getattr(r, name) for r in self.requests], dtype=dtype)
            if (array < low).any():
                r = int(np.flatnonzero(array < low)[0])
                raise ValueError(f"requests[{r}].{name} must be at least {low}, got {array[r]}")
            setattr(self, name, array)
        self.home = np.array([-1 if r.kv_worker is None else r.kv_worker for r in self.requests], dtype=np.int64)
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
        """Seconds to have the KV cache of requests r on workers w (arrays), and where it is copied, not recomputed."""
        topology, num_bytes = self.topology, self.kv_bytes[r]
        near = topology.node_of(self.home[r]) == topology.node_of(w)
        copy = np.where(near, topology.intra.seconds(num_bytes), topology.inter.seconds(num_bytes))
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

    Returns a `Plan`. Memory is never exceeded; requests that fit nowhere are deferred (worker -1). KV caches stay where
    they are unless moving shortens the step. Ties go to the lower index. Raises ValueError for bad input.
    """
    problem = Problem(requests, workers, topology)
    if not problem.requests:
        return Plan(np.zeros(0, dtype=np.int64), problem.load, float(problem.load.max()), True)
    bound = lower_bound(problem)
    worker, exact = best_schedule(problem, bound), False
    if len(problem.requests) <= EXACT_REQUESTS:
        solved = solve_exactly(problem, worker)
        if solved is not None:
            worker, exact = solved, True
    busy, _ = problem.evaluate(worker)
    served = worker >= 0
    if not served.all():  # the bound holds for the requests that this step serves
        kept = [r for r, ok in zip(problem.requests, served) if ok]
        bound = lower_bound(Problem(kept, workers, topology)) if kept else float(problem.load.max())
    moved = np.flatnonzero(served & (problem.kv_tokens > 0) & (worker != problem.home))
    copied = moved[problem.fetch(moved, worker[moved])[1]]
    lowest = float(busy.max()) if exact else bound
    return Plan(worker, busy, lowest, exact, tuple(moved.tolist()), tuple(copied.tolist()))


def lower_bound(problem):
    """A step time that no assignment beats, memory aside: bisection on a necessary condition.

    If the step ends by T, worker w can take at most T - load_w of work, and the work is at least the sum of
    all requests' own compute, plus the cheapest way out for KV caches whose home has no room for them, plus
    one copy of a prefix for every worker that its requests cannot do without.
    """
    p = problem
    fast, workers = p.token_s.min(), len(p.workers)
    own = p.tokens * fast
    link = p.topology.intra if p.topology.gpus_per_node > 1 else p.topology.inter
    leave = np.minimum(link.seconds(p.kv_bytes), p.kv_tokens * fast)
    leave = np.where(p.kv_tokens > 0, leave, 0.0)
    # Alone on the least busy worker, a request takes its own tokens, and its prefix where nobody has it.
    alone = own + np.where(p.prefix >= 0, np.append(p.prefix_tokens * ~p.cached.any(axis=1), 0)[p.prefix] * fast, 0.0)
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
    others_load = np.sort(np.where(p.cached, np.inf, p.load), axis=1)  # per prefix, workers without it, roomiest first
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
