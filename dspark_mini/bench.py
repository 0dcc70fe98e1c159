"""Measure every target beside its baselines, in one run: python -m dspark_mini bench [--record FILE].

A row holds one number: case, implementation, metric, value, and where it is a target of ours, the target and
whether it was met. Times in ms are one thread's processor time, the fastest of several runs. `target_no` is
the number of the target:

1 placement, 2 split, 3 rebalancing, 4 planning speed, 5 request planning, 6 dispatch, 7 loss of a rank, 8 simulator.
"""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import numpy as np

from . import baselines, simulator
from .exact import exact_step, lp_peak
from .load import balancedness
from .placing import place
from .planner import Problem, Request, Worker, plan_batch
from .rebalancing import rebalance
from .split import gpu_tokens, split_batch, split_bound
from .topology import Topology
from .trace import bundled_trace, generate_trace, r1_like_load, read_trace, shift_load

__all__ = ["bench", "best_ms", "small_problem", "trace_files", "traffic"]


class _Record:
    def __init__(self, progress):
        self.rows, self.progress = [], progress

    def add(self, number, case, impl, metric, value, at_least=None, at_most=None, note=None):
        target, ok = None, None
        if at_least is not None:
            target, ok = f">= {at_least:.6g}", bool(value >= at_least)
        if at_most is not None:
            target, ok = f"<= {at_most:.6g}", bool(value <= at_most)
        row = {"target_no": number, "case": case, "impl": impl, "metric": metric, "value": float(f"{value:.6g}")}
        self.rows.append({**row, "target": target, "ok": ok, **({"note": note} if note else {})})
        if self.progress:
            mark = {True: "ok", False: "MISSED", None: ""}[ok]
            print(
                f"{number}  {', '.join(map(str, case.values()))}: {impl} {metric} {value:.5g} {target or ''} {mark}",
                file=sys.stderr,
            )


def best_ms(call, *args, **keywords):
    """Milliseconds of this thread's processor time, fastest of 11 runs: the machine may be shared."""
    call(*args, **keywords)
    times = []
    for _ in range(11):
        start = time.thread_time()
        call(*args, **keywords)
        times.append(time.thread_time() - start)
    return 1e3 * min(times)


def trace_files(folder=None):
    """The real traces in `folder`, $DSPARK_TRACES or shared/data/traces, the first that has any; or none."""
    shared = (root / "shared/data/traces" for root in Path(__file__).resolve().parents[1:3])
    folders = (Path(f) for f in (folder, os.environ.get("DSPARK_TRACES"), *shared) if f)
    return next(filter(None, (sorted(f.glob("esft_*.npz")) for f in folders)), [])


def bench(traces=None, progress=False):
    """Run everything and return the record (a dict ready for JSON)."""
    record = _Record(progress)
    traces = {"generated": bundled_trace()} | {f.stem.removeprefix("esft_"): read_trace(f) for f in trace_files(traces)}
    for part in (_placement, _split, _rebalance, _planner, _dispatch, _survival, _simulator):
        part(record, traces)
    return {
        "schema": 1,
        "recorded": datetime.now(timezone.utc).date().isoformat(),
        "commit": _commit(),
        "command": "OMP_NUM_THREADS=1 python -m dspark_mini bench --record notebooks/results/dspark.json",
        "machine": _machine(),
        "limits": None,  # nothing here is compared with a machine's limits
        "rows": record.rows,
    }


def _commit():
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _machine():
    import scipy
    import torch

    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return {
        "gpu": None,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "torch": torch.__version__,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


# ------------------------------------------------------------------------------------------------- 1 and 4


def _zipf(exponent, experts=256, layers=8):
    rng = np.random.default_rng(0)
    return np.stack([rng.permutation(np.arange(1.0, experts + 1) ** -exponent) for _ in range(layers)])


def _placement(record, traces):
    hot = np.ones((4, 256))
    hot[:, 7] = 255 * 9.0  # nine tenths of the load
    cases = [
        ("Zipf 1.2", _zipf(1.2), 64, 320, 0.99),
        ("Zipf 0.8", _zipf(0.8), 64, 320, None),
        ("Zipf 1.2", _zipf(1.2), 32, 288, None),
        ("Zipf 1.2", _zipf(1.2), 144, 288, None),
        ("Zipf 2", _zipf(2.0), 64, 320, None),
        ("R1-like (generated)", r1_like_load(), 32, 288, 0.998),
        ("R1-like (generated), indivisible slots", r1_like_load(), 30, 290, None),
        ("one expert with 9/10 of the load", hot, 32, 288, None),
    ]
    cases += [(f"routing: {name}", t.counts(), 8, 72, None) for name, t in traces.items()]
    for name, load, gpus, slots, wanted in cases:
        add = partial(
            record.add, 1, {"load": name, "layers": len(load), "experts": load.shape[1], "gpus": gpus, "slots": slots}
        )
        size = {"num_gpus": gpus, "num_slots": slots}
        plan = place(load, **size)
        rivals = {"none": baselines.contiguous(load, num_gpus=gpus)} if load.shape[1] % gpus == 0 else {}
        for rival in (baselines.round_robin, baselines.least_loaded, baselines.replicate_and_pack):
            rivals[rival.__name__] = rival(load, **size)
        for rival, p in rivals.items():
            add(rival, "balancedness, median", np.median(p.balancedness))
            add(rival, "balancedness, min", p.balancedness.min())
        add("place", "balancedness, median", np.median(plan.balancedness), at_least=wanted)
        add("place", "balancedness, min", plan.balancedness.min())
        add("bound", "balancedness, median", np.median(plan.bound))
        ahead = (plan.balancedness - rivals["replicate_and_pack"].balancedness).min()
        add("place", "least lead over replicate_and_pack", ahead, at_least=-1e-12)
        crowded = sum(
            len(s) - len(np.unique(s))
            for row in plan.slot_expert
            for s in np.split(row, np.flatnonzero(np.diff(plan.slot_gpu)) + 1)
        )
        add("place", "copies beside a sister on one GPU", crowded, at_most=0)
        equal = np.allclose(plan.share * np.take_along_axis(plan.copies, plan.slot_expert, 1), 1.0)
        add("place", "layers that need unequal shares", 0 if equal else 1)

    # Any load at all: random small problems, where strange things happen.
    rng, worst = np.random.default_rng(0), 1.0
    for _ in range(1000):
        experts, gpus = int(rng.integers(2, 13)), int(rng.integers(1, 7))
        slots = max(experts, gpus) + int(rng.integers(0, 15))
        load = rng.lognormal(0, rng.uniform(0.1, 3), experts) * (rng.random(experts) > 0.2)
        ours = place(load, num_gpus=gpus, num_slots=slots).balancedness[0]
        greedy = baselines.replicate_and_pack(load, num_gpus=gpus, num_slots=slots).balancedness[0]
        worst = min(worst, ours / greedy)
    add = partial(record.add, 1, {"load": "1,000 random small problems, zeros included"})
    add("place", "worst ratio to replicate_and_pack", worst, at_least=1 - 1e-9)

    for name, load, gpus, slots, wanted in (
        ("R1-like (generated)", r1_like_load(), 32, 288, 50.0),
        ("Zipf 1.2", _zipf(1.2, layers=58), 64, 320, None),
    ):
        add = partial(record.add, 4, {"load": name, "layers": 58, "experts": 256, "gpus": gpus, "slots": slots})
        size = {"num_gpus": gpus, "num_slots": slots}
        add("place", "ms", best_ms(place, load, **size), at_most=wanted)
        add("replicate_and_pack", "ms", best_ms(baselines.replicate_and_pack, load, **size))


# ------------------------------------------------------------------------------------------------- 2


def _split(record, traces):
    for (name, trace), slots in itertools.product(traces.items(), (72, 80)):
        half = trace.num_tokens // 2
        plan = place(trace.counts(0, half), num_gpus=8, num_slots=slots)
        for size in (64, 512):
            _split_batches(record, name, plan, size, list(trace.batches(size, half))[:6])


def _split_batches(record, name, plan, size, batches):
    values, times, over, behind = {name: [] for name in (*baselines.DIVISION_RULES, "LP")}, [], 0, 0
    for batch, layer in itertools.product(batches, range(0, plan.num_layers, 2)):
        counts = batch[layer]
        split_batch(counts, plan, layer)
        start = time.thread_time()
        split_batch(counts, plan, layer)
        times.append(time.thread_time() - start)
        rules = baselines.DIVISION_RULES.items()
        peaks = {name: int(gpu_tokens(rule(counts, plan, layer), plan).max()) for name, rule in rules}
        peak, best, mean = peaks["split_batch"], lp_peak(plan, layer, counts), counts.sum() / 8
        for impl, busiest in (peaks | {"LP": best}).items():
            values[impl].append(mean / busiest)
        over += peak > np.ceil(best - 1e-6) or split_bound(counts, plan, layer)[0] != peak
        behind += peak > peaks["equal_split"]
    case = {"routing": name, "gpus": 8, "slots": plan.num_slots, "batch": size, "batches x layers": len(times)}
    add = partial(record.add, 2, case)
    for impl, v in values.items():
        add(impl, "balancedness, mean", np.mean(v))
    loss = 1 - np.mean(values["split_batch"]) / np.mean(values["LP"])
    note = "all of it is the cost of whole tokens: no whole-token split is better (next row)"
    add("split_batch", "mean loss to the fractional LP", loss, at_most=0.005, note=note)
    add("split_batch", "splits above the LP rounded up to a token", over, at_most=0)
    add("split_batch", "splits worse than equal", behind, at_most=0)
    add("split_batch", "ms, median", 1e3 * np.median(times), at_most=1.0)


# ------------------------------------------------------------------------------------------------- 3


def _rebalance(record, traces):
    load = r1_like_load()
    cases = [("R1-like (generated), every expert's load times exp(0.5 N)", load, shift_load(load), 32, 288)]
    names = [n for n in traces if n != "generated"]
    if len(names) >= 2:
        a, b = (traces[n].counts() for n in names[:2])
        cases.append((f"routing: {names[0]} -> {names[1]}", a, b, 8, 80))
        cases.append((f"routing: {names[1]} -> {names[0]}", b, a, 8, 80))
    for name, old, new, gpus, slots in cases:
        plan = place(old, num_gpus=gpus, num_slots=slots)
        add = partial(record.add, 3, {"shift": name, "gpus": gpus, "slots": slots})
        add("no move", "balancedness, median", np.median(balancedness(plan.gpu_load_of(new))))
        greedy = (baselines.replicate_and_pack(x, num_gpus=gpus, num_slots=slots) for x in (old, new))
        add("replicate_and_pack", "moved copies per layer, median", _moved(*greedy))
        for target, most in ((0.95, 30), (0.99, 50)):
            start = time.thread_time()
            result, moves = rebalance(plan, new, target=target)
            ms = 1e3 * (time.thread_time() - start)
            count = np.bincount([m.layer for m in moves], minlength=plan.num_layers)
            add(f"rebalance to {target}", "balancedness, min", result.balancedness.min(), at_least=target)
            add(f"rebalance to {target}", "moved copies per layer, median", np.median(count), at_most=most)
            add(f"rebalance to {target}", "moved copies per layer, max", count.max(), at_most=most)
            add(f"rebalance to {target}", "ms, all layers", ms)
    noise = load * (1 + 0.001 * np.random.default_rng(0).standard_normal(load.shape))
    size = {"num_gpus": 32, "num_slots": 288}
    plan = place(load, **size)
    add = partial(record.add, 3, {"shift": "0.1 % noise", "gpus": 32, "slots": 288})
    add("rebalance", "moved copies", len(rebalance(plan, noise)[1]), at_most=0)
    greedy = (baselines.replicate_and_pack(x, **size) for x in (load, noise))
    add("replicate_and_pack", "moved copies per layer, median", _moved(*greedy))
    shifted = shift_load(load)
    cost = 0.01 * load.sum(axis=1).mean() / 32
    result, moves = rebalance(plan, shifted, move_cost=cost)
    count = np.bincount([m.layer for m in moves], minlength=58)
    gain = plan.gpu_load_of(shifted).max(axis=1) - result.gpu_load.max(axis=1) - cost * count
    add = partial(
        record.add, 3, {"shift": "exp(0.5 N), a move costs 1 % of the mean GPU load", "gpus": 32, "slots": 288}
    )
    add("rebalance", "layers whose moves do not pay", int((gain[count > 0] <= 0).sum()), at_most=0)
    add("rebalance", "moved copies per layer, median", np.median(count))
    add("rebalance", "balancedness, median", np.median(result.balancedness))


def _moved(old, new):
    """Median over layers of the copies a GPU gains that it did not hold."""
    gpus = np.split(np.arange(old.num_slots), np.flatnonzero(np.diff(old.slot_gpu)) + 1)
    return np.median(
        [sum(len(s) - len(np.intersect1d(b[s], a[s])) for s in gpus) for a, b in zip(old.slot_expert, new.slot_expert)]
    )


# ------------------------------------------------------------------------------------------------- 5


def traffic(kind, n=1000, workers=64, seed=0):
    """A large batch: (requests, workers). Kinds are "plain", "KV on workers", "shared prefixes" and "mixed"."""
    rng, requests = np.random.default_rng(seed), []
    for _ in range(n):
        keywords = {}
        if kind in ("KV on workers", "mixed") and rng.random() < 0.5:
            kv = int(rng.lognormal(7, 1))
            keywords = {"kv_tokens": kv, "kv_bytes": kv * 70_000, "kv_worker": int(rng.integers(workers))}
        elif kind in ("shared prefixes", "mixed") and rng.random() < 0.6:
            keywords = {"prefix": int(min(9, rng.zipf(1.5) - 1)), "prefix_tokens": 500}
        requests.append(Request(int(np.clip(rng.lognormal(5.5, 1), 1, 4000)), **keywords))
    return requests, [Worker(200_000, load_s=float(rng.uniform(0, 0.02))) for _ in range(workers)]


def _planner(record, traces):
    topology = Topology(8, 8)
    for kind in ("plain", "KV on workers", "shared prefixes", "mixed"):
        requests, workers = traffic(kind)
        add = partial(record.add, 5, {"requests": 1000, "workers": 64, "traffic": kind})
        problem = Problem(requests, workers, topology)
        plan = plan_batch(requests, workers, topology)
        rivals = {"round_robin": np.arange(1000) % 64, "least_loaded": _least_loaded(problem)}
        for name, worker in rivals.items():
            add(name, "step / lower bound", problem.evaluate(worker)[0].max() / plan.lower_bound_s)
        note = "the bound lets groups share the same empty workers and every moved cache take the fastest link"
        add("plan_batch", "step / lower bound", 1 + plan.gap, at_most=1.02, note=note if kind == "mixed" else None)
        add("plan_batch", "ms", best_ms(plan_batch, requests, workers, topology), at_most=5.0)
        used = problem.evaluate(plan.worker)[1]
        add("plan_batch", "workers over memory", int((used > problem.free).sum()), at_most=0)
        if kind == "shared prefixes":
            hot = set(plan.worker[problem.prefix == 0].tolist())
            add("plan_batch", "workers that share the hottest prefix", len(hot))
        add("plan_batch", "KV caches that move", len(plan.moved))

    different, solved, times = 0, 0, []
    rng = np.random.default_rng(1)
    for _ in range(100):
        requests, workers = small_problem(rng)
        start = time.thread_time()
        plan = plan_batch(requests, workers, Topology(2, 2))
        times.append(time.thread_time() - start)
        best = exact_step(Problem(requests, workers, Topology(2, 2)))
        if best is not None:
            solved += 1
            different += not np.isclose(plan.step_s, best, rtol=1e-6, atol=0) or bool(plan.deferred)
    add = partial(record.add, 5, {"requests": "1-7", "workers": "1-3", "traffic": "mixed, memory tight"})
    add("HiGHS", "problems solved by the mixed-integer program", solved)
    add("plan_batch", "problems with another optimum", different, at_most=0)
    add("plan_batch", "ms, median", 1e3 * np.median(times))


def _least_loaded(problem):
    """Requests in order, each to the worker that is least loaded when it arrives, blind to caches."""
    time_, worker = problem.load.copy(), np.empty(len(problem.tokens), np.int64)
    for r, tokens in enumerate(problem.tokens):
        worker[r] = time_.argmin()
        time_[worker[r]] += tokens * problem.token_s[worker[r]]
    return worker


def small_problem(rng):
    """A batch small enough for the exact plan, with little memory: (requests, workers)."""
    workers = [
        Worker(
            int(rng.integers(800, 8000)),
            float(rng.uniform(0, 0.02)),
            float(rng.choice([25e-6, 40e-6])),
            frozenset([int(rng.integers(2))]) if rng.random() < 0.3 else frozenset(),
        )
        for _ in range(int(rng.integers(1, 4)))
    ]
    requests = []
    for _ in range(int(rng.integers(1, 8))):
        keywords = {}
        if rng.random() < 0.4:
            kv = int(rng.integers(1, 2000))
            keywords = {"kv_tokens": kv, "kv_bytes": kv * 70_000, "kv_worker": int(rng.integers(len(workers)))}
        if rng.random() < 0.4:
            prefix = int(rng.integers(2))
            keywords |= {"prefix": prefix, "prefix_tokens": (300, 700)[prefix]}
        requests.append(Request(int(rng.integers(1, 2000)), **keywords))
    return requests, workers


# ------------------------------------------------------------------------------------------------- 6 and 7


def _dispatch(record, traces):
    from .demo import layer_rank
    from .launch import run_ranks

    settings = dict(
        dim=256, hidden=128, experts=64, top_k=6, layers=4, tokens=128, steps=3, slots_per_gpu=None, trace=None,
        timeout_s=60,
    )  # fmt: skip
    for ranks in (1, 2, 4, 7):
        report = run_ranks(layer_rank, ranks, settings, timeout_s=300)[0]
        add = partial(
            record.add, 6, {"ranks": ranks, "experts": 64, "top_k": 6, "width": "256 -> 128", "device": "cpu, gloo"}
        )
        error = 0.0 if report["identical"] else max(report["max_error"], 1e-9)
        add("moe_forward", "outputs that differ from one process, largest difference", error, at_most=0)
        mean = sum(report["after"]["rank_tokens"]) / ranks
        for impl, when in (("equal split, experts in order", "before"), ("place + split_batch", "after")):
            add(impl, "rows on the critical path / mean", report[when]["critical_rows"] / mean)


def _survival(record, traces):
    from .demo import survive_demo

    for how, most in (("kill", 1.0), ("freeze", 4.0)):
        report = survive_demo(how=how, timeout_s=3.0)
        add = partial(record.add, 7, {"ranks": 4, "lost": f"1, by {how}, mid-step", "timeout, s": 3.0})
        add("runtime", "s until the last survivor noticed", max(report["noticed_s"].values()), at_most=most)
        add("runtime", "s until serving again", report["resumed_s"])
        add("runtime", "requests not finished", report["jobs"] - report["finished"], at_most=0)
        add("runtime", "outputs other than undisturbed", 0 if report["identical"] else 1, at_most=0)
        add("runtime", "expert copies reloaded from storage", report["from_storage"])


# ------------------------------------------------------------------------------------------------- 8


def _simulator(record, traces):
    longer = {("generated, 8,192 tokens" if n == "generated" else n): t for n, t in traces.items()}
    longer["generated, 8,192 tokens"] = generate_trace(num_tokens=8192, seed=2)
    loads = {
        "chunked prefill, prompts of 16,384": simulator.chunk_load(4096, 16384),
        "chunked prefill, prompts of 4,096": simulator.chunk_load(4096, 4096),
        "prefill, 32 short prompts": simulator.prefill_load(4096),
        "decode, context 1,024": simulator.decode_load(2048, median=1024),
        "decode, context 4,096": simulator.decode_load(256),
    }
    cluster = {"topology": Topology(1, 8), "model": simulator.MODELS["v2-lite"], "num_slots": 80}
    for (name, trace), (mode, load) in itertools.product(longer.items(), loads.items()):
        results = simulator.four_way(trace, load=load, max_batches=4, **cluster)
        base = results["neither"]
        case = {"routing": name, "model": "DeepSeek-V2-Lite", "gpus": 8, "slots": 80, "step": mode}
        add = partial(record.add, 8, case)
        for impl, r in results.items():
            add(impl, "throughput, neither = 1", base.step_s / r.step_s)
        both = base.step_s / results["both"].step_s
        product = base.step_s**2 / results["kernel"].step_s / results["scheduler"].step_s
        add("both", "throughput / product of the single gains", both / product)
        if mode.startswith("chunked prefill, prompts of 16"):
            worst = int(base.layer_utilisation.min(axis=1).argmin())
            for impl, wanted in (("neither", None), ("both", 0.9)):
                lowest = results[impl].layer_utilisation[worst].min()
                add(impl, f"lowest utilisation in layer {worst}, busiest = 1", lowest, at_least=wanted)
                add(impl, "balancedness, all layers", results[impl].balancedness)
    load = r1_like_load(num_layers=4)
    start = time.perf_counter()
    plan = place(load, num_gpus=4096, num_slots=8192, num_nodes=512)
    rng = np.random.default_rng(0)
    counts = [np.stack([rng.multinomial(4096 * 64 * 8, row / row.sum()) for row in load])]
    result = simulator.simulate(
        counts, plan, topology=Topology(512, 8), model=simulator.MODELS["r1"], load=simulator.decode_load(4096 * 64)
    )
    add = partial(
        record.add, 8, {"load": "R1-like (generated)", "layers": 4, "gpus": 4096, "slots": 8192, "nodes": 512}
    )
    add("place + simulate", "s", time.perf_counter() - start, at_most=30.0)
    add("place + simulate", "balancedness", result.balancedness)
