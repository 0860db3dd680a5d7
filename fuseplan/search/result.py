"""What is known of a component once it has been looked at, and how that is told.

From what the solver knows in the end to a proof that can be checked without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from fuseplan.search.space import Mask, Space
from fuseplan.support.work import LATE, SPENT

FAILURES = (ImportError, MemoryError, RuntimeError, OverflowError, OSError, AttributeError)
"""What a missing, broken or overwhelmed OR-Tools raises; a library that does not load, OSError."""

MANY_NOTES = 3
UNUSABLE = "the solver could not be used"


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
    note: str = ""
    steady: bool = True
    """Solving it once more gives the same, as far as this file knows: no solver was missing."""
    crowded: bool = False
    """Whether it has too many groups for copies of operations to be worth their search."""


def failure(error: BaseException) -> str:
    """What to tell of a solver that could not be used."""
    return f"{UNUSABLE} ({str(error) or type(error).__name__})"


def ended_note(space: Space, is_late: bool = True) -> str:
    """What to tell of a component that the deadline, or the limit of counted work, left unproven."""
    why = LATE if is_late and not space.book.work.is_spent else SPENT
    return f"{why} {space.n} operations from {where(space)} on were proven"


def where(space: Space) -> str:
    """The first operation of a component, by name."""
    node = space.book.graph.nodes[space.component.nodes[0]]
    return f"{node.op} (n{node.id})"


def renumbered(note: str, number: Callable[[int], int]) -> str:
    """A note with other numbers of nodes, which ``where`` wrote: ``exp (n12)``."""
    return re.sub(r"\(n(\d+)\)", lambda found: f"(n{number(int(found[1]))})", note)
