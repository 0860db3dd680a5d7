"""A CSV file of rows that is written row by row, so that an interrupted run continues where it stopped."""

from __future__ import annotations

import codecs
import csv
import dataclasses
import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar, get_type_hints

from fuseplan.support.errors import FuseplanError, InvalidArgumentError

if sys.platform != "win32":
    import fcntl

R = TypeVar("R")


class OtherColumnsError(FuseplanError, ValueError):
    """A file that rows shall be added to has other columns."""


class RowFile(Generic[R]):
    """The rows of one dataclass, of ``str``, ``int``, ``float`` and ``bool`` fields, each perhaps None.

    The first row that is added replaces the file in one step; each later row is appended in one write. A row
    that was cut short is ignored when the file is read, as its last field, which must not be empty, is
    missing; the next row that is added takes its place. Rows for which ``keep`` does not hold, such as those
    of other versions, are dropped with the first row that is added. Several may add to one file, also from
    other processes: rows that others have added since the file was read stay.

    Raises:
        OtherColumnsError: the file has other columns, and is left as it is.
        InvalidArgumentError: the file is no CSV in UTF-8, and is left as it is.
    """

    def __init__(self, path: Path, row: type[R], keep: Any = lambda row: True) -> None:
        self.path, self._row = path, row
        self._names = [field.name for field in dataclasses.fields(row)]  # type: ignore[arg-type]
        self.rows: list[R] = []
        self._dropped: set[str] = set()
        self._size: int | None = None  # of the file, when this wrote the last row
        for found in self._read():
            if keep(found):
                self.rows.append(found)
            else:
                self._dropped.add(repr(found))

    def add(self, row: R) -> None:
        """Write one more row at once."""
        target = self.path.resolve()  # behind a symbolic link, which stays
        with _locked(target.parent):
            if self._can_append(target):
                self.rows.append(row)
                with target.open("a", newline="", encoding="utf-8", errors="backslashreplace") as file:
                    self._write(file, [row])
                self._size = target.stat().st_size
                return
            if target.exists():
                self.rows = [found for found in self._read() if repr(found) not in self._dropped]
            self.rows.append(row)
            part = target.with_name(f".{target.name}.{os.getpid()}.part")
            try:
                with part.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
                    csv.writer(file, lineterminator="\n").writerow(self._names)
                    self._write(file, self.rows)
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
            self._size = target.stat().st_size

    def _can_append(self, target: Path) -> bool:
        """Whether the next row may follow what the file has. A process that died may have left a part of a
        row, which ends without a line feed or within quotes."""
        if self._size is None or not target.exists():
            return False
        if target.stat().st_size == self._size:
            return True
        data = target.read_bytes()
        return data.endswith(b"\n") and data.count(b'"') % 2 == 0

    def _write(self, file: TextIO, rows: Iterable[R]) -> None:
        for row in rows:
            values = list(dataclasses.asdict(row).values())  # type: ignore[call-overload]
            # The writer quotes a line feed by itself, but no carriage return.
            has_return = any(isinstance(value, str) and "\r" in value for value in values)
            quoting: Any = csv.QUOTE_ALL if has_return else csv.QUOTE_MINIMAL
            csv.writer(file, quoting=quoting, lineterminator="\n").writerow(values)

    def _read(self) -> list[R]:
        """The rows of the file, none if there is no file."""
        if not self.path.exists():
            return []
        try:
            # A row that was cut within a character still leaves the rows before it readable.
            text = codecs.getincrementaldecoder("utf-8")().decode(self.path.read_bytes())
            reader = csv.DictReader(io.StringIO(text, newline=""))
            if reader.fieldnames is not None and list(reader.fieldnames) != self._names:
                raise OtherColumnsError(
                    f"{self.path} has other columns than {', '.join(self._names)}: move it away"
                )
            rows = [parsed_row(self._row, record) for record in reader]
        except (UnicodeDecodeError, csv.Error) as error:
            raise InvalidArgumentError(
                f"expected a CSV file in UTF-8, but {self.path} is none ({error}): move it away"
            ) from None
        return [row for row in rows if row is not None]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other writers of files in ``folder`` out of the block. A lock on the folder leaves no file."""
    if sys.platform == "win32":  # it has no such locks
        yield
        return
    place = None
    with suppress(OSError):  # a folder that cannot be read, or a file system without locks of folders
        place = os.open(folder, os.O_RDONLY)
        fcntl.flock(place, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if place is not None:
            os.close(place)  # which releases the lock


def parsed_row(row: type[R], record: Mapping[str, Any]) -> R | None:
    """The row that a line of a file holds; None for a line that was not written to its end."""
    readers = _readers(row)  # type: ignore[arg-type]  # classes are hashable
    try:
        if not record[next(reversed(readers))]:
            return None
        return row(**{name: read(record[name]) for name, read in readers.items()})
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


@cache
def _readers(row: type) -> dict[str, Any]:
    """For each field, the function that reads it from text."""
    hints = get_type_hints(row)
    readers: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        (kind, *optional) = getattr(hints[field.name], "__args__", (hints[field.name],))
        read = {"True": True, "False": False}.__getitem__ if kind is bool else kind
        readers[field.name] = (lambda text, read=read: read(text) if text else None) if optional else read
    return readers


def results_lines(path: Path) -> tuple[list[dict[str, str]], str]:
    """The rows of a file of results as text, and the lines before them that start with ``#``."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    head = list(takewhile(lambda line: line.startswith("#"), lines))
    return list(csv.DictReader(lines[len(head) :])), "".join(head)
