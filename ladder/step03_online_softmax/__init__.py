"""Step 03, online softmax: one pass over the keys, with a running maximum and a running sum.

Changed: the first pass is gone. When a tile raises a row's maximum from m to m', everything gathered so far is
multiplied by exp(m - m'), and the result is exactly what a second pass would have given.

Why: K is read once and Q K^T is computed once. It is also what makes a fused kernel possible at all: a program can
finish a row while it streams the keys. The same rescale merges any two partial results, which later rungs use to split
a long sequence over many processors.

Predict: one of three products gone, so FLOPs are back to 1.0 x. The bytes hardly fall (201 GB after 211 at 16k tokens):
what the first pass cost, rescaling the accumulator costs again. About 1.2 x faster than step 02, same memory.

Still slow because: each tile still leaves the chip between PyTorch's kernels; about seventeen launches a tile.
"""

from ladder.contract import outside_autocast

from .attention import attention, bytes_moved

attention = outside_autocast(attention)

__all__ = ["attention", "bytes_moved"]
