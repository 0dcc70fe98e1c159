"""Exercises of chapters 06 and 07."""

import math

import torch

from ladder.chapters.exercise import (
    NotYet,
    _close,
    _exercise,
    _held,
    _noise,
    _number,
    _tensor,
    check,
    hint,
    solution,
)
from ladder.lab.problem import reference

__all__ = ["check", "hint", "solution"]  # what a notebook calls


# ---------------------------------------------------------------- chapter 06: pages and splits


def _slots_case(answer, table, positions, page_size, case):
    expected = torch.tensor([int(table[p // page_size]) * page_size + p % page_size for p in positions])
    got = answer(torch.tensor(table, dtype=torch.int32), torch.tensor(positions), page_size)
    _tensor(got, expected.shape)
    if not torch.equal(got.long(), expected):
        at = int((got.long() != expected).nonzero()[0, 0])
        raise NotYet(f"{case}: position {positions[at]} is in slot {int(got[at])}; want {int(expected[at])}")


def _slots_visible(answer):
    _slots_case(answer, [3, 0, 5], [0, 1, 4, 9, 11], 4, "pages of 4")


def _slots_strict(answer):
    _slots_case(answer, [7, 2, 9], [2, 0, 1], 1, "pages of one token")
    _slots_case(answer, [1, 4, 2**31 - 1, -1], [0, 4, 5, 9], 5, "pages of 5, garbage behind the length")
    _slots_case(answer, [0, 70_000_000], [63, 64, 127], 64, "a pool of more than 2^31 slots")


_exercise(
    "06a", "Where a token lives",
    (
        "Two steps: which entry of the table, and which place within that page. Both come from dividing by page_size.",
        "A page holds page_size slots, so page p begins at slot p * page_size of the flattened pool.",
        "block_table[positions // page_size].long() * page_size + positions % page_size: widen before you multiply.",
    ),
    _slots_visible, _slots_strict, "ladder.chapters.ch06_07_serving.solutions:slots",
)  # fmt: skip


def _splits_case(answer, case, edges, shift=0.0, rows=3):
    q, k, v = (_noise(1, 1, n, 8, seed=i) for i, n in enumerate((rows, edges[-1], edges[-1])))
    q = q * 8**0.5
    k = torch.cat([k, torch.ones_like(k[..., :1])], -1)
    q = torch.cat([q, torch.full_like(q[..., :1], shift)], -1)  # one dimension that moves every score by ``shift``
    parts, lses = [], []
    for a, b in zip(edges, edges[1:]):
        if a == b:  # an empty split wrote nothing: its part is whatever the workspace held
            parts.append(torch.full((rows, 8), math.nan))
            lses.append(torch.full((rows,), -math.inf))
        else:
            out, lse = reference(q, k[:, :, a:b], v[:, :, a:b], scale=1.0)
            parts.append(out[0, 0].float())
            lses.append(lse[0, 0].float())
    got = answer(torch.stack(parts), torch.stack(lses))
    if not isinstance(got, tuple) or len(got) != 2:
        raise NotYet(f"the result is {type(got).__name__}; want a tuple (out, lse)")
    if edges[-1]:
        out, lse = reference(q, k, v, scale=1.0)
        out, lse = out[0, 0], lse[0, 0]
    else:
        out, lse = torch.zeros(rows, 8), torch.full((rows,), -math.inf)
    _close(got[0], out, case, "out", tolerance=2e-2 if shift else 1e-4)  # float32 log-sum-exps near 5e4 are 0.004 apart
    _close(got[1], lse, case, "lse")


def _splits_visible(answer):
    _splits_case(answer, "3 splits", (0, 5, 9, 20))


def _splits_strict(answer):
    _splits_case(answer, "splits of very unequal length", (0, 1, 2, 300, 301))
    _splits_case(answer, "an empty split whose part is NaN", (0, 7, 7, 12))
    _splits_case(answer, "every split empty: 0 and -inf", (0, 0, 0))
    _splits_case(answer, "scores near 50,000", (0, 6, 11), shift=5e4)


_exercise(
    "06b", "Merge the splits",
    (
        "exp(lse) of a split is the sum of its exponentials: the weight that its normalised part deserves.",
        "Subtract the largest lse before exp, as softmax does. What must happen where it is -inf?",
        "w = exp(lses - top); out = (w[..., None] * parts).sum(0) / w.sum(0)[:, None]; lse = top + log(w.sum(0)). 0 x "
        "NaN is NaN: replace parts where w is 0.",
    ),
    _splits_visible, _splits_strict, "ladder.chapters.ch06_07_serving.solutions:merge_splits",
)  # fmt: skip


def _fewest_case(answer, num_tasks, slots, most):
    def filled(n):
        return n * num_tasks / (-(-n * num_tasks // slots) * slots)

    good = [n for n in range(1, most + 1) if filled(n) >= 0.85]
    expected = good[0] if good else max(range(1, most + 1), key=filled)
    got = answer(num_tasks, slots, most)
    _number(got, expected, f"{num_tasks} programs, {slots} slots, at most {most} splits")


def _fewest_visible(answer):
    _fewest_case(answer, 32, 264, 64)


def _fewest_strict(answer):
    for case in (
        (8, 264, 64), (264, 264, 8), (270, 264, 1), (300, 264, 4), (1, 264, 3), (512, 264, 8), (2048, 264, 64),
    ):  # fmt: skip
        _fewest_case(answer, *case)


_exercise(
    "06c", "How many splits",
    (
        "n splits make n * num_tasks programs. They run in waves of ``slots``; the last wave may be nearly empty.",
        "filled(n) = programs / (waves * slots), waves = programs / slots rounded up. Try n = 1, 2, ... in order.",
        "return the first n with filled(n) >= 0.85; if there is none up to ``most``, the n that fills most (the first "
        "of equals).",
    ),
    _fewest_visible, _fewest_strict, "ladder.chapters.ch06_07_serving.solutions:fewest_splits",
)  # fmt: skip


# ---------------------------------------------------------------- chapter 07: experts and latents


def _group_case(answer, ids, num_experts, case):
    flat = torch.tensor(ids).flatten().tolist()
    expected = [i for e in range(num_experts) for i, x in enumerate(flat) if x == e]
    counts = [flat.count(e) for e in range(num_experts)]
    offsets = [sum(counts[:e]) for e in range(num_experts + 1)]
    got = answer(torch.tensor(ids), num_experts)
    if not isinstance(got, tuple) or len(got) != 2:
        raise NotYet(f"the result is {type(got).__name__}; want a tuple (order, offsets)")
    for name, x, want in (("offsets", got[1], offsets), ("order", got[0], expected)):
        _tensor(x, (len(want),), name)
        if x.tolist() != want:
            raise NotYet(f"{case}: {name} is {x.tolist()}; want {want}")


def _group_visible(answer):
    _group_case(answer, [[2, 0], [1, 2], [2, 1]], 3, "3 tokens, top_k 2, 3 experts")


def _group_strict(answer):
    _group_case(answer, [[3, 1], [3, 1], [1, 3], [3, 1]], 5, "experts that nobody chose")
    _group_case(answer, [[0, -1], [2, 0], [-1, -1]], 3, "ids of -1: dropped by the router")
    _group_case(
        answer, [[(7 * t + 3 * c) % 4 for c in range(3)] for t in range(40)], 4, "120 assignments: stable order"
    )


_exercise(
    "07a", "Sort tokens by expert",
    (
        "Two results: how many assignments each expert has, summed up, and the assignments in expert order.",
        "torch.bincount counts; cumsum with a 0 in front gives offsets. A sort by expert must be stable: equal experts "
        "keep token order.",
        "ids = expert_ids.flatten(); order = torch.sort(ids, stable=True).indices; drop those whose id is outside 0 .. "
        "num_experts - 1.",
    ),
    _group_visible, _group_strict, "ladder.chapters.ch06_07_serving.solutions:group",
)  # fmt: skip


def _tiles_case(answer, counts, block_rows):
    offsets = [sum(counts[:e]) for e in range(len(counts) + 1)]
    expected = [(e, r) for e, n in enumerate(counts) for r in range(offsets[e], offsets[e] + n, block_rows)]
    got = answer(torch.tensor(offsets), block_rows)
    if not isinstance(got, list):
        raise NotYet(f"the result is {type(got).__name__}; want a list of (expert, first row)")
    got = [tuple(int(x) for x in tile) for tile in got]
    if got != expected:
        raise NotYet(f"loads {counts}, tiles of {block_rows} rows: {got}; want {expected}")


def _tiles_visible(answer):
    _tiles_case(answer, [5, 2, 4], 4)


def _tiles_strict(answer):
    for counts, block_rows in (([0, 9, 0, 0, 1], 4), ([8, 8], 8), ([1, 1, 1], 16), ([0, 0], 4), ([130, 3, 64], 64)):
        _tiles_case(answer, counts, block_rows)


_exercise(
    "07b", "A tile for each real row, none for padding",
    (
        "Expert e owns rows offsets[e] .. offsets[e + 1] - 1. A tile belongs to one expert: it multiplies with one "
        "weight.",
        "An expert of n rows needs ceil(n / block_rows) tiles, so one with no row needs none.",
        "[(e, r) for e in range(experts) for r in range(offsets[e], offsets[e + 1], block_rows)], with plain integers.",
    ),
    _tiles_visible, _tiles_strict, "ladder.chapters.ch06_07_serving.solutions:tiles",
)  # fmt: skip


def _absorb_case(answer, num_heads, head_dim, latent_dim, seqlen, case):
    q, w = _noise(num_heads, head_dim), _noise(num_heads, head_dim, latent_dim, seed=1)
    latent = _noise(seqlen, latent_dim, seed=2)
    want = torch.einsum("hd,hdl,sl->hs", q.double(), w.double(), latent.double())
    _close(answer(q, w, latent), want, case)
    return q, w, latent


def _absorb_visible(answer):
    _absorb_case(answer, 2, 4, 8, 5, "2 heads, latent of 8, 5 tokens")


def _absorb_strict(answer):
    _absorb_case(answer, 3, 16, 8, 1, "a latent smaller than a head")
    args = _absorb_case(answer, 8, 32, 64, 512, "8 heads, latent of 64, 512 tokens")
    need = 4 * (8 * 512 + 2 * 8 * 64)
    _held(
        answer, args, 2 * need, f"the scores take {4 * 8 * 512:,}; keys of every head would take {4 * 8 * 512 * 32:,}"
    )


_exercise(
    "07c", "Absorb the projection",
    (
        "Head h's key of token s is w[h] @ latent[s]. Its score is q[h] . (w[h] @ latent[s]): a product of three; "
        "where can brackets go?",
        "(q[h] @ w[h]) is one vector of the latent's size for each head, made once a step and not once a token.",
        "torch.bmm(q[:, None], w)[:, 0] @ latent.T: (H, L) times (L, S).",
    ),
    _absorb_visible, _absorb_strict, "ladder.chapters.ch06_07_serving.solutions:absorbed_scores",
)  # fmt: skip
