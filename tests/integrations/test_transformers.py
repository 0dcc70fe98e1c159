"""Hugging Face models on step 08: logits and greedy tokens beside transformers' own attention, on random small models."""

import copy
import math
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="4.57")

from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function  # noqa: E402

from ladder.integrations import transformers as ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default", "error:dflash")  # a fallback that no test asked for is an error

COMMON = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=48, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None, use_cache=True,
)  # fmt: skip
MOE = dict(moe_intermediate_size=16, num_experts_per_tok=2, norm_topk_prob=True)
MODELS = {  # configuration, fields, whose attention is the reference
    "Llama": (dict(), "sdpa"),
    "Qwen3Moe": (dict(num_experts=4, decoder_sparse_step=1, **MOE), "sdpa"),
    "DeepseekV2": (
        dict(n_routed_experts=4, n_shared_experts=1, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=24, qk_rope_head_dim=8,
             v_head_dim=16, first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy", num_key_value_heads=4,
             moe_intermediate_size=16, num_experts_per_tok=2),
        "sdpa",
    ),
    "Gemma2": (dict(sliding_window=6, query_pre_attn_scalar=16, attn_logit_softcapping=2.0), "eager"),
    "Gemma3Text": (dict(sliding_window=5, query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"]), "sdpa"),
    "GptOss": (dict(sliding_window=4, num_local_experts=4, num_experts_per_tok=2), "eager"),
}  # fmt: skip
OLD = int(transformers.__version__.split(".")[0]) < 5
TOKENS = 18  # more than a decode call takes
IDS = torch.randint(3, 64, (3, TOKENS), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([TOKENS, 4, 11])
POSITIONS = torch.arange(TOKENS)
LEFT, RIGHT = (POSITIONS >= TOKENS - LENGTHS[:, None]).long(), (POSITIONS < LENGTHS[:, None]).long()

ours.register()


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Step 08's PyTorch path: the kernels have their own tests."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


_BUILT = {}


def build(name, device="cpu", dtype=torch.float32, **more):
    """(model on dflash2, the same on transformers' own attention)."""
    key = (name, str(device), dtype, *more.items())
    if key not in _BUILT:
        fields, reference = MODELS[name]
        config = getattr(transformers, f"{name}Config")(**{**COMMON, **fields, **more})
        torch.manual_seed(0)
        kind = getattr(transformers, "Gemma3ForCausalLM" if name == "Gemma3Text" else f"{name}ForCausalLM")
        model = kind._from_config(config, attn_implementation="dflash2", dtype=dtype).to(device).eval()
        for parameter in model.parameters():  # the initial 0.02 makes every attention nearly uniform
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.25)
        if name == "GptOss":
            for layer in model.model.layers:
                torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
        other = kind._from_config(copy.deepcopy(config), attn_implementation=reference, dtype=dtype).to(device).eval()
        other.load_state_dict(model.state_dict())
        assert model.config._attn_implementation == "step08" and other.config._attn_implementation == reference
        _BUILT[key] = model, other
    return _BUILT[key]


def both(name, **inputs):
    """Logits of the two models."""
    models = build(name)  # its weights are ordinary tensors
    with torch.inference_mode():
        return [model(**inputs).logits for model in models]


@pytest.fixture
def calls(monkeypatch):
    """How often each entry of step 08 ran."""
    counts = {}
    real = ours._entries("dflash2")

    def counted(name):
        def call(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return getattr(real, name)(*args, **kwargs)

        return call

    stand_in = SimpleNamespace(**{name: counted(name) for name in ("dense", "varlen", "paged_prefill", "decode")})
    monkeypatch.setattr(ours, "_entries", lambda backend: stand_in)
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_prefill(name, calls):
    mine, theirs = both(name, input_ids=IDS)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert calls == {"dense": 2}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(name, side, calls):
    mask = LEFT if side == "left" else RIGHT
    mine, theirs = both(name, input_ids=IDS, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    torch.testing.assert_close(mine[mask.bool()], theirs[mask.bool()], atol=1e-4, rtol=1e-4)
    assert mine.isfinite().all() and calls == {"varlen": 2}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(name, padded, cache):
    if OLD and name == "DeepseekV2" and cache == "static":
        pytest.skip("this transformers' static cache wants equal head sizes")
    inputs = dict(input_ids=IDS, attention_mask=LEFT if padded else torch.ones_like(IDS))
    tokens = [
        model.generate(
            **inputs, max_new_tokens=8, do_sample=False, disable_compile=True,
            cache_implementation="static" if cache == "static" else None,
        ) for model in build(name)
    ]  # fmt: skip
    assert tokens[0].shape == (3, TOKENS + 8) and torch.equal(*tokens)


def test_decode_reads_the_cache_where_it_lies(calls):
    """No packing: one decode call a layer and step, padded on the left or not, in either cache."""
    model, _ = build("Llama")
    for mask, cache, prefill in (
        (LEFT, None, {"varlen": 2}), (LEFT, "static", {"varlen": 2}), (torch.ones_like(IDS), "static", {"paged_prefill": 2}),
    ):  # fmt: skip
        calls.clear()
        model.generate(
            input_ids=IDS, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False, disable_compile=True,
            cache_implementation=cache,
        )  # fmt: skip
        assert calls == {**prefill, "decode": 4}


def test_long_static_prefill_and_chunks(calls):
    """A prompt longer than decode takes, into a static cache, then a chunk of three on top, then one token."""
    model, other = build("Llama")
    ids = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    for kind in (transformers.StaticCache, transformers.DynamicCache):
        logits = []
        for each in (model, other):
            cache = kind(config=each.config, **(dict(max_cache_len=48) if kind is transformers.StaticCache else {}))
            with torch.inference_mode():
                logits.append([
                    each(
                        input_ids=ids[:, a:b], past_key_values=cache, position_ids=torch.arange(a, b)[None],
                        cache_position=torch.arange(a, b),
                    ).logits for a, b in ((0, 36), (36, 39), (39, 40))
                ])  # fmt: skip
        for mine, theirs in zip(*logits, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert calls == {"paged_prefill": 2, "decode": 4, "dense": 6}


def test_long_dynamic_decode_splits_keys(monkeypatch, calls):
    monkeypatch.setattr(ours, "SPLIT_KEYS", TOKENS + 1)
    model, other = build("Gemma3Text")
    tokens = [m.generate(input_ids=IDS, max_new_tokens=6, do_sample=False, disable_compile=True) for m in (model, other)]
    assert torch.equal(*tokens) and calls["decode"] == 5 and calls["dense"] == 2 + 5  # the sliding layer keeps few keys


def test_holes(calls):
    """Right-padded prompts that go on leave padding between real tokens."""
    mask = torch.cat((RIGHT, torch.ones(3, 2, dtype=torch.long)), dim=1)
    ids = torch.cat((IDS, IDS[:, :2]), dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    mine, theirs = both("Llama", input_ids=ids, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(mine[mask.bool()], theirs[mask.bool()], atol=1e-4, rtol=1e-4)
    assert calls == {"varlen": 2}
    with pytest.warns(UserWarning, match="dflash2: the mask is neither"):  # the window counts the holes
        mine, theirs = both("Gemma3Text", input_ids=ids, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(mine[mask.bool()], theirs[mask.bool()], atol=1e-4, rtol=1e-4)


# Masks


def sdpa_visible(mask_function, q_length, kv_length, **arguments):
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(
        batch_size=3, q_length=q_length, kv_length=kv_length, mask_function=mask_function, allow_is_causal_skip=False, **arguments
    )


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("padding", [None, "left", "right", "all"])
@pytest.mark.parametrize("q_length", [1, 3, TOKENS])
def test_a_mask_says_what_the_full_mask_says(window, static, padding, q_length):
    if OLD:
        pytest.skip("the reference's arguments are those of transformers 5")
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    kv_length = TOKENS + 5 if static else TOKENS
    q_offset = torch.tensor(TOKENS - q_length) if static else TOKENS - q_length
    attention_mask = {None: None, "left": LEFT, "right": RIGHT, "all": torch.ones_like(IDS)}[padding]
    attention_mask = None if attention_mask is None else attention_mask.bool()
    arguments = dict(q_offset=q_offset, kv_offset=0, attention_mask=attention_mask, local_size=window, device="cpu")
    full = sdpa_visible(function, q_length, kv_length, **arguments)
    made = ours.key_mask(batch_size=3, q_length=q_length, kv_length=kv_length, mask_function=function, **arguments)
    query = torch.empty(3, 4, q_length, 8)
    causal, found_window, entries = ours._decode_mask(made, query, kv_length)
    assert (found_window or None) == window and causal is True
    visible = ours._visible(entries, query, kv_length, True, window)
    real = torch.ones(3, q_length, dtype=torch.bool) if attention_mask is None else attention_mask[:, TOKENS - q_length :]
    assert torch.equal(visible.expand_as(full)[:, 0][real], full[:, 0][real])
    if padding in (None, "all") and not static and window is None:
        assert entries is None and made.untyped_storage().nbytes() <= 4 * 3
    assert made.untyped_storage().nbytes() <= 4 * 3 * (1 + kv_length + q_length)  # not Sq x Sk


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("fallback", [False, True])
def test_a_mask_decides_whether_a_layer_is_causal(side, causal, fallback):
    """Not the module: AIMv2's text layers say they are not causal and get a causal mask, a decoder may get the other one."""
    from transformers.masking_utils import bidirectional_mask_function

    mask = (LEFT if side == "left" else RIGHT).bool()
    function = causal_mask_function if causal else bidirectional_mask_function
    made = ours.key_mask(batch_size=3, q_length=TOKENS, kv_length=TOKENS, mask_function=function, attention_mask=mask, device="cpu")
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, TOKENS, 8, requires_grad=fallback) for _ in range(3))
    visible = mask[:, None, None] & (torch.ones(TOKENS, TOKENS).tril().bool() if causal else True)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)
    for says in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out, _ = ours.attention_forward(SimpleNamespace(is_causal=says), q, k, v, made, is_causal=says)
        torch.testing.assert_close(out[mask], wanted[mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_without_padding_decides_too(causal):
    from transformers.masking_utils import bidirectional_mask_function

    function = causal_mask_function if causal else bidirectional_mask_function
    made = ours.key_mask(batch_size=2, q_length=4, kv_length=4, mask_function=function)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 4, 8) for _ in range(3))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    for module in (SimpleNamespace(is_causal=not causal), SimpleNamespace()):
        out, _ = ours.attention_forward(module, q, k, v, made)
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


def test_without_a_mask_the_module_is_asked():
    """A module that does not say is one that sees everything, which no mask means in eager attention."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 4, 8) for _ in range(3))
    for module, causal in ((SimpleNamespace(is_causal=True), True), (SimpleNamespace(is_causal=False), False), (SimpleNamespace(), False)):
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
        torch.testing.assert_close(ours.attention_forward(module, q, k, v, None)[0], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(OLD, reason="this transformers' BERT has no attention interface")
def test_bidirectional_encoder(calls):
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=32
    )
    torch.manual_seed(0)
    model = transformers.BertModel._from_config(config, attn_implementation="dflash2").eval()
    other = transformers.BertModel._from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    other.load_state_dict(model.state_dict())
    for mask in (None, LEFT, RIGHT):
        with torch.inference_mode():
            mine, theirs = (m(input_ids=IDS, attention_mask=mask).last_hidden_state for m in (model, other))
        real = torch.ones_like(IDS).bool() if mask is None else mask.bool()
        torch.testing.assert_close(mine[real], theirs[real], atol=1e-4, rtol=1e-4)
    assert calls == {"dense": 2, "varlen": 4}


@pytest.mark.skipif(OLD, reason="this transformers' masks do not trace in one graph")
def test_compiled_in_one_graph():
    """A padded batch and a window, masks and all, without asking the device anything."""
    model, _ = build("Gemma3Text")
    positions = (LEFT.cumsum(-1) - 1).clamp(min=0)
    inputs = dict(input_ids=IDS, attention_mask=LEFT, position_ids=positions, use_cache=False)
    with torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).logits
        plain = model(**inputs).logits
    torch.testing.assert_close(compiled[LEFT.bool()], plain[LEFT.bool()], atol=1e-4, rtol=1e-4)


# Autocast


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(name, dtype):
    """A float32 model is no further from its float32 logits than transformers' own attention, under the same autocast."""
    models = build(name)
    mask = LEFT
    inputs = dict(input_ids=IDS, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    with torch.inference_mode():
        wanted = models[1](**inputs).logits[mask.bool()]
        with torch.autocast("cpu", dtype):
            mine, theirs = (model(**inputs).logits[mask.bool()] for model in models)
            tokens = [model.generate(input_ids=IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False) for model in models]
    assert mine.dtype == theirs.dtype and tokens[0].shape == tokens[1].shape == (3, TOKENS + 3)
    error, allowed = ((x.float() - wanted).square().mean().sqrt() for x in (mine, theirs))
    assert 0 < error <= 1.5 * allowed + 1e-3, f"rms error {error}, transformers' {allowed}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [dict(), dict(softcap=2.0), dict(s_aux=torch.tensor([0.5, -1.0, 2.0, 0.0]))])
@pytest.mark.parametrize("fallback", [False, True])
def test_autocast_computes_in_its_type(dtype, options, fallback):
    """As if the tensors had come in it: not once more rounded inside. float64 is left as it is."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8).to(dtype)
    mask = torch.ones(5, 5).tril()[None, None].bool() if fallback else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = layer(q.to(dtype), k.to(dtype), v, mask, **options)
        with torch.autocast("cpu", dtype):
            out = layer(q, k, v, mask, **options)
            double = layer(q.double(), k.double(), v.double(), mask, **options)
    assert out.dtype == dtype and torch.equal(out, wanted) and double.dtype == torch.float64


# Layout


@pytest.mark.parametrize("path", ["dense", "varlen", "paged prefill", "decode", "decode of tokens", "packed", "fallback", "packed fallback"])
def test_results_are_contiguous(path, calls, monkeypatch):
    """Models call view on them."""
    torch.manual_seed(0)
    new = {"paged prefill": 20, "decode": 2, "decode of tokens": 2}.get(path, 24)
    q, k, v = (torch.randn(2, *shape).transpose(1, 2) for shape in ((new, 4, 8), (24, 2, 8), (24, 2, 12)))
    mask, more = None, {}
    arguments = dict(batch_size=2, q_length=new, kv_length=24, q_offset=24 - new, mask_function=causal_mask_function)
    if path in ("paged prefill", "decode"):
        mask = ours.key_mask(**arguments | dict(q_offset=torch.tensor(23 - new)))
    elif path == "decode of tokens":
        monkeypatch.setattr(ours, "SPLIT_KEYS", 24)
    elif path == "packed":
        mask = ours.key_mask(**arguments, attention_mask=torch.arange(24) < torch.tensor([24, 9])[:, None])
    elif path == "fallback":
        mask = torch.ones(2, 1, new, 24).bool()
    if "varlen" in path or path == "packed fallback":
        more = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 24, 30, 48]))
    if path == "packed fallback":
        more["dropout"] = 1e-9
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = layer(q, k, v, mask, **more)
    entry = {"decode of tokens": "decode", "packed": "varlen", "paged prefill": "paged_prefill"}.get(path, path)
    assert calls == ({} if "fallback" in path else {entry: 1})
    assert out.shape == (2, new, 4, 12) and out.is_contiguous()


# What the kernels do not compute


def test_gradients_fall_back_and_are_right():
    mine, theirs = build("GptOss")
    mask = LEFT
    losses, gradients = [], []
    for model in (mine, theirs):
        model.zero_grad()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        if model is mine:
            with pytest.warns(UserWarning, match="dflash2: gradients are recorded"):
                logits = model(input_ids=IDS, attention_mask=mask, position_ids=positions).logits
        else:
            logits = model(input_ids=IDS, attention_mask=mask, position_ids=positions).logits
        losses.append(logits[mask.bool()].square().mean())
        losses[-1].backward()
        gradients.append([layer.self_attn.sinks.grad.clone() for layer in model.model.layers])
        gradients[-1].append(model.model.embed_tokens.weight.grad.clone())
        model.zero_grad(set_to_none=True)
    torch.testing.assert_close(*losses)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def layer(q, k, v, mask=None, **kwargs):
    module = SimpleNamespace(is_causal=True, training=False)
    return ours.attention_forward(module, q, k, v, mask, **kwargs)[0]


@pytest.mark.parametrize("reason, arguments", [
    ("dropout is 0.5", dict(dropout=0.5)), ("position_bias is given", dict(position_bias=torch.zeros(1, 4, 5, 5))),
    ("the mask is neither", dict(mask=torch.zeros(1, 1, 5, 5))),
    ("a window of 2 without", dict(is_causal=False, sliding_window=2)),
    ("dflash1: a sliding window, which dflash2 has", dict(backend="dflash1", sliding_window=2)),
    ("dflash1: a softcap", dict(backend="dflash1", softcap=3.0)),
    ("dflash1: attention sinks", dict(backend="dflash1", s_aux=torch.zeros(4))),
])  # fmt: skip
def test_reasons(reason, arguments):
    q = torch.randn(1, 4, 5, 8)
    with pytest.warns(UserWarning, match=reason):
        assert layer(q, q[:, :2], q[:, :2], **arguments).shape == (1, 5, 4, 8)
    with pytest.raises(NotImplementedError, match=reason):
        layer(q, q[:, :2], q[:, :2], fallback=False, **arguments)


@pytest.mark.parametrize("options", [dict(), dict(softcap=1.5), dict(s_aux=torch.tensor([0.5, -1.0, 2.0, 0.0])), dict(position_bias=True)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_fallback_computes_any_mask(options, kind):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 12)
    visible = torch.rand(2, 1, 5, 7) > 0.4
    visible[:, :, 1] = False
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3)) * 8**-0.5
    if "softcap" in options:
        scores = 1.5 * torch.tanh(scores / 1.5)
    if "position_bias" in options:
        options = dict(position_bias=torch.randn(1, 4, 5, 7))
        scores = scores + options["position_bias"]
    scores = scores.masked_fill(~visible, -math.inf)
    total = scores.exp().sum(-1, keepdim=True)
    if "s_aux" in options:
        total = total + options["s_aux"].view(1, 4, 1, 1).exp()
    wanted = (scores.exp() / total.clamp(min=1e-30)) @ v.repeat_interleave(2, 1)
    mask = visible if kind == "bool" else torch.zeros(visible.shape).masked_fill(~visible, -math.inf)
    with pytest.warns(UserWarning, match="the mask is neither"):
        out = layer(q, k, v, mask, **options)
    torch.testing.assert_close(out, wanted.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_4d_mask_of_the_caller():
    visible = torch.tril(torch.ones(TOKENS, TOKENS, dtype=torch.bool))[None, None].expand(3, -1, -1, -1).clone()
    visible[..., 3] = False
    visible[..., 3, 3] = True
    with pytest.warns(UserWarning, match="the mask is neither"):
        mine, theirs = both("Llama", input_ids=IDS, attention_mask=visible)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_packed_sequences():
    """position_ids that start again: transformers' mask without lengths, a ragged batch with them."""
    positions = torch.cat((torch.arange(7), torch.arange(TOKENS - 7)))[None]
    inputs = dict(input_ids=IDS[:1], position_ids=positions, use_cache=False)
    with pytest.warns(UserWarning, match="the mask is neither"):
        mine, theirs = both("Llama", **inputs)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    q = torch.randn(1, 4, TOKENS, 8)
    starts = torch.tensor([0, 7, TOKENS])
    out = layer(q, q[:, :2], q[:, :2], cu_seq_lens_q=starts, cu_seq_lens_k=starts)
    apart = [layer(x, x[:, :2], x[:, :2]) for x in q.split([7, TOKENS - 7], dim=2)]
    torch.testing.assert_close(out, torch.cat(apart, dim=1))


def test_errors():
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(NotImplementedError, match="continuous batching"):
        layer(q, q, q, block_table=torch.zeros(1))
    with pytest.raises(ValueError, match=r"attention_mask of a layer is \(1, 5\)"):
        layer(q, q, q, torch.ones(1, 5))
    for mask in (torch.ones(1, 1, 5, 5).long(), torch.ones(1, 1, 2, 2).int()):
        with pytest.raises(ValueError, match=r"attention_mask of a layer is \(1, 1, .*int.*; want bool, or floating point"):
            layer(*(q[:, :, : mask.shape[3]],) * 3, mask)
    with pytest.raises(ValueError, match=r"attention_mask is \(3, 18, 18\); want \(B, tokens\), or"):
        both("Llama", input_ids=IDS, attention_mask=torch.ones(3, TOKENS, TOKENS))
    with pytest.raises(ValueError, match="cu_seq_lens_k is None; want cu_seq_lens_q and"):
        layer(q, q, q, cu_seq_lens_q=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"s_aux is \(1,\); want a torch.Tensor \(4,\)"):
        layer(q, q, q, torch.ones(1, 1, 5, 5), s_aux=torch.zeros(1))
    with pytest.raises(TypeError, match="s_aux is a list"):
        layer(q, q, q, s_aux=[0.0] * 4)
    made = ours.key_mask(
        batch_size=1, q_length=5, kv_length=5, local_size=3, mask_function=sliding_window_causal_mask_function(3)
    )
    with pytest.raises(ValueError, match="sliding_window is 4, the mask was made for 3"):
        layer(q, q, q, made, sliding_window=4)
    ragged = ours.key_mask(
        batch_size=1, q_length=5, kv_length=5, mask_function=causal_mask_function, attention_mask=torch.tensor([[1, 1, 1, 0, 0]])
    )
    with pytest.raises(ValueError, match="made for 10 keys and queries; the layer has 5 and 4; want attn_implementation='eager'"):
        layer(q[:, :, 1:], q, q, ragged)


@pytest.mark.parametrize("name, fields", [
    ("Bloom", dict(hidden_size=32, n_layer=1, n_head=4)), ("XGLM", dict(d_model=32, num_layers=1, attention_heads=4, ffn_dim=48)),
    ("GPTNeo", dict(hidden_size=32, num_layers=1, num_heads=4, attention_types=[[["global"], 1]])),
])  # fmt: skip
@pytest.mark.parametrize("backend", ["dflash2", "step08", "dflash1"])
@pytest.mark.skipif(OLD, reason="these models made their masks themselves")
def test_models_that_call_no_backend(name, fields, backend):
    """Their layers would take the mask, or its absence, for a full one: Bloom and XGLM would lose the causal mask."""
    config = getattr(transformers, f"{name}Config")(vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, **fields)
    kind = getattr(transformers, f"{name}ForCausalLM")
    with pytest.raises(ValueError, match=f"attn_implementation is .*{name}ForCausalLM is its own code, which calls no backend"):
        kind._from_config(config, attn_implementation=backend)
    kind._from_config(config, attn_implementation="eager")


@pytest.mark.skipif(OLD, reason="this transformers' Doge makes its masks otherwise")
@pytest.mark.parametrize("cache", [None, "static"])
def test_models_that_edit_their_masks(cache):
    """Doge adds its own scores to the mask, so it is given a whole one."""
    torch.manual_seed(0)
    config = transformers.DogeConfig(**{**COMMON, "head_dim": 8})
    model, other = (
        transformers.DogeForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name).eval() for name in ("dflash2", "sdpa")
    )
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.25)
    other.load_state_dict(model.state_dict())
    for mask in (torch.ones_like(IDS), LEFT):
        with pytest.warns(UserWarning, match="dflash2: the mask is neither"):
            scores = [
                x.generate(
                    input_ids=IDS, attention_mask=mask, max_new_tokens=3, do_sample=False, disable_compile=True, output_scores=True,
                    return_dict_in_generate=True, cache_implementation=cache,
                ).scores for x in (model, other)
            ]  # fmt: skip
        for mine, theirs in zip(*scores, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("options", [dict(), dict(softcap=2.0)])
def test_packed_sequences_with_gradients(window, options):
    """The fallback keeps sequences apart that lie in one."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    starts_q, starts_k = torch.tensor([0, 2, 2, 7, 12]), torch.tensor([0, 4, 5, 13, 14])
    arguments = dict(cu_seq_lens_q=starts_q, cu_seq_lens_k=starts_k, sliding_window=window, **options)
    for is_causal in (True, False) if window is None else (True,):
        wanted = layer(q, k, v, is_causal=is_causal, **arguments)
        with pytest.warns(UserWarning, match="gradients are recorded"):
            out = layer(q.clone().requires_grad_(), k, v, is_causal=is_causal, **arguments)
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("argument, value", [
    ("indices", torch.zeros(1, 5, 2)), ("block_indices", torch.zeros(1, 1, 5, 2)), ("sinks", torch.zeros(1, 4, 5, 1)),
    ("head_mask", torch.ones(4)), ("output_attentions", True), ("read_index", torch.zeros(1)),
])  # fmt: skip
def test_arguments_that_nothing_reads(argument, value):
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(NotImplementedError, match=rf"dflash2: .*\({argument}\); want attn_implementation='eager' or 'sdpa'"):
        layer(q, q, q, **{argument: value})
    layer(q, q, q, **{argument: False if argument == "output_attentions" else None})


def test_dflash1_in_the_interpreter(monkeypatch):
    """Step 07 has no PyTorch path: the interpreter runs its kernels, dense, ragged and paged."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, 3, 16), torch.randn(2, 1, 3, 16), torch.randn(2, 1, 3, 16)
    lengths = torch.tensor([3, 2])
    for mask in (None, torch.arange(3) >= 3 - lengths[:, None], torch.arange(3) < lengths[:, None]):
        made = ours.key_mask(batch_size=2, q_length=3, kv_length=3, mask_function=causal_mask_function, attention_mask=mask)
        one, two = (layer(q, k, v, made, backend=backend) for backend in ("dflash1", "dflash2"))
        real = torch.ones(2, 3, dtype=torch.bool) if mask is None else mask
        torch.testing.assert_close(one[real], two[real], atol=1e-5, rtol=1e-5)


def test_without_transformers():
    """The module itself imports without it, and register says what to install."""
    code = """
import sys
sys.modules["transformers"] = None
import ladder.integrations.transformers as ours
assert "triton" not in sys.modules
try:
    ours.register()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "needs transformers >= 4.57 (pip install transformers)" in done.stdout


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "DeepseekV2"])
def test_a_mask_with_fewer_columns_than_tokens(name):
    """A caller who forgets to extend the mask: the tokens that it does not know see what transformers lets them see."""
    short = LEFT[:, :TOKENS]
    models = build(name)
    results = []
    with torch.inference_mode(), pytest.warns(UserWarning, match="neither causal, nor a sliding window, nor padding"):
        for model in models:
            cache = transformers.DynamicCache(config=model.config)
            first = model(IDS, attention_mask=short, past_key_values=cache).logits
            more = model(IDS[:, :2], attention_mask=short, past_key_values=cache).logits
            results.append((first, more, model(IDS, attention_mask=RIGHT[:, : TOKENS - 3]).logits))
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(results[0][2][0], results[1][2][0], atol=1e-4, rtol=1e-4)
