"""Cells that several benchmarks and chapters share, and what is read out of recorded ones."""

import math

from .decode_problem import DecodeProblem
from .results import by, timed

OURS, V1 = "step08_dflash2", "step07_dflash1"
LENGTHS = (1024, 4096, 16384, 32768, 131072)


def by_cell(rows, mode):
    """[{implementation: Row}] of the timed rows of one mode, a dict a cell."""
    return by(timed(rows, mode), lambda row: row["cell"])


def faster(impls, peer, ours=OURS):
    """How many times faster than ``peer`` ours is in one case; None where either is missing or wrong."""
    if peer not in impls or ours not in impls or impls[peer].ok is False or impls[ours].ok is False:
        return None
    return impls[peer].ms / impls[ours].ms


def geometric_mean(values):
    """Of positive numbers; None of none."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def decode_problems():
    """The table of decode cells: 32 query and 8 KV heads of 128, one new token, pages of 64."""
    cells = [(1, 4096), (1, 32768), (1, 131072), (8, 4096), (8, 32768), (64, 4096), (64, 16384)]
    return [DecodeProblem(B=b, context=n) for b, n in cells]


def mla_problems():
    """Absorbed MLA decode, 576 / 512."""
    shape = dict(Hkv=1, D=576, Dv=512, latent=True, scale=192**-0.5)
    cells = [(16, 64, 4096), (16, 128, 8192), (128, 64, 4096), (128, 128, 8192), (16, 1, 32768)]
    return [DecodeProblem(B=b, Hq=h, context=n, **shape) for h, b, n in cells]
