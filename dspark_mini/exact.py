"""Exact optima by HiGHS, which the benchmark and the tests compare with. They take milliseconds to minutes."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

__all__ = ["exact_step", "lp_peak"]


def lp_peak(placement, layer, load):
    """The busiest GPU's load under the best split of `load` (experts,), fractions allowed: a linear program."""
    slots, n = placement.slot_expert[layer], placement.num_slots
    equal, above = np.zeros((len(load), n + 1)), np.zeros((placement.num_gpus, n + 1))
    equal[slots, np.arange(n)] = 1
    above[placement.slot_gpu, np.arange(n)] = 1
    above[:, n] = -1
    return linprog(np.append(np.zeros(n), 1), above, np.zeros(placement.num_gpus), equal, load).fun


def exact_step(problem):
    """The optimal step time in seconds of a `planner.Problem`, or None if memory cannot hold all requests.

    A mixed-integer program in x[r, w] (request r runs on worker w), y[g, w] (prefix g is computed there) and T. It
    counts T in units of 1e-4 s, since the solver's tolerances are absolute.
    """
    p = problem
    cost, need = p.cost_matrix()
    n, w, g = *cost.shape, len(p.prefix_tokens)
    x, y = np.arange(n * w).reshape(n, w), n * w + np.arange(g * w).reshape(g, w)
    size = n * w + g * w + 1
    rows, low, high = [], [], []

    def add(index, value, lo, hi):
        row = np.zeros(size)
        row[index] = value
        rows.append(row)
        low.append(lo)
        high.append(hi)

    for r in range(n):
        add(x[r], 1, 1, 1)
        for k in range(w) if p.prefix[r] >= 0 else ():
            add([x[r, k], y[p.prefix[r], k]], [1, -1], -np.inf, 0)
    for k in range(w):
        new = np.flatnonzero(~p.cached[:, k])
        here, prefixes = np.concatenate([x[:, k], y[new, k]]), p.prefix_tokens[new]
        seconds = np.concatenate([cost[:, k], prefixes * p.token_s[k]])
        add(np.append(here, size - 1), np.append(1e4 * seconds, -1), -np.inf, -1e4 * p.load[k])
        add(here, np.concatenate([need[:, k], prefixes]), -np.inf, p.free[k])
    objective = np.zeros(size)
    objective[-1] = 1
    result = milp(
        objective,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.append(np.ones(size - 1), 0),
        bounds=Bounds(0, np.append(np.ones(size - 1), np.inf)),
        options={"mip_rel_gap": 0},
    )
    if result.status != 0:
        return None
    # HiGHS takes a number within 1e-6 of an integer for one, so the plan is read and priced anew.
    return float(p.evaluate(result.x[x].argmax(axis=1))[0].max())
