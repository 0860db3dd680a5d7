"""A partition under construction: merge two groups, and never make two wait for each
other."""

from __future__ import annotations

from fuseplan.schedule.pricing import Price
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits
from fuseplan.support.digraph import execution_order


class Merging:
    """Groups of a component, at first one an operation. A group is named by its mask.

    The groups are kept in an order in which they could run. Only what stands between two groups in that
    order can wait for one and be waited for by the other, so that a merge of two groups is tested and
    made without looking at the rest (as Pearce and Kelly, "A dynamic topological sort algorithm for
    directed acyclic graphs", JEA 2007, keep an order).
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.owner: list[Mask] = [0] * space.n
        self.reach: dict[Mask, Mask] = {}
        """For each group, the positions that wait for one of its members."""
        self.looked = 0
        """Positions in all groups that were asked about: a count of the work done."""
        singles = space.singles
        for group in singles:
            reach = 0
            for i in bits(group):
                self.owner[i] = group
                reach |= space.below[i]
            self.reach[group] = reach & ~group
        several = len(singles) < space.n  # else the order of positions is one
        self._order = [singles[g] for g in execution_order(space.followers(singles))] if several else singles
        self._place = {group: k for k, group in enumerate(self._order)}

    def groups(self) -> list[Mask]:
        """The groups as they are now, by lowest member."""
        return sorted(self.reach, key=lambda mask: mask & -mask)

    def saving(self, a: Mask, b: Mask) -> tuple[int, int, int] | None:
        """What merging saves in each objective; None if it is illegal or a loss."""
        both = a | b
        self._count(both)
        if not self._allowed(both):
            return None
        price, apart = self.space.price(both), self.space.total((a, b))
        if not isinstance(price, Price) or apart < price:
            return None
        return (
            apart.time_ps - price.time_ps,
            apart.hbm_bytes - price.hbm_bytes,
            apart.kernels - price.kernels,
        )

    def saving_at_most(self, a: Mask, b: Mask) -> tuple[int, int, int] | None:
        """No less than ``saving``, without pricing the two together."""
        both = a | b
        self._count(both)
        apart = self.space.total((a, b))
        known = self.space.known_price(both)
        least_ps = self.space.least(both) if known is None else 0
        if known is not None or apart.time_ps < least_ps:
            return self.saving(a, b) if known is not None else None
        return (apart.time_ps - least_ps, apart.hbm_bytes, apart.kernels) if self._allowed(both) else None

    def _count(self, both: Mask) -> None:
        size = both.bit_count()
        self.looked += size
        self.space.book.looked += size

    def _allowed(self, both: Mask) -> bool:
        space = self.space
        return not space.clashes(both) and not space.refused(both, space.crossing(both))

    def neighbours(self, group: Mask) -> set[Mask]:
        """The groups that share an edge or an array with ``group``."""
        border: Mask = 0
        for i in bits(group):
            border |= self.space.neighbours[i]
        return {self.owner[i] for i in bits(border & ~group)}

    def deadlocks(self, a: Mask, b: Mask) -> bool:
        """Whether a third group waits for one of the two and is waited for by the other."""
        first, last = sorted((self._place[a], self._place[b]))
        start, goal = self._order[first], self._order[last]
        waiting = self.reach[start]
        for group in self._order[first + 1 : last]:
            if group & waiting:
                if self.reach[group] & goal:
                    return True
                waiting |= self.reach[group]
        return False

    def merge(self, a: Mask, b: Mask) -> Mask:
        """Make the two groups one; they must not deadlock."""
        both = a | b
        first, last = sorted((self._place.pop(a), self._place.pop(b)))
        waiting = self.reach[self._order[first]]
        before: list[Mask] = []
        after: list[Mask] = []
        for group in self._order[first + 1 : last]:
            if group & waiting:
                waiting |= self.reach[group]
                after.append(group)
            elif group:
                before.append(group)
        moved = [*before, both, *after]
        # Places that are left over hold the empty group.
        self._order[first : last + 1] = [0] * (last + 1 - first - len(moved)) + moved
        for k, group in enumerate(moved, last + 1 - len(moved)):
            self._place[group] = k
        self.reach[both] = (self.reach.pop(a) | self.reach.pop(b)) & ~both
        for i in bits(both):
            self.owner[i] = both
        return both
