"""Assign each graph node to the XLA kernels that compute it, by the metadata of their instructions.

XLA recomputes a node where that saves memory traffic, splits nodes into steps, and removes nodes, so a node
may occur in several kernels or in none. Nodes are assigned from the results backwards. A kernel that needs a
node computes it if the node occurs in the kernel and the kernel reads enough for it; otherwise it reads the
node from the last earlier kernel of that kind. A node that occurs nowhere is computed by the first kernel
that needs it. Barriers and the like belong to no kernel. No kernel depends on a later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.graph import Graph, Node, OpKind
from costmodel.traffic import part_bytes
from fuseplan.planners.hlo.kernels import HloKernel

Place = tuple[int, int]
"""A kernel's position in XLA's order with ``len(graph.nodes)``; or, for a node that no kernel computes, the
position of the kernel that it runs before, with the node."""


NARROWING = 2
"""XLA may store a float32 array in half of its bytes, so a kernel may read this much less than a node's
operands have. The partial results of a reduction split into steps are far smaller than its operand."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The assignment of nodes to places."""

    places: tuple[tuple[Place, ...], ...]
    """For each node, the places that compute it, ascending."""
    source: tuple[Place, ...]
    """For each node, the place from which the other places read it."""
    hosts: tuple[Place | None, ...]
    """For each kernel, the place to which its launch and its bytes are charged: its own, if it has nodes;
    None if the graph has none."""


def place_nodes(graph: Graph, kernels: Sequence[HloKernel]) -> Placed:
    """Assign the nodes of a program that was compiled to ``kernels``."""
    return _Placing(graph, kernels).run()


class _Placing:
    def __init__(self, graph: Graph, kernels: Sequence[HloKernel]) -> None:
        self.graph, self.kernels = graph, kernels
        self.slot = len(graph.nodes)
        self.caller: Place = (len(kernels), self.slot)
        holders: list[list[int]] = [[] for _ in graph.nodes]
        for k, kernel in enumerate(kernels):
            for n in kernel.computes:
                holders[n].append(k)
        self.occurs = [
            [(k, self.slot) for k in ([k for k in several if self._reads_enough(n, k, holders)] or several)]
            for n, several in enumerate(holders)
        ]

    def _reads_enough(self, n: int, k: int, holders: Sequence[Sequence[int]]) -> bool:
        """Whether kernel ``k`` reads or computes all operands of node ``n``. Otherwise it completes what
        another kernel began: it adds partial sums, or multiplies by an inverse."""
        graph, node = self.graph, self.graph.nodes[n]
        producer = {v: graph.values[v].producer for v in node.inputs}
        # A producer that occurs in no kernel became part of its readers.
        needed = [v for v, p in producer.items() if p < 0 or (holders[p] and k not in holders[p])]
        return sum(part_bytes(graph, node, v) for v in needed) <= NARROWING * self.kernels[k].read_bytes

    def run(self) -> Placed:
        graph, homes = self.graph, self._homes()
        wanted: list[set[Place]] = [set() for _ in graph.nodes]
        for v in graph.outputs:
            self._want(v, self.caller, wanted)
        places: list[tuple[Place, ...]] = [()] * len(graph.nodes)
        source: list[Place] = [self.caller] * len(graph.nodes)
        next_effect = self.caller
        for node in reversed(graph.nodes):
            n, users = node.id, wanted[node.id]
            if self._is_alone(node):
                source[n] = self._alone(n, min(users | {next_effect if node.effects else self.caller}))
                next_effect = source[n] if node.effects else next_effect
                places[n] = (source[n],)
            else:
                places[n], source[n] = self._shared(node, users or {self.caller}, homes[n])
            for place in places[n]:
                for v in node.inputs:
                    self._want(v, place, wanted)
        return Placed(tuple(places), tuple(source), self._hosts(places))

    def _want(self, v: int, place: Place, wanted: list[set[Place]]) -> None:
        producer = self.graph.values[v].producer
        if producer >= 0:
            wanted[producer].add(place)

    def _homes(self) -> list[Place]:
        """For each node, the last kernel in which it occurs, or else in which an operand does."""
        homes: list[Place] = []
        for node in self.graph.nodes:
            of_operands = [homes[p] for v in node.inputs if (p := self.graph.values[v].producer) >= 0]
            homes.append(max(self.occurs[node.id] or of_operands, default=(-1, self.slot)))
        return homes

    def _is_alone(self, node: Node) -> bool:
        """Whether no kernel computes the node: it has side effects, or is a barrier."""
        return node.effects or (node.kind == OpKind.OPAQUE and not self.occurs[node.id])

    def _alone(self, n: int, before: Place) -> Place:
        """The place of a node without a kernel: in XLA's order, but before the places that wait for it."""
        k = max((k for k, _ in self.occurs[n]), default=before[0])
        return min((k, n), (before[0], n))

    def _shared(self, node: Node, users: set[Place], home: Place) -> tuple[tuple[Place, ...], Place]:
        """The places that compute a node which ``users`` need, and the one from which the others read it."""
        occurs = self.occurs[node.id]
        if node.kind >= OpKind.OUT_ELEMENTWISE_FUSABLE:
            # XLA computes these once; further kernels copy or convert the operands or the result.
            occurs = [place for place in occurs if place <= min(users)][-1:]
        inside = users.intersection(occurs)
        outside = users - inside
        if not outside:
            return tuple(sorted(inside)), min(inside)
        first = min(outside)
        before = [place for place in occurs if place < first]
        if before:
            source = before[-1]
        elif first == self.caller:
            source = home
        elif first[1] < self.slot:  # a node without a kernel
            source = (first[0] - 1, self.slot)
        else:
            source = first
        return tuple(sorted(inside | {source})), source

    def _hosts(self, places: Sequence[tuple[Place, ...]]) -> tuple[Place | None, ...]:
        """Charge a kernel without nodes of its own to a place that computes a node it comes from, else to a
        kernel that reads it, else to one that it reads, else to the last place."""
        used = sorted({place for several in places for place in several})
        hosts: list[Place | None] = [None] * len(self.kernels)
        for k, kernel in enumerate(self.kernels):
            near = sorted(place for n in kernel.touches for place in places[n])
            own = (k, self.slot)
            if own in used:
                hosts[k] = own
            elif near:
                hosts[k] = next((place for place in near if place > own), near[-1])
        readers: list[list[int]] = [[] for _ in self.kernels]
        for k, kernel in enumerate(self.kernels):
            for earlier in kernel.after:
                readers[earlier].append(k)
        for k in reversed(range(len(hosts))):
            if hosts[k] is None:
                hosts[k] = next((hosts[r] for r in readers[k] if hosts[r] is not None), None)
        for k, kernel in enumerate(self.kernels):
            if hosts[k] is None:
                found = [hosts[e] for e in kernel.after if hosts[e] is not None]
                hosts[k] = found[-1] if found else next(iter(used[-1:]), None)
        return tuple(hosts)
