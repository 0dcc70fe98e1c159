"""Sampling: temperature, top-p, what a row may not know of its batch, and the parameters that are refused."""

import re

import numpy as np
import pytest
import torch

from ladder.engine.engine import SamplingParams
from ladder.engine.sampling import _mix, sample, uniform


def test_temperature_follows_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    draws = sample(logits.expand(20000, -1), [SamplingParams(temperature=0.7, seed=n) for n in range(20000)], [5] * 20000)
    share = torch.bincount(draws, minlength=4) / 20000
    assert (share - (logits[0] / 0.7).softmax(0)).abs().max() < 0.012  # four standard deviations


def test_positions_draw_independently():
    logits = torch.zeros(1, 2).expand(4000, -1)
    draws = sample(logits, [SamplingParams(temperature=1.0, seed=3)] * 4000, list(range(4000))).float()
    assert abs(draws.mean() - 0.5) < 0.035
    assert abs(torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1]) < 0.07


def test_top_p_keeps_the_fewest_tokens_that_suffice():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(3000, -1)
    for top_p, kept in ((0.4, {0}), (0.5, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        params = [SamplingParams(temperature=1.0, top_p=top_p, seed=n) for n in range(3000)]
        assert set(sample(logits, params, [0] * 3000).tolist()) == kept, top_p


def test_a_row_does_not_know_its_batch():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=t, top_p=p, seed=n) for n, (t, p) in enumerate(((0, 1), (0.5, 1), (2, 0.9), (1, 0.5), (0, 0.1)))]
    together = sample(logits, params, [3, 1, 4, 1, 5])
    for n in range(5):
        assert sample(logits[n : n + 1], [params[n]], [[3, 1, 4, 1, 5][n]]) == together[n]
    assert together[0] == logits[0].argmax() and together[4] == logits[4].argmax()


def test_uniform_numbers_are_inside_and_spread():
    x = uniform(torch.arange(200), 500)
    assert 0 < x.min() and x.max() < 1 and abs(x.mean() - 0.5) < 0.005 and abs(x.var() - 1 / 12) < 0.002


def test_noise_is_never_without_bound():
    """A hash whose upper 24 bits are all set; a number that is rounded to 1 is infinite noise, and a token drawn whatever its logit."""
    x = uniform(torch.tensor([_mix(113 * 0x9E3779B1 + 3)]), 94002)
    assert x[0, 94001] == x.max() == 1 - 2.0**-24


def test_no_draw_leaves_the_vocabulary_that_counts():
    """Of 102,400 tokens one has all the probability; these seeds drew others when a hash was rounded to 1."""
    logits = torch.zeros(1, 102400)
    logits[0, 7] = 1000.0
    for seed in (113, 304, 450, 506):
        for top_p in (0.5, 1.0):
            assert sample(logits, [SamplingParams(temperature=0.5, top_p=top_p, seed=seed)], [3]) == 7, seed


def test_all_tokens_are_all_tokens_in_any_company():
    """The first token's probability rounds to 1, and this seed draws the second: also beside a request with a smaller top_p."""
    logits = torch.tensor([[17.4, 0.0]])
    lonely, mate = SamplingParams(temperature=1.0, seed=29679190), SamplingParams(temperature=1.0, top_p=0.9)
    assert sample(logits, [lonely], [0]).tolist() == [1]
    assert sample(logits.expand(2, -1), [lonely, mate], [0, 0]).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", (1e-40, 1e-7, 1.0))
def test_the_smallest_top_p_keeps_the_best_token(temperature):
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    draws = sample(logits.expand(50, -1), [SamplingParams(temperature=temperature, top_p=1e-46, seed=n) for n in range(50)], [0] * 50)
    assert draws.tolist() == [1] * 50


@pytest.mark.parametrize("stop", (7, "ab", (1.5,), (True,)))
def test_stop_is_token_ids(stop):
    with pytest.raises(TypeError, match="sampling: stop is"):
        SamplingParams(stop=stop)


def test_stop_may_be_any_collection():
    assert SamplingParams(stop=[3, 4]).stop == SamplingParams(stop=iter((3, 4))).stop == (3, 4)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [({name: value}, TypeError, f"sampling: {name} is {value!r}; want {wanted}")
     for name, wanted in (("temperature", "a number of at least 0"), ("top_p", "a number above 0, at most 1"),
                          ("max_tokens", "an integer of at least 1"), ("seed", "an integer of at least 0"))
     for value in (None, "0.7", True, 1j)]
    + [({"max_tokens": 2.0}, TypeError, "max_tokens is 2.0"), ({"seed": 0.5}, TypeError, "seed is 0.5"), ({"stop": None}, TypeError, "stop is None"),
       ({"stop": (None,)}, TypeError, "stop is None; want an integer"), ({"stop": (-1,)}, ValueError, "stop is -1; want an integer"),
       ({"temperature": -1.0}, ValueError, "temperature is -1.0; want a number of at least 0"), ({"seed": -1}, ValueError, "seed is -1"),
       ({"temperature": float("inf")}, ValueError, "temperature is inf"), ({"temperature": float("nan")}, ValueError, "temperature is nan"),
       ({"top_p": 0.0}, ValueError, "top_p is 0.0; want a number above 0"), ({"top_p": 1.5}, ValueError, "top_p is 1.5"),
       ({"top_p": float("nan")}, ValueError, "top_p is nan"), ({"max_tokens": 0}, ValueError, "max_tokens is 0")],
    ids=str,
)  # fmt: skip
def test_sampling_refuses(wrong, error, message):
    with pytest.raises(error, match=re.escape(message)):
        SamplingParams(**wrong)


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(np.int64(3), np.float32(0.5), np.float64(1), np.int32(7), np.array([1, 2]))
    assert params == SamplingParams(3, 0.5, 1.0, 7, (1, 2))
    assert [type(value) for value in (params.temperature, params.max_tokens, params.stop[0])] == [float, int, int]
