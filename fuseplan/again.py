"""What is computed again for some of its readers: a second search, on the graph with copies.

What may be computed again is chosen before (``fuseplan.trials``), and tried on one of each distinct
region (``fuseplan.sample``). Where copies make too many groups of a component, all in it is
computed once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from costmodel.graph import Graph
from fuseplan import memo
from fuseplan.copies import Copies, split
from fuseplan.lower import Lowered
from fuseplan.plan import already_optimal
from fuseplan.planners import Budget, PlanGroups
from fuseplan.planners.base import Grouping, left_s
from fuseplan.pricing import Nodes
from fuseplan.recomputed import realised
from fuseplan.recomputing import Recomputing
from fuseplan.sample import sample_of
from fuseplan.schedule import Scheduler
from fuseplan.trials import worth_again

if TYPE_CHECKING:
    from fuseplan.planner import Clock


_Searched = tuple[Copies, Grouping]


def plan_again(
    lowered: Lowered,
    scheduler: Scheduler,
    plan_groups: PlanGroups,
    once: Grouping,
    budget: Budget,
    clock: Clock,
) -> tuple[Lowered, Grouping]:
    """``once``, a plan in which everything is computed once, or a better one with the program that
    computes some values again. What is proven is proven of the plans that may."""
    graph = lowered.graph
    expires_at = time.monotonic() + budget.deadline_s

    def search(graph: Graph, pricing: Scheduler, groups: Sequence[Nodes], roots: Nodes) -> _Searched | None:
        """The best plan in which ``roots`` may be computed again, but for those that make too many groups."""
        while (copies := split(graph, roots)) is not None:
            left = replace(budget, deadline_s=left_s(expires_at), known=copies.lifted(groups))
            found = plan_groups(copies.graph, Recomputing(copies, pricing), left)
            clock.add(found.stats.seconds)
            if not found.crowded or time.monotonic() >= expires_at:
                return copies, found
            crowded = {copies.node[c] for c in found.crowded}
            roots = tuple([n for n in roots if n not in crowded])
        return None

    with memo.kept():  # what is found in the sample is recalled for the whole
        components, groups = once.components, once.groups
        roots = clock.time("heuristics", lambda: worth_again(graph, scheduler, components, groups))
        sample = clock.time("partition", lambda: sample_of(graph, components, roots))
        tried = search(sample.graph, sample.scheduler(scheduler), sample.here(groups), sample.first(roots))
        answer = search(graph, scheduler, groups, sample.everywhere(tried[0].roots)) if tried else None
    if answer is None:
        return lowered, once
    copies, again = answer
    device, features = scheduler.device, scheduler.features
    program, again = realised(lowered, copies, again, lambda new: Scheduler(new.graph, device, new, features))
    best_ps, once_ps = (sum(k.cost.time_ps for k in grouping.kernels) for grouping in (again, once))
    if best_ps > once_ps:  # the deadline ended the second search
        kept = replace(again, kernels=once.kernels, refusals=once.refusals, status="FEASIBLE")
        return lowered, kept
    if best_ps == once_ps and again.status == "OPTIMAL" and once.stats.certified:
        stats = replace(again.stats, certified=once.stats.certified)
        again = replace(again, stats=stats, notes=(*again.notes, already_optimal(once.stats.certified)))
    # What a value takes that nobody turned out to read was counted in.
    bound_ps = None if again.bound_ps is None else min(again.bound_ps, best_ps)
    return program, replace(again, bound_ps=bound_ps)
