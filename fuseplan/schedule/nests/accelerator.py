"""Schedule a group with several contractions as one kernel of a GPU or a TPU.

The axes of the group's largest intermediates are tiled. An axis that indexes all results, and that no node
reduces, is a grid axis; one other axis is the stream, walked in passes; all others are whole in every tile.
So attention streams its keys, a gated layer the axis that both contractions contract, a cross-entropy its
classes. An axis that all contractions contract may be whole instead, so that a norm of its rows is known
before they are multiplied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property

from costmodel.axes import GroupAxes, compose
from costmodel.backends import Backend, backend_of
from costmodel.device import DeviceSpec
from costmodel.graph import Boundary, Graph, OpKind
from costmodel.kernel import AxisRole, KernelSpec, evaluations, tile_count
from costmodel.onchip import footprint
from costmodel.roofline import estimate
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.addressing import whole_tile
from fuseplan.schedule.layout import Contraction, Layout, SpecMaker, contraction_axes, free_axes, group_layout
from fuseplan.schedule.nests.cpu import tileable
from fuseplan.schedule.nests.multipass import passes_of
from fuseplan.schedule.nests.offered import Nests
from fuseplan.schedule.nests.regions import (
    expands,
    joined_contractions,
    narrow_contractions,
    normalised_contractions,
    regions,
)
from fuseplan.schedule.pricing import Nodes
from fuseplan.schedule.tilings import Tiles, addressing, dot_tiles
from fuseplan.support.work import Work

SETTLING_GAIN = (9, 10)
"""The contractions of a nest are *settled* (``Pricing.settled``) if the nest takes less than this fraction of
their time as kernels of their own, which may also write a conversion of their results."""

SMALL_WORK = 50_000
"""Units of work (``fuseplan.support.work``) of finding regions of small intermediates, and again of
scheduling them."""

SCHEDULING = 150
"""Units of looking for the best nest of a region, for each operation."""

MASKED_KERNELS = 4
"""The number of fastest kernels whose masked tiles are determined."""


def kernel_nests(
    graph: Graph, nodes: tuple[int, ...], axes: GroupAxes, edge: Boundary, backend: str
) -> Iterator[KernelSpec]:
    """The kernels of the group to price, in a fixed order."""
    layout = group_layout(graph, nodes, axes, edge)
    members = zip((graph.nodes[n] for n in nodes), axes.node_axes, strict=True)
    dots = [contraction_axes(*m) for m in members if m[0].kind == OpKind.OUT_ELEMENTWISE_FUSABLE]
    can_address = addressing(layout, backend, lifts=True)
    inner = _inner(graph, nodes, axes, edge) if backend_of(backend).loops_inside else set()
    for roles in _roles(layout, axes, dots, inner, backend_of(backend)):
        make_spec = SpecMaker(nodes, axes, layout, roles, backend)
        if AxisRole.STREAMED in roles:
            passes = passes_of(graph, make_spec(axes.sizes))
            if passes is None:
                continue
            make_spec.passes = passes
        for tiles in itertools.product(*_tiles(layout.sizes, roles, dots, backend)):
            if can_address(tiles) and all(dot.is_flat(tiles) for dot in dots):
                yield make_spec(tiles)


def _inner(graph: Graph, nodes: tuple[int, ...], axes: GroupAxes, edge: Boundary) -> set[int]:
    """The axes that may be contracted in an inner loop: only contractions of arrays read by the kernel have
    them. (On a TPU they are whole in VMEM.)"""
    read, inner = set(edge.reads), {a for a, reduced in enumerate(axes.reduced) if reduced}
    for n, own in zip(nodes, axes.node_axes, strict=True):
        node = graph.nodes[n]
        if not node.flops.matrix or not read.issuperset(node.inputs):
            inner -= {a for dims in own for a in dims}
        else:
            inner -= {a for m in node.output_maps for dims in compose(m, own) for a in dims}
    return inner


def _roles(
    layout: Layout, axes: GroupAxes, dots: list[Contraction], inner: set[int], backend: Backend
) -> Iterator[tuple[AxisRole, ...]]:
    """Roles of the axes: for each axis that can be the stream, with the other contracted axes whole or in
    inner loops; and without a stream if all contractions contract one axis."""
    free = free_axes(layout, axes)
    one_depth = len({dot.depth for dot in dots}) == 1
    tiled = free if one_depth else tileable(layout, axes)
    batch = {a for dot in dots for a in dot.batch}
    for stream in range(len(axes.sizes)):
        if stream in free or axes.whole[stream] or not axes.reduced[stream]:
            continue
        roles = [
            AxisRole.PARALLEL
            if a in free and (a in tiled or a in batch or layout.sizes[a] > backend.max_whole_axis)
            else AxisRole.RESIDENT
            for a in range(len(axes.sizes))
        ]
        roles[stream] = AxisRole.STREAMED
        held = [a for a, role in enumerate(roles) if role == AxisRole.RESIDENT]
        if all(layout.sizes[a] <= backend.max_whole_axis for a in held):
            yield tuple(roles)
        for a in held:
            if a in inner and layout.sizes[a] > backend.one_step_depth:
                roles[a] = AxisRole.INNER
        held = [a for a in held if roles[a] == AxisRole.RESIDENT]
        if AxisRole.INNER in roles and all(layout.sizes[a] <= backend.max_whole_axis for a in held):
            yield tuple(roles)
    if one_depth:
        yield tuple(AxisRole.PARALLEL if a in free else AxisRole.RESIDENT for a in range(len(axes.sizes)))


def _tiles(
    sizes: Tiles, roles: tuple[AxisRole, ...], dots: list[Contraction], backend: str
) -> list[tuple[int, ...]]:
    """Tiles of each axis; batch axes of a contraction have tiles of one."""
    batch = {a for dot in dots for a in dot.batch}
    multiple = {a for dot in dots for side in (dot.rows, dot.columns) if len(side) > 1 for a in side}
    held = AxisRole.STREAMED not in roles
    options: list[tuple[int, ...]] = []
    for a, (size, role) in enumerate(zip(sizes, roles, strict=True)):
        if role == AxisRole.RESIDENT:
            options.append((whole_tile(size, backend),))
        elif a in batch:
            options.append((1,))
        else:
            one = (1,) if role == AxisRole.PARALLEL and a in multiple else ()
            options.append((*dot_tiles(size, backend, held), *one))
    return options


class KernelNests(Nests):
    """Nests as kernels of a GPU or a TPU. There every array that a nest keeps on chip is a saving, of its
    launches, too."""

    def __init__(self, graph: Graph, device: DeviceSpec, lowered: Lowered | None) -> None:
        super().__init__(graph, device, lowered, device.backend)

    def _groups(self) -> Iterable[Nodes]:
        regions = (*self._large, *self._joined, *self._small)
        yield from regions
        yield from normalised_contractions(self.graph, regions, self.backend)
        yield from narrow_contractions(self.graph, self.backend)

    @cached_property
    def _large(self) -> tuple[Nodes, ...]:
        """The regions that keep an array on chip which is large, and larger than all that they read or write,
        such as the scores of attention."""
        return tuple(r for r in super()._groups() if expands(self.graph, r))

    @cached_property
    def _joined(self) -> tuple[Nodes, ...]:
        return tuple(joined_contractions(self.graph, self.backend))

    @cached_property
    def _small(self) -> tuple[Nodes, ...]:
        """The other regions that are faster as nests: as many as are found in limited work, those of few
        operations first."""
        found = regions(self.graph, 1, self.backend, Work(SMALL_WORK))
        small = sorted(set(found).difference(self._large, self._joined), key=lambda r: (len(r), r))
        scheduled = itertools.accumulate(SCHEDULING * len(r) for r in small)
        return tuple(
            r for r, units in zip(small, scheduled, strict=True) if units <= SMALL_WORK and self._gains(r)
        )

    @cached_property
    def nested(self) -> dict[int, tuple[int, int]]:
        shares: dict[int, tuple[int, int]] = {}
        for nodes in self.offers:
            for n, share in zip(nodes, evaluations(self._offered(nodes).spec), strict=True):
                shares[n] = min(share, shares.get(n, share), key=lambda s: s[0] / s[1])
        return shares

    @cached_property
    def settled(self) -> frozenset[int]:
        """The operations of offered regions that are much faster than their contractions
        (``SETTLING_GAIN``), where no other groups come near: those of large intermediates, and joined ones.
        The statistics of normalised contractions may be computed in another kernel."""
        settling = {*self._large, *self._joined}
        return frozenset(n for r in self.offers if r in settling and self._settles(r) for n in r)

    def _settles(self, nodes: Nodes) -> bool:
        contractions = (n for n in nodes if self.graph.nodes[n].flops.matrix)
        numerator, denominator = SETTLING_GAIN
        return self._offered(nodes).cost.time_ps * denominator < self.apart_ps(contractions) * numerator

    def _offered(self, nodes: Nodes) -> Kernel:
        kernel = self.best(nodes)
        assert kernel is not None, "an offered group has a nest"
        return kernel

    def may_be(self, nodes: Nodes) -> bool:
        """Whether the group holds an offered one, as constraints (``must_fuse``) may demand."""
        inside = frozenset(nodes)
        return any(inside.issuperset(offer) for offer in self.offers)

    def choose(
        self, nodes: Nodes, axes: GroupAxes, edge: Boundary, below_ps: int | None = None
    ) -> Kernel | None:
        """The fastest kernel that fits on chip; of equals, the one of the fewest steps."""
        specs = kernel_nests(self.graph, nodes, axes, edge, self.backend)
        fitting = ((spec, footprint(self.graph, spec, self.device)) for spec in specs)
        kernels = [
            Kernel(spec, estimate(self.graph, spec, self.device, need))
            for spec, need in fitting
            if need.fits(self.device)
        ]
        kernels.sort(key=_rank)
        return min([*kernels, *map(self.masked_kernel, kernels[:MASKED_KERNELS])], key=_rank, default=None)


def _rank(kernel: Kernel) -> tuple[int, int, int]:
    return kernel.cost.time_ps, kernel.cost.hbm_bytes, tile_count(kernel.spec)
