"""Which values may be computed again: chosen before the search, from the best plan without.

With copies of everything that could be computed again, there are several times as many groups as
without. Of many, those are left to the search that some kernel of the best plan without would better compute
for itself. In the gradient of a GPT-2 block for an H200 these are 7 of 17; it is planned in half of
the time, and the plan is the same. And where copies still make too many groups of a component, all
in it is computed once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from costmodel.graph import Graph
from fuseplan.config import Options
from fuseplan.constrained import limited
from fuseplan.constraints import Resolved
from fuseplan.copies import Copies, roots_of, split
from fuseplan.lower import Lowered
from fuseplan.plan import already_optimal
from fuseplan.planners import Budget, PlanGroups
from fuseplan.planners.base import Grouping, left_s
from fuseplan.pricing import Nodes, Price, PriceBook
from fuseplan.recomputed import realised
from fuseplan.recomputing import Recomputing
from fuseplan.schedule import Scheduler

if TYPE_CHECKING:
    from fuseplan.planner import Clock


_FEW = 6
"""So many values are all left to the search: a GPT-2 block has 5, and the best plan of it on a GPU
computes one again that a kernel would not, were the others as they are."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A program, its kernels, and the limits that they keep to, by node of the program."""

    lowered: Lowered
    grouping: Grouping
    limits: Resolved | None

    @property
    def time_ps(self) -> int:
        return sum(k.cost.time_ps for k in self.grouping.kernels)


def plan_again(
    lowered: Lowered,
    scheduler: Scheduler,
    planner: Callable[[Resolved | None], PlanGroups],
    once: Grouping,
    options: Options,
    clock: Clock,
    limits: Resolved | None = None,
) -> Answer:
    """``once``, a plan within ``limits`` in which everything is computed once, or a better one with the
    program that computes some values again. What is proven is proven of the plans that may.
    ``planner`` makes plans within limits."""
    graph = lowered.graph
    roots = clock.time("heuristics", lambda: worth_again(graph, scheduler, once.groups, limits))
    expires_at = time.monotonic() + options.deadline_s
    found = search_again(graph, scheduler, planner, once, roots, limits, expires_at, clock)
    if found is None:
        return Answer(lowered, once, limits)
    copies, again = found
    program, again, places = realised(
        lowered, copies, again, lambda new: Scheduler(new.graph, options.device, new, options.features)
    )
    best_ps, once_ps = (sum(k.cost.time_ps for k in grouping.kernels) for grouping in (again, once))
    if best_ps > once_ps:  # the deadline ended the second search
        kept = replace(again, kernels=once.kernels, refusals=once.refusals, status="FEASIBLE")
        return Answer(lowered, kept, limits)
    if best_ps == once_ps and again.status == "OPTIMAL" and once.stats.certified:
        stats = replace(again.stats, certified=once.stats.certified)
        again = replace(again, stats=stats, notes=(*again.notes, already_optimal(once.stats.certified)))
    # What a value takes that nobody turned out to read was counted in.
    bound_ps = None if again.bound_ps is None else min(again.bound_ps, best_ps)
    there = None if limits is None else limits.moved(places)
    return Answer(program, replace(again, bound_ps=bound_ps), there)


def search_again(
    graph: Graph,
    scheduler: Scheduler,
    planner: Callable[[Resolved | None], PlanGroups],
    once: Grouping,
    roots: Sequence[int],
    limits: Resolved | None,
    expires_at: float,
    clock: Clock,
) -> tuple[Copies, Grouping] | None:
    """Copies of ``roots``, but for those of components that then have too many groups, and a plan of
    them; None if there are none."""
    while True:
        copies = split(graph, roots, computed_once(limits))
        if copies is None:
            return None
        budget = Budget(left_s(expires_at), known=copies.lifted(once.groups))
        plan_groups = planner(None if limits is None else limits.moved(copies.places))
        again = plan_groups(copies.graph, Recomputing(copies, scheduler), budget)
        clock.add(again.stats.seconds)
        if not again.crowded or time.monotonic() >= expires_at:
            return copies, again
        crowded = {copies.node[c] for c in again.crowded}
        roots = tuple(n for n in roots if n not in crowded)


def computed_once(limits: Resolved | None) -> frozenset[int]:
    """What nothing may compute again: what must share a kernel."""
    return frozenset() if limits is None else limits.fused


def worth_again(
    graph: Graph, scheduler: Scheduler, groups: Sequence[Nodes], limits: Resolved | None = None
) -> tuple[int, ...]:
    """The operations that could be computed again; of many, those that one kernel of ``groups``, or all
    that read the result, would better compute for themselves, with what leads there."""
    roots = roots_of(graph, scheduler.device)
    if len(roots) <= _FEW:
        return roots
    every = split(graph, roots, computed_once(limits))
    return () if every is None else tuple(sorted(_Trials(every, scheduler, groups, limits).worthwhile()))


class _Trials:
    """Kernels of a plan, each with all copies of its operations, and what moving some would cost."""

    def __init__(
        self, copies: Copies, scheduler: Scheduler, groups: Sequence[Nodes], limits: Resolved | None
    ) -> None:
        self._copies, self._graph = copies, copies.graph
        there = None if limits is None else limits.moved(copies.places)
        self._book = PriceBook(*limited(copies.graph, Recomputing(copies, scheduler), there))
        kernel_of = {n: g for g, nodes in enumerate(groups) for n in nodes}
        self._kernel = [kernel_of[n] for n in copies.node]
        """For each copy, where its operation is computed."""
        self._members: list[list[int]] = [[] for _ in groups]
        for c, g in enumerate(self._kernel):
            self._members[g].append(c)
        self._now_ps: dict[int, float] = {}
        self._roots = frozenset(copies.roots)
        self._several = {c for c, n in enumerate(copies.node) if copies.copies[n] > 1}

    def worthwhile(self) -> Iterator[int]:
        found: set[int] = set()
        for moves in self._moves():
            wanted = {self._copies.node[c] for moved, _ in moves for c in moved} & self._roots
            if not wanted <= found and self._extra_ps(moves) < 0:
                found |= wanted
        yield from found

    def _moves(self) -> Iterator[list[tuple[list[int], int]]]:
        """For each root, each way to compute it again: copies, and the kernel that they move to."""
        of_root: dict[int, list[int]] = defaultdict(list)
        for c, n in enumerate(self._copies.node):
            if n in self._roots:
                of_root[n].append(c)
        for copies in of_root.values():
            to: dict[int, list[int]] = defaultdict(list)
            for c in copies:
                for reader in {r for v in self._graph.nodes[c].outputs for r in self._graph.consumers[v]}:
                    if self._kernel[reader] != self._kernel[c]:
                        to[self._kernel[reader]].append(c)
            for deep in (False, True):
                each = [(self._cone(some, g, deep), g) for g, some in to.items()]
                yield from ([one] for one in each)
                if len(each) > 1:
                    yield each

    def _cone(self, copies: Iterable[int], g: int, deep: bool) -> list[int]:
        """``copies`` with what leads to them and is computed again with them; if ``deep``, with all
        copies that they need, as far as kernel ``g`` does not compute them anyway."""
        cone: dict[int, None] = {}
        waiting = list(copies)
        while waiting:
            c = waiting.pop()
            if c in cone or self._kernel[c] == g:
                continue
            cone[c] = None
            makers = (self._graph.values[v].producer for v in self._graph.nodes[c].inputs)
            for m in makers:
                if m in self._several and (deep or self._copies.node[m] not in self._roots):
                    waiting.append(m)
        return list(cone)

    def _extra_ps(self, moves: Sequence[tuple[list[int], int]]) -> float:
        """Picoseconds that the plan takes more after the moves; infinity if it cannot be."""
        after: dict[int, set[int]] = {}
        for moved, g in moves:
            after.setdefault(g, set(self._members[g])).update(moved)
            for c in moved:
                source = self._kernel[c]
                after.setdefault(source, set(self._members[source])).discard(c)
        extra = 0.0
        for g, nodes in after.items():
            if g not in self._now_ps:
                self._now_ps[g] = self._price_ps(self._members[g])
            extra += self._price_ps(nodes) - self._now_ps[g]
        return extra

    def _price_ps(self, nodes: Iterable[int]) -> float:
        group = tuple(sorted(nodes))
        price = self._book.price(group) if group else Price(0, 0, 0)
        return price.time_ps if isinstance(price, Price) else float("inf")
