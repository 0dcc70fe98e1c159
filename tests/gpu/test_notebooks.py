"""Every chapter on a GPU, from top to bottom: no cell fails, and every live cell measures and passes parity."""

import json

import pytest
import torch
from support import ROOT

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from ladder.chapters import live_record

pytestmark = pytest.mark.gpu
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_runs_and_its_live_cell_passes(path, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    entry, rows = live_record.chapter(path, tmp_path)
    assert entry["ok"] and entry["measured"] > 0, entry["verdict"]
    assert "could not be measured" not in json.dumps(rows)
