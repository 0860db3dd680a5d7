"""The best kernel of several contractions of a group, on a GPU or a TPU.

Kernel nests: the tiles that a group with several contractions may have in one kernel of a GPU or
a TPU.

The axes of the group's largest inner values are cut: one that indexes all results, and that nothing
reduces, is a grid axis; one other is the stream (``passes``); everything else is whole in every tile.
So attention streams its keys, a gated layer what its two products contract, a cross-entropy its
classes. What all contractions of a group contract alike may be held instead: a row of which a norm is
needed first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from costmodel.axes import GroupAxes, NodeAxes, compose
from costmodel.backends import backend_of
from costmodel.device import DeviceSpec
from costmodel.graph import Boundary, Graph, OpKind
from costmodel.kernel import AxisRole, KernelSpec
from costmodel.memory import footprint
from costmodel.passes import evaluations
from costmodel.roofline import estimate
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.layout import Contraction, Layout, contraction_axes, group_layout
from fuseplan.schedule.nests.connected import Nodes
from fuseplan.schedule.nests.cpu import cuttable, program_of
from fuseplan.schedule.nests.live_tiles import walked_in_ranges
from fuseplan.schedule.nests.offered import Nests
from fuseplan.schedule.nests.regions import joined, narrow, normed
from fuseplan.schedule.padding import whole_tile
from fuseplan.schedule.spec import SpecMaker
from fuseplan.schedule.tilings import Tiles, addressing, dot_tiles

_WHOLE = 1024
"""No longer axis is whole in a tile of a kernel that also streams another: 32 rows of it in float32 are
all of a GPU's registers that values may have."""


_NARROW = 128
"""What is no longer than so is contracted at once: a head of an attention."""


def kernel_nests(
    graph: Graph, nodes: tuple[int, ...], axes: GroupAxes, edge: Boundary, backend: str
) -> Iterator[KernelSpec]:
    """The kernels of the group that are priced, in a fixed order."""
    layout = group_layout(graph, nodes, axes, edge)
    dots = _contractions(graph, nodes, axes.node_axes)
    can_address = addressing(layout, backend, lifts=True)
    inner = _inner(graph, nodes, axes, edge) if backend_of(backend).loops_inside else set()
    for roles in _roles(layout, axes, dots, inner):
        make_spec = SpecMaker(nodes, axes, layout, roles, backend)
        if AxisRole.STREAMED in roles:
            program = program_of(graph, make_spec(axes.sizes))
            if program is None:
                continue
            make_spec.passes = tuple(p.loop for p in program.passes)
        for tiles in itertools.product(*_tiles(layout.sizes, roles, dots, backend)):
            if can_address(tiles) and all(dot.is_flat(tiles) for dot in dots):
                yield make_spec(tiles)


def _contractions(graph: Graph, nodes: tuple[int, ...], node_axes: tuple[NodeAxes, ...]) -> list[Contraction]:
    members = zip((graph.nodes[n] for n in nodes), node_axes, strict=True)
    return [
        contraction_axes(node, own) for node, own in members if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE
    ]


def _inner(graph: Graph, nodes: tuple[int, ...], axes: GroupAxes, edge: Boundary) -> set[int]:
    """The axes that may be contracted in a loop of their own: only contractions of what is read have
    them. (VMEM holds them whole.)"""
    read, inner = set(edge.reads), {a for a, reduced in enumerate(axes.reduced) if reduced}
    for n, own in zip(nodes, axes.node_axes, strict=True):
        node = graph.nodes[n]
        if not node.flops.matrix or not read.issuperset(node.inputs):
            inner -= {a for dims in own for a in dims}
        else:
            inner -= {a for m in node.output_maps for dims in compose(m, own) for a in dims}
    return inner


def _roles(
    layout: Layout, axes: GroupAxes, dots: list[Contraction], inner: set[int]
) -> Iterator[tuple[AxisRole, ...]]:
    """Roles of the axes, one way for each axis that can be the stream; and one without, where all that is
    contracted is, so that a row's norm is known before it is multiplied."""
    free = {a for a in range(len(axes.sizes)) if _is_free(a, layout, axes)}
    at_once = len({dot.depth for dot in dots}) == 1
    cut = free if at_once else cuttable(layout, axes)
    apart = {a for dot in dots for a in dot.batch}
    for stream in range(len(axes.sizes)):
        if stream in free or axes.whole[stream] or not axes.reduced[stream]:
            continue
        roles = [
            AxisRole.PARALLEL
            if a in free and (a in cut or a in apart or layout.sizes[a] > _WHOLE)
            else AxisRole.RESIDENT
            for a in range(len(axes.sizes))
        ]
        roles[stream] = AxisRole.STREAMED
        held = [a for a, role in enumerate(roles) if role == AxisRole.RESIDENT]
        if all(layout.sizes[a] <= _WHOLE for a in held):
            yield tuple(roles)
        for a in held:
            if a in inner and layout.sizes[a] > _NARROW:
                roles[a] = AxisRole.INNER
        held = [a for a in held if roles[a] == AxisRole.RESIDENT]
        if AxisRole.INNER in roles and all(layout.sizes[a] <= _WHOLE for a in held):
            yield tuple(roles)
    if at_once:
        yield tuple(AxisRole.PARALLEL if a in free else AxisRole.RESIDENT for a in range(len(axes.sizes)))


def _is_free(a: int, layout: Layout, axes: GroupAxes) -> bool:
    """Whether tiles of an axis can be computed apart from each other."""
    return not axes.reduced[a] and not axes.whole[a] and all(a in w.axis_set for w in layout.writes)


def _tiles(
    sizes: Tiles, roles: tuple[AxisRole, ...], dots: list[Contraction], backend: str
) -> list[tuple[int, ...]]:
    """Tiles of each axis: what batches of products share is one matrix of them at a time."""
    apart = {a for dot in dots for a in dot.batch}
    beside = {a for dot in dots for side in (dot.rows, dot.columns) if len(side) > 1 for a in side}
    held = AxisRole.STREAMED not in roles
    options: list[tuple[int, ...]] = []
    for a, (size, role) in enumerate(zip(sizes, roles, strict=True)):
        if role == AxisRole.RESIDENT:
            options.append((whole_tile(size, backend),))
        elif a in apart:
            options.append((1,))
        else:
            alone = (1,) if role == AxisRole.PARALLEL and a in beside else ()
            options.append((*dot_tiles(size, backend, held), *alone))
    return options


_SETTLED = (9, 10)
"""By so much a nest has to be faster than its contractions alone, whose kernels may also write what is
narrower than their results."""

_RANGED = 4
"""So many of the fastest kernels are looked at for tiles that a mask leaves out."""


class KernelNests(Nests):
    """Kernels of several contractions; see ``Nests``."""

    def __init__(self, graph: Graph, device: DeviceSpec, lowered: Lowered | None) -> None:
        super().__init__(graph, device, lowered, device.backend)

    def _groups(self) -> Iterable[Nodes]:
        yield from self._tied
        yield from normed(self.graph, self._tied, self.backend)
        yield from narrow(self.graph, self.backend)

    @cached_property
    def _tied(self) -> tuple[Nodes, ...]:
        """What large values tie together, or where results meet."""
        return (*super()._groups(), *joined(self.graph, self.backend))

    @cached_property
    def nested(self) -> dict[int, tuple[int, int]]:
        shares: dict[int, tuple[int, int]] = {}
        for nodes in self.offers:
            for n, share in zip(nodes, evaluations(self._offered(nodes).spec), strict=True):
                shares[n] = min(share, shares.get(n, share), key=lambda s: s[0] / s[1])
        return shares

    @cached_property
    def settled(self) -> frozenset[int]:
        """Alone, each of a nest's contractions is a kernel, and these take longer than the nest. What rows
        are normed by may be computed apart all the same."""
        tied = set(self._tied)
        return frozenset(n for nodes in self.offers if nodes in tied and self._settles(nodes) for n in nodes)

    def _settles(self, nodes: Nodes) -> bool:
        products = (n for n in nodes if self.graph.nodes[n].flops.matrix)
        return self._offered(nodes).cost.time_ps * _SETTLED[1] < self.apart_ps(products) * _SETTLED[0]

    def _offered(self, nodes: Nodes) -> Kernel:
        kernel = self.best(nodes)
        assert kernel is not None, "what is offered has a nest"
        return kernel

    def may_be(self, nodes: Nodes) -> bool:
        """One that is offered, or holds one that is, because it must (``fuseplan.Constraints``)."""
        inside = frozenset(nodes)
        return any(inside.issuperset(offer) for offer in self.offers)

    def choose(
        self, nodes: Nodes, axes: GroupAxes, edge: Boundary, below_ps: int | None = None
    ) -> Kernel | None:
        """The fastest that fits on chip; of equals, the one of the largest tiles, which walks its stream in
        the fewest steps."""
        specs = kernel_nests(self.graph, nodes, axes, edge, self.backend)
        fitting = ((spec, footprint(self.graph, spec, self.device)) for spec in specs)
        kernels = [
            Kernel(spec, estimate(self.graph, spec, self.device, need))
            for spec, need in fitting
            if need.fits(self.device)
        ]
        kernels.sort(key=_rank)
        return min([*kernels, *map(self._in_ranges, kernels[:_RANGED])], key=_rank, default=None)

    def _in_ranges(self, kernel: Kernel) -> Kernel:
        """The same kernel, which leaves out the tiles at either end that a mask makes nothing of."""
        spec = kernel.spec
        if self.lowered is None or not self.masked(spec.nodes):
            return kernel
        program = program_of(self.graph, spec)
        assert program is not None
        spec = replace(spec, walked=walked_in_ranges(self.lowered, spec, program, self._index))
        return Kernel(spec, estimate(self.graph, spec, self.device))


def _rank(kernel: Kernel) -> tuple[int, int, int]:
    steps = math.prod(axis.n_tiles for axis in kernel.spec.axes)
    return kernel.cost.time_ps, kernel.cost.hbm_bytes, steps
