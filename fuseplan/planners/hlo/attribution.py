"""Which of XLA's kernels computes which node, from where each instruction says that it comes from.

XLA computes a node again wherever that saves it a trip through memory, cuts one into steps, and leaves out
what it can; so a node may show in several kernels, or in none. From the results backwards, a kernel that
needs a node either computes it itself, where the node shows in it and it reads enough for that, or reads it
from the last such kernel before. What shows nowhere is computed by the first that needs it; barriers and
such are no kernel's. No kernel ever waits for a later one, whatever the compiler said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.graph import Graph, Node, OpKind
from costmodel.traffic import part_bytes
from fuseplan.planners.hlo.kernels import HloKernel

Place = tuple[int, int]
"""A kernel's position in XLA's order, and ``len(graph.nodes)``; or, before it, a node that is alone."""


_SLACK = 2
"""Arrays may be as much smaller in XLA's program than in the graph, as where it keeps halves of float32; what
is left of a sum after its first step is smaller by far."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where nodes are computed."""

    places: tuple[tuple[Place, ...], ...]
    """For each node, ascending; several where it is computed again."""
    source: tuple[Place, ...]
    """For each node, the place that writes it for those that do not compute it."""
    hosts: tuple[Place | None, ...]
    """For each kernel, the place that it is counted with: its own, if it has nodes; None if there are no
    nodes at all."""


def place_nodes(graph: Graph, kernels: Sequence[HloKernel]) -> Placed:
    """Place the nodes of a program that was compiled to ``kernels``."""
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
        self.shows = [
            [(k, self.slot) for k in ([k for k in several if self._reads_enough(n, k, holders)] or several)]
            for n, several in enumerate(holders)
        ]

    def _reads_enough(self, n: int, k: int, holders: Sequence[Sequence[int]]) -> bool:
        """Whether kernel ``k`` reads what node ``n`` is computed from, or computes that too. One that does
        not finishes what another began: it adds partial sums up, or multiplies by an inverse."""
        graph, node = self.graph, self.graph.nodes[n]
        producer = {v: graph.values[v].producer for v in node.inputs}
        # What shows nowhere has become a part of its readers.
        needed = [v for v, p in producer.items() if p < 0 or (holders[p] and k not in holders[p])]
        return sum(part_bytes(graph, node, v) for v in needed) <= _SLACK * self.kernels[k].read_bytes

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
        """For each node, the last kernel in which it shows, or else anything that it is made of."""
        homes: list[Place] = []
        for node in self.graph.nodes:
            made_of = [homes[p] for v in node.inputs if (p := self.graph.values[v].producer) >= 0]
            homes.append(max(self.shows[node.id] or made_of, default=(-1, self.slot)))
        return homes

    def _is_alone(self, node: Node) -> bool:
        """What has side effects is, and what is no work, but may keep others apart."""
        return node.effects or (node.kind == OpKind.OPAQUE and not self.shows[node.id])

    def _alone(self, n: int, before: Place) -> Place:
        """The place of a node that is alone: in XLA's order, but before whoever waits for it."""
        k = max((k for k, _ in self.shows[n]), default=before[0])
        return min((k, n), (before[0], n))

    def _shared(self, node: Node, users: set[Place], home: Place) -> tuple[tuple[Place, ...], Place]:
        """Where a node that ``users`` need is computed, and which of these places writes it."""
        shows = self.shows[node.id]
        if node.kind >= OpKind.OUT_ELEMENTWISE_FUSABLE:
            # XLA computes none of these twice: the rest is copies and conversions for it.
            shows = [place for place in shows if place <= min(users)][-1:]
        inside = users.intersection(shows)
        outside = users - inside
        if not outside:
            return tuple(sorted(inside)), min(inside)
        first = min(outside)
        before = [place for place in shows if place < first]
        if before:
            source = before[-1]
        elif first == self.caller:
            source = home
        elif first[1] < self.slot:  # It is alone.
            source = (first[0] - 1, self.slot)
        else:
            source = first
        return tuple(sorted(inside | {source})), source

    def _hosts(self, places: Sequence[tuple[Place, ...]]) -> tuple[Place | None, ...]:
        """Kernels without nodes of their own are counted with what they come from, else with who reads
        them, else with what they read, else with anyone."""
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
