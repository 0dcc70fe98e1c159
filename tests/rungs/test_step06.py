"""Rung 06: the paged cache, decode over it, the merge of its splits, and the errors a user sees."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.decode_checks import DEVICE

from ladder.lab.decode_problem import DecodeProblem
from ladder.lab.parity import poison
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
        splits = choose_num_splits(tasks, 1 << 20, 64, 132)
        waves = splits * tasks / 264
        assert 1 <= splits <= max(1, 528 // tasks)
        if waves / -(-splits * tasks // 264) < 0.85:  # then no number of splits reaches it, and none does better
            assert all(s * tasks / 264 / -(-s * tasks // 264) <= waves / -(-splits * tasks // 264) for s in range(1, max(2, 528 // tasks + 1)))
        else:
            assert all(s * tasks / 264 / -(-s * tasks // 264) < 0.85 for s in range(1, splits))


def test_decode_bytes_moved():
    problem = DecodeProblem(B=64, context=4096)
    kv = 64 * 4096 * 8 * 256 * 2
    assert problem.kv_bytes == kv
    assert 4 * kv < decode_bytes_moved(problem) < 4.1 * kv  # four query heads fetch each KV head, L2 or not


# The cache


def new_tokens(n, t, heads=2, dim=8, dim_v=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(n, t, heads, dim, generator=generator).to(DEVICE),
        torch.randn(n, t, heads, dim_v, generator=generator).to(DEVICE),
    )


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
    cache = PagedKVCache(12, 16, num_kv_heads=2, head_dim=32, max_seqs=2, max_seq_len=64, dtype=torch.float16, device=DEVICE)
    poison(cache.k_pages, cache.v_pages)
    q = torch.randn(2, 1, 4, 32).to(DEVICE, torch.float16)
    for step in range(3):
        cache.append(*(torch.randn(2, 13, 2, 32, generator=torch.Generator().manual_seed(step)).to(DEVICE, torch.float16) for _ in range(2)))
        out = paged_decode(q, cache.k_pages, cache.v_pages, cache.block_table, cache.seq_lens)
        for b in range(2):
            k, v = (x.transpose(0, 1)[None] for x in cache.read(b))
            want = torch.softmax((q[b].transpose(0, 1)[None].double() @ k.repeat_interleave(2, 1).double().mT) / 32**0.5, -1)
            want = (want @ v.repeat_interleave(2, 1).double())[0, :, 0]
            assert (out[b, 0].double() - want).abs().max() < 2e-3


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


def test_a_full_cache_stores_nothing():
    cache = small_cache()
    cache.append(*new_tokens(2, 16))
    before = cache.k_pages.clone(), cache.block_table.clone()
    with pytest.raises(MemoryError, match="PagedKVCache: sequence 2 needs 3 more pages; 2 are free"):
        cache.append(*new_tokens(1, 9), [2])
    with pytest.raises(ValueError, match="sequence 0 would have 21 tokens; its row of the block table holds 20"):
        cache.append(*new_tokens(2, 5))
    assert cache.seq_lens.tolist() == [16, 16, 0] and cache.free_pages == 2
    assert torch.equal(cache.k_pages.nan_to_num(), before[0].nan_to_num()) and torch.equal(cache.block_table, before[1])


def test_cache_rejects():
    cache = small_cache()
    k, v = new_tokens(2, 3)
    for args, message in (
        ((k[0], v), r"k has shape \(3, 2, 8\); want"),
        ((k, v[:, :2]), r"v has shape \(2, 2, 2, 4\); want \(2, 3, 2, 4\)"),
        ((k, k), r"v has shape \(2, 3, 2, 8\); want \(2, 3, 2, 4\)"),
        ((k.half(), v), "k has dtype torch.float16; want torch.float32, the dtype of the cache"),
        ((k, v, [0]), r"k has shape \(2, 3, 2, 8\); want \(1, 3, 2, 8\)"),
        ((k, v, [1, 1]), r"seqs is \[1, 1\]; want every sequence once"),
        ((k, v, [0, 3]), r"seq is 3; want 0 .. 2"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.append(*args)
    for name in ("num_pages", "page_size", "num_kv_heads", "head_dim", "max_seqs", "max_seq_len"):
        with pytest.raises(ValueError, match=f"PagedKVCache: {name} is 0; want an integer of at least 1"):
            small_cache(**{name: 0})


BAD_BOOKS = {
    "half a token": (TypeError, "num_tokens is 1.5; want an integer of at least 0", lambda c: c.allocate(0, 1.5)),
    "True tokens": (TypeError, "num_tokens is True; want an integer", lambda c: c.allocate(0, True)),
    "no token count": (TypeError, "num_tokens is None; want an integer", lambda c: c.allocate(0, None)),
    "-1 tokens": (ValueError, "num_tokens is -1; want an integer of at least 0", lambda c: c.allocate(0, -1)),
    "allocate for a": (TypeError, "seq is 'a'; want an integer, 0 .. 1", lambda c: c.allocate("a", 1)),
    "lists": (TypeError, r"k is a list; want a torch.Tensor \(n, t, 2, 8\)", lambda c: c.append([1], [2])),
    "v no tensor": (TypeError, r"v is a list; want a torch.Tensor \(2, 3, 2, 4\)", lambda c: c.append(new_tokens(2, 3)[0], [2])),
    "k of no dims": (ValueError, r"k has shape \(\); want", lambda c: c.append(torch.zeros(()), torch.zeros(()))),
    "k of 1 dim": (ValueError, r"k has shape \(2,\); want \(n, t, 2, 8\)", lambda c: c.append(torch.zeros(2), torch.zeros(2))),
    "too many": (ValueError, "k has 3 sequences; want 2 at most, max_seqs of the cache", lambda c: c.append(*new_tokens(3, 1))),
    "seqs a": (TypeError, "seq is 'a'; want an integer, 0 .. 1", lambda c: c.append(*new_tokens(1, 1), seqs=["a"])),
    "seqs 0.5": (TypeError, "seq is 0.5; want an integer, 0 .. 1", lambda c: c.append(*new_tokens(1, 1), seqs=[0.5])),
    "seqs True": (TypeError, "seq is True; want an integer, 0 .. 1", lambda c: c.append(*new_tokens(1, 1), seqs=[True])),
    "seqs 1": (TypeError, "seqs is 1; want a sequence of integers, or None", lambda c: c.append(*new_tokens(1, 1), seqs=1)),
    "seqs a 0-dim tensor": (TypeError, "seqs is 1; want", lambda c: c.append(*new_tokens(1, 1), seqs=torch.tensor(1))),
    "float tensor": (TypeError, "seq is 1.0; want an integer", lambda c: c.append(*new_tokens(1, 1), seqs=torch.ones(1))),
    "free a": (TypeError, "seq is 'a'; want an integer", lambda c: c.free("a")),
    "read 2": (ValueError, "seq is 2; want 0 .. 1", lambda c: c.read(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BOOKS)
def test_an_error_leaves_the_books_alone(name):
    error, message, call = BAD_BOOKS[name]
    cache = small_cache(max_seqs=2)
    cache.append(*new_tokens(2, 7))
    table = cache.block_table.clone()
    with pytest.raises(error, match="PagedKVCache: " + message):
        call(cache)
    assert [cache.length(s) for s in range(2)] == cache.seq_lens.tolist() == [7, 7]
    assert cache.free_pages == 6 and torch.equal(cache.block_table, table)
    assert torch.equal(cache.read(1)[0], new_tokens(2, 7)[0][1])


class Broken(BaseException):
    """As Ctrl-C is no Exception."""


def books(cache):
    return (cache.seq_lens.tolist(), cache.block_table.tolist(), [cache.length(s) for s in range(3)], [list(p) for p in cache._pages],
            list(cache._free))  # fmt: skip


@pytest.mark.parametrize("place", ("allocate", "write", "the middle of write"))
def test_an_append_that_fails_changes_nothing(place, monkeypatch):
    """Appends of random sizes to random sequences, half of which fail: the books after are those before, and the next goes on."""
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
        (dict(num_pages=2.0), TypeError, "num_pages is 2.0; want an integer of at least 1"),
        (dict(max_seqs=True), TypeError, "max_seqs is True; want an integer of at least 1"),
        (dict(page_size="16"), TypeError, "page_size is '16'; want an integer of at least 1"),
        (dict(dtype=torch.int32), ValueError, "dtype is torch.int32; want float16, bfloat16 or float32"),
        (dict(dtype=torch.float64), ValueError, "dtype is torch.float64; want float16, bfloat16 or float32"),
        (dict(dtype="float16"), TypeError, "dtype is 'float16'; want a torch.dtype"),
    ),
)
def test_cache_that_cannot_be(changes, error, message):
    options = dict(num_pages=10, page_size=4, num_kv_heads=2, head_dim=8, max_seqs=3, max_seq_len=20)
    with pytest.raises(error, match="PagedKVCache: " + message):
        PagedKVCache(**{**options, **changes})


def test_integers_of_numpy():
    cache = small_cache(**{name: np.int64(n) for name, n in dict(num_pages=10, page_size=4, max_seqs=3, max_seq_len=20).items()})
    k, v = new_tokens(2, 5)
    cache.append(k, v, np.array([2, 0]))
    cache.append(k, v, torch.tensor([2, 0]))
    cache.allocate(np.int32(1), np.int64(5))
    assert [cache.length(np.int64(s)) for s in range(3)] == [10, 5, 10] and cache.free_pages == 2
    assert torch.equal(cache.read(np.int64(2))[0], k[0].repeat(2, 1, 1))
