"""Find operations to fuse for an operand they share: siblings (readers of an array), hubs (scalars).

*Siblings* read one array side by side. A kernel of both reads the array once and is launched once. The
*full-size operands* of an operation are the largest arrays that it reads, where its results are no larger:
all of its axes index them, and one tiling serves all operations that share one.

A *hub* is a set of one-element values that scalar arithmetic connects. Its *ports* are the operations on
arrays that make or read one of them. A norm of all gradients is a hub, and so is Adam's bias correction: each
ties a whole optimizer step together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from costmodel.graph import Graph, Node, OpKind
from fuseplan.support.digraph import connected_sets

Edge = tuple[int, int]

_MOST_PAIRED = 64
"""Up to so many readers of one array are all siblings of each other. Of more, each is a sibling of the next
only, since all pairs would be too many. None of the workloads' arrays is a full-size operand of
more than 6."""


def full_size_operands(graph: Graph, node: Node) -> tuple[int, ...]:
    """The full-size operands of ``node``; none of a contraction or an operation with side effects."""
    if node.kind > OpKind.REDUCTION or node.effects:
        return ()
    sizes = {v: graph.values[v].size for v in node.inputs + node.outputs}
    largest = max(sizes.values(), default=0)
    return tuple(v for v in dict.fromkeys(node.inputs) if sizes[v] == largest > 1)


def sibling_pairs(
    arrays: Sequence[Sequence[int]], kept: Sequence[Edge], barriers: Sequence[Edge]
) -> Iterator[Edge]:
    """Pairs of siblings that no path through a barrier joins. ``arrays[n]`` are the full-size
    operands of node ``n``.

    A path through a barrier ends on a higher *level* (most barriers on any path to a node) than
    it starts: siblings are looked for on one level.
    """
    if not any(arrays):
        return
    level = [0] * len(arrays)
    steps = sorted([(v, u, 0) for u, v in kept] + [(v, u, 1) for u, v in barriers])
    for v, u, barrier in steps:
        level[v] = max(level[v], level[u] + barrier)
    reading: dict[tuple[int, int], list[int]] = {}
    for n, its in enumerate(arrays):
        for v in its:
            reading.setdefault((v, level[n]), []).append(n)
    found: dict[Edge, None] = {}
    for nodes in reading.values():
        found.update(dict.fromkeys(combinations(nodes, 2) if len(nodes) <= _MOST_PAIRED else pairwise(nodes)))
    yield from found


MAX_PORTS = 4
"""A scalar of more ports is a *wide* hub. Normalising a single row needs 3 (its mean is made once and read
twice). Groups that meet only in a wide hub are searched last, from the best plan without them, for their
number is exponential in the number of parameters."""


@dataclass(frozen=True, slots=True)
class Hubs:
    """The hubs of a graph that have more than ``MAX_PORTS`` ports."""

    ports: dict[int, int]
    """For each value of one, how many ports the hub has."""
    arithmetic: frozenset[int]
    """The operations that touch scalars alone."""


def wide_hubs(graph: Graph) -> Hubs:
    """The hubs of ``graph`` with more than ``MAX_PORTS`` ports."""
    values = graph.values
    scalars = [value.id for value in values if value.shape.count(1) == len(value.shape)]
    is_scalar, number = set(scalars), {v: i for i, v in enumerate(scalars)}
    arithmetic: set[int] = set()
    links: list[tuple[int, int]] = []
    mixed: list[tuple[int, set[int]]] = []
    for node in graph.nodes:
        touched = node.inputs + node.outputs
        if is_scalar.issuperset(touched):
            arithmetic.add(node.id)
            links += [(number[touched[0]], number[v]) for v in touched[1:]]
        elif not is_scalar.isdisjoint(touched):
            mixed.append((node.id, is_scalar.intersection(touched)))
    hub_of: dict[int, int] = {}
    for members in connected_sets(len(scalars), links):
        hub_of.update((scalars[i], scalars[members[0]]) for i in members)
    ports: dict[int, set[int]] = {}
    for n, touched_scalars in mixed:
        # Copies of an operation are one port: groups that are searched without copies are searched with them.
        port = graph.origins[n] if graph.origins else n
        for v in touched_scalars:
            ports.setdefault(hub_of[v], set()).add(port)
    wide = {hub: len(nodes) for hub, nodes in ports.items() if len(nodes) > MAX_PORTS}
    return Hubs({v: wide[hub] for v, hub in hub_of.items() if hub in wide}, frozenset(arithmetic))
