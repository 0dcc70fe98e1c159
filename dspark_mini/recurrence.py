"""The exact plan of a small batch, by a recurrence over its requests.

With the costs c(r, w) of `planner.py`, t = (t_1 .. t_W) the finish times, m the free memory and h the workers
that now hold the current request's prefix, let F_0 = {(load, free, cached)} and

    F_i = prune { (t + (c(r_i, w) + prefix_w) * e_w,  m - need * e_w,  h + {w})
                  :  (t, m, h) in F_{i-1},  w fits }

and the answer is the smallest max(t) in F_N. Requests are ordered by prefix, so h is one set at a time.
`prune` drops duplicates and states whose own lower bound is not below the best plan known. Small problems are
solved this way (`Plan.exact`), and the tests compare the result with a mixed-integer program. The number of
states grows like W^N, so for a thousand requests this is *not* what runs: `list_schedule.py` is.
"""

from __future__ import annotations

import numpy as np

EXACT_STATES = 20_000  # the search gives up when more states than this are alive


def solve_exactly(problem, known):
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
                # The rest takes at least `cheapest`: a state goes if even perfect spreading misses the limit.
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
