"""Measure every target beside its baselines, in one run: python -m dspark_mini bench [--record FILE].

A row holds one number: case, implementation, metric, value, and where it is a target of ours, the target and
whether it was met. Times in ms are one thread's processor time, the fastest of several runs. `target_no` is
the number of the target:

1 placement, 2 split, 3 rebalancing, 4 planning speed, 5 request planning, 6 dispatch, 7 loss of a rank, 8 simulator.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from scipy.optimize import linprog

from . import baselines, simulator
from .load import balancedness
from .placing import place
from .planner import Problem, Request, Worker, plan_batch
from .rebalancing import rebalance
from .split import gpu_tokens, split_batch, split_bound
from .topology import Topology
from .trace import bundled_trace, generate_trace, r1_like_load, read_trace, shift_load

__all__ = ["bench"]


class _Record:
    def __init__(self, progress):
        self.rows, self.progress = [], progress

    def add(self, number, case, impl, metric, value, at_least=None, at_most=None, note=None):
        ok = None
        if at_least is not None:
            ok = bool(value >= at_least)
        if at_most is not None:
            ok = bool(value <= at_most)
        target = f">= {at_least:.6g}" if at_least is not None else f"<= {at_most:.6g}" if at_most is not None else None
        row = {
            "target_no": number,
            "case": case,
            "impl": impl,
            "metric": metric,
            "value": float(f"{value:.6g}"),
            "target": target,
            "ok": ok,
        }
        if note:
            row["note"] = note
        self.rows.append(row)
        if self.progress:
            mark = {True: "ok", False: "MISSED", None: ""}[ok]
            print(
                f"{number}  {', '.join(map(str, case.values()))}: {impl} {metric} {value:.5g} {target or ''} {mark}",
                file=sys.stderr,
            )


def _best_ms(call, *args, **keywords):
    """Milliseconds of this thread's processor time, fastest of 11 runs: the machine may be shared."""
    call(*args, **keywords)
    times = []
    for _ in range(11):
        start = time.thread_time()
        call(*args, **keywords)
        times.append(time.thread_time() - start)
    return 1e3 * min(times)


def find_traces(folder=None):
    """{name: Trace}: real ones from `folder`, $DSPARK_TRACES or ../shared/data/traces, and the generated one."""
    root = Path(__file__).resolve().parents[1]
    traces = {"generated": bundled_trace()}
    for place_ in (
        folder,
        os.environ.get("DSPARK_TRACES"),
        root / "shared/data/traces",
        root.parent / "shared/data/traces",
    ):
        files = sorted(Path(place_).glob("esft_*.npz")) if place_ else []
        if files:
            traces |= {f.stem.removeprefix("esft_"): read_trace(f) for f in files}
            break
    return traces


def bench(traces=None, progress=False):
    """Run everything and return the record (a dict ready for JSON)."""
    record = _Record(progress)
    traces = find_traces(traces)
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
        case = {"load": name, "layers": len(load), "experts": load.shape[1], "gpus": gpus, "slots": slots}
        plan = place(load, num_gpus=gpus, num_slots=slots)
        rivals = {
            "round_robin": baselines.round_robin(load, num_gpus=gpus, num_slots=slots),
            "least_loaded": baselines.least_loaded(load, num_gpus=gpus, num_slots=slots),
            "replicate_and_pack": baselines.replicate_and_pack(load, num_gpus=gpus, num_slots=slots),
        }
        if load.shape[1] % gpus == 0:
            rivals = {"none": baselines.contiguous(load, num_gpus=gpus)} | rivals
        for rival, p in rivals.items():
            record.add(1, case, rival, "balancedness, median", np.median(p.balancedness))
            record.add(1, case, rival, "balancedness, min", p.balancedness.min())
        record.add(1, case, "place", "balancedness, median", np.median(plan.balancedness), at_least=wanted)
        record.add(1, case, "place", "balancedness, min", plan.balancedness.min())
        record.add(1, case, "bound", "balancedness, median", np.median(plan.bound))
        ahead = (plan.balancedness - rivals["replicate_and_pack"].balancedness).min()
        record.add(1, case, "place", "least lead over replicate_and_pack", ahead, at_least=-1e-12)
        crowded = sum(
            len(s) - len(np.unique(s))
            for row in plan.slot_expert
            for s in np.split(row, np.flatnonzero(np.diff(plan.slot_gpu)) + 1)
        )
        record.add(1, case, "place", "copies beside a sister on one GPU", crowded, at_most=0)
        equal = np.allclose(plan.share * np.take_along_axis(plan.copies, plan.slot_expert, 1), 1.0)
        record.add(1, case, "place", "layers that need unequal shares", 0 if equal else 1)

    # Any load at all: random small problems, where strange things happen.
    rng, worst = np.random.default_rng(0), 1.0
    for _ in range(1000):
        experts, gpus = int(rng.integers(2, 13)), int(rng.integers(1, 7))
        slots = max(experts, gpus) + int(rng.integers(0, 15))
        load = rng.lognormal(0, rng.uniform(0.1, 3), experts) * (rng.random(experts) > 0.2)
        ours = place(load, num_gpus=gpus, num_slots=slots).balancedness[0]
        greedy = baselines.replicate_and_pack(load, num_gpus=gpus, num_slots=slots).balancedness[0]
        worst = min(worst, ours / greedy)
    case = {"load": "1,000 random small problems, zeros included"}
    record.add(1, case, "place", "worst ratio to replicate_and_pack", worst, at_least=1 - 1e-9)

    for name, load, gpus, slots, wanted in (
        ("R1-like (generated)", r1_like_load(), 32, 288, 50.0),
        ("Zipf 1.2", _zipf(1.2, layers=58), 64, 320, None),
    ):
        case = {"load": name, "layers": 58, "experts": 256, "gpus": gpus, "slots": slots}
        size = {"num_gpus": gpus, "num_slots": slots}
        ours = _best_ms(place, load, **size)
        record.add(4, case, "place", "ms", ours, at_most=wanted)
        greedy = _best_ms(baselines.replicate_and_pack, load, **size)
        record.add(4, case, "replicate_and_pack", "ms", greedy)


# ------------------------------------------------------------------------------------------------- 2


def _lp(counts, placement, layer):
    """The busiest GPU's load under the best fractional split, by HiGHS."""
    slots, n = placement.slot_expert[layer], placement.num_slots
    equal, above = np.zeros((len(counts), n + 1)), np.zeros((placement.num_gpus, n + 1))
    equal[slots, np.arange(n)] = 1
    above[placement.slot_gpu, np.arange(n)] = 1
    above[:, n] = -1
    return linprog(np.append(np.zeros(n), 1), above, np.zeros(placement.num_gpus), equal, counts).fun


def _split(record, traces):
    for name, trace in traces.items():
        half = trace.num_tokens // 2
        for slots in (72, 80):
            plan = place(trace.counts(0, half), num_gpus=8, num_slots=slots)
            for size in (64, 512):
                batches = list(trace.batches(size, half))[:6]
                values, times = {"equal_split": [], "split_batch": [], "LP": []}, []
                over, behind, gap = 0, 0, 0.0
                for batch in batches:
                    for layer in range(0, trace.num_layers, 2):
                        counts = batch[layer]
                        split_batch(counts, plan, layer)
                        start = time.thread_time()
                        tokens = split_batch(counts, plan, layer)
                        times.append(time.thread_time() - start)
                        peak = int(gpu_tokens(tokens, plan).max())
                        equal = int(gpu_tokens(baselines.equal_split(counts, plan, layer), plan).max())
                        best, mean = _lp(counts, plan, layer), counts.sum() / 8
                        values["split_batch"].append(mean / peak)
                        values["equal_split"].append(mean / equal)
                        values["LP"].append(mean / best)
                        over += peak > np.ceil(best - 1e-6) or split_bound(counts, plan, layer)[0] != peak
                        behind += peak > equal
                        gap = max(gap, (peak - 1) / best - 1)  # beyond what whole tokens cost
                case = {"routing": name, "gpus": 8, "slots": slots, "batch": size, "batches x layers": len(times)}
                for impl, v in values.items():
                    record.add(2, case, impl, "balancedness, mean", np.mean(v))
                loss = 1 - np.mean(values["split_batch"]) / np.mean(values["LP"])
                record.add(
                    2,
                    case,
                    "split_batch",
                    "mean loss to the fractional LP",
                    loss,
                    at_most=0.005,
                    note="all of it is the cost of whole tokens: no whole-token split is better (next row)",
                )
                record.add(2, case, "split_batch", "splits above the LP rounded up to a token", over, at_most=0)
                record.add(2, case, "split_batch", "splits worse than equal", behind, at_most=0)
                record.add(2, case, "split_batch", "ms, median", 1e3 * np.median(times), at_most=1.0)


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
        case = {"shift": name, "gpus": gpus, "slots": slots}
        record.add(3, case, "no move", "balancedness, median", np.median(balancedness(plan.gpu_load_of(new))))
        before = baselines.replicate_and_pack(old, num_gpus=gpus, num_slots=slots)
        after = baselines.replicate_and_pack(new, num_gpus=gpus, num_slots=slots)
        record.add(3, case, "replicate_and_pack", "moved copies per layer, median", _moved(before, after))
        for target, most in ((0.95, 30), (0.99, 50)):
            start = time.thread_time()
            result, moves = rebalance(plan, new, target=target)
            ms = 1e3 * (time.thread_time() - start)
            count = np.bincount([m.layer for m in moves], minlength=plan.num_layers)
            record.add(
                3, case, f"rebalance to {target}", "balancedness, min", result.balancedness.min(), at_least=target
            )
            record.add(
                3, case, f"rebalance to {target}", "moved copies per layer, median", np.median(count), at_most=most
            )
            record.add(3, case, f"rebalance to {target}", "moved copies per layer, max", count.max(), at_most=most)
            record.add(3, case, f"rebalance to {target}", "ms, all layers", ms)
    noise = load * (1 + 0.001 * np.random.default_rng(0).standard_normal(load.shape))
    plan, case = place(load, num_gpus=32, num_slots=288), {"shift": "0.1 % noise", "gpus": 32, "slots": 288}
    record.add(3, case, "rebalance", "moved copies", len(rebalance(plan, noise)[1]), at_most=0)
    greedy = [baselines.replicate_and_pack(x, num_gpus=32, num_slots=288) for x in (load, noise)]
    record.add(3, case, "replicate_and_pack", "moved copies per layer, median", _moved(*greedy))
    shifted = shift_load(load)
    cost = 0.01 * load.sum(axis=1).mean() / 32
    result, moves = rebalance(plan, shifted, move_cost=cost)
    count = np.bincount([m.layer for m in moves], minlength=58)
    gain = plan.gpu_load_of(shifted).max(axis=1) - result.gpu_load.max(axis=1) - cost * count
    case = {"shift": "exp(0.5 N), a move costs 1 % of the mean GPU load", "gpus": 32, "slots": 288}
    record.add(3, case, "rebalance", "layers whose moves do not pay", int((gain[count > 0] <= 0).sum()), at_most=0)
    record.add(3, case, "rebalance", "moved copies per layer, median", np.median(count))
    record.add(3, case, "rebalance", "balancedness, median", np.median(result.balancedness))


def _moved(old, new):
    """Median over layers of the copies a GPU gains that it did not hold."""
    gpus = np.split(np.arange(old.num_slots), np.flatnonzero(np.diff(old.slot_gpu)) + 1)
    return np.median(
        [sum(len(s) - len(np.intersect1d(b[s], a[s])) for s in gpus) for a, b in zip(old.slot_expert, new.slot_expert)]
    )


# ------------------------------------------------------------------------------------------------- 5


def _requests(kind, n=1000, workers=64, seed=0):
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
        requests, workers = _requests(kind)
        case = {"requests": 1000, "workers": 64, "traffic": kind}
        problem = Problem(requests, workers, topology)
        plan = plan_batch(requests, workers, topology)
        least = np.argsort(problem.load, kind="stable")
        rivals = {"round_robin": np.arange(1000) % 64, "least_loaded": _least_loaded(problem, least)}
        for name, worker in rivals.items():
            record.add(5, case, name, "step / lower bound", problem.evaluate(worker)[0].max() / plan.lower_bound_s)
        record.add(
            5,
            case,
            "plan_batch",
            "step / lower bound",
            1 + plan.gap,
            at_most=1.02,
            note="the bound lets groups share the same empty workers and every moved cache take the fastest link"
            if kind == "mixed"
            else None,
        )
        record.add(5, case, "plan_batch", "ms", _best_ms(plan_batch, requests, workers, topology), at_most=5.0)
        used = problem.evaluate(plan.worker)[1]
        record.add(5, case, "plan_batch", "workers over memory", int((used > problem.free).sum()), at_most=0)
        if kind == "shared prefixes":
            hot = problem.prefix == 0
            record.add(
                5, case, "plan_batch", "workers that share the hottest prefix", len(set(plan.worker[hot].tolist()))
            )
        record.add(5, case, "plan_batch", "KV caches that move", len(plan.moved))

    different, solved, times = 0, 0, []
    rng = np.random.default_rng(1)
    for _ in range(100):
        requests, workers = _small(rng)
        start = time.thread_time()
        plan = plan_batch(requests, workers, Topology(2, 2))
        times.append(time.thread_time() - start)
        best = _milp(requests, workers, Topology(2, 2))
        if best is not None:
            solved += 1
            different += not np.isclose(plan.step_s, best, rtol=1e-6, atol=0) or bool(plan.deferred)
    case = {"requests": "1-7", "workers": "1-3", "traffic": "mixed, memory tight"}
    record.add(5, case, "HiGHS", "problems solved by the mixed-integer program", solved)
    record.add(5, case, "plan_batch", "problems with another optimum", different, at_most=0)
    record.add(5, case, "plan_batch", "ms, median", 1e3 * np.median(times))


def _least_loaded(problem, _):
    """Requests in order, each to the worker that is least loaded when it arrives, blind to caches."""
    time_, worker = problem.load.copy(), np.empty(len(problem.tokens), np.int64)
    for r, tokens in enumerate(problem.tokens):
        worker[r] = time_.argmin()
        time_[worker[r]] += tokens * problem.token_s[worker[r]]
    return worker


def _small(rng):
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


def _milp(requests, workers, topology):
    """The optimal step by HiGHS, None if memory does not suffice: x[r, w], y[g, w] (prefix computed there), T."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    p = Problem(requests, workers, topology)
    cost, need = p.cost_matrix()
    n, w, g = *cost.shape, len(p.prefix_tokens)
    x, y = np.arange(n * w).reshape(n, w), n * w + np.arange(g * w).reshape(g, w)
    size = n * w + g * w + 1
    rows, low, high = [], [], []

    def add(index, value, lo, hi):
        row = np.zeros(size)
        row[index] = value
        rows.append(row)
        low.append(lo)
        high.append(hi)

    for r in range(n):
        add(x[r], 1, 1, 1)
        if p.prefix[r] >= 0:
            for k in range(w):
                add([x[r, k], y[p.prefix[r], k]], [1, -1], -np.inf, 0)
    for k in range(w):
        new = np.flatnonzero(~p.cached[:, k])
        seconds = np.concatenate([cost[:, k], p.prefix_tokens[new] * p.token_s[k], [-1]])
        add(np.concatenate([x[:, k], y[new, k], [size - 1]]), seconds, -np.inf, -p.load[k])
        add(
            np.concatenate([x[:, k], y[new, k]]), np.concatenate([need[:, k], p.prefix_tokens[new]]), -np.inf, p.free[k]
        )
    objective = np.zeros(size)
    objective[-1] = 1
    result = milp(
        objective,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.append(np.ones(size - 1), 0),
        bounds=Bounds(0, np.append(np.ones(size - 1), np.inf)),
        options={"mip_rel_gap": 0},
    )
    return result.fun if result.status == 0 else None


# ------------------------------------------------------------------------------------------------- 6 and 7


def _dispatch(record, traces):
    from .demo import layer_rank
    from .launch import run_ranks

    settings = {
        "dim": 256,
        "hidden": 128,
        "experts": 64,
        "top_k": 6,
        "layers": 4,
        "tokens": 128,
        "steps": 3,
        "slots_per_gpu": None,
        "trace": None,
        "timeout_s": 60,
    }
    for ranks in (1, 2, 4, 7):
        report = run_ranks(layer_rank, ranks, settings, timeout_s=300)[0]
        case = {"ranks": ranks, "experts": 64, "top_k": 6, "width": "256 -> 128", "device": "cpu, gloo"}
        record.add(
            6,
            case,
            "moe_forward",
            "outputs that differ from one process, largest difference",
            0.0 if report["identical"] else max(report["max_error"], 1e-9),
            at_most=0,
        )
        mean = sum(report["after"]["rank_tokens"]) / ranks
        record.add(
            6,
            case,
            "equal split, experts in order",
            "rows on the critical path / mean",
            report["before"]["critical_rows"] / mean,
        )
        record.add(
            6, case, "place + split_batch", "rows on the critical path / mean", report["after"]["critical_rows"] / mean
        )


def _survival(record, traces):
    from .demo import survive_demo

    for how, most in (("kill", 1.0), ("freeze", 4.0)):
        report = survive_demo(how=how, timeout_s=3.0)
        case = {"ranks": 4, "lost": f"1, by {how}, mid-step", "timeout, s": 3.0}
        record.add(
            7, case, "runtime", "s until the last survivor noticed", max(report["noticed_s"].values()), at_most=most
        )
        record.add(7, case, "runtime", "s until serving again", report["resumed_s"])
        record.add(7, case, "runtime", "requests not finished", report["jobs"] - report["finished"], at_most=0)
        record.add(7, case, "runtime", "outputs other than undisturbed", 0 if report["identical"] else 1, at_most=0)
        record.add(7, case, "runtime", "expert copies reloaded from storage", report["from_storage"])


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
    for name, trace in longer.items():
        for mode, load in loads.items():
            results = simulator.four_way(
                trace,
                topology=Topology(1, 8),
                model=simulator.MODELS["v2-lite"],
                num_slots=80,
                load=load,
                max_batches=4,
            )
            base = results["neither"]
            case = {"routing": name, "model": "DeepSeek-V2-Lite", "gpus": 8, "slots": 80, "step": mode}
            for impl, r in results.items():
                record.add(8, case, impl, "throughput, neither = 1", base.step_s / r.step_s)
            both = base.step_s / results["both"].step_s
            product = base.step_s**2 / results["kernel"].step_s / results["scheduler"].step_s
            record.add(8, case, "both", "throughput / product of the single gains", both / product)
            if mode.startswith("chunked prefill, prompts of 16"):
                worst = int(base.layer_utilisation.min(axis=1).argmin())
                for impl in ("neither", "both"):
                    use = results[impl].layer_utilisation[worst]
                    record.add(
                        8,
                        case,
                        impl,
                        f"lowest utilisation in layer {worst}, busiest = 1",
                        use.min(),
                        at_least=0.9 if impl == "both" else None,
                    )
                    record.add(8, case, impl, "balancedness, all layers", results[impl].balancedness)
    load = r1_like_load(num_layers=4)
    start = time.perf_counter()
    plan = place(load, num_gpus=4096, num_slots=8192, num_nodes=512)
    rng = np.random.default_rng(0)
    counts = [np.stack([rng.multinomial(4096 * 64 * 8, row / row.sum()) for row in load])]
    result = simulator.simulate(
        counts, plan, topology=Topology(512, 8), model=simulator.MODELS["r1"], load=simulator.decode_load(4096 * 64)
    )
    case = {"load": "R1-like (generated)", "layers": 4, "gpus": 4096, "slots": 8192, "nodes": 512}
    record.add(8, case, "place + simulate", "s", time.perf_counter() - start, at_most=30.0)
    record.add(8, case, "place + simulate", "balancedness", result.balancedness)
