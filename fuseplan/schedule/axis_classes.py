"""Which dimensions of a graph's nodes a group might tie together to one axis, roughly.

What is not tied here is tied in no group: that holds of a group and of every larger one.
"""

from __future__ import annotations

from collections.abc import Iterable

import rustworkx as rx

from costmodel.graph import DimMap, Graph, Node

Classes = list[list[int]]
"""For each node of a graph, the class of each of its dimensions."""


def axis_classes(graph: Graph, nodes: Iterable[Node]) -> Classes:
    """Classes of dimensions that values connect which ``nodes`` make or read. Every dimension of
    another node is a class of its own."""
    first: list[int] = []
    count = 0
    for node in graph.nodes:
        first.append(count)
        count += len(node.dims)
    ties: rx.PyGraph = rx.PyGraph(multigraph=False)
    ties.add_nodes_from(range(count))
    seen: dict[int, tuple[int, DimMap]] = {}
    pairs: list[tuple[int, int]] = []
    for node in nodes:
        for v, dim_map in zip(node.inputs + node.outputs, node.input_maps + node.output_maps, strict=True):
            other, known = seen.setdefault(v, (node.id, dim_map))
            if other != node.id:
                pairs += [
                    (first[other] + a, first[node.id] + b)
                    for left, right in zip(known, dim_map, strict=True)
                    for a in left
                    for b in right
                ]
    ties.add_edges_from_no_data(pairs)
    classes = [0] * count
    for c, slots in enumerate(rx.connected_components(ties)):
        for slot in slots:
            classes[slot] = c
    return [classes[start : start + len(node.dims)] for start, node in zip(first, graph.nodes, strict=True)]
