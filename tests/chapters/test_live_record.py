"""What ``live_record`` makes of a chapter: its time, its live cell's verdict and rows, and its refusals."""

import nbformat
import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from ladder.chapters import live_record

MEASURES = """
import json, os, pathlib
from IPython.display import HTML, display
row = {"case": {"mode": "test"}, "impl": "a rung", "ok": %s}
pathlib.Path(os.environ["LADDER_LIVE_CACHE"], "a.json").write_text(json.dumps({
    "schema": 1, "recorded": "", "commit": "", "command": "", "machine": {}, "limits": None, "rows": [row], "seconds": 2}))
display(HTML("progress"))

class Shown:
    def _repr_mimebundle_(self, **_):
        return {"text/html": "<b>x</b>", "text/plain": "%s\\na table"}

Shown()
"""


def written(tmp_path, source, tags=(live_record.TAG,)):
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": list(tags)})
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1"), cell]), tmp_path / "00_a.ipynb")
    return tmp_path / "00_a.ipynb"


@pytest.mark.parametrize("ok, verdict, right", [(True, "Parity ok.", True), (False, "Parity ok.", False), (True, "Parity FAILED.", False)])
def test_a_chapter_is_run_and_its_rows_are_kept(tmp_path, ok, verdict, right):
    entry, rows = live_record.chapter(written(tmp_path, MEASURES % (ok, verdict)), tmp_path / "cache")
    assert entry["verdict"] == verdict and entry["ok"] is right and entry["measured"] == 1 and entry["live_seconds"] == 2
    assert rows == [{"case": {"mode": "test"}, "impl": "a rung", "ok": ok, "chapter": "00_a"}]


@pytest.mark.parametrize("source, tags", [("print('There is no CUDA device here.')", (live_record.TAG,)), ("1", ())])
def test_a_chapter_without_a_measurement_is_refused(tmp_path, source, tags):
    with pytest.raises(RuntimeError, match="00_a.ipynb: a live cell showed no measurement"):
        live_record.chapter(written(tmp_path, source, tags), tmp_path / "cache")


def test_a_record_holds_every_chapter_and_what_failed(tmp_path, monkeypatch, capsys):
    good = written(tmp_path, MEASURES % (True, "Parity ok."))
    bad = good.rename(tmp_path / "01_b.ipynb")
    written(tmp_path, MEASURES % (True, "Parity ok."))
    bad.write_text(bad.read_text().replace("1 + 1", "1 / 0"))
    monkeypatch.setattr(live_record.results, "machine", lambda device: {"gpu": "a card"})
    assert live_record.record([tmp_path / "00_a.ipynb", bad], 2, tmp_path / "record.json") == 1
    doc = live_record.results.read(tmp_path / "record.json")
    assert [row["case"] for row in doc["rows"]] == [{"mode": "chapter", "chapter": "00_a"}, {"mode": "test"}]
    assert doc["failures"][0]["chapter"] == "01_b" and "ZeroDivisionError" in doc["failures"][0]["error"]
    said = capsys.readouterr()
    assert said.out.startswith("00_a: ") and "Parity ok." in said.out and "01_b: FAILED" in said.err


def test_the_committed_record_holds_every_chapter_without_a_failure():
    doc = live_record.results.load("live_h200")
    chapters = {row["case"]["chapter"]: row for row in doc["rows"] if row["case"]["mode"] == "chapter"}
    assert set(chapters) == {path.stem for path in live_record.FOLDER.glob("*.ipynb")} and doc["failures"] == []
    assert all(row["ok"] and row["measured"] > 0 for row in chapters.values())
    rungs = [row for name, row in chapters.items() if "01" <= name[:2] <= "08"]
    assert all(row["live_seconds"] < 30 for row in rungs), "a live part takes less than half a minute"
