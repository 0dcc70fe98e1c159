"""Run a batch under torch.profiler, follow its memory, and say what took the time."""

import gc
import importlib
import inspect
import math
import os
import re
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

ATTENTION = r"dflash|flash|fmha|attention|attn|sdpa|mla_"
COMMUNICATION = r"nccl|all_?reduce|all_?to_?all|all_?gather|reduce_?scatter|nvshmem|deep_?ep"
MOE = r"moe|expert|router|mixtureof"


class ProfileError(Exception):
    """What the user has to change, in words."""


@dataclass
class Found:
    """What a run showed. Times in ms of one batch, memory in bytes,
    shares 0 .. 1, None where nothing could be known."""

    device: str
    gpus: int
    steps: int
    step_ms: float
    work_ms: float  # kernel time, or operator time on a CPU
    attention_share: float
    communication_share: float
    busy_share: float | None
    dflash_names: list[str]
    attention_names: dict[str, float]  # name -> ms of one batch, largest first
    other_names: dict[str, float]
    memory: dict[str, float]
    memory_curve: list[tuple[float, int]]  # seconds since the first measured batch, bytes
    pools: list[dict] = field(default_factory=list)
    moe: bool | None = None
    moe_because: str = ""
    context: int | None = None
    context_because: str = ""


def load_step(name):
    """The function that runs one batch, of "package.module:callable". The working directory is on the path."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ProfileError(f"--module is {name!r}; want PACKAGE:CALLABLE, as in mypackage.serve:run_one_batch")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    value = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(value, part):
            there = ", ".join(sorted(_callables(value))[:8]) or "no functions"
            raise ProfileError(f"{module_name} has no {attribute}; it has {there}")
        value = getattr(value, part)
    if not callable(value):
        raise ProfileError(f"{name} is a {type(value).__name__}; want something to call")
    try:
        inspect.signature(value).bind()
    except TypeError as error:
        raise ProfileError(f"{name}: {error}; want a function that needs no argument") from error
    except ValueError:
        pass  # no signature: a builtin
    return value


def _callables(module):
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]


def measure(step, *, steps=3, warmup=2, attention=ATTENTION):
    """Run ``step`` so many times, and as often again under torch.profiler; returns ``Found``.

    A batch that returns a function is a loader: the function is the batch. Work is what runs on the GPU where there is
    one and it was used, else operators on the CPU. A kernel is attention when its own name matches ``attention``, or
    that of an operator or a ``torch.profiler.record_function`` range around its launch.
    """
    modules = set()

    def note(module, *_):
        modules.add(type(module).__name__)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        made = step()
        loaded = callable(made)
        step = made if loaded else step
        for _ in range(warmup - (not loaded)):
            step()
    finally:
        hook.remove()
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    walls = []
    with MemoryCurve(on_gpu) as curve:  # time and memory without the profiler, which takes both
        for _ in range(steps):
            start = time.perf_counter()
            step()
            if on_gpu:
                torch.cuda.synchronize()
            walls.append(time.perf_counter() - start)
    with torch.profiler.profile(activities=activities, record_shapes=True) as prof:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    found = summarise(prof.events(), steps=steps, wall=steps * statistics.median(walls), attention=attention)
    found.memory, found.memory_curve = curve.summary(), curve.points(60)
    found.pools = kv_pools()
    if modules:
        experts = sorted(name for name in modules if re.search(MOE, name, re.IGNORECASE))
        found.moe = bool(experts)
        found.moe_because = (
            f"modules {', '.join(experts[:3])}"
            if experts
            else f"none of its {len(modules)} kinds of module is named so"
        )
    return found


def summarise(events, *, steps, wall, attention=ATTENTION):
    """``Found`` of a profiler's events, memory and model apart. wall: seconds that the batches take without it."""
    is_attention = re.compile(attention, re.IGNORECASE).search
    is_communication = re.compile(COMMUNICATION, re.IGNORECASE).search
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not _annotation(e)]
    operators = [e for e in events if e.device_type == torch.autograd.DeviceType.CPU]
    times, sums = {}, {"attention": 0.0, "communication": 0.0, "all": 0.0}

    def add(name, us, inside):
        kind = "attention" if inside or is_attention(name) else "communication" if is_communication(name) else "other"
        sums["all"] += us
        if kind != "other":
            sums[kind] += us
        times.setdefault(kind, {}).setdefault(name, 0.0)
        times[kind][name] += us

    busy = None
    if kernels:
        inside = {}  # kernel name -> time launched under an operator or a range that is attention
        for event in operators:
            if event.kernels and _under(event, is_attention):
                for kernel in event.kernels:
                    inside[kernel.name] = inside.get(kernel.name, 0.0) + kernel.duration
        for event in kernels:  # a name may be launched inside and outside: its time is split
            us = event.time_range.elapsed_us()
            part = min(us, inside.get(event.name, 0.0))
            inside[event.name] = inside.get(event.name, 0.0) - part
            if part:
                add(event.name, part, True)
            if us > part:
                add(event.name, us - part, False)
        busy = min(1.0, 1e-6 * _union((e.time_range.start, e.time_range.end) for e in kernels) / wall) if wall else None
    else:
        for event in operators:
            if event.self_cpu_time_total > 0:
                add(event.name, event.self_cpu_time_total, _under(event, is_attention))

    def largest(*kinds):
        rows = [(name, us / 1e3 / steps) for kind in kinds for name, us in times.get(kind, {}).items()]
        return dict(sorted(rows, key=lambda row: -row[1])[:8])

    total = sums["all"] or 1.0
    dflash = sorted({e.name for e in (kernels or operators) if "dflash" in e.name.lower()})
    context, because = _context(operators)
    return Found(
        device=torch.cuda.get_device_name() if kernels and torch.cuda.is_available() else "cuda" if kernels else "cpu",
        gpus=torch.cuda.device_count(), steps=steps, step_ms=1e3 * wall / steps, work_ms=sums["all"] / 1e3 / steps,
        attention_share=sums["attention"] / total, communication_share=sums["communication"] / total, busy_share=busy,
        dflash_names=dflash, attention_names=largest("attention"), other_names=largest("other", "communication"),
        memory={}, memory_curve=[], context=context, context_because=because,
    )  # fmt: skip


def _annotation(event):
    """Whether a GPU event is the shadow of a range of the host: it covers kernels that are counted themselves."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith("ProfilerStep")


def _under(event, matches):
    """Whether the operator or one around it matches."""
    while event is not None:
        if matches(event.name):
            return True
        event = event.cpu_parent
    return False


def _union(intervals):
    """Length covered by intervals (start, end)."""
    covered, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _context(operators):
    """(most keys of a scaled_dot_product_attention call, how that is known)."""
    longest = max(
        (e.input_shapes[1][-2] for e in operators
         if "scaled_dot_product" in e.name and len(e.input_shapes) > 1 and len(e.input_shapes[1]) >= 2), default=None,
    )  # fmt: skip
    return longest, "" if longest is None else "the longest that scaled_dot_product_attention saw"


class MemoryCurve:
    """Memory in use over time, read every 10 ms: of the GPU's allocator and device, or of the process on a CPU."""

    def __init__(self, on_gpu, interval=0.01):
        self.on_gpu, self.interval = on_gpu, interval
        self.samples = []  # (seconds, bytes)
        self._stop = threading.Event()

    def __enter__(self):
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()
        self._sample()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join()
        self._sample()

    def _follow(self):
        while not self._stop.wait(self.interval):
            self._sample()

    def _sample(self):
        now = time.perf_counter() - self.start
        self.samples.append((now, torch.cuda.memory_allocated() if self.on_gpu else resident_bytes()))

    def points(self, most):
        """At most so many samples, each the peak of its stretch of time."""
        size = -(-len(self.samples) // most)
        return [max(self.samples[i : i + size], key=lambda s: s[1]) for i in range(0, len(self.samples), size)]

    def summary(self):
        """first, last, median, peak in bytes; on a GPU reserved, free, total, and what lies unused between blocks."""
        values = [value for _, value in self.samples]
        memory = dict(first=values[0], last=values[-1], median=statistics.median(values), peak=max(values))
        if self.on_gpu:
            stats = torch.cuda.memory_stats()
            free, total = torch.cuda.mem_get_info()
            memory |= dict(
                peak=torch.cuda.max_memory_allocated(), reserved=torch.cuda.memory_reserved(), free=free, total=total,
                split=stats.get("inactive_split_bytes.all.current", 0),
            )  # fmt: skip
        return memory


def resident_bytes():
    """Memory of this process in the machine's memory; where that cannot be read, the most it ever was."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


def kv_pools():
    """Caches of keys and values alive in this process: kind, bytes, and tokens where the layout says so.

    Known: the ladder's ``PagedKVCache`` and engine's ``KVCache``, transformers' caches.
    """
    pools = []
    for thing in gc.get_objects():
        kind = type(thing)
        name, home = kind.__name__, str(kind.__module__).split(".")[0]
        if home == "ladder" and name == "PagedKVCache":
            tokens = thing.k_pages.shape[0] * thing.k_pages.shape[1]
            pools.append(dict(kind=name, bytes=thing.k_pages.nbytes + thing.v_pages.nbytes, tokens=tokens))
        elif home == "ladder" and name == "KVCache":
            pools.append(dict(kind=name, bytes=thing.nbytes, tokens=thing.parts[0].shape[1] * thing.parts[0].shape[2]))
        elif home == "transformers" and name in ("DynamicCache", "StaticCache", "EncoderDecoderCache"):
            layers = [
                layer
                for layer in getattr(thing, "layers", ())
                if isinstance(getattr(layer, "keys", None), torch.Tensor)
            ]
            if layers:
                tokens = max(layer.keys.shape[0] * layer.keys.shape[-2] for layer in layers if layer.keys.ndim == 4)
                pools.append(
                    dict(
                        kind=name, bytes=sum(layer.keys.nbytes + layer.values.nbytes for layer in layers), tokens=tokens
                    )
                )
    return sorted(pools, key=lambda pool: -pool["bytes"])
