"""What only a GPU can show of rung 08's decode: bfloat16, races, graphs, streams, memory."""

import importlib
import random

import pytest
import torch
from support.step08_checks import WINDOWS, WindowOracle, check_windows, hide, mla

from ladder.lab.decode_problem import DecodeOracle, DecodeProblem, PagedInputs
from ladder.lab.parity import poison
from ladder.step08_dflash2 import (
    DecodeWorkspace,
    decision,
    dflash2_decode,
    dflash2_mla_decode,
    get_decode_schedule,
)
from ladder.step08_dflash2.hopper import decode as hopper_decode
from ladder.step08_dflash2.windows import Range, RangeWindows

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CUDA = torch.device("cuda")
RAGGED = tuple(random.Random(3).randrange(1, 16385) for _ in range(64))
LATENT = dict(Hkv=1, D=576, Dv=512, latent=True, scale=192**-0.5)
PROBLEMS = {
    "one of 4k": DecodeProblem(),
    "one of 128k": DecodeProblem(context=131072),
    "eight of 4k": DecodeProblem(B=8),
    "64 of 4k": DecodeProblem(B=64),
    "ragged": DecodeProblem(B=64, lengths=RAGGED, max_context=16384),
    "splits to the nearest": DecodeProblem(Hkv=2, Hq=8, context=1920),
    "very long": DecodeProblem(B=16, lengths=(131072, *[1024] * 15), max_context=131072),
    "very long, 4 tokens": DecodeProblem(B=9, lengths=(100, 131072, *[100] * 7), max_context=131072, q_len=4),
    "12 of 3000": DecodeProblem(B=12, context=3000),
    "one long": DecodeProblem(B=33, lengths=(60000, *range(1, 33)), max_context=65536),
    "4 new tokens": DecodeProblem(B=8, lengths=RAGGED[:8], max_context=16384, q_len=4),
    "16 new tokens": DecodeProblem(B=3, lengths=(9, 5000, 16384), q_len=16),
    **{f"pages of {n}": DecodeProblem(B=5, lengths=(1, 4097, 63, 20000, 0), page_size=n, max_context=32768) for n in (1, 16, 48, 256)},
    **{f"d{d}": DecodeProblem(B=3, Hq=6, Hkv=2, D=d, Dv=d, lengths=(1, 3000, 77), max_context=4096) for d in (64, 72, 96, 192, 256)},
    **{f"group of {g}": DecodeProblem(B=3, Hq=2 * g, Hkv=2, lengths=(1, 3000, 77), max_context=4096) for g in (1, 3, 6, 7, 8, 40)},
    "MLA 16 heads": DecodeProblem(B=3, Hq=16, lengths=(5000, 1, 8191), max_context=8192, **LATENT),
    "MLA 16 heads, 2 tokens": DecodeProblem(B=3, Hq=16, q_len=2, lengths=(5000, 1, 8191), max_context=8192, **LATENT),
    "MLA 128 heads, splits to the nearest": DecodeProblem(B=3, Hq=128, context=2944, **LATENT),
    "MLA 128 heads": DecodeProblem(B=3, Hq=128, lengths=(5000, 1, 8191), max_context=8192, **LATENT),
}


@pytest.fixture(params=("chosen", "hopper"))
def kernel(request, monkeypatch):
    """The kernel that a call takes by itself, and sm_90's wherever it can."""
    if request.param == "hopper":
        monkeypatch.setattr(hopper_decode, "pays", lambda *_: True)
        monkeypatch.setattr(decision, "_decide_decode", decision._decide_decode.__wrapped__)
    return request.param


def call_of(p, inputs, lens=None):
    """(function, its tensors) for a problem."""
    lens = inputs.seq_lens if lens is None else lens
    if p.latent:
        return dflash2_mla_decode, (inputs.q, inputs.k_cache[:, :, 0], inputs.block_table, lens)
    return dflash2_decode, (*list(inputs)[:4], lens)


@pytest.mark.parametrize("splits", (None, 1, 7))
@pytest.mark.parametrize("name", PROBLEMS)
def test_at_size(name, splits, kernel):
    p = PROBLEMS[name]
    if kernel == "hopper" and (p.latent or p.D not in hopper_decode.STAGES or p.page_size & (p.page_size - 1)):
        pytest.skip("sm_90's kernel does not take it")
    inputs = p.make(CUDA)
    call, args = call_of(p, inputs)
    out, lse = call(*args, scale=p.scale, return_lse=True, num_kv_splits=splits)
    parity = DecodeOracle(inputs, scale=p.scale).check(out, lse)
    assert parity, parity.reason


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("q_len", (1, 4))
@pytest.mark.parametrize("windows", (None, RangeWindows.sink_window(128, 1000), RangeWindows([Range(0, -2, 4, 300)])), ids=str)
def test_windows_softcap_and_sinks_at_size(windows, q_len, dtype):
    p = DecodeProblem(B=4, lengths=(1, 900, 5000, 2100), q_len=q_len, dtype=dtype, max_context=8192)
    inputs = hide(p.make(CUDA), windows, 0)
    sinks = torch.randn(32, device=CUDA)
    for splits in (None, 5):
        check_windows(inputs, windows=windows, softcap=30.0, sinks=sinks, num_kv_splits=splits)


@pytest.mark.parametrize("heads", (16, 128))
def test_mla_windows_at_size(heads):
    p = DecodeProblem(B=3, Hq=heads, lengths=(1, 900, 5000), dtype="bfloat16", max_context=8192, **LATENT)
    windows = WINDOWS["sink 4, window 7"]
    check_windows(hide(p.make(CUDA), windows, 0), mla, scale=p.scale, windows=windows, sinks=torch.randn(heads, device=CUDA))


@pytest.mark.parametrize("name", ("one of 128k", "eight of 4k", "ragged", "16 new tokens", "MLA 16 heads", "MLA 128 heads"))
def test_same_bits_on_every_run(name, kernel):
    """Splits finish in another order every time; the merge adds them in theirs, and leaves the counters at zero."""
    p = PROBLEMS[name]
    inputs, workspace = p.make(CUDA), DecodeWorkspace(CUDA)
    call, args = call_of(p, inputs)
    first = call(*args, scale=p.scale, workspace=workspace)
    assert all(torch.equal(call(*args, scale=p.scale, workspace=workspace), first) for _ in range(100))
    assert not workspace.counters.any()


def test_a_fixed_number_of_splits_ignores_the_rest_of_the_batch(kernel):
    q, k, v, table, lens = PROBLEMS["ragged"].make(CUDA)
    together = dflash2_decode(q, k, v, table, lens, num_kv_splits=6)
    for b in range(0, 64, 9):
        alone = dflash2_decode(q[b : b + 1], k, v, table[b : b + 1], lens[b : b + 1], num_kv_splits=6)
        assert torch.equal(alone[0], together[b])


def test_a_schedule_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(hopper_decode, "pays", lambda *_: False)  # sm_90's kernel finds its own
    monkeypatch.setattr(decision, "_decide_decode", decision._decide_decode.__wrapped__)
    inputs = PROBLEMS["ragged"].make(CUDA)
    shape = dict(num_heads=32, num_kv_heads=8, head_dim=128, page_size=64, max_seq_len=16384)
    schedule = get_decode_schedule(inputs.seq_lens, **shape)
    assert torch.equal(dflash2_decode(*inputs, schedule=schedule), dflash2_decode(*inputs))
    get_decode_schedule(inputs.seq_lens // 3, **shape, out=schedule)
    assert DecodeOracle(inputs).check(dflash2_decode(*inputs, schedule=schedule))


def test_a_batch_of_thousands(kernel):
    lengths = tuple(random.Random(4).randrange(1, 400) for _ in range(3000))
    p = DecodeProblem(B=3000, Hq=4, Hkv=2, lengths=lengths, max_context=65536)
    inputs = p.make(CUDA)
    assert DecodeOracle(inputs, most_sequences=50).check(*dflash2_decode(*inputs, return_lse=True))


@pytest.mark.parametrize("heads", (0, 16, 128), ids=("GQA", "MLA 16", "MLA 128"))
@pytest.mark.parametrize("windows", (None, RangeWindows.sink_window(4, 1000)), ids=str)
def test_graph_captured_short_replayed_long(heads, windows, kernel):
    p = DecodeProblem(B=3, lengths=(32000, 1, 4097), max_context=32768, **(dict(Hq=heads, **LATENT) if heads else {}))
    inputs, workspace = p.make(CUDA), DecodeWorkspace(CUDA)
    lens, out = torch.ones_like(inputs.seq_lens), torch.empty(*inputs.q.shape[:3], p.Dv, dtype=inputs.q.dtype, device=CUDA)
    call, args = call_of(p, inputs, lens)

    def run():
        call(*args, scale=p.scale, windows=windows, out=out, workspace=workspace)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for lengths in (inputs.seq_lens, torch.ones_like(lens), inputs.seq_lens):
        lens.copy_(lengths)
        poison(out)
        graph.replay()
        now = PagedInputs(*list(inputs)[:4], lengths)
        if windows is None:
            assert DecodeOracle(now, scale=p.scale).check(out)
            continue
        for b in range(3):
            k, v = now.sequence(b)
            oracle = WindowOracle(now.q[b : b + 1].transpose(1, 2), k, v, right=0, windows=windows, scale=p.scale)
            assert oracle.check(out[b : b + 1].transpose(1, 2))


def test_no_synchronisation_and_no_memory():
    inputs, workspace = PROBLEMS["ragged"].make(CUDA), DecodeWorkspace(CUDA)
    options = dict(workspace=workspace, windows=RangeWindows.sink_window(4, 3000), sinks=torch.zeros(32, device=CUDA))
    out = dflash2_decode(*inputs, **options)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        dflash2_decode(*inputs, **options, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() == before


def test_loud_length():
    inputs = PROBLEMS["eight of 4k"].make(CUDA)
    inputs.seq_lens[2], inputs.seq_lens[5] = 4097, -1
    for splits in (None, 1, 5):
        out, lse = dflash2_decode(*inputs, return_lse=True, num_kv_splits=splits)
        wrong = torch.tensor([b in (2, 5) for b in range(8)], device=CUDA)
        assert out[wrong].isnan().all() and lse[wrong].isnan().all() and out[~wrong].isfinite().all()


def test_offsets_past_2_to_31():
    """Pages so far apart that an int32 product of page and stride wraps around."""
    p = DecodeProblem(B=2, Hq=4, Hkv=2, lengths=(200, 130), max_context=256)
    q, k, v, table, lens = p.make(CUDA)
    stride = (1 << 31) // 4 + 64

    def apart(x):
        buffer = torch.empty((x.shape[0] - 1) * stride + x[0].numel(), dtype=x.dtype, device=CUDA)
        return buffer.as_strided(x.shape, (stride, *x.stride()[1:])).copy_(x)

    far = apart(k), apart(v)
    inputs = PagedInputs(q, *far, table, lens)
    assert DecodeOracle(inputs).check(*dflash2_decode(*inputs, return_lse=True))


def test_current_stream():
    inputs, workspace = PROBLEMS["eight of 4k"].make(CUDA), DecodeWorkspace(CUDA)
    want = dflash2_decode(*inputs, workspace=workspace)
    late = torch.full_like(inputs.q, float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(inputs.q)
        out = dflash2_decode(late, *list(inputs)[1:], workspace=workspace)
    side.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("mode", (None, "reduce-overhead"))
def test_compile_whole(mode):
    inputs, workspace = PROBLEMS["ragged"].make(CUDA), DecodeWorkspace(CUDA)
    want = dflash2_decode(*inputs, workspace=workspace, windows=WINDOWS["sliding 17"])

    def block(q):
        return dflash2_decode(q * 1.0, *list(inputs)[1:], workspace=workspace, windows=WINDOWS["sliding 17"]) + 1

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, mode=mode)
    for _ in range(3):
        assert torch.equal(compiled(inputs.q), want + 1)


def test_one_compile_for_all_lengths():
    kernel = importlib.import_module("ladder.step08_dflash2.portable.decode_kernel").dflash2_decode

    def kinds():
        return sum(len(caches[0]) for caches in kernel.device_caches.values())

    inputs = DecodeProblem(B=6, lengths=(4096,) * 6, max_context=8192).make(CUDA)
    dflash2_decode(*inputs)
    before = kinds()
    for length in (1, 17, 1000, 4095):
        dflash2_decode(*list(inputs)[:4], torch.full_like(inputs.seq_lens, length))
    assert kinds() == before > 0
