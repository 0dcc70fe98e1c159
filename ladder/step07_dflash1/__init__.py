"""Step 07, DFlash v1: one kernel family for serving an MoE model: prefill, decode and MLA, launched for real work only.

Changed: the query heads of a KV group are rows of one decode tile, so K and V are fetched once per group, and the split
that finishes last merges the others inside the same launch. A head of 192 is 128 + 64 columns, not 256 with a quarter
empty; MLA's latent cache is loaded once for keys and values. Ragged prefill launches a program for each tile that
exists. Tokens are sorted by expert on the device, and attention can write its rows straight in expert order.

Why: what an MoE server runs is not a square of 16k tokens: it is ragged chunks on a paged cache, decode of groups of
any size, and experts whose loads differ by an order of magnitude. Padding each of them to the largest wastes most.

Predict: decode at 32 query and 8 KV heads moves a quarter of step 06's bytes, one launch instead of two. MLA prefill at
192/128 does 320 columns of product for each pair instead of 384 or 512. Padded experts cost max/mean of the loads, 3
to 6 on real routing; compact tiles cost half a tile per expert. Prefill itself: a few per cent.

Still slow because: the tensor cores still wait for the exponentials of the same warps, addresses are computed in the
registers that the accumulator wants, and every key is visited, however far away.
"""

from ladder.step06_paged import PagedKVCache, choose_num_splits

from .decode import DecodeWorkspace, decode_bytes_moved, mla_decode, paged_decode
from .groups import TokenGroups, capacity_offsets, group_tokens, grouped_matmul, permute_rows, tile_map
from .prefill import attention, attention_varlen, bytes_moved, paged_prefill

__all__ = [
    "DecodeWorkspace", "PagedKVCache", "TokenGroups", "attention", "attention_varlen", "bytes_moved",
    "capacity_offsets", "choose_num_splits", "decode_bytes_moved", "group_tokens", "grouped_matmul", "mla_decode",
    "paged_decode", "paged_prefill", "permute_rows", "tile_map",
]  # fmt: skip
