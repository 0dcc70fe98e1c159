"""Files that are written whole or not at all: a full disk leaves what stood there before."""

from __future__ import annotations

import os
from pathlib import Path


class CannotWrite(ValueError):
    """A file could not be written; the message names it."""


def write_text(path, text):
    """Write a text file; CannotWrite names it."""
    write_whole(path, lambda file: file.write(text.encode()))


def write_figure(path, figure):
    """Save a matplotlib figure in the format of the file's name, PNG where it has none."""
    write_whole(path, lambda file: figure.savefig(file, format=Path(path).suffix[1:] or "png"))


def write_whole(path, fill):
    """Have `fill` write to a binary file beside `path`, which then takes its place."""
    path = Path(path)
    try:
        if path.exists() and (not path.is_file() or str(path.parent) in ("/dev", "/dev/fd")):
            with open(path, "ab") as file:  # a device or a pipe is written to, never replaced
                fill(file)
            return
        real = Path(os.path.realpath(path))  # a link stays a link
        partial = real.with_name(real.name + ".partial")
        try:
            with open(partial, "wb") as file:
                fill(file)
            os.replace(partial, real)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror or error}") from error
