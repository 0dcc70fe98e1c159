"""The rule: what a measurement means, and both in words."""

import re
from dataclasses import dataclass

SHARE = 0.30  # of the time in attention: above it a better kernel pays
LONG_CONTEXT = 8192  # tokens
BUSY = 0.80  # of the time with a kernel running: "utilisation is high"
FULL = 0.60  # of a unit's peak in ncu: "used well"


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
        ("Is the model a mixture of experts?", found.moe, found.moe_because or "no torch.nn.Module ran; say --moe or "
            "--no-moe"),
        ("Is the GPU busy, and a batch still too slow?", *_busy_but_slow(found, target_ms)),
        (f"Are there contexts above {LONG_CONTEXT:,} tokens?",
         None if found.context is None else found.context > LONG_CONTEXT,
         f"{found.context:,} tokens, {found.context_because}" if found.context is not None else "not seen; say "
             "--context"),
    ]  # fmt: skip
    words = {True: "yes", False: "no", None: "unknown"}
    lines += [
        f"{i}. {question} {words[answer]} ({because})." for i, (question, answer, because) in enumerate(questions, 1)
    ]
    experts, slow, long = (answer for _, answer, _ in questions)
    if share <= SHARE:
        name, verdict = (
            "scheduling",
            _scheduling(found, f"a kernel twice as fast would save {share / 2:.0%} of the time"),
        )
    elif slow is False:
        name, verdict = "scheduling", _scheduling(found, "kernels are not what a batch waits for")
    elif experts is False:
        name, verdict = (
            "dense",
            (
                "Attention matters, but what DFlash does for experts is nothing to a dense model: expect the gain of a "
                "good attention "
                "kernel and no more, and at short contexts none."
            ),
        )
    elif long is False:
        name, verdict = (
            "wait",
            f"The gain grows with the context; at {found.context:,} tokens it can wait until longer ones come.",
        )
    elif experts and slow and long:
        name, verdict = (
            "kernel",
            (
                f"All three: use the kernel. Attention twice as fast would save {share / 2:.0%} of the time, four "
                f"times as fast "
                f"{share * 3 / 4:.0%}."
            ),
        )
    else:
        name, verdict = (
            "unknown",
            "Attention is worth a better kernel if the questions marked unknown are answered with yes.",
        )
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
        parts.append(
            f"The GPU has no kernel running {idle:.0%} of the time (launches, the host, waiting for requests or peers)."
        )
    if found.communication_share > 0:
        parts.append(f"Communication takes {found.communication_share:.0%} of kernel time.")
    if found.other_names:
        name, ms = next(iter(found.other_names.items()))
        parts.append(f"The largest other work is {_short(name)}, {ms:.2f} ms of a batch.")
    return " ".join(parts)


def describe(found):
    """The measurement as a page of text."""
    where, what = "the CPU, whose shares say little about a GPU", "operators"
    if found.busy_share is not None:
        where, what = found.device, "kernels"
    lines = [f"{found.steps} batches on {where}: {found.step_ms:.2f} ms each, {found.work_ms:.2f} ms in {what}."]
    for title, names in (("attention", found.attention_names), ("the rest", found.other_names)):
        lines += [f"  {title}:"] if names else []
        lines += [
            f"    {ms:9.3f} ms  {ms / max(found.work_ms, 1e-9):6.1%}  {_short(name)}" for name, ms in names.items()
        ]
    if not found.attention_names:
        lines.append(
            "  No kernel, operator or range is named like attention. Eager attention is matrix products and a softmax: "
            "put it"
        )
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
        lines.append(
            f"Memory: {first} before, peak {peak}, {last} after; the peak is {spike:.0%} above the median{cause}."
        )
        if "reserved" in memory:
            lines.append(
                f"  The allocator holds {_bytes(memory['reserved'])}, of which {_bytes(memory['split'])} lie unused "
                f"between blocks; "
                f"{_bytes(memory['free'])} of {_bytes(memory['total'])} are free on the device."
            )
        lines.append(f"  {curve(found.memory_curve)}")
    if found.pools:
        lines += [
            f"KV pool: {pool['kind']}, {_bytes(pool['bytes'])}, {pool['tokens']:,} tokens." for pool in found.pools[:3]
        ]
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
