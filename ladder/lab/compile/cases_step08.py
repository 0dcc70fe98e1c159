"""What to compile in order to know that step 08 compiles: launches as its functions make them, prefill's first.

``ladder.lab.compile.matrix`` asks every Triton rung that has such a module for its cases.
"""

from types import SimpleNamespace
from unittest import mock

import torch

from ladder.lab.compile.cases_step06 import recorder
from ladder.step08_dflash2.windows import Range, RangeWindows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WINDOW = RangeWindows.sink_window(128, 4096)
RANGES = RangeWindows([Range(0, 512, 4, 64), Range(512, -64, 64, 1024), Range(-64, None)])
# See ``ladder.lab.compile.matrix``. The first spills under Triton 3.9, the second from 3.8 on, the others under 3.6.
KNOWN_SPILLS = (
    (
        "sm_90",
        "decode d576/512 bfloat16 group 128",
        512,
        "tiles of 32 rows do not spill, and took 1.6 x as long, with windows 1.05 and 1.4 x; sm_90 needs it for those "
        "alone",
    ),
    (
        "sm_90",
        "MLA 8 heads q_len 4 page 16 splits 3",
        48,
        "three words a tile of 74 KB that it waits for; memory binds",
    ),
    ("sm_100", "decode d576/512 float32 group 16", 192, "float32 on a latent cache serves to check other kernels"),
    ("sm_86", "prefill d192/128 bfloat16 dense 1024 64x32", 8, "two words a tile; not measured on such a card"),
    ("sm_86", "decode d576/512 bfloat16 group 16 q2", 16, "five words a tile; not measured on such a card"),
)
# head sizes of q/k and v, dtype, causal with log-sum-exp (or dense without), new tokens, what else
PREFILL = (
    (128, 128, BF16, False, 1024, {}), (128, 128, BF16, True, 1001, {}), (64, 64, FP16, True, 1001, {}),
    (192, 128, BF16, True, 1001, {}), (192, 128, BF16, False, 1024, {}), (96, 96, BF16, True, 1001, {}),
    (160, 160, BF16, True, 1001, {}), (256, 256, BF16, True, 1001, {}), (72, 72, BF16, True, 1001, {}),
    (40, 40, FP16, True, 1001, {}), (128, 128, FP32, True, 1001, {}), (256, 256, FP32, True, 1001, {}),
    (128, 128, BF16, True, 1001, dict(windows=WINDOW)), (64, 64, BF16, True, 1001, dict(windows=WINDOW, sinks=True)),
    (192, 128, BF16, True, 1001, dict(windows=WINDOW)), (256, 256, BF16, True, 1001, dict(windows=WINDOW)),
    (128, 128, BF16, False, 1001, dict(windows=WINDOW, right=31)), (128, 128, BF16, True, 1001, dict(windows=RANGES)),
    (128, 128, BF16, True, 1001, dict(softcap=50.0)), (256, 256, BF16, True, 1001, dict(softcap=50.0, windows=WINDOW)),
    (128, 128, BF16, True, 1001, dict(sinks=True)),
    (128, 128, FP32, True, 1001, dict(windows=RANGES, softcap=50.0, sinks=True)),
    (128, 128, BF16, True, 1, {}), (128, 128, BF16, True, 9, {}),
    (64, 64, BF16, True, 16, dict(windows=WINDOW, sinks=True)),
)  # fmt: skip
# head sizes, page size (0: packed keys), dtype, max_seqlen_q, what else
RAGGED = (
    (128, 128, 0, BF16, None, {}), (128, 128, 0, BF16, 4096, {}), (192, 128, 0, BF16, 4096, {}),
    (128, 128, 0, BF16, 1, {}),
    (128, 128, 0, BF16, 4096, dict(windows=WINDOW)), (128, 128, 64, BF16, 4096, {}), (128, 128, 16, BF16, 4096, {}),
    (128, 128, 1, BF16, None, {}), (192, 128, 64, BF16, 4096, {}), (64, 64, 256, FP16, 4096, {}),
    (128, 128, 64, FP32, None, {}),
    (64, 64, 64, BF16, 4096, dict(windows=WINDOW, sinks=True)),
    (256, 256, 64, BF16, 4096, dict(windows=WINDOW, softcap=50.0)),
    (128, 128, 64, BF16, 4, dict(windows=WINDOW)),
)  # fmt: skip


def compile_cases(shared_memory_bytes, capability, *, thorough=False):
    """Yield (name, kernel, args, kwargs) of every launch to compile, those of decode and of the fused kernels too.

    Args:
        shared_memory_bytes, capability: of the processor, which the tile sizes depend on.
        thorough: also every head size x dtype x mask, with windows and a softcap.
    """
    from . import cases_step08_decode, cases_step08_fusion, cases_step08_hopper

    yield from prefill_compile_cases(capability, thorough=thorough)
    yield from cases_step08_decode.decode_compile_cases(shared_memory_bytes, capability, thorough=thorough)
    yield from cases_step08_fusion.compile_cases(shared_memory_bytes, capability, thorough=thorough)
    if tuple(capability) == (9, 0):
        yield from cases_step08_hopper.hopper_compile_cases()


def prefill_compile_cases(capability, *, thorough=False):
    """The launches of ``dflash2_prefill``; arguments as in ``compile_cases``."""
    from ladder.step08_dflash2 import dispatch, prefill
    from ladder.step08_dflash2.portable import prefill_kernel

    launches = []
    stand_in = SimpleNamespace(dflash2_prefill=recorder(launches, prefill_kernel.dflash2_prefill))

    def launched(name, call):
        with (
            mock.patch.object(prefill, "device_code", lambda *_: stand_in),
            mock.patch.object(
                dispatch, "machine", lambda _: dispatch.Machine(10 * capability[0] + capability[1], 132, False)
            ),
        ):
            call()
        for function, args, kwargs in launches:
            pack = f" pack {kwargs['PACK']}" if kwargs["PACK"] > 1 else ""
            yield f"prefill {name} {kwargs['BLOCK_M']}x{kwargs['BLOCK_N']}{pack}", function, args, kwargs
        launches.clear()

    def named(d, dv, dtype, extra):
        dims = f"d{d}" if d == dv else f"d{d}/{dv}"
        windows = extra.get("windows")
        words = [f"{len(windows)} ranges" if len(windows) > 1 else "window"] if windows is not None else []
        words += [f"right {extra['right']}"] if "right" in extra else []
        return " ".join([dims, str(dtype)[6:], *words, *(w for w in ("softcap", "sinks") if w in extra)])

    def options(extra, dtype):
        return {**extra, "sinks": torch.empty(8, dtype=dtype)} if "sinks" in extra else extra

    cases = list(PREFILL)
    if thorough:
        sizes = (
            (16, 16),
            (32, 32),
            (40, 40),
            (64, 64),
            (80, 80),
            (96, 96),
            (128, 64),
            (128, 128),
            (136, 136),
            (192, 128),
            (192, 192),
            (224, 128),
        )
        cases += [(d, dv, t, c, 1003, e) for d, dv in (*sizes, (256, 256)) for t in (BF16, FP32) for c in (False, True)
                    for e in ({}, dict(windows=WINDOW), dict(softcap=30.0))]  # fmt: skip
    for d, dv, dtype, causal, tokens, extra in cases:
        length = 1024 if tokens == 1024 else 1001  # 1001: no divisor that the compiler could use
        q, k, v = (
            torch.empty(2, h, n, x, dtype=dtype) for h, n, x in ((8, tokens, d), (2, length, d), (2, length, dv))
        )
        name = f"{named(d, dv, dtype, extra)} {'causal' if causal else 'dense'} {tokens}"
        yield from launched(
            name, lambda: prefill.dense(q, k, v, causal=causal, return_lse=causal, **options(extra, dtype))
        )  # noqa: B023

    cu = torch.tensor([0, 30, 1001], dtype=torch.int32)
    for d, dv, page, dtype, most, extra in RAGGED:
        q, k, v = (torch.empty(1001, h, n, dtype=dtype) for h, n in ((8, d), (2, d), (2, dv)))
        name = f"{named(d, dv, dtype, extra)} {f'page {page}' if page else 'ragged'} up to {most}"
        if page:
            caches = (torch.empty(5, page, 2, n, dtype=dtype) for n in (d, dv))
            table, lengths = torch.zeros(2, 7, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
            call = lambda: prefill.paged_prefill(q, *caches, table, lengths, cu, most, **options(extra, dtype))  # noqa: B023,E731
        else:
            call = lambda: prefill.varlen(q, k, v, cu, cu, most, causal=True, return_lse=True, **options(extra, dtype))  # noqa: B023,E731
        yield from launched(name, call)
