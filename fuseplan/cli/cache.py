"""``fuseplan cache``."""

from __future__ import annotations

from typing import Annotated

import typer

from fuseplan.cli.arguments import Json
from fuseplan.console import print_json
from fuseplan.search.cache import cache_file, open_disk, setting
from fuseplan.support.atomic_file import OutputError
from fuseplan.support.format import bytes_text


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete all of them.")] = False,
    json: Json = False,
) -> None:
    """Show how many solutions of earlier plans are kept on disk (with FUSEPLAN_CACHE=1)."""
    path, used = cache_file(), setting() not in ("", "0")
    disk = open_disk(path)
    if clear and disk is not None and not disk.clear():
        raise OutputError(f"{path} cannot be removed: remove it by hand, or set FUSEPLAN_CACHE to a folder")
    entries, size_bytes = (0, 0) if disk is None else (disk.count(), disk.size_bytes())
    if json:
        print_json({"file": str(path), "used": used, "entries": entries, "size_bytes": size_bytes})
        return
    print(f"file     {path}")
    print(f"used     {'yes' if used else 'no: FUSEPLAN_CACHE=1 keeps the solutions of components there'}")
    print(f"entries  {entries:,}, {bytes_text(size_bytes)}")
