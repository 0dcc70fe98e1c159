"""The engine's books under random sequences of operations: requests, steps, cancellations, streams that are read in turns or left,
steps that fail. A model made of a hash stands for the real one, and a cache that knows whose token lies in every slot.
"""

import os
import random

import pytest
import torch
from support.engine_models import TINY, engine

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from ladder.engine.engine import Engine, SamplingParams  # noqa: E402
from ladder.engine.sampling import sample  # noqa: E402

VOCAB = 256


def logits_after(tokens):
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(hash(tuple(tokens)) & 0xFFFFFFFF)) * 3


def alone(prompt, params):
    """The answer, and why it ends."""
    tokens = list(prompt)
    while True:
        tokens += sample(logits_after(tokens), [params], [len(tokens)]).tolist()
        if tokens[-1] in params.stop:
            return tokens[len(prompt) :], "stop"
        if len(tokens) - len(prompt) == params.max_tokens:
            return tokens[len(prompt) :], "length"


class Broken(RuntimeError):
    pass


class HashRunner:
    """Computes nothing, and checks that every key which a token looks at is the one that was stored for it."""

    def __init__(self, served):
        self.served, self.size = served, served.pool.page_size
        self.slots = {}  # (page, place) -> (request, position, token)
        self.idle = 0
        self.fails = None  # "before" a step runs, "after", or when it is "launched"

    def store(self, request, count):
        end = request.computed + count
        tokens = request.tokens(0, end)
        assert len(tokens) == end <= len(request.pages) * self.size and len(request.pages) <= -(-request.length // self.size)
        at = [(request.pages[p // self.size], p % self.size) for p in range(end)]
        assert all(page > 0 for page, _ in at)
        for position in range(request.computed, end):
            self.slots[at[position]] = request.id, position, tokens[position]
        for position in range(end):
            assert self.slots[at[position]] == (request.id, position, tokens[position])
        return logits_after(tokens)

    def prefill(self, chunks):
        if self.fails == "before":
            raise Broken
        scheduler, news = self.served.scheduler, [n for _, n in chunks]
        assert 0 < sum(news) <= scheduler.chunk_tokens and min(news) > 0
        assert len(chunks) == 1 or sum(r.computed + n for r, n in chunks) <= scheduler.chunk_keys
        rows = [self.store(r, n) for r, n in chunks]
        if self.fails == "after":
            raise Broken
        rows = [row for row, (r, n) in zip(rows, chunks) if r.computed + n == r.length]
        return torch.cat(rows) if rows else None

    def launch(self, step):
        self.idle = 0 if step else self.idle + 1
        assert self.idle < 20  # requests that no step takes up
        found = Engine._launch(self.served, step)
        if found and self.fails == "launched":
            raise Broken
        return found

    def decode(self, requests):
        if self.fails == "before":
            raise Broken
        logits = torch.cat([self.store(r, 1) for r in requests])
        if self.fails == "after":
            raise Broken
        return logits, logits.argmax(dim=-1)


def check(served):
    scheduler, pool = served.scheduler, served.pool
    held = [page for r in served.requests.values() for page in r.pages]
    assert len(set(held)) == len(held) == pool.used and 0 not in held
    assert sorted(held + pool._free) == list(range(1, pool.num_pages))
    assert len(scheduler.running) <= scheduler.max_seqs
    assert all(r.pages and r.finished is None and r.computed <= r.length for r in scheduler.running)
    assert all(not r.pages and not r.computed and r.finished is None for r in scheduler.waiting)


OPTIONS = st.fixed_dictionaries(
    dict(max_seqs=st.integers(1, 5), page_size=st.sampled_from((1, 2, 3, 8)), kv_tokens=st.integers(12, 60), chunk_tokens=st.integers(1, 20),
         chunk_keys=st.integers(1, 40), decode_every=st.integers(1, 4))
)  # fmt: skip


@settings(max_examples=int(os.environ.get("LADDER_ENGINE_EXAMPLES", "40")), deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
@given(OPTIONS, st.booleans(), st.integers(0, 1 << 30))
def test_any_sequence_of_operations(options, ahead, seed):
    generator = random.Random(seed)
    served = engine(TINY, **options)
    served.looks_ahead, served.runner = ahead, HashRunner(served)
    served._launch = served.runner.launch
    want, got, ended, streams, cancelled, left = {}, {}, {}, {}, set(), set()  # left: of streams that were not read to their end

    def ask():
        new = generator.randint(1, min(10, served.max_len - 1))
        prompt = [generator.randrange(VOCAB) for _ in range(generator.randint(1, served.max_len - new))]
        stop = tuple(generator.sample(range(VOCAB), generator.choice((0, 0, 8, 60))))
        return prompt, SamplingParams(new, generator.choice((0.0, 0.0, 0.8)), generator.choice((1.0, 0.7)), generator.randrange(1 << 20), stop)

    def read(events, own=None):
        for event in events:
            assert event.request not in ended
            assert own is None or event.request in own or event.request not in streamed
            if event.token is not None:
                got[event.request].append(event.token)
            if event.finished:
                ended[event.request] = event.finished

    streamed = set()

    def submitted(number, pair):
        want[number], got[number] = pair, []

    def turn(own, stream):
        """The next event of a stream, for it was submitted when it was first read."""
        try:
            read([next(stream)], own)
        except StopIteration:
            del streams[own]
            assert own <= set(ended)

    for _ in range(generator.randint(5, 60)):
        action = generator.random()
        served.runner.fails = generator.choice(("before", "after", "launched")) if generator.random() < 0.05 else None
        try:
            if action < 0.25:
                pair = ask()
                submitted(served.submit(*pair), pair)
            elif action < 0.35:
                pairs = [ask() for _ in range(generator.randint(1, 3))]
                own = frozenset(range(served._submitted, served._submitted + len(pairs)))
                for number, pair in zip(sorted(own), pairs):
                    submitted(number, pair)
                streamed |= own
                stream = served.stream([p for p, _ in pairs], [s for _, s in pairs])
                streams[own] = stream
                turn(own, stream)
            elif action < 0.6 and streams:
                own = generator.choice(list(streams))
                turn(own, streams[own])
            elif action < 0.65 and streams:
                own = generator.choice(list(streams))
                streams.pop(own).close()
                left |= own
            elif action < 0.75 and want:
                number = generator.choice(list(want)[-3:])
                if served.requests[number].finished is None:
                    cancelled.add(number)
                served.cancel(number)
            elif not streams:
                read(served.step())
        except Broken:  # ends the stream that ran the step, and nothing else
            left = left.union(*(own for own, stream in streams.items() if stream.gi_frame is None))
            streams = {own: stream for own, stream in streams.items() if not own & left}
        cancelled |= {n for n in left if served.requests[n].finished == "cancelled"}
        check(served)
    served.runner.fails = None
    for own, stream in list(streams.items()):
        read(stream, own)
    budget = sum(len(p) + s.max_tokens for p, s in want.values()) * (2 + served.scheduler.preemptions) + 100
    while served.busy:
        read(served.step())
        check(served)
        budget -= 1
        assert budget > 0
    assert served.pool.used == 0 and not served._inboxes
    for number, (prompt, params) in want.items():
        answer, reason = alone(prompt, params)
        request = served.requests[number]
        assert request.output == answer[: len(request.output)]
        if number in cancelled:
            assert request.finished == "cancelled"
        else:
            assert request.output == answer and request.finished == reason
            assert number in left or got[number] == answer and ended[number] == reason
