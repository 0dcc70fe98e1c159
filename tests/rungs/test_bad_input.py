"""Bad arguments of step 08 and of FlashAttention's interface: an error that names the argument, and nothing written."""

import math

import numpy as np
import pytest
import torch

import ladder.step08_dflash2 as step08
from ladder.integrations import flash_attn as fa
from ladder.lab.decode_problem import DecodeProblem
from ladder.lab.problem import AttentionProblem


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Checks come before any path is chosen; PyTorch's is the quickest."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def dense():
    return dict(q=torch.randn(2, 4, 6, 16), k=torch.randn(2, 2, 9, 16), v=torch.randn(2, 2, 9, 16))


def paged(q_len=3):
    return dict(
        q=torch.randn(2, q_len, 4, 16), k_cache=torch.randn(6, 4, 2, 16), v_cache=torch.randn(6, 4, 2, 16),
        block_table=ints(0, 1, 2, 3).view(2, 2), seq_lens=ints(4, 7),
    )  # fmt: skip


def latent():
    return dict(
        q=torch.randn(2, 3, 4, 24), latent_cache=torch.randn(6, 4, 24), block_table=ints(0, 1, 2, 3).view(2, 2),
        seq_lens=ints(4, 7), scale=0.2, head_dim_v=16,
    )  # fmt: skip


def append():
    cos, sin = step08.rope_tables(16, 64)
    return dict(
        x=torch.randn(5, 32), weight_qkv=torch.randn(128, 32), cos=cos, sin=sin, positions=torch.arange(5),
        k_cache=torch.zeros(4, 4, 2, 16), v_cache=torch.zeros(4, 4, 2, 16), slot_mapping=torch.arange(5),
        num_heads=4, num_kv_heads=2, head_dim=16,
    )  # fmt: skip


def router():
    return dict(x=torch.randn(5, 32), residual=None, norm_weight=torch.ones(32), gate_weight=torch.randn(8, 32), top_k=2)


@pytest.mark.parametrize("bad", [np.zeros((2, 2)), torch.ones(2), "20", [1.0], None], ids=["numpy", "tensor", "str", "list", "None"])
@pytest.mark.parametrize("entry, make", [(step08.dflash2_attention, dense), (step08.dflash2_decode, paged), (step08.dflash2_mla_decode, latent)])
def test_softcap_that_is_no_number(entry, make, bad):
    with pytest.raises(TypeError, match="softcap is"):
        entry(**make(), softcap=bad)


@pytest.mark.parametrize("bad", [np.zeros(4), [0.0] * 4, 1.0, "sinks"], ids=["numpy", "list", "float", "str"])
@pytest.mark.parametrize("entry, make", [(step08.dflash2_attention, dense), (step08.dflash2_decode, paged), (step08.dflash2_mla_decode, latent)])
def test_sinks_that_are_no_tensor(entry, make, bad):
    with pytest.raises(TypeError, match=r"sinks is a .*want a torch.Tensor \(4,\)"):
        entry(**make(), sinks=bad)


def test_out_that_wants_gradients():
    for entry, make, shape in (
        (step08.dflash2_attention, dense, (2, 4, 6, 16)), (step08.dflash2_decode, paged, (2, 3, 4, 16)),
        (step08.dflash2_mla_decode, latent, (2, 3, 4, 16)),
    ):  # fmt: skip
        out = torch.empty(shape, requires_grad=True)
        with pytest.raises(NotImplementedError, match="out requires gradients"):
            entry(**make(), out=out)
        with torch.no_grad():
            assert entry(**make(), out=out) is not None
    for name in ("k_cache", "out"):
        arguments = append()
        arguments[name] = torch.zeros(4, 4, 2, 16) if name == "k_cache" else torch.zeros(5, 4, 16)
        arguments[name].requires_grad_()
        with pytest.raises(NotImplementedError, match="forward only"):
            step08.fused_qkv_rope_append(**arguments)


def test_out_over_an_input():
    """Over K and V it would change what later rows read; over q, element for element, every row was read before."""
    x = dense()
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


@pytest.mark.parametrize("config", [[1], "tiles", 3])
def test_config_is_checked_on_a_cpu_too(config):
    for entry, make in ((step08.dflash2_decode, paged), (step08.dflash2_mla_decode, latent)):
        with pytest.raises(TypeError, match="config is a"):
            entry(**make(), config=config)


@pytest.mark.parametrize("bad", [
    torch.randn(6, 4, 24).half(), torch.randn(6, 4, 24).to("meta"), torch.randn(6, 4, 23), torch.randn(6, 0, 24),
], ids=["dtype", "device", "columns", "page_size"])  # fmt: skip
def test_latent_cache_by_its_own_name(bad):
    with pytest.raises(ValueError, match="latent_cache"):
        step08.dflash2_mla_decode(**{**latent(), "latent_cache": bad})


def test_decode_schedule():
    sizes = dict(num_heads=4, num_kv_heads=2, head_dim=16, page_size=4, max_seq_len=4096, q_len=2)
    lengths = ints(4000, 7)
    wanted = step08.get_decode_schedule(lengths, **sizes)
    found = step08.get_decode_schedule(lengths, **{name: np.int64(n) for name, n in sizes.items()})
    assert torch.equal(found, wanted)
    for name, bad in (("dtype", np.zeros(2)), ("dtype", "float16"), ("config", [1])):
        with pytest.raises(TypeError, match=name):
            step08.get_decode_schedule(lengths, **sizes, **{name: bad})
    with pytest.raises(ValueError, match="seq_lens is on meta"):
        step08.get_decode_schedule(lengths.to("meta"), **sizes)


@pytest.mark.parametrize("name, bad, error", [
    ("Sq", -3, ValueError), ("Sq", "4", TypeError), ("Sk", None, TypeError), ("Sk", 2.5, TypeError), ("Sk", -1, ValueError),
    ("causal", np.zeros(2), TypeError), ("causal", None, TypeError), ("right", "1", TypeError), ("right", -1, ValueError),
], ids=str)  # fmt: skip
def test_windows_methods(name, bad, error):
    windows = step08.RangeWindows.sink_window(1, 3)
    arguments = {**dict(Sq=4, Sk=6, causal=True, right=None), name: bad}
    with pytest.raises(error, match=f"{name} is"):
        windows.visible(**arguments)
    with pytest.raises(error, match=f"{name} is"):
        windows.visited_tiles(**arguments, block_m=2, block_n=2)


@pytest.mark.parametrize("name, bad, error", [
    ("q", None, TypeError), ("q", torch.randn(4, 6, 16), ValueError), ("k", torch.randn(2, 3, 9, 16), ValueError),
    ("k", torch.randn(2, 2, 9, 8), ValueError), ("scale", "1", TypeError), ("scale", math.nan, ValueError),
    ("rows", 0, ValueError), ("seed", None, TypeError), ("per_head", np.zeros(2), TypeError), ("causal", 1, TypeError),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_attention_mass(name, bad, error):
    windows = step08.RangeWindows.sink_window(1, 3)
    q, k, _ = dense().values()
    with pytest.raises(error, match={"rows": "rows is", "k": "k |q has"}.get(name, name)):
        windows.attention_mass(**{**dict(q=q, k=k), name: bad})


def test_yarn_and_rope():
    assert step08.yarn_mscale(np.float32(4)) == pytest.approx(0.1 * math.log(4) + 1)
    assert torch.equal(step08.rope_tables(8, 4, np.float32(500))[0], step08.rope_tables(8, 4, 500.0)[0])
    for bad, error in ((None, TypeError), ("4", TypeError), ([4.0], TypeError), (math.nan, ValueError), (math.inf, ValueError)):
        with pytest.raises(error, match="factor is"):
            step08.yarn_mscale(bad)
        with pytest.raises(error, match="mscale is"):
            step08.yarn_mscale(4.0, bad)
    with pytest.raises(TypeError, match="device"):
        step08.rope_tables(8, 4, device=2.5)


@pytest.mark.parametrize("name", ["scoring", "group_score"])
@pytest.mark.parametrize("bad", [np.zeros(2), ["max"], 3], ids=["numpy", "list", "int"])
def test_router_words(name, bad):
    with pytest.raises(ValueError, match=f"{name} is"):
        step08.fused_norm_router(**router(), **{name: bad})


def test_numbers_of_numpy():
    wanted = step08.fused_norm_router(**router_at(0), eps=1e-3, routed_scaling_factor=2.5)
    found = step08.fused_norm_router(**router_at(0), eps=np.float32(1e-3), routed_scaling_factor=np.float32(2.5))
    torch.testing.assert_close(found, wanted)


def router_at(seed):
    torch.manual_seed(seed)
    return router()


PREFILL = AttentionProblem(B=1, Hq=4, Hkv=2, Sq=8, Sk=8, D=16, causal=True, dtype="float32")
DECODE = DecodeProblem(B=1, Hq=4, Hkv=2, q_len=1, lengths="8", D=16, page_size=4, dtype="float32")


@pytest.mark.parametrize("options, error", [
    (dict(problem=None), TypeError), (dict(problem=[1, 2]), TypeError), (dict(problem=torch.ones(2)), TypeError),
    (dict(page_size=-4), ValueError), (dict(page_size="16"), TypeError), (dict(sinks=torch.ones(4)), TypeError),
    (dict(ragged=None), TypeError), (dict(windows=[1]), TypeError), (dict(device="gpu"), ValueError),
    (dict(problem=DECODE, windows="all"), TypeError), (dict(problem=DECODE, softcap=-1.0), ValueError),
], ids=str)  # fmt: skip
def test_explain(options, error):
    with pytest.raises(error, match=[*options][-1]):
        step08.explain(**{"problem": PREFILL, "device": "cpu", **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_explain_without_a_gpu():
    with pytest.raises(ValueError, match="PyTorch sees no GPU"):
        step08.explain(PREFILL, device="cuda")


@pytest.mark.parametrize("shapes", [None, 3, PREFILL, [3], ["16k"], torch.ones(2), [(PREFILL, 3)]], ids=str)
def test_warmup(shapes):
    with pytest.raises(TypeError, match="shapes"):
        step08.warmup(shapes, "cpu")


# FlashAttention's interface


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


@pytest.mark.parametrize("name, bad", [
    ("k", None), ("k", torch.randn(2, 9, 16)), ("k", torch.randn(2, 9, 2, 8)), ("k", torch.randn(2, 9, 2, 16).half()),
    ("v", 3), ("v", torch.randn(2, 8, 2, 16)), ("q", torch.tensor(1.0)), ("causal", "no"), ("causal", None), ("window_size", 3),
    ("window_size", None), ("window_size", (3, 1.5)), ("window_size", (-2, 0)), ("return_attn_probs", "yes"),
], ids=lambda x: x if isinstance(x, str) else type(x).__name__)  # fmt: skip
def test_fa_dense(name, bad):
    with pytest.raises((TypeError, ValueError), match=f"flash_attn_func: {name} "):
        fa.flash_attn_func(**{**fa_dense(), name: bad})


@pytest.mark.parametrize("name, bad", [
    ("k", torch.randn(9, 2, 8)), ("v", torch.randn(9, 16)), ("cu_seqlens_q", [0, 3, 7]), ("cu_seqlens_q", ints(0, 3, 7).float()),
    ("cu_seqlens_q", ints(0, 3, 8)), ("cu_seqlens_k", ints(0, 9)), ("cu_seqlens_k", ints(0, 4, 9).to("meta")),
    ("seqused_q", [2, 3]), ("seqused_q", ints(2, 3, 1)), ("seqused_q", ints(2, 3).float()), ("seqused_q", ints(4, 3)),
    ("seqused_k", ints(-1, 3)), ("max_seqlen_q", "4"), ("max_seqlen_k", -1),
], ids=lambda x: x if isinstance(x, str) else type(x).__name__)  # fmt: skip
def test_fa_varlen(name, bad):
    with pytest.raises((TypeError, ValueError), match=f"flash_attn_varlen_func: {name} "):
        fa.flash_attn_varlen_func(**{**fa_varlen(), name: bad})


@pytest.mark.parametrize("name, bad, argument", [
    ("k_cache", None, None), ("k_cache", torch.zeros(6, 4, 16), None), ("v_cache", torch.zeros(6, 4, 1, 16), None),
    ("k", torch.randn(2, 3, 1, 16), None), ("v", torch.tensor(1.0), None), ("v", 3, None), ("k", torch.randn(2, 3, 2, 16).half(), None),
    ("cache_seqlens", ints(6, 4), None), ("cache_seqlens", ints(-1, 4), None), ("cache_seqlens", 2**40, None),
    ("cache_seqlens", -3, None), ("page_table", ints(0, 1, 2, 3).view(2, 2).long(), None), ("page_table", [[0, 1], [2, 3]], None),
    ("page_table", ints(0, 1, 2, 9).view(2, 2), None), ("page_table", ints(-1, 1, 2, 3).view(2, 2), None),
    ("cache_batch_idx", [1, 0], None), ("cache_batch_idx", ints(0, 2), None), ("cache_batch_idx", ints(0, -1), None),
    ("cache_batch_idx", ints(1, 0).float(), None), ("cache_leftpad", ints(0, -1), None), ("cache_leftpad", ints(0, 8), None),
    ("cache_leftpad", 3.5, None), ("rotary_sin", torch.zeros(64, 4), None), ("rotary_cos", torch.zeros(64, 9), "rotary_sin"),
    ("rotary_seqlens", ints(70, 0), "rotary_cos"), ("rotary_interleaved", "no", None), ("scheduler_metadata", [1], None),
    ("num_splits", np.zeros(2), None), ("num_splits", -1, None), ("return_softmax_lse", 1, None),
], ids=lambda x: x if isinstance(x, str) else type(x).__name__)  # fmt: skip
def test_fa_kvcache_writes_nothing_before_it_complains(name, bad, argument):
    given = fa_cache()
    caches = given["k_cache"], given["v_cache"]
    with pytest.raises((TypeError, ValueError), match=f"flash_attn_with_kvcache: {argument or name} "):
        fa.flash_attn_with_kvcache(**{**given, name: bad})
    if name != "cache_leftpad":  # whose bound is the length with the new tokens
        assert not any(x.any() for x in caches)


@pytest.mark.parametrize("name, bad", [
    ("out_partial", None), ("out_partial", torch.ones(3, 5, 2, 8).int()), ("lse_partial", [1.0]), ("lse_partial", torch.ones(3, 5, 2).bool()),
    ("lse_partial", torch.ones(3, 5, 2).to("meta")), ("out", 3), ("out", torch.empty(5, 2, 7)), ("out_dtype", "float16"), ("out_dtype", torch.int32),
], ids=lambda x: x if isinstance(x, str) else type(x).__name__)  # fmt: skip
def test_fa_combine(name, bad):
    given = dict(out_partial=torch.randn(3, 5, 2, 8), lse_partial=torch.randn(3, 5, 2))
    with pytest.raises((TypeError, ValueError), match=f"flash_attn_combine: {name} "):
        fa.flash_attn_combine(**{**given, name: bad})


@pytest.mark.parametrize("name, bad", [
    ("batch_size", 3), ("max_seqlen_q", None), ("max_seqlen_k", "8"), ("cache_seqlens", [4, 7]), ("cache_seqlens", ints(4, 7).float()),
    ("num_splits", "2"), ("headdim_v", 0), ("window_size", 3), ("cache_leftpad", [0, 0]), ("cu_seqlens_k_new", ints(0, 1)),
], ids=lambda x: x if isinstance(x, str) else type(x).__name__)  # fmt: skip
def test_fa_metadata(name, bad):
    given = dict(batch_size=2, max_seqlen_q=1, max_seqlen_k=8, num_heads_q=4, num_heads_kv=2, headdim=16, cache_seqlens=ints(4, 7))
    with pytest.raises((TypeError, ValueError), match={"batch_size": "cache_seqlens", "headdim_v": "headdim_v"}.get(name, name)):
        fa.get_scheduler_metadata(**{**given, name: bad})


def test_everything_is_exported():
    for name in ("rope_tables", "yarn_mscale", "fused_add_norm", "BlockOutput", "DFlash2AttentionBlock", "DFlash2MLABlock", "Router",
                 "AttentionBatch", "get_decode_schedule", "DecodeWorkspace", "RangeWindows", "Range"):  # fmt: skip
        assert name in step08.__all__ and name in dir(step08) and getattr(step08, name).__doc__


# Blocks


@pytest.mark.parametrize("name, bad, error", [
    ("num_heads", 3, ValueError), ("dtype", torch.int32, ValueError), ("dtype", "float32", TypeError), ("windows", "all", TypeError),
    ("softcap", "30", TypeError), ("softcap", -1.0, ValueError), ("scale", "1", TypeError), ("scale", math.nan, ValueError),
    ("norm_eps", -1.0, ValueError), ("sinks", "yes", TypeError), ("interleaved", None, TypeError), ("qk_norm", 1, TypeError),
    ("router", 3, TypeError),
], ids=str)  # fmt: skip
def test_block_sizes(name, bad, error):
    given = dict(hidden=32, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    with pytest.raises(error, match=f"{name} is"):
        step08.DFlash2AttentionBlock(**{**given, name: bad})
    if name in ("num_heads", "qk_norm"):
        return
    with pytest.raises(error, match=f"{name} is"):
        step08.DFlash2MLABlock(**{**dict(hidden=32, num_heads=2, dtype=torch.float32), name: bad})


@pytest.mark.parametrize("batch", [None, {}, step08.AttentionBatch(torch.arange(4), torch.arange(4), None, None)], ids=["None", "dict", "fields"])
def test_block_batch(batch):
    block = step08.DFlash2AttentionBlock(32, 4, 2, 16, dtype=torch.float32)
    cos, sin = step08.rope_tables(16, 64)
    with pytest.raises(TypeError, match="batch"):
        block(torch.randn(4, 32), None, cos, sin, batch, torch.zeros(4, 4, 2, 16), torch.zeros(4, 4, 2, 16))


# transformers, of which no part is needed to call a layer's attention


@pytest.mark.parametrize("name, bad, error", [
    ("query", None, TypeError), ("query", torch.randn(4, 6, 16), ValueError), ("key", [1], TypeError), ("value", torch.randn(9, 16), ValueError),
    ("sliding_window", -3, ValueError), ("sliding_window", 2.5, TypeError), ("backend", "dflash3", ValueError),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_attention_forward(name, bad, error):
    from ladder.integrations.transformers import attention_forward

    q, k, v = dense().values()
    with pytest.raises(error, match=f"{name} is"):
        attention_forward(**{**dict(module=torch.nn.Identity(), query=q, key=k, value=v, attention_mask=None), name: bad})


def test_register_wants_a_flag():
    from ladder.integrations.transformers import register

    with pytest.raises(TypeError, match="fallback is 'no'"):
        register(fallback="no")
