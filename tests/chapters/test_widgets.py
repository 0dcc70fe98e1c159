"""The explorers move when a control moves, show the numbers of the rungs themselves, and have a still picture."""

import pytest
import torch

pytest.importorskip("ipywidgets")

from ladder.chapters import plots
from ladder.chapters.ch01_05_rungs import widgets
from ladder.chapters.explorer import VIEW, PredictThenMeasure
from ladder.chapters.source import RungDiff, diff_lines, highlight, source_of, where
from ladder.lab import results
from ladder.lab.problem import MINILM, AttentionProblem, reference
from ladder.lab.trace import Traffic, watch
from ladder.rungs import RUNGS, find

PNG = b"\x89PNG\r\n\x1a\n"
TILED = ("step02_tiled", "step03_online_softmax", "step04_gqa")


def limits():
    return {"matmul_tflops": 800.0, "read_tbs": 4.0, "copy_tbs": 4.0}


def ladder_doc():
    """Results made up for these tests alone: every rung of the first five and one peer on one problem."""
    problem = AttentionProblem(Sq=4096, Sk=4096, dtype="bfloat16")
    rows = []
    for rung, ms in zip([r.name for r in RUNGS[:5]] + ["fa3"], (2.0, 8.0, 6.0, 5.0, 0.8, 0.5)):
        moved = find(rung).bytes_moved(problem) if rung.startswith("step") else problem.min_bytes
        rows.append(
            {"case": problem.case(), "impl": rung, "ms": {"median": ms, "p20": ms, "p80": ms},
             "tflops": problem.flops / ms / 1e9, "bytes_moved": moved, "peak_bytes": 1, "ok": True}
        )  # fmt: skip
    return results.document(rows, limits=limits(), command="test"), {
        k: v for k, v in problem.case().items() if k != "mode"
    }


def compile_doc():
    case = {"mode": "compile", "target": "sm_90", "D": 128, "Dv": 128, "dtype": "bfloat16"}
    rows = []
    for warps, registers, spills in ((8, 240, 0), (4, 255, 60)):
        rows.append(
            {"case": {**case, "BLOCK_M": 128, "BLOCK_N": 128, "num_warps": warps, "num_stages": 2}, "impl": "step05_fused",
             "registers": registers, "spill_stores": spills, "spill_loads": spills, "local": 0, "shared": 163840, "hgmma": 32, "hmma": 0}
        )  # fmt: skip
    return results.document(rows, limits=None, command="test")


def small(seqlen_q=20, seqlen_k=28, heads=2, kv_heads=2, dtype="float32"):
    return AttentionProblem(Hq=heads, Hkv=kv_heads, Sq=seqlen_q, Sk=seqlen_k, D=8, Dv=8, dtype=dtype).make()


# ---------------------------------------------------------------- the trace


@pytest.mark.parametrize("rung", TILED)
@pytest.mark.parametrize("causal", [False, True])
def test_watched_result_is_the_rungs_own(rung, causal):
    q, k, v = small()
    attention = find(rung).attention
    run = watch(attention, q, k, v, causal=causal, tile_q=8, tile_k=8)
    assert torch.equal(run.result, attention(q, k, v, causal=causal, tile_q=8, tile_k=8))


@pytest.mark.parametrize("rung", TILED)
def test_state_after_the_last_tile_gives_the_output(rung):
    q, k, v = small()
    run = watch(find(rung).attention, q, k, v, tile_q=8, tile_k=8)
    last = {step.q0: step for step in run.steps if step.acc is not None}
    assert sorted(last) == [0, 8, 16]
    for q0, step in last.items():
        torch.testing.assert_close(step.acc / step.row_sum[..., None], run.result[:, :, q0 : q0 + 8])


@pytest.mark.parametrize("rung", ["step03_online_softmax", "step04_gqa"])
def test_state_after_each_tile_is_attention_over_the_keys_so_far(rung):
    q, k, v = small(dtype="float32")
    attention = find(rung).attention
    run = watch(attention, q, k, v, tile_q=32, tile_k=8)
    assert [step.k0 for step in run.steps] == [0, 8, 16, 24]
    for step in run.steps:
        keys = step.k0 + 8
        out, lse = reference(q, k[:, :, :keys], v[:, :, :keys])
        torch.testing.assert_close((step.acc / step.row_sum[..., None]).double(), out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close((step.row_max + step.row_sum.log()).double(), lse, atol=1e-5, rtol=1e-5)
        scores = q @ k[:, :, :keys].transpose(-2, -1) / 8**0.5
        torch.testing.assert_close(step.row_max, scores.amax(-1))


def test_two_sweeps_of_step_02():
    q, k, v = small()
    run = watch(find("step02_tiled").attention, q, k, v, tile_q=32, tile_k=8)
    assert [step.sweep for step in run.steps] == [1] * 4 + [2] * 4
    assert all(step.acc is None and step.row_sum is None for step in run.steps[:4])
    assert all(step.acc is not None for step in run.steps[4:])


def test_watch_refuses_a_rung_without_tiles_and_restores_the_hook():
    import sys

    before = sys.gettrace()
    with pytest.raises(ValueError, match="for k0"):
        watch(find("step01_naive").attention, *small())
    watch(find("step03_online_softmax").attention, *small(), tile_q=8, tile_k=8)
    with pytest.raises(TypeError):
        watch(find("step03_online_softmax").attention, *small(), causal="yes")
    assert sys.gettrace() is before


@pytest.mark.parametrize("rung", [r.name for r in RUNGS[:4]])
@pytest.mark.parametrize("causal", [False, True])
def test_traffic_agrees_with_the_rungs_count(rung, causal):
    problem = AttentionProblem(Hq=8, Hkv=8, Sq=512, Sk=512, D=64, Dv=64, causal=causal)
    inputs = problem.make()
    with Traffic() as seen:
        find(rung).attention(*inputs, causal=causal)
    counted = find(rung).bytes_moved(problem)  # leaves out row vectors and the boolean mask, a few percent here
    assert counted <= seen.num_bytes < 1.07 * counted


def test_traffic_counts_no_views_and_bytes_grow():
    x = torch.zeros(4, 8)
    with Traffic() as seen:
        x.view(8, 4)[1:].T.unsqueeze(0).expand(3, 4, 7)
    assert seen.num_bytes == 0
    with Traffic() as seen:
        x.mul_(2)  # loads and stores
        x + 1
    assert [(loaded, stored) for _, loaded, stored in seen.operations] == [(128, 128), (128, 128)]
    run = watch(find("step03_online_softmax").attention, *small(), tile_q=8, tile_k=8)
    so_far = [step.num_bytes for step in run.steps]
    assert so_far == sorted(so_far) and so_far[0] > 0 and so_far[-1] <= run.num_bytes


# ---------------------------------------------------------------- explorers


def stepper():
    return widgets.TileStepper(find("step03_online_softmax").attention, *small(), tile_q=8, tile_k=8)


def roofline(upto=5, peers=True):
    doc, case = ladder_doc()
    return widgets.Roofline(doc, {"4k": case}, upto=upto, peers=peers)


EXPLORERS = {
    "predict": lambda: PredictThenMeasure("how many?", 12.0, "ms", low=1, high=100, because="so.", source="test"),
    "diff": lambda: RungDiff(find("step02_tiled").attention, find("step03_online_softmax").attention),
    "stepper": stepper,
    "softmax": widgets.OnlineSoftmaxExplorer,
    "tiles": widgets.TileMapExplorer,
    "cost": lambda: widgets.NaiveCostExplorer(limits()),
    "roofline": roofline,
    "model": widgets.ModelMemoryExplorer,
    "launch": lambda: widgets.LaunchExplorer(compile_doc()),
}


@pytest.mark.parametrize("name", EXPLORERS)
def test_every_explorer_has_a_still_and_a_fixed_repr(name):
    data, metadata = EXPLORERS[name]()._repr_mimebundle_()
    again, _ = EXPLORERS[name]()._repr_mimebundle_()
    assert VIEW in data
    assert data["text/plain"] == again["text/plain"] and "0x" not in data["text/plain"]
    if "image/png" in data:
        assert data["image/png"].startswith(PNG) and metadata["image/png"]["width"] <= 800
        assert data["image/png"] == again["image/png"], "the same picture every time"
    else:
        assert data["text/html"] == again["text/html"]


def moved(explorer, control, value):
    """Whether setting a control changes what is shown."""
    before = explorer.picture.value, explorer.readout.value
    control.value = value
    return (explorer.picture.value, explorer.readout.value) != before


@pytest.mark.parametrize(
    "name, control, value",
    [
        ("stepper", "step", 4), ("stepper", "row", 3), ("softmax", "seen", 1), ("tiles", "tile_k", 64),
        ("tiles", "causal", False), ("tiles", "seqlen_q", 7), ("cost", "seqlen", 1024), ("cost", "causal", True),
        ("roofline", "peers", False), ("model", "layout_", "MHA"), ("model", "requests", 200), ("launch", "num_warps", 4),
    ],
)  # fmt: skip
def test_a_control_redraws(name, control, value):
    explorer = EXPLORERS[name]()
    assert moved(explorer, getattr(explorer, control), value)


def test_prediction_stays_hidden_until_the_reader_commits():
    predict = EXPLORERS["predict"]()
    assert "12" not in predict.answer.value
    predict.prediction.value = 24.0
    assert "12" not in predict.answer.value and predict.committed is None
    predict.reveal.click()
    assert predict.committed == pytest.approx(24.0, rel=0.02)
    assert "12 ms" in predict.answer.value and "too high" in predict.answer.value and "2 x" in predict.answer.value
    predict.prediction.value = 12.5
    predict.reveal.click()
    assert "within 25 %" in predict.answer.value
    with pytest.raises(ValueError, match="measured is 500"):
        PredictThenMeasure("?", 500, "ms", low=1, high=100)


def test_stepper_shows_the_rungs_numbers():
    q, k, v = small()
    for rung in TILED:
        attention = find(rung).attention
        stepper = widgets.TileStepper(attention, q, k, v, head=1, causal=True, tile_q=8, tile_k=8)
        for number, step in enumerate(watch(attention, q, k, v, causal=True, tile_q=8, tile_k=8).steps, start=1):
            stepper.step.value = number
            row = stepper.row.value
            assert f"{float(step.row_max[0, 1, row]):.3f}" in stepper.readout.value
            assert f"{step.num_bytes:,}" in stepper.readout.value
            if step.acc is not None:
                assert f"l = {float(step.row_sum[0, 1, row]):.3f}" in stepper.readout.value
        stepper.step.value = 0
        assert "Nothing has moved" in stepper.readout.value


def test_stepper_stacks_the_heads_of_a_group():
    q, k, v = small(seqlen_q=6, seqlen_k=16, heads=4, kv_heads=2)
    stepper = widgets.TileStepper(find("step04_gqa").attention, q, k, v, head=1, tile_q=3, tile_k=8)
    assert stepper.rows == 12 and len(stepper.watched.steps) == 4
    stepper.step.value = 4
    assert "Row 6:" in stepper.readout.value  # the second tile of positions starts after 2 heads x 3 rows


def test_online_softmax_explorer_is_exact():
    explorer = widgets.OnlineSoftmaxExplorer()
    for slider, value in zip(explorer.scores, (-6.0, 6.0, 0.5, -3.0, 5.5, 6.0)):
        slider.value = value
    steps = explorer.states()
    scores = torch.tensor([s.value for s in explorer.scores])
    want = float(torch.softmax(scores, 0) @ torch.arange(1.0, 7.0))
    assert float(steps[-1].acc / steps[-1].row_sum) == pytest.approx(want, rel=1e-5)
    assert f"{want:.4f}" in explorer.readout.value
    assert [float(s.rescale) for s in steps] == pytest.approx([0.0, 1.0, 1.0])


@pytest.mark.parametrize("shape", [(96, 160, 32, 32), (160, 96, 64, 16), (1, 200, 16, 64), (77, 77, 16, 32)])
def test_tile_map_is_what_the_loop_visits(shape):
    seqlen_q, seqlen_k, tile_q, tile_k = shape
    kinds = plots.tile_kinds(*shape, causal=True)
    for (q0, k0), kind in kinds.items():
        rows, keys = range(q0, min(q0 + tile_q, seqlen_q)), range(k0, min(k0 + tile_k, seqlen_k))
        seen = [j <= i + seqlen_k - seqlen_q for i in rows for j in keys]
        assert kind == ("whole" if all(seen) else "cut" if any(seen) else "skipped")
    q, k, v = AttentionProblem(Hq=1, Hkv=1, Sq=seqlen_q, Sk=seqlen_k, D=8, Dv=8).make()
    run = watch(find("step04_gqa").attention, q, k, v, causal=True, tile_q=tile_q, tile_k=tile_k)
    assert {(s.q0, s.k0) for s in run.steps} == {tile for tile, kind in kinds.items() if kind != "skipped"}
    assert set(plots.tile_kinds(*shape, causal=False).values()) == {"whole"}


def test_model_memory_is_published_arithmetic():
    per_token = widgets.ModelMemoryExplorer.kv_bytes_per_token
    assert per_token("MHA") == 2 * 61 * 2 * 128 * 128
    assert per_token("GQA, 8 KV heads") == per_token("MHA") / 16
    assert per_token("MLA latent") == 2 * 61 * 576
    explorer = widgets.ModelMemoryExplorer()
    assert explorer.needs()["weights"] == pytest.approx(1.342e12)
    assert "1.34 TB" in explorer.readout.value


def test_naive_cost_follows_the_rung():
    explorer = widgets.NaiveCostExplorer(limits(), seqlen=1024, num_heads=8, head_dim=64)
    problem = AttentionProblem(Hq=8, Hkv=8, Sq=1024, Sk=1024, D=64, Dv=64, dtype="bfloat16")
    costs = explorer.costs()
    assert costs["moved"] == find("step01_naive").bytes_moved(problem) and costs["flops"] == problem.flops
    assert costs["memory_ms"] == pytest.approx(costs["moved"] / 4e12 * 1e3)


def test_roofline_reads_the_rows():
    explorer = roofline(upto=3)
    doc, points = explorer.doc, explorer.points()
    assert [number for *_, number in points] == [1, 2, 3]
    for (_, intensity, speed, number), row in zip(points, doc["rows"]):
        assert speed == row["tflops"]
        assert intensity == pytest.approx(AttentionProblem(Sq=4096, Sk=4096).flops / row["bytes_moved"])
    assert "memory traffic binds" in explorer.readout.value and explorer.reach() == {}
    problem = AttentionProblem(Sq=4096, Sk=4096, dtype="bfloat16")
    assert roofline(upto=5).reach() == {5: problem.flops / problem.min_bytes}
    assert "arithmetic binds, at 800" in roofline(upto=5).readout.value


def test_launch_explorer_says_what_does_not_fit():
    explorer = widgets.LaunchExplorer(compile_doc())
    assert "no spills" in explorer.readout.value and "1 program of 8 warps" in explorer.readout.value
    explorer.num_warps.value = 4
    assert "spills: 60 stores" in explorer.readout.value


# ---------------------------------------------------------------- source and diffs


def test_highlight_loses_no_character():
    import html
    import re

    for rung in RUNGS[:4]:
        code = source_of(rung.attention, docstring=True)
        plain = html.unescape(re.sub(r"<[^>]+>", "", highlight(code)))
        assert plain == code


def test_source_leaves_the_docstring_in_the_file():
    attention = find("step03_online_softmax").attention
    code = source_of(attention)
    assert "one pass over the keys" not in code and "rescale = torch.exp" in code
    compile(code, "shown", "exec")
    assert where(attention) == "ladder/step03_online_softmax/attention.py: attention"


def test_diff_has_both_sides_in_full():
    old, new = find("step02_tiled").attention, find("step03_online_softmax").attention
    lines = diff_lines(old, new)
    assert "\n".join(a for _, a, _ in lines if a is not None) == source_of(old).rstrip()
    assert "\n".join(b for _, _, b in lines if b is not None) == source_of(new).rstrip()
    diff = RungDiff(old, new)
    for style in diff.style.options:
        diff.style.value = style
        assert "rescale" in diff.body.value
    assert diff.changed == sum(sign in "+~" for sign, _, _ in lines)


def test_minilm_steps_like_the_chapter():
    q, k, v = (x[:, 5:6].float() for x in MINILM.replace(B=1, Sq=48, Sk=48).make())
    run = watch(find("step03_online_softmax").attention, q, k, v, tile_q=16, tile_k=16)
    assert len(run.steps) == 9
    assert all(bool((a.row_max <= b.row_max).all()) for a, b in zip(run.steps, run.steps[1:]) if a.q0 == b.q0)
