"""One step of a model on a device: batches of requests as tensors, and decode as CUDA graphs."""

import functools

import numpy as np
import torch

from .context import Batch, ServingContext
from .kv_pool import KVCache
from .layers import tune_experts
from .sampling import SamplingParams, sample
from .scheduler import Request

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # rows of a captured decode


def serving(method):
    """Decorate what runs the model: no gradients, and the runner's own
    dtype, whatever ``torch.autocast`` says around it."""

    @functools.wraps(method)
    def call(self, *args):
        with torch.inference_mode(), torch.autocast(self.device.type, enabled=False):
            return method(self, *args)

    return call


class Runner:
    """A loaded model, its backend and its cache.

    Args:
        model, backend, spec: see their modules. page_size: tokens. max_len: tokens of the longest sequence.
        max_seqs: most rows of a decode.
    """

    def __init__(self, model, backend, spec, *, device, dtype, page_size, max_len, max_seqs, cuda_graphs):
        self.model, self.backend, self.spec, self.device, self.dtype = model, backend, spec, device, dtype
        self.page_size, self.max_len, self.max_seqs = page_size, max_len, max_seqs
        self.table_width = -(-max_len // page_size)
        absorbed = backend.absorbs and not backend.gathers
        self.captures = cuda_graphs and device.type == "cuda" and backend.captures and (absorbed or not spec.latent)
        self.cache = self.context = None
        self.graphs, self.pool = {}, None
        self.replayed = None  # the graph of the newest decode, None where that was launched kernel by kernel

    def allocate(self, num_pages):
        """The cache of so many pages, page 0 included; replaces the one there was."""
        self.graphs.clear()
        self.pool = self.replayed = None
        self.cache = self.context = None
        self.cache = KVCache(
            self.spec.cache_rows, self.spec.config.num_layers, num_pages, self.page_size, self.dtype, self.device
        )
        self.context = ServingContext(self.model, self.backend, self.cache)

    def batch(self, chunks, decode):
        """The tensors of ``chunks``, (request, number of new tokens) each."""
        size, pages = self.page_size, [np.array(r.pages, dtype=np.int64) for r, _ in chunks]
        news, ends = [n for _, n in chunks], [r.computed + n for r, n in chunks]
        at = [np.arange(r.computed, r.computed + n) for r, n in chunks]
        gathered = (
            self.backend.gathers
            or not self.backend.captures
            or not decode
            or self.spec.latent
            and not self.backend.absorbs
        )

        def slots(positions, own):
            return own[positions // size] * size + positions % size

        keys = [slots(np.arange(end), own) for end, own in zip(ends, pages)] if gathered else []
        table = np.zeros((len(chunks), self.table_width), dtype=np.int32)
        for row, own in zip(table, pages):
            row[: len(own)] = own
        starts = np.zeros((2, len(chunks) + 1), dtype=np.int32)
        np.cumsum([news, ends], axis=1, out=starts[:, 1:])
        tokens = np.concatenate([np.array(r.tokens(r.computed, n), dtype=np.int64) for r, n in chunks])
        packed = np.stack([tokens, np.concatenate(at), np.concatenate([slots(p, own) for p, own in zip(at, pages)])])
        tokens, positions, slot_mapping = self._put(packed)
        cu_q, cu_k = self._put(starts)
        return Batch(
            decode, tokens, positions, slot_mapping, self._put(table), self._put(np.array(ends, dtype=np.int32)),
            cu_q, cu_k, max(news), max(ends), self._put(np.concatenate(keys)) if gathered else None,
            list(zip(news, ends)),
        )  # fmt: skip

    def _put(self, array):
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    @serving
    def prefill(self, chunks):
        """Compute chunks of prompts; logits (n, vocab) of those whose last token was among them, or None."""
        batch = self.batch(chunks, False)
        self.context.begin(batch)
        ends = np.cumsum([n for _, n in chunks])
        last = [end - 1 for (r, n), end in zip(chunks, ends) if r.computed + n == r.length]
        # Without a finished prompt one row goes on, for form's sake: what counts is in the cache by then.
        rows = self._put(np.array(last or [0], dtype=np.int64))
        if len(last) == len(chunks):
            batch.last = batch.only(rows, self._put(np.arange(len(chunks) + 1, dtype=np.int32)))
        hidden = self.model(batch.tokens, self.context, rows)
        return self.model.logits(hidden) if last else None

    @serving
    def decode(self, requests):
        """The logits (n, vocab) of one more token for each request, and their largest entries (n,)."""
        self.replayed = None
        bucket = next((b for b in BUCKETS if b >= len(requests)), None)
        if self.captures and bucket:
            return self._replay(requests, bucket)
        batch = self.batch([(r, 1) for r in requests], True)
        self.context.begin(batch)
        logits = self.model.logits(self.model(batch.tokens, self.context))
        return logits, logits.argmax(dim=-1)

    def _replay(self, requests, bucket):
        if bucket not in self.graphs:
            self.graphs[bucket] = DecodeGraph(self, bucket)
        self.replayed = self.graphs[bucket]
        return self.replayed.run(requests)

    @torch.inference_mode()
    def follow(self, tokens):
        """``tokens`` (n,) are those of the newest decode, whatever was
        largest here: a replay that goes on starts from them."""
        if self.replayed:
            self.replayed.state[0, : len(tokens)].copy_(tokens)

    @serving
    def measure(self, chunk_tokens):
        """Bytes of activations that a full prefill step and the
        sampling of a full batch need on top of weights and cache."""
        if self.device.type != "cuda":
            return 0
        length = min(chunk_tokens, self.max_len)
        count = chunk_tokens // length
        pages = -(-length // self.page_size)
        self.allocate(count * pages + 1)
        vocab = self.spec.config.vocab
        chunks = []
        for n in range(count):
            request = Request(n, [1] * length, SamplingParams())
            request.pages = list(range(1 + n * pages, 1 + (n + 1) * pages))
            chunks.append((request, length))
        self.prefill(chunks)  # compiles; the second run is what counts
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.prefill(chunks)
        hidden = torch.zeros(self.max_seqs, self.spec.config.width, dtype=self.dtype, device=self.device)
        rows = self.model.logits(hidden)
        sample(rows, [SamplingParams(temperature=1.0, top_p=0.9)] * self.max_seqs, [0] * self.max_seqs)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        assert rows.shape[1] == vocab
        del hidden, rows
        self.cache = self.context = None
        torch.cuda.empty_cache()
        return peak


class DecodeGraph:
    """Decode of up to ``size`` rows as one CUDA graph: tokens in, the next greedy tokens and the logits out.

    Rows without a request stand at position 0 of page 0, which is nobody's. A replay leaves the greedy tokens and their
    positions where the next one reads them: a step that goes on with the same requests sends nothing to the device.
    """

    def __init__(self, runner, size):
        self.runner, self.size = runner, size
        device = runner.device
        # tokens, positions, and 1 where there is a request
        self.state = torch.zeros(3, size, dtype=torch.int64, device=device)
        self.table = torch.zeros(size, runner.table_width, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self.host_state = torch.zeros(3, size, dtype=torch.int64, pin_memory=pinned)
        self.host_table = torch.zeros(size, runner.table_width, dtype=torch.int32, pin_memory=pinned)
        self.holders = []  # (request, preemptions, pages) of the rows that the device's table shows
        self.next = None  # (request, preemptions, tokens computed) of the rows that the device's state is ready for
        # A workspace of its own: one that grew for another size would leave this graph with freed memory.
        self.workspace = type(runner.backend.workspace)(device) if hasattr(runner.backend, "workspace") else None
        self.context = runner.context.using(runner.backend.with_workspace(self.workspace))
        self.graph, self.logits, self.greedy = self.capture(device)

    def capture(self, device):
        """The graph, and the tensors that a replay fills."""
        moe = next((m for m in self.runner.model.modules() if hasattr(m, "router")), None)
        if moe is not None:
            tune_experts(moe.gate_up, moe.down, self.size, moe.config.top_k, getattr(moe.config, "num_shared", 0))
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles, and grows the workspace, neither of which a capture may do
                self.forward()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # its graphs share their memory, for only one runs at a time; a pool dies with its last graph
        runner = self.runner
        runner.pool = runner.pool or torch.cuda.graph_pool_handle()
        # NCCL's watchdog asks for events in a thread of its own, which another mode would not forgive.
        with torch.cuda.graph(graph, pool=runner.pool, capture_error_mode="thread_local"):
            logits, greedy = self.forward()
        return graph, logits, greedy

    def forward(self):
        runner, size = self.runner, self.runner.page_size
        tokens, positions, live = self.state
        pages = self.table.gather(1, (positions // size)[:, None])[:, 0].long()
        slots, seq_lens = pages * size + positions % size, (positions + 1).int()
        self.context.begin(Batch(True, tokens, positions, slots, self.table, seq_lens, max_k=runner.max_len))
        logits = runner.model.logits(runner.model(tokens, self.context))
        greedy = logits.argmax(dim=-1)
        tokens.copy_(greedy)
        positions.add_(live)
        return logits, greedy

    def run(self, requests):
        count = len(requests)
        now, ready = [(r.id, r.preempted, r.computed) for r in requests], self.next
        self.next = None  # until the replay is under way: an error leaves a state that nobody may go on from
        if now != ready:
            columns = [[r.tokens(r.computed, 1)[0] for r in requests], [r.computed for r in requests], [1] * count]
            self.host_state[:, :count] = torch.tensor(columns)
            self.host_state[:, count:] = 0
            self.state.copy_(self.host_state, non_blocking=True)
        holders = [(r.id, r.preempted, len(r.pages)) for r in requests]
        if holders != self.holders:
            self.host_table.zero_()
            for row, request in zip(self.host_table, requests):
                row[: len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
            self.table.copy_(self.host_table, non_blocking=True)
            self.holders = holders
        self.graph.replay()
        if all(r.params.temperature == 0 for r in requests):
            self.next = [(number, preempted, computed + 1) for number, preempted, computed in now]
        return self.logits[:count], self.greedy[:count]
