"""Step 05, fused: the first Triton kernel: the whole chain in one launch, no tile ever leaves the chip.

Changed: the loop of step 04 moves into one kernel. Each program owns one tile of queries of one head; it keeps the
maximum, the sum and the accumulator in registers, streams K and V tiles through shared memory, and writes its rows of
the output once. The tensor cores multiply 16-bit operands and accumulate in float32.

Why: the bytes. Scores, exponentials and accumulators, tens of gigabytes of traffic at 16k tokens, no longer exist
outside the processor that uses them; what is left is Q and the output once, and K and V once for each query tile.

Predict: at 16k tokens, 16 heads of 128 in bf16, 17 GB move instead of the 201 GB of step 03, mostly from L2, so the
kernel is bound by arithmetic: 2.2 TFLOP, 2.8 ms at the full rate of an H200, perhaps half of that rate for a first
kernel. One launch where step 03 makes thousands.

Still slow because: the tensor cores wait while the same warps take exponentials, every K and V tile is fetched once
per query head instead of once per group, and one new token of a long sequence keeps a single processor busy.
"""

from .attention import attention, bytes_moved

__all__ = ["attention", "bytes_moved"]
