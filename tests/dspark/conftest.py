"""Shared fixtures. Real routing traces are used where they are present, and only there."""

import numpy as np
import pytest

from dspark_mini.bench import trace_files
from dspark_mini.trace import read_trace


@pytest.fixture(scope="session")
def real_traces():
    found = {file.stem.removeprefix("esft_dsv2lite_"): file for file in trace_files()}
    if not found:
        pytest.skip("real traces are not here; set DSPARK_TRACES to the folder that holds them")
    return {name: read_trace(found[name]) for name in ("law", "intent")}


@pytest.fixture
def rng():
    return np.random.default_rng(0)
