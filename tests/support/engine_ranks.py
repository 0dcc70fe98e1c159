"""What the ranks of the tensor-parallel tests run: one set of processes does many checks, since starting them costs the most."""

import dataclasses
import os
import signal

import torch

from dspark_mini import place
from dspark_mini.launch import connect
from ladder.engine import bench, parallel
from support.engine_models import MLA, SPECS, TINY, engine, greedy, prompts


def joined(rank, ranks, port, name, **options):
    import torch.distributed as dist

    return parallel.join("cpu", store=dist.PrefixStore(name, connect(port)), rank=rank, size=ranks, timeout_s=20, **options)


def ways(rank, ranks):
    """Every way to split the experts of the test models: in order, placed with a second copy of some, by width."""
    yield "whole", lambda spec: {}
    yield "width", lambda spec: {"experts": "width"}

    def placed(spec):
        c = spec.config
        layers = c.num_layers - getattr(c, "num_dense", 0)
        load = torch.rand(layers, c.num_experts, generator=torch.Generator().manual_seed(3)).numpy() ** 3 * 1000
        return {"placement": place(load, num_gpus=ranks, num_slots=c.num_experts + ranks)}

    yield "placed", placed


def answers(rank, ranks, port, asked, tokens):
    """{(model, way): (answers, log)} of greedy and sampled requests, and a bench row, from every way to split."""
    base = joined(rank, ranks, port, "answers")
    found = {}
    for name, spec in SPECS.items():
        for way, options in ways(rank, ranks):
            part = parallel.Parallel(base.rank, base.size, base.device, **options(spec))
            log = []
            served = engine(dataclasses.replace(spec, parallel=part), log=log.append)
            found[name, way] = served.generate(asked, greedy(tokens)), log, served.spec.parameters
    row = bench.throughput(dataclasses.replace(TINY, parallel=base), "sdpa", input_len=20, output_len=4, concurrency=2, device="cpu",
                           kv_tokens=256, page_size=16)  # fmt: skip
    parallel.leave()
    return {"answers": found, "row": row}


def weights(rank, ranks, port, folder):
    """Sums of this rank's parameters of a checkpoint, of the same weights cut from a whole model, and whether all are equal."""
    from pathlib import Path

    from ladder.engine.models import Spec, deepseek_v2

    part = parallel.Parallel(rank, ranks, "cpu")
    spec = Spec("deepseek-v2-lite", MLA.config, Path(folder), parallel=part)
    loaded = spec.load(torch.float32, "cpu")
    cut = part.shrink(deepseek_v2.load(folder, torch.float32))
    return all(torch.equal(a, b) for a, b in zip(loaded.parameters(), cut.parameters(), strict=True))


def lose_one(rank, ranks, port):
    """The last rank kills itself in the middle of an answer; what do the others say?"""
    part = joined(rank, ranks, port, "lose")
    served = engine(dataclasses.replace(TINY, parallel=part))
    for number, _ in enumerate(served.stream(prompts((9,)), greedy(30))):
        if number == 3 and rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def lost(rank, ranks, port):
    try:
        lose_one(rank, ranks, port)
    except parallel.RankLost as error:
        return str(error)
    return "finished"
