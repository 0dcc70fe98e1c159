"""The engine: requests in, tokens out as they come."""

import operator
import time
from collections import deque
from dataclasses import dataclass, replace

import torch

from ladder.contract import check_integer

from . import backends
from .config import EngineConfig
from .kv_pool import PagePool
from .layers import MOST_ROWS, HostCopy
from .memory import gib, plan_memory
from .models import Spec
from .runner import Runner
from .sampling import SamplingParams, sample
from .scheduler import Request, Scheduler


@dataclass(frozen=True)
class Event:
    """A token of a request's answer; ``finished`` is None, or why it was the last: "length", "stop" or "cancelled".

    A cancelled request's last event has no token.
    """

    request: int
    token: int | None
    finished: str | None


class Engine:
    """Continuous batching of one model on one device.

    Args:
        spec: the model, see ``ladder.engine.models.find``.
        backend: name of the attention backend, see ``ladder.engine.backends.NAMES``.
        device, dtype: None is the GPU in bfloat16 where there is one, else the CPU in float32.
        mem_fraction: share of the device's memory that weights, activations and the KV pool may take together.
        kv_tokens: size of the KV pool in tokens; None is what the fraction leaves, at most what ``max_seqs`` sequences
            of ``max_len`` tokens could ever fill.
        max_len: longest sequence, prompt and answer, in tokens; None is the model's context, or the pool if that is
            less.
        max_seqs: most requests that run at a time. chunk_tokens: most prompt tokens in a step. chunk_keys: most keys
            that they look at together. decode_every: see ``Scheduler``. page_size: tokens of a page.
        cuda_graphs: capture decode (on a GPU, where the backend allows it).
        windows: ``RangeWindows`` for step08, None is exact attention.
        log: called with each line of the log. progress: see ``Spec.load``.

    Raises:
        TypeError, ValueError: before anything is allocated: an argument that is none, an unknown backend, one that
        cannot run here, a
            model that does not fit.
    """

    def __init__(self, spec, backend="step08", *, log=None, progress=None, **options):
        # 1. What is asked for, checked; nothing is allocated yet.
        if not isinstance(spec, Spec):
            raise TypeError(f"engine: spec is {spec!r}; want a Spec, such as ladder.engine.models.find('tiny-moe')")
        for name, value in (("log", log), ("progress", progress)):
            if value is not None and not callable(value):
                raise TypeError(f"engine: {name} is {value!r}; want a function, or None")
        self.log = log or (lambda line: None)
        self.parallel = spec.parallel
        if self.parallel:
            self.parallel.check(spec.config)
            options["device"] = self.parallel.device
        config = self.config = EngineConfig(backend, **options)
        self.spec, self.device, self.dtype = spec, config.device, config.dtype
        self.backend = backends.make(backend, self.device, config.windows)
        self.backend.check(self.device, self.dtype)
        if config.max_len is not None and config.max_len > spec.config.context:
            most = f"{spec.config.context}, the context of {spec.name}"
            raise ValueError(f"engine: max_len is {config.max_len}; want at most {most}")
        needs = plan_memory(spec, self.backend, config)
        # 2. The model, and what is left for the pool.
        self._say_model()
        self.runner = Runner(
            spec.load(self.dtype, self.device, progress), self.backend, spec, device=self.device, dtype=self.dtype,
            page_size=config.page_size, max_len=needs.longest, max_seqs=config.max_seqs, cuda_graphs=config.cuda_graphs,
        )  # fmt: skip
        activations = needs.plan.activations
        if self.device.type == "cuda":
            activations = self.runner.measure(needs.chunk_tokens) + needs.unmeasured
        self.plan = replace(needs.plan, activations=activations)
        # all ranks' books are the same
        room = self.parallel.least(self.plan.pages) if self.parallel else self.plan.pages
        pages = needs.pool_pages(room, activations)
        self.pool = PagePool(pages, config.page_size)
        self.max_len = min(needs.longest, self.pool.tokens)
        self.runner.allocate(pages)
        # 3. The books: who waits, who runs, and what was not told yet.
        self.scheduler = Scheduler(
            self.pool, max_seqs=config.max_seqs, chunk_tokens=needs.chunk_tokens, chunk_keys=needs.chunk_keys,
            decode_every=config.decode_every,
        )  # fmt: skip
        self.requests, self._submitted = {}, 0
        self._events = deque()  # not told yet
        # request -> the queue of its stream, which finds there what happens while others run the steps
        self._inboxes = {}
        # Whether a prefill may follow another before the first one's tokens are read; not where experts wait for the
        # host.
        few_rows = needs.chunk_tokens * getattr(spec.config, "top_k", 1) <= MOST_ROWS
        self.looks_ahead = self.device.type == "cuda" and not self.parallel and few_rows
        self._ahead = None  # what ``_launch`` returned of such a prefill
        self.steps = {"prefill": 0, "decode": 0}
        self._say_memory()

    def _say_model(self):
        spec, on_gpu = self.spec, self.device.type == "cuda"
        where = torch.cuda.get_device_name(self.device) if on_gpu else "the CPU"
        source = f"weights of {spec.source.name}" if spec.source else "random weights"
        size = f"{spec.parameters / 1e6:,.1f} M parameters"
        self.log(f"model {spec.name}, {source}, {size}, {str(self.dtype).removeprefix('torch.')} on {where}")

    def _say_memory(self):
        windows = "" if self.config.windows is None else f", {self.config.windows}"
        cache = self.runner.cache.nbytes
        if self.parallel:
            held = self.parallel.experts if self.parallel.placement is None else "placed"
            self.log(f"{self.parallel.size} ranks, tensor parallel, experts {held}; what follows is one rank's")
        captures = ", decode as CUDA graphs" if self.runner.captures else ""
        self.log(f"attention backend {self.backend.name}{windows}{captures}")
        self.log(
            f"KV pool {self.pool.tokens:,} tokens in {self.pool.tokens // self.config.page_size:,} pages of "
            f"{self.config.page_size}, {cache:,} bytes ({gib(cache)}, {self.spec.token_bytes(self.dtype):,} bytes a "
            f"token); "
            f"weights {gib(self.plan.weights)}, activations {gib(self.plan.activations)}, {self.config.mem_fraction:g} "
            f"of "
            f"{gib(self.plan.total)}"
        )

    def submit(self, prompt, params=SamplingParams()):
        """Queue a request; returns its number.

        Args:
            prompt: token ids. params: ``SamplingParams``.

        Raises:
            TypeError: no prompt, or no ``SamplingParams``.
            ValueError: an empty prompt, what is no id of the vocabulary,
            a request longer than a sequence or the pool may be.
        """
        prompt = check_prompt(prompt, self.spec.config.vocab)
        if not isinstance(params, SamplingParams):
            raise TypeError(f"engine: params is {params!r}; want SamplingParams")
        if len(prompt) + params.max_tokens > self.max_len:
            raise ValueError(
                f"engine: {len(prompt)} prompt tokens and {params.max_tokens} to generate are "
                f"{len(prompt) + params.max_tokens}; "
                f"want at most {self.max_len}, the longest sequence (KV pool: {self.pool.tokens} tokens)"
            )
        request = Request(self._submitted, prompt, params, submitted=time.perf_counter())
        self._submitted += 1
        self.requests[request.id] = request
        self.scheduler.add(request)
        return request.id

    def cancel(self, number):
        """End a request now, running or waiting; its pages are free at once. Nothing happens when it has ended already.

        Raises:
            ValueError: there is no request of that number.
        """
        request = self._request(number)
        if request.finished is None:
            self.scheduler.finish(request, "cancelled")
            self._tell(Event(number, None, "cancelled"))

    def forget(self, number):
        """Drop the record of a request that has ended, and return it: who serves for long calls this for every answer
        that was read.

        Raises:
            ValueError: there is no request of that number, or it has not ended.
        """
        if self._request(number).finished is None:
            raise ValueError(f"engine: request {number} has not ended; want one that has, or cancel it first")
        return self.requests.pop(number)

    def _request(self, number):
        number = check_integer("engine", "number", number, 0)
        if number not in self.requests:
            raise ValueError(f"engine: there is no request {number}")
        return self.requests[number]

    @property
    def busy(self):
        return self.scheduler.busy or bool(self._events)

    def step(self):
        """Run one step; returns its ``Event``s, in batch order, but for those that a stream will yield. An empty list:
        only prompts were computed.

        After an exception (no memory for a step, Ctrl-C) the engine goes on: tokens that were lost with it are computed
        again, and events that it had already come with the next step.
        """
        try:
            self._step()
        except BaseException:
            self._ahead = None
            self.scheduler.rewind()
            raise
        events = list(self._events)
        self._events.clear()
        return events

    def _tell(self, event):
        self._inboxes.get(event.request, self._events).append(event)

    def _step(self):
        launched, self._ahead = self._ahead or self._launch(self.scheduler.next()), None
        if launched is None or not launched[0]:
            return
        requests, greedy, prefill = launched
        if prefill and self.looks_ahead:  # the device goes on while the host reads and plans
            self._ahead = self._launch(self.scheduler.ahead())
        tokens = greedy.wait() if isinstance(greedy, HostCopy) else greedy.tolist()  # the one wait for the device
        now = time.perf_counter()
        for request, token in zip(requests, tokens):
            if request.finished:  # cancelled while its prompt was computed
                continue
            request.output.append(token)
            request.times.append(now)
            reason = None
            if token in request.params.stop:
                reason = "stop"
            elif len(request.output) == request.params.max_tokens:
                reason = "length"
            if reason:
                self.scheduler.finish(request, reason)
            self._tell(Event(request.id, token, reason))

    def _launch(self, step):
        """Send a step to the device: (requests with a new token, these
        tokens, whether it was a prefill); None without a step."""
        if step is None:
            return None
        if step.decode:
            requests = [r for r, _ in step.chunks]
            logits, greedy = self.runner.decode(requests)
        else:
            requests = [r for r, n in step.chunks if r.computed + n == r.length]
            logits = self.runner.prefill(step.chunks)
            greedy = logits.argmax(dim=-1) if requests else None
        self.steps["decode" if step.decode else "prefill"] += 1
        for request, new in step.chunks:
            request.computed += new
        if not requests:
            return requests, None, not step.decode
        if any(r.params.temperature > 0 for r in requests):
            greedy = sample(logits, [r.params for r in requests], [r.length for r in requests])
        if self.parallel:
            self.parallel.agree(greedy)
            if step.decode:
                self.runner.follow(greedy)
        copied = not step.decode and self.looks_ahead  # on its way before the next step is
        return requests, HostCopy(greedy) if copied else greedy, not step.decode

    def stream(self, prompts, params=SamplingParams()):
        """Submit prompts (lists of token ids; ``params`` one for all
        or a list) and yield ``Event``s until all have ended.

        Several streams may be read in turns: each runs steps for all, and yields its own requests' events and those of
        requests that no stream submitted.

        Raises:
            TypeError, ValueError: as ``submit``, and nothing stays queued.
        """
        prompts = _listed(prompts)
        params = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"engine: {len(params)} params for {len(prompts)} prompts; want one for all, or one for each"
            )
        own, live, inbox = [], set(), deque()
        try:
            for prompt, p in zip(prompts, params):
                number = self.submit(prompt, p)
                own.append(number), live.add(number)
                self._inboxes[number] = inbox
            while live:
                if not inbox and not self._events:
                    self._events.extend(self.step())
                    continue
                # taken one by one: whoever asks next goes on where this one left
                event = (inbox or self._events).popleft()
                if event.finished:
                    live.discard(event.request)
                yield event
        finally:
            for number in live:  # the caller went away
                self.cancel(number)
            for number in own:
                del self._inboxes[number]

    def generate(self, prompts, params=SamplingParams()):
        """The answers (lists of token ids) to prompts, in their order."""
        prompts, first = _listed(prompts), self._submitted
        own, others = range(first, first + len(prompts)), []
        try:
            for event in self.stream(prompts, params):
                if event.request not in own:
                    others.append(event)
        finally:  # after an error too, for who submitted them
            self._events.extendleft(reversed(others))
        return [self.requests[number].output for number in own]


def _listed(prompts):
    try:
        return list(prompts)
    except TypeError:
        raise TypeError(f"engine: prompts is {prompts!r}; want a list of prompts, each a list of token ids") from None


def check_prompt(prompt, vocab):
    """A prompt as a list of ints.

    Raises:
        TypeError: it is no list. ValueError: it is empty, or holds what is no id of a vocabulary of that size.
    """
    tokens = []
    try:
        prompt = list(prompt)
    except TypeError:
        raise TypeError(f"engine: prompt is {prompt!r}; want a list of token ids") from None
    for token in prompt:
        try:
            tokens.append(operator.index(token))
        except TypeError:
            raise ValueError(f"engine: prompt holds {token!r}; want token ids, integers of 0 .. {vocab - 1}") from None
    if not tokens:
        raise ValueError("engine: prompt is empty; want at least one token")
    if not 0 <= min(tokens) <= max(tokens) < vocab:
        wrong = next(t for t in tokens if not 0 <= t < vocab)
        raise ValueError(f"engine: prompt holds token {wrong}; want 0 .. {vocab - 1}")
    return tokens
