"""Regions: the groups that are offered to the planners as tiled loops.

A loop nest pays where it keeps large intermediates from memory. A region therefore is what
such values tie together: all operations that make or read one of them, and what lies between
these. How large is large is tried at several levels; whether a region has a nest, and whether
it is worth it, is for the scheduler to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from costmodel.backends import backend_of
from costmodel.boundary import boundary
from costmodel.graph import Graph, OpKind
from fuseplan.schedule.nests.connected import Nodes, loopable, tied_at_any_level

_ARRANGING = frozenset({"transpose", "convert_element_type", "reshape", "squeeze", "expand_dims"})


def regions(graph: Graph, min_bytes: int, backend: str = "loops") -> Iterator[Nodes]:
    """Groups of ``backend`` tied together by intermediates of at least ``min_bytes``, each once."""
    found: set[Nodes] = set()
    positions = is_index_arithmetic(graph, backend)
    for nodes in tied_at_any_level(graph, min_bytes, backend):
        region = convex(graph, with_positions(graph, nodes, positions))
        region = with_positions(graph, region, positions)
        if region in found:
            continue
        found.add(region)
        reduces = any(graph.nodes[n].kind >= OpKind.REDUCTION for n in nodes)
        new = [graph.nodes[n] for n in set(region).difference(nodes)]
        # A product between two large values belongs to another layer.
        whole = all(loopable(node, backend) and not node.flops.matrix for node in new)
        if reduces and whole and _expands(graph, region) and _is_new(graph, region, backend):
            yield region
            arranged = with_arrangement(graph, region, backend)
            if arranged != region and arranged not in found:
                found.add(arranged)
                yield arranged


def _is_new(graph: Graph, nodes: Nodes, backend: str) -> bool:
    """Whether the rules refuse the group, so that it is possible as a nest only: a contraction that
    something else is reduced beside (``fuseplan.schedule.legality``); on a CPU, any."""
    kinds = [graph.nodes[n].kind for n in nodes]
    several = OpKind.OUT_ELEMENTWISE_FUSABLE in kinds and sum(k >= OpKind.REDUCTION for k in kinds) > 1
    return several or backend_of(backend).loop_nest


def _expands(graph: Graph, nodes: Nodes) -> bool:
    """Whether something made and used up inside is larger than all that is read and written.
    Where nothing is, XLA's own loops already touch no more memory than a nest would
    (test_regions.py::test_layernorm_is_left_to_xla)."""
    edge = boundary(graph, nodes)
    outside = max((graph.values[v].size for v in (*edge.reads, *edge.writes)), default=0)
    kept = {v for n in nodes for v in graph.nodes[n].outputs}.difference(edge.writes)
    return max((graph.values[v].size for v in kept), default=0) > outside


def is_used_up(graph: Graph, n: int, inside: set[int]) -> bool:
    """Whether nothing but nodes ``inside`` wants what node ``n`` makes."""
    outputs = graph.nodes[n].outputs
    return graph.results.isdisjoint(outputs) and all(inside.issuperset(graph.consumers[v]) for v in outputs)


def with_arrangement(graph: Graph, nodes: Nodes, backend: str = "loops") -> Nodes:
    """``nodes`` with the transposes and conversions that alone read one of their results, so
    that results are written where they belong at once."""
    inside = set(nodes)
    results = graph.results
    queue = [v for n in nodes for v in graph.nodes[n].outputs]
    while queue:
        v = queue.pop()
        readers = graph.consumers[v]
        if v in results or len(readers) != 1 or readers[0] in inside:
            continue
        node = graph.nodes[readers[0]]
        if node.op in _ARRANGING and loopable(node, backend):
            inside.add(node.id)
            queue += node.outputs
    return tuple(sorted(inside))


def paths(graph: Graph, nodes: Nodes) -> list[int]:
    """``nodes`` and everything between the first and the last of them that depends on one, in
    order."""
    after, last = set(nodes), nodes[-1]
    queue = list(nodes)
    while queue:
        for v in graph.nodes[queue.pop()].outputs:
            new = [n for n in graph.consumers[v] if n < last and n not in after]
            after.update(new)
            queue += new
    return sorted(after)


def convex(graph: Graph, nodes: Nodes) -> Nodes:
    """``nodes`` with everything on paths between them."""
    found = set(nodes)
    for n in reversed(paths(graph, nodes)):
        if any(c in found for v in graph.nodes[n].outputs for c in graph.consumers[v]):
            found.add(n)
    return tuple(sorted(found))


def is_index_arithmetic(graph: Graph, backend: str = "loops") -> list[bool]:
    """For each node, whether it depends on nothing but positions and literals."""
    known: list[bool] = []
    for node in graph.nodes:
        makers = [graph.values[v].producer for v in node.inputs]
        known.append(loopable(node, backend) and all(m >= 0 and known[m] for m in makers))
    return known


def with_positions(graph: Graph, nodes: Nodes, positions: Sequence[bool]) -> Nodes:
    """``nodes`` with the index arithmetic (where ``positions``) that they alone read: each
    tile computes its own."""
    inside = set(nodes)

    def made_for(n: int) -> Iterator[int]:
        makers = (graph.values[v].producer for v in graph.nodes[n].inputs)
        return (-m for m in makers if m >= 0 and positions[m] and m not in inside)

    # The last first: whoever reads it is inside by then, or never will be.
    queue = [m for n in nodes for m in made_for(n)]
    heapify(queue)
    while queue:
        n = -heappop(queue)
        if n not in inside and is_used_up(graph, n, inside):
            inside.add(n)
            for m in made_for(n):
                heappush(queue, m)
    return tuple(sorted(inside))
