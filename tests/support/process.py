"""A fresh Python, with or without Triton."""

import os
import subprocess
import sys

from support import ROOT

WITHOUT_TRITON = """
import importlib.abc, sys

class NoTriton(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
"""


def python(code, **environment):
    """What a fresh Python prints, with TRITON_INTERPRET unset unless given."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
