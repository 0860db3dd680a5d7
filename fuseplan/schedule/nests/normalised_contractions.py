"""Normed: a contraction and the statistics of the rows that it contracts, such as a layer norm's.

A row's mean and variance are sums along the axis that the contraction sums along. In one kernel the
row is not written once it is normed, and read again: it is whole on chip, or walked in passes, and
what is divided by (an RMS norm's root) is left for the end of the one walk (``scaling``).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from costmodel.graph import Graph, OpKind
from fuseplan.schedule.nests.connected import Nodes, loopable
from fuseplan.schedule.nests.regions import convex, is_used_up


def normed(graph: Graph, groups: Iterable[Nodes], backend: str) -> Iterator[Nodes]:
    """Contractions, each with what is elementwise on its result and without, and the contractions of
    ``groups``, where some sum is needed for what they multiply; with what they follow from from there
    on, none of it wanted elsewhere."""
    found: set[Nodes] = set()
    products = (
        n.id for n in graph.nodes if n.kind == OpKind.OUT_ELEMENTWISE_FUSABLE and loopable(n, backend)
    )
    alone = [(n,) for n in products if _with_statistics(graph, (n,), backend) != (n,)]
    for group in (*alone, *(_followed(graph, n, backend) for (n,) in alone), *groups):
        whole = _with_statistics(graph, group, backend)
        if whole != group and whole not in found and convex(graph, whole) == whole:
            found.add(whole)
            yield whole


def _followed(graph: Graph, product: int, backend: str) -> Nodes:
    """A contraction and as much of what is elementwise of its result as leaves one value."""
    inside = {product}
    found: Nodes = (product,)
    open_values = set(graph.nodes[product].outputs)
    waiting = [n for v in open_values for n in graph.consumers[v]]
    heapq.heapify(waiting)
    while waiting:
        node = graph.nodes[heapq.heappop(waiting)]
        makers = {graph.values[v].producer for v in node.inputs} - inside
        fits = node.kind <= OpKind.BROADCAST and loopable(node, backend)
        # What is made from arguments alone, as a row of biases is, does not wait for the product.
        first = all(m < product or max(_makers(graph, m), default=-1) < 0 for m in makers)
        if node.id in inside or not (fits and first):
            continue
        inside.add(node.id)
        open_values.update(node.outputs)
        open_values = {
            v for v in open_values if v in graph.results or not inside.issuperset(graph.consumers[v])
        }
        if len(open_values) == 1:
            found = tuple(sorted(inside))
        for v in node.outputs:
            for n in graph.consumers[v]:
                heapq.heappush(waiting, n)
    return found


def _with_statistics(graph: Graph, group: Nodes, backend: str) -> Nodes:
    """``group`` with all before it that only it needs, from the first reductions on: of what is before
    these, what reads no more than it makes."""
    behind = _used_up(graph, group, lambda n: loopable(graph.nodes[n], backend))
    after: set[int] = set()
    for n in sorted(behind):
        if graph.nodes[n].kind == OpKind.REDUCTION or not after.isdisjoint(_makers(graph, n)):
            after.add(n)
    if not after:
        return group
    kept = _used_up(graph, group, lambda n: n in after or (n in behind and _reads_once(graph, n)))
    return tuple(sorted({*group, *kept}))


def _used_up(graph: Graph, group: Nodes, may_be: Callable[[int], bool]) -> set[int]:
    """The nodes before ``group`` whose results nothing but it needs, or another of them."""
    inside, found = set(group), set[int]()
    waiting = [-m for n in group for m in _makers(graph, n) if m >= 0]
    heapq.heapify(waiting)
    while waiting:  # the last first: who reads it is known then
        node = graph.nodes[-heapq.heappop(waiting)]
        if node.id in inside or node.kind > OpKind.REDUCTION:
            continue
        if may_be(node.id) and is_used_up(graph, node.id, inside):
            inside.add(node.id)
            found.add(node.id)
            for m in _makers(graph, node.id):
                if m >= 0:
                    heapq.heappush(waiting, -m)
    return found


def _makers(graph: Graph, n: int) -> set[int]:
    """The nodes that make what a node reads; -1 for arguments."""
    return {graph.values[v].producer for v in graph.nodes[n].inputs}


def _reads_once(graph: Graph, n: int) -> bool:
    node = graph.nodes[n]
    made = max(graph.values[v].size for v in node.outputs)
    return sum(graph.values[v].size >= made for v in set(node.inputs)) <= 1
