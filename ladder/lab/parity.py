"""Is it right? Errors against a float64 oracle, judged by the error
that eager low precision makes on the same input."""

from dataclasses import dataclass

import torch

from .problem import reference

SAMPLE_ROWS = 512  # query rows of a long sequence that the oracle computes; finiteness is checked on all


@dataclass(frozen=True)
class Parity:
    """Outcome of a check. ``ok`` when everything is finite and ``max_error <= budget``; ``reason`` says what failed."""

    ok: bool
    max_error: float
    budget: float
    reason: str = ""

    def __bool__(self):
        return self.ok


class Oracle:
    """The float64 answer to one problem, and how far eager low precision is from it.

    The budget is FlashAttention's own rule: max|out - oracle| <= 2 x max|eager low precision - oracle| + rounding band,
    where the band is two units in the last place of the largest output, and one float32 unit of the largest value,
    which sums of probabilities times values are made of.
    """

    def __init__(self, q, k, v, *, causal=False, scale=None, sample_rows=SAMPLE_ROWS):
        self._judge(
            q, v, sample_rows,
            lambda compute: reference(q, k, v, causal=causal, scale=scale, rows=self.rows, compute=compute),
        )  # fmt: skip

    def _judge(self, q, v, sample_rows, answer):
        """Set answers and budgets; ``answer(dtype)`` computes (out, lse)
        of the sampled rows with every intermediate in ``dtype``."""
        self.dtype, self.shape = q.dtype, (*q.shape[:3], v.shape[3])
        self.lse_shape = self.shape[:3]
        self.rows = sample_positions(q.shape[2], sample_rows).to(q.device)
        self.out, self.lse = answer(torch.float64)
        eager, eager_lse = answer(q.dtype)
        self.budget = 2 * distance(eager.double(), self.out) + band(self.out, q.dtype) + band(v, torch.float32) / 2
        # The log-sum-exp is float32 everywhere, whatever the inputs: scores of float32 products, accumulated.
        self.lse_budget = 2 * distance(eager_lse, self.lse) + band(self.lse, torch.float32)

    def error(self, out):
        """max|out - oracle| over the rows that the oracle computed."""
        return distance(out[:, :, self.rows].double(), self.out)

    def lse_error(self, lse):
        """max|lse - oracle| over the rows that the oracle computed."""
        return distance(lse[:, :, self.rows].double(), self.lse)

    def check(self, out, lse=None):
        """Compare an output (B, Hq, Sq, Dv), and a log-sum-exp (B, Hq, Sq) when given. Returns Parity."""
        inf = float("inf")
        if tuple(out.shape) != self.shape or out.dtype != self.dtype:
            return Parity(
                False, inf, self.budget, f"output is {tuple(out.shape)} {out.dtype}, want {self.shape} {self.dtype}"
            )
        if not torch.isfinite(out).all():
            bad = int((~torch.isfinite(out)).sum())
            return Parity(False, inf, self.budget, f"{bad} of {out.numel()} outputs are not finite")
        error = self.error(out)
        if not error <= self.budget:
            return Parity(False, error, self.budget, f"max error {error:.3g} is over the budget {self.budget:.3g}")
        if lse is not None:
            if tuple(lse.shape) != self.lse_shape or lse.dtype != torch.float32:
                reason = f"lse is {tuple(lse.shape)} {lse.dtype}, want {self.lse_shape} float32"
                return Parity(False, error, self.budget, reason)
            lse_error = self.lse_error(lse)
            if not lse_error <= self.lse_budget:
                reason = f"lse error {lse_error:.3g} is over the budget {self.lse_budget:.3g}"
                return Parity(False, error, self.budget, reason)
        return Parity(True, error, self.budget)

    def agree(self, out, previous):
        """Compare two rungs with each other: both are allowed the budget, so their distance is at most twice that."""
        error = distance(out.double(), previous.double())
        if not error <= 2 * self.budget:
            return Parity(False, error, 2 * self.budget, f"differs from the previous rung by {error:.3g}")
        return Parity(True, error, 2 * self.budget)


def poison(*tensors):
    """Fill floating tensors with NaN in place, so that an element that nobody writes cannot pass for a result."""
    for tensor in tensors:
        tensor.fill_(float("nan"))


def inside_nan(tensor, margin=3):
    """A view equal to ``tensor`` inside a larger buffer that is NaN all around: an out-of-bounds read shows."""
    outer = torch.full([n + 2 * margin for n in tensor.shape], float("nan"), dtype=tensor.dtype, device=tensor.device)
    view = outer[tuple(slice(margin, margin + n) for n in tensor.shape)]
    view.copy_(tensor)
    return view


class nan_allocations:
    """Context in which ``torch.empty`` and ``new_empty`` return NaN instead of whatever the memory held."""

    def __enter__(self):
        self._before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        return self

    def __exit__(self, *exc):
        torch.use_deterministic_algorithms(self._before[0])
        torch.utils.deterministic.fill_uninitialized_memory = self._before[1]


def distance(a, b):
    """max|a - b|; equal infinities are 0 apart, NaN anywhere is infinitely far."""
    if a.numel() == 0:
        return 0.0
    difference = torch.where(a == b, 0.0, (a - b).abs())
    return float(torch.nan_to_num(difference, nan=float("inf")).max())


def band(values, dtype):
    """The rounding band: two units of ``dtype`` in the last place of the largest finite value."""
    finite = values[torch.isfinite(values)]
    return 2 * torch.finfo(dtype).eps * float(finite.abs().max()) if finite.numel() else 0.0


def sample_positions(length, most):
    """Up to ``most`` positions of 0 .. length: the ends, where masks go wrong, and random ones between."""
    if length <= most:
        return torch.arange(length)
    inner = torch.randperm(length, generator=torch.Generator().manual_seed(0))[: most - 4]
    return torch.cat([inner, torch.tensor([0, 1, length - 2, length - 1])]).unique()
