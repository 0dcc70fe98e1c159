"""What the README shows is what was recorded."""

import json
import re
from pathlib import Path

import pytest

from ladder.lab import report, results

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_readme_tables_equal_the_recorded_results():
    assert report.render(README) == README, "run python -m ladder.lab.report"
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


def test_a_marker_may_stand_before_its_record(monkeypatch):
    monkeypatch.setattr(report, "SECTIONS", {name: made for name, made in report.SECTIONS.items() if name not in report.OPTIONAL})
    text = "a\n<!-- dflash2-table -->\n<!-- /dflash2-table -->\nb"
    assert report.render(text) == "a\n<!-- dflash2-table -->\n*Not recorded yet.*\n<!-- /dflash2-table -->\nb"
    monkeypatch.setitem(report.SECTIONS, "dflash2-table", ("step08_dflash2", report.dflash2_table))
    monkeypatch.setattr(report.results, "load", lambda name: dflash2_doc())
    assert report.render(text).count("|") > 20
