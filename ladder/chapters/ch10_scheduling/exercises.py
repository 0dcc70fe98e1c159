"""Exercises of the scheduling chapter: a visible and a stricter test, three hints, one solution each.

`check("10a", function)` says how far an answer is, `hint("10a", 1)` gives away a little, `hint("10a", 3)`
almost all, `solution("10a")` shows one answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dspark_mini.placement import replicate
from dspark_mini.trace import r1_like_load
from ladder.chapters import exercise
from ladder.chapters.exercise import NotYet

__all__ = ["EXERCISES", "check", "hint", "run", "solution"]


@dataclass(frozen=True)
class Exercise:
    """`visible(answer)` and `strict(answer)` raise NotYet; `solve` is one right answer."""

    hints: tuple
    visible: Callable
    strict: Callable
    solve: Callable


def check(name, answer):
    """Run an exercise's tests on an answer, the strict one once the visible one passes; print a line for each."""
    for level in ("visible", "strict"):
        verdict = run(name, level, answer)
        print(f"{name} {level}: {'pass' if verdict is None else 'not yet: ' + verdict}")
        if verdict is not None:
            return


def run(name, level, answer):
    """None if `answer` passes that level's test, else one line that says why not."""
    return exercise.run(_find(name), level, answer)


def hint(name, level):
    """Print hint 1, 2 or 3."""
    if level not in (1, 2, 3):
        raise ValueError(f"level must be 1, 2 or 3, got {level!r}")
    print(f"{name}, hint {level}: {_find(name).hints[level - 1]}")


def solution(name):
    """Print the source of one solution."""
    print(inspect.getsource(_find(name).solve).rstrip())


def _find(name):
    if name not in EXERCISES:
        raise ValueError(f"exercise must be one of {', '.join(EXERCISES)}, got {name!r}")
    return EXERCISES[name]


def _want(got, wanted, what):
    if got is None:
        raise NotYet(f"{what}: your function returned None")
    if np.shape(got) != np.shape(wanted) or not np.allclose(got, wanted):
        raise NotYet(f"{what}: got {np.asarray(got).tolist()}, wanted {np.asarray(wanted).tolist()}")


# ------------------------------------------------------------------------------------------------- 10a


def copies_for(load, num_slots):
    """How many copies each expert gets, spare slots going one by one to the expert whose copies are heaviest."""
    copies = np.ones(len(load), dtype=int)
    for _ in range(num_slots - len(load)):
        copies[np.argmax(np.asarray(load) / copies)] += 1
    return copies


def _visible_copies(answer):
    _want(answer(np.array([7.0, 3.0, 1.0]), 5), [3, 1, 1], "loads 7, 3, 1 in five slots")


def _strict_copies(answer):
    _want(answer(np.array([4.0, 4.0, 1.0]), 4), [2, 1, 1], "equal loads: the lower id first")
    _want(answer(np.array([5.0, 2.0]), 2), [1, 1], "no spare slot")
    load = r1_like_load(num_layers=1)[0]
    _want(answer(load, 288), replicate(load[None], 288, 288)[0], "256 experts in 288 slots")


# ------------------------------------------------------------------------------------------------- 10b


def pour(tokens, levels):
    """Pour `tokens` over GPUs that already stand at `levels`, lowest
    first, until they are level (fractions allowed)."""
    low = np.sort(levels)
    for n in range(1, len(low) + 1):
        height = (tokens + low[:n].sum()) / n
        if n == len(low) or height <= low[n]:
            return np.maximum(height - np.asarray(levels), 0.0)


def _visible_pour(answer):
    _want(answer(6, np.array([1.0, 3.0])), [4, 2], "6 tokens on levels 1, 3")


def _strict_pour(answer):
    _want(answer(1, np.array([5.0, 0.0, 2.0])), [0, 1, 0], "too little to reach the second level")
    _want(answer(0, np.array([2.0, 1.0])), [0, 0], "nothing to pour")
    rng = np.random.default_rng(0)
    for _ in range(20):
        levels, tokens = rng.uniform(0, 10, 6), rng.uniform(0, 40)
        got = answer(tokens, levels.copy())
        _want(got, pour(tokens, levels), "random levels")


# ------------------------------------------------------------------------------------------------- 10c


def best_step(costs):
    """Smallest possible finish time for costs (requests, workers), by the recurrence over sets of load vectors."""
    states = {tuple([0.0] * len(costs[0]))}
    for row in costs:
        states = {t[:w] + (t[w] + c,) + t[w + 1 :] for t in states for w, c in enumerate(row)}
    return min(max(t) for t in states)


def _visible_step(answer):
    got = answer([[3, 3], [2, 2], [2, 2], [1, 1]])
    if got is None:
        raise NotYet("requests of 3, 2, 2, 1 on two workers: your function returned None")
    _want(got, 4, "requests of 3, 2, 2, 1 on two workers")


def _strict_step(answer):
    # Longest first, each where it ends first, gives 11 here.
    _want(answer([[5, 5], [5, 5], [4, 4], [3, 3], [3, 3]]), 10, "5, 5, 4, 3, 3: longest-first gives 11")
    _want(answer([[1, 9], [9, 1], [5, 5]]), 6, "costs that differ by worker")
    _want(answer([[2, 2, 2]]), 2, "one request")
    rng = np.random.default_rng(1)
    for _ in range(5):
        costs = rng.integers(1, 20, (6, 3)).tolist()
        _want(answer(costs), best_step(costs), "random costs")


EXERCISES = {
    "10a": Exercise(
        (
            "The load of one copy is load / copies.",
            "Start with one copy each; hand out num_slots - len(load) more, one at a time.",
            "Each time: copies[np.argmax(load / copies)] += 1.",
        ),
        _visible_copies,
        _strict_copies,
        copies_for,
    ),
    "10b": Exercise(
        (
            "Some GPUs end under water, all at one height; the others are too high and get nothing.",
            "If the n lowest are under water, the height is (tokens + the sum of their levels) / n.",
            "Take the smallest n whose height does not exceed the next level; return max(height - level, 0).",
        ),
        _visible_pour,
        _strict_pour,
        pour,
    ),
    "10c": Exercise(
        (
            "A state is the tuple of the workers' finish times.",
            "Each request turns one state into as many as there are workers; equal tuples are one state.",
            "states = {t with t[w] + row[w] : t in states, w}; at the end min(max(t)).",
        ),
        _visible_step,
        _strict_step,
        best_step,
    ),
}
