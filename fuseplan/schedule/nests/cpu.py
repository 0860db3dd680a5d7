"""The best tiled loops of a group on the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from costmodel.axes import GroupAxes
from costmodel.boundary import Boundary
from costmodel.device import DeviceSpec
from costmodel.graph import Graph, OpKind
from costmodel.picoseconds import time_ps
from costmodel.roofline import estimate
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.nests.connected import Nodes
from fuseplan.schedule.nests.cpu_tilings import nests, program_of
from fuseplan.schedule.nests.live_tiles import walked
from fuseplan.schedule.nests.multipass import Limit
from fuseplan.schedule.nests.offered import Nests

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

    def choose(
        self, nodes: Nodes, axes: GroupAxes, edge: Boundary, below_ps: int | None = None
    ) -> Kernel | None:
        # A mask may leave out most of what a nest computes.
        bounded = not self.masked(nodes)
        limit = Limit(self._least_ps(nodes), _as_fast(below_ps) if bounded and below_ps is not None else None)
        priced = []
        for order, spec, work in nests(self.graph, nodes, axes, edge, limit):
            cost = estimate(self.graph, spec, self.device, work=work)
            priced.append((cost.time_ps, order, Kernel(spec, cost)))
            if bounded and (limit.ps is None or _as_fast(cost.time_ps) < limit.ps):
                limit.ps = _as_fast(cost.time_ps)
        priced.sort(key=lambda found: found[:2])
        kernels = [self._walked(kernel) for _, _, kernel in priced[:_SEARCHED]]
        least_ps = min((k.cost.time_ps for k in kernels), default=None)
        if least_ps is None or (below_ps is not None and least_ps >= below_ps):
            return None
        fast = (k for k in kernels if k.cost.time_ps <= _as_fast(least_ps))
        return min(fast, key=lambda k: (k.cost.onchip_bytes, k.cost.time_ps))

    def _least_ps(self, nodes: Nodes) -> list[int]:
        """What each node takes at least, in whichever tiles: its arithmetic."""
        device, found = self.device, []
        for node in (self.graph.nodes[n] for n in nodes):
            work = [
                (node.flops.vector, device.vector_flops_per_s),
                (node.flops.transcendental, device.transcendental_per_s),
            ]
            if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
                dtype = self.graph.values[node.inputs[0]].dtype
                work.append((node.flops.matrix, device.matrix_rate(dtype)))
            found.append(sum(time_ps(amount, rate) - 1 for amount, rate in work if amount and rate))
        return found

    def _walked(self, kernel: Kernel) -> Kernel:
        """The same kernel, without the tiles that a mask makes nothing of."""
        spec = kernel.spec
        if not self.masked(spec.nodes):
            return kernel
        program = program_of(self.graph, spec)
        assert program is not None
        assert self.lowered is not None
        spec = replace(spec, walked=walked(self.lowered, spec, program, self._index))
        return Kernel(spec, estimate(self.graph, spec, self.device))


def _as_fast(ps: int) -> int:
    """What is as fast as a nest that takes so long."""
    return ps * _AS_FAST[0] // _AS_FAST[1]
