"""Tests run anywhere: on the CPU kernels go through Triton's interpreter, on an NVIDIA GPU they are compiled."""

import os
from pathlib import Path

import pytest
import torch

from ladder.lab import interpret

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS warns under deterministic algorithms
interpret.enable_without_gpu()  # before any test module imports triton

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # workers that share the cores, not each all of them
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    for item in items:
        ours = item.path.parent == HERE and isinstance(item, pytest.Function)
        if ours and not item.get_closest_marker("filterwarnings"):
            item.add_marker(pytest.mark.filterwarnings("error"))
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
