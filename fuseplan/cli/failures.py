"""Show an exception that is no mistake in the command: from the user's file on, without the calls above."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

_PACKAGES = Path(__file__).resolve().parents[2]
_COMMANDS = str(_PACKAGES / "fuseplan" / "cli")
_OWN = (str(_PACKAGES / "fuseplan"), str(_PACKAGES / "costmodel"))
_INSTALLED = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def show_failure(error: BaseException) -> None:
    """Print the traceback of an exception on stderr, without what led to the user's own code: the frames of
    the command line and of fuseplan above the first frame of a user's file. Where there is none, all but
    those of the command line are printed."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _cut(one)
            waiting += [one.__cause__, one.__context__]
    traceback.print_exception(error, file=sys.stderr)


def _cut(error: BaseException) -> TracebackType | None:
    """The traceback from the first frame of a user's file on."""
    below: TracebackType | None = error.__traceback__
    frame = error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if _is_users(file):
            return frame
        if _is_in(file, (_COMMANDS,)):
            below = frame.tb_next
        frame = frame.tb_next
    # The text of a syntax error says where it is.
    return None if isinstance(error, SyntaxError) else below


def _is_users(file: str) -> bool:
    return not file.startswith("<") and not _is_in(file, _OWN) and not _is_in(file, _INSTALLED)


def _is_in(file: str, folders: tuple[str, ...]) -> bool:
    path = Path(file).resolve()
    return any(path.is_relative_to(folder) for folder in folders)
