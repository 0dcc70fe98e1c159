"""The engine on a GPU: bfloat16 logits of every rung, captured decode, the experts' fast path, memory to the last page."""

import pytest
import torch
from support.engine_models import prompts

from ladder.engine import bench, layers
from ladder.engine.engine import Engine, SamplingParams
from ladder.engine.models import Spec
from ladder.engine.models.deepseek_v2 import DeepseekV2Config
from ladder.engine.models.tiny_moe import TinyMoEConfig

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

# Small, but with head sizes and widths that the fast kernels take.
TINY = Spec("tiny-moe", TinyMoEConfig(num_layers=2, context=1024), std=0.06)
MLA = Spec(
    "deepseek-v2-lite",
    DeepseekV2Config(num_layers=3, width=256, num_experts=16, top_k=4, expert_width=128, dense_width=512, vocab=1024, context=4096),
    seed=1, std=0.06,
)  # fmt: skip
SPECS = {"tiny-moe": TINY, "mla": MLA}


def logits_of(spec, backend, tokens, steps, dtype, **options):
    """Logits of the last prompt token and of ``steps`` forced decode steps, (steps + 1, vocab) float32."""
    engine = Engine(spec, backend, dtype=dtype, kv_tokens=2048, max_seqs=4, chunk_tokens=256, **options)
    captured = []
    prefill, decode = engine.runner.prefill, engine.runner.decode

    def keep_prefill(chunks):
        logits = prefill(chunks)
        if logits is not None:
            captured.append(logits[0].clone())
            logits = torch.nn.functional.one_hot(torch.tensor([7], device=logits.device), logits.shape[1]).float()
        return logits

    def keep_decode(requests):
        logits, greedy = decode(requests)
        captured.append(logits[0].clone())
        for graph in engine.runner.graphs.values():
            graph.next = None  # its next token is not the one that it left on the device
        return logits, torch.full_like(greedy, 7)  # the same continuation for everyone

    engine.runner.prefill, engine.runner.decode = keep_prefill, keep_decode
    engine.generate([tokens], SamplingParams(max_tokens=steps + 1))
    assert engine.pool.used == 0
    bench.release(engine)
    return torch.stack(captured).float()


@pytest.mark.parametrize("model", SPECS)
@pytest.mark.parametrize("backend", ("step01", "step02", "step03", "step04", "step05", "step06", "step07", "step08"))
def test_bfloat16_logits_are_within_the_budget(model, backend):
    """Error against float32 at most twice that of SDPA in bfloat16, prompt in chunks and decode."""
    spec, tokens = SPECS[model], prompts((600,), vocab=200)[0]
    exact = logits_of(spec, "sdpa", tokens, 3, torch.float32)
    usual = (logits_of(spec, "sdpa", tokens, 3, torch.bfloat16) - exact).norm()
    ours = (logits_of(spec, backend, tokens, 3, torch.bfloat16) - exact).norm()
    assert ours <= 2 * usual + 1e-3 * exact.norm(), (float(ours), float(usual))


@pytest.mark.parametrize("model", SPECS)
@pytest.mark.parametrize("backend", ("step07", "step08"))
def test_captured_decode_gives_the_eager_tokens(model, backend):
    """Eager decode, given each token of the captured one, would have chosen it too, but for near ties."""
    asked, steps = prompts((3, 130, 64, 300, 17), vocab=200), 70  # over a page's end, batches of 5
    engine = Engine(SPECS[model], backend, kv_tokens=4096, max_seqs=8)
    assert engine.runner.captures
    answers = engine.generate(asked, SamplingParams(max_tokens=steps))
    assert engine.runner.graphs
    bench.release(engine)

    engine = Engine(SPECS[model], backend, kv_tokens=4096, max_seqs=8, cuda_graphs=False)
    decode, same = engine.runner.decode, []

    def forced(requests):
        logits, greedy = decode(requests)
        told = torch.tensor([answers[r.id][len(r.output)] for r in requests], device=greedy.device)
        same.extend((greedy == told).tolist())
        return logits, told

    engine.runner.decode = forced
    again = engine.generate(asked, SamplingParams(max_tokens=steps))
    assert not engine.runner.graphs and [a[1:] for a in again] == [a[1:] for a in answers]
    assert [a[0] for a in again] == [a[0] for a in answers]  # the same prefill
    assert len(same) == 5 * (steps - 1) and sum(same) >= 0.95 * len(same), f"{sum(same)} of {len(same)}"  # another expert product turns near ties
    bench.release(engine)


@pytest.mark.parametrize("product", ("library", "streamed"))
@pytest.mark.parametrize("tokens", (1, 8, 100, 900))
def test_experts_fast_path(product, tokens):
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, device="cuda")  # noqa: E731
    x, gate_up, down = draw(tokens, 256), draw(18, 256, 256) * 0.06, draw(18, 256, 128) * 0.06
    weights, ids = draw(tokens, 16).softmax(-1).topk(4)
    want = layers.run_experts(x, ids, weights, gate_up, down, 2)
    with torch.inference_mode():
        got = layers.fast_experts(*(t.bfloat16() if t.is_floating_point() and t is not weights else t for t in (x, ids, weights, gate_up, down)), 2, product)
    assert (got.float() - want).norm() < 0.02 * want.norm()


def test_experts_in_halves_give_the_same(monkeypatch):
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x, gate_up, down, norm = draw(900, 256), draw(18, 256, 256) * 0.06, draw(18, 256, 128) * 0.06, draw(256)
    weights, ids = torch.rand(900, 16, generator=generator, device="cuda").topk(4)
    found = []
    for most in (1 << 17, 0):
        monkeypatch.setattr(layers, "MOST_ROWS", most)
        with torch.inference_mode():
            parts = layers.fast_experts(x, ids, weights, gate_up, down, 2, "library", later=True)
            assert (parts.behind is None) == (most > 0)
            found.append(parts.add_norm(x, norm, 1e-6))
    for whole, halves in zip(*found):
        torch.testing.assert_close(halves, whole, rtol=2e-2, atol=2e-2)


def test_a_prefill_launched_ahead_changes_no_answer():
    """Three steps of prompts in flight, then decode: the same tokens as one step at a time."""
    asked, answers = prompts([200] * 6, vocab=200), []
    for ahead in (True, False):
        engine = Engine(MLA, "step08", kv_tokens=4096, max_seqs=8, chunk_tokens=400, cuda_graphs=False)
        assert engine.looks_ahead
        engine.looks_ahead = ahead
        answers.append(engine.generate(asked, SamplingParams(max_tokens=8)))
        bench.release(engine)
    assert answers[0] == answers[1]


def test_preempted_requests_resume_on_the_gpu():
    engine = Engine(TINY, "step08", kv_tokens=64 * 20, max_len=1024, max_seqs=16, chunk_tokens=512)
    asked = prompts([100 + 37 * n for n in range(12)], vocab=200)
    events = list(engine.stream(asked, SamplingParams(max_tokens=200)))
    assert engine.scheduler.preemptions > 0 and engine.pool.used == 0
    assert len(events) == 12 * 200


@pytest.mark.parametrize("fraction", (0.5, 0.95))
def test_no_fraction_runs_out_of_memory(fraction):
    rows = bench.memory_table(MLA, "step08", input_len=900, output_len=64, fractions=(fraction,), requests=60, max_seqs=32)
    assert rows[0]["mixed_requests"] == 60
    total = torch.cuda.mem_get_info()[1]
    assert rows[0]["peak_bytes"] <= fraction * total
