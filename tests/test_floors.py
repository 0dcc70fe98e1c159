"""The floors of the house: imports run downwards only, and no files import each other in a circle."""

import ast

import pytest
from support import ROOT

# From the ground up: a file may import its own floor and those below. "stepNN" stands for the rungs, which have an
# order of their own.
FLOORS = (
    ("contract", "rungs"), ("stepNN",), ("lab", "integrations"), ("engine", "profile", "climb"), ("bench", "chapters"),
    ("__main__",),
)  # fmt: skip
# Rooms of one floor that nevertheless do not know each other.
APART = {("lab", "integrations"), ("integrations", "lab"), ("bench", "chapters"), ("chapters", "bench")}

# What a later stage of the move mends. An entry that is no longer true is a failure: then it leaves this table.
STILL_TO_MEND = {
    "arrows": set(),
    "circles": set(),
}


def modules():
    """{dotted name: (path, package that its relative imports start from)} of ``ladder`` and ``dspark_mini``."""
    found = {}
    for path in sorted([*(ROOT / "ladder").rglob("*.py"), *(ROOT / "dspark_mini").rglob("*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = ".".join(parts[:-1])
        found[package if parts[-1] == "__init__" else ".".join(parts)] = path, package
    return found


def imported(path, package, known):
    """{modules of ``known`` that a file imports}, inside functions too, and those that it names for ``importlib``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= (names & known) | ({base} if names - known else set())
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return found & known


def graph():
    """{module: modules that it imports}."""
    known = modules()
    return {name: imported(path, package, set(known)) - {name} for name, (path, package) in known.items()}


def room(module):
    """The part of ``ladder`` that a module belongs to; None for ``dspark_mini`` and ``ladder``, on the ground."""
    parts = module.split(".")
    return parts[1] if parts[0] == "ladder" and len(parts) > 1 else None


def height(room):
    """(floor, number of the rung) of a room."""
    if room is None:
        return -1, 0
    if room.startswith("step"):
        return FLOORS.index(("stepNN",)), int(room[4:6])
    return next(i for i, rooms in enumerate(FLOORS) if room in rooms), 0


def upward(module, target):
    """Whether an import runs up, or between rooms that are kept apart."""
    here, there = room(module), room(target)
    if module.startswith("dspark_mini"):
        return target.startswith("ladder")
    return height(there) > height(here) or (here, there) in APART


def circles(edges):
    """Sets of modules each of which reaches every other (Tarjan)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(frozenset(stack[at:]))
            del stack[at:]

    for node in edges:
        if node not in index:
            visit(node)
    return {circle for circle in found if len(circle) > 1}


def test_every_room_has_a_floor():
    for module in modules():
        height(room(module))


def test_no_arrow_runs_up():
    arrows = {(name, target) for name, targets in graph().items() for target in targets if upward(name, target)}
    assert arrows == STILL_TO_MEND["arrows"]


def test_no_files_import_each_other_in_a_circle():
    assert circles(graph()) == STILL_TO_MEND["circles"]


def test_dspark_mini_imports_nothing_of_the_ladder():
    pure = [targets for name, targets in graph().items() if name.startswith("dspark_mini")]
    assert pure and not any(target.startswith("ladder") for targets in pure for target in targets)


@pytest.mark.parametrize(
    "module, target, wrong",
    [
        ("ladder.lab.results", "ladder.chapters.plots", True),
        ("ladder.chapters.plots", "ladder.lab.results", False),
        ("ladder.step05_fused.attention", "ladder.step06_paged.cache", True),
        ("ladder.step06_paged.cache", "ladder.step05_fused.attention", False),
        ("ladder.step08_dflash2.api", "ladder.rungs", False),
        ("ladder.engine.engine", "ladder.bench.harness", True),
        ("ladder.__main__", "ladder.chapters.readme", False),
        ("dspark_mini.placing", "ladder.lab.results", True),
        ("ladder.chapters.ch10_scheduling.tables", "dspark_mini.placing", False),
    ],
)
def test_which_way_is_up(module, target, wrong):
    assert upward(module, target) is wrong


def test_reads_every_form_of_an_import(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        "import p.one\nfrom p import two, word\nfrom . import three\n"
        "def f():\n    from ..q.four import x\n    importlib.import_module('q.five')\n"
    )
    known = {"p", "p.one", "p.two", "p.three", "q.four", "q.five", "q.six"}
    # the file stands in package p.here
    assert imported(file, "p.here", known | {"p.here.three"}) == {"p", "p.one", "p.two", "p.here.three", "q.five"}
    assert "p.q.four" in imported(file, "p.here", {"p.q.four"})


def test_finds_a_circle():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}
