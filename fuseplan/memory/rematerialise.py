"""Plans under a limit in which some values are computed again: what memory wants most.

A value that waits for a late reader need not be there meanwhile where the reader computes it again (as
rematerialisation: Chen et al., arXiv:1604.06174). The fastest plan that may do so
(``fuseplan.search.remat.search``) often fits where none does in which everything is computed once. Else
every value that could be computed again is left to the search, at prices that make memory dear
(``fuseplan.memory.limit``): much is worth computing again for its bytes that is not for its time.

A program that needs less memory where a plan needs the most: values wait for nobody that can be
computed again from what is there anyway.

Those who read such a value after the highest step compute it then (rematerialisation: Chen et al.,
arXiv:1604.06174), from inputs of the function and from values that wait for other reasons.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from fuseplan.frontend.lower import Lowered
from fuseplan.memory.limit import arrange_within, noted, over_limit, slowed
from fuseplan.memory.liveness import Lives, lives_of, profile
from fuseplan.memory.order import Order, least_peak
from fuseplan.memory.plan_bound import least_peak_of_any
from fuseplan.plan.constraints import Resolved
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.plan.options import Options
from fuseplan.planners import Budget, PlanGroups
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.constrained_pricing import limited
from fuseplan.search.grouping import Answer, Grouping
from fuseplan.search.remat.duplicate_pricing import Recomputing
from fuseplan.search.remat.duplicates import Copies, operations_of, roots_of, split
from fuseplan.search.remat.materialise import realised, rewritten
from fuseplan.search.remat.search import Search
from fuseplan.search.remat.select import computed_once, worth_again
from fuseplan.support.errors import MemoryLimitError
from fuseplan.support.stage_timer import Clock
from fuseplan.support.work import Work, ended, limit_of

_SMALL = 16
"""What is so many times smaller than the value may wait in its place."""


def computed_late(
    lowered: Lowered, kernels: Sequence[Kernel], device: DeviceSpec, once: Collection[int]
) -> tuple[Lowered, list[list[int]]] | None:
    """The program in which later readers compute again what is in the way at the highest step of
    ``kernels``, which are in order, and for each operation the nodes that compute it; None if nothing
    is. The nodes ``once`` are computed once."""
    graph = lowered.graph
    lives = lives_of(graph, kernels)
    needs = profile(lives, range(len(kernels)))
    top = needs.index(max(needs, default=0)) if needs else 0
    waiting = _waiting(graph, lives, top)
    roots = {n for n in roots_of(graph, device) if waiting.intersection(graph.nodes[n].outputs)}
    while roots:
        copies = split(graph, roots, once)
        if copies is None:
            return None
        costly = {n for n in copies.roots if not _is_fed(copies, n, waiting)}
        if not costly:
            return rewritten(lowered, copies, _early_and_late(copies, kernels, top))
        roots = set(copies.roots) - costly
    return None


def _waiting(graph: Graph, lives: Lives, top: int) -> set[int]:
    """The values that are there at a step and that later ones use."""
    return {
        v
        for v, writer, users in zip(lives.values, lives.writers, lives.users, strict=True)
        if writer <= top < users[-1]
    }


def _is_fed(copies: Copies, root: int, waiting: Collection[int]) -> bool:
    """Whether all is there, or small, that ``root`` is computed from."""
    graph = copies.whole
    made = sum(graph.values[v].nbytes for v in graph.nodes[root].outputs)
    seen, queue = {root}, [root]
    while queue:
        for v in graph.nodes[queue.pop()].inputs:
            maker = graph.values[v].producer
            if maker < 0 or v in waiting or graph.values[v].nbytes * _SMALL <= made:
                continue
            if copies.copies[maker] < 2:
                return False
            if maker not in seen:
                seen.add(maker)
                queue.append(maker)
    return True


def _early_and_late(copies: Copies, kernels: Sequence[Kernel], top: int) -> list[tuple[int, ...]]:
    """The nodes that run up to the highest step, and those after; copies with their readers."""
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


_ROUNDS = 6
"""Of computing more values again for later readers, each where the last plan needs the most."""


@dataclass(frozen=True, slots=True)
class Within:
    """Looks for plans of ``lowered`` that keep to ``limits``, a peak among them."""

    lowered: Lowered
    scheduler: Scheduler
    planner: Callable[[Resolved | None], PlanGroups]
    limits: Resolved
    most_bytes: int
    options: Options
    clock: Clock
    cut: list[str] = field(default_factory=list)
    """The notes of all plans that were looked at, and what cut those short that were not found."""

    def plan(self, once: Grouping, fastest: Answer) -> Answer:
        """The fastest plan found that fits. ``once`` is the fastest one in which everything is
        computed once, ``fastest`` that of all, both whatever they need.

        Raises:
            MemoryLimitError: none was found.
        """
        order = arrange_within(fastest.lowered.graph, fastest.grouping.kernels, self.most_bytes)
        if order.peak_bytes <= self.most_bytes:
            grouping = replace(fastest.grouping, kernels=order.kernels)
            return replace(fastest, grouping=grouping, limits=self._limited(fastest))
        expires_at = time.monotonic() + self.options.deadline_s
        graph, most = self.lowered.graph, self.most_bytes
        every = split(graph, roots_of(graph, self.options.device), computed_once(self.limits))
        if every is None:
            return self._planned(self.lowered, self.limits, self._work(expires_at, self.options.shares))
        attempts = (
            lambda work: self._planned(self.lowered, self.limits, work),
            lambda work: self._later(every, fastest, work),
            lambda work: self._again(every, once, fastest, order, work),
        )
        found, share = [], self.options.shares * len(attempts)
        for attempt in attempts:
            found.append(self._attempt(attempt, self._work(expires_at, share)))
            if isinstance(found[-1], Answer) and found[-1].grouping.time_ps <= fastest.grouping.time_ps:
                break  # The limit costs nothing.
        why = ended((*fastest.grouping.notes, *self.cut))
        answers = [answer for answer in found if isinstance(answer, Answer)]
        if not answers:
            smallest = [error.smallest_bytes for error in found if isinstance(error, MemoryLimitError)]
            least = min(order.peak_bytes, *smallest)
            raise MemoryLimitError(most, least, self._least_bytes(every), fastest.grouping.bound_ps, why)
        best = min(answers, key=lambda answer: answer.grouping.time_ps)
        bound_ps, proof = fastest.grouping.bound_ps, fastest.grouping.proof
        if best.lowered is not self.lowered and (proof is None or not proof.roots):
            bound_ps = proof = None  # is of plans that compute everything once
        before, time_ps = fastest.grouping.uncertified(), best.grouping.time_ps
        proven = bound_ps is not None and bound_ps >= time_ps
        grouping = replace(
            before,
            kernels=best.grouping.kernels,
            status="OPTIMAL" if proven else "FEASIBLE",
            bound_ps=time_ps if proven else bound_ps,
            notes=noted((*before.notes, slowed(before.time_ps, order.peak_bytes, time_ps, most)), why),
            refusals=best.grouping.refusals,
            proof=proof,
        )
        return replace(best, grouping=grouping)

    def _limited(self, answer: Answer) -> Resolved:
        assert answer.limits is not None, "without limits there is none of memory"
        return replace(answer.limits, max_peak_bytes=self.most_bytes)

    def _work(self, expires_at: float, share: int = 1) -> Work:
        """One of ``share`` equal parts of what a search may do until the deadline."""
        return Work(limit_of(self.options.whole_s) // share, expires_at=expires_at)

    def _budget(self, work: Work) -> Budget:
        return Budget(self.options.deadline_s, asked_s=self.options.whole_s, work=work).until(work.expires_at)

    def _attempt(self, plan: Callable[[Work], Answer | None], work: Work) -> Answer | MemoryLimitError | None:
        try:
            return plan(work)
        except MemoryLimitError as error:
            self.cut.append(error.ended)
            return error

    def _later(self, every: Copies, fastest: Answer, work: Work) -> Answer | None:
        """What the fastest plan computes again computed again, and for later readers what is in the
        way of the limit then; all kernels chosen anew. None if that is the program as it was."""
        answer, lowest = fastest, math.inf
        free = self._work(work.expires_at)
        for _ in range(_ROUNDS):
            order = least_peak(answer.lowered.graph, answer.grouping.kernels)
            if free.is_over:
                self.cut.append(free.why)
                break
            if order.peak_bytes >= lowest:
                break
            fastest, lowest = answer, order.peak_bytes
            once = [n for n, (m,) in enumerate(operations_of(answer.lowered.graph)) if every.copies[m] < 2]
            found = computed_late(answer.lowered, order.kernels, self.options.device, once)
            if lowest <= self.most_bytes or found is None:
                break
            lowered, places = found
            assert answer.limits is not None, "without limits there is none of memory"
            answer = self._planned(lowered, answer.limits.moved(places), free)
        if fastest.lowered is self.lowered:
            return None
        return self._planned(fastest.lowered, self._limited(fastest), work)

    def _planned(self, lowered: Lowered, limits: Resolved, work: Work) -> Answer:
        grouping = self.planner(limits)(lowered.graph, self._schedule(lowered), self._budget(work))
        self.cut.extend(grouping.notes)
        return Answer(lowered, grouping, limits)

    def _again(
        self, every: Copies, once: Grouping, fastest: Answer, order: Order, work: Work
    ) -> Answer | None:
        """Copies computed for whom that is best where memory is dear: of all that could be computed
        again, or where that is too much of what is in the way, or of what is worth it for its time."""
        graph, scheduler, free = self.lowered.graph, self.scheduler, replace(self.limits, max_peak_bytes=None)
        few = worth_again(graph, scheduler, once.components, once.groups, free)
        budget = self._budget(self._work(work.expires_at))
        search = Search(self.planner, budget, work.expires_at, self.clock)
        some = sorted({*few, *self._in_the_way(fastest.lowered.graph, order).intersection(every.roots)})
        for roots in dict.fromkeys((every.roots, tuple(some), few)):
            found = search(graph, scheduler, once.groups, roots, free)
            self.cut.extend(() if found is None else found[1].notes)
            if found is not None and found[1].time_ps <= fastest.grouping.time_ps:
                break
        if found is None:
            return None
        copies = found[0]
        plan_groups = self.planner(self.limits.moved(copies.places))
        budget = replace(self._budget(work), known=copies.lifted(once.groups))
        grouping = plan_groups(copies.graph, Recomputing(copies, scheduler), budget)
        self.cut.extend(grouping.notes)
        program, grouping, places = realised(self.lowered, copies, grouping, self._schedule)
        return Answer(program, grouping, self.limits.moved(places))

    def _in_the_way(self, graph: Graph, order: Order) -> set[int]:
        """The operations whose results are there where a plan needs more than the limit."""
        operation = operations_of(graph)
        values = over_limit(graph, order.kernels, self.most_bytes)
        return {operation[graph.values[v].producer][0] for v in values}

    def _schedule(self, lowered: Lowered) -> Scheduler:
        return Scheduler(lowered.graph, self.options.device, lowered, self.options.features)

    def _least_bytes(self, every: Copies) -> int:
        """What every plan needs, whatever it computes again."""
        limits = self.limits.moved(every.places)
        graph, pricing = limited(every.graph, Recomputing(every, self.scheduler), limits)
        return least_peak_of_any(graph, PriceBook(graph, pricing), math.inf)
