"""The paged allocator: a model check against plain bookkeeping, sharing, eviction, compaction, fragmentation."""

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dspark_mini import KVPool, OutOfPages


class Machine(RuleBasedStateMachine):
    """Random use of a small pool. `text` is what each sequence holds; `memory` what is in the pages."""

    def __init__(self):
        super().__init__()
        self.pool, self.size = KVPool(12, 4), 4
        self.text, self.memory, self.next = {}, {}, 0
        self.prefixes = {}

    def write(self, name, start):
        pages = self.pool.pages(name)
        for i in range(start, len(self.text[name])):
            self.memory[pages[i // self.size], i % self.size] = self.text[name][i]

    @rule(tokens=st.integers(1, 20), use=st.sampled_from([None, "p", "q"]))
    def allocate(self, tokens, use):
        name, self.next = self.next, self.next + 1
        before = self.pool.stats()
        try:
            pages, hit = self.pool.allocate(name, tokens, prefix=use)
        except OutOfPages:
            assert self.pool.stats() == before
            assert -(-tokens // 4) * 4 > self.pool.available() or use
            return
        assert len(pages) == -(-tokens // 4) and hit % 4 == 0 and hit <= tokens
        self.text[name] = self.prefixes[use][:hit] if hit else []
        self.text[name] = self.text[name] + [(name, i) for i in range(hit, tokens)]
        self.write(name, hit)

    @precondition(lambda self: self.text)
    @rule(data=st.data(), tokens=st.integers(1, 6))
    def append(self, data, tokens):
        name = data.draw(st.sampled_from(sorted(self.text)))
        try:
            _, copies = self.pool.append(name, tokens)
        except OutOfPages:
            return
        for source, target in copies:
            for i in range(self.size):
                self.memory[target, i] = self.memory.get((source, i))
        start = len(self.text[name])
        self.text[name] = self.text[name] + [(name, "more", start + i) for i in range(tokens)]
        self.write(name, start)

    @precondition(lambda self: self.text)
    @rule(data=st.data())
    def fork(self, data):
        name, child = data.draw(st.sampled_from(sorted(self.text))), self.next
        self.next += 1
        self.pool.fork(name, child)
        self.text[child] = list(self.text[name])

    @precondition(lambda self: self.text)
    @rule(data=st.data(), prefix=st.sampled_from(["p", "q"]))
    def keep(self, data, prefix):
        name = data.draw(st.sampled_from(sorted(self.text)))
        tokens = data.draw(st.integers(1, len(self.text[name])))
        self.pool.cache_prefix(prefix, name, tokens)
        self.prefixes[prefix] = self.text[name][: tokens // 4 * 4]

    @precondition(lambda self: self.text)
    @rule(data=st.data())
    def free(self, data):
        name = data.draw(st.sampled_from(sorted(self.text)))
        self.pool.free(name)
        del self.text[name]

    @rule()
    def compact(self):
        moves = self.pool.compaction()
        stats = self.pool.stats()
        live = stats.used + stats.cached
        assert all(source >= live > target for source, target in moves)  # the least that can be moved
        for source, target in moves:
            for i in range(self.size):
                self.memory[target, i] = self.memory.get((source, i))
        self.pool.apply(moves)
        assert self.pool.compaction() == []

    @invariant()
    def everything_is_where_it_was_written(self):
        for name, text in self.text.items():
            pages = self.pool.pages(name)
            assert [self.memory[pages[i // 4], i % 4] for i in range(len(text))] == text
        stats = self.pool.stats()
        assert stats.used + stats.cached + stats.free == 12
        used = {page for name in self.text for page in self.pool.pages(name)}
        assert stats.used == len(used) and stats.tokens + stats.internal == 4 * len(used)


TestPool = Machine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_shared_prefix_is_stored_once():
    pool = KVPool(100, 16)
    pool.allocate("first", 160)
    pool.cache_prefix("system", "first", 128)
    hits = [pool.allocate(i, 160, prefix="system")[1] for i in range(10)]
    assert hits == [128] * 10
    assert pool.stats().used == 8 + 11 * 2 and pool.stats().utilisation == 1.0
    pool.append(0)
    assert pool.stats().utilisation == pytest.approx(481 / 496)
    for name in ("first", *range(10)):
        pool.free(name)
    assert (pool.stats().used, pool.stats().cached, pool.stats().free) == (0, 8, 92)
    pool.allocate("big", 1600)  # the memory is wanted: the prefix goes
    assert pool.stats().cached == 0


def books(pool):
    """All that the pool knows: prefixes with the least recently used first, the free pages in any order."""
    state = copy.deepcopy(vars(pool))
    return {**state, "_prefixes": list(state["_prefixes"].items()), "_free": sorted(state["_free"])}


def test_what_is_refused_changes_nothing():
    """Also the order in which prefixes go, and reference counts, which no statistic shows."""
    pool = KVPool(8, 4)
    for prefix in "pq":
        pool.allocate(prefix, 8)
        pool.cache_prefix(prefix, prefix, 8)
        pool.free(prefix)
    pool.allocate("a", 10)
    before = books(pool)
    for error, call in (
        (OutOfPages, lambda: pool.allocate("b", 40, prefix="p")),
        (OutOfPages, lambda: pool.append("a", 30)),
        (ValueError, lambda: pool.allocate("b", 8.0, prefix="p")),
        (ValueError, lambda: pool.allocate("b", 18.5)),
        (ValueError, lambda: pool.allocate("b", True)),
        (ValueError, lambda: pool.append("a", 9.0)),
        (ValueError, lambda: pool.append("a", "1")),
        (ValueError, lambda: pool.cache_prefix("p", "a", 8.0)),
        (ValueError, lambda: pool.fork("a", "a")),
        (ValueError, lambda: pool.apply([(0, 7), (0, 6)])),
        (ValueError, lambda: pool.apply([(0, -1)])),
        (ValueError, lambda: pool.apply([(0, 8)])),
        (TypeError, lambda: pool.allocate([], 4)),
        (TypeError, lambda: pool.cache_prefix([], "a", 4)),
        (TypeError, lambda: pool.fork("a", [])),
    ):
        with pytest.raises(error):
            call()
        assert books(pool) == before
    pool.apply(move for move in [(0, 7)])
    assert pool._prefixes["p"][0] == [7, 1]
    pool.allocate("b", 8, prefix="p")
    pool.free("b")  # q is now the prefix that was used least recently: it goes first
    pool.allocate("c", 8)
    assert list(pool._prefixes) == ["p"]


def test_pages_of_the_prefix_that_a_sequence_takes_are_not_counted_as_free():
    """A prefix that only the newcomer uses frees nothing by being evicted: out of pages, not out of victims."""
    pool = KVPool(4, 4)
    pool.allocate("a", 8)
    pool.cache_prefix("p", "a", 8)
    pool.free("a")
    pool.allocate("b", 4)  # 1 page is free, 2 lie in the prefix
    before = pool.stats()
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 free and 0 held"):
        pool.allocate("c", 16, prefix="p")
    assert pool.stats() == before
    assert pool.allocate("c", 12, prefix="p")[1] == 8
