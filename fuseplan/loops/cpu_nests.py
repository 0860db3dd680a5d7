"""The best tiled loops of a group on the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from costmodel.axes import GroupAxes
from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from costmodel.kernel import KernelSpec
from costmodel.roofline import estimate
from fuseplan.layout import Boundary
from fuseplan.loops.nest import nests, program_of
from fuseplan.loops.offered import Nests
from fuseplan.loops.regions import Nodes
from fuseplan.loops.walks import walked
from fuseplan.lower import Lowered
from fuseplan.plan import Kernel

_AS_FAST = (103, 100)
"""Tilings within 3 % of the fastest are as fast as it, for all the model knows: the one
that needs the least memory is taken."""

_SEARCHED = 24
"""Of all tilings, so many of the cheapest are looked at for tiles that a mask leaves out:
finding them takes milliseconds, and a mask changes the order of tilings little."""


class CpuNests(Nests):
    """Tiled loops; see ``Nests``. Any group may be one."""

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

    def choose(self, nodes: Nodes, axes: GroupAxes, edge: Boundary) -> Kernel | None:
        priced = [
            (estimate(self.graph, spec, self.device).time_ps, i, spec)
            for i, spec in enumerate(nests(self.graph, nodes, axes, edge))
        ]
        kernels = [self._priced(spec) for _, _, spec in sorted(priced)[:_SEARCHED]]
        if not kernels:
            return None
        limit_ps = min(k.cost.time_ps for k in kernels) * _AS_FAST[0] // _AS_FAST[1]
        fast = (k for k in kernels if k.cost.time_ps <= limit_ps)
        return min(fast, key=lambda k: (k.cost.onchip_bytes, k.cost.time_ps))

    def _priced(self, spec: KernelSpec) -> Kernel:
        if self.masked(spec.nodes):
            program = program_of(self.graph, spec)
            assert program is not None
            assert self.lowered is not None
            spec = replace(spec, walked=walked(self.lowered, spec, program, self._index))
        return Kernel(spec, estimate(self.graph, spec, self.device))
