"""Output of the command line: rich tables on a terminal, plain aligned text in a pipe, and progress on a
terminal's stderr."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fuseplan.support.format import columns


def print_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Iterable[int] = (),
    title: str = "",
    bold: Iterable[int] = (),
) -> None:
    """Print a table. The columns ``right`` are aligned right; the rows ``bold`` are bold on a terminal."""
    rows, right, bold = [list(row) for row in rows], set(right), set(bold)
    if not sys.stdout.isatty():
        if title:
            print(title)
        print("\n".join(columns([head, *rows], right)))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0), header_style="dim",
    )  # fmt: skip
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i in right else "left", overflow="fold", no_wrap=i in right)
    for i, row in enumerate(rows):
        table.add_row(*row, style="bold" if i in bold else None)
    # At least 80 columns: a narrower terminal wraps lines better than a table wraps cells.
    Console(width=max(shutil.get_terminal_size().columns, 80), highlight=False, markup=False).print(table)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON, and NaN as null."""
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if hasattr(value, "item"):  # a NumPy scalar of a frame
        return _plain(value.item())
    return value


class Steps:
    """Progress through a known number of steps."""

    def __init__(self, progress: Any = None, task: Any = None) -> None:
        self._progress, self._task = progress, task

    def start(self, text: str) -> None:
        """Show ``text`` as the current step."""
        if self._progress is not None:
            self._progress.update(self._task, description=text)

    def total(self, count: int) -> None:
        """Set the number of steps."""
        if self._progress is not None:
            self._progress.update(self._task, total=count)

    def done(self) -> None:
        """Advance by one step."""
        if self._progress is not None:
            self._progress.advance(self._task)


@contextmanager
def progress(total: int) -> Iterator[Steps]:
    """Show a progress bar on stderr while the block runs; nothing if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield Steps()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        yield Steps(bar, bar.add_task("", total=total))
