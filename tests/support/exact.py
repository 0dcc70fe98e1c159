"""The exact optimum of a placement, by HiGHS; other optima stand in `dspark_mini.exact`."""

import itertools

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp


def exact_peak(load, num_gpus, num_slots):
    """Smallest possible load of the busiest GPU under equal splits on distinct GPUs, by HiGHS over all copy counts."""
    experts, best = len(load), np.inf
    size = num_slots // num_gpus + (np.arange(num_gpus) < num_slots % num_gpus)
    spare = num_slots - experts
    for extra in itertools.combinations_with_replacement(range(experts), spare):
        copies = 1 + np.bincount(extra, minlength=experts)
        if copies.max() > num_gpus:
            continue
        weight = load / copies
        n = experts * num_gpus  # x[e, g] says that GPU g holds expert e
        one_each = np.kron(np.eye(experts), np.ones(num_gpus))
        room = np.kron(np.ones(experts), np.eye(num_gpus))
        busy = np.kron(weight, np.eye(num_gpus))
        column = np.zeros((experts, 1)), np.zeros((num_gpus, 1)), -np.ones((num_gpus, 1))
        result = milp(
            np.append(np.zeros(n), 1.0),
            constraints=[
                LinearConstraint(np.hstack([one_each, column[0]]), copies, copies),
                LinearConstraint(np.hstack([room, column[1]]), size, size),
                LinearConstraint(np.hstack([busy, column[2]]), -np.inf, 0),
            ],
            integrality=np.append(np.ones(n), 0),
            bounds=Bounds(0, np.append(np.ones(n), np.inf)),
            options={"mip_rel_gap": 0},
        )
        if result.status == 0:
            best = min(best, result.fun)
    return best
