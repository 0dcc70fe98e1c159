"""Chapters 09 and 11: arithmetic against the engine, explorers that move, tables that follow their records, exercises that catch errors."""

import json
import math
import random

import pytest
import torch

import ladder.chapters.ch11_end_to_end.exercises  # noqa: F401  registers them
from ladder.chapters import article, plots
from ladder.chapters import exercise as exercises
from ladder.chapters.ch09_profiling import counters
from ladder.chapters.ch09_profiling import tables as profiling
from ladder.chapters.ch11_end_to_end import solutions as solutions_engine
from ladder.chapters.ch11_end_to_end import tables as end_to_end
from ladder.chapters.ch11_end_to_end.widgets import (
    AmdahlExplorer,
    DecisionExplorer,
    PoolExplorer,
    ShareExplorer,
    TimelineExplorer,
)
from ladder.engine.engine import Engine
from ladder.engine.kv_pool import PagePool
from ladder.engine.models import find, tiny_moe
from ladder.engine.models.tiny_moe import TinyMoEConfig
from ladder.engine.sampling import SamplingParams
from ladder.engine.scheduler import Request, Scheduler
from ladder.lab import results
from ladder.profile.measure import _union

PNG = b"\x89PNG"
V1, OURS = end_to_end.V1, end_to_end.OURS


# ---------------------------------------------------------------- Amdahl and the decision


def test_amdahl():
    assert profiling.end_to_end(0.3, 2) == pytest.approx(1 / 0.85)
    assert profiling.end_to_end(0, 5) == 1 and profiling.end_to_end(1, math.inf) == math.inf and profiling.end_to_end(0.5, 0.5) < 1
    for share, gain in ((0.2, 3.0), (0.7, 1.3), (0.9, math.inf)):
        assert profiling.share_of(profiling.end_to_end(share, gain), gain) == pytest.approx(share)
    for wrong in ((1.1, 2), (-0.1, 2), (0.5, 0)):
        with pytest.raises(ValueError, match="want"):
            profiling.end_to_end(*wrong)


def test_a_forecast_follows_the_record():
    def row(impl, ms):
        case = dict(B=1, Sq=16384, Sk=16384, Hq=16, Hkv=16, D=128, Dv=128, causal=True, dtype="bfloat16")
        from ladder.lab.problem import AttentionProblem

        return {"case": AttentionProblem(**case).case(), "impl": impl, "ms": {"median": ms, "p20": ms, "p80": ms}}

    doc = document([row(V1, 3.0), row(OURS, 1.5)])
    assert profiling.kernel_gain(doc) == pytest.approx(2.0) and profiling.kernel_gain(doc, 131072) is None
    text = profiling.forecast(doc).data
    assert "| 16k tokens | **2.00 x** | 1.05 x | 1.18 x | 1.33 x | 1.54 x |" in text and "128k" not in text


@pytest.mark.parametrize(
    "changes, name, said",
    [
        ({}, "kernel", "All three"), ({"share": 30}, "scheduling", "threshold is 30%"), ({"busy": 50}, "scheduling", "no kernel running 50%"),
        ({"target_ms": 60}, "scheduling", "not what a batch waits for"), ({"context": 8192}, "wait", "can wait"), ({"context": 16384}, "kernel", "All three"),
    ],
)  # fmt: skip
def test_the_decision_answers_its_sliders(changes, name, said):
    explorer = DecisionExplorer()
    before = explorer.readout.value
    for control, value in changes.items():
        getattr(explorer, control).value = value
    assert explorer.answer().name == name and said in explorer.readout.value
    assert not changes or explorer.readout.value != before


def test_the_decision_on_a_dense_model_and_with_too_much_communication():
    explorer = DecisionExplorer(share=80, communication=50)
    found = explorer.found()
    assert found.attention_share + found.communication_share == 1.0
    explorer.experts.value = False
    assert explorer.answer().name == "dense" and "One GPU" in explorer.readout.value
    explorer.gpus.value = 8
    assert "One GPU" not in explorer.readout.value
    explorer.experts.value = None
    assert explorer.answer().name == "unknown"
    explorer.busy.value = 0
    assert explorer.end_to_end(2.0) == 1.0, "what no kernel fills is not shortened"
    assert explorer.still().startswith(PNG)


def test_amdahl_explorer():
    explorer = AmdahlExplorer(share=50, gain=2.0)
    assert explorer.value() == pytest.approx(4 / 3) and "1.33 x" in explorer.readout.value and "33 %" in explorer.readout.value
    explorer.gain.value = 0.5
    assert explorer.value() < 1 and "0.67 x" in explorer.readout.value


# ---------------------------------------------------------------- profiling


def test_the_kernels_a_rung_launches():
    found = profiling.launched()
    assert found[5] == ["fused_attention_forward"] and set(found) == {5, 6, 7, 8}
    assert {"dflash2_prefill", "dflash2_prefill_hopper", "dflash2_decode", "dflash2_schedule", "dflash2_norm_router"} <= set(found[8])
    assert not {"dflash2_chunk", "dflash2_find", "dflash2_fold", "dflash2_consume"} & set(found[8]), "device functions are no kernels"
    assert all(name.startswith(f"dflash{n - 6}_") for n in (7, 8) for name in found[n])
    lines = profiling.names_table().data.splitlines()
    assert lines[2].endswith("| 0 of 1 |") and lines[-1].endswith(f"| {len(found[8])} of {len(found[8])} |")


def test_counters_are_shown_and_missing_ones_are_said(monkeypatch, tmp_path):
    for kind, rungs in (("prefill", ("05 Fused", "07 DFlash v1", "08 DFlash v2")), ("decode", ("06 Paged", "07 DFlash v1", "08 DFlash v2"))):
        text = counters.table(kind).data
        assert all(f"| {rung} | " in text for rung in rungs) and "recorded on NVIDIA H200" in text
    assert "dflash2_decode_hopper: 2 launches" in counters.described() and "did not run" not in counters.described()
    assert "the number of cycles falls by" in counters.cycles_and_clock().data
    assert plots.png(counters.picture().figure).startswith(PNG)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    for shown in (counters.table("decode").data, counters.cycles_and_clock().data, counters.described()):
        assert "ot recorded yet" in shown and "ladder.bench ncu" in shown


@pytest.mark.slow
@pytest.mark.skipif(not tiny_moe.WEIGHTS.is_file(), reason="tiny-moe is not trained yet")
def test_profiles_of_tiny_moe():
    layers = TinyMoEConfig().num_layers
    found, rest = profiling.report()["measured"], profiling.measured()
    assert rest["calls"]["aten::scaled_dot_product_attention"] == 3 * layers
    assert found["attention_share"] > 0 and found["context"] == profiling.TOKENS and found["moe"]
    assert "flash" in next(iter(found["attention_names"])) and not found["dflash_names"]
    assert rest["eager"]["attention_share"] == 0 < rest["eager_named"]["attention_share"]
    assert "aten::bmm" in rest["eager_named"]["attention_names"] and "3 batches" in repr(profiling.shares_picture())


def test_memory_held():
    naive, online = profiling.held((256, 512)).values()
    assert naive[1] / naive[0] > 3.5 and online[1] / online[0] < 2.6
    assert plots.png(profiling.memory_over_time(256).figure).startswith(PNG)


# ---------------------------------------------------------------- the scheduler's timeline


def test_the_timeline_is_what_the_engine_does():
    """Steps, preemptions and token times of ``serve`` are those of an engine with a model on the same pool."""
    config = TinyMoEConfig(num_layers=1, width=32, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=2, top_k=1, expert_width=16, shared_width=16, context=256)
    from ladder.engine.models import Spec

    work = [(0, 40, 30), (0, 24, 36), (0, 60, 24), (0, 16, 36)]
    options = dict(chunk_tokens=64, decode_every=4)
    engine = Engine(Spec("tiny-moe", config), "sdpa", device="cpu", kv_tokens=14 * 16, page_size=16, max_seqs=64, max_len=128, **options)
    for _, prompt, answer in work:
        engine.submit([1] * prompt, SamplingParams(max_tokens=answer))
    steps, used = [], []
    while engine.busy:
        came = {e.request for e in engine.step()}
        steps.append(came)
    run = end_to_end.serve(work, pages=14, **options)
    assert run.preemptions == engine.scheduler.preemptions > 0
    assert len(run.used) == len(steps) == sum(engine.steps.values()) and max(run.used) == engine.pool.most_used
    for step, came in enumerate(steps):
        assert came == {r.id for r in run.requests if step in r.times}
    assert not used and all(r.finished == "length" for r in run.requests)


def test_marks_tell_everything_once():
    work = TimelineExplorer.WORK["one long prompt among short ones"]
    run = end_to_end.serve(work, pages=30)
    assert len({(m.step, m.request) for m in run.marks}) == len(run.marks)
    for number, (came, prompt, answer) in enumerate(work):
        mine = [m for m in run.marks if m.request == number]
        assert [m.step for m in mine] == list(range(came, run.requests[number].times[-1] + 1))
        assert sum(m.tokens for m in mine if m.what == "prefill") == prompt, "nobody was preempted"
        assert sum(m.what == "decode" for m in mine) == answer - 1
    assert max(run.used) <= 30 and run.preemptions == 0
    with pytest.raises(ValueError, match="want at most 64"):
        end_to_end.serve(work, pages=4)


def test_timeline_explorer():
    explorer = TimelineExplorer()
    assert explorer.run().preemptions == 1 and "1 preemption<" in explorer.readout.value and "computed twice" in explorer.readout.value
    explorer.pages.value = 24
    assert "0 preemptions" in explorer.readout.value and "twice" not in explorer.readout.value
    explorer.work.value = "one long prompt among short ones"

    def longest_gap():
        return max(b - a for r in explorer.run().requests for a, b in zip(r.times, r.times[1:]))

    explorer.pages.value, explorer.chunk_tokens.value, explorer.decode_every.value = 40, 32, 8
    late = longest_gap()
    explorer.decode_every.value = 1
    assert longest_gap() < late
    explorer.pages.value = 8
    assert "326 tokens; want at most 128" in explorer.readout.value and explorer.still().startswith(PNG)


# ---------------------------------------------------------------- memory


def test_the_plan_by_arithmetic_is_the_engines():
    spec = find("deepseek-v2-lite")
    plan = end_to_end.memory_plan(141e9, 0.9)
    assert plan.weights == 2 * spec.parameters and plan.page_bytes == 64 * 31104
    held = end_to_end.concurrency(plan, 4608)
    assert held == solutions_engine.at_once(141e9, 0.9, plan.weights, plan.activations + plan.reserve, plan.page_bytes, 64, 4608) > 600
    assert end_to_end.concurrency(end_to_end.memory_plan(30e9, 0.9), 4608) == 0
    text = end_to_end.concurrency_table().data
    assert f"**{held}**" in text and "64, sometimes out of memory" in text


def test_pool_explorer():
    explorer = PoolExplorer()
    before = explorer.requests()
    assert f"{before:,} requests" in explorer.readout.value
    explorer.tokens.value = 2 * 4608
    assert explorer.requests() == pytest.approx(before / 2, abs=1)
    explorer.fraction.value = 0.5
    explorer.gpu.value = end_to_end.GPUS["A100, 80 GB"]
    assert explorer.requests() < before / 4
    explorer.step_keys.value = 262144
    explorer.tokens.value = 131072
    assert explorer.still().startswith(PNG)
    explorer.gpu.value, explorer.weights = end_to_end.GPUS["A100, 80 GB"], 90e9
    explorer.redraw()
    assert "Does not fit" in explorer.readout.value


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "mla-dense"])
def test_weights_of_the_arithmetic_are_the_models(name):
    model = end_to_end.models()["DeepSeek-V2-Lite" if name == "deepseek-v2-lite" else "V2-Lite, every layer dense"]
    layer = model.attention_weights + model.ffn_weights + model.num_experts * model.expert_weights
    assert model.num_layers * layer + 2 * model.output_weights == pytest.approx(find(name).parameters, rel=1e-3)
    assert model.cache * model.num_layers * 2 == find(name).token_bytes(torch.bfloat16)


def test_shares_grow_with_context_and_cross_once():
    for model in end_to_end.models().values():
        for phase in ("prefill", "decode"):
            first = end_to_end.crossing(model, phase, 0.3)
            assert model.share(phase, first - 1) <= 0.3 < model.share(phase, first)
            assert model.share(phase, 512) < 0.05
            assert end_to_end.crossing(model, phase, 0.3, longest=64) is None
    lite = end_to_end.models()["DeepSeek-V2-Lite"]
    assert lite.touched(1) == pytest.approx(6) and 34 < lite.touched(8) < 36 and lite.touched(10**4) == pytest.approx(64)
    assert lite.share("prefill", 16384, efficiency=0.5) > lite.share("prefill", 16384)
    assert end_to_end.share_table().data.count("| prefill |") == 3


def test_share_explorer():
    explorer = ShareExplorer()
    at_16k = explorer.shares()
    explorer.context.value = 512
    assert all(explorer.shares()[name] < share for name, share in at_16k.items()) and "At 512" in explorer.readout.value
    explorer.phase.value, explorer.batch.value = "decode", 64
    assert explorer.still().startswith(PNG)


# ---------------------------------------------------------------- records


def document(rows):
    return {**results.document(rows, command="a test"), "recorded": "2026-01-02T00:00:00+00:00"}


def row(impl, model="deepseek-v2-lite", ins=4096, outs=512, many=8, **measured):
    case = {"mode": "engine", "model": model, "input_len": ins, "output_len": outs, "concurrency": many, "dtype": "bfloat16", "weights": "random"}
    return {"case": case, "impl": impl, **measured}


def test_missing_records_are_said_in_words(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert end_to_end.results_table().data.count("not recorded yet") == 4
    for show in (end_to_end.memory_recorded, end_to_end.backends_table, end_to_end.dense_table, end_to_end.long_table):
        assert "Not recorded yet" in show().data and "ladder.engine bench" in show().data
        assert "Not recorded yet" in show(document([row(OURS, model="another", ttft_ms=1.0)])).data, "a file without these rows"
    assert "ladder.engine quality" in end_to_end.quality_table().data
    assert "ladder.engine quality" in end_to_end.quality_readings().data
    assert "Not recorded yet" in end_to_end.latency_table().data


def test_our_table_stands_beside_the_articles():
    rows = [
        row(V1, ttft_ms=400.0, itl_ms=10.0, itl_p99_ms=11.0, tok_s=700.0, peak_bytes=40e9), row(OURS, ttft_ms=200.0, itl_ms=5.0, tok_s=1400.0, peak_bytes=32e9),
        row(OURS, ttft_ms=1.0, itl_ms=1.0, tok_s=1.0, peak_bytes=1e9, partial=True), row(V1, "mla-dense", 512, 128, ttft_ms=30.0, itl_ms=3.0),
        row(OURS, "mla-dense", 512, 128, ttft_ms=30.0, itl_ms=2.9), row("sdpa", ttft_ms=900.0, itl_ms=40.0),
    ]  # fmt: skip
    doc = document(rows)
    text = end_to_end.results_table(doc).data
    for part in ("810 to 580 ms (1.40 x)", "400 to 200 ms (2.00 x)", "10 to 5 ms (2.00 x)", "40 to 32 GB (1.25 x)", "700 to 1,400 tokens/s (2.00 x)", results.caption(doc)):
        assert part in text, part
    lines = end_to_end.backends_table(doc).data.splitlines()
    assert len(lines) == 7 and lines[2].startswith("| ") and "900" in lines[2] and "**" in lines[4], "slowest first, partial rows left out"
    assert "Not recorded yet" in end_to_end.long_table(doc).data
    fuller = document([*rows, row(V1, ttft_ms=400.0, itl_ms=10.0, tok_s=700.0, peak_bytes=120e9), row(OURS, ins=32768, outs=16, many=1, ttft_ms=1500.0, peak_bytes=35e9)])
    assert "40 to 32 GB" in end_to_end.results_table(fuller).data, "a run that fills the card does not say what the work needs"
    assert f"| 32,768, 16, 1 | {end_to_end.implementation_title(OURS)} | 32,768 | 1,500 | 35 GB |" in end_to_end.long_table(fuller).data
    dense = end_to_end.dense_table(doc).data
    assert "| mla-dense | 512, 128, 8 | 30 to 30 ms (1.00 x) | 3 to 2.9 ms (1.03 x) |" in dense and "| deepseek-v2-lite |" in dense


def test_memory_and_quality_tables_follow_their_rows():
    table = [
        {"case": {"mode": "engine", "model": "deepseek-v2-lite", "mem_fraction": f}, "impl": OURS, "kv_pool_tokens": 10**6, "concurrency": n, "limited_by": by,
         "mixed_requests": 200, "preemptions": 3, "out_of_memory": 0}
        for f, n, by in ((0.85, 217, "memory"), (0.9, 256, "max_seqs"))
    ]  # fmt: skip
    text = end_to_end.memory_recorded(document(table)).data
    assert "**217** | 200 | 3 | 0 |" in text and "**256**, limited by max_seqs" in text
    quality = [
        {"case": {"mode": "engine", "task": "quality", "policy": p, "context": 4096, "sequences": 16, "dtype": "bfloat16"}, "impl": OURS, "bits_per_byte": b, "visible_pairs": v}
        for p, b, v in (("exact", 1.1, 1.0), ("sliding 256", 1.25, 0.12))
    ]  # fmt: skip
    assert "| sliding 256 | 1.2500 | +0.1500 | 12 % |" in end_to_end.quality_table(document(quality)).data


def test_what_windows_and_fused_launches_are_said_to_do():
    said = end_to_end.quality_readings().data
    assert "- Better than exact attention: sliding 1024 (" in said and "at 1,024 tokens" in said
    assert sum(end_to_end.training_lengths().values()) == pytest.approx(1)
    table = end_to_end.latency_table().data
    assert "Amdahl's limit" in table and "| control, 512 tokens" in table and "recorded on NVIDIA H200" in table


def test_the_articles_table_agrees_with_itself():
    for column in (2, 3):
        ttft, itl, said = (article.ARTICLE[name][column] for name in ("ttft_ms", "itl_ms", "tok_s"))
        assert end_to_end.implied_throughput(ttft, itl) == pytest.approx(said, rel=0.04)


@pytest.mark.slow
@pytest.mark.skipif(not tiny_moe.WEIGHTS.is_file(), reason="tiny-moe is not trained yet")
def test_training_and_quality_pictures():
    run = json.loads(end_to_end.TRAINING.read_text())
    assert f"{run['steps']:,} steps" in repr(end_to_end.training_picture())
    found = end_to_end.quality_here(tokens=96, window=16)
    assert found["exact"] < found["sliding 16"] and len(found) == 5
    assert plots.png(end_to_end.quality_picture(found).figure).startswith(PNG)


# ---------------------------------------------------------------- exercises


def product_of_gains(shares, gains):
    total = 1.0
    for share, gain in zip(shares, gains):
        total *= 1 / (1 - share + share / gain)
    return total


def sum_of_lengths(intervals, wall):
    return sum(end - start for start, end in intervals) / wall


def reached_without_maximum(intervals, wall):
    covered, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = end
    return covered / wall


def unsorted(intervals, wall):
    covered, reached = 0.0, -math.inf
    for start, end in intervals:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / wall


def inclusive(share, busy_share, step_ms, target_ms, experts, context):
    return solutions_engine.advise(share + 1e-9, busy_share, step_ms, target_ms, experts, context)


def context_first(share, busy_share, step_ms, target_ms, experts, context):
    return "wait" if context <= 8192 and share > 0.3 else solutions_engine.advise(share, busy_share, step_ms, target_ms, experts, context)


def latency_forgotten(share, busy_share, step_ms, target_ms, experts, context):
    return solutions_engine.advise(share, busy_share, step_ms + 1, target_ms, experts, context)


def tokens_by_tokens(total, fraction, weights, activations, page_bytes, page_size, tokens):
    return max(0, int(total * fraction - weights - activations) // page_bytes * page_size) // tokens


def page_zero_used(total, fraction, weights, activations, page_bytes, page_size, tokens):
    return max(0, int(total * fraction - weights - activations) // page_bytes) // -(-tokens // page_size)


def fraction_of_what_is_left(total, fraction, weights, activations, page_bytes, page_size, tokens):
    return max(0, int((total - weights - activations) * fraction) // page_bytes - 1) // -(-tokens // page_size)


def prompts_apart(prompts, chunk_tokens):
    return [[(n, min(chunk_tokens, p - s))] for n, p in enumerate(prompts) for s in range(0, p, chunk_tokens)]


def empty_step_at_the_end(prompts, chunk_tokens):
    steps = solutions_engine.chunks(prompts, chunk_tokens)
    return steps + [[]] if sum(prompts) % chunk_tokens == 0 else steps


def median_of_first_tokens(times, began):
    firsts = sorted(t[0] for t in times if t)
    return firsts[len(firsts) // 2] - began, solutions_engine.latencies(times, began)[1]


def mean_gap(times, began):
    gaps = [b - a for t in times for a, b in zip(t, t[1:])]
    return solutions_engine.latencies(times, began)[0], sum(gaps) / len(gaps) if gaps else None


def gaps_over_all_requests(times, began):
    flat = sorted(x for t in times for x in t)
    return solutions_engine.latencies(times, began)[0], sorted(b - a for a, b in zip(flat, flat[1:]))[len(flat) // 2 - 1]


@pytest.mark.parametrize(
    "name, answer",
    [
        ("09a", product_of_gains), ("09b", sum_of_lengths), ("09b", reached_without_maximum), ("09b", unsorted), ("09c", inclusive), ("09c", context_first),
        ("09c", latency_forgotten), ("11a", tokens_by_tokens), ("11a", page_zero_used), ("11a", fraction_of_what_is_left), ("11b", prompts_apart),
        ("11b", empty_step_at_the_end), ("11c", median_of_first_tokens), ("11c", mean_gap), ("11c", gaps_over_all_requests),
    ],
)  # fmt: skip
def test_plausible_wrong_answers_are_caught(name, answer):
    exercise = exercises.find(name)
    verdicts = [exercises.run(exercise, level, answer) for level in ("visible", "strict")]
    assert any(verdicts), f"{answer.__name__} passes both tests"


@pytest.mark.parametrize("name", ["09a", "09b", "09c", "11a", "11b", "11c"])
def test_solutions_pass(name):
    exercise = exercises.find(name)
    assert [exercises.run(exercise, level, exercise.solve()) for level in ("visible", "strict")] == [None, None]


def scheduled_chunks(prompts, chunk_tokens):
    """The prefill steps of the engine's scheduler on a pool that never runs out, before anybody decodes."""
    pool = PagePool(2 + sum(prompts) + 2 * len(prompts), 1)
    scheduler = Scheduler(pool, chunk_tokens=chunk_tokens, chunk_keys=10**9, decode_every=10**9)
    for number, length in enumerate(prompts):
        scheduler.add(Request(number, [0] * length, SamplingParams(max_tokens=2)))
    steps = []
    while scheduler.busy and not (step := scheduler.next()).decode:
        steps.append([(r.id, n) for r, n in step.chunks])
        for request, new in step.chunks:
            request.computed += new
            if request.missing == 0:
                request.output.append(0)
    return steps


def test_exercises_are_what_the_ladder_does():
    rng = random.Random(0)
    for _ in range(50):
        intervals = [(a, a + rng.randint(0, 9)) for a in (rng.randint(0, 40) for _ in range(rng.randint(0, 8)))]
        assert solutions_engine.busy(intervals, 50) == pytest.approx(_union(intervals) / 50)
        prompts, size = [rng.randint(1, 30) for _ in range(rng.randint(0, 6))], rng.randint(1, 20)
        chunks = solutions_engine.chunks(prompts, size)
        rests = [step[0] for step in chunks[1:]]
        if not any(count == 1 and sum(n == number for step in chunks for n, _ in step) > 1 for number, count in rests):
            assert chunks == scheduled_chunks(prompts, size), "the engine computes a last single token as a decode"
