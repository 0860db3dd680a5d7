"""Refuse groups whose on-chip bytes exceed a core for every tiling, and for every larger group.

An axis that a member reduces is never a grid axis again, however the group grows. It is streamed or it is
resident; only one axis can be streamed, in one pass that on a GPU writes nothing, or in several passes
(``Capacity.may_stream``). If the resident axes alone exceed a core (``costmodel.onchip.LeastFootprint``), no
schedule of this group or of any larger one can fit, which prunes a search early.

Axes are compared across groups by *class*: dimensions of a graph's nodes that some group might tie together.
Dimensions of different classes are different axes in every group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from costmodel.axes import Classes, GroupAxes, axis_classes, compose, minor_extents
from costmodel.device import DeviceSpec
from costmodel.graph import DimRole, Graph, Node, OpKind
from costmodel.onchip import LeastFootprint, LeastFootprints
from fuseplan.schedule.layout import SHORT_AXIS, repeats
from fuseplan.support.bitset import bits
from fuseplan.support.errors import Verdict

Mask = int

_NEVER_STREAMED = frozenset((-1,))


class Capacity:
    """Which groups of a graph can fit on a core of a device."""

    def __init__(self, graph: Graph, device: DeviceSpec) -> None:
        self.graph = graph
        self.device = device
        self.classes = axis_classes(graph, graph.nodes)
        self.writes_in_pass = device.sequential_grid
        """Whether a stream that is walked once may be written to on the way."""
        products = [n.kind == OpKind.OUT_ELEMENTWISE_FUSABLE for n in graph.nodes]
        others = [n for n, is_product in zip(graph.nodes, products, strict=True) if not is_product]
        known = axis_classes(graph, others) if any(products) else self.classes
        self._reduced = [
            _NEVER_STREAMED if is_product or DimRole.WHOLE in node.roles else _reduced(node, known[node.id])
            for node, is_product in zip(graph.nodes, products, strict=True)
        ]
        self._short = _short(others, known)
        self._rows: frozenset[int] | None = None
        """The axes that may be streamed in passes; None: all."""
        if not device.capabilities.walks_in_passes:
            self._rows = frozenset()
        elif not device.sequential_grid:
            self._rows = _rows(others, known)

    @cached_property
    def least_footprint(self) -> LeastFootprints:
        """Lower bounds of the footprints of groups."""
        return LeastFootprints(self.graph, self.device)

    @cached_property
    def minor_extents(self) -> list[list[int]]:
        """For each dimension of each node, the least extent of the innermost axis that it may be split
        into."""
        return minor_extents(self.graph)

    def held(self, n: int) -> frozenset[int]:
        """The classes of the axes that node ``n`` reduces or needs whole."""
        own = zip(self.classes[n], self.graph.nodes[n].roles, strict=True)
        return frozenset(c for c, role in own if role in (DimRole.REDUCED, DimRole.WHOLE))

    def may_stream(self, nodes: Sequence[int]) -> bool:
        """Whether the axis that ``nodes`` reduce may be streamed in several passes, so that none of it has to
        be on chip, as far as can be told of every larger group.

        It is the only long axis that the group reduces: with another resident beside it, few rows would be
        left to stream side by side. On a GPU it lies along the rows of arrays: tiles of columns have to be
        long to be loaded well, so that there are too few of them to occupy all cores. Both hold for the axes
        of the whole graph without its contractions, which no such group has. So a group that is forbidden to
        do so forbids it to every larger one.
        """
        return self.can_stream(frozenset().union(*map(self.reduced, nodes)))

    def reduced(self, n: int) -> frozenset[int]:
        """The axes that node ``n`` reduces, in classes of the graph without contractions. A contraction, or a
        node that needs an axis whole, has one that no kernel streams in passes."""
        return self._reduced[n]

    def can_stream(self, reduced: frozenset[int]) -> bool:
        """``may_stream`` of nodes that reduce these axes together."""
        long = reduced - self._short
        return len(long) <= 1 and long != _NEVER_STREAMED and (self._rows is None or long <= self._rows)

    def refuse(self, nodes: tuple[int, ...], axes: GroupAxes, crossing: Set[int]) -> Verdict | None:
        """Why no tile of ``nodes`` or of a larger group can fit on a core, or None.

        ``crossing`` are values that the group reads or writes however it grows: arguments and
        results of the function, and what it exchanges with nodes that can never join.
        """
        graph = self.graph
        held = frozenset(a for a in range(len(axes.sizes)) if axes.reduced[a] or axes.whole[a])
        if not held or (not any(axes.whole) and self.may_stream(nodes)):
            return None
        least = self.least_footprint(nodes, axes, crossing)
        if least.fits(held):
            return None
        members = [(graph.nodes[n], own) for n, own in zip(nodes, axes.node_axes, strict=True)]
        # An axis that is missing from a written value proves nothing: joiners may yet tie it to
        # one that is there.
        indexed = {
            a
            for node, own in members
            for v, dim_map in zip(node.outputs, node.output_maps, strict=True)
            if v in crossing
            for dims in compose(dim_map, own)
            for a in dims
        }
        class_of = {
            a: c
            for node, own in members
            for c, dims in zip(self.classes[node.id], own, strict=True)
            for a in dims
        }
        repeated = repeats(graph, nodes, axes)
        streamable = [
            a
            for a in held
            if axes.reduced[a] and not axes.whole[a] and (self.writes_in_pass or a not in indexed)
            if a not in repeated
        ]
        for c in {class_of[a] for a in streamable}:
            # Axes of one class may be one axis of a larger group, and streamed together.
            if least.fits(held.difference([a for a in streamable if class_of[a] == c])):
                return None
        names = " and ".join(dict.fromkeys(graph.nodes[n].op for n in (nodes[0], nodes[-1])))
        limit = f"({self.device.block_limit_bytes:,} bytes a core)"
        reason = f"{names} would hold more whole rows and columns than fit on chip {limit}"
        return Verdict("on-chip", reason, nodes)


def _reduced(node: Node, classes: Sequence[int]) -> frozenset[int]:
    own = zip(classes, node.roles, strict=True)
    return frozenset(c for c, role in own if role == DimRole.REDUCED)


def _short(nodes: Iterable[Node], classes: Classes) -> frozenset[int]:
    """The axes of which no dimension is longer than ``SHORT_AXIS``."""
    long: set[int] = set()
    every: set[int] = set()
    for node in nodes:
        every.update(classes[node.id])
        long.update([c for c, size in zip(classes[node.id], node.dims, strict=True) if size > SHORT_AXIS])
    return frozenset(every - long)


def _rows(nodes: Iterable[Node], classes: Classes) -> frozenset[int]:
    """The axes along which some array lies that has others, and those of vectors alone."""
    rows: set[int] = set()
    others: set[int] = set()
    every: set[int] = set()
    for node in nodes:
        for dim_map in (*node.input_maps, *node.output_maps):
            dims = [classes[node.id][d] for dims in dim_map for d in dims]
            every.update(dims)
            if len(dims) > 1:
                others.update(dims[:-1])
                rows.add(dims[-1])
    return frozenset(rows | (every - others))


@dataclass(frozen=True, slots=True)
class _Streaming:
    """The reasons that keep a group from streaming an axis in one pass."""

    never: Mask
    """Positions that need it whole, or both reduce it and walk it again."""
    after: tuple[tuple[Mask, Mask], ...]
    """Positions that walk it, each with those before it whose sums along it reach it."""
    written: tuple[tuple[Mask, Mask], ...]
    """Positions that walk it, each with those of its results that it indexes, as bits of values."""


_MOST_LOOKED = 64_000
"""The most nodes that the tests of one whole component look at together. A component with more sets of axes,
such as the update of many parameters, has each further group tested by itself."""


class ComponentCapacity:
    """Which groups of one component ``Capacity.refuse`` surely allows, told by masks: a search enumerates
    many groups, and few need a closer look.

    ``members`` are the nodes at each position, ``values`` the bits of values, ``above`` the positions on
    paths to each.
    """

    def __init__(
        self,
        capacity: Capacity,
        members: Sequence[Sequence[int]],
        values: dict[int, Mask],
        above: Sequence[Mask],
    ) -> None:
        self._capacity, self._members, self._values, self._above = capacity, members, values, above
        self._nodes = sorted(n for nodes in members for n in nodes)
        self._least: LeastFootprint | None = None
        self._holders = self._by_axis(capacity.held)
        self._reducers = self._by_axis(capacity.reduced)
        kinds = [{capacity.graph.nodes[n].kind for n in nodes} for nodes in members]
        self._contractions = sum(1 << i for i, of in enumerate(kinds) if OpKind.OUT_ELEMENTWISE_FUSABLE in of)
        # No cached methods: a cycle would keep all that belongs to a component until garbage is collected.
        self._fitting: dict[frozenset[int], bool] = {}
        self._streaming: dict[int, _Streaming] = {}

    def _by_axis(self, axes_of: Callable[[int], frozenset[int]]) -> tuple[tuple[int, Mask], ...]:
        """For each axis, the positions of the nodes that have it."""
        found: dict[int, Mask] = {}
        for i, nodes in enumerate(self._members):
            for axis in frozenset().union(*map(axes_of, nodes)):
                found[axis] = found.get(axis, 0) | 1 << i
        return tuple(found.items())

    def _held(self, mask: Mask) -> frozenset[int]:
        """The axes that the group reduces or needs whole."""
        return frozenset([axis for axis, holders in self._holders if holders & mask])

    def is_tight(self, mask: Mask) -> bool:
        """Whether the group may be too large if every axis that it holds is whole."""
        return not self._fits(self._held(mask))

    def has_contraction(self, mask: Mask) -> bool:
        """Whether the group holds a contraction, which not all tiles serve."""
        return bool(mask & self._contractions)

    def is_roomy(self, mask: Mask, crossing: Mask) -> bool:
        """Whether the group is surely allowed, with one axis streamed if need be, while it exchanges
        ``crossing``, a mask of values."""
        held = self._held(mask)
        reduced = frozenset([axis for axis, reducers in self._reducers if reducers & mask])
        if not held or self._capacity.can_stream(reduced):
            return True
        return any(self._fits(held - {a}) and self._streams(mask, a, crossing) for a in held)

    def _fits(self, held: frozenset[int]) -> bool:
        known = self._fitting.get(held)
        if known is None and len(self._fitting) * len(self._nodes) < _MOST_LOOKED:
            known = self._fitting[held] = self._all_fit(held)
        return bool(known)  # What is not known is looked at group by group.

    def _all_fit(self, held: frozenset[int]) -> bool:
        """Whether the whole component would be allowed, if groups of it hold no other axes than ``held``:
        each dimension of each node counts as an axis of its own."""
        if self._least is None:
            graph = self._capacity.graph
            members = [graph.nodes[n] for n in self._nodes]
            sizes = tuple([size for node in members for size in node.dims])
            numbers = iter(range(len(sizes)))
            own = tuple([tuple([(next(numbers),) for _ in node.dims]) for node in members])
            values = frozenset([v for node in members for v in node.inputs + node.outputs])
            axes = GroupAxes(sizes, (), (), own)
            self._least = self._capacity.least_footprint(self._nodes, axes, values)
        every = chain.from_iterable(self._capacity.classes[n] for n in self._nodes)
        return self._least.fits(frozenset([a for a, c in enumerate(every) if c in held]))

    def _streams(self, mask: Mask, axis: int, crossing: Mask) -> bool:
        """Whether the axis is reduced in one pass and indexes nothing that is written for good, except
        where the pass may write."""
        if axis not in self._streaming:
            self._streaming[axis] = self._streaming_of(axis)
        rules = self._streaming[axis]
        if mask & rules.never:
            return False
        if not self._capacity.writes_in_pass and any(
            mask & i and crossing & made for i, made in rules.written
        ):
            return False
        return not any(mask & i and mask & before for i, before in rules.after)

    def _streaming_of(self, axis: int) -> _Streaming:
        graph = self._capacity.graph
        walking = reducing = never = 0
        written: list[tuple[Mask, Mask]] = []
        for i, nodes in enumerate(self._members):
            made = 0
            behind: set[int] = set()
            for n in nodes:
                node, own = graph.nodes[n], self._capacity.classes[n]
                is_behind = not behind.isdisjoint(node.inputs)
                roles = {role for c, role in zip(own, node.roles, strict=True) if c == axis}
                if roles:
                    walking |= 1 << i
                    if DimRole.REDUCED in roles:
                        reducing |= 1 << i
                    if is_behind or DimRole.WHOLE in roles:
                        never |= 1 << i
                    for v, dim_map in zip(node.outputs, node.output_maps, strict=True):
                        if any(own[d] == axis for dims in dim_map for d in dims):
                            made |= self._values.get(v, 0)
                if is_behind or DimRole.REDUCED in roles:
                    behind.update(node.outputs)
            if made:
                written.append((1 << i, made))
        after = ((1 << i, self._above[i] & reducing) for i in bits(walking))
        return _Streaming(never, tuple((i, before) for i, before in after if before), tuple(written))
