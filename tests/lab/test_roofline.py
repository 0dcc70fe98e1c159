"""The limits of a machine: what binds, and that work and bytes are counted right."""

import math

import pytest
import torch
from support.checks import DEVICE

from ladder.lab import roofline
from ladder.lab.roofline import Limits, measure_limits
from ladder.lab.timing import Timing

CPU = torch.device("cpu")


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
    product, copied, *reads = work
    assert limits.matmul_tflops == pytest.approx(2 * product.shape[0] ** 3 / 1e9)
    assert limits.copy_tbs == pytest.approx(2 * copied.numel() * 4 / 1e9)
    total, rows, peaks = reads  # three ways to read it all, of which the fastest counts
    assert float(total) == float(rows.sum()) == copied.numel() and peaks.numel() * (1 << 20) == copied.numel()
    assert limits.read_tbs == pytest.approx(max(copied.numel() * 4 / 1e9, limits.copy_tbs))


@pytest.mark.slow
def test_limits_of_this_machine():
    limits = measure_limits(DEVICE, quick=True)
    assert all(math.isfinite(x) and x > 0 for x in limits.as_dict().values())
    assert 1e-4 < limits.matmul_tflops < 1e4 and 1e-4 < limits.copy_tbs <= limits.read_tbs < 100
