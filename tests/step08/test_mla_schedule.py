"""Who waits for whom in the MLA kernels on sm_90: a model of their partitions, run in many orders, without a GPU.

A partition is a generator that yields what it waits for. Copies land at any later time. Every read checks that the place holds
what is meant, when it starts and again when it is known to be over; an order in which nobody can go on is a deadlock.
"""


import pytest
from support.chip import Chip

FREE, Q_FREE = 5, 13
PLACES = 3


WORKS = ([1], [2], [3], [4], [5], [7], [0], [1, 1, 1], [2, 2, 2], [3, 2, 1, 4], [0, 3, 0, 0, 5], [5, 0], [8, 8, 1, 8])


# 16 or 32 rows, mla_few_kernel: partitions that live as long as the launch


def few_produce(chip, works, slots):
    it = q_turn = 0

    def tell(turn, work):
        yield from chip.wait(("work free", turn % PLACES), turn // PLACES & 1 ^ 1)
        chip.memory["work", turn % PLACES] = work
        chip.arrive(("work", turn % PLACES))

    for turn, tiles in enumerate(works):
        yield from tell(turn, tiles)
        q_piece = 0 if q_turn == 0 else min(4, 3 * tiles - 1)
        for piece in range(3 * tiles):
            if piece == q_piece:
                if q_turn:
                    yield from chip.sync(Q_FREE, 32, 160)
                chip.expect("q", [(16 * 576 * 2, "q", q_turn)])
            if it >= slots:
                yield from chip.sync(FREE + it % slots, 32, 160)
            chip.expect(("k", it % slots), [(64 * 192 * 2, ("k", it % slots), (turn, piece))])
            it += 1
            yield "go"
        q_turn += tiles > 0
    yield from tell(len(works), None)


def few_consume(chip, works, slots):
    g = q_turn = 0
    for turn in range(len(works) + 1):
        yield from chip.wait(("work", turn % PLACES), turn // PLACES & 1)
        tiles = chip.memory["work", turn % PLACES]
        if tiles is None:
            assert turn == len(works)
            return
        assert tiles == works[turn]
        chip.arrive(("work free", turn % PLACES))
        if tiles:
            yield from chip.wait("q", q_turn & 1)
        for tile in range(tiles):
            for piece in range(3):
                yield from chip.wait(("k", (g + piece) % slots), (g + piece) // slots & 1)
                chip.read("q", q_turn)
                chip.read(("k", (g + piece) % slots), (turn, 3 * tile + piece))
            yield "go"
            chip.read("q", q_turn)
            if tile == tiles - 1:
                chip.come(Q_FREE, 128, 160)
            for piece in range(3):
                chip.read(("k", (g + piece) % slots), (turn, 3 * tile + piece))
                chip.come(FREE + (g + piece) % slots, 128, 160)
                yield "go"
            g += 3
        q_turn += tiles > 0


@pytest.mark.parametrize("slots", (7, 8))
@pytest.mark.parametrize("works", WORKS)
def test_few_rows(works, slots):
    assert FREE + slots <= Q_FREE
    for seed in range(100):
        chip = Chip(seed)
        chip.run(few_produce(chip, works, slots), few_consume(chip, works, slots))


def test_the_model_sees_a_deadlock():
    def lonely(chip):
        yield from chip.sync(FREE, 128, 160)

    with pytest.raises(AssertionError, match="deadlock"):
        chip = Chip(0)
        chip.run(lonely(chip))
