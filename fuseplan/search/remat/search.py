"""Rematerialisation: plan the graph in which chosen operations have a copy for each reader.

``roots_of`` lists the operations that may be worth computing again. Copies of all of them make several times
as many groups, so ``worth_recomputing`` keeps those that a trial finds: some kernel of the best plan without
copies would better compute the value for itself. In the gradient of a GPT-2 block for an H200 these are 7 of
17.
Where copies still make too many groups of a component, its operations are computed once: first the small ones
that lead to the chosen; then, where copies gain nothing, the chosen, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from costmodel.graph import Graph
from fuseplan.frontend.compared import needed_once
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.constraints import Resolved
from fuseplan.plan.notes import FAULTS, Note, NoteKind, note, renumbered
from fuseplan.schedule.pricing import Nodes, PriceBook, Pricing
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.schedule.shared_operands import wide_hubs
from fuseplan.search.grouping import Answer, Budget, Grouping, PlanGroups, break_cycles, sum_prices
from fuseplan.search.limits import LIMITS
from fuseplan.search.remat.duplicate_pricing import DuplicatePricing
from fuseplan.search.remat.duplicates import SplitGraph, roots_of, small_leading, split
from fuseplan.search.remat.materialise import materialised
from fuseplan.search.remat.moves import Moves
from fuseplan.support.digraph import reachable
from fuseplan.support.work import UNCUT, Limit, StageTimer, seconds_of, share_of, unlimited


def plan_rematerialised(
    lowered: Lowered,
    scheduler: Scheduler,
    planner: Callable[[Resolved | None], PlanGroups],
    once: Grouping,
    budget: Budget,
    clock: StageTimer,
    limits: Resolved | None = None,
) -> Answer:
    """Improve ``once``, a plan within ``limits`` that computes everything once, by rematerialisation.

    The answer is ``once``, or a better plan with the program in which some operations stand several times.
    Its bound holds for all plans with the copies of the search that it comes from. ``planner`` makes plans
    within limits.
    """
    graph, groups = lowered.graph, once.groups
    if budget.deadline_s < seconds_of(UNCUT, len(graph.nodes)) and roots_of(graph, scheduler.device):
        return Answer(lowered, _unfinished(once, scheduler), limits)
    expires_at = time.monotonic() + budget.deadline_s
    search = Search(planner, budget, expires_at, clock, improves_start=once.bound_ps is not None)
    roots = clock.time("heuristics", lambda: worth_recomputing(graph, scheduler, groups, limits))
    found = search(graph, scheduler, groups, roots, limits)
    if found is None:
        return Answer(lowered, once, limits)
    copies, again = found
    program, again, places = clock.time("copies", lambda: materialised(lowered, copies, again, scheduler))
    once_of = {node: n for n, nodes in enumerate(places) for node in nodes}
    if again.bound_ps is None and again.time_ps >= once.time_ps:  # a heuristic need not gain by copies
        faults = [n for n in again.notes if isinstance(n, Note) and n.kind in FAULTS]
        if faults and once.bound_ps is not None:  # The first search's proof is of plans without copies.
            once = once.unproven(*renumbered(faults, once_of.__getitem__))
        return Answer(lowered, once, limits)
    if again.time_ps == once.time_ps and _is_as_good(once, again):
        notes = renumbered(again.notes, once_of.__getitem__)
        return Answer(lowered, replace(once, notes=tuple(dict.fromkeys((*once.notes, *notes)))), limits)
    if again.time_ps > once.time_ps:  # the deadline ended the second search
        notes = renumbered(again.notes, once_of.__getitem__)
        kept = replace(again, kernels=once.kernels, refusals=once.refusals, status="FEASIBLE", notes=notes)
        return Answer(lowered, kept, limits)
    if again.time_ps == once.time_ps and again.status == "OPTIMAL" and once.stats.certified:
        stats = replace(again.stats, certified=once.stats.certified)
        again = replace(again, stats=stats)
    # The bound counts the time to write copies that no kernel turned out to read.
    bound_ps = None if again.bound_ps is None else min(again.bound_ps, again.time_ps)
    there = None if limits is None else limits.moved(places)
    return Answer(program, replace(again, bound_ps=bound_ps), there)


def _is_as_good(once: Grouping, again: Grouping) -> bool:
    """Whether neither of two plans is proven, and the bound of ``once`` is no lower."""
    unproven = once.status != "OPTIMAL" != again.status
    return unproven and once.bound_ps is not None and once.bound_ps >= (again.bound_ps or 0)


def _unfinished(once: Grouping, scheduler: Scheduler) -> Grouping:
    """``once`` with the bound of plans that may rematerialise."""
    floor_ps = scheduler.floor(tuple(range(len(scheduler.graph.nodes))))
    bound_ps = None if once.bound_ps is None else min(once.bound_ps, floor_ps)
    cut = note(NoteKind.REMATERIALISATION_CUT, limit=Limit.DEADLINE)
    return replace(once.unproven(cut), bound_ps=bound_ps)


_SHARE_OF_MORE = 0.75
"""A search with copies may do this part of the counted work that is left; the rest is for one with fewer."""


@dataclass(frozen=True, slots=True)
class Search:
    """Plans graphs in which some operations have copies, until ``expires_at``."""

    planner: Callable[[Resolved | None], PlanGroups]
    budget: Budget
    expires_at: float
    clock: StageTimer
    improves_start: bool = False
    """Whether the planner starts from a plan that it is given, which then has copies where single moves of
    them gain."""

    def __call__(
        self,
        graph: Graph,
        scheduler: Scheduler,
        groups: Sequence[Nodes],
        roots: Sequence[int],
        limits: Resolved | None,
    ) -> tuple[SplitGraph, Grouping] | None:
        """The graph with copies of ``roots`` and its best plan; None if nothing can be copied. Of components
        that then have too many groups, first the small operations that lead to roots are computed once; where
        copies still gain nothing, the roots are, too. ``groups`` are a plan without copies."""
        once = computed_once(limits)
        if not scheduler.crosses_hubs:  # Each copy of a hub would have too few readers to be one.
            once |= {graph.values[v].producer for v in wide_hubs(graph).ports}
        best: tuple[SplitGraph, Grouping] | None = None
        gains = False
        while True:
            started = time.monotonic()
            copies = split_all(graph, roots, once)
            if copies is None:  # A plan that gains nothing has a better bound from the search without copies.
                return best if gains else None
            pricing, known = DuplicatePricing(copies, scheduler), copies.lifted(groups)
            plan_groups = self.planner(None if limits is None else limits.moved(copies.places))
            self.clock.add([("copies", time.monotonic() - started)])
            start = self._start(copies, pricing, known, limits)
            left = replace(self.budget.until(self.expires_at), known=start)
            with share_of(left.work, _SHARE_OF_MORE):
                found = plan_groups(copies.graph, pricing, left)
            if start != known:
                found = _no_slower(found, copies.graph, pricing, start)
            self.clock.add(found.stats.seconds)
            gaining = {n for nodes in set(found.groups).difference(known) for n in nodes}
            if best is None or _is_better(found, best[1]):
                best, gains = (copies, found), bool(gaining)
            limit = self.budget.limit_reached(self.expires_at)
            parts = found.with_too_many_copies
            if parts and limit is not None:
                told = note(NoteKind.FEWER_COPIES_CUT, limit=limit)
                return best[0], replace(best[1], notes=(*best[1].notes, told))
            too_many = {copies.node[c] for part in parts for c in part}
            idle = {copies.node[c] for part in parts if gaining.isdisjoint(part) for c in part}
            fewer = tuple([n for n in roots if n not in idle])
            if small := too_many.intersection(small_leading(copies)):
                once |= small
            elif fewer != tuple(roots):
                roots = fewer
            else:
                return best

    def _start(
        self, copies: SplitGraph, pricing: DuplicatePricing, known: Sequence[Nodes], limits: Resolved | None
    ) -> tuple[Nodes, ...]:
        """The plan to start from: ``known``, with copies moved to kernels that better compute them again."""
        if not self.improves_start or (limits is not None and limits.max_peak_bytes is not None):
            return tuple(known)
        moves = Moves(copies, pricing, known, limits)
        work = self.budget.work or unlimited()
        return self.clock.time("heuristics", lambda: moves.improved(work, self.expires_at))


def split_all(graph: Graph, roots: Sequence[int], once: frozenset[int]) -> SplitGraph | None:
    """As ``split``, but small operations that only lead to ``roots`` are computed once where their copies are
    too many readers for another of the roots to be copied."""
    copies = split(graph, roots, once)
    once |= needed_once(graph)
    while copies is not None:
        copied = frozenset(copies.copied)

        def copied_readers(n: int, copied: frozenset[int] = copied) -> Iterator[int]:
            yield from {r for v in graph.nodes[n].outputs for r in graph.consumers[v] if r in copied}

        lost = set(roots).difference(copied, once)
        small = reachable(lost, copied_readers).intersection(small_leading(copies))
        fewer = split(graph, roots, once | small) if small else None
        if fewer is None or lost.isdisjoint(fewer.copied):
            break
        copies, once = fewer, once | small
    return copies


def _no_slower(found: Grouping, graph: Graph, pricing: Pricing, start: Sequence[Nodes]) -> Grouping:
    """``found``, or the faster plan ``start`` that its search began with. A search that the deadline ends may
    lose it, as kernels across hubs are divided until the last step."""
    if found.bound_ps is None or found.status == "OPTIMAL":
        return found
    book = PriceBook(graph, pricing)
    if sum_prices(book, start).time_ps >= found.time_ps:
        return found
    ordered, _ = break_cycles(graph, book, start)
    kernels = tuple(map(book.kernel, ordered))
    return replace(found.uncertified(), kernels=kernels, status="FEASIBLE")


def _is_better(found: Grouping, other: Grouping) -> bool:
    """Whether a plan with fewer copies is no slower, or proven and as fast within the tolerance."""
    is_proven = found.status == "OPTIMAL" and other.status != "OPTIMAL"
    tolerance_ps = other.time_ps * LIMITS.slack if is_proven else 0
    return found.time_ps <= other.time_ps + tolerance_ps


def computed_once(limits: Resolved | None) -> frozenset[int]:
    """The operations that must not be copied: those of ``must_fuse``."""
    return frozenset() if limits is None else limits.fused


def worth_recomputing(
    graph: Graph, scheduler: Scheduler, groups: Sequence[Nodes], limits: Resolved | None = None
) -> Nodes:
    """The operations that could be computed again; of many, those that one kernel of ``groups``, or all
    kernels that read the result, would better compute for themselves, with the operations that lead there."""
    roots = roots_of(graph, scheduler.device)
    if not scheduler.device.capabilities.emits_kernels:
        # What tiled loops compute again was decided before the search (``fuseplan.passes.recompute_large``).
        nested = {n for offer in scheduler.offers for n in offer}
        roots = tuple([n for n in roots if n not in nested])
    if len(roots) <= LIMITS.untried_copies:
        return roots
    copies = split(graph, roots, computed_once(limits))
    if copies is None:
        return ()
    moves = Moves(copies, DuplicatePricing(copies, scheduler), copies.lifted(groups), limits)
    return tuple(sorted(moves.worthwhile()))
