"""RangeWindows, and the eager path of step 08 under every mask, against a mask written key by key."""

import copy
import pickle

import pytest
import torch
from support.decode_checks import PROBLEMS
from support.step08_checks import WINDOWS, WindowOracle, mask_of

from ladder.lab.parity import inside_nan, nan_allocations
from ladder.lab.problem import AttentionProblem
from ladder.step08_dflash2 import eager
from ladder.step08_dflash2.windows import Range, RangeWindows

SHAPES = ((40, 40), (7, 45), (45, 7), (1, 33), (33, 1), (0, 5), (5, 0))
CPU = torch.device("cpu")


@pytest.mark.parametrize("right", (None, 0, 3))
@pytest.mark.parametrize("name", [n for n in WINDOWS if WINDOWS[n] is not None])
def test_visible_is_the_definition(name, right):
    windows = WINDOWS[name]
    for Sq, Sk in SHAPES:
        assert torch.equal(windows.visible(Sq, Sk, right=right), mask_of(windows, Sq, Sk, right)), (Sq, Sk)
        if right == 0:
            assert torch.equal(windows.visible(Sq, Sk, True), windows.visible(Sq, Sk, right=0))


@pytest.mark.parametrize("right", (None, 0, 3))
@pytest.mark.parametrize("block_m, block_n", ((16, 16), (8, 32), (64, 4)))
@pytest.mark.parametrize("name", [n for n in WINDOWS if WINDOWS[n] is not None])
def test_visited_tiles_are_those_that_hold_a_visible_pair(name, block_m, block_n, right):
    windows = WINDOWS[name]
    for Sq, Sk in SHAPES:
        count, tiles = windows.visited_tiles(Sq, Sk, right == 0, block_m, block_n, right=right)
        mask, found = windows.visible(Sq, Sk, right=right), {}
        for m in range(0, Sq, block_m):
            for n in range(0, Sk, block_n):
                some = mask[m : m + block_m, n : n + block_n]
                if some.any():
                    found[m // block_m, n // block_n] = bool(some.all()) and n + block_n <= Sk
        assert count == len(tiles) == len({(m, n) for m, n, _ in tiles})
        visited = {(m, n): not masked for m, n, masked in tiles}
        for tile, whole in visited.items():  # a tile without a mask is wholly visible
            assert not whole or found[tile]
        assert set(visited) >= set(found)
        if len(windows) == 1 and windows.ranges[0][:2] == (0, None):  # no row tile with rows of two ranges
            assert set(visited) == set(found)
            if windows.ranges[0].sink == 0:  # where sinks meet the window, together they may fill a tile
                assert visited == found


def test_long_context_visits_what_the_window_holds():
    windows = RangeWindows.sink_window(128, 4096)
    count, _ = windows.visited_tiles(1 << 15, 1 << 15, True, 128, 128)
    assert count == sum(min(t + 1, 33) + (t > 32) for t in range(256))
    dense = (256 * 257) // 2
    assert dense / count > 3.9


def test_equality_hash_repr_and_copies():
    a, b = RangeWindows.sink_window(4, 7), RangeWindows([(0, None, 4, 7)])
    assert a == b and hash(a) == hash(b) and a != RangeWindows.sliding(7) and a != "a"
    assert eval(repr(a)) == a
    assert pickle.loads(pickle.dumps(a)) == a == copy.deepcopy(a) == RangeWindows.from_flat(a.flat)
    assert RangeWindows([Range(9, None), Range(0, 4)]) == RangeWindows([Range(0, 4), Range(9, None)])
    assert len(RangeWindows.prefix_local(0, 1, 1)) == 0
    with pytest.raises(AttributeError, match="immutable"):
        a.ranges = ()


def test_table():
    windows = WINDOWS["end and start"]
    table = windows.table("cpu")
    assert table.dtype == torch.int32 and table.is_contiguous()
    assert table.tolist() == [[0, 9, 0, 1], [-12, -4, 5, 1 << 30], [-4, 1 << 30, 1, 2]]
    assert windows.table(CPU) is table is RangeWindows(windows.ranges).table("cpu")
    assert RangeWindows([]).table("cpu").shape == (0, 4)


@pytest.mark.parametrize(
    "ranges, error, message",
    [
        ([Range(0, 10), Range(9, 20)], ValueError, "overlap"),
        ([Range(-5, None), Range(-7, -4)], ValueError, "overlap"),
        ([Range(0, None), Range(-4, None)], ValueError, "overlap"),
        ([Range(4, 4)], ValueError, r"ranges\[0\] is 4 .. 4, which holds no position; want start below stop"),
        ([Range(-4, 4)], ValueError, "holds no position"),
        ([Range(i, i + 1) for i in range(9)], ValueError, "ranges has 9 entries; want at most 8"),
        ([Range(0, None, -1)], ValueError, r"ranges\[0\].sink is -1; want an integer of at least 0"),
        ([Range(0, None, 0, 0)], ValueError, r"ranges\[0\].window is 0; want an integer of at least 1"),
        ([Range(0, None, 0, 2.0)], TypeError, r"ranges\[0\].window is 2.0"),
        ([Range(0, 1 << 30)], ValueError, r"ranges\[0\].stop is 1073741824; want less than 2\*\*30"),
        ([Range(None, 3)], TypeError, r"ranges\[0\].start is None"),
        ([7], TypeError, r"ranges\[0\] is 7; want Range"),
        (Range(0, 3), TypeError, "want a list of Range"),
        (7, TypeError, "ranges is 7; want a list of Range"),
    ],
)
def test_bad_ranges(ranges, error, message):
    with pytest.raises(error, match=f"step08_dflash2: .*{message}"):
        RangeWindows(ranges)


def test_attention_mass():
    q, k, _ = AttentionProblem(B=2, Hq=4, Hkv=2, Sq=30, Sk=50, D=16, dtype="float32").make()
    assert RangeWindows.sliding(50).attention_mass(q, k) == 0.0
    windows = RangeWindows.sink_window(3, 8)
    heads = windows.attention_mass(q, k, rows=30, per_head=True)
    scores = q.double() @ k.double().repeat_interleave(2, dim=1).transpose(2, 3) / 4
    probs = scores.masked_fill(~mask_of(None, 30, 50, 0), float("-inf")).softmax(-1)
    want = probs.masked_fill(mask_of(windows, 30, 50, 0), 0.0).sum(-1).mean(-1)
    torch.testing.assert_close(heads.double(), want, rtol=1e-5, atol=1e-6)
    few = windows.attention_mass(q, k, rows=10, seed=3)
    assert few == windows.attention_mass(q, k, rows=10, seed=3) and abs(few - float(want.mean())) < 0.2
    assert 0 < windows.attention_mass(q, k, causal=False) < 1
    assert RangeWindows.sliding(1).attention_mass(q[:, :, :0], k) == 0.0


# The eager path


def options(right=None, **changes):
    return dict(right=right, scale=0.25, **changes)


def oracle(q, k, v, right=None, **kwargs):
    return WindowOracle(q, k, v, right=right, **kwargs)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("right", (None, 0, 3))
def test_eager_attention(name, right):
    for Sq, Sk in SHAPES:
        q, k, v = (inside_nan(x) for x in AttentionProblem(B=2, Hq=6, Hkv=2, Sq=Sq, Sk=Sk, D=16, Dv=8).make())
        for extra in ({}, dict(softcap=2.0, sinks=torch.linspace(-2, 3, 6))):
            arguments = options(right, windows=WINDOWS[name], **extra)
            with nan_allocations():
                out, lse = eager.attention(q, k, v, return_lse=True, **arguments)
            parity = oracle(q, k, v, **arguments).check(out, lse)
            assert parity, f"{Sq} x {Sk} {extra}: {parity.reason}"


def test_eager_rows_are_taken_some_at_a_time(monkeypatch):
    q, k, v = AttentionProblem(B=2, Hq=4, Hkv=2, Sq=40, Sk=50, D=16, Dv=8, dtype="float32").make()
    whole = eager.attention(q, k, v, causal=True, scale=0.3, windows=WINDOWS["sink 4, window 7"], return_lse=True)
    monkeypatch.setattr(eager, "MAX_SCORES", 3 * 2 * 4 * 50)
    parts = eager.attention(q, k, v, causal=True, scale=0.3, windows=WINDOWS["sink 4, window 7"], return_lse=True)
    for a, b in zip(whole, parts):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_eager_skips_what_nobody_sees():
    q, k, v = AttentionProblem(Hq=2, Hkv=2, Sq=5, Sk=50, D=16, Dv=16).make()
    k[:, :, 4:20], v[:, :, 4:20] = float("nan"), float("nan")
    windows = RangeWindows.sink_window(4, 12)
    parity = oracle(q, k, v, right=0, windows=windows, scale=0.25).check(eager.attention(q, k, v, **options(0, windows=windows)))
    assert parity, parity.reason


@pytest.mark.parametrize("name", WINDOWS)
def test_eager_varlen(name):
    lengths_q, lengths_k = [5, 0, 1, 40, 20], [9, 3, 1, 40, 3]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(n), h, d, generator=generator).half()
               for n, h, d in ((lengths_q, 4, 16), (lengths_k, 2, 16), (lengths_k, 2, 8)))  # fmt: skip
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (lengths_q, lengths_k))
    arguments = options(0, windows=WINDOWS[name], sinks=torch.linspace(-1, 1, 4))
    with nan_allocations():
        out, lse = eager.varlen(q, k, v, cu_q, cu_k, return_lse=True, **arguments)
    for (q0, q1), (k0, k1) in zip(*(zip(c.tolist(), c.tolist()[1:]) for c in (cu_q, cu_k))):
        one = [x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1])]
        parity = oracle(*one, **arguments).check(out[q0:q1].transpose(0, 1)[None], lse[None, :, q0:q1])
        assert parity, f"{q1 - q0} x {k1 - k0}: {parity.reason}"


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("case", ("page edges", "pages of 3", "5 new tokens, some without keys", "group of 7"))
def test_eager_decode_and_paged_prefill(case, name):
    """Dead slots hold NaN, the block table garbage past the pages of a sequence."""
    inputs = PROBLEMS[case].make(CPU)
    q = inputs.q
    arguments = options(0, windows=WINDOWS[name], softcap=5.0, sinks=torch.linspace(-1, 1, q.shape[2]))
    with nan_allocations():
        out, lse = eager.decode(*inputs, return_lse=True, **arguments)
        cu = torch.arange(0, q.shape[0] * q.shape[1] + 1, q.shape[1], dtype=torch.int32)
        packed, packed_lse = eager.paged_prefill(
            q.flatten(0, 1), *inputs_of_cache(inputs), cu, return_lse=True, **arguments
        )
    for b in range(q.shape[0]):
        k, v = inputs.sequence(b)
        want = oracle(q[b : b + 1].transpose(1, 2), k, v, **arguments)
        parity = want.check(out[b : b + 1].transpose(1, 2), lse[b : b + 1])
        assert parity, f"sequence {b}: {parity.reason}"
    torch.testing.assert_close(packed.view_as(out), out, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(packed_lse.unflatten(1, q.shape[:2]).transpose(0, 1), lse, rtol=1e-5, atol=1e-5)


def inputs_of_cache(inputs):
    return inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_lens


def test_eager_one_token_out_and_loud_length():
    q, k_cache, v_cache, table, lengths = PROBLEMS["page edges"].make(CPU)
    want, want_lse = eager.decode(q, k_cache, v_cache, table, lengths, scale=0.2, return_lse=True)
    out = torch.full_like(want[:, 0], float("nan"))
    got, lse = eager.decode(q[:, 0], k_cache, v_cache, table, lengths, scale=0.2, out=out, return_lse=True)
    assert got is out and torch.equal(out, want[:, 0]) and torch.equal(lse, want_lse[..., 0])
    lengths[2], lengths[3] = 97, -1  # no page holds them
    out, lse = eager.decode(q, k_cache, v_cache, table, lengths, scale=0.2, return_lse=True)
    assert out[2:4].isnan().all() and lse[2:4].isnan().all()
    keep = [0, 1, 4, 5]
    torch.testing.assert_close(out[keep], want[keep], rtol=1e-3, atol=1e-3)
    assert out[0].eq(0).all()


def test_eager_mla_decode():
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(5, 16, 48, generator=generator).half()
    q = torch.randn(2, 2, 5, 48, generator=generator).half()
    table, lengths = torch.tensor([[3, 1, -7], [0, 4, 2]], dtype=torch.int32), torch.tensor([20, 48], dtype=torch.int32)
    arguments = options(0, windows=WINDOWS["sink 4, window 7"], sinks=torch.linspace(-1, 1, 5))
    out, lse = eager.mla_decode(q, cache, table, lengths, head_dim_v=32, return_lse=True, **arguments)
    for b, pages in enumerate(([3, 1], [0, 4, 2])):
        k = cache[pages].flatten(0, 1)[: int(lengths[b])][None, None]
        parity = oracle(q[b : b + 1].transpose(1, 2), k, k[..., :32], **arguments).check(out[b : b + 1].transpose(1, 2), lse[b : b + 1])
        assert parity, parity.reason
