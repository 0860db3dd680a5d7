"""Refuse groups that no tiles serve, given which nodes may still join them (``LeastTiles``).

``Capacity.refuse`` asks whether a group could fit if the axes that it holds were whole and all others cut
into tiles of one element, whatever joins it. Here the nodes that may join are known, and with them more of
the tiles of every larger group:

- An axis that some array written for good does not have is no grid axis: it is whole, or streamed.
- The axis along which the largest arrays are contiguous has a least tile (``tilings``).
- A streamed axis has one too, and a whole axis the tile that holds it.

A kernel with a contraction has tiles of all other axes than those that are contracted, and walks one of these
once (``axis_roles``, ``tilings``). So it holds no other axis, and writes nothing along the one that it walks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from math import prod

from costmodel.axes import GroupAxes, NodeAxes, compose
from costmodel.graph import DimRole, Node, OpKind
from fuseplan.schedule.addressing import whole_tile
from fuseplan.schedule.footprint import Capacity
from fuseplan.schedule.layout import contraction_axes, repeats
from fuseplan.schedule.tilings import least_contiguous_tile, least_stream_tile
from fuseplan.support.errors import Verdict


@dataclass(frozen=True, slots=True)
class _Contiguous:
    """A dimension of a node along which one of its arrays is contiguous."""

    elements: int
    """Of the array."""
    dim: int
    class_: int
    least_extent: int
    """Of the innermost axis that the dimension may be split into."""


class LeastTiles:
    """The tiles that every group needs at least. What is known of each node is found once.

    Args:
        capacity: of the graph and the device.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity

    @cached_property
    def _elements(self) -> list[int]:
        """For each node, the elements of the largest array that it reads or makes, as far as it has axes."""
        return [_elements(node) for node in self._capacity.graph.nodes]

    @cached_property
    def _reduced(self) -> list[frozenset[int]]:
        """For each node, the classes of the axes that it reduces."""
        classes = self._capacity.classes
        return [
            frozenset(
                [c for c, role in zip(classes[node.id], node.roles, strict=True) if role == DimRole.REDUCED]
            )
            for node in self._capacity.graph.nodes
        ]

    @cached_property
    def _contiguous(self) -> list[tuple[_Contiguous, ...]]:
        return [tuple(_contiguous_of(self._capacity, node)) for node in self._capacity.graph.nodes]

    @cached_property
    def _products(self) -> frozenset[int]:
        """The contractions."""
        nodes = self._capacity.graph.nodes
        return frozenset([node.id for node in nodes if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE])

    def refuse(
        self, nodes: tuple[int, ...], axes: GroupAxes, crossing: Set[int], joiners: Collection[int]
    ) -> Verdict | None:
        """Why no tiles serve any group that holds all of ``nodes``, and others of ``joiners`` alone; None if
        some may.

        Args:
            nodes: ascending.
            axes: of ``nodes``.
            crossing: values that every such group reads or writes.
            joiners: all nodes that may join.
        """
        capacity = self._capacity
        graph, backend = capacity.graph, capacity.device.backend
        members = [(graph.nodes[n], own) for n, own in zip(nodes, axes.node_axes, strict=True)]
        class_of = {
            a: c
            for n, own in zip(nodes, axes.node_axes, strict=True)
            for c, dims in zip(capacity.classes[n], own, strict=True)
            for a in dims
        }
        # Nothing ties two axes of one class together if nothing joins.
        tied_to = class_of if joiners else {a: a for a in class_of}
        written = [
            {a for dims in compose(dim_map, own) for a in dims}
            for node, own in members
            for v, dim_map in zip(node.outputs, node.output_maps, strict=True)
            if v in crossing
        ]
        # An axis that is missing from a written array may yet be tied to one of the same class that is there.
        there = [{tied_to[a] for a in own} for own in written]
        held = {
            a
            for a, c in tied_to.items()
            if axes.reduced[a] or axes.whole[a] or any(c not in classes for classes in there)
        }
        if not held:
            return None
        repeated = repeats(graph, nodes, axes)
        indexed = set().union(*written)
        anchor = next(((node, own) for node, own in members if node.id in self._products), None)
        if anchor is not None:
            depth = contraction_axes(*anchor).depth
            walked = depth[0] if depth else None
            others = held - {a for a in held if tied_to[a] in {tied_to[d] for d in depth}}
            if others or walked in repeated or walked in indexed:
                reason = f"{anchor[0].op} has tiles of an axis that {_ops(members)} needs whole"
                return Verdict("backend", reason, nodes)
        every = (*nodes, *joiners)
        reducible = frozenset().union(*[self._reduced[n] for n in every])
        least_stream, parallel = 1, {}
        if self._products.isdisjoint(every):  # which have tiles of their own
            least_stream = least_stream_tile(backend)
            parallel = self._along_rows(nodes, axes, every, reducible)
        least = capacity.least_footprint(nodes, axes, crossing)
        tiles = {**parallel, **{a: whole_tile(axes.sizes[a], backend) for a in held}}
        if least.fits_with(tiles):
            return None
        may_pass = not any(axes.whole) and (not any(axes.reduced) or capacity.may_stream(nodes))
        for a in held:
            in_one_pass = a not in repeated and (capacity.writes_in_pass or a not in indexed)
            if class_of[a] not in reducible or axes.whole[a] or not (in_one_pass or may_pass):
                continue
            # Axes of one class may be one axis of a larger group, and streamed together.
            streamed = {b: min(least_stream, axes.sizes[b]) for b in held if tied_to[b] == tied_to[a]}
            if least.fits_with({**tiles, **streamed}):
                return None
        limit = f"({capacity.device.block_limit_bytes:,} bytes a core)"
        reason = f"{_ops(members)} would need larger blocks than fit on chip {limit}"
        return Verdict("on-chip", reason, nodes)

    def _along_rows(
        self, nodes: Sequence[int], axes: GroupAxes, every: Sequence[int], reducible: Set[int]
    ) -> dict[int, int]:
        """The least tile of each axis along which a largest array of every larger group is contiguous."""
        largest = max([self._elements[n] for n in every])
        found: dict[int, int] = {}
        for n, own in zip(nodes, axes.node_axes, strict=True):
            for of in self._contiguous[n]:
                if of.elements == largest:
                    tile = least_contiguous_tile(of.class_ in reducible, self._capacity.device.backend)
                    found[own[of.dim][-1]] = min(tile, of.least_extent)
        return found


def _ops(members: Sequence[tuple[Node, NodeAxes]]) -> str:
    return " and ".join(dict.fromkeys(node.op for node, _ in (members[0], members[-1])))


def _contiguous_of(capacity: Capacity, node: Node) -> Iterator[_Contiguous]:
    """The dimensions along which arrays of ``node`` are contiguous."""
    classes = capacity.classes[node.id]
    maps = node.input_maps + node.output_maps
    for v, dim_map in zip(node.inputs + node.outputs, maps, strict=True):
        if node.addresses(dim_map):  # A kernel has no block of it.
            continue
        dims = [d for of in dim_map for d in of]
        elements = prod([node.dims[d] for d in dims])
        # If two of its dimensions became one axis, it would be smaller.
        is_distinct = len({classes[d] for d in dims}) == len(dims)
        if capacity.graph.values[v].size == elements > 1 and is_distinct and dim_map[-1]:
            d = dim_map[-1][-1]
            yield _Contiguous(elements, d, classes[d], capacity.minor_extents[node.id][d])


def _elements(node: Node) -> int:
    maps = [m for m in node.input_maps + node.output_maps if not node.addresses(m)]
    return max([prod([node.dims[d] for dims in dim_map for d in dims]) for dim_map in maps], default=0)
