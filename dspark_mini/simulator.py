"""The same decisions on clusters we do not own.

Placement, split and request planning are the real code. Only time is modelled, by data-sheet rates and three rules:

* a phase takes the longer of its arithmetic and its memory traffic (a roofline), on every GPU by itself;
* a layer is attention, dispatch, experts, combine, one after the other; each ends when its slowest GPU has ended;
* an all-to-all takes as long as its busiest port (`topology.py`).

What is left out: overlap of communication with arithmetic, contention inside the network, launch overheads,
everything a real system loses for reasons of its own. The simulator answers questions of the form "how much
does imbalance cost", not "how fast is it".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import baselines
from .checks import check_number
from .placing import place
from .planner import Request, Worker, plan_batch
from .split import gpu_tokens, split_batch, split_bound
from .topology import Topology

__all__ = [
    "GPU", "H200", "MODELS", "Load", "MoEShape", "Result", "chunk_load", "decode_load", "four_way", "prefill_load",
    "simulate",
]  # fmt: skip


@dataclass(frozen=True)
class GPU:
    """Rates of one GPU: dense bf16 FLOP/s, memory bytes/s, and the part of each that kernels reach."""

    name: str
    flops: float
    bytes_per_s: float
    matmul_efficiency: float = 0.7
    memory_efficiency: float = 0.85


H200 = GPU("H200", 989e12, 4.8e12)


@dataclass(frozen=True)
class MoEShape:
    """What the time of one MoE decoder layer depends on.

    dim, hidden        model width, width of one routed expert; `shared` experts of that width serve every token
    kv_width           cached numbers per token and layer (MLA: the latent, 576)
    attention_params   weights of the attention projections
    prefill_flops, decode_flops
                       FLOPs per pair of query and key; MLA decodes on the latent, which costs more of them
    bytes_per_weight   also used for KV and for token rows on the wire
    """

    name: str
    num_layers: int
    dim: int
    hidden: int
    num_experts: int
    top_k: int
    shared: int
    kv_width: int
    attention_params: int
    prefill_flops: int
    decode_flops: int
    bytes_per_weight: float = 2.0

    @property
    def expert_params(self):
        return 3 * self.dim * self.hidden


MODELS = {
    # Widths from the public configurations. FLOPs per pair: 2 * heads * (192 + 128), and on the latent (576 + 512).
    "v2-lite": MoEShape(
        "DeepSeek-V2-Lite", 26, 2048, 1408, 64, 6, 2, 576, 2048 * (16 * 192 + 576 + 16 * 128) + 512 * 16 * 256,
        2 * 16 * 320, 2 * 16 * 1088,
    ),
    "r1": MoEShape(
        "DeepSeek-R1", 58, 7168, 2048, 256, 8, 1, 576,
        7168 * (1536 + 576 + 128 * 128) + 1536 * 128 * 192 + 512 * 128 * 256, 2 * 128 * 320, 2 * 128 * 1088, 1.0,
    ),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Load:
    """The requests of one step: `new_tokens` each computes, and the mean `context` each of these attends to."""

    new_tokens: np.ndarray
    context: np.ndarray

    @property
    def tokens(self):
        return int(self.new_tokens.sum())


def decode_load(requests, seed=0, median=4096, spread=0.6):
    """One new token each, contexts log-normal around `median`."""
    draw = np.random.default_rng(seed).lognormal(np.log(median), spread, requests)
    return Load(np.ones(requests, np.int64), np.clip(draw, 64, 131072).astype(np.int64))


def prefill_load(tokens, seed=0, requests=32, spread=0.6):
    """`requests` prompts of log-normal lengths, `tokens` tokens together; a prompt of n attends to n / 2 on average."""
    draw = np.random.default_rng(seed).lognormal(0, spread, requests)
    edges = np.round(np.concatenate([[0], np.cumsum(draw)]) / draw.sum() * (tokens - requests)).astype(np.int64)
    length = np.diff(edges) + 1
    return Load(length, (length + 1) // 2)


def chunk_load(tokens, prompt, requests=32):
    """Chunked prefill: `requests` prompts of `prompt` tokens, each at another stage, `tokens` tokens together."""
    new = np.full(requests, tokens // requests, np.int64)
    new[: tokens % requests] += 1
    return Load(new, ((np.arange(requests) + 0.5) / requests * prompt).astype(np.int64) + 1)


@dataclass(frozen=True, eq=False)
class Result:
    """A simulated run: times in seconds, summed over layers and batches.

    gpu_tokens   (batches, layers, gpus) int64 tokens served by each GPU's experts
    busy_s       (gpus,) seconds that each GPU computes; step_s the seconds all steps take
    phases       seconds of "attention", "exchange", "experts" on the critical path
    bound        the highest balancedness that any split reaches on this placement (`split_bound`)
    """

    gpu_tokens: np.ndarray
    busy_s: np.ndarray
    step_s: float
    tokens: int
    phases: dict
    expert_busy_s: np.ndarray
    bound: float

    @property
    def utilisation(self):
        """(gpus,) part of the time each GPU computes."""
        return self.busy_s / self.step_s

    @property
    def expert_utilisation(self):
        """(gpus,) part of the expert phase each GPU computes: the article's picture."""
        return self.expert_busy_s / self.phases["experts"]

    @property
    def layer_utilisation(self):
        """(layers, gpus) tokens of each GPU over those of the layer's busiest, all batches together."""
        total = self.gpu_tokens.sum(axis=0)
        return total / np.maximum(total.max(axis=1, keepdims=True), 1)

    @property
    def tokens_per_s(self):
        return self.tokens / self.step_s

    @property
    def balancedness(self):
        """Tokens of the mean GPU over tokens of the busiest, summed over layers and batches."""
        return float(self.gpu_tokens.mean(axis=2).sum() / max(self.gpu_tokens.max(axis=2).sum(), 1))


def simulate(
    counts, placement, *, topology, model, load, gpu=H200, split=split_batch, attention_speedup=1.0,
    spread_requests=False,
):  # fmt: skip
    """Run batches through the model on a simulated cluster; returns a `Result`.

    counts            sequence of (layers, experts) int64, one per batch, such as `Trace.batches` yields
    placement         a `Placement` for topology.num_gpus GPUs; split: `split_batch` or a baseline of its signature
    model             a `MoEShape`; as many layers are run as the counts have
    load              a `Load`: the requests behind every batch
    attention_speedup how much faster the attention core (not the projections) is than one third of its
                      roofline, which stands for attention written as separate operations; 3 is the roofline
    spread_requests   True: requests are assigned by `plan_batch`, weighed by their attention; False: round robin
    """
    check_number(attention_speedup, "attention_speedup", positive=True)
    counts = [np.asarray(c, dtype=np.int64) for c in counts]
    gpus = topology.num_gpus
    if placement.num_gpus != gpus:
        raise ValueError(f"placement must be for the topology's {gpus} GPUs, got {placement.num_gpus}")
    if not counts or any(c.shape != placement.load.shape for c in counts):
        shapes = [c.shape for c in counts[:3]]
        raise ValueError(f"counts must be a sequence of {placement.load.shape} arrays, got {shapes}")
    layers = len(counts[0])
    owner = np.arange(len(load.new_tokens)) % gpus
    if spread_requests:
        work = load.new_tokens * (load.context * float(model.prefill_flops) + 2.0 * model.attention_params)
        units = np.ceil(work / work.max() * 1e6).astype(np.int64)  # requests are planned by relative work
        requests = [Request(tokens=int(n)) for n in units]
        owner = plan_batch(requests, [Worker(10**12, token_s=1.0)] * gpus, Topology(1, gpus)).worker
    attention = _attention_s(load, owner, model, gpu, gpus, attention_speedup)

    served = np.zeros((len(counts), layers, gpus), dtype=np.int64)
    experts_s, exchange_s = np.zeros((len(counts), layers, gpus)), 0.0
    own = np.bincount(owner, load.new_tokens, gpus)
    row_bytes = model.dim * model.bytes_per_weight
    bound = 0.0
    for b, batch in enumerate(counts):
        for layer in range(layers):
            slot_tokens = split(batch[layer], placement, layer)
            served[b, layer] = gpu_tokens(slot_tokens, placement)
            active = gpu_tokens(slot_tokens > 0, placement)
            experts_s[b, layer] = _experts_s(served[b, layer], active, own, model, gpu)
            exchange_s += 2 * even_exchange_s(own * model.top_k * row_bytes, served[b, layer] * row_bytes, topology)
            bound += split_bound(batch[layer], placement, layer)[0]
    slowest = experts_s.max(axis=2).sum()
    runs = len(counts) * layers
    phases = {"attention": attention.max() * runs, "exchange": exchange_s, "experts": float(slowest)}
    expert_busy = experts_s.sum(axis=(0, 1))
    busy, step_s = attention * runs + expert_busy, float(sum(phases.values()))
    reached = float(served.mean(axis=2).sum() / max(bound, 1))
    return Result(served, busy, step_s, load.tokens * len(counts), phases, expert_busy, reached)


def _roofline(flops, num_bytes, gpu):
    return np.maximum(
        flops / (gpu.flops * gpu.matmul_efficiency), num_bytes / (gpu.bytes_per_s * gpu.memory_efficiency)
    )


def _attention_s(load, owner, model, gpu, gpus, speedup):
    """(gpus,) seconds of one layer's attention: projections, and the core over each token's context."""
    tokens = np.bincount(owner, load.new_tokens, gpus)
    decode = load.new_tokens == 1
    pairs = load.new_tokens * load.context.astype(np.float64)
    flops = np.bincount(owner, pairs * np.where(decode, model.decode_flops, model.prefill_flops), gpus)
    # A decode step reads its whole cache for one query, while the keys of a prompt are on the chip already.
    read = np.bincount(owner, np.where(decode, load.context, load.new_tokens), gpus) * model.kv_width
    project = _roofline(2.0 * tokens * model.attention_params, model.attention_params * model.bytes_per_weight, gpu)
    core = _roofline(flops, read * model.bytes_per_weight, gpu)
    return np.where(tokens > 0, project, 0.0) + 3.0 * core / speedup


def _experts_s(rows, active, own_tokens, model, gpu):
    """(gpus,) seconds of one layer's experts: `rows` tokens over
    `active` experts, and the shared ones for own tokens."""
    flops = 2.0 * model.expert_params * (rows + model.shared * own_tokens)
    weights = model.expert_params * model.bytes_per_weight * (active + model.shared * (own_tokens > 0))
    return _roofline(flops, weights, gpu)


def even_exchange_s(sent, received, topology):
    """Seconds of one all-to-all: `sent` and `received` (gpus,) bytes, spread evenly over the other side.

    Every GPU has one port per kind of link, each way; all ports work at once, and the busiest decides. Contention
    inside the network is not modelled, so a real all-to-all takes at least this.
    """
    gpus, per_node = topology.num_gpus, topology.gpus_per_node
    seconds = 0.0
    for link, part in ((topology.intra, (per_node - 1) / gpus), (topology.inter, (gpus - per_node) / gpus)):
        busiest = max(sent.max(), received.max()) * part
        if busiest > 0:
            seconds = max(seconds, link.seconds(busiest))
    return seconds


def four_way(trace, *, topology, model, num_slots, load, gpu=H200, kernel_speedup=2.0, max_batches=8):
    """Throughput of {neither, kernel, scheduler, both} on a trace; returns a dict of name -> `Result`.

    The first half of the trace is history: the scheduler places for it. The second half is dispatched, in
    batches of `load.tokens`. Without the scheduler experts sit in id order, one copy each, and requests go
    round robin. The kernel makes the attention core `kernel_speedup` times faster.
    """
    check_number(kernel_speedup, "kernel_speedup", positive=True)
    half = trace.num_tokens // 2
    history = trace.counts(0, half)
    batches = list(trace.batches(load.tokens, half))[:max_batches]
    if not batches:
        raise ValueError(
            f"load must have at most half the trace's tokens ({trace.num_tokens - half}), got {load.tokens}"
        )
    before = baselines.contiguous(history, num_gpus=topology.num_gpus)
    after = place(history, num_gpus=topology.num_gpus, num_slots=num_slots, num_nodes=topology.num_nodes)
    shared = {"topology": topology, "model": model, "load": load, "gpu": gpu}
    scheduler = {"placement": after, "spread_requests": True}
    neither = {"placement": before, "split": baselines.equal_split}
    return {
        "neither": simulate(batches, **neither, **shared),
        "kernel": simulate(batches, **neither, attention_speedup=kernel_speedup, **shared),
        "scheduler": simulate(batches, **scheduler, **shared),
        "both": simulate(batches, **scheduler, attention_speedup=kernel_speedup, **shared),
    }
