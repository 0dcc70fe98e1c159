"""The text that ``tiny-moe`` learns: the standard library's sources, which every reader of Python has.

Recipe: every ``*.py`` file below ``sysconfig.get_paths()["stdlib"]``, in the order of their relative paths, without
installed packages, tables of data (``encodings``, ``pydoc_data``), files over 512 KiB and files that are no UTF-8.
A file belongs to the held-out text when the first byte of the SHA-256 of its relative path is below 13 (1 file in 20),
so the split is the same on every machine. A document is its bytes and a final zero byte.
"""

import hashlib
import sysconfig
from pathlib import Path

from .models.tiny_moe import END

EXCLUDED = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}
LARGEST = 512 * 1024
HELD_OUT = 13  # of 256


def documents(root=None):
    """[(relative path, bytes, held out)] of the corpus below ``root``, None for the running Python's standard library.

    Raises:
        ValueError: there is no Python source below ``root``.
    """
    root = Path(root or sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if EXCLUDED & set(name.parts) or path.stat().st_size > LARGEST:
            continue
        text = path.read_bytes()
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        if text and END not in text:
            found.append((name.as_posix(), text, hashlib.sha256(name.as_posix().encode()).digest()[0] < HELD_OUT))
    if not found:
        raise ValueError(f"corpus: no Python sources below {root}; want a standard library")
    return found


def join(docs):
    """The documents' bytes in one, each ended by a zero byte."""
    return b"".join(text + bytes([END]) for _, text, _ in docs)


def describe(docs):
    """What a record says about a corpus: numbers of files and bytes, and a digest of it all."""
    split = {name: [d for d in docs if d[2] == held] for name, held in (("train", False), ("held_out", True))}
    return {
        name: {"files": len(part), "bytes": len(join(part)), "sha256": hashlib.sha256(join(part)).hexdigest()}
        for name, part in split.items()
    }
