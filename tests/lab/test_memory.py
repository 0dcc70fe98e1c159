"""Peak memory: counted right on known allocations, and what the rungs predict: S x S for step 01, S from there on."""

import pytest
import torch
from support.checks import DEVICE

from ladder.lab.memory import peak_bytes
from ladder.lab.problem import AttentionProblem
from ladder.rungs import RUNGS

cpu_only = pytest.mark.skipif(DEVICE.type != "cpu", reason="the caching allocator rounds; exact bytes are the CPU's")


@cpu_only
def test_exact_bytes():
    x = torch.zeros(1000)
    assert peak_bytes(lambda x: x + 1, x) == 4000
    assert peak_bytes(lambda x: (x + 1) + 1, x) == 8000
    assert peak_bytes(lambda x: ((x + 1) + 1) + 1, x) == 8000  # the first is free again before the third
    assert peak_bytes(lambda x: x.view(10, 100)[2:].t(), x) == 0  # views
    assert peak_bytes(lambda x: x.add_(1), x) == 0
    assert peak_bytes(lambda x: [x.clone() for _ in range(5)], x) == 20000
    assert peak_bytes(lambda x: torch.empty(7, dtype=torch.int64), x) == 56


@cpu_only
def test_what_is_freed_does_not_count():
    def loop(x):
        for _ in range(10):
            y = x * 2
            del y

    assert peak_bytes(loop, torch.zeros(1000)) == 4000


def test_arguments_do_not_count():
    q, k, v = AttentionProblem(Hq=1, Hkv=1, Sq=64, Sk=64, D=16, Dv=16).make(DEVICE)
    assert peak_bytes(lambda q, k, v: q, q, k, v) == 0
    assert peak_bytes(lambda pair: pair[0], (q, k)) == 0


@cpu_only
def test_errors_pass_through():
    with pytest.raises(ZeroDivisionError):
        peak_bytes(lambda x: 1 // 0, torch.zeros(3))
    assert peak_bytes(lambda x: x + 1, torch.zeros(10)) == 40


def peak(rung, length):
    q, k, v = AttentionProblem(Hq=1, Hkv=1, Sq=length, Sk=length, D=16, Dv=16, causal=True).make(DEVICE)
    return peak_bytes(lambda *qkv: rung.attention(*qkv, causal=True), q, k, v)


@pytest.mark.parametrize("rung", [r for r in RUNGS if r.number <= 4], ids=lambda rung: rung.name)
def test_growth_with_the_length(rung):
    """Doubling a length beyond the tiles: four times for the matrix, at most twice for everything later."""
    short, long = peak(rung, 2048), peak(rung, 4096)
    if rung.number == 1:
        assert 3.8 < long / short < 4.2
        assert long > 2 * (2 * 4096 * 4096)  # bytes of two fp16 matrices
    else:
        assert long <= 2.05 * short
        assert long < 2 * 4096 * 4096
