"""The serving engine: the same answers from every backend, alone or in company, and memory that always comes back."""

import contextlib
import os
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.engine_models import MLA, SPECS, TINY, engine, greedy, prompts

from ladder.engine import backends
from ladder.engine.engine import Engine, SamplingParams
from ladder.engine.layers import HostCopy
from ladder.engine.models import Spec, find

REQUESTS = int(os.environ.get("LADDER_ENGINE_REQUESTS", "100"))  # 1,000 take a few minutes


@pytest.fixture(scope="module")
def expected():
    """Greedy answers of the yardstick, SDPA, to prompts of several lengths."""
    found = {}
    for name, spec in SPECS.items():
        asked = prompts((1, 5, 33, 70))
        found[name] = asked, [engine(spec).generate([p], greedy(6))[0] for p in asked]
    return found


@pytest.mark.parametrize("model", SPECS)
def test_answers_are_not_trivial(expected, model):
    _, answers = expected[model]
    assert len({token for answer in answers for token in answer}) >= 6


@pytest.mark.parametrize("model", SPECS)
@pytest.mark.parametrize("backend", ("step01", "step02", "step03", "step04"))
def test_the_same_tokens_from_every_rung(expected, model, backend):
    asked, answers = expected[model]
    served = engine(SPECS[model], backend)
    assert served.generate(asked, greedy(6)) == answers
    assert served.pool.used == 0


@pytest.mark.parametrize("model", SPECS)
@pytest.mark.parametrize("backend", ("step05", "step06", "step07", "step08"))
def test_the_same_tokens_from_the_interpreter(expected, model, backend):
    """A chunked prompt and a decode step: what an interpreter can do in a second or two."""
    asked, answers = expected[model]
    served = engine(SPECS[model], backend, chunk_tokens=3)
    for part in served.runner.cache.parts:  # what nobody owns, and the rest of a last page, must never reach an answer
        part.fill_(float("nan"))
    assert served.generate([asked[1]], greedy(2)) == [answers[1][:2]]
    assert served.steps == {"prefill": 2, "decode": 1}


@pytest.mark.parametrize("model", SPECS)
@pytest.mark.parametrize("chunk", (1, 7, 64))
def test_chunks_of_any_size(expected, model, chunk):
    asked, answers = expected[model]
    assert engine(SPECS[model], "step04", chunk_tokens=chunk).generate(asked[1:], greedy(6)) == answers[1:]


@pytest.mark.parametrize(("model", "ahead"), [(name, ahead) for name in SPECS for ahead in (False, True)])
def test_in_company_as_alone(model, ahead):
    """Random lengths, temperatures, cancellations and a pool so small that requests are preempted: every answer is the
    one computed alone, and every page comes back."""
    spec, generator = SPECS[model], random.Random(7)
    served = engine(spec, max_seqs=6, page_size=4, kv_tokens=4 * 40, max_len=96, chunk_tokens=48, decode_every=2)
    served.looks_ahead = ahead
    alone = engine(spec, max_seqs=1, max_len=96)
    asked, numbers, cancelled = [], {}, set()
    for _ in range(REQUESTS // len(SPECS)):
        length, new = generator.randint(1, 60), generator.randint(1, 36)
        params = SamplingParams(new, generator.choice((0.0, 0.0, 0.9)), generator.choice((1.0, 0.8)), generator.randrange(1 << 30))
        asked.append((prompts((length,), seed=generator.random())[0], params))
    for prompt, params in asked:
        numbers[served.submit(prompt, params)] = (prompt, params)
        if generator.random() < 0.7:
            for event in served.step():
                assert event.token is None or event.token == served.requests[event.request].output[-1]
        if generator.random() < 0.15:
            victim = generator.choice(list(numbers))
            if served.requests[victim].finished is None:
                cancelled.add(victim)
            served.cancel(victim)
    while served.busy:
        served.step()
    assert served.scheduler.preemptions > 0 and cancelled
    assert served.pool.used == 0 and served.pool.free == 40 and len(set(served.pool._free)) == 40
    for number, (prompt, params) in numbers.items():
        request = served.requests[number]
        assert request.finished == ("cancelled" if number in cancelled else "length")
        if number not in cancelled or request.output:
            want = alone.generate([prompt], params)[0]
            assert request.output == want[: len(request.output)], number
            assert number in cancelled or len(request.output) == params.max_tokens


def test_pages_hold_every_token_once():
    """While it runs, no page has two owners and nobody holds page 0."""
    served = engine(TINY, max_seqs=5, kv_tokens=16 * 9, max_len=80)
    for prompt in prompts((40, 3, 25, 60, 17, 9), seed=3):
        served.submit(prompt, greedy(18))
    while served.busy:
        served.step()
        held = Counter(page for r in served.requests.values() for page in r.pages)
        assert not held or max(held.values()) == 1 and 0 not in held
        assert len(held) == served.pool.used
        assert all(len(r.pages) * 16 >= r.computed for r in served.scheduler.running)


def test_unused_pages_never_reach_an_answer(expected):
    """NaN in every page that nobody owns, and in the rest of the last one."""
    for model, spec in SPECS.items():
        asked, answers = expected[model]
        for backend in ("sdpa", "step04"):
            served = engine(spec, backend)
            for part in served.runner.cache.parts:
                part.fill_(float("nan"))
            assert served.generate([asked[1]], greedy(6)) == [answers[1]], (model, backend)


def test_streaming_stops_and_closes():
    served = engine(TINY)
    asked = prompts((5, 9))
    answers = served.generate(asked, greedy(8))
    stop = answers[0][3]
    cut = answers[0].index(stop) + 1
    events = list(served.stream(asked, [SamplingParams(8, stop=(stop,)), greedy(8)]))
    first = min(e.request for e in events)
    mine = [e for e in events if e.request == first]
    assert [e.token for e in mine] == answers[0][:cut] and mine[-1].finished == "stop"
    assert [e.finished for e in mine[:-1]] == [None] * (cut - 1)
    stream = served.stream(asked, greedy(8))
    next(stream)
    stream.close()  # the reader went away: both requests are cancelled
    assert not served.scheduler.busy and served.pool.used == 0


def test_a_request_is_cancelled_while_its_prompt_is_computed_ahead():
    """Its pages go to others at once, and the token that is on its way is nobody's."""
    served = engine(TINY, page_size=4, kv_tokens=4 * 8, max_len=16, chunk_tokens=4)
    served.looks_ahead = True
    asked = prompts((4, 4, 12))
    for prompt in asked[:2]:
        served.submit(prompt, greedy(4))
    assert [e.request for e in served.step()] == [0] and served._ahead[0] == [served.requests[1]]
    served.cancel(1)
    third = served.submit(asked[2], greedy(4))
    events = [e for _ in range(20) for e in served.step()]
    assert [(e.token, e.finished) for e in events if e.request == 1] == [(None, "cancelled")]
    assert served.requests[1].output == [] and served.pool.used == 0
    assert [e.token for e in events if e.request == third] == engine(TINY).generate(asked[2:], greedy(4))[0]


def test_streams_may_be_read_in_turns():
    """Each stream yields its own requests' events, all of them, whoever ran the steps; a request of nobody's goes to who asks."""
    asked = prompts((5, 9, 4))
    answers = engine(TINY).generate(asked, greedy(8))
    served = engine(TINY)
    one, two = served.stream(asked[:1], greedy(8)), served.stream(asked[1:2], greedy(8))
    seen = [next(one)], [next(two)]
    assert served.generate(asked[2:], greedy(8)) == answers[2:]  # runs the others to their end, too
    seen[0].append(next(one))
    seen[1].extend(two)
    seen[0].extend(one)
    for n, events in enumerate(seen):
        assert [e.token for e in events] == answers[n] and {e.request for e in events} == {n}
        assert [e.finished for e in events] == [None] * 7 + ["length"]
    assert not served._inboxes and not served.busy and served.pool.used == 0
    alone = served.submit(asked[0], greedy(8))
    assert served.generate(asked[2:], greedy(2)) == [answers[2][:2]]  # what happens to the other meanwhile is told later
    stream = served.stream(asked[1:2], greedy(8))
    events = [next(stream) for _ in range(3)]
    events += [e for _ in range(20) for e in served.step()]  # not the stream's, which wait for it
    assert [e.token for e in events if e.request == alone] == answers[0]
    assert [e.token for e in (*events, *stream) if e.request != alone] == answers[1]


def test_a_stream_that_is_refused_leaves_nothing():
    served = engine(TINY)
    for asked, params, message in (([[1, 2], []], greedy(3), "empty"), ([[1], [2]], [greedy(3)], "1 params for 2 prompts")):
        with pytest.raises(ValueError, match=message):
            served.generate(asked, params)
        assert not served.busy and not served._inboxes
    assert served.generate(iter([[1, 2], [3]]), (greedy(3), greedy(2))) == engine(TINY).generate([[1, 2], [3]], [greedy(3), greedy(2)])


def test_an_answer_that_was_read_may_be_forgotten():
    served = engine(TINY)
    (answer,) = served.generate(prompts((5,)), greedy(3))
    assert served.forget(0).output == answer and not served.requests
    number = served.submit([1, 2], greedy(3))
    with pytest.raises(ValueError, match="request 1 has not ended"):
        served.forget(number)
    served.cancel(number)
    served.forget(number)
    assert [e.finished for e in served.step()] == ["cancelled"]
    with pytest.raises(ValueError, match="no request 1"):
        served.forget(number)
    assert served.generate(prompts((5,)), greedy(3)) == [answer]


def test_a_call_that_fails_keeps_what_it_saw_of_others(monkeypatch):
    """``generate`` reads the events of requests that others submitted; after an error they are still there to be told."""
    served = engine(TINY)
    number = served.submit([1, 2], greedy(6))
    real, calls = served.runner.decode, []

    def decode(requests):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        return real(requests)

    monkeypatch.setattr(served.runner, "decode", decode)
    with pytest.raises(RuntimeError, match="out of memory"):
        served.generate([[3, 4, 5]], greedy(9))
    seen = []
    while served.busy:
        seen += [event.token for event in served.step() if event.request == number]
    assert seen == engine(TINY).generate([[1, 2]], greedy(6))[0]


@pytest.mark.parametrize("backend", ("sdpa", "step04", "step08"))
@pytest.mark.parametrize("model", SPECS)
def test_autocast_around_it_changes_nothing(model, backend, monkeypatch):
    """A float32 engine computes in float32 inside ``torch.autocast``: the same logits, bit for bit, of prefills and decodes."""
    asked, seen = prompts((5, 50, 1)), []
    for around in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        served = engine(SPECS[model], backend)
        for name, pick in (("prefill", lambda found: found), ("decode", lambda found: found[0])):
            def record(*args, real=getattr(served.runner, name), pick=pick):
                found = real(*args)
                logits.append(pick(found))
                return found

            monkeypatch.setattr(served.runner, name, record)
        logits = []
        with around:
            answers = served.generate(asked, greedy(4))
            answers.append([event.token for event in served.stream(asked, SamplingParams(4, 0.8, 0.9))])
        seen.append((answers, [x for x in logits if x is not None]))
        assert served.steps["prefill"] > 2 and served.steps["decode"] > 2
    assert seen[0][0] == seen[1][0] and len(seen[0][1]) == len(seen[1][1]) > 4
    for ours, theirs in zip(*(logits for _, logits in seen)):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs)


@pytest.mark.parametrize("ahead", (False, True))
@pytest.mark.parametrize("place", ("prefill", "decode", "sample", "read"))
def test_a_step_that_fails_costs_no_answer(ahead, place, monkeypatch):
    """An exception anywhere in a step (no memory, Ctrl-C): the next steps compute again what nobody got, and no page is lost."""
    from ladder.engine import engine as module

    asked = prompts((5, 40, 1, 18))
    params = [SamplingParams(12, temperature=t, seed=n) for n, t in enumerate((0.0, 0.7, 0.0, 0.7))]
    want = engine(TINY).generate(asked, params)
    served = engine(TINY, page_size=4, kv_tokens=4 * 26, max_len=80, chunk_tokens=16)
    served.looks_ahead = ahead
    generator, failed = random.Random(3), []

    def failing(real):
        def run(*arguments):
            if generator.random() < 0.4:
                failed.append(1)
                raise KeyboardInterrupt if len(failed) % 2 else RuntimeError("out of memory")
            return real(*arguments)

        return run

    class Unread(HostCopy):
        def __init__(self, copied):
            self.host, self.tolist = copied.wait() if isinstance(copied, HostCopy) else copied.tolist(), self.wait

        def wait(self):
            return failing(lambda: self.host)()

    if place in ("prefill", "decode"):
        monkeypatch.setattr(served.runner, place, failing(getattr(served.runner, place)))
    elif place == "sample":
        monkeypatch.setattr(module, "sample", failing(module.sample))
    else:
        real = served._launch

        def launch(step):
            found = real(step)
            return found if found is None or not found[0] else (found[0], Unread(found[1]), found[2])

        monkeypatch.setattr(served, "_launch", launch)
    numbers = [served.submit(prompt, p) for prompt, p in zip(asked, params)]
    seen = {number: [] for number in numbers}
    for _ in range(2000):
        if not served.busy:
            break
        try:
            for event in served.step():
                seen[event.request].append(event.token)
        except (KeyboardInterrupt, RuntimeError):
            pass
    assert len(failed) > 1 and not served.busy and served.pool.used == 0
    assert [seen[n] for n in numbers] == [served.requests[n].output for n in numbers] == want


@pytest.mark.parametrize("ahead", (False, True))
def test_prompts_do_not_starve_decodes(ahead):
    """With long prompts waiting, a running answer gets a token at least every ``decode_every`` + 1 steps."""
    served = engine(TINY, decode_every=2, chunk_tokens=16, max_seqs=8, kv_tokens=2048)
    served.looks_ahead = ahead
    first = served.submit(prompts((4,))[0], greedy(20))
    served.step()
    for prompt in prompts((200, 200, 200)):
        served.submit(prompt, greedy(2))
    without = 0
    while served.requests[first].finished is None:
        without = 0 if any(e.request == first for e in served.step()) else without + 1
        assert without <= 2


class Replayed:
    """Stands for a captured graph on a CPU: a replay runs the same forward again, into the same tensors."""

    def __init__(self, decode_graph):
        self.decode_graph = decode_graph
        self.outputs = decode_graph.forward()

    def replay(self):
        for kept, new in zip(self.outputs, self.decode_graph.forward()):
            kept.copy_(new)


def replays(served):
    """Decode of ``served`` as captured graphs do it."""
    paged = GatheredOnTheDevice(served.backend)
    served.backend = served.runner.backend = served.runner.context.backend = paged
    served.runner.captures = True
    return served


def capture(self, device):
    graph = Replayed(self)
    return graph, *graph.outputs


@pytest.mark.parametrize("model", SPECS)
def test_replayed_decode_pads_and_follows_pages(model, monkeypatch):
    """What a captured decode does with its buffers: padding rows, pages that grow, requests that come, go and are preempted."""

    monkeypatch.setattr("ladder.engine.runner.DecodeGraph.capture", capture)
    asked = prompts((3, 20, 9, 31, 14), seed=5)
    alone = [engine(SPECS[model]).generate([p], greedy(20 - 3 * n))[0] for n, p in enumerate(asked)]
    served = replays(engine(SPECS[model], "step04", page_size=4, kv_tokens=4 * 24, max_len=64, max_seqs=5))
    assert served.generate(asked, [greedy(20 - 3 * n) for n in range(5)]) == alone
    assert set(served.runner.graphs) >= {1, 2, 4} and served.scheduler.preemptions > 0
    for part in served.runner.cache.parts:
        assert not part[:, 0].isnan().any()


def test_a_replay_that_fails_leaves_no_state_to_go_on_from(monkeypatch):
    """The token that the failed replay should have made comes from a larger graph; the small one is then a token behind."""
    monkeypatch.setattr("ladder.engine.runner.DecodeGraph.capture", capture)
    served = replays(engine(TINY, "step04"))
    number = served.submit([1, 2, 3], greedy(12))
    for _ in range(4):
        served.step()

    def replay():
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(served.runner.graphs[1].graph, "replay", replay)
        with pytest.raises(RuntimeError, match="out of memory"):
            served.step()
    served.submit([4, 5], greedy(2))
    while served.busy:
        served.step()
    assert set(served.runner.graphs) == {1, 2}
    assert served.requests[number].output == engine(TINY).generate([[1, 2, 3]], greedy(12))[0]


class Corrected:
    """Another rank whose tokens count, and which chose otherwise now and then."""

    def __init__(self):
        self.calls = 0

    @torch.inference_mode()
    def agree(self, tokens):
        self.calls += 1
        if self.calls % 3 == 0:
            tokens.copy_((tokens + 1) % 96)


def test_a_replay_goes_on_from_the_tokens_that_ranks_agreed_on(monkeypatch):
    monkeypatch.setattr("ladder.engine.runner.DecodeGraph.capture", capture)
    asked, found = prompts((3, 20, 9)), []
    for prepare in (lambda served: served, replays):
        served = prepare(engine(TINY, "step04"))
        served.parallel = Corrected()
        found.append(served.generate(asked, greedy(12)))
    assert found[0] == found[1] != engine(TINY, "step04").generate(asked, greedy(12))


class GatheredOnTheDevice(backends.Backend):
    """Decode from the tensors alone, as a captured graph must: no lengths from the host."""

    name, gathers, absorbs, captures = "test", False, True, True

    def __init__(self, dense):
        self.dense = dense

    def _decode(self, q, k_cache, v_cache, batch, scale):
        assert batch.lengths is None and batch.key_slots is None
        out = []
        for row, (table, length) in enumerate(zip(batch.block_table, batch.seq_lens.tolist())):
            k, v = (x[table.long()].flatten(0, 1)[:length] for x in (k_cache, v_cache))
            out.append(self.dense._one(q[row : row + 1], k, v, scale))
        return torch.cat(out)

    def decode(self, q, k_cache, v_cache, batch, scale):
        return self._decode(q, k_cache, v_cache, batch, scale)

    def mla_decode(self, q, latents, batch, scale, value_dim):
        k = latents[:, :, None]
        return self._decode(q, k, k[..., :value_dim], batch, scale)

    def prefill(self, q, k_cache, v_cache, batch, scale):
        k, v = (x.flatten(0, 1)[batch.key_slots] for x in (k_cache, v_cache))
        return self.dense.varlen(q, k, v, batch, scale)

    def varlen(self, *arguments):
        return self.dense.varlen(*arguments)


# Errors come before memory does


class Heavy(Spec):
    """A spec that must not be loaded."""

    def load(self, *args):
        raise AssertionError("loaded")


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (dict(backend="flash9"), "backend is 'flash9'; want one of sdpa, step01"),
        (dict(backend="step09"), "backend is 'step09'"),
        (dict(mem_fraction=1.5), "mem_fraction is 1.5"),
        (dict(mem_fraction=1e-9), "needs .* GiB for weights"),
        (dict(kv_tokens=1 << 45), "GiB for the KV pool"),
        (dict(max_len=4096), "max_len is 4096; want at most 256, the context"),
        (dict(chunk_tokens=0), "chunk_tokens is 0"),
        (dict(kv_tokens=0), "kv_tokens is 0; want an integer of at least 1"),
        (dict(max_len=0), "max_len is 0; want an integer of at least 1"),
        (dict(windows=object()), "range windows arrive with step08"),
        (dict(windows=3, backend="step08"), "windows is 3; want RangeWindows"),
        (dict(mem_fraction=None), "mem_fraction is None; want a number above 0, at most 1"),
        (dict(mem_fraction="0.9"), "mem_fraction is '0.9'; want a number"),
        (dict(kv_tokens=16.0), "kv_tokens is 16.0; want an integer of at least 1, or None"),
        (dict(max_len="9"), "max_len is '9'; want an integer"),
        (dict(max_seqs=None), "max_seqs is None; want an integer of at least 1"),
        (dict(chunk_keys=True), "chunk_keys is True; want an integer"),
        (dict(decode_every=1.5), "decode_every is 1.5; want an integer"),
        (dict(page_size=[16]), r"page_size is \[16\]; want an integer"),
        (dict(cuda_graphs=None), "cuda_graphs is None; want True or False"),
        (dict(device="gpu"), "device is 'gpu'; want .*cpu"),
        (dict(device=2.5), "device is 2.5; want .*cpu"),
        (dict(device="meta"), "device is 'meta'; want .*cpu"),
        (dict(dtype="float32"), "dtype is 'float32'; want torch.float16"),
        (dict(dtype=torch.int8), "dtype is torch.int8; want torch.float16"),
        (dict(log="file"), "log is 'file'; want a function"),
        (dict(progress=3), "progress is 3; want a function"),
        (dict(spec="tiny-moe"), "spec is 'tiny-moe'; want a Spec"),
    ),
)
def test_errors_before_anything_is_allocated(options, message):
    heavy = Heavy(TINY.name, TINY.config)
    with pytest.raises((TypeError, ValueError), match=message):
        Engine(**{"spec": heavy, "backend": "sdpa", "device": "cpu", **options})


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (lambda: Spec("tiny-moe", None), "config is a NoneType; want a DeepseekV2Config or TinyMoEConfig"),
        (lambda: Spec("tiny-moe", TINY.config, 3), "source is 3; want the path"),
        (lambda: Spec("tiny-moe", TINY.config, seed=None), "seed is None; want an integer"),
        (lambda: Spec("tiny-moe", TINY.config, std="0.02"), "std is '0.02'; want a number"),
        (lambda: Spec("tiny-moe", TINY.config, router_bias=[[0.0]]), r"router_bias has shape \(1, 1\); want \(2, 4\)"),
        (lambda: replace(TINY.config, width=32.0), "tiny-moe: width is 32.0; want an integer of at least 1"),
        (lambda: replace(TINY.config, eps=None), "tiny-moe: eps is None; want a number above 0"),
        (lambda: replace(TINY.config, renormalize=1), "tiny-moe: renormalize is 1; want True or False"),
        (lambda: replace(MLA.config, routed_scale="1"), "routed_scale .*is '1'; want a number above 0"),
    ),
)
def test_a_model_that_cannot_be_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_the_whole_model_does_not_fit_here_and_says_so(monkeypatch):
    monkeypatch.setattr("ladder.engine.memory.device_memory", lambda device: (24 << 30, 0))
    spec = find("deepseek-v2-lite")
    assert abs(spec.parameters / 15.7e9 - 1) < 0.01
    assert spec.token_bytes(torch.bfloat16) == 576 * 27 * 2
    with pytest.raises(ValueError, match=r"needs 29\.\d\d GiB for weights"):
        Engine(spec, "step04", device="cpu", dtype=torch.bfloat16, max_len=4096)


def test_triton_rungs_say_that_the_cpu_is_too_slow(monkeypatch):
    monkeypatch.setattr("ladder.lab.interpret.is_enabled", lambda: False)
    for backend in ("step05", "step06", "step07"):
        with pytest.raises(ValueError, match="no path on the CPU but Triton's interpreter"):
            engine(TINY, backend)
    backends.make("step08", "cpu").check(torch.device("cpu"), torch.float32)  # has its eager path


def test_requests_are_refused_by_name():
    served = engine(TINY, kv_tokens=64)
    for prompt, params, message in (
        ([], greedy(1), "prompt is empty"),
        ([1, 256], greedy(1), "token 256; want 0 .. 255"),
        ([1, -1], greedy(1), "token -1; want 0 .. 255"),
        ([1, float("nan")], greedy(1), "holds nan; want token ids"),
        ([1.5], greedy(1), "holds 1.5; want token ids"),
        ("ab", greedy(1), "holds 'a'; want token ids"),
        ([1] * 60, greedy(5), "60 prompt tokens and 5 to generate are 65; want at most 64"),
    ):
        with pytest.raises(ValueError, match=message):
            served.submit(prompt, params)
    for call, message in (
        (lambda: served.submit(None), "prompt is None; want a list of token ids"),
        (lambda: served.generate([1, 2]), "prompt is 1; want a list of token ids"),
        (lambda: served.generate(3), "prompts is 3; want a list of prompts"),
        (lambda: list(served.stream(None)), "prompts is None; want a list of prompts"),
        (lambda: served.submit([1], None), "params is None; want SamplingParams"),
        (lambda: served.generate([[1], [2]], [greedy(1), 5]), "params is 5; want SamplingParams"),
        (lambda: served.cancel("a"), "number is 'a'; want an integer"),
        (lambda: served.forget([1]), r"number is \[1\]; want an integer"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(ValueError, match="no request 5"):
        served.cancel(5)
    assert not served.busy and not served._inboxes


def test_the_log_names_the_backend_and_the_pool():
    lines = []
    served = engine(TINY, "step04", log=lines.append)
    text = "\n".join(lines)
    assert "attention backend step04_gqa" in text
    assert f"KV pool 1,024 tokens in 64 pages of 16, {served.runner.cache.nbytes:,} bytes" in text
    assert served.runner.cache.nbytes == 65 * 16 * TINY.token_bytes(torch.float32)


def test_mla_caches_one_row_a_token():
    assert [tuple(p.shape) for p in engine(MLA).runner.cache.parts] == [(2, 65, 16, 48)]
