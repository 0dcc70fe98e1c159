"""Which requests run in the next step: continuous batching, chunked prefill, preemption by recomputation.

Everything here is on the host and knows no tensors. A step is either a prefill, packed chunks of several prompts, or a
decode, one token for every request whose prompt is done. A prompt gets the pages of all its tokens when it is admitted,
so only decode can run out; then the youngest request gives its pages back and waits, its tokens to be computed again.
The oldest is never the victim while another runs, so work always ends.
"""

from collections import deque
from dataclasses import dataclass, field

from .kv_pool import OutOfPages
from .sampling import SamplingParams


@dataclass(eq=False)
class Request:
    """One request. ``computed`` tokens have their keys in the cache; ``tokens`` is prompt and answer so far."""

    id: int
    prompt: list
    params: SamplingParams
    output: list = field(default_factory=list)
    pages: list = field(default_factory=list)
    computed: int = 0
    preempted: int = 0
    finished: str | None = None  # "length", "stop" or "cancelled"
    times: list = field(default_factory=list)  # when each token of the answer came, seconds
    submitted: float = 0.0

    @property
    def length(self):
        return len(self.prompt) + len(self.output)

    @property
    def missing(self):
        """Tokens still to be computed; the next token needs all of them."""
        return self.length - self.computed

    def tokens(self, start, count):
        """Tokens start .. start + count of prompt and answer."""
        prompt = self.prompt[start : start + count]
        begin = max(0, start - len(self.prompt))
        return prompt + self.output[begin : begin + count - len(prompt)]


@dataclass(frozen=True)
class Step:
    """``chunks``: (request, number of new tokens) in batch order; all 1 when ``decode``."""

    decode: bool
    chunks: tuple


class Scheduler:
    """Args:
    pool: the ``PagePool``. max_seqs: most requests at a time. chunk_tokens: most new tokens of a prefill step.
    chunk_keys: most keys that the chunks of a prefill step look at, together; one long prompt may exceed it alone.
    decode_every: prefill steps after which waiting decodes get their turn, the bound on inter-token latency.
    """

    def __init__(self, pool, *, max_seqs=256, chunk_tokens=8192, chunk_keys=65536, decode_every=4):
        self.pool, self.max_seqs, self.chunk_tokens, self.chunk_keys = pool, max_seqs, chunk_tokens, chunk_keys
        self.decode_every = decode_every
        self.waiting, self.running = deque(), []
        self._prefills = 0  # since the last decode
        self.preemptions = 0

    @property
    def busy(self):
        return bool(self.waiting or self.running)

    def add(self, request):
        self.waiting.append(request)

    def next(self):
        """The next step, or None when nothing is left to do."""
        decoding = [r for r in self.running if r.computed and r.missing == 1]
        if not decoding or self._prefills < self.decode_every:
            chunks = self._prefill()
            if chunks:
                self._prefills += 1
                return Step(False, tuple(chunks))
        self._prefills = 0
        decoding = self._room(decoding)
        return Step(True, tuple((r, 1) for r in decoding)) if decoding else None

    def ahead(self):
        """A prefill that may follow one whose tokens are not known
        yet, or None: what it looks at must not depend on them."""
        chunks = self._prefill() if self._prefills < self.decode_every else None
        if not chunks:
            return None
        self._prefills += 1
        return Step(False, tuple(chunks))

    def _prefill(self):
        """Chunks of prompts that are under way, then of those that wait, while tokens and pages last."""
        chunks, tokens, keys = [], self.chunk_tokens, self.chunk_keys

        def take(request):
            nonlocal tokens, keys
            count = min(request.missing, tokens)
            if chunks and request.computed + count > keys:
                return False
            chunks.append((request, count))
            tokens, keys = tokens - count, keys - request.computed - count
            return True

        for request in self.running:
            if tokens and (not request.computed or request.missing > 1):
                take(request)
        while tokens and self.waiting and len(self.running) < self.max_seqs:
            request = self.waiting[0]
            # A page in reserve for everyone who decodes, or each admission would be followed by a preemption.
            spare = len(self.running) + 1 if self.running else 0
            if self.pool.pages_for(request.length) + spare > self.pool.free:
                break
            if chunks and min(request.missing, tokens) > keys:
                break
            self.pool.grow(request.pages, request.length)
            self.running.append(self.waiting.popleft())
            take(request)
        return chunks

    def _room(self, decoding):
        """Pages for one more token of each, oldest first; the youngest give way when there are none."""
        kept = []
        for request in decoding:
            if request not in self.running:
                continue  # preempted for an older one
            while True:
                try:
                    self.pool.grow(request.pages, request.length)
                    kept.append(request)
                    break
                except OutOfPages:
                    victim = self.running[-1]
                    self._preempt(victim)
                    if victim is request:
                        break
        return kept

    def _preempt(self, request):
        self.running.remove(request)
        self.pool.release(request.pages)
        request.computed = 0
        request.preempted += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def finish(self, request, reason):
        """Take the request out, whatever it was doing, and give its pages back."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.pool.release(request.pages)
        request.finished = reason

    def rewind(self):
        """After a step that failed: what was computed for a token that nobody got is to be computed again."""
        for request in self.running:
            request.computed = min(request.computed, request.length - 1)
