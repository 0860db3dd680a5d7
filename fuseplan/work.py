"""Work: how much a search does, counted so that its limit is the same on every machine.

A clock would end a search elsewhere on a busy machine than on an idle one, and the plans would differ.
The clock is only the user's deadline; what ends a search otherwise is what it has done.
"""

from __future__ import annotations

from dataclasses import dataclass

UNITS_PER_S = 1_000_000
"""A unit is about a microsecond of an idle core."""

SHARE = 2
"""Each search of a program may do half of what an idle core does until the deadline, so that a busy machine
comes to the same end. No search of the workloads does so much."""

LEAST_S = 20.0
"""Deadlines shorter than this cut a search by the clock; its counted limit is as for this one, so that what
is remembered of one plan holds for another."""

STEP = 15
"""Of enumerating one more group."""

_PRICE, _PRICE_A_NODE = 400, 25


@dataclass(slots=True)
class Work:
    """What one search may do, in units, and what it has done."""

    limit: int
    spent: int = 0

    def spend(self, units: int) -> None:
        """So much has been done."""
        self.spent += units

    def spend_price(self, n_nodes: int) -> None:
        """A group has been scheduled."""
        self.spent += _PRICE + _PRICE_A_NODE * n_nodes

    @property
    def is_spent(self) -> bool:
        """Whether the search is to end."""
        return self.spent >= self.limit


def limit_of(deadline_s: float) -> int:
    """The counted limit of one search under a deadline."""
    seconds = min(max(deadline_s, LEAST_S), 1e6)
    return int(seconds * UNITS_PER_S / SHARE)
