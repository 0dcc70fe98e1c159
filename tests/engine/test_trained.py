"""The trained tiny-moe: its record, its text, its routing and its attention inputs."""

import json
import re

import numpy as np
import pytest
import torch

from dspark_mini.trace import read_trace
from ladder.engine import corpus, quality
from ladder.engine.engine import Engine, SamplingParams
from ladder.engine.models import find, tiny_moe
from ladder.engine.train_tiny_moe import bits_per_byte
from ladder.lab.parity import Oracle
from ladder.lab.problem import TINY_MOE
from ladder.rungs import RUNGS

pytestmark = pytest.mark.skipif(not tiny_moe.WEIGHTS.is_file(), reason="tiny-moe is not trained yet")

RECORD = tiny_moe.WEIGHTS.with_name("tiny_moe_training.json")
TRACE = quality.__file__.rsplit("/ladder/", 1)[0] + "/dspark_mini/data/tiny_moe_trace.npz"


def test_the_record_fits_the_weights():
    record = json.loads(RECORD.read_text())
    assert record["finished"] and tiny_moe.WEIGHTS.stat().st_size <= 16_000_000
    assert record["parameters"] == find("tiny-moe").parameters
    assert record["curve"][0]["bits_per_byte"] > 5 > 2 > record["held_out_bits_per_byte"]["4096"]
    assert record["held_out_bits_per_byte"]["4096"] < record["held_out_bits_per_byte"]["512"], "long context helps"


def test_held_out_bits_per_byte_here():
    """This Python's library may differ from the one that was recorded, but not by much; nothing of it was learnt."""
    recorded = json.loads(RECORD.read_text())["held_out_bits_per_byte"]["1024"]
    text = torch.tensor(list(corpus.join([d for d in corpus.documents() if d[2]])))
    starts = torch.linspace(0, len(text) - 1025, 8).long().tolist()
    model = tiny_moe.load()
    here = sum(bits_per_byte(model, text[s : s + 1025], 1024, 1, torch.float32, 1024) for s in starts) / len(starts)
    assert abs(here - recorded) < 0.5


def test_it_writes_python():
    engine = Engine(find("tiny-moe"), "sdpa", device="cpu", kv_tokens=512, max_seqs=4)
    prompts = ["import ", "def __init__(self", "for i in ran"]
    answers = engine.generate([list(p.encode()) for p in prompts], SamplingParams(max_tokens=24))
    texts = [p + bytes(a).decode(errors="replace") for p, a in zip(prompts, answers)]
    assert re.match(r"import [a-z_]{2,}\b", texts[0])
    assert re.match(r"def __init__\(self[,)]", texts[1])
    assert re.match(r"for i in range\(", texts[2])


def test_routing_is_skewed_and_alive():
    trace = read_trace(TRACE)
    assert (trace.num_layers, trace.num_experts, trace.top_k, trace.generated) == (6, 16, 2, False) and trace.num_tokens == 4096
    counts = trace.counts()
    assert ((counts.max(1) / counts.mean(1)) > 1.2).all()
    assert (counts > 0).mean() > 0.9
    assert not np.array_equal(trace.topk_ids[0], trace.topk_ids[1])


def test_attention_inputs_are_real():
    q, k, v = TINY_MOE.make()
    assert q.shape == (3, 8, 1024, 64) and k.shape == v.shape == (3, 2, 1024, 64) and q.dtype == torch.float16
    assert all(torch.isfinite(x).all() and x.float().std() > 0.05 for x in (q, k, v))
    small = TINY_MOE.replace(B=1, Sq=96, Sk=96)
    q, k, v = small.make()
    oracle = Oracle(q, k, v, causal=True)
    for rung in RUNGS:
        if rung.why_not(small) is None and not rung.needs_triton:
            assert oracle.check(rung.attention(q, k, v, causal=True)), rung.name
    with pytest.raises(ValueError, match="8 query and 2 KV heads of size 64"):
        TINY_MOE.replace(Hkv=8).make()
