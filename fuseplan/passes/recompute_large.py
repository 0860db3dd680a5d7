"""Recompute large values, such as attention weights, in the backward pass instead of storing them.

The rest of a network runs between the forward and the backward pass of a layer, so no loop nest holds both.
Values of the forward pass that the backward pass reads (attention weights, a hidden layer) would stay in
memory. Here such readers get a copy of the operations that compute the large value from small ones, which a
loop nest evaluates tile by tile (rematerialisation: Chen et al., arXiv:1604.06174). A mask that is computed
from positions alone is copied for each loop nest that reads it, since it costs next to nothing.

The rewritten program computes the same results. Both programs are planned, and the faster plan is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from functools import partial

from costmodel.graph import ORIGINAL, Graph, Item
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.rewrite import with_copies
from fuseplan.schedule.nests.regions import (
    IsLarge,
    can_nest,
    connected_groups,
    descendants_up_to_last,
    is_index_arithmetic,
    levels,
)
from fuseplan.schedule.pricing import Nodes
from fuseplan.support.digraph import reachable
from fuseplan.support.memo import memoised

Copies = dict[Nodes, Nodes]
"""For each set of readers, the operations that are copied for them."""


@memoised
def recompute(lowered: Lowered, min_bytes: int) -> Lowered | None:
    """``lowered`` with values of at least ``min_bytes`` rematerialised for distant readers; None where there
    is nothing to copy."""
    new = lowered
    # One level of largeness at a time: copies made at one are part of the graph at the next.
    for is_large in levels(lowered.graph, min_bytes):
        copies = _copies(new.graph, is_large)
        if copies:
            new, _ = rewritten(new, copies)
    return None if new is lowered else new


def _copies(graph: Graph, is_large: IsLarge) -> Copies:
    """The operations to copy for each set of readers, at one level of largeness."""
    positions = is_index_arithmetic(graph)
    copies: Copies = {}
    for group in connected_groups(graph, is_large):
        for stage in stages(graph, group):
            chain = chain_of(graph, stage, is_large, positions)
            if chain and _gains(graph, chain, set(stage)):
                copies[stage] = chain
    return copies


def _gains(graph: Graph, chain: Nodes, readers: set[int]) -> bool:
    """Whether copying makes readers independent: something of the chain is read elsewhere, too."""
    own = readers | set(chain)
    made = [v for n in chain for v in graph.nodes[n].outputs]
    return any(v in graph.results or not own.issuperset(graph.consumers[v]) for v in made)


def stages(graph: Graph, group: Nodes, backend: str = "loops") -> list[Nodes]:
    """``group`` in parts that can each be one nest: a part ends where a path leaves the group
    through an operation that no tiled loop of it could hold, and returns."""
    inside = set(group)
    level: dict[int, int] = {}
    for n in descendants_up_to_last(graph, group):
        node = graph.nodes[n]
        before = [level[m] for v in node.inputs if (m := graph.values[v].producer) in level]
        foreign = n not in inside and (not can_nest(node, backend) or node.flops.matrix > 0)
        # Odd levels are outside: a member behind them is on the next even one.
        now = max(before, default=0)
        if (foreign and now % 2 == 0) or (n in inside and now % 2):
            now += 1
        level[n] = now
    parts: dict[int, list[int]] = {}
    for n in group:
        parts.setdefault(level[n], []).append(n)
    return [tuple(parts[k]) for k in sorted(parts)]


def chain_of(
    graph: Graph,
    readers: Collection[int],
    is_large: IsLarge,
    positions: list[bool],
    backend: str = "loops",
    stored: Set[int] = frozenset(),
) -> Nodes:
    """The operations that lead from values that are not large, and from the results of ``stored``, to
    ``readers``, in order; empty if one of them cannot be evaluated tile by tile."""
    apart = {*readers, *stored}

    def producers(n: int) -> Iterator[int]:
        for v in graph.nodes[n].inputs:
            m = graph.values[v].producer
            if m >= 0 and m not in apart and (is_large(graph.values[v].size) or positions[m]):
                yield m

    chain = reachable(readers, producers)
    return tuple(sorted(chain)) if all(can_nest(graph.nodes[n], backend) for n in chain) else ()


def rewritten(lowered: Lowered, copies: Copies) -> tuple[Lowered, dict[Item, int]]:
    """The program with ``copies``, and without operations whose results nothing reads any more. The second
    result says where each operation stands now: ``(n, k)`` is the copy of node ``n`` for the ``k``-th set of
    readers."""
    graph = lowered.graph
    wants = {n: side for side, stage in enumerate(copies) for n in stage}
    chains = [set(chain) for chain in copies.values()]
    order: dict[Item, None] = {}
    for n in range(len(graph.nodes)):
        if n in wants:
            # Just before the first reader, since the operands of a copy may be computed late.
            side = wants[n]
            makers = reachable([n], partial(_makers, graph, chains[side]))
            order.update(dict.fromkeys((m, side) for m in sorted(makers)))
        order[n, ORIGINAL] = None

    def copy_of(item: Item, v: int) -> int | None:
        n, copy = item
        side = wants.get(n) if copy is ORIGINAL else copy
        return side if (graph.values[v].producer, side) in order else ORIGINAL

    return with_copies(lowered, tuple(order), copy_of)


def _makers(graph: Graph, chain: set[int], n: int) -> set[int]:
    """The members of ``chain`` whose results node ``n`` reads."""
    return chain.intersection([graph.values[v].producer for v in graph.nodes[n].inputs])
