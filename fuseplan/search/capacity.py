"""Which groups of a component fit on chip for sure: asked of each that is enumerated, by masks.

It is ``Residency.is_roomy`` but for groups that fit only because they are few: what is said here of
the blocks that are alive is said of the whole component.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from costmodel.graph import DimRole
from fuseplan.schedule.footprint import Residency
from fuseplan.support.bitset import bits

Mask = int
Axes = frozenset[int]


@dataclass(frozen=True, slots=True)
class _Streaming:
    """What keeps a group from streaming an axis in one pass."""

    never: Mask
    """Positions that need it whole, or both reduce it and walk it again."""
    after: tuple[tuple[Mask, Mask], ...]
    """Positions that walk it, each with those before it whose sums along it reach it."""
    written: tuple[tuple[Mask, Mask], ...]
    """Positions that walk it, each with those of its results that it indexes, as bits of values."""


class Room:
    """What the groups of one component hold on chip. ``members`` are the nodes at each position,
    ``values`` the bits of values, ``above`` the positions on paths to each."""

    def __init__(
        self,
        residency: Residency,
        members: Sequence[Sequence[int]],
        values: dict[int, Mask],
        above: Sequence[Mask],
    ) -> None:
        self._residency, self._members, self._values, self._above = residency, members, values, above
        self._nodes = tuple(sorted(n for nodes in members for n in nodes))
        self._holders = self._by_axis([residency.held(n) for n in self._nodes])
        self._walkers = self._by_axis([residency.walks.held(n) for n in self._nodes])
        self._fits = cache(self._all_fit)
        self._streaming = cache(self._streaming_of)

    def _by_axis(self, axes_of: Sequence[Axes]) -> tuple[tuple[int, Mask], ...]:
        position = {n: 1 << i for i, nodes in enumerate(self._members) for n in nodes}
        found: dict[int, Mask] = {}
        for n, axes in zip(self._nodes, axes_of, strict=True):
            for axis in axes:
                found[axis] = found.get(axis, 0) | position[n]
        return tuple(found.items())

    def held(self, mask: Mask) -> Axes:
        """The axes, roughly, that the group reduces or needs whole."""
        return frozenset([axis for axis, holders in self._holders if holders & mask])

    def is_tight(self, mask: Mask) -> bool:
        """Whether the group may be too large if all that it holds is whole."""
        return not self._fits(self.held(mask))

    def is_roomy(self, mask: Mask, crossing: Mask) -> bool:
        """Whether the group fits for sure, one axis streamed if need be, while it exchanges
        ``crossing``, a mask of values."""
        held = self.held(mask)
        if not held:
            return True
        walked = [axis for axis, walkers in self._walkers if walkers & mask]
        if len(walked) == 1 and self._residency.walks.is_allowed(walked[0]):
            return True
        return any(self._fits(held - {a}) and self._streams(mask, a, crossing) for a in held)

    def _all_fit(self, held: Axes) -> bool:
        return self._residency.fits_at_once(self._nodes, held)

    def _streams(self, mask: Mask, axis: int, crossing: Mask) -> bool:
        rules = self._streaming(axis)
        if mask & rules.never:
            return False
        if not self._residency.on_the_way and any(mask & i and crossing & made for i, made in rules.written):
            return False
        return not any(mask & i and mask & before for i, before in rules.after)

    def _streaming_of(self, axis: int) -> _Streaming:
        residency, graph = self._residency, self._residency.graph
        walking = reducing = never = 0
        written: list[tuple[Mask, Mask]] = []
        for i, nodes in enumerate(self._members):
            values = 0
            for n in nodes:
                node, own = graph.nodes[n], residency.axes(n)
                if axis not in own:
                    continue
                walking |= 1 << i
                roles = {role for a, role in zip(own, node.roles, strict=True) if a == axis}
                if DimRole.REDUCED in roles:
                    reducing |= 1 << i
                if DimRole.WHOLE in roles or not residency.streams(tuple(nodes), axis):
                    never |= 1 << i
                for v, dim_map in zip(node.outputs, node.output_maps, strict=True):
                    if any(own[d] == axis for dims in dim_map for d in dims):
                        values |= self._values.get(v, 0)
            if values:
                written.append((1 << i, values))
        after = ((1 << i, self._above[i] & reducing) for i in bits(walking))
        return _Streaming(never, tuple((i, before) for i, before in after if before), tuple(written))
