"""Climbing the ladder: every rung on one problem, checked against the oracle and the rung before, timed, tabulated."""

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
    steps, previous = [], None

    def record(step):
        steps.append(step)
        if on_step:
            on_step(step)

    for rung in rungs:
        skipped = rung.why_not(problem)
        step, out = Step(rung.name, rung.title, _skipped_row(problem, rung.name, skipped), True, skipped=skipped or ""), None
        if not skipped:
            options = dict(causal=problem.causal, scale=problem.scale)
            attention, lse = rung.attention, "lse" in rung.features

            def run(q, k, v, attention=attention, options=options):
                return attention(q, k, v, **options)

            def run_with_lse(q, k, v, attention=attention, options=options):
                return attention(q, k, v, return_lse=True, **options)

            step, out = _measure(
                problem, rung.name, rung.title, run, inputs, oracle, previous, device, budget_ms,
                with_lse=run_with_lse if lse else None,
                is_rung=True, interpreted=rung.needs_triton and device.type == "cpu",
                bytes_moved=rung.bytes_moved(problem),
            )  # fmt: skip
        previous = out if out is not None else previous
        record(step)
    del previous, out
    if with_peers:
        for peer in peers.peers_for(problem, device):
            step, _ = _measure(
                problem, peer.name, peer.title, peer.build(problem), inputs, oracle, None, device, budget_ms, is_rung=False
            )
            record(step)
    return steps


def _measure(
    problem, name, title, run, inputs, oracle, previous, device, budget_ms,
    *, is_rung, interpreted=False, with_lse=None, bytes_moved=None,
):  # fmt: skip
    """Check, time, check again. Returns (Step, output)."""
    extra = {"bytes_moved": int(bytes_moved)} if bytes_moved is not None else {}
    try:
        peak = peak_bytes(run, *inputs[0])
        with nan_allocations():  # an element that nobody writes stays NaN, and NaN is never within the budget
            out, lse = with_lse(*inputs[0]) if with_lse else (run(*inputs[0]), None)
        parity = oracle.check(out, lse)
        if parity.ok and previous is not None:
            agreement = oracle.agree(out, previous)
            parity = parity if agreement.ok else agreement
        if interpreted:
            time = timing.measure(run, inputs, device=device, budget_ms=0.0, min_runs=1, max_runs=1)
        else:
            time = timing.measure(run, inputs, device=device, budget_ms=budget_ms)
        again = oracle.check(run(*inputs[0]))
        if parity.ok and not again.ok:
            parity = Parity(False, again.max_error, again.budget, f"after timing: {again.reason}")
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        reason = "out of memory"
        return Step(name, title, _skipped_row(problem, name, reason), is_rung, skipped=reason), None
    except Exception as error:
        if is_rung:  # our own failures are failures; a peer's are its reason for having no number
            parity = Parity(False, float("inf"), oracle.budget, f"{type(error).__name__}: {error}")
            row = results.row(problem.case(), name, parity=parity)
            return Step(name, title, row, True, interpreted), None
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return Step(name, title, _skipped_row(problem, name, reason), False, skipped=reason), None
    if interpreted:
        extra["interpreted"] = True
    row = results.row(
        problem.case(), name, timing=time, flops=problem.flops, num_bytes=problem.min_bytes,
        peak_bytes=peak, parity=parity, **extra,
    )  # fmt: skip
    return Step(name, title, row, is_rung, interpreted), out


def _skipped_row(problem, name, reason):
    return results.row(problem.case(), name, skipped=reason) if reason else {}


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
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.3g} ms" if value >= 1 else f"{value * 1000:.3g} us"


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
