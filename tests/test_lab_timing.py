"""The clock: medians, rotation of inputs, limits on runs; the roofline that is measured with it."""

import math
import time

import pytest
import torch
from checks import DEVICE

from ladder.lab import roofline, timing
from ladder.lab.roofline import Limits, measure_limits
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


def test_the_binding_limit():
    limits = Limits(matmul_tflops=800.0, read_tbs=4.0, copy_tbs=3.5)
    assert limits.ridge == 200.0
    assert limits.bound(8e12, 1e9) == (pytest.approx(10.0), "compute")
    assert limits.bound(8e9, 4e9) == (pytest.approx(1.0), "memory")
    assert limits.bound(200.0 * 4e9, 4e9)[1] == "compute"  # on the ridge
    assert limits.as_dict() == {"matmul_tflops": 800.0, "read_tbs": 4.0, "copy_tbs": 3.5}


def test_limits_count_work_and_bytes(monkeypatch):
    """With every call taking one millisecond, the limits are the work that was done."""
    work = []

    def one_ms(fn, inputs, **options):
        work.append(fn(*inputs[0]))
        return Timing(1.0, 1.0, 1.0, 1)

    monkeypatch.setattr(roofline, "measure", one_ms)
    limits = measure_limits(CPU, quick=True)
    product, copied, rows = work
    assert limits.matmul_tflops == pytest.approx(2 * product.shape[0] ** 3 / 1e9)
    assert limits.copy_tbs == pytest.approx(2 * copied.numel() * 4 / 1e9)
    assert float(rows.sum()) == copied.numel()  # every byte was read
    assert limits.read_tbs == pytest.approx(max(copied.numel() * 4 / 1e9, limits.copy_tbs))


@pytest.mark.slow
def test_limits_of_this_machine():
    limits = measure_limits(DEVICE, quick=True)
    assert all(math.isfinite(x) and x > 0 for x in limits.as_dict().values())
    assert 1e-4 < limits.matmul_tflops < 1e4 and 1e-4 < limits.copy_tbs <= limits.read_tbs < 100
