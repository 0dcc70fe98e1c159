"""Coarse fusion: the work before attention (projection, norm, rotation, cache) and after it (norm, router) in one
launch or two."""

from .append import fused_mla_append, fused_qkv_rope_append
from .block import AttentionBatch, BlockOutput, DFlash2AttentionBlock, DFlash2MLABlock, Router
from .launch import FEW_TOKENS, ONE_LAUNCH_TOKENS, few_rows_to_route
from .rope import rope_tables, yarn_mscale
from .router import fused_add_norm, fused_norm_router

__all__ = [
    "FEW_TOKENS", "ONE_LAUNCH_TOKENS", "AttentionBatch", "BlockOutput", "DFlash2AttentionBlock", "DFlash2MLABlock",
    "Router",
    "few_rows_to_route", "fused_add_norm", "fused_mla_append", "fused_norm_router", "fused_qkv_rope_append",
    "rope_tables", "yarn_mscale",
]  # fmt: skip
