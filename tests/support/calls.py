"""Arguments of calls that work, one function for each entry, on the CPU and in float32."""

import torch

import ladder.step08_dflash2 as step08

STARTS = torch.tensor([0, 2, 6], dtype=torch.int32)
LENGTHS, TABLE = torch.tensor([5, 7], dtype=torch.int32), torch.tensor([[0, 3], [5, 2]], dtype=torch.int32)


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def heads(heads_q=4, heads_kv=2):
    return dict(q=random(2, heads_q, 6, 16), k=random(2, heads_kv, 9, 16), v=random(2, heads_kv, 9, 16))


def packed():
    return dict(q=random(6, 4, 16), k=random(7, 2, 16), v=random(7, 2, 16), cu_seqlens_q=STARTS,
                cu_seqlens_k=torch.tensor([0, 3, 7], dtype=torch.int32))  # fmt: skip


def paged(q_len=2):
    caches = dict(k_cache=random(6, 4, 2, 16), v_cache=random(6, 4, 2, 16))
    return dict(q=random(2, q_len, 4, 16), **caches, block_table=TABLE, seq_lens=LENGTHS)


def chunk():
    return {**paged(), "q": random(6, 4, 16), "cu_seqlens_q": STARTS}


def latent():
    pages = dict(latent_cache=random(6, 4, 24), block_table=TABLE, seq_lens=LENGTHS)
    return dict(q=random(2, 2, 4, 24), **pages, scale=0.2, head_dim_v=16)


def append(fused=None):
    cos, sin = step08.rope_tables(16, 64)
    return dict(
        x=random(5, 64), weight_qkv=random(128, 64) / 8, cos=cos, sin=sin, positions=torch.arange(5), fused=fused,
        k_cache=torch.zeros(4, 4, 2, 16), v_cache=torch.zeros(4, 4, 2, 16), slot_mapping=torch.arange(5),
        num_heads=4, num_kv_heads=2, head_dim=16,
    )  # fmt: skip


def mla_append(fused=None):
    cos, sin = step08.rope_tables(8, 64)
    return dict(
        x=random(5, 64), weight=random(24, 64) / 8, kv_norm_weight=torch.ones(16),
        cos=cos, sin=sin, positions=torch.arange(5),
        latent_cache=torch.zeros(4, 4, 24), slot_mapping=torch.arange(5), q_pe=random(5, 4, 8), fused=fused,
    )  # fmt: skip


def route(fused=None):
    weights = dict(norm_weight=torch.ones(64), gate_weight=random(8, 64))
    return dict(x=random(5, 64), residual=random(5, 64), **weights, top_k=2, fused=fused)


def groups():
    return dict(x=random(5, 32), weight=random(4, 32, 16), offsets=torch.tensor([0, 2, 2, 4, 5], dtype=torch.int32))


def cached():
    caches = dict(k_cache=random(2, 8, 2, 16), v_cache=random(2, 8, 2, 16), cache_seqlens=LENGTHS - 1)
    return dict(q=random(2, 1, 4, 16), **caches, k=random(2, 1, 2, 16), v=random(2, 1, 2, 16), causal=True)
