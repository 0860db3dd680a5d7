"""The best kernel of several contractions of a group, on a GPU or a TPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from costmodel.axes import GroupAxes
from costmodel.boundary import Boundary
from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from costmodel.memory import footprint
from costmodel.passes import evaluations
from costmodel.roofline import estimate
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.nests.accelerator_tilings import kernel_nests
from fuseplan.schedule.nests.connected import Nodes
from fuseplan.schedule.nests.cpu_tilings import program_of
from fuseplan.schedule.nests.gated_contractions import joined
from fuseplan.schedule.nests.low_rank import narrow
from fuseplan.schedule.nests.normalised_contractions import normed
from fuseplan.schedule.nests.offered import Nests
from fuseplan.schedule.nests.stream_ranges import walked_in_ranges

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
