"""Who waits for whom in the MLA kernels on sm_90: a model of their partitions, run in many orders, without a GPU.

A partition is a generator that yields what it waits for. Copies land at any later time. Every read checks that the place holds
what is meant, when it starts and again when it is known to be over; an order in which nobody can go on is a deadlock.
"""

import random

import pytest

FREE, Q_FREE = 5, 13
PLACES = 3


class Chip:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.named = {}  # hardware barrier -> [threads that came, threads wanted, rounds done]
        self.full = {}  # mbarrier -> [phases done, bytes or arrivals outstanding]
        self.memory = {}
        self.copies = []
        self.events = 0

    def come(self, barrier, mine, wanted):
        """``bar.arrive``, and the first half of ``bar.sync``: the round in which this one is done."""
        assert isinstance(barrier, str) or 5 <= barrier <= 15, "Triton takes 0 .. 4 for itself, here under a name"
        state = self.named.setdefault(barrier, [0, wanted, 0])
        assert state[1] == wanted
        self.events += 1
        state[0] += mine
        assert state[0] <= wanted, f"barrier {barrier}: more than {wanted} threads"
        this = state[2]
        if state[0] == wanted:
            state[0], state[2] = 0, this + 1
        return this

    def sync(self, barrier, mine, wanted):
        this = self.come(barrier, mine, wanted)
        while self.named[barrier][2] <= this:
            yield f"bar {barrier}"

    def wait(self, name, parity):
        state = self.full.setdefault(name, [0, None])
        while state[0] & 1 == parity:
            yield f"mbarrier {name} parity {parity}"

    def expect(self, name, copies):
        """``mbarrier.expect`` and the copies, (bytes, place, value) each."""
        state = self.full.setdefault(name, [0, None])
        assert state[1] is None, f"mbarrier {name}: a phase opens before the last is over"
        state[1] = sum(n for n, _, _ in copies)
        for n, place, value in copies:
            self.memory[place] = "under way"
            self.copies.append((name, n, place, value))

    def arrive(self, name):
        self.events += 1
        self.full.setdefault(name, [0, None])[0] += 1

    def land(self):
        name, n, place, value = self.copies.pop(self.random.randrange(len(self.copies)))
        self.memory[place] = value
        self.events += 1
        state = self.full[name]
        state[1] -= n
        if state[1] == 0:
            state[0], state[1] = state[0] + 1, None

    def read(self, place, value):
        assert self.memory.get(place) == value, f"{place} holds {self.memory.get(place)}; want {value}"

    def run(self, *partitions):
        """Let partitions run and copies land, in a random order, until all are done."""
        alive, waiting = set(partitions), {}
        while alive:
            ready = sorted(alive - waiting.keys(), key=lambda p: p.__name__) + ["copy"] * bool(self.copies)
            assert ready, f"deadlock: {[(p.__name__, what) for p, what in waiting.items()]}"
            chosen, before = self.random.choice(ready), self.events
            if chosen == "copy":
                self.land()
            else:
                what = next(chosen, None)
                if what is None:
                    alive.remove(chosen)
                elif what != "go":
                    waiting[chosen] = what
            if self.events != before:  # it may be what the others wait for
                waiting = {}
        assert not self.copies


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
