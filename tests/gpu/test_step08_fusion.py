"""Step 08's fusion on a GPU: bfloat16, models' sizes, graphs, no waiting, offsets past 2^31, one launch where one is promised."""

import pytest
import torch
from support import step08_block as blocks

from ladder.bench import fusion as chains
from ladder.lab.parity import inside_nan, poison
from ladder.step07_dflash1 import DecodeWorkspace

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CUDA = torch.device("cuda")
NAN = float("nan")
MODELS = {
    "Llama-8B": ("qkv", 4096, dict(Hq=32, Hkv=8, D=128, rot_dim=128)),
    "Qwen3-30B-A3B": ("qkv", 2048, dict(Hq=32, Hkv=4, D=128, rot_dim=128, norms=True)),
    "GLM": ("qkv", 4096, dict(Hq=32, Hkv=2, D=128, rot_dim=64)),
    "odd": ("qkv", 1000, dict(Hq=6, Hkv=2, D=80, rot_dim=20, norms=True)),
    "wide heads": ("qkv", 2048, dict(Hq=4, Hkv=1, D=256, rot_dim=256, norms=True)),
    "DeepSeek-V2-Lite": ("mla", 2048, dict(H=16, rank=512, rot_dim=64)),
    "DeepSeek-V3": ("mla", 7168, dict(H=128, rank=512, rot_dim=64)),
    "V2-Lite's router": ("router", 2048, dict(E=64, top_k=6, renormalize=False)),
    "V2's router": ("router", 5120, dict(E=160, top_k=6, num_groups=8, topk_groups=3, renormalize=False, routed_scaling_factor=16.0)),
    "V3's router": ("router", 7168, dict(E=256, top_k=8, num_groups=8, topk_groups=4, scoring="sigmoid", routed_scaling_factor=2.5)),
    "Qwen3's router": ("router", 2048, dict(E=128, top_k=8)),
    "K2's router": ("router", 7168, dict(E=384, top_k=8, scoring="sigmoid")),
    "Mixtral's router": ("router", 4096, dict(E=8, top_k=2)),
    "1024 experts": ("router", 1024, dict(E=1024, top_k=8)),
}  # fmt: skip


def made(name, tokens, dtype=torch.bfloat16, **changes):
    """(case, positional arguments, keyword arguments) of a call on a model's sizes."""
    op, hidden, shape = MODELS[name]
    case = chains.Case(op, name, tokens, hidden, shape)
    args, options = case.make(CUDA, dtype)
    if op == "qkv" and name == "GLM":
        options |= dict(interleaved=True, bias=torch.randn(args[1].shape[0], device=CUDA).to(dtype))
    return case, args, {**options, **changes}


def caches(case, args):
    return {"qkv": args[5:7], "mla": args[5:6], "router": []}[case.op]


def hold(case, args, options, **more):
    """Run a call and hold it against float64; returns its result."""
    exact_args = [x.double() if x.is_floating_point() else x for x in args]
    exact_options = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    reference = case.outputs(case.chain(*exact_args, **exact_options), exact_args)
    chained = [x.clone() for x in case.outputs(case.chain(*args, **options), args)]
    poison(*caches(case, args))
    result = case.call(*args, **options, **more)
    parity = chains.check_budget(case.outputs(result, args), reference, chained)
    assert parity, f"{case.label()}: {parity.reason}"
    for cache in caches(case, args):  # what no slot names is as it was
        assert int((~cache.flatten(0, 1).flatten(1).isnan()).all(1).sum()) == case.tokens
    if case.op == "router":
        parity = chains.check_choice(result[0], args[3], *result[2:], **{k: v for k, v in options.items() if k != "top_k"})
        assert parity, f"{case.label()}: {parity.reason}"
    return result


@pytest.mark.parametrize("tokens", [1, 8, 33, 64, 65, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, tokens, dtype=torch.bfloat16):
    case, args, options = made(name, tokens, dtype)
    workspace = DecodeWorkspace(CUDA)
    for fused in (None, True, False):
        if fused and tokens > 64:
            continue
        first = hold(case, args, options, fused=fused, workspace=workspace)
        workspace.partials.fill_(NAN)
        again = case.call(*args, **options, fused=fused, workspace=workspace)
        for a, b in zip(first, again) if case.op == "router" else [(first, again)]:
            assert torch.equal(a, b), "the same call gave other bits"
        assert not workspace.counters.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("tokens", [8, 200])
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "GLM", "DeepSeek-V2-Lite", "V2-Lite's router", "V2's router"])
def test_other_types(name, tokens, dtype):
    test_models(name, tokens, dtype)


@pytest.mark.parametrize("tokens", [8, 500])
def test_gate_in_float32(tokens):
    """DeepSeek keeps its gate in float32: bfloat16 rows by float32 weights, to float32's precision."""
    case, args, options = made("V3's router", tokens)
    args[3] = torch.randn(args[3].shape, device=CUDA) * args[3].shape[1] ** -0.5
    normed, _, weights, ids, counts = case.call(*args, **options)
    del options["top_k"]
    parity = chains.check_choice(normed, args[3], weights, ids, counts, tolerance=2e-6, **options)
    assert parity, parity.reason


def agree(got, want):
    """Equal but for two units of the largest value: other strides choose another product, whose sums round elsewhere."""
    torch.testing.assert_close(got, want, rtol=0.0, atol=2 * torch.finfo(want.dtype).eps * float(want.abs().max()))


@pytest.mark.parametrize("name", ["Llama-8B", "Qwen3-30B-A3B", "GLM", "DeepSeek-V2-Lite"])
@pytest.mark.parametrize("fused", [True, False])
def test_strides_and_negative_slots(name, fused):
    case, args, options = made(name, 37)
    plain = case.call(*args, **options, fused=fused)
    want = [x.clone() for x in case.outputs(plain, args)]
    poison(*caches(case, args))
    args[0] = inside_nan(args[0].T.contiguous()).T
    slots = 7 if case.op == "qkv" else 6
    kept = torch.arange(37, device=CUDA) % 3 != 0
    all_slots, args[slots] = args[slots], torch.where(kept, args[slots], -1 - args[slots]).int()
    out = torch.full((*plain.shape[::-1],), NAN, dtype=plain.dtype, device=CUDA).permute(2, 1, 0)
    case.call(*args, **options, fused=fused, out=out)
    agree(out, want[0])
    for cache, rows in zip(caches(case, args), want[1:]):
        got = cache.flatten(0, 1)[all_slots]
        agree(got[kept], rows[kept])
        assert got[~kept].isnan().all()


@pytest.mark.parametrize("fused", [True, False])
def test_what_lies_outside_shows_and_is_not_written(fused):
    for name, slots in (("Llama-8B", 7), ("DeepSeek-V2-Lite", 6)):
        case, args, options = made(name, 16)
        clean = case.call(*args, **options, fused=fused)
        args[4][3], args[4][5], args[slots][7] = 8192, -1, 1 << 40
        q = case.call(*args, **options, fused=fused)
        rot = slice(None) if case.op == "qkv" else slice(512, None)
        bad = q[..., rot].isnan().flatten(1).all(1).nonzero().flatten().tolist()
        assert bad == [3, 5, 7]
        good = [t for t in range(16) if t not in bad]
        assert torch.equal(q[good], clean[good])


def test_slots_past_2_to_31():
    """A cache whose last page lies 2^31 elements behind the first."""
    case, args, options = made("Llama-8B", 8)
    plain = case.outputs(case.call(*args, **options), args)
    stride = (1 << 31) + 128
    buffers = [torch.empty(stride + 64 * 1024, dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
    far = [b.as_strided((2, 64, 8, 128), (stride, 1024, 128, 1)) for b in buffers]
    args[5:7] = far
    args[7] = torch.tensor([64, 127, 100, 70, 3, 90, 81, 65], device=CUDA)
    for fused in (True, False):
        for b in buffers:
            b[stride:].fill_(NAN)
        result = case.call(*args, **options, fused=fused)
        for got, want in zip((result, *(c[args[7] // 64, args[7] % 64] for c in far)), plain):
            agree(got, want)


@pytest.mark.parametrize("tokens", [8, 300])
@pytest.mark.parametrize("name", ["Llama-8B", "DeepSeek-V2-Lite", "V3's router"])
def test_graphs_and_no_waiting(name, tokens):
    """Captured once, replayed on other positions, slots and rows; nothing asks the device for a number."""
    case, args, options = made(name, tokens)
    workspace = DecodeWorkspace(CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case.call(*args, **options, workspace=workspace)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.call(*args, **options, workspace=workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    held = workspace.nbytes
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = case.call(*args, **options, workspace=workspace)
    fresh, _ = case.make(CUDA, seed=5)
    for old, new in zip(args, fresh):
        if old.shape == new.shape:
            old.copy_(new)
    for _ in range(3):
        poison(*caches(case, args))
        graph.replay()
    torch.cuda.synchronize()
    got = [x.clone() for x in (result if case.op == "router" else case.outputs(result, args))]
    again = case.call(*args, **options)
    for a, b in zip(got, again if case.op == "router" else case.outputs(again, args)):
        assert torch.equal(a, b)
    assert workspace.nbytes == held


@pytest.mark.parametrize("name, tokens, most", [
    ("Llama-8B", 8, 1), ("Llama-8B", 64, 3), ("Llama-8B", 1000, 3), ("DeepSeek-V2-Lite", 8, 1), ("DeepSeek-V2-Lite", 1000, 3),
    ("V2-Lite's router", 8, 1), ("V3's router", 8, 2), ("V3's router", 64, 2), ("V3's router", 1000, 2),
])  # fmt: skip
def test_launches(name, tokens, most):
    """One kernel for few rows. For more: a product (which may split itself into two kernels) and a pass, or norm and router.

    Which way is the faster one is held against the record of ``ladder.bench.fusion`` in tests/step08/test_fusion.py.
    """
    case, args, options = made(name, tokens)
    workspace = DecodeWorkspace(CUDA)
    count = chains.launches(lambda: case.call(*args, **options, workspace=workspace), CUDA)
    assert 1 <= count <= most < chains.launches(lambda: case.chain(*args, **options), CUDA)


def test_torch_compile_with_inductor():
    case, args, options = made("Qwen3-30B-A3B", 8)
    router, router_args, router_options = made("Qwen3's router", 8)

    def step(x):
        q = case.call(x * 2, *args[1:], **options)
        return q + 1, *router.call(x, *router_args[1:], **router_options)

    plain = step(args[0])
    rows = [x.clone() for x in case.outputs(plain[0], args)[1:]]
    poison(*caches(case, args))
    compiled = torch.compile(step, fullgraph=True)(args[0])
    for a, b in zip((*plain, *rows), (*compiled, *case.outputs(plain[0], args)[1:]), strict=True):
        torch.testing.assert_close(a, b)


def test_every_case_of_the_benchmark_is_right():
    for case in chains.cases():
        args, options = case.make(CUDA)
        hold(case, args, options)


@pytest.mark.parametrize("name", ["llama", "qwen3 moe", "v2 lite", "v3"])
def test_a_block_in_a_graph(name):
    """A whole block captured at one length and replayed at the next, against the same block called."""
    block = blocks.randomised(blocks.BLOCKS[name]()).to(torch.bfloat16)
    outputs = []
    for captured in (False, True):
        server, workspace = blocks.served(block), DecodeWorkspace(CUDA)
        server.caches = [c.bfloat16() for c in server.caches]
        random = torch.Generator(CUDA).manual_seed(0)
        x = [torch.randn(n, blocks.HIDDEN, generator=random, device=CUDA).bfloat16() for n in (8, 2, 2, 2)]

        def call(x, batch, server=server, workspace=workspace):
            return block(x, None, server.cos, server.sin, batch, *server.caches, workspace=workspace)

        call(x[0], server.step((5, 3), False))
        batch = server.step((1, 1), True)
        call(x[1], batch)
        if captured:
            static, graph = x[1].clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = call(static, batch)
        for row in x[2:]:
            new = server.step((1, 1), True)
            if captured:
                static.copy_(row)
                for field in ("positions", "slot_mapping", "block_table", "seq_lens"):
                    getattr(batch, field).copy_(getattr(new, field))
                graph.replay()
            else:
                output = call(row, new)
        outputs.append([None if y is None else y.clone() for y in output])
    for a, b in zip(*outputs):
        assert (a is None and b is None) or torch.equal(a, b)
