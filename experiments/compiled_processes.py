"""Run the tasks of ``experiments.compiled`` in a child process, with a new one after a crash or a timeout.

libtpu may end the process while it estimates cycles of a kernel that it does compile, such as one with copies
to scalar memory.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from experiments.compiled_kernels import steps_of
from experiments.compiled_rows import ENDED, Row, Task
from fuseplan.extend import dump_cycles

LIMIT_S = 600.0
"""libtpu takes minutes for the cycles of some kernels of ours, and of XLA's."""

_FATAL = re.compile(r"^F\d{4} \S+\s+\d+ \S+\] (.*)$", re.MULTILINE)
"""As absl logs what it then aborts for."""
_ERROR = re.compile(r"^\w[\w.]*(?:Error|Exception)\b.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Work:
    """What one process does: tasks, each from a kernel of its plan on."""

    tasks: tuple[tuple[Task, int], ...]
    deadline_s: float
    with_cycles: bool
    limit_s: float = LIMIT_S
    """Of each kernel."""
    only_one: bool = False
    in_hbm: bool = False
    """Of the arrays between operations."""


@dataclass(frozen=True, slots=True)
class Died:
    """A process has ended before its work, by itself or at the limit."""

    cause: str
    too_long: bool = False


Message = tuple[Row, bool] | Died | None
"""A row and whether all is known of it; None after each task."""


def _send(work: Work, messages: Connection, said_to: str) -> None:
    """Each row as it is known, None after each task."""
    said = os.open(said_to, os.O_WRONLY)
    os.dup2(said, 2)  # What the compiler says at its end is the cause.
    with dump_cycles() if work.with_cycles else nullcontext():
        for task, first in work.tasks:
            for row, is_known in steps_of(task, work.deadline_s, first, work.in_hbm):
                messages.send((row, is_known))
                if work.only_one and is_known:
                    return
            messages.send(None)


def _received(work: Work) -> Iterator[Message]:
    """What a process sends, until it has done its work or dies."""
    context = get_context("spawn")
    here, there = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        said.touch()
        process = context.Process(target=_send, args=(work, there, str(said)), daemon=True)
        process.start()
        there.close()
        try:
            while here.poll(work.limit_s):
                yield here.recv()
            yield Died(f"not known after {work.limit_s:g} s", too_long=True)
            return
        except EOFError:
            process.join()
        finally:
            process.kill()
            process.join()
        if process.exitcode:
            yield Died(_cause(said.read_text(errors="replace")))


def _cause(said: str) -> str:
    """Why a process has ended, of all that it said.

    Example:
        >>> _cause("W1122 13:45:33.8 6321 a.cc:1] slow\\nF1122 13:45:33.8 6321 b.cc:2] Unsupported\\n@ 0x7f")
        'the compiler ended the process: Unsupported'
    """
    fatal, error = _FATAL.search(said), _ERROR.findall(said)
    last = fatal[1] if fatal else error[-1] if error else ""
    return f"{ENDED}: {last}" if last else ENDED


def all_rows(work: Work) -> Iterator[Row | None]:
    """A row a kernel, and None after each task. A kernel that ends the process, itself or XLA's for the
    same, is compiled once more with all arrays in HBM, and then without cycles. The rest goes on."""
    left = list(work.tasks)
    while left:
        begun: Row | None = None
        for message in _received(replace(work, tasks=tuple(left))):
            if not left:  # It died of nothing but its end.
                break
            task, first = left[0]
            if message is None:
                del left[0]
                yield None
            elif isinstance(message, Died):
                yield _at_the_end(work, left[0], begun, message)
                if begun is None:  # Not at a kernel: nothing of this task will come.
                    del left[0]
                    yield None
                else:
                    left[0] = task, first + 1
            elif message[1]:
                begun, left[0] = None, (task, first + 1)
                yield message[0]
            else:
                begun = message[0]


def _at_the_end(work: Work, at: tuple[Task, int], begun: Row | None, died: Died) -> Row:
    if begun is None:
        return Row(*at[0], -1, 0, 1, "?", 0, "", False, died.cause)
    if work.with_cycles:
        alone = replace(work, tasks=(at,), only_one=True)
        if not died.too_long and (row := _known(replace(alone, in_hbm=True))):
            return row
        if not begun.compiled and (row := _known(replace(alone, with_cycles=False))):
            return replace(row, no_cycles=died.cause)
    if begun.compiled:
        return replace(begun, no_cycles=begun.no_cycles.replace(ENDED, died.cause))
    return replace(begun, cause=died.cause)


def _known(work: Work) -> Row | None:
    """The row of the first kernel, unless that ends the process as well."""
    rows = [message[0] for message in _received(work) if isinstance(message, tuple) and message[1]]
    return rows[0] if rows else None
