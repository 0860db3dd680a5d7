"""The progress of planning, for a display to read: the current pass, and the best plan and bound so far."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """The progress of the plans that are made inside one ``followed`` block."""

    stage: str = ""
    """The pass that runs now."""
    best_ps: float = math.inf
    """The time of the fastest plan found so far, in picoseconds; infinite before there is one."""
    bound_ps: float = 0.0
    """No plan of the program that is searched takes less."""
    expires_at: float = math.inf
    """The deadline, by ``time.monotonic``."""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.stage, self.found)))

    def clear(self) -> None:
        """Forget the program that was planned last."""
        self.stage, self.best_ps, self.bound_ps, self.expires_at = "", math.inf, 0.0, math.inf

    @property
    def left(self) -> str:
        """The time until the deadline as text; empty if there is none."""
        if not math.isfinite(self.expires_at):
            return ""
        return f"{max(self.expires_at - time.monotonic(), 0):.0f} s left"

    @property
    def found(self) -> str:
        """The best plan and its gap as text; empty before there is one."""
        if not math.isfinite(self.best_ps):
            return ""
        gap = 1 - self.bound_ps / self.best_ps if self.best_ps else 0.0
        proof = f"gap {gap:.0%}" if gap > 0 else "proven"
        return f"{self.best_ps / 1e6:,.4g} µs, {proof}"


_followed: ContextVar[Progress | None] = ContextVar("_followed", default=None)


@contextmanager
def followed() -> Iterator[Progress]:
    """Record the progress of the plans that this thread makes inside the block."""
    progress = Progress()
    token = _followed.set(progress)
    try:
        yield progress
    finally:
        _followed.reset(token)


def is_followed() -> bool:
    """Whether a block of ``followed`` is running."""
    return _followed.get() is not None


def begin(expires_at: float) -> None:
    """Record that the planning of another program begins, which ends at ``expires_at`` by
    ``time.monotonic``."""
    progress = _followed.get()
    if progress is not None:
        progress.clear()
        progress.expires_at = expires_at


def enter(stage: str) -> None:
    """Record that a pass begins."""
    progress = _followed.get()
    if progress is not None:
        progress.stage = stage


def found(time_ps: float, bound_ps: float) -> None:
    """Record the modelled time of a plan of the whole program, and a lower bound on that of every plan."""
    progress = _followed.get()
    if progress is not None and time_ps < math.inf:
        progress.best_ps, progress.bound_ps = min(progress.best_ps, time_ps), bound_ps
