"""Tensor parallelism over real processes (gloo): the answers of one process, from every way to split the experts."""

import dataclasses
import socket
import subprocess
import sys
import time

import pytest
import torch
from support import engine_ranks
from support.engine_models import MLA, SPECS, TINY, engine, greedy, prompts

from dspark_mini import place
from dspark_mini.launch import run_ranks
from ladder.engine import layers
from ladder.engine.layers import AWAY, run_experts
from ladder.engine.parallel import Parallel
from ladder.lab import interpret

ASKED = prompts((1, 5, 33, 70))


@pytest.fixture(scope="module")
def two():
    return run_ranks(engine_ranks.answers, 2, ASKED, 6, timeout_s=120)


@pytest.mark.parametrize("model", SPECS)
@pytest.mark.parametrize("way", ("whole", "width", "placed"))
def test_two_ranks_answer_as_one_process(two, model, way):
    want = engine(SPECS[model]).generate(ASKED, greedy(6))
    assert len({token for answer in want for token in answer}) >= 6
    for rank in two:
        got, log, parameters = rank["answers"][model, way]
        assert got == want
        assert parameters < SPECS[model].parameters
        assert any("2 ranks, tensor parallel" in line for line in log)


def test_the_bench_row_of_ranks(two):
    row = two[0]["row"]
    assert row["case"]["tensor_parallel"] == 2 and row["case"]["experts"] == "whole" and row["tok_s"] > 0


def test_a_killed_rank_is_an_error_and_no_hang():
    began = time.monotonic()
    said = run_ranks(engine_ranks.lost, 2, timeout_s=60, may_die=[1])
    assert "engine: rank 0 of 2 lost another rank" in said[0] and time.monotonic() - began < 40


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("way", ("whole", "width", "placed"))
def test_the_parts_add_up(ranks, way):
    """Every rank's part of a layer, summed here without a group, is the layer."""
    tiny = dataclasses.replace(TINY, config=dataclasses.replace(TINY.config, num_kv_heads=4))  # every rank has one
    spec = tiny if way != "whole" or ranks == 4 else MLA
    c, g = spec.config, torch.Generator().manual_seed(0)
    stack = c.num_experts + getattr(c, "num_shared", 0)
    gate_up, down = torch.randn(stack, 2 * c.expert_width, c.width, generator=g), torch.randn(stack, c.width, c.expert_width, generator=g)
    x = torch.randn(130, c.width, generator=g)  # more tokens than turns
    ids = torch.rand(130, c.num_experts, generator=g).topk(c.top_k).indices
    weights = torch.rand(130, c.top_k, generator=g)
    want = run_experts(x, ids, weights, gate_up, down, stack - c.num_experts)
    options = dict(engine_ranks.ways(0, ranks))[way](spec)
    total, rows = 0, 0
    for rank in range(ranks):
        part = Parallel(rank, ranks, "cpu", **options)
        moe = type("Layer", (), dict(layer=getattr(c, "num_dense", 0), config=part.local(c)))
        name = f"blocks.{moe.layer}.mlp."
        table = part.table(moe, torch.device("cpu"))
        mine = [part.cut(name + leaf, weight, c) for leaf, weight in (("gate_up", gate_up), ("down", down))]
        total = total + run_experts(x, ids, weights, *mine, getattr(moe.config, "num_shared", 0), table)
        rows += 0 if table is None else int((table[torch.arange(130)[:, None] % len(table), ids] < AWAY).sum())
    torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-4)
    assert way == "width" or rows == ids.numel()  # every assignment is computed once


def test_copies_take_turns_by_their_shares():
    c = TINY.config
    load = [[900.0, 100.0, 50.0, 50.0]] * c.num_layers
    plan = place(load, num_gpus=2, num_slots=6)
    tables = [Parallel(rank, 2, "cpu", placement=plan).table(type("L", (), dict(layer=0, config=c)), "cpu") for rank in range(2)]
    here = torch.stack([(t < AWAY).float() for t in tables])
    assert (here.sum(dim=0) == 1).all()  # every token of every expert on one rank
    work = (here.mean(dim=1) * torch.tensor(load[0])).sum(dim=1)
    assert abs(work[0] / work[1] - 1) < 0.1


def test_a_checkpoint_is_cut_as_a_whole_model_is(tmp_path):
    from support.engine_models import checkpoint_tensors, write_checkpoint

    write_checkpoint(tmp_path, checkpoint_tensors(MLA.config), MLA.config)
    assert all(run_ranks(engine_ranks.weights, 2, str(tmp_path), timeout_s=60))


@pytest.mark.skipif(not interpret.has_triton(), reason="Triton is not installed")
@pytest.mark.parametrize("tokens", (5, 70))
def test_the_gpu_path_of_a_part_in_the_interpreter(tokens, monkeypatch):
    """Rows of other ranks' experts are never written, so they hold NaN here and must not reach the sum."""
    c = MLA.config
    g = torch.Generator().manual_seed(tokens)
    gate_up, down = torch.randn(10, 64, c.width, generator=g) * 0.3, torch.randn(10, c.width, 32, generator=g) * 0.3
    x, weights = torch.randn(tokens, c.width, generator=g), torch.rand(tokens, 2, generator=g)
    ids = torch.rand(tokens, 8, generator=g).topk(2).indices
    plan = place(torch.rand(1, 8, generator=g).numpy() ** 3, num_gpus=2, num_slots=10)
    moe = type("Layer", (), dict(layer=1, config=dataclasses.replace(c, num_shared=1)))
    empty = torch.Tensor.new_empty

    def unwritten(self, *shape, **options):
        return empty(self, *shape, **options).fill_(float("nan") if self.is_floating_point() else 0)

    monkeypatch.setattr(torch.Tensor, "new_empty", unwritten)
    monkeypatch.setattr(layers, "grouped_product", nan_behind(layers.grouped_product))
    total = {}
    for rank in range(2):
        part = Parallel(rank, 2, "cpu", placement=plan)
        table = part.table(moe, "cpu")
        mine = [part.cut("blocks.1.mlp." + leaf, weight, c) for leaf, weight in (("gate_up", gate_up), ("down", down))]
        for few in (1024, 0):
            monkeypatch.setattr(layers, "FEW_ASSIGNMENTS", few)
            for product in ("library", "streamed") if few else ("library",):
                got = layers.fast_experts(x, ids, weights, *mine, 1, product, table)
                total[few, product] = total.get((few, product), 0) + got
    want = run_experts(x, ids, weights, gate_up, down, 2)
    for got in total.values():
        torch.testing.assert_close(got, want)


def nan_behind(product):
    """A grouped product that leaves rows behind the last group as the library's does: unwritten."""

    def run(x, weight, ends, short=False):
        rows = product(x, weight, ends)
        return torch.cat([rows, rows.new_full((len(x) - len(rows), rows.shape[1]), float("nan"))])

    return run


@pytest.mark.parametrize("options", ([], ["--experts", "width"]))
def test_the_command_under_torchrun(options):
    """The text of one process, printed once."""
    command = ["-m", "ladder.engine", "generate", "--device", "cpu", "--backend", "sdpa", "--prompt", "import ", "--max-tokens", "12"]
    alone = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    several = subprocess.run([sys.executable, *torchrun, *command, *options], capture_output=True, text=True, timeout=120)
    assert several.returncode == 0, several.stderr[-2000:]
    assert several.stdout == alone.stdout and "2 ranks, tensor parallel" in several.stderr


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    "spec, size, options, message",
    [
        (TINY, 4, {}, "num_kv_heads is 2; want a multiple of 4"),
        (MLA, 4, {}, "num_shared is 2; want a multiple of 4, the number of ranks; with experts 'width'"),
        (MLA, 3, {"experts": "width"}, "num_heads is 4; want a multiple of 3"),
        (TINY, 2, {"experts": "half"}, "experts is 'half'; want one of whole, width"),
        (TINY, 2, {"placement": place([[1.0, 2.0]], num_gpus=2, num_slots=2)}, "placement is for"),
        (TINY, 2, {"placement": place([[1.0] * 4], num_gpus=4, num_slots=4)}, "placement is for 4 GPUs"),
    ],
)
def test_what_does_not_divide_is_said_before_anything_is_allocated(spec, size, options, message):
    with pytest.raises(ValueError, match=message):
        engine(dataclasses.replace(spec, parallel=Parallel(0, size, "cpu", **options)))
