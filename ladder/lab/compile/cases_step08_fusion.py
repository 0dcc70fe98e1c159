"""What to compile in order to know that step 08's fusion compiles: launches as its functions make them."""

from types import SimpleNamespace
from unittest import mock

import torch

from ladder.lab.compile.cases_step06 import recorder

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# tokens, hidden, query heads, KV heads, head size, rotated columns, dtype, head norms, bias, interleaved
ATTENTION = (
    (8, 4096, 32, 8, 128, 128, BF16, False, False, False), (64, 4096, 32, 8, 128, 128, BF16, False, False, False),
    (8, 2048, 32, 4, 128, 128, BF16, True, False, False), (8, 3584, 28, 4, 128, 128, BF16, False, True, False),
    (8, 1000, 8, 8, 80, 32, BF16, False, True, False), (8, 4096, 16, 2, 128, 64, FP16, False, True, True),
    (8, 1024, 4, 1, 256, 256, BF16, True, False, False), (8, 2048, 32, 8, 64, 64, FP32, False, False, False),
    (4096, 4096, 32, 8, 128, 128, BF16, False, False, False), (4096, 2048, 32, 4, 128, 128, BF16, True, False, False),
    (4096, 4096, 16, 2, 128, 64, FP16, False, True, True), (4096, 1024, 4, 1, 256, 256, BF16, True, False, False),
    (4096, 2048, 32, 8, 64, 64, FP32, True, False, False), (4096, 2048, 4, 4, 64, 2, BF16, False, False, True),
)  # fmt: skip
# tokens, hidden (0: the latent comes projected), heads, absorbed columns, dtype
MLA = (
    (8, 2048, 16, 512, BF16), (64, 7168, 128, 512, BF16), (8, 2048, 16, 0, BF16), (4096, 0, 16, 0, BF16),
    (8, 0, 128, 512, FP16),
    (8, 2048, 16, 512, FP32),
)  # fmt: skip
# tokens, hidden, experts, top_k, groups, kept groups, dtype, dtype of the gate, sigmoid with bias
ROUTER = (
    (8, 2048, 64, 6, None, None, BF16, BF16, False), (8, 7168, 256, 8, 8, 4, BF16, BF16, True),
    (8, 7168, 256, 8, 8, 4, BF16, FP32, True),
    (64, 7168, 256, 8, 8, 4, BF16, BF16, True), (64, 7168, 256, 8, 8, 4, BF16, FP32, True),
    (64, 5120, 160, 6, 8, 3, BF16, FP32, False),
    (64, 2048, 128, 8, None, None, BF16, BF16, False), (64, 7168, 384, 8, None, None, BF16, FP32, True),
    (8, 1000, 8, 2, None, None, FP16, FP16, False), (64, 2048, 64, 6, None, None, FP32, FP32, False),
    (16, 7168, 1024, 8, None, None, BF16, BF16, False),
    (64, 7168, 512, 10, None, None, BF16, BF16, False),
    (4096, 2048, 64, 6, None, None, BF16, BF16, False), (4096, 7168, 256, 8, 8, 4, BF16, BF16, True),
    (4096, 7168, 256, 8, 8, 4, BF16, FP32, True), (4096, 2048, 1024, 8, None, None, BF16, FP32, False),
    (4096, 2048, 64, 6, None, None, FP32, FP32, False), (4096, 16384, 16, 2, None, None, BF16, BF16, False),
)  # fmt: skip


def compile_cases(shared_memory_bytes, capability, *, thorough=False):
    """Yield (name, kernel, args, kwargs) of every launch to compile; see ``ladder.lab.compile.matrix``."""
    from ladder.step08_dflash2 import fusion
    from ladder.step08_dflash2.fusion import append, kernel, launch

    launches = []
    kernels = {n: recorder(launches, f) for n, f in vars(kernel).items() if n.startswith("dflash2_")}
    processors = {(8, 0): 108, (9, 0): 132, (10, 0): 148}.get(capability, 84)

    def launched(name, call):
        with (
            mock.patch.object(launch, "kernels", lambda _: SimpleNamespace(**kernels)),
            mock.patch.object(append, "check_values", lambda *_: None),
            mock.patch.object(launch, "processors", lambda _: processors),
            mock.patch.object(
                torch.nn.functional, "linear", lambda x, w, bias=None: x.new_empty(x.shape[0], w.shape[0])
            ),
        ):
            call()
        for function, args, kwargs in launches:
            yield f"{function.__name__.removeprefix('dflash2_')} {name}", function, args, kwargs
        launches.clear()

    def empty(*shape, dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    def tokens_of(tokens):
        return empty(tokens, dtype=torch.int32), empty(tokens, dtype=torch.int64)

    for tokens, hidden, heads, kv_heads, dim, rot, dtype, norms, bias, interleaved in ATTENTION:
        columns, (positions, slots) = (heads + 2 * kv_heads) * dim, tokens_of(tokens)
        cos, cache, norm = empty(99, rot // 2, dtype=FP32), empty(
            7, 64, kv_heads, dim, dtype=dtype,
        ), empty(dim, dtype=dtype)  # fmt: skip
        call = lambda: fusion.fused_qkv_rope_append(  # noqa: E731
            empty(tokens, hidden, dtype=dtype), empty(columns, hidden, dtype=dtype), cos, cos, positions, cache, cache,
            slots,  # noqa: B023
            num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, bias=empty(columns, dtype=dtype) if bias else None,
             # noqa: B023
            q_norm_weight=norm if norms else None, k_norm_weight=norm if norms else None, interleaved=interleaved,
             # noqa: B023
        )  # fmt: skip
        name = f"T{tokens} {hidden} {heads}/{kv_heads} d{dim} rot {rot} {str(dtype)[6:]}"
        yield from launched(name + " norms" * norms + " bias" * bias, call)

    for tokens, hidden, heads, nope, dtype in MLA:
        positions, slots = tokens_of(tokens)
        cos, cache = empty(99, 32, dtype=FP32), empty(7, 64, 576, dtype=dtype)
        call = lambda: fusion.fused_mla_append(  # noqa: E731
            empty(tokens, hidden or 576, dtype=dtype), empty(512, dtype=dtype), cos, cos, positions, cache, slots,
             # noqa: B023
            empty(tokens, heads, 64, dtype=dtype), weight=empty(576, hidden, dtype=dtype) if hidden else None,
             # noqa: B023
            q_nope=empty(tokens, heads, nope, dtype=dtype) if nope else None,  # noqa: B023
        )  # fmt: skip
        yield from launched(f"T{tokens} {hidden or 'projected'} heads {heads} absorbed {nope} {str(dtype)[6:]}", call)

    for tokens, hidden, experts, top_k, groups, kept, dtype, gate_dtype, sigmoid in ROUTER:
        x = empty(tokens, hidden, dtype=dtype)
        call = lambda: fusion.fused_norm_router(  # noqa: E731
            x, x, empty(hidden, dtype=dtype), empty(experts, hidden, dtype=gate_dtype), top_k=top_k, num_groups=groups,
             # noqa: B023
            topk_groups=kept, scoring="sigmoid" if sigmoid else "softmax",  # noqa: B023
            correction_bias=empty(experts, dtype=FP32) if sigmoid else None,  # noqa: B023
        )  # fmt: skip
        name = f"T{tokens} {hidden} top {top_k} of {experts}" + f" groups {kept} of {groups}" * (groups is not None)
        yield from launched(f"{name} {str(dtype)[6:]} gate {str(gate_dtype)[6:]}", call)
