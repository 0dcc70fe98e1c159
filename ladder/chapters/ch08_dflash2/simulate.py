"""Who computes which tile when: small exact simulations of a grid of
tiles, of two units that must overlap, of split decode.

Times are in steps: the time that one tile of keys takes. Nothing here is measured; what it predicts is compared with
the record in chapter 08.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

PROCESSORS = 132  # of an H100 or H200
MMA_FLOPS_PER_CLOCK, EXPS_PER_CLOCK = 4096, 16  # of one processor, bf16 products and base-2 exponentials


@dataclass(frozen=True)
class Tile:
    """One tile of query rows of one head of one sequence. ``steps``: tiles of keys that it visits."""

    seq: int
    head: int
    row: int
    steps: int


@dataclass(frozen=True)
class Piece:
    """A program computing a tile from ``start`` to ``end``."""

    program: int
    start: float
    end: float
    tile: Tile


def tiles_of(
    lengths_q: Sequence[int], lengths_k: Sequence[int], heads: int, *, causal=True, block_m=128, block_n=128
) -> list[Tile]:
    """Every tile of a batch, sequence by sequence, head by head, from the first rows to the last."""
    tiles = []
    for seq, (seqlen_q, seqlen_k) in enumerate(zip(lengths_q, lengths_k)):
        count = []
        for row in range(-(-seqlen_q // block_m)):
            last = min(seqlen_q, (row + 1) * block_m) - 1 + seqlen_k - seqlen_q  # the newest key of the tile's last row
            keys = min(seqlen_k, max(0, last + 1)) if causal else seqlen_k
            count.append(-(-keys // block_n))
        tiles += [Tile(seq, head, row, steps) for head in range(heads) for row, steps in enumerate(count)]
    return tiles


ORDERS = {
    "first rows first": lambda tiles: list(tiles),
    "heaviest first, head by head": lambda tiles: sorted(tiles, key=lambda t: (t.seq, t.head, -t.row)),
    "heaviest first, over all heads": lambda tiles: sorted(tiles, key=lambda t: (-t.steps, t.seq, t.head)),
}


def take_next(tiles, programs, overhead) -> list[Piece]:
    """Whoever is free first takes the next tile: what the hardware
    does with a grid of tiles, and what a shared counter does."""
    free = [(0.0, p) for p in range(programs)]
    pieces = []
    for tile in tiles:
        start, program = heapq.heappop(free)
        end = start + tile.steps + overhead
        pieces.append(Piece(program, start, end, tile))
        heapq.heappush(free, (end, program))
    return pieces


def fixed_stride(tiles, programs, overhead, snake=False) -> list[Piece]:
    """Program p takes tiles p, p + programs, p + 2 programs, ...; with
    ``snake`` every second row of them runs backwards."""
    free, pieces = [0.0] * programs, []
    for i, tile in enumerate(tiles):
        turn, program = divmod(i, programs)
        program = programs - 1 - program if snake and turn % 2 else program
        start = free[program]
        free[program] = start + tile.steps + overhead
        pieces.append(Piece(program, start, free[program], tile))
    return pieces


# What a program pays around a tile: load Q, fill the pipeline, store. A program that stays hides about two thirds of it
# behind the tile before and after.
STAYS = 1 / 3
ASSIGNMENTS = {
    "a program for each tile": lambda tiles, programs, overhead: take_next(tiles, programs, overhead),
    "persistent, fixed stride": lambda tiles, programs, overhead: fixed_stride(tiles, programs, overhead * STAYS),
    "persistent, snake": lambda tiles, programs, overhead: fixed_stride(tiles, programs, overhead * STAYS, snake=True),
    "persistent, shared counter": lambda tiles, programs, overhead: take_next(tiles, programs, overhead * STAYS),
}


def makespan(pieces) -> float:
    """When the last program finishes."""
    return max((piece.end for piece in pieces), default=0.0)


def balance(pieces, programs) -> float:
    """Steps of real work over what all programs could have done until the last one finished: 1 is perfect."""
    end = makespan(pieces)
    return sum(piece.tile.steps for piece in pieces) / (programs * end) if end else 1.0


def simulate(tiles, order, assignment, *, programs=PROCESSORS, overhead=1.5) -> list[Piece]:
    """Pieces of a batch under an order and an assignment (keys of ORDERS and ASSIGNMENTS)."""
    return ASSIGNMENTS[assignment](ORDERS[order](tiles), programs, overhead)


# ---------------------------------------------------------------- two units that should both be busy


@dataclass(frozen=True)
class Clocks:
    """Clocks that one tile step of ``rows`` x ``keys`` takes: the two products, and the exponentials between them."""

    scores: float
    softmax: float
    values: float

    @property
    def products(self):
        return self.scores + self.values


def clocks(head_dim, head_dim_v, rows=128, keys=128) -> Clocks:
    """Clocks of a tile step from the rates of a Hopper processor, nothing else counted."""
    flops = 2 * rows * keys
    return Clocks(
        flops * head_dim / MMA_FLOPS_PER_CLOCK, rows * keys / EXPS_PER_CLOCK, flops * head_dim_v / MMA_FLOPS_PER_CLOCK
    )


@dataclass(frozen=True)
class Burst:
    """One unit ("tensor" or "softmax") busy for one group of warps on key tile ``step``."""

    unit: str
    group: int
    step: int
    start: float
    end: float
    what: str


PIPELINES = ("one group, in turn", "two groups", "two groups, values one tile behind")


def pipeline(step_clocks: Clocks, kind: str, steps=8) -> list[Burst]:
    """What the tensor cores and the softmax units of one processor do, for a tile of rows.

    kind: one of PIPELINES. "one group, in turn": all warps wait for each product, then all do softmax. "two groups":
    each has half of the rows and its own pace. "values one tile behind": a group issues the scores of a tile together
    with the values of the tile before, and does softmax while the second product runs. Each unit serves one burst at a
    time, whoever asked first.
    """
    groups = 1 if kind == PIPELINES[0] else 2
    behind = kind == PIPELINES[2]
    share = 1 / groups
    scores, softmax, values = step_clocks.scores * share, step_clocks.softmax * share, step_clocks.values * share
    # Each group's bursts in the order in which it issues them, and which earlier burst of its own each waits for.
    plans = []
    for _ in range(groups):
        plan = []
        for i in range(steps):
            plan.append(("tensor", i, scores, "scores", ("softmax" if behind else "values", i - 1)))
            if behind and i:
                plan.append(("tensor", i - 1, values, "values", ("softmax", i - 1)))
            plan.append(("softmax", i, softmax, "softmax", ("scores", i)))
            if not behind or i == steps - 1:
                plan.append(("tensor", i, values, "values", ("softmax", i)))
        plans.append(plan)
    unit_free = {"tensor": 0.0, "softmax": 0.0}
    done = [{} for _ in range(groups)]
    place, bursts = [0] * groups, []
    while any(place[g] < len(plans[g]) for g in range(groups)):
        ready = []
        for g in range(groups):
            if place[g] < len(plans[g]):
                unit, step, length, what, after = plans[g][place[g]]
                asked = done[g].get(after, 0.0)  # the first step waits for nothing
                ready.append((max(asked, unit_free[unit]), asked, g))
        start, _, g = min(ready)
        unit, step, length, what, _ = plans[g][place[g]]
        place[g] += 1
        unit_free[unit] = start + length
        done[g][(what, step)] = start + length
        bursts.append(Burst(unit, g, step, start, start + length, what))
    return bursts


def tensor_share(bursts) -> float:
    """Share of the time in which the tensor cores work."""
    end = max(b.end for b in bursts)
    return sum(b.end - b.start for b in bursts if b.unit == "tensor") / end


def overlap_prediction(head_dim, head_dim_v, kind, steps=256) -> float:
    """Share of the matrix-product limit that a long loop of this kind can reach, by the rates alone."""
    return tensor_share(pipeline(clocks(head_dim, head_dim_v), kind, steps))


# ---------------------------------------------------------------- split decode


def split_tiles(lengths, kv_heads, splits, *, keys=64) -> list[Tile]:
    """Decode tasks: every sequence and KV head in ``splits`` parts (an
    int, or one for each sequence) of whole key tiles."""
    counts = [splits] * len(lengths) if isinstance(splits, int) else list(splits)
    tasks = []
    for seq, (length, count) in enumerate(zip(lengths, counts)):
        steps = -(-length // keys)
        share = -(-steps // count)
        for head in range(kv_heads):
            parts = [min(share, steps - i * share) for i in range(count)]
            tasks += [Tile(seq, head, i, part) for i, part in enumerate(parts) if part > 0]
    return tasks
