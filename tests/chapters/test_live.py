"""The live cell: what it says without a GPU, what its program measures, and what it shows of a document."""

import json
import sys

import pytest
import torch
from support import ROOT

pytest.importorskip("ipywidgets")

from ladder.chapters import live, live_measure, live_process, plots
from ladder.lab import results
from ladder.lab.decode_problem import DecodeProblem
from ladder.lab.problem import AttentionProblem
from ladder.rungs import RUNGS, find

SMALL = [
    AttentionProblem(Hq=2, Hkv=2, Sq=20, Sk=28, D=16, Dv=16, causal=True, dtype="float32"),
    DecodeProblem(B=2, Hq=4, Hkv=2, context=40, D=16, Dv=16, page_size=16, dtype="float32"),
    DecodeProblem(B=2, Hq=4, Hkv=1, context=33, D=32, Dv=16, page_size=16, dtype="float32", latent=True, scale=0.2),
]


@pytest.fixture
def measured(monkeypatch):
    """A function from a rung's number to the document that its chapter measures, on small problems and this CPU."""
    monkeypatch.setattr(live_measure, "BUDGET_MS", 0.0)

    def measure(number, count=3):
        chosen = SMALL[: 1 if number < 6 else count]
        monkeypatch.setattr(live_measure, "problems", lambda rung: chosen)
        said = []
        doc = live_measure.measure(find(number).name, lambda *what: said.append(what), "cpu")
        assert [done for done, *_ in said] == sorted(done for done, *_ in said) and said[-1][1] == len(chosen) + 1
        return json.loads(json.dumps(doc))

    return measure


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_every_rung_is_held_against_the_one_before(rung, measured):
    doc = measured(rung.number)
    shown = live.Comparison(rung, doc)
    assert shown.ok and shown.verdict().startswith("Parity ok")
    both = [row for row in shown.measured if row["impl"] == rung.name]
    assert len(both) == (1 if rung.number < 6 else 2 if rung.number == 6 else 3)
    assert sum("agrees" in row for row in both) == (0 if rung.number == 1 else len(both) - (rung.number == 7))
    assert all(row["ms"]["median"] > 0 for row in shown.measured)
    text = repr(shown)
    assert rung.title in text and ("MLA arrives with step07_dflash1" in text) == (rung.number in (6, 7))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_would_happen(capsys):
    assert live.compare(5) is None
    line = capsys.readouterr().out
    assert line.count("\n") == 1 and "step05_fused against step04_gqa and float64" in line


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_every_chapter_has_its_live_cell(rung):
    """nbval leaves the cell out, for on a GPU it shows that GPU; what is committed is the line of a CPU."""
    notebook = json.loads((ROOT / "notebooks" / f"{rung.name.removeprefix('step')}.ipynb").read_text())
    cells = [c for c in notebook["cells"] if f'live.compare("{rung.name}")' in "".join(c["source"])]
    assert len(cells) == 1 and cells[0]["metadata"]["tags"] == ["nbval-ignore-output"]
    assert "".join(cells[0]["outputs"][0]["text"]) == live.topic(rung).without_gpu + "\n" and len(cells[0]["outputs"]) == 1


def test_a_wrong_rung_is_seen(measured, monkeypatch):
    right = find(2).module.attention
    monkeypatch.setattr(find(2).module, "attention", lambda *a, **o: right(*a, **o) * 1.01)
    shown = live.Comparison(find(2), measured(2))
    assert not shown.ok and shown.verdict().startswith("Parity FAILED. ") and "Tiled" in shown.verdict()
    monkeypatch.setattr(find(2).module, "attention", lambda *a, **o: torch.empty_like(right(*a, **o)))
    assert "not finite" in live.Comparison(find(2), measured(2)).verdict()


def test_what_does_not_fit_says_how_much_it_needs(measured, monkeypatch):
    monkeypatch.setattr(live_measure, "_free_bytes", lambda device: 1000.0)
    shown = live.Comparison(find(2), measured(2))
    assert not shown.measured and "does not fit (needs 0.0 GB more)" in repr(shown)
    assert shown.verdict() == "Nothing could be measured here."
    shown._repr_mimebundle_()

    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.undo()
    for thing, name in ((AttentionProblem, "make"), (find(2).module, "attention")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live_measure, "problems", lambda rung: SMALL[:1])
            patch.setattr(thing, name, full)
            doc = live_measure.measure("step02_tiled", lambda *what: None, "cpu")
        assert "does not fit" in doc["rows"][-1]["skipped"]


def test_the_problems_fit_their_rungs_and_the_plain_ones_are_recorded():
    for rung in RUNGS:
        chosen = live_measure.problems(rung)
        assert 3 <= len(chosen) <= 4
        assert all(live_measure.why_not(rung, p) is None for p in chosen), rung.name
        doc = results.document([dict(case=p.case(), impl=rung.name) for p in chosen], command="test")
        recorded = [live.Comparison(rung, doc).recorded(row) for row in doc["rows"]]
        assert sum(x is not None for x in recorded) >= 2, (rung.name, recorded)


def test_what_is_shown(measured, monkeypatch):
    doc = measured(8)
    shown = live.Comparison(find(8), doc)
    monkeypatch.setattr(live.Comparison, "recorded", lambda self, row: 0.5)
    bundle = shown._repr_mimebundle_()
    assert bundle["text/html"].count("<tr>") == 1 + len(doc["rows"]) and "data:image/png" in bundle["text/html"]
    assert len(plots.png(shown.figure())) > 10_000
    headings, lines = shown.table()
    assert all(len(line) == len(headings) for line in lines)
    assert live.short("void flash::fwd<int, 3>(float*)") == "flash::fwd" and len(live.short("k" * 80)) == 40


def test_the_program_is_started_without_the_interpreter_and_its_failure_is_one_line(monkeypatch, capsys):
    seen = []

    class Silent:
        def show(self, *what):
            seen.append(what)

        def done(self):
            seen.append("done")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = (
        "import json, os; print(json.dumps({'doing': 'x', 'done': 0, 'of': 2})); print('noise');"
        "print(json.dumps({'document': {'interpreted': 'TRITON_INTERPRET' in os.environ}}))"
    )
    monkeypatch.setattr(live_process.Topic, "program", property(lambda topic: [sys.executable, "-c", topic.does]))

    def run(code):
        return live_process._run(live_process.Topic("a topic", "", code, ()), Silent())

    assert run(code) == ({"interpreted": False}, None)
    assert seen == [(0, 2, "x"), "done"]
    assert run("raise ValueError('no driver')") == (None, "ValueError: no driver")
    assert run("raise SystemExit(3)") == (None, "the process ended with status 3")


def test_the_cache_is_read_and_written(measured, monkeypatch, tmp_path, capsys):
    doc = measured(3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(results, "machine", lambda device="cpu": {"gpu": "a card"})
    runs = []
    monkeypatch.setattr(live_process, "_run", lambda topic, progress: runs.append(topic.name) or (doc, None))
    for _ in range(2):
        assert live.compare(3).ok
    assert runs == ["step03_online_softmax"] and live.topic(find(3)).cache.is_relative_to(tmp_path)
    assert live.compare(3, again=True).ok and len(runs) == 2
    monkeypatch.setattr(live_process, "_run", lambda topic, progress: (None, "no driver"))
    assert live.compare(4) is None and "could not be measured: no driver" in capsys.readouterr().out
