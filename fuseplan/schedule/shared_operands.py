"""Find operations to fuse for an operand they share: siblings (readers of an array), hubs (scalars).

*Siblings* read one array side by side. A kernel of both reads the array once and is launched once. The
*full-size operands* of an operation are the largest arrays that it reads, where its results are no larger:
all of its axes index them, and one tiling serves all operations that share one.

A *hub* is a set of one-element values that scalar arithmetic connects. Its *ports* are the operations on
arrays that make or read one of them. A norm of all gradients is a hub, and so is Adam's bias correction: each
ties a whole optimizer step together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from costmodel.graph import Graph, Node, OpKind
from fuseplan.support.digraph import connected_sets

Edge = tuple[int, int]

_MOST_PAIRED = 64
"""Up to so many readers of one array are all siblings of each other. Of more, each is a sibling of one of the
next, since all pairs would be too many. None of the workloads' arrays is a full-size operand of
more than 6."""


def full_size_operands(graph: Graph, node: Node) -> tuple[int, ...]:
    """The full-size operands of ``node``; none of a contraction or an operation with side effects."""
    if node.kind > OpKind.REDUCTION or node.effects:
        return ()
    sizes = {v: graph.values[v].size for v in node.inputs + node.outputs}
    largest = max(sizes.values(), default=0)
    return tuple(v for v in dict.fromkeys(node.inputs) if sizes[v] == largest > 1)


def sibling_pairs(
    arrays: Sequence[Sequence[int]], parted: Callable[[Sequence[Edge]], Callable[[int, int], bool]]
) -> Iterator[Edge]:
    """Pairs of siblings, the lower operation first. ``arrays[n]`` are the full-size operands of node ``n``;
    ``parted`` says, of any pairs, which of these no kernel may hold, since a path between the two passes
    through another kernel."""
    readers: dict[int, list[int]] = {}
    for n, its in enumerate(arrays):
        for v in dict.fromkeys(its):
            readers.setdefault(v, []).append(n)
    lists = [nodes for nodes in readers.values() if len(nodes) > 1]
    are_parted = parted([pair for nodes in lists for pair in pairwise(nodes)])
    found: dict[Edge, None] = {}
    for nodes in lists:
        near = len(nodes) <= _MOST_PAIRED
        for i, u in enumerate(nodes):
            others = (v for v in nodes[i + 1 : i + _MOST_PAIRED] if not are_parted(u, v))
            found.update(((u, v), None) for v in (others if near else islice(others, 1)))
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
