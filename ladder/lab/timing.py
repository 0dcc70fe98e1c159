"""How long does it take: CUDA-event medians with rotating inputs and a flushed L2, wall time on a CPU."""

import statistics
import time
from dataclasses import dataclass

import torch

HEAD_START_CYCLES = 600_000  # ~0.3 ms in which the CPU gets ahead, so that a short kernel's time holds no launch gap


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, 20th and 80th percentile of ``runs`` calls."""

    median: float
    p20: float
    p80: float
    runs: int

    def as_dict(self):
        return {"median": round(self.median, 6), "p20": round(self.p20, 6), "p80": round(self.p80, 6)}


def measure(fn, inputs, *, device, budget_ms=300.0, min_runs=3, max_runs=200, flush=True):
    """Time ``fn(*args)``.

    Args:
        fn: the function; its result is dropped.
        inputs: list of argument tuples; successive calls rotate through them, so that no call finds its data cached.
        device: torch.device that the work runs on.
        budget_ms: stop once the timed calls took this long.
        min_runs, max_runs: bounds on the number of timed calls.
        flush: fill the L2 cache with other data before each call (CUDA); right for whatever starts from device memory.
            It is filled by reading: what a write left there would be written back during the call, at its cost.

    Returns:
        Timing. Compilation and the first call are outside it.
    """
    if not inputs:
        raise ValueError("inputs is empty; want at least one tuple of arguments")
    device = torch.device(device)
    clock = _cuda_clock if device.type == "cuda" else _wall_clock
    samples = clock(fn, inputs, device, budget_ms, min_runs, max_runs, flush)
    cuts = statistics.quantiles(samples, n=5, method="inclusive") if len(samples) > 1 else samples * 4
    return Timing(statistics.median(samples), cuts[0], cuts[-1], len(samples))


def replayed(fn, device, *, runs=25):
    """Timing of ``fn()`` replayed from a CUDA graph, the L2 cache filled with other data before each replay.

    A server replays its decode step so, and no time of the host is in it. ``fn`` runs twice before it is captured; what
    it writes is what the last replay wrote.
    """
    with torch.cuda.device(device):
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
        sweep = torch.zeros(torch.cuda.get_device_properties(device).L2_cache_size // 2, device=device)
        events = []
        for _ in range(runs):
            sweep.sum()  # it reads: what a write leaves in the cache would be written back during the replay
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
    samples = sorted(begin.elapsed_time(end) for begin, end in events)
    return Timing(samples[runs // 2], samples[runs // 5], samples[-1 - runs // 5], runs)


def _wall_clock(fn, inputs, device, budget_ms, min_runs, max_runs, flush):
    start = time.perf_counter()
    fn(*inputs[0])
    first = (time.perf_counter() - start) * 1e3
    if first > 10 * budget_ms:  # the interpreter: one call says all there is to say
        return [first]
    samples = []
    while len(samples) < min_runs or (sum(samples) < budget_ms and len(samples) < max_runs):
        args = inputs[len(samples) % len(inputs)]
        start = time.perf_counter()
        fn(*args)
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def _cuda_clock(fn, inputs, device, budget_ms, min_runs, max_runs, flush):
    with torch.cuda.device(device):
        fn(*inputs[0])
        torch.cuda.synchronize()
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        sweep = torch.zeros(l2_bytes // 2 if flush else 1, dtype=torch.float32, device=device)

        def run(count):
            events = []
            for i in range(count):
                torch.cuda._sleep(HEAD_START_CYCLES)
                sweep.sum()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                fn(*inputs[i % len(inputs)])
                end.record()
                events.append((begin, end))
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in events]

        first = run(min_runs)
        if sum(first) >= budget_ms:  # so long that more runs would say the same
            return first
        count = int(min(max_runs, max(min_runs, budget_ms / max(statistics.median(first), 1e-3))))
        return run(count)
