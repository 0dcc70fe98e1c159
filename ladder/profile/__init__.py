"""Is attention your bottleneck? ``python -m ladder.profile`` measures,
decides by rule, and reads what Nsight Compute wrote."""

from .decide import BUSY, FULL, LONG_CONTEXT, SHARE, Answer, curve, decide, describe, next_command
from .measure import Found, MemoryCurve, ProfileError, kv_pools, load_step, measure, resident_bytes, summarise
from .ncu import describe_ncu, read_ncu

__all__ = [
    "BUSY", "FULL", "LONG_CONTEXT", "SHARE", "Answer", "Found", "MemoryCurve", "ProfileError", "curve", "decide",
    "describe",
    "describe_ncu", "kv_pools", "load_step", "measure", "next_command", "read_ncu", "resident_bytes", "summarise",
]  # fmt: skip
