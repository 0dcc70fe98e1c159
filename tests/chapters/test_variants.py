"""Chapter 02's variant of rung 02 is right, and what chapters 01 and 02 explain follows from the record."""

import copy

import pytest
import torch

from ladder import step01_naive, step02_tiled
from ladder.chapters.ch01_05_rungs import tables, variants
from ladder.lab import results
from ladder.lab.parity import Oracle
from ladder.lab.problem import MINILM, AttentionProblem
from ladder.lab.trace import Traffic

PROBLEMS = {
    "real input": MINILM.replace(B=1, Sq=200, Sk=200),
    "causal bf16": AttentionProblem(Hq=4, Hkv=4, Sq=130, Sk=170, D=32, Dv=32, causal=True, dtype="bfloat16"),
    "rows that see no key": AttentionProblem(B=2, Hq=2, Hkv=2, Sq=96, Sk=40, D=32, Dv=32, causal=True),
    "one token": AttentionProblem(Hq=4, Hkv=4, Sq=1, Sk=333, D=64, Dv=64, dtype="bfloat16"),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_16_bit_products_stay_within_the_budget(problem):
    q, k, v = problem.make()
    oracle = Oracle(q, k, v, causal=problem.causal)
    out = variants.tiled_16bit(q, k, v, causal=problem.causal, tile_q=64, tile_k=32)
    assert oracle.check(out), oracle.check(out).reason
    assert oracle.agree(out, step02_tiled.attention(q, k, v, causal=problem.causal))


def test_float32_inputs_are_rung_02():
    q, k, v = AttentionProblem(Hq=2, Hkv=2, Sq=50, Sk=70, D=32, Dv=32, dtype="float32").make()
    torch.testing.assert_close(variants.tiled_16bit(q, k, v), step02_tiled.attention(q, k, v))


def test_shapes_that_rung_02_refuses_are_refused():
    with pytest.raises(NotImplementedError, match="grouped heads"):
        variants.tiled_16bit(*AttentionProblem(Hq=4, Hkv=2, Sq=8, Sk=8, D=16, Dv=16).make())


@pytest.mark.parametrize("causal", [False, True])
def test_bytes_of_float32_inputs_are_those_that_run(causal):
    """With float32 inputs there is no cast on the CPU, except that of the weights to their own dtype, which is free."""
    problem = AttentionProblem(Hq=16, Hkv=16, Sq=512, Sk=512, D=32, Dv=32, dtype="float32", causal=causal)
    with Traffic() as seen:
        variants.tiled_16bit(*problem.make(), causal=causal)
    rounding = problem.B * problem.Hq * problem.Sq * problem.Sk * 8
    assert seen.num_bytes == pytest.approx(variants.bytes_moved(problem) - rounding, rel=0.05)


def test_a_causal_call_of_rung_01_moves_what_the_table_says():
    """The bytes of a causal call, with masked_fill replaced by the two kernels that it runs."""
    problem = AttentionProblem(Hq=8, Hkv=8, Sq=256, Sk=256, D=32, Dv=32, causal=True)
    q, k, v = problem.make()
    with Traffic() as seen:
        step01_naive.attention(q, k, v, causal=True)
    scores, hidden = torch.zeros(1, 8, 256, 256, dtype=q.dtype), torch.zeros(256, 256, dtype=torch.bool)
    with Traffic() as inside:
        scores.clone().masked_fill_(hidden, 0.0)
    masks = sum(a + b for name, a, b in seen.operations if name == "masked_fill")
    others = sum(a + b for name, a, b in seen.operations if name in ("ones", "triu"))
    counted = seen.num_bytes - others - masks + inside.num_bytes + 7 * hidden.nbytes  # each head loads the mask
    assert counted == tables.naive_kernel_bytes(problem)
    assert tables.naive_kernel_bytes(problem.replace(causal=False)) == step01_naive.bytes_moved(
        problem.replace(causal=False)
    )


def test_two_causes_of_rung_02_follow_from_the_record():
    doc = tables.numbers()
    causes = tables.tiled_causes(doc)
    total = tables.ms(doc, "step02_tiled", tables.plain(16384))
    assert 0 < causes["products, data sheet"] < causes["products, from 02 and 03"] < total
    assert causes["products, from 02 and 03"] + causes["bytes"] < total
    assert causes["with 16-bit products"] < total
    assert f"{total:.0f} ms" in tables.tiled_costs(doc).data


def test_the_16_bit_row_is_shown_once_it_is_recorded(monkeypatch, tmp_path):
    doc = copy.deepcopy(tables.numbers())
    row = copy.deepcopy(tables.rows(doc, "step02_tiled", tables.plain(16384))[0])
    row["impl"], row["ms"] = variants.NAME, {"median": 77.7, "p20": 77.0, "p80": 78.0}
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert "not recorded yet" in tables.sixteen_bit().data
    results.write({**doc, "rows": [*doc["rows"], row]}, tmp_path / f"{variants.RECORD}.json")
    text = tables.sixteen_bit().data
    assert "77.7" in text and "not recorded yet" not in text


def test_what_the_products_multiply():
    inputs = AttentionProblem(Hq=2, Hkv=2, Sq=40, Sk=40, D=16, Dv=16).make()
    assert tables.product_dtypes(step01_naive.attention, *inputs) == "float16"
    assert tables.product_dtypes(step02_tiled.attention, *inputs) == "float32"


def test_the_command_writes_a_record_of_all_three(tmp_path, monkeypatch):
    rows = variants.measure("cpu", lengths=(64,), budget_ms=0.0)
    assert len(rows) == 6 and all(row["ok"] for row in rows) and {row["impl"] for row in rows} >= {variants.NAME, "step02_tiled"}
    monkeypatch.setattr(variants, "measure", lambda: rows)
    monkeypatch.setattr(results, "machine", lambda device: {"gpu": "a card"})
    variants.main(["--json", str(tmp_path / "a.json")])
    assert len(results.read(tmp_path / "a.json")["rows"]) == 6
