"""What to compile in order to know that step 07 compiles: launches as its functions make them.

``ladder.lab.compile.matrix`` asks every Triton rung that has such a module for its cases.
"""

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch

from ladder.lab.compile.cases_step06 import recorder

# See ``ladder.lab.compile.matrix``: tuned and recorded under Triton 3.6, where the first does not spill.
KNOWN_SPILLS = (
    (
        "sm_90", "decode d576/512 bfloat16 group 128", 512,
        "an exhibit, which stays as it was measured; step 08 has a kernel of its own for this",
    ),  # fmt: skip
    (
        "sm_100", "decode d576/512 bfloat16 group 128", 16,
        "an exhibit, which stays as it was measured; three words a tile",
    ),  # fmt: skip
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# head sizes of q/k and v, dtype, causal with log-sum-exp (or dense without)
PREFILL = (
    (128, 128, BF16, False), (128, 128, BF16, True), (64, 64, FP16, True), (192, 128, BF16, True), (96, 96, BF16, True),
    (160, 160, BF16, True), (256, 256, BF16, True), (72, 72, BF16, True), (40, 40, FP16, True), (128, 128, FP32, True),
    (192, 128, FP32, True), (256, 256, FP32, True),
)  # fmt: skip
# head sizes, choices of a token (0: token order), page size (0: packed keys), dtype
RAGGED = (
    (128, 128, 0, 0, BF16), (128, 128, 6, 0, BF16), (192, 128, 8, 0, BF16), (128, 128, 0, 64, BF16),
    (128, 128, 0, 16, BF16),
    (128, 128, 0, 1, BF16), (192, 128, 0, 64, BF16), (64, 64, 0, 256, FP16), (128, 128, 0, 64, FP32),
)  # fmt: skip
LATENT = (576, 512)  # columns of MLA's cache and of its value
# head sizes, query heads of a KV head, new tokens, page size, splits, dtype
DECODE = (
    (128, 128, 4, 1, 64, 1, BF16), (128, 128, 4, 1, 64, 5, BF16), (128, 128, 4, 1, 16, 5, BF16),
    (128, 128, 7, 1, 1, 5, BF16),
    (128, 128, 6, 4, 48, 5, BF16), (128, 128, 16, 8, 64, 5, BF16), (64, 64, 8, 1, 64, 5, FP16),
    (80, 80, 1, 1, 64, 5, BF16),
    (192, 128, 1, 1, 64, 5, BF16), (256, 256, 2, 1, 64, 5, BF16), (128, 128, 4, 1, 64, 5, FP32),
    (256, 256, 2, 1, 64, 5, FP32),
    (576, 512, 16, 1, 64, 5, BF16), (576, 512, 128, 1, 64, 5, BF16), (576, 512, 128, 1, 64, 1, BF16),
    (576, 512, 16, 1, 64, 5, FP32),
)  # fmt: skip


def compile_cases(shared_memory_bytes, capability, *, thorough=False):
    """Yield (name, kernel, args, kwargs) of every launch to compile.

    Args:
        shared_memory_bytes, capability: of the processor, which the tile sizes depend on.
        thorough: also every head size x dtype x mask.
    """
    from ladder.step07_dflash1 import decode, groups, groups_kernel, kernel, prefill

    launches = []
    stand_in = SimpleNamespace(
        **{
            name: recorder(launches, function)
            for module in (kernel, groups_kernel)
            for name, function in vars(module).items()
            if name.startswith("dflash1_")
        }
    )

    def launched(name, call):
        with ExitStack() as patches:
            for module in (prefill, decode, groups):
                patches.enter_context(mock.patch.object(module, "device_code", lambda *_: stand_in))
            for module in (prefill, decode):
                patches.enter_context(mock.patch.object(module, "arch", lambda _: 10 * capability[0] + capability[1]))
            call()
        for function, args, kwargs in launches:
            tiles = f" {kwargs['BLOCK_M']}x{kwargs['BLOCK_N']}" if "BLOCK_M" in kwargs else ""
            yield f"{function.__name__.removeprefix('dflash1_')} {name}{tiles}", function, args, kwargs
        launches.clear()

    def dims(d, dv):
        return f"d{d}" if d == dv else f"d{d}/{dv}"

    dense = list(PREFILL)
    if thorough:
        sizes = (16, 16), (32, 32), (40, 40), (80, 80), (96, 96), (128, 64), (136, 136), (192, 192), (224, 128)
        dense += [(d, dv, t, c) for d, dv in sizes for t in (BF16, FP32) for c in (False, True)]
    for d, dv, dtype, causal in dense:
        length = 1001 if causal else 1024  # 1001: no divisor that the compiler could use
        q, k, v = (torch.empty(2, h, length, n, dtype=dtype) for h, n in ((8, d), (2, d), (2, dv)))
        name = f"{dims(d, dv)} {str(dtype)[6:]} {'causal' if causal else 'dense'}"
        yield from launched(name, lambda: prefill.attention(q, k, v, causal=causal, return_lse=causal))  # noqa: B023

    cu = torch.tensor([0, 30, 101], dtype=torch.int32)
    for d, dv, top_k, page, dtype in RAGGED:
        q, k, v = (torch.empty(101, h, n, dtype=dtype) for h, n in ((8, d), (2, d), (2, dv)))
        name = f"{dims(d, dv)} {str(dtype)[6:]} ragged" + f" top {top_k}" * (top_k > 0) + f" page {page}" * (page > 0)
        index = torch.zeros(101, top_k, dtype=torch.int32) if top_k else None
        if page:
            caches = (torch.empty(5, page, 2, n, dtype=dtype) for n in (d, dv))
            table, lengths = torch.zeros(2, 7, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
            call = lambda: prefill.paged_prefill(q, *caches, table, lengths, cu)  # noqa: B023,E731
        else:
            call = lambda: prefill.attention_varlen(q, k, v, cu, cu, causal=True, return_lse=True, out_index=index)  # noqa: B023,E731
        yield from launched(name, call)

    for d, dv, group, q_len, page, splits, dtype in DECODE:
        latent = (d, dv) == LATENT
        kv_heads = 1 if latent else 8
        q = torch.empty(3, q_len, group * kv_heads, d, dtype=dtype)
        k_cache = torch.empty(5, page, kv_heads, d, dtype=dtype)
        v_cache = k_cache[..., :dv] if latent else torch.empty(5, page, kv_heads, dv, dtype=dtype)
        table, lengths = torch.zeros(3, 7, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        options = dict(num_kv_splits=splits, return_lse=q_len == 1)
        if latent:
            call = lambda: decode.mla_decode(q, k_cache[:, :, 0], table, lengths, scale=0.07, **options)  # noqa: B023,E731
        else:
            call = lambda: decode.paged_decode(q, k_cache, v_cache, table, lengths, **options)  # noqa: B023,E731
        yield from launched(f"{dims(d, dv)} {str(dtype)[6:]} group {group} q{q_len} page {page} splits {splits}", call)

    ids = torch.zeros(1001, 6, dtype=torch.int64)
    yield from launched("1001 x 6 of 64", lambda: groups.group_tokens(ids, 64))
    order, offsets = torch.zeros(6006, dtype=torch.int32), torch.zeros(65, dtype=torch.int32)
    for dtype in (BF16, FP32):
        x, weight = torch.empty(1001, 256, dtype=dtype), torch.empty(64, 256, 176, dtype=dtype)
        tiles = torch.zeros(100, 2, dtype=torch.int32)
        name = f"{str(dtype)[6:]} 64 experts"
        yield from launched(
            f"{name} gather", lambda: groups.grouped_matmul(x, weight, offsets, order=order, top_k=6, tiles=tiles)
        )  # noqa: B023
        yield from launched(name, lambda: groups.grouped_matmul(x, weight, offsets, tiles=tiles))  # noqa: B023
    yield from launched("64 experts", lambda: groups.tile_map(offsets, 64, 6006))
    chosen = groups.TokenGroups(order, offsets, torch.zeros(1001, 6, dtype=torch.int32))
    yield from launched("top 6", lambda: groups.permute_rows(torch.empty(1001, 2048, dtype=BF16), chosen))
