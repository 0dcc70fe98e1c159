"""The decode launches of step 08 that ``compile_cases`` compiles, as its functions make them."""

from types import SimpleNamespace
from unittest import mock

import torch

from ladder.lab.compile.cases_step06 import recorder
from ladder.step08_dflash2.windows import RangeWindows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WINDOW = RangeWindows.sink_window(4, 500)
LATENT = (576, 512)  # columns of MLA's cache and of its value
# head sizes, query heads of a KV head, new tokens, page size, sequences, dtype, options
CASES = (
    (128, 128, 4, 1, 64, 8, BF16, {}), (128, 128, 4, 1, 64, 1, BF16, {}), (128, 128, 4, 1, 16, 300, BF16, {}),
    (128, 128, 4, 1, 256, 8, BF16, dict(num_kv_splits=1)), (128, 128, 4, 1, 64, 8, BF16, dict(num_kv_splits=5)),
    (128, 128, 7, 1, 1, 8, BF16, {}), (128, 128, 6, 4, 48, 8, BF16, {}), (128, 128, 4, 4, 64, 8, BF16, {}),
    (128, 128, 16, 8, 64, 8, BF16, {}), (64, 64, 8, 1, 64, 8, FP16, dict(windows=WINDOW, sinks=True)),
    (128, 128, 4, 4, 64, 8, BF16, dict(windows=WINDOW, softcap=50.0, sinks=True)),
    (256, 256, 2, 1, 64, 8, BF16, dict(windows=WINDOW, softcap=50.0)),
    (80, 80, 1, 1, 64, 8, BF16, {}), (72, 72, 3, 1, 16, 8, FP16, {}), (96, 96, 1, 1, 64, 8, BF16, {}),
    (192, 128, 1, 1, 64, 8, BF16, {}),
    (128, 128, 4, 1, 64, 8, FP32, dict(softcap=30.0)), (256, 256, 2, 1, 64, 8, FP32, {}),
    (576, 512, 16, 1, 64, 8, BF16, {}), (576, 512, 16, 2, 64, 8, BF16, {}), (576, 512, 128, 1, 64, 8, BF16, {}),
    (576, 512, 128, 1, 64, 1, BF16, {}), (576, 512, 128, 2, 64, 8, BF16, dict(num_kv_splits=1)),
    (576, 512, 128, 1, 64, 8, BF16, dict(windows=WINDOW)), (576, 512, 16, 1, 64, 8, FP32, {}),
)  # fmt: skip


def decode_compile_cases(shared_memory_bytes, capability, *, thorough=False):
    """Yield (name, kernel, args, kwargs) of every decode launch to compile; arguments as in ``compile_cases``."""
    from ladder.step08_dflash2 import decode, dispatch
    from ladder.step08_dflash2.portable import decode_kernel

    cases = list(CASES)
    if thorough:
        sizes = (
            (16, 16),
            (32, 32),
            (40, 40),
            (64, 64),
            (80, 80),
            (96, 96),
            (128, 64),
            (160, 160),
            (192, 192),
            (192, 128),
            (224, 128),
        )
        cases += [(d, dv, 3, 3, page, 5, t, {}) for d, dv in sizes for t in (BF16, FP32) for page in (16, 64)]
    launches = []
    stand_in = SimpleNamespace(
        **{name: recorder(launches, getattr(decode_kernel, name)) for name in ("dflash2_decode", "dflash2_schedule")}
    )
    for d, dv, group, q_len, page, batch, dtype, given in cases:
        latent = (d, dv) == LATENT
        kv_heads = 1 if latent else 8
        q = torch.empty(batch, q_len, group * kv_heads, d, dtype=dtype)
        k_cache = torch.empty(5, page, kv_heads, d, dtype=dtype)
        v_cache = k_cache[..., :dv] if latent else torch.empty(5, page, kv_heads, dv, dtype=dtype)
        table, lengths = torch.zeros(batch, -(-32768 // page), dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
        out, lse = torch.empty(*q.shape[:3], dv, dtype=dtype), torch.empty(batch, q.shape[2], q_len)
        options = {**dict(right=0, scale=0.07, windows=None, softcap=0.0, num_kv_splits=None), **given}
        options["sinks"] = torch.empty(q.shape[2]) if options.get("sinks") else None
        options["latent_cache"] = k_cache[:, :, 0] if latent else None
        machine = dispatch.Machine(10 * capability[0] + capability[1], 132, False)
        with mock.patch.object(dispatch, "machine", lambda _: machine):  # noqa: B023
            decode.launch(stand_in, q, k_cache, v_cache, table, lengths, out, lse if q_len == 1 else None, **options)
        size = f"d{d}" if d == dv else f"d{d}/{dv}"
        extras = "".join(f" {name}" for name in ("windows", "softcap", "sinks") if given.get(name))
        splits = "" if options["num_kv_splits"] is None else f" splits {options['num_kv_splits']}"
        for function, args, kwargs in launches:
            tiles = f" {kwargs['BLOCK_M']}x{kwargs['BLOCK_N']}" if "BLOCK_M" in kwargs else ""
            name = f"{size} {str(dtype)[6:]} group {group} q{q_len} page {page} batch {batch}{splits}{extras}{tiles}"
            yield f"{function.__name__.removeprefix('dflash2_')} {name}", function, args, kwargs
        launches.clear()
