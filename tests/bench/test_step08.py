"""The bench of rung 08: every cell rehearsed small, wrong answers and interruptions recorded as such, ratios computed right."""

import importlib.machinery
import math
import sys
import types

import pytest
import torch

pytest.importorskip("triton")

from ladder import step08_dflash2  # noqa: E402
from ladder.bench import harness  # noqa: E402
from ladder.bench import step08 as bench_v2  # noqa: E402
from ladder.bench.step08 import OURS, V1, cells, main, prefill_problems, ratio_summary, targets  # noqa: E402
from ladder.lab import results  # noqa: E402
from ladder.lab.decode_problem import DecodeProblem  # noqa: E402
from ladder.lab.problem import reference  # noqa: E402
from ladder.lab.roofline import Limits  # noqa: E402
from ladder.lab.window_oracle import WindowOracle, visible_rows  # noqa: E402

LIMITS = Limits(800.0, 4.0, 4.0)
RANGES = [
    [(0, None, 0, 3)], [(0, None, 2, 4)], [(0, -5, 1, 3)], [(-6, None, 3, 1)], [(2, 7, 0, 2), (9, None, 4, None)], [(0, 4, 0, None), (4, -2, 5, 2)],
]  # fmt: skip


@pytest.fixture(autouse=True)
def fast_limits(monkeypatch):
    monkeypatch.setattr(harness, "measure_limits", lambda *args, **kwargs: LIMITS)
    monkeypatch.setattr(harness, "warm_all", lambda *args: None)
    if not torch.cuda.is_available():  # the bench is what is tested: step 08 by PyTorch, not in the slow interpreter
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def rehearse(path, *args):
    code = main(["--dry", "--json", str(path), *args])
    return code, results.load(path)


def test_every_section_rehearses_right(tmp_path):
    picks = [
        "d128 causal (1|128)k",
        "dense 32k (MHA|group 6)",
        "decode B1 4k",
        "ragged",
        "q_len 4",
        "16 heads B1 ",
        "windows",
        "chunked.*128k$",
        "memory",
    ]
    code, doc = rehearse(tmp_path / "r.json", *[x for p in picks for x in ("--cells", p)])
    assert code == 0 and doc["complete"] and not doc["not_run"] and not doc["failures"] and doc["dry"]
    sections = {row["case"]["mode"] for row in doc["rows"]}
    assert sections == {"prefill", "decode", "mla_decode", "window", "chunked", "memory"}
    ours = [row for row in doc["rows"] if row["impl"] == OURS]
    assert all(row["ok"] and row["max_error"] <= row["budget"] for row in ours if "ms" in row)
    names = {cell.name for cell in harness.chosen(cells(dry=True), None, picks)} - {"memory 128k causal"}
    assert names <= {row.get("cell") for row in ours}
    assert {"step08_contiguous"} < {row["impl"] for row in doc["rows"]}


def test_first_call_says_what_import_warmup_and_calls_take(tmp_path):
    code, doc = rehearse(tmp_path / "r.json", "--only", "first_call")
    assert code == 0 and not doc["failures"]
    kinds = {(row["case"]["cache"], row["case"]["warmup"]) for row in doc["rows"]}
    assert {("warm", False), ("empty", True)} <= kinds
    assert all(row["seconds_import"] > 0 and row["seconds_prefill"] > 0 and row["seconds_decode"] > 0 for row in doc["rows"])


def test_a_wrong_answer_is_recorded_as_wrong(tmp_path, monkeypatch):
    right = step08_dflash2.dflash2_attention

    def wrong(q, k, v, *, out=None, **options):
        return out.copy_(right(q, k, v, **options) * 1.05)

    monkeypatch.setattr(step08_dflash2, "dflash2_attention", wrong)
    _, doc = rehearse(tmp_path / "r.json", "--cells", "d128 causal 1k MHA")
    row = results.one(doc, OURS)
    assert row["ok"] is False and "over the budget" in row["reason"]
    line = next(e for e in doc["must_reach"] if e["what"].startswith("share of answers"))
    assert line["value"] == 0 and not line["ok"]


def test_what_nobody_writes_is_not_taken_for_an_answer(tmp_path, monkeypatch):
    calls = []

    def only_once(q, k, v, *, out=None, **options):
        if not calls:
            calls.append(out.copy_(reference(q, k, v, causal=True)[0]))
        return out

    monkeypatch.setattr(step08_dflash2, "dflash2_attention", only_once)
    _, doc = rehearse(tmp_path / "r.json", "--cells", "d128 causal 1k MHA")
    row = results.one(doc, OURS)  # right before the timing, NaN after it
    assert row["ok"] is False and "not finite" in row["reason"]


def test_an_implementation_that_fails_later_is_no_result(tmp_path, monkeypatch):
    """One that breaks while it is timed has no row, one that breaks after has a wrong one."""
    right, events, state = step08_dflash2.dflash2_attention, harness.Bench.events, {}

    def breaks(*args, **options):
        if state.get("broken"):
            raise RuntimeError("no longer")
        return right(*args, **options)

    def timed(self, fn):
        state["broken"] = state["when"] == "before"
        timing = events(self, fn)
        state["broken"] = True
        return timing

    monkeypatch.setattr(step08_dflash2, "dflash2_attention", breaks)
    monkeypatch.setattr(harness.Bench, "events", timed)
    state.update(when="before", broken=False)
    _, doc = rehearse(tmp_path / "a.json", "--cells", "d128 causal 1k MHA")
    assert not results.select(doc, OURS) and any("no longer" in f["error"] for f in doc["failures"])
    state.update(when="after", broken=False)
    _, doc = rehearse(tmp_path / "b.json", "--cells", "d128 causal 1k MHA")
    assert results.one(doc, OURS)["ok"] is False and "after it was timed" in results.one(doc, OURS)["reason"]


def test_what_a_graph_cannot_hold_is_timed_launch_by_launch(tmp_path, monkeypatch):
    def refuses(self, fn, runs=25):
        raise RuntimeError("cannot be captured")

    monkeypatch.setattr(harness.Bench, "graph", refuses)
    _, doc = rehearse(tmp_path / "r.json", "--cells", "decode B1 4k")
    row = results.one(doc, OURS)
    assert row["timed"] == "events" and row["ok"] and any("captured" in f["error"] for f in doc["failures"])


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    def refuses(*args, **options):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(step08_dflash2, "dflash2_decode", refuses)
    code, doc = rehearse(tmp_path / "r.json", "--cells", "decode B1 4k", "--cells", "windows 32k sink")
    assert code == 0 and doc["complete"]
    assert {row["case"]["mode"] for row in doc["rows"]} == {"window"}
    assert any("out of registers" in failure["error"] for failure in doc["failures"])


def test_interrupted_and_out_of_time_files_say_so(tmp_path, monkeypatch, capsys):
    chosen = ["--only", "prefill", "--cells", "d64 dense (1|4|16)k MHA"]
    code, doc = rehearse(tmp_path / "a.json", *chosen, "--minutes", "0")
    assert code == 0 and not doc["complete"] and doc["stopped"] == "out of time" and len(doc["not_run"]) == 3
    assert "PARTIAL" in capsys.readouterr().out

    run, seen = harness.run_cell, []

    def stops(bench, cell):
        seen.append(cell.name)
        if len(seen) == 2:
            raise KeyboardInterrupt("SIGTERM")
        run(bench, cell)

    monkeypatch.setattr(harness, "run_cell", stops)
    code, doc = rehearse(tmp_path / "b.json", *chosen)
    assert code == 1 and not doc["complete"] and doc["stopped"] == "interrupted SIGTERM"
    assert doc["not_run"] == seen[1:] + [c.name for c in harness.chosen(cells(dry=True), ["prefill"], chosen[3:])][2:]
    assert [row["cell"] for row in doc["rows"] if row["impl"] == OURS] == seen[:1]


def test_keep_holds_other_rows_of_the_same_machine_only(tmp_path):
    path = tmp_path / "r.json"
    _, first = rehearse(path, "--cells", "d64 causal 4k MHA", "--cells", "memory")
    _, second = rehearse(path, "--cells", "memory", "--keep")
    kept = [row for row in second["rows"] if row["case"]["mode"] == "prefill"]
    assert len(kept) == sum(row["case"]["mode"] == "prefill" for row in first["rows"])
    assert all(row["recorded"] == first["recorded"] and row["commit"] == first["commit"] for row in kept)
    assert sum(row["case"]["mode"] == "memory" for row in second["rows"]) == 1
    first["machine"]["gpu"] = "another"
    results.write(first, path)
    before = path.read_text()
    with pytest.raises(SystemExit):
        rehearse(path, "--cells", "memory", "--keep")
    assert path.read_text() == before


@pytest.mark.parametrize("args", [
    ["--only", "prefil"], ["--cells", "no such cell"], ["--cells", "("], ["--minutes", "nan"], ["--minutes", "-1"], ["--peers", "nonsense"],
    ["--json", "nowhere/x.json"],
])  # fmt: skip
def test_bad_choices_are_refused(args, capsys):
    with pytest.raises(SystemExit):
        main(["--dry", *args])
    assert args[0] in capsys.readouterr().err


def test_the_cells_are_those_of_the_targets():
    names = [cell.name for cell in cells()]
    assert len(names) == len(set(names))
    problems = prefill_problems()
    for D, Dv in ((64, 64), (128, 128), (192, 128)):
        for causal in (False, True):
            mine = [p for p, _ in problems.values() if (p.D, p.Dv, p.causal) == (D, Dv, causal)]
            for group, lengths in ((1, 5), (8, 5), (3, 3), (6, 3)):
                assert len({p.Sq for p in mine if p.Hq // p.Hkv == group}) == lengths
    for problem, peers in problems.values():
        assert "fa3" in peers and "sdpa_cudnn" in peers
        assert problem.B * problem.Sq == max(16384, problem.Sq)
        assert problem.flops / (400e9 if problem.D == 64 else 550e9) < 190  # ms, at what cuDNN reaches
    longest = [peers for p, peers in problems.values() if p.Sq == 131072 and p.causal and p.Hq == p.Hkv]
    assert len(longest) == 3 and all(V1 in peers for peers in longest)
    table = bench_v2.decode_problems()
    for B, context in ((1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 32768), (64, 4096), (64, 16384)):
        assert any((p.B, p.context, p.q_len, p.page_size, p.lengths) == (B, context, 1, 64, None) for p in table.values())


def row(mode, cell, impl, ms, tflops=None, tbs=None, ok=True, **case):
    case = {"mode": mode, "D": 128, "Dv": 128, "Hq": 16, "Hkv": 16, "B": 1, "Sq": 16384, "Sk": 16384, "causal": True, **case}
    extra = {k: v for k, v in (("tflops", tflops), ("tbs", tbs)) if v is not None}
    return {"case": case, "cell": cell, "impl": impl, "ms": {"median": ms, "p20": ms, "p80": ms}, "ok": ok, **extra}


def test_ratios_and_targets_from_rows():
    rows = [
        row("prefill", "a", OURS, 1.0, 640, causal=False), row("prefill", "a", "fa3", 2.0, 320, causal=False),
        row("prefill", "b", OURS, 2.0, 500, Sq=131072), row("prefill", "b", "fa3", 1.0, 1000, Sq=131072),
        row("prefill", "b", V1, 3.0, 333, Sq=131072),
        row("prefill", "c", OURS, 1.0, 500, D=64, Dv=64), row("prefill", "c", "fa3", 9.0, 50, D=64, Dv=64, ok=False),
        row("decode", "d", OURS, 0.5, tbs=3.9), row("decode", "d", "fa3", 0.6, tbs=3.0), row("decode", "d", "sdpa_cudnn", 0.4, tbs=4.1),
        row("decode", "d", "step08_contiguous", 0.49, tbs=4.0),
    ]  # fmt: skip
    lines = {line[0]: line[1:] for line in ratio_summary(rows)}
    assert lines["all prefill"] == (2, pytest.approx(1.0), 0.5, "b")  # 2 x and 0.5 x; the peer that is wrong counts for nothing
    assert lines["mask: dense"][1] == pytest.approx(2.0) and "head size: d64" not in lines
    assert lines["decode"] == (1, pytest.approx(1.2), pytest.approx(1.2), "d")
    reached = {line["what"]: line for line in targets(rows, LIMITS)}
    assert reached["prefill, geometric mean over fa3"]["value"] == 1.0 and not reached["prefill, geometric mean over fa3"]["ok"]
    assert reached["a: over fa3"]["ok"] and not reached["b: over fa3"]["ok"] and "c: over fa3" not in reached
    assert reached["a: share of the matrix-product limit"]["value"] == 0.8 and not reached["a: share of the matrix-product limit"]["ok"]
    assert reached["b: over step 07"]["value"] == 1.5 and reached["b: over step 07"]["ok"]
    assert reached["d: share of the read limit"]["value"] == 0.975
    assert reached["d: over the best peer, sdpa_cudnn"]["value"] == 0.8 and not reached["d: over the best peer, sdpa_cudnn"]["ok"]
    assert reached["d: contiguous over paged time"]["value"] == 0.98 and reached["d: contiguous over paged time"]["ok"]


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("shape", [(12, 12), (5, 12)])
def test_the_window_oracle_and_the_package_mean_the_same(ranges, shape):
    seqlen_q, seqlen_k = shape
    rows = torch.arange(seqlen_q)
    for causal in (True, False):
        want = step08_dflash2.RangeWindows(ranges).visible(seqlen_q, seqlen_k, causal)
        assert torch.equal(visible_rows(ranges, rows, seqlen_q, seqlen_k, causal=causal), want)
    if seqlen_q == seqlen_k and all(window is not None for *_, window in ranges):
        assert bench_v2.visible_pairs(ranges, seqlen_q) == int(visible_rows(ranges, rows, seqlen_q, seqlen_q).sum())


def test_the_window_oracle_is_attention_where_everything_is_seen():
    q, k, v = (torch.randn(2, heads, 40, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    oracle = WindowOracle(q, k, v, [(0, None, 0, 40)])
    out, lse = reference(q, k, v, causal=True)
    assert torch.allclose(oracle.out, out[:, :, oracle.rows]) and torch.allclose(oracle.lse, lse[:, :, oracle.rows])
    assert oracle.check(out.float(), lse.float()).ok
    narrow = WindowOracle(q, k, v, [(0, None, 0, 39)])
    assert not narrow.check(out.float()).ok  # the last row lost one key


def test_padded_keys_are_those_of_the_pages_and_zeros_after():
    inputs = DecodeProblem(B=3, lengths=(5, 1, 9), Hq=2, Hkv=2, D=8, Dv=8, page_size=4, dtype="float32").make()
    k, v = inputs.padded()
    assert k.shape == (3, 9, 2, 8)
    for b, length in enumerate((5, 1, 9)):
        for padded, gathered in zip((k, v), inputs.sequence(b)):
            assert torch.equal(padded[b, :length], gathered[0].transpose(0, 1)) and not padded[b, length:].any()


def test_geometric_mean():
    assert bench_v2.geometric_mean([2.0, 8.0]) == pytest.approx(4.0) and bench_v2.geometric_mean([]) is None
    assert math.isclose(bench_v2.geometric_mean([3.0]), 3.0)


def test_compiling_ahead_runs_every_cell(capsys):
    harness.warm(cells(dry=True), 0, 1)
    assert capsys.readouterr().out == ""
    for cell in harness.chosen(cells(dry=True), ["decode", "windows", "chunked"]):
        for work in cell.build(torch.device("cpu"), False):
            assert OURS in work.impls and work.impls[OURS]().isfinite().all(), cell.name


# ---------------------------------------------------------------- the peer that this machine has not


def attend(q, k, v, scale, left=None, extra=None):
    """One sequence in FlashAttention's layout (S, H, D), causal to the bottom right; extra: added to the scores of a KV head."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).double() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k)
    if extra is not None:
        scores = scores + torch.einsum("qhd,khd->hqk", extra.double(), v)
    position = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))
    hidden = (key > position) | (key < position - (len(k) if left is None else left))
    probs = torch.softmax((scores * scale).masked_fill(hidden, -math.inf), -1)
    return torch.einsum("hqk,khd->qhd", probs, v)


@pytest.fixture
def fa3(monkeypatch):
    """A module of that name with the two functions that are called, as their documentation defines them."""
    module = types.ModuleType("fa3_fwd_interface")
    module.__spec__ = importlib.machinery.ModuleSpec("fa3_fwd_interface", None)

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
        assert causal and window_size[1] == 0
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return torch.stack([attend(*x, scale, left=window_size[0]) for x in zip(q, k, v)]).to(q.dtype)

    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, softmax_scale=None, causal=False, qv=None):
        assert causal and cache_seqlens.dtype == torch.int32
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        outs = [
            attend(q[b], k_cache[b, :n], v_cache[b, :n], scale, extra=None if qv is None else qv[b]) + 0.0 * v_cache[b].double().sum()
            for b, n in enumerate(cache_seqlens.tolist())  # the kernel multiplies what lies past the length by zero: no NaN there
        ]
        return torch.stack(outs).to(q.dtype)

    module.flash_attn_func, module.flash_attn_with_kvcache = flash_attn_func, flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    monkeypatch.setattr("ladder.lab.peers.on_hopper", lambda x: True)
    return module


@pytest.mark.parametrize(
    "problem",
    [
        DecodeProblem(B=3, Hq=4, Hkv=2, D=16, Dv=16, lengths=(5, 17, 9), page_size=4),
        DecodeProblem(B=2, Hq=4, Hkv=1, D=16, Dv=16, context=12, q_len=3, page_size=4, scale=0.3),
        DecodeProblem(B=2, Hq=3, Hkv=1, D=24, Dv=16, latent=True, context=10, page_size=4, scale=0.2),
    ],
    ids=["ragged", "new tokens", "latent"],
)
def test_fa3_is_given_the_same_problem_without_pages(fa3, problem):
    inputs = problem.make()
    run = bench_v2.contiguous_peers(problem, inputs)["fa3"]
    parity = bench_v2.DecodeOracle(inputs, scale=problem.scale, most_sequences=9).check(run())
    assert parity.ok, parity.reason


def test_fa3_is_given_the_same_window(fa3):
    q, k, v = (torch.randn(1, 2, 24, 16, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3))
    for window in (1, 5, 24):
        parity = WindowOracle(q, k, v, [(0, None, 0, window)]).check(bench_v2.fa3_window(q, k, v, window)())
        assert parity.ok, parity.reason
    assert not WindowOracle(q, k, v, [(0, None, 0, 6)]).check(bench_v2.fa3_window(q, k, v, 5)()).ok


def test_keep_does_not_forget_that_a_run_was_cut_short(tmp_path):
    path = tmp_path / "r.json"
    rehearse(path, "--cells", "memory")
    lost = ["prefill d64 dense 1k MHA", "prefill d64 causal 1k MHA"]
    results.write({**results.load(path), "complete": False, "not_run": lost}, path)
    _, doc = rehearse(path, "--cells", "d64 causal 4k MHA", "--cells", "d64 dense 1k MHA", "--keep")
    assert doc["complete"] is False and doc["not_run"] == lost[1:] and {row["case"]["mode"] for row in doc["rows"]} == {"prefill", "memory"}
    _, doc = rehearse(path, "--cells", lost[1], "--keep")
    assert doc["complete"] is True and doc["not_run"] == []


def test_a_kept_row_is_held_against_the_limits_of_its_own_run():
    row = {"case": {"mode": "decode"}, "cell": "decode B64 16k", "impl": OURS, "ms": {"median": 1.0}, "tbs": 3.9}
    def share(row):
        return next(t["value"] for t in targets([row], LIMITS) if "read limit" in t["what"])
    assert share(row) == 0.975 and share({**row, "limits": {"read_tbs": 7.8}}) == 0.5
