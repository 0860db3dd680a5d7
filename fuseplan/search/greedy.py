"""Greedy fusion in topological order, as fusing compilers do it.

Edge by edge, in the order of the graph, a consumer joins its producer's group if the
result is legal and no dearer than the two apart. Decisions are never revised, so the
result depends on the order of operations: that of TorchInductor does too (pytorch#142316).

A group that grows by one operation at a time is priced anew each time. After a counted amount of work
what is left is merged in rounds (``best_first.merge_in_rounds``).
"""

from __future__ import annotations

from costmodel.graph import Graph
from fuseplan.schedule.pricing import Pricing
from fuseplan.search.best_first import MAX_LOOKED, merge_in_rounds
from fuseplan.search.grouping import Budget, Grouping, plan_apart
from fuseplan.search.merging import Merging
from fuseplan.search.space import Mask, Space


def plan_groups(graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
    """Greedy fusion, until the deadline of ``budget``."""
    return plan_apart(graph, pricing, merge, budget)


def merge(space: Space) -> list[Mask]:
    """Greedy groups of one component; where ``space.book`` is late, those that were made until then."""
    merging = Merging(space)
    for v in range(space.n):
        for u in space.producers[v]:
            if merging.looked > MAX_LOOKED:
                merge_in_rounds(merging)
                return merging.groups()
            if space.book.is_late():
                return merging.groups()
            a, b = merging.owner[u], merging.owner[v]
            if a != b and merging.saving(a, b) is not None and not merging.deadlocks(a, b):
                merging.merge(a, b)
    return merging.groups()
