"""Step 01, naive: attention as its formula reads, one PyTorch operation after another.

Changed: nothing yet; this is the ground floor. softmax(scale * Q K^T) V with every intermediate in memory.

Why: it is the definition. Every later rung must give the same numbers, and every later saving is counted from here.

Predict: 2 * Sq * Sk * (D + Dv) FLOPs a head, but the Sq x Sk score matrix is written by the product, read and written
by the softmax (and once more by the mask), and read by the second product: four to seven passes over S^2 elements. At
16k tokens and 16 heads in bf16 one pass is 8.6 GB, so at 4.4 TB/s the passes alone cost 8 to 14 ms where the
arithmetic needs 3.

Still slow because: memory grows with S^2 and almost all time goes into moving a matrix that nobody asked for.
"""

from ladder.contract import outside_autocast

from .attention import attention, bytes_moved

attention = outside_autocast(attention)

__all__ = ["attention", "bytes_moved"]
