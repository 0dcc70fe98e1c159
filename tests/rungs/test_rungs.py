"""Every rung on every edge case: within the error budget of eager low precision, and equal to the rung before."""

import functools
from functools import partial

import pytest
import torch
from support.checks import CASES, DEVICE, can, check, compute, has_lse, small_tiles
from support.ragged import LENGTHS, check_ragged, packed, starts

from ladder.lab.parity import Oracle
from ladder.lab.problem import MINILM, AttentionProblem
from ladder.rungs import RUNGS, find

CLIMBED = [rung for rung in RUNGS if rung.number <= 5 or rung.number == 8]  # later rungs bring their own matrix


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


@pytest.mark.parametrize("rung", CLIMBED, ids=lambda rung: rung.name)
@pytest.mark.parametrize("causal", (False, True))
def test_real_input_across_tiles(rung, causal):
    """All layers and heads of the captured input; layer 0 has rows whose softmax is almost one-hot."""
    interpreted = rung.needs_triton and DEVICE.type == "cpu"
    length = 100 if interpreted else 512
    q, k, v = MINILM.replace(B=3, Sq=length, Sk=length).make(DEVICE)
    if interpreted:  # two heads of each layer: the interpreter takes its time
        q, k, v = (x[:, 5:7] for x in (q, k, v))
    oracle = Oracle(q, k, v, causal=causal)
    with small_tiles(rung.attention, 64, 32) as attention:
        out = attention(q, k, v, causal=causal)
        assert oracle.check(out), oracle.check(out).reason
    for before in CLIMBED[: rung.number - 1]:
        if not before.needs_triton:
            agreement = oracle.agree(out, before.attention(q, k, v, causal=causal))
            assert agreement, f"{before.name}: {agreement.reason}"


@pytest.mark.parametrize("rung", CLIMBED, ids=lambda rung: rung.name)
def test_tile_sizes_do_not_change_the_answer(rung):
    case = CASES["causal 129x130"]
    q, k, v = case.tensors()
    oracle = Oracle(q, k, v, causal=True)
    for rows, keys in ((16, 64), (32, 16), (64, 128)):
        with small_tiles(rung.attention, rows, keys) as attention:
            out = attention(q, k, v, causal=True)
        assert oracle.check(out), f"tiles {rows} x {keys}: {oracle.check(out).reason}"


@pytest.mark.parametrize("rung", CLIMBED, ids=lambda rung: rung.name)
def test_every_position_of_the_diagonal(rung):
    """Sk - Sq from below -tile to above +tile: the diagonal meets every corner of a tile."""
    for offset in range(-18, 19):
        q, k, v = AttentionProblem(Hq=1, Hkv=1, Sq=33, Sk=33 + offset, D=16, Dv=16, causal=True).make(DEVICE)
        with small_tiles(rung.attention) as attention:
            parity = Oracle(q, k, v, causal=True).check(attention(q, k, v, causal=True))
        assert parity, f"Sk - Sq = {offset}: {parity.reason}"


@pytest.mark.parametrize("rung", CLIMBED, ids=lambda rung: rung.name)
def test_no_heads(rung):
    q = k = v = torch.zeros(2, 0, 5, 16, dtype=torch.float16, device=DEVICE)
    out, lse = compute(rung.attention, q, k, v, causal=True, scale=None, lse=has_lse(rung.attention))
    assert out.shape == (2, 0, 5, 16)
    assert lse is None or lse.shape == (2, 0, 5)


@pytest.mark.parametrize("rung", CLIMBED, ids=lambda rung: rung.name)
def test_output_is_fresh_contiguous_and_inputs_are_kept(rung):
    q, k, v = CASES["bshd"].tensors()
    kept = [x.clone() for x in (q, k, v)]
    out = rung.attention(q, k, v, causal=True)
    assert out.is_contiguous() and out.dtype == q.dtype
    assert all(out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for x in (q, k, v))
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), kept))


@pytest.mark.parametrize("rung", CLIMBED, ids=lambda rung: rung.name)
def test_scale_zero_is_the_mean_of_the_visible_values(rung):
    q, k, v = CASES["causal 17x33"].tensors(dtype="float32")
    out = rung.attention(q, k, v, causal=True, scale=0.0)
    for row in (0, 5, 16):
        torch.testing.assert_close(out[:, :, row], v[:, :, : row + 17].mean(dim=2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rung", [r for r in CLIMBED if not r.needs_triton], ids=lambda rung: rung.name)
def test_gradients_of_the_pytorch_rungs(rung):
    """Steps 01 to 04 are differentiable; step 05 says so and points to step 04."""
    q, k, v = (x.double().float().requires_grad_() for x in CASES["causal 17x33"].tensors())
    gradients = torch.autograd.grad(rung.attention(q, k, v, causal=True).square().sum(), (q, k, v))
    mask = torch.ones(17, 33, dtype=torch.bool, device=DEVICE).tril(16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    for found, wanted in zip(gradients, torch.autograd.grad(expected.square().sum(), (q, k, v))):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rung", CLIMBED[1:], ids=lambda rung: rung.name)
def test_same_bits_twice(rung):
    q, k, v = CASES["causal 33x17"].tensors()
    with small_tiles(rung.attention) as attention:
        assert torch.equal(attention(q, k, v, causal=True), attention(q, k, v, causal=True))


# ragged batches


SMALL_TILES = dict(BLOCK_M=16, BLOCK_N=16, num_warps=4)
VARLEN = {4: find(4).module.attention_varlen, 7: partial(find(7).module.attention_varlen, config=SMALL_TILES)}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("rung", VARLEN)
def test_ragged_batch(rung, index_dtype, causal, name):
    check_ragged(VARLEN[rung], *LENGTHS[name], causal, index_dtype)


def test_ragged_batch_without_lse_and_with_scale():
    q, k, v = packed([3, 4], [5, 6])
    step04 = find(4).module
    out = step04.attention_varlen(q, k, v, starts([3, 4]), starts([5, 6]), scale=-0.4)
    alone = step04.attention(*(x[None].transpose(1, 2) for x in (q[3:], k[5:], v[5:])), scale=-0.4)
    assert torch.equal(out[3:], alone[0].transpose(0, 1))


def test_ragged_sequences_do_not_touch_each_other():
    """NaN in one sequence stays in it."""
    q, k, v = packed([3, 4, 2], [5, 6, 7])
    k[5:11] = float("nan")
    out = find(4).module.attention_varlen(q, k, v, starts([3, 4, 2]), starts([5, 6, 7]))
    assert torch.isfinite(out[:3]).all() and torch.isfinite(out[7:]).all() and out[3:7].isnan().all()
