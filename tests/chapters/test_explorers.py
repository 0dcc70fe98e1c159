"""Every explorer of the chapters stands in a notebook and in a test."""

import importlib
import inspect
import pkgutil

import pytest
from support import ROOT

pytest.importorskip("ipywidgets")

from ladder import chapters
from ladder.chapters.explorer import Explorer

FOLDERS = [module.name for module in pkgutil.iter_modules(chapters.__path__) if module.ispkg]
NOTEBOOKS = "".join(path.read_text() for path in (ROOT / "notebooks").glob("*.ipynb"))
TESTS = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


def explorers(folder):
    """Names of the explorers that a topic's widgets.py defines; none of a topic without one."""
    names = [module.name for module in pkgutil.iter_modules([f"{chapters.__path__[0]}/{folder}"])]
    if "widgets" not in names:
        return []
    widgets = importlib.import_module(f"ladder.chapters.{folder}.widgets")
    own = [c for _, c in inspect.getmembers(widgets, inspect.isclass) if c.__module__ == widgets.__name__]
    return [c.__name__ for c in own if issubclass(c, Explorer)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_explorers_are_shown_and_tested(folder):
    assert not [name for name in explorers(folder) if f"{name}(" not in NOTEBOOKS], "these stand in no notebook"
    assert not [name for name in explorers(folder) if name not in TESTS], "these stand in no test"


def test_there_are_explorers():
    assert sum(len(explorers(folder)) for folder in FOLDERS) > 15
