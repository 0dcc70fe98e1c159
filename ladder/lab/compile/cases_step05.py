"""What to compile in order to know that step 05 compiles: launches as ``attention`` makes them, one tensor a dtype.

``ladder.lab.compile.matrix`` asks every Triton rung that has such a module for its cases.
"""

import torch

from ladder.step05_fused.attention import LOG2_E, launch_config

# head sizes of q/k and v, dtype, causal with log-sum-exp (or dense without)
CASES = (
    (128, 128, torch.bfloat16, False),
    (128, 128, torch.bfloat16, True),
    (64, 64, torch.float16, True),
    (192, 128, torch.bfloat16, True),
    (136, 136, torch.bfloat16, True),
    (256, 256, torch.bfloat16, True),
    (72, 72, torch.bfloat16, True),
    (80, 80, torch.bfloat16, True),
    (40, 40, torch.float16, True),
    (128, 128, torch.float32, True),
)
HEAD_SIZES = ((16, 16), (32, 32), (40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (128, 64), (128, 128), (136, 136),
              (160, 160), (192, 128), (192, 192), (256, 256))  # fmt: skip


def compile_cases(shared_memory_bytes, capability, *, thorough=False):
    """Yield (name, kernel, args, kwargs) of every launch to compile.

    Args:
        shared_memory_bytes, capability: of the processor, which the tile sizes depend on.
        thorough: every head size x dtype x mask instead of a choice of them.
    """
    from ladder.step05_fused.kernel import fused_attention_forward

    chosen = CASES
    if thorough:
        dtypes = torch.float16, torch.bfloat16, torch.float32
        chosen = [(d, dv, dtype, causal) for d, dv in HEAD_SIZES for dtype in dtypes for causal in (False, True)]
    for head_dim, head_dim_v, dtype, causal in chosen:
        length = 1001 if causal else 1024  # 1001: no divisor that the compiler could use
        q = torch.empty(2, 8, length, head_dim, dtype=dtype, device="meta")
        k = torch.empty(2, 2, length, head_dim, dtype=dtype, device="meta")
        v = torch.empty(2, 2, length, head_dim_v, dtype=dtype, device="meta")
        out = torch.empty(2, 8, length, head_dim_v, dtype=dtype, device="meta")
        lse = torch.empty(2, 8, length, dtype=torch.float32, device="meta") if causal else None
        args = (
            q, k, v, out, lse, *q.stride(), *k.stride(), *v.stride(), *out.stride(),
            q.shape[1], q.shape[1] // k.shape[1], length, length, LOG2_E / head_dim**0.5,
        )  # fmt: skip
        options = launch_config(head_dim, head_dim_v, q.element_size(), shared_memory_bytes, capability)
        kwargs = dict(
            HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, IS_CAUSAL=causal, SCALE_SIGN=1, HAS_LSE=causal, **options
        )
        dims = f"d{head_dim}" if head_dim == head_dim_v else f"d{head_dim}/{head_dim_v}"
        tiles = f"{options['BLOCK_M']}x{options['BLOCK_N']} w{options['num_warps']} s{options['num_stages']}"
        name = f"{dims} {str(dtype).removeprefix('torch.')} {'causal' if causal else 'dense'} {tiles}"
        yield name, fused_attention_forward, args, kwargs
