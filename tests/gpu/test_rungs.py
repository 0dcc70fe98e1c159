"""What only a GPU can show: bfloat16, compiled code, offsets past 2^31, streams, graphs, the peers."""

import importlib

import pytest
import torch
from support.checks import CASES, Case, check

from ladder.lab import peers
from ladder.lab.memory import peak_bytes
from ladder.lab.parity import Oracle, inside_nan
from ladder.lab.problem import MINILM, SHAPES, AttentionProblem
from ladder.lab.timing import measure
from ladder.rungs import RUNGS, find

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CUDA = torch.device("cuda")
DTYPES = ("bfloat16", "float16")
CLIMBED = [rung for rung in RUNGS if rung.number <= 5 or rung.number == 8]

MODELS = {
    f"{name} {Sq}x{Sk} {'causal' if causal else 'dense'}": AttentionProblem(**shape, Sq=Sq, Sk=Sk, causal=causal)
    for name, shape in SHAPES.items()
    for Sq, Sk, causal in (
        (1024, 1024, True),
        (777, 1531, True),
        (1531, 777, True),
        (1000, 1024, False),
        (1, 4097, True),
    )
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_edges_in_both_16_bit_types(name, dtype):
    case = CASES[name]
    case = Case(name, case.problem.replace(dtype=dtype), case.layout)
    for rung in CLIMBED:
        if rung.why_not(case.problem) is None:
            check(rung.attention, case)


@pytest.mark.parametrize("dtype", (*DTYPES, "float32"))
@pytest.mark.parametrize("name", MODELS)
def test_model_shapes(name, dtype):
    problem = MODELS[name].replace(dtype=dtype)
    q, k, v = problem.make(CUDA)
    oracle = Oracle(q, k, v, causal=problem.causal)
    out, lse = find(5).attention(q, k, v, causal=problem.causal, return_lse=True)
    parity = oracle.check(out, lse)
    assert parity, parity.reason
    assert oracle.agree(out, find(4).attention(q, k, v, causal=problem.causal))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", (16, 32, 40, 64, 72, 80, 96, 112, 128, 136, 160, 192, 224, 256))
def test_head_sizes_across_tiles(D, dtype):
    q, k, v = AttentionProblem(Hq=4, Hkv=2, Sq=300, Sk=421, D=D, Dv=D, causal=True, dtype=dtype).make(CUDA)
    out, lse = find(5).attention(*(inside_nan(x) for x in (q, k, v)), causal=True, return_lse=True)
    parity = Oracle(q, k, v, causal=True).check(out, lse)
    assert parity, parity.reason


@pytest.mark.parametrize("causal", (False, True))
def test_real_input_whole(causal):
    q, k, v = MINILM.make(CUDA)
    oracle = Oracle(q, k, v, causal=causal)
    before = None
    for rung in CLIMBED:
        out = rung.attention(q, k, v, causal=causal)
        assert oracle.check(out), f"{rung.name}: {oracle.check(out).reason}"
        assert before is None or oracle.agree(out, before), rung.name
        before = out


# Offsets past 2^31 elements: an int32 product of an index and a stride would wrap around.


def far_apart(x, dim, stride):
    """A view equal to ``x`` whose elements along ``dim`` lie ``stride`` apart in one buffer of NaN."""
    strides = list(x.contiguous().stride())
    strides[dim] = stride
    span = sum((n - 1) * s for n, s in zip(x.shape, strides)) + 1
    assert span > 1 << 31
    buffer = torch.full((span,), float("nan"), dtype=x.dtype, device=x.device)
    view = buffer.as_strided(x.shape, strides)
    view.copy_(x)
    return view


@pytest.mark.parametrize(
    "dim, stride", [(0, (1 << 31) + 64), (1, (1 << 30) + 16), (2, 1 << 25)], ids=["batch", "head", "row"]
)
@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_strides_past_2_to_31(which, dim, stride):
    tensors = list(AttentionProblem(B=2, Hq=3, Hkv=3, Sq=100, Sk=100, D=64, Dv=64, dtype="bfloat16").make(CUDA))
    oracle = Oracle(*tensors, causal=True)
    tensors[which] = far_apart(tensors[which], dim, stride)
    out, lse = find(5).attention(*tensors, causal=True, return_lse=True)
    parity = oracle.check(out, lse)
    assert parity, parity.reason


def test_more_than_2_to_31_outputs():
    Sq = 1 << 20
    q = torch.randn(1, 17, Sq, 128, dtype=torch.bfloat16, device=CUDA)
    assert q.numel() > 1 << 31
    k, v = (torch.randn(1, 1, 20, 128, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    out = find(5).attention(q, k, v)
    for head in (0, 16):  # the last head lies past 2^31 elements
        parity = Oracle(q[:, head : head + 1], k, v, sample_rows=256).check(out[:, head : head + 1])
        assert parity, f"head {head}: {parity.reason}"


def test_same_bits_on_100_runs():
    q, k, v = AttentionProblem(Hq=8, Hkv=2, Sq=1000, Sk=1500, D=128, Dv=128, causal=True, dtype="bfloat16").make(CUDA)
    first, first_lse = find(5).attention(q, k, v, causal=True, return_lse=True)
    for _ in range(100):
        out, lse = find(5).attention(q, k, v, causal=True, return_lse=True)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


def test_rows_do_not_depend_on_batch_mates():
    q, k, v = AttentionProblem(B=3, Hq=4, Hkv=4, Sq=300, Sk=300, D=64, Dv=64, dtype="bfloat16").make(CUDA)
    assert torch.equal(find(5).attention(q, k, v)[1:2], find(5).attention(q[1:2], k[1:2], v[1:2]))


def test_cuda_graph():
    """Captured once, replayed on other numbers in the same memory."""
    problem = AttentionProblem(Hq=8, Hkv=2, Sq=333, Sk=555, D=128, Dv=128, causal=True, dtype="bfloat16")
    static = problem.make(CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        find(5).attention(*static, causal=True, return_lse=True)  # compiles outside the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = find(5).attention(*static, causal=True, return_lse=True)
    for copy in (1, 2):
        fresh = problem.make(CUDA, copy=copy)
        for target, source in zip(static, fresh):
            target.copy_(source)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        eager, eager_lse = find(5).attention(*fresh, causal=True, return_lse=True)
        assert torch.equal(out, eager) and torch.equal(lse, eager_lse)


def test_no_synchronisation():
    q, k, v = AttentionProblem(Sq=256, Sk=256, dtype="bfloat16").make(CUDA)
    find(5).attention(q, k, v, causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        find(5).attention(q, k, v, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_current_stream():
    """The launch goes to the stream of the caller: it waits for what that stream does first."""
    q, k, v = AttentionProblem(Hq=4, Hkv=4, Sq=512, Sk=512, D=64, Dv=64, dtype="bfloat16").make(CUDA)
    expected = find(5).attention(q, k, v)
    late = torch.full_like(v, float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(v)
        out = find(5).attention(q, k, late)
    side.synchronize()
    assert torch.equal(out, expected)


def test_one_compile_for_all_lengths():
    kernel = importlib.import_module("ladder.step05_fused.kernel").fused_attention_forward

    def compiled():
        return sum(len(caches[0]) for caches in kernel.device_caches.values())

    def call(length):
        q, k, v = AttentionProblem(Hq=2, Hkv=2, Sq=length, Sk=length, D=64, Dv=64, dtype="bfloat16").make(CUDA)
        find(5).attention(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), causal=True)

    call(101)
    before = compiled()
    assert before > 0
    for length in (103, 355, 999, 1501):
        call(length)
    assert compiled() == before


def test_memory_is_the_output_alone():
    for length in (1024, 4096):
        problem = AttentionProblem(Sq=length, Sk=length, dtype="bfloat16")
        q, k, v = problem.make(CUDA)
        out = problem.Hq * length * 128 * 2
        assert out <= peak_bytes(lambda *qkv: find(5).attention(*qkv), q, k, v) <= out + (2 << 20)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu():
    q, k, v = AttentionProblem(Hq=2, Hkv=2, Sq=100, Sk=100, D=64, Dv=64, dtype="bfloat16").make("cuda:1")
    out = find(5).attention(q, k, v, causal=True)
    assert out.device == q.device and Oracle(q, k, v, causal=True).check(out)


def test_cpu_tensors_are_refused():
    q = torch.zeros(1, 1, 4, 16)
    with pytest.raises(ValueError, match="step05_fused: q is on cpu; want a CUDA tensor"):
        find(5).attention(q, q, q)


@pytest.mark.parametrize("name", MODELS)
def test_peers_agree(name):
    problem = MODELS[name].replace(dtype="bfloat16")
    q, k, v = problem.make(CUDA)
    oracle = Oracle(q, k, v, causal=problem.causal)
    if problem.causal and problem.Sq > problem.Sk:
        pytest.skip("peers differ on rows that see no key")
    found = peers.peers_for(problem, CUDA)
    assert found, "no peer runs here"
    for peer in found:
        try:
            out = peer.build(problem)(q, k, v)
        except RuntimeError as error:
            if "No available kernel" in str(error):
                continue  # this build of PyTorch lacks the backend for this shape, and says so
            raise
        parity = oracle.check(out)
        assert parity, f"{peer.name}: {parity.reason}"


def test_clock_sees_work_and_flushes_the_cache():
    x = torch.ones(1 << 22, device=CUDA)  # 16 MiB: fits the L2, so only the flush makes it come from memory
    cold = measure(lambda x: x.sum(), [(x,)], device=CUDA, budget_ms=50)
    warm = measure(lambda x: x.sum(), [(x,)], device=CUDA, budget_ms=50, flush=False)
    assert 0 < warm.median <= cold.median < 10
    small, large = (torch.randn(n, n, device=CUDA, dtype=torch.bfloat16) for n in (1024, 8192))
    short, long = (measure(torch.matmul, [(a, a)], device=CUDA, budget_ms=50).median for a in (small, large))
    assert long > 20 * short
