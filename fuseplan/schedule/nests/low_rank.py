"""Narrow: a contraction along the few columns that another one makes, as those of a low-rank adapter.

In ``x @ w + (x @ a) @ b`` the rows of ``x @ a`` are short: a kernel that has a tile of ``x`` makes them
beside ``x @ w``, and multiplies them by ``b`` when all of ``x`` has been seen; ``x`` is read once, and no
product is stored. So it is with ``gelu(x @ a) @ b`` (Houlsby et al., arXiv:1902.00751; Hu et al.,
arXiv:2106.09685).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from costmodel.graph import DimRole, Graph, Node, OpKind
from fuseplan.schedule.nests.connected import Nodes, loopable
from fuseplan.schedule.nests.regions import convex, is_used_up

_NARROW = 128
"""So many columns are whole in a tile: a head of an attention has no more."""

_SMALLER = 4
"""What is made narrow is so many times smaller than what it is made of: it may be made again for each
tile of columns of the result."""


def narrow(graph: Graph, backend: str) -> Iterator[Nodes]:
    """Pairs of contractions, with what is elementwise between them, and with a third to whose result theirs
    is added; nothing but the last result is wanted elsewhere."""
    for node in graph.nodes:
        if not _is_product(node, backend) or _depth(node) > _NARROW:
            continue
        for v in node.inputs:
            before = _made_by_a_product(graph, v, node.id, backend)
            pair = tuple(sorted({*before, node.id}))
            if before and convex(graph, pair) == pair:
                yield pair
                beside = _added(graph, pair, backend)
                if beside != pair and convex(graph, beside) == beside:
                    yield beside


def _is_product(node: Node, backend: str) -> bool:
    return node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE and loopable(node, backend)


def _depth(node: Node) -> int:
    """How many products each element of its result sums up."""
    return prod(n for n, role in zip(node.dims, node.roles, strict=True) if role == DimRole.REDUCED)


def _made_by_a_product(graph: Graph, v: int, reader: int, backend: str) -> set[int]:
    """What makes ``v`` from the operands of one contraction, if nothing but ``reader`` needs any of it."""
    inside, found, products = {reader}, set[int](), 0
    waiting = [graph.values[v].producer]
    while waiting:
        n = max(waiting)  # the last first: who reads it is known then
        waiting.remove(n)
        if n < 0 or n in found or not is_used_up(graph, n, inside):
            continue
        node = graph.nodes[n]
        if _is_product(node, backend):
            products += _shrinks(graph, node)
        elif node.kind <= OpKind.BROADCAST and loopable(node, backend):
            waiting += [graph.values[u].producer for u in node.inputs]
        else:
            continue
        found.add(n)
        inside.add(n)
    one = sum(graph.nodes[n].flops.matrix > 0 for n in found) == products == 1
    return found if one else set()


def _shrinks(graph: Graph, node: Node) -> bool:
    largest = max(graph.values[v].size for v in node.inputs)
    return graph.values[node.outputs[0]].size * _SMALLER <= largest


def _added(graph: Graph, pair: Nodes, backend: str) -> Nodes:
    """``pair`` with what is elementwise of its result, up to a sum with another contraction's."""
    inside, last = set(pair), pair[-1]
    while True:
        (v, *_) = graph.nodes[last].outputs
        readers = graph.consumers[v]
        if v in graph.results or len(readers) != 1 or graph.nodes[readers[0]].kind != OpKind.ELEMENTWISE:
            return pair
        last = readers[0]
        inside.add(last)
        makers = {graph.values[u].producer for u in graph.nodes[last].inputs} - inside
        others = {m for m in makers if m >= 0 and _is_product(graph.nodes[m], backend)}
        if len(others) == 1 and is_used_up(graph, min(others), inside):
            return tuple(sorted(inside | others))
