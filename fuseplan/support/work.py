"""Count the work of a search, so that it is limited alike on every machine, and time the stages of planning.

Where the clock ends a search, it ends sooner on a busy machine than on an idle one, and the plans may differ.
So a search ends when its counted work reaches a limit, and by the clock only near the user's deadline. Where
either has cut a plan short, a note says which (``fuseplan.plan.notes``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

DEFAULT_DEADLINE_S = 40.0
"""Wall-clock seconds after which the planner returns the best plan found."""


class Limit(Enum):
    """A limit that may end a search; the value is its name in a sentence."""

    DEADLINE = "the deadline"
    WORK = "the limit of counted work"
    """The same on every machine; a longer deadline raises it."""


UNIT_S = 1e-6
"""A unit of work takes an idle core between half a microsecond and two."""

UNITS_PER_S = round(1 / UNIT_S)

SHARE = 4
"""The searches of one planning may do the deadline in microseconds, divided by this, as counted work. On an
idle core that takes up to half of the deadline, so that a core half as fast makes the same plan."""

LEAST_S = 40.0
"""Under a shorter deadline the counted limit is as for this one, and the clock ends the search: cached
solutions of one plan then hold for another."""

STEP = 10
"""Units that enumerating one more group takes."""

# A core half as fast as an idle one, as where two processes share a machine, takes a microsecond or less for
# each unit of the next six.

UNCUT = 400
"""Units for each operation that the deadline must leave for a step that cannot be cut short: to choose large
values to compute again, or to make the graph with copies. An idle core needs a quarter of that for the
training step of a GPT-2 of 24 layers."""

TAIL = 80
"""Units for each operation that a search leaves to order and check kernels, which comes after it: an idle
core needs half of that for a fan of ten thousand operations."""

DIVISION = 500
"""Units for each operation that it takes to divide a graph into components, to ask about each as a whole and
to check the kernels, none of which can be cut short."""

WHOLE = 250
"""Units for each operation that it takes to ask about a graph as one kernel, and to check that."""

LOOPS = 2_000
"""Units for each operation that it takes to look for the loops of XLA that are offered, which cannot be cut
short."""

MOST_LOOPS = 1_500_000
"""The most units that it takes to look for loops in a program of any size."""

PEER = 1_000
"""Units for each operation that the algorithm of another system may take when its plan is compared with the
solver's."""

ONLY_LOOPS = 500
"""The most units for each operation of the search in a first call on a CPU, which looks only for tiled
loops. The caller waits for it; XLA then takes two to four milliseconds to compile each operation."""

COPIES = 2_000
"""Units for each operation that a search leaves to the one with copies: to make the graph with copies, to
move those that gain, and to plan the rest of the program as before."""

SLACK_S = 0.5
"""Seconds after the deadline by which planning ends: steps that cannot be cut short may run until then. A
fifth of the time of tracing and lowering comes on top."""

MARGIN = 50_000
"""A solution found less than so many microseconds before the deadline is not remembered: OR-Tools looks at
its own clock, and may have stopped by then."""


def seconds_of(units: int, count: int = 1) -> float:
    """Seconds that stand for ``count`` times ``units``. Where they are compared with the deadline that the
    user gave, every machine decides alike; with the time that is left, a slow one may skip a step."""
    return units * count * UNIT_S


def may_begin(units: int, n_operations: int, left_s: float) -> bool:
    """Whether a step that takes ``units`` for each of so many operations, and cannot be cut short, may begin
    ``left_s`` before the deadline."""
    return seconds_of(units, n_operations) <= left_s + SLACK_S


def least_planning_s(n_operations: int, has_loops: bool) -> float:
    """Seconds that planning so many operations takes at least: its steps cannot be cut short. ``has_loops``:
    loops of XLA are looked for."""
    loops = min(LOOPS * n_operations, MOST_LOOPS) if has_loops else 0
    return seconds_of(DIVISION * n_operations + loops)


def lead_s(n_operations: int) -> float:
    """Seconds before the deadline at which heuristics end, so that the kernels of so many operations are
    ordered and checked ``SLACK_S`` after it."""
    return max(seconds_of(TAIL, n_operations) - SLACK_S, 0.0)


@dataclass(slots=True)
class Work:
    """Counted work in units: its limit, and how much is spent. The searches of one planning share one. What
    the scheduler's answers take was measured on the workloads, for groups of 2 to 120 operations."""

    limit: int
    spent: int = 0
    expires_at: float = math.inf
    """The user's deadline, by ``time.monotonic``, for ``is_over``."""

    @contextmanager
    def within(self, share: float) -> Iterator[None]:
        """Limit the work to a part of what is left: the rest is for what follows."""
        limit = self.limit
        self.limit = self.spent + int(self.left * share)
        try:
            yield
        finally:
            self.limit = limit

    def spend(self, units: int) -> None:
        """Count ``units`` of work."""
        self.spent += units

    def spend_price(self, n_nodes: int, loops: bool = False) -> None:
        """Count the work of scheduling a group of ``n_nodes`` operations; as ``loops`` of XLA there are few
        ways to."""
        self.spent += 40 + 15 * n_nodes if loops else 250 + 25 * n_nodes

    def spend_rules(self, n_dims: int) -> None:
        """Count the work of asking whether a kernel may hold operations whose operands and results have
        ``n_dims`` dimensions together."""
        self.spent += 3 * n_dims // 2

    def spend_room(self, n_nodes: int, loops: bool = False) -> None:
        """Count the work of asking whether ``n_nodes`` operations are too large for the chip, which ``loops``
        of XLA never are."""
        self.spent += n_nodes if loops else 80 + 11 * n_nodes

    def spend_partial_groups(self, count: int, n_positions: int) -> None:
        """Count the work of bounding ``count`` partial groups in a component of ``n_positions``."""
        self.spent += count * (25 + n_positions * n_positions // 400)

    def spend_relaxation(self, n_columns: int, n_positions: int) -> None:
        """Count the work of solving the linear program over ``n_columns`` groups anew in one case."""
        self.spent += n_columns * n_positions // 4

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave ``spent`` as it was before: for what is asked or not by what an earlier plan left behind, on
        which the limit of this one must not depend."""
        before = self.spent
        try:
            yield
        finally:
            self.spent = before

    @property
    def left(self) -> int:
        """Units of work up to the limit."""
        return max(self.limit - self.spent, 0)

    @property
    def is_spent(self) -> bool:
        """Whether the limit is reached."""
        return self.spent >= self.limit

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached, or the deadline."""
        return self.is_spent or time.monotonic() >= self.expires_at

    @property
    def ended_by(self) -> Limit:
        """The limit that is reached, if the work is over."""
        return Limit.WORK if self.is_spent else Limit.DEADLINE


@contextmanager
def share_of(work: Work | None, share: float) -> Iterator[None]:
    """Limit what follows to a part of ``work``, as ``Work.within``; None has no limit."""
    if work is None:
        yield
        return
    with work.within(share):
        yield


def unlimited() -> Work:
    """Work without a limit that is ever reached."""
    return Work(limit_of(math.inf))


def limit_of(deadline_s: float) -> int:
    """The counted limit of the searches of one planning under a deadline."""
    seconds = min(max(deadline_s, LEAST_S), 1e6)
    return int(seconds * UNITS_PER_S / SHARE)


def first_reached(limits: Iterable[Limit | None]) -> Limit | None:
    """The deadline if it is among ``limits``, else the limit of counted work if that is, else None."""
    found = set(limits)
    return next((limit for limit in Limit if limit in found), None)


class StageTimer:
    """Wall-clock seconds of planning by stage, in order."""

    def __init__(self, trace_s: float = 0.0) -> None:
        self.seconds: dict[str, float] = {"trace": trace_s} if trace_s else {}
        self.started = self._last = time.monotonic()

    def add(self, seconds: Iterable[tuple[str, float]]) -> None:
        """Add seconds to stages."""
        for stage, some in seconds:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + some

    def time(self, stage: str, step: Callable[[], Any]) -> Any:
        """Run ``step``, and add its seconds to ``stage``."""
        started = time.monotonic()
        result = step()
        self.add([(stage, time.monotonic() - started)])
        return result

    def lap(self, stage: str) -> None:
        """Add the seconds since the last lap to ``stage``."""
        now = time.monotonic()
        self.add([(stage, now - self._last)])
        self._last = now
