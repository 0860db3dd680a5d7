"""Output for people: rich tables on a terminal, plain aligned text in a pipe, and progress on a terminal's
stderr."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fuseplan.support.format import columns
from fuseplan.support.progress import Progress, followed, is_followed

PATIENCE_S = 2.0
"""Seconds of planning after which a terminal is told."""


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

    def __init__(self, progress: Any = None, task: Any = None, planning: Progress | None = None) -> None:
        self._progress, self._task, self._planning = progress, task, planning

    def start(self, text: str) -> None:
        """Show ``text`` as the current step."""
        if self._planning is not None:
            self._planning.clear()
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
    """Show a progress bar on stderr while the block runs: the step, how many are done, and of a program that
    is planned the pass, the best plan so far, its gap and the time left. Nothing if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield Steps()
        return
    from rich import progress as rich_progress
    from rich.console import Console
    from rich.text import Text

    with followed() as planning:

        class PlanningColumn(rich_progress.TextColumn):
            def render(self, task: Any) -> Any:
                text = ", ".join(filter(None, (str(planning), planning.left)))
                return Text(text, overflow="ellipsis", no_wrap=True)

        bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(bar_width=16),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeElapsedColumn(),
            PlanningColumn(""),
            console=Console(stderr=True),
            transient=True,
        )
        with bar:
            yield Steps(bar, bar.add_task("", total=total), planning)


class Board:
    """Progress through a known number of steps, of which several run at a time."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[str, Callable[[], str]]] = {}

    def start(self, key: int, text: str, progress: Callable[[], str]) -> None:
        """Show ``text`` as a running step, followed at each moment by what ``progress`` returns."""
        self._running[key] = text, progress

    def done(self, key: int) -> None:
        """Advance by one step."""
        self._running.pop(key, None)

    @property
    def lines(self) -> list[str]:
        """A line for each running step."""
        running = list(self._running.values())
        return [f"{text}  {progress()}".rstrip() for text, progress in running]


class _LiveBoard(Board):
    """A ``Board`` on a terminal: the running steps above a bar with the steps done and the time left."""

    def __init__(self, total: int) -> None:
        super().__init__()
        from rich import progress as rich_progress

        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("planned"),
            rich_progress.BarColumn(bar_width=24),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("left"),
            rich_progress.TimeRemainingColumn(),
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=total)

    def done(self, key: int) -> None:
        super().done(key)
        self._bar.advance(self._task)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        lines = [Text(line, overflow="ellipsis", no_wrap=True) for line in self.lines]
        return Group(*lines, self._bar.get_renderable())


@contextmanager
def board(total: int) -> Iterator[Board]:
    """Show the running steps and a bar on stderr while the block runs; nothing if stderr is no terminal."""
    if not sys.stderr.isatty() or not total:
        yield Board()
        return
    from rich.console import Console
    from rich.live import Live

    shown = _LiveBoard(total)
    with Live(shown, console=Console(stderr=True), transient=True, refresh_per_second=4):
        yield shown


@contextmanager
def planning_line(what: str, deadline_s: float) -> Iterator[None]:
    """Show the progress of planning in one line on a terminal's stderr, once it has taken ``PATIENCE_S``.
    Nothing is shown if stderr is no terminal, or if another display shows the progress already."""
    if not sys.stderr.isatty() or is_followed():
        yield
        return
    with followed() as progress:
        line = _PlanningLine(what, deadline_s, progress)
        timer = threading.Timer(PATIENCE_S, line.show)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            line.finish()


class _PlanningLine:
    """One line of a terminal: the progress of planning, and in the end its result."""

    def __init__(self, what: str, deadline_s: float, progress: Progress) -> None:
        self._what, self._deadline_s, self._progress = what, deadline_s, progress
        self._started = time.monotonic()
        self._status: Any = None

    def show(self) -> None:
        """Start to show the line."""
        from rich.console import Console
        from rich.status import Status

        self._status = Status(self, console=Console(stderr=True, highlight=False))
        self._status.start()

    def finish(self) -> None:
        """Replace the line, if it was shown, by the result."""
        if self._status is not None:
            self._status.stop()
            self._status.console.print(
                f"fuseplan planned {self._what} in {self._seconds:.0f} s: {self._progress.found}"
            )

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def __rich__(self) -> Any:
        from rich.text import Text

        text = f"fuseplan plans {self._what}: {self._seconds:.0f} of {self._deadline_s:g} s, {self._progress}"
        return Text(text, overflow="ellipsis", no_wrap=True)
