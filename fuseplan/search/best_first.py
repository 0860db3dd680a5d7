"""Best-first fusion: always the merge that saves the most.

As XLA's priority fusion, but on pairs of groups with their real price: a queue of merges
by saving, where an entry whose groups have changed since is skipped.

A group that takes in one operation after the other is priced anew each time, so that the queue takes
time quadratic in the size of the groups. After a counted amount of work what is left is merged in
rounds: in each, every group merges at most once, with the neighbour that saves the most. Groups double
in a round, and all rounds together look at each operation a few times for each doubling.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from costmodel.graph import Graph
from fuseplan.schedule.pricing import Pricing
from fuseplan.search.grouping import Budget, Grouping, plan_apart
from fuseplan.search.merging import Merging
from fuseplan.search.space import Mask, Space

MAX_LOOKED = 20_000
"""Positions that the queue looks at in the groups it asks for, before rounds take over: half a second of
work, and sixteen times what the largest component of the workloads needs."""

_TRIED = 4
"""Neighbours, the smallest first, that a group is priced with in one round."""


def plan_groups(graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
    """Best-first fusion, until the deadline of ``budget``."""
    return plan_apart(graph, pricing, merge, budget)


def merge(space: Space, sides: Sequence[Mask] = ()) -> list[Mask]:
    """Best-first groups of one component, none of which holds positions of two ``sides``; where
    ``space.book`` is late, those that were made until then.

    A merge is queued with what it saves at most, and priced when it comes first: most are
    overtaken by others and never are.
    """
    merging = Merging(space)
    queue: list[tuple[tuple[int, int, int], bool, Mask, Mask]] = []

    def offer(a: Mask, b: Mask, priced: bool) -> None:
        if _is_apart(a, b, sides):
            return
        saving = merging.saving(a, b) if priced else merging.saving_at_most(a, b)
        if saving is not None:
            most = (-saving[0], -saving[1], -saving[2])
            heapq.heappush(queue, (most, priced, min(a, b), max(a, b)))

    for u, v in space.component.edges + space.component.siblings:
        if merging.owner[u] != merging.owner[v]:
            if merging.looked > MAX_LOOKED or space.book.is_late():
                break
            offer(merging.owner[u], merging.owner[v], False)
    while queue and merging.looked <= MAX_LOOKED and not space.book.is_late():
        _, priced, a, b = heapq.heappop(queue)
        if a not in merging.reach or b not in merging.reach or merging.deadlocks(a, b):
            continue
        if not priced:
            offer(a, b, True)
            continue
        both = merging.merge(a, b)
        for other in sorted(merging.neighbours(both)):
            if merging.looked > MAX_LOOKED or space.book.is_late():
                break
            offer(both, other, False)
    if merging.looked > MAX_LOOKED:
        merge_in_rounds(merging, sides)
    return merging.groups()


def merge_in_rounds(merging: Merging, sides: Sequence[Mask] = ()) -> None:
    """Merge each group with the neighbour that saves the most, once a round, until no merge gains or
    ``Merging.space``'s book is late."""
    book = merging.space.book
    refused: set[Mask] = set()
    """Unions that are illegal or lose."""
    gains = True
    while gains:
        gains = False
        merged: set[Mask] = set()
        for group in merging.groups():
            if group not in merging.reach or group in merged:
                continue
            near = [other for other in merging.neighbours(group) if other not in merged]
            near = [other for other in near if group | other not in refused]
            near.sort(key=lambda mask: (mask.bit_count(), mask))
            best: tuple[tuple[int, int, int], Mask] | None = None
            for other in near[:_TRIED]:
                if book.is_late():
                    return
                saving = None if _is_apart(group, other, sides) else merging.saving(group, other)
                if saving is None:
                    refused.add(group | other)
                elif (best is None or saving > best[0]) and not merging.deadlocks(group, other):
                    best = saving, other
            if best is not None:
                merged.add(merging.merge(group, best[1]))
                gains = True


def _is_apart(a: Mask, b: Mask, sides: Sequence[Mask]) -> bool:
    return any(a & side and not b & side for side in sides)
