"""Siblings: operations that walk one array side by side, and may share a kernel for that alone.

No value passes between the two, but a kernel of both reads the array once and is launched once.
An operation *walks* an array if it reads it and touches none that is larger: then the array's
axes are all of its own, and one tiling serves both.

Which nodes of a component are joined by a path that leaves it and comes back.

Inside a component all edges are crossable, so a path that leaves it does so by a barrier, at
one of a few *exits*. Paths are sets of exits, one integer with a bit an exit: those that a node
leads to, and those that lead to a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from costmodel.graph import Graph, Node, OpKind

Edge = tuple[int, int]


Place = tuple[int, int]
"""Of a node: which component it is in, and at which position."""


@dataclass(frozen=True, slots=True)
class PathsBack:
    """Exits of a node's own component; a node without any is missing."""

    leaving: dict[int, int]
    """Those that crossable edges lead to from the node, itself one of them or not."""
    entering: dict[int, int]
    """Those from which a path that starts with a barrier leads to the node."""

    def join(self, u: int, v: int) -> bool:
        """Whether a path through a barrier leads from ``u`` to ``v``, of one component."""
        return self.leaving.get(u, 0) & self.entering.get(v, 0) != 0

    def below(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """For each node of a component, the positions to which a path through a barrier leads."""
        entered: dict[int, int] = {}
        for i, n in enumerate(nodes):
            if n in self.entering:
                exits = self.entering[n]
                entered[exits] = entered.get(exits, 0) | 1 << i
        if not entered:
            return (0,) * len(nodes)
        known = {
            exits: sum(positions for some, positions in entered.items() if some & exits)
            for exits in {self.leaving.get(n, 0) for n in nodes}
        }
        return tuple([known[self.leaving.get(n, 0)] for n in nodes])


def paths_back(
    members: Sequence[Sequence[int]], place: Sequence[Place], kept: Sequence[Edge], barriers: Sequence[Edge]
) -> PathsBack:
    """The paths that leave the components ``members`` and come back. They are connected by
    ``kept``, the crossable edges, in order of the consumer; ``place`` has every node's place."""
    exits = _exits(members, place, barriers)
    first: dict[int, int] = {}
    bit: dict[int, int] = {}
    leaving: dict[int, int] = {}
    for c, nodes in exits.items():
        first[c] = len(bit)
        for k, u in enumerate(nodes):
            bit[u] = len(bit)
            leaving[u] = 1 << k
    for u, v in reversed(kept):
        if v in leaving:
            leaving[u] = leaving.get(u, 0) | leaving[v]
    entering: dict[int, int] = {}
    for v, reached in _reached(len(place), kept, barriers, bit) if exits else ():
        c = place[v][0]
        if c in first:
            own = reached >> first[c] & ((1 << len(exits[c])) - 1)
            if own:
                entering[v] = own
    return PathsBack(leaving, entering)


def _exits(
    members: Sequence[Sequence[int]], place: Sequence[Place], barriers: Sequence[Edge]
) -> dict[int, list[int]]:
    """For each component, the nodes that barriers leave it from, but for those after the last
    node to which one leads."""
    entered = [-1] * len(members)
    for _, v in barriers:
        c = place[v][0]
        entered[c] = max(entered[c], v)
    exits: dict[int, dict[int, None]] = {}
    for u, _ in barriers:
        c = place[u][0]
        if u < entered[c]:
            exits.setdefault(c, {})[u] = None
    return {c: list(leaving) for c, leaving in exits.items()}


def _reached(
    n_nodes: int, kept: Sequence[Edge], barriers: Sequence[Edge], bit: dict[int, int]
) -> Iterator[tuple[int, int]]:
    """For each node in order, the exits from which a path that starts with a barrier leads to it.
    A set is forgotten after its node's last consumer, so memory follows what is live."""
    before: list[list[Edge]] = [[] for _ in range(n_nodes)]
    last = [-1] * n_nodes
    for u, v in kept:
        before[v].append((u, 0))
        last[u] = max(last[u], v)
    for u, v in barriers:
        before[v].append((u, 1 << bit[u] if u in bit else 0))
        last[u] = max(last[u], v)
    reached = [0] * n_nodes
    for v, preds in enumerate(before):
        now = 0
        for u, own in preds:
            now |= reached[u] | own
            if last[u] == v:
                reached[u] = 0
        if now:
            yield v, now
            reached[v] = now


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
