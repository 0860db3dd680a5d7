"""Write files atomically: write a temporary file, then rename it."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path

from fuseplan.support.errors import FuseplanError, InvalidArgumentError


class OutputError(FuseplanError, OSError):
    """A file cannot be written."""


def check_writable(path: str | PathLike[str]) -> Path:
    """``path`` if a file can be made there, asked before long work.

    Raises:
        OutputError: no file can be made there.
        InvalidArgumentError: ``path`` is no path.
    """
    try:
        target = Path(path)
    except TypeError:
        raise InvalidArgumentError(f"expected the path of a file to write, got {path!r}") from None
    if "\0" in str(target):
        raise OutputError(f"cannot write {str(target)!r}: a path has no NUL character")
    if target.is_dir():
        raise OutputError(f"expected a file to write, but {target} is a folder")
    folder = target.parent
    if not folder.is_dir():
        raise OutputError(f"cannot write {target}: there is no folder {folder}")
    if not os.access(folder, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise OutputError(f"cannot write {target}: permission denied")
    return target


def write_text(path: str | PathLike[str], text: str) -> Path:
    """Write ``text`` in one step: a reader sees the old file or the new one. Raises
    ``OutputError``."""
    target = check_writable(path)
    if target.exists() and not target.is_file():  # a pipe or a device: nothing to replace
        target.write_text(text, encoding="utf-8")
        return target
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from None
    return target
