"""A partition under construction: merge two groups, and never make two wait for each
other."""

from __future__ import annotations

from fuseplan.bits import bits
from fuseplan.pricing import Price
from fuseplan.space import Mask, Space


class Merging:
    """Groups of a component, at first one an operation. A group is named by its mask."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.owner: list[Mask] = [0] * space.n
        self.reach: dict[Mask, Mask] = {}
        """For each group, the positions that wait for one of its members."""
        for group in space.singles:
            reach = 0
            for i in bits(group):
                self.owner[i] = group
                reach |= space.below[i]
            self.reach[group] = reach & ~group

    def groups(self) -> list[Mask]:
        """The groups as they are now, by lowest member."""
        return sorted(self.reach, key=lambda mask: mask & -mask)

    def saving(self, a: Mask, b: Mask) -> tuple[int, int, int] | None:
        """What merging saves in each objective; None if it is illegal or a loss."""
        both = a | b
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
        apart = self.space.total((a, b))
        known = self.space.known_price(both)
        least_ps = self.space.least(both) if known is None else 0
        if known is not None or apart.time_ps < least_ps:
            return self.saving(a, b) if known is not None else None
        return (apart.time_ps - least_ps, apart.hbm_bytes, apart.kernels) if self._allowed(both) else None

    def _allowed(self, both: Mask) -> bool:
        space = self.space
        return not space.clashes(both) and not space.refused(both, space.crossing(both))

    def deadlocks(self, a: Mask, b: Mask) -> bool:
        """Whether a third group waits for one of the two and is waited for by the other."""
        return self._leads_around(a, b) or self._leads_around(b, a)

    def _leads_around(self, a: Mask, b: Mask) -> bool:
        both = a | b
        seen: Mask = 0
        new = self.reach[a] & ~both
        while new:
            group = self.owner[(new & -new).bit_length() - 1]
            if self.reach[group] & b:
                return True
            seen |= group
            new = (new | self.reach[group]) & ~(seen | both)
        return False

    def merge(self, a: Mask, b: Mask) -> Mask:
        """Make the two groups one."""
        both = a | b
        self.reach[both] = (self.reach.pop(a) | self.reach.pop(b)) & ~both
        for i in bits(both):
            self.owner[i] = both
        return both
