"""The solution of one component: groups, bound, prices, and a note where it is not proven."""

from __future__ import annotations

from dataclasses import dataclass, field

from fuseplan.plan.notes import Note, NoteKind, note
from fuseplan.search.space import Mask, Space
from fuseplan.support.work import Limit

FAILURES = (ImportError, MemoryError, RuntimeError, OverflowError, OSError, AttributeError)
"""What a missing, broken or overwhelmed OR-Tools raises; a library that does not load, OSError."""


@dataclass(slots=True)
class Solved:
    """The best partition found of one distinct component, and what is known about others."""

    groups: list[Mask]
    bound_ps: int
    optimal: bool
    columns: dict[Mask, int] = field(default_factory=dict)
    """Every legal group that has not been refused, with its time or a floor under it."""
    duals: tuple[int, ...] = ()
    """A price for each position such that no column costs less than its positions."""
    note: Note | None = None
    steady: bool = True
    """Solving it once more gives the same, as far as this file knows: no solver was missing."""
    crowded: bool = False
    """Whether it has too many groups for copies of operations to be worth their search."""


def failure(error: BaseException) -> Note:
    """The note on a solver that could not be used."""
    return note(NoteKind.SOLVER_FAILED, error=str(error) or type(error).__name__)


def ended_note(space: Space, is_late: bool = True) -> Note:
    """The note on a component that the deadline, or the limit of counted work, left unproven."""
    limit = Limit.DEADLINE if is_late and not space.book.work.is_spent else Limit.WORK
    return part_note(NoteKind.UNPROVEN, space, limit)


def part_note(kind: NoteKind, space: Space, limit: Limit | None = None, **figures: int) -> Note:
    """A note on a component, which is named by its size and its first operation."""
    return note(kind, limit=limit, node=space.component.nodes[0], count=space.n, **figures)
