"""What the commands `run` and `survive` do: a real MoE layer over ranks, before and after, and the loss of a rank."""

from __future__ import annotations

import os
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from . import baselines
from .dispatch import gather_rows, moe_forward, rank_in
from .experts import Experts, moe_reference
from .launch import connect, join_group, run_ranks
from .load import balancedness
from .placing import place
from .runtime import Job, ModelConfig, Options, reference_outputs, serve
from .split import split_batch
from .trace import bundled_trace, generate_trace, read_trace

__all__ = ["layer_demo", "layer_rank", "survive_demo"]

WIDTHS = {"small": (256, 128), "v2-lite": (2048, 1408)}


def layer_demo(settings):
    """One rank's part of `run`, in the process group that torchrun
    announced (or alone); report on rank 0, else None."""
    if "RANK" in os.environ and not dist.is_initialized():
        prepare()
        cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=settings["timeout_s"])
        )
        device = f"cuda:{torch.cuda.current_device()}" if cuda else "cpu"
    else:
        device = "cuda" if torch.cuda.is_available() and not dist.is_initialized() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # ranks share this machine's cores
    try:
        return _layer(settings, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def prepare():
    """Settings of this process that ranks of one machine want before they meet."""
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may lead to no device
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # nothing that is sent here needs the switch's multicast


def layer_rank(rank, num_ranks, port, settings):
    """The same, started by `launch.run_ranks` instead of torchrun."""
    join_group(connect(port), "run", rank, num_ranks, timeout_s=settings["timeout_s"])
    return layer_demo(settings)


def _layer(settings, device):
    rank, ranks = rank_in(None)
    dim, hidden = settings["dim"], settings["hidden"]
    tokens, layers, steps = settings["tokens"], settings["layers"], settings["steps"]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if settings["trace"]:
        trace = read_trace(settings["trace"])
    elif (settings["experts"], settings["top_k"]) == (64, 6):
        trace = bundled_trace()
    else:
        trace = generate_trace(num_layers=layers, num_experts=settings["experts"], top_k=settings["top_k"], seed=1)
    layers = min(layers, trace.num_layers)
    half = trace.num_tokens // 2
    history = trace.counts(0, half)[:layers]
    slots = settings["slots_per_gpu"] or -(-trace.num_experts // ranks) + 2
    plans = {
        "before": (baselines.contiguous(history, num_gpus=ranks), baselines.equal_split),
        "after": (place(history, num_gpus=ranks, num_slots=slots * ranks), split_batch),
    }
    report = {"ranks": ranks, "device": device, "dim": dim, "hidden": hidden, "experts": trace.num_experts}
    report |= {"top_k": trace.top_k, "layers": layers, "tokens_per_rank": tokens, "slots_per_gpu": slots}
    report |= {"steps": steps, "trace": trace.source, "generated": trace.generated}
    outputs = {}
    for name, (placement, split) in plans.items():
        held = placement.slot_expert[:, placement.slot_gpu == rank]
        experts = Experts(held, dim=dim, hidden=hidden, dtype=dtype, device=device)
        rows, seconds, exchange = np.zeros((layers, ranks), np.int64), 0.0, 0.0
        for step in range(steps + 1):  # step 0 warms up and is not counted
            for layer in range(layers):
                x, ids, weights = _inputs(trace, layer, half, step, rank, ranks, tokens, dim, dtype, device)
                stats = {}
                out = moe_forward(x, ids, weights, experts, placement, layer, split=split, stats=stats)
                outputs[name, step, layer] = out
                if step:
                    rows[layer] += stats["plan"].rank_tokens
                    seconds += stats["compute"]
                    exchange += stats["exchange"]
        busy = gather_rows(np.array([round(seconds * 1e9), round(exchange * 1e9)]), None, ranks)
        report[name] = {
            "rank_tokens": rows.sum(axis=0).tolist(),
            "layer_rank_tokens": rows.tolist(),
            "balancedness": [round(float(b), 4) for b in balancedness(rows)],
            "compute_s": (busy[:, 0] / 1e9).tolist(),
            "exchange_s": (busy[:, 1] / 1e9).tolist(),
            "critical_rows": int(rows.max(axis=1).sum()),
        }
    same = all(torch.equal(outputs["before", 0, y], outputs["after", 0, y]) for y in range(layers))
    x, ids, weights = _inputs(trace, 0, half, 0, rank, ranks, tokens, dim, dtype, device)
    alone = moe_reference(x, ids, weights, 0, num_experts=trace.num_experts, hidden=hidden)
    identical = same and torch.equal(alone, outputs["after", 0, 0])
    error = float((alone - outputs["after", 0, 0]).abs().max()) if len(alone) else 0.0
    checks = gather_rows(np.array([identical, round(error * 1e9)]), None, ranks)
    report["identical"] = bool(checks[:, 0].all())  # a promise of the CPU; a GPU's products depend on row counts
    report["max_error"] = float(checks[:, 1].max()) / 1e9
    return report if rank == 0 else None


def _inputs(trace, layer, start, step, rank, ranks, tokens, dim, dtype, device):
    """This rank's tokens of a step: routing from the trace (wrapping around), states drawn from a seed."""
    at = start + (np.arange(tokens) + (step * ranks + rank) * tokens) % (trace.num_tokens - start)
    ids = torch.from_numpy(trace.topk_ids[layer, at].astype(np.int64)).to(device)
    generator = torch.Generator().manual_seed((step * 1009 + layer) * 1009 + rank)
    x = torch.randn(tokens, dim, generator=generator).to(device, dtype)
    weights = torch.rand(tokens, trace.top_k, generator=generator).softmax(dim=-1).to(device, dtype)
    return x, ids, weights


def survive_demo(*, ranks=4, lose=2, how="kill", step=3, jobs=24, timeout_s=3.0, device="cpu", limit_s=120, **widths):
    """Serve requests on `ranks` ranks, lose one in the middle of a step, and compare with an undisturbed
    process. `widths` replace those of a small `ModelConfig`; `device` "cuda" gives each rank a GPU."""
    config = ModelConfig(**{"dim": 64, "hidden": 32, "num_experts": 64, "top_k": 6, "num_layers": 2, **widths})
    work = [Job(tuple((7 * j + i) % config.vocab for i in range(1 + j % 5)), 4 + j % 6) for j in range(jobs)]
    options = Options(timeout_s=timeout_s, faults=((lose, step, 1, how),), device=device)
    reports = run_ranks(serve, ranks, config, work, options, timeout_s=limit_s, may_die=[lose])
    main = next(r for r in reports if r and "outputs" in r)
    died = main["faults"][lose]
    first = lambda r, kind, after=0.0: next(e for e in r["events"] if e["kind"] == kind and e["time"] > after)
    survivors = [r for r in reports if r and r["rank"] != lose]
    noticed = {r["rank"]: round(first(r, "noticed")["time"] - died, 4) for r in survivors}
    resumed, moved = first(main, "resumed"), first(main, "moved", died)
    return {
        "ranks": ranks,
        "lost": lose,
        "how": how,
        "timeout_s": timeout_s,
        "jobs": jobs,
        "members": main["members"],
        "noticed_s": noticed,
        "resumed_s": round(resumed["time"] - died, 4),
        "restarted": resumed["restarted"],
        "copies_fetched": moved["copies"],
        "from_storage": moved["reloaded"],
        "finished": len(main["outputs"]),
        "identical": main["outputs"] == reference_outputs(config, work, device),
        "history": main["history"],
        "events": [{k: v for k, v in e.items() if k != "time"} for e in main["events"]],
    }
