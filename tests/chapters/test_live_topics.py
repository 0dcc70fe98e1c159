"""The live cells of chapters 00, 09, 10 and 11: what their programs measure on a CPU, and what they show of it."""

import json

import pytest
import torch
from support import ROOT

pytest.importorskip("ipywidgets")

from ladder.chapters import live_machine, plots
from ladder.chapters.ch09_profiling import live as profiling
from ladder.chapters.ch10_scheduling import live as scheduling
from ladder.chapters.ch11_end_to_end import live as end_to_end
from ladder.engine.models import find
from ladder.lab import results

CELLS = {"00_orientation": live_machine, "09_profiling": profiling, "10_scheduling": scheduling, "11_end_to_end": end_to_end}
BACKENDS = ("sdpa", "step01")  # steps 07 and 08 would run in the interpreter here
SERVED = dict(shape=dict(input_len=24, output_len=4, concurrency=2), low=torch.float32, page_size=16, backends=BACKENDS)


def measured(module, **options):
    said = []
    doc = module.measure(module.TOPIC.name, lambda *what: said.append(what), "cpu", **options)
    assert said and all(done < of for done, of, _ in said)
    return json.loads(json.dumps(doc))


def shown_whole(shown):
    """The sentence and the table, after the notebook's form was made too."""
    bundle = shown._repr_mimebundle_()
    assert bundle["text/plain"] == repr(shown) and "<table>" in bundle["text/html"]
    headings, lines = shown.table()
    assert lines and all(len(line) == len(headings) for line in lines)
    return repr(shown)


def test_the_machine():
    shown = live_machine.Machine(measured(live_machine))
    text = shown_whole(shown)
    assert "FLOPs per byte" in shown.verdict() and "recorded on NVIDIA H200" in text
    assert plots.png(shown.figure()).startswith(b"\x89PNG")


def test_the_profile():
    doc = measured(profiling, spec=find("tiny-moe"), tokens=64, backends=BACKENDS)
    assert "no kernel of attention" in shown_whole(profiling.Profile(doc)), "no operator of step 01 is called attention"
    old, new = doc["rows"]
    assert old["attention_ms"] > 0 and old["attention_ms"] < old["work_ms"] and old["case"]["layers"] == 6
    old |= {"work_ms": 10.0, "attention_ms": 5.0}
    new |= {"work_ms": 6.0, "attention_ms": 2.5}
    shown = profiling.Profile(doc)
    assert "2.00 x as fast, so Amdahl's law promises 1.33 x" in shown.verdict() and "Measured: 1.67 x" in shown.verdict()
    assert plots.png(shown.figure()).startswith(b"\x89PNG")
    doc["rows"][1] = {"case": new["case"], "impl": "step01", "skipped": "does not fit"}
    assert "could not be profiled here: does not fit" in shown_whole(profiling.Profile(doc))


def test_the_layer_of_experts(monkeypatch):
    sizes = dict(dim=64, hidden=32)
    doc = measured(scheduling, sizes=sizes, tokens=2048)
    shown = scheduling.Layers(doc)
    assert shown.ok and "where counting tokens promises" in shown.verdict()
    first, greedy, ours = shown.layers
    assert sum(first["rows"]) == sum(greedy["rows"]) == sum(ours["rows"]) and len(ours["gpu_ms"]) == scheduling.GPUS
    assert first["balancedness"] < greedy["balancedness"] <= ours["balancedness"]
    shown_whole(shown)
    exchange = {"case": {"mode": "exchange", "gpus": 2, "routing": "zipf"}, "impl": "placed", "step_s": 0.004}
    skipped = {"case": {"mode": "exchange", "gpus": 2}, "impl": "exchange", "skipped": "no link"}
    text = shown_whole(scheduling.Layers({**doc, "rows": [*doc["rows"], exchange, skipped]}))
    assert "placed, gpus 2, routing zipf |  | 4 a step" in text and "no link" in text
    right = scheduling.Experts.run
    monkeypatch.setattr(scheduling.Experts, "run", lambda *args: 1.1 * right(*args))
    wrong = scheduling.Layers(measured(scheduling, sizes=sizes, tokens=2048))
    assert not wrong.ok and wrong.verdict().startswith("Parity FAILED")


def test_the_engine(monkeypatch):
    doc = measured(end_to_end, spec=find("tiny-moe"), **SERVED)
    shown = end_to_end.Served(doc)
    assert shown.ok and shown.verdict().startswith("Parity ok") and len(shown.served) == 2
    shown_whole(shown)
    case = next(r["case"] for r in results.load("engine")["rows"] if r["case"].get("input_len") == 4096 and "ttft_ms" in r
                and r["impl"] == "step08_dflash2" and r["case"]["model"] == "deepseek-v2-lite" and "tensor_parallel" not in r["case"])
    whole = {**shown.served[1], "case": case, "impl": "step08_dflash2", "layers": 27}
    assert end_to_end.SHAPE.items() <= case.items(), "the live cell serves what is recorded"
    assert shown.recorded(whole)["ttft_ms"] > 0 and shown.recorded({**whole, "layers": 4}) == {}
    doc["rows"][1]["ok"] = False
    assert end_to_end.Served(doc).verdict().startswith("Parity FAILED. step01: logits are")
    monkeypatch.setattr("ladder.engine.bench.throughput", lambda *a, **o: (_ for _ in ()).throw(ValueError("needs 40 GB")))
    assert "needs 40 GB" in shown_whole(end_to_end.Served(measured(end_to_end, spec=find("tiny-moe"), **SERVED)))


def test_wrong_logits_are_seen(monkeypatch):
    right = end_to_end.logits
    monkeypatch.setattr(end_to_end, "logits", lambda backend, *a: right(backend, *a) + (0.1 if backend == "step01" else 0))
    rows = end_to_end.parity(torch.device("cpu"), torch.float32, BACKENDS)
    assert [row["ok"] for row in rows] == [True, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", CELLS)
def test_without_a_gpu_one_line(name, capsys):
    assert CELLS[name].show() is None
    said = capsys.readouterr().out
    assert said == CELLS[name].TOPIC.without_gpu + "\n" and "On one, this cell " in said


@pytest.mark.parametrize("name", CELLS)
def test_the_chapter_has_its_live_cell(name):
    """nbval leaves the cell out, for on a GPU it shows that GPU; what is committed is the line of a CPU."""
    notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code" and "nbval-ignore-output" in c["metadata"].get("tags", [])]
    assert len(cells) == 1 and "show()" in "".join(cells[0]["source"])
    assert "".join(cells[0]["outputs"][0]["text"]) == CELLS[name].TOPIC.without_gpu + "\n"


@pytest.mark.parametrize("module", [live_machine, profiling, scheduling, end_to_end])
def test_a_change_of_its_sources_makes_cached_numbers_stale(module, monkeypatch):
    monkeypatch.setattr(results, "machine", lambda device="cpu": {"gpu": "a card"})
    for pattern in module.TOPIC.sources:
        assert list((ROOT / "ladder").glob(pattern)), pattern
    assert module.TOPIC.cache.name.startswith(module.TOPIC.name)
