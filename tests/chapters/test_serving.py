"""Chapters 06 and 07: their explorers move and agree with the rungs, their tables are made from calls and records."""

import re

import pytest
import torch
from support import ROOT

pytest.importorskip("ipywidgets")

from ladder.chapters import plots
from ladder.chapters.ch06_07_serving import tables as serving
from ladder.chapters.ch06_07_serving import widgets as widgets_serving
from ladder.chapters.explorer import VIEW
from ladder.lab import interpret, results
from ladder.lab.decode_problem import DecodeProblem
from ladder.rungs import RUNGS
from ladder.step06_paged import choose_num_splits

PNG = b"\x89PNG\r\n\x1a\n"
needs_triton = pytest.mark.skipif(not interpret.has_triton(), reason="Triton is not installed")


def decode_doc():
    """Results made up for these tests alone: both rungs and two peers on two decode problems."""
    rows = []
    for problem in list(serving.decode_problems().values())[:2]:
        for impl, ms in (("step06_paged", 0.4), ("step07_dflash1", 0.1), ("sdpa_cudnn", 0.2), ("sdpa_flash", 0.3), ("sweep", 0.01)):
            rows.append(
                {"case": problem.case(), "impl": impl, "ms": {"median": ms, "p20": ms, "p80": ms}, "tbs": problem.kv_bytes / ms / 1e9}
            )
    return results.document(rows, limits={"matmul_tflops": 800.0, "read_tbs": 4.0, "copy_tbs": 4.0}, command="test")


def roofline():
    problems = dict(list(serving.decode_problems().items())[:2])
    return widgets_serving.DecodeRoofline(decode_doc(), problems, upto=7)


EXPLORERS = {
    "fit": widgets_serving.CacheFitExplorer,
    "pages": widgets_serving.PageExplorer,
    "splits": widgets_serving.SplitExplorer,
    "groups": widgets_serving.GroupedTileExplorer,
    "roofline": roofline,
}
MOVES = [
    ("fit", "page_size", 4096), ("fit", "longest", 8192), ("fit", "typical", 256), ("pages", "event", 8), ("pages", "page_size", 2),
    ("splits", "splits", 3), ("splits", "packed", True), ("splits", "batch", 64), ("splits", "context", 1024), ("groups", "skew", 0.0),
    ("groups", "block_rows", 16), ("groups", "tokens", 64), ("groups", "experts", 8), ("groups", "top_k", 1), ("roofline", "peers", True),
]  # fmt: skip


@pytest.mark.parametrize("name", EXPLORERS)
def test_every_explorer_has_a_still_and_a_fixed_repr(name):
    data, metadata = EXPLORERS[name]()._repr_mimebundle_()
    again, _ = EXPLORERS[name]()._repr_mimebundle_()
    assert VIEW in data and data["image/png"].startswith(PNG) and metadata["image/png"]["width"] <= 800
    assert data["image/png"] == again["image/png"] and data["text/plain"] == again["text/plain"]


@pytest.mark.parametrize("name, control, value", MOVES)
def test_a_control_redraws(name, control, value):
    explorer = EXPLORERS[name]()
    before = explorer.picture.value, explorer.readout.value
    getattr(explorer, control).value = value
    assert (explorer.picture.value, explorer.readout.value) != before


def test_page_explorer_shows_a_real_cache():
    explorer = widgets_serving.PageExplorer(page_size=4)
    for event in range(len(explorer.EVENTS)):
        explorer.event.value = event
        cache, problem = explorer.cache()
        assert problem is None
        for seq, length in enumerate(cache.seq_lens.tolist()):
            for position in range(length):
                page = int(cache.block_table[seq, position // 4])
                owner = 2 if seq == 3 else seq  # D reads C's keys
                assert cache.k_pages[page, position % 4, 0, 0] == 100 * owner + position
    assert cache.block_table[3, :2].tolist() == cache.block_table[2, :2].tolist() and int(cache.seq_lens[3]) == 8


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_page_explorer_says_when_the_pool_is_full(size):
    explorer = widgets_serving.PageExplorer(page_size=size)
    for event in range(len(explorer.EVENTS)):
        explorer.event.value = event
        _, problem = explorer.cache()
        assert problem is None or "pages" in explorer.readout.value


def test_cache_fit_is_arithmetic():
    explorer = widgets_serving.CacheFitExplorer(page_size=1)
    fits, lengths = explorer.fits(), explorer.lengths()
    slots = int(explorer.pool // fits["token"])
    assert fits["token"] == 2 * 2 * 8 * 128 * 32
    assert fits["reserved"] == slots // explorer.longest.value
    assert lengths[: fits["paged"]].sum() <= slots < lengths[: fits["paged"] + 1].sum()
    assert fits["live_paged"] == 1.0, "pages of one token waste nothing"
    explorer.page_size.value = 4096
    coarse = explorer.fits()
    assert coarse["paged"] < fits["paged"] and coarse["live_paged"] < 0.9


def test_cache_table_is_published_arithmetic():
    table = serving.cache_table(context=131072, memory=100e9).data
    assert "16,384 B | 524 kB | 68.7 GB | 1.5 |" in table  # 2 * 2 * 32 * 128, x 32 layers, x 131,072 tokens
    assert "| 1,152 B | 70.3 kB |" in table  # 2 * 576, x 61 layers


def test_split_explorer_is_the_rungs_heuristic():
    explorer = widgets_serving.SplitExplorer(batch=1, context=32768, num_heads=32)
    assert explorer.chosen() == choose_num_splits(32, 32768, 64, 132)
    assert explorer.filled(explorer.chosen()) >= 0.85 > explorer.filled(explorer.chosen() - 1)
    explorer.splits.value = 1
    assert "32 programs without splits" in explorer.readout.value and "= 32, in 1 wave" in explorer.readout.value
    explorer.packed.value = True
    assert explorer.tasks() == 8 and explorer.filled(explorer.chosen()) >= 0.95


def test_split_explorer_agrees_with_step_07():
    """What a packed call would launch, read off the bytes that its partial results take."""
    from ladder.step07_dflash1 import decode_bytes_moved

    for problem in serving.decode_problems().values():
        explorer = widgets_serving.SplitExplorer(batch=problem.B, context=problem.context, packed=True)
        splits, rows = explorer.chosen(), problem.B * problem.Hq
        partial = 8 * rows * splits * (problem.Dv + 1) if splits > 1 else 0
        assert decode_bytes_moved(problem) == problem.kv_bytes + 2 * rows * (splits * problem.D + problem.Dv) + partial


@needs_triton
@pytest.mark.parametrize("skew, tokens, experts, block_rows", [(0.0, 64, 8, 16), (0.6, 256, 16, 32), (1.5, 256, 8, 64)])
def test_grouped_tile_explorer_is_the_rungs_tile_map(skew, tokens, experts, block_rows):
    run_interpreted(
        f"""
        import torch
        from ladder.chapters.ch06_07_serving.widgets import GroupedTileExplorer
        from ladder.step07_dflash1 import capacity_offsets, tile_map
        e = GroupedTileExplorer({tokens}, {experts}, 2, {skew}, {block_rows})
        counts = torch.tensor(e.loads())
        assert counts.sum() == {tokens} * 2 == e.rows()["real"]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        tiles = tile_map(offsets, {block_rows}, int(counts.sum()))
        assert int((tiles[:, 0] >= 0).sum()) == e.rows()["tiles"]
        padded = tile_map(capacity_offsets({experts}, int(counts.max())), {block_rows}, {experts} * int(counts.max()))
        assert int((padded[:, 0] >= 0).sum()) * {block_rows} == e.rows()["padded"]
        """
    )


def run_interpreted(code):
    """Run code in a process of its own with Triton's interpreter on: this one may have imported Triton without."""
    import os
    import subprocess
    import sys
    import textwrap

    root = str(ROOT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    code = "from ladder.lab import interpret; interpret.enable()\n" + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_triton
def test_compatibility_table_is_what_the_calls_do():
    text = run_interpreted("from ladder.chapters.ch06_07_serving import tables as serving; print(serving.accepts().data)")
    assert "WRONG" not in text and "wrong answer" not in text
    rows = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in text.splitlines() if line.startswith("|")}
    assert len(rows) == len(serving.HEADS) + 2
    assert rows["G = 1"][:9] == ["yes"] * 9
    for group in ("G = 2", "G = 3", "G = 7", "G = 16"):
        assert rows[group][:9] == ["**a**"] * 3 + ["yes"] * 6
    assert "yes" not in rows["6 heads on 4"] and rows["576 / 512: MLA decode"][9] == "yes"
    assert rows["head 320"][3] == "yes" and rows["head 320"][4:9] == ["**d**"] * 5
    assert re.search(r"\*\*a\*\* `NotImplementedError: grouped heads \(4 query heads on 2 KV heads\)", text)


def test_a_wrong_answer_is_no_yes():
    def wrong(q, k, v):
        return torch.zeros_like(q)

    def raising(q, k, v):
        raise ValueError("step09_future: q is too new")

    assert serving.try_heads(RUNGS[3].attention, 4, 2, 16, 16) is None
    assert serving.try_heads(wrong, 4, 2, 16, 16) == "a wrong answer"
    assert serving.try_heads(raising, 4, 2, 16, 16) == "ValueError: step09_future: q is too new"


@needs_triton
def test_parity_table_finds_a_wrong_merge():
    run_interpreted(
        """
        from ladder.chapters.ch06_07_serving import tables as serving
        import ladder.step06_paged as rung
        assert "FAILS" not in serving.parity(6).data
        right = rung.paged_decode
        def wrong(*args, **options):
            out, lse = right(*args, **options)
            return out * 1.05, lse
        rung.paged_decode = wrong
        assert serving.parity(6).data.count("FAILS") >= 6
        """
    )


def test_speed_table_reads_the_rows_and_no_sweep():
    doc = decode_doc()
    problems = dict(list(serving.decode_problems().items())[:2])
    table = serving.speed(doc, 7, problems).data
    first = next(iter(problems.values()))
    rate = first.kv_bytes / 0.1 / 1e9
    assert f"| 400 | {rate / 4:.2f} | {100 * rate / 16:.0f} % | 100 | {rate:.2f} | {100 * rate / 4:.0f} % | cuDNN | 200 |" in table
    assert "07" not in serving.speed(doc, 6, problems).data.split("\n")[0]


def test_decode_roofline_counts_keys_once():
    explorer = roofline()
    problem = next(iter(serving.decode_problems().values()))
    points = explorer.points()
    assert [number for *_, number in points] == [6, 7]
    for (_, intensity, speed, _), ms in zip(points, (0.4, 0.1)):
        assert intensity == pytest.approx(problem.flops / problem.min_bytes) and 3.9 < intensity < 4
        assert speed == pytest.approx(problem.flops / ms / 1e9)
    assert "memory traffic binds" in explorer.readout.value


def test_absorbed_mla_of_128_heads_is_bound_by_arithmetic():
    """The claim of chapter 07, from shapes alone."""
    problem = DecodeProblem(B=1, Hq=128, Hkv=1, context=4096, D=576, Dv=512, latent=True, scale=192**-0.5)
    assert problem.flops / problem.kv_bytes > 200


def test_microseconds_read_well():
    assert [serving.us({"ms": {"median": m}}) for m in (0.0159, 0.0855, 0.596, 2.12)] == ["15.9", "85.5", "596", "2,120"]


def test_packed_rows_draws_every_head():
    figure = serving.packed_rows(4)
    texts = [t.get_text() for axes in figure.axes for t in axes.texts]
    assert texts == [f"head {h}" for h in range(4)] * 2 and plots.png(figure).startswith(PNG)
