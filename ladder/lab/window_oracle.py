"""What range windows let a query see, said once more and independently of the kernel: the oracle that checks them."""

import math

import torch

from .parity import SAMPLE_ROWS, Oracle


def visible_rows(ranges, rows, seqlen_q, seqlen_k, *, causal=True):
    """Which keys some query rows see, as the definition of range windows has it.

    Args:
        ranges: [(start, stop, sink, window)]: queries at positions start <= p < stop see the first ``sink`` keys and
            the ``window`` newest up to themselves; None for "to the end" and "all of them"; negative positions count
            from seqlen_k.
        rows: (n,) int64 query indices; query i sits at position i + seqlen_k - seqlen_q.
        causal: nothing to the right of a query's own position.

    Returns:
        (n, seqlen_k) bool, on the device of ``rows``.
    """
    position = (rows + seqlen_k - seqlen_q)[:, None]
    key = torch.arange(seqlen_k, device=rows.device)
    seen = torch.ones(len(rows), seqlen_k, dtype=torch.bool, device=rows.device)
    for start, stop, sink, window in ranges:
        first = start + seqlen_k if start < 0 else start
        last = math.inf if stop is None else stop + seqlen_k if stop < 0 else stop
        inside = (position >= first) & (position < last)
        if window is not None:
            seen = torch.where(inside, (key > position - window) | (key < sink), seen)
    return seen & (key <= position) if causal else seen


class WindowOracle(Oracle):
    """The float64 answer of attention under range windows, on sampled
    rows, with the error budget of ``parity.Oracle``."""

    def __init__(self, q, k, v, ranges, *, causal=True, scale=None, sample_rows=SAMPLE_ROWS):
        def answer(compute):
            seen = visible_rows(ranges, self.rows, q.shape[2], k.shape[2], causal=causal)
            return _masked(q, k, v, self.rows, seen, scale, compute)

        self._judge(q, v, sample_rows, answer)


def _masked(q, k, v, rows, seen, scale, compute):
    """``problem.reference`` under a mask of its own for each row: out (B, Hq, n, Dv), lse (B, Hq, n)."""
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for h in range(q.shape[1]):  # head by head: a long sequence in float64 is large
        keys, values = k[:, h // group].to(compute), v[:, h // group].to(compute)
        scores = ((q[:, h, rows].to(compute) * scale) @ keys.transpose(-2, -1)).masked_fill(~seen, float("-inf"))
        lses.append(torch.logsumexp(scores.double(), dim=-1))
        probs = torch.softmax(scores, dim=-1).masked_fill(~seen.any(dim=-1, keepdim=True), 0.0)
        outs.append(probs @ values)
    return torch.stack(outs, 1), torch.stack(lses, 1)
