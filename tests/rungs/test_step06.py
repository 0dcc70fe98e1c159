# ruff: noqa: E501  (rows of a table)
"""Rung 06: the paged cache, decode over it, the merge of its splits, and the errors a user sees."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.decode_checks import DEVICE

from ladder.lab.decode_problem import DecodeProblem
from ladder.lab.parity import poison
from ladder.lab.problem import reference
from ladder.rungs import find
from ladder.step06_paged import PagedKVCache, attention, choose_num_splits, decode_bytes_moved, paged_decode

ON_GPU = DEVICE.type == "cuda"


def test_dense_prefill_is_step_05():
    assert attention is find(5).attention


def test_choose_num_splits():
    assert choose_num_splits(512, 4096, 64, 132) == 1  # 64 sequences of 8 KV heads fill the chip
    assert choose_num_splits(1, 64, 64, 132) == 1  # one tile cannot be split
    assert choose_num_splits(1, 128, 64, 132) == 2
    for tasks in range(1, 600):
        splits, most = choose_num_splits(tasks, 1 << 20, 64, 132), max(1, 528 // tasks)
        filled = {s: s * tasks / 264 / -(-s * tasks // 264) for s in range(1, most + 1)}
        if filled[splits] < 0.85:  # then no number of splits reaches it, and none does better
            assert filled[splits] == max(filled.values())
        else:
            assert all(filled[s] < 0.85 for s in range(1, splits))


def test_decode_bytes_moved():
    problem = DecodeProblem(B=64, context=4096)
    kv = 64 * 4096 * 8 * 256 * 2
    assert problem.kv_bytes == kv
    assert 4 * kv < decode_bytes_moved(problem) < 4.1 * kv  # four query heads fetch each KV head, L2 or not


# The cache


def new_tokens(n, t, heads=2, dim=8, dim_v=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, t, heads, d, generator=generator).to(DEVICE) for d in (dim, dim_v))


def small_cache(**changes):
    options = dict(num_pages=10, page_size=4, num_kv_heads=2, head_dim=8, head_dim_v=4, max_seqs=3, max_seq_len=20)
    cache = PagedKVCache(**{**options, **changes}, dtype=torch.float32, device=DEVICE)
    poison(cache.k_pages, cache.v_pages)
    return cache


@pytest.mark.parametrize("page_size", (1, 3, 4, 64))
def test_append_then_read_back(page_size):
    cache = small_cache(page_size=page_size, num_pages=40)
    stored = [[], [], []]
    for step, (seqs, t) in enumerate((([0, 1, 2], 3), ([1], 5), ([2, 0], 1), ([1], 4), ([0], 0), ([2], 4))):
        k, v = new_tokens(len(seqs), t, seed=step)
        cache.append(k, v, seqs)
        for i, s in enumerate(seqs):
            stored[s].append((k[i], v[i]))
    for s in range(3):
        for got, want in zip(cache.read(s), zip(*stored[s])):
            assert torch.equal(got, torch.cat(want))
    assert cache.seq_lens.tolist() == [4, 12, 8] == [cache.length(s) for s in range(3)]
    pages = [p for row, n in zip(cache.block_table.tolist(), (4, 12, 8)) for p in row[: -(-n // page_size)]]
    assert len(set(pages)) == len(pages) == 40 - cache.free_pages
    assert all(p == -1 for row, n in zip(cache.block_table.tolist(), (4, 12, 8)) for p in row[-(-n // page_size) :])
    live = sum(cache.seq_lens.tolist()) * 2 * 8
    assert int((~cache.k_pages.isnan()).sum()) == live  # nothing else was touched


def test_decode_from_an_appended_cache():
    sizes = dict(num_kv_heads=2, head_dim=32, max_seqs=2, max_seq_len=64)
    cache = PagedKVCache(12, 16, **sizes, dtype=torch.float16, device=DEVICE)
    poison(cache.k_pages, cache.v_pages)
    q = torch.randn(2, 1, 4, 32).to(DEVICE, torch.float16)
    for step in range(3):
        cache.append(*(x.half() for x in new_tokens(2, 13, 2, 32, 32, seed=step)))
        out = paged_decode(q, cache.k_pages, cache.v_pages, cache.block_table, cache.seq_lens)
        for b in range(2):
            k, v = (x.transpose(0, 1)[None] for x in cache.read(b))
            want, _ = reference(q[b].transpose(0, 1)[None], k, v)
            assert (out[b, 0].double() - want[0, :, 0]).abs().max() < 2e-3


def test_free_gives_pages_back():
    cache = small_cache()
    cache.append(*new_tokens(3, 9))
    assert cache.free_pages == 1
    cache.free(1)
    assert cache.free_pages == 4 and cache.length(1) == 0 and cache.seq_lens.tolist() == [9, 0, 9]
    assert (cache.block_table[1] == -1).all()
    cache.append(*new_tokens(1, 13, seed=1), [1])
    assert torch.equal(cache.read(1)[0], new_tokens(1, 13, seed=1)[0][0])
    assert torch.equal(cache.read(0)[0], new_tokens(3, 9)[0][0])


def both(c, *seqs, **changes):
    """``append`` of 3 new tokens to 2 sequences, k or v replaced."""
    k, v = new_tokens(2, 3)
    c.append(*{**dict(k=k, v=v), **changes}.values(), *seqs)


def one(c, seqs):
    c.append(*new_tokens(1, 1), seqs=seqs)


BAD_BOOKS = (
    (TypeError, "num_tokens is 1.5; want an integer of at least 0", lambda c: c.allocate(0, 1.5)),
    (TypeError, "num_tokens is True; want an integer", lambda c: c.allocate(0, True)),
    (TypeError, "num_tokens is None; want an integer", lambda c: c.allocate(0, None)),
    (ValueError, "num_tokens is -1; want an integer of at least 0", lambda c: c.allocate(0, -1)),
    (TypeError, "seq is 'a'; want an integer, 0 .. 1", lambda c: c.allocate("a", 1)),
    (TypeError, r"k is a list; want a torch.Tensor \(n, t, 2, 8\)", lambda c: both(c, k=[1])),
    (TypeError, r"v is a list; want a torch.Tensor \(2, 3, 2, 4\)", lambda c: both(c, v=[2])),
    (ValueError, r"k has shape \(\); want", lambda c: both(c, k=torch.zeros(()))),
    (ValueError, r"k has shape \(2,\); want \(n, t, 2, 8\)", lambda c: both(c, k=torch.zeros(2))),
    (ValueError, r"k has shape \(3, 2, 8\); want", lambda c: both(c, k=new_tokens(1, 3)[0][0])),
    (ValueError, r"v has shape \(2, 2, 2, 4\); want \(2, 3, 2, 4\)", lambda c: both(c, v=new_tokens(2, 2)[1])),
    (ValueError, r"v has shape \(2, 3, 2, 8\); want \(2, 3, 2, 4\)", lambda c: both(c, v=new_tokens(2, 3)[0])),
    (ValueError, "k has dtype torch.float16; want torch.float32, the dtype of the cache", lambda c: both(c, k=new_tokens(2, 3)[0].half())),
    (ValueError, r"k has shape \(2, 3, 2, 8\); want \(1, 3, 2, 8\)", lambda c: both(c, [0])),
    (ValueError, "k has 3 sequences; want 2 at most, max_seqs of the cache", lambda c: c.append(*new_tokens(3, 1))),
    (ValueError, r"seqs is \[1, 1\]; want every sequence once", lambda c: both(c, [1, 1])),
    (ValueError, "seq is 3; want 0 .. 1", lambda c: both(c, [0, 3])),
    (TypeError, "seq is 'a'; want an integer, 0 .. 1", lambda c: one(c, ["a"])),
    (TypeError, "seq is 0.5; want an integer, 0 .. 1", lambda c: one(c, [0.5])),
    (TypeError, "seq is True; want an integer, 0 .. 1", lambda c: one(c, [True])),
    (TypeError, "seqs is 1; want a sequence of integers, or None", lambda c: one(c, 1)),
    (TypeError, "seqs is 1; want", lambda c: one(c, torch.tensor(1))),
    (TypeError, "seq is 1.0; want an integer", lambda c: one(c, torch.ones(1))),
    (ValueError, "sequence 0 would have 21 tokens; its row of the block table holds 20", lambda c: c.append(*new_tokens(2, 14))),
    (MemoryError, "sequence 1 needs 3 more pages; 1 are free", lambda c: c.append(*new_tokens(2, 13), [0, 1])),
    (TypeError, "seq is 'a'; want an integer", lambda c: c.free("a")),
    (ValueError, "seq is 2; want 0 .. 1", lambda c: c.read(2)),
)  # fmt: skip


@pytest.mark.parametrize("error, message, call", BAD_BOOKS, ids=[message for _, message, _ in BAD_BOOKS])
def test_an_error_leaves_the_books_alone(error, message, call):
    cache = small_cache(num_pages=8 if error is MemoryError else 10, max_seqs=2)
    cache.append(*new_tokens(2, 7))
    before, pages = books(cache), cache.k_pages.clone()
    with pytest.raises(error, match="PagedKVCache: " + message):
        call(cache)
    assert books(cache) == before and torch.equal(cache.k_pages.nan_to_num(), pages.nan_to_num())


class Broken(BaseException):
    """As Ctrl-C is no Exception."""


def books(cache):
    lengths = [cache.length(s) for s in range(len(cache.seq_lens))]
    return cache.seq_lens.tolist(), cache.block_table.tolist(), lengths, [list(p) for p in cache._pages], list(cache._free)


@pytest.mark.parametrize("place", ("allocate", "write", "the middle of write"))
def test_an_append_that_fails_changes_nothing(place, monkeypatch):
    """Appends of random sizes to random sequences, half of which fail: the books are then as before, and the next goes on."""
    cache, generator, stored, failed = small_cache(), random.Random(place), [[], [], []], 0
    for step in range(60):
        seqs = generator.sample(range(3), generator.randint(1, 3))
        new = generator.randint(0, 4)
        k, v = new_tokens(len(seqs), new, seed=step)
        before = books(cache)
        with monkeypatch.context() as patch:
            if generator.random() < 0.5:
                real, after = PagedKVCache.allocate, generator.randint(0, len(seqs) - 1)

                def fail(self, *args, real=real, calls=iter(range(9)), after=after):
                    if place != "allocate" or next(calls) >= after:
                        raise Broken
                    return real(self, *args)

                if place == "the middle of write":  # keys are stored by then
                    pages = SimpleNamespace(shape=v.shape, dtype=v.dtype, device=v.device, view=lambda *args: fail(0))
                    patch.setattr(cache, "v_pages", pages)
                else:
                    patch.setattr(PagedKVCache, place, fail)
            try:
                cache.append(k, v, seqs)
            except (Broken, MemoryError, ValueError) as error:
                failed += isinstance(error, Broken)
                assert books(cache) == before
                continue
        for i, s in enumerate(seqs):
            stored[s].append((k[i], v[i]))
        if cache.free_pages < 3:
            cache.free(seqs[0])
            stored[seqs[0]] = []
        for s in range(3):
            for got, want in zip(cache.read(s), zip(*stored[s])):
                assert torch.equal(got, torch.cat(want))
    assert failed > 10


def test_inference_mode_or_not_is_the_same():
    """A cache that was made inside may be written outside, and the other way round; no gradients are kept."""
    found = []
    for made, used in ((True, False), (False, True), (False, False)):
        with torch.inference_mode(made):
            cache = small_cache()
        with torch.inference_mode(used):
            for step in range(3):
                k, v = new_tokens(3, 2, seed=step)
                cache.append(k.requires_grad_(not used), v)
            cache.free(1)
            cache.append(*new_tokens(1, 5, seed=9), [1])
        assert not cache.k_pages.requires_grad
        found.append((books(cache), [cache.read(s)[0].tolist() for s in range(3)]))
    assert found[0] == found[1] == found[2] and found[0][0][0] == [6, 5, 6]


@pytest.mark.parametrize(
    "changes, error, message",
    (
        *((dict([(n, 0)]), ValueError, f"{n} is 0; want an integer of at least 1")
          for n in ("num_pages", "page_size", "num_kv_heads", "head_dim", "max_seqs", "max_seq_len")),
        (dict(num_pages=2.0), TypeError, "num_pages is 2.0; want an integer of at least 1"),
        (dict(max_seqs=True), TypeError, "max_seqs is True; want an integer of at least 1"),
        (dict(page_size="16"), TypeError, "page_size is '16'; want an integer of at least 1"),
        (dict(dtype=torch.int32), ValueError, "dtype is torch.int32; want float16, bfloat16 or float32"),
        (dict(dtype=torch.float64), ValueError, "dtype is torch.float64; want float16, bfloat16 or float32"),
        (dict(dtype="float16"), TypeError, "dtype is 'float16'; want a torch.dtype"),
    ),
)  # fmt: skip
def test_cache_that_cannot_be(changes, error, message):
    options = dict(num_pages=10, page_size=4, num_kv_heads=2, head_dim=8, max_seqs=3, max_seq_len=20)
    with pytest.raises(error, match="PagedKVCache: " + message):
        PagedKVCache(**{**options, **changes})


def test_integers_of_numpy():
    cache = small_cache(num_pages=np.int64(10), page_size=np.int64(4), max_seqs=np.int64(3), max_seq_len=np.int64(20))
    k, v = new_tokens(2, 5)
    cache.append(k, v, np.array([2, 0]))
    cache.append(k, v, torch.tensor([2, 0]))
    cache.allocate(np.int32(1), np.int64(5))
    assert [cache.length(np.int64(s)) for s in range(3)] == [10, 5, 10] and cache.free_pages == 2
    assert torch.equal(cache.read(np.int64(2))[0], k[0].repeat(2, 1, 1))
