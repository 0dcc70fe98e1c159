"""Measure one rung beside the rung before it on this machine: ``python -m ladder.chapters.live_measure step05_fused``.

The live cell of a rung's chapter starts this program; ``live_process`` says how.
"""

import functools
import statistics

import torch

from ladder.chapters import live_process
from ladder.lab import results, timing
from ladder.lab.decode_problem import DecodeOracle, DecodeProblem
from ladder.lab.memory import peak_bytes
from ladder.lab.parity import Oracle, nan_allocations
from ladder.lab.problem import SHAPES, AttentionProblem
from ladder.lab.roofline import measure_limits
from ladder.rungs import RUNGS, find

TURNS = 3  # the two rungs are timed alternately, so that a clock that drifts meets both
BUDGET_MS = 60.0  # of one turn


def problems(rung):
    """Three or four bf16 problems of what ``rung`` can do; the plain ones are in the record too."""

    def prefill(shape, length, causal):
        return AttentionProblem(
            B=max(1, 16384 // length), **SHAPES[shape], Sq=length, Sk=length, causal=causal, dtype="bfloat16"
        )

    if rung.number < 4:
        return [prefill("plain", 1024, False), prefill("plain", 4096, False), prefill("plain", 4096, True)]
    if rung.number < 6:  # rung 03 knows no grouped heads: in chapter 04 it sits the last problem out
        return [*problems(find(1)), prefill("qwen3-moe", 4096, True)]
    chosen = [prefill("plain", 16384, True), DecodeProblem(B=8, context=4096), DecodeProblem(B=1, context=32768)]
    if "mla" in rung.features:
        chosen.append(DecodeProblem(B=16, Hq=16, Hkv=1, context=4096, D=576, Dv=512, latent=True, scale=192**-0.5))
    return chosen


def before(rung):
    """The rung below, or None."""
    return RUNGS[rung.number - 2] if rung.number > 1 else None


def why_not(rung, problem):
    """Why ``rung`` sits ``problem`` out, or None."""
    if not hasattr(problem, "q_len"):
        return rung.why_not(problem)
    if problem.latent and "mla" not in rung.features:
        return "MLA arrives with step07_dflash1"
    return None


def implementation(rung, problem):
    """``rung`` as a function of the tensors of ``arguments``."""
    options = dict(causal=problem.causal) if hasattr(problem, "causal") else {}
    options["scale"] = problem.scale
    if not hasattr(problem, "q_len"):
        return functools.partial(rung.attention, **options)
    if problem.latent:
        decode = rung.module.dflash2_mla_decode if "windows" in rung.features else rung.module.mla_decode
        return lambda q, k, v, table, lens: decode(q, k[:, :, 0], table, lens, head_dim_v=problem.Dv, **options)
    if "paged" in rung.features:
        return functools.partial(
            rung.module.dflash2_decode if "windows" in rung.features else rung.module.paged_decode, **options
        )
    # Without pages a server would keep K and V of each sequence in one piece.
    return lambda q, k, v: rung.attention(q, k, v, causal=True, **options)


def arguments(rung, problem, inputs):
    """The tensors that ``implementation(rung, problem)`` takes."""
    if hasattr(problem, "q_len") and "paged" not in rung.features:
        return inputs.q.transpose(1, 2), *inputs.contiguous()
    return tuple(inputs)


def compare(rung, problem, device, doing):
    """Result rows of the rung before and of ``rung`` on one problem: checked, timed in turns, checked again."""
    doing(f"{problem.label()}: inputs and the float64 answer")
    inputs = problem.make(device)
    decode = hasattr(problem, "q_len")
    if decode:
        oracle = DecodeOracle(inputs, scale=problem.scale)
    else:
        oracle = Oracle(*inputs, causal=problem.causal, scale=problem.scale)
    rows, calls, outputs = [], {}, {}
    for who in filter(None, (before(rung), rung)):
        doing(f"{problem.label()}: {who.name} against float64")
        reason = why_not(who, problem)
        need = None if reason else _bytes_needed(who, problem)
        if need and need > _free_bytes(device):
            reason = _does_not_fit(need)
        row = {"case": problem.case(), "impl": who.name}
        rows.append(row)
        if not reason:
            call, args = implementation(who, problem), arguments(who, problem, inputs)
            try:
                with nan_allocations():
                    out = call(*args)
                parity = oracle.check(_as_oracle(out, decode, who), None)
                row |= {
                    "ok": parity.ok, "max_error": parity.max_error, "budget": parity.budget, "reason": parity.reason
                }  # fmt: skip
                calls[who.name], outputs[who.name] = (call, args), _as_oracle(out, decode, who)
                row["peak_bytes"] = peak_bytes(call, *args)
                row["kernel"] = longest_kernel(call, args)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                calls.pop(who.name, None)
                reason = _does_not_fit(need)
        if reason:
            row["skipped"] = reason
    if len(outputs) == 2:
        old, new = outputs.values()
        distance = float(torch.nan_to_num((old.double() - new.double()).abs(), nan=float("inf")).max())
        rows[-1] |= {"distance": distance, "agrees": distance <= 2 * oracle.budget}
    doing(f"{problem.label()}: times, in turns")
    times = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, (call, args) in calls.items():
            if decode and device.type == "cuda":  # as a server runs it, and as it is recorded: without the host
                times[name].append(timing.replayed(functools.partial(call, *args), device))
            else:
                times[name].append(timing.measure(call, [args], device=device, budget_ms=BUDGET_MS))
    for row in rows:
        if row["impl"] not in calls:
            continue
        call, args = calls[row["impl"]]
        median = statistics.median(t.median for t in times[row["impl"]])
        time = next(t for t in times[row["impl"]] if t.median == median)
        row |= results.row({}, "", timing=time, flops=problem.flops, num_bytes=problem.min_bytes) | {
            "case": row["case"], "impl": row["impl"]
        }  # fmt: skip
        again = oracle.check(_as_oracle(call(*args), decode, find(row["impl"])), None)
        if row["ok"] and not again.ok:
            row |= {"ok": False, "reason": f"after timing: {again.reason}"}
    return rows


def _as_oracle(out, decode, rung):
    return out.transpose(1, 2) if decode and "paged" not in rung.features else out


def _bytes_needed(rung, problem):
    """Bytes that a call allocates: PyTorch rungs are traced on tensors without storage; kernels write their output."""
    if hasattr(problem, "q_len"):
        return 0
    p, dtype = problem, torch.bfloat16
    if rung.needs_triton:
        return p.B * p.Hq * p.Sq * p.Dv * p.itemsize
    shapes = (p.B, p.Hq, p.Sq, p.D), (p.B, p.Hkv, p.Sk, p.D), (p.B, p.Hkv, p.Sk, p.Dv)
    inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    return peak_bytes(implementation(rung, problem), *inputs)


def _free_bytes(device):
    """Bytes that this process may still allocate."""
    if device.type != "cuda":
        return float("inf")
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def _does_not_fit(need):
    return f"does not fit (needs {need / 1e9:.1f} GB more)" if need else "does not fit"


def longest_kernel(call, args):
    """Name of the kernel in which the GPU spends most of a call; None where the driver does not let a profiler look."""
    from torch.profiler import ProfilerActivity, profile

    if not args[0].is_cuda:
        return None
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call(*args)
            torch.cuda.synchronize()
        kernels = [e for e in seen.key_averages() if e.self_device_time_total > 0]
    except RuntimeError:
        return None
    return max(kernels, key=lambda e: e.self_device_time_total).key if kernels else None


def measure(name, doing, device="cuda"):
    """The document of one chapter's measurement; ``doing`` as ``live_process.serve`` says."""
    rung, device = find(name), torch.device(device)
    chosen = problems(rung)
    whole = len(chosen) + 1
    doing(0, whole, "the limits of this machine: a matrix product, and reading memory")
    limits = measure_limits(device, quick=True)
    rows = []
    for number, problem in enumerate(chosen, 1):
        torch.cuda.empty_cache()
        try:
            rows += compare(rung, problem, device, functools.partial(doing, number, whole))
        except torch.OutOfMemoryError:  # already the inputs or the float64 answer are too large
            reason = _does_not_fit(problem.min_bytes)
            rows += [
                {"case": problem.case(), "impl": who.name, "skipped": reason}
                for who in filter(None, (before(rung), rung))
            ]
    return results.document(rows, device=device, limits=limits)


if __name__ == "__main__":
    live_process.serve(measure, [rung.name for rung in RUNGS])
