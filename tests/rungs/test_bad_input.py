# ruff: noqa: E501  (rows of a table)
"""Bad arguments of step 08 and of what stands on it: an error that names the argument, and nothing written."""

import math

import numpy as np
import pytest
import torch
from support.calls import append, heads, latent, paged, route

import ladder.step08_dflash2 as step08
from ladder.integrations import flash_attn as fa
from ladder.integrations.transformers import attention_forward, register
from ladder.lab.decode_problem import DecodeProblem
from ladder.lab.problem import AttentionProblem

EITHER = (TypeError, ValueError)


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Checks come before any path is chosen; PyTorch's is the quickest."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


# Calls that work


def schedule():
    return dict(seq_lens=ints(4000, 7), num_heads=4, num_kv_heads=2, head_dim=16, page_size=4, max_seq_len=4096, q_len=2)


def sizes(**changes):
    return lambda: dict(dtype=torch.float32, **changes)


def fa_dense():
    return dict(q=torch.randn(2, 6, 4, 16), k=torch.randn(2, 9, 2, 16), v=torch.randn(2, 9, 2, 16))


def fa_varlen():
    return dict(
        q=torch.randn(7, 4, 16), k=torch.randn(9, 2, 16), v=torch.randn(9, 2, 16), cu_seqlens_q=ints(0, 3, 7),
        cu_seqlens_k=ints(0, 4, 9), max_seqlen_q=4, max_seqlen_k=5, seqused_q=ints(2, 3), seqused_k=ints(4, 4),
    )  # fmt: skip


def fa_cache():
    cos, sin = step08.rope_tables(16, 64)
    return dict(
        q=torch.randn(2, 3, 4, 16), k_cache=torch.zeros(6, 4, 2, 16), v_cache=torch.zeros(6, 4, 2, 16),
        k=torch.randn(2, 3, 2, 16), v=torch.randn(2, 3, 2, 16), rotary_cos=cos, rotary_sin=sin, cache_seqlens=ints(1, 4),
        page_table=ints(0, 1, 2, 3).view(2, 2), causal=True,
    )  # fmt: skip


def fa_combine():
    return dict(out_partial=torch.randn(3, 5, 2, 8), lse_partial=torch.randn(3, 5, 2))


def fa_metadata():
    return dict(batch_size=2, max_seqlen_q=1, max_seqlen_k=8, num_heads_q=4, num_heads_kv=2, headdim=16, cache_seqlens=ints(4, 7))


def hf():
    q, k, v = heads().values()
    return dict(module=torch.nn.Identity(), query=q, key=k, value=v, attention_mask=None)


WINDOWS = step08.RangeWindows.sink_window(1, 3)
PREFILL = AttentionProblem(B=1, Hq=4, Hkv=2, Sq=8, Sk=8, D=16, causal=True, dtype="float32")
DECODE = DecodeProblem(B=1, Hq=4, Hkv=2, q_len=1, lengths="8", D=16, page_size=4, dtype="float32")
ATTENTION = ((step08.dflash2_attention, heads), (step08.dflash2_decode, paged), (step08.dflash2_mla_decode, latent))
BLOCKS = ((step08.DFlash2AttentionBlock, sizes(hidden=32, num_heads=4, num_kv_heads=2, head_dim=16)),
          (step08.DFlash2MLABlock, sizes(hidden=32, num_heads=2)))  # fmt: skip
MASKS = ((WINDOWS.visible, lambda: dict(Sq=4, Sk=6, causal=True, right=None)),
         (WINDOWS.visited_tiles, lambda: dict(Sq=4, Sk=6, causal=True, right=None, block_m=2, block_n=2)))  # fmt: skip
MASS = ((WINDOWS.attention_mass, lambda: {n: x for n, x in heads().items() if n != "v"}),)
EXPLAIN = ((step08.explain, lambda: dict(problem=PREFILL, device="cpu")),)
EXPLAIN_DECODE = ((step08.explain, lambda: dict(problem=DECODE, device="cpu")),)
KVCACHE = ((fa.flash_attn_with_kvcache, fa_cache),)

# functions with their good arguments, {argument: bad values}, exceptions, words (ARG stands for the argument)
REFUSED = (
    (ATTENTION, dict(softcap=(np.zeros((2, 2)), torch.ones(2), "20", [1.0], None)), TypeError, "softcap is"),
    (ATTENTION, dict(sinks=(np.zeros(4), [0.0] * 4, 1.0, "sinks")), TypeError, r"sinks is a .*want a torch.Tensor \(4,\)"),
    (ATTENTION[1:], dict(config=([1], "tiles", 3)), TypeError, "config is a"),
    (ATTENTION[2:], dict(latent_cache=(torch.randn(6, 4, 24).half(), torch.randn(6, 4, 24).to("meta"), torch.randn(6, 4, 23), torch.randn(6, 0, 24))),
     ValueError, "latent_cache"),
    (((step08.get_decode_schedule, schedule),), dict(dtype=(np.zeros(2), "float16"), config=([1],)), TypeError, "ARG"),
    (((step08.get_decode_schedule, schedule),), dict(seq_lens=(ints(4, 7).to("meta"),)), ValueError, "seq_lens is on meta"),
    (MASKS, dict(Sq=(-3,), Sk=(-1,), right=(-1,)), ValueError, "ARG is"),
    (MASKS, dict(Sq=("4",), Sk=(None, 2.5), causal=(np.zeros(2), None), right=("1",)), TypeError, "ARG is"),
    (MASS, dict(q=(None,), scale=("1",), seed=(None,), per_head=(np.zeros(2),), causal=(1,)), TypeError, "ARG"),
    (MASS, dict(q=(torch.randn(4, 6, 16),), k=(torch.randn(2, 2, 9, 8),), scale=(math.nan,)), ValueError, "ARG "),
    (MASS, dict(k=(torch.randn(2, 3, 9, 16),)), ValueError, "q has 4 heads"), (MASS, dict(rows=(0,)), ValueError, "rows is"),
    (((step08.yarn_mscale, lambda: dict(factor=4.0)),), dict(factor=(None, "4", [4.0]), mscale=(None, "4", [4.0])), TypeError, "ARG is"),
    (((step08.yarn_mscale, lambda: dict(factor=4.0)),), dict(factor=(math.nan, math.inf), mscale=(math.nan, math.inf)), ValueError, "ARG is"),
    (((step08.rope_tables, lambda: dict(head_dim=8, max_positions=4)),), dict(device=(2.5,)), TypeError, "device"),
    (((step08.fused_norm_router, route),), dict(scoring=(np.zeros(2), ["max"], 3), group_score=(np.zeros(2), ["max"], 3)), ValueError, "ARG is"),
    (EXPLAIN, dict(problem=(None, [1, 2], torch.ones(2)), page_size=("16",), sinks=(torch.ones(4),), ragged=(None,), windows=([1],)), TypeError, "ARG"),
    (EXPLAIN, dict(page_size=(-4,), device=("gpu",)), ValueError, "ARG"),
    (EXPLAIN_DECODE, dict(windows=("all",)), TypeError, "windows"), (EXPLAIN_DECODE, dict(softcap=(-1.0,)), ValueError, "softcap"),
    (((step08.warmup, lambda: dict(device="cpu")),), dict(shapes=(None, 3, PREFILL, [3], ["16k"], torch.ones(2), [(PREFILL, 3)])), TypeError, "shapes"),
    (BLOCKS[:1], dict(num_heads=(3,)), ValueError, "num_heads is"), (BLOCKS[:1], dict(qk_norm=(1,)), TypeError, "qk_norm is"),
    (BLOCKS, dict(dtype=(torch.int32,), softcap=(-1.0,), scale=(math.nan,), norm_eps=(-1.0,)), ValueError, "ARG is"),
    (BLOCKS, dict(dtype=("float32",), windows=("all",), softcap=("30",), scale=("1",), sinks=("yes",), interleaved=(None,), router=(3,)), TypeError, "ARG is"),
    # FlashAttention's interface
    (((fa.flash_attn_func, fa_dense),), dict(
        k=(None, torch.randn(2, 9, 16), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 16).half()), v=(3, torch.randn(2, 8, 2, 16)), q=(torch.tensor(1.0),),
        causal=("no", None), window_size=(3, None, (3, 1.5), (-2, 0)), return_attn_probs=("yes",),
    ), EITHER, "flash_attn_func: ARG "),
    (((fa.flash_attn_varlen_func, fa_varlen),), dict(
        k=(torch.randn(9, 2, 8),), v=(torch.randn(9, 16),), cu_seqlens_q=([0, 3, 7], ints(0, 3, 7).float(), ints(0, 3, 8)),
        cu_seqlens_k=(ints(0, 9), ints(0, 4, 9).to("meta")), seqused_q=([2, 3], ints(2, 3, 1), ints(2, 3).float(), ints(4, 3)),
        seqused_k=(ints(-1, 3),), max_seqlen_q=("4",), max_seqlen_k=(-1,),
    ), EITHER, "flash_attn_varlen_func: ARG "),
    (KVCACHE, dict(
        k_cache=(None, torch.zeros(6, 4, 16)), v_cache=(torch.zeros(6, 4, 1, 16),), k=(torch.randn(2, 3, 1, 16), torch.randn(2, 3, 2, 16).half()),
        v=(torch.tensor(1.0), 3), cache_seqlens=(ints(6, 4), ints(-1, 4), 2**40, -3),
        page_table=(ints(0, 1, 2, 3).view(2, 2).long(), [[0, 1], [2, 3]], ints(0, 1, 2, 9).view(2, 2), ints(-1, 1, 2, 3).view(2, 2)),
        cache_batch_idx=([1, 0], ints(0, 2), ints(0, -1), ints(1, 0).float()), cache_leftpad=(ints(0, -1), ints(0, 8), 3.5),
        rotary_sin=(torch.zeros(64, 4),), rotary_interleaved=("no",), scheduler_metadata=([1],), num_splits=(np.zeros(2), -1), return_softmax_lse=(1,),
    ), EITHER, "flash_attn_with_kvcache: ARG "),
    (KVCACHE, dict(rotary_cos=(torch.zeros(64, 9),)), EITHER, "flash_attn_with_kvcache: rotary_sin "),
    (KVCACHE, dict(rotary_seqlens=(ints(70, 0),)), EITHER, "flash_attn_with_kvcache: rotary_cos "),
    (((fa.flash_attn_combine, fa_combine),), dict(
        out_partial=(None, torch.ones(3, 5, 2, 8).int()), lse_partial=([1.0], torch.ones(3, 5, 2).bool(), torch.ones(3, 5, 2).to("meta")),
        out=(3, torch.empty(5, 2, 7)), out_dtype=("float16", torch.int32),
    ), EITHER, "flash_attn_combine: ARG "),
    (((fa.get_scheduler_metadata, fa_metadata),), dict(
        max_seqlen_q=(None,), max_seqlen_k=("8",), cache_seqlens=([4, 7], ints(4, 7).float()), num_splits=("2",), headdim_v=(0,), window_size=(3,),
        cache_leftpad=([0, 0],), cu_seqlens_k_new=(ints(0, 1),),
    ), EITHER, "ARG"),
    (((fa.get_scheduler_metadata, fa_metadata),), dict(batch_size=(3,)), EITHER, "cache_seqlens"),
    # transformers, of which no part is needed to call a layer's attention
    (((attention_forward, hf),), dict(query=(None,), key=([1],), sliding_window=(2.5,)), TypeError, "ARG is"),
    (((attention_forward, hf),), dict(query=(torch.randn(4, 6, 16),), value=(torch.randn(9, 16),), sliding_window=(-3,), backend=("dflash3",)), ValueError, "ARG is"),
    (((register, dict),), dict(fallback=("no",)), TypeError, "fallback is 'no'"),
)  # fmt: skip


def refusals():
    for entries, changes, errors, words in REFUSED:
        for entry, make in entries:
            for argument, values in changes.items():
                for bad in values:
                    is_tensor = isinstance(bad, torch.Tensor)  # an id must be the same in every process
                    told = f"{tuple(bad.shape)} {bad.dtype}" if is_tensor else str(bad)[:20]
                    yield pytest.param(
                        entry, make, argument, bad, errors, words, id=f"{entry.__name__}-{argument}-{told}"
                    )


@pytest.mark.parametrize("entry, make, argument, bad, errors, words", list(refusals()))
def test_refusal(entry, make, argument, bad, errors, words):
    given = make()
    before = {name: x.clone() for name, x in given.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(errors, match=words.replace("ARG", argument)):
        entry(**{**given, argument: bad})
    if argument != "cache_leftpad":  # whose bound is the length with the new tokens
        assert all(torch.equal(given[name], x) for name, x in before.items())


def test_out_that_wants_gradients():
    for (entry, make), shape in zip(ATTENTION, ((2, 4, 6, 16), (2, 2, 4, 16), (2, 2, 4, 16))):
        out = torch.empty(shape, requires_grad=True)
        with pytest.raises(NotImplementedError, match="out requires gradients"):
            entry(**make(), out=out)
        with torch.no_grad():
            assert entry(**make(), out=out) is not None
    for name, shape in (("k_cache", (4, 4, 2, 16)), ("out", (5, 4, 16))):
        with pytest.raises(NotImplementedError, match="forward only"):
            step08.fused_qkv_rope_append(**{**append(), name: torch.zeros(shape, requires_grad=True)})


def test_out_over_an_input():
    """Over K and V it would change what later rows read; over q, element for element, every row was read before."""
    x = heads()
    wanted = step08.dflash2_attention(**x)
    room = torch.randn(2 * 4 * 16 * 9 + 48)
    v = room[: 2 * 2 * 9 * 16].view(2, 2, 9, 16).copy_(x["v"])
    for name in ("k", "v"):
        with pytest.raises(ValueError, match=f"out shares memory with {name};"):
            step08.dflash2_attention(**{**x, name: v}, out=room[: wanted.numel()].view_as(wanted))
    q = room[: wanted.numel()].view_as(wanted).copy_(x["q"])
    with pytest.raises(ValueError, match="out shares memory with q;"):
        step08.dflash2_attention(q, x["k"], x["v"], out=room[16 : 16 + wanted.numel()].view_as(wanted))
    torch.testing.assert_close(step08.dflash2_attention(q, x["k"], x["v"], out=q), wanted)

    y = paged()
    with pytest.raises(ValueError, match="out shares memory with v_cache;"):
        step08.dflash2_decode(**y, out=y["v_cache"].flatten()[: y["q"].numel()].view_as(y["q"]))
    packed = torch.randn(7, 8 * 16)  # q, k, v as a projection leaves them: interleaved, none on another
    q, k, v = (t.unflatten(1, (-1, 16)) for t in packed.split([64, 32, 32], dim=1))
    starts = ints(0, 3, 7)
    wanted = step08.dflash2_varlen(q, k, v, starts, starts)
    torch.testing.assert_close(step08.dflash2_varlen(q, k, v, starts, starts, out=q), wanted)


def test_numbers_of_numpy():
    given, rows = schedule(), route()
    found = step08.get_decode_schedule(**{name: np.int64(n) if isinstance(n, int) else n for name, n in given.items()})
    assert torch.equal(found, step08.get_decode_schedule(**given))
    assert step08.yarn_mscale(np.float32(4)) == pytest.approx(0.1 * math.log(4) + 1)
    assert torch.equal(step08.rope_tables(8, 4, np.float32(500))[0], step08.rope_tables(8, 4, 500.0)[0])
    wanted = step08.fused_norm_router(**rows, eps=1e-3, routed_scaling_factor=2.5)
    found = step08.fused_norm_router(**rows, eps=np.float32(1e-3), routed_scaling_factor=np.float32(2.5))
    torch.testing.assert_close(found, wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_explain_without_a_gpu():
    with pytest.raises(ValueError, match="PyTorch sees no GPU"):
        step08.explain(PREFILL, device="cuda")


def test_everything_is_exported():
    for name in ("rope_tables", "yarn_mscale", "fused_add_norm", "BlockOutput", "DFlash2AttentionBlock", "DFlash2MLABlock", "Router",
                 "AttentionBatch", "get_decode_schedule", "DecodeWorkspace", "RangeWindows", "Range"):  # fmt: skip
        assert name in step08.__all__ and name in dir(step08) and getattr(step08, name).__doc__


@pytest.mark.parametrize("batch", [None, {}, step08.AttentionBatch(torch.arange(4), torch.arange(4), None, None)], ids=["None", "dict", "fields"])
def test_block_batch(batch):
    block = step08.DFlash2AttentionBlock(32, 4, 2, 16, dtype=torch.float32)
    cos, sin = step08.rope_tables(16, 64)
    with pytest.raises(TypeError, match="batch"):
        block(torch.randn(4, 32), None, cos, sin, batch, torch.zeros(4, 4, 2, 16), torch.zeros(4, 4, 2, 16))
