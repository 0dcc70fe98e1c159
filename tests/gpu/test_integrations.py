"""The integrations in 16 bits on a GPU: FlashAttention's calls, Hugging Face models, compiled static-cache decode."""

import importlib

import pytest
import torch
from support.integration_checks import MASKS, check_dense, check_kvcache, check_varlen, make

from ladder.integrations import flash_attn as fa

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default", "error:dflash")]

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [
    (2, 6, 6, 1, 1, 64, 64), (2, 6, 2, 113, 203, 64, 64), (1, 6, 1, 239, 1, 128, 128), (2, 4, 2, 799, 3, 96, 96),
    (1, 8, 2, 1024, 1023, 128, 128), (1, 4, 4, 384, 256, 192, 128), (1, 4, 4, 256, 512, 64, 512), (1, 2, 1, 640, 128, 256, 256),
], ids=str)  # fmt: skip
def test_dense(shape, mask, dtype):
    check_dense(mask, shape, CUDA, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_varlen(mask, used, dims, dtype):
    check_varlen(mask, [300, 1, 0, 129, 64], [300, 511, 7, 0, 65], CUDA, dtype, used=used, heads=(6, 2), dims=dims)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("page_size", [None, 1, 4, 128])
@pytest.mark.parametrize("seqlen_q, new", [(1, 1), (3, 3), (16, 5), (64, 64)])
def test_kvcache(mask, page_size, seqlen_q, new, dtype):
    common = dict(page_size=page_size, capacity=512, heads=(6, 3), dims=(128, 128), lengths=(0, 339, 128))
    check_kvcache(mask, CUDA, dtype, seqlen_q=seqlen_q, **common)
    check_kvcache(mask, CUDA, dtype, seqlen_q=seqlen_q, seqlen_new=new, num_splits=3, **common)
    check_kvcache(mask, CUDA, dtype, seqlen_q=seqlen_q, seqlen_new=new, metadata=True, **common)


@pytest.mark.parametrize("mask", ["dense", "causal", "both"])
@pytest.mark.parametrize("page_size", [None, 1, 4, 128])
@pytest.mark.parametrize("batch_idx", [False, True])
@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("rotary", [None, (64, True), (128, False)], ids=str)
def test_kvcache_append(mask, page_size, batch_idx, leftpad, ragged, rotary):
    common = dict(page_size=page_size, capacity=384, heads=(6, 2), dims=(128, 128), lengths=(0, 200, 77))
    more = dict(batch_idx=batch_idx, leftpad=leftpad, ragged=ragged, rotary=rotary)
    for seqlen_q, new, num_splits in ((3, 3, 0), (70, 40, 1)):
        check_kvcache(mask, CUDA, torch.bfloat16, seqlen_q=seqlen_q, seqlen_new=new, num_splits=num_splits, **common, **more)


def test_kvcache_in_a_cuda_graph():
    """One step captured at length 1 and replayed at others: no call waits for the device."""
    dims = dict(device=CUDA, dtype=torch.bfloat16)
    q, k, v = make(2, 1, 8, 64, **dims), make(2, 1, 2, 64, **dims, seed=1), make(2, 1, 2, 64, **dims, seed=2)
    k_cache, v_cache = make(2, 2048, 2, 64, **dims, seed=3), make(2, 2048, 2, 64, **dims, seed=4)
    lengths = torch.ones(2, dtype=torch.int32, device=CUDA)

    def step():
        return fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for length in (1, 700, 2047):
        lengths.fill_(length)
        graph.replay()
        assert torch.equal(out, step())


def test_beside_flash_attention_3():
    """The same calls in both libraries, where FlashAttention-3 is installed."""
    try:
        theirs = importlib.import_module("flash_attn_interface")
    except Exception as error:
        pytest.skip(f"no FlashAttention-3: {error}")
    dims = dict(device=CUDA, dtype=torch.bfloat16)
    q, k, v = make(2, 300, 8, 128, **dims), make(2, 300, 2, 128, **dims, seed=1), make(2, 300, 2, 128, **dims, seed=2)
    for options in (dict(), dict(causal=True), dict(window_size=(40, 20)), dict(causal=True, softcap=10.0)):
        torch.testing.assert_close(fa.flash_attn_func(q, k, v, **options), theirs.flash_attn_func(q, k, v, **options), atol=2e-2, rtol=2e-2)
    lengths = torch.tensor([200, 17], dtype=torch.int32, device=CUDA)
    for options in (dict(causal=True), dict(window_size=(30, -1)), dict(cache_leftpad=lengths // 3, causal=True)):
        ours, other = (
            lib.flash_attn_with_kvcache(q[:, :2], k.clone(), v.clone(), k[:, :2], v[:, :2], cache_seqlens=lengths, **options)
            for lib in (fa, theirs)
        )
        torch.testing.assert_close(ours, other, atol=2e-2, rtol=2e-2)
    starts = torch.tensor([0, 300, 600], dtype=torch.int32, device=CUDA)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    both = [
        lib.flash_attn_varlen_func(*packed, starts, starts, 300, 300, seqused_k=lengths, causal=True, return_attn_probs=True)
        for lib in (fa, theirs)
    ]
    for ours, other in zip(*both, strict=True):
        torch.testing.assert_close(ours, other, atol=2e-2, rtol=2e-2)


def models():
    """The helpers of the CPU tests, if transformers is there."""
    pytest.importorskip("transformers", minversion="4.57")
    return importlib.import_module("integrations.test_transformers")


NAMES = ["Llama", "Qwen3Moe", "DeepseekV2", "Gemma2", "Gemma3Text", "GptOss"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_logits_in_bfloat16(name, side):
    """No further from float32 than twice transformers' own attention in bfloat16."""
    tests = models()
    mine, theirs = tests.build(name, CUDA, torch.bfloat16)
    pair = tests.build(name, CUDA, torch.float32)
    for model in pair:
        model.load_state_dict(mine.state_dict())  # the rounded weights
    exact = pair[1]
    mask = {None: torch.ones_like(tests.IDS), "left": tests.LEFT, "right": tests.RIGHT}[side].to(CUDA)
    inputs = dict(input_ids=tests.IDS.to(CUDA), attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    with torch.inference_mode():
        ours, eager, wanted = (model(**inputs).logits[mask.bool()].float() for model in (mine, theirs, exact))
    assert ours.isfinite().all()
    error, allowed = ((x - wanted).square().mean().sqrt() for x in (ours, eager))
    assert error <= 2 * allowed + 1e-3, f"rms error {error}, transformers' {allowed}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generate(name, padded, cache):
    """Greedy tokens in float32, through the portable kernels."""
    tests = models()
    pair = tests.build(name, CUDA, torch.float32)
    ids = tests.IDS.to(CUDA)
    mask = tests.LEFT.to(CUDA) if padded else torch.ones_like(ids)
    tokens = [
        model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, disable_compile=True, cache_implementation=cache
        ) for model in pair
    ]  # fmt: skip
    assert torch.equal(*tokens)


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text"])
@pytest.mark.parametrize("padded", [False, True])
def test_compiled_static_decode(name, padded):
    """generate() compiles the decode step of a static cache by itself: the same tokens as without."""
    tests = models()
    model, _ = tests.build(name, CUDA, torch.float32)
    ids = tests.IDS.to(CUDA)
    mask = tests.LEFT.to(CUDA) if padded else torch.ones_like(ids)
    tokens = [
        model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, cache_implementation="static",
            disable_compile=disable,
        ) for disable in (False, True)
    ]  # fmt: skip
    assert torch.equal(*tokens)
