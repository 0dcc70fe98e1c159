"""FlashAttention-3's calls on step 08, against float64: the cases of FlashAttention's own forward tests, small."""

import importlib
import inspect
import math

import pytest
import torch
from support.integration_checks import MASKS, check_dense, check_kvcache, check_varlen, make, oracle

from ladder.integrations import flash_attn as fa
from ladder.integrations.flash_attn_cache import append_rows
from ladder.step08_dflash2 import get_decode_schedule

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Step 08's PyTorch path: the kernels have their own tests, here it is the translation that counts."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [
    (2, 4, 4, 9, 17, 16, 16), (2, 6, 2, 17, 9, 16, 16), (1, 6, 1, 1, 1, 8, 24), (1, 4, 2, 13, 13, 64, 64),
], ids=str)  # fmt: skip
def test_dense(mask, shape):
    check_dense(mask, shape, CPU, torch.float32)


def test_values_of_512_columns():
    """FlashAttention takes them up to head size 64; step 08 gets them in blocks."""
    check_dense("causal", (1, 2, 1, 5, 7, 16, 512), CPU, torch.float32)
    check_varlen("causal", [3, 2], [4, 9], CPU, torch.float32, dims=(16, 300))
    check_kvcache("causal", CPU, torch.float32, dims=(32, 512))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("used", [False, True])
def test_varlen(mask, used):
    check_varlen(mask, [7, 1, 0, 12], [7, 9, 4, 0], CPU, torch.float32, used=used)


def test_varlen_of_no_sequences():
    check_varlen("causal", [], [], CPU, torch.float32)
    check_varlen("dense", [0, 0], [3, 0], CPU, torch.float32, used=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("page_size", [None, 3])
def test_kvcache_masks(mask, page_size):
    check_kvcache(mask, CPU, torch.float32, page_size=page_size)
    check_kvcache(mask, CPU, torch.float32, page_size=page_size, seqlen_q=19, ragged=True, seqlen_new=4)


@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_kvcache_page_sizes(page_size):
    check_kvcache("both", CPU, torch.float32, page_size=page_size, seqlen_new=4, leftpad=page_size == 8)


@pytest.mark.parametrize("mask, new", [
    ("causal", dict(seqlen_new=3)), ("both", dict(seqlen_new=2, seqlen_q=5, rotary=(16, True))),
    ("dense", dict(seqlen_new=5, seqlen_q=18, rotary=(32, False))),
], ids=["plain", "interleaved", "halves"])  # fmt: skip
@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("batch_idx", [False, True])
@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_kvcache_append(mask, new, page_size, batch_idx, leftpad, ragged):
    check_kvcache(
        mask, CPU, torch.float32, page_size=page_size, batch_idx=batch_idx, leftpad=leftpad, ragged=ragged, lengths=(5, 0), **new
    )


@pytest.mark.parametrize("ragged", [False, True])
def test_kvcache_one_token_with_splits(ragged):
    for num_splits in (0, 1, 3):
        check_kvcache("causal", CPU, torch.float32, seqlen_q=1, seqlen_new=1, num_splits=num_splits, ragged=ragged)


@pytest.mark.parametrize("mask", ["causal", "left", "both"])
@pytest.mark.parametrize("ragged", [False, True])
def test_kvcache_with_metadata(mask, ragged):
    for seqlen_q, num_splits in ((1, 0), (2, 0), (1, 2), (20, 0)):
        check_kvcache(
            mask, CPU, torch.float32, seqlen_q=seqlen_q, seqlen_new=1, metadata=True, ragged=ragged, page_size=8,
            num_splits=num_splits, leftpad=seqlen_q == 2,
        )  # fmt: skip


def test_metadata_is_decodes_schedule():
    lengths = torch.tensor([4000, 17], dtype=torch.int32)
    found = fa.get_scheduler_metadata(2, 1, 4096, 8, 2, 64, lengths, torch.float16, max_seqlen_k_new=1, page_size=16)
    wanted = get_decode_schedule(
        lengths + 1, num_heads=8, num_kv_heads=2, head_dim=64, page_size=16, max_seq_len=4096, dtype=torch.float16
    )
    assert len(wanted) and torch.equal(found, wanted)
    assert fa.get_scheduler_metadata(2, 1, 4096, 8, 2, 64, lengths, num_splits=2).shape == (0, 4)
    assert fa.get_scheduler_metadata(2, 17, 4096, 8, 2, 64, lengths).shape == (0, 4)
    with pytest.raises(TypeError, match="get_scheduler_metadata: max_seqlen_k_new is None"):
        fa.get_scheduler_metadata(2, 1, 4096, 8, 2, 64, lengths, max_seqlen_k_new=None)
    with pytest.raises(NotImplementedError, match="attention_chunk"):
        fa.get_scheduler_metadata(2, 1, 4096, 8, 2, 64, lengths, attention_chunk=8)


def test_kvcache_lengths_as_int_and_none():
    q = make(2, 1, 4, 16, device=CPU, dtype=torch.float32)
    k, v = (make(2, 10, 2, 16, device=CPU, dtype=torch.float32, seed=s) for s in (1, 2))
    whole = fa.flash_attn_with_kvcache(q, k, v)
    part = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=6)
    for b in range(2):
        torch.testing.assert_close(whole[b].double(), oracle(q[b], k[b], v[b])[0], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(part[b].double(), oracle(q[b], k[b, :6], v[b, :6])[0], atol=2e-5, rtol=2e-5)


def test_rotary_seqlens():
    """Positions of the rotation apart from the length of the cache."""
    dims = dict(device=CPU, dtype=torch.float32)
    q, k, v = make(1, 2, 2, 16, **dims), make(1, 2, 1, 16, **dims, seed=1), make(1, 2, 1, 16, **dims, seed=2)
    k_cache, v_cache = torch.zeros(1, 8, 1, 16), torch.zeros(1, 8, 1, 16)
    angles = make(8, 8, **dims, seed=3)
    lengths = torch.tensor([4], dtype=torch.int32)
    fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=angles.cos(), rotary_sin=angles.sin(), cache_seqlens=lengths,
        rotary_seqlens=lengths // 4, causal=True, rotary_interleaved=False,
    )  # fmt: skip
    cos, sin = angles.cos()[1:3, None], angles.sin()[1:3, None]
    a, b = k[0, ..., :8], k[0, ..., 8:]
    torch.testing.assert_close(k_cache[0, 4:6], torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_through_the_kernels(monkeypatch):
    """What the translation hands to the kernels: pages of one token, strided columns, a right edge."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    small = dict(heads=(2, 1), dims=(16, 16), lengths=(0, 11))
    check_kvcache("all", CPU, torch.float32, seqlen_q=1, seqlen_new=1, leftpad=True, **small)
    check_kvcache("causal", CPU, torch.float32, seqlen_q=18, seqlen_new=2, ragged=True, **small)
    check_varlen("both", [3, 0, 5], [4, 2, 5], CPU, torch.float16, used=True, heads=(2, 1))
    check_dense("all", (1, 2, 1, 5, 7, 16, 16), CPU, torch.float16)


@pytest.mark.filterwarnings("default")
def test_compiled_in_one_graph():
    dims = dict(device=CPU, dtype=torch.float32)
    q, cache, new = make(2, 3, 4, 16, **dims), make(2, 20, 2, 16, **dims, seed=1), make(2, 3, 2, 16, **dims, seed=2)
    angles = make(20, 4, **dims, seed=3)
    lengths = torch.tensor([3, 9], dtype=torch.int32)

    def step(q, cache, new, lengths):
        return fa.flash_attn_with_kvcache(
            q, cache, cache, new, new, rotary_cos=angles.cos(), rotary_sin=angles.sin(), cache_seqlens=lengths, causal=True,
            window_size=(4, -1),
        )  # fmt: skip

    with torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(q, cache.clone(), new, lengths)
        torch.testing.assert_close(compiled, step(q, cache.clone(), new, lengths))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("window", [(-1, -1), (2, 1)])
def test_compiled_with_sizes_that_change(window):
    """One graph for all lengths: no size is written down while it is a symbol."""
    dims = dict(device=CPU, dtype=torch.float32)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)

    def calls(q, k, lengths):
        dense = fa.flash_attn_func(q, k, k, window_size=window)
        packed = fa.flash_attn_varlen_func(q[0], k[0], k[0], lengths, lengths, None, None, window_size=window)
        return dense, packed, fa.flash_attn_with_kvcache(q, k, k, window_size=window)

    with torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(calls, fullgraph=True, backend="aot_eager", dynamic=True)
        for length in (5, 6, 9):
            arguments = make(2, length, 4, 16, **dims), make(2, length, 2, 16, **dims, seed=1), starts.clamp(max=length)
            arguments[2][-1] = length
            for found, wanted in zip(compiled(*arguments), calls(*arguments), strict=True):
                torch.testing.assert_close(found, wanted)


def test_combine():
    dims = dict(device=CPU, dtype=torch.float32)
    q, k, v = make(5, 4, 16, **dims), make(30, 2, 16, **dims, seed=1), make(30, 2, 16, **dims, seed=2)
    parts = [oracle(q, k[a:b], v[a:b]) for a, b in ((0, 7), (7, 20), (20, 30))]
    out_partial = torch.stack([out for out, _ in parts] + [torch.full_like(parts[0][0], math.nan)]).float()[:, None]
    lse_partial = torch.stack([lse.T for _, lse in parts] + [torch.full((5, 4), -math.inf)]).float()[:, None]
    out, lse = fa.flash_attn_combine(out_partial, lse_partial, out_dtype=torch.float16)
    wanted, wanted_lse = oracle(q, k, v)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out[0].double(), wanted, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(lse[0].double(), wanted_lse.T, atol=1e-5, rtol=1e-5)
    given = torch.empty(1, 5, 4, 16)
    assert fa.flash_attn_combine(out_partial, lse_partial, out=given)[0] is given
    torch.testing.assert_close(given[0].double(), wanted, atol=1e-5, rtol=1e-5)
    nothing = fa.flash_attn_combine(out_partial[3:], lse_partial[3:])
    assert not nothing[0].any() and (nothing[1] == -math.inf).all()
    with pytest.raises(ValueError, match="out_dtype is torch.float16; want torch.float32, the dtype of out"):
        fa.flash_attn_combine(out_partial, lse_partial, out=given, out_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"lse_partial is \(4, 1, 5, 3\); want \(4, 1, 5, 4\)"):
        fa.flash_attn_combine(out_partial, lse_partial[..., :3])


def test_forward_is_in_the_graph_and_backward_says_why():
    q, k, v = (make(1, 3, 2, 16, device=CPU, dtype=torch.float32, seed=s).requires_grad_() for s in range(3))
    out, lse = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    torch.testing.assert_close(out[0].double(), oracle(q[0], k[0], v[0], causal=True)[0], atol=2e-5, rtol=2e-5)
    assert out.requires_grad and not lse.requires_grad
    with pytest.raises(NotImplementedError, match="flash_attn_func: gradients.*step 04"):
        out.sum().backward()
    sinks = torch.zeros(2, requires_grad=True)
    plain, starts = [x.detach() for x in (q, k, v)], torch.tensor([0, 3], dtype=torch.int32)
    for out in (
        fa.flash_attn_func(*plain, learnable_sink=sinks),
        fa.flash_attn_varlen_func(*(x[0] for x in plain), starts, starts, 3, 3, s_aux=sinks),
    ):
        with pytest.raises(NotImplementedError, match="gradients.*step 04"):
            out.sum().backward()
    with torch.no_grad():
        assert not fa.flash_attn_func(q, k, v, learnable_sink=sinks).requires_grad
    assert not fa.flash_attn_with_kvcache(q, k, v).requires_grad


@pytest.mark.parametrize("argument, value", [
    ("qv", torch.zeros(1, 3, 2, 16)), ("attention_chunk", 4), ("q_descale", torch.ones(1, 2)),
    ("k_descale", torch.ones(1, 2)), ("v_descale", torch.ones(1, 2)),
])  # fmt: skip
def test_what_is_not_computed_is_named(argument, value):
    x = make(1, 3, 2, 16, device=CPU, dtype=torch.float32)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    for call in (
        lambda **kw: fa.flash_attn_func(x, x, x, **kw),
        lambda **kw: fa.flash_attn_varlen_func(x[0], x[0], x[0], starts, starts, 3, 3, **kw),
        lambda **kw: fa.flash_attn_with_kvcache(x, x, x, **kw),
    ):
        with pytest.raises(NotImplementedError, match=argument):
            call(**{argument: value})


def test_float8_is_named():
    x = make(1, 3, 2, 16, device=CPU, dtype=torch.float32).to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
        fa.flash_attn_func(x, x, x)


def test_bad_arguments():
    x = make(1, 3, 2, 16, device=CPU, dtype=torch.float32)
    table = torch.zeros(1, 4)
    cases = [
        (dict(k=x), "v is None; want k and v"),
        (dict(rotary_cos=table), "rotary_sin is None"),
        (dict(rotary_cos=table, rotary_sin=table), "without k and v"),
        (dict(cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32)), "max_seqlen_q None"),
        (dict(cache_seqlens=torch.tensor([3])), r"cache_seqlens is \(1,\) torch.int64; want an int or \(1,\) torch.int32"),
        (dict(page_table=torch.zeros(2, 1, dtype=torch.int32)), "page_table has 2 sequences; want 1"),
        (dict(window_size=(1, 2, 3)), "window_size has 3 entries"),
        (dict(learnable_sink=table[0, :2], s_aux=table[0, :2]), "learnable_sink and s_aux"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            fa.flash_attn_with_kvcache(x, x, x, **arguments)
    with pytest.raises(TypeError, match="q is a list"):
        fa.flash_attn_func([1], x, x)


def test_lengths_that_do_not_fit_on_a_cpu():
    """Sequences of at most one token go to decode, which gives every one of them a row."""
    ints = dict(dtype=torch.int32)
    q, cache = make(3, 4, 16, device=CPU, dtype=torch.float32), make(3, 8, 2, 16, device=CPU, dtype=torch.float32)
    for starts, most, message in (
        ([0, 1, 1, 2], 1, r"cu_seqlens_q is \[0, 1, 1, 2\]; want 0, .*up to the 3 packed tokens"),
        ([0, 0, 2, 3], 1, "max_seqlen_q is 1; want at least 2, the longest sequence"),
    ):
        with pytest.raises(ValueError, match=f"flash_attn_with_kvcache: {message}"):
            fa.flash_attn_with_kvcache(q, cache, cache, cu_seqlens_q=torch.tensor(starts, **ints), max_seqlen_q=most)
    starts, used = torch.tensor([0, 1, 3], **ints), torch.tensor([1, 1], **ints)
    for most in ((1, 2), (2, 1)):
        with pytest.raises(ValueError, match="flash_attn_varlen_func: max_seqlen_. is 1; want at least 2"):
            fa.flash_attn_varlen_func(q, q, q, starts, starts, *most, window_size=(0, 1))
    fa.flash_attn_varlen_func(q, q, q, starts, starts, 1, 1, used, used)


@pytest.mark.parametrize("wrong", [
    dict(softcap=-1.0), dict(softmax_scale=math.inf), dict(learnable_sink=torch.zeros(3)), dict(cache_leftpad=9),
    dict(page_table=torch.tensor([[7, 1, 0]], dtype=torch.int32)), dict(scheduler_metadata=torch.zeros(1, 4)),
    dict(rotary_cos=torch.ones(3, 4), rotary_sin=torch.ones(3, 4)),
], ids=lambda wrong: next(iter(wrong)))  # fmt: skip
def test_nothing_is_written_by_a_call_that_fails(wrong):
    dims = dict(device=CPU, dtype=torch.float32)
    q, cache, new = make(1, 2, 4, 16, **dims), make(3, 4, 2, 16, **dims), make(1, 2, 2, 16, **dims, seed=1)
    keys, values = cache.clone(), cache.clone()
    right = dict(page_table=torch.tensor([[2, 1, 0]], dtype=torch.int32), cache_seqlens=torch.tensor([5], dtype=torch.int32))
    with pytest.raises(ValueError):
        fa.flash_attn_with_kvcache(q, keys, values, new, new, **{**right, **wrong})
    assert torch.equal(keys, cache) and torch.equal(values, cache)
    fa.flash_attn_with_kvcache(q, keys, values, new, new, **right)
    assert not torch.equal(keys, cache)


def test_starts_of_any_stride():
    dims = dict(device=CPU, dtype=torch.float32)
    q, k = make(5, 4, 16, **dims), make(2, 8, 2, 16, **dims, seed=1)
    starts = torch.tensor([[0, 9], [2, 9], [5, 9]], dtype=torch.int32)[:, 0]
    assert torch.equal(
        fa.flash_attn_varlen_func(q, q, q, starts, starts, 3, 3), fa.flash_attn_varlen_func(q, q, q, *[starts.contiguous()] * 2, 3, 3)
    )
    packed = dict(cu_seqlens_q=starts, max_seqlen_q=3)
    assert torch.equal(
        fa.flash_attn_with_kvcache(q, k, k, **packed),
        fa.flash_attn_with_kvcache(q, k, k, **{**packed, "cu_seqlens_q": starts.contiguous()}),
    )


def test_a_window_side_of_none():
    q, cache = make(2, 3, 4, 16, device=CPU, dtype=torch.float32), make(2, 8, 2, 16, device=CPU, dtype=torch.float32)
    for theirs, mine in (((None, None), (-1, -1)), ((2, None), (2, -1)), ((None, 1), (-1, 1))):
        for call in (fa.flash_attn_func, fa.flash_attn_with_kvcache):
            assert torch.equal(call(q, cache, cache, window_size=theirs), call(q, cache, cache, window_size=mine))


def test_hints_change_nothing():
    x = make(1, 20, 2, 16, device=CPU, dtype=torch.float32)
    plain = fa.flash_attn_func(x, x, x, causal=True)
    for hint in (dict(pack_gqa=True), dict(num_splits=3), dict(sm_margin=8), dict(deterministic=True)):
        assert torch.equal(plain, fa.flash_attn_func(x, x, x, causal=True, **hint))


SIGNATURES = {  # positional order, as callers of FlashAttention-3 rely on it
    "flash_attn_func": "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap "
    "num_splits pack_gqa deterministic sm_margin return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale "
    "causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic "
    "sm_margin return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
    "page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale "
    "causal window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
    "return_softmax_lse",
    "flash_attn_combine": "out_partial lse_partial out out_dtype",
    "get_scheduler_metadata": "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype "
    "headdim_v cu_seqlens_q cu_seqlens_k_new cache_leftpad page_size max_seqlen_k_new causal window_size attention_chunk "
    "has_softcap num_splits pack_gqa sm_margin",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = inspect.signature(getattr(fa, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == SIGNATURES[name].split()


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_of_the_installed_flash_attention(name):
    """Where FlashAttention-3 is installed, its own signatures are the measure."""
    try:
        theirs = importlib.import_module("flash_attn_interface")
    except Exception as error:  # it loads CUDA libraries while importing
        pytest.skip(f"no FlashAttention-3: {error}")
    wanted = list(inspect.signature(getattr(theirs, name)).parameters)
    parameters = inspect.signature(getattr(fa, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY][: len(wanted)] == wanted


@pytest.mark.parametrize("window", [(3, 0), [3, 0], torch.tensor([3, 0]), torch.tensor([3, 0], dtype=torch.int32)], ids=["tuple", "list", "int64", "int32"])
def test_a_window_is_any_pair(window):
    q, k, v = (make(2, 9, 2, 16, device=CPU, dtype=torch.float32, seed=s) for s in range(3))
    want = fa.flash_attn_func(q, k, v, window_size=(3, 0))
    assert torch.equal(fa.flash_attn_func(q, k, v, window_size=window), want)
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    packed = (x.flatten(0, 1) for x in (q, k, v))
    torch.testing.assert_close(fa.flash_attn_varlen_func(*packed, cu, cu, 9, 9, window_size=window), want.flatten(0, 1))
    torch.testing.assert_close(fa.flash_attn_with_kvcache(q, k, v, window_size=window), want)
    for bad in (torch.tensor(3), torch.tensor([1.0, 2.0])):
        with pytest.raises(TypeError, match="window_size"):
            fa.flash_attn_func(q, k, v, window_size=bad)
    with pytest.raises(ValueError, match="window_size has 3 entries"):
        fa.flash_attn_func(q, k, v, window_size=torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lengths, lost", [((2, 3), (False, False)), ((2, 7), (False, True)), ((8, 7), (True, True)), ((-1, 0), (True, False)), ((2, 4), (False, True))])
def test_append_writes_all_of_a_sequence_or_nothing(packed, lengths, lost):
    """What a GPU does, where nobody can look at the lengths first. The last page of the second sequence is not one of the cache."""
    table, lens = torch.tensor([[5, 2], [0, 99]], dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    k_cache, v_cache = (torch.randn(6, 4, 2, 8, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    new_k, new_v = torch.randn(2, 3 if lengths[1] == 7 else 1, 2, 8), torch.randn(2, 3 if lengths[1] == 7 else 1, 2, 8)
    count = new_k.shape[1]
    want_k, want_v = k_cache.clone(), v_cache.clone()
    for b in range(2):
        for i in range(0 if lost[b] else count):
            place = int(table[b, (lengths[b] + i) // 4]), (lengths[b] + i) % 4
            want_k[place], want_v[place] = new_k[b, i], new_v[b, i]
    cu = torch.tensor([0, count, 2 * count], dtype=torch.int32) if packed else None
    rows = [x.flatten(0, 1) if packed else x for x in (new_k, new_v)]
    assert append_rows(k_cache, v_cache, *rows, table, lens, cu).tolist() == list(lost)
    assert torch.equal(k_cache, want_k) and torch.equal(v_cache, want_v)


def test_append_without_any_room():
    cache, table = torch.zeros(0, 4, 1, 8), torch.zeros(2, 3, dtype=torch.int32)
    assert append_rows(cache, cache, torch.ones(2, 1, 1, 8), torch.ones(2, 1, 1, 8), table, torch.zeros(2, dtype=torch.int32), None).all()
    nothing = torch.ones(2, 0, 1, 8)
    assert not append_rows(cache, cache, nothing, nothing, table, torch.zeros(2, dtype=torch.int32), None).any()
