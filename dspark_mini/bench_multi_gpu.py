"""What several GPUs are asked to show: a MoE layer before and after placement, the link, a migration, and predictions.

`measure_ranks` runs on every rank of a group that `launch.run_ranks` or torchrun started, on GPUs over NCCL or on a CPU
over gloo (where times mean nothing, but the code is the same). Rank 0 reports one dict after the other, as soon as each
is known, so that a run that breaks off leaves what it had measured.

Routing is the package's generated trace, which has the statistics of DeepSeek-V2-Lite's real routing, and a Zipf law
with the hot experts first, the worst case for experts in order. On two GPUs of 32 experts each the former is nearly
even by itself: imbalance grows with the number of GPUs.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import torch
import torch.distributed as dist

from . import baselines, simulator
from .demo import prepare
from .dispatch import all_to_all, gather_rows, migrate, moe_forward
from .experts import Experts
from .launch import connect, join_group
from .load import balancedness
from .placement import Placement, moves_between
from .placing import place
from .rebalancing import rebalance
from .split import split_batch
from .topology import Topology
from .trace import Trace, bundled_trace, generate_trace

__all__ = ["dispatch_rank", "measure_ranks", "predict_layers", "zipf_trace"]

SIZES = dict(dim=2048, hidden=1408, experts=64, top_k=6, layers=4, steps=8, tokens=(8192, 64), spare=2)


def zipf_trace(*, num_layers, num_tokens, num_experts, top_k, exponent=0.8, seed=0):
    """A `Trace` whose tokens choose `top_k` distinct experts with chances ~ 1 / (id + 1) ** exponent."""
    rng = np.random.default_rng(seed)
    chance = -exponent * np.log(np.arange(1, num_experts + 1))
    score = chance + rng.gumbel(size=(num_layers, num_tokens, num_experts))
    ids = np.argsort(-score, axis=2, kind="stable")[:, :, :top_k].astype(np.int32)
    offsets = np.array([0, num_tokens])
    return Trace(ids, offsets, num_experts, f"Zipf {exponent}, hot experts first", generated=True)


def traces(sizes):
    """{name: Trace} of the routings, all generated."""
    shape = {"num_layers": sizes["layers"], "num_experts": sizes["experts"], "top_k": sizes["top_k"]}
    ours = (sizes["experts"], sizes["top_k"]) == (64, 6)
    like = bundled_trace() if ours else generate_trace(**shape, num_tokens=512, seed=1)
    return {"v2-lite-like": like, "zipf": zipf_trace(**shape, num_tokens=1536)}


def predict_layers(batches, placement, split, *, ranks, tokens, sizes):
    """The simulator's `Result` for MoE layers without attention and shared experts: `tokens` of each rank in a step.

    batches: (layers, experts) int64 counts, one a step.
    """
    widths = {"dim": sizes["dim"], "hidden": sizes["hidden"], "num_experts": sizes["experts"], "top_k": sizes["top_k"]}
    model = dataclasses.replace(simulator.MODELS["v2-lite"], **widths, shared=0)
    load = simulator.Load(np.full(ranks, tokens, np.int64), np.ones(ranks, np.int64))
    return simulator.simulate(batches, placement, topology=Topology(1, ranks), model=model, load=load, split=split)


def dispatch_rank(rank, num_ranks, port, device, sizes, path):
    """Entry point of a rank started by `launch.run_ranks`: rank 0 appends each report to `path`, a JSON line each."""
    import json

    prepare()
    if device == "cuda":
        torch.cuda.set_device(rank)
    join_group(connect(port), "dispatch", rank, num_ranks, timeout_s=60, cuda=device != "cpu")
    for report in measure_ranks(f"cuda:{rank}" if device == "cuda" else "cpu", sizes):
        if rank == 0:
            with open(path, "a") as file:
                file.write(json.dumps(report) + "\n")
    gather_rows(np.zeros(1), None, num_ranks)  # nobody leaves while another still exchanges


def measure_ranks(device, sizes=SIZES):
    """Yield reports (dicts with "what": "link", "layer" or "migration"), the same on every rank of the group."""
    sizes = {**SIZES, **sizes}
    ranks = dist.get_world_size()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    yield _link(device, dtype, ranks, sizes)
    for name, trace in traces(sizes).items():
        layers, half = min(sizes["layers"], trace.num_layers), trace.num_tokens // 2
        history = trace.counts(0, half)[:layers]
        slots = -(-trace.num_experts // ranks) + sizes["spare"]
        plans = {
            "identity": (baselines.contiguous(history, num_gpus=ranks), baselines.equal_split),
            "dspark": (place(history, num_gpus=ranks, num_slots=slots * ranks), split_batch),
        }
        for impl, (placement, split) in plans.items():
            held = placement.slot_expert[:, placement.slot_gpu == dist.get_rank()]
            experts = Experts(held, dim=sizes["dim"], hidden=sizes["hidden"], dtype=dtype, device=device)
            for tokens in sizes["tokens"]:
                found = _layers(trace, half, experts, placement, split, tokens, layers, dtype, device, ranks, sizes)
                report = {"what": "layer", "routing": name, "source": trace.source, "impl": impl, "layers": layers}
                yield {**report, "slots": placement.num_slots, **found}
            del experts
        start = in_order(history, ranks, slots)
        targets = {"rebalance": rebalance(start, history)[0]}
        if name == "zipf" and ranks > 1:  # when every copy moves to the next GPU, the link shows its rate
            targets["everything"] = Placement(np.roll(start.slot_expert, slots, axis=1), history, ranks)
        for kind, plan in targets.items():
            found = _migration(start, plan, dtype, device, ranks, sizes)
            yield {"what": "migration", "kind": kind, "routing": name, "layers": layers, **found}


def _seconds(device, ranks, run):
    """Seconds that the slowest rank needs for run(), all starting together."""
    gather_rows(np.zeros(1), None, ranks)
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    mine = time.perf_counter() - start
    return float(gather_rows(np.array([round(mine * 1e9)]), None, ranks).max()) / 1e9


def _link(device, dtype, ranks, sizes, repeats=8):
    """An all-to-all of large, equal parts, in bytes a second that a rank sends. It also sets up the communicator."""
    rows = 2 * sizes["tokens"][0] * sizes["top_k"] // ranks * ranks
    x = torch.randn(rows, sizes["dim"], device=device).to(dtype)
    part = [rows // ranks] * ranks

    def run():
        for _ in range(repeats):
            all_to_all(x, part, part, None)

    best = min(_seconds(device, ranks, run) for _ in range(3)) / repeats
    sent = (rows - part[0]) * sizes["dim"] * x.element_size()
    predicted = Topology().intra.seconds(sent)
    rate = sent / best / 1e9 if ranks > 1 else None
    return {"what": "link", "bytes_sent": sent, "seconds": best, "gb_s": rate, "predicted_gb_s": sent / predicted / 1e9}


def _layers(trace, half, experts, placement, split, tokens, layers, dtype, device, ranks, sizes):
    """Steps of all layers, `tokens` tokens a rank: times on the critical path, work and bytes of each rank."""
    rank, steps = dist.get_rank(), sizes["steps"]
    names = ("compute", "exchange", "planning")
    mine = np.zeros((steps, layers, len(names)))
    rows = np.zeros((steps, layers, ranks), np.int64)
    sent, batches, total = np.zeros(ranks, np.int64), [], 0.0
    generator = torch.Generator(device).manual_seed(rank)
    x = torch.randn(tokens, sizes["dim"], generator=generator, device=device).to(dtype)
    weights = torch.rand(tokens, trace.top_k, generator=generator, device=device).softmax(dim=-1).to(dtype)
    for step in range(-1, steps):  # the first warms up and is not counted
        at = half + (np.arange(tokens) + (step % steps * ranks + rank) * tokens) % (trace.num_tokens - half)
        every_ids = [torch.from_numpy(ids.astype(np.int64)).to(device) for ids in trace.topk_ids[:layers, at]]
        stats = [{} for _ in every_ids]

        def run(every_ids=every_ids, stats=stats):
            for layer, ids in enumerate(every_ids):
                moe_forward(x, ids, weights, experts, placement, layer, split=split, stats=stats[layer])

        seconds = _seconds(device, ranks, run)
        if step < 0:
            continue
        total += seconds
        mine[step] = [[s[n] for n in names] for s in stats]
        rows[step] = [s["plan"].rank_tokens for s in stats]
        for s in stats:
            traffic = s["plan"].traffic.copy()
            np.fill_diagonal(traffic, 0)
            sent += traffic.sum(axis=1) + traffic.sum(axis=0)  # rows go there, and results come back
        batches.append(np.stack([s["plan"].counts for s in stats]))
    every = gather_rows(np.round(mine * 1e9).astype(np.int64).ravel(), None, ranks).reshape(ranks, *mine.shape) / 1e9
    slowest = every.max(axis=0).sum(axis=(0, 1)) / steps  # a layer ends when its slowest rank does
    busy = every[..., 0].sum(axis=(1, 2))
    predicted = predict_layers(batches, placement, split, ranks=ranks, tokens=tokens, sizes=sizes)
    bytes_row = sizes["dim"] * (4 if dtype == torch.float32 else 2)
    wait = every[..., 0].max(axis=0).sum()
    said = {f"{name}_s": predicted.phases[name] / steps for name in ("experts", "exchange")}
    said |= {"balancedness": predicted.balancedness, "utilisation": predicted.expert_utilisation.tolist()}
    return {
        "tokens_per_rank": tokens, "step_s": total / steps, "experts_s": slowest[0], "exchange_s": slowest[1],
        "planning_s": slowest[2], "bytes_sent": (sent * bytes_row // steps).tolist(),
        "rank_rows": rows.sum(axis=(0, 1)).tolist(),
        "balancedness": float(np.mean(balancedness(rows.reshape(-1, ranks)))),
        "utilisation": (busy / wait).tolist(), "predicted": said,
    }  # fmt: skip


def in_order(load, ranks, slots):
    """Experts in id order, as many on each GPU as divide evenly; its spare slots repeat the first of its own."""
    parts = np.array_split(np.arange(load.shape[1]), ranks)
    row = np.concatenate([np.resize(part, slots) for part in parts])
    return Placement(np.tile(row, (len(load), 1)), load, ranks)


def _migration(start, plan, dtype, device, ranks, sizes):
    """From one placement to another: copies fetched from the ranks that have them, layer by layer."""
    moves, gpu = moves_between(start.slot_expert, plan), plan.slot_gpu
    crossing = [gpu[m.target] for m in moves if gpu[m.source] != gpu[m.target]]
    bytes_copy = 3 * sizes["dim"] * sizes["hidden"] * (4 if dtype == torch.float32 else 2)
    arriving = np.bincount(crossing, minlength=ranks) * bytes_copy
    seconds, right = [], True
    for _ in range(2):  # the first time meets cold buffers
        held = start.slot_expert[:, start.slot_gpu == dist.get_rank()]
        experts = Experts(held, dim=sizes["dim"], hidden=sizes["hidden"], dtype=dtype, device=device)
        seconds.append(_seconds(device, ranks, lambda experts=experts: migrate(experts, moves, plan)))
        wanted = plan.slot_expert[:, plan.slot_gpu == dist.get_rank()]
        last = len(wanted) - 1
        right &= bool((experts.held == wanted).all()) and all(
            torch.equal(experts.weights[last, s], experts.stored(last, int(e))) for s, e in enumerate(wanted[last][:4])
        )
        del experts
    right = gather_rows(np.array([right]), None, ranks).all()
    most, link = int(arriving.max()), Topology().intra
    predicted = len({m.layer for m in moves}) * link.latency_s + most / link.bytes_per_s
    balance = [float(np.mean(p.balancedness)) for p in (start, plan)]
    return {
        "copies": len(moves), "bytes_received": arriving.tolist(), "seconds": min(seconds),
        "gb_s": most / min(seconds) / 1e9, "weights_right": bool(right), "balancedness": balance,
        "predicted_s": predicted,
    }  # fmt: skip
