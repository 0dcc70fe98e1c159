"""Step 08, DFlash v2: attention that visits only the keys which a query range sees, fused with what surrounds it.

Changed: range windows (first keys, newest keys, or all, for each range of positions) become two loops over tiles: those
that every row sees, without mask code, and those that an edge crosses. Softcap, learned sinks and a right edge live in
the same kernel. Short chunks fill their tile with the heads of a group. Decode plans its splits on the device, RoPE and
the cache append join the projection, and the norm joins the router. On Hopper the tiles move by TMA between specialised
warps. Custom operators let torch.compile see through a call.

Why: at 128k tokens a causal mask leaves 8.6 billion pairs a head, and a sink with a window of 4,096 keeps one in
sixteen: no kernel is fast enough to win that back. What remains is
small, and then launches and passes over memory count.

Predict: time follows the visited tiles: at 128k with 128 sinks and a window of 4,096, 15 x fewer than causal. Dense and
causal keep step 07's loop, instruction for instruction, where the portable kernel runs; Hopper's own kernel gains what
the tensor cores no longer wait. A chunk of 32 tokens becomes 128 rows of 4 heads, which load K and V once.

Still slow because: a window fixed ahead of time cannot know which far keys matter, the portable kernel still makes its
tensor cores wait for the exponentials, and a cache of 16-bit keys is twice what 8 bits would be.
"""

import importlib

from .api import attention, dflash2_attention, dflash2_paged_prefill, dflash2_varlen
from .explain import explain, warmup
from .prefill import bytes_moved
from .windows import Range, RangeWindows

# What the other modules bring, imported on first use: name -> module.
_LAZY = {
    "DecodeWorkspace": "dispatch", "decode_bytes_moved": "decode", "dflash2_decode": "api", "dflash2_mla_decode": "api",
    "get_decode_schedule": "schedule", "fused_add_norm": "fusion", "fused_mla_append": "fusion",
    "fused_norm_router": "fusion",
    "fused_qkv_rope_append": "fusion", "rope_tables": "fusion", "yarn_mscale": "fusion", "AttentionBatch": "fusion",
    "BlockOutput": "fusion", "DFlash2AttentionBlock": "fusion", "DFlash2MLABlock": "fusion", "Router": "fusion",
}  # fmt: skip

__all__ = [
    "Range", "RangeWindows", "attention", "bytes_moved", "dflash2_attention", "dflash2_paged_prefill", "dflash2_varlen",
    "explain", "warmup", *_LAZY,
]  # fmt: skip


def __getattr__(name):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
