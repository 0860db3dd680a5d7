"""A CSV file of rows that is written row by row, so that an interrupted run continues where it stopped."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from fuseplan.support.errors import FuseplanError

R = TypeVar("R")


class OtherColumnsError(FuseplanError, ValueError):
    """A file that rows shall be added to has other columns."""


class RowFile(Generic[R]):
    """The rows of one dataclass, of ``str``, ``int``, ``float`` and ``bool`` fields, each perhaps None.

    The first row that is added replaces the file in one step; each later row is appended in one write. A line
    that was cut short is ignored when the file is read: its last field, which must not be empty, is missing.
    Rows for which ``keep`` does not hold, such as those of other versions, are dropped with the first row
    that is added.

    Raises:
        OtherColumnsError: the file has other columns, and is left as it is.
    """

    def __init__(self, path: Path, row: type[R], keep: Any = lambda row: True) -> None:
        self.path, self._row = path, row
        self._names = [field.name for field in dataclasses.fields(row)]  # type: ignore[arg-type]
        self.rows: list[R] = []
        self._whole = False
        if path.exists():
            self.rows = [row for row in self._read() if keep(row)]

    def add(self, row: R) -> None:
        """Write one more row at once."""
        self.rows.append(row)
        if self._whole:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                self._writer(file).writerow(dataclasses.asdict(row))  # type: ignore[call-overload]
            return
        part = self.path.with_name(f".{self.path.name}.part")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(dataclasses.asdict(row) for row in self.rows)  # type: ignore[call-overload]
        part.replace(self.path)
        self._whole = True

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._names, lineterminator="\n")

    def _read(self) -> Iterator[R]:
        with self.path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames is not None and list(reader.fieldnames) != self._names:
                raise OtherColumnsError(
                    f"{self.path} has other columns than {', '.join(self._names)}: move it away"
                )
            for record in reader:
                row = parsed_row(self._row, record)
                if row is not None:
                    yield row


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
