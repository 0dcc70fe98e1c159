"""What the ranks of the distributed tests run. One set of processes does many checks: starting them costs the most."""

import itertools
import os
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dspark_mini import Placement, place
from dspark_mini.baselines import contiguous, equal_split
from dspark_mini.dispatch import ExchangeError, exchange_rows, migrate, moe_forward, plan_exchange
from dspark_mini.experts import Experts, moe_reference
from dspark_mini.launch import connect, join_group
from dspark_mini.rebalancing import rebalance

EXPERTS, TOP_K, DIM, HIDDEN = 16, 3, 24, 20


def join(rank, ranks, port, timeout_s=30):
    store = connect(port)
    join.number = getattr(join, "number", 0) + 1  # every group meets under a name of its own
    join_group(store, f"test/{join.number}", rank, ranks, timeout_s=timeout_s)
    return store


def inputs(seed, rank, tokens, hot=None):
    """Tokens of one rank: states, expert ids and weights. With `hot`, every token's first choice is that expert."""
    g = torch.Generator().manual_seed(seed * 100 + rank)
    x = torch.randn(tokens, DIM, generator=g)
    popularity = torch.linspace(2, -2, EXPERTS)
    ids = (popularity + torch.randn(tokens, EXPERTS, generator=g)).topk(TOP_K).indices
    if hot is not None and tokens:
        ids = torch.stack(
            [torch.full((tokens,), hot), *((hot + 1 + k) % EXPERTS + 0 * ids[:, 0] for k in range(TOP_K - 1))], 1
        )
    return x, ids, torch.rand(tokens, TOP_K, generator=g).softmax(-1)


def placements(ranks):
    """Placements of one layer to try: one copy each, replicated, indivisible slots, duplicates on one GPU."""
    load = np.linspace(20, 1, EXPERTS)[None]
    yield "contiguous", contiguous(load, num_gpus=ranks)
    yield "replicated", place(load, num_gpus=ranks, num_slots=EXPERTS + 2 * ranks)
    yield "indivisible", place(load, num_gpus=ranks, num_slots=EXPERTS + ranks // 2 + 1)
    yield "duplicates", Placement(np.sort(np.arange(2 * EXPERTS) % EXPERTS)[None], load, ranks)


def token_counts(ranks):
    """Tokens per rank: even, uneven, some ranks with none, only one rank with any, nobody."""
    yield "even", [32] * ranks
    yield "uneven", [7 * (r + 1) % 23 + 1 for r in range(ranks)]
    yield "some empty", [0 if r % 2 else 13 for r in range(ranks)]
    yield "only the last", [0] * (ranks - 1) + [17]
    yield "none", [0] * ranks


def experts_of(plan, rank):
    return Experts(plan.slot_expert[:, plan.slot_gpu == rank], dim=DIM, hidden=HIDDEN)


def layer_checks(rank, ranks):
    """Every placement with every token count: bit-identical to one process, and tokens where the plan says."""
    wrong, checked = [], 0
    for (name, plan), (case, tokens) in itertools.product(placements(ranks), token_counts(ranks)):
        experts = experts_of(plan, rank)
        for hot, split in itertools.product((None, 5), ({}, {"split": equal_split})):
            x, ids, weights = inputs(3, rank, tokens[rank], hot)
            stats = {}
            strided = torch.empty(len(x), 2 * DIM)[:, ::2].copy_(x)  # any strides will do
            out = moe_forward(strided, ids, weights, experts, plan, 0, stats=stats, **split)
            checked += 1
            if not torch.equal(out, moe_reference(x, ids, weights, 0, num_experts=EXPERTS, hidden=HIDDEN)):
                wrong.append((name, case, hot))
            elif stats["plan"].rank_tokens.sum() != sum(tokens) * TOP_K:
                wrong.append((name, case, "tokens lost"))
    return {"wrong": wrong, "checked": checked}


def padding_check(rank, ranks):
    """Padding (-1) is computed by nobody and adds nothing."""
    plan = place(np.ones((1, EXPERTS)), num_gpus=ranks, num_slots=EXPERTS + ranks)
    x, ids, weights = inputs(1, rank, 10)
    ids[4:7] = -1
    ids[8, 1] = -1
    stats = {}
    out = moe_forward(x, ids, weights, experts_of(plan, rank), plan, 0, stats=stats)
    assert torch.equal(out, moe_reference(x, ids, weights, 0, num_experts=EXPERTS, hidden=HIDDEN))
    assert (out[4:7] == 0).all()
    assert stats["plan"].counts.sum() == ranks * (10 * TOP_K - 3 * TOP_K - 1)


def disagreement_checks(rank, ranks):
    """One rank differs from the others in one thing; all ranks must raise, and the group must stay usable."""
    plan = place(np.ones((2, EXPERTS)), num_gpus=ranks, num_slots=EXPERTS + ranks)
    other = Placement(plan.slot_expert[:, ::-1].copy(), plan.load, ranks)
    x, ids, weights = inputs(1, rank, 4)
    odd = rank == ranks - 1
    messages = {}

    def refused(name, call, *args, own=False, **keywords):
        """All ranks must raise ExchangeError; if the mistake is the odd rank's `own`, that rank a ValueError."""
        with pytest.raises(ValueError if own and odd else ExchangeError) as error:
            call(*args, **keywords)
        messages[name] = str(error.value)

    def crooked(counts, placement, layer):
        """All tokens to the first copy of each expert, on the odd rank to the last: both legal, but not the same."""
        tokens = np.zeros(placement.num_slots, dtype=np.int64)
        for n, slots in zip(counts.tolist(), placement.slots_of(layer)):
            tokens[slots[-1 if odd else 0]] = n
        return tokens

    refused("placement", plan_exchange, ids, other if odd else plan, 0, width=DIM)
    refused("layer", plan_exchange, ids, plan, 1 if odd else 0, width=DIM)
    refused("width", plan_exchange, ids, plan, 0, width=DIM + odd)
    refused("dtype", plan_exchange, ids, plan, 0, width=DIM, dtype=torch.float64 if odd else torch.float32)
    refused("top_k", plan_exchange, ids[:, :2] if odd else ids, plan, 0, width=DIM)
    refused("ids", plan_exchange, ids + EXPERTS * odd, plan, 0, width=DIM, own=True)
    skew = inputs(1, rank, 9, hot=0)[1]  # expert 0 has two copies
    refused("split", plan_exchange, skew, plan, 0, width=DIM, split=crooked)
    experts = experts_of(plan, rank)
    experts.held = experts.held[:, ::-1] if odd else experts.held
    refused("weights", moe_forward, x, ids, weights, experts, plan, 0, own=True)
    ones, rows = [1] * ranks, torch.zeros(ranks + odd, 4)
    refused("send sizes", exchange_rows, rows, ones[:-1] + [1 + odd], ones)
    refused("row width", exchange_rows, torch.zeros(ranks, 4 + odd), ones, ones)
    refused("own sum", exchange_rows, rows, ones, ones, own=True)
    plan_exchange(ids, plan, 0, width=DIM)  # still in step
    return messages


def row_checks(rank, ranks):
    """exchange_rows with strided input and output, unequal and zero counts: every row arrives, in order."""
    send = [(rank + 2 * r) % 4 for r in range(ranks)]
    receive = [(r + 2 * rank) % 4 for r in range(ranks)]
    rows = torch.cat([torch.arange(n * 3).view(n, 3) + 1000 * rank + 100 * r for r, n in enumerate(send)]).float()
    wide = torch.empty(len(rows), 6)[:, ::2].copy_(rows)
    want = torch.cat([torch.arange(n * 3).view(n, 3) + 1000 * r + 100 * rank for r, n in enumerate(receive)]).float()
    out = torch.full((sum(receive), 9), -1.0)
    exchange_rows(wide, send, receive, out=out[:, ::3])
    assert torch.equal(out[:, ::3], want)
    assert (out[:, 1::3] == -1).all() and (out[:, 2::3] == -1).all()
    assert torch.equal(exchange_rows(rows, send, receive), want)


def migration_check(rank, ranks):
    """After a rebalancing every slot holds the weights that the new placement names, fetched from peers."""
    load = np.random.default_rng(0).lognormal(0, 1, (3, EXPERTS))
    plan = place(load, num_gpus=ranks, num_slots=EXPERTS + 2 * ranks)
    experts = experts_of(plan, rank)
    new, moves = rebalance(plan, load[:, ::-1].copy())
    migrate(experts, moves, new)
    wanted = experts_of(new, rank)
    assert (experts.held == wanted.held).all() and torch.equal(experts.weights, wanted.weights)
    return len(moves)


def all_checks(rank, ranks, port):
    """Everything above in one set of processes, each check in its own group."""
    results = {}
    checks = [layer_checks, padding_check, row_checks, migration_check, disagreement_checks]
    for check in checks if ranks > 1 else checks[:-1]:
        join(rank, ranks, port)
        results[check.__name__] = check(rank, ranks)
        dist.barrier()
        dist.destroy_process_group()
    return results


def die_in_exchange(rank, ranks, port, how):
    """The last rank dies, or naps, instead of joining an exchange; how long until the others know?"""
    store = join(rank, ranks, port, timeout_s=2)
    dist.barrier()
    if rank == ranks - 1:
        store.set("time", repr(time.time()))
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP)
    _, ids, _ = inputs(1, rank, 4)
    plan = place(np.ones((1, EXPERTS)), num_gpus=ranks, num_slots=EXPERTS)
    try:
        plan_exchange(ids, plan, 0, width=DIM)
    except RuntimeError as error:
        assert not isinstance(error, ExchangeError)
        return time.time() - float(store.get("time"))
    raise AssertionError("the exchange went through without the last rank")


def fail_with_value_error(rank, ranks, port):
    if rank == 1:
        raise ValueError("this rank has a bug")
    time.sleep(60)
