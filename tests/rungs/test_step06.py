"""Rung 06: the paged cache, decode over it, the merge of its splits, and the errors a user sees."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.decode_checks import DEVICE, LAYOUTS, PROBLEMS, SMALL, check_decode, inputs_of

from ladder import contract
from ladder.lab.decode_problem import DecodeOracle, DecodeProblem
from ladder.lab.parity import nan_allocations, poison
from ladder.rungs import find
from ladder.step06_paged import PagedKVCache, attention, choose_num_splits, decode_bytes_moved, paged_decode
from ladder.step06_paged.attention import workspace_elements

ON_GPU = DEVICE.type == "cuda"


@pytest.mark.parametrize("name", PROBLEMS)
def test_edge(name):
    problem = PROBLEMS[name]
    check_decode(paged_decode, inputs_of(problem), scale=problem.scale)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layouts(layout):
    check_decode(paged_decode, inputs_of(PROBLEMS["group of 3"], layout))


@pytest.mark.parametrize("splits", (1, 2, 3, 7, 50))
def test_every_number_of_splits(splits):
    """Also more splits than tiles: the empty ones neither count nor are read."""
    out, oracle = check_decode(paged_decode, inputs_of(PROBLEMS["splits"]), num_kv_splits=splits)
    one = paged_decode(*inputs_of(PROBLEMS["splits"]), num_kv_splits=1)
    assert (out.double() - one.double()).abs().max() <= 2 * oracle.budget


def test_a_fixed_number_of_splits_ignores_the_rest_of_the_batch():
    q, k, v, table, lens = inputs_of(PROBLEMS["page edges"])
    together = paged_decode(q, k, v, table, lens, num_kv_splits=3)
    for b in range(len(lens)):
        alone = paged_decode(q[b : b + 1], k, v, table[b : b + 1], lens[b : b + 1], num_kv_splits=3)
        assert torch.equal(alone[0], together[b])


def test_pages_shared_between_sequences():
    """Three sequences start with the same two pages; one of them is nothing but those."""
    inputs = inputs_of(DecodeProblem(B=3, lengths=(32, 40, 70), max_context=96, **SMALL))
    inputs.block_table[1, :2] = inputs.block_table[0, :2]
    inputs.block_table[2, :2] = inputs.block_table[0, :2]
    check_decode(paged_decode, inputs)


@pytest.mark.parametrize("scores", ("huge", "sunken"))
def test_logits_of_5e4(scores):
    inputs = inputs_of(PROBLEMS["group of 3"].replace(lengths=(0, 70), dtype="float16"))  # a merge is as exact as a float32 lse near 5e4
    size = (5e4 / 32) ** 0.5
    if scores == "huge":
        inputs.q.copy_(inputs.q.sign() * size)
        inputs.k_cache.copy_(inputs.k_cache.sign() * size)
    else:  # all at -5e4: below any sentinel that is not -inf
        inputs.q.fill_(size)
        inputs.k_cache.copy_(torch.where(inputs.k_cache.isnan(), float("nan"), -size))
    check_decode(paged_decode, inputs, scale=1.0, num_kv_splits=3)


def test_three_dimensional_q_out_and_workspace():
    problem = PROBLEMS["group of 7"]
    q, *rest = inputs_of(problem)
    want, want_lse = paged_decode(q, *rest, return_lse=True, num_kv_splits=3)
    out = torch.full((2, 7, 32), float("nan"), dtype=q.dtype, device=DEVICE)
    workspace = torch.full((workspace_elements(2, 1, 7, 32, 3),), float("nan"), device=DEVICE)
    got, lse = paged_decode(q[:, 0], *rest, return_lse=True, num_kv_splits=3, out=out, workspace=workspace)
    assert got.data_ptr() == out.data_ptr() and torch.equal(got, want[:, 0]) and torch.equal(lse, want_lse[:, :, 0])
    with pytest.raises(ValueError, match=r"step06_paged: out has shape \(2, 1, 7, 32\); want \(2, 7, 32\)"):
        paged_decode(q[:, 0], *rest, out=out[:, None])
    with pytest.raises(ValueError, match=rf"workspace has 5 elements.*want {workspace.numel()} contiguous float32"):
        paged_decode(q, *rest, num_kv_splits=3, workspace=workspace[:5])


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
    with pytest.raises(MemoryError, match="PagedKVCache: 9 more tokens need 3 pages; 2 are free"):
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
        ((k.half(), v), "k is torch.float16 on .*; want torch.float32"),
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
    "lists": (TypeError, r"k is a list; want a torch.Tensor \('n', 't', 2, 8\)", lambda c: c.append([1], [2])),
    "v no tensor": (TypeError, r"v is a list; want a torch.Tensor \('n', 't', 2, 4\)", lambda c: c.append(new_tokens(2, 3)[0], [2])),
    "k of no dims": (ValueError, r"k has shape \(\); want", lambda c: c.append(torch.zeros(()), torch.zeros(()))),
    "k of 1 dim": (ValueError, r"k has shape \(2,\); want \(2, 't', 2, 8\)", lambda c: c.append(torch.zeros(2), torch.zeros(2))),
    "too many": (ValueError, "k has 3 sequences; want 2 at the most, max_seqs of the cache", lambda c: c.append(*new_tokens(3, 1))),
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
    inputs = inputs_of(PROBLEMS["splits"])
    assert torch.equal(paged_decode(*inputs, num_kv_splits=np.int64(3)), paged_decode(*inputs, num_kv_splits=3))


# What a user gets wrong


def good():
    return dict(zip(("q", "k_cache", "v_cache", "block_table", "seq_lens"), inputs_of(PROBLEMS["group of 3"])))


BAD = {
    "q no tensor": (TypeError, "q is a list; want a torch.Tensor", lambda a: dict(q=[1])),
    "q of 2 dims": (ValueError, r"q has shape \(2, 6\); want \(B, q_len, Hq, D\)", lambda a: dict(q=a["q"][:, 0, :, 0])),
    "dtype": (ValueError, "k_cache has dtype torch.float32", lambda a: dict(k_cache=a["k_cache"].float())),
    "int q": (ValueError, "q has dtype torch.int32", lambda a: dict(q=a["q"].int())),
    "head size": (ValueError, r"k_cache has shape .*, 16\); want \(num_pages, page_size, Hkv, 32\)", lambda a: dict(k_cache=a["k_cache"][..., :16])),
    "heads": (ValueError, "q has 5 heads; want a multiple of the 2 heads", lambda a: dict(q=a["q"][:, :, :5])),
    "v pages": (ValueError, r"v_cache has shape .*; want", lambda a: dict(v_cache=a["v_cache"][1:])),
    "flat table": (ValueError, r"block_table has shape .*want \(2, max_pages\)", lambda a: dict(block_table=a["block_table"][0])),
    "int64 table": (ValueError, "block_table has dtype torch.int64; want int32", lambda a: dict(block_table=a["block_table"].long())),
    "rows of table": (ValueError, r"block_table has shape \(1, 6\); want \(2, max_pages\)", lambda a: dict(block_table=a["block_table"][:1])),
    "float lengths": (ValueError, "seq_lens has dtype torch.float32; want int32", lambda a: dict(seq_lens=a["seq_lens"].float())),
    "lengths no tensor": (TypeError, "seq_lens is a list; want a torch.Tensor", lambda a: dict(seq_lens=[5, 40])),
    "scale": (ValueError, "scale is nan; want a finite number", lambda a: dict(scale=float("nan"))),
    "splits": (ValueError, "num_kv_splits is 0; want an integer of at least 1", lambda a: dict(num_kv_splits=0)),
    "splits of 1.5": (TypeError, "num_kv_splits is 1.5; want an integer of at least 1, or None", lambda a: dict(num_kv_splits=1.5)),
    "out": (ValueError, "out has dtype torch.float32; want torch.float16, the dtype of q", lambda a: dict(out=a["q"].float())),
    "out no tensor": (TypeError, "out is a list; want a torch.Tensor", lambda a: dict(out=[1])),
    "out on itself": (ValueError, "out has shape .*; want memory of its own", lambda a: dict(out=a["q"][:, :, :1].expand_as(a["q"]))),
    "workspace": (TypeError, "workspace is a int; want a float32 torch.Tensor of .* elements", lambda a: dict(workspace=3)),
    "return_lse": (TypeError, "return_lse is 'no'; want True or False", lambda a: dict(return_lse="no")),
    "strided lengths": (ValueError, "seq_lens has strides .*; want a contiguous", lambda a: dict(seq_lens=a["seq_lens"].repeat_interleave(2)[::2])),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_argument(name):
    error, message, change = BAD[name]
    arguments = good()
    with pytest.raises(error, match="step06_paged: " + message):
        paged_decode(**{**arguments, **change(arguments)})


def test_head_size_without_a_kernel():
    arguments = {n: x[..., :1].expand(*x.shape[:-1], 257) if n in ("q", "k_cache") else x for n, x in good().items()}
    with pytest.raises(NotImplementedError, match="head size 257 is above 256; step04_gqa has no limit"):
        paged_decode(**arguments)


@pytest.mark.skipif(ON_GPU, reason="on a GPU lengths are not read by the host")
@pytest.mark.parametrize("length", (-1, 97))
def test_a_length_beyond_the_table_is_an_error(length):
    arguments = good()
    arguments["seq_lens"][1] = length
    with pytest.raises(ValueError, match=f"step06_paged: seq_lens holds {length}; want 0 .. 96"):
        paged_decode(**arguments)


@pytest.mark.skipif(ON_GPU, reason="on a GPU the table is not read by the host")
@pytest.mark.parametrize("entry", (10**7, -1, "the page after the last"))
def test_a_live_entry_that_is_no_page_is_an_error(entry):
    arguments = good()
    pages = len(arguments["k_cache"])
    entry = pages if isinstance(entry, str) else entry
    want = paged_decode(**arguments)
    arguments["block_table"][1, 3:] = entry  # 40 keys on pages of 16 end in column 2
    assert torch.equal(paged_decode(**arguments), want)
    arguments["block_table"][1, 2] = entry
    with pytest.raises(ValueError, match=rf"step06_paged: block_table\[1, 2\] is {entry}, and seq_lens\[1\] = 40 reaches it; want 0 .. {pages - 1}"):
        paged_decode(**arguments)


@pytest.mark.skipif(ON_GPU, reason="on a GPU the table is not read by the host")
def test_a_cache_without_pages():
    arguments = good()
    arguments.update(k_cache=arguments["k_cache"][:0], v_cache=arguments["v_cache"][:0])
    with pytest.raises(ValueError, match=r"step06_paged: block_table\[0, 0\] is .*; want no live entry: the cache has no page"):
        paged_decode(**arguments)
    arguments["seq_lens"].zero_()
    assert (paged_decode(**arguments) == 0).all()


def test_a_length_beyond_the_table_is_nan_in_the_kernel(monkeypatch):
    """What a GPU does, where the host cannot look: loud in that sequence's rows, right in the others."""
    arguments = good()
    want = paged_decode(**arguments)
    monkeypatch.setattr(contract, "_check_pages", lambda *arguments: None)
    arguments["seq_lens"][1] = 97
    with nan_allocations():
        out, lse = paged_decode(**arguments, return_lse=True)
    assert out[1].isnan().all() and lse[1].isnan().all() and torch.equal(out[0], want[0])


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", (16, 64, 256))
def test_bfloat16_at_size(page_size):
    problem = DecodeProblem(B=5, lengths=(1, 4097, 63, 20000, 0), page_size=page_size, max_context=32768)
    check_decode(paged_decode, problem.make(DEVICE))


@pytest.mark.gpu
def test_same_bits_on_every_run():
    inputs = DecodeProblem(B=3, lengths=(9000, 1, 4097), max_context=16384).make(DEVICE)
    first = paged_decode(*inputs)
    assert all(torch.equal(paged_decode(*inputs), first) for _ in range(100))


@pytest.mark.gpu
def test_graph_captured_short_replayed_long():
    problem = DecodeProblem(B=3, lengths=(9000, 1, 4097), max_context=16384)
    inputs = problem.make(DEVICE)
    out, lens = torch.empty_like(inputs.q), torch.ones_like(inputs.seq_lens)

    def run():
        paged_decode(*list(inputs)[:4], lens, out=out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    lens.copy_(inputs.seq_lens)
    poison(out)
    graph.replay()
    parity = DecodeOracle(inputs).check(out)
    assert parity, parity.reason
