"""Nests: the loop orders and tiles that a group may have on the CPU.

The axes that index the group's largest inner values are cut; the others stay whole in every
tile. An axis that indexes all results is an outer, parallel loop; of the others, the
innermost is the stream (``passes``), and around it results are accumulated in place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from costmodel.axes import GroupAxes
from costmodel.boundary import Boundary
from costmodel.graph import Graph
from costmodel.kernel import Access, AxisRole, KernelSpec
from costmodel.nest_work import NestWork, nest_work
from fuseplan.schedule.layout import Layout, group_layout
from fuseplan.schedule.nests.multipass import Limit, LimitError, Program, make_program
from fuseplan.schedule.spec import SpecMaker
from fuseplan.schedule.tilings import addressing

# Tiles of a long axis. Under 64 a matrix product is all overhead; over 4096 nothing is gained.
_TILES = (64, 128, 256, 512, 1024, 2048, 4096)
_LONG = 64
_AS_LARGE = 2
"""Inner values half as large as the largest have axes worth cutting, too."""


def program_of(graph: Graph, spec: KernelSpec, limit: Limit | None = None) -> Program | None:
    """The passes of a nest; ``LimitError`` if they take longer than the limit."""
    return make_program(
        graph,
        spec.nodes,
        spec.node_axes,
        frozenset(i for i, axis in enumerate(spec.axes) if not axis.role.is_whole),
        spec.streamed,
        frozenset(w.value for w in spec.writes),
        spec.keeps,
        limit,
    )


def passes_of(graph: Graph, spec: KernelSpec) -> tuple[tuple[int, ...], ...] | None:
    """For each pass of a kernel along its stream, the nodes evaluated on every tile; None if there are no
    such passes."""
    program = program_of(graph, spec)
    return None if program is None else tuple(p.loop for p in program.passes)


Order = tuple[int, int]
"""Where a nest stands among those of its group, in whichever order they are priced."""


def nests(
    graph: Graph, nodes: tuple[int, ...], axes: GroupAxes, edge: Boundary, limit: Limit
) -> Iterator[tuple[Order, KernelSpec, NestWork]]:
    """The nests of the group that may keep to the limit. Those of the fewest streamed axes come first: they
    compute least more than once."""
    layout = group_layout(graph, nodes, axes, edge)
    cut = cuttable(layout, axes)
    free = {a for a in cut if all(a in w.axis_set for w in layout.writes) and not axes.reduced[a]}
    options = [
        _tiles(layout.sizes[a], a in free) if a in cut else (layout.sizes[a],) for a in range(len(axes.sizes))
    ]
    can_address = addressing(layout, "loops")
    by_roles: dict[tuple[AxisRole, ...], list[tuple[int, tuple[int, ...]]]] = {}
    for place, tiles in enumerate(itertools.product(*options)):
        roles = tuple(_role(a, tile, layout.sizes[a], free) for a, tile in enumerate(tiles))
        if any(role != AxisRole.RESIDENT for role in roles) and can_address(tiles):
            by_roles.setdefault(roles, []).append((place, tiles))
    for roles in sorted(by_roles, key=lambda roles: roles.count(AxisRole.STREAMED)):
        for k, make_spec in enumerate(_makers(graph, nodes, axes, layout, roles, limit)):
            work = nest_work(graph, make_spec(axes.sizes))
            for place, tiles in by_roles[roles]:
                yield (place, k), make_spec(tiles), work


def _makers(
    graph: Graph,
    nodes: tuple[int, ...],
    axes: GroupAxes,
    layout: Layout,
    roles: tuple[AxisRole, ...],
    limit: Limit,
) -> Iterator[SpecMaker]:
    """Makers of specs under these roles: for each axis that can be the stream, with products
    computed again in each pass and, where that makes a difference, kept."""
    streams: list[int | None] = [a for a, role in enumerate(roles) if role == AxisRole.STREAMED]
    for stream in streams or [None]:
        for keeps in (False, True):
            make_spec = SpecMaker(nodes, axes, layout, roles, "loops", stream, keeps)
            try:
                program = program_of(graph, make_spec(axes.sizes), limit)
            except LimitError:
                continue
            if program is None or (keeps and not any(p.kept for p in program.passes)):
                break
            make_spec.passes = tuple(p.loop for p in program.passes)
            yield make_spec


def cuttable(layout: Layout, axes: GroupAxes) -> set[int]:
    """The axes of the largest inner values, but for those that some node needs whole."""

    def extent(access: Access) -> int:
        return math.prod(layout.sizes[a] for a in access.axis_set)

    largest = max((extent(a) for a in layout.inner), default=0)
    large = [a for a in layout.inner if extent(a) * _AS_LARGE >= largest]
    return {a for access in large for a in access.axis_set if not axes.whole[a] and layout.sizes[a] > 1}


def _tiles(size: int, free: bool) -> tuple[int, ...]:
    """Tiles of an axis, and the whole of it; a short one is cut into ones or not at all."""
    if size <= _LONG:
        return (1, size) if free else (size,)
    return (*(t for t in _TILES if t < size), size)


def _role(a: int, tile: int, size: int, free: set[int]) -> AxisRole:
    if tile >= size:
        return AxisRole.RESIDENT
    return AxisRole.PARALLEL if a in free else AxisRole.STREAMED
