"""Rung 08's decode: the schedule, windows, softcap and sinks, MLA, the operators, and the errors a user sees."""

import importlib
from unittest import mock

import pytest
import torch
from support.decode_checks import LAYOUTS, PROBLEMS, _problem, check_decode, inputs_of
from support.process import python
from support.step08_checks import DEVICE, ON_GPU, WINDOWS, check_windows, hide, mla
from torch.utils._python_dispatch import TorchDispatchMode

from ladder.lab.decode_problem import DecodeOracle, DecodeProblem
from ladder.lab.parity import nan_allocations
from ladder.lab.problem import reference
from ladder.rungs import find
from ladder.step08_dflash2 import (
    DecodeWorkspace,
    api,
    decision,
    decode,
    decode_bytes_moved,
    dflash2_decode,
    dflash2_mla_decode,
    dispatch,
    get_decode_schedule,
)
from ladder.step08_dflash2 import schedule as scheduling
from ladder.step08_dflash2 import tiles as tiling
from ladder.step08_dflash2.tiles import decode_config
from ladder.step08_dflash2.windows import Range, RangeWindows

SMALL = dict(BLOCK_N=16, min_split_keys=16, most_per_sm=4)  # short sequences cross many tiles and splits

EDGES = {
    **PROBLEMS,
    "group of 8": _problem(Hq=16, lengths=(5, 40)),
    "d64": _problem(D=64, Dv=64, lengths=(50,)),
    "d192": _problem(D=192, Dv=192, lengths=(20,)),
    "16 new tokens": _problem(q_len=16, lengths=(1, 16, 70)),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name):
    p = EDGES[name]
    check_decode(dflash2_decode, inputs_of(p), scale=p.scale)


@pytest.mark.parametrize("name", ("page edges", "pages of 3", "group of 7", "5 new tokens, some without keys", "d192/128"))
def test_edges_in_small_splits(name):
    check_decode(dflash2_decode, inputs_of(EDGES[name]), config=SMALL)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layouts(layout):
    check_decode(dflash2_decode, inputs_of(PROBLEMS["group of 3"], layout), config=SMALL)


@pytest.mark.parametrize("splits", (1, 2, 3, 7, 50))
def test_every_number_of_splits(splits):
    """Also more splits than tiles: none of those that are left over is waited for."""
    out, oracle = check_decode(dflash2_decode, inputs_of(PROBLEMS["splits"]), num_kv_splits=splits)
    one = dflash2_decode(*inputs_of(PROBLEMS["splits"]), num_kv_splits=1)
    assert (out.double() - one.double()).abs().max() <= 2 * oracle.budget


def test_agrees_with_step_07():
    inputs = inputs_of(PROBLEMS["group of 7"])
    difference = dflash2_decode(*inputs).double() - find(7).module.paged_decode(*inputs).double()
    assert difference.abs().max() <= 2 * DecodeOracle(inputs).budget


def test_one_token_without_its_dimension():
    q, *rest = inputs_of(PROBLEMS["group of 3"])
    out, lse = dflash2_decode(q, *rest, return_lse=True)
    flat_out, flat_lse = dflash2_decode(q[:, 0], *rest, return_lse=True)
    assert torch.equal(flat_out, out[:, 0]) and torch.equal(flat_lse, lse[..., 0])


def test_a_fixed_number_of_splits_ignores_the_rest_of_the_batch():
    q, k, v, table, lens = inputs_of(PROBLEMS["page edges"])
    together = dflash2_decode(q, k, v, table, lens, num_kv_splits=3)
    for b in range(len(lens)):
        alone = dflash2_decode(q[b : b + 1], k, v, table[b : b + 1], lens[b : b + 1], num_kv_splits=3)
        assert torch.equal(alone[0], together[b])


def test_wide_offsets_give_the_same_numbers(monkeypatch):
    inputs = inputs_of(PROBLEMS["d192/128"])
    narrow, layout_of = dflash2_decode(*inputs, config=SMALL), decision.layout_of
    monkeypatch.setattr(decision, "_decide_decode", decision._decide_decode.__wrapped__)
    monkeypatch.setattr(decision, "layout_of", lambda *args: {**layout_of(*args), "WIDE": True})
    assert torch.equal(dflash2_decode(*inputs, config=SMALL), narrow)


# The schedule


def plan_of(batch, capacity, config=(), q_len=1, kv_heads=2, **changes):
    options = dict(page_size=16, itemsize=2, arch=90, num_processors=132, latent=False, num_kv_splits=None, reach=1 << 30)
    options.update(changes)
    return tiling.plan_decode(batch, q_len, 4, kv_heads, 128, 128, options.pop("page_size"), capacity, config=config or None, **options)


def parts_of(plan, lengths, capacity, windows=None, q_len=1):
    schedule = torch.full((plan.num_slots, 4), 99, dtype=torch.int32)
    scheduling.fill_schedule(schedule, torch.tensor(lengths, dtype=torch.int32), q_len, capacity, windows, plan)
    return schedule


BATCHES = {
    "one": [32768], "one of nothing": [0], "equal": [4096] * 64, "many": [1000] * 3000, "nothing": [0] * 5,
    "one long": [64] * 63 + [131072], "to 16k": [64 + 259 * i for i in range(64)], "just above": [4096] * 63 + [4097],
    "ones": [1] * 100, "out of bounds": [5, -1, 131073, 40],
}  # fmt: skip


@pytest.mark.parametrize("kv_heads", (1, 8, 200))
@pytest.mark.parametrize("name", BATCHES)
def test_every_split_has_a_slot(name, kv_heads):
    """As many slots as the host may know that it needs, for any lengths; every sequence in consecutive ones."""
    lengths, capacity = BATCHES[name], 131072
    plan = plan_of(len(lengths), capacity, kv_heads=kv_heads)
    used = [row for row in parts_of(plan, lengths, capacity).tolist() if row[0] >= 0]
    expected = [(s, i, n) for s, n in dict((row[0], row[2]) for row in used).items() for i in range(n)]
    assert [tuple(row[:3]) for row in used] == expected and {row[0] for row in used} == set(range(len(lengths)))
    assert plan.num_slots <= plan.most + len(lengths)


def test_parts_are_about_equal():
    """What a ragged batch lost before: the longest sequence no longer finishes alone."""
    lengths = BATCHES["to 16k"]
    plan = plan_of(len(lengths), 16384, kv_heads=8)
    parts = [lengths[s] / n for s, _, n, _ in parts_of(plan, lengths, 16384).tolist() if s >= 0]
    assert max(parts) < 0.02 * sum(lengths) < max(lengths)
    assert len(parts) >= 128  # more than the processors hold at once
    assert 256 / 1.5 <= min(p for p in parts if p > 128)  # none so small that the merge outweighs it


def test_no_more_splits_are_planned_than_a_sequence_has_tiles():
    for capacity, reach, tiles in ((0, 1 << 30, 1), (16, 1 << 30, 1), (4096, 1 << 30, 256), (4096, 100, 7 + 2)):
        plan = plan_of(8, capacity, config=(("BLOCK_N", 16),), num_kv_splits=1 << 30, reach=reach)
        assert (plan.num_slots, plan.num_splits) == (8 * tiles, tiles)
    inputs = inputs_of(PROBLEMS["splits"])
    assert torch.equal(dflash2_decode(*inputs, num_kv_splits=1 << 30), dflash2_decode(*inputs, num_kv_splits=50))


def test_equal_lengths_that_fill_the_chip_are_not_split():
    lengths = BATCHES["equal"]
    parts = parts_of(plan_of(len(lengths), 131072, kv_heads=8), lengths, 131072)
    assert (parts[:64, 2] == 1).all() and (parts[64:, 0] == -1).all()


def test_a_batch_too_short_to_split_needs_no_schedule():
    plan = plan_of(7, 256)
    assert plan.kind == tiling.FIXED and plan.num_slots == 7
    assert plan_of(7, 1 << 20, reach=200).num_slots == 7  # a window keeps it short
    assert plan_of(7, 1 << 20, num_kv_splits=3).num_slots == 21


@pytest.mark.parametrize("at_a_time", (1024, 4))
@pytest.mark.parametrize("name", ("none", "sink 4, window 7", "local but for the last 7", "two ranges and a gap"))
def test_the_kernel_finds_what_the_formula_says(name, at_a_time, monkeypatch):
    monkeypatch.setattr(tiling, "SEQUENCES_AT_A_TIME", at_a_time)  # 4: the search goes over the batch in several steps
    lengths = torch.tensor([0, 300, 512, 40, -1, 999], dtype=torch.int32, device=DEVICE)
    shape = dict(num_heads=4, num_kv_heads=2, head_dim=32, page_size=16, max_seq_len=512, q_len=2, config=SMALL, windows=WINDOWS[name])
    found = get_decode_schedule(lengths, **shape)
    monkeypatch.setattr(scheduling, "device_code", lambda *_: None)
    wanted = get_decode_schedule(lengths.cpu(), **shape) if not ON_GPU else None
    if wanted is not None:
        live = wanted[:, 0] >= 0
        assert torch.equal(found[:, 0], wanted[:, 0]) and torch.equal(found[live], wanted[live])
        if name in ("none", "local but for the last 7"):  # elsewhere the windows are short
            assert (wanted[live][:, 2] > 1).any()


def test_a_schedule_gives_the_same_bits():
    inputs = inputs_of(_problem(lengths=(0, 17, 90, 33), max_context=96))
    shape = dict(num_heads=4, num_kv_heads=2, head_dim=32, page_size=16, max_seq_len=96, dtype=torch.float16, config=SMALL)
    schedule = get_decode_schedule(inputs.seq_lens, **shape)
    want, lse = dflash2_decode(*inputs, config=SMALL, return_lse=True)
    out, same_lse = dflash2_decode(*inputs, config=SMALL, return_lse=True, schedule=schedule)
    assert torch.equal(out, want) and torch.equal(lse, same_lse)
    stale = get_decode_schedule(inputs.seq_lens.flip(0).contiguous(), **shape, out=torch.empty_like(schedule))
    assert not torch.equal(stale, schedule)
    check_decode(dflash2_decode, inputs, config=SMALL, schedule=stale)  # splits without a key among them


def test_a_schedule_by_a_launch_of_its_own():
    inputs = inputs_of(PROBLEMS["page edges"])
    want = dflash2_decode(*inputs, config=SMALL)
    assert torch.equal(dflash2_decode(*inputs, config={**SMALL, "schedule_apart": True}), want)


# The workspace


def test_workspace_is_sized_to_need_and_left_clean():
    workspace = DecodeWorkspace(DEVICE)
    inputs = inputs_of(PROBLEMS["page edges"])
    want = dflash2_decode(*inputs, num_kv_splits=4)
    dflash2_decode(*inputs, num_kv_splits=1, workspace=workspace)
    assert workspace.nbytes == 0  # nothing to merge, nothing held
    for _ in range(3):
        assert torch.equal(dflash2_decode(*inputs, num_kv_splits=4, workspace=workspace), want)
        assert not workspace.counters.any()
        workspace.partials.fill_(float("nan"))  # whatever an earlier call left
    assert workspace.nbytes == 4 * (6 * 2 * 4 * 2 * (32 + 1) + 6 * 2)  # rows that are there, not those of the tile


class Allocations(TorchDispatchMode):
    """Names of the operators that made a tensor."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "empty" in str(function) or "zeros" in str(function) or "clone" in str(function) or "copy" in str(function):
            self.made.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("latent", (False, True))
def test_nothing_is_allocated_with_out_and_workspace(latent):
    if latent:
        _, x = latent_inputs()
        call, args, options = dflash2_mla_decode, (x.q, x.k_cache[:, :, 0], x.block_table, x.seq_lens), dict(scale=0.2, head_dim_v=32)
    else:
        x = inputs_of(PROBLEMS["page edges"])
        call, args, options = dflash2_decode, tuple(x), {}
    options.update(workspace=DecodeWorkspace(DEVICE), config=SMALL, windows=WINDOWS["sink 4, window 7"])
    options["sinks"] = torch.zeros(x.q.shape[2], device=DEVICE)
    out = call(*args, **options)
    kernels = importlib.import_module("ladder.step08_dflash2.portable.decode_kernel")
    with mock.patch.object(kernels, "dflash2_decode", mock.MagicMock()) as launched, Allocations() as log:
        assert call(*args, **options, out=out).data_ptr() == out.data_ptr()
    assert launched.__getitem__.call_count == 1 and log.made == []


def test_splits_may_finish_in_any_order():
    """The interpreter runs programs in their order; here another than the last split arrives last."""
    inputs = inputs_of(PROBLEMS["one head"].replace(lengths=(90,), page_size=16))
    workspace = DecodeWorkspace(DEVICE)
    want = dflash2_decode(*inputs, num_kv_splits=3, workspace=workspace)
    if ON_GPU:
        return  # the order is the device's
    workspace.counters.fill_(2)  # two of the three have "arrived", with their parts in place: the first to run merges
    out = torch.full_like(want, float("nan"))
    dflash2_decode(*inputs, num_kv_splits=3, workspace=workspace, out=out)
    assert torch.equal(out, want)


def test_the_same_bits_again():
    inputs = inputs_of(_problem(Hq=4, Hkv=1, q_len=2, lengths=(40, 70)))
    options = dict(config=SMALL, windows=WINDOWS["sink 4, window 7"], sinks=torch.ones(4, device=DEVICE), return_lse=True)
    first, first_lse = dflash2_decode(*inputs, **options)
    again, again_lse = dflash2_decode(*inputs, **options)
    assert torch.equal(first, again) and torch.equal(first_lse, again_lse)


def test_loud_length_in_the_kernel():
    """On a GPU the host does not read the lengths; here the kernel is launched behind the check's back."""
    q, k, v, table, lens = inputs_of(PROBLEMS["group of 3"])
    q, k, v, sinks = q[:, :, :3], k[:, :, :1], v[:, :, :1], torch.zeros(3, device=DEVICE)
    for wrong in (97, -1):
        lens[1] = wrong
        with mock.patch.object(decode, "check_paged", lambda *a, scale, **_: 32**-0.5), nan_allocations():
            with_sinks = dict(windows=WINDOWS["sliding 5"], sinks=sinks)
            for options in ({}, dict(num_kv_splits=1), dict(num_kv_splits=3), dict(config=SMALL), with_sinks):
                out, lse = dflash2_decode(q, k, v, table, lens, return_lse=True, **options)
                assert out[1].isnan().all() and lse[1].isnan().all() and out[0].isfinite().all() and lse[0].isfinite().all()


@pytest.mark.parametrize("wrong", (97, -1))
def test_loud_length_under_an_older_schedule(wrong):
    """Which has the sequence in several splits: what they add up to is NaN too."""
    q, k, v, table, lens = inputs_of(PROBLEMS["group of 3"].replace(lengths=(90, 90)))
    capacity = table.shape[1] * k.shape[1]
    shape = dict(num_heads=q.shape[2], num_kv_heads=k.shape[2], head_dim=q.shape[3], page_size=k.shape[1], max_seq_len=capacity)
    schedule = get_decode_schedule(lens, **shape, dtype=q.dtype, config=SMALL)
    assert (schedule[:, 2] > 1).any() and not 0 <= wrong <= capacity
    lens[1] = wrong
    with mock.patch.object(decode, "check_paged", lambda *a, scale, **_: 32**-0.5), nan_allocations():
        out, lse = dflash2_decode(q, k, v, table, lens, return_lse=True, schedule=schedule, config=SMALL)
    assert out[1].isnan().all() and lse[1].isnan().all() and out[0].isfinite().all() and lse[0].isfinite().all()


@pytest.mark.parametrize("latent", (False, True))
def test_a_table_without_pages_is_not_looked_at(latent):
    """It has no memory. A length above 0 is then beyond it, whose page sm_90's kernels would look up before they see that."""
    options, lens = dict(scale=0.1, return_lse=True), torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    d, heads, table = 576 if latent else 128, 1 if latent else 2, torch.zeros(2, 0, dtype=torch.int32, device=DEVICE)
    q, cache = (torch.ones(*shape, d, dtype=torch.float16, device=DEVICE) for shape in ((2, 1, 4), (3, 16, heads)))
    call, caches = (dflash2_mla_decode, [cache[:, :, 0]]) if latent else (dflash2_decode, [cache, cache])
    with (
        mock.patch.object(decode, "check_paged", lambda *a, scale, **_: scale),
        mock.patch.object(dispatch, "machine", lambda _: dispatch.Machine(90, 132, True)), mock.patch.object(decode.hopper_mla, "launch_mla") as launch_mla,
        mock.patch.object(decode.hopper_decode, "launch_decode") as launch_decode,
    ):  # fmt: skip
        call(q, *caches, torch.zeros(2, 1, dtype=torch.int32, device=DEVICE), lens, **options)
        assert launch_mla.call_count + launch_decode.call_count == 1
        out, lse = call(q, *caches, table, lens, **options)
        assert launch_mla.call_count + launch_decode.call_count == 1
    assert (out[0] == 0).all() and torch.isneginf(lse[0]).all() and out[1].isnan().all() and lse[1].isnan().all()


# Windows, softcap, sinks


@pytest.mark.parametrize("q_len", (1, 3))
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name, q_len):
    windows = WINDOWS[name]
    inputs = hide(inputs_of(_problem(Hq=2, Hkv=1, D=16, Dv=16, q_len=q_len, lengths=(0, 2, 33, 77))), windows, 0)
    check_windows(inputs, windows=windows, config=SMALL, num_kv_splits=q_len)


@pytest.mark.parametrize("name", ("sliding 17", "sink 16, window 16", "local prefix 20"))
def test_windows_in_parts_that_the_device_finds(name):
    windows = WINDOWS[name]
    inputs = hide(inputs_of(_problem(Hq=2, Hkv=1, D=16, Dv=16, q_len=2, lengths=(1, 33, 77))), windows, 0)
    check_windows(inputs, windows=windows, config=SMALL)


@pytest.mark.parametrize("page_size", (1, 3, 48, 64))
def test_windows_on_pages_of(page_size):
    p = _problem(Hq=2, Hkv=1, D=16, Dv=16, page_size=page_size, lengths=(1, 40, 80), max_context=144)
    windows = WINDOWS["sink 4, window 7"]
    check_windows(hide(inputs_of(p), windows, 0), windows=windows, config=SMALL, num_kv_splits=2)


@pytest.mark.parametrize("name", ("none", "sink 4, window 7", "end and start"))
@pytest.mark.parametrize("q_len", (1, 4))
def test_not_causal(name, q_len):
    windows = WINDOWS[name]
    inputs = hide(inputs_of(_problem(Hq=2, Hkv=1, D=16, Dv=16, q_len=q_len, lengths=(1, 3, 50))), windows, None)
    check_windows(inputs, windows=windows, right=None, config=SMALL, num_kv_splits=2)


@pytest.mark.parametrize("splits", (None, 1, 3))
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_softcap_and_sinks(splits, dtype):
    inputs = inputs_of(_problem(q_len=3, lengths=(0, 1, 77), dtype=dtype))
    sinks = torch.tensor([-2.0, 0.0, 3.0, float("-inf")], device=DEVICE)
    for softcap, some in ((30.0, None), (0.7, sinks)):
        check_windows(inputs, softcap=softcap, sinks=some, num_kv_splits=splits, config=SMALL)


@pytest.mark.parametrize("softcap", (1e5, 1e8, 1e38))
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_a_large_softcap_changes_nothing(softcap, dtype):
    check_windows(inputs_of(_problem(q_len=3, lengths=(0, 1, 77), dtype=dtype)), softcap=softcap, num_kv_splits=3, config=SMALL)


def test_a_row_without_keys_has_its_sink_alone():
    inputs = inputs_of(_problem(q_len=2, lengths=(0, 1)))
    sinks = torch.tensor([-1.0, 2.0, 0.5, float("-inf")], device=DEVICE)
    for splits in (None, 1, 4):
        out, lse = dflash2_decode(*inputs, sinks=sinks, return_lse=True, num_kv_splits=splits)
        assert (out[0] == 0).all() and (out[1, 0] == 0).all()
        assert torch.allclose(lse[0], sinks[:, None].expand(4, 2)) and torch.allclose(lse[1, :, 0], sinks)


@pytest.mark.parametrize("splits", (1, 2, 5, 9))
def test_sinks_count_once_however_the_keys_are_split(splits):
    """Nine splits of the five tiles of the longest: four have no key."""
    inputs = inputs_of(_problem(lengths=(3, 33, 77)))
    shape = dict(num_heads=4, num_kv_heads=2, head_dim=32, page_size=16, max_seq_len=96, dtype=torch.float16, config=SMALL)
    sinks = torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE)
    check_windows(inputs, sinks=sinks, num_kv_splits=splits, config=SMALL)
    schedule = torch.full_like(get_decode_schedule(inputs.seq_lens, **shape)[:1].expand(3 * splits, 4), 0).contiguous()
    schedule[:, 0] = torch.arange(3).repeat_interleave(splits)
    schedule[:, 1], schedule[:, 2] = torch.arange(splits).repeat(3), splits
    check_windows(inputs, sinks=sinks, schedule=schedule, config=SMALL)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_sinks_in_16_bits_and_with_a_stride(dtype):
    inputs = inputs_of(PROBLEMS["group of 3"])
    sinks = torch.linspace(-3, 3, 12, device=DEVICE).to(dtype)[::2]
    assert torch.equal(dflash2_decode(*inputs, sinks=sinks), dflash2_decode(*inputs, sinks=sinks.float().contiguous()))


@pytest.mark.parametrize("scale", (1.0, -1.0, 0.0))
@pytest.mark.parametrize("softcap", (0.0, 20.0))
def test_huge_logits(scale, softcap):
    """Scores up to +-5e4: multiples of 56 x 56, exact in float16."""
    q, k, v, table, lens = inputs_of(_problem(q_len=2, lengths=(1, 77)))
    inputs = type(inputs_of(PROBLEMS["splits"]))(56 * q.sign(), 56 * k.sign(), v, table, lens)
    check_windows(inputs, scale=scale, softcap=softcap, config=SMALL, sinks=torch.full((4,), -100.0, device=DEVICE))
    sunken = type(inputs)(56 * q.sign().abs(), torch.where(k.isnan(), k, -56.0), v, table, lens)
    check_windows(sunken, scale=scale, softcap=softcap, config=SMALL)


# MLA


def latent_inputs(**changes):
    p = DecodeProblem(**{**dict(B=2, Hq=5, Hkv=1, D=48, Dv=32, latent=True, page_size=16, dtype="float16", lengths=(0, 40),
                               max_context=64, scale=0.2), **changes})  # fmt: skip
    return p, p.make(DEVICE)


@pytest.mark.parametrize(
    "changes",
    (
        {}, dict(Hq=16, q_len=2, lengths=(1, 33)), dict(page_size=1), dict(dtype="float32"), dict(D=64, Dv=64),
        dict(D=32, Dv=16), dict(D=16, Dv=16, dtype="float32"),
        dict(D=576, Dv=512, Hq=16, lengths=(3, 37)), dict(Hq=40, q_len=3, lengths=(2, 50)),
    ),
    ids=lambda c: ", ".join(f"{k}={v}" for k, v in c.items()) or "small",
)  # fmt: skip
@pytest.mark.parametrize("splits", (None, 1, 3))
def test_mla_decode(changes, splits):
    p, inputs = latent_inputs(**changes)
    check_windows(inputs, mla, scale=p.scale, num_kv_splits=splits)


@pytest.mark.parametrize("name", ("sliding 5", "sink 4, window 7", "local but for the last 7"))
def test_mla_windows_softcap_and_sinks(name):
    windows = WINDOWS[name]
    p, inputs = latent_inputs(q_len=2, lengths=(1, 60))
    sinks = torch.linspace(-1, 1, 5, device=DEVICE)
    for splits in (None, 3):
        check_windows(
            hide(inputs, windows, 0), mla, scale=p.scale, windows=windows, softcap=4.0, sinks=sinks, num_kv_splits=splits, config=SMALL
        )


def test_absorbed_mla_is_mla():
    """Scores and values through the latent are those of the keys and values that it decompresses to."""
    generator = torch.Generator().manual_seed(5)
    heads, nope, rope, rank, length, scale = 3, 8, 16, 32, 20, 24**-0.5
    up_k, up_v = (torch.randn(heads, nope, rank, generator=generator) / 6 for _ in range(2))
    latent, k_rope = torch.randn(length, rank, generator=generator), torch.randn(length, rope, generator=generator)
    q_nope, q_rope = torch.randn(1, heads, nope, generator=generator), torch.randn(1, heads, rope, generator=generator)
    keys = torch.cat((torch.einsum("hnr,lr->hln", up_k, latent), k_rope.expand(heads, -1, -1)), -1)[None]
    values = torch.einsum("hnr,lr->hln", up_v, latent)[None]
    want, _ = reference(torch.cat((q_nope, q_rope), -1)[:, :, None], keys, values, causal=True, scale=scale)
    cache = torch.zeros(2, 16, rank + rope)
    cache.view(-1, rank + rope)[:length] = torch.cat((latent, k_rope), -1)
    q = torch.cat((torch.einsum("bhn,hnr->bhr", q_nope, up_k), q_rope), -1)
    table, lens = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    out = dflash2_mla_decode(*(x.to(DEVICE) for x in (q, cache, table, lens)), scale=scale, head_dim_v=rank)
    got = torch.einsum("bhr,hnr->bhn", out.cpu(), up_v)
    assert (got - want[:, :, 0]).abs().max() < 1e-5


# Without Triton, and under torch.compile


@pytest.mark.skipif(ON_GPU, reason="CPU tensors take this path")
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
def test_the_eager_path(dtype, monkeypatch):
    monkeypatch.setattr(decode, "device_code", lambda *_: None)
    monkeypatch.setattr(decode, "launch", None)
    sinks = torch.tensor([1.0, 2.0, 0.0, -1.0])
    for windows in (None, WINDOWS["sink 4, window 7"]):
        inputs = inputs_of(_problem(q_len=2, lengths=(0, 1, 40), dtype=dtype))
        out, _ = check_windows(inputs, windows=windows, softcap=9.0, sinks=sinks)
        given = torch.full_like(out, float("nan"))
        dflash2_decode(*inputs, windows=windows, softcap=9.0, sinks=sinks, out=given, workspace=DecodeWorkspace("cpu"), num_kv_splits=3)
        assert torch.equal(given, out)
        p, latent = latent_inputs(dtype=dtype)
        check_windows(latent, mla, scale=p.scale, windows=windows)
    flat, flat_lse = dflash2_decode(inputs.q[:, 0], *list(inputs)[1:], return_lse=True)
    assert flat.shape == inputs.q[:, 0].shape and flat_lse.shape == inputs.q.shape[0:3:2]


@pytest.mark.skipif(ON_GPU, reason="on a GPU triton is needed")
def test_importing_and_the_eager_path_leave_triton_alone():
    code = """
import sys, torch
from ladder.step08_dflash2 import dflash2_decode, get_decode_schedule
q, cache = torch.ones(1, 2, 16, dtype=torch.bfloat16), torch.ones(2, 16, 1, 16, dtype=torch.bfloat16)
table, lens = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
get_decode_schedule(lens, num_heads=2, num_kv_heads=1, head_dim=16, page_size=16, max_seq_len=32)
assert (dflash2_decode(q, cache, cache, table, lens) == 1).all()
assert "triton" not in sys.modules and not torch.cuda.is_initialized()
"""
    python(code)


def compiled(function, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.filterwarnings("default")
def test_compile_whole():
    inputs = inputs_of(_problem(q_len=2, lengths=(3, 70)))
    windows, sinks, workspace = WINDOWS["sink 4, window 7"], torch.ones(4, device=DEVICE), DecodeWorkspace(DEVICE)
    schedule = torch.tensor([[0, 0, 1, 0], [1, 0, 2, 0], [1, 1, 2, 0]], dtype=torch.int32, device=DEVICE)
    dflash2_decode(*inputs, num_kv_splits=3, workspace=workspace)

    def block(q, *rest, **options):
        out = dflash2_decode(q * 2, *rest, **options)
        return (out[0] + 1, out[1]) if isinstance(out, tuple) else out + 1

    for options in (
        {}, dict(return_lse=True, windows=windows, sinks=sinks, softcap=3.0, scale=0.2), dict(num_kv_splits=3, workspace=workspace),
        dict(schedule=schedule, causal=False),
    ):  # fmt: skip
        want, got = block(*inputs, **options), compiled(block)(*inputs, **options)
        for a, b in zip(want if isinstance(want, tuple) else (want,), got if isinstance(got, tuple) else (got,)):
            assert torch.equal(a, b)
    assert not workspace.counters.any()
    out = torch.empty_like(inputs.q)
    compiled(lambda q, *rest: dflash2_decode(q, *rest, out=out))(*inputs)
    assert torch.equal(out, dflash2_decode(*inputs))
    flat = compiled(lambda q, *rest: dflash2_decode(q, *rest, return_lse=True))(inputs.q[:, 0], *list(inputs)[1:])
    assert flat[1].shape == (2, 4)


@pytest.mark.filterwarnings("default")
def test_compile_mla_whole():
    p, x = latent_inputs(q_len=2)
    args = x.q, x.k_cache[:, :, 0], x.block_table, x.seq_lens

    def block(*args):
        return dflash2_mla_decode(*args, scale=0.2, head_dim_v=32, return_lse=True, windows=RangeWindows([Range(0, None, 2, 9)]))

    for a, b in zip(block(*args), compiled(block)(*args)):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("default")
def test_operators_say_what_they_do():
    inputs = inputs_of(_problem(q_len=2, lengths=(3, 70)))
    workspace = DecodeWorkspace(DEVICE)
    dflash2_decode(*inputs, num_kv_splits=3, workspace=workspace)
    args = (*inputs, True, None, [0, 1 << 30, 4, 6], 0.0, torch.ones(4, device=DEVICE), 3, True, torch.zeros_like(inputs.q))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.ladder.dflash2_decode.default, (*args, workspace.partials, workspace.counters, None), test_utils=tests)
    _, x = latent_inputs()
    args = (x.q, x.k_cache[:, :, 0], x.block_table, x.seq_lens, 0.2, 32, True, None, 0.0, None, None, False)
    out = torch.zeros(*x.q.shape[:3], 32, dtype=x.q.dtype, device=DEVICE)
    torch.library.opcheck(torch.ops.ladder.dflash2_mla_decode.default, (*args, out, None, None, None), test_utils=tests)


# Errors


def call_of(name, **changes):
    if name == "dflash2_mla_decode":
        _, x = latent_inputs(lengths=(5, 40))
        arguments = dict(q=x.q, latent_cache=x.k_cache[:, :, 0], scale=0.2, head_dim_v=32)
    else:
        x = inputs_of(PROBLEMS["group of 3"])
        arguments = dict(q=x.q, k_cache=x.k_cache, v_cache=x.v_cache)
    return getattr(api, name), {**arguments, "block_table": x.block_table, "seq_lens": x.seq_lens, **changes}


CALLS = ("dflash2_decode", "dflash2_mla_decode")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "changes, error, message",
    (
        (dict(causal=1), TypeError, "causal is 1; want True or False"),
        (dict(return_lse="no"), TypeError, "return_lse is 'no'; want True or False"),
        (dict(config=[1]), TypeError, "config is a list; want a dict of launch parameters, or None"),
        (dict(out=[1]), TypeError, "out is a list; want a torch.Tensor"),
        (dict(num_kv_splits=1.5), TypeError, "num_kv_splits is 1.5; want an integer of at least 1, or None"),
        (dict(num_kv_splits=0), ValueError, "num_kv_splits is 0; want an integer of at least 1, or None"),
        (dict(workspace=3), TypeError, "workspace is a int; want a DecodeWorkspace"),
        (dict(windows=(3, 4)), TypeError, "windows is a tuple; want a RangeWindows, or None"),
        (dict(softcap=-1.0), ValueError, "softcap is -1.0; want a finite number of at least 0"),
        (dict(softcap=float("nan")), ValueError, "softcap is nan; want a finite number of at least 0"),
        (dict(softcap="a"), TypeError, "softcap is 'a'; want a real number, 0 for none"),
        (dict(sinks=[0.0]), TypeError, "sinks is a list; want a torch.Tensor"),
        (dict(sinks=torch.zeros(3)), ValueError, r"sinks has shape \(3,\); want \([56],\)"),
        (dict(schedule=[1]), TypeError, r"schedule is a list; want a torch.Tensor \(num_slots, 4\), or None"),
        (dict(schedule=torch.zeros(3, 4)), ValueError, "schedule has dtype torch.float32; want int32"),
        (dict(schedule=torch.zeros(3, 4, dtype=torch.int32, device=DEVICE), num_kv_splits=2), ValueError, "schedule and num_kv_splits"),
    ),
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_bad_options(name, changes, error, message):
    call, arguments = call_of(name)
    with pytest.raises(error, match="step08_dflash2: " + message):
        call(**{**arguments, **changes})


@pytest.mark.skipif(ON_GPU, reason="on a GPU the table is not read by the host")
@pytest.mark.parametrize("name", CALLS)
def test_a_live_entry_that_is_no_page_is_an_error(name):
    call, arguments = call_of(name)
    want = call(**arguments)
    arguments["block_table"][1, 3:] = -1
    assert torch.equal(call(**arguments), want)
    arguments["block_table"][1, 2] = 10**7
    with pytest.raises(ValueError, match=r"step08_dflash2: block_table\[1, 2\] is 10000000, and seq_lens\[1\] = 40 reaches it"):
        call(**arguments)


def test_mla_errors():
    call, arguments = call_of("dflash2_mla_decode")
    for changes, error, message in (
        (dict(scale=None), TypeError, "scale is None; want the model's"),
        (dict(head_dim_v=24), ValueError, "head_dim_v is 24; want a power of two, 16 .. 48"),
        (dict(head_dim_v="32"), TypeError, "head_dim_v is '32'; want an integer"),
        (dict(head_dim_v=16), NotImplementedError, "D = 48 is above twice head_dim_v = 16"),
        (dict(latent_cache=arguments["latent_cache"][None]), ValueError, "latent_cache is .*; want a torch.Tensor"),
        (dict(latent_cache=3), TypeError, "latent_cache is a int; want a torch.Tensor"),
    ):
        with pytest.raises(error, match="step08_dflash2: " + message):
            call(**{**arguments, **changes})


@pytest.mark.parametrize(
    "changes, error, message",
    (
        (dict(seq_lens=[1]), TypeError, "seq_lens is a list; want a contiguous int32"),
        (dict(seq_lens=torch.zeros(4)), ValueError, r"seq_lens is \(4,\) torch.float32 on cpu; want"),
        (dict(seq_lens=torch.zeros(4, dtype=torch.int32)[::2]), ValueError, "seq_lens has stride 2; want a contiguous tensor"),
        (dict(num_heads=5), ValueError, "num_heads is 5; want a multiple of num_kv_heads = 2"),
        (dict(q_len=0), ValueError, "q_len is 0; want an integer of at least 1"),
        (dict(dtype=torch.int8), ValueError, "dtype is torch.int8; want float16, bfloat16 or float32"),
        (dict(out=torch.zeros(1, 4)), ValueError, r"out is \(1, 4\) torch.float32 on cpu; want a contiguous int32"),
        (dict(windows=1), TypeError, "windows is a int; want a RangeWindows"),
    ),
)
def test_bad_schedule_arguments(changes, error, message):
    arguments = dict(seq_lens=torch.zeros(3, dtype=torch.int32), num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, max_seq_len=64)
    arguments.update(changes)
    with pytest.raises(error, match="step08_dflash2: " + message):
        get_decode_schedule(arguments.pop("seq_lens"), **arguments)


def test_forward_only():
    q, *rest = inputs_of(PROBLEMS["group of 3"])
    with pytest.raises(NotImplementedError, match="step08_dflash2: .* requires gradients; forward only"):
        dflash2_decode(q.requires_grad_(), *rest)
    with torch.no_grad():
        dflash2_decode(q, *rest)


def test_decode_bytes_moved():
    for p in (DecodeProblem(B=64, context=4096), DecodeProblem(B=64, lengths=(64,) * 63 + (16384,)), DecodeProblem(context=32768)):
        assert p.kv_bytes < decode_bytes_moved(p) < 1.05 * p.kv_bytes
    latent = DecodeProblem(B=64, Hq=16, Hkv=1, D=576, Dv=512, context=4096, latent=True)
    assert latent.kv_bytes < decode_bytes_moved(latent) < 1.1 * latent.kv_bytes


def test_tiles_fit_their_pages():
    for page_size, block_n in ((16, 16), (64, 32), (48, 16), (8, 32)):
        assert decode_config(128, 128, 4, page_size, 2, 90)["BLOCK_N"] == block_n


@pytest.mark.parametrize(("arch", "stages"), ((80, 4), (86, 3), (89, 3), (90, 4), (120, 3)))
def test_few_programs_fit_the_shared_memory_of_small_processors(arch, stages):
    """Three tiles of K and V, 32 KB together, under way leave no room for Q where there are 99 KB."""
    config = decode_config(128, 128, 16, 64, 2, arch, few=True)
    assert (config["BLOCK_N"], config["num_stages"]) == (64, stages)
