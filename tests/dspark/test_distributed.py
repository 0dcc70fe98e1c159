"""Real processes over gloo: dispatch, refusals, migration, and ranks that die or hang."""

import time

import numpy as np
import pytest
import torch
from support import dspark_ranks as rank_code

from dspark_mini.dispatch import fingerprint
from dspark_mini.experts import expert_mlp, make_expert, row_matmul
from dspark_mini.launch import RanksFailed, run_ranks
from dspark_mini.runtime import Job, ModelConfig, Options, reference_outputs, serve

CONFIG = ModelConfig(dim=32, hidden=16, num_experts=16, top_k=3, num_layers=2)
JOBS = [Job(tuple((7 * j + i) % 256 for i in range(1 + j % 5)), 3 + j % 9) for j in range(23)]


@pytest.fixture(scope="module")
def reference():
    return reference_outputs(CONFIG, JOBS)


def test_a_row_does_not_depend_on_its_neighbours():
    g = torch.Generator().manual_seed(0)
    for dim, hidden in ((24, 20), (64, 32), (256, 128)):
        w_in, w_out = make_expert(0, 0, dim=dim, hidden=hidden)
        x = torch.randn(50, dim, generator=g)
        alone = torch.cat([expert_mlp(row[None], w_in, w_out) for row in x])
        assert torch.equal(expert_mlp(x, w_in, w_out), alone)
        order = torch.randperm(50, generator=g)
        assert torch.equal(expert_mlp(x[order], w_in, w_out), alone[order])
        torch.testing.assert_close(row_matmul(x, w_in), x @ w_in)


def test_the_fingerprint_sees_order():
    a = np.array([[1, 2], [3, 4]])
    assert fingerprint(a) != fingerprint(a[::-1]) and fingerprint(a) == fingerprint(a.copy())


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_dispatch_combine_and_migration(count):
    results = run_ranks(rank_code.all_checks, count, timeout_s=100)
    for result in results:
        assert result["layer_checks"]["wrong"] == []
        assert result["layer_checks"]["checked"] == 4 * 5 * 2 * 2
    if count > 1:
        assert results[0]["migration_check"] > 0
        messages = [r["disagreement_checks"] for r in results]
        assert all(m == messages[0] for m in messages[:-1])  # the same error on all that did nothing wrong
        wanted = {
            "placement": "disagree on placement",
            "layer": "disagree on layer",
            "width": "disagree on width",
            "dtype": "disagree on dtype",
            "top_k": "disagree on top_k",
            "ids": "invalid expert ids",
            "weights": "not their experts",
            "split": "planned another exchange",
            "send sizes": "rows to rank",
            "row width": "row width",
            "own sum": "refused to exchange",
        }
        assert {name: text in messages[0][name] for name, text in wanted.items()} == dict.fromkeys(wanted, True)
        assert "topk_ids must lie in" in messages[-1]["ids"]
        assert "experts must hold" in messages[-1]["weights"]


@pytest.mark.parametrize("how, low, high", [("kill", 0.0, 1.0), ("freeze", 1.5, 6.0)])
def test_a_lost_peer_is_noticed(how, low, high):
    results = run_ranks(rank_code.die_in_exchange, 3, how, timeout_s=60, may_die=[2])
    assert results[2] is None
    assert all(low <= seconds <= high for seconds in results[:2])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_serving_gives_the_outputs_of_one_process(count, reference):
    reports = run_ranks(serve, count, CONFIG, JOBS, Options(rebalance_every=3), timeout_s=100)
    assert reports[0]["outputs"] == reference
    assert count == 1 or any(e["kind"] == "moved" for e in reports[0]["events"])  # it did rebalance on the way
    assert all(r["history"] == reports[0]["history"] for r in reports)


@pytest.mark.parametrize(
    "count, faults",
    [
        (4, ((2, 3, 1, "kill"),)),  # in the middle of a step
        (4, ((0, 3, 0, "kill"),)),  # the rank that decides
        (2, ((1, 2, 1, "kill"),)),  # one survivor, who must hold all experts
        (5, ((1, 2, 0, "kill"), (3, 5, 1, "kill"))),  # one after the other
        (4, ((1, 3, 1, "kill"), (2, 3, 1, "kill"))),  # two at once
    ],
    ids=["one", "the first", "all but one", "two in turn", "two at once"],
)
def test_killed_ranks_lose_nothing(count, faults, reference):
    lost = [fault[0] for fault in faults]
    reports = run_ranks(serve, count, CONFIG, JOBS, Options(faults=faults, timeout_s=10), timeout_s=100, may_die=lost)
    survivors = [r for r in reports if r]
    assert [r["rank"] for r in survivors] == [r for r in range(count) if r not in lost]
    main = survivors[0]
    assert main["outputs"] == reference and main["members"] == [r["rank"] for r in survivors]
    for report in survivors:
        noticed = [e["time"] for e in report["events"] if e["kind"] == "noticed"]
        for died in main["faults"].values():
            assert min(t - died for t in noticed if t > died - 0.01) < 1.0
        assert any(e["kind"] == "moved" and e["reloaded"] for e in report["events"])  # lost experts came from storage


@pytest.mark.parametrize("how", ["freeze", "nap"])
def test_a_frozen_rank_is_left_behind(how, reference):
    options = Options(faults=((1, 3, 1, how),), timeout_s=2, settle_s=1)
    start = time.monotonic()
    reports = run_ranks(serve, 3, CONFIG, JOBS, options, timeout_s=100, may_die=[1] if how == "freeze" else [])
    assert reports[0]["outputs"] == reference and reports[0]["members"] == [0, 2]
    noticed = [e["time"] for r in reports if r and r["rank"] != 1 for e in r["events"] if e["kind"] == "noticed"]
    assert all(1.5 < t - reports[0]["faults"][1] < 6 for t in noticed)
    if how == "nap":  # it wakes up, finds itself voted out, and leaves
        assert reports[1]["evicted"]
    assert time.monotonic() - start < 60


def test_a_bug_is_not_taken_for_a_lost_peer():
    with pytest.raises(RanksFailed, match="this rank has a bug"):
        run_ranks(rank_code.fail_with_value_error, 2, timeout_s=30)
    with pytest.raises(RanksFailed, match="were not done after"):
        run_ranks(rank_code.fail_with_value_error, 1, timeout_s=4)
