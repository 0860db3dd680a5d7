"""What is computed again for some of its readers: a second search, on the graph with copies.

What may be computed again is chosen before (``fuseplan.search.remat.select``), and tried on one of each
distinct region (``fuseplan.search.remat.search``). Where copies make too many groups of a component, all in
it is computed once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from costmodel.graph import Graph
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.constraints import Resolved
from fuseplan.schedule.pricing import Nodes
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.cache import SolutionCache
from fuseplan.search.grouping import Answer, Budget, Grouping, PlanGroups
from fuseplan.search.limits import LIMITS
from fuseplan.search.remat.duplicate_pricing import Recomputing
from fuseplan.search.remat.duplicates import Copies, roots_of, split
from fuseplan.search.remat.materialise import realised
from fuseplan.search.remat.select import computed_once, sample_of, worth_again
from fuseplan.support.stage_timer import Clock
from fuseplan.support.work import LATE

NO_TIME = f"{LATE} plans that compute values again were searched: everything is computed once"


def plan_again(
    lowered: Lowered,
    scheduler: Scheduler,
    planner: Callable[[Resolved | None], PlanGroups],
    once: Grouping,
    budget: Budget,
    clock: Clock,
    limits: Resolved | None = None,
) -> Answer:
    """``once``, a plan within ``limits`` in which everything is computed once, or a better one with the
    program that computes some values again. What is proven is proven of the plans that may.
    ``planner`` makes plans within limits."""
    graph, groups, components = lowered.graph, once.groups, once.components
    uncut_s = LIMITS.remat_s_per_node * len(graph.nodes)
    if budget.deadline_s < uncut_s and roots_of(graph, scheduler.device):
        return Answer(lowered, _unfinished(once, scheduler), limits)
    # What is found in the sample is recalled for the whole.
    known = budget.known_solutions
    budget = replace(budget, cache=SolutionCache() if known is None else known)
    search = Search(planner, budget, time.monotonic() + budget.deadline_s, clock)
    roots = clock.time("heuristics", lambda: worth_again(graph, scheduler, components, groups, limits))
    if roots and components and (limits is None or not limits.shapes_groups):
        sample = clock.time("partition", lambda: sample_of(graph, components, roots))
        small, some = sample.scheduler(scheduler), sample.here(groups)
        tried = search(sample.graph, small, some, sample.first(roots), None)
        roots = sample.everywhere(tried[0].roots) if tried is not None else ()
    found = search(graph, scheduler, groups, roots, limits)
    if found is None:
        return Answer(lowered, once, limits)
    copies, again = found
    device, features = scheduler.device, scheduler.features
    program, again, places = clock.time(
        "copies",
        lambda: realised(lowered, copies, again, lambda new: Scheduler(new.graph, device, new, features)),
    )
    if again.bound_ps is None and again.time_ps >= once.time_ps:  # a heuristic need not gain by copies
        return Answer(lowered, once, limits)
    if again.time_ps > once.time_ps:  # the deadline ended the second search
        kept = replace(again, kernels=once.kernels, refusals=once.refusals, status="FEASIBLE")
        return Answer(lowered, kept, limits)
    if again.time_ps == once.time_ps and again.status == "OPTIMAL" and once.stats.certified:
        stats = replace(again.stats, certified=once.stats.certified)
        again = replace(again, stats=stats)
    # What a value takes that nobody turned out to read was counted in.
    bound_ps = None if again.bound_ps is None else min(again.bound_ps, again.time_ps)
    there = None if limits is None else limits.moved(places)
    return Answer(program, replace(again, bound_ps=bound_ps), there)


def _unfinished(once: Grouping, scheduler: Scheduler) -> Grouping:
    """``once`` as a plan among those that may compute values again."""
    bound_ps = scheduler.floor(tuple(range(len(scheduler.graph.nodes))))
    once = once.uncertified()
    return replace(
        once,
        status="FEASIBLE",
        bound_ps=None if once.bound_ps is None else min(once.bound_ps, bound_ps),
        notes=(*once.notes, NO_TIME),
        proof=None,
    )


@dataclass(frozen=True, slots=True)
class Search:
    """Plans graphs in which some operations have copies, until it is ``expires_at``."""

    planner: Callable[[Resolved | None], PlanGroups]
    budget: Budget
    expires_at: float
    clock: Clock

    def __call__(
        self,
        graph: Graph,
        scheduler: Scheduler,
        groups: Sequence[Nodes],
        roots: Sequence[int],
        limits: Resolved | None,
    ) -> tuple[Copies, Grouping] | None:
        """Copies of ``roots``, but for those of components that then have too many groups, and the best
        plan of them; None if there are none. ``groups`` are a plan without."""
        while True:
            started = time.monotonic()
            copies = split(graph, roots, computed_once(limits))
            if copies is None:
                return None
            pricing, known = Recomputing(copies, scheduler), copies.lifted(groups)
            plan_groups = self.planner(None if limits is None else limits.moved(copies.places))
            self.clock.add([("copies", time.monotonic() - started)])
            left = replace(self.budget.until(self.expires_at), known=known)
            found = plan_groups(copies.graph, pricing, left)
            self.clock.add(found.stats.seconds)
            if not found.crowded:
                return copies, found
            if time.monotonic() >= self.expires_at:
                note = f"{LATE} plans with fewer copies were searched"
                return copies, replace(found, notes=(*found.notes, note))
            crowded = {copies.node[c] for c in found.crowded}
            roots = tuple([n for n in roots if n not in crowded])
