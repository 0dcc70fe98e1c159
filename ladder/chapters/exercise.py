"""Exercises of the chapters: two levels of tests and three hints each.

``check("03a", fold)`` prints how far a function is; ``hint("03a", 1)`` gives away a little, ``hint("03a", 3)`` almost
all; ``solution("03a")`` shows one answer. The visible test is the one a reader would write first. The strict test holds
the cases that break plausible answers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ladder.lab import memory

EXERCISES = {}


class NotYet(AssertionError):
    """What a test says when an answer is wrong: what came, what is wanted."""


@dataclass(frozen=True)
class Exercise:
    """``visible(answer)`` and ``strict(answer)`` raise NotYet;
    ``solution`` is "module:function" of one right answer."""

    name: str
    title: str
    hints: tuple[str, str, str]
    visible: Callable
    strict: Callable
    solution: str

    def solve(self):
        """The solution, as an answer to pass to the tests."""
        import importlib

        module, function = self.solution.split(":")
        return getattr(importlib.import_module(module), function)


def check(name, answer):
    """Run an exercise's tests on an answer, the strict one once the visible one passes; print a line for each."""
    exercise = find(name)
    for level in ("visible", "strict"):
        verdict = run(exercise, level, answer)
        print(f"{name} {level}: {'pass' if verdict is None else 'not yet: ' + verdict}")
        if verdict is not None:
            break


def run(exercise, level, answer):
    """None when ``answer`` passes that level's test, else one line that says why not."""
    try:
        getattr(exercise, level)(answer)
    except NotYet as reason:
        return str(reason)
    except Exception as error:  # an answer under construction may do anything
        return f"it raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    return None


def hint(name, level):
    """Print hint 1, 2 or 3 of an exercise."""
    hints = find(name).hints
    if level not in (1, 2, 3):
        raise ValueError(f"level is {level!r}; want 1, 2 or 3")
    print(f"{name}, hint {level}: {hints[level - 1]}")


def solution(name):
    """The source of a solution, highlighted."""
    from ladder.chapters.source import Source

    return Source(find(name).solve())


def find(name):
    """The Exercise of that name; ValueError lists them all."""
    if name not in EXERCISES:
        raise ValueError(f"exercise is {name!r}; want one of {', '.join(EXERCISES)}")
    return EXERCISES[name]


def _exercise(name, title, hints, visible, strict, solution):
    EXERCISES[name] = Exercise(name, title, hints, visible, strict, solution)


# ---------------------------------------------------------------- what the tests say


def _tensor(got, shape, what="the result"):
    if not isinstance(got, torch.Tensor):
        raise NotYet(f"{what} is {type(got).__name__}; want a torch.Tensor of shape {tuple(shape)}")
    if tuple(got.shape) != tuple(shape):
        raise NotYet(f"{what} has shape {tuple(got.shape)}; want {tuple(shape)}")


def _close(got, expected, case, what="the result", tolerance=1e-4):
    _tensor(got, expected.shape, what)
    if torch.isnan(got).any():
        raise NotYet(f"{case}: {int(torch.isnan(got).sum())} of {got.numel()} elements of {what} are NaN")
    got, expected = got.double(), expected.double()
    error = torch.where(got == expected, 0.0, (got - expected).abs())
    worst = float(torch.nan_to_num(error, nan=math.inf).max()) if error.numel() else 0.0
    limit = tolerance * max(
        1.0, float(expected[torch.isfinite(expected)].abs().max()) if torch.isfinite(expected).any() else 1.0
    )
    if not worst <= limit:
        raise NotYet(f"{case}: {what} is off by {worst:.2g}; want within {limit:.2g}")


def _number(got, expected, case, tolerance=0.0):
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        raise NotYet(f"the result is {type(got).__name__}; want a number")
    if not abs(got - expected) <= tolerance * abs(expected):
        raise NotYet(
            f"{case}: {got:.6g}; want {expected:.6g}" + (f" within {100 * tolerance:.0f} %" if tolerance else "")
        )


def _held(function, args, limit, why):
    """Refuse an answer that holds more than ``limit`` bytes at once."""
    peak = memory.peak_bytes(function, *args)
    if peak > limit:
        raise NotYet(f"it held {peak:,} bytes at once; want at most {limit:,}: {why}")


def _noise(*shape, seed=0, shift=0.0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale + shift
