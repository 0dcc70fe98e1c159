"""Peers: they say why they cannot run, and those that can give the oracle's answer."""

import pytest
import torch
from support.checks import CASES, DEVICE

from ladder.lab import peers
from ladder.lab.parity import Oracle
from ladder.lab.problem import MINILM, SHAPES, AttentionProblem

CPU = torch.device("cpu")
PROBLEMS = {
    "dense": AttentionProblem(Hq=2, Hkv=2, Sq=33, Sk=50, D=16, Dv=16),
    "causal": AttentionProblem(Hq=2, Hkv=2, Sq=40, Sk=40, D=16, Dv=16, causal=True),
    "causal, more keys": AttentionProblem(Hq=2, Hkv=2, Sq=20, Sk=50, D=16, Dv=16, causal=True),
    "grouped": AttentionProblem(Hq=6, Hkv=2, Sq=33, Sk=50, D=16, Dv=16),
    "grouped causal": AttentionProblem(Hq=6, Hkv=2, Sq=20, Sk=50, D=16, Dv=16, causal=True, scale=0.1),
    "unequal": AttentionProblem(Hq=2, Hkv=2, Sq=20, Sk=20, D=24, Dv=16, causal=True),
    "minilm": MINILM.replace(Sq=64, Sk=64),
}


def availability(problem, device):
    """{peer name: None, or the reason it cannot run this problem there}."""
    return {peer.name: peer.why_not(problem, torch.device(device)) for peer in peers.PEERS}


def test_names_are_unique_and_every_refusal_is_a_reason():
    assert len({peer.name for peer in peers.PEERS}) == len(peers.PEERS)
    p = AttentionProblem(**SHAPES["qwen3-moe"])
    for device in ("cpu", CPU):
        reasons = availability(p, device)
        assert set(reasons) == {peer.name for peer in peers.PEERS}
        assert reasons["sdpa"] is None
        assert all(isinstance(why, str) and why for name, why in reasons.items() if name != "sdpa")
        assert [peer.name for peer in peers.peers_for(p, device)] == ["sdpa"]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_peers_agree_with_the_oracle(name, dtype):
    problem = PROBLEMS[name].replace(dtype=dtype)
    q, k, v = problem.make(DEVICE)
    oracle = Oracle(q, k, v, causal=problem.causal, scale=problem.scale)
    for peer in peers.peers_for(problem, DEVICE):
        if peer.name == "flex":
            continue  # compiles a kernel a problem; the GPU tests run it
        parity = oracle.check(peer.build(problem)(q, k, v))
        assert parity, f"{peer.name}: {parity.reason}"


def test_top_left_alignment_would_be_noticed():
    """What the peers must not do on Sq != Sk: ``is_causal`` alone aligns to the top left."""
    q, k, v = CASES["causal 17x33"].tensors()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert not Oracle(q, k, v, causal=True).check(out)


def test_refusals_on_a_hopper_gpu(monkeypatch):
    """The reasons are computed from the problem, so they can be checked without a GPU."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(peers.util, "find_spec", lambda name: object())
    reasons = availability(AttentionProblem(dtype="bfloat16"), cuda)
    assert (
        reasons["sdpa"] and reasons["sdpa_flash"] is reasons["sdpa_cudnn"] is reasons["fa3"] is reasons["flex"] is None
    )
    mla = availability(AttentionProblem(**SHAPES["deepseek-v2-lite"], dtype="bfloat16"), cuda)
    assert mla["sdpa_flash"] == "wants equal head sizes" and mla["flex"] == "wants power-of-two head sizes"
    assert mla["sdpa_cudnn"] is None
    exact = availability(AttentionProblem(dtype="float32"), cuda)
    assert exact["sdpa_flash"] == exact["flashinfer"] == "computes 16-bit types only" and exact["fa3"]
    assert availability(AttentionProblem(D=512, Dv=512), cuda)["sdpa_flash"] == "wants head sizes up to 256"
    monkeypatch.setattr(peers.util, "find_spec", lambda name: None)
    assert "pip install" in availability(AttentionProblem(dtype="bfloat16"), cuda)["fa3"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert availability(AttentionProblem(dtype="bfloat16"), cuda)["fa3"] == "needs a Hopper GPU"
