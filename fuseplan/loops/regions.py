"""Regions: the groups that are offered to the planners as tiled loops.

A loop nest pays where it keeps large intermediates from memory. A region therefore is what
such values tie together: all operations that make or read one of them, and what lies between
these. How large is large is tried at several levels; whether a region has a nest, and whether
it is worth it, is for the scheduler to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import rustworkx as rx

from costmodel.graph import Graph, Node, OpKind
from fuseplan.layout import boundary

_SMALLER = (1, 4)
"""Values of this part of the largest one's size count as large, too: the summands of a squared
distance are three times the distances (test_regions.py::test_broadcast_differences)."""

_ARRANGING = frozenset({"transpose", "convert_element_type", "reshape", "squeeze", "expand_dims"})

Nodes = tuple[int, ...]


def regions(graph: Graph, min_bytes: int) -> Iterator[Nodes]:
    """Groups tied together by intermediates of at least ``min_bytes``, each once."""
    found: set[Nodes] = set()
    between = Between(graph)
    positions = is_index_arithmetic(graph)
    for large in levels(graph, min_bytes):
        for nodes in tied(graph, large):
            region = with_positions(graph, between.convex(with_positions(graph, nodes, positions)), positions)
            if region in found:
                continue
            found.add(region)
            reduces = any(graph.nodes[n].kind >= OpKind.REDUCTION for n in nodes)
            new = [graph.nodes[n] for n in set(region).difference(nodes)]
            # A product between two large values belongs to another layer.
            whole = all(loopable(node) and not node.flops.matrix for node in new)
            if reduces and whole and _expands(graph, region):
                yield region
                arranged = with_arrangement(graph, region)
                if arranged != region and arranged not in found:
                    found.add(arranged)
                    yield arranged


def _expands(graph: Graph, nodes: Nodes) -> bool:
    """Whether something made and used up inside is larger than all that is read and written.
    Where nothing is, XLA's own loops already touch no more memory than a nest would
    (test_regions.py::test_layernorm_is_left_to_xla)."""
    edge = boundary(graph, nodes)
    outside = max((graph.values[v].size for v in (*edge.reads, *edge.writes)), default=0)
    kept = {v for n in nodes for v in graph.nodes[n].outputs}.difference(edge.writes)
    return max((graph.values[v].size for v in kept), default=0) > outside


def levels(graph: Graph, min_bytes: int) -> Iterator[Callable[[int], bool]]:
    """Ways to call a value large, from the largest size that an operation makes downwards."""
    made = {v.size for v in graph.values if v.producer >= 0 and v.nbytes >= min_bytes}
    for size in sorted(made, reverse=True):
        for part in _SMALLER:

            def is_large(v: int, most: int = size, part: int = part) -> bool:
                value = graph.values[v]
                return most // part < value.size + (part == 1) and value.size <= most

            yield is_large


def tied(graph: Graph, is_large: Callable[[int], bool]) -> Iterator[Nodes]:
    """The operations that large values tie together, set by set."""
    ties = rx.PyGraph(multigraph=False)
    ties.add_nodes_from(range(len(graph.nodes)))
    touched: set[int] = set()
    for value in graph.values:
        if value.producer < 0 or not is_large(value.id):
            continue
        ends = [n for n in (value.producer, *graph.consumers[value.id]) if loopable(graph.nodes[n])]
        touched.update(ends)
        ties.add_edges_from_no_data([(ends[0], n) for n in ends[1:]])
    for component in rx.connected_components(ties):
        if len(component) > 1 and component <= touched:
            yield tuple(sorted(component))


def loopable(node: Node) -> bool:
    """Whether a tiled loop can hold the node."""
    return "loops" in node.backends and not node.effects


def with_arrangement(graph: Graph, nodes: Nodes) -> Nodes:
    """``nodes`` with the transposes and conversions that alone read one of their results, so
    that results are written where they belong at once."""
    inside = set(nodes)
    results = set(graph.outputs)
    queue = [v for n in nodes for v in graph.nodes[n].outputs]
    while queue:
        v = queue.pop()
        readers = graph.consumers[v]
        if v in results or len(readers) != 1 or readers[0] in inside:
            continue
        node = graph.nodes[readers[0]]
        if node.op in _ARRANGING and loopable(node):
            inside.add(node.id)
            queue += node.outputs
    return tuple(sorted(inside))


class Between:
    """What lies between the members of a group."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def convex(self, nodes: Nodes) -> Nodes:
        """``nodes`` with everything on paths between them."""
        inside = set(nodes)
        first, last = nodes[0], nodes[-1]
        after: set[int] = set()  # what depends on a member
        for n in range(first, last + 1):
            node = self.graph.nodes[n]
            makers = (self.graph.values[v].producer for v in node.inputs)
            if any(m in inside or m in after for m in makers):
                after.add(n)
        needed: set[int] = set()  # what a member depends on
        for n in range(last, first - 1, -1):
            readers = (c for v in self.graph.nodes[n].outputs for c in self.graph.consumers[v])
            if any(r in inside or r in needed for r in readers):
                needed.add(n)
        return tuple(sorted(inside | (after & needed)))


def is_index_arithmetic(graph: Graph) -> list[bool]:
    """For each node, whether it depends on nothing but positions and literals."""
    known: list[bool] = []
    for node in graph.nodes:
        makers = [graph.values[v].producer for v in node.inputs]
        known.append(loopable(node) and all(m >= 0 and known[m] for m in makers))
    return known


def with_positions(graph: Graph, nodes: Nodes, positions: list[bool]) -> Nodes:
    """``nodes`` with the index arithmetic that they alone read: each tile computes its own."""
    inside = set(nodes)
    results = set(graph.outputs)
    for n in range(nodes[-1], -1, -1):
        outputs = graph.nodes[n].outputs
        readers = {c for v in outputs for c in graph.consumers[v]}
        if positions[n] and readers and readers <= inside and results.isdisjoint(outputs):
            inside.add(n)
    return tuple(sorted(inside))
