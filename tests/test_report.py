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
