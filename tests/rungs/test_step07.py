# ruff: noqa: E501  (rows of a table)
"""Rung 07: prefill in every form, packed decode, MLA, tokens grouped by expert, and the errors a user sees."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from support import ragged
from support.decode_checks import DEVICE, PROBLEMS, SMALL, inputs_of, latent_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

import ladder.step07_dflash1 as step07
from ladder.lab.decode_problem import DecodeOracle, DecodeProblem
from ladder.lab.parity import Oracle, inside_nan, nan_allocations, poison
from ladder.lab.problem import AttentionProblem, reference
from ladder.step07_dflash1 import (
    DecodeWorkspace,
    attention,
    attention_varlen,
    capacity_offsets,
    decode,
    decode_bytes_moved,
    group_tokens,
    grouped_matmul,
    mla_decode,
    paged_decode,
    paged_prefill,
    permute_rows,
    prefill,
    tile_map,
)  # fmt: skip
from ladder.step07_dflash1.tiles import layout, split_head

ON_GPU = DEVICE.type == "cuda"
SMALL_TILES = dict(BLOCK_M=16, BLOCK_N=16, num_warps=4)
TRACES = Path(os.environ.get("LADDER_TRACES", Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"))


# Dense prefill


def problem(**changes):
    return AttentionProblem(**{**dict(Hq=2, Hkv=1, Sq=33, Sk=33, D=32, Dv=32, causal=True, dtype="float16"), **changes})


DENSE = {
    "causal": problem(), "dense": problem(causal=False), "float32": problem(dtype="float32"),
    "one query": problem(Sq=1), "one key": problem(Sk=1), "no key": problem(Sk=0), "no query": problem(Sq=0),
    "more queries than keys": problem(Sq=50, Sk=20), "more keys than queries": problem(Sq=20, Sk=50),
    "tile edges": problem(Sq=32, Sk=48), "group of 3": problem(Hq=6, Hkv=2), "group of 7": problem(Hq=7, Hkv=1),
    "d40": problem(D=40, Dv=40), "d72": problem(D=72, Dv=72), "d80": problem(D=80, Dv=80), "d96": problem(D=96, Dv=96),
    "d128": problem(D=128, Dv=128), "d160": problem(D=160, Dv=160), "d256": problem(D=256, Dv=256),
    "d192/128": problem(D=192, Dv=128), "d48/24": problem(D=48, Dv=24), "d75": problem(D=75, Dv=75),
    "negative scale": problem(scale=-0.4), "zero scale": problem(scale=0.0),
    "batch of 3": problem(B=3), "empty batch": problem(B=0),
}  # fmt: skip


SHIPPED = ("causal", "d72", "d192/128", "float32", "more keys than queries")  # also with the tiles of a real launch


@pytest.mark.parametrize("name, small", [(n, True) for n in DENSE] + [(n, False) for n in SHIPPED])
def test_dense(name, small):
    p = DENSE[name]
    q, k, v = (inside_nan(x) if x.numel() else x for x in p.make(DEVICE))
    with nan_allocations():
        out, lse = attention(q, k, v, causal=p.causal, scale=p.scale, return_lse=True, config=SMALL_TILES if small else None)
    parity = Oracle(q, k, v, causal=p.causal, scale=p.scale).check(out, lse)
    assert parity, parity.reason


def strided(x, order):
    return x.permute(order).contiguous().permute([order.index(i) for i in range(4)])


@pytest.mark.parametrize("order", ((0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)))
def test_any_strides(order):
    q, k, v = DENSE["group of 3"].make(DEVICE)
    want = attention(q, k, v, causal=True, config=SMALL_TILES)
    out = strided(torch.full_like(want, float("nan")), order)
    got = attention(*(strided(x, order) for x in (q, k, v)), causal=True, config=SMALL_TILES, out=out)
    assert got.data_ptr() == out.data_ptr() and torch.equal(got, want)


def test_stride_zero_and_wide_strides():
    q, k, v = DENSE["group of 3"].make(DEVICE)
    k, v = (x[:, :1, :1].expand_as(x) for x in (k, v))
    parity = Oracle(q, k, v, causal=True).check(attention(q, k, v, causal=True, config=SMALL_TILES))
    assert parity, parity.reason
    assert layout(k, v)["WIDE"] is False
    far = torch.empty_strided((1, 1, 2, 32), (1, 1, 1 << 30, 1), dtype=torch.float16, device="meta")
    assert layout(far, far)["WIDE"] is True


def test_wide_offsets_give_the_same_numbers(monkeypatch):
    q, k, v = DENSE["d48/24"].make(DEVICE)
    inputs = inputs_of(PROBLEMS["d192/128"])
    narrow = attention(q, k, v, causal=True, config=SMALL_TILES), paged_decode(*inputs)
    for module in (prefill, decode):
        monkeypatch.setattr(module, "layout", lambda k, v: {**layout(k, v), "WIDE": True})
    assert torch.equal(attention(q, k, v, causal=True, config=SMALL_TILES), narrow[0])
    assert torch.equal(paged_decode(*inputs), narrow[1])


def test_layout_sees_alignment():
    x = torch.empty(2, 2, 8, 72, dtype=torch.float16)
    assert layout(x, x)["ALIGNED"] == 8 and layout(x.float(), x.float())["ALIGNED"] == 4
    assert layout(x, x[..., 1:])["ALIGNED"] == 0  # starts off a word
    assert layout(x, torch.empty(2, 2, 8, 75, dtype=torch.float16))["ALIGNED"] == 0
    assert layout(x, x.transpose(2, 3))["ALIGNED"] == 0


def test_split_head():
    for head_dim in range(1, 577):
        block, tail = split_head(head_dim)
        assert block + tail >= head_dim and block & (block - 1) == 0 and tail & (tail - 1) == 0
        assert tail == 0 or (tail >= 16 and block < head_dim)
        assert block + tail <= max(16, 1 << (head_dim - 1).bit_length())
    assert [split_head(d) for d in (40, 64, 96, 128, 160, 192, 576)] == [(32, 16), (64, 0), (64, 32), (128, 0), (128, 32), (128, 64), (512, 64)]


# Ragged prefill, and chunks on a cache


def packed(lengths_q, lengths_k, **changes):
    tensors = ragged.packed(lengths_q, lengths_k, **{**dict(Hq=4, D=32, Dv=16), **changes})
    return (*tensors, ragged.starts(lengths_q), ragged.starts(lengths_k))


def test_ragged_with_shipped_tiles():
    ragged.check_ragged(attention_varlen, [130, 3, 128], [150, 3, 128], True, D=192, Dv=128)


@pytest.mark.parametrize("page_size", (1, 3, 16, 32))
def test_chunk_on_a_cache(page_size):
    """17 new tokens of each sequence on cached ones: what decode computes row by row."""
    p = DecodeProblem(B=3, lengths=(17, 40, 19), q_len=17, max_context=64, **{**SMALL, "page_size": page_size})
    inputs = p.make(DEVICE)
    cu = torch.arange(4, dtype=torch.int32, device=DEVICE) * 17
    with nan_allocations():
        out, lse = paged_prefill(inputs.q.flatten(0, 1), *list(inputs)[1:], cu, return_lse=True, config=dict(BLOCK_M=16, BLOCK_N=16))
    parity = DecodeOracle(inputs).check(out.view(3, 17, 4, 32), lse.view(4, 3, 17).transpose(0, 1))
    assert parity, parity.reason


def test_chunks_give_what_the_whole_gives():
    """A prompt fed in chunks of any sizes through the cache equals the prompt fed at once."""
    q, k, v, cu, _ = packed([50], [50], Dv=32)
    whole = attention_varlen(q, k, v, cu, cu, causal=True, config=SMALL_TILES)
    cache = step07.PagedKVCache(8, 16, num_kv_heads=2, head_dim=32, max_seqs=1, max_seq_len=64, dtype=q.dtype, device=DEVICE)
    poison(cache.k_pages, cache.v_pages)
    at = 0
    for size in (16, 1, 20, 13):
        part = slice(at, at + size)
        cache.append(k[None, part], v[None, part])
        cu_part = torch.tensor([0, size], dtype=torch.int32, device=DEVICE)
        out = paged_prefill(q[part], cache.k_pages, cache.v_pages, cache.block_table, cache.seq_lens, cu_part, config=SMALL_TILES)
        assert (out.double() - whole[part].double()).abs().max() < 2e-3
        at += size


# Decode


def test_workspace_is_sized_to_need_and_left_clean():
    workspace = DecodeWorkspace(DEVICE)
    inputs = inputs_of(PROBLEMS["page edges"])
    want = paged_decode(*inputs, num_kv_splits=4)
    paged_decode(*inputs, num_kv_splits=1, workspace=workspace)
    assert workspace.nbytes == 0  # nothing to merge, nothing held
    for _ in range(3):
        assert torch.equal(paged_decode(*inputs, num_kv_splits=4, workspace=workspace), want)
        assert not workspace.counters.any()
        workspace.partials.fill_(float("nan"))  # whatever an earlier call left
    held = workspace.nbytes
    assert held == 4 * (6 * 2 * 4 * 16 * (32 + 1) + 6 * 2)
    paged_decode(*(x[:2] if x.shape[0] == 6 else x for x in inputs), num_kv_splits=4, workspace=workspace)
    assert workspace.nbytes == held
    with pytest.raises(TypeError, match="workspace is a Tensor; want a DecodeWorkspace"):
        paged_decode(*inputs, num_kv_splits=4, workspace=workspace.partials)


def test_workspace_and_captured_graphs(monkeypatch):
    """Zeros that a capture asks for are written by its replay only, so no other call gets them; and what a graph works on
    is not freed when a later call wants more."""
    capturing = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    with FakeTensorMode():
        workspace = DecodeWorkspace("cuda")
        assert workspace.device.index is not None  # whichever GPU is the current one when it grows
        first = workspace.reserve(100, 10)
        assert [x.numel() for x in first] == [100, 10] and workspace.nbytes == 440
        capturing.append(True)
        assert [a is b for a, b in zip(workspace.reserve(50, 10), first)] == [True, True]
        partials, counters = workspace.reserve(50, 20)
        assert partials is first[0] and counters is not first[1] and counters.numel() == 20
        capturing.clear()
        assert workspace.counters is first[1] and workspace.nbytes == 440  # nothing of the capture's
        again = workspace.reserve(50, 20)
        assert again[0] is first[0] and again[1] is not counters and workspace.counters is again[1]
        assert workspace.nbytes == 440 + 80  # with the 10 counters of the graph's
        larger = workspace.reserve(200, 30)
        assert workspace.nbytes == 440 + 800 + 120  # without the 20 that no graph has seen
        assert [x.numel() for x in larger] == [200, 30] and [x.numel() for x in workspace.reserve(1, 1)] == [200, 30]


def test_splits_may_finish_in_any_order():
    """The interpreter runs programs in their order; here another than the last split arrives last."""
    inputs = inputs_of(PROBLEMS["one head"].replace(lengths=(90,), page_size=16))
    workspace = DecodeWorkspace(DEVICE)
    want = paged_decode(*inputs, num_kv_splits=3, workspace=workspace)
    partials = workspace.partials.clone()
    # Two of the three splits have "arrived" already, with their partials in place: the first to run merges.
    workspace.counters.fill_(2)
    out = torch.full_like(want, float("nan"))
    paged_decode(*inputs, num_kv_splits=3, workspace=workspace, out=out)
    workspace.partials.copy_(partials)
    assert torch.equal(out, want)


def test_decode_bytes_moved():
    p = DecodeProblem(B=64, context=4096)
    assert p.kv_bytes < decode_bytes_moved(p) < 1.02 * p.kv_bytes  # a quarter of step 06's: the group shares a tile
    latent = DecodeProblem(B=64, Hq=128, Hkv=1, D=576, Dv=512, context=4096, latent=True)
    assert latent.kv_bytes == 64 * 4096 * 576 * 2


# MLA


@pytest.mark.parametrize(
    "changes",
    (
        {}, dict(D=32, Dv=16), dict(Hq=16, q_len=2, lengths=(1, 33)), dict(page_size=1), dict(dtype="float32"), dict(D=64, Dv=64),
        dict(D=576, Dv=512, Hq=16, lengths=(3, 37)), dict(Hq=40, q_len=3, lengths=(2, 50)),
    ),
    ids=lambda c: ", ".join(f"{k}={v}" for k, v in c.items()) or "small",
)  # fmt: skip
@pytest.mark.parametrize("splits", (1, 3))
def test_mla_decode(changes, splits):
    p, inputs = latent_inputs(**changes)
    oracle = DecodeOracle(inputs, scale=p.scale)
    with nan_allocations():
        out, lse = mla_decode(
            inputs.q, inputs.k_cache[:, :, 0], inputs.block_table, inputs.seq_lens,
            scale=p.scale, head_dim_v=p.Dv, num_kv_splits=splits, return_lse=True,
        )  # fmt: skip
    parity = oracle.check(out, lse)
    assert parity, parity.reason


def test_absorbed_mla_is_mla():
    """(q_nope W_uk) . c + q_rope . k_rope, then W_uv: the same as attention on the keys and values of every head."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    heads, nope, rope, rank, length = 3, 24, 16, 32, 20
    q_nope, q_rope, latent, k_rope = draw(1, heads, nope), draw(1, heads, rope), draw(length, rank), draw(length, rope)
    w_uk, w_uv = draw(heads, nope, rank) / 5, draw(heads, rank, nope) / 5
    k = torch.cat([torch.einsum("hnr,lr->hln", w_uk, latent), k_rope.expand(heads, -1, -1)], -1)
    v = torch.einsum("lr,hrn->hln", latent, w_uv)
    scale = (nope + rope) ** -0.5
    want, _ = reference(torch.cat([q_nope, q_rope], -1)[:, :, None], k[None], v[None], scale=scale)
    cache = torch.full((2, 16, rank + rope), float("nan"), device=DEVICE)
    cache[1], cache[0, :4] = torch.cat([latent, k_rope], -1)[:16], torch.cat([latent, k_rope], -1)[16:]
    q = torch.cat([torch.einsum("bhn,hnr->bhr", q_nope, w_uk), q_rope], -1)
    table, lens = torch.tensor([[1, 0]], dtype=torch.int32, device=DEVICE), torch.tensor([20], dtype=torch.int32, device=DEVICE)
    out = mla_decode(q, cache, table, lens, scale=scale, head_dim_v=rank)
    got = torch.einsum("bhr,hrn->bhn", out.double(), w_uv.double())
    assert (got - want[:, :, 0]).abs().max() < 1e-5


# Groups


def want_groups(ids, num_experts):
    flat = ids.flatten().long().cpu()
    kept = (flat >= 0) & (flat < num_experts)
    order = torch.where(kept, flat, num_experts).argsort(stable=True)[: int(kept.sum())]
    return order, torch.bincount(flat[kept], minlength=num_experts).cumsum(0), kept


@pytest.mark.parametrize(
    "shape, num_experts",
    (((300,), 7), ((100, 6), 64), ((128, 1), 1), ((129, 2), 3), ((1, 1), 256), ((0, 2), 4), ((70, 8), 256), ((40,), 63)),
)
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("dropped", (False, True))
def test_group_tokens(shape, num_experts, dtype, dropped):
    generator = torch.Generator().manual_seed(num_experts)
    low, high = (-2, num_experts + 2) if dropped else (0, num_experts)
    ids = torch.randint(low, high, shape, generator=generator).to(DEVICE, dtype)
    groups = group_tokens(ids, num_experts)
    order, ends, kept = want_groups(ids, num_experts)
    total = len(order)
    assert groups.order.dtype == groups.offsets.dtype == groups.places.dtype == torch.int32
    assert groups.offsets.tolist() == [0, *ends.tolist()]
    assert groups.order[:total].tolist() == order.tolist() and (groups.order[total:] == -1).all()
    places = groups.places.flatten().cpu()
    assert groups.places.shape == (shape if len(shape) == 2 else (*shape, 1))
    assert torch.equal(places[order], torch.arange(total, dtype=torch.int32)) and (places[~kept] == -1).all()


@pytest.mark.parametrize("block", (1, 4, 16))
@pytest.mark.parametrize("counts", ([5], [0, 0, 3], [16, 1, 0, 17, 4], [0, 0], [1] * 20))
def test_tile_map_covers_every_row_once(counts, block):
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0, dtype=torch.int32)
    tiles = tile_map(offsets, block, sum(counts)).tolist()
    want = [[e, int(offsets[e]) + r] for e, n in enumerate(counts) for r in range(0, n, block)]
    assert tiles[: len(want)] == want and all(t == [-1, -1] for t in tiles[len(want) :])
    assert len(tiles) <= sum(counts) // block + len(counts)


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
@pytest.mark.parametrize("inner, columns", ((48, 40), (33, 7)))
def test_grouped_matmul(dtype, inner, columns):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 5, (50, 2), generator=generator).to(DEVICE)
    x = torch.randn(50, inner, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(5, inner, columns, generator=generator).to(DEVICE, dtype)
    groups = group_tokens(ids, 5)
    rows = int(groups.offsets[-1])
    out = torch.full((100, columns), float("nan"), dtype=dtype, device=DEVICE)
    config = dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)
    grouped_matmul(x, weight, groups.offsets, order=groups.order, top_k=2, out=out, config=config)
    chosen = groups.order[:rows].long()
    want = torch.einsum("rk,rkn->rn", x[chosen // 2].double(), weight[ids.flatten()[chosen]].double())
    assert (out[:rows].double() - want).abs().max() < (2e-5 if dtype == torch.float32 else 0.05)
    assert out[rows:].isnan().all()  # dropped assignments make no work
    sorted_x = inside_nan(x[chosen // 2])  # the same without the gather, NaN around the rows
    assert torch.equal(grouped_matmul(sorted_x, weight, groups.offsets, config=config)[:rows], out[:rows])

    # The padded launch computes the same numbers, in more programs.
    counts = groups.offsets.diff().tolist()
    capacity = max(counts)
    padded = torch.randn(5 * capacity, inner, generator=generator).to(DEVICE, dtype)
    for e in range(5):
        padded[e * capacity : e * capacity + counts[e]] = sorted_x[groups.offsets[e] : groups.offsets[e + 1]]
    padded_out = grouped_matmul(padded, weight, capacity_offsets(5, capacity, DEVICE), config=config)
    for e in range(5):
        assert torch.equal(padded_out[e * capacity : e * capacity + counts[e]], out[groups.offsets[e] : groups.offsets[e + 1]])


@pytest.mark.parametrize("top_k", (1, 3))
@pytest.mark.parametrize("index", (torch.int32, torch.int64))
def test_attention_in_expert_order(top_k, index):
    """Grouping moves rows and changes no number; dropped assignments are stored nowhere."""
    q, k, v, cu_q, cu_k = packed([5, 17, 0, 33], [9, 17, 2, 33])
    ids = torch.randint(-1, 4, (55, top_k), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    groups = group_tokens(ids, 4)
    rows = int(groups.offsets[-1])
    assert 0 < rows < 55 * top_k
    want, want_lse = attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True, config=SMALL_TILES)
    out = torch.full((55 * top_k + 2, 4, 16), float("nan"), dtype=q.dtype, device=DEVICE)
    got, lse = attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True, config=SMALL_TILES, out=out, out_index=groups.places.to(index))
    assert torch.equal(got[:rows], want[groups.order[:rows].long() // top_k]) and got[rows:].isnan().all()
    assert torch.equal(lse, want_lse)
    assert torch.equal(permute_rows(want.flatten(1), groups)[:rows], got[:rows].flatten(1))
    with pytest.raises(ValueError, match=rf"out has shape \(3, 4, 16\); want \(at least {55 * top_k}, 4, 16\)"):
        attention_varlen(q, k, v, cu_q, cu_k, out=out[:3], out_index=groups.places)


@pytest.mark.skipif(not (TRACES / "esft_dsv2lite_law.npz").exists(), reason="no routing traces; LADDER_TRACES names their folder")
@pytest.mark.parametrize("task", ("law", "intent"))
def test_real_routing(task):
    """Real choices of 6 of 64 experts: the sort is right, and compact tiles are near the rows there are."""
    with np.load(TRACES / f"esft_dsv2lite_{task}.npz") as data:
        ids, counts = torch.from_numpy(data["topk_ids"].astype("int64")), data["counts"]
    for layer in (0, 13) if ON_GPU else (13,):
        chosen = ids[layer].to(DEVICE)
        groups = group_tokens(chosen, 64)
        order, ends, _ = want_groups(chosen, 64)
        assert groups.order.tolist() == order.tolist() and groups.offsets[1:].tolist() == ends.tolist()
        assert groups.offsets.diff().tolist() == counts[layer].tolist()
        rows = chosen.numel()
        tiles = int((tile_map(groups.offsets, 64, rows)[:, 0] >= 0).sum())
        padded = 64 * -(-int(counts[layer].max()) // 64)
        assert rows / 64 <= tiles <= rows / 64 + 64 and padded > 1.9 * tiles  # padding would double the work, or more


@pytest.mark.parametrize(
    "strides, fits",
    (
        ((2112, 1056, 32, 1), True), ((33 * 64, 32, 64, 1), True), ((1, 33 * 32, 1, 33), True), ((0, 1056, 32, 1), True),
        ((2112, 0, 32, 1), False), ((2112, 1056, 0, 1), False), ((2112, 1056, 32, 0), False), ((2112, 1056, 31, 1), False),
        ((2112, 32, 32, 1), False), ((2112, 1, 2, 66), True), ((2112, 1, 1, 66), False),
    ),
)  # fmt: skip
def test_out_that_lies_on_itself(strides, fits):
    q, k, v = DENSE["causal"].make(DEVICE)
    want = attention(q, k, v, causal=True, config=SMALL_TILES)
    out = torch.full((5000,), float("nan"), dtype=q.dtype, device=DEVICE).as_strided(want.shape, strides)
    if fits:
        assert torch.equal(attention(q, k, v, causal=True, config=SMALL_TILES, out=out), want)
    else:
        with pytest.raises(ValueError, match=r"step07_dflash1: out has shape \(1, 2, 33, 32\) and strides .*; want memory of its own"):
            attention(q, k, v, causal=True, config=SMALL_TILES, out=out)


@pytest.mark.skipif(ON_GPU, reason="on a GPU the index is not read by the host")
@pytest.mark.parametrize("index", (torch.int32, torch.int64))
def test_out_index_beyond_out(index):
    q, k, v, cu, _ = packed([5, 17], [5, 17])
    places = torch.arange(44, dtype=index).view(22, 2)
    places[3, 1] = 44
    with pytest.raises(ValueError, match="step07_dflash1: out_index holds 44; want at most 43, the last row of out, or below 0 for none"):
        attention_varlen(q, k, v, cu, cu, out_index=places, config=SMALL_TILES)
    out = attention_varlen(q, k, v, cu, cu, out_index=places, config=SMALL_TILES, out=q.new_zeros(45, 4, 16))
    assert torch.equal(out[44], out[6]) and (out[7] == 0).all()


# What a user gets wrong, beyond what test_contract.py and test_paged.py ask of every rung.
# x has 4 tokens, 3 experts own 1, 0 and 3 rows.


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def varlen_arguments():
    return dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), packed([5, 17], [5, 17])))


GOOD = {
    attention: lambda: dict(zip("qkv", DENSE["causal"].make(DEVICE))),
    attention_varlen: varlen_arguments,
    grouped_matmul: lambda: dict(x=torch.ones(4, 8), weight=torch.ones(3, 8, 5), offsets=int32(0, 1, 1, 4)),
    tile_map: lambda: dict(offsets=int32(0, 4), block_rows=2, total_rows=4),
    permute_rows: lambda: dict(x=torch.ones(4, 6), groups=group_tokens(torch.arange(8, device=DEVICE).view(4, 2) % 3, 3)),
    group_tokens: lambda: dict(expert_ids=torch.zeros(3, dtype=torch.int32), num_experts=4),
    capacity_offsets: lambda: dict(num_experts=3, capacity=2),
}
PREFILLS = (attention, attention_varlen)

BAD = (
    (PREFILLS, dict(return_lse="no"), TypeError, "return_lse is 'no'; want True or False"),
    (PREFILLS + (grouped_matmul,), dict(config=[1]), TypeError, "config is a list; want a dict of launch parameters, or None"),
    (PREFILLS + (grouped_matmul, permute_rows), dict(out=[1]), TypeError, r"out is a list; want a torch.Tensor \(.*\), or None"),
    (PREFILLS, dict(out=torch.ones(1, 3)), ValueError, r"out has shape \(1, 3\); want \("),
    (attention_varlen, dict(out=torch.ones(1, 4, 16).half().expand(22, 4, 16)), ValueError, r"out has shape \(22, 4, 16\) and strides \(0, 16, 1\)"),
    (attention_varlen, dict(out_index=[1]), TypeError, "out_index is a list"),
    (attention_varlen, dict(out_index=int32(1, 2)[:, None]), ValueError, r"out_index has shape \(2, 1\); want \(22, top_k\)"),
    (attention_varlen, dict(out_index=torch.zeros(22, 0, dtype=torch.int32)), ValueError, "out_index has shape .*; want at least one column"),
    (attention_varlen, dict(out_index=torch.zeros(22, 2)), ValueError, "out_index has dtype torch.float32; want int32 or int64"),
    (attention_varlen, dict(cu_seqlens_k=int32(0, 0, 5, 5, 22, 22)[::2]), ValueError, r"cu_seqlens_k has strides \(2,\); want a contiguous tensor"),
    (grouped_matmul, dict(x=[1]), TypeError, r"x is a list; want a torch.Tensor \(T, K\)"),
    (grouped_matmul, dict(x=torch.ones(4, 8).int()), ValueError, "x has dtype torch.int32; want float16 or bfloat16 or float32"),
    (grouped_matmul, dict(weight=[1]), TypeError, "weight is a list; want a torch.Tensor"),
    (grouped_matmul, dict(weight=torch.ones(3, 7, 5)), ValueError, r"weight has shape \(3, 7, 5\); want \(num_experts, 8, N\)"),
    (grouped_matmul, dict(weight=torch.ones(3, 8, 5).half()), ValueError, "weight has dtype torch.float16; want torch.float32, the dtype of x"),
    (grouped_matmul, dict(offsets=[0, 1, 1, 4]), TypeError, r"offsets is a list; want a torch.Tensor \(4,\)"),
    (grouped_matmul, dict(offsets=int32(0, 1, 1)), ValueError, r"offsets has shape \(3,\); want \(4,\)"),
    (grouped_matmul, dict(offsets=int32(0, 1, 1, 4).to("meta")), ValueError, "offsets is on meta; want .*, the device of x"),
    (grouped_matmul, dict(order=[0, 1, 2, 3]), TypeError, "order is a list; want a torch.Tensor"),
    (grouped_matmul, dict(order=int32(0, 1, 2, 3).long()), ValueError, "order has dtype torch.int64; want int32"),
    (grouped_matmul, dict(order=torch.arange(8, dtype=torch.int32)), ValueError, "order has 8 rows; want 4, .*top_k=1; was top_k=2 meant?"),
    (grouped_matmul, dict(order=int32(0, 1, 2)), ValueError, "order has 3 rows; want 4, the 4 tokens of x times top_k=1$"),
    (grouped_matmul, dict(top_k=0), ValueError, "top_k is 0; want an integer of at least 1"),
    (grouped_matmul, dict(top_k=2.0), TypeError, "top_k is 2.0; want an integer of at least 1"),
    (grouped_matmul, dict(out=torch.ones(4, 8)), ValueError, r"out has shape \(4, 8\); want \(4, 5\)"),
    (grouped_matmul, dict(out=torch.ones(1, 5).expand(4, 5)), ValueError, "out has shape .*; want memory of its own"),
    (grouped_matmul, dict(tiles=[1]), TypeError, r"tiles is a list; want a torch.Tensor \(slots, 2\)"),
    (grouped_matmul, dict(tiles=int32(0, 0)), ValueError, r"tiles has shape \(2,\); want \(slots, 2\)"),
    (tile_map, dict(offsets=[0, 1]), TypeError, r"offsets is a list; want a torch.Tensor \(num_experts \+ 1,\)"),
    (tile_map, dict(offsets=int32()), ValueError, r"offsets has shape \(0,\); want \(num_experts \+ 1,\)"),
    (tile_map, dict(offsets=int32(0, 4).long()), ValueError, "offsets has dtype torch.int64; want int32"),
    (tile_map, dict(offsets=int32(0, 4)[None]), ValueError, r"offsets has shape \(1, 2\); want \(num_experts \+ 1,\)"),
    (tile_map, dict(block_rows=0), ValueError, "block_rows is 0; want an integer of at least 1"),
    (tile_map, dict(block_rows=2.0), TypeError, "block_rows is 2.0; want an integer of at least 1"),
    (tile_map, dict(total_rows=-1), ValueError, "total_rows is -1; want an integer of at least 0"),
    (tile_map, dict(total_rows=4.5), TypeError, "total_rows is 4.5; want an integer of at least 0"),
    (permute_rows, dict(x=[1]), TypeError, r"x is a list; want a torch.Tensor \(4, width\)"),
    (permute_rows, dict(x=torch.ones(3, 6)), ValueError, r"x has shape \(3, 6\); want \(4, width\)"),
    (permute_rows, dict(x=torch.ones(6, 4).T), ValueError, r"x has strides \(1, 4\); want rows contiguous"),
    (permute_rows, dict(groups=[1]), TypeError, "groups is a list; want TokenGroups"),
    (permute_rows, dict(out=torch.ones(7, 6)), ValueError, r"out has shape \(7, 6\); want \(8, 6\)"),
    (permute_rows, dict(out=torch.ones(8, 6).half()), ValueError, "out has dtype torch.float16; want torch.float32, the dtype of x"),
    (permute_rows, dict(out=torch.empty(8, 6, device="meta")), ValueError, "out is on meta; want .*, the device of x"),
    (permute_rows, dict(out=torch.ones(6, 8).T), ValueError, r"out has strides \(1, 8\); want rows contiguous"),
    (permute_rows, dict(out=torch.ones(1, 6).expand(8, 6)), ValueError, "out has shape .*; want memory of its own"),
    (group_tokens, dict(expert_ids=[1, 2]), TypeError, r"expert_ids is a list; want a torch.Tensor \(T, top_k\)"),
    (group_tokens, dict(expert_ids=torch.zeros(3)), ValueError, "expert_ids has dtype torch.float32; want int32 or int64"),
    (group_tokens, dict(expert_ids=int32(0)[None, None]), ValueError, r"expert_ids has shape \(1, 1, 1\); want \(T, top_k\)"),
    (group_tokens, dict(num_experts=0), ValueError, "num_experts is 0; want an integer of at least 1"),
    *(((group_tokens, capacity_offsets), dict(num_experts=bad), TypeError, "num_experts is .*; want an integer of at least 1")
      for bad in ("3", 3.0, True)),
)  # fmt: skip
READ = (  # values, which on a GPU stay on the device
    ((grouped_matmul,), dict(offsets=int32(1, 1, 1, 4)), ValueError, r"offsets is \[1, 1, 1, 4\]; want 0, then never falling, up to 4 rows at the most"),
    ((grouped_matmul,), dict(offsets=int32(0, 2, 1, 4)), ValueError, r"offsets is \[0, 2, 1, 4\]; want 0, then never falling"),
    ((grouped_matmul,), dict(offsets=int32(0, 1, 1, 5)), ValueError, r"offsets is \[0, 1, 1, 5\]; want 0, .*up to 4 rows"),
    ((tile_map,), dict(offsets=int32(0, 5)), ValueError, r"offsets is \[0, 5\]; want 0, .*up to 4 rows"),
    ((grouped_matmul,), dict(order=int32(0, 1, 4, 3)), ValueError, "order holds 4 before row 4, the end of offsets; want 0 .. 3"),
    ((grouped_matmul,), dict(order=int32(0, 1, -1, 3)), ValueError, "order holds -1 before row 4"),
)  # fmt: skip


def bad_calls():
    for calls, changes, error, words in (*BAD, *(() if ON_GPU else READ)):
        for call in calls if isinstance(calls, tuple) else (calls,):
            yield pytest.param(call, changes, error, words, id=f"{call.__name__}-{words[:30]}")


@pytest.mark.parametrize("call, changes, error, words", list(bad_calls()))
def test_bad_argument(call, changes, error, words):
    arguments = {**GOOD[call](), **changes}
    with pytest.raises(error, match="step07_dflash1: " + words):
        call(**{n: x.to(DEVICE) if isinstance(x, torch.Tensor) and not x.is_meta else x for n, x in arguments.items()})


def test_integers_of_numpy():
    ids = torch.arange(8, device=DEVICE).view(4, 2) % 3
    groups, x, weight = group_tokens(ids, np.int64(3)), torch.ones(4, 8, device=DEVICE), torch.ones(3, 8, 5, device=DEVICE)
    assert torch.equal(groups.order, group_tokens(ids, 3).order)
    assert torch.equal(tile_map(groups.offsets, np.int32(2), np.int64(8)), tile_map(groups.offsets, 2, 8))
    assert capacity_offsets(np.int64(3), np.int64(2)).tolist() == [0, 2, 4, 6]
    assert (grouped_matmul(x, weight, groups.offsets, order=groups.order, top_k=np.int64(2)) == 8).all()


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("heads", (16, 128))
def test_mla_at_size(heads):
    p = DecodeProblem(B=3, Hq=heads, Hkv=1, D=576, Dv=512, latent=True, lengths=(5000, 1, 8191), max_context=8192, scale=192**-0.5)
    inputs = p.make(DEVICE)
    out, lse = mla_decode(inputs.q, inputs.k_cache[:, :, 0], inputs.block_table, inputs.seq_lens, scale=p.scale, return_lse=True)
    parity = DecodeOracle(inputs, scale=p.scale).check(out, lse)
    assert parity, parity.reason


@pytest.mark.gpu
def test_prefill_at_size():
    for D, Dv in ((64, 64), (72, 72), (128, 128), (192, 128), (256, 256)):
        p = AttentionProblem(Hq=6, Hkv=2, Sq=1000, Sk=3333, D=D, Dv=Dv, causal=True, dtype="bfloat16")
        q, k, v = p.make(DEVICE)
        parity = Oracle(q, k, v, causal=True).check(*attention(q, k, v, causal=True, return_lse=True))
        assert parity, f"d{D}: {parity.reason}"
