"""Fusion as graph colouring: an edge joins operations that may not share a kernel, a colour is a kernel.

Two operations conflict if no kernel may hold both with all operations between them. The conflict graph is
coloured by DSATUR (Brélaz, Commun. ACM 22(4), 1979): the next operation is the one whose neighbours have the
most colours, and it takes a colour that none of them has, either the first such colour, which minimises the
number of colours, or the one with which it shares the most bytes. (Publications describe XLA in this way; it
uses a priority queue, see ``xla_priority``.)

Colouring ignores paths and data flow, and pairwise legality does not make a group legal. So each colour is
split into convex parts, and then into connected legal groups (``fuseplan.search.decided``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Literal

from costmodel.graph import Graph
from fuseplan.schedule.pricing import Nodes, PriceBook, Pricing
from fuseplan.search.decided import plan_decided
from fuseplan.search.grouping import Budget, Grouping, decompose, place
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits

Objective = Literal["bytes", "kernels"]


def plan_groups(
    graph: Graph, pricing: Pricing, budget: Budget | None = None, *, objective: Objective = "bytes"
) -> Grouping:
    """Plan with the groups of a colouring that minimises memory traffic or the number of colours.

    ``budget`` is unused: each operation is coloured once. For the other objective:

        >>> import functools
        >>> from fuseplan import register_planner
        >>> register_planner("fewest_colours", functools.partial(plan_groups, objective="kernels"))
    """
    return plan_decided(graph, pricing, functools.partial(_groups, objective=objective))


def _groups(book: PriceBook, objective: Objective) -> Iterator[Nodes]:
    parts = decompose(book.graph, book, at_hubs=False)
    found = [
        [piece for colour in colours(space, objective) for piece in convex(space, colour)]
        for space in parts.spaces
    ]
    for kind, nodes in parts.instances:
        yield from (group for group in place(found[kind], nodes) if len(group) > 1)


def conflicts(space: Space) -> list[Mask]:
    """For each operation, those that cannot share a kernel with it and all operations between the two."""
    found = list(space.conflicts)
    for v in range(space.n):
        for u in range(v):
            both = 1 << u | 1 << v | space.inner_below[u] & space.inner_above[v]
            if not found[v] >> u & 1 and space.breaks_rules(both):
                found[u] |= 1 << v
                found[v] |= 1 << u
    return found


def colours(space: Space, objective: Objective) -> list[Mask]:
    """The operations of each colour, no two of which conflict."""
    by_bytes = objective == "bytes"
    conflict, shared = conflicts(space), _shared_bytes(space)
    classes: list[Mask] = []
    seen: list[set[int]] = [set() for _ in range(space.n)]  # the colours of each operation's neighbours
    worth: list[dict[int, int]] = [{} for _ in range(space.n)]  # the bytes that it shares with each colour
    left = set(range(space.n))

    def urgency(v: int) -> tuple[bool, int, int, int]:
        # Operations that share bytes with an allowed colour come before those that need a new one.
        is_near = by_bytes and not worth[v].keys() <= seen[v]
        return is_near, len(seen[v]), conflict[v].bit_count(), -v

    while left:
        v = max(left, key=urgency)
        left.remove(v)
        allowed = [c for c in (worth[v] if by_bytes else range(len(classes))) if c not in seen[v]]
        colour = min(allowed, key=lambda c: (-worth[v].get(c, 0) * by_bytes, c), default=len(classes))
        classes += [0] * (colour == len(classes))
        classes[colour] |= 1 << v
        for u in bits(conflict[v]):
            seen[u].add(colour)
        for u, nbytes in shared[v].items():
            worth[u][colour] = worth[u].get(colour, 0) + nbytes
    return classes


def convex(space: Space, colour: Mask) -> list[Mask]:
    """Split a colour into parts that no path leaves and enters again."""
    exits = [0] * space.n
    """For each operation, the most exits from the colour on any path to it."""
    parts: dict[int, Mask] = {}
    for v in range(space.n):
        inside = colour >> v & 1
        steps = (exits[u] + (colour >> u & 1 and not inside) for u in space.producers[v])
        exits[v] = max(steps, default=0)
        if inside:
            parts[exits[v]] = parts.get(exits[v], 0) | 1 << v
    return list(parts.values())


def _shared_bytes(space: Space) -> Sequence[dict[int, int]]:
    """For each operation, the bytes of the arrays that it has in common with each other operation."""
    graph = space.book.graph
    shared: list[dict[int, int]] = [{} for _ in range(space.n)]
    touched: dict[int, set[int]] = {}
    for i, nodes in enumerate(space.members):
        for n in nodes:
            for v in (*graph.nodes[n].inputs, *graph.nodes[n].outputs):
                touched.setdefault(v, set()).add(i)
    for v, several in touched.items():
        for i in several:
            for j in several - {i}:
                shared[i][j] = shared[i].get(j, 0) + graph.values[v].nbytes
    return shared
