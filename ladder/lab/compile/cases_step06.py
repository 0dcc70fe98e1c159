"""What to compile in order to know that step 06 compiles: launches as ``paged_decode`` makes them.

``ladder.lab.compile.matrix`` asks every Triton rung that has such a module for its cases.
"""

import importlib
from unittest import mock

import torch

# head sizes of q/k and v, query and KV heads, new tokens, page size, dtype
CASES = (
    (128, 128, 32, 8, 1, 64, torch.bfloat16),
    (128, 128, 32, 8, 1, 16, torch.bfloat16),
    (128, 128, 28, 4, 1, 1, torch.bfloat16),
    (64, 64, 64, 8, 4, 256, torch.float16),
    (80, 80, 32, 32, 1, 48, torch.bfloat16),
    (192, 128, 16, 16, 1, 64, torch.bfloat16),
    (256, 256, 8, 4, 2, 64, torch.bfloat16),
    (128, 128, 32, 8, 1, 64, torch.float32),
)
HEAD_SIZES = (
    (16, 16), (40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (128, 64), (128, 128), (160, 160), (192, 128),
    (256, 256),
)  # fmt: skip


def compile_cases(shared_memory_bytes, capability, *, thorough=False):
    """Yield (name, kernel, args, kwargs) of every launch to compile.

    Args:
        shared_memory_bytes, capability: of the processor.
        thorough: every head size x dtype x page size instead of a choice of them.
    """
    attention = importlib.import_module("ladder.step06_paged.attention")
    from ladder.step06_paged import kernel

    chosen = CASES
    if thorough:
        dtypes = torch.float16, torch.bfloat16, torch.float32
        chosen = [(d, dv, 12, 4, 3, page, t) for d, dv in HEAD_SIZES for t in dtypes for page in (1, 16, 64)]
    for head_dim, head_dim_v, num_heads, num_kv_heads, q_len, page_size, dtype in chosen:
        launches = []
        recorders = recorder(launches, kernel.paged_decode_split), recorder(launches, kernel.paged_decode_merge)
        q = torch.empty(3, q_len, num_heads, head_dim, dtype=dtype)
        k_cache = torch.empty(5, page_size, num_kv_heads, head_dim, dtype=dtype)
        v_cache = torch.empty(5, page_size, num_kv_heads, head_dim_v, dtype=dtype)
        table, lengths = torch.zeros(3, 7, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        with mock.patch.object(attention, "_kernels", lambda *_: recorders):
            attention.paged_decode(q, k_cache, v_cache, table, lengths, num_kv_splits=5, return_lse=q_len == 1)
        dims = f"d{head_dim}" if head_dim == head_dim_v else f"d{head_dim}/{head_dim_v}"
        name = f"{dims} {num_heads}/{num_kv_heads} q{q_len} page {page_size} {str(dtype).removeprefix('torch.')}"
        for part, (function, args, kwargs) in zip(("split", "merge"), launches):
            yield f"{part} {name}", function, args, kwargs


def recorder(launches, function):
    """Stands where a kernel stands: a launch is appended to ``launches`` as (kernel, args, kwargs)."""

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: launches.append((function, args, kwargs))

    return Recorder()
