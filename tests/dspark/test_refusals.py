"""What a newcomer gets wrong: refused at once, by name, and never computed with."""

import numpy as np
import pytest

from dspark_mini import (
    KVPool,
    LoadTracker,
    OutOfPages,
    Placement,
    Request,
    Topology,
    Trace,
    Worker,
    assign_sources,
    balancedness,
    count_tokens,
    place,
    plan_batch,
    rebalance,
    shrink,
    simulator,
    split_batch,
)  # fmt: skip
from dspark_mini.__main__ import main
from dspark_mini.baselines import contiguous
from dspark_mini.runtime import Job, ModelConfig
from dspark_mini.topology import Link
from dspark_mini.trace import bundled_trace, generate_trace, read_counts

# Every message names the argument, says what came, and what is wanted.
P = place(np.ones(16), num_gpus=4, num_slots=20)
FOUR = place(np.ones((1, 4)), num_gpus=2, num_slots=4)
T = Topology(1, 2)
CLUSTER = {"topology": Topology(1, 4), "model": simulator.MODELS["v2-lite"], "load": simulator.decode_load(8)}
PAGES = KVPool(4, 4)
PAGES.allocate("a", 4)
PREFIXES = [Request(1, prefix="a", prefix_tokens=n) for n in (1, 2)]


def placed(load, num_gpus=2, num_slots=8, **keywords):
    return place(load, num_gpus=num_gpus, num_slots=num_slots, **keywords)


def plan(requests, workers, topology=T):
    return plan_batch(requests, workers, topology)


def four_way(trace=None, load=None, **keywords):
    return simulator.four_way(trace, topology=T, model=None, num_slots=4, load=load, **keywords)


def simulate(counts, gpus):
    return simulator.simulate(counts, contiguous(np.ones((26, 64)), num_gpus=gpus), **CLUSTER)


@pytest.mark.parametrize("call, message", [
    # load
    (lambda: balancedness([np.nan, 1]), "gpu_load must be finite and not negative, got nan"),
    (lambda: balancedness([-1, 1]), "gpu_load must be finite and not negative, got -1"),
    (lambda: balancedness([]), "gpu_load must have shape .* at least one GPU"),
    (lambda: count_tokens([[0, 4]], 4), "topk_ids must lie in -1 .. 3"),
    (lambda: count_tokens([[0.5]], 4), "integer expert ids"),
    (lambda: count_tokens([[1]], 4, mask=np.array([1])), "mask must be bool"),
    (lambda: LoadTracker(1, 2).update([[1, 2, 3]]), "counts must have shape"),
    (lambda: LoadTracker(1, 2).update([[1, -2]]), "counts must not be negative"),
    (lambda: LoadTracker(0, 2), "num_layers must be at least 1, got 0"),
    (lambda: LoadTracker(1, 2, half_life=0), "half_life.* must be a finite number and positive, got 0"),
    # placement
    (lambda: placed([1.0, np.nan]), "load must be finite.*layer 0, expert 1"),
    (lambda: placed([1.0, -2.0]), "load must not be negative"),
    (lambda: placed([[[1.0]]]), r"load must have shape \(layers, experts\)"),
    (lambda: placed(["a", "b"]), "load must hold numbers"),
    (lambda: placed([[1.0, 2.0], [1.0]]), "rectangular"),
    (lambda: placed([[1e308] * 4], num_slots=4), "load must have a finite sum .* layer 0"),
    (lambda: placed([1.0] * 5, num_slots=4), "num_slots must be at least one per expert"),
    (lambda: placed([1.0] * 4, num_gpus=0), "num_gpus must be at least 1, got 0"),
    (lambda: placed([1.0] * 4, num_nodes=3), "num_nodes must divide num_gpus"),
    (lambda: placed([1.0] * 4, num_groups=3), "num_groups must divide"),
    (lambda: Placement([[0, 0]], [1.0, 1.0], 2), "lacks expert 1"),
    # rebalance, shrink
    (lambda: rebalance(None, np.ones(16)), "placement must be a Placement .* got None"),
    (lambda: rebalance(P, np.ones(16), move_cost="x"), "move_cost must be a finite number .* got 'x'"),
    (lambda: rebalance(P, np.ones(16), move_cost=-1.0), "move_cost must be a finite number and not negative"),
    (lambda: rebalance(P, np.ones(16), target="x"), "target.* must be a finite number .* got 'x'"),
    (lambda: rebalance(P, np.ones(16), target=1.5), "target must lie in"),
    (lambda: rebalance(P, np.ones(16), max_moves=2.5), "max_moves.* must be an integer, got 2.5"),
    (lambda: rebalance(P, np.ones(16), max_moves=-1), "max_moves.* must be at least 0, got -1"),
    (lambda: rebalance(P, np.ones((2, 16))), "placement's shape"),
    (lambda: rebalance(FOUR, [[1, 1, 1, np.inf]]), "finite"),
    (lambda: shrink(P, ["a"]), "lost_gpus must be an integer, got 'a'"),
    (lambda: shrink(P, [0, 1, 2, 3]), "every GPU"),
    (lambda: shrink(P, [0], slots_per_gpu=5), "slots_per_gpu must be at least 6"),
    (lambda: shrink(P, [5]), "lost_gpus must lie"),
    # split
    (lambda: split_batch(np.full(16, 2**63, np.uint64), P, 0), "counts must add up to at most 2.*63"),
    (lambda: split_batch([2**62] * 16, P, 0), "counts must add up to at most 2.*63"),
    (lambda: split_batch(np.full(16, 2.0**62), P, 0), "counts must add up to at most 2.*63"),
    (lambda: split_batch([[1], [2, 3]], P, 0), r"counts must be one array of shape \(16,\)"),
    (lambda: split_batch([1, 2], FOUR, 0), "shape"),
    (lambda: split_batch([1, -1, 0, 0], FOUR, 0), "negative"),
    (lambda: split_batch([1.5, 0, 0, 0], FOUR, 0), "whole"),
    (lambda: split_batch([np.nan, 0, 0, 0], FOUR, 0), "whole"),
    (lambda: split_batch(np.ones(16), None, 0), "placement must be a Placement .* got None"),
    (lambda: split_batch(np.ones(16), P, "0"), "layer must be an integer, got '0'"),
    (lambda: split_batch(np.ones(16), P, 1), r"layer must be in 0 \.\. 0, got 1"),
    (lambda: assign_sources([[0, 2, 0, 0], [0] * 4], FOUR.slot_expert[0] == 1, FOUR, 0), "1 has 2 tokens and 1 places"),
    # planner
    (lambda: Request("5"), "tokens of a Request must be an integer, got '5'"),
    (lambda: Request(5.5), "tokens of a Request must be an integer, got 5.5"),
    (lambda: Request(1, kv_tokens=1.5), "kv_tokens of a Request must be an integer, got 1.5"),
    (lambda: Request(1, kv_bytes=np.nan), "kv_bytes of a Request must be a finite number .* got nan"),
    (lambda: Request(1, prefix=[1]), r"prefix of a Request must be hashable or None, got \[1\]"),
    (lambda: plan(None, [Worker(10)]), "requests must be a sequence, got None"),
    (lambda: plan([5, 6], [Worker(10)]), r"requests\[0\] must be a Request, got 5"),
    (lambda: plan([Request(1)], [5]), r"workers\[0\] must be a Worker, got 5"),
    (lambda: plan([Request(1)], [Worker(5)], None), "topology must be a Topology, got None"),
    (lambda: plan([Request(1)], [Worker(10, token_s=0)]), r"0\].token_s must be a finite number and positive, got 0"),
    (lambda: plan([Request(1)], [Worker("a")]), r"free_tokens must be an integer, got 'a'"),
    (lambda: plan([Request(1)], [Worker(-1)]), r"workers\[0\].free_tokens must be at least 0, got -1"),
    (lambda: plan([Request(1)], [Worker(1, load_s=float("nan"))]), r"workers\[0\].load_s"),
    (lambda: plan([Request(0)], [Worker(1)]), r"requests\[0\].tokens must be at least 1"),
    (lambda: plan([Request(1, kv_tokens=5)], [Worker(1)]), r"requests\[0\].kv_worker"),
    (lambda: plan([Request(1, kv_tokens=5, kv_worker=3)], [Worker(1)]), r"kv_worker must be a worker in 0 .. 0"),
    (lambda: plan([Request(1)], []), "workers must not be empty"),
    (lambda: plan([Request(1)], [Worker(1)] * 5), "outnumber"),
    (lambda: plan(PREFIXES, [Worker(9)]), "the same"),
    # topology and simulator
    (lambda: Topology("1", 2), "num_nodes must be an integer, got '1'"),
    (lambda: Topology(1.5, 2), "num_nodes must be an integer, got 1.5"),
    (lambda: Topology(0, 8), "num_nodes must be at least 1, got 0"),
    (lambda: Topology(1, 0), "gpus_per_node must be at least 1, got 0"),
    (lambda: Topology(1, 2, intra=5), "intra must be a Link, got 5"),
    (lambda: Link(-1.0, 1), "latency_s of a link must be a finite number and not negative, got -1"),
    (lambda: four_way(kernel_speedup=np.nan), "kernel_speedup must be a finite number and positive, got nan"),
    (lambda: simulate([np.ones((26, 64))], 8), "topology's 4 GPUs"),
    (lambda: simulate([], 4), "counts must be a sequence"),
    (lambda: four_way(bundled_trace(), simulator.decode_load(10_000)), "half the trace"),
    # KV pool, traces, runtime
    (lambda: KVPool(0), "num_pages must be at least 1, got 0"),
    (lambda: PAGES.allocate("a", 1), "already"),
    (lambda: PAGES.allocate("b", 0), "tokens must be at least 1, got 0"),
    (lambda: PAGES.free("zzz"), "not in the pool"),
    (lambda: PAGES.cache_prefix("p", "a", 5), "1 .. 4"),
    (lambda: PAGES.apply([(3, 0)]), "live pages"),
    (lambda: PAGES.fork("a", "a"), "already"),
    (lambda: Trace(np.full((1, 1, 1), 9), np.array([0, 1]), 4), "topk_ids must lie in"),
    (lambda: Trace(np.full((1, 1), 9), np.array([0, 1]), 4), "topk_ids must be integers of shape"),
    (lambda: Trace(np.zeros((1, 2, 1), int), np.array([0, 1]), 4), "seq_offsets must rise"),
    (lambda: ModelConfig(num_experts=2, top_k=3), "top_k must not exceed"),
    (lambda: ModelConfig(dim=0), "dim must be at least 1, got 0"),
    (lambda: Job((), 3), "at least one prompt token"),
])  # fmt: skip
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_pool_that_is_full_says_how_full():
    with pytest.raises(OutOfPages, match="5 pages wanted, 3 free"):
        PAGES.allocate("c", 20)


def test_large_and_numpy_arguments_are_fine():
    assert balancedness([1e308] * 4) == 1.0 and balancedness([5e-324, 5e-324]) == 1.0
    assert balancedness([[1, 3], [0, 0]]).tolist() == [2 / 3, 1.0]
    assert split_batch(np.array([2**63 - 1] + [0] * 15, np.uint64), P, np.int64(0)).sum() == 2**63 - 1
    assert plan_batch([Request(np.int32(5))], [Worker(np.int64(10))], T).worker.tolist() == [0]


@pytest.mark.parametrize("suffix, text", [(s, t) for s in ("pt", "npz", "npy", "json") for t in ("", "{x")])
def test_corrupt_files_are_named(tmp_path, suffix, text):
    file = tmp_path / f"bad.{suffix}"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"bad.{suffix} must be an? .*cannot be read"):
        read_counts(file)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("place x.json --gpus 0", "argument --gpus: must be a positive integer, got '0'"),
        ("place x.json --output {}/none/x.json", "argument --output: must be a file in an existing folder"),
        ("place x.json --output {}", "argument --output: must be a file, got the folder"),
        ("simulate --gpus 0", "argument --gpus: must be a positive integer"),
        ("simulate --batch 0", "argument --batch: must be a positive integer"),
        ("simulate --kernel-speedup -1", "argument --kernel-speedup: must be a finite number > 0, got '-1'"),
        ("simulate --kernel-speedup 0", "argument --kernel-speedup: must be a finite number > 0"),
        ("simulate --kernel-speedup nan", "argument --kernel-speedup: must be a finite number > 0"),
        ("simulate --plot {}/none/x.png", "argument --plot: must be a file in an existing folder"),
        ("run --ranks 0", "argument --ranks: must be a positive integer"),
        ("run --ranks 2 --top-k 100", "--top-k must not exceed --experts (64), got 100"),
        ("bench --record {}/none/x.json", "argument --record: must be a file in an existing folder"),
    ],
)
def test_the_command_line_refuses(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.format(tmp_path).split())
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_ranks_beside_torchrun_and_an_interrupt(monkeypatch, capsys):
    from dspark_mini import __main__ as cli

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stop:
        main(["run", "--ranks", "3"])
    assert stop.value.code == 2 and "--ranks 3 starts ranks here, and torchrun has started 2" in capsys.readouterr().err

    def stopped(_):
        raise KeyboardInterrupt

    monkeypatch.delenv("RANK")
    monkeypatch.setitem(cli.COMMANDS, "run", stopped)
    assert main(["run"]) == 130 and "run: interrupted" in capsys.readouterr().err


def test_a_full_disk_costs_no_earlier_file(tmp_path, monkeypatch, capsys, full_disk):
    from dspark_mini import bench

    counts = tmp_path / "counts.json"
    counts.write_text(str(np.arange(1, 257).reshape(4, 64).tolist()))
    monkeypatch.setattr(bench, "bench", lambda *args, **options: {"rows": [], "note": "x" * 5000})
    commands = {"--output": f"place {counts}", "--plot": f"place {counts}", "--record": "bench"}
    for option, command in commands.items():
        file = tmp_path / "out.png"
        file.write_text("before")
        with full_disk(), pytest.raises(SystemExit) as stopped:
            main([*command.split(), option, str(file)])
        assert stopped.value.code == 2 and f"argument {option}: cannot write {file}: " in capsys.readouterr().err
        assert file.read_text() == "before" and len(list(tmp_path.iterdir())) == 2, "nothing partial is left"
    trace = generate_trace(num_layers=2, num_tokens=512, num_experts=64, top_k=4, seed=0)
    with full_disk(), pytest.raises(ValueError, match="cannot write .*t.npz"):
        trace.save(tmp_path / "t")
    assert not list(tmp_path.glob("t*"))
