"""Fusion as graph colouring: an edge joins operations that may not share a kernel, a colour is a kernel.

The literature's other way of deciding, beside the greedy one (it is said of XLA, which in truth runs a queue
of priorities: ``xla_priority``). Two operations conflict if no kernel may hold both with everything between
them. The conflict graph is coloured in order of saturation (DSATUR: Brélaz, Commun. ACM 22(4), 1979): next is
the operation whose conflicts have the most colours, and it takes a colour that none of them has: the first,
which makes the fewest colours, or that with which it shares the most bytes.

Colours know neither paths nor what passes between operations, so a colour is no kernel yet. It is made
convex, by parting what stands before an operation of another colour from what stands behind that, and falls
into what holds together (``decided``). Nor are three operations one kernel because any two of them are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Literal

from costmodel.graph import Graph
from fuseplan.schedule.pricing import Nodes, PriceBook, Pricing
from fuseplan.search.decided import plan_decided
from fuseplan.search.grouping import Budget, Grouping, place, take_apart
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits

Objective = Literal["bytes", "kernels"]


def plan_groups(
    graph: Graph, pricing: Pricing, budget: Budget | None = None, *, objective: Objective = "bytes"
) -> Grouping:
    """The groups of a colouring, by memory traffic or by the number of colours. ``budget`` is not needed:
    each operation is coloured once. For the other objective:

        >>> import functools
        >>> from fuseplan import register_planner
        >>> register_planner("fewest_colours", functools.partial(plan_groups, objective="kernels"))
    """
    return plan_decided(graph, pricing, functools.partial(_groups, objective=objective))


def _groups(book: PriceBook, objective: Objective) -> Iterator[Nodes]:
    parts = take_apart(book.graph, book)
    found = [
        [piece for colour in colours(space, objective) for piece in convex(space, colour)]
        for space in parts.kinds
    ]
    for kind, nodes in parts.instances:
        yield from (group for group in place(found[kind], nodes) if len(group) > 1)


def conflicts(space: Space) -> list[Mask]:
    """For each operation, those that no kernel may hold with it and with all between the two."""
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
    seen: list[set[int]] = [set() for _ in range(space.n)]  # the colours of an operation's conflicts
    worth: list[dict[int, int]] = [{} for _ in range(space.n)]  # by colour, the bytes that it shares with it
    left = set(range(space.n))

    def urgency(v: int) -> tuple[bool, int, int, int]:
        # What shares bytes with a colour that it may take comes before what would begin another.
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
    """A colour in parts none of which is left by a path and entered again."""
    exits = [0] * space.n
    """The most often that a path to each operation has left the colour."""
    parts: dict[int, Mask] = {}
    for v in range(space.n):
        inside = colour >> v & 1
        steps = (exits[u] + (colour >> u & 1 and not inside) for u in space.producers[v])
        exits[v] = max(steps, default=0)
        if inside:
            parts[exits[v]] = parts.get(exits[v], 0) | 1 << v
    return list(parts.values())


def _shared_bytes(space: Space) -> Sequence[dict[int, int]]:
    """For each operation, the bytes that it need not move beside each other: what one makes for the other,
    or what both read."""
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
