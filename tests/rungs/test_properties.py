"""What is true of attention whatever the numbers are, on shapes that hypothesis picks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checks import DEVICE, small_tiles

from ladder.rungs import RUNGS, find

CLIMBED = [rung for rung in RUNGS if rung.number <= 5 or rung.number == 8]
INTERPRETED = DEVICE.type == "cpu"


@st.composite
def problems(draw, grouped=True, causal=st.booleans(), least_keys=1):
    """(q, k, v, causal) in float32; lengths around tile edges, any group, head sizes that are no powers of two."""
    heads = draw(st.sampled_from([1, 2]))
    group = draw(st.sampled_from([1, 3])) if grouped else 1
    Sq = draw(st.sampled_from([1, 2, 15, 16, 17, 33]))
    Sk = max(least_keys, draw(st.sampled_from([1, 2, 15, 16, 17, 40])))
    D = draw(st.sampled_from([1, 8, 16, 20]))
    Dv = draw(st.sampled_from([D, 24])) if grouped else D
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    spread = draw(st.sampled_from([0.1, 1.0, 8.0]))
    q, k, v = (
        torch.randn(1, h, length, dim, generator=generator)
        for h, length, dim in ((heads * group, Sq, D), (heads, Sk, D), (heads, Sk, Dv))
    )
    return (spread * q).to(DEVICE), k.to(DEVICE), v.to(DEVICE), draw(causal)


def holds(rungs=CLIMBED, **options):
    """Make a test of ``body(attention, q, k, v, causal)`` on examples of ``problems(**options)``, always the same."""

    def decorate(body):
        @pytest.mark.parametrize("rung", rungs, ids=lambda rung: rung.name)
        def test(rung):
            examples = 6 if rung.needs_triton and INTERPRETED else 25

            @settings(deadline=None, derandomize=True, max_examples=examples, database=None)
            @given(problems(grouped="grouped_heads" in rung.features, **options))
            def run(problem):
                with small_tiles(rung.attention) as attention:
                    body(attention, *problem)

            run()

        test.__doc__ = body.__doc__
        return test

    return decorate


def close(a, b, tolerance=3e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


WITH_LSE = [rung for rung in CLIMBED if "lse" in rung.features]


@holds(causal=st.just(False))
def test_order_of_keys_does_not_matter(attention, q, k, v, _):
    order = torch.randperm(k.shape[2], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    close(attention(q, k[:, :, order], v[:, :, order]), attention(q, k, v))


@holds()
def test_adding_a_constant_to_a_row_of_scores_changes_nothing(attention, q, k, v, causal):
    """One more direction that all keys share and the queries weigh as they like: a constant for each row."""
    constant = 5 * torch.ones_like(q[..., :1]).cumsum(2).sin()
    shifted_q, shifted_k = torch.cat([q, constant], 3), torch.cat([k, torch.ones_like(k[..., :1])], 3)
    if v.shape[3] == k.shape[3]:  # keep equal head sizes for the rungs that want them
        v = torch.cat([v, torch.ones_like(v[..., :1])], 3)
        plain_q, plain_k = (torch.cat([x, torch.zeros_like(x[..., :1])], 3) for x in (q, k))
    else:
        plain_q, plain_k = q, k
    close(
        attention(shifted_q, shifted_k, v, causal=causal, scale=0.5),
        attention(plain_q, plain_k, v, causal=causal, scale=0.5),
    )


@holds()
def test_output_lies_between_the_values(attention, q, k, v, _):
    out = attention(q, k, v)
    v = v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    slack = 1e-5 * v.abs().amax()
    assert (out >= v.amin(dim=2, keepdim=True) - slack).all()
    assert (out <= v.amax(dim=2, keepdim=True) + slack).all()


@holds()
def test_linear_in_the_values(attention, q, k, v, causal):
    w = v.flip(3).cos()
    together = attention(q, k, 2 * v - 3 * w, causal=causal)
    close(together, 2 * attention(q, k, v, causal=causal) - 3 * attention(q, k, w, causal=causal), 1e-4)


@holds()
def test_ones_stay_ones(attention, q, k, v, causal):
    """Weights sum to one in every row that sees a key; the others are zero."""
    out = attention(q, k, torch.ones_like(v), causal=causal)
    seen = torch.ones(q.shape[2], dtype=torch.bool, device=DEVICE)
    if causal:
        seen = torch.arange(q.shape[2], device=DEVICE) + k.shape[2] - q.shape[2] >= 0
    close(out[:, :, seen], torch.ones_like(out[:, :, seen]))
    assert (out[:, :, ~seen] == 0).all()


@holds()
def test_future_keys_change_nothing(attention, q, k, v, _):
    """Row i of a causal call depends on keys up to i + Sk - Sq alone, to the last bit."""
    offset = k.shape[2] - q.shape[2]
    before = attention(q, k, v, causal=True)
    row = q.shape[2] // 2
    future = max(0, row + offset + 1)
    k, v = k.clone(), v.clone()
    k[:, :, future:] = 100.0
    v[:, :, future:] = -100.0
    after = attention(q, k, v, causal=True)
    assert torch.equal(after[:, :, : row + 1], before[:, :, : row + 1])


@holds()
def test_last_visible_key_matters(attention, q, k, v, _):
    """Each row does see key i + Sk - Sq: a value there that no other has shows in row i and not in row i - 1."""
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    offset = k.shape[2] - q.shape[2]
    row = q.shape[2] - 1 - (q.shape[2] - 1) // 3
    if row + offset < 0:
        return
    v = torch.zeros_like(v)
    v[:, :, row + offset] = row + offset + 1.0
    out = attention(q, k, v, causal=True)
    close(out[:, :, row], torch.ones_like(out[:, :, row]))
    assert (out[:, :, :row] == 0).all()


@holds()
def test_causal_rows_are_dense_calls_on_their_prefix(attention, q, k, v, _):
    out = attention(q, k, v, causal=True)
    for row in {0, q.shape[2] // 2, q.shape[2] - 1}:
        keys = row + 1 + k.shape[2] - q.shape[2]
        if keys > 0:
            alone = attention(q[:, :, row : row + 1], k[:, :, :keys], v[:, :, :keys])
            close(out[:, :, row : row + 1], alone)


@holds(WITH_LSE, causal=st.just(False), least_keys=2)
def test_two_halves_merge_into_the_whole(attention, q, k, v, _):
    """The log-sum-exp carries what is needed to merge partial results over disjoint keys."""
    cut = k.shape[2] // 3 + 1
    out, lse = attention(q, k, v, return_lse=True)
    left, left_lse = attention(q, k[:, :, :cut], v[:, :, :cut], return_lse=True)
    right, right_lse = attention(q, k[:, :, cut:], v[:, :, cut:], return_lse=True)
    merged_lse = torch.logaddexp(left_lse, right_lse)
    merged = left * (left_lse - merged_lse).exp()[..., None] + right * (right_lse - merged_lse).exp()[..., None]
    close(merged_lse, lse)
    close(merged, out)


@holds(WITH_LSE)
def test_lse_is_that_of_the_scores(attention, q, k, v, causal):
    _, lse = attention(q, k, v, causal=causal, scale=0.3, return_lse=True)
    scores = 0.3 * q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(2, 3)
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=DEVICE).triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, float("-inf"))
    close(lse, scores.logsumexp(-1).float())


@holds([find(4), find(5)])
def test_grouped_heads_are_repeated_heads(attention, q, k, v, causal):
    group = q.shape[1] // k.shape[1]
    repeated = (x.repeat_interleave(group, dim=1) for x in (k, v))
    close(attention(q, k, v, causal=causal), attention(q, *repeated, causal=causal))
