"""Normed: a contraction and the statistics of the rows that it contracts, such as a layer norm's.

A row's mean and variance are sums along the axis that the contraction sums along. In one kernel the
row is not written once it is normed, and read again: it is whole on chip, or walked in passes, and
what is divided by (an RMS norm's root) is left for the end of the one walk (``scaling``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from costmodel.graph import Graph, OpKind
from fuseplan.loops.regions import Nodes, convex, loopable


def normed(graph: Graph, groups: Iterable[Nodes], backend: str) -> Iterator[Nodes]:
    """Contractions, each with what is elementwise on its result and without, and the contractions of
    ``groups``, where some sum is needed for what they multiply; with what they follow from from there
    on, none of it wanted elsewhere."""
    products = [
        (n.id,) for n in graph.nodes if n.kind == OpKind.OUT_ELEMENTWISE_FUSABLE and loopable(n, backend)
    ]
    for group in dict.fromkeys([*products, *(_followed(graph, p, backend) for p in products), *groups]):
        whole = _with_statistics(graph, group, backend)
        if whole != group and convex(graph, whole) == whole:
            yield whole


def _followed(graph: Graph, product: Nodes, backend: str) -> Nodes:
    """A contraction and what is elementwise of its result."""
    found = set(product)
    for node in graph.nodes[product[0] + 1 :]:
        makers = {graph.values[v].producer for v in node.inputs}
        if node.kind <= OpKind.BROADCAST and loopable(node, backend) and not found.isdisjoint(makers):
            found.add(node.id)
    return tuple(sorted(found))


def _with_statistics(graph: Graph, group: Nodes, backend: str) -> Nodes:
    """``group`` with all before it that only it needs, from the first reductions on: of what is before
    these, what reads no more than it makes."""
    behind = _used_up(graph, group, frozenset(range(group[-1])), backend)
    after: set[int] = set()
    for n in sorted(behind):
        makers = {graph.values[v].producer for v in graph.nodes[n].inputs}
        if graph.nodes[n].kind == OpKind.REDUCTION or not after.isdisjoint(makers):
            after.add(n)
    if not after:
        return group
    cheap = frozenset(n for n in behind - after if _reads_once(graph, n))
    return tuple(sorted({*group, *_used_up(graph, group, cheap | after, backend)}))


def _used_up(graph: Graph, group: Nodes, among: frozenset[int], backend: str) -> frozenset[int]:
    """Of the nodes ``among`` that may be, those whose results nothing but ``group`` needs, or another of
    them."""
    inside, found = set(group), set[int]()
    for n in sorted(among, reverse=True):
        node = graph.nodes[n]
        readers = {c for v in node.outputs for c in graph.consumers[v]}
        is_needed = bool(readers) and readers <= inside and graph.results.isdisjoint(node.outputs)
        if n not in inside and node.kind <= OpKind.REDUCTION and loopable(node, backend) and is_needed:
            inside.add(n)
            found.add(n)
    return frozenset(found)


def _reads_once(graph: Graph, n: int) -> bool:
    node = graph.nodes[n]
    made = max(graph.values[v].size for v in node.outputs)
    return sum(graph.values[v].size >= made for v in set(node.inputs)) <= 1
