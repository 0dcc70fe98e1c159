"""The scheduler by itself: chunks, the bound on keys, who gives way, and a pool that is all or nothing."""


import pytest

from ladder.engine.engine import SamplingParams
from ladder.engine.kv_pool import OutOfPages, PagePool
from ladder.engine.scheduler import Request, Scheduler


def scheduler(pages=9, page_size=4, **options):
    return Scheduler(PagePool(pages, page_size), **{"max_seqs": 3, "chunk_tokens": 8, "chunk_keys": 16, **options})


def request(number, length, new=4):
    return Request(number, list(range(length)), SamplingParams(new))


def compute(step, token=0):
    """What the engine does with a step."""
    for r, new in step.chunks:
        r.computed += new
        if r.computed == r.length:
            r.output.append(token)


def test_a_long_prompt_comes_in_chunks_and_shares_steps():
    s = scheduler(pages=20)
    long, short = request(0, 13), request(1, 3)
    s.add(long), s.add(short)
    step = s.next()
    assert (step.decode, step.chunks) == (False, ((long, 8),))
    compute(step)
    step = s.next()
    assert step.chunks == ((long, 5), (short, 3))
    compute(step)
    assert s.next() == type(step)(True, ((long, 1), (short, 1)))


def test_keys_bound_a_step():
    s = scheduler(pages=40, chunk_tokens=8, chunk_keys=10, decode_every=99)
    a, b = request(0, 14), request(1, 6)
    s.add(a), s.add(b)
    compute(s.next())
    assert s.next().chunks == ((a, 6),)  # 14 keys already: the other prompt waits


def test_the_youngest_gives_way_and_resumes():
    s = scheduler(pages=5, chunk_tokens=32, chunk_keys=64)  # four pages of four tokens
    old, young = request(0, 4, 9), request(1, 4, 9)
    s.add(old), s.add(young)
    compute(s.next())
    compute(s.next())  # the first has its prompt, the second waits until a page is spare
    seen = set()
    for _ in range(30):
        step = s.next()
        if step is None:
            break
        compute(step)
        for r, _n in step.chunks:
            if len(r.output) == 9:
                s.finish(r, "length")
        seen |= {r.id for r, _n in step.chunks}
    assert seen == {0, 1} and old.preempted == 0 and old.finished == young.finished == "length"
    assert young.preempted == s.preemptions and s.pool.used == 0


def test_the_pool_is_all_or_nothing():
    pool, pages = PagePool(4, 8), []
    pool.grow(pages, 17)
    assert len(pages) == 3 and pool.free == 0 and 0 not in pages
    with pytest.raises(OutOfPages, match="1 more pages wanted, 0 are free"):
        pool.grow(pages, 25)
    assert len(pages) == 3
    pool.release(pages)
    assert pages == [] and pool.free == 3 and pool.most_used == 3
