"""A ladder of attention kernels: every rung one idea above the last, each proven equal to the one before."""

import sys
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from pathlib import Path

__version__ = "0.1.0"

# Commands by the names that older records give: ``python -m ladder.bench_v2`` runs what ``python -m ladder.bench
# step08`` does.
OLD_COMMANDS = {
    "ladder.bench_v1": "ladder.bench.step07", "ladder.bench_v2": "ladder.bench.step08",
    "ladder.bench_fusion": "ladder.bench.fusion",
    "ladder.bench_variants": "ladder.bench.variants", "ladder.bench_multi_gpu": "ladder.bench.multi_gpu",
    "ladder.lab.compile_matrix": "ladder.lab.compile.matrix", "ladder.lab.compile_sweep": "ladder.lab.compile.sweep",
    "ladder.lab.report": "ladder.chapters.readme", "ladder.lab.notebooks": "ladder.chapters.run",
}  # fmt: skip


class _OldCommands(InspectLoader):
    """Finds a module of an old name, when nothing else does, and runs the one that it is now."""

    def find_spec(self, name, path=None, target=None):
        if name not in OLD_COMMANDS:
            return None
        file = Path(__file__).parents[1].joinpath(*OLD_COMMANDS[name].split(".")).with_suffix(".py")
        return ModuleSpec(name, self, origin=str(file))  # which becomes sys.argv[0]: a record gives the new name

    def get_source(self, name):
        return f"from {OLD_COMMANDS[name]} import main\n\nif __name__ == '__main__':\n    raise SystemExit(main())\n"


sys.meta_path.append(_OldCommands())
