"""Step 06, paged: the KV cache in pages, and decode that splits one sequence's keys over the whole chip.

Changed: K and V live in a pool of fixed-size pages; a block table says which pages hold which sequence. Decode cuts the
keys of a sequence into splits: each program folds one split with step 05's loop and leaves a normalised partial output
and its log-sum-exp; a second, small kernel weighs the partial outputs by their log-sum-exp and adds them up, exactly.
Prefill is step 05's.

Why: a contiguous cache reserves the longest possible length for every sequence, most of it never used, and step 05
gives one new token of one head to a single program: with 32 heads, 100 of an H200's 132 processors stand idle.

Predict: decode reads every key and value for one token of output, about one FLOP a byte, so memory binds: the time is
(bytes of K and V) / (read rate) once the splits fill the chip. 32k tokens of 8 KV heads, 134 MB: 30 us at 4.4 TB/s,
where 32 programs alone would need four times as long.

Still slow because: the query heads of a group each fetch the same K and V tile, 15 of the 16 rows of a tile are empty
at one new token, and the merge is a launch of its own, which a short context feels.
"""

from .attention import attention, bytes_moved, choose_num_splits, decode_bytes_moved, paged_decode
from .cache import PagedKVCache

__all__ = ["PagedKVCache", "attention", "bytes_moved", "choose_num_splits", "decode_bytes_moved", "paged_decode"]
