"""Models of transformers, made tiny, on step 08 beside transformers' own eager attention: all of its causal language models, and
encoders and pairs of encoder and decoder of the kinds that differ in their masks.

About twenty types run always. ``pytest -m sweep tests/integrations/test_transformers_sweep.py`` runs the others, in two minutes on one
core. A type that is new in transformers is in the sweep by itself: when it cannot be made tiny, ``SMALL`` or ``EXCEPTIONS`` lacks
a field, or it belongs in ``NOT_TINY`` with the reason; when the backend refuses it, in ``REFUSED`` with what the user is told.
"""

import copy
import inspect

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from ladder.integrations import transformers as ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # layers that fall back say so, and transformers says much else
ours.register()

SMALL = dict(  # values for the usual names of fields, where a configuration has them
    vocab_size=64, hidden_size=32, d_model=32, n_embd=32, embedding_size=32, emb_dim=32, dim=32, word_embed_proj_dim=32,
    num_hidden_layers=2, n_layer=2, n_layers=2, num_layers=2, decoder_layers=2, encoder_layers=2, num_nextn_predict_layers=0,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, attention_heads=4, decoder_attention_heads=4, encoder_attention_heads=4,
    num_key_value_heads=2, num_kv_heads=2, head_dim=8, global_head_dim=8,
    swa_head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2,
    intermediate_size=48, ffn_dim=48, decoder_ffn_dim=48, encoder_ffn_dim=48, d_ff=48, n_inner=48, ffn_hidden_size=48,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, shared_intermediate_size=16, moe_shared_expert_intermediate_size=16,
    num_experts=4, num_local_experts=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, num_experts_per_token=2,
    moe_topk=2, moe_num_experts=4, moe_k=2, n_group=1, topk_group=1, first_k_dense_replace=1, moe_layer_start_index=1,
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, qk_head_dim=16,
    sliding_window=6, attention_chunk_size=64, max_position_embeddings=128, n_positions=128, n_ctx=128, max_seq_len=128,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_d_ssm=64, mamba_num_heads=4, mamba_head_dim=16,
    ssm_state_size=8, n_groups=1,
    state_size=8, time_step_rank=4, mamba_dt_rank=4,
    index_n_heads=4, index_head_dim=16, index_topk=64,
    lm_head_bias=False, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, laurel_rank=4, altup_num_inputs=2,
)  # fmt: skip


def small(config_class, **more):
    """A tiny configuration; configurations within it are tiny too."""
    parameters = inspect.signature(config_class.__init__).parameters
    fields = {name: value for name, value in SMALL.items() if name in parameters}
    if "kv_lora_rank" in parameters:
        fields |= dict(num_key_value_heads=4)  # one latent, expanded to all heads
    for name, kind in getattr(config_class, "sub_configs", {}).items():
        if kind is transformers.AutoConfig:
            kind = type(getattr(config_class(), name, None))
        if name in parameters and issubclass(kind, transformers.PretrainedConfig):
            fields[name] = small(kind)
    return config_class(**fields | more)


HYBRID = dict(layer_types=["linear_attention", "full_attention"])
INDEXER = dict(indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4)
EXCEPTIONS = {  # fields of types that need others
    **dict.fromkeys(("bailing_hybrid", "granitemoehybrid", "kimi_linear", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
                     "qwen3_next"), HYBRID),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), HYBRID | INDEXER),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]), "lfm3": dict(layer_types=["conv", "full_attention"]),
    "bamba": dict(attn_layer_indices=[1]), "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "recurrent_gemma": dict(num_hidden_layers=3), "zaya": dict(num_experts_per_tok=1),
    "zamba": dict(num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "hybrid"]),
    "zamba2": dict(layers_block_type=["mamba", "hybrid"]),
    "codegen": dict(rotary_dim=4), "gptj": dict(rotary_dim=4), "mamba2": dict(num_heads=8), "xmod": dict(default_language="en_XX"),
    "musicgen": dict(num_codebooks=1), "musicgen_melody": dict(num_codebooks=1), "moshi": dict(audio_vocab_size=64),
    "dory": dict(num_hidden_layers=4, n_input_layers=1, n_output_layers=1),
    "hrm_text": dict(prefix_lm=False),
    "xlstm": dict(hidden_size=64, num_heads=8),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4)),
    "cohere_compass_text": dict(rope_parameters={"full_attention": dict(rope_type="default", rope_theta=1e4)}),
    "gemma3n_text": dict(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "reformer": dict(is_decoder=True, axial_pos_embds=False),
}  # fmt: skip
IDS = torch.randint(3, 64, (3, 18), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([18, 4, 11])
LEFT, RIGHT = (torch.arange(18) >= 18 - LENGTHS[:, None]).long(), (torch.arange(18) < LENGTHS[:, None]).long()


def build(kind, config):
    """(model on dflash2, the same on eager) with random weights that make no attention uniform."""
    torch.manual_seed(0)
    model = kind._from_config(copy.deepcopy(config), attn_implementation="dflash2", dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
        elif "sink" in name:
            torch.nn.init.normal_(parameter, std=2.0)
        elif name.endswith("gate"):  # of a layer that starts as none
            torch.nn.init.ones_(parameter)
    other = kind._from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32).eval()
    other.load_state_dict(model.state_dict())
    return model, other


def tiny(model_type):
    """(model on dflash2, the same on eager) of a type."""
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    config = small(kind.config_class, **EXCEPTIONS.get(model_type, {}))
    with torch.device("meta"):
        size = sum(p.numel() for p in kind._from_config(copy.deepcopy(config), attn_implementation="eager").parameters())
    assert size < 1e8, f"{model_type} has {size} parameters; add the fields that make it small to SMALL or EXCEPTIONS"
    return build(kind, config)


def dense(model):
    return model(input_ids=IDS).logits


def padded(model, mask):
    return model(input_ids=IDS, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits[mask.bool()]


def continued(model):
    first = model(input_ids=IDS[:, :12], use_cache=True)
    second = model(input_ids=IDS[:, 12:17], past_key_values=first.past_key_values, use_cache=True)
    third = model(input_ids=IDS[:, 17:], past_key_values=second.past_key_values, use_cache=True)
    return torch.cat([x.logits for x in (first, second, third)], dim=1)


def generated(model):
    return model.generate(input_ids=IDS, attention_mask=LEFT, max_new_tokens=4, min_new_tokens=4, do_sample=False)


CHECKS = dict(dense=dense, left=lambda m: padded(m, LEFT), right=lambda m: padded(m, RIGHT), continued=continued, generate=generated)
LEFT_OUT = {  # checks that transformers' own eager attention cannot do either
    **dict.fromkeys(("cpmant", "openai-gpt", "prophetnet", "recurrent_gemma", "reformer", "rwkv", "xlm"), ["continued"]),
    **dict.fromkeys(("musicgen", "musicgen_melody"), ["generate"]),
}
NOT_TINY = {
    "blt": "its configuration lacks num_hidden_layers, which its own cache asks for",
    "gemma3n": "its vision tower needs timm; gemma3n_text is the language model",
    "gemma4_assistant": "it reads keys and values of another model",
    "gemma4_unified_assistant": "it reads keys and values of another model",
    "xlstm": "it has no attention, and its state does not fit its own kernels when it is small",
}
OWN = "is its own code, which calls no backend; want 'eager' or 'sdpa' for it"
SPARSE = r"sparse attention \(indices\); want attn_implementation='eager' or 'sdpa' for this model"
TOKEN_SINKS = r"a sink logit of each token \(sinks\); want attn_implementation='eager' or 'sdpa' for this model"
REFUSED = {
    **dict.fromkeys((
        "big_bird", "bloom", "falcon", "git", "gpt_neo", "gpt_neox_japanese", "megatron-bert", "mpt", "mvp", "rembert", "roformer", "trocr",
        "xglm", "xlnet",
    ), OWN),
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4"), SPARSE),
    **dict.fromkeys(("inkling2_loop_text", "inkling2_text"), TOKEN_SINKS),
}  # fmt: skip
SERVED = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in {*NOT_TINY, *REFUSED}]
ALWAYS = [  # of every kind: grouped heads, latents, windows, sinks, softcaps, experts, own masks, results that are viewed, no rotation
    "afmoe", "bamba", "bart", "bert", "cohere2", "deepseek_v3", "deepseek_v4", "doge", "dory", "gemma2", "gemma3_text", "gpt2", "gpt_oss",
    "jetmoe", "llama", "llama4_text", "mimo_v2_flash", "minimax_m3_vl_text", "modernbert-decoder", "opt", "phi3", "qwen3_next", "smollm3",
]  # fmt: skip


@pytest.fixture(autouse=True)
def pytorch_path(monkeypatch):
    """Step 08's PyTorch path: the kernels have their own tests."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def of_both(models, run):
    """Results of the same call on dflash2 and on eager."""
    results = []
    for model in models:
        torch.manual_seed(0)
        np.random.seed(0)  # BigBirdPegasus draws its random blocks
        with torch.inference_mode():
            results.append(run(model))
    return results


def check_close(mine, theirs):
    spread = float(theirs.std())
    assert spread > 1e-3, f"the results vary by {spread}, which shows nothing"
    torch.testing.assert_close(mine, theirs, atol=1e-4 * max(1, spread), rtol=1e-4)


def in_sweep(names, always):
    return [name if name in always else pytest.param(name, marks=pytest.mark.sweep) for name in names]


@pytest.mark.parametrize("model_type", in_sweep(SERVED, ALWAYS))
def test_causal_models(model_type):
    models = tiny(model_type)
    for name, check in CHECKS.items():
        if name not in LEFT_OUT.get(model_type, ()):
            mine, theirs = of_both(models, check)
            if name == "generate":
                assert torch.equal(mine, theirs)
            else:
                check_close(mine, theirs)


@pytest.mark.parametrize("model_type", in_sweep(REFUSED, ["bloom", "git", "deepseek_v32", "inkling2_text"]))
def test_refused_models(model_type):
    """Each says what to do instead, and that works."""
    with pytest.raises((NotImplementedError, ValueError), match=REFUSED[model_type]):
        of_both(tiny(model_type)[:1], dense)
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    kind._from_config(small(kind.config_class, **EXCEPTIONS.get(model_type, {})), attn_implementation="eager")


def test_lists_name_causal_models():
    listed = {*NOT_TINY, *REFUSED, *ALWAYS, *LEFT_OUT, *EXCEPTIONS}
    assert listed <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), listed - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


# Encoders, and encoders with decoders

LONG = torch.randint(3, 64, (2, 96), generator=torch.Generator().manual_seed(0))
PADDED = (torch.arange(96) < torch.tensor([96, 70])[:, None]).long()
ENCODERS = dict(
    AlignTextModel={}, BertModel={}, ClapTextModel={}, EsmModel={}, EuroBertModel={}, ModernBertModel={}, SplinterModel={}, XLMRobertaModel={},
)  # fmt: skip
PAIRS = dict(
    BartForConditionalGeneration={},
    BigBirdPegasusForConditionalGeneration=dict(block_size=4, num_random_blocks=1),
    LongT5ForConditionalGeneration=dict(d_kv=8, local_radius=8),
    M2M100ForConditionalGeneration={},
    NllbMoeForConditionalGeneration=dict(expert_capacity=64, encoder_sparse_step=2, decoder_sparse_step=2),
    PegasusXForConditionalGeneration=dict(block_size=8, num_global_tokens=2),
    SwitchTransformersForConditionalGeneration=dict(
        d_kv=8, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0
    ),
    T5ForConditionalGeneration=dict(d_kv=8, decoder_start_token_id=0),
    T5GemmaForConditionalGeneration={},
)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("mask", [None, PADDED], ids=["real", "padded"])
def test_encoders(name, mask):
    kind = getattr(transformers, name)
    models = build(kind, small(kind.config_class, **ENCODERS[name]))
    mine, theirs = of_both(models, lambda model: model(input_ids=LONG, attention_mask=mask).last_hidden_state)
    real = PADDED.bool() if mask is not None else torch.ones_like(PADDED).bool()
    check_close(mine[real], theirs[real])


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("mask", [None, PADDED], ids=["real", "padded"])
def test_encoders_with_decoders(name, mask):
    kind = getattr(transformers, name)
    models = build(kind, small(kind.config_class, **PAIRS[name]))
    check_close(*of_both(models, lambda model: model(input_ids=LONG, attention_mask=mask, decoder_input_ids=LONG[:, :20]).logits))
    tokens = of_both(models, lambda model: model.generate(
        input_ids=LONG, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False, num_beams=1,
    ))  # fmt: skip
    assert torch.equal(*tokens)


@pytest.mark.parametrize("attention_type", ["prob", "full"])
def test_informer(attention_type):
    """A decoder over numbers, whose encoder draws the queries that it attends from."""
    config = transformers.InformerConfig(
        prediction_length=6, context_length=24, lags_sequence=[1], num_time_features=1, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, attention_type=attention_type,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    past, future = torch.randn(2, 25, generator=generator), torch.randn(2, 6, generator=generator)
    inputs = dict(
        past_values=past, past_time_features=torch.linspace(0, 1, 25).expand(2, -1)[..., None], past_observed_mask=torch.ones_like(past),
        future_values=future, future_time_features=torch.linspace(1, 2, 6).expand(2, -1)[..., None],
    )  # fmt: skip
    check_close(*of_both(build(transformers.InformerModel, config), lambda model: model(**inputs).last_hidden_state))


@pytest.mark.parametrize("masked", [False, True])
def test_mllama_sees_all_of_a_picture(masked):
    """Cross attention without a mask, by a module that does not say whether it is causal."""
    config = small(transformers.models.mllama.configuration_mllama.MllamaTextConfig, cross_attention_layers=[1])
    models = build(transformers.MllamaForCausalLM, config)
    picture = torch.randn(3, 20, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(3, 1, 18, 20).masked_fill(torch.arange(20) >= 9, torch.finfo(torch.float32).min) if masked else None
    check_close(*of_both(models, lambda model: model(input_ids=IDS, cross_attention_states=picture, cross_attention_mask=mask).logits))
