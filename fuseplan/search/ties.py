"""Ties: what passes between operations of a graph, and which of them walk one array side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from costmodel.graph import Graph
from fuseplan.plan.constraints import Nodes
from fuseplan.search.components import data_edges, effect_edges


class Ties:
    """For each operation, those before and after it, and the arrays that it walks."""

    def __init__(self, graph: Graph, walked: Callable[[int], Nodes] = lambda n: ()) -> None:
        self.edges = data_edges(graph) + effect_edges(graph)
        self.after: list[list[int]] = [[] for _ in graph.nodes]
        self.before: list[list[int]] = [[] for _ in graph.nodes]
        for u, v in self.edges:
            self.after[u].append(v)
            self.before[v].append(u)
        self._walked = [walked(node.id) for node in graph.nodes]

    def between(self, nodes: set[int]) -> set[int]:
        """``nodes`` and everything on a path between two of them."""
        low, high = min(nodes), max(nodes)  # ids are a topological order

        def reach(edges: Sequence[Sequence[int]]) -> set[int]:
            seen: set[int] = set()
            queue = list(nodes)
            while queue:
                new = {n for n in edges[queue.pop()] if low < n < high} - seen
                seen |= new
                queue += new
            return seen

        return nodes | (reach(self.after) & reach(self.before))

    def parts(self, nodes: Sequence[int]) -> list[Nodes]:
        """The parts of ``nodes`` that hold together, by lowest operation."""
        left = set(nodes)
        walkers: dict[int, list[int]] = {}
        for n in nodes:
            for v in self._walked[n]:
                walkers.setdefault(v, []).append(n)
        parts = []
        while left:
            start = min(left)
            part, queue = {start}, [start]
            while queue:
                n = queue.pop()
                beside = (m for v in self._walked[n] for m in walkers[v])
                new = left.intersection((*self.after[n], *self.before[n], *beside)) - part
                part |= new
                queue += new
            left -= part
            parts.append(tuple(sorted(part)))
        return parts
