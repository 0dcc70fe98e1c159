"""Step 02, tiled: the same numbers tile by tile; the S x S matrix is never in memory.

Changed: two loops over tiles of queries and keys. The softmax needs its row maximum before the first exponential, so
the keys are walked twice: pass one finds the maximum, pass two takes exponentials, sums them and multiplies V.

Why: memory. A tile of scores is tile_q x tile_k whatever the sequence length, so peak memory grows with S, not S^2.

Predict: Q K^T is computed twice, so 1.5 x the FLOPs. Each tile still travels through memory between PyTorch's
kernels, in float32 (the accuracy that a fused kernel keeps in its registers), so no time is saved: expect it several
times slower than step 01, at a few percent of its memory.

Still slow because: two passes over the keys, and every intermediate tile leaves the chip and comes back.
"""

from ladder.contract import outside_autocast

from .attention import attention, bytes_moved

attention = outside_autocast(attention)

__all__ = ["attention", "bytes_moved"]
