"""Watch a rung while it runs: its variables after each tile, and the bytes that its operations load and store.

Nothing is computed a second time. ``watch`` runs the rung's own function under Python's trace hook and copies its
local variables at the end of each turn of the loop over keys; ``Traffic`` listens to every PyTorch operation under it.
"""

import ast
import inspect
import sys
import textwrap
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STATE = ("row_max", "row_sum", "acc", "scores", "probs", "rescale")


@dataclass(frozen=True)
class Step:
    """The state of a rung after one tile of keys.

    sweep: which of the rung's loops over keys this was, 1 or 2. q0, k0: first row and first column of the tile.
    row_max, row_sum (B, H, rows), acc (B, H, rows, Dv), scores, probs (B, H, rows, columns), rescale (B, H, rows):
    copies, float32; None where this loop does not use the name. num_bytes: loaded and stored since the call began.
    """

    sweep: int
    q0: int
    k0: int
    num_bytes: int
    row_max: torch.Tensor | None = None
    row_sum: torch.Tensor | None = None
    acc: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    probs: torch.Tensor | None = None
    rescale: torch.Tensor | None = None


@dataclass(frozen=True)
class Watched:
    """What ``watch`` saw: the rung's result, and one Step for each tile in the order in which they ran."""

    result: object
    steps: list
    tile_q: int
    tile_k: int
    num_bytes: int


class Traffic(TorchDispatchMode):
    """Counts the bytes that every PyTorch operation inside it loads and stores; views and reshapes move nothing.

    ``operations`` lists (name, bytes loaded, bytes stored). Each operand counts once, as if no cache helped.
    """

    def __init__(self):
        super().__init__()
        self.operations, self.paused = [], False

    @property
    def num_bytes(self):
        return sum(loaded + stored for _, loaded, stored in self.operations)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.paused:
            return result
        sources = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        targets = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        in_place = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        shares = {x.untyped_storage()._cdata for x in sources}
        view = targets and not in_place and all(x.untyped_storage()._cdata in shares for x in targets)
        name = func._schema.name.removeprefix("aten::")
        if not view and not name.startswith(("empty", "new_empty")):
            writes_only = name in ("zero_", "fill_", "copy_")  # the target is stored, not loaded
            loaded = sum(x.numel() * x.itemsize for x in (sources[1:] if writes_only else sources))
            self.operations.append((name, loaded, sum(x.numel() * x.itemsize for x in targets)))
        return result


def watch(attention, q, k, v, **options):
    """Run ``attention(q, k, v, **options)`` and return Watched.

    Args:
        attention: the function of a tiled rung in PyTorch (steps 02 to 04): its source has a loop ``for k0 in ...``.
        q, k, v, options: its arguments.

    Raises:
        ValueError: the function has no loop over key tiles.
    """
    function = inspect.unwrap(attention)
    sweeps = _key_loops(function)
    if not sweeps:
        raise ValueError(f"{attention.__module__}.attention has no loop 'for k0 in ...'; want steps 02 to 04")
    watcher = _Watcher(function.__code__, sweeps)
    before = sys.gettrace()
    with watcher.traffic:
        sys.settrace(watcher.on_call)
        try:
            result = attention(q, k, v, **options)
        finally:
            sys.settrace(before)
    sizes = {name: p.default for name, p in inspect.signature(attention).parameters.items() if name.startswith("tile_")}
    sizes.update({name: value for name, value in options.items() if name in sizes})
    return Watched(result, watcher.steps, sizes["tile_q"], sizes["tile_k"], watcher.traffic.num_bytes)


@dataclass
class _Watcher:
    """Python's trace hook: copies the state once the last line of a loop body has run."""

    code: object
    sweeps: dict  # each line of a body's last statement -> (sweep number, names the body uses)
    steps: list = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    finished: int | None = None  # the last statement that ran, when it ends a loop body

    def on_call(self, frame, event, arg):
        return self.on_line if frame.f_code is self.code else None

    def on_line(self, frame, event, arg):
        if event == "line":
            if self.finished is not None and frame.f_lineno not in self.sweeps:
                self._copy(frame.f_locals, *self.sweeps[self.finished])
            self.finished = frame.f_lineno if frame.f_lineno in self.sweeps else None
        return self.on_line

    def _copy(self, local, sweep, names):
        self.traffic.paused = True
        state = {name: local[name].detach().float().clone() for name in STATE if name in names}
        self.traffic.paused = False
        self.steps.append(Step(sweep, local["q0"], local["k0"], self.traffic.num_bytes, **state))


def _key_loops(function):
    """{each line of the last statement of a ``for k0`` loop: (the loop's number from 1, the names in its body)}."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and getattr(n.target, "id", None) == "k0"]
    found, before = {}, function.__code__.co_firstlineno - 1
    for number, loop in enumerate(sorted(loops, key=lambda n: n.lineno), start=1):
        names = {n.id for statement in loop.body for n in ast.walk(statement) if isinstance(n, ast.Name)}
        last = loop.body[-1]
        found.update({before + line: (number, names) for line in range(last.lineno, last.end_lineno + 1)})
    return found
