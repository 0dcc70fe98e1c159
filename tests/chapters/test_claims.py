"""The page of the article's claims is made of the records, and its links lead somewhere."""

import re

from ladder.chapters import claims
from ladder.lab import results


def test_the_page_is_the_records():
    assert claims.PAGE.read_text() == claims.page(), "run python -m ladder.chapters.claims"


def test_every_claim_has_a_verdict_a_reason_and_a_chapter():
    found = claims.claims()
    assert len(found) >= 20
    for claim, verdict, reason, chapter in found:
        assert verdict in ("true", "false", "depends", "not testable here") and claim and reason
        assert (claims.PAGE.parent / f"{claims.CHAPTERS[chapter]}.ipynb").exists()


def test_counters_that_are_not_recorded_are_said_to_be_missing(monkeypatch, tmp_path):
    load = results.load
    monkeypatch.setattr(results, "load", lambda name: load(tmp_path / "none.json") if name == "ncu" else load(name))
    assert claims.counters("prefill", claims.NEW) is None and "are not recorded yet" in claims.page()


def test_the_glossary_links_only_to_what_it_explains():
    text = (claims.PAGE.parent / "glossary.md").read_text()
    terms = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^### (.*)$", text, re.MULTILINE)}
    linked = set(re.findall(r"\(#([^)]*)\)", text))
    assert terms == linked, "every term stands in the list at the top, and every link leads to a term"
    for chapter in claims.PAGE.parent.glob("*.ipynb"):
        for anchor in re.findall(r"glossary\.md#([\w-]+)", chapter.read_text()):
            assert anchor in terms, f"{chapter.name} links to glossary.md#{anchor}"
