"""Recorded results: what is written is what is read, schema 1 is enforced, and captions say where numbers come from."""

import io
import json
import math
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from ladder.lab import results
from ladder.lab.parity import Parity
from ladder.lab.problem import MINILM, AttentionProblem
from ladder.lab.roofline import Limits
from ladder.lab.timing import Timing


@pytest.fixture
def doc():
    p = AttentionProblem(Hq=2, Hkv=2, Sq=64, Sk=64, D=16, Dv=16, causal=True)
    rows = [
        results.row(p.case(), "step01_naive", timing=Timing(2.0, 1.0, 3.0, 9), flops=p.flops, num_bytes=10**6,
                    peak_bytes=123, parity=Parity(True, 0.001, 0.002)),
        results.row(p.case(), "sdpa", timing=Timing(1.0, 1.0, 1.0, 9)),
        results.row(MINILM.case(), "step01_naive", parity=Parity(False, math.inf, 0.002, "3 of 9 outputs are not finite")),
    ]  # fmt: skip
    return results.document(rows, limits=Limits(1.0, 0.5, 0.4), command="python -m ladder", note="kept")


def test_document_is_stamped(doc):
    assert doc["schema"] == 1 and doc["command"] == "python -m ladder" and doc["note"] == "kept"
    assert doc["limits"] == {"matmul_tflops": 1.0, "read_tbs": 0.5, "copy_tbs": 0.4}
    assert {"gpu", "driver", "cpu", "torch", "triton", "python"} <= set(doc["machine"])
    assert doc["recorded"].endswith("+00:00")


def test_row_computes_rates():
    case = AttentionProblem().case()
    row = results.row(case, "x", timing=Timing(2.0, 1.0, 3.0, 9), flops=8e12, num_bytes=6e9)
    assert row["tflops"] == 4000.0 and row["tbs"] == 3.0 and row["ms"] == {"median": 2.0, "p20": 1.0, "p80": 3.0}
    assert results.row(case, "x") == {"case": case, "impl": "x"}
    failed = results.row(case, "x", parity=Parity(False, math.inf, 0.5, "not finite"))
    assert failed["ok"] is False and failed["max_error"] is None and failed["reason"] == "not finite"
    assert "reason" not in results.row(case, "x", parity=Parity(True, 0.1, 0.5))


def test_round_trip(doc, tmp_path):
    target = tmp_path / "climb.json"
    results.write(doc, target)
    assert results.load(target) == doc
    assert [p.name for p in tmp_path.iterdir()] == ["climb.json"]  # nothing partial is left
    text = target.read_text()
    assert sum(line.startswith('  {"case"') for line in text.splitlines()) == 3  # a row a line
    results.write(doc, target)
    assert target.read_text() == text


def test_write_without_rows_and_to_standard_output(doc, tmp_path):
    results.write({**doc, "rows": []}, tmp_path / "none.json")
    assert results.load(tmp_path / "none.json")["rows"] == []
    with redirect_stdout(io.StringIO()) as out:
        results.write(doc, "-")
    assert json.loads(out.getvalue()) == doc


def test_write_refuses_what_json_cannot_say(doc, tmp_path):
    doc["rows"][0]["ms"]["median"] = math.nan
    with pytest.raises(ValueError):
        results.write(doc, tmp_path / "bad.json")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="cannot write .*nowhere/climb.json: No such file or directory"):
        results.write({**doc, "rows": []}, tmp_path / "nowhere" / "climb.json")


@pytest.mark.parametrize("field", ("schema", "recorded", "commit", "command", "machine", "limits", "rows"))
def test_missing_field(doc, field):
    del doc[field]
    with pytest.raises(ValueError, match=f"field '{field}' is missing"):
        results.validate(doc)


def test_bad_fields(doc):
    with pytest.raises(ValueError, match="schema is 2; want 1"):
        results.validate({**doc, "schema": 2})
    for bad in ({"impl": "x"}, {"case": {}}, {"case": "prefill", "impl": "x"}, {"case": {}, "impl": 3}):
        with pytest.raises(ValueError, match="row 1 is .* want a 'case' object and an 'impl' name"):
            results.validate({**doc, "rows": [doc["rows"][0], bad]})
    with pytest.raises(ValueError, match="row 0 has ms .*want median, p20 and p80"):
        results.validate({**doc, "rows": [{"case": {}, "impl": "x", "ms": {"median": 1}}]})


def test_select_and_one(doc):
    assert len(results.select(doc)) == 3 and len(results.select(doc, "step01_naive")) == 2
    assert results.one(doc, "step01_naive", input="minilm")["ok"] is False
    assert results.one(doc, "step01_naive", causal=True, Sq=64)["peak_bytes"] == 123
    with pytest.raises(LookupError, match="2 rows of step01_naive match"):
        results.one(doc, "step01_naive")
    with pytest.raises(results.NotRecorded, match="^Not recorded: fa3"):
        results.one(doc, "fa3", Sq=64)


def test_load_by_name(doc, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match="recorded so far: none"):
        results.load("climb")
    results.write(doc, tmp_path / "climb.json")
    assert results.load("climb") == doc
    with pytest.raises(FileNotFoundError, match="no recorded results at .*h200.json; recorded so far: climb"):
        results.load("h200")


def test_recorded_results_are_valid():
    for path in sorted(results.FOLDER.glob("*.json")):
        doc = results.load(path)
        assert doc["rows"], path.name
        assert doc["commit"] and doc["command"], path.name


def test_caption(doc):
    doc["machine"]["gpu"], doc["recorded"] = "NVIDIA H200", "2026-11-29T10:00:00+00:00"
    assert results.caption(doc) == "recorded on NVIDIA H200, 2026-11-29"
    doc["machine"].update(gpu=None, cpu="x86_64")
    assert results.caption(doc) == "recorded on x86_64, 2026-11-29"


def test_commit(monkeypatch):
    monkeypatch.setenv("LADDER_COMMIT", "abc123")
    assert results.commit() == "abc123"
    monkeypatch.delenv("LADDER_COMMIT")
    monkeypatch.setattr(results, "_git", lambda root, *args: {"rev-parse": "0123456789ab", "status": " M x"}[args[0]])
    assert results.commit() == "0123456789ab+"
    monkeypatch.setattr(results, "_git", lambda root, *args: {"rev-parse": "0123456789ab", "status": ""}[args[0]])
    assert results.commit() == "0123456789ab"

    def no_git(*args):
        raise FileNotFoundError("git")

    monkeypatch.setattr(results, "_git", no_git)
    assert results.commit() is None


@pytest.mark.parametrize("argv, command", [
    (["/src/ladder/__main__.py", "--json", "a b.json"], "python -m ladder --json 'a b.json'"),
    (["/src/tools/bench.py", "-n", "3"], "python bench.py -n 3"),
])  # fmt: skip
def test_command_as_typed(monkeypatch, argv, command):
    monkeypatch.setattr(results.sys, "argv", argv)
    assert results.document([])["command"] == command


def test_a_file_without_results_is_named(doc, tmp_path):
    for text in ("no json", "[]", json.dumps({**doc, "machine": None}), json.dumps({**doc, "rows": 5}), json.dumps({**doc, "rows": [1]})):
        file = tmp_path / "other"
        file.write_text(text)
        with pytest.raises(ValueError, match="other holds no results document"):
            results.kept_rows(file, [], doc["machine"])


def test_a_partial_row_does_not_replace_a_whole_one(doc, tmp_path):
    results.write(doc, tmp_path / "old")
    rows = [{**doc["rows"][0], "partial": True}, {**doc["rows"][1], "impl": "other", "partial": True}]
    kept = results.kept_rows(tmp_path / "old", rows, doc["machine"], by_impl=True)
    assert [row["impl"] for row in rows] == ["other"] and len(kept) == 3 and all("commit" in row for row in kept)


def test_a_whole_row_stays_where_its_case_is_measured_again_in_part(doc, tmp_path):
    """One implementation of a case is measured anew, another's run was cut short: of the second the old row stays."""
    entry = doc["rows"][0]
    old = [{**entry, "impl": impl} for impl in ("a", "b", "c")]
    results.write({**doc, "rows": old}, tmp_path / "old")
    rows = [{**entry, "impl": "a"}, {**entry, "impl": "b", "partial": True}]
    kept = results.kept_rows(tmp_path / "old", rows, doc["machine"])
    assert [row["impl"] for row in rows] == ["a"] and [row["impl"] for row in kept] == ["b"] and "commit" in kept[0]


def test_a_device_is_written_to_and_not_replaced(doc):
    results.write(doc, "/dev/null")
    assert not Path("/dev/null").is_file()


def test_what_cannot_be_written_leaves_what_stood_there(doc, tmp_path, full_disk):
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot([1, 2])
    writes = {
        "a.txt": lambda path: results.write_text(path, "x" * 5000),
        "a.json": lambda path: results.write({**doc, "note": "x" * 5000}, path),
        "a.png": lambda path: results.write_figure(path, figure),
        "a.svg": lambda path: results.write_figure(path, figure),
    }
    for name, write in writes.items():
        path = tmp_path / name
        path.write_text("before")
        with full_disk(), pytest.raises(results.CannotWrite, match=f"cannot write .*{name}: "):
            write(path)
        assert path.read_text() == "before" and sorted(p.name for p in tmp_path.iterdir()) == [name]
        write(path)
        assert path.read_bytes()[:4] == {"a.txt": b"xxxx", "a.json": b"{\n \"", "a.png": b"\x89PNG", "a.svg": b"<?xm"}[name]
        path.unlink()


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    results.write_text(tmp_path / "link", "ä")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text(encoding="utf-8") == "ä"


def test_what_was_not_run_stays_until_it_is(doc, tmp_path):
    file = tmp_path / "r.json"
    assert results.still_not_run(file, ["b"], ["a"]) == ["b"]
    results.write(doc, file)
    assert results.still_not_run(file, [], ["a"]) == []
    results.write({**doc, "complete": False, "not_run": ["a", "b", "c"]}, file)
    assert results.still_not_run(file, ["d", "b"], ["a"]) == ["d", "b", "c"]


def test_a_kept_row_brings_its_limits_and_a_caption_its_days(doc, tmp_path):
    file, old = tmp_path / "r", {**doc, "recorded": "2026-11-28T10:00:00+00:00"}
    old["rows"][1].update(commit="abc", recorded="2026-11-27T10:00:00+00:00", command="first")  # kept before rows had their limits
    results.write(old, file)
    first, second = results.kept_rows(file, [doc["rows"][2]], doc["machine"])
    assert first["limits"] == old["limits"] and first["recorded"] == old["recorded"] and "limits" not in second
    new = {**doc, "limits": {**doc["limits"], "read_tbs": 9.0}, "recorded": "2026-11-29T10:00:00+00:00", "rows": [doc["rows"][2], first, second]}
    assert [results.limit(new, row, "read_tbs") for row in new["rows"]] == [9.0, 0.5, 9.0]
    results.write(new, file)
    assert results.kept_rows(file, [], doc["machine"])[1]["limits"] == old["limits"], "kept again, it is still its own run's"
    assert results.caption(new, new["rows"]).endswith(", 2026-11-27 to 2026-11-29") and results.caption(new).endswith(", 2026-11-29")
    assert results.caption(new, [first]).endswith(", 2026-11-28")
    assert results.sources(new, [second, second]) == "commit abc, by `first`"
    full = {**new, "commit": "0123456789abcdef0123+"}
    assert results.sources(full, full["rows"][:1]).startswith("commit 0123456789ab+, by") and results.sources({**new, "commit": None}, new["rows"][:1]).startswith("no commit")
