"""Models of the engine small enough for a test, with weights large enough that no two logits are close."""

import json
import random

import torch
from safetensors.torch import save_file

from ladder.engine.bench import huggingface_config
from ladder.engine.engine import Engine, SamplingParams
from ladder.engine.models import Spec
from ladder.engine.models.deepseek_v2 import YARN, DeepseekV2Config
from ladder.engine.models.tiny_moe import TinyMoEConfig

TINY = Spec(
    "tiny-moe",
    TinyMoEConfig(
        num_layers=2, width=32, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=4, expert_width=16, shared_width=16, context=256
    ),
    std=0.3,
)  # fmt: skip
MLA = Spec(
    "deepseek-v2-lite",
    DeepseekV2Config(
        num_layers=2, width=32, num_heads=4, latent=32, rope_dim=16, nope_dim=16, v_dim=16, num_experts=8, top_k=2, num_shared=2,
        expert_width=16, dense_width=48, vocab=96, context=256, rope={**YARN, "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    seed=1, std=0.25,
)  # fmt: skip
SPECS = {"tiny-moe": TINY, "mla": MLA}


def engine(spec, backend="sdpa", **options):
    options = {"page_size": 16, "max_seqs": 4, "kv_tokens": 1024, "chunk_tokens": 40, "device": "cpu", **options}
    return Engine(spec, backend, **options)


def prompts(lengths, vocab=96, seed=0):
    generator = random.Random(seed)
    return [[generator.randrange(vocab) for _ in range(n)] for n in lengths]


def greedy(count):
    return SamplingParams(max_tokens=count)


def checkpoint_tensors(c, seed=0):
    """Random weights under the public checkpoint's names and shapes."""
    generator = torch.Generator().manual_seed(seed)
    hidden = c.expert_width
    shapes = {"model.embed_tokens": (c.vocab, c.width), "model.norm": (c.width,), "lm_head": (c.vocab, c.width)}
    for n in range(c.num_layers):
        layer = f"model.layers.{n}."
        shapes |= {
            layer + "input_layernorm": (c.width,), layer + "post_attention_layernorm": (c.width,),
            layer + "self_attn.q_proj": (c.num_heads * c.qk_dim, c.width),
            layer + "self_attn.kv_a_proj_with_mqa": (c.latent + c.rope_dim, c.width),
            layer + "self_attn.kv_a_layernorm": (c.latent,),
            layer + "self_attn.kv_b_proj": (c.num_heads * (c.nope_dim + c.v_dim), c.latent),
            layer + "self_attn.o_proj": (c.width, c.num_heads * c.v_dim),
        }  # fmt: skip
        mlps = {"mlp.": c.dense_width}
        if n >= c.num_dense:
            shapes[layer + "mlp.gate"] = (c.num_experts, c.width)
            mlps = {f"mlp.experts.{e}.": hidden for e in range(c.num_experts)} | {"mlp.shared_experts.": hidden * c.num_shared}
        for name, inner in mlps.items():
            shapes |= {layer + name + "gate_proj": (inner, c.width), layer + name + "up_proj": (inner, c.width),
                       layer + name + "down_proj": (c.width, inner)}  # fmt: skip
    return {
        f"{name}.weight": torch.randn(shape, generator=generator) * (0.25 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write_checkpoint(folder, tensors, c, shards=3):
    """The folder as it is published: shards, their index, and the configuration."""
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: tensors[n].contiguous() for n in names[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({**huggingface_config(c), "eos_token_id": 7}))
