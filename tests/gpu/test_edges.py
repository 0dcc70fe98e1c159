"""Past every edge, on a GPU: lengths that no page holds, rows of no sequence, keys that nobody sees, caches without room.

What must not be read is NaN, and outputs begin as NaN or as a number that has to stay.
"""

import random

import pytest
import torch
from support.step08_checks import WindowOracle, random_ranges

from ladder.integrations import flash_attn as fa
from ladder.lab.decode_problem import DecodeProblem
from ladder.lab.parity import nan_allocations
from ladder.step07_dflash1 import DecodeWorkspace
from ladder.step08_dflash2 import (
    RangeWindows,
    decision,
    dflash2_attention,
    dflash2_decode,
    dflash2_mla_decode,
    dflash2_paged_prefill,
    dflash2_varlen,
    eager,
    get_decode_schedule,
)
from ladder.step08_dflash2.hopper import prefill as hopper

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CUDA, BF16, NAN = torch.device("cuda"), torch.bfloat16, float("nan")
LENGTHS = (700, 1, 0, 3000, 333)
LATENT = dict(Hkv=1, D=576, Dv=512, latent=True, scale=192**-0.5)
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


def rows(*shape, dtype=BF16):
    return torch.randn(*shape, device=CUDA, dtype=dtype, generator=torch.Generator(CUDA).manual_seed(sum(shape)))


def decode(problem, inputs, lens, **options):
    if problem.latent:
        return dflash2_mla_decode(
            inputs.q, inputs.k_cache[:, :, 0], inputs.block_table, lens, scale=problem.scale, return_lse=True, **options
        )
    return dflash2_decode(*list(inputs)[:4], lens, return_lse=True, **options)


@pytest.mark.parametrize("problem", [
    DecodeProblem(B=5, lengths=LENGTHS, max_context=4096), DecodeProblem(B=5, lengths=LENGTHS, max_context=4096, q_len=4),
    DecodeProblem(B=5, lengths=LENGTHS, max_context=4096, D=72, Dv=72), DecodeProblem(B=5, Hq=16, lengths=LENGTHS, max_context=4096, **LATENT),
    DecodeProblem(B=5, Hq=128, lengths=LENGTHS, max_context=4096, **LATENT),
], ids=["GQA", "4 tokens", "portable", "MLA 16", "MLA 128"])  # fmt: skip
@pytest.mark.parametrize("scheduled", [False, True])
def test_impossible_lengths_are_nan_and_disturb_nobody(problem, scheduled):
    """Also under a schedule that was made while the lengths were possible. The pages behind every length are NaN."""
    inputs, options = problem.make(CUDA), {}
    if scheduled:
        options["schedule"] = get_decode_schedule(
            inputs.seq_lens, num_heads=problem.Hq, num_kv_heads=problem.Hkv, head_dim=problem.D, head_dim_v=problem.Dv,
            page_size=problem.page_size, max_seq_len=problem.capacity, q_len=problem.q_len,
        )  # fmt: skip
    with nan_allocations():
        want, want_lse = decode(problem, inputs, inputs.seq_lens, **options)
        for impossible in (-1, problem.capacity + 1, 2**31 - 1, -(2**31)):
            lens = inputs.seq_lens.clone()
            lens[[0, 3]] = impossible
            out, lse = decode(problem, inputs, lens, **options)
            assert out[[0, 3]].isnan().all() and lse[[0, 3]].isnan().all(), impossible
            for b in (1, 2, 4):
                torch.testing.assert_close(out[b], want[b], atol=1e-2, rtol=1e-2)
                torch.testing.assert_close(lse[b], want_lse[b], atol=1e-3, rtol=1e-3)
    assert want.isfinite().all()


@pytest.mark.parametrize("heads", [8, 16])
def test_a_workspace_that_grows_leaves_a_captured_graph_its_own(heads):
    """``reserve`` in a capture takes memory of the graph; the workspace may grow between capture and replay."""
    small = DecodeProblem(B=2, Hq=heads, Hkv=8, lengths=(5000, 900), max_context=8192)
    if heads == 16:
        small = DecodeProblem(B=2, Hq=16, lengths=(5000, 900), max_context=8192, **LATENT)
    large = DecodeProblem(**{**vars(small), "B": 16, "lengths": (8000,) * 16})
    inputs, others = small.make(CUDA), large.make(CUDA)
    want = decode(small, inputs, inputs.seq_lens)[0].clone()
    want_large = decode(large, others, others.seq_lens)[0].clone()
    workspace = DecodeWorkspace(CUDA)
    decode(small, inputs, inputs.seq_lens)  # compiled before the capture, with a workspace of its own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(small, inputs, inputs.seq_lens, workspace=workspace)[0]
    assert torch.equal(decode(large, others, others.seq_lens, workspace=workspace)[0], want_large)
    for _ in range(3):
        captured.fill_(NAN)
        graph.replay()
        assert torch.equal(captured, want)
        assert torch.equal(decode(large, others, others.seq_lens, workspace=workspace)[0], want_large)


@needs_hopper
@pytest.mark.parametrize("seed", range(3))
def test_keys_that_no_range_sees(seed):
    """NaN in every key and value that no query sees, under ranges that overlap in a short sequence."""
    draw = random.Random(seed)
    for _ in range(12):
        windows, right = random_ranges(draw), draw.choice((0, None, 5))
        Sq, Sk = draw.choice((20, 64, 100)), draw.choice((40, 90, 130))
        q, k, v = rows(1, 2, Sq, 128), rows(1, 1, Sk, 128), rows(1, 1, Sk, 128)
        hidden = ~windows.visible(Sq, Sk, right=right).any(0).to(CUDA)
        k[:, :, hidden], v[:, :, hidden] = NAN, NAN
        out = torch.full_like(q, NAN)
        hopper.launch_prefill(q, k, v, out, None, causal=right == 0, right=right, scale=0.1, windows=windows)
        parity = WindowOracle(q, k, v, right=right, windows=windows, scale=0.1).check(out)
        assert parity, (parity.reason, windows, Sq, Sk, right)


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (72, 72)], ids=str)
def test_rows_of_no_sequence_stay_as_they_are(splits, paged, dims, monkeypatch):
    """Packed queries behind the last sequence, as the padding of a captured graph: their rows of ``out`` are not written."""
    if splits is not None:
        monkeypatch.setattr(hopper, "choose_splits", lambda *_: splits)
        hopper.plan_prefill.cache_clear()
        monkeypatch.setattr(decision, "_decide_prefill", decision._decide_prefill.__wrapped__)
    used, total, keys = 45, 70, (900, 0, 2500)
    q, cu = rows(total, 4, dims[0]), ints(0, 20, 25, used)
    q[used:] = NAN
    out = torch.full((total, 4, dims[1]), 9.0, device=CUDA, dtype=BF16)
    if paged:
        k, v, table = rows(80, 64, 2, dims[0]), rows(80, 64, 2, dims[1]), torch.randperm(80, device=CUDA).int()[:75].view(3, 25)
        table = torch.cat([table, table.flip(0)], 1)
        entry, arguments = dflash2_paged_prefill, (q, k, v, table, ints(*keys), cu)
        want = eager.paged_prefill(q[:used], k, v, table, ints(*keys), cu, causal=True, scale=0.1)
    else:
        k, v, cu_k = rows(sum(keys) + 9, 2, dims[0]), rows(sum(keys) + 9, 2, dims[1]), ints(0, 900, 900, 3400)
        k[3400:], v[3400:] = NAN, NAN
        entry, arguments = dflash2_varlen, (q, k, v, cu, cu_k)
        want = eager.varlen(q[:used], k, v, cu, cu_k, causal=True, scale=0.1)
    for _ in range(2):  # the second time the scratch holds what the first left
        entry(*arguments, causal=True, scale=0.1, out=out)
        assert (out[used:] == 9).all()
        torch.testing.assert_close(out[:used], want, atol=2e-2, rtol=2e-2)
    hopper.plan_prefill.cache_clear()


@pytest.mark.parametrize("softcap", [30.0, 256.0, 1e3, 1e5, 1e8, 1e20])
@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32], ids=str)
@pytest.mark.parametrize("entry", ["prefill", "decode"])
def test_softcaps_of_any_size(softcap, dtype, entry):
    if entry == "prefill":
        q, k, v = rows(1, 4, 100, 128, dtype=dtype), rows(1, 2, 300, 128, dtype=dtype), rows(1, 2, 300, 128, dtype=dtype)
        out, lse = dflash2_attention(q, k, v, causal=True, scale=0.3, softcap=softcap, return_lse=True)
    else:
        p = DecodeProblem(B=1, Hq=4, Hkv=2, context=300, dtype=str(dtype)[6:])
        inputs = p.make(CUDA)
        out, lse = dflash2_decode(*inputs, scale=0.3, softcap=softcap, return_lse=True)
        q, out, (k, v) = inputs.q.transpose(1, 2), out.transpose(1, 2), inputs.sequence(0)
    parity = WindowOracle(q, k, v, right=0, scale=0.3, softcap=softcap).check(out, lse)
    assert parity, parity.reason


# FlashAttention's interface: a call that appends where there is no room


def cache_of(page_size, batch=3, capacity=64):
    pages = capacity // page_size
    table = torch.randperm(2 * batch * pages, device=CUDA).int()[: batch * pages].view(batch, pages)
    k, v = (torch.full((2 * batch * pages, page_size, 2, 64), NAN, device=CUDA, dtype=BF16) for _ in range(2))
    for b in range(batch):
        for x in (k, v):
            x[table[b].long()] = rows(pages, page_size, 2, 64)
    return k, v, table


@pytest.mark.parametrize("new", [1, 5, 40])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("ragged", [False, True])
def test_appending_past_the_page_table(new, page_size, ragged):
    """NaN for that sequence alone, nothing written for it, and the process lives; in a captured graph too."""
    k_cache, v_cache, table = cache_of(page_size)
    q, k, v = rows(3, new, 4, 64), rows(3, new, 2, 64), rows(3, new, 2, 64)
    lens = ints(20, 64 - new + 1, 64 - new)  # the second has room for all but one
    asked = dict(page_table=table, causal=True)
    if ragged:
        cu = ints(0, new, 2 * new, 3 * new)
        asked |= dict(cu_seqlens_q=cu, cu_seqlens_k_new=cu, max_seqlen_q=new)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    before = k_cache.clone(), v_cache.clone()
    out = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lens, **asked).view(3, new, 4, 64)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()
    for cache, old, x in ((k_cache, before[0], k), (v_cache, before[1], v)):
        changed = (cache != old) & ~(cache.isnan() & old.isnan())
        mine = torch.zeros(cache.shape[:2], dtype=torch.bool, device=CUDA)
        for b, length in ((0, 20), (2, 64 - new)):
            for i in range(new):
                place = int(table[b, (length + i) // page_size]), (length + i) % page_size
                assert torch.equal(cache[place], x.view(3, new, 2, 64)[b, i])
                mine[place] = True
        assert not changed[~mine].any()
    good = fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=ints(20 + new, 64, 64), **{n: x for n, x in asked.items() if n != "cu_seqlens_k_new"})
    torch.testing.assert_close(out[[0, 2]], good.view(3, new, 4, 64)[[0, 2]], atol=1e-2, rtol=1e-2)


def test_appending_past_the_page_table_in_a_graph():
    k_cache, v_cache, table = cache_of(16)
    q, k, v, lens = rows(3, 1, 4, 64), rows(3, 1, 2, 64), rows(3, 1, 2, 64), ints(20, 30, 40)
    asked = dict(cache_seqlens=lens, page_table=table, causal=True)
    fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **asked)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **asked)
    for lengths, lost in (((20, 64, 63), (1,)), ((64, 64, 2**31 - 1), (0, 1, 2)), ((5, 6, 7), ())):
        lens.copy_(ints(*lengths))
        before = v_cache.clone()
        graph.replay()
        for b in range(3):
            assert out[b].isnan().all() if b in lost else out[b].isfinite().all(), (lengths, b)
        changed = (v_cache != before) & ~(v_cache.isnan() & before.isnan())
        assert int(changed.any(-1).any(-1).sum()) <= 3 - len(lost)


def test_rows_of_the_cache_and_positions_that_are_not_there():
    """Each would trip an assertion of the device, which takes every tensor of the process along."""
    k_cache, v_cache, table = cache_of(16)
    q, k, v = rows(2, 1, 4, 64), rows(2, 1, 2, 64), rows(2, 1, 2, 64)
    asked = dict(page_table=table, causal=True)
    out = fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=ints(20, 20), cache_batch_idx=ints(2, 7), **asked)
    assert out[0].isfinite().all() and out[1].isnan().all()
    out = fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=ints(20, 20), cache_leftpad=ints(3, -1), page_table=table[:2], causal=True)
    assert out[0].isfinite().all() and out[1].isnan().all()
    cos, sin = torch.ones(30, 32, device=CUDA, dtype=BF16), torch.zeros(30, 32, device=CUDA, dtype=BF16)
    out = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=ints(29, 30), page_table=table[:2], causal=True
    )
    assert out[0].isfinite().all() and out[1].isnan().all()
    wide = RangeWindows.sliding(8)
    assert dflash2_decode(q, k_cache, v_cache, table[:2], ints(20, 20), windows=wide).isfinite().all()  # the process lives
