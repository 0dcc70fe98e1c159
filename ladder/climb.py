"""Climbing the ladder: every rung on one problem, checked against the oracle and the rung before, timed, tabulated."""

import functools
import sys
import warnings
from dataclasses import dataclass

import torch

from .lab import peers, results, timing
from .lab.memory import peak_bytes
from .lab.parity import Oracle, Parity, nan_allocations
from .lab.problem import MINILM, SHAPES, AttentionProblem

INPUT_COPIES = 3  # a timing loop rotates through this many input sets
RECORD_LENGTHS = (1024, 4096, 16384, 32768)
TOKENS = 16384  # published prefill cases keep B * S at this many tokens or more
MEMORY_LENGTHS = (1024, 2048, 4096, 8192, 65536)  # one sequence each, to see what grows with S and what with S^2


@dataclass(frozen=True)
class Step:
    """One line of the climb: a rung or a peer on one problem. ``skipped`` says why nothing was measured."""

    impl: str
    title: str
    row: dict
    is_rung: bool
    interpreted: bool = False
    skipped: str = ""

    @property
    def ok(self):
        return bool(self.row.get("ok", False)) or bool(self.skipped)


def problems(device, *, shapes=None, lengths=None, masks=(False, True), dtype=None, quick=False, record=False):
    """The problems of one climb.

    Args:
        device: torch.device. A CPU gets small lengths in float16, since Triton's interpreter runs there.
        shapes: names from ``lab.problem.SHAPES`` and "minilm"; None is the default choice.
        lengths: sequence lengths in tokens; None is the default choice.
        masks: which of dense (False) and causal (True).
        dtype: element type; None is bfloat16 on CUDA, float16 on a CPU.
        quick: the real input and one small synthetic problem.
        record: the published set.
    """
    on_gpu = device.type == "cuda"
    dtype = dtype or ("bfloat16" if on_gpu else "float16")
    minilm = MINILM if on_gpu else MINILM.replace(B=1)
    if record:
        chosen = [MINILM.replace(dtype=dtype)]
        for causal in (False, True):
            for length in RECORD_LENGTHS:
                chosen.append(_synthetic("plain", length, causal, dtype, batch=max(1, TOKENS // length)))
        chosen += [_synthetic(name, TOKENS, True, dtype) for name in ("qwen3-moe", "deepseek-v2-lite")]
        return chosen + [_synthetic("plain", length, False, dtype) for length in MEMORY_LENGTHS]
    if quick:
        small = _synthetic("plain", 1024 if on_gpu else 128, True, dtype)
        return [minilm.replace(dtype=dtype), small if on_gpu else small.replace(Hq=2, Hkv=2)]
    names = shapes or ["minilm", *SHAPES]
    lengths = lengths or ([4096] if on_gpu else [192])
    chosen = []
    for name in names:
        if name == "minilm":
            chosen += [minilm.replace(dtype=dtype, causal=causal) for causal in (masks if shapes else (False,))]
            continue
        for length in lengths:
            for causal in masks if (shapes or name == "plain") else (True,):
                problem = _synthetic(name, length, causal, dtype)
                if not on_gpu and not shapes:  # the default climb: the interpreter walks one program at a time
                    group = problem.Hq // problem.Hkv
                    problem = problem.replace(Hq=max(2, group), Hkv=max(1, 2 // group))
                chosen.append(problem)
    return chosen


def _synthetic(name, length, causal, dtype, batch=1):
    return AttentionProblem(B=batch, Sq=length, Sk=length, causal=causal, dtype=dtype, **SHAPES[name])


def climb(problem, rungs, device, *, with_peers=True, budget_ms=300.0, on_step=None):
    """Run every rung, then every importable peer, on one problem; all of one case come from one run.

    Args:
        problem: AttentionProblem. rungs: list of Rung. device: torch.device.
        with_peers: also measure the peers.
        budget_ms: time spent on timing each implementation.
        on_step: called with each Step as it is done.

    Returns:
        list of Step. A rung that lacks a feature, or runs out of memory, is skipped with its reason.
    """
    copies = INPUT_COPIES if device.type == "cuda" and problem.min_bytes < 4e9 else 1
    inputs = [problem.make(device, copy) for copy in range(copies)]
    oracle = Oracle(*inputs[0], causal=problem.causal, scale=problem.scale)
    setting = problem, inputs, oracle, device, budget_ms
    steps, previous = [], None
    for rung in rungs:
        skipped, out = rung.why_not(problem), None
        if skipped:
            steps.append(_skipped(problem, rung, skipped, True))
        else:
            step, out = _measure_rung(rung, previous, *setting)
            steps.append(step)
        previous = out if out is not None else previous
        if on_step:
            on_step(steps[-1])
    del previous, out
    for peer in peers.peers_for(problem, device) if with_peers else ():
        steps.append(_measure(peer, peer.build(problem), None, *setting, is_rung=False)[0])
        if on_step:
            on_step(steps[-1])
    return steps


def _measure_rung(rung, previous, problem, *setting):
    run = functools.partial(rung.attention, causal=problem.causal, scale=problem.scale)
    return _measure(
        rung, run, previous, problem, *setting, is_rung=True,
        with_lse=functools.partial(run, return_lse=True) if "lse" in rung.features else None,
        bytes_moved=int(rung.bytes_moved(problem)),
    )  # fmt: skip


def _measure(impl, run, previous, problem, inputs, oracle, device, budget_ms, *, is_rung, with_lse=None, **extra):
    """Check, time, check again. ``previous`` is the output of the rung before. Returns (Step, output)."""
    interpreted = is_rung and impl.needs_triton and device.type == "cpu"
    try:
        peak = peak_bytes(run, *inputs[0])
        with nan_allocations():  # an element that nobody writes stays NaN, and NaN is never within the budget
            out, lse = with_lse(*inputs[0]) if with_lse else (run(*inputs[0]), None)
        parity = oracle.check(out, lse)
        if parity.ok and previous is not None:
            agreement = oracle.agree(out, previous)
            parity = parity if agreement.ok else agreement
        once = dict(budget_ms=0.0, min_runs=1, max_runs=1)  # the time means nothing
        time = timing.measure(run, inputs, device=device, **(once if interpreted else dict(budget_ms=budget_ms)))
        again = oracle.check(run(*inputs[0]))
        if parity.ok and not again.ok:
            parity = Parity(False, again.max_error, again.budget, f"after timing: {again.reason}")
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return _skipped(problem, impl, "out of memory", is_rung), None
    except Exception as error:
        if is_rung:  # our own failures are failures; a peer's are its reason for having no number
            parity = Parity(False, float("inf"), oracle.budget, f"{type(error).__name__}: {error}")
            row = results.row(problem.case(), impl.name, parity=parity)
            return Step(impl.name, impl.title, row, True, interpreted), None
        first_line = (str(error).strip().splitlines() or [""])[0]
        return _skipped(problem, impl, f"{type(error).__name__}: {first_line}", False), None
    if interpreted:
        extra["interpreted"] = True
    row = results.row(
        problem.case(), impl.name, timing=time, flops=problem.flops, num_bytes=problem.min_bytes,
        peak_bytes=peak, parity=parity, **extra,
    )  # fmt: skip
    return Step(impl.name, impl.title, row, is_rung, interpreted), out


def _skipped(problem, impl, reason, is_rung):
    return Step(impl.name, impl.title, results.row(problem.case(), impl.name, skipped=reason), is_rung, skipped=reason)


def table(problem, steps, limits):
    """A rich Table of one problem's steps."""
    from rich.table import Table

    bound_ms, binding = limits.bound(problem.flops, problem.min_bytes)
    out = Table(
        title=f"[bold]{problem.label()}[/]   limit here: {_ms(bound_ms)} ({binding})",
        title_justify="left", caption_justify="left", header_style="bold", pad_edge=False,
    )  # fmt: skip
    for heading in ("", "parity", "error", "time", "TFLOP/s", "moved", "peak memory", "of limit"):
        out.add_column(heading, justify="left" if heading in ("", "parity") else "right", no_wrap=True)
    for step in steps:
        row, style = step.row, None if step.is_rung else "dim"
        if step.skipped:
            out.add_row(step.impl, "-", style="dim")
            continue
        parity = "[green]ok[/]" if row["ok"] else "[bold red]FAIL[/]"
        error = f"{row['max_error']:.1e}" if row.get("max_error") is not None else "-"
        if "ms" not in row:
            out.add_row(step.impl, parity, error, style=style)
            continue
        time = _ms(row["ms"]["median"])
        moved = _size(row["bytes_moved"]) if "bytes_moved" in row else ""
        share = bound_ms / row["ms"]["median"]  # far above 1 the machine was busy while its limits were measured
        of_limit = f"{share:.1%}" if share < 1.1 else "-"
        if step.interpreted:
            cells = (f"({time})", "-", moved, "-", "-")
        else:
            cells = (time, f"{row['tflops']:.3g}", moved, _size(row["peak_bytes"]), of_limit)
        out.add_row(step.impl, parity, error, *cells, style=style)
    notes = [f"{s.impl}: {s.row['reason']}" for s in steps if not s.skipped and s.row.get("reason")]
    for reason in dict.fromkeys(s.skipped for s in steps if s.skipped):
        notes.append(f"{', '.join(s.impl for s in steps if s.skipped == reason)}: {reason}")
    if any(step.interpreted for step in steps):
        notes.append("Times in parentheses come from Triton's interpreter on the CPU: they mean nothing.")
    out.caption = "\n".join(notes)
    return out


def _ms(value):
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.3g} ms" if value >= 1 else f"{value * 1000:.3g} us"


def _size(count):
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def quiet():
    """Silence warnings that say nothing about the result: a climb prints a table, not a log."""
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


def console(to_stderr):
    """A rich Console that does not squeeze the table when the output is a pipe."""
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 120, highlight=False)
