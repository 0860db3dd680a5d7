"""The arrays that a group of operations reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.graph import Graph


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a group exchanges with the rest: values read, and values that must be written."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


def boundary(graph: Graph, nodes: tuple[int, ...]) -> Boundary:
    """Live-in values by first use, and live-out values by node order."""
    inside = set(nodes)
    all_nodes, consumers, results = graph.nodes, graph.consumers, graph.results
    reads: dict[int, None] = {}
    made: set[int] = set()
    writes: list[int] = []
    for n in nodes:
        node = all_nodes[n]
        for v in node.inputs:
            if v not in made:
                reads[v] = None
        for v in node.outputs:
            made.add(v)
            if v in results or not inside.issuperset(consumers[v]):
                writes.append(v)
    return Boundary(tuple(reads), tuple(writes))
