"""Models of transformers, made tiny, on step 08 beside transformers' own eager attention."""

import copy
import functools
import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from ladder.integrations import transformers as ours  # noqa: E402

ours.register()

SMALL = dict(  # values for the usual names of fields, where a configuration has them
    vocab_size=64, hidden_size=32, d_model=32, n_embd=32, embedding_size=32, emb_dim=32, dim=32, word_embed_proj_dim=32,
    num_hidden_layers=2, n_layer=2, n_layers=2, num_layers=2, decoder_layers=2, encoder_layers=2, num_nextn_predict_layers=0,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, attention_heads=4, decoder_attention_heads=4, encoder_attention_heads=4,
    num_key_value_heads=2, num_kv_heads=2, head_dim=8, global_head_dim=8, swa_head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2,
    intermediate_size=48, ffn_dim=48, decoder_ffn_dim=48, encoder_ffn_dim=48, d_ff=48, n_inner=48, ffn_hidden_size=48,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, shared_intermediate_size=16, moe_shared_expert_intermediate_size=16,
    num_experts=4, num_local_experts=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, num_experts_per_token=2,
    moe_topk=2, moe_num_experts=4, moe_k=2, n_group=1, topk_group=1, first_k_dense_replace=1, moe_layer_start_index=1,
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, qk_head_dim=16,
    sliding_window=6, attention_chunk_size=64, max_position_embeddings=128, n_positions=128, n_ctx=128, max_seq_len=128,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_d_ssm=64, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1,
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
    "bailing_hybrid": HYBRID, "granitemoehybrid": HYBRID, "qwen3_next": HYBRID, "qwen3_5": HYBRID, "qwen3_5_moe": HYBRID, "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID, "qwen4_exp": HYBRID | INDEXER, "qwen4_exp_text": HYBRID | INDEXER, "kimi_linear": HYBRID,
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]), "lfm3": dict(layer_types=["conv", "full_attention"]),
    "bamba": dict(attn_layer_indices=[1]), "jamba": dict(attn_layer_period=2, attn_layer_offset=1), "recurrent_gemma": dict(num_hidden_layers=3),
    "zamba": dict(num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "hybrid"]), "zamba2": dict(layers_block_type=["mamba", "hybrid"]),
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
    "zaya": dict(num_experts_per_tok=1),
}  # fmt: skip
IDS = torch.randint(3, 64, (3, 18), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([18, 4, 11])
LEFT, RIGHT = (torch.arange(18) >= 18 - LENGTHS[:, None]).long(), (torch.arange(18) < LENGTHS[:, None]).long()


@functools.cache
def tiny(model_type):
    """(model on dflash2, the same on eager) with random weights that make no attention uniform."""
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    config = small(kind.config_class, **EXCEPTIONS.get(model_type, {}))
    with torch.device("meta"):
        size = sum(p.numel() for p in kind._from_config(copy.deepcopy(config), attn_implementation="eager").parameters())
    assert size < 1e8, f"{model_type} has {size} parameters"
    torch.manual_seed(0)
    model = kind._from_config(copy.deepcopy(config), attn_implementation="dflash2", dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
        elif "sink" in name:
            torch.nn.init.normal_(parameter, std=2.0)
    other = kind._from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32).eval()
    other.load_state_dict(model.state_dict())
    return model, other


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
