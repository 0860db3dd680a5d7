"""Best-first fusion: always the merge that saves the most.

As XLA's priority fusion, but on pairs of groups with their real price: a queue of merges
by saving, where an entry whose groups have changed since is skipped.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from costmodel.graph import Graph
from fuseplan.bits import bits
from fuseplan.planners.base import Budget, Grouping, plan_apart
from fuseplan.planners.merging import Merging
from fuseplan.pricing import Pricing
from fuseplan.space import Mask, Space


def plan_groups(graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
    """Best-first fusion. ``budget`` is not needed: each merge adds a few entries."""
    return plan_apart(graph, pricing, merge)


def merge(space: Space, sides: Sequence[Mask] = ()) -> list[Mask]:
    """Best-first groups of one component, none of which holds positions of two ``sides``.

    A merge is queued with what it saves at most, and priced when it comes first: most are
    overtaken by others and never are.
    """
    merging = Merging(space)
    queue: list[tuple[tuple[int, int, int], bool, Mask, Mask]] = []

    def offer(a: Mask, b: Mask, priced: bool) -> None:
        if any(a & side and not b & side for side in sides):
            return
        saving = merging.saving(a, b) if priced else merging.saving_at_most(a, b)
        if saving is not None:
            most = (-saving[0], -saving[1], -saving[2])
            heapq.heappush(queue, (most, priced, min(a, b), max(a, b)))

    for u, v in space.component.edges + space.component.siblings:
        if merging.owner[u] != merging.owner[v]:
            offer(merging.owner[u], merging.owner[v], False)
    while queue:
        _, priced, a, b = heapq.heappop(queue)
        if a not in merging.reach or b not in merging.reach or merging.deadlocks(a, b):
            continue
        if not priced:
            offer(a, b, True)
            continue
        both = merging.merge(a, b)
        border = 0
        for i in bits(both):
            border |= space.neighbours[i]
        for other in {merging.owner[i] for i in bits(border & ~both)}:
            offer(both, other, False)
    return merging.groups()
