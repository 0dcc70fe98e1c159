"""Step 08's prefill kernel: dense, ragged and paged, under every mask, softcap and sinks, against float64 and step 07."""

import math

import pytest
import torch
from support.decode_checks import PROBLEMS
from support.step08_checks import DEVICE, WINDOWS, WindowOracle

from ladder.lab.decode_problem import DecodeProblem
from ladder.lab.parity import Oracle, inside_nan, nan_allocations, poison
from ladder.lab.problem import MINILM, AttentionProblem
from ladder.rungs import find
from ladder.step08_dflash2 import (
    RangeWindows,
    decision,
    dflash2_attention,
    dflash2_paged_prefill,
    dflash2_varlen,
    dispatch,
    eager,
)
from ladder.step08_dflash2 import prefill as module
from ladder.step08_dflash2.dispatch import device_code
from ladder.step08_dflash2.tiles import layout

launch_config = decision.launch_config
uncached = decision._decide_prefill.__wrapped__


@pytest.fixture
def small(monkeypatch):
    """Tiles of 16 x 16, so that a few dozen tokens cross several; ``small(rows, keys)`` for others."""

    def tiles(rows=16, keys=16):
        shrink = lambda *a, **k: {**launch_config(*a, **k), "BLOCK_M": rows, "BLOCK_N": keys, "num_warps": 4}  # noqa: E731
        monkeypatch.setattr(decision, "_decide_prefill", uncached)
        monkeypatch.setattr(decision, "launch_config", shrink)

    tiles()
    return tiles


def problem(**changes):
    return AttentionProblem(**{**dict(Hq=2, Hkv=1, Sq=33, Sk=33, D=16, Dv=16, dtype="float16"), **changes})


def run(q, k, v, **options):
    with nan_allocations():
        return dflash2_attention(q, k, v, return_lse=True, **options)


def check(p, right=0, layout=inside_nan, **options):
    q, k, v = (layout(x) if x.numel() else x for x in p.make(DEVICE))
    options = dict(right=right, scale=p.scale, **options)
    out, lse = run(q, k, v, **options)
    parity = WindowOracle(q, k, v, **options).check(out, lse)
    assert parity, parity.reason
    return out, lse


def sinks_of(heads, dtype=torch.float32):
    return torch.linspace(-2, 3, heads, dtype=dtype, device=DEVICE)


def test_tensors_on_the_test_device_reach_the_kernel():
    assert device_code(torch.empty(0, dtype=torch.float16, device=DEVICE)) is not None


# Masks


@pytest.mark.parametrize("right", (None, 0, 3))
@pytest.mark.parametrize("name", WINDOWS)
def test_every_window(small, name, right):
    for Sq, Sk in ((33, 33), (7, 50), (35, 7)):
        check(problem(Sq=Sq, Sk=Sk), right, windows=WINDOWS[name])


@pytest.mark.parametrize("name", ("sliding 16", "sink 16, window 16", "local but for the last 7", "two ranges and a gap"))
@pytest.mark.parametrize("rows, keys", ((32, 16), (16, 32), (64, 64)))
def test_windows_on_other_tiles(small, rows, keys, name):
    small(rows, keys)
    check(problem(Sq=70, Sk=90), windows=WINDOWS[name])


def test_every_edge_of_a_window(small):
    """Windows and sinks from below to above a tile: every edge meets every corner."""
    q, k, v = problem(Hq=1, Sq=20, Sk=40, dtype="float32").make(DEVICE)
    for window in (1, 2, 15, 16, 17, 31, 32, 33):
        for sink in (0, 1, 16, 17):
            windows = RangeWindows.sink_window(sink, window)
            out, lse = run(q, k, v, causal=True, windows=windows)
            parity = WindowOracle(q, k, v, right=0, windows=windows).check(out, lse)
            assert parity, f"{windows}: {parity.reason}"


@pytest.mark.parametrize("right", (0, 1, 14, 15, 16, 31, 1 << 29, 1 << 40))
def test_right_edge(small, right):
    check(problem(Sq=40, Sk=37), right)
    check(problem(Sq=40, Sk=37), right, windows=RangeWindows.sliding(9))


def test_a_window_of_w_is_exactly_w_keys(small):
    """With equal scores the output is the mean of the values seen: one-hot values show which."""
    q, k = (torch.zeros(1, 1, 40, 16, device=DEVICE) for _ in range(2))
    v = torch.eye(40, device=DEVICE)[None, None]
    out = dflash2_attention(q, k, v, causal=True, windows=RangeWindows.sink_window(2, 5))
    for row in range(40):
        want = sorted({*range(min(2, row + 1)), *range(max(0, row - 4), row + 1)})
        assert out[0, 0, row].nonzero()[:, 0].tolist() == want
        torch.testing.assert_close(out[0, 0, row, want], torch.full((len(want),), 1 / len(want), device=DEVICE))


def test_windows_that_hide_nothing_change_no_bit(small):
    q, k, v = problem(Sq=40, Sk=50).make(DEVICE)
    want = dflash2_attention(q, k, v, causal=True)
    assert torch.equal(dflash2_attention(q, k, v, causal=True, windows=RangeWindows([])), want)
    close = dflash2_attention(q, k, v, causal=True, windows=RangeWindows.sliding(50))
    torch.testing.assert_close(close, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ("sliding 5", "sink 4, window 7", "local but for the last 7"))
def test_what_no_query_sees_is_not_touched(small, name):
    """NaN in K and V outside the windows, inside tiles that are visited too."""
    windows = WINDOWS[name]
    q, k, v = problem(Sq=9, Sk=60).make(DEVICE)
    hidden = ~windows.visible(9, 60, True).any(dim=0).to(DEVICE)
    clean = dflash2_attention(q, k, v, causal=True, windows=windows, return_lse=True)
    k[:, :, hidden], v[:, :, hidden] = float("nan"), float("nan")
    for a, b in zip(dflash2_attention(q, k, v, causal=True, windows=windows, return_lse=True), clean):
        assert torch.equal(a, b)
    assert bool(hidden.any()) or len(windows.ranges) and windows.ranges[0].stop == -7


# Softcap and sinks


@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize("softcap", (0.5, 5.0, 50.0))
def test_softcap(small, softcap, dtype):
    check(problem(dtype=dtype, scale=1.0), softcap=softcap)
    check(problem(dtype=dtype, scale=-0.7), None, softcap=softcap, windows=WINDOWS["sink 4, window 7"])


@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize("softcap", (1e3, 1e5, 1e8, 1e20, 1e38))
def test_a_large_softcap_changes_nothing(small, softcap, dtype):
    """The cap multiplies the error of its tanh, which therefore has to be relative where the result is small."""
    check(problem(dtype=dtype, scale=0.3), softcap=softcap)
    check(problem(dtype=dtype, scale=-0.3), None, softcap=softcap, windows=WINDOWS["sink 4, window 7"])


@pytest.mark.parametrize("softcap", (1e-3, 1e-20, 1e-44))
def test_a_small_softcap_makes_all_keys_equal(small, softcap):
    q, k, v = problem(Sq=20, Sk=40).make(DEVICE)
    out, lse = run(q, k, v, softcap=softcap)
    want = v.double().mean(2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], 1).expand(out.shape)
    torch.testing.assert_close(out.double(), want, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(40)), atol=2e-3, rtol=0)


def test_softcap_of_huge_scores(small):
    p = problem(Sq=20, Sk=40)
    q, k, v = p.make(DEVICE)
    q, k = 56 * q.sign(), 56 * k.sign()  # scores up to +-5e4
    for scale in (1.0, 0.0):
        out, lse = run(q, k, v, causal=True, softcap=30.0, scale=scale)
        parity = WindowOracle(q, k, v, right=0, softcap=30.0, scale=scale).check(out, lse)
        assert parity, parity.reason


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_sinks(small, dtype):
    check(problem(Hq=6, Hkv=2, Sq=20), sinks=sinks_of(6, dtype))
    check(problem(Hq=6, Hkv=2, Sq=20), sinks=sinks_of(12, dtype)[::2], softcap=3.0, windows=WINDOWS["sliding 5"])


def test_sinks_of_rows_that_see_nothing(small):
    sinks = sinks_of(2)
    sinks[1] = float("-inf")
    q, k, v = problem(Sq=50, Sk=20).make(DEVICE)
    out, lse = run(q, k, v, causal=True, sinks=sinks)
    assert (out[:, :, :30] == 0).all()
    assert (lse[0, 0, :30] == sinks[0]).all() and torch.isneginf(lse[0, 1, :30]).all()
    parity = WindowOracle(q, k, v, right=0, sinks=sinks).check(out, lse)
    assert parity, parity.reason


def test_sinks_of_rows_that_see_nothing_in_any_split():
    """The merge of split keys, which only the kernel of sm_90 calls: a row of no key, under a sink and under none."""
    from ladder.step08_dflash2.hopper.prefill import merge_splits

    part_out = torch.zeros(2, 4, 16, device=DEVICE)  # of 2 splits, 2 heads, 2 queries
    part_lse = torch.full((2, 4), float("-inf"), device=DEVICE)
    part_out[1, 1], part_lse[1, 1] = 2.0, 0.5
    out, lse = torch.full((1, 2, 2, 16), float("nan"), device=DEVICE), torch.full((1, 2, 2), float("nan"), device=DEVICE)
    merge_splits(part_out, part_lse, out, lse, torch.tensor([float("-inf"), 3.0], device=DEVICE))
    assert out[0, :, :, 0].tolist() == [[0.0, 2.0], [0.0, 0.0]]
    torch.testing.assert_close(lse.cpu(), torch.tensor([[[float("-inf"), 0.5], [3.0, 3.0]]]))


@pytest.mark.parametrize("value", (-5e4, 5e4))
def test_extreme_sinks(small, value):
    """One that is nothing, and one that takes everything."""
    q, k, v = problem().make(DEVICE)
    out, lse = run(q, k, v, causal=True, sinks=torch.full((2,), value, device=DEVICE))
    if value > 0:
        assert (out == 0).all() and (lse == value).all()
    else:
        torch.testing.assert_close(out, dflash2_attention(q, k, v, causal=True), rtol=0, atol=0)


def test_everything_at_once(small):
    check(
        problem(B=2, Hq=6, Hkv=2, Sq=25, Sk=40, D=24, Dv=40, scale=-0.3), softcap=2.0, sinks=sinks_of(6),
        windows=WINDOWS["two ranges and a gap"],
    )  # fmt: skip


# Shapes and layouts

HEADS = ((3, 1), (6, 1), (7, 1), (12, 2), (5, 5))
SIZES = ((40, 40), (72, 72), (80, 80), (96, 96), (160, 160), (192, 192), (256, 256), (192, 128), (24, 12), (75, 33))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_head_sizes(small, sizes):
    check(problem(Hq=1, Sq=18, Sk=34, D=sizes[0], Dv=sizes[1]), windows=WINDOWS["sink 4, window 7"])


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("Sq", (1, 3, 20))
def test_groups_with_heads_as_rows_or_alone(small, heads, Sq):
    p = problem(B=2, Hq=heads[0], Hkv=heads[1], Sq=Sq, Sk=37)
    check(p, sinks=sinks_of(heads[0]), windows=WINDOWS["sink 4, window 7"])


@pytest.mark.parametrize("heads, Sq, pack, block_m", (((7, 1), 1, 7, 16), ((32, 4), 9, 8, 128), ((6, 2), 200, 1, 128), ((71, 1), 1, 71, 128),
                                                      ((300, 1), 2, 100, 128)))  # fmt: skip
def test_short_chunks_are_packed(heads, Sq, pack, block_m):
    config = launch_config(64, 64, 2, 90, group=heads[0] // heads[1], tokens=Sq, most_tokens=Sq)
    assert config["PACK"] == pack and config["BLOCK_M"] >= pack and config["BLOCK_M"] == block_m


def test_a_bound_below_the_truth_chooses_tiles_and_no_more():
    """``max_seqlen_q`` 0 in front of tokens, and more heads of a KV head than the smallest tile has rows."""
    q, k, v = torch.randn(7, 40, 16, device=DEVICE), torch.randn(9, 1, 16, device=DEVICE), torch.randn(9, 1, 16, device=DEVICE)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ((0, 2, 7), (0, 4, 9)))
    want = dflash2_varlen(q, k, v, cu_q, cu_k, 5, causal=True)
    for bound in (0, 1, 3):
        torch.testing.assert_close(dflash2_varlen(q, k, v, cu_q, cu_k, bound, causal=True), want)


@pytest.mark.parametrize("name", ("dense", "windowed", "float32", "packed"))
def test_shipped_tiles(name):
    p = {"float32": problem(dtype="float32"), "packed": problem(Hq=4, Sq=5, Sk=140)}.get(name, problem(Sq=140, Sk=150, D=72, Dv=72))
    check(p, None if name == "dense" else 0, windows=RangeWindows.sink_window(5, 40) if name == "windowed" else None)


def bshd(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def dims_first(x):
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def odd_offset(x):
    buffer = x.new_full((x.numel() + 2,), float("nan"))
    buffer[1:-1] = x.flatten()
    return buffer[1:-1].view(x.shape)


@pytest.mark.parametrize("layout", (bshd, dims_first, odd_offset))
def test_layouts(small, layout):
    p = problem(Hq=6, Hkv=2, Sq=20, Sk=40, D=24, Dv=24)
    windows = WINDOWS["sink 4, window 7"]
    want = run(*p.make(DEVICE), causal=True, windows=windows)
    q, k, v = (layout(x) for x in p.make(DEVICE))
    out = layout(torch.full_like(want[0], float("nan")))
    got = run(q, k, v, causal=True, windows=windows, out=out)
    assert got[0].data_ptr() == out.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_stride_zero(small):
    q, k, v = problem(B=2, Hq=6, Hkv=2, Sq=20, Sk=40).make(DEVICE)
    q, k, v = q[:, :1, :1].expand_as(q), k[:1, :1].expand_as(k), v[:, :, :1].expand_as(v)
    parity = Oracle(q, k, v, causal=True).check(*run(q, k, v, causal=True))
    assert parity, parity.reason


def test_wide_offsets_give_the_same_numbers(small, monkeypatch):
    q, k, v = problem(D=24, Dv=40).make(DEVICE)
    windows, layout_of = WINDOWS["sink 4, window 7"], decision.layout_of
    want = dflash2_attention(q, k, v, causal=True, windows=windows)
    monkeypatch.setattr(decision, "layout_of", lambda *args: {**layout_of(*args), "WIDE": True})
    assert torch.equal(dflash2_attention(q, k, v, causal=True, windows=windows), want)


def layout_of(k, v):
    aligned = (k.data_ptr() | v.data_ptr()) % 16 == 0
    return decision.layout_of(k.dtype, aligned, k.stride(), v.stride(), k.shape[-1], v.shape[-1])


def test_layout_is_that_of_step_07():
    base = torch.empty(4 * 40 * 24 + 1, dtype=torch.float16, device=DEVICE)
    k = base[:-1].view(1, 4, 40, 24)
    for x in (k, k[..., 1:], k[:, :, ::2], k.transpose(1, 2), k.transpose(2, 3), base[1:].view(1, 4, 40, 24), k[:, :1].expand_as(k)):
        for _ in range(2):
            assert layout_of(x, k) == layout(x, k), x.stride()
    far = torch.empty_strided((1, 1, 2, 32), (1, 1, 1 << 30, 1), dtype=torch.float16, device="meta")
    assert layout_of(far, far)["WIDE"] is True
    packed = torch.empty_strided((200, 1, 32), (1 << 24, 32, 1), dtype=torch.float16, device="meta")  # a key's stride comes first
    assert layout_of(packed, packed)["WIDE"] is True and layout_of(packed[None], packed[None])["WIDE"] is True
    batch = torch.empty_strided((2, 1, 200, 32), (1 << 40, 6400, 32, 1), dtype=torch.float16, device="meta")
    assert layout_of(batch, batch)["WIDE"] is False


def test_agrees_with_step_07(small):
    """The captured input of a trained model, whose softmax is almost one-hot in places."""
    q, k, v = (x[:1, 5:7] for x in MINILM.replace(B=3, Sq=70, Sk=70).make(DEVICE))
    for causal in (False, True):
        oracle = Oracle(q, k, v, causal=causal)
        out = dflash2_attention(q, k, v, causal=causal)
        parity = oracle.agree(out, find(7).attention(q, k, v, causal=causal, config=dict(BLOCK_M=16, BLOCK_N=16)))
        assert oracle.check(out) and parity, parity.reason


def test_kernel_and_eager_agree(small):
    q, k, v = problem(Hq=6, Hkv=2, Sq=20, Sk=40, dtype="float32").make(DEVICE)
    options = dict(causal=True, scale=0.3, windows=WINDOWS["eight ranges"], softcap=4.0, sinks=sinks_of(6), return_lse=True)
    for a, b in zip(dflash2_attention(q, k, v, **options), eager.attention(q, k, v, **options)):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_same_bits_twice(small):
    q, k, v = problem(Hq=6, Hkv=2).make(DEVICE)
    options = dict(causal=True, windows=WINDOWS["sink 4, window 7"], softcap=4.0, sinks=sinks_of(6))
    for a, b in zip(run(q, k, v, **options), run(q, k, v, **options)):
        assert torch.equal(a, b)


# Ragged batches

RAGGED = {
    "mixed": ([5, 1, 17, 40], [9, 1, 30, 3]),
    "zeros": ([0, 4, 0, 1, 0], [3, 0, 0, 6, 2]),
    "decode and a chunk": ([1, 1, 30, 1], [7, 40, 50, 1]),
    "empty batch": ([], []),
    "only empty sequences": ([0, 0], [0, 0]),
}


def packed(lengths_q, lengths_k, Hq=6, Hkv=2, D=16, Dv=8):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(sum(n), h, d, generator=generator).half().to(DEVICE)
               for n, h, d in ((lengths_q, Hq, D), (lengths_k, Hkv, D), (lengths_k, Hkv, Dv))]  # fmt: skip
    return [inside_nan(x) for x in tensors]


def starts(lengths, dtype=torch.int32):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0)], dtype=dtype, device=DEVICE)


def check_packed(out, lse, q, sequences, lengths_q, **options):
    """Each sequence of packed results against the oracle; ``sequences`` are their k and v (1, Hkv, Sk, .)."""
    first = 0
    for length, (k, v) in zip(lengths_q, sequences):
        rows = slice(first, first + length)
        one = q[rows].transpose(0, 1)[None]
        parity = WindowOracle(one, k, v, **options).check(out[rows].transpose(0, 1)[None], lse[None, :, rows])
        assert parity, f"{length} x {k.shape[2]}: {parity.reason}"
        first += length


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("most", (None, 40))
@pytest.mark.parametrize("index", (torch.int32, torch.int64), ids=str)
def test_ragged(small, name, most, index):
    lengths_q, lengths_k = RAGGED[name]
    q, k, v = packed(lengths_q, lengths_k)
    cu_q, cu_k = starts(lengths_q, index), starts(lengths_k, index)
    options = dict(windows=WINDOWS["local but for the last 7"], sinks=sinks_of(6))
    with nan_allocations():
        out, lse = dflash2_varlen(q, k, v, cu_q, cu_k, most, most, causal=True, return_lse=True, **options)
    ends = list(zip(cu_k.tolist(), cu_k.tolist()[1:]))
    sequences = [[x[a:b].transpose(0, 1)[None] for x in (k, v)] for a, b in ends]
    check_packed(out, lse, q, sequences, lengths_q, right=0, **options)


def test_ragged_without_a_mask_and_with_a_right_edge(small):
    lengths_q, lengths_k = RAGGED["mixed"]
    q, k, v = packed(lengths_q, lengths_k)
    cu_q, cu_k = starts(lengths_q), starts(lengths_k)
    ends = list(zip(cu_k.tolist(), cu_k.tolist()[1:]))
    sequences = [[x[a:b].transpose(0, 1)[None] for x in (k, v)] for a, b in ends]
    for options in (dict(right=None), dict(right=3, windows=WINDOWS["sliding 5"], softcap=2.0)):
        out, lse = dflash2_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options)
        check_packed(out, lse, q, sequences, lengths_q, **options)


def test_ragged_sequences_do_not_touch_each_other(small):
    q, k, v = packed([3, 4, 2], [5, 6, 7])
    k[5:11] = float("nan")
    out = dflash2_varlen(q, k, v, starts([3, 4, 2]), starts([5, 6, 7]))
    assert torch.isfinite(out[:3]).all() and torch.isfinite(out[7:]).all() and out[3:7].isnan().all()


def test_ragged_shipped_tiles():
    """With max_seqlen_q = 1 a tile is the heads of one token."""
    q, k, v = packed([1, 1, 1], [7, 40, 1])
    cu = starts([1, 1, 1]), starts([7, 40, 1])
    want = eager.varlen(q, k, v, *cu, causal=True, scale=0.25)
    for most in (1, None, 50):
        torch.testing.assert_close(dflash2_varlen(q, k, v, *cu, most, causal=True), want, rtol=2e-3, atol=2e-3)


# Pages


@pytest.mark.parametrize("page_size", (1, 3, 8, 16, 32))
@pytest.mark.parametrize("name", ("none", "sink 4, window 7", "local but for the last 7"))
def test_chunk_on_a_cache(small, page_size, name):
    """Dead slots and unused pages hold NaN, the block table garbage past the pages of a sequence."""
    lengths_q, lengths = (5, 1, 20, 0, 3), (5, 40, 33, 7, 2)
    inputs = DecodeProblem(B=5, Hq=6, Hkv=2, D=16, Dv=8, page_size=page_size, dtype="float16", lengths=lengths, max_context=64).make(DEVICE)
    q = inside_nan(torch.randn(sum(lengths_q), 6, 16, generator=torch.Generator().manual_seed(1)).half().to(DEVICE))
    options = dict(windows=WINDOWS[name], sinks=sinks_of(6))
    with nan_allocations():
        out, lse = dflash2_paged_prefill(
            q, inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_lens, starts(lengths_q), return_lse=True, **options
        )
    check_packed(out, lse, q, [inputs.sequence(b) for b in range(5)], lengths_q, right=0, **options)


@pytest.mark.parametrize("name", ("page edges", "pages of 256", "group of 7", "d192/128", "empty batch"))
def test_newest_tokens_on_the_decode_problems(name):
    """With the tiles that a call of few tokens gets."""
    inputs = PROBLEMS[name].make(DEVICE)
    q = inputs.q.flatten(0, 1)
    cu = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=DEVICE)
    arguments = (inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_lens, cu, 1)
    out, lse = dflash2_paged_prefill(q, *arguments, return_lse=True)
    check_packed(out, lse, q, [inputs.sequence(b) for b in range(q.shape[0])], [1] * q.shape[0], right=0)


def test_chunks_give_what_the_whole_gives(small):
    lengths = (37,)
    inputs = DecodeProblem(B=1, Hq=4, Hkv=2, D=16, Dv=16, page_size=16, dtype="float32", lengths=lengths).make(DEVICE)
    q = torch.randn(37, 4, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    windows = WINDOWS["sink 4, window 7"]
    k, v = inputs.sequence(0)
    whole = dflash2_attention(q.transpose(0, 1)[None], k, v, causal=True, windows=windows)[0].transpose(0, 1)
    first = 0
    for chunk in (20, 1, 16):
        seen = torch.tensor([first + chunk], dtype=torch.int32, device=DEVICE)
        out = dflash2_paged_prefill(
            q[first : first + chunk], inputs.k_cache, inputs.v_cache, inputs.block_table, seen, starts([chunk]), windows=windows
        )
        torch.testing.assert_close(out, whole[first : first + chunk], rtol=2e-5, atol=2e-5)
        first += chunk


def test_paged_without_a_causal_mask(small):
    inputs = DecodeProblem(B=2, Hq=4, Hkv=2, D=16, Dv=16, page_size=16, dtype="float16", lengths=(9, 40)).make(DEVICE)
    q = torch.randn(7, 4, 16, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    for options in (dict(right=None), dict(right=2, windows=WINDOWS["sliding 5"])):
        out, lse = dflash2_paged_prefill(
            q, inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_lens, starts([3, 4]), causal=False, return_lse=True, **options
        )
        check_packed(out, lse, q, [inputs.sequence(b) for b in range(2)], [3, 4], **options)


def test_loud_length_in_the_kernel(monkeypatch):
    """A length that no page holds: on a CPU the check refuses it, so the kernel is asked behind its back."""
    inputs = DecodeProblem(B=3, Hq=2, Hkv=1, D=16, Dv=16, page_size=16, dtype="float16", lengths=(5, 20, 30)).make(DEVICE)
    monkeypatch.setattr(module, "check_paged", lambda *args, **options: 0.25)
    lens = torch.tensor([5, 33, -1], dtype=torch.int32, device=DEVICE)
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    out, lse = dflash2_paged_prefill(q, inputs.k_cache, inputs.v_cache, inputs.block_table, lens, starts([1, 1, 1]), return_lse=True)
    assert torch.isfinite(out[0]).all() and torch.isfinite(lse[:, 0]).all()
    assert out[1:].isnan().all() and lse[:, 1:].isnan().all()


def test_garbage_before_the_window_is_not_followed(small):
    """An engine frees pages that no query will see again; their entries may then be anything that is a page or not."""
    inputs = DecodeProblem(B=1, Hq=2, Hkv=1, D=16, Dv=16, page_size=8, dtype="float16", lengths=(60,)).make(DEVICE)
    q = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    windows, table = RangeWindows.sink_window(8, 12), inputs.block_table.clone()
    k, v = inputs.sequence(0)
    first_kept = (60 - 4 - 12 + 1) // 8
    table[:, 1:first_kept] = table[:, 0]  # on a CPU a live entry has to be a page
    inputs.k_cache[inputs.block_table[0, 1:first_kept].long()] = float("nan")
    inputs.v_cache[inputs.block_table[0, 1:first_kept].long()] = float("nan")
    out, lse = dflash2_paged_prefill(q, inputs.k_cache, inputs.v_cache, table, inputs.seq_lens, starts([4]), windows=windows, return_lse=True)
    check_packed(out, lse, q, [(k, v)], [4], right=0, windows=windows)


# On a GPU


@pytest.fixture
def portable(monkeypatch):
    """The portable kernel also where another would be chosen."""
    found = dispatch.machine(DEVICE)
    monkeypatch.setattr(dispatch, "machine", lambda _: found._replace(hopper=False))


GPU_WINDOWS = {"none": None, "window": RangeWindows.sink_window(128, 700), "ranges": RangeWindows([(0, 300, 4, 64), (300, -40, 64, 512)])}


@pytest.mark.gpu
@pytest.mark.parametrize("which", ("portable", "chosen"))
@pytest.mark.parametrize("window", GPU_WINDOWS)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("sizes", ((64, 64), (128, 128), (192, 128), (256, 256), (72, 72)), ids=str)
def test_at_size(request, sizes, dtype, window, which):
    if which == "portable":
        request.getfixturevalue("portable")
    for Sq, Sk, extra in ((1200, 1500, {}), (1, 1500, {}), (1500, 1200, dict(softcap=30.0, sinks=sinks_of(8)))):
        p = problem(Hq=8, Hkv=2, Sq=Sq, Sk=Sk, D=sizes[0], Dv=sizes[1], dtype=dtype)
        check(p, 0, windows=GPU_WINDOWS[window], **extra)
        check(p, None, windows=GPU_WINDOWS[window], **extra)


@pytest.mark.gpu
@pytest.mark.parametrize("which", ("portable", "chosen"))
@pytest.mark.parametrize("page_size", (1, 16, 64, 256))
@pytest.mark.parametrize("window", GPU_WINDOWS)
def test_pages_at_size(request, page_size, window, which):
    if which == "portable":
        request.getfixturevalue("portable")
    lengths_q, lengths = (300, 1, 1, 0, 700), (300, 900, 1, 40, 1100)
    inputs = DecodeProblem(B=5, Hq=8, Hkv=2, page_size=page_size, dtype="bfloat16", lengths=lengths, max_context=2048).make(DEVICE)
    q = torch.randn(sum(lengths_q), 8, 128, device=DEVICE, dtype=torch.bfloat16)
    options = dict(windows=GPU_WINDOWS[window], sinks=sinks_of(8))
    arguments = (inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_lens, starts(lengths_q))
    for most in (None, 700):
        with nan_allocations():
            out, lse = dflash2_paged_prefill(q, *arguments, most, return_lse=True, **options)
        check_packed(out, lse, q, [inputs.sequence(b) for b in range(5)], lengths_q, right=0, **options)


@pytest.mark.gpu
def test_more_than_2_to_31_elements():
    """Keys of a sequence that lie past 2^31 elements, and an output that does."""
    p = problem(B=2, Hq=3, Hkv=3, Sq=100, Sk=100, D=64, Dv=64, dtype="bfloat16")
    q, k, v = p.make(DEVICE)
    want = dflash2_attention(q, k, v, causal=True, windows=RangeWindows.sliding(30))
    buffer = torch.full(((1 << 31) + 64 + k[0].numel(),), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    far = buffer.as_strided(k.shape, ((1 << 31) + 64, *k.stride()[1:]))
    far.copy_(k)
    assert torch.equal(dflash2_attention(q, far, v, causal=True, windows=RangeWindows.sliding(30)), want)
    del buffer, far
    out = torch.full(((1 << 31) + 64 + want[0].numel(),), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    out = out.as_strided(want.shape, ((1 << 31) + 64, *want.stride()[1:]))
    dflash2_attention(q, k, v, causal=True, windows=RangeWindows.sliding(30), out=out)
    assert torch.equal(out, want)


@pytest.mark.gpu
@pytest.mark.parametrize("windows", (None, RangeWindows.sink_window(16, 200)), ids=("dense", "windowed"))
def test_same_bits_on_1000_runs(windows):
    q, k, v = problem(Hq=8, Hkv=2, Sq=700, Sk=900, D=128, Dv=128, dtype="bfloat16").make(DEVICE)
    first = dflash2_attention(q, k, v, causal=True, windows=windows, return_lse=True)
    for _ in range(1000):
        for a, b in zip(first, dflash2_attention(q, k, v, causal=True, windows=windows, return_lse=True)):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_graph_captured_short_replayed_long():
    """Lengths and block table are read on the device; the windows' table may be made inside the capture."""
    inputs = DecodeProblem(B=2, Hq=8, Hkv=2, page_size=64, dtype="bfloat16", lengths=(4, 4), max_context=2048).make(DEVICE)
    long = DecodeProblem(B=2, Hq=8, Hkv=2, page_size=64, dtype="bfloat16", lengths=(2000, 1700), max_context=2048).make(DEVICE)
    cache_k, cache_v = (torch.full_like(x, float("nan")) for x in (long.k_cache, long.v_cache))
    cache_k[: len(inputs.k_cache)], cache_v[: len(inputs.v_cache)] = inputs.k_cache, inputs.v_cache
    table, lens = inputs.block_table.clone(), inputs.seq_lens.clone()
    q = torch.randn(8, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    cu, windows = starts((4, 4)), RangeWindows.sink_window(7, 501)
    call = lambda w: dflash2_paged_prefill(q, cache_k, cache_v, table, lens, cu, 4, windows=w, return_lse=True)  # noqa: E731
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(RangeWindows.sink_window(7, 502))  # compiles outside the capture; another table
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(windows)
    cache_k.copy_(long.k_cache)
    cache_v.copy_(long.v_cache)
    table.copy_(long.block_table)
    lens.copy_(long.seq_lens)
    poison(out, lse)
    graph.replay()
    want = call(windows)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch warns, once a process, that its search for synchronisation is a prototype
def test_no_synchronisation():
    q, k, v = problem(Sq=256, Sk=256, dtype="bfloat16").make(DEVICE)
    options = dict(causal=True, windows=RangeWindows.sliding(40), sinks=sinks_of(2), softcap=5.0)
    packed_q, packed_k, packed_v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    cu = starts((100, 156))
    calls = (lambda: dflash2_attention(q, k, v, **options), lambda: dflash2_varlen(packed_q, packed_k, packed_v, cu, cu, 156, 156, **options))
    for call in calls:
        call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_time_follows_the_visited_tiles(portable):
    from ladder.lab.timing import measure

    q, k, v = problem(Hq=4, Hkv=4, Sq=16384, Sk=16384, D=128, Dv=128, dtype="bfloat16").make(DEVICE)
    windows = RangeWindows.sink_window(128, 1024)
    full, some = (measure(lambda q, k, v, w=w: dflash2_attention(q, k, v, causal=True, windows=w), [(q, k, v)], device=DEVICE).median
                  for w in (None, windows))  # fmt: skip
    tiles = [w.visited_tiles(16384, 16384, True, 128, 128).count for w in (RangeWindows([]), windows)]
    assert full / some > 0.6 * tiles[0] / tiles[1]


