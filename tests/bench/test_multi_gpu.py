"""``python -m ladder.bench multi_gpu``: every part over gloo, small; partial results; predictions; tables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import ROOT

from dspark_mini import baselines, place, split_batch
from ladder.bench import multi_gpu as bench
from ladder.chapters.ch10_scheduling import tables as multi_gpu
from ladder.lab import interpret, results


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("multi") / "multi_gpu.json"
    # In a process of its own: step 08 runs by PyTorch there, and a fork of this one would have the slow interpreter.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "ladder.bench", "multi_gpu", "--device", "cpu", "--json", str(path)]
    code = subprocess.run(command, env=env, cwd=ROOT, timeout=400).returncode
    return code, path


def test_every_part_runs_on_cpu_ranks(recorded):
    code, path = recorded
    doc = results.load(path)
    assert code == 0 and doc["failures"] == []
    parts = {r["case"]["part"] for r in doc["rows"]}
    assert parts == set(bench.PARTS)
    assert all(r["case"]["gpus"] == 2 for r in doc["rows"])
    assert all(r["ok"] for r in doc["rows"] if r["case"]["part"] in ("parity", "survive"))
    ways = {r["case"]["which"]: r for r in multi_gpu.rows(doc, "four_way")}
    assert set(ways) == {"neither", "kernel", "scheduler", "both"}
    assert ways["neither"]["balancedness"] < 0.8 < 0.98 < ways["both"]["balancedness"]
    found = multi_gpu.rows(doc, "dispatch", what="layer", tokens_per_rank=64)
    layers = {(r["case"]["routing"], r["impl"]): r for r in found}
    assert layers["zipf", "identity"]["balancedness"] < 0.7 < 0.99 < layers["zipf", "dspark"]["balancedness"]
    assert all(abs(r["predicted"]["balancedness"] - r["balancedness"]) < 0.02 for r in found)  # the same arithmetic
    moves = multi_gpu.rows(doc, "dispatch", what="migration")
    assert moves and all(r["weights_right"] and r["copies"] and max(r["bytes_received"]) for r in moves)


def test_a_part_that_fails_costs_only_itself(recorded, tmp_path, monkeypatch, capsys):
    _, path = recorded
    copy = tmp_path / "multi_gpu.json"
    copy.write_text(path.read_text())

    def broken(*_):
        raise RuntimeError("no link\nthe cable is out")

    monkeypatch.setattr(bench, "dispatch", broken)
    row = json.dumps({"case": {"mode": "multi_gpu", "part": "survive", "gpus": 2}, "impl": "dspark", "ok": True})
    monkeypatch.setattr(bench, "survive", lambda ranks, device, file, seconds: Path(file).write_text(row))
    assert bench.main(["--device", "cpu", "--json", str(copy), "--only", "dispatch", "survive"]) == 1
    doc = results.load(copy)
    assert doc["failures"] == [{"part": "dispatch", "error": "RuntimeError: the cable is out"}]
    parts = [r["case"]["part"] for r in doc["rows"]]
    # What has nothing new stays, and says whence.
    assert parts.count("survive") == 1 and {"dispatch", "engine"} <= set(parts)
    assert set(doc["earlier"]) == {"dispatch", "parity", "engine", "four_way"} and "partial" not in doc
    assert "dispatch failed: RuntimeError: the cable is out" in capsys.readouterr().err


def test_a_file_of_another_machine_or_of_something_else_is_refused(recorded, tmp_path, capsys):
    _, path = recorded
    copy = tmp_path / "multi_gpu.json"
    doc = json.loads(path.read_text())
    doc["machine"]["gpu"] = "another"
    for text, why in ((json.dumps(doc), "was recorded on another"), ("{", "holds no results")):
        copy.write_text(text)
        with pytest.raises(SystemExit):
            bench.main(["--device", "cpu", "--json", str(copy)])
        assert why in capsys.readouterr().err and copy.read_text() == text


def test_a_part_without_time_says_so(tmp_path):
    path = tmp_path / "multi_gpu.json"
    assert bench.main(["--device", "cpu", "--json", str(path), "--only", "survive", "--seconds", "5"]) == 1
    assert "no time is left" in results.load(path)["failures"][0]["error"]


@pytest.mark.parametrize("options, message", [
    (["--ranks", "1"], "want at least 2"), (["--device", "cpu", "--ranks", "3"], "want a divisor of 4"),
    (["--device", "cpu", "--seconds", "nan"], "want a positive number"),
    (["--device", "cpu", "--seconds", "-1"], "want a positive number"),
    (["--device", "cpu", "--json", "nowhere/x.json"], "want a file in a folder that exists"),
])  # fmt: skip
def test_bad_options(options, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(options)
    assert message in capsys.readouterr().err


def test_biased_routers_follow_the_rates():
    rates = np.stack([1 / np.arange(1, 17) ** 0.8, np.ones(16)])
    bias = bench.router_bias(rates, 0.9, 3, tokens=1024)
    probs = (0.9 * torch.randn(4096, 16, generator=torch.Generator().manual_seed(1))).softmax(dim=-1)
    for wanted, b in zip(rates, bias):
        found = torch.bincount((probs + b).topk(3).indices.flatten(), minlength=16).numpy() / 4096
        assert np.abs(found - np.minimum(3 * wanted / wanted.sum(), 0.97)).max() < 0.06


@pytest.mark.skipif(not interpret.has_triton(), reason="Triton is not installed")
def test_both_routers_take_the_bias():
    from ladder.engine.backends import make
    from ladder.engine.context import Context
    from ladder.engine.models.deepseek_v2 import MoE

    c = bench.small_spec().config
    moe, g = MoE(c, 1), torch.Generator().manual_seed(0)
    torch.nn.init.normal_(moe.router, std=0.3, generator=g)
    moe.bias = torch.linspace(0.4, -0.4, c.num_experts)
    x, norm = torch.randn(9, c.width, generator=g), torch.ones(c.width)
    with torch.no_grad():
        _, _, weights, ids = Context().norm_route(moe, x, None, norm)
        fused = make("step08", torch.device("cpu")).fused
        _, _, fused_weights, fused_ids = fused.norm_route(x, None, norm, moe.router, c, moe.bias)
    order, fused_order = ids.argsort(dim=1), fused_ids.argsort(dim=1)
    assert torch.equal(ids.gather(1, order), fused_ids.gather(1, fused_order).to(ids.dtype))
    torch.testing.assert_close(weights.gather(1, order), fused_weights.gather(1, fused_order))
    moe.bias = None
    with torch.no_grad():
        plain = Context().norm_route(moe, x, None, norm)[3]
    assert not torch.equal(plain.sort(dim=1).values, ids.sort(dim=1).values)


def test_predictions_say_what_is_worth_what():
    counts = np.tile((1e6 / np.arange(1, 65) ** 0.8).astype(np.int64), (26, 1))
    order, placed = baselines.contiguous(counts, num_gpus=2), place(counts, num_gpus=2, num_slots=68)
    run = lambda plan, split, speed: bench.predict(counts, plan, split, (speed, 2.0), bench.FOUR_WAY, ranks=2)["tok_s"]  # noqa: E731
    base, kernel = run(order, baselines.equal_split, 2.2), run(order, baselines.equal_split, 3.0)
    scheduler, both = run(placed, split_batch, 2.2), run(placed, split_batch, 3.0)
    assert 1.02 < kernel / base < 1.2 and 1.1 < scheduler / base < 1.5
    assert abs(both / base / (kernel / base * scheduler / base) - 1) < 0.05  # nearly the product


def test_tables_from_a_record(recorded):
    doc = results.load(recorded[1])
    for table in (multi_gpu.layer_table, multi_gpu.moves_table, multi_gpu.loss_table, multi_gpu.parity_table):
        text = table(doc).data
        assert "2 ranks; recorded on" in text and "|" in text and "Not recorded" not in text
    full = json.loads(json.dumps(doc))
    for r in full["rows"]:
        if r["case"]["part"] in ("engine", "four_way"):
            r["impl"] = {"sdpa": "step07_dflash1"}.get(r["impl"], r["impl"])
            r["peak_bytes"] = 18 << 30
            r["predicted"] = r["predicted"] or {"tok_s": 100.0, "ttft_ms": 5.0, "itl_ms": 7.0, "gain": 1.1}
    assert "(" in multi_gpu.engine_table(full).data and "product" in multi_gpu.four_way_table(full).data


def test_tables_without_a_record(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    for name in ("layer_table", "moves_table", "loss_table", "parity_table", "engine_table", "four_way_table"):
        assert multi_gpu.COMMAND in getattr(multi_gpu, name)().data
    ways = {"neither": 1.0, "kernel": 1.3, "scheduler": 1.2, "both": 1.6}
    assert repr(multi_gpu.four_way_picture(ways, "8 GPUs", "recorded")).endswith("in 1 panels")
    doc = {"rows": [], "failures": [{"part": "engine", "error": "RankLost: silent"}]}
    assert "RankLost: silent" in multi_gpu.engine_table(doc).data


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_what_one_does(tmp_path):
    path = tmp_path / "multi_gpu.json"
    assert bench.main(["--json", str(path), "--only", "survive", "parity"]) == 0
    assert all(r["ok"] for r in results.load(path)["rows"])


def test_the_record_in_the_repository_is_whole():
    doc = multi_gpu.record()
    if doc is None:
        pytest.skip("not recorded yet")
    assert all(r["ok"] for r in doc["rows"] if "ok" in r)
    assert "2 ranks" in multi_gpu.layer_table().data


def test_a_full_disk_costs_no_earlier_record(tmp_path, monkeypatch, capsys, full_disk):
    file = tmp_path / "r.json"
    results.write(results.document([], device="cpu"), file)
    case = {"mode": "multi_gpu", "part": "survive", "gpus": 2}
    before, row = file.read_text(), json.dumps({"case": case, "impl": "x" * 900, "ok": True})
    monkeypatch.setattr(bench, "survive", lambda ranks, device, path, seconds: results.write_text(path, row))
    with full_disk():
        assert bench.main(["--device", "cpu", "--json", str(file), "--only", "survive"]) == 2
    assert f"cannot write {file}: " in capsys.readouterr().err and file.read_text() == before
