"""Every rung on every edge case: within the error budget of eager low precision, and equal to the rung before."""

import functools

import pytest
import torch
from checks import CASES, DEVICE, can, check, compute, has_lse, small_tiles

from ladder.lab.parity import Oracle, inside_nan, nan_allocations
from ladder.lab.problem import MINILM, AttentionProblem
from ladder.rungs import RUNGS, find

CLIMBED = [rung for rung in RUNGS if rung.number <= 5]  # later rungs bring their own matrix


@functools.lru_cache(maxsize=64)
def computed(rung, name, small):
    return check(rung.attention, CASES[name], small=small)


def pairs():
    for name, case in CASES.items():
        for rung in CLIMBED:
            if can(rung, case.problem):
                for small in (False, True) if rung.number > 1 else (False,):
                    yield pytest.param(rung, name, small, id=f"{name}-{rung.name}{'-small' if small else ''}")


@pytest.mark.parametrize("rung, name, small", list(pairs()))
def test_edge(rung, name, small):
    out, oracle = computed(rung, name, small)
    below = [r for r in CLIMBED if r.number < rung.number and can(r, CASES[name].problem)]
    if below:
        before, _ = computed(below[-1], name, below[-1].number > 1)
        parity = oracle.agree(out, before)
        assert parity, parity.reason
