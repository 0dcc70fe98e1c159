"""Small attention blocks of step 08, and just enough of a server to call them."""

import torch

from ladder.step08_dflash2 import RangeWindows
from ladder.step08_dflash2.fusion import (
    AttentionBatch,
    DFlash2AttentionBlock,
    DFlash2MLABlock,
    Router,
    rope_tables,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, HIDDEN = 4, 32
NAN = float("nan")


def randomised(block, seed=0):
    """Parameters other than those a model starts with, norms around 1."""
    random = torch.Generator().manual_seed(seed)
    for name, p in block.named_parameters():
        noise = torch.randn(p.shape, generator=random).to(p)
        p.copy_(1 + 0.2 * noise if "norm" in name else noise * (p.shape[-1] ** -0.5 if p.ndim == 2 else 0.5))
    return block


class Server:
    """Just enough of one to call a block: pages, slots, lengths. Unused pages hold NaN, unused table entries garbage."""

    def __init__(self, rope_dim, *caches):
        self.cos, self.sin = rope_tables(rope_dim, 64, device=DEVICE)
        self.caches = [torch.full((16, PAGE, *shape), NAN, device=DEVICE) for shape in caches]
        self.free = [9, 2, 14, 7, 0, 11, 5, 3, 15, 1]
        self.pages, self.lengths = [[], []], [0, 0]

    def step(self, counts, decode, context=False):
        """The batch of ``counts`` new tokens for each sequence."""
        positions, slots = [], []
        for s, count in enumerate(counts):
            for p in range(self.lengths[s], self.lengths[s] + count):
                if p // PAGE == len(self.pages[s]):
                    self.pages[s].append(self.free.pop())
                positions.append(p)
                slots.append(self.pages[s][p // PAGE] * PAGE + p % PAGE)
            self.lengths[s] += count
        table = torch.full((2, 6), 1 << 30, dtype=torch.int32)
        for s, pages in enumerate(self.pages):
            table[s, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

        def tensor(x, dtype=torch.int32):
            return torch.tensor(x, dtype=dtype, device=DEVICE)

        batch = AttentionBatch(tensor(positions), tensor(slots, torch.int64), table.to(DEVICE), tensor(self.lengths))
        if not decode:
            batch.cu_seqlens_q, batch.max_seqlen_q = tensor([0, counts[0], sum(counts)]), max(counts)
        if context:
            keys = [self.pages[s][p // PAGE] * PAGE + p % PAGE for s in range(2) for p in range(self.lengths[s])]
            batch.context_slots, batch.cu_seqlens_k = tensor(keys, torch.int64), tensor([0, self.lengths[0], sum(self.lengths)])
        return batch


ROUTER = Router(8, 2, scoring="sigmoid", correction_bias=True, num_groups=4, topk_groups=2, routed_scaling_factor=2.5)
BLOCKS = {
    "llama": lambda: DFlash2AttentionBlock(HIDDEN, 2, 1, 16, dtype=torch.float32, device=DEVICE),
    "qwen3 moe": lambda: DFlash2AttentionBlock(HIDDEN, 3, 1, 16, qk_norm=True, router=Router(8, 2), dtype=torch.float32, device=DEVICE),
    "gpt-oss": lambda: DFlash2AttentionBlock(
        HIDDEN, 2, 1, 16, qkv_bias=True, sinks=True, windows=RangeWindows.sliding(3), router=Router(4, 2), dtype=torch.float32,
        device=DEVICE,
    ),
    "v2 lite": lambda: DFlash2MLABlock(
        HIDDEN, 2, qk_nope_head_dim=16, qk_rope_head_dim=16, kv_lora_rank=32, v_head_dim=8, router=Router(8, 3, renormalize=False),
        dtype=torch.float32, device=DEVICE,
    ),
    "v3": lambda: DFlash2MLABlock(
        HIDDEN, 2, qk_nope_head_dim=16, qk_rope_head_dim=16, kv_lora_rank=32, v_head_dim=16, q_lora_rank=24, scale=0.3, router=ROUTER,
        dtype=torch.float32, device=DEVICE,
    ),
}  # fmt: skip


def served(block):
    """A server whose caches fit the block."""
    if isinstance(block, DFlash2MLABlock):
        return Server(block.rope, (block.rank + block.rope,))
    return Server(block.head_dim, *[(block.num_kv_heads, block.head_dim)] * 2)
