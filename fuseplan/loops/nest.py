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
from costmodel.graph import Graph
from costmodel.kernel import Access, AxisRole, KernelSpec
from fuseplan.layout import Boundary, Layout, group_layout
from fuseplan.loops.passes import Program, make_program
from fuseplan.spec import SpecMaker
from fuseplan.tiles import addressing

# Tiles of a long axis. Under 64 a matrix product is all overhead; over 4096 nothing is gained.
_TILES = (64, 128, 256, 512, 1024, 2048, 4096)
_LONG = 64
_AS_LARGE = 2
"""Inner values half as large as the largest have axes worth cutting, too."""


def program_of(graph: Graph, spec: KernelSpec) -> Program | None:
    """The passes of a nest."""
    return make_program(
        graph,
        spec.nodes,
        spec.node_axes,
        frozenset(i for i, axis in enumerate(spec.axes) if not axis.role.is_whole),
        spec.streamed,
        frozenset(w.value for w in spec.writes),
        spec.keeps,
    )


def passes_of(graph: Graph, spec: KernelSpec) -> tuple[tuple[int, ...], ...]:
    """For each pass of a kernel along its stream, the nodes evaluated on every tile: it has some,
    if it walks no more than one axis."""
    program = program_of(graph, spec)
    assert program is not None
    return tuple(p.loop for p in program.passes)


def nests(graph: Graph, nodes: tuple[int, ...], axes: GroupAxes, edge: Boundary) -> Iterator[KernelSpec]:
    """The nests of the group that are priced, in a fixed order."""
    layout = group_layout(graph, nodes, axes, edge)
    cut = cuttable(layout, axes)
    free = {a for a in cut if all(a in w.axis_set for w in layout.writes) and not axes.reduced[a]}
    options = [
        _tiles(layout.sizes[a], a in free) if a in cut else (layout.sizes[a],) for a in range(len(axes.sizes))
    ]
    can_address = addressing(layout, "loops")
    programs: dict[tuple[AxisRole, ...], list[SpecMaker]] = {}
    for tiles in itertools.product(*options):
        roles = tuple(_role(a, tile, layout.sizes[a], free) for a, tile in enumerate(tiles))
        if all(role == AxisRole.RESIDENT for role in roles):
            continue
        if not can_address(tiles):
            continue
        if roles not in programs:
            programs[roles] = _makers(graph, nodes, axes, layout, roles)
        for make_spec in programs[roles]:
            yield make_spec(tiles)


def _makers(
    graph: Graph, nodes: tuple[int, ...], axes: GroupAxes, layout: Layout, roles: tuple[AxisRole, ...]
) -> list[SpecMaker]:
    """Makers of specs under these roles: for each axis that can be the stream, with products
    computed again in each pass and, where that makes a difference, kept."""
    streams: list[int | None] = [a for a, role in enumerate(roles) if role == AxisRole.STREAMED]
    makers: list[SpecMaker] = []
    for stream in streams or [None]:
        for keeps in (False, True):
            make_spec = SpecMaker(nodes, axes, layout, roles, "loops", stream, keeps)
            program = program_of(graph, make_spec(axes.sizes))
            if program is None or (keeps and not any(p.kept for p in program.passes)):
                break
            make_spec.passes = tuple(p.loop for p in program.passes)
            makers.append(make_spec)
    return makers


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
