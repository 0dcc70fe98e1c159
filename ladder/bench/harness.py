"""The loop that every benchmark runs: time, check, keep, record."""

import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ladder.lab import results
from ladder.lab.cells import OURS
from ladder.lab.parity import Parity, poison
from ladder.lab.timing import Timing, measure

ROUNDS = 3


@dataclass
class Work:
    """What to run for one case: ``impls`` are functions of no arguments that return an output.

    ``oracle()`` makes the judge, whose ``check(out)`` returns a Parity; ``outs`` are the buffers that an implementation writes
    into, poisoned before it is checked. ``graph``: time it replayed from a CUDA graph. ``suffix``: what its rows add to the cell's name.
    """

    case: dict
    impls: dict
    oracle: Callable
    outs: dict = field(default_factory=dict)
    flops: float | None = None
    num_bytes: float | None = None
    graph: bool = False
    suffix: str = ""
    extra: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One comparison. ``build(device, peers)`` returns a list of Work; ``peers`` False: only what this repository compiles."""

    section: str
    name: str
    build: Callable


class Bench:
    """Collects rows; knows the device, the limits and the time left."""

    def __init__(self, device, deadline, quick=False):
        self.device, self.deadline, self.rows, self.failures = device, deadline, [], []
        self.budget = 40 if quick else 120
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self.sweep = torch.zeros(l2 // 2, dtype=torch.float32, device=device)

    def guard(self, what, fn, *args):
        """Run fn; on an exception note it and go on. Skips everything once the deadline has passed."""
        if time.time() > self.deadline:
            self.failures.append({"what": what, "error": "not run: out of time"})
            return None
        try:
            return fn(*args)
        except Exception as error:  # a compile error, out of memory, an assertion: all are results
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.failures.append({"what": what, "error": f"{type(error).__name__}: {error}"[:400], "at": f"{Path(last.filename).name}:{last.lineno}"})
            print(f"  FAILED {what}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            return None

    def events(self, fn, args=()):
        return measure(fn, [args], device=self.device, budget_ms=self.budget, max_runs=60)

    def graph(self, fn, runs=25):
        """Timing of ``fn()`` replayed from a CUDA graph, L2 filled with other data before each replay; leaves one replay's output."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                fn()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        for _ in range(2):
            graph.replay()
        events = []
        for _ in range(runs):
            self.sweep.sum()  # reads: dirty lines would be written back during the replay
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        samples = sorted(a.elapsed_time(b) for a, b in events)
        return Timing(samples[runs // 2], samples[runs // 5], samples[-1 - runs // 5], runs)

    def add(self, *args, **kwargs):
        entry = results.row(*args, **kwargs)
        self.rows.append(entry)
        speed = f"{entry['tflops']:8.1f} TFLOP/s" if "tflops" in entry else ""
        speed += f"{entry['tbs']:8.3f} TB/s" if "tbs" in entry else ""
        ok = {True: "ok", False: "WRONG " + entry.get("reason", ""), None: ""}[entry.get("ok")]
        ms = f"{entry['ms']['median']:9.4f} ms" if "ms" in entry else ""
        extra = {k: v for k, v in entry.items() if k in ("config", "num_kv_splits", "ms_eager")}
        print(f"  {entry['impl']:16} {ms} {speed} {ok} {extra or ''}", flush=True)
        return entry


class DryRun(Bench):
    """Runs everything once and times nothing: compiles what a Bench will launch."""

    def __init__(self, device):
        super().__init__(device, time.time() + 120)

    def events(self, fn, args=()):
        fn(*args)
        return Timing(1.0, 1.0, 1.0, 1)

    def graph(self, fn, runs=1):
        return self.events(fn)


class Measure(Bench):
    """``Bench`` for a GPU or, in a dry run, for any device: rounds in turn, and a check on both sides of them."""

    def __init__(self, device, stop_at, *, dry=False, only_impls=None):
        self.dry, self.only_impls, self.stop_at = dry, only_impls, stop_at
        if device.type == "cuda":
            super().__init__(device, math.inf)  # time runs out between cells, never within one
        else:
            self.device, self.deadline, self.rows, self.failures = device, math.inf, [], []
        self.budget = 25

    def events(self, fn, args=()):
        if self.dry:
            return measure(fn, [args], device=self.device, budget_ms=0.01, min_runs=1, max_runs=1)
        return measure(fn, [args], device=self.device, budget_ms=self.budget, min_runs=2, max_runs=40)

    def graph(self, fn, runs=25):
        return super().graph(fn, runs) if self.device.type == "cuda" else self.events(fn)

    def work(self, work, name):
        """Check, measure in rounds, check again; one row an implementation."""
        print(f"{name}", flush=True)
        impls = {n: fn for n, fn in work.impls.items() if n == OURS or self.only_impls is None or n in self.only_impls}
        oracle = work.oracle()

        def check(impl):
            if impl in work.outs:
                poison(work.outs[impl])
            return oracle.check(impls[impl]().contiguous())

        before = {impl: self.guard(f"{impl} {name}", check, impl) for impl in impls}
        timed = {impl: [] for impl in impls if before[impl] is not None}
        clocks = dict.fromkeys(timed, self.graph if work.graph else self.events)
        for turn in range(1 if self.dry else ROUNDS):
            order = list(timed)
            first = turn % max(1, len(order))
            for impl in order[first:] + order[:first]:  # another one first in every round
                timing = self.guard(f"{impl} {name}", clocks[impl], impls[impl])
                if timing is None and work.graph and clocks[impl] != self.events:  # what cannot be captured is timed launch by launch
                    clocks[impl], timed[impl] = self.events, []
                    timing = self.guard(f"{impl} {name}, without a graph", self.events, impls[impl])
                if timing is None:
                    timed.pop(impl)
                else:
                    timed[impl].append(timing)
        for impl, timings in timed.items():
            after = self.guard(f"{impl} {name}, after timing", check, impl)
            if after is None:
                after = Parity(False, math.inf, oracle.budget, "raised after it was timed")
            middle = sorted(timings, key=lambda t: t.median)[len(timings) // 2]
            spread = Timing(middle.median, min(t.p20 for t in timings), max(t.p80 for t in timings), sum(t.runs for t in timings))
            self.add(
                work.case, impl, timing=spread, flops=work.flops, num_bytes=work.num_bytes, parity=after if before[impl] else before[impl],
                cell=name, timed="graph" if clocks[impl] == self.graph else "events", **work.extra,
            )  # fmt: skip
