"""Who waits for whom in the MLA kernel whose two groups share tiles in pairs, on sm_90: a model run in many orders, without a GPU.

Each group is two actors that stand for its warps, which meet only where the compiled kernel lets them meet. A product reads
from its issue until its wait; both ends are checked. The partitions live as long as the launch: what a work leaves behind must
suit the next one. ``support.chip`` has the chip.
"""

import random

import pytest
from support.chip import Chip

FREE, LEFT, RIGHT, LAST = 5, 0, 2, 4
EVEN_P, ODD_P, ODD_TURN, SUMS, EVEN_TURN = 11, 12, 13, 14, 15
PLACES = 3
WARPS = 2
MINE = 128 // WARPS
PIECES = ((LEFT, "left"), (RIGHT, "right"), (LAST, "last"))


def places(name, slot):
    """The last key columns lie in one part for each warp, which will hold the rows of its probabilities."""
    return [("last", slot, w) for w in range(WARPS)] if name == "last" else [(name, slot)]


def reading(chip, name, slot, value):
    for place in places(name, slot):
        chip.read(place, value)


def arrive_once(chip, name, of):
    """``mbarrier.arrive`` on a barrier that counts to ``of``."""
    chip.events += 1
    came = chip.memory.get(("came", name), 0) + 1
    chip.memory["came", name] = came % of
    if came == of:
        chip.arrive(name)


def arrive(chip, group, w, name):
    """Of a group: all its warps meet, then one thread arrives."""
    yield from chip.sync(group, MINE, 128)
    if w == 0:
        arrive_once(chip, name, 2)


def produce(chip, works):
    uses = [0, 0]

    def tell(turn, work):
        yield from chip.wait(("work free", turn % PLACES), turn // PLACES & 1 ^ 1)
        chip.memory["work", turn % PLACES] = (turn, work)
        chip.arrive(("work", turn % PLACES))

    def query(turn):
        yield from chip.wait("q free", turn & 1 ^ 1)
        chip.expect("q", [(64 * 576 * 2, "q", turn)])

    for turn, tiles in enumerate(works):
        yield from tell(turn, tiles)
        if turn == 0:
            yield from query(turn)
        for tile in range(tiles):
            slot = tile % 2
            for piece, name in PIECES if slot == 0 else (PIECES[1], PIECES[0], PIECES[2]):
                if uses[slot] > 0:
                    yield from chip.sync(FREE + piece + slot, 32, 160)
                chip.expect((name, slot), [(64, place, ("keys", turn, tile)) for place in places(name, slot)])
                yield "go"
            uses[slot] += 1
            if turn > 0 and tile == 0:
                yield from query(turn)
        if turn > 0 and tiles == 0:
            yield from query(turn)
    yield from tell(len(works), None)


def scores(chip, turn, tile, use):
    for name in ("left", "right", "last") if tile % 2 == 0 else ("right", "left", "last"):
        yield from chip.wait((name, tile % 2), use & 1)
        reading(chip, name, tile % 2, ("keys", turn, tile))
    chip.read("q", turn)


def scores_over(chip, turn, tile):
    for _, name in PIECES:
        reading(chip, name, tile % 2, ("keys", turn, tile))
    chip.read("q", turn)


def tell(chip, group, w, turn, tile, barrier):
    yield from chip.sync(group, MINE, 128)  # else a warp would write over keys that another one's scores still read
    chip.memory["last", tile % 2, w] = chip.memory["max", group, w] = "half written"
    yield "go"
    chip.memory["last", tile % 2, w] = ("p", turn, tile)
    chip.memory["max", group, w] = (turn, tile)
    chip.come(barrier, MINE, 256)


def hear(chip, group, turn, tile, barrier):
    yield from chip.sync(barrier, MINE, 256)
    for _ in range(2):
        for w in range(WARPS):
            chip.read(("max", group, w), (turn, tile))
        yield "go"


def product(chip, name, turn, tile):
    reading(chip, name, tile % 2, ("keys", turn, tile))


def other(chip, name, turn, tile):
    """A product with the other group's probabilities: what it reads, at its start and its end."""
    product(chip, name, turn, tile)
    reading(chip, "last", tile % 2, ("p", turn, tile))


def sums(chip, mine, others, w, turn, buffers):
    chip.memory["sum", mine, turn % buffers, w] = turn
    yield "go"
    yield from chip.sync(SUMS, MINE, 256)
    yield "go"
    for i in range(WARPS):
        chip.read(("sum", others, turn % buffers, i), turn)
    yield "go"


def works_of(chip, group, w, body):
    """What both groups do with the ring of works."""
    turn = 0
    while True:
        place = turn % PLACES
        yield from chip.wait(("work", place), turn // PLACES & 1)
        told, tiles = chip.memory["work", place]
        assert told == turn
        if tiles is None:
            return
        yield from chip.wait("q", turn & 1)
        yield from body(turn, tiles)
        chip.read(("work", place), (turn, tiles))
        yield from arrive(chip, group, w, ("work free", place))
        turn += 1


def even(chip, w, buffers=2):
    uses = [0, 0]

    def body(turn, tiles):
        evens, odds = uses
        if tiles:
            yield from scores(chip, turn, 0, evens)
            yield "go"
            scores_over(chip, turn, 0)
            if tiles > 1:
                chip.come(ODD_TURN, MINE, 256)
            yield "go"
            yield from tell(chip, "even", w, turn, 0, EVEN_P)
            for tile in range(2, tiles, 2):
                half = tile // 2
                yield from chip.sync(EVEN_TURN, MINE, 256)
                product(chip, "left", turn, tile - 2)
                yield from chip.wait(("left", 1), odds + half - 1 & 1)
                yield "go"
                product(chip, "left", turn, tile - 2)
                chip.come(FREE + LEFT, MINE, 160)
                yield from hear(chip, "odd", turn, tile - 1, ODD_P)
                other(chip, "left", turn, tile - 1)
                yield from scores(chip, turn, tile, evens + half)
                yield "go"
                other(chip, "left", turn, tile - 1)
                chip.come(FREE + LEFT + 1, MINE, 160)
                chip.come(FREE + LAST + 1, MINE, 160)
                yield "go"
                if tile + 1 < tiles:
                    chip.come(ODD_TURN, MINE, 256)
                yield "go"
                scores_over(chip, turn, tile)
                yield from tell(chip, "even", w, turn, tile, EVEN_P)
            yield from arrive(chip, "even", w, "q free")
            uses[0] += (tiles + 1) // 2
            uses[1] += tiles // 2
            tile = (tiles - 1) // 2 * 2
            if tiles % 2 == 0:
                yield from chip.sync(EVEN_TURN, MINE, 256)
            product(chip, "left", turn, tile)
            yield "go"
            product(chip, "left", turn, tile)
            chip.come(FREE + LEFT, MINE, 160)
            if tiles % 2 == 0:
                yield from chip.wait(("left", 1), uses[1] - 1 & 1)
                yield from hear(chip, "odd", turn, tiles - 1, ODD_P)
                other(chip, "left", turn, tiles - 1)
                yield "go"
                other(chip, "left", turn, tiles - 1)
                chip.come(FREE + LEFT + 1, MINE, 160)
                chip.come(FREE + LAST + 1, MINE, 160)
        else:
            yield from arrive(chip, "even", w, "q free")
        yield from sums(chip, "even", "odd", w, turn, buffers)

    yield from works_of(chip, "even", w, body)


def odd(chip, w, buffers=2):
    uses = [0, 0]

    def body(turn, tiles):
        evens, odds = uses
        for tile in range(1, tiles, 2):
            half = tile // 2
            yield from chip.sync(ODD_TURN, MINE, 256)
            yield from scores(chip, turn, tile, odds + half)
            yield from chip.wait(("right", 0), evens + half & 1)
            yield from hear(chip, "even", turn, tile - 1, EVEN_P)
            chip.come(EVEN_TURN, MINE, 256)
            yield "go"
            scores_over(chip, turn, tile)
            other(chip, "right", turn, tile - 1)
            yield "go"
            yield from tell(chip, "odd", w, turn, tile, ODD_P)
            yield "go"
            other(chip, "right", turn, tile - 1)
            chip.come(FREE + RIGHT, MINE, 160)
            yield "go"
            chip.come(FREE + LAST, MINE, 160)
            product(chip, "right", turn, tile)
            yield "go"
            product(chip, "right", turn, tile)
            chip.come(FREE + RIGHT + 1, MINE, 160)
        yield from arrive(chip, "odd", w, "q free")
        uses[0] += (tiles + 1) // 2
        uses[1] += tiles // 2
        if tiles % 2:
            yield from chip.wait(("right", 0), uses[0] - 1 & 1)
            yield from hear(chip, "even", turn, tiles - 1, EVEN_P)
            other(chip, "right", turn, tiles - 1)
            yield "go"
            other(chip, "right", turn, tiles - 1)
            chip.come(FREE + RIGHT, MINE, 160)
            chip.come(FREE + LAST, MINE, 160)
        yield from sums(chip, "odd", "even", w, turn, buffers)

    yield from works_of(chip, "odd", w, body)


def named(generator, name):
    generator.__name__ = name
    return generator


def run(chip, works, even=even, odd=odd):
    groups = [named(f(chip, w), f"{name} {w}") for name, f in (("even", even), ("odd", odd)) for w in range(WARPS)]
    chip.run(produce(chip, works), *groups)
    used = [any(works), any(n > 1 for n in works)]
    for barrier, (came, _, _) in chip.named.items():
        free = isinstance(barrier, int) and FREE <= barrier < FREE + 6
        assert came == (128 if free and used[(barrier - FREE) % 2] else 0), f"barrier {barrier} is left with {came}"


@pytest.mark.parametrize("tiles", range(10))
def test_one_work(tiles):
    for seed in range(50):
        run(Chip(seed), [tiles])


@pytest.mark.parametrize("tiles", range(6))
def test_equal_works(tiles):
    for seed in range(50):
        run(Chip(seed), [tiles] * 5)


def test_works_one_after_another():
    for seed in range(600):
        choose = random.Random(seed)
        run(Chip(seed), [choose.randrange(6) for _ in range(choose.randrange(1, 8))])


def test_the_model_sees_a_piece_given_back_too_early():
    def hasty(chip, w):
        chip.come(FREE + LEFT, MINE, 160)
        yield from even(chip, w)

    with pytest.raises(AssertionError):
        for seed in range(50):
            run(Chip(seed), [6], even=hasty)


def test_the_model_sees_sums_written_over():
    with pytest.raises(AssertionError):
        for seed in range(200):
            run(Chip(seed), [1, 1, 0, 1], even=lambda chip, w: even(chip, w, 1), odd=lambda chip, w: odd(chip, w, 1))
