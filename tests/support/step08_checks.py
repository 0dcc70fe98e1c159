"""What step 08 must compute, written from its definition: a mask key by key, and attention in float64 under it."""

import torch

from ladder.lab import interpret

interpret.enable_without_gpu()  # before any test module imports triton

from ladder.lab.decode_problem import GARBAGE_PAGES  # noqa: E402
from ladder.lab.parity import Parity, band, distance, nan_allocations  # noqa: E402
from ladder.step08_dflash2 import dflash2_decode, dflash2_mla_decode  # noqa: E402
from ladder.step08_dflash2.windows import Range, RangeWindows  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"

# Every preset and shape of range, small enough that sequences of a few dozen tokens cross all edges.
WINDOWS = {
    "none": None,
    "sliding 1": RangeWindows.sliding(1),
    "sliding 5": RangeWindows.sliding(5),
    "sliding 16": RangeWindows.sliding(16),
    "sliding 17": RangeWindows.sliding(17),
    "wider than the sequence": RangeWindows.sliding(1000),
    "sink 4, window 7": RangeWindows.sink_window(4, 7),
    "sink 16, window 16": RangeWindows.sink_window(16, 16),
    "sink 33, window 3": RangeWindows.sink_window(33, 3),
    "sink 1000, window 1": RangeWindows.sink_window(1000, 1),
    "local prefix 20": RangeWindows.prefix_local(20, 3, 6),
    "local but for the last 7": RangeWindows.prefix_local(-7, 3, 6),
    "local but for the last 1000": RangeWindows.prefix_local(-1000, 3, 6),
    "two ranges and a gap": RangeWindows([Range(3, 18, 2, 4), Range(30, None, 17, 9)]),
    "end and start": RangeWindows([Range(0, 9, 0, 2), Range(-12, -4, 5, None), Range(-4, None, 1, 3)]),
    "eight ranges": RangeWindows([Range(6 * i, 6 * i + 5, i, 2 * i + 1) for i in range(8)]),
}


def sees(windows, p, j, Sk, right):
    """Whether the query at position p sees key j."""
    if right is not None and j > p + right:
        return False
    for start, stop, sink, window in windows.ranges if windows is not None else ():
        start = start + Sk if start < 0 else start
        stop = float("inf") if stop is None else stop + Sk if stop < 0 else stop
        if start <= p < stop:
            return j < sink or window is None or p - window < j
    return True


def mask_of(windows, Sq, Sk, right):
    rows = [[sees(windows, i + Sk - Sq, j, Sk, right) for j in range(Sk)] for i in range(Sq)]
    return torch.tensor(rows, dtype=torch.bool).view(Sq, Sk)


def formula(q, k, v, mask, *, scale=None, softcap=0.0, sinks=None, compute=torch.float64):
    """(out, lse): attention under ``mask`` (Sq, Sk), every intermediate in ``compute``."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    group = q.shape[1] // max(1, k.shape[1])
    k, v = (x.to(compute).repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q.to(compute) * scale) @ k.transpose(2, 3)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask.to(q.device), float("-inf"))
    if sinks is not None:
        extra = sinks.to(compute).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores, v = torch.cat([scores, extra], dim=3), torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[3])], dim=2)
    lse = torch.logsumexp(scores.double(), dim=3)
    probs = torch.softmax(scores, dim=3)
    return probs.masked_fill((scores == float("-inf")).all(dim=3, keepdim=True), 0.0) @ v, lse


class WindowOracle:
    """The float64 answer under windows, a right edge, a softcap and sinks, with the budget of ``parity.Oracle``."""

    def __init__(self, q, k, v, *, right=None, windows=None, scale=None, softcap=0.0, sinks=None):
        mask = mask_of(windows, q.shape[2], k.shape[2], right)
        some = mask.any(dim=0).to(v.device)
        if mask.shape[0]:  # what no query sees may hold anything
            k, v = (torch.where(some[:, None], x, 0.0) for x in (k, v))
        options = dict(scale=scale, softcap=softcap, sinks=sinks)
        self.dtype, self.shape = q.dtype, (*q.shape[:3], v.shape[3])
        self.out, self.lse = formula(q, k, v, mask, **options)
        eager, eager_lse = formula(q, k, v, mask, **options, compute=q.dtype)
        self.budget = 2 * distance(eager.double(), self.out) + band(self.out, q.dtype) + band(v, torch.float32) / 2
        self.lse_budget = 2 * distance(eager_lse, self.lse) + band(self.lse, torch.float32)
        if softcap:  # float32 tanh is exact to a unit of 1, which the cap multiplies, and relative to itself where it is small
            largest = float((q.double().abs().amax() * k.double().abs().amax()) * q.shape[3]) if q.numel() and k.numel() else 0.0
            largest *= abs(q.shape[3] ** -0.5 if scale is None else scale)
            unit = 4 * torch.finfo(torch.float32).eps * min(softcap, 8 * largest)
            self.lse_budget += unit
            self.budget += unit * float(v.abs().max()) if v.numel() else 0.0

    def check(self, out, lse=None):
        if tuple(out.shape) != self.shape or out.dtype != self.dtype:
            return Parity(False, float("inf"), self.budget, f"output is {tuple(out.shape)} {out.dtype}, want {self.shape} {self.dtype}")
        if not torch.isfinite(out).all():
            return Parity(False, float("inf"), self.budget, f"{int((~torch.isfinite(out)).sum())} of {out.numel()} outputs are not finite")
        error = distance(out.double(), self.out)
        if not error <= self.budget:
            return Parity(False, error, self.budget, f"max error {error:.3g} is over the budget {self.budget:.3g}")
        unseen = torch.isneginf(self.lse)
        if not (out[unseen] == 0).all():
            return Parity(False, error, self.budget, "rows that see no key are not 0")
        if lse is not None:
            if tuple(lse.shape) != self.shape[:3] or lse.dtype != torch.float32:
                return Parity(False, error, self.budget, f"lse is {tuple(lse.shape)} {lse.dtype}, want {self.shape[:3]} float32")
            lse_error = distance(lse.double(), self.lse)
            if not lse_error <= self.lse_budget:
                return Parity(False, error, self.budget, f"lse error {lse_error:.3g} is over the budget {self.lse_budget:.3g}")
        return Parity(True, error, self.budget)


def hide(inputs, windows, right):
    """NaN in keys and values that no new token sees, garbage in the block table where a whole page holds no other."""
    q, k, v, table, lens = inputs
    table = table.clone()
    page_size, q_len = k.shape[1], q.shape[1]
    for b, length in enumerate(lens.tolist()):
        if not length or windows is None:
            continue
        seen = windows.visible(q_len, length, causal=False, right=right).any(dim=0)
        for page in range(-(-length // page_size)):
            mine = seen[page * page_size : (page + 1) * page_size]
            dead = (~mine).nonzero()[:, 0].to(k.device)
            for x in (k, v):
                x[int(table[b, page]), dead] = float("nan")
            if not mine.any() and ON_GPU:  # a CPU checks every entry below the length
                table[b, page] = GARBAGE_PAGES[page % 4]
    return type(inputs)(q, k, v, table, lens)


def check_windows(inputs, call=dflash2_decode, *, right=0, windows=None, softcap=0.0, sinks=None, scale=None, **options):
    """Check every sequence against the oracle of step 08; returns output and log-sum-exp."""
    with nan_allocations():
        out, lse = call(
            *inputs, causal=right is not None, windows=windows, softcap=softcap, sinks=sinks, scale=scale, return_lse=True, **options
        )
    known = type(inputs)(*list(inputs)[:3], inputs.block_table.clamp(0, inputs.k_cache.shape[0] - 1), inputs.seq_lens)
    for b in range(inputs.q.shape[0]):
        k, v = known.sequence(b)  # where the table holds garbage no key is seen
        oracle = WindowOracle(
            inputs.q[b : b + 1].transpose(1, 2), k, v, right=right, windows=windows, scale=scale, softcap=softcap, sinks=sinks
        )
        parity = oracle.check(out[b : b + 1].transpose(1, 2), lse[b : b + 1])
        assert parity, f"sequence {b}: {parity.reason}"
    return out, lse


def mla(q, k_cache, v_cache, table, lens, **options):
    return dflash2_mla_decode(q, k_cache[:, :, 0], table, lens, head_dim_v=v_cache.shape[3], **options)


def random_ranges(draw):
    """Ranges counted from the start, then ranges counted from the end, which overlap in a short sequence."""
    def some(first, step):
        return [Range(a, a + draw.randrange(1, step), draw.choice((0, 3, 30)), draw.choice((1, 4, 20, None))) for a in first]

    from_start = some([a for a in (0, 20, 45) if draw.random() < 0.6], 18)
    from_end = some([a for a in (-60, -40, -18) if draw.random() < 0.6], 17)
    return RangeWindows(from_start + from_end)
