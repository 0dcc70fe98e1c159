"""Exercises of chapters 09 and 11: Amdahl's law, busy time, the decision; the pool, chunks, latencies."""

import itertools
import math

from ladder import profile
from ladder.chapters.exercise import NotYet, _exercise, _number, check, hint, solution

__all__ = ["check", "hint", "solution"]  # what a notebook calls

# ---------------------------------------------------------------- 09a: Amdahl, for several parts


def _whole_case(answer, shares, gains, want, case):
    _number(answer(list(shares), list(gains)), want, case, tolerance=1e-9)


def _whole_visible(answer):
    _whole_case(answer, (0.3,), (2.0,), 1 / 0.85, "30 % become 2 x as fast")
    _whole_case(answer, (0.5, 0.25), (2.0, 5.0), 1 / 0.55, "half becomes 2 x, a quarter 5 x as fast")


def _whole_strict(answer):
    for shares, gains, want, case in (
        ((), (), 1.0, "nothing changes"),
        ((0.0,), (9.0,), 1.0, "a part that takes no time"),
        ((0.4,), (1.0,), 1.0, "a gain of 1"),
        ((0.3,), (math.inf,), 1 / 0.7, "a part that vanishes"),
        ((1.0,), (3.0,), 3.0, "one part that is everything"),
        ((0.5,), (0.5,), 1 / 1.5, "a part that becomes slower"),
        ((0.4, 0.4, 0.2), (2.0, 4.0, 1.0), 1 / 0.5, "parts that are everything together"),
    ):
        _whole_case(answer, shares, gains, want, case)


_exercise(
    "09a", "The whole from its parts",
    (
        "Measure time, not speed: before, the whole takes 1. A part that took a share s now takes s / gain, and what "
        "no part claims takes what it took.",
        "The time afterwards is (1 - the sum of the shares) + the sum of share / gain. An infinite gain leaves 0 of a "
        "part.",
        "return 1 / (1 - sum(shares) + sum(s / g for s, g in zip(shares, gains))): gains must not be multiplied, nor "
        "averaged.",
    ),
    _whole_visible, _whole_strict, "ladder.chapters.ch11_end_to_end.solutions:whole",
)  # fmt: skip


# ---------------------------------------------------------------- 09b: busy


def _busy_case(answer, intervals, wall, want, case):
    got = answer(list(intervals), wall)
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        raise NotYet(f"the result is {type(got).__name__}; want a number")
    if abs(got - want) > 1e-9:
        raise NotYet(f"{case}: {got:.6g}; want {want:.6g}")


def _busy_visible(answer):
    _busy_case(answer, [(0, 2), (5, 6)], 10, 0.3, "two kernels in 10 us")
    _busy_case(answer, [(0, 4), (2, 6)], 10, 0.6, "two kernels that overlap")


def _busy_strict(answer):
    for intervals, wall, want, case in (
        ([], 10, 0.0, "no kernel"),
        ([(0, 9), (1, 2), (3, 8)], 10, 0.9, "short kernels inside a long one"),
        ([(0, 9), (1, 2), (4, 10)], 10, 1.0, "a kernel that outlasts a long one, after a short one that did not"),
        ([(5, 6), (0, 2), (1, 3)], 10, 0.4, "in another order than they started"),
        ([(0, 1), (1, 2)], 4, 0.5, "one right after the other"),
        ([(3, 3)], 10, 0.0, "a kernel of no length"),
        ([(100.5, 101.0), (100.0, 100.25)], 2, 0.375, "a clock that does not start at 0"),
    ):
        _busy_case(answer, intervals, wall, want, case)


_exercise(
    "09b", "How busy is busy",
    (
        "Two kernels that run at the same time make the GPU busy once. You want the length of the union of the "
        "intervals, not the sum of their lengths.",
        "Sort by start and walk: remember how far the union has reached. An interval adds only what lies beyond that "
        "point, which may be nothing.",
        "For start, end in sorted(intervals): covered += max(0, end - max(start, reached)); reached = max(reached, "
        "end). Divide by wall.",
    ),
    _busy_visible, _busy_strict, "ladder.chapters.ch11_end_to_end.solutions:busy",
)  # fmt: skip


# ---------------------------------------------------------------- 09c: the decision


def rule(share, busy_share, step_ms, target_ms, experts, context):
    """The name of ``ladder.profile``'s answer."""
    found = profile.Found(
        device="a GPU", gpus=1, steps=1, step_ms=step_ms, work_ms=step_ms * busy_share, attention_share=share,
        communication_share=0.0,
        busy_share=busy_share, dflash_names=[], attention_names={}, other_names={}, memory={}, memory_curve=[],
        moe=experts, context=context,
    )  # fmt: skip
    return profile.decide(found, target_ms).name


def _advise_case(answer, *case):
    share, busy_share, step_ms, target_ms, experts, context = case
    got, want = answer(*case), rule(*case)
    if not isinstance(got, str):
        raise NotYet(f'the result is {type(got).__name__}; want "scheduling", "dense", "wait" or "kernel"')
    if got != want:
        kind = "experts" if experts else "dense"
        raise NotYet(
            f"attention {share:.0%}, busy {busy_share:.0%}, {step_ms:g} of {target_ms:g} ms, {kind}, {context:,} "
            f'tokens: "{got}"; want "{want}"'
        )


def _advise_visible(answer):
    _advise_case(answer, 0.45, 0.95, 60.0, 40.0, True, 32768)
    _advise_case(answer, 0.12, 0.95, 60.0, 40.0, True, 32768)
    _advise_case(answer, 0.45, 0.95, 60.0, 40.0, False, 32768)
    _advise_case(answer, 0.45, 0.95, 60.0, 40.0, True, 2048)


def _advise_strict(answer):
    for share in (0.1, 0.3, 0.31, 0.9):
        for busy_share in (0.5, 0.8, 0.95):
            for step_ms in (40.0, 40.1):
                for experts in (True, False):
                    for context in (8192, 8193):
                        _advise_case(answer, share, busy_share, step_ms, 40.0, experts, context)


_exercise(
    "09c", "The decision",
    (
        "Four questions in this order: is the share above 30 %? Is the GPU busy at 80 % or more, and the batch still "
        "slower than it should be? Is it a mixture of experts? Above 8,192 tokens?",
        "The first two that are answered with no mean that the time is not in the kernel: \"scheduling\", whatever the "
        "others say. A dense model gives \"dense\", a short context \"wait\".",
        "share <= 0.30 or busy_share < 0.80 or step_ms <= target_ms: \"scheduling\". Then not experts: \"dense\". Then "
        "context <= 8192: \"wait\". Else \"kernel\".",
    ),
    _advise_visible, _advise_strict, "ladder.chapters.ch11_end_to_end.solutions:advise",
)  # fmt: skip


# ---------------------------------------------------------------- 11a: how many at once


def _at_once_case(answer, want, case, **arguments):
    got = answer(**arguments)
    if isinstance(got, bool) or not isinstance(got, int):
        raise NotYet(f"the result is {type(got).__name__}; want an integer")
    if got != want:
        raise NotYet(f"{case}: {got:,}; want {want:,}")


def _at_once_visible(answer):
    small = dict(total=1000, fraction=0.9, weights=300, activations=100, page_bytes=10, page_size=16)
    _at_once_case(answer, 12, "50 pages, requests of 64 tokens", tokens=64, **small)
    _at_once_case(answer, 9, "50 pages, requests of 65 tokens", tokens=65, **small)


def _at_once_strict(answer):
    page = dict(page_bytes=10, page_size=16)
    real = dict(
        total=141 * 10**9, weights=31_412_968_448, activations=1_500_000_000, page_bytes=64 * 31104, page_size=64,
        tokens=4608,
    )  # fmt: skip
    for fraction in (0.85, 0.90, 0.95):
        pages = int(real["total"] * fraction - real["weights"] - real["activations"]) // real["page_bytes"]
        _at_once_case(answer, (pages - 1) // 72, f"V2-Lite on 141 GB at {fraction:.2f}", fraction=fraction, **real)
    for want, case, arguments in (
        (0, "weights that do not fit", dict(total=1000, fraction=0.5, weights=600, activations=0, tokens=16, **page)),
        (
            0,
            "one page, which is page 0 and stays unused",
            dict(total=1000, fraction=1.0, weights=990, activations=0, tokens=1, **page),
        ),
        (1, "two pages", dict(total=1000, fraction=1.0, weights=900, activations=80, tokens=16, **page)),
        (
            99,
            "requests of one token take a page each",
            dict(total=1000, fraction=1.0, weights=0, activations=0, tokens=1, **page),
        ),
        (
            0,
            "a request larger than the pool",
            dict(total=1000, fraction=1.0, weights=0, activations=0, tokens=1600, **page),
        ),
        (
            3,
            "an incomplete page does not count",
            dict(total=1000, fraction=1.0, weights=955, activations=0, tokens=16, **page),
        ),
    ):
        _at_once_case(answer, want, case, **arguments)


_exercise(
    "11a", "How many at once",
    (
        "The fraction is of the device's total. Weights and activations come out of it; what is left is divided into "
        "whole pages, of which page 0 stays unused.",
        "A request takes whole pages: its tokens divided by the page size, rounded up. Divide pages by pages, not "
        "tokens by tokens, and never answer less than 0.",
        "pages = int(total * fraction - weights - activations) // page_bytes; return max(0, pages - 1) // -(-tokens // "
        "page_size).",
    ),
    _at_once_visible, _at_once_strict, "ladder.chapters.ch11_end_to_end.solutions:at_once",
)  # fmt: skip


# ---------------------------------------------------------------- 11b: chunked prefill


def _laid_end_to_end(prompts, chunk_tokens):
    """All tokens in a row, cut every ``chunk_tokens``: the definition, not an algorithm."""
    row = [number for number, length in enumerate(prompts) for _ in range(length)]
    steps = [row[i : i + chunk_tokens] for i in range(0, len(row), chunk_tokens)]
    return [[(number, len(list(part))) for number, part in itertools.groupby(step)] for step in steps]


def _chunks_case(answer, prompts, chunk_tokens):
    got, want = answer(list(prompts), chunk_tokens), _laid_end_to_end(prompts, chunk_tokens)
    case = f"prompts {', '.join(map(str, prompts)) or 'none'} in steps of {chunk_tokens}"
    if not isinstance(got, (list, tuple)):
        raise NotYet(f"{case}: the result is {type(got).__name__}; want a list of steps")
    got = [[tuple(part) for part in step] for step in got]
    if got != want:
        raise NotYet(f"{case}: {got}; want {want}")


def _chunks_visible(answer):
    _chunks_case(answer, (5, 9, 2), 8)


def _chunks_strict(answer):
    for prompts, chunk_tokens in (
        ((), 8), ((8,), 8), ((8, 8), 8), ((20,), 8), ((24,), 8), ((1, 1, 1), 8), ((3, 5, 1), 8), ((7, 2, 30, 1), 8),
        ((1, 2, 3, 4, 5, 6, 7), 4), ((5, 5), 1),
    ):  # fmt: skip
        _chunks_case(answer, prompts, chunk_tokens)


_exercise(
    "11b", "Chunked prefill",
    (
        "Walk through the prompts in order with a step that has room for chunk_tokens. A prompt that does not fit is "
        "cut; its rest opens the next step.",
        "Open a new step only when there is something to put into it: prompts that end exactly at the edge of a step "
        "must not leave an empty one behind.",
        "For each prompt, while some of it is left: if room is 0, append a new step and set room to chunk_tokens; take "
        "min(left, room), append (number, taken), subtract from both.",
    ),
    _chunks_visible, _chunks_strict, "ladder.chapters.ch11_end_to_end.solutions:chunks",
)  # fmt: skip


# ---------------------------------------------------------------- 11c: latencies


def _latencies_case(answer, times, began, ttft, itl, case):
    got = answer([list(t) for t in times], began)
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        raise NotYet(f"the result is {type(got).__name__}; want a tuple (ttft, itl)")
    _number(got[0], ttft, f"{case}, TTFT", tolerance=1e-9)
    if itl is None:
        if got[1] is not None:
            raise NotYet(f"{case}, ITL: {got[1]}; want None, there is no second token")
        return
    _number(got[1], itl, f"{case}, ITL", tolerance=1e-9)


def _latencies_visible(answer):
    _latencies_case(answer, [(3.0, 4.0, 5.0), (3.5, 4.5, 5.5)], 1.0, 2.5, 1.0, "two requests")


def _latencies_strict(answer):
    for times, began, ttft, itl, case in (
        ([(2.0,), (4.0,)], 0.0, 4.0, None, "one token each"),
        ([(1.0, 2.0, 3.0, 4.0), (1.0, 9.0)], 0.0, 1.0, 1.0, "one request was preempted: its gap counts, once"),
        ([(1.0, 2.0), (1.0, 4.0)], 0.0, 1.0, 2.0, "two gaps: their middle"),
        ([(1.0, 2.0), ()], 0.5, 0.5, 1.0, "one request without a token yet"),
        ([(5.0, 6.0), (1.0, 2.5, 3.5, 4.5)], 0.0, 5.0, 1.0, "a first token is never a gap"),
        ([(1.0, 2.0), (2.0, 3.0), (9.0, 10.0)], 0.0, 9.0, 1.0, "one late request of three"),
    ):
        _latencies_case(answer, times, began, ttft, itl, case)


_exercise(
    "11c", "Latencies from token times",
    (
        "The batch has its first tokens when the last of its requests has its own. Inter-token latency knows nothing "
        "of the beginning: it is made of gaps within each answer.",
        "Collect the gaps of neighbouring tokens of each request, all into one list, and take its median; a request "
        "with one token adds none, and an empty list has no median.",
        "ttft = max(t[0] for t in times if t) - began; gaps = [b - a for t in times for a, b in zip(t, t[1:])]; "
        "statistics.median(gaps) if gaps else None.",
    ),
    _latencies_visible, _latencies_strict, "ladder.chapters.ch11_end_to_end.solutions:latencies",
)  # fmt: skip
