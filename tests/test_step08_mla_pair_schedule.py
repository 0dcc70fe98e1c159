"""Who waits for whom in the MLA kernel whose two groups share tiles in pairs, on sm_90: a model run in many orders, without a GPU.

Each group is two actors that stand for its warps, which meet only where the compiled kernel lets them meet. A product reads
from its issue until its wait; both ends are checked. ``test_step08_mla_schedule`` has the chip.
"""

import pytest
from test_step08_mla_schedule import Chip

FREE, LEFT, RIGHT, LAST = 5, 0, 2, 4
EVEN_P, ODD_P, ODD_TURN, SUMS, EVEN_TURN = 11, 12, 13, 14, 15
WARPS = 2
MINE = 128 // WARPS
PIECES = ((LEFT, "left"), (RIGHT, "right"), (LAST, "last"))


def places(name, slot):
    """The last key columns lie in one part for each warp, which will hold the rows of its probabilities."""
    return [("last", slot, w) for w in range(WARPS)] if name == "last" else [(name, slot)]


def reading(chip, name, slot, value):
    for place in places(name, slot):
        chip.read(place, value)


def produce(chip, tiles, turns):
    chip.expect("q", [(64 * 576 * 2, "q", 0)])
    for tile in range(tiles):
        slot = tile % 2
        for piece, name in PIECES if slot == 0 else (PIECES[1], PIECES[0], PIECES[2]):
            if tile >= 2:
                yield from chip.sync(FREE + piece + slot, 32, 160)
            chip.expect((name, slot), [(64, place, ("keys", tile)) for place in places(name, slot)])
            yield "go"


def scores(chip, tile):
    for name in ("left", "right", "last") if tile % 2 == 0 else ("right", "left", "last"):
        yield from chip.wait((name, tile % 2), tile // 2 & 1)
        reading(chip, name, tile % 2, ("keys", tile))
    chip.read("q", 0)


def scores_over(chip, tile):
    for _, name in PIECES:
        reading(chip, name, tile % 2, ("keys", tile))


def tell(chip, group, w, tile, barrier):
    yield from chip.sync(group, MINE, 128)  # else a warp would write over keys that another one's scores still read
    chip.memory["last", tile % 2, w] = "half written"
    yield "go"
    chip.memory["last", tile % 2, w] = ("p", tile)
    chip.memory["max", group, w] = tile
    chip.come(barrier, MINE, 256)


def hear(chip, group, tile, barrier):
    yield from chip.sync(barrier, MINE, 256)
    for w in range(WARPS):
        chip.read(("max", group, w), tile)


def other(chip, name, tile):
    """A product with the other group's probabilities: what it reads, at its start and its end."""
    reading(chip, name, tile % 2, ("keys", tile))
    reading(chip, "last", tile % 2, ("p", tile))


def even(chip, tiles, turns, w):
    yield from chip.wait("q", 0)
    if tiles:
        yield from scores(chip, 0)
        yield "go"
        scores_over(chip, 0)
        if turns and tiles > 1:
            chip.come(ODD_TURN, MINE, 256)
        yield "go"
        yield from tell(chip, "even", w, 0, EVEN_P)
        for tile in range(2, tiles, 2):
            if turns > 1:
                yield from chip.sync(EVEN_TURN, MINE, 256)
            reading(chip, "left", 0, ("keys", tile - 2))
            yield from chip.wait(("left", 1), (tile // 2 & 1) ^ 1)
            yield "go"
            reading(chip, "left", 0, ("keys", tile - 2))
            chip.come(FREE + LEFT, MINE, 160)
            yield from hear(chip, "odd", tile - 1, ODD_P)
            other(chip, "left", tile - 1)
            yield from scores(chip, tile)
            yield "go"
            other(chip, "left", tile - 1)
            if tile + 1 < tiles:
                chip.come(FREE + LEFT + 1, MINE, 160)
                chip.come(FREE + LAST + 1, MINE, 160)
                yield "go"
                if turns:
                    chip.come(ODD_TURN, MINE, 256)
            yield "go"
            scores_over(chip, tile)
            yield from tell(chip, "even", w, tile, EVEN_P)
        tile = (tiles - 1) // 2 * 2
        if turns > 1 and tiles % 2 == 0:
            yield from chip.sync(EVEN_TURN, MINE, 256)
        reading(chip, "left", 0, ("keys", tile))
        yield "go"
        reading(chip, "left", 0, ("keys", tile))
        if tiles % 2 == 0:
            yield from chip.wait(("left", 1), tiles // 2 - 1 & 1)
            yield from hear(chip, "odd", tiles - 1, ODD_P)
            other(chip, "left", tiles - 1)
            yield "go"
            other(chip, "left", tiles - 1)
    yield from chip.sync(SUMS, MINE, 256)


def odd(chip, tiles, turns, w):
    yield from chip.wait("q", 0)
    for tile in range(1, tiles, 2):
        if turns:
            yield from chip.sync(ODD_TURN, MINE, 256)
        yield from scores(chip, tile)
        yield from chip.wait(("right", 0), tile // 2 & 1)
        yield from hear(chip, "even", tile - 1, EVEN_P)
        if turns > 1:
            chip.come(EVEN_TURN, MINE, 256)
            yield "go"
        scores_over(chip, tile)
        other(chip, "right", tile - 1)
        yield "go"
        yield from tell(chip, "odd", w, tile, ODD_P)
        yield "go"
        other(chip, "right", tile - 1)
        if tile + 1 < tiles:
            chip.come(FREE + RIGHT, MINE, 160)
            yield "go"
            chip.come(FREE + LAST, MINE, 160)
        reading(chip, "right", 1, ("keys", tile))
        yield "go"
        reading(chip, "right", 1, ("keys", tile))
        if tile + 2 < tiles:
            chip.come(FREE + RIGHT + 1, MINE, 160)
    if tiles % 2:
        yield from chip.wait(("right", 0), tiles // 2 & 1)
        yield from hear(chip, "even", tiles - 1, EVEN_P)
        other(chip, "right", tiles - 1)
        yield "go"
        other(chip, "right", tiles - 1)
    yield from chip.sync(SUMS, MINE, 256)


def named(generator, name):
    generator.__name__ = name
    return generator


def run(chip, tiles, turns, even=even):
    groups = [named(f(chip, tiles, turns, w), f"{name} {w}") for name, f in (("even", even), ("odd", odd)) for w in range(WARPS)]
    chip.run(produce(chip, tiles, turns), *groups)
    assert all(came == 0 for came, _, _ in chip.named.values()), f"somebody came whom nobody waits for: {chip.named}"


@pytest.mark.parametrize("turns", (0, 1, 2))
@pytest.mark.parametrize("tiles", range(10))
def test_pairs(tiles, turns):
    for seed in range(100):
        run(Chip(seed), tiles, turns)


def test_the_model_sees_a_piece_given_back_too_early():
    def hasty(chip, tiles, turns, w):
        first = even(chip, tiles, turns, w)
        chip.come(FREE + LEFT, MINE, 160)
        yield from first

    with pytest.raises(AssertionError):
        for seed in range(50):
            run(Chip(seed), 6, 1, even=hasty)
