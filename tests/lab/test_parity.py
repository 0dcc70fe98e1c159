"""The judge is judged: what it must accept, what it must refuse, and with which words."""

import pytest
import torch
from support.checks import CASES, DEVICE

from ladder.lab.parity import Oracle, Parity, inside_nan, nan_allocations, poison
from ladder.lab.problem import AttentionProblem, reference
from ladder.rungs import find


@pytest.fixture
def solved():
    q, k, v = CASES["causal 33x17"].tensors()
    out, lse = reference(q, k, v, causal=True)
    return Oracle(q, k, v, causal=True), out.to(q.dtype), lse.float()


def test_accepts_the_answer_and_eager_low_precision(solved):
    oracle, out, lse = solved
    parity = oracle.check(out, lse)
    assert parity and parity.ok and parity.reason == "" and 0 <= parity.max_error <= parity.budget
    q, k, v = CASES["causal 33x17"].tensors()
    eager, _ = reference(q, k, v, causal=True, compute=q.dtype)
    assert oracle.check(eager).max_error <= oracle.budget / 2
    assert oracle.check(find(1).attention(q, k, v, causal=True))


def test_budget_is_small_against_the_values(solved):
    """A judge that allows everything is none: the budget is about a hundredth of the values, far less in float32."""
    oracle, out, _ = solved
    assert 0 < oracle.budget < 0.01 * float(out.abs().max())
    q, k, v = CASES["float32"].tensors()
    assert 0 < Oracle(q, k, v).budget < 1e-5


def test_refuses_one_wrong_element_anywhere(solved):
    oracle, out, _ = solved
    for place in ((0, 0, 0, 0), (0, 1, 32, 15), (0, 1, 20, 7)):
        wrong = out.clone()
        wrong[place] += 3 * oracle.budget
        parity = oracle.check(wrong)
        assert not parity and "over the budget" in parity.reason and parity.max_error >= 2 * oracle.budget


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
def test_refuses_what_is_not_finite(solved, value):
    oracle, out, _ = solved
    out[0, 0, 5, 3] = value
    parity = oracle.check(out)
    assert not parity and parity.reason == f"1 of {out.numel()} outputs are not finite"


def test_refuses_shape_and_dtype(solved):
    oracle, out, lse = solved
    for wrong in (out[..., :3], out[:, :1], out.float(), out[0]):
        assert not oracle.check(wrong) and "want (1, 2, 33, 16)" in oracle.check(wrong).reason
    for wrong in (lse[..., :5], lse.double(), lse.transpose(1, 2)):
        assert not oracle.check(out, wrong) and oracle.check(out, wrong).reason.startswith("lse is")


def test_refuses_a_wrong_lse(solved):
    oracle, out, lse = solved
    seen = torch.isfinite(lse)
    for wrong in (
        lse + 0.1,
        lse / 0.6931,
        torch.where(seen, lse, 0.0),
        torch.where(seen, lse, -1e4),
        lse * float("nan"),
    ):
        parity = oracle.check(out, wrong)
        assert not parity and parity.reason.startswith("lse error")
    assert oracle.check(out, torch.where(seen, lse, -float("inf")))


def test_agree(solved):
    oracle, out, _ = solved
    near, far = out.clone(), out.clone()
    near[0, 0, 30, 0] += oracle.budget
    far[0, 0, 30, 0] += 4 * oracle.budget
    assert oracle.agree(near, out)
    assert not oracle.agree(far, out) and "differs from the previous rung" in oracle.agree(far, out).reason
    assert not oracle.agree(out * float("nan"), out)


def test_rows_of_a_long_sequence_are_sampled_with_its_ends():
    q, k, v = AttentionProblem(Hq=1, Hkv=1, Sq=700, Sk=700, D=8, Dv=8, causal=True).make(DEVICE)
    oracle = Oracle(q, k, v, causal=True, sample_rows=64)
    assert 60 <= len(oracle.rows) <= 64 and {0, 1, 698, 699} <= set(oracle.rows.tolist())
    out = find(3).attention(q, k, v, causal=True)
    assert oracle.check(out)
    for row in (0, 699):
        wrong = out.clone()
        wrong[:, :, row] += 0.5
        assert not oracle.check(wrong)
    unsampled = next(i for i in range(700) if i not in set(oracle.rows.tolist()))
    out[0, 0, unsampled, 0] = float("nan")
    assert "not finite" in oracle.check(out).reason


@pytest.mark.parametrize("name", ("empty batch", "no queries", "no keys", "nothing"))
def test_nothing_to_compare(name):
    q, k, v = CASES[name].tensors()
    oracle = Oracle(q, k, v)
    assert oracle.check(torch.zeros(oracle.shape, dtype=q.dtype, device=DEVICE))


def test_parity_is_its_ok():
    assert Parity(True, 0.0, 1.0) and not Parity(False, 2.0, 1.0, "too far")


def test_poison_fills_in_place():
    a, b = torch.zeros(3), torch.ones(2, 2, dtype=torch.float16)
    poison(a, b)
    assert a.isnan().all() and b.isnan().all()


def test_inside_nan_is_equal_and_surrounded():
    x = torch.randn(2, 3, 4, device=DEVICE)
    view = inside_nan(x, margin=2)
    assert torch.equal(view, x) and not view.is_contiguous()
    whole = torch.as_strided(view, (6, 7, 8), (56, 8, 1), 0)
    assert int(whole.isnan().sum()) == 6 * 7 * 8 - x.numel()


def test_nan_allocations_fill_and_come_back():
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    with nan_allocations():
        assert torch.empty(100).isnan().all()
        assert torch.zeros(3).new_empty(5, dtype=torch.float16).isnan().all()
        assert torch.empty_like(torch.zeros(4, device=DEVICE)).isnan().all()
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    with pytest.raises(KeyError), nan_allocations():
        raise KeyError
    assert before[0] == torch.are_deterministic_algorithms_enabled()


def test_an_output_that_is_not_written_is_caught():
    """What the two of them are for: memory that a kernel forgot is NaN, and the judge sees it."""
    q, k, v = CASES["dense 33x17"].tensors()
    with nan_allocations():
        out = torch.empty_like(q)
        out[:, :, :-1] = find(1).attention(q, k, v)[:, :, :-1]
    assert "not finite" in Oracle(q, k, v).check(out).reason
