"""The launches of the Hopper kernels that ``compile_cases`` compiles, as ``hopper`` makes them."""

import contextlib
from unittest import mock

import torch

from ladder.lab.compile.cases_step06 import recorder
from ladder.step08_dflash2.windows import Range, RangeWindows

BF16, FP16 = torch.bfloat16, torch.float16
WINDOW = RangeWindows.sink_window(128, 4096)
RANGES = RangeWindows([Range(0, 512, 4, 64), Range(512, -64, 64, 1024)])
# head sizes, dtype, causal, longest sequence, page size (None: dense, 0: packed), what else
PREFILL = (
    (128, 128, BF16, False, 4096, None, {}), (128, 128, BF16, True, 4096, None, {}),
    (64, 64, BF16, True, 4096, None, {}),
    (64, 64, FP16, False, 1024, None, {}), (192, 128, BF16, True, 4096, None, {}), (96, 96, BF16, True, 4096, None, {}),
    (256, 256, BF16, True, 4096, None, {}), (128, 128, BF16, True, 4096, None, dict(windows=WINDOW)),
    (128, 128, BF16, True, 4096, None, dict(windows=RANGES, sinks=True)),
    (128, 128, BF16, True, 4096, None, dict(softcap=30.0)), (128, 128, BF16, True, 4096, 0, {}),
    (64, 64, BF16, True, 1024, None, {}), (192, 128, BF16, False, 4096, None, {}),
    (256, 128, BF16, False, 4096, None, {}), (128, 128, BF16, True, 4096, 64, {}),
    (128, 128, BF16, True, 4096, 16, dict(num_splits=4)), (192, 128, BF16, True, 4096, 64, {}),
)  # fmt: skip
# heads, new tokens, page size, dtype, splits, merged inside
MLA = ((16, 1, 64, BF16, None, None), (128, 1, 64, BF16, 1, None), (8, 4, 16, FP16, 3, None),
       (16, 4, 16, FP16, None, None),
       (128, 1, 64, BF16, None, True))  # fmt: skip
# query and KV heads, head size, new tokens, page size, dtype, splits
DECODE = ((32, 8, 128, 1, 64, BF16, None), (64, 8, 64, 1, 64, BF16, None), (28, 4, 128, 16, 16, FP16, 3))


def hopper_compile_cases():
    """Yield (name, kernel, args, kwargs) of every launch of the Hopper kernels to compile."""
    from ladder.step08_dflash2 import dispatch
    from ladder.step08_dflash2.hopper import (
        decode,
        decode_kernel,
        merge_kernel,
        mla,
        mla_few_kernel,
        mla_kernel,
        prefill,
        prefill_kernel,
    )

    launches = []
    kernels = ((prefill_kernel, "dflash2_prefill_hopper"), (mla_few_kernel, "dflash2_mla_few_hopper"),
               (mla_kernel, "dflash2_mla_hopper"), (decode_kernel, "dflash2_decode_hopper"),
               (merge_kernel, "dflash2_merge_splits"), (merge_kernel, "dflash2_mla_merge_parts"))  # fmt: skip

    def launched(name, call):
        with contextlib.ExitStack() as patches:
            for module, kernel in kernels:
                patches.enter_context(mock.patch.object(module, kernel, recorder(launches, getattr(module, kernel))))
            for module in (prefill, mla, decode):
                patches.enter_context(mock.patch.object(module, "counter", lambda _: torch.zeros(1, dtype=torch.int32)))
            patches.enter_context(mock.patch.object(dispatch, "machine", lambda _: dispatch.Machine(90, 132, True)))
            patches.enter_context(mock.patch.object(torch.cuda, "device", lambda _: contextlib.nullcontext()))
            call()
        for function, args, kwargs in launches:
            yield f"{name} {function.__name__.removeprefix('dflash2_')}", function, args, kwargs
        launches.clear()

    cu = torch.tensor([0, 1000, 4096], dtype=torch.int32)
    for d, dv, dtype, causal, length, page, extra in PREFILL:
        extra = {**extra, "sinks": torch.empty(8)} if "sinks" in extra else extra
        name = f"d{d}/{dv} {str(dtype)[6:]} {'causal' if causal else 'dense'} {length} {'' if page is None else f'page {page} ' if page else 'ragged '}"  # noqa: E501
        name += " ".join(word for word in extra)
        shapes = ((8, d), (2, d), (2, dv), (8, dv))
        if page is None:
            q, k, v, out = (torch.empty(2, h, length, n, dtype=dtype) for h, n in shapes)
            packed, lse = {}, None
        else:
            q, k, v, out = (torch.empty(length, h, n, dtype=dtype) for h, n in shapes)
            packed, lse = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=length), torch.empty(8, length)
        if page:
            k, v = (torch.empty(99, page, 2, n, dtype=dtype) for n in (d, dv))
            packed.update(
                block_table=torch.zeros(2, 4096 // page, dtype=torch.int32),
                seq_lens=torch.zeros(2, dtype=torch.int32),
                cu_seqlens_k=None,
            )
        yield from launched(
            name, lambda: prefill.launch_prefill(q, k, v, out, lse, causal=causal, scale=0.1, **packed, **extra)
        )  # noqa: B023

    for heads, q_len, page, dtype, splits, merges in MLA:
        q, out = (torch.empty(8, q_len, heads, n, dtype=dtype) for n in (576, 512))
        cache, table = torch.empty(99, page, 576, dtype=dtype), torch.zeros(8, 4096 // page, dtype=torch.int32)
        options = dict(scale=0.1, right=0, sinks=None, num_kv_splits=splits, workspace=None, merges=merges)
        call = lambda: mla.launch_mla(q, cache, table, torch.zeros(8, dtype=torch.int32), out, None, **options)  # noqa: B023,E731
        yield from launched(
            f"MLA {heads} heads q_len {q_len} page {page} splits {splits}{' merges' if merges else ''}", call
        )

    for heads, kv_heads, d, q_len, page, dtype, splits in DECODE:
        q, out = (torch.empty(8, q_len, heads, d, dtype=dtype) for _ in range(2))
        k, v = (torch.empty(99, page, kv_heads, d, dtype=dtype) for _ in range(2))
        table, options = (
            torch.zeros(8, 4096 // page, dtype=torch.int32),
            dict(scale=0.1, right=0, sinks=None, num_kv_splits=splits, workspace=None),
        )
        call = lambda: decode.launch_decode(q, k, v, table, torch.zeros(8, dtype=torch.int32), out, None, **options)  # noqa: B023,E731
        yield from launched(f"decode {heads}/{kv_heads} d{d} q_len {q_len} page {page} splits {splits}", call)
