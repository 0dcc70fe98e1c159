"""The Hopper kernels without a Hopper: what they take, how they are launched, and (on a GPU) that they are right."""

import importlib
import json
import os
import random
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch
from support.step08_checks import random_ranges

from ladder.lab.compile import matrix as compile_matrix
from ladder.lab.problem import AttentionProblem
from ladder.step08_dflash2 import RangeWindows, dispatch, eager, explain, warmup
from ladder.step08_dflash2.decision import decode_call, prefill_call
from ladder.step08_dflash2.hopper import decode as hopper_decode
from ladder.step08_dflash2.hopper import mla as hopper_mla
from ladder.step08_dflash2.hopper import prefill as hopper

explaining = importlib.import_module("ladder.step08_dflash2.explain")  # whose name in the package is the function's

BF16 = torch.bfloat16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tensors(d=128, dv=128, dtype=BF16, length=64):
    return [torch.empty(2, h, length, n, dtype=dtype) for h, n in ((8, d), (2, d), (2, dv))]


HOPPER = dispatch.Machine(90, 132, True)


def refusal(q, k, v, out=None, **options):
    out = q.new_empty(*q.shape[:-1], v.shape[-1]) if out is None else out
    return hopper.supports_prefill(prefill_call(q, k, v, out, **options))


def mla_refusal(q, cache, out, **options):
    k = cache[:, :, None]
    return hopper_mla.supports_mla(decode_call(q, k, k[..., : out.shape[3]], out, 4096, latent=True, **options))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, v: (q.float(), k.float(), v.float()), "float32"),
        (lambda q, k, v: (q, k, v[..., ::2]), "v has strides"),
        (lambda q, k, v: (q, k[..., 1:], v), "k has strides"),
        (lambda q, k, v: (q.expand(2, 8, 64, 128), k[:, :1].expand(2, 2, 64, 128), v), "k has strides"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), "is empty"),
        (lambda q, k, v: (q[..., :64], k[..., :64], v), "wider than the keys"),
    ],
)
def test_what_the_copy_engine_cannot_address_is_refused_with_a_reason(change, reason):
    assert refusal(*tensors()) is None
    assert reason in refusal(*change(*tensors()))


def test_out_and_pages_are_looked_at_too():
    q, k, v = tensors()
    assert "out has strides" in refusal(q, k, v, torch.empty(2, 8, 64, 129, dtype=BF16)[..., :128])
    pages = torch.empty(9, 48, 2, 128, dtype=BF16)
    assert "page_size 48" in refusal(q[0].transpose(0, 1), pages, pages, num_seqs=1, capacity=48)
    assert "scale of zero" in refusal(q, k, v, scale=0.0)


def test_mla_is_built_for_deepseek():
    q, cache = torch.empty(2, 1, 16, 576, dtype=BF16), torch.empty(9, 64, 576, dtype=BF16)
    out = torch.empty(2, 1, 16, 512, dtype=BF16)
    assert mla_refusal(q, cache, out) is None
    assert "576/512" in mla_refusal(q[..., :320], cache[..., :320], out[..., :256])
    assert "portable" in mla_refusal(q, cache, out, softcap=3.0)
    assert "page_size 8" in mla_refusal(q, cache[:, :8], out)


@pytest.mark.parametrize("head_dim", (8, 40, 64, 72, 96, 112, 128, 160, 192, 256))
def test_tiles_cover_the_head(head_dim):
    width, parts = hopper.width_of(head_dim)
    assert sum(parts) == width >= head_dim
    assert all(part == 0 or part & (part - 1) == 0 for part in parts)


@pytest.mark.parametrize("short", (False, True))
@pytest.mark.parametrize(("d", "dv"), [(d, dv) for d, _ in hopper.WIDTHS for dv, _ in hopper.WIDTHS if dv <= d])
def test_tiles_and_barriers_fit_the_chip(d, dv, short):
    config = hopper.config_for(d, dv, short)
    rows, n = 64 * config["WG"], config["N"]
    assert d == dv or not config["O_IN_Q"]  # one memory, of one shape, for Q and then the output
    output = 0 if config["O_IN_Q"] else 1024 if config["DIRECT"] else rows * dv  # straight from registers: 512 bytes a warp
    shared = 2 * (config["QBUF"] * rows * d + config["STAGES"] * n * (d + dv) + output) + 1024
    assert shared <= 227 * 1024
    barriers = 2 * config["STAGES"] + (config["WG"] if config["Q_EARLY"] else 0)
    assert 5 + barriers <= 13  # hardware barriers: two a stage from 5 on, and one a group's Q; turns from 13 on
    threads = 128 * config["WG"]
    assert threads * config["CONSUMER_REGS"] + 128 * config["PRODUCER_REGS"] <= 65536


def planned(seqlen_q, seqlen_k, right, ragged=False, num_splits=1, windows=False, d=128):
    config, *_ = hopper.plan_prefill(
        16, 16, 1, seqlen_q, seqlen_k, d, d, right, ragged, False, None, 132, num_splits, windows
    )
    return config["ALIGNED"]


def test_tiles_are_aligned_only_where_the_diagonal_meets_their_corners():
    assert planned(1024, 1024, 0) and planned(1024, 896, 0)
    assert planned(1000, 1128, 0)  # a last tile of queries need not be whole
    assert not any(planned(*lengths) for lengths in ((1024, 1024, None), (1024, 1024, 1), (1024, 1088, 0)))
    assert not planned(4096, 4096, 0, d=256)  # tiles of 64 keys
    for other in (dict(ragged=True), dict(num_splits=2), dict(windows=True)):
        assert not planned(1024, 1024, 0, **other)


def test_sections_follow_what_was_measured():
    def heads(seqlen_k, head_dims, limited, group=1):
        return hopper.choose_section(group, 2 * seqlen_k * head_dims, seqlen_k, limited)

    assert [heads(n, 256, False) for n in (1024, 4096, 16384, 131072)] == [2, 2, 1, 1]
    assert heads(4096, 256, False, 8) == 8 and heads(16384, 128, False) == 2
    assert [heads(n, 256, True) for n in (4096, 16384, 32768, 131072)] == [21, 8, 4, 1]
    assert heads(4096, 320, True) == 16 and heads(131072, 256, True, 8) == 8  # heads that share K and V stay together


@pytest.mark.parametrize("block", (64, 128))
def test_no_tile_of_packed_queries_is_left_out(block):
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 5, (1 + seed % 5,), generator=generator) * torch.randint(1, 3, (1,), generator=generator) * 64
        lengths = (lengths + torch.randint(0, 2, lengths.shape, generator=generator)).tolist()
        total = sum(lengths)
        if not total:
            continue
        _, num_m, *_ = hopper.plan_prefill(
            len(lengths), 8, 1, total, 4096, 128, 128, 0, True, True, max(lengths), 132, None, False,
            (("WG", block // 64),),
        )  # fmt: skip
        start, last = 0, 0  # sequence s owns the tiles start // block + s and on
        for s, length in enumerate(lengths):
            last = max(last, start // block + s + -(-length // block) if length else 0)
            start += length
        assert last <= num_m, lengths


def test_splits_follow_the_tiles_that_hold_queries():
    arguments = (1, 16, 1, 512, 131584, 128, 128, 0, True, True, 512, 132)
    assert hopper.plan_prefill(*arguments)[1:3] == (4, 2)  # 128 works; a fifth, empty tile a head would make it three splits


def test_a_block_table_without_columns_is_planned():
    """Sequences without keys, whose rows are zeros: nothing to split, and no bytes to divide the cache by."""
    for right in (None, 0):
        _, num_m, splits, section, grid = hopper.plan_prefill(2, 8, 4, 10, 0, 128, 128, right, True, True, 5, 132)
        assert splits == 1 and section >= 1 and grid == num_m * 8


def test_sections_are_even():
    assert hopper.fit_section(16, 3) == 2  # not 3, 3, 3, 3, 3, 1: the one would run alone
    assert hopper.fit_section(64, 12) == 8
    assert hopper.fit_section(7, 3) == 3  # a prime has no better
    assert hopper.fit_section(5, 99) == 5


def test_keys_are_split_only_where_tiles_do_not_fill_the_chip():
    assert hopper.choose_splits(tiles=132, seqlen_k=1 << 17, block_n=128, processors=132) == 1
    assert hopper.choose_splits(tiles=1, seqlen_k=256, block_n=128, processors=132) == 1
    splits = hopper.choose_splits(tiles=16, seqlen_k=1 << 17, block_n=128, processors=132)
    assert 7 <= splits <= 9  # 16 x 8 = 128 of 132 processors


@pytest.mark.parametrize("sinks", (None, (0.5, float("-inf"))), ids=str)
def test_splits_merge_to_the_whole(sinks):
    """Of rows that all splits see, that some see and that none sees; a sink counts once, and one of -inf not at all."""
    torch.manual_seed(0)
    sinks = None if sinks is None else torch.tensor(sinks, device=DEVICE)
    part_out, part_lse = torch.randn(3, 2 * 2 * 5, 24, device=DEVICE), torch.randn(3, 2 * 2 * 5, device=DEVICE)
    part_lse[0, ::5] = part_lse[:2, 1::5] = part_lse[:, 2::5] = float("-inf")
    part_out[part_lse == float("-inf")] = 0
    out, lse = torch.empty(2, 5, 2, 24, device=DEVICE).transpose(1, 2), torch.empty(2, 2, 5, device=DEVICE)
    hopper.merge_splits(part_out, part_lse, out, lse, sinks)
    logits = part_lse.view(3, 2, 2, 5)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, 1, 2, 1).expand(1, 2, 2, 5)])
    weights = logits.softmax(0).nan_to_num(0.0)[:3]  # no logit at all: no weight
    torch.testing.assert_close(out, (part_out.view(3, 2, 2, 5, 24) * weights[..., None]).sum(0))
    torch.testing.assert_close(lse, logits.logsumexp(0))


def test_merging_leaves_the_rows_of_no_sequence():
    """Packed queries may stand behind the last sequence; their parts were never written."""
    torch.manual_seed(0)
    part_out, part_lse = torch.randn(2, 3 * 7, 16, device=DEVICE), torch.randn(2, 3 * 7, device=DEVICE)
    part_out.view(2, 3, 7, 16)[:, :, 5:], part_lse.view(2, 3, 7)[:, :, 5:] = float("nan"), float("nan")
    out, lse = (torch.full(shape, 9.0, device=DEVICE) for shape in ((1, 3, 7, 16), (3, 7)))
    hopper.merge_splits(part_out, part_lse, out, lse, None, torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE))
    weights = part_lse.view(2, 3, 7)[:, :, :5].softmax(0)
    torch.testing.assert_close(out[0, :, :5], (part_out.view(2, 3, 7, 16)[:, :, :5] * weights[..., None]).sum(0))
    assert bool((out[:, :, 5:] == 9).all()) and bool((lse[:, 5:] == 9).all()) and bool((lse[:, :5] != 9).all())


# The key tiles that a tile of rows visits, by the source of the device function itself: it is scalar arithmetic


class Table:
    """The windows' table as ``gl.load`` reads it."""

    def __init__(self, flat, place=0):
        self.flat, self.place = flat, place

    def __add__(self, step):
        return Table(self.flat, self.place + step)


@pytest.fixture(scope="module")
def keys_of_tile():
    """``dflash2_keys``, and what it calls, run by Python."""
    work = pytest.importorskip("ladder.step08_dflash2.hopper.work")
    scalars = types.SimpleNamespace(
        load=lambda x: x.flat[x.place], where=lambda c, a, b: a if c else b, minimum=min, maximum=max, static_range=range,
        cdiv=lambda a, b: -(-a // b),
    )  # fmt: skip
    names = {"gl": scalars, "NEVER": 1 << 30}
    for name in ("dflash2_range", "dflash2_keys"):
        function = getattr(work, name).fn
        names[name] = types.FunctionType(function.__code__, names, name)
    return names["dflash2_keys"]


@pytest.mark.parametrize("seed", range(8))
def test_no_row_of_v_that_nobody_sees_counts_as_seen(keys_of_tile, seed):
    """The kernel cleans the rows of V between ``sink`` and ``low``: what no row sees may hold NaN, and 0 x NaN is NaN."""
    draw = random.Random(seed)
    overlapping = 0
    for _ in range(150):
        windows, right = random_ranges(draw), draw.choice((0, None, 5))
        rows, keys, block_m, first = draw.randrange(1, 90), draw.randrange(1, 100), 16, 0
        seen = windows.visible(rows, keys, right=right)
        for first in range(0, rows, block_m):
            low, sink, high_tile, low_tile, sink_tile, begin, end = keys_of_tile(
                first, rows, keys, right or 0, Table(windows.flat), 0, 1, 8, block_m, right is not None, len(windows), False
            )
            wanted = seen[first : first + block_m].any(0)
            told = [key < sink or key >= low for key in range(keys)]
            stop = keys if right is None else max(0, min(keys, min(first + block_m, rows) - 1 + keys - rows + right + 1))
            assert told[:stop] == wanted[:stop].tolist() or not len(windows), (windows, rows, keys, first, right)
            visited = {*range(low_tile, high_tile), *range(sink_tile)}
            assert {key // 8 for key in wanted.nonzero()[:, 0].tolist()} <= visited and end - begin == len(visited)
        bounds = [(r.start + (r.start < 0) * keys, r.stop + (r.stop < 0) * keys) for r in windows.ranges]
        overlapping += any(a[0] < b[1] and b[0] < a[1] for i, a in enumerate(bounds) for b in bounds[:i])
    assert overlapping > 20


def test_mla_gives_a_small_batch_to_the_whole_chip():
    row_tiles, found, slots, *_ = hopper_mla.plan_mla(1, 16, 32768, 132, None)
    assert (row_tiles, found) == (1, True) and slots >= 128
    assert hopper_mla.plan_mla(8, 128, 4096, 132, 3)[:4] == (2, False, 24, 3)
    assert hopper_mla.plan_mla(4, 16, 64, 132, None)[1:3] == (False, 4)


def test_no_more_splits_are_planned_than_a_sequence_has_tiles():
    """Each would be a slot of the workspace, and the first tile of one that is left over would not fit 32 bits."""
    for capacity, tiles in ((0, 1), (16, 1), (4096, 64), (4097, 65)):
        assert hopper_mla.plan_mla(8, 128, capacity, 132, 1 << 30)[2:4] == (8 * tiles, tiles)
        assert hopper_decode.plan_decode(8, 4, 8, capacity, 132, 1 << 30)[2:4] == (8 * tiles, tiles)
    assert hopper_mla.mla_merges("few", 8, 132, 9) == hopper_mla.mla_merges("few", 8, 132, 1 << 30)  # what the caller says decides, not the table


def splits_of(tiles, chunk):
    return max(1, (2 * tiles + chunk) // (2 * chunk))


def slots_in_use(lengths, target, most, min_tiles):
    """Slots of a KV head's row tile as ``dflash2_decode_cut`` finds them on the device."""
    tiles = [-(-n // 64) for n in lengths]
    total, longest, batch = sum(tiles), max(tiles), len(tiles)
    mean = -(-total // batch)
    wanted = most if batch > 1 and longest * 4 > mean * 5 else target
    chunk = max(min_tiles, -(-total // wanted))
    return sum(splits_of(n, chunk) for n in tiles)


@pytest.mark.parametrize("seed", range(8))
def test_every_split_that_the_device_makes_has_a_slot(seed):
    """Else parts of two heads would share memory. Lengths up to the last page, equal and not."""
    draw = random.Random(seed)
    for _ in range(2000):
        batch, rows, heads = draw.choice((1, 2, 3, 8, 40, 64, 300)), draw.choice((1, 4, 16, 128)), draw.choice((1, 2, 8))
        capacity = 64 * draw.choice((draw.randrange(1, 60), draw.randrange(1, 2100)))
        lengths = [capacity] * batch if draw.random() < 0.5 else [draw.randrange(capacity + 1) for _ in range(batch)]
        lengths = [capacity, *[draw.randrange(99)] * (batch - 1)] if draw.random() < 0.2 else lengths
        _, found, slots, _, target, most = hopper_decode.plan_decode(batch, rows, heads, capacity, 132, None)
        if found:
            assert slots_in_use(lengths, target, most, hopper_decode.MIN_TILES) <= slots, (lengths, rows, heads)
        _, found, slots, _, target, most = hopper_mla.plan_mla(batch, rows, capacity, 132, None, hopper_mla.mla_design(rows)[1])
        if found:
            assert slots_in_use(lengths, target, most, hopper_mla.MLA_MIN_TILES) <= slots, (lengths, rows)


def test_mla_takes_the_rows_as_columns_where_they_are_few():
    assert [hopper_mla.mla_design(rows) for rows in (1, 16, 17, 32)] == [("few", 16), ("few", 16), ("few", 32), ("few", 32)]
    assert hopper_mla.mla_design(33)[1] == hopper_mla.mla_design(512)[1] == hopper_mla.MLA_TILE


def test_mla_with_fixed_splits_merges_them_the_same_way_in_every_batch():
    for splits in (1, 3, 8, 9, 64):
        assert all(len({hopper_mla.mla_merges(kind, batch, 66, splits) for batch in (1, 16, 300)}) == 1 for kind in ("few", "many"))
        assert len({str(hopper_mla.merge_config(batch, 16, splits)) for batch in (1, 16, 300)}) == 1
    for kind in ("few", "many"):  # one sequence in 128 parts: too much for one program
        assert hopper_mla.mla_merges(kind, 64, 66, None) and not hopper_mla.mla_merges(kind, 1, 66, None)


@pytest.mark.parametrize("causal", (False, True))
def test_explain_says_what_is_launched(causal):
    p = AttentionProblem(B=1, Hq=16, Sq=16384, Sk=16384, D=192, Dv=128, causal=causal, dtype="bfloat16")
    with (
        mock.patch.object(dispatch, "machine", lambda _: HOPPER),
        mock.patch.object(explaining, "device_code", lambda *_: object()),
    ):
        text = explain(p, device="cpu")
    assert "dflash2_prefill_hopper" in text and "128 + 64 columns" in text
    assert ("8 heads side by side" in text) == causal  # without a diagonal, as many as the L2 cache holds
    assert "take turns" in text


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        (dict(), {}), (dict(D=64, Dv=64), {}), (dict(Sk=1100), {}), (dict(Sk=4224), {}), (dict(B=1, Hq=16, Sq=512, Sk=131072), {}),
        (dict(D=64, Dv=64), dict(ragged=True, return_lse=True)), (dict(B=1, Hq=8, Sq=512, Sk=65536), dict(page_size=64)),
        (dict(causal=False), dict(windows=RangeWindows.sliding(64), sinks=True)),
    ],
    ids=str,
)  # fmt: skip
def test_warmup_launches_the_variant_of_the_whole_problem(changes, options):
    """Few tokens, but the tiles, the mask and the splits that the lengths of the problem choose."""
    p = AttentionProblem(**{**dict(B=2, Hq=32, Hkv=8, Sq=4096, Sk=4096, D=128, Dv=128, causal=True, dtype="bfloat16"), **changes})
    launches = []

    def launch(q, k, v, out, lse, *, cu_seqlens_q=None, block_table=None, num_splits=None, config=None, windows=None, causal, right, **others):
        paged, ragged = block_table is not None, cu_seqlens_q is not None
        rows, keys = (q.shape[0], block_table.numel() * k.shape[1] if paged else k.shape[0]) if ragged else (q.shape[2], k.shape[2])
        config, _, splits, *_ = hopper.plan_prefill(
            1, p.Hq, p.Hq // p.Hkv, rows, keys, p.D, p.Dv, right, ragged, paged, None, 132, num_splits, windows is not None,
            None if config is None else tuple(sorted(config.items())),
        )  # fmt: skip
        launches.append((config, splits > 1, lse is not None, q.numel()))

    with (
        mock.patch.object(dispatch, "machine", lambda _: HOPPER),
        mock.patch.object(explaining, "device_code", lambda *_: object()),
        mock.patch.object(hopper, "launch_prefill", launch),
    ):
        warmup([(p, options)], device="cpu")
    page_size, ragged = options.get("page_size", 0), "ragged" in options or "page_size" in options
    rows, keys = (p.B * p.Sq, p.B * p.Sk) if ragged else (p.Sq, p.Sk)
    config, _, splits, *_ = hopper.plan_prefill(
        p.B, p.Hq, p.Hq // p.Hkv, rows, p.Sk if page_size else keys, p.D, p.Dv, 0 if p.causal else None, ragged, page_size > 0,
        p.Sq, 132, None, "windows" in options,
    )  # fmt: skip
    assert launches == [(config, splits > 1, "return_lse" in options, p.Hq * min(p.Sq, 256) * p.D)]


# On a GPU


def hopper_only():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


CASES = {
    "causal": dict(causal=True), "dense": dict(), "d64": dict(D=64, causal=True), "d64 long": dict(D=64, Sq=2500, Sk=2500, causal=True),
    "192/128": dict(D=192, Dv=128, causal=True), "d256": dict(D=256), "256/128": dict(D=256, Dv=128), "224/192": dict(D=224, Dv=192, causal=True), "d80": dict(D=80, causal=True), "fp16": dict(dtype=torch.float16),
    "more queries": dict(Sq=500, Sk=150, causal=True), "aligned": dict(Sq=700, Sk=700, causal=True),
    "aligned, more queries": dict(Sq=512, Sk=256, causal=True), "one query": dict(Sq=1, Sk=777), "split": dict(Sq=60, Sk=3000, num_splits=3, causal=True),
    "sinks": dict(sinks=True, causal=True), "sinks, split": dict(Sq=60, Sk=3000, num_splits=4, sinks=True),
    "sinks, rows without keys": dict(Sq=500, Sk=150, sinks=True, causal=True),
    "sinks, rows without keys, split": dict(Sq=500, Sk=150, num_splits=2, sinks=True, causal=True),
    "softcap": dict(softcap=15.0), "negative": dict(scale=-0.1, causal=True), "right": dict(right=37),
    "window": dict(Sq=900, Sk=900, causal=True, windows=RangeWindows.sink_window(20, 130)),
    "prefix": dict(Sq=700, Sk=900, causal=True, windows=RangeWindows.prefix_local(-100, 3, 50)),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_hopper_prefill_is_right(name):
    hopper_only()
    case = dict(dict(Sq=300, Sk=520, D=128, dtype=BF16, causal=False, scale=0.1, num_splits=1, windows=None, softcap=0.0, right=None), **CASES[name])
    dv = case.pop("Dv", case["D"])
    torch.manual_seed(0)
    shapes = (2, 4, case["Sq"], case["D"]), (2, 2, case["Sk"], case["D"]), (2, 2, case["Sk"], dv)
    q, k, v = (torch.randn(s, device="cuda", dtype=case["dtype"]) for s in shapes)
    sinks = torch.tensor([0.5, float("-inf"), -1.0, 2.0], device="cuda") if case.pop("sinks", False) else None  # one of them none
    options = {name: case[name] for name in ("causal", "scale", "windows", "softcap", "right")} | {"sinks": sinks}
    out = torch.full((2, 4, case["Sq"], dv), float("nan"), device="cuda", dtype=case["dtype"])
    lse = torch.full((2, 4, case["Sq"]), float("nan"), device="cuda")
    assert refusal(q, k, v, out) is None
    hopper.launch_prefill(q, k, v, out, lse, num_splits=case["num_splits"], **options)
    exact, exact_lse = eager.attention(q.float(), k.float(), v.float(), return_lse=True, **options)
    torch.testing.assert_close(out.float(), exact, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, exact_lse, atol=1e-3, rtol=1e-4)
    again = torch.full_like(out, float("nan"))  # many works a program, one after another
    hopper.launch_prefill(q, k, v, again, None, num_splits=case["num_splits"], config=dict(grid=3), **options)
    assert torch.equal(again, out)


@pytest.mark.gpu
def test_hopper_prefill_gives_the_same_bits_a_thousand_times():
    """Programs draw their work from a counter, in another order every time."""
    hopper_only()
    q, k, v = (torch.randn(2, h, 1500, 128, device="cuda", dtype=BF16) for h in (8, 2, 2))
    first, out = torch.empty_like(q), torch.empty_like(q)
    hopper.launch_prefill(q, k, v, first, None, causal=True, scale=0.1)
    for _ in range(1000):
        hopper.launch_prefill(q, k, v, out, None, causal=True, scale=0.1)
        assert torch.equal(out, first)


# What the compiler makes of them, on any machine


def test_hopper_kernels_compile_without_spills_in_their_loops():
    """The plain causal prefill, one of values narrower than keys, and MLA decode: tensor cores of sm_90, products under way together, nothing spilled in loops."""
    code = """
import json
from ladder.lab.compile.compiler import compile_for
from ladder.lab.compile.cases_step08_hopper import hopper_compile_cases
for name, kernel, args, kwargs in hopper_compile_cases():
    if name.startswith(("d128/128 bfloat16 causal 4096  prefill", "d256/128", "MLA 16 heads q_len 1", "MLA 128 heads")):
        c = compile_for("sm_90", kernel, *args, **kwargs)
        print(json.dumps([name, c.count("HGMMA"), c.serialized, c.hot_loop_spills, c.shared]))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(compile_matrix.ROOT), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=compile_matrix.ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 6  # prefill twice, MLA of few rows, and its merge inside or after it, MLA of many rows, and with its merge inside
    for name, products, serialized, spills, shared in rows:
        assert not serialized and spills <= 3 and shared <= 227 * 1024, name  # a word or two of MLA's
        assert products >= 60 or "merge" in name
