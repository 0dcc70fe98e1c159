"""Load, topology, traces, simulator and command line."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import dspark_mini
from dspark_mini import (
    LoadTracker,
    Topology,
    bundled_trace,
    count_tokens,
    generate_trace,
    place,
    read_counts,
    read_trace,
    simulator,
)  # fmt: skip
from dspark_mini.__main__ import main
from dspark_mini.baselines import contiguous
from dspark_mini.trace import r1_like_load

# ------------------------------------------------------------------------------------------------- load


def test_padding_and_warm_up_are_not_load():
    ids = torch.tensor([[0, 1], [2, -1], [-1, -1], [0, 2]])
    assert count_tokens(ids, 4).tolist() == [2, 1, 2, 0]
    assert count_tokens(ids, 4, mask=np.array([True, True, True, False])).tolist() == [1, 1, 1, 0]
    tracker = LoadTracker(1, 4, warmup_steps=2)
    for _ in range(3):
        tracker.update([[1, 0, 2, 0]])
    assert tracker.counts.tolist() == [[1, 0, 2, 0]] and tracker.steps == 3


def test_counts_are_64_bits_and_old_load_fades():
    tracker = LoadTracker(1, 2, half_life=100)
    tracker.update([[2**40, 0]])
    tracker.update([[0, 100]])
    assert tracker.counts.dtype == np.int64 and tracker.counts[0, 0] == 2**40
    assert tracker.load[0].tolist() == [2**39, 100]


def test_topology_times():
    topology = Topology(2, 2, dspark_mini.Link(1.0, 10.0), dspark_mini.Link(2.0, 5.0))
    assert [topology.link(0, g).seconds(10) for g in (1, 2, 3)] == [2.0, 4.0, 4.0]


def test_the_simulator_s_exchange_is_the_topology_s():
    for topology in (Topology(1, 8), Topology(4, 4)):
        g = topology.num_gpus
        received = np.random.default_rng(0).uniform(1e6, 2e6, g)
        sent = np.full(g, received.sum() / g)
        traffic = sent[:, None] * received[None, :] / received.sum()
        node = topology.node_of(np.arange(g))
        same = node[:, None] == node
        seconds = []
        for link, mask in ((topology.intra, same & ~np.eye(g, dtype=bool)), (topology.inter, ~same)):
            moved = traffic * mask  # every port of a kind of link works at once
            busiest = max(moved.sum(axis=0).max(), moved.sum(axis=1).max())
            seconds.append(link.seconds(busiest) if busiest else 0.0)
        assert simulator.even_exchange_s(sent, received, topology) == pytest.approx(max(seconds), rel=0.1)


# ------------------------------------------------------------------------------------------------- traces


def test_own_format_round_trip(tmp_path):
    trace = generate_trace(num_layers=2, num_tokens=50, sequence=20)
    trace.save(tmp_path / "t.npz")
    again = read_trace(tmp_path / "t.npz")
    assert (again.topk_ids == trace.topk_ids).all() and again.seq_offsets.tolist() == [0, 20, 40, 50]
    assert again.generated and again.num_experts == 64
    assert (read_counts(tmp_path / "t.npz") == trace.counts()).all()
    assert sum(b.sum() for b in trace.batches(25)) == trace.counts().sum()


def test_esft_text(tmp_path):
    rows = {
        1: [[[3, 1], [0, 2], [7, 3]], [[1, 2]]],
        2: [[[4, 5], [6, 7], [0, 1]], [[2, 3]]],
        10: [[[1, 0]] * 3, [[0, 1]]],
    }
    for layer, sequences in rows.items():
        lines = []
        for tokens in sequences:
            ids = [str(e) for token in tokens for e in token]
            lines.append("\t".join(ids) + "\t\t" + "\t".join(["0.5"] * len(ids)))
        (tmp_path / f"expert_weights_{layer}.txt").write_text("\n".join(lines) + "\n")
    trace = read_trace(tmp_path)
    assert trace.topk_ids.tolist() == [[t for s in rows[layer] for t in s] for layer in (1, 2, 10)]  # numeric order
    assert (trace.seq_offsets.tolist(), trace.num_experts, trace.generated) == ([0, 3, 4], 8, False)
    assert (read_counts(tmp_path) == trace.counts()).all()
    (tmp_path / "expert_weights_2.txt").write_text("1\t2\t\t0.5\n")
    with pytest.raises(ValueError, match="expert_weights_2.txt, line 1"):
        read_trace(tmp_path)


def test_sglang_dumps(tmp_path):
    counts = torch.arange(24, dtype=torch.int32).view(2, 3, 4)
    torch.save({"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}, tmp_path / "a.pt")
    torch.save({"logical_count": counts[0].to(torch.int64) + 2**40}, tmp_path / "b.pt")
    assert (read_counts(tmp_path / "a.pt") == counts.sum(0).numpy()).all()
    assert read_counts(tmp_path / "b.pt")[0, 0] == 2**40
    assert (read_counts(tmp_path) == counts.sum(0).numpy() + counts[0].numpy() + 2**40).all()
    torch.save([1], tmp_path / "c.pt")
    with pytest.raises(ValueError, match="logical_count"):
        read_counts(tmp_path / "c.pt")


def test_json_and_unknown_files(tmp_path):
    (tmp_path / "c.json").write_text('{"counts": [[1, 2], [3, 4]]}')
    assert read_counts(tmp_path / "c.json").tolist() == [[1, 2], [3, 4]]
    (tmp_path / "d.json").write_text('{"x": 1}')
    for name, message in (("d.json", "'counts'"), ("e.csv", "counts come as"), ("e.txt", "counts come as")):
        with pytest.raises(ValueError, match=message):
            read_counts(tmp_path / name)


def skew(trace):
    """Statistics that the generated trace is to share with real ones, over 2,048 tokens at most."""
    n = min(trace.num_tokens, 1536)
    counts = trace.counts(0, n)
    windows = [c.mean(1) / c.max(1) for c in trace.batches(64, 0, n)]
    a, b = trace.counts(0, n // 2), trace.counts(n // 2, n)
    ids = trace.topk_ids[::5, :400]
    return {
        "balancedness": np.median(counts.mean(1) / counts.max(1)),
        "worst": (counts.mean(1) / counts.max(1)).min(),
        "per 64 tokens": np.median(windows),
        "halves": np.mean([np.corrcoef(x, y)[0, 1] for x, y in zip(a, b)]),
        "shared by neighbours": (ids[:, 1:, :, None] == ids[:, :-1, None, :]).sum((2, 3)).mean(),
    }


def test_the_bundled_trace_is_like_the_real_ones(real_traces):
    ours = skew(bundled_trace())
    assert bundled_trace().generated
    for trace in real_traces.values():
        for name, value in skew(trace).items():
            assert ours[name] == pytest.approx(value, rel=0.3), name


def test_the_bundled_trace_is_what_the_generator_makes():
    fresh, kept = generate_trace(seed=1), bundled_trace()
    assert fresh.topk_ids.shape == kept.topk_ids.shape == (26, 1536, 6)
    assert (fresh.topk_ids == kept.topk_ids).mean() > 0.99  # scores may tie differently on other machines


def test_r1_like_loads_are_as_skewed_as_published():
    balance = contiguous(r1_like_load(), num_gpus=32).balancedness
    assert np.median(balance) == pytest.approx(0.40, abs=0.04)
    assert balance.min() == pytest.approx(0.145, abs=0.03)


# ------------------------------------------------------------------------------------------------- simulator


def four(trace, load):
    cluster = {"topology": Topology(1, 8), "model": simulator.MODELS["v2-lite"], "num_slots": 80}
    return simulator.four_way(trace, load=load, **cluster)


def check_four(trace, load):
    results = four(trace, load)
    base = results["neither"].step_s
    gain = {name: base / r.step_s for name, r in results.items()}
    assert results["both"].balancedness > 0.97
    assert results["neither"].balancedness < 0.8
    for r in results.values():
        assert r.balancedness <= r.bound * (1 + 1e-9) and (r.utilisation <= 1 + 1e-9).all()
        assert r.step_s == pytest.approx(sum(r.phases.values()))
    assert results["neither"].layer_utilisation.min() < 0.3  # a GPU at less than 30 % where another is at 100 %
    assert results["both"].layer_utilisation.min() > 0.9
    return gain


def test_the_articles_picture_on_generated_routing():
    trace = generate_trace(num_layers=8, num_tokens=8192, seed=2)
    gain = check_four(trace, simulator.chunk_load(4096, 16384))
    assert gain["kernel"] > 1.2 and gain["scheduler"] > 1.1
    # Nearly the product, and clearly more than the sum.
    assert gain["both"] == pytest.approx(gain["kernel"] * gain["scheduler"], rel=0.03)
    assert gain["both"] > gain["kernel"] + gain["scheduler"] - 1


def test_the_articles_picture_on_real_routing(real_traces):
    for trace in real_traces.values():
        gain = check_four(trace, simulator.chunk_load(4096, 16384))
        assert 1.2 < gain["kernel"] < 1.4 and 1.2 < gain["scheduler"] < 1.35
        assert gain["both"] == pytest.approx(gain["kernel"] * gain["scheduler"], rel=0.03)


def test_decode_with_few_tokens_gains_nothing_from_even_tokens():
    """A negative result worth keeping: every expert's weights are read anyway, however many tokens it has."""
    results = four(bundled_trace(), simulator.decode_load(256))
    assert results["neither"].balancedness < 0.75
    assert results["neither"].phases["experts"] < 1.1 * results["scheduler"].phases["experts"]


def test_four_thousand_gpus():
    start = time.process_time()
    load = r1_like_load(num_layers=1)
    plan = place(load, num_gpus=4096, num_slots=8192, num_nodes=512)
    counts = np.random.default_rng(0).multinomial(4096 * 64, load[0] / load[0].sum())[None]
    result = simulator.simulate(
        [counts], plan, topology=Topology(512, 8), model=simulator.MODELS["r1"], load=simulator.decode_load(8192)
    )
    assert result.balancedness > 0.9
    assert result.gpu_tokens.sum() == 4096 * 64
    assert time.process_time() - start < 30


# ------------------------------------------------------------------------------------------------- command line


def test_place_command(tmp_path, capsys):
    counts = bundled_trace().counts()[:3]
    (tmp_path / "counts.json").write_text(json.dumps(counts.tolist()))
    plot, output = tmp_path / "plot.png", tmp_path / "plan.json"
    main(["place", str(tmp_path / "counts.json"), "--plot", str(plot), "--output", str(output)])
    text = capsys.readouterr().out
    assert "greedy replicate and pack" in text and "upper bound" in text
    assert plot.read_bytes()[:4] == b"\x89PNG"
    plan = dspark_mini.Placement.from_json(json.loads(output.read_text()))
    assert plan.digest() == place(counts, num_gpus=8, num_slots=72).digest()
    main(["place", str(tmp_path / "counts.json"), "--json"])
    values = json.loads(capsys.readouterr().out)["balancedness"]
    assert values["none (experts in order)"]["median"] < values["place"]["median"] <= values["upper bound"]["median"]


def test_simulate_command(tmp_path, capsys):
    main(["simulate", "--batch", "768", "--json", "--plot", str(tmp_path / "p.png")])
    data = json.loads(capsys.readouterr().out)
    assert set(data["speedup"]) == {"neither", "kernel", "scheduler", "both"} and data["generated"]
    main(["simulate", "--batch", "768", "--mode", "decode"])
    assert "utilisation" in capsys.readouterr().out.lower()


def test_errors_are_one_line(tmp_path, capsys):
    (tmp_path / "bad.json").write_text("[[1, -2]]")
    with pytest.raises(SystemExit) as stop:
        main(["place", str(tmp_path / "bad.json")])
    assert stop.value.code == 2
    assert "counts in bad.json must not be negative" in capsys.readouterr().err


def test_torchrun(tmp_path):
    """The command of the documentation: a real layer on four ranks, with table data and plot."""
    plot = tmp_path / "plot.png"
    command = "-m torch.distributed.run --standalone --nproc-per-node 4 -m dspark_mini run"
    widths = f"--dim 32 --hidden 16 --tokens 48 --layers 2 --json --plot {plot}"
    command = [sys.executable, *command.split(), *widths.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["identical"] and report["ranks"] == 4
    assert report["after"]["critical_rows"] < report["before"]["critical_rows"]
    rows = report["tokens_per_rank"] * 4 * report["top_k"] * report["layers"] * report["steps"]
    assert sum(report["after"]["rank_tokens"]) == rows == sum(report["before"]["rank_tokens"])
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_survive_command(capsys):
    main(["survive", "--ranks", "3", "--lose", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["identical"] and report["finished"] == report["jobs"] and report["members"] == [0, 2]
    assert max(report["noticed_s"].values()) < 1.0


def test_importing_the_package_is_light():
    code = "import sys, dspark_mini; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]
