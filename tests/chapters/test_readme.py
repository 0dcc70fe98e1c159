"""What the README shows is what was recorded."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from support import ROOT

from ladder.chapters import readme as report
from ladder.lab import results

README = (ROOT / "README.md").read_text()


def test_readme_tables_equal_the_recorded_results():
    assert report.render(README) == README, "run python -m ladder.chapters.readme"
    for name in report.SECTIONS:
        section = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", README, re.DOTALL)
        assert section and section[1].count("|") > 20, f"{name} is empty"


def test_a_changed_number_is_noticed():
    number = re.search(r"(\d+) TFLOP/s \|", README)[1]
    forged = README.replace(f"{number} TFLOP/s |", f"{int(number) + 1} TFLOP/s |", 1)
    assert forged != README and report.render(forged) != forged


def test_every_recorded_file_keeps_the_schema_and_says_where_it_comes_from():
    files = sorted(results.FOLDER.glob("*.json"))
    assert files
    for path in files:
        doc = json.loads(path.read_text())
        results.validate(doc)
        assert doc["command"] and doc["recorded"] and doc["machine"]["torch"]
        assert re.fullmatch(r"[0-9a-f]{7,40}\+?", doc["commit"] or ""), f"{path.name}: commit is {doc['commit']!r}"
        assert "/" not in doc["command"].replace("notebooks/results/", "").replace("/dev/stdout", ""), path.name


def test_recorded_ladder_holds_every_published_target():
    doc = results.load("ladder")
    assert all(row["ok"] for row in doc["rows"] if row["impl"].startswith("step") and "ms" in row)
    fused = results.one(doc, "step05_fused", causal=False, **report.HEADLINE)
    flash = results.one(doc, "sdpa_flash", causal=False, **report.HEADLINE)
    assert fused["tflops"] >= 1.15 * flash["tflops"]


def test_peak_memory_grows_with_the_square_only_on_the_first_rung():
    doc = results.load("ladder")
    case = {**report.HEADLINE, "causal": False}

    def growth(impl, short, long):
        a, b = (results.one(doc, impl, **{**case, "Sq": n})["peak_bytes"] for n in (short, long))
        return b / a

    assert growth("step01_naive", 8192, 32768) > 12  # 16 x, less what grows with S
    for impl in ("step02_tiled", "step03_online_softmax", "step04_gqa", "step05_fused"):
        assert growth(impl, 8192, 32768) < 4.5


def test_readme_map_and_links_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
    for name in ("ladder", "ladder/lab", "dspark_mini", "notebooks", "tests", ".ci", "Makefile", "pyproject.toml", "environment.yml", "LICENSE"):
        assert name in README


@pytest.mark.parametrize("width", ["ladder.png"])
def test_figures_exist(width):
    assert (results.FOLDER / width).stat().st_size > 10_000


def dflash2_doc():
    def row(cell, impl, ms, **rates):
        mode, ms = cell.split(" ")[0], {"median": ms, "p20": ms, "p80": ms}
        return {"case": {"mode": mode, "cell": cell}, "cell": cell, "impl": impl, "ms": ms, "ok": rates.pop("ok", True), **rates}

    rows = [
        row("prefill d128 causal 16k MHA", "step08_dflash2", 1.0, tflops=700), row("prefill d128 causal 16k MHA", "fa3", 1.1, tflops=636),
        row("prefill d192/128 dense 1k GQA 8", "step08_dflash2", 1.0, tflops=500), row("prefill d192/128 dense 1k GQA 8", "fa3", 0.8, tflops=625),
        row("prefill d64 dense 4k group 3", "step08_dflash2", 1.0, tflops=400), row("prefill d64 dense 4k group 3", "fa3", 0.1, tflops=4000, ok=False),
        row("decode B8 32k", "step08_dflash2", 0.25, tbs=4.2), row("decode B8 32k", "sdpa_cudnn", 0.3, tbs=3.5), row("decode B8 32k", "fa3", 0.2, tbs=5.25),
        row("mla_decode 16 heads B64 4k", "step08_dflash2", 0.1, tbs=3.0),
    ]  # fmt: skip
    return results.document(rows, command="a test", limits={"matmul_tflops": 800.0, "read_tbs": 4.4, "copy_tbs": 4.0}, complete=False, not_run=["x"])


def test_the_table_of_step_08_follows_its_rows():
    table = report.dflash2_table(dflash2_doc())
    lines = {line.split("|")[1].strip(): [x.strip() for x in line.split("|")[2:-1]] for line in table.splitlines() if line.startswith("|")}
    assert lines["d128 causal, MHA"] == ["", "", "700 (1.10)", "", ""] and lines["d192/128 dense, GQA 8"][0] == "500 (0.80)"
    assert lines["d64 dense, group 3"][1] == "400", "no ratio to a peer that is wrong"
    assert "geometric mean 0.94 over 2 cells, least 0.80" in table
    assert lines["B8 32k"] == ["1.05 GB", "4.20", "FlashAttention-3 5.25", "0.80", "-"]
    assert lines["MLA, 16 heads B64 4k"][2:] == ["-", "-", "-"] and "1 cells are missing" in table


def test_a_marker_may_stand_before_its_record(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    text = "a\n<!-- dflash2-table -->\n<!-- /dflash2-table -->\nb"
    made = report.render(text)
    assert made == "a\n<!-- dflash2-table -->\n*Not recorded yet.*\n<!-- /dflash2-table -->\nb" == report.render(made)
    results.write(dflash2_doc(), tmp_path / "step08_dflash2.json")
    recorded = report.render(text)
    assert recorded.count("|") > 20 and report.render(recorded) == recorded
    (tmp_path / "step08_dflash2.json").unlink()
    with pytest.raises(ValueError, match="step08_dflash2.json is missing, which <!-- dflash2-table --> of README.md shows"):
        report.render(recorded)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of what the report reads and writes."""
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    shutil.copytree(results.FOLDER, tmp_path / "results")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    return tmp_path


@pytest.mark.parametrize("old, new, said", [
    ("<!-- ladder-table -->", "<!-- laddr-table -->", "<!-- laddr-table --> marks no table; want one of ladder-table, "),
    ("<!-- ladder-table -->", "<!- ladder-table -->", "<!-- /ladder-table --> closes a table that was not opened"),
    ("<!-- /ladder-table -->", "<!-- ladder-table -->", "<!-- ladder-table --> is not closed before <!-- ladder-table -->"),
    ("<!-- /ladder-table -->", "", "<!-- ladder-table --> is not closed before <!-- decode-table -->"),
    ("<!-- /multi-gpu-table -->", "", "<!-- multi-gpu-table --> is never closed"),
    ("ladder-table -->", "laddr-table -->", "<!-- laddr-table --> marks no table"),
    ("decode-table -->", "decode table -->", "README.md has no <!-- decode-table -->"),
    ("engine-table -->", "engine table -->", "README.md has no <!-- engine-table -->"),
])  # fmt: skip
def test_a_wrong_marker_is_an_error(checkout, capsys, old, new, said):
    assert old in README
    (checkout / "README.md").write_text(README.replace(old, new), encoding="utf-8")
    for argv in (["--check"], []):
        assert report.main(argv) == 2
        err = capsys.readouterr().err
        assert said in err and "README.md" in err and err.count("\n") == 1
    assert (checkout / "README.md").read_text(encoding="utf-8") == README.replace(old, new), "nothing was written"


@pytest.mark.parametrize("source", ["ladder", "step07_dflash1", "engine", "multi_gpu"])
def test_a_record_that_is_missing_or_broken_is_named(checkout, capsys, source):
    file = checkout / "results" / f"{source}.json"
    doc = results.read(file)
    for damage in (lambda: results.write({**doc, "rows": [{**row, "ms": row.get("ms", {"median": 1, "p20": 1, "p80": 1}), "tflops": None, "tbs": None, "itl_ms": "x", "peak_bytes": "x"} for row in doc["rows"]]}, file),
                   lambda: file.write_text("{"), file.unlink):  # fmt: skip
        damage()
        for argv in (["--check"], []):
            assert report.main(argv) == 2
            err = capsys.readouterr().err
            assert f"{source}.json" in err and err.count("\n") == 1 and "recorded yet" not in err
    assert (checkout / "README.md").read_text(encoding="utf-8") == README


def test_a_figure_that_is_missing_damaged_or_of_other_numbers_is_noticed(checkout, capsys):
    file = checkout / "results" / "ladder.png"
    assert report.main(["--check"]) == 0, capsys.readouterr().err
    whole = file.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for data, said in ((flipped, "is damaged after"), (whole[:middle], "is damaged after"), (whole + b"x", "is damaged after"), (b"", "is no PNG"), (None, "cannot be read")):
        file.unlink() if data is None else file.write_bytes(data)
        assert report.main(["--check"]) == 2
        err = capsys.readouterr().err
        assert "ladder.png" in err and said in err and err.count("\n") == 1
    file.write_bytes(whole)
    doc = results.load("ladder")
    doc["rows"][0]["peak_bytes"] += 1
    results.write(doc, checkout / "results" / "ladder.json")
    assert report.main(["--check"]) == 1 and "ladder.png differs from the recorded results" in capsys.readouterr().err
    assert report.main([]) == 0 and report.main(["--check"]) == 0
    assert report.drawn_from(file) == report.digest(doc)


def test_what_the_report_cannot_write_leaves_what_stood_there(checkout, capsys, full_disk):
    stale = README.replace("TFLOP/s |", "GFLOP/s |", 1)
    (checkout / "README.md").write_text(stale, encoding="utf-8")
    with full_disk():
        assert report.main([]) == 2
    assert "cannot write" in (err := capsys.readouterr().err) and "README.md" in err
    assert (checkout / "README.md").read_text(encoding="utf-8") == stale and report.drawn_from(results.FOLDER / "ladder.png")


def test_an_installed_package_says_that_it_is_no_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    for argv in (["--check"], []):
        assert report.main(argv) == 2
        err = capsys.readouterr().err
        assert "README.md is missing" in err and "in a checkout of the repository" in err and err.count("\n") == 1


OTHER_RUN = {"commit": "0123456789ab", "recorded": "2026-11-01T00:00:00+00:00", "command": "an older run"}


def test_a_kept_row_is_credited_to_its_own_run_and_its_limits():
    doc = results.load("ladder")
    row = results.one(doc, "step05_fused", causal=False, **report.HEADLINE)
    plain = report.ladder_table(doc)
    assert "an older run" not in plain and "earlier runs" not in plain
    row.update(OTHER_RUN, limits={**doc["limits"], "matmul_tflops": 2 * row["tflops"]})
    table = report.ladder_table(doc)
    assert re.search(r"\*\*05 Fused.*\| 50% \|", table) and "2026-11-01 to 2026-11-30" in table
    assert f"commit {doc['commit']}, by `{doc['command']}`" in table and "commit 0123456789ab, by `an older run`" in table
    assert "earlier runs are of the limits of their own run." in table
    results.one(doc, "step06_paged", causal=True, **report.HEADLINE).update(OTHER_RUN)
    assert "where it recorded them, else of the newest run's." in report.ladder_table(doc)
    del row["limits"]
    assert "earlier runs are of the limits of the newest run." in report.ladder_table(doc)


def test_every_caption_credits_a_kept_row():
    for name, (source, make) in report.SECTIONS.items():
        doc = results.load(source)
        before = make(doc)
        for row in doc["rows"]:
            row.update(OTHER_RUN)
        after = make(doc)
        assert "an older run" in after and "commit 0123456789ab" in after and "2026-11-01" in after and doc["command"] not in after, name
        assert before.count("|") == after.count("|"), name
    doc = results.load("step07_dflash1")
    for row in doc["rows"]:
        row.update(OTHER_RUN, limits={**doc["limits"], "read_tbs": doc["limits"]["read_tbs"] / 2})
    assert "(96%)" in report.decode_table(results.load("step07_dflash1")) and "(192%)" in report.decode_table(doc)


def test_a_part_of_several_gpus_that_was_kept_is_credited_to_its_own_run():
    doc = {**results.load("multi_gpu"), "earlier": {"engine": OTHER_RUN}}
    table = report.multi_gpu_table(doc)
    assert "commit 0123456789ab, by `an older run`" in table and doc["commit"] in table and "2026-11-01" in table


def test_rungs_stand_in_their_order_whatever_the_order_of_the_rows():
    doc = results.load("ladder")
    turned = {**doc, "rows": doc["rows"][::-1]}
    assert report.ladder_table(turned) == report.ladder_table(doc)

    def shown(doc):
        speed, memory = report.climb_figure(doc).axes
        return [text.get_text() for text in speed.get_yticklabels()], [text.get_text() for text in memory.get_legend().get_texts()]

    names, lines = shown(turned)
    assert (names, lines) == shown(doc) and [name[:2] for name in names[:8]] == [f"0{n}" for n in range(1, 9)]
    one_length = {**doc, "rows": [row for row in turned["rows"] if row["case"]["Sq"] == 4096]}
    bars = [text.get_text()[:2] for text in report.climb_figure(one_length).axes[1].get_yticklabels()]
    assert len(bars) > 1 and bars == sorted(bars)


def test_the_figure_says_from_which_days_its_points_are():
    doc = results.load("ladder")
    assert report.climb_figure(doc)._supxlabel.get_text().endswith("2026-11-29 to 2026-11-30"), "64k is kept from the day before"


def test_the_tables_need_nothing_that_only_notebooks_need():
    missing = ["IPython", "ipywidgets", "jupyterlab", "nbformat", "nbclient", "transformers", "pytest", "hypothesis"]
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); from ladder.chapters import readme as report; sys.exit(report.main(['--check']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
