"""Siblings: operations that walk one array side by side, and may share a kernel for that alone.

No value passes between the two, but a kernel of both reads the array once and is launched once.
An operation *walks* an array if it reads it and touches none that is larger: then the array's
axes are all of its own, and one tiling serves both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from costmodel.graph import Graph, Node, OpKind
from fuseplan.schedule.outside_paths import Edge

_MOST_PAIRED = 64
"""Readers of one array that are all siblings of each other; of more, each of the next alone, or
their pairs would be too many. Of the workloads' arrays none is walked by more than 6 at a time."""


def walked(graph: Graph, node: Node) -> tuple[int, ...]:
    """The arrays that ``node`` walks. Contractions and what stands alone have no siblings."""
    if node.kind > OpKind.REDUCTION or node.effects:
        return ()
    sizes = {v: graph.values[v].size for v in node.inputs + node.outputs}
    largest = max(sizes.values(), default=0)
    return tuple(v for v in dict.fromkeys(node.inputs) if sizes[v] == largest > 1)


def sibling_pairs(
    arrays: Sequence[Sequence[int]], kept: Sequence[Edge], barriers: Sequence[Edge]
) -> Iterator[Edge]:
    """Pairs of siblings that no path through a barrier joins. ``arrays[n]`` are those that node ``n`` walks.

    A path through a barrier ends on a higher *level* (most barriers on any path to a node) than
    it starts: siblings are looked for on one level.
    """
    if not any(arrays):
        return
    level = [0] * len(arrays)
    steps = sorted([(v, u, 0) for u, v in kept] + [(v, u, 1) for u, v in barriers])
    for v, u, barrier in steps:
        level[v] = max(level[v], level[u] + barrier)
    walkers: dict[tuple[int, int], list[int]] = {}
    for n, its in enumerate(arrays):
        for v in its:
            walkers.setdefault((v, level[n]), []).append(n)
    found: dict[Edge, None] = {}
    for nodes in walkers.values():
        found.update(dict.fromkeys(combinations(nodes, 2) if len(nodes) <= _MOST_PAIRED else pairwise(nodes)))
    yield from found
