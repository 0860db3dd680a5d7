"""Meet a limit of peak memory by computing values again for late readers instead of storing them.

A value need not be live until a late reader if that reader computes it again (rematerialisation: Chen et al.,
arXiv:1604.06174). The fastest plan that rematerialises (``fuseplan.search.remat.search``) often keeps to a
limit to which no other plan does. Otherwise two ways are tried. One rewrites the program so that the readers
after the highest step recompute the values live there, from inputs of the function and values that are live
anyway. The other leaves every value that could be recomputed to the search, at prices with a surcharge on
memory (``limit``), since more is worth recomputing for its bytes than for its time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from fuseplan.frontend.lower import Lowered
from fuseplan.memory.limit import cost_note, live_over_limit, noted, order_within
from fuseplan.memory.liveness import live_ranges, plan_peak_bound, profile
from fuseplan.memory.order import Order, minimise_peak
from fuseplan.plan.constraints import Resolved
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.plan.notes import limit_reached, renumbered
from fuseplan.plan.options import Options
from fuseplan.planners import Budget, PlanGroups
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler, make_scheduler
from fuseplan.search.constrained_pricing import limited
from fuseplan.search.grouping import Answer, Grouping
from fuseplan.search.remat.duplicate_pricing import DuplicatePricing
from fuseplan.search.remat.duplicates import SplitGraph, operations_of, roots_of, split
from fuseplan.search.remat.materialise import materialised, rewritten
from fuseplan.search.remat.search import Search, computed_once, worth_recomputing
from fuseplan.support.errors import MemoryLimitError
from fuseplan.support.work import Limit, StageTimer, Work, first_reached, limit_of

SMALL_OPERAND = 16
"""An operand that is this many times smaller than the value may be kept live to recompute the value."""

MAX_REWRITES = 6
"""How often the program is rewritten to recompute more values, each time at the peak of the last plan."""


def rematerialised_at_peak(
    lowered: Lowered, kernels: Sequence[Kernel], device: DeviceSpec, once: Collection[int]
) -> tuple[Lowered, list[list[int]]] | None:
    """Rewrite the program so that readers after the highest step of ``kernels`` recompute what is live there.

    Returns:
        The program, and for each operation the nodes that compute it; None if nothing can be recomputed. The
        nodes ``once`` are computed once.
    """
    graph = lowered.graph
    lives = live_ranges(graph, kernels)
    needs = profile(lives, range(len(kernels)))
    top = needs.index(max(needs)) if needs else 0
    live = {r.value for r in lives.ranges if r.writer <= top < r.users[-1]}
    roots = {n for n in roots_of(graph, device) if live.intersection(graph.nodes[n].outputs)}
    while roots:
        copies = split(graph, roots, once)
        if copies is None:
            return None
        costly = {n for n in copies.roots if not _is_recomputable(copies, n, live)}
        if not costly:
            return rewritten(lowered, copies, _before_and_after(copies, kernels, top))
        roots = set(copies.roots) - costly
    return None


def _is_recomputable(copies: SplitGraph, root: int, live: Collection[int]) -> bool:
    """Whether ``root`` follows from copied nodes, and from values that are live, inputs, or small."""
    graph = copies.whole
    root_bytes = sum(graph.values[v].nbytes for v in graph.nodes[root].outputs)
    seen, queue = {root}, [root]
    while queue:
        for v in graph.nodes[queue.pop()].inputs:
            producer = graph.values[v].producer
            if producer < 0 or v in live or graph.values[v].nbytes * SMALL_OPERAND <= root_bytes:
                continue
            if copies.copies[producer] < 2:
                return False
            if producer not in seen:
                seen.add(producer)
                queue.append(producer)
    return True


def _before_and_after(copies: SplitGraph, kernels: Sequence[Kernel], top: int) -> list[tuple[int, ...]]:
    """The nodes that run up to step ``top``, and those that run after it; a copy runs with its readers."""
    graph = copies.graph
    step = {n: k for k, kernel in enumerate(kernels) for n in kernel.spec.nodes}
    late: dict[int, bool] = {}
    for node in reversed(graph.nodes):
        n = copies.node[node.id]
        readers = {r for v in node.outputs for r in graph.consumers[v]}
        if copies.copies[n] < 2 or not readers:
            late[node.id] = step[n] > top
        else:
            late[node.id] = all(late[r] for r in readers)
    return [tuple(n for n in sorted(late) if late[n] == after) for after in (False, True)]


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """The search for a plan of ``lowered`` that keeps to ``limits`` and to a peak of ``max_peak_bytes``."""

    lowered: Lowered
    scheduler: Scheduler
    planner: Callable[[Resolved | None], PlanGroups]
    limits: Resolved
    max_peak_bytes: int
    options: Options
    clock: StageTimer
    reached: list[Limit | None] = field(default_factory=list)
    """The limits that cut short the searches for plans, found or not."""

    def plan(self, once: Grouping, fastest: Answer) -> Answer:
        """The fastest plan found that fits.

        Args:
            once: the fastest plan that computes every operation once, without the limit.
            fastest: the fastest plan of all, without the limit.

        Raises:
            MemoryLimitError: none was found.
        """
        order = order_within(fastest.lowered.graph, fastest.grouping.kernels, self.max_peak_bytes)
        if order.peak_bytes <= self.max_peak_bytes:
            grouping = replace(fastest.grouping, kernels=order.kernels)
            return replace(fastest, grouping=grouping, limits=self._limited(fastest))
        expires_at = time.monotonic() + self.options.deadline_s
        graph, most = self.lowered.graph, self.max_peak_bytes
        every = split(graph, roots_of(graph, self.options.device), computed_once(self.limits))
        if every is None:
            return self._planned(self.lowered, self.limits, self._work(expires_at, self.options.shares))
        attempts = (
            lambda work: self._planned(self.lowered, self.limits, work),
            lambda work: self._rewritten(every, fastest, work),
            lambda work: self._duplicated(every, once, fastest, order, work),
        )
        found, share = [], self.options.shares * len(attempts)
        for attempt in attempts:
            found.append(self._attempt(attempt, self._work(expires_at, share)))
            if isinstance(found[-1], Answer) and found[-1].grouping.time_ps <= fastest.grouping.time_ps:
                break  # The limit costs nothing.
        ended_by = first_reached((limit_reached(fastest.grouping.notes), *self.reached))
        answers = [answer for answer in found if isinstance(answer, Answer)]
        if not answers:
            smallest = [error.smallest_bytes for error in found if isinstance(error, MemoryLimitError)]
            least = min(order.peak_bytes, *smallest)
            raise MemoryLimitError(most, least, self._least_bytes(every), fastest.grouping.bound_ps, ended_by)
        best = min(answers, key=lambda answer: answer.grouping.time_ps)
        bound_ps, proof = fastest.grouping.bound_ps, fastest.grouping.proof
        if best.lowered is not self.lowered and (proof is None or not proof.copied):
            bound_ps = proof = None  # They hold for plans without rematerialisation.
        before, time_ps = fastest.grouping.uncertified(), best.grouping.time_ps
        proven = bound_ps is not None and bound_ps >= time_ps
        here, there = (operations_of(answer.lowered.graph) for answer in (fastest, best))
        notes = renumbered(before.notes, lambda n: there.index(here[n]))
        grouping = replace(
            before,
            kernels=best.grouping.kernels,
            status="OPTIMAL" if proven else "FEASIBLE",
            bound_ps=time_ps if proven else bound_ps,
            notes=noted((*notes, cost_note(before.time_ps, order.peak_bytes, time_ps, most)), ended_by),
            refusals=best.grouping.refusals,
            proof=proof,
        )
        return replace(best, grouping=grouping)

    def _limited(self, answer: Answer) -> Resolved:
        assert answer.limits is not None, "without limits there is none of memory"
        return replace(answer.limits, max_peak_bytes=self.max_peak_bytes)

    def _work(self, expires_at: float, share: int = 1) -> Work:
        """One of ``share`` equal parts of the counted work that a search may do until the deadline."""
        return Work(limit_of(self.options.whole_s) // share, expires_at=expires_at)

    def _budget(self, work: Work) -> Budget:
        return Budget(self.options.deadline_s, asked_s=self.options.whole_s, work=work).until(work.expires_at)

    def _attempt(self, plan: Callable[[Work], Answer | None], work: Work) -> Answer | MemoryLimitError | None:
        try:
            return plan(work)
        except MemoryLimitError as error:
            self.reached.append(error.ended_by)
            return error

    def _rewritten(self, every: SplitGraph, fastest: Answer, work: Work) -> Answer | None:
        """Rematerialise every value that the fastest plan rematerialises, and then the values live at each
        peak that exceeds the limit; plan the program anew. None if nothing is rematerialised."""
        answer, lowest = fastest, math.inf
        free = self._work(work.expires_at)
        for _ in range(MAX_REWRITES):
            order = minimise_peak(answer.lowered.graph, answer.grouping.kernels)
            if free.is_over:
                self.reached.append(free.ended_by)
                break
            if order.peak_bytes >= lowest:
                break
            fastest, lowest = answer, order.peak_bytes
            once = [n for n, (m,) in enumerate(operations_of(answer.lowered.graph)) if every.copies[m] < 2]
            found = rematerialised_at_peak(answer.lowered, order.kernels, self.options.device, once)
            if lowest <= self.max_peak_bytes or found is None:
                break
            lowered, places = found
            assert answer.limits is not None, "without limits there is none of memory"
            answer = self._planned(lowered, answer.limits.moved(places), free)
        if fastest.lowered is self.lowered:
            return None
        return self._planned(fastest.lowered, self._limited(fastest), work)

    def _planned(self, lowered: Lowered, limits: Resolved, work: Work) -> Answer:
        scheduler = make_scheduler(lowered, self.options.device, self.options.features)
        grouping = self.planner(limits)(lowered.graph, scheduler, self._budget(work))
        self.reached.append(limit_reached(grouping.notes))
        return Answer(lowered, grouping, limits)

    def _duplicated(
        self, every: SplitGraph, once: Grouping, fastest: Answer, order: Order, work: Work
    ) -> Answer | None:
        """Plan a graph in which every reader has its own copy of some operations, under the limit.

        The copied operations are all that could be recomputed; or, where that is too much, those whose
        results are live over the limit with those worth recomputing for their time; or the latter only.
        """
        graph, scheduler, free = self.lowered.graph, self.scheduler, replace(self.limits, max_peak_bytes=None)
        few = worth_recomputing(graph, scheduler, once.groups, free)
        budget = self._budget(self._work(work.expires_at))
        search = Search(self.planner, budget, work.expires_at, self.clock)
        some = sorted({*few, *self._live_over_limit(fastest.lowered.graph, order).intersection(every.roots)})
        for roots in dict.fromkeys((every.roots, tuple(some), few)):
            found = search(graph, scheduler, once.groups, roots, free)
            self.reached.append(None if found is None else limit_reached(found[1].notes))
            if found is not None and found[1].time_ps <= fastest.grouping.time_ps:
                break
        if found is None:
            return None
        copies = found[0]
        plan_groups = self.planner(self.limits.moved(copies.places))
        budget = replace(self._budget(work), known=copies.lifted(once.groups))
        grouping = plan_groups(copies.graph, DuplicatePricing(copies, scheduler), budget)
        self.reached.append(limit_reached(grouping.notes))
        program, grouping, places = materialised(self.lowered, copies, grouping, scheduler)
        return Answer(program, grouping, self.limits.moved(places))

    def _live_over_limit(self, graph: Graph, order: Order) -> set[int]:
        """The operations whose results are live where a plan needs more than the limit."""
        operation = operations_of(graph)
        values = live_over_limit(graph, order.kernels, self.max_peak_bytes)
        return {operation[graph.values[v].producer][0] for v in values}

    def _least_bytes(self, every: SplitGraph) -> int:
        """Bytes that every plan needs, with any rematerialisation."""
        limits = self.limits.moved(every.places)
        graph, pricing = limited(every.graph, DuplicatePricing(every, self.scheduler), limits)
        return plan_peak_bound(graph, PriceBook(graph, pricing), math.inf)
