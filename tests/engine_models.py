"""Models of the engine small enough for a test, with weights large enough that no two logits are close."""

import random

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
