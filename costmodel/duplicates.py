"""Operations that a graph computes several times (``Graph.origins``): find them, and undo the duplication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from costmodel.graph import Graph, Node, check_graph, make_graph


def copies_of(graph: Graph) -> Iterator[tuple[int, ...]]:
    """The copies of each operation that stands more than once."""
    by_origin: dict[int, list[int]] = {}
    for n, origin in enumerate(graph.origins):
        by_origin.setdefault(origin, []).append(n)
    yield from (tuple(nodes) for nodes in by_origin.values() if len(nodes) > 1)


def arrays_of(graph: Graph) -> list[int]:
    """For each value, the one that the first copy of its maker makes: copies of an array are one."""
    array = list(range(len(graph.values)))
    for node, origin in zip(graph.nodes, graph.origins, strict=False):
        for v, first in zip(node.outputs, graph.nodes[origin].outputs, strict=True):
            array[v] = first
    return array


def whole(graph: Graph) -> Graph:
    """The graph in which each operation stands once, which ``graph`` has copies of."""
    if not graph.origins:
        return graph
    firsts = sorted(set(graph.origins))
    node_id = {n: i for i, n in enumerate(firsts)}
    name: dict[int, int] = {v: i for i, v in enumerate(graph.inputs)}
    values = [replace(graph.values[v], id=i) for v, i in name.items()]
    nodes: list[Node] = []
    for node in graph.nodes:
        first = graph.nodes[graph.origins[node.id]]
        if first is node:
            new = node_id[node.id]
            reads = tuple([name[v] for v in node.inputs])
            for v in node.outputs:
                name[v] = len(values)
                values.append(replace(graph.values[v], id=len(values), producer=new))
            writes = tuple([name[v] for v in node.outputs])
            nodes.append(replace(node, id=new, inputs=reads, outputs=writes))
        name.update({v: name[w] for v, w in zip(node.outputs, first.outputs, strict=True)})
    inputs, results = ([name[v] for v in ids] for ids in (graph.inputs, graph.outputs))
    operation = [node_id[n] for n in graph.origins]
    # Copies wait for copies: pair by pair it is one operation that waits for another.
    waits = dict.fromkeys((operation[u], operation[v]) for u, v in graph.waits)
    return check_graph(make_graph(values, nodes, inputs, results, waits=waits))
