"""The clock: medians, rotation of inputs, limits on the number of runs."""

import time

import pytest
import torch

from ladder.lab import timing
from ladder.lab.timing import Timing, measure

CPU = torch.device("cpu")


def fake_clock(monkeypatch, durations):
    """time.perf_counter() that advances by the next of ``durations`` (ms) at every second reading."""
    state = {"now": 0.0, "reads": 0}
    steps = iter(durations)

    def perf_counter():
        state["reads"] += 1
        if state["reads"] % 2 == 0:
            state["now"] += next(steps) / 1e3
        return state["now"]

    monkeypatch.setattr(timing.time, "perf_counter", perf_counter)


def test_median_and_percentiles(monkeypatch):
    fake_clock(monkeypatch, [99.0, 5.0, 1.0, 3.0, 2.0, 4.0])  # the first call is not counted
    result = measure(lambda: None, [()], device=CPU, budget_ms=15, min_runs=5)
    assert (result.median, result.p20, result.p80, result.runs) == pytest.approx((3.0, 1.8, 4.2, 5))
    assert result.as_dict() == {"median": 3.0, "p20": 1.8, "p80": 4.2}


def test_first_call_is_warm_up_unless_it_is_endless(monkeypatch):
    fake_clock(monkeypatch, [2000.0])
    assert measure(lambda: None, [()], device=CPU, budget_ms=100) == Timing(2000.0, 2000.0, 2000.0, 1)


def test_bounds_on_runs(monkeypatch):
    fake_clock(monkeypatch, [50.0] * 100)
    assert measure(lambda: None, [()], device=CPU, budget_ms=10, min_runs=3).runs == 3
    fake_clock(monkeypatch, [50.0] * 100)
    assert measure(lambda: None, [()], device=CPU, budget_ms=200, min_runs=3).runs == 4
    fake_clock(monkeypatch, [0.01] * 100)
    assert measure(lambda: None, [()], device=CPU, budget_ms=200, max_runs=7).runs == 7


def test_inputs_rotate():
    seen = []
    measure(lambda x, y: seen.append((x, y)), [(1, 2), (3, 4), (5, 6)], device=CPU, budget_ms=1000, max_runs=5)
    assert seen == [(1, 2), (1, 2), (3, 4), (5, 6), (1, 2), (3, 4)]


def test_real_time_is_measured():
    result = measure(lambda: time.sleep(0.02), [()], device=CPU, budget_ms=1, min_runs=3)
    assert 19 <= result.p20 <= result.median <= result.p80 < 2000


def test_no_inputs():
    with pytest.raises(ValueError, match="inputs is empty; want at least one tuple"):
        measure(lambda: None, [], device=CPU)
