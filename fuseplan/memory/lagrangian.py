"""Prices that make memory dear: so much more for each byte that is written for later kernels.

A planner takes equal groups to cost the same wherever they are, so a surcharge must follow from a
group's structure alone. It is on the results of *kinds* of nodes: a value that is alive at the
peak makes those of all nodes like its producer dear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from costmodel.duplicates import arrays_of
from costmodel.graph import Graph
from costmodel.kernel import KernelSpec
from costmodel.memory import is_bitcast
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.pricing import Nodes, PriceBook, Pricing
from fuseplan.schedule.structure import Signatures
from fuseplan.support.errors import Verdict

UNIT_BYTES = 2**20
"""Surcharges are integers: picoseconds for so many bytes."""


class Penalised(Pricing):
    """``pricing`` with a surcharge on what kernels write; nothing at first. Groups are priced
    once, whatever the surcharge is changed to."""

    def __init__(self, graph: Graph, pricing: Pricing) -> None:
        self.graph = graph
        self.ps_per_unit = 0
        self._pricing, self.device = pricing, pricing.device
        self.book = PriceBook(graph, pricing)
        """Prices without the surcharge."""
        self._kind = [self.book.signatures.of((node.id,)).key for node in graph.nodes]
        self._dear: set[tuple[int, ...]] = set()
        self.offers, self.residency = pricing.offers, pricing.residency
        self.absorbs_moves = pricing.absorbs_moves
        self.merges_copies = bool(self.book.copies)
        self._array = arrays_of(graph)
        self._every = {n: copies for copies in self.book.copies for n in copies}
        self._outputs = frozenset(graph.outputs)

    def charge(self, values: Iterable[int]) -> None:
        """Make ``values``, and all like them, dear."""
        makers = (self.graph.values[v].producer for v in values)
        copies = (m for n in makers if n >= 0 for m in self._every.get(n, (n,)))
        self._dear.update(self._kind[n] for n in copies)

    def surcharge_ps(self, spec: KernelSpec) -> int:
        """What is added to the kernel's time."""
        if not self.ps_per_unit or is_bitcast(self.graph, spec):
            return 0
        return sum(self._surcharge_ps(a.value) for a in spec.writes)

    def _surcharge_ps(self, v: int) -> int:
        value = self.graph.values[v]
        if self._kind[value.producer] not in self._dear:
            return 0
        return value.nbytes * self.ps_per_unit // UNIT_BYTES

    def floor(self, nodes: Nodes) -> int:
        """``pricing``'s floor, and the surcharge on what is written however ``nodes`` are grouped."""
        floor_ps = self.book.floor(nodes)
        if not self.ps_per_unit:
            return floor_ps
        graph, inside = self.graph, set(nodes)
        written: dict[int, int] = {}
        for n in nodes:
            if graph.nodes[n].bitcast:
                continue
            for v in graph.nodes[n].outputs:
                if v in self._outputs or not inside.issuperset(graph.consumers[v]):
                    array = self._array[v] if self.merges_copies else v
                    written[array] = self._surcharge_ps(v)
        return floor_ps + sum(written.values())

    def compatible(self, nodes: Nodes) -> Verdict | None:
        """As ``Pricing.compatible``."""
        return self._pricing.compatible(nodes)

    def oversized(self, nodes: Nodes, crossing: frozenset[int]) -> Verdict | None:
        """As ``Pricing.oversized``."""
        return self._pricing.oversized(nodes, crossing)

    def renames(self, n: int) -> bool:
        """As ``Pricing.renames``."""
        return self._pricing.renames(n)

    def walked(self, n: int) -> Nodes:
        """As ``Pricing.walked``."""
        return self._pricing.walked(n)

    def imprint(self, nodes: Nodes, signatures: Signatures) -> str | None:
        """As ``Pricing.imprint``; with a surcharge, nothing is remembered."""
        return None if self.ps_per_unit else self.book.imprint(nodes)

    def price(self, nodes: Nodes) -> Kernel | Verdict:
        """The group as ``pricing`` schedules it, with the surcharge."""
        answer = self.book.price(nodes)
        if isinstance(answer, Verdict):
            return answer
        return self._plus(self.book.kernel(nodes), 1)

    def real(self, kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
        """Kernels that a planner chose by these prices, at what they cost without."""
        return tuple(self._plus(kernel, -1) for kernel in kernels)

    def _plus(self, kernel: Kernel, sign: int) -> Kernel:
        extra = sign * self.surcharge_ps(kernel.spec)
        if not extra:
            return kernel
        surcharge_ps = kernel.cost.surcharge_ps + extra
        return replace(kernel, cost=replace(kernel.cost, surcharge_ps=surcharge_ps))
