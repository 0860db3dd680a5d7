"""Schedule a group as tiled loops of a CPU.

The axes of the group's largest intermediates are tiled; the others are whole in every tile. An axis that
indexes all results, and that no node reduces, is an outer, parallel loop. Of the other tiled axes one is the
stream, walked in passes (``multipass``); around it results are accumulated in place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cached_property

from costmodel.axes import GroupAxes
from costmodel.backends import backend_of
from costmodel.cpu_functions import flops_on_cpu
from costmodel.device import DeviceSpec, time_ps
from costmodel.graph import Boundary, Graph, OpKind
from costmodel.kernel import Access, AxisRole, KernelSpec
from costmodel.loops import NestWork, nest_work
from costmodel.roofline import estimate
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.layout import Layout, SpecMaker, free_axes, group_layout
from fuseplan.schedule.nests.multipass import TimeLimit, TooSlowError, program_of
from fuseplan.schedule.nests.offered import Nests
from fuseplan.schedule.pricing import Nodes
from fuseplan.schedule.tilings import addressing

LARGE_FRACTION = 2
"""The axes of intermediates of at least half the largest one's size are tiled."""

EQUAL_TIME = (110, 100)
"""Tilings are taken to be equally fast if they take as long as the fastest one, or up to 10 % longer beside
its matrix products: the surcharge on what the model may not see (``costmodel.loops``). The one that needs the
least memory is chosen: of its pages fewer are new in a call, and more of them are in a cache."""

LONG_AXIS, LONG_TILE = 256, 16
"""An axis that has so many of the longest tiles has one that is so many times as long, too. If it alone is
tiled, as the indices of a lookup are, shorter tiles are too small for all cores."""

MASKED_KERNELS = 24
"""The number of fastest tilings whose masked tiles are determined, which takes milliseconds each. A mask
changes the order of tilings little."""


Order = tuple[int, int]
"""The rank of a nest among those of its group, independent of the order in which they are priced."""


def nests(
    graph: Graph, nodes: tuple[int, ...], axes: GroupAxes, edge: Boundary, limit: TimeLimit
) -> Iterator[tuple[Order, KernelSpec, NestWork]]:
    """The nests of the group that may keep to the limit, those of the fewest streamed axes first, since they
    recompute least."""
    layout = group_layout(graph, nodes, axes, edge)
    tiled = tileable(layout, axes)
    free = tiled & free_axes(layout, axes)
    options = [
        _tiles(layout.sizes[a], a in free) if a in tiled else (layout.sizes[a],)
        for a in range(len(axes.sizes))
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
    limit: TimeLimit,
) -> Iterator[SpecMaker]:
    """Makers of specs with these roles: for each axis that can be the stream, with contractions recomputed in
    each pass and, where that makes a difference, stored."""
    streams: list[int | None] = [a for a, role in enumerate(roles) if role == AxisRole.STREAMED]
    for stream in streams or [None]:
        for keeps in (False, True):
            make_spec = SpecMaker(nodes, axes, layout, roles, "loops", stream, keeps)
            try:
                program = program_of(graph, make_spec(axes.sizes), limit)
            except TooSlowError:
                continue
            if program is None or (keeps and not any(p.kept for p in program.passes)):
                break
            make_spec.passes = tuple(p.loop for p in program.passes)
            yield make_spec


def tileable(layout: Layout, axes: GroupAxes) -> set[int]:
    """The axes of the largest intermediates, without those that some node needs whole."""

    def extent(access: Access) -> int:
        return math.prod(layout.sizes[a] for a in access.axis_set)

    largest = max((extent(a) for a in layout.inner), default=0)
    large = [a for a in layout.inner if extent(a) * LARGE_FRACTION >= largest]
    return {a for access in large for a in access.axis_set if not axes.whole[a] and layout.sizes[a] > 1}


def _tiles(size: int, free: bool) -> tuple[int, ...]:
    """Tiles of an axis, and the whole axis; a short axis has tiles of one or is whole.

    A candidate is replaced by the largest divisor of the axis up to it, unless that is half as long or less:
    tiles that do not overlap need no masks. An axis of 2,000 has tiles of 500, not of 512.
    """
    tiles = [tile for tile in backend_of("loops").pass_tiles if tile < size]
    if tiles and size >= LONG_AXIS * tiles[-1]:
        tiles.append(LONG_TILE * tiles[-1])
    if not tiles:
        return (1, size) if free else (size,)
    return (*(_divisor(size, tile) or tile for tile in tiles), size)


def _divisor(size: int, tile: int) -> int | None:
    """The largest divisor of ``size`` from ``tile`` down to more than half of it, if there is one."""
    return next((d for d in range(tile, tile // 2, -1) if size % d == 0), None)


def _role(a: int, tile: int, size: int, free: set[int]) -> AxisRole:
    if tile >= size:
        return AxisRole.RESIDENT
    return AxisRole.PARALLEL if a in free else AxisRole.STREAMED


class CpuNests(Nests):
    """Nests as tiled loops of a CPU. Any group may be one."""

    def __init__(self, graph: Graph, device: DeviceSpec, lowered: Lowered | None) -> None:
        super().__init__(graph, device, lowered, "loops")

    def may_be(self, nodes: Nodes) -> bool:
        return True

    def skips(self, nodes: Nodes) -> bool:
        inside = set(nodes)
        return any(offer <= inside for offer in self._skipping_offers)

    @cached_property
    def _skipping_offers(self) -> tuple[frozenset[int], ...]:
        return tuple(frozenset(r) for r in self.offers if self.masked(r))

    def choose(
        self, nodes: Nodes, axes: GroupAxes, edge: Boundary, below_ps: int | None = None
    ) -> Kernel | None:
        # A masked nest may evaluate few of its tiles, so its time has no lower bound here.
        # Nor have the rates of the device a meaning for a user's cost model.
        bounded = not self.masked(nodes) and self.device.cost_model is None
        limit = TimeLimit(
            self._least_ps(nodes), _equal_ps(below_ps) if bounded and below_ps is not None else None
        )
        priced = []
        for order, spec, work in nests(self.graph, nodes, axes, edge, limit):
            cost = estimate(self.graph, spec, self.device, work=work)
            priced.append((cost.time_ps, order, Kernel(spec, cost)))
            if bounded and (limit.ps is None or _equal_ps(cost.time_ps) < limit.ps):
                limit.ps = _equal_ps(cost.time_ps)
        priced.sort(key=lambda found: found[:2])
        kernels = [self.masked_kernel(kernel) for _, _, kernel in priced[:MASKED_KERNELS]]
        least_ps = min((k.cost.time_ps for k in kernels), default=None)
        if least_ps is None or (below_ps is not None and least_ps >= below_ps):
            return None
        fastest = min(kernels, key=lambda k: k.cost.time_ps).cost
        slowest_ps = fastest.matrix_ps + _equal_ps(fastest.time_ps - fastest.matrix_ps)
        fast = (k for k in kernels if k.cost.time_ps <= slowest_ps)
        return min(fast, key=lambda k: (k.cost.onchip_bytes, k.cost.time_ps))

    def _least_ps(self, nodes: Nodes) -> list[int]:
        """For each node, a lower bound on its picoseconds from its flops alone, valid for every tiling."""
        device, found = self.device, []
        for node in (self.graph.nodes[n] for n in nodes):
            flops = flops_on_cpu(self.graph, node, tiled=True)
            work = [
                (flops.vector, device.vector_flops_per_s),
                (flops.transcendental, device.transcendental_per_s),
            ]
            if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
                dtype = self.graph.values[node.inputs[0]].dtype
                work.append((flops.matrix, device.matrix_rate(dtype)))
            found.append(sum(time_ps(amount, rate) - 1 for amount, rate in work if amount and rate))
        return found


def _equal_ps(ps: int) -> int:
    """The longest time that counts as equal to ``ps``."""
    return ps * EQUAL_TIME[0] // EQUAL_TIME[1]
