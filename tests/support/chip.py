"""A model of one multiprocessor: named barriers, mbarriers, copies under way, and shared memory that says who wrote it."""

import random


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
