"""The one loop and the one command of the benchmarks: compile ahead, check, time in rounds, check again, record.

A benchmark is a ``Suite``: its cells, its targets and its own options. All implementations of a cell are measured in
turn, round after round, in one process, so that a clock that drifts meets them all. A cell that fails is recorded with
its error and does not stop the others. The file is written after every cell: a run that is stopped says so
(``"complete": false`` and what was not run).
"""

import argparse
import contextlib
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ladder.lab import results
from ladder.lab.parity import Parity, poison
from ladder.lab.peers import PEERS
from ladder.lab.roofline import measure_limits
from ladder.lab.timing import Timing, measure, replayed

ROUNDS = 3


@dataclass
class Work:
    """What to run for one case: ``impls`` are functions of no arguments that return an output.

    Args:
        oracle: makes the judge, whose ``check(out)`` returns a Parity, or None where there is nothing to compare with.
        outs: the buffers that an implementation writes into; they are poisoned before it is checked.
        flops, num_bytes: of the case; or {implementation: number} where they differ.
        graph: time a replay from a CUDA graph; ``eager`` also records the time of plain launches.
        suffix: what its rows add to the cell's name. extra: fields of
        every row. about(name, fn): fields of one implementation's row.
    """

    case: dict
    impls: dict
    oracle: Callable = lambda: None
    outs: dict = field(default_factory=dict)
    flops: float | dict | None = None
    num_bytes: float | dict | None = None
    graph: bool = False
    suffix: str = ""
    extra: dict = field(default_factory=dict)
    about: Callable = lambda name, fn: {}
    eager: bool = False
    rounds: int = ROUNDS


@dataclass(frozen=True)
class Cell:
    """One comparison. ``build(device, peers)`` returns a list of Work; ``peers`` False: only what this repository
    compiles. A cell that is no timing has ``run(bench)`` instead, which adds rows itself.
    """

    section: str
    name: str
    build: Callable = lambda device, peers: []
    run: Callable | None = None


@dataclass(frozen=True)
class Suite:
    """One benchmark.

    Args:
        name, doc: of its module. json, minutes: defaults of its options.
        sections: what --only chooses from. cells(args): every cell, in the order in which a run cut short should have
        measured them. targets(rows, limits): [{"what", "value", "want", "ok"}] to record beside the rows.
        summary(rows): lines to print at the end. options(parser): adds the suite's own options. why_not(): why it
            cannot run on this machine's GPU, or None.
        impls: names of this suite's own; --peers chooses among those behind the first, and among the peers, and leaves
            out none of the others. dry: whether --dry is offered.
        strict: whether a failure, or a wrong answer, makes the exit code 1.
    """

    name: str
    doc: str
    json: str
    minutes: float
    sections: tuple
    cells: Callable
    targets: Callable | None = None
    summary: Callable = lambda rows: []
    options: Callable = lambda parser: None
    why_not: Callable = lambda: None
    impls: tuple = ()
    dry: bool = False
    strict: bool = False


class Bench:
    """Collects rows; ``dry`` runs everything about once, on any device. ``left_out``: names that are not measured."""

    def __init__(self, device, *, dry=False, left_out=()):
        self.device, self.dry, self.left_out, self.rows, self.failures = device, dry, left_out, [], []

    def guard(self, what, fn, *args):
        """Run fn; note an exception and go on."""
        try:
            return fn(*args)
        except Exception as error:  # a compile error, out of memory, an assertion: all are results
            last = traceback.extract_tb(error.__traceback__)[-1]
            said = {
                "error": f"{type(error).__name__}: {error}"[:400],
                "at": f"{Path(last.filename).name}:{last.lineno}",
            }
            self.failures.append({"what": what, **said})
            print(f"  FAILED {what}: {said['error'][:200]}", flush=True)
            return None

    def events(self, fn):
        """Timing of ``fn()`` between CUDA events, or by the wall clock on a CPU."""
        limits = (
            dict(budget_ms=0.01, min_runs=1, max_runs=1) if self.dry else dict(budget_ms=25, min_runs=2, max_runs=40)
        )
        return measure(fn, [()], device=self.device, **limits)

    def graph(self, fn):
        """Timing of ``fn()`` replayed from a CUDA graph; leaves one replay's output. On a CPU it is ``events``."""
        return replayed(fn, self.device) if self.device.type == "cuda" else self.events(fn)

    def add(self, *args, **kwargs):
        """Append a row (arguments of ``results.row``) and print it."""
        entry = results.row(*args, **kwargs)
        self.rows.append(entry)
        words = [
            f"{entry[name]:8.{digits}f} {unit}"
            for name, digits, unit in (("tflops", 1, "TFLOP/s"), ("tbs", 3, "TB/s"))
            if name in entry
        ]
        words = [f"{entry['ms']['median']:9.4f} ms", *words] if "ms" in entry else words
        words += [{True: "ok", False: f"WRONG {entry.get('reason', '')}"}[entry["ok"]]] if "ok" in entry else []
        shown = {
            k: v
            for k, v in entry.items()
            if k in ("config", "num_kv_splits", "ms_eager", "launches", "kept", "peak_bytes")
        }
        print(f"  {entry['impl']:16} {' '.join(words)} {shown or ''}", flush=True)
        return entry

    def work(self, work, name):
        """Check, measure in rounds, check again; one row an implementation."""
        print(name, flush=True)
        impls = {n: fn for n, fn in work.impls.items() if n not in self.left_out}
        oracle = work.oracle()

        def check(impl):
            poison(*work.outs.get(impl, ()))
            out = impls[impl]()
            if oracle is None:
                return Parity(True, 0.0, 0.0)
            return oracle.check(out.contiguous() if isinstance(out, torch.Tensor) else out)

        before = {impl: self.guard(f"{impl} {name}", check, impl) for impl in impls}
        timed = {impl: [] for impl in impls if before[impl] is not None}
        clocks = dict.fromkeys(timed, self.graph if work.graph else self.events)
        for turn in range(1 if self.dry else work.rounds):
            order = list(timed)
            first = turn % max(1, len(order))
            for impl in order[first:] + order[:first]:  # another one first in every round
                timing = self.guard(f"{impl} {name}", clocks[impl], impls[impl])
                # what cannot be captured is timed by launches
                if timing is None and work.graph and clocks[impl] != self.events:
                    clocks[impl], timed[impl] = self.events, []
                    timing = self.guard(f"{impl} {name}, without a graph", self.events, impls[impl])
                if timing is None:
                    timed.pop(impl)
                else:
                    timed[impl].append(timing)
        for impl, timings in timed.items():
            after = self.guard(f"{impl} {name}, after timing", check, impl)
            if after is None:
                after = Parity(False, math.inf, oracle.budget if oracle else 0.0, "raised after it was timed")
            parity = after if before[impl] else before[impl]
            self._record(
                work, impl, name, timings, parity if oracle or not parity else None, clocks[impl] == self.graph
            )

    def _record(self, work, impl, name, timings, parity, replayed):
        """The row of an implementation that was timed."""
        middle = sorted(timings, key=lambda t: t.median)[len(timings) // 2]
        spread = Timing(
            middle.median, min(t.p20 for t in timings), max(t.p80 for t in timings), sum(t.runs for t in timings)
        )
        flops, num_bytes = (x.get(impl) if isinstance(x, dict) else x for x in (work.flops, work.num_bytes))
        more = {**work.extra, **(self.guard(f"{impl} {name}", work.about, impl, work.impls[impl]) or {})}
        if work.eager:
            more["ms_eager"] = round(self.events(work.impls[impl]).median, 6)
        self.add(work.case, impl, timing=spread, flops=flops, num_bytes=num_bytes, parity=parity, cell=name,
                 timed="graph" if replayed else "events", **more)  # fmt: skip


def run_cell(bench, cell):
    """Measure one cell into ``bench.rows``."""
    if cell.run:
        cell.run(bench)
    for work in cell.build(bench.device, True):
        bench.guard(cell.name, bench.work, work, cell.name + work.suffix)
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


# Compiling ahead: several processes, all at once, so that the measuring process finds every kernel in the cache


def warm(cells, share, shares):
    """Run every ``shares``-th implementation once, from ``share`` on; says nothing, the measuring process will."""
    device, number = torch.device("cuda" if torch.cuda.is_available() else "cpu"), itertools.count()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for cell in cells:
            with contextlib.suppress(Exception):
                for work in cell.build(device, False):
                    for run in work.impls.values():
                        if next(number) % shares == share:
                            with contextlib.suppress(Exception):
                                run()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def warm_all(suite, argv, start):
    """Compile the suite's kernels in processes that each take a share."""
    workers = min(14, max(1, (os.cpu_count() or 2) - 2))
    command = [sys.executable, "-m", "ladder.bench", suite.name, *argv, "--warm"]
    for process in [subprocess.Popen([*command, str(i), str(workers)]) for i in range(workers)]:
        process.wait()
    print(f"compiled in {time.time() - start:.0f} s with {workers} processes", flush=True)


# The command


def parse(suite, argv):
    """(args, cells to run) of a command line; a bad one ends the process with a sentence that names the option."""
    parser = argparse.ArgumentParser(prog=f"python -m ladder.bench {suite.name}", description=suite.doc.splitlines()[0])
    parser.add_argument("--json", default=suite.json, help="file for the results, - for standard output")
    parser.add_argument("--only", default=",".join(suite.sections), help=f"some of {','.join(suite.sections)}")
    parser.add_argument("--cells", action="append", help="regular expression on the names of cells; may be given again")
    parser.add_argument("--peers", help="implementations to compare with, as fa3,sdpa_cudnn; default all that run here")
    parser.add_argument("--minutes", type=float, default=suite.minutes, help="start no new cell after this long")
    parser.add_argument(
        "--keep", action="store_true", help="keep rows of the file for cases that this run does not measure"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cells and stop")
    if suite.dry:
        what = "every cell at a thousandth of its length, on any device: a rehearsal, no result"
        parser.add_argument("--dry", action="store_true", help=what)
    parser.add_argument("--no-warm", action="store_true", help="do not compile ahead in other processes")
    parser.add_argument("--warm", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.set_defaults(dry=False)
    suite.options(parser)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.only.split(",") if name not in suite.sections]:
        parser.error(f"--only: {unknown[0]!r} is no section; want some of {', '.join(suite.sections)}")
    try:
        todo = chosen(suite.cells(args), args.only.split(","), args.cells)
    except re.error as error:
        parser.error(f"argument --cells: {error.pattern!r} is no regular expression: {error}")
    if not 0 <= args.minutes < math.inf:
        parser.error(f"argument --minutes: {args.minutes}; want a number of at least 0")
    known = {*suite.impls[:1], *_optional(suite)}
    if args.peers and (unknown := set(args.peers.split(",")) - known):
        parser.error(f"argument --peers: {sorted(unknown)[0]!r} is none; want some of {', '.join(sorted(known))}")
    if args.json != "-" and not Path(args.json).absolute().parent.is_dir():
        parser.error(f"argument --json: cannot write {args.json}; want a file in a folder that exists")
    if not todo:
        parser.error(f"--cells: nothing matches {args.cells}; --list prints the names")
    if not args.list and not args.dry and not torch.cuda.is_available():
        parser.error("needs a CUDA device" + ("; --dry rehearses on any" if suite.dry else ""))
    if not args.list and not args.dry and (reason := suite.why_not()):
        parser.error(reason)
    args.keep = args.keep and args.json != "-"
    if args.keep and not args.list:  # a file that cannot be added to is refused before anything is measured
        try:
            results.kept_rows(args.json, [], results.machine(_device()))
        except ValueError as error:
            parser.error(f"argument --json: {error}")
    return args, todo


def chosen(cells, only=None, patterns=None):
    """The cells of some sections whose names match one of the patterns."""
    return [
        cell for cell in cells
        if (only is None or cell.section in only) and (patterns is None or any(re.search(p, cell.name) for p in patterns))  # noqa: E501
    ]  # fmt: skip


def _device():
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@results.names_what_it_cannot_write
def main(suite, argv=None):
    """The command ``python -m ladder.bench NAME``; returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args, todo = parse(suite, argv)
    if args.list:
        print("\n".join(cell.name for cell in todo))
        return 0
    if args.warm:
        return warm(todo, *args.warm)
    start, device = time.time(), _device()
    if device.type == "cuda" and not args.no_warm:
        warm_all(suite, [x for x in argv if x != "--keep"], start)
    torch.manual_seed(0)
    limits = measure_limits(device, quick=args.dry)
    print(f"limits {limits.as_dict()}", flush=True)
    left_out = _optional(suite) - set(args.peers.split(",")) if args.peers else ()
    return Run(suite, args, todo, limits, Bench(device, dry=args.dry, left_out=left_out)).all(start + 60 * args.minutes)


def _optional(suite):
    """Names that --peers can leave out: a suite's own behind its first, and everybody else's."""
    return {*suite.impls[1:], "flex", *(peer.name for peer in PEERS)}


@dataclass
class Run:
    """The cells of one command, and the file that is written after each of them."""

    suite: Suite
    args: argparse.Namespace
    todo: list
    limits: object
    bench: Bench
    stopped: str | None = None

    def all(self, stop_at):
        """Run the cells; write whatever there is when stopped. Returns the exit code."""
        self.left, self.machine = list(self.todo), results.machine(self.bench.device)

        def interrupt(number, frame):
            raise KeyboardInterrupt(signal.Signals(number).name)

        before = signal.signal(signal.SIGTERM, interrupt)
        try:
            while self.left and not self.stopped:
                if time.time() > stop_at:
                    self.stopped = "out of time"
                    break
                begin = time.time()
                self.bench.guard(self.left[0].name, run_cell, self.bench, self.left[0])
                print(f"    {time.time() - begin:.1f} s", flush=True)
                del self.left[0]
                self.save()
        except KeyboardInterrupt as error:
            self.stopped = f"interrupted {error}".strip()
        finally:
            signal.signal(signal.SIGTERM, before)
        report(self.suite, self.save(last=True))
        failed = self.suite.strict and (self.bench.failures or any(row.get("ok") is False for row in self.bench.rows))
        return int(bool(failed or self.stopped and self.stopped.startswith("interrupted")))

    def save(self, last=False):
        """Write the document as it stands, to standard output only the ``last``; return it."""
        path, bench = self.args.json, self.bench
        kept = results.kept_rows(path, bench.rows, self.machine) if self.args.keep else []
        rows, not_run = bench.rows + kept, [cell.name for cell in self.left]
        if self.args.keep:
            not_run = results.still_not_run(path, not_run, [cell.name for cell in self.todo if cell not in self.left])
        more = {"must_reach": self.suite.targets(rows, self.limits)} if self.suite.targets else {}
        more |= {"dry": True} if bench.dry else {}
        more |= results.kept_note(path) if kept else {}
        more |= {"stopped": self.stopped} if self.stopped else {}
        complete = not not_run and self.stopped is None
        doc = results.document(rows, device=bench.device, limits=self.limits, complete=complete, not_run=not_run,
                               failures=bench.failures, **more)  # fmt: skip
        if not bench.rows and path != "-" and Path(path).exists():
            print(f"nothing was measured: {path} is left as it is")
        elif path != "-" or last:
            results.write(doc, path)
        return doc


def target(what, value, want, most=False):
    """[a line of ``must_reach``], or [] where there is no value; ``most`` marks an upper bound."""
    if value is None:
        return []
    ok = value <= want if most else value >= want
    return [{"what": what, "value": round(value, 4), "want": want, "ok": ok, **({"most": True} if most else {})}]


def report(suite, doc):
    """Print the summary, targets and failures of a results document."""
    for line in suite.summary(doc["rows"]):
        print(line)
    for e in doc.get("must_reach", ()):
        want = f"(want {'<=' if e.get('most') else '>='} {e['want']})"
        print(f"{'ok  ' if e['ok'] else 'MISS'} {e['value']:9.3f} {want} {e['what']}")
    for failure in doc["failures"]:
        print("failed:", failure)
    if not doc["complete"]:
        names = ", ".join(doc["not_run"])
        print(f"PARTIAL ({doc.get('stopped', 'not finished')}): {len(doc['not_run'])} cells not run: {names}")
