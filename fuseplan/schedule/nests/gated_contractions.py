"""Joined: contractions whose results meet in an elementwise operation, as a gate and what it gates.

``silu(x @ g) * (x @ u)`` has two products of the same rows; in one kernel both are accumulated in one
loop over what they contract, ``x`` is read once, and neither product is stored.
"""

from __future__ import annotations

from collections.abc import Iterator

from costmodel.axes import Conflict, unify
from costmodel.graph import Graph, OpKind
from fuseplan.schedule.layout import contraction_axes
from fuseplan.schedule.nests.connected import Nodes, loopable
from fuseplan.schedule.nests.regions import is_used_up

_MOST = 4
"""So many contractions meet at most: each holds an accumulator of a tile in registers."""


def joined(graph: Graph, backend: str) -> Iterator[Nodes]:
    """Groups of two to four contractions of the same rows and columns, with what is elementwise between
    them and the operation in which they meet, each once."""
    feeding: dict[int, Nodes] = {}
    found: set[Nodes] = set()
    for node in graph.nodes:
        if not loopable(node, backend):
            continue
        if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
            feeding[node.id] = (node.id,)
            continue
        if node.kind > OpKind.BROADCAST:
            continue
        makers = {graph.values[v].producer for v in node.inputs}
        sources = {feeding[m] for m in makers if m in feeding}
        together = tuple(sorted({n for some in sources for n in some}))
        if not together or sum(graph.nodes[n].flops.matrix > 0 for n in together) > _MOST:
            continue
        group = feeding[node.id] = (*together, node.id)
        if (
            len(sources) > 1
            and group not in found
            and all(is_used_up(graph, n, set(group)) for n in group[:-1])
            and _is_one_loop(graph, group)
        ):
            found.add(group)
            yield group


def _is_one_loop(graph: Graph, group: Nodes) -> bool:
    """Whether the contractions of a group have the same axes, and what they contract is one, too."""
    dots = [n for n in group if graph.nodes[n].kind == OpKind.OUT_ELEMENTWISE_FUSABLE]
    axes = unify(graph, group)
    if not 1 < len(dots) <= _MOST or isinstance(axes, Conflict):
        return False
    own = {n: contraction_axes(graph.nodes[n], axes.node_axes[group.index(n)]) for n in dots}
    first = own[dots[0]]
    return bool(first.depth) and all(dot == first for dot in own.values())
