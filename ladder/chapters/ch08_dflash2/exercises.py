"""Exercises of chapter 08: a schedule, the tiles of a window, a logit without a value."""

import math

import torch

from ladder.chapters.exercise import NotYet, _close, _exercise, _noise, _number, check, hint, solution

__all__ = ["check", "hint", "solution"]  # what a notebook calls

# ---------------------------------------------------------------- 08a: when does the last program finish?


def _finish_case(answer, costs, programs, case):
    clocks = [0] * programs  # whoever is free first: the smallest clock, not the next in turn
    for cost in costs:
        clocks[clocks.index(min(clocks))] += cost
    _number(answer(list(costs), programs), max(clocks), case, tolerance=1e-9)


def _finish_visible(answer):
    _finish_case(answer, (3, 1, 2, 2), 2, "costs 3 1 2 2 on 2 programs")
    _finish_case(answer, (3, 2, 2, 1), 2, "costs 3 2 2 1 on 2 programs")


def _finish_strict(answer):
    for costs, programs, case in (
        ((), 4, "no tiles"),
        ((5, 1), 4, "fewer tiles than programs"),
        ((9, 1, 1, 1, 1, 1), 2, "one long tile: the other program takes all the rest"),
        ((1, 1, 1, 1, 1, 9), 2, "the long tile last"),
        (tuple(range(1, 65)) * 3, 7, "a causal head of 64 tiles, three times, lightest first"),
        (tuple(sorted(range(1, 65), reverse=True)) * 3, 7, "the same, heaviest first within each head"),
        ((0.5, 0.25, 0.25, 1.0), 2, "costs that are no integers"),
        ((4, 3, 2), 1, "one program"),
    ):
        _finish_case(answer, costs, programs, case)


_exercise(
    "08a", "When does the last program finish",
    (
        "Keep a clock for each program: when it will be free. The next tile goes to the program whose clock is "
        "smallest, not to the next in turn.",
        "Start with programs zeros. For each cost, in the order given: find the smallest clock and add the cost to it.",
        "A heap keeps the smallest clock in front: heapq.heapreplace(free, free[0] + cost) for each cost; the answer "
        "is max(free). With no tiles that is 0.",
    ),
    _finish_visible, _finish_strict, "ladder.chapters.ch08_dflash2.solutions:finish",
)  # fmt: skip


# ---------------------------------------------------------------- 08b: the tiles of a window


def _visited_case(answer, first, last, sink, window, block_n):
    expected = []
    for tile in range(last // block_n + 1):
        keys = range(tile * block_n, (tile + 1) * block_n)
        seen = [j <= p and (j > p - window or j < sink) for p in range(first, last + 1) for j in keys]
        if any(seen):
            expected.append((tile, not all(seen)))
    got = answer(first, last, sink, window, block_n)
    case = f"rows {first}..{last}, sink {sink}, window {window}, tiles of {block_n}"
    if not isinstance(got, (list, tuple)):
        raise NotYet(f"{case}: the result is {type(got).__name__}; want a list of (tile, masked)")
    got = [tuple(x) if isinstance(x, (list, tuple)) else x for x in got]
    if [x[0] if isinstance(x, tuple) else x for x in got] != [tile for tile, _ in expected]:
        raise NotYet(f"{case}: tiles {got}; want the tiles {[tile for tile, _ in expected]}")
    for mine, right in zip(got, expected):
        if tuple(map(int, mine)) != tuple(map(int, right)):
            raise NotYet(f"{case}: tile {right[0]} is {'masked' if right[1] else 'whole'}; got {mine}")


def _visited_visible(answer):
    _visited_case(answer, 256, 319, 16, 96, 32)


def _visited_strict(answer):
    for case in (
        (0, 15, 0, 8, 16),  # the first rows: nothing before them
        (64, 79, 0, 1, 16),  # a window of 1 is the row itself
        (64, 79, 16, 16, 16),  # sinks that fill a tile: whole
        (64, 79, 17, 16, 16),  # one sink more: a masked tile
        (48, 63, 20, 24, 16),  # sinks and window meet in a tile
        (48, 63, 33, 24, 16),  # no hole left
        (48, 63, 48, 24, 16),  # sinks up to the rows themselves
        (50, 61, 3, 30, 8),  # rows that are no whole tile
        (50, 61, 64, 5, 8),  # more sinks than keys
        (128, 191, 4, 40, 64),  # a window narrower than a tile
        (200, 200, 0, 64, 16),  # one row: decode
        (96, 127, 0, 500, 32),  # a window longer than everything: causal
    ):
        _visited_case(answer, *case)


_exercise(
    "08b", "Which tiles, and which of them masked",
    (
        "Row p sees keys p - window + 1 .. p and the keys below sink, as far as p. A tile is visited when any row sees "
        "any of its keys, masked unless every row sees all.",
        "The oldest key of the window that any row sees is first - window + 1, that of the first row. A tile is "
        "skipped when it lies after the sinks and before that key.",
        "For keys k0..k1 of a tile: skip if k0 >= sink and k1 <= first - window. Whole if k1 <= first and one of: k0 > "
        "last - window, k1 < sink, or last - window < sink (no hole).",
    ),
    _visited_visible, _visited_strict, "ladder.chapters.ch08_dflash2.solutions:visited",
)  # fmt: skip


# ---------------------------------------------------------------- 08c: a logit without a value


def _sink_case(answer, scores, values, cuts, sink, case, tolerance=1e-5):
    """scores (R, K), values (K, Dv), split at ``cuts``; equal cuts make an empty split."""
    outs, lses = [], []
    edges = [0, *cuts, scores.shape[1]]
    for a, b in zip(edges, edges[1:]):
        part = scores[:, a:b]
        if part.shape[1] == 0:
            outs.append(torch.zeros(len(scores), values.shape[1]))
            lses.append(torch.full((len(scores),), -math.inf))
            continue
        lse = torch.logsumexp(part.double(), 1)
        weights = torch.exp(part.double() - lse.masked_fill(lse == -math.inf, 0.0)[:, None])
        outs.append((weights @ values[a:b].double()).float())
        lses.append(lse.float())
    logits = torch.cat([scores.double(), sink[:, None].double()], 1)
    lse = torch.logsumexp(logits, 1)
    weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[:, None])
    want = (weights[:, :-1] @ values.double()).float()
    got = answer(torch.stack(outs), torch.stack(lses), sink)
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        raise NotYet(f"the result is {type(got).__name__}; want a tuple (out, lse)")
    _close(got[0], want, case, "out", tolerance)
    _close(got[1], lse.float(), case, "lse", tolerance)


def _sink_visible(answer):
    _sink_case(answer, _noise(3, 12), _noise(12, 4, seed=1), (5, 9), torch.tensor([0.5, 2.0, -1.0]), "three splits")


def _sink_strict(answer):
    scores, values, sink = _noise(3, 12), _noise(12, 4, seed=1), torch.tensor([0.5, 2.0, -1.0])
    hidden = scores.clone()
    hidden[1] = -math.inf
    for args, case in (
        ((scores, values, (), sink), "one split"),
        ((scores, values, (2, 4, 6, 8), sink), "five splits: the sink counts once, not once a split"),
        ((scores, values, (0, 6, 6), sink), "two empty splits"),
        ((hidden, values, (4,), sink), "a row that sees no key: 0, and its lse is the sink"),
        ((scores * 1e4, values, (4,), sink), "large logits"),
        ((scores, values, (4,), torch.full((3,), 3e4)), "a sink that takes everything"),
        ((scores, values, (4,), torch.full((3,), -math.inf)), "a sink of -inf is no sink"),
        ((hidden, values, (4,), torch.full((3,), -math.inf)), "no key and no sink: 0 and -inf"),
    ):
        _sink_case(answer, *args, case)


_exercise(
    "08c", "A logit without a value",
    (
        "The sink is one more term exp(sink) in the denominator of the whole row. It belongs to no split, so it is "
        "added once, when the splits are merged.",
        "Treat it as one more split whose lse is ``sink`` and whose output is zero. Subtract the largest lse before "
        "the exponentials; where all are -inf subtract 0.",
        "logits = cat(lses, sink); top = max (0 where -inf); shares = exp(logits - top); total = their sum; out = "
        "sum(shares[:-1] * outs) / total (1 where 0); lse = top + log(total).",
    ),
    _sink_visible, _sink_strict, "ladder.chapters.ch08_dflash2.solutions:merge_with_sink",
)  # fmt: skip
