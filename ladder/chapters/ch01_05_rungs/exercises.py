"""Exercises of chapters 01 to 04; those of chapter 05 are kernels, in ``exercises_triton``."""

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

from . import exercises_triton  # noqa: F401  registers them

__all__ = ["check", "hint", "solution"]  # what a notebook calls


# ---------------------------------------------------------------- chapter 01


def _softmax_visible(answer):
    scores = _noise(4, 6)
    _close(answer(scores), torch.softmax(scores, -1), "four rows of noise")


def _softmax_strict(answer):
    big = torch.tensor([[5e4, 4.9e4, -5e4], [-5e4, -5e4, -5e4], [0.0, 0.0, 0.0]])
    _close(answer(big), torch.softmax(big.double(), -1), "scores of +-50,000")
    masked = torch.tensor([[1.0, -math.inf, 2.0], [-math.inf] * 3])
    want = torch.stack([torch.softmax(masked[0].double(), -1), torch.zeros(3, dtype=torch.float64)])
    _close(answer(masked), want, "hidden keys, and a row that sees none (its weights are 0)")


_exercise(
    "01a", "A softmax that survives",
    (
        "exp(89) overflows float32. The softmax does not change when the same number is taken off all scores of a row.",
        "Take off the row maximum, so that the largest exponent is 0. Which row has no finite maximum?",
        "m = scores.amax(-1, keepdim=True); replace -inf by 0 in m; e = exp(scores - m); divide by the sum, but by 1 "
        "where it is 0.",
    ),
    _softmax_visible, _softmax_strict, "ladder.chapters.ch01_05_rungs.solutions:safe_softmax",
)  # fmt: skip


def _traffic_of(batch, heads, seqlen_q, seqlen_k, head_dim, itemsize, causal):
    """Bytes that step 01 really moves, seen operation by operation."""
    from ladder.lab.trace import Traffic
    from ladder.step01_naive import attention

    dtype = {2: torch.float16, 4: torch.float32}[itemsize]
    q = torch.zeros(batch, heads, seqlen_q, head_dim, dtype=dtype)
    k = torch.zeros(batch, heads, seqlen_k, head_dim, dtype=dtype)
    with Traffic() as seen:
        attention(q, k, k, causal=causal)
    return seen.num_bytes


def _traffic_visible(answer):
    case = (1, 8, 128, 128, 64, 2, False)
    _number(answer(*case), _traffic_of(*case), "B=1, 8 heads, S=128, D=64, 2 bytes, dense", 0.01)


def _traffic_strict(answer):
    for case in ((2, 4, 64, 192, 32, 4, False), (1, 1, 1, 512, 64, 2, False)):
        _number(answer(*case), _traffic_of(*case), f"(B, H, Sq, Sk, D, itemsize, causal) = {case}", 0.01)
    case = (2, 32, 128, 128, 32, 2, True)  # the boolean mask itself is shared by all heads: one percent here
    _number(answer(*case), _traffic_of(*case), f"(B, H, Sq, Sk, D, itemsize, causal) = {case}", 0.02)


_exercise(
    "01b", "Count the bytes",
    (
        "Walk through the five lines of the rung: scale, product, (mask), softmax, product. What does each load, what "
        "does each store?",
        "Scaling loads and stores Q. The first product loads the scaled Q and K, and stores the scores.",
        "Scores: 1 stored + (2 for the mask) + 2 for the softmax + 1 loaded. Q-sized: 2 for scaling, 1 loaded by the "
        "product, 1 for the output. K and V: 1 each.",
    ),
    _traffic_visible, _traffic_strict, "ladder.chapters.ch01_05_rungs.solutions:naive_bytes",
)  # fmt: skip


# ---------------------------------------------------------------- chapter 02


def _row_max_visible(answer):
    q, k = _noise(6, 16), _noise(32, 16, seed=1)
    _close(answer(q, k, 8), (q @ k.T).amax(-1), "6 queries, 32 keys, tiles of 8")


def _row_max_strict(answer):
    q, k = _noise(6, 16).abs(), -_noise(32, 16, seed=1).abs()
    _close(answer(q, k, 8), (q @ k.T).amax(-1), "all scores negative")
    for seqlen in (1, 7, 29):
        k = _noise(seqlen, 16, seed=2)
        _close(answer(q, k, 8), (q @ k.T).amax(-1), f"{seqlen} keys, tiles of 8")
    q, k = _noise(64, 16), _noise(2048, 16, seed=3)
    _held(answer, (q, k, 32), 4 * 64 * 32 * 4, "a tile of scores has 64 x 32 elements, the matrix 64 x 2048")


_exercise(
    "02a", "Pass one",
    (
        "The maximum over all keys is the maximum of the maxima of the tiles.",
        "Which number is no larger than any score, so that the first tile always wins?",
        "m = full(Sq, -inf); for k0 in range(0, Sk, tile_k): m = maximum(m, (q @ k[k0:k0 + tile_k].T).amax(-1)). "
        "Slices end by themselves at Sk.",
    ),
    _row_max_visible, _row_max_strict, "ladder.chapters.ch01_05_rungs.solutions:tiled_row_max",
)  # fmt: skip


def _two_pass_reference(q, k, v):
    return reference(q[None, None], k[None, None], v[None, None], scale=1.0)[0][0, 0]


def _two_pass_visible(answer):
    q, k, v = _noise(6, 16, scale=0.3), _noise(32, 16, seed=1), _noise(32, 8, seed=2)
    _close(answer(q, k, v, 8), _two_pass_reference(q, k, v), "6 queries, 32 keys, tiles of 8")


def _two_pass_strict(answer):
    q, v = torch.ones(4, 16), _noise(30, 8, seed=2)
    k = _noise(30, 16, seed=1, scale=0.1, shift=-20.0)  # scores near -320: exp underflows without the maximum
    _close(answer(q, k, v, 8), _two_pass_reference(q, k, v), "scores near -320, 30 keys, tiles of 8")
    _close(answer(q, -k, v, 8), _two_pass_reference(q, -k, v), "scores near +320, 30 keys, tiles of 8")
    q, k, v = _noise(64, 16), _noise(2048, 16, seed=3), _noise(2048, 16, seed=4)
    _close(answer(q, k, v, 32), _two_pass_reference(q, k, v), "64 queries, 2048 keys, tiles of 32")
    _held(answer, (q, k, v, 32), 8 * 64 * 32 * 4, "a tile of scores has 64 x 32 elements, the matrix 64 x 2048")
    q, k, v = torch.zeros(2, 16).half(), torch.zeros(4096, 16).half(), torch.full((4096, 8), 0.1).half()
    _close(answer(q, k, v, 64).float(), v[:2].float(), "4096 equal keys in float16: sums need float32", tolerance=2e-3)


_exercise(
    "02b", "Pass two",
    (
        "Once the maximum is known, every tile can be turned into exponentials on its own. What is left to add up?",
        "Two things: the sum of the exponentials, and their product with the tile's values. Divide at the very end.",
        "acc += exp(s - m) @ v_tile; total += exp(s - m).sum(-1); out = acc / total. Convert the tiles to float32 "
        "first.",
    ),
    _two_pass_visible, _two_pass_strict, "ladder.chapters.ch01_05_rungs.solutions:two_pass",
)  # fmt: skip


# ---------------------------------------------------------------- chapter 03


def _fold_all(answer, scores, values, tile):
    """Fold tiles of scores (R, n) and values (n, Dv) one after another, from an empty state."""
    m = torch.full(scores.shape[:1], -math.inf)
    total, acc = torch.zeros(scores.shape[0]), torch.zeros(scores.shape[0], values.shape[1])
    for k0 in range(0, scores.shape[1], tile):
        state = answer(m, total, acc, scores[:, k0 : k0 + tile], values[k0 : k0 + tile])
        if not isinstance(state, tuple) or len(state) != 3:
            raise NotYet(f"the result is {type(state).__name__}; want a tuple (m, l, acc)")
        m, total, acc = state
        for got, name, like in (
            (m, "m", scores[:, 0]),
            (total, "l", scores[:, 0]),
            (acc, "acc", scores[:, :1] * values[:1]),
        ):
            _tensor(got, like.shape, name)
    return m, total, acc


def _fold_case(answer, scores, values, tile, case):
    m, total, acc = _fold_all(answer, scores, values, tile)
    _close(m, scores.amax(-1), case, "m")
    finite = scores.double().amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.exp(scores.double() - finite)
    _close(total, weights.sum(-1), case, "l")
    _close(acc, weights @ values.double(), case, "acc")


def _fold_visible(answer):
    scores, values = _noise(3, 8).sort(-1, descending=True).values, _noise(8, 4, seed=1)
    _fold_case(answer, scores, values, 4, "largest scores first")


def _fold_strict(answer):
    values = _noise(12, 4, seed=1)
    _fold_case(answer, _noise(3, 12).sort(-1).values, values, 4, "each tile raises the maximum")
    _fold_case(answer, _noise(3, 12, scale=2e4), values, 4, "scores of +-50,000")
    hidden = _noise(2, 12)
    hidden[0, :5] = -math.inf
    hidden[1] = -math.inf
    _fold_case(answer, hidden, values, 4, "a first tile that is hidden, and a row that is")


_exercise(
    "03a", "Fold a tile",
    (
        "l and acc were made with exponentials that subtracted the old maximum. What must they be multiplied by if the "
        "new one is subtracted?",
        "exp(s - m_new) = exp(s - m_old) * exp(m_old - m_new). Both l and acc need the factor.",
        "m_new = maximum(m, scores.amax(-1)); use 0 where it is -inf; r = exp(m - m_new); p = exp(scores - m_new); l * "
        "r + p.sum(-1), acc * r + p @ v.",
    ),
    _fold_visible, _fold_strict, "ladder.chapters.ch01_05_rungs.solutions:fold",
)  # fmt: skip


def _merge_case(answer, scores, values, cut, case):
    parts = []
    for s, v in ((scores[:, :cut], values[:cut]), (scores[:, cut:], values[cut:])):
        weights = torch.softmax(s.double(), -1).nan_to_num(0.0)
        parts += [(weights @ v.double()).float(), torch.logsumexp(s.double(), -1).float()]
    got = answer(*parts)
    if not isinstance(got, tuple) or len(got) != 2:
        raise NotYet(f"the result is {type(got).__name__}; want a tuple (out, lse)")
    weights = torch.softmax(scores.double(), -1).nan_to_num(0.0)
    _close(got[0], weights @ values.double(), case, "out")
    _close(got[1], torch.logsumexp(scores.double(), -1), case, "lse")


def _merge_visible(answer):
    _merge_case(answer, _noise(3, 10), _noise(10, 4, seed=1), 4, "10 keys split after 4")


def _merge_strict(answer):
    values = _noise(10, 4, seed=1)
    _merge_case(answer, _noise(3, 10) + 300, values, 4, "scores near 300")
    _merge_case(answer, _noise(3, 10) - 300, values, 4, "scores near -300")
    hidden = _noise(3, 10)
    hidden[0, :4] = hidden[1, 4:] = -math.inf
    hidden[2] = -math.inf
    _merge_case(answer, hidden, values, 4, "a part that saw no key (lse -inf, out 0)")


_exercise(
    "03b", "Merge two halves",
    (
        "A part's share of the whole is its sum of exponentials over the total: exp(lse_part) / (exp(lse_a) + "
        "exp(lse_b)).",
        "exp(300) overflows. Take the larger log-sum-exp off both first. What if both are -inf?",
        "m = maximum(lse_a, lse_b), 0 where -inf; w = exp(lse - m) for each; out = (w_a * out_a + w_b * out_b) / (w_a "
        "+ w_b, or 1 where 0); lse = m + log(w_a + w_b).",
    ),
    _merge_visible, _merge_strict, "ladder.chapters.ch01_05_rungs.solutions:merge",
)  # fmt: skip


# ---------------------------------------------------------------- chapter 04


def _hidden_case(answer, seqlen_q, seqlen_k):
    got = answer(seqlen_q, seqlen_k)
    want = torch.tensor(
        [[j > i + seqlen_k - seqlen_q for j in range(seqlen_k)] for i in range(seqlen_q)]
    ).view(seqlen_q, seqlen_k)
    _tensor(got, want.shape)
    if got.dtype != torch.bool:
        raise NotYet(f"the result has dtype {got.dtype}; want torch.bool, True where a key is hidden")
    if not torch.equal(got, want):
        i, j = (got != want).nonzero()[0].tolist()
        raise NotYet(
            f"Sq = {seqlen_q}, Sk = {seqlen_k}: query {i} and key {j} are {'hidden' if got[i, j] else 'visible'}; want "
            f"the opposite"
        )


def _hidden_visible(answer):
    _hidden_case(answer, 4, 4)


def _hidden_strict(answer):
    for seqlen_q, seqlen_k in ((1, 5), (3, 7), (6, 2), (5, 1), (2, 2)):
        _hidden_case(answer, seqlen_q, seqlen_k)


_exercise(
    "04a", "The corner matters",
    (
        "The last query is the newest token: it sees every key. Count backwards from it.",
        "Query i stands at position i + Sk - Sq among the keys.",
        "torch.arange(Sk)[None, :] > torch.arange(Sq)[:, None] + Sk - Sq",
    ),
    _hidden_visible, _hidden_strict, "ladder.chapters.ch01_05_rungs.solutions:hidden",
)  # fmt: skip


def _grouped_case(answer, num_heads, num_kv_heads, seqlen_q, seqlen_k, head_dim):
    q, k = _noise(num_heads, seqlen_q, head_dim), _noise(num_kv_heads, seqlen_k, head_dim, seed=1)
    want = q @ k.repeat_interleave(num_heads // num_kv_heads, 0).transpose(-2, -1)
    _close(answer(q, k), want, f"{num_heads} query heads on {num_kv_heads} KV heads")
    return q, k


def _grouped_visible(answer):
    _grouped_case(answer, 4, 1, 5, 7, 8)


def _grouped_strict(answer):
    for num_heads, num_kv_heads in ((6, 2), (4, 4), (8, 2), (7, 1)):
        _grouped_case(answer, num_heads, num_kv_heads, 5, 7, 8)
    q, k = _grouped_case(answer, 8, 2, 4, 512, 64)
    scores = 8 * 4 * 512 * 4
    _held(
        answer, (q, k), scores + 8 * 4 * 64 * 4, f"the scores take {scores:,}; K must not be copied for each query head"
    )


_exercise(
    "04b", "Share K without copying it",
    (
        "Heads 0 .. G-1 read KV head 0, the next G read KV head 1. They are neighbours in memory already.",
        "A product does not care whether its rows come from one head or from G heads. Broadcasting in @ copies, "
        "though.",
        "q.reshape(Hkv, G * Sq, D) @ k.transpose(-2, -1), then view the result as (Hq, Sq, Sk).",
    ),
    _grouped_visible, _grouped_strict, "ladder.chapters.ch01_05_rungs.solutions:grouped_scores",
)  # fmt: skip


def _kind_case(answer, seqlen_q, seqlen_k, tile_q, tile_k):
    for q0 in range(0, seqlen_q, tile_q):
        for k0 in range(0, seqlen_k, tile_k):
            rows, keys = range(q0, min(q0 + tile_q, seqlen_q)), range(k0, min(k0 + tile_k, seqlen_k))
            seen = [j <= i + seqlen_k - seqlen_q for i in rows for j in keys]
            want = "whole" if all(seen) else "cut" if any(seen) else "skipped"
            got = answer(rows.start, rows.stop, keys.start, keys.stop, seqlen_q, seqlen_k)
            if got != want:
                raise NotYet(
                    f"Sq = {seqlen_q}, Sk = {seqlen_k}: rows {rows.start} to {rows.stop - 1} and keys {keys.start} to "
                    f"{keys.stop - 1} are {got!r}; want {want!r}"
                )


def _kind_visible(answer):
    _kind_case(answer, 8, 8, 2, 2)


def _kind_strict(answer):
    for shape in ((8, 8, 2, 4), (8, 8, 4, 2), (7, 13, 3, 4), (13, 7, 4, 3), (1, 9, 4, 4), (9, 1, 4, 4)):
        _kind_case(answer, *shape)


_exercise(
    "04c", "Whole, cut or skipped",
    (
        "Two corners decide. Which row of a tile sees the fewest keys, and which the most?",
        "Row q0 sees keys up to q0 + Sk - Sq. A tile is whole if even that row sees its last key.",
        "whole: k1 - 1 <= q0 + Sk - Sq; cut: k0 <= q1 - 1 + Sk - Sq; else skipped. The ends q1 and k1 are exclusive.",
    ),
    _kind_visible, _kind_strict, "ladder.chapters.ch01_05_rungs.solutions:tile_kind",
)  # fmt: skip
