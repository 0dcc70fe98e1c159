"""Chapter 08: schedules against brute force, explorers that move, tables that follow their records, exercises that catch errors."""

import random

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import ladder.chapters.ch08_dflash2.exercises  # noqa: F401  registers them
from ladder.chapters import exercise as exercises
from ladder.chapters import plots, source
from ladder.chapters.ch08_dflash2 import plots as plots_dflash2
from ladder.chapters.ch08_dflash2 import simulate as schedules
from ladder.chapters.ch08_dflash2 import solutions as solutions_dflash2
from ladder.chapters.ch08_dflash2 import tables as dflash2
from ladder.chapters.ch08_dflash2.widgets import (
    OverlapExplorer,
    PrefillRoofline,
    ScheduleExplorer,
    WindowExplorer,
)
from ladder.chapters.explorer import VIEW
from ladder.lab import results
from ladder.lab.problem import AttentionProblem
from ladder.step08_dflash2 import RangeWindows

PNG = b"\x89PNG"
V1, OURS = dflash2.V1, dflash2.OURS


# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [([300], [300]), ([70, 128, 1], [200, 128, 513]), ([0, 5], [9, 0]), ([100], [40])])
def test_tiles_cover_what_is_visible(lengths, causal):
    tiles = schedules.tiles_of(*lengths, heads=2, causal=causal, block_m=32, block_n=16)
    assert len(tiles) == 2 * sum(-(-n // 32) for n in lengths[0])
    for tile in tiles:
        seqlen_q, seqlen_k = (x[tile.seq] for x in lengths)
        visible = RangeWindows([]).visible(seqlen_q, seqlen_k, causal)[tile.row * 32 : (tile.row + 1) * 32]
        assert tile.steps == -(-int(visible.any(0).sum()) // 16)


@pytest.mark.parametrize("order", schedules.ORDERS)
@pytest.mark.parametrize("assignment", schedules.ASSIGNMENTS)
def test_a_schedule_runs_every_tile_once_and_no_two_at_a_time(order, assignment):
    tiles = schedules.tiles_of([700, 90], [700, 300], heads=3, block_m=32, block_n=32)
    pieces = schedules.simulate(tiles, order, assignment, programs=7)
    assert sorted(map(repr, (p.tile for p in pieces))) == sorted(map(repr, tiles))
    for program in range(7):
        mine = sorted((p.start, p.end) for p in pieces if p.program == program)
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(mine, mine[1:]))
    assert 0 < schedules.balance(pieces, 7) <= 1
    assert schedules.makespan(pieces) >= sum(t.steps for t in tiles) / 7


def test_whoever_is_free_takes_the_next_tile():
    rng = random.Random(0)
    for _ in range(20):
        costs, programs = [rng.randint(1, 9) for _ in range(rng.randint(1, 30))], rng.randint(1, 6)
        tiles = [schedules.Tile(0, 0, i, c) for i, c in enumerate(costs)]
        assert schedules.makespan(schedules.take_next(tiles, programs, 0.0)) == solutions_dflash2.finish(costs, programs)
    pieces = schedules.fixed_stride([schedules.Tile(0, 0, i, 1) for i in range(5)], 2, 0.0)
    assert [p.program for p in pieces] == [0, 1, 0, 1, 0]
    pieces = schedules.fixed_stride([schedules.Tile(0, 0, i, 1) for i in range(5)], 2, 0.0, snake=True)
    assert [p.program for p in pieces] == [0, 1, 1, 0, 0]


def test_the_narrow_band_of_weights():
    """132 programs over heads of 128 tiles: a fixed stride loses a third, a shared counter nothing."""
    tiles = schedules.tiles_of([16384], [16384], heads=16)
    values = {way: schedules.balance(schedules.simulate(tiles, "heaviest first, head by head", way), 132) for way in schedules.ASSIGNMENTS}
    assert values["persistent, fixed stride"] < 0.7 and values["persistent, shared counter"] > 0.97
    sorted_over_heads = schedules.simulate(tiles, "heaviest first, over all heads", "persistent, fixed stride")
    assert schedules.balance(sorted_over_heads, 132) > 0.9


@pytest.mark.parametrize("kind", schedules.PIPELINES)
@pytest.mark.parametrize("head", [(64, 64), (128, 128), (192, 128)])
def test_a_pipeline_keeps_its_order_and_shares_its_units(kind, head):
    bursts = schedules.pipeline(schedules.clocks(*head), kind, steps=12)
    for unit in ("tensor", "softmax"):
        mine = sorted((b.start, b.end) for b in bursts if b.unit == unit)
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(mine, mine[1:])), "one burst at a time"
    at = {(b.group, b.what, b.step): b for b in bursts}
    groups = {b.group for b in bursts}
    assert len(at) == len(bursts) == 3 * 12 * len(groups)
    for g in groups:
        for i in range(12):
            assert at[g, "scores", i].end <= at[g, "softmax", i].start + 1e-6
            assert at[g, "softmax", i].end <= at[g, "values", i].start + 1e-6
    c = schedules.clocks(*head)
    work = sum(b.end - b.start for b in bursts if b.unit == "tensor")
    assert work == pytest.approx(12 * c.products)


def test_in_turn_is_the_sum_and_overlap_the_larger():
    c = schedules.clocks(128, 128)
    assert (c.scores, c.softmax, c.values) == (1024, 1024, 1024)
    assert schedules.overlap_prediction(128, 128, schedules.PIPELINES[0]) == pytest.approx(2 / 3)
    assert schedules.overlap_prediction(64, 64, schedules.PIPELINES[0]) == pytest.approx(1 / 2)
    for kind in schedules.PIPELINES[1:]:
        assert schedules.overlap_prediction(128, 128, kind) > 0.98
    slow = schedules.Clocks(512, 2048, 512)  # softmax twice the products: it binds, whatever the order
    assert schedules.tensor_share(schedules.pipeline(slow, schedules.PIPELINES[2], 256)) == pytest.approx(0.5, abs=0.01)


def test_splits_hold_every_key_tile_once():
    lengths, splits = [1000, 1, 64, 65], [7, 3, 1, 2]
    tasks = schedules.split_tiles(lengths, 2, splits)
    for seq, length in enumerate(lengths):
        mine = [t for t in tasks if t.seq == seq]
        assert sum(t.steps for t in mine) == 2 * -(-length // 64)
        assert len(mine) <= 2 * splits[seq] and all(t.steps > 0 for t in mine)


def test_the_rungs_own_schedule_gives_the_longest_most_parts():
    splits = dflash2.decode_splits((4096, 256, 256), num_heads=8, num_kv_heads=2, head_dim=64)
    assert splits[0] > max(splits[1:]) >= 1
    lengths = (4096, 256, 256)
    ours = schedules.take_next(schedules.split_tiles(lengths, 2, splits), schedules.PROCESSORS, 1.0)
    assert schedules.makespan(ours) < schedules.makespan(
        schedules.take_next(schedules.split_tiles(lengths, 2, 1), schedules.PROCESSORS, 1.0)
    )


# ---------------------------------------------------------------- explorers


def schedule_explorer(**options):
    return ScheduleExplorer("1 prompt of 4k, 16 heads", **options)


def roofline():
    return PrefillRoofline(results.load(V1), upto=8)


EXPLORERS = {"schedule": schedule_explorer, "overlap": OverlapExplorer, "window": lambda: WindowExplorer(length=8192), "roofline": roofline}


@pytest.mark.parametrize("name", EXPLORERS)
def test_every_explorer_has_a_still_and_a_fixed_repr(name):
    explorer = EXPLORERS[name]()
    data, metadata = explorer._repr_mimebundle_()
    again, _ = EXPLORERS[name]()._repr_mimebundle_()
    assert VIEW in data and data["image/png"].startswith(PNG)
    assert data["image/png"] == again["image/png"] and data["text/plain"] == again["text/plain"]
    assert "0x" not in data["text/plain"] and metadata["image/png"]["width"] <= 800


@pytest.mark.parametrize(
    "name, control, value",
    [
        ("schedule", "order", "first rows first"), ("schedule", "assignment", "persistent, snake"), ("schedule", "causal", False),
        ("schedule", "overhead", 4.0), ("schedule", "batch", "16 prompts of 1k, 16 heads"), ("overlap", "head", (64, 64)), ("overlap", "softmax", 2.0),
        ("overlap", "steps", 3), ("window", "kind", "local prefix, full tail"), ("window", "sink", 0), ("window", "window", 256),
        ("window", "length", 16384), ("window", "source", "noise"), ("roofline", "peers", False),
    ],
)  # fmt: skip
def test_a_control_redraws(name, control, value):
    explorer = EXPLORERS[name]()
    before = explorer.picture.value, explorer.readout.value
    getattr(explorer, control).value = value
    assert (explorer.picture.value, explorer.readout.value) != before


def test_schedule_explorer_says_what_the_simulation_says():
    explorer = schedule_explorer()
    end = schedules.makespan(explorer.pieces())
    assert f"{end:,.0f}" in explorer.readout.value
    assert f"{100 * explorer.balances()[explorer.assignment.value]:.0f} %" in explorer.readout.value
    explorer.causal.value = False
    tiles = explorer.tiles()
    assert {t.steps for t in tiles} == {32} and len(tiles) == 32 * 16


def test_schedule_image_is_the_pieces():
    pieces = [
        schedules.Piece(0, 0.0, 4.0, schedules.Tile(0, 0, 0, 4)), schedules.Piece(1, 0.0, 2.0, schedules.Tile(0, 0, 1, 2)),
        schedules.Piece(1, 3.0, 4.0, schedules.Tile(0, 0, 2, 1)),
    ]  # fmt: skip
    image = plots_dflash2.schedule_image(pieces, 2, columns=4)
    assert image[0].tolist() == [4, 4, 4, 4]
    assert image[1, :2].tolist() == [2, 2] and np.isnan(image[1, 2]) and image[1, 3] == 1


def test_window_explorer_measures_what_is_hidden():
    explorer = WindowExplorer(window=512, sink=0, length=8192)
    assert explorer.dropped().max() < 1e-6, "a window of everything hides nothing"
    explorer.window.value = 64
    q, k = explorer.inputs()
    full = torch.softmax((q @ k.transpose(-2, -1) * 32**-0.5).masked_fill(~RangeWindows([]).visible(512, 512, True), -torch.inf), -1)
    exact = full.masked_fill(explorer.windows().visible(512, 512, True), 0.0).sum(-1).mean(-1)
    assert np.abs(explorer.dropped() - exact.numpy()).max() < 0.12  # 64 sampled rows of 512
    visited, of = explorer.tiles()
    assert of == 64 * 65 // 2 and visited == 63 * 2 + 1
    before = explorer.dropped().mean()
    explorer.kind.value, explorer.tail.value = "local prefix, full tail", 256
    assert explorer.dropped().mean() < before


def test_tiles_saved_is_a_count():
    assert dflash2.tiles_saved(512, 64, 64, 64) == pytest.approx(
        36 / len(RangeWindows.sink_window(64, 64).visited_tiles(512, 512, True, 64, 64).tiles)
    )


# ---------------------------------------------------------------- records


def timed(case, impl, ms, **extra):
    tflops = case.flops / ms / 1e9 if isinstance(case, AttentionProblem) else None
    case = case.case() if isinstance(case, AttentionProblem) else case
    return {"case": case, "impl": impl, "ms": {"median": ms, "p20": ms, "p80": ms}, **({"tflops": tflops} if tflops else {}), **extra}


def document(rows, **extra):
    limits = {"matmul_tflops": 800.0, "read_tbs": 4.0, "copy_tbs": 4.0}
    return {**results.document(rows, command="a test", limits=limits), "recorded": "2026-01-02T00:00:00+00:00", **extra}


def test_missing_records_are_said_in_words(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert dflash2.numbers() is None
    for show in (dflash2.variants, dflash2.variants_picture, dflash2.fusion):
        assert "Not recorded yet" in show().data
    for show in (dflash2.grid, dflash2.speed, dflash2.windows, dflash2.memory_and_start, dflash2.verdicts):
        assert "ladder.bench step08" in show(None).data


def test_variants_are_compared_with_what_they_build_on():
    p = AttentionProblem(Sq=4096, Sk=4096, causal=True, dtype="bfloat16")
    doc = document([
        timed(p, V1, 3.0), timed(p, "hopper_base", 2.5), timed(p, "+overlap", 2.0), timed(p, "+pingpong", 2.2, kept=False, why="barriers cost more"),
        timed(p, "+persistent", 1.9), timed(p, "+other", 1.0, over="hopper_base", predicted=2.0), timed(p, "fa3", 1.8),
    ])  # fmt: skip
    [(_, chain, peers)] = dflash2.variant_chains(doc)
    builds_on = {entry["impl"]: before["impl"] for entry, before, _ in chain}
    assert builds_on == {
        "hopper_base": V1,
        "+overlap": "hopper_base",
        "+pingpong": "+overlap",
        "+persistent": "+overlap",
        "+other": "hopper_base",
    }
    text = dflash2.variants(doc).data
    assert "| `+overlap` |" in text and "1.25 x" in text and "not kept: barriers cost more" in text and "2.50 x" in text
    assert dict((e["impl"], p) for e, _, p in chain)["+pingpong"] == 1.0 and set(peers) == {"fa3"}
    assert isinstance(dflash2.variants_picture(doc).figure, Figure) and "5 variants" in repr(dflash2.variants_picture(doc))
    wrong = document([timed(p, V1, 3.0), timed(p, "hopper_base", 2.5, ok=False)])
    assert "wrong answer" in dflash2.variants(wrong).data


def test_persistence_is_predicted_by_the_simulation():
    case = AttentionProblem(B=16, Hq=16, Hkv=16, Sq=1024, Sk=1024, causal=True).case()
    assert 1.05 < dflash2.predicted_gain("+persistent", case) < 1.5  # short prompts: what surrounds a tile counts
    assert dflash2.predicted_gain("+named_barriers", case) is None


def test_fusion_table_follows_its_rows():
    case = {"mode": "fusion", "op": "qkv", "model": "a model", "T": 64, "hidden": 4096}
    row = dict(launches=1, bytes=5e9)
    doc = document([
        timed(case, "torch", 2.0, launches=9, bytes=8e9), timed(case, OURS, 1.0, **row), timed(case, "one_launch", 0.75, **row), timed(case, "two_launches", 1.0, **row),
        timed({**case, "T": 8}, "torch", 2.0, **row), timed({**case, "T": 8}, OURS, 0.1, ok=False, **row),
    ])  # fmt: skip
    text = dflash2.fusion(doc).data
    assert "| qkv | a model | 64 | 9 to 1 | 8 GB to 5 GB | 1.60 x | **2.00 x** | 750 | 1e+03 |" in text
    assert "| 8 |" not in text, "a wrong answer has no speed"


def test_tables_of_a_recorded_run():
    p = AttentionProblem(Sq=4096, Sk=4096, causal=True, dtype="bfloat16")
    cell = dict(cell="prefill d128 causal 4k MHA")
    w = {**p.case(), "mode": "window"}
    rows = [
        timed(p, OURS, 2.0, **cell), timed(p, V1, 3.0, **cell), timed(p, "fa3", 1.9, **cell),
        timed({**w, "windows": [[0, None, 128, 4096]]}, OURS, 1.0, cell="windows 4k", visible_share=0.1), timed({**w, "windows": None}, OURS, 8.0, cell="windows 4k, causal"),
        {"case": {**p.case(), "mode": "memory"}, "impl": OURS, "peak_bytes": 5e8}, {"case": {**p.case(), "mode": "memory"}, "impl": V1, "peak_bytes": 6e8},
    ]  # fmt: skip
    reached = [{"what": "a", "value": 1.0, "want": 1.0, "ok": True}, {"what": "b is late", "value": 0.5, "want": 1.0, "ok": False}]
    doc = document(rows, must_reach=reached, complete=False, stopped="out of time")
    assert "1.50 x" in dflash2.speed(doc).data and "d128 causal 4k MHA" in dflash2.speed(doc).data
    assert "8.0 x" in dflash2.windows(doc).data and "10.0 x" in dflash2.windows(doc).data
    assert "600 MB" in dflash2.memory_and_start(doc).data
    said = dflash2.verdicts(doc).data
    assert "1 of 2 targets" in said and "b is late" in said and "out of time" in said
    assert "1 prefill cells" in repr(dflash2.grid(doc)) and "no cell" in dflash2.grid(doc, "flex").data
    assert dflash2.ratio(doc, "prefill", "fa3", cell["cell"]) == pytest.approx(0.95) and dflash2.ratio(doc, "prefill", "fa3", "x") is None


def test_step_07_is_read_from_its_record():
    v1 = results.load(V1)
    text = dflash2.in_turn(v1).data
    for problem, ours, _, _ in dflash2.step_07_rows(v1):
        assert f"**{ours['tflops']:.0f}**" in text and problem.causal
    assert results.caption(v1) in text


def test_projection_bytes_are_counted():
    product, one_pass, apart = dflash2.projection_bytes(2, num_heads=4, num_kv_heads=1, head_dim=8, hidden=16)
    assert product == 2 * (2 * 16 + 16 * 48 + 2 * 48)
    assert one_pass == 2 * 2 * 2 * 48 and apart == 2 * (2 * 2 * 40 + 2 * 2 * 16)
    assert "memory" in dflash2.projection_table().data and "arithmetic" in dflash2.projection_table().data


def test_the_hopper_kernel_is_read_not_imported():
    names = list(source._hopper_functions())
    assert "dflash2_fold" in names
    assert all(name in source.hopper_code(*names[:3]).data for name in names[:3])
    shown = source.HopperSource("dflash2_fold")
    assert "warpgroup_mma" in shown._repr_html_() and repr(shown).endswith("dflash2_fold") and '"""' not in shown._repr_html_()
    with pytest.raises(KeyError):
        source.HopperSource("no_such_function")


def test_small_figures_are_drawn():
    grid = plots_dflash2.ratio_grid({("a", "1k"): 1.2, ("b", "4k"): 0.8}, ["a", "b"], ["1k", "4k"], title="t", note="n")
    pairs = plots_dflash2.predicted_and_measured([("x", 1.1, 1.0), ("y", None, 0.9)], unit="x")
    for figure in (grid, pairs):
        assert plots.png(figure).startswith(PNG)
    shown = [text.get_text() for text in grid.axes[0].texts]
    assert sorted(shown) == ["0.80", "1.20"]


# ---------------------------------------------------------------- exercises


def in_turn(costs, programs):
    clocks = [0] * programs
    for i, cost in enumerate(costs):
        clocks[i % programs] += cost
    return max(clocks)


def sorted_first(costs, programs):
    return solutions_dflash2.finish(sorted(costs, reverse=True), programs)


def nothing_between(first, last, sink, window, block_n):
    """Every tile from 0: masks the hole instead of skipping it."""
    seen = dict(solutions_dflash2.visited(first, last, sink, window, block_n))
    return [(tile, seen.get(tile, True)) for tile in range(last // block_n + 1)]


def window_off_by_one(first, last, sink, window, block_n):
    return solutions_dflash2.visited(first, last, sink, window + 1, block_n)


def all_masked(first, last, sink, window, block_n):
    return [(tile, True) for tile, _ in solutions_dflash2.visited(first, last, sink, window, block_n)]


def holes_forgotten(first, last, sink, window, block_n):
    """Whole wherever both ends of the tile are seen: forgets that the middle may not be."""
    return [
        (t, m and not (t * block_n < sink and (t + 1) * block_n - 1 > last - window and (t + 1) * block_n - 1 <= first))
        for t, m in solutions_dflash2.visited(first, last, sink, window, block_n)
    ]  # fmt: skip


def sink_in_every_split(outs, lses, sink):
    with_sink = torch.logaddexp(lses, sink.expand_as(lses))
    out = outs * torch.exp(lses - with_sink)[..., None]
    return solutions_dflash2.merge_with_sink(out, with_sink, torch.full_like(sink, -torch.inf))


def no_maximum(outs, lses, sink):
    shares = torch.exp(lses)
    total = shares.sum(0) + torch.exp(sink)
    return (shares[..., None] * outs).sum(0) / total[:, None], torch.log(total)


def sink_left_out_of_lse(outs, lses, sink):
    out, _ = solutions_dflash2.merge_with_sink(outs, lses, sink)
    return out, torch.logsumexp(lses, 0)


@pytest.mark.parametrize(
    "name, answer",
    [
        ("08a", in_turn), ("08a", sorted_first), ("08b", nothing_between), ("08b", window_off_by_one), ("08b", all_masked), ("08b", holes_forgotten),
        ("08c", sink_in_every_split), ("08c", no_maximum), ("08c", sink_left_out_of_lse),
    ],
)  # fmt: skip
def test_plausible_wrong_answers_are_caught(name, answer):
    exercise = exercises.find(name)
    verdicts = [exercises.run(exercise, level, answer) for level in ("visible", "strict")]
    assert any(verdicts), f"{answer.__name__} passes both tests"


@pytest.mark.parametrize("name", ["08a", "08b", "08c"])
def test_solutions_pass(name):
    exercise = exercises.find(name)
    assert [exercises.run(exercise, level, exercise.solve()) for level in ("visible", "strict")] == [None, None]


def test_the_visited_tiles_of_an_exercise_are_the_rungs():
    rng = random.Random(1)
    for _ in range(40):
        block, tile = rng.choice((4, 8, 16)), rng.randint(0, 5)
        sink, window = rng.randint(0, 40), rng.randint(1, 60)
        seqlen = (tile + 1) * block
        mine = solutions_dflash2.visited(tile * block, seqlen - 1, sink, window, block)
        theirs = RangeWindows.sink_window(sink, window).visited_tiles(seqlen, seqlen, True, block, block).tiles
        rungs = sorted((n, masked) for row, n, masked in theirs if row == tile)
        assert [t for t, _ in mine] == [n for n, _ in rungs]
        assert all(masked or not needs for (_, needs), (_, masked) in zip(mine, rungs)), "the rung never leaves out a mask that is needed"
