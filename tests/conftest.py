"""Tests run anywhere: on the CPU kernels go through Triton's interpreter, on an NVIDIA GPU they are compiled."""

import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ladder.lab import interpret

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS warns under deterministic algorithms
interpret.enable_without_gpu()  # before any test module imports triton

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # workers that share the cores, not each all of them
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))

HERE = Path(__file__).parent


@pytest.fixture
def full_disk(monkeypatch):
    """A context in which no file grows beyond a kilobyte, as on a full disk."""
    resource = pytest.importorskip("resource")
    monkeypatch.setenv("GIT_OPTIONAL_LOCKS", "0")  # or git, asked for the commit, is killed while it holds the lock of its index

    @contextmanager
    def limited():
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


def pytest_collection_modifyitems(config, items):
    for item in items:
        ours = HERE in item.path.parents and item.path.parent.name != "dspark" and isinstance(item, pytest.Function)
        if ours and not item.get_closest_marker("filterwarnings"):
            item.add_marker(pytest.mark.filterwarnings("error"))
    left_out = [] if torch.cuda.is_available() else ["gpu"]
    if "sweep" not in config.option.markexpr:
        left_out.append("sweep")
    chosen = [item for item in items if not any(map(item.get_closest_marker, left_out))]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
