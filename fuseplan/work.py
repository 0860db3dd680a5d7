"""Count the work of a search, so that it is limited alike on every machine.

If the clock ended a search, it would end sooner on a busy machine than on an idle one, and the plans would
differ. So a search ends when its counted work reaches a limit, and by the clock only at the user's deadline.
"""

from __future__ import annotations

from dataclasses import dataclass

UNITS_PER_S = 1_000_000
"""A unit is about a microsecond of an idle core."""

SHARE = 2
"""Each search of a program may do half of what an idle core does until the deadline, so that a busy machine
comes to the same end. No search of the workloads does so much."""

LEAST_S = 20.0
"""Under a shorter deadline the counted limit is as for this one, and the clock ends the search: what is
remembered of one plan then holds for another."""

STEP = 15
"""Units that enumerating one more group takes."""

_PRICE, _PRICE_A_NODE = 400, 25


@dataclass(slots=True)
class Work:
    """The work of one search in units: its limit, and how much is spent."""

    limit: int
    spent: int = 0

    def spend(self, units: int) -> None:
        """Count ``units`` of work."""
        self.spent += units

    def spend_price(self, n_nodes: int) -> None:
        """Count the work of scheduling a group of ``n_nodes`` operations."""
        self.spent += _PRICE + _PRICE_A_NODE * n_nodes

    @property
    def is_spent(self) -> bool:
        """Whether the search is to end."""
        return self.spent >= self.limit


def limit_of(deadline_s: float) -> int:
    """The counted limit of one search under a deadline."""
    seconds = min(max(deadline_s, LEAST_S), 1e6)
    return int(seconds * UNITS_PER_S / SHARE)
