"""``python -m ladder.profile``: is attention your bottleneck? Measure first, decide by rule, then look into the kernel.

    python -m ladder.profile --module mypackage.serve:run_one_batch --context 32768 --target-ms 40

runs your batch under torch.profiler, follows its memory, and says in words what the numbers mean: whether attention takes
enough of the time to be worth a better kernel, and the three questions to ask before changing one. It prints the ``ncu``
command to run next and reads what that wrote (``--ncu-csv``).
"""

import argparse
import csv
import gc
import importlib
import inspect
import json
import math
import os
import re
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ladder.lab import results

SHARE = 0.30  # of the time in attention: above it a better kernel pays
LONG_CONTEXT = 8192  # tokens
BUSY = 0.80  # of the time with a kernel running: "utilisation is high"
FULL = 0.60  # of a unit's peak in ncu: "used well"
ATTENTION = r"dflash|flash|fmha|attention|attn|sdpa|mla_"
COMMUNICATION = r"nccl|all_?reduce|all_?to_?all|all_?gather|reduce_?scatter|nvshmem|deep_?ep"
MOE = r"moe|expert|router|mixtureof"


@results.names_what_it_cannot_write
def main(argv=None):
    args = parse_args(argv)
    kernels = read_ncu(args.ncu_csv) if args.ncu_csv else None
    if args.module is None:
        print(describe_ncu(kernels))
        return 0
    try:
        step = load_step(args.module)
        found = measure(step, steps=args.steps, warmup=args.warmup, attention=args.attention)
    except (ProfileError, ImportError) as error:
        print(f"ladder.profile: {error}", file=sys.stderr)
        return 2
    if args.moe is not None:
        found.moe, found.moe_because = args.moe, "as you said"
    if args.context is not None:
        found.context, found.context_because = args.context, "as you said"
    answer = decide(found, args.target_ms)
    text = "\n".join([describe(found), "", *answer.lines, "", next_command(args.module)])
    print(text if kernels is None else f"{text}\n\n{describe_ncu(kernels)}", file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json:
        record = dict(measured=asdict(found), decision=answer.name, because=answer.lines, ncu=kernels)
        if args.json == "-":
            print(json.dumps(record, indent=1))
        else:
            results.write_text(args.json, json.dumps(record, indent=1) + "\n")
    return 0


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m ladder.profile",
        description="Measure where the time and the memory of a batch go, and decide whether a better attention kernel pays.",
    )
    parser.add_argument(
        "--module", metavar="PACKAGE:CALLABLE",
        help="what runs one batch; it may instead return a function that does, so that loading a model is not measured",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=3, help="batches to time, and again to profile (default 3)")
    parser.add_argument("--warmup", type=int, default=2, help="batches to run before (default 2)")
    parser.add_argument(
        "--attention", default=ATTENTION, metavar="REGEX",
        help="names of kernels, operators and record_function ranges that are attention (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--target-ms", type=float, help="latency that a batch should have")
    parser.add_argument(
        "--context", type=int, help="tokens of a long request (default: the longest that scaled_dot_product_attention saw)"
    )
    parser.add_argument(
        "--moe", action=argparse.BooleanOptionalAction, help="whether the model is a mixture of experts (default: by its modules' names)"
    )
    parser.add_argument("--ncu-csv", metavar="FILE", help="what ncu wrote with --csv: memory and compute use of each kernel")
    parser.add_argument("--json", metavar="FILE", help="write the numbers too; - is standard output")
    args = parser.parse_args(argv)
    if args.module is None and args.ncu_csv is None:
        parser.error("want --module PACKAGE:CALLABLE, --ncu-csv FILE, or both")
    for option in ("steps", "warmup", "context"):
        value, least = getattr(args, option), 0 if option == "warmup" else 1
        if value is not None and value < least:
            parser.error(f"argument --{option}: {value}; want at least {least}")
    if args.target_ms is not None and not 0 < args.target_ms < math.inf:
        parser.error(f"argument --target-ms: {args.target_ms}; want a positive number of milliseconds")
    try:
        re.compile(args.attention)
    except re.error as error:
        parser.error(f"argument --attention: {args.attention!r} is no regular expression: {error}")
    if args.ncu_csv and not Path(args.ncu_csv).is_file():
        parser.error(f"argument --ncu-csv: no file {args.ncu_csv}")
    if args.ncu_csv:
        try:
            read_ncu(args.ncu_csv)
        except ProfileError as error:
            parser.error(f"argument --ncu-csv: {error}")
    if args.json and args.json != "-" and not Path(args.json).absolute().parent.is_dir():
        parser.error(f"argument --json: no folder {Path(args.json).parent} to write {Path(args.json).name} into")
    if args.json and Path(args.json).is_dir():
        parser.error(f"argument --json: {args.json} is a folder; want a file")
    return args


class ProfileError(Exception):
    """What the user has to change, in words."""


# Measuring


@dataclass
class Found:
    """What a run showed. Times in ms of one batch, memory in bytes, shares 0 .. 1, None where nothing could be known."""

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

    A batch that returns a function is a loader: the function is the batch. Work is what runs on the GPU where there is one
    and it was used, else operators on the CPU. A kernel is attention when its own name matches ``attention``, or that of
    an operator or a ``torch.profiler.record_function`` range around its launch.
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
        found.moe_because = f"modules {', '.join(experts[:3])}" if experts else f"none of its {len(modules)} kinds of module is named so"
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
            layers = [layer for layer in getattr(thing, "layers", ()) if isinstance(getattr(layer, "keys", None), torch.Tensor)]
            if layers:
                tokens = max(layer.keys.shape[0] * layer.keys.shape[-2] for layer in layers if layer.keys.ndim == 4)
                pools.append(dict(kind=name, bytes=sum(layer.keys.nbytes + layer.values.nbytes for layer in layers), tokens=tokens))
    return sorted(pools, key=lambda pool: -pool["bytes"])


# Deciding


@dataclass
class Answer:
    """name: "kernel", "scheduling", "wait", "dense" or "unknown". lines: why, in words."""

    name: str
    lines: list[str]


def decide(found, target_ms=None):
    """The rule: is attention more than 30 % of the time? Then: experts? busy, and still too slow? contexts above 8k?"""
    share = found.attention_share
    device = "CPU" if found.busy_share is None else "GPU"
    lines = [f"Attention takes {share:.0%} of the {device} time; the threshold is {SHARE:.0%}."]
    questions = [
        ("Is the model a mixture of experts?", found.moe, found.moe_because or "no torch.nn.Module ran; say --moe or --no-moe"),
        ("Is the GPU busy, and a batch still too slow?", *_busy_but_slow(found, target_ms)),
        (f"Are there contexts above {LONG_CONTEXT:,} tokens?",
         None if found.context is None else found.context > LONG_CONTEXT,
         f"{found.context:,} tokens, {found.context_because}" if found.context is not None else "not seen; say --context"),
    ]  # fmt: skip
    words = {True: "yes", False: "no", None: "unknown"}
    lines += [f"{i}. {question} {words[answer]} ({because})." for i, (question, answer, because) in enumerate(questions, 1)]
    experts, slow, long = (answer for _, answer, _ in questions)
    if share <= SHARE:
        name, verdict = "scheduling", _scheduling(found, f"a kernel twice as fast would save {share / 2:.0%} of the time")
    elif slow is False:
        name, verdict = "scheduling", _scheduling(found, "kernels are not what a batch waits for")
    elif experts is False:
        name, verdict = "dense", (
            "Attention matters, but what DFlash does for experts is nothing to a dense model: expect the gain of a good attention "
            "kernel and no more, and at short contexts none."
        )
    elif long is False:
        name, verdict = "wait", f"The gain grows with the context; at {found.context:,} tokens it can wait until longer ones come."
    elif experts and slow and long:
        name, verdict = "kernel", (
            f"All three: use the kernel. Attention twice as fast would save {share / 2:.0%} of the time, four times as fast "
            f"{share * 3 / 4:.0%}."
        )
    else:
        name, verdict = "unknown", "Attention is worth a better kernel if the questions marked unknown are answered with yes."
    lines.append(verdict)
    if found.gpus == 1 and name != "scheduling":
        lines.append("One GPU: only the kernel can help; balancing experts over devices needs several.")
    return Answer(name, lines)


def _busy_but_slow(found, target_ms):
    if found.busy_share is None:
        return None, "no GPU ran, and a CPU has no such number"
    text = f"a kernel runs {found.busy_share:.0%} of the time, {BUSY:.0%} is busy; a batch takes {found.step_ms:.1f} ms"
    if found.busy_share < BUSY:
        return False, text
    if target_ms is None:
        return None, f"{text}; say --target-ms"
    return found.step_ms > target_ms, f"{text}, the target is {target_ms:g} ms"


def _scheduling(found, why):
    parts = [f"First look at scheduling and communication: {why}."]
    if found.busy_share is not None and found.busy_share < BUSY:
        idle = 1 - found.busy_share
        parts.append(f"The GPU has no kernel running {idle:.0%} of the time (launches, the host, waiting for requests or peers).")
    if found.communication_share > 0:
        parts.append(f"Communication takes {found.communication_share:.0%} of kernel time.")
    if found.other_names:
        name, ms = next(iter(found.other_names.items()))
        parts.append(f"The largest other work is {_short(name)}, {ms:.2f} ms of a batch.")
    return " ".join(parts)


# Describing


def describe(found):
    """The measurement as a page of text."""
    where, what = "the CPU, whose shares say little about a GPU", "operators"
    if found.busy_share is not None:
        where, what = found.device, "kernels"
    lines = [f"{found.steps} batches on {where}: {found.step_ms:.2f} ms each, {found.work_ms:.2f} ms in {what}."]
    for title, names in (("attention", found.attention_names), ("the rest", found.other_names)):
        lines += [f"  {title}:"] if names else []
        lines += [f"    {ms:9.3f} ms  {ms / max(found.work_ms, 1e-9):6.1%}  {_short(name)}" for name, ms in names.items()]
    if not found.attention_names:
        lines.append("  No kernel, operator or range is named like attention. Eager attention is matrix products and a softmax: put it")
        lines.append("  into torch.profiler.record_function('attention'), or name what it runs with --attention.")
    if found.dflash_names:
        lines.append(f"DFlash is in use: {', '.join(map(_short, found.dflash_names[:4]))}.")
    else:
        lines.append("DFlash is not in use: no kernel or operator has dflash in its name.")
    memory = found.memory
    if memory:
        spike = memory["peak"] / max(memory["median"], 1) - 1
        first, peak, last = (_bytes(memory[key]) for key in ("first", "peak", "last"))
        cause = ", a spike that temporary buffers make" if spike > 0.2 else ""
        lines.append(f"Memory: {first} before, peak {peak}, {last} after; the peak is {spike:.0%} above the median{cause}.")
        if "reserved" in memory:
            lines.append(
                f"  The allocator holds {_bytes(memory['reserved'])}, of which {_bytes(memory['split'])} lie unused between blocks; "
                f"{_bytes(memory['free'])} of {_bytes(memory['total'])} are free on the device."
            )
        lines.append(f"  {curve(found.memory_curve)}")
    if found.pools:
        lines += [f"KV pool: {pool['kind']}, {_bytes(pool['bytes'])}, {pool['tokens']:,} tokens." for pool in found.pools[:3]]
    else:
        lines.append("KV pool: none that is known (the ladder's, or transformers' caches).")
    return "\n".join(lines)


def curve(points):
    """Bytes over time as one line of blocks."""
    if not points:
        return ""
    low, high = min(v for _, v in points), max(v for _, v in points)
    blocks = "▁▂▃▄▅▆▇█"
    bars = "".join(blocks[int((len(blocks) - 1) * (v - low) / max(high - low, 1))] for _, v in points)
    return f"{bars} {_bytes(low)} .. {_bytes(high)} in {points[-1][0]:.2f} s"


def next_command(module):
    """What to run next for a closer look at the kernels."""
    return (
        "To look into the kernels (each is replayed many times: a sample, never a loaded server):\n"
        "  ncu --kernel-name regex:dflash --set full --csv --page details --log-file dflash.csv \\\n"
        f"    python -m ladder.profile --module {module} --steps 1\n"
        "  python -m ladder.profile --ncu-csv dflash.csv"
    )


def _short(name):
    name = re.sub(r"^void |\(.*", "", name)
    return name if len(name) <= 80 else f"{name[:77]}..."


def _bytes(count):
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


# Nsight Compute


COLUMNS = {  # of the raw page -> name here; the details page names them after its metrics
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute",
    "gpu__time_duration.sum": "us",
    "Memory Throughput": "memory", "Compute (SM) Throughput": "compute", "Duration": "us",
}  # fmt: skip
MICROSECONDS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6}


def read_ncu(path):
    """Kernels of ``ncu --csv``, ``--page details`` or ``--page raw``.

    Returns:
        A list of {"kernel", "launches", "us", "memory", "compute"}: microseconds in all, shares 0 .. 1 of the peak weighted
        by time; longest first.

    Raises:
        ProfileError: no table of kernels in the file.
    """
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        lines = [line for line in file if line.lstrip().startswith('"')]  # ncu writes ==PROF== and the program's words too
    rows = list(csv.reader(lines))
    header = next((i for i, row in enumerate(rows) if "Kernel Name" in row), None)
    if header is None:
        raise ProfileError(f"{path} has no column Kernel Name; want what ncu --csv --page details (or raw) wrote")
    names = rows[header]
    launches = {}  # id -> {"kernel", metrics}
    if "Metric Name" in names:
        places = [names.index(n) for n in ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")]
        for row in rows[header + 1 :]:
            if len(row) != len(names):
                continue
            number, kernel, metric, unit, value = (row[i] for i in places)
            launch = launches.setdefault(number, {"kernel": kernel})
            if metric in COLUMNS and (unit == "%" or COLUMNS[metric] == "us"):  # Memory Throughput is in GB/s elsewhere
                launch.setdefault(COLUMNS[metric], _number(value, unit))
    else:
        wanted = {i: COLUMNS[n] for i, n in enumerate(names) if n in COLUMNS}
        units, *data = rows[header + 1 :] or [[]]
        for row in data:
            if len(row) == len(names):
                launch = launches.setdefault(row[names.index("ID")], {"kernel": row[names.index("Kernel Name")]})
                launch |= {key: _number(row[i], units[i]) for i, key in wanted.items()}
    kernels = {}
    for launch in launches.values():
        if not all(launch.get(key) is not None for key in ("us", "memory", "compute")):
            continue
        kernel = kernels.setdefault(launch["kernel"], dict(kernel=launch["kernel"], launches=0, us=0.0, memory=0.0, compute=0.0))
        kernel["launches"] += 1
        kernel["us"] += launch["us"]
        for key in ("memory", "compute"):
            kernel[key] += launch["us"] * launch[key]
    if not kernels:
        raise ProfileError(f"{path} has no kernel with a duration, memory and compute throughput; want ncu --set full")
    for kernel in kernels.values():
        for key in ("memory", "compute"):
            kernel[key] /= kernel["us"] or 1.0
    return sorted(kernels.values(), key=lambda kernel: -kernel["us"])


def _number(value, unit):
    """A cell as microseconds or a share; None when it holds no number."""
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        return None
    return number / 100 if unit == "%" else number * MICROSECONDS.get(unit, 1.0)


def describe_ncu(kernels):
    """What the two throughputs of each kernel say."""
    lines = ["Kernels by Nsight Compute (use of memory and of compute, of their peaks):"]
    for kernel in kernels:
        memory, compute = kernel["memory"], kernel["compute"]
        if memory >= FULL and compute >= FULL:
            verdict = "both used well: as it should be in prefill"
        elif memory >= FULL:
            verdict = "bound by memory: right for decode, in prefill a sign of too small tiles"
        elif compute >= FULL:
            verdict = "bound by compute: right for prefill of long contexts"
        else:
            verdict = "neither is used: latency, too few programs, or waiting within the kernel"
        lines.append(
            f"  {_short(kernel['kernel'])}: {kernel['launches']} launches, {kernel['us']:.1f} us, memory {memory:.0%}, "
            f"compute {compute:.0%}: {verdict}."
        )
    if not any("dflash" in kernel["kernel"].lower() for kernel in kernels):
        lines.append("  None of them has dflash in its name: DFlash did not run.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
