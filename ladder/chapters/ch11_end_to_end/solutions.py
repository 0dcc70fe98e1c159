"""One right answer to each exercise of chapters 09 and 11. Try first: ``ladder.chapters.ch01_05_rungs.exercises.hint``
gives away less."""

import statistics


def whole(shares, gains):
    """x as fast, the whole, when parts that take ``shares`` (0 .. 1 each) of the time become ``gains`` x as fast."""
    return 1 / (1 - sum(shares) + sum(share / gain for share, gain in zip(shares, gains)))


def busy(intervals, wall):
    """Share of ``wall`` in which at least one kernel ran; intervals are (start, end), in any order, and may overlap."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / wall


def advise(share, busy_share, step_ms, target_ms, experts, context):
    """"scheduling", "dense", "wait" or "kernel": what to do about attention that takes ``share`` of the time."""
    if share <= 0.30:
        return "scheduling"
    if busy_share < 0.80 or step_ms <= target_ms:
        return "scheduling"
    if not experts:
        return "dense"
    return "kernel" if context > 8192 else "wait"


def at_once(total, fraction, weights, activations, page_bytes, page_size, tokens):
    """Requests of ``tokens`` tokens that the KV pool holds at once; page 0 is nobody's, and a page has one owner."""
    pages = int(total * fraction - weights - activations) // page_bytes
    return max(0, pages - 1) // -(-tokens // page_size)


def chunks(prompts, chunk_tokens):
    """Prefill steps, each [(prompt, tokens)], of prompts of given
    lengths in their order, packed into ``chunk_tokens`` a step."""
    steps, room = [], 0
    for number, length in enumerate(prompts):
        while length:
            if room == 0:
                steps.append([])
                room = chunk_tokens
            count = min(length, room)
            steps[-1].append((number, count))
            length, room = length - count, room - count
    return steps


def latencies(times, began):
    """(TTFT of the batch, median ITL) in seconds, from a list of token
    times for each request that came at ``began``."""
    firsts = [t[0] for t in times if t]
    gaps = [b - a for t in times for a, b in zip(t, t[1:])]
    return max(firsts) - began, statistics.median(gaps) if gaps else None
