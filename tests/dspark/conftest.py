"""Shared fixtures. Real routing traces are used where they are present, and only there."""

import os
from pathlib import Path

import numpy as np
import pytest

from dspark_mini.trace import read_trace


def trace_folder():
    root = Path(__file__).resolve().parents[2]
    for folder in (os.environ.get("DSPARK_TRACES"), root / "shared/data/traces", root.parent / "shared/data/traces"):
        if folder and list(Path(folder).glob("esft_*.npz")):
            return Path(folder)
    return None


@pytest.fixture(scope="session")
def real_traces():
    folder = trace_folder()
    if folder is None:
        pytest.skip("real traces are not here; set DSPARK_TRACES to the folder that holds them")
    return {name: read_trace(folder / f"esft_dsv2lite_{name}.npz") for name in ("law", "intent")}


@pytest.fixture
def rng():
    return np.random.default_rng(0)
