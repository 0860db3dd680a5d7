"""Plan under a limit of peak memory: exact search, and a price on bytes kept alive.

The fastest plan of all, in its order of least peak, often fits, and then keeps its proof. Otherwise a small
graph is searched exactly (``exact.plan_exactly``). For a larger one, the planner plans again at prices with a
surcharge on each byte written for later kernels: a Lagrange multiplier of the limit, which is raised until a
plan fits and then bisected. The fastest of these plans that fits is the answer.

A planner takes groups of equal structure to cost the same, so the surcharge must follow from structure. A
value that is live at the peak puts the surcharge on the results of every node of its producer's structure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from costmodel.graph import Graph, arrays_of
from costmodel.kernel import KernelSpec
from costmodel.memory import is_bitcast
from fuseplan.memory.exact import ExactOptions, plan_exactly
from fuseplan.memory.liveness import live_ranges, plan_peak_bound, profile
from fuseplan.memory.order import Order, OrderOptions, minimise_peak
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.plan.notes import AnyNote, Note, NoteKind, limit_reached, note
from fuseplan.planners import PlanGroups
from fuseplan.schedule.pricing import Nodes, PriceBook, Pricing, PricingWrapper
from fuseplan.schedule.structure import Signatures
from fuseplan.search.grouping import Budget, Grouping
from fuseplan.support.errors import MemoryLimitError, Verdict
from fuseplan.support.work import Limit, Work, limit_of

SURCHARGE_UNIT_BYTES = 2**20
"""A surcharge is an integer number of picoseconds for this many bytes."""


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Limits of the search for a plan within a limit of memory."""

    exact: ExactOptions = field(default_factory=ExactOptions)
    raises: int = 4
    """Plans made with a surcharge that grows by ``factor`` from one to the next, until one fits."""
    factor: int = 8
    bisections: int = 5
    """Plans made with surcharges between the least that fits and the greatest that does not."""


DEFAULTS = LimitOptions()


class SurchargedPricing(PricingWrapper):
    """Prices with a surcharge on the bytes that kernels write, 0 at first. Each group is scheduled once,
    however often the surcharge changes."""

    def __init__(self, graph: Graph, pricing: Pricing) -> None:
        super().__init__(pricing)
        self.graph = graph
        self.ps_per_unit = 0
        self.book = PriceBook(graph, pricing)
        """Prices without the surcharge."""
        self._structure = [self.book.signatures.of((node.id,)).key for node in graph.nodes]
        self._charged: set[tuple[int, ...]] = set()
        self.merges_copies = bool(self.book.copies)
        self._array = arrays_of(graph)
        self._copies = {n: copies for copies in self.book.copies for n in copies}
        self._outputs = frozenset(graph.outputs)

    def charge(self, values: Iterable[int]) -> None:
        """Put the surcharge on ``values``, and on all results of nodes of equal structure."""
        producers = (self.graph.values[v].producer for v in values)
        copies = (m for n in producers if n >= 0 for m in self._copies.get(n, (n,)))
        self._charged.update(self._structure[n] for n in copies)

    def surcharge_ps(self, spec: KernelSpec) -> int:
        """Picoseconds added to the kernel's time."""
        if not self.ps_per_unit or is_bitcast(self.graph, spec):
            return 0
        return sum(self._surcharge_ps(a.value) for a in spec.writes)

    def _surcharge_ps(self, v: int) -> int:
        value = self.graph.values[v]
        if self._structure[value.producer] not in self._charged:
            return 0
        return value.nbytes * self.ps_per_unit // SURCHARGE_UNIT_BYTES

    def floor(self, nodes: Nodes) -> int:
        """As ``Pricing.floor``, with the surcharge on all that ``nodes`` write however they are grouped."""
        floor_ps = self.book.floor(nodes)
        if not self.ps_per_unit:
            return floor_ps
        graph, inside = self.graph, set(nodes)
        written: dict[int, int] = {}
        for n in nodes:
            if graph.nodes[n].bitcast:
                continue
            for v in graph.nodes[n].outputs:
                if v in self._outputs or not inside.issuperset(graph.consumers[v]):
                    array = self._array[v] if self.merges_copies else v
                    written[array] = self._surcharge_ps(v)
        return floor_ps + sum(written.values())

    def least(self, nodes: Nodes) -> int:
        """As ``Pricing.least``."""
        return max(self.floor(nodes), super().least(nodes))

    def cache_key(self, nodes: Nodes, signatures: Signatures) -> str | None:
        """As ``Pricing.cache_key``; nothing is cached while there is a surcharge."""
        return None if self.ps_per_unit else self.book.cache_key(nodes)

    def price(self, nodes: Nodes) -> Kernel | Verdict:
        """As ``Pricing.price``, with the surcharge."""
        answer = self.book.price(nodes)
        if isinstance(answer, Verdict):
            return answer
        return self._plus(self.book.kernel(nodes), 1)

    def unsettled(self) -> Self:
        """As ``Pricing.unsettled``."""
        other = super().unsettled()
        other.book = PriceBook(self.graph, other._pricing)
        return other

    def without_surcharge(self, kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
        """Kernels that a planner chose by these prices, at their cost without the surcharge."""
        return tuple(self._plus(kernel, -1) for kernel in kernels)

    def _plus(self, kernel: Kernel, sign: int) -> Kernel:
        extra = sign * self.surcharge_ps(kernel.spec)
        if not extra:
            return kernel
        surcharge_ps = kernel.cost.surcharge_ps + extra
        return replace(kernel, cost=replace(kernel.cost, surcharge_ps=surcharge_ps))


def plan_within(
    graph: Graph,
    pricing: Pricing,
    budget: Budget,
    plan_groups: PlanGroups,
    max_peak_bytes: int,
    options: LimitOptions = DEFAULTS,
) -> Grouping:
    """The fastest kernels found whose temporaries need at most ``max_peak_bytes`` at once, in an order that
    keeps to it.

    ``budget.work`` counts the searches that follow that for the fastest plan of all. ``status`` is OPTIMAL if
    no plan under the limit is faster, which is proven where the fastest plan of all fits or the graph is
    small; ``bound_ps`` is a lower bound on every plan under the limit.

    Raises:
        MemoryLimitError: no plan that fits was found; it names the smallest peak that was.
    """
    work = budget.work
    if work is None:
        work = Work(limit_of(budget.whole_s), expires_at=time.monotonic() + budget.deadline_s)
    priced = SurchargedPricing(graph, pricing)
    fastest = plan_groups(graph, priced, replace(budget, work=None))
    order = order_within(graph, fastest.kernels, max_peak_bytes)
    if order.peak_bytes <= max_peak_bytes:
        return replace(fastest, kernels=order.kernels)
    # A planner without a bound may search another space, in which the exact plan is not.
    if fastest.bound_ps is not None and not priced.merges_copies:
        exact = plan_exactly(graph, pricing, max_peak_bytes, work, options.exact)
        if exact is not None and exact.kernels is not None:
            best = minimise_peak(graph, exact.kernels)
            return _answer(fastest, order, best, max_peak_bytes, time_of(best.kernels))
        if exact is not None:
            raise MemoryLimitError(
                max_peak_bytes, exact.smallest_bytes, exact.smallest_bytes, fastest.bound_ps
            )
    least_bytes = plan_peak_bound(graph, priced.book, math.inf)
    shared = replace(budget, work=work)
    ended_by = limit_reached(fastest.notes)
    search = _SurchargeSearch(
        graph, priced, shared, plan_groups, max_peak_bytes, work, order, ended_by, options
    )
    found = search.run(order)
    ended_by = work.ended_by if work.is_over else search.ended_by
    if found is None:
        raise MemoryLimitError(
            max_peak_bytes, search.lowest.peak_bytes, least_bytes, fastest.bound_ps, ended_by
        )
    answer = _answer(fastest, order, found, max_peak_bytes, fastest.bound_ps)
    return replace(answer, notes=noted(answer.notes, ended_by))


def order_within(graph: Graph, kernels: Sequence[Kernel], max_peak_bytes: int) -> Order:
    """The order of least peak, without tolerance where that decides whether the kernels fit."""
    order = minimise_peak(graph, kernels)
    if order.bound_bytes <= max_peak_bytes < order.peak_bytes:
        order = minimise_peak(graph, kernels, OrderOptions(tolerance=0))
    return order


def _answer(
    fastest: Grouping, before: Order, best: Order, max_peak_bytes: int, bound_ps: int | None
) -> Grouping:
    """``best`` in place of the fastest plan, with a note on the cost of the limit."""
    time_ps = time_of(best.kernels)
    cost = cost_note(time_of(fastest.kernels), before.peak_bytes, time_ps, max_peak_bytes)
    return replace(
        fastest.uncertified(),
        kernels=best.kernels,
        status="OPTIMAL" if bound_ps == time_ps else "FEASIBLE",
        bound_ps=bound_ps,
        notes=(*fastest.notes, cost),
    )


def noted(notes: tuple[AnyNote, ...], ended_by: Limit | None) -> tuple[AnyNote, ...]:
    """``notes`` with one on the limit that cut short the search within the limit of memory, unless they name
    one already."""
    if ended_by is None or limit_reached(notes) is not None:
        return notes
    return (*notes, note(NoteKind.MEMORY_CUT, limit=ended_by))


def cost_note(fastest_ps: int, fastest_bytes: int, time_ps: int, max_peak_bytes: int) -> Note:
    """The note on the time that the limit costs."""
    percent = 100 * max(time_ps - fastest_ps, 0) / max(fastest_ps, 1)
    return note(
        NoteKind.MEMORY_COST, limit_bytes=max_peak_bytes, percent=percent, fastest_bytes=fastest_bytes
    )


def time_of(kernels: Sequence[Kernel]) -> int:
    """Picoseconds of kernels that run one after another."""
    return sum(k.cost.time_ps for k in kernels)


@dataclass(slots=True)
class _SurchargeSearch:
    """Plans at rising and then bisected surcharges."""

    graph: Graph
    priced: SurchargedPricing
    budget: Budget
    plan_groups: PlanGroups
    max_peak_bytes: int
    work: Work
    lowest: Order
    """The plan of the lowest peak so far."""
    ended_by: Limit | None
    """The limit that has cut a plan short, if one has."""
    options: LimitOptions
    best: Order | None = None
    """The fastest plan that fits."""

    def run(self, order: Order) -> Order | None:
        """The fastest plan found that fits; ``order`` is the fastest plan of all, which does not."""
        self._charge(order)
        written = sum(k.cost.hbm_bytes for k in order.kernels)
        # The first surcharge on a byte is the plan's time per byte moved.
        rate = max(time_of(order.kernels) * SURCHARGE_UNIT_BYTES // max(written, 1), 1)
        too_low = 0
        for _ in range(self.options.raises):
            if self.work.is_over or self._fits(rate):
                break
            too_low, rate = rate, rate * self.options.factor
        enough = rate
        for _ in range(self.options.bisections):
            middle = (too_low + enough) // 2
            if self.best is None or self.work.is_over or not too_low < middle < enough:
                break
            if self._fits(middle):
                enough = middle
            else:
                too_low = middle
        return self.best

    def _fits(self, ps_per_unit: int) -> bool:
        """Plan at this surcharge; whether the plan keeps to the limit."""
        self.priced.ps_per_unit = ps_per_unit
        left = self.budget.until(self.work.expires_at)
        found = self.plan_groups(self.graph, self.priced, left)
        self.ended_by = self.ended_by or limit_reached(found.notes)
        kernels = self.priced.without_surcharge(found.kernels)
        order = order_within(self.graph, kernels, self.max_peak_bytes)
        self._keep(order)
        if order.peak_bytes > self.max_peak_bytes:
            self._charge(order)
            return False
        return True

    def _keep(self, order: Order) -> None:
        if order.peak_bytes < self.lowest.peak_bytes:
            self.lowest = order
        fits = order.peak_bytes <= self.max_peak_bytes
        if fits and (self.best is None or _rank(order.kernels) < _rank(self.best.kernels)):
            self.best = order

    def _charge(self, order: Order) -> None:
        self.priced.charge(live_over_limit(self.graph, order.kernels, self.max_peak_bytes))


def live_over_limit(graph: Graph, kernels: Sequence[Kernel], max_peak_bytes: int) -> list[int]:
    """The temporaries that are live while some kernel runs and more than the limit is in use."""
    lives = live_ranges(graph, kernels)
    needs = profile(lives, range(len(kernels)))
    over = {step for step, need in enumerate(needs) if need > max_peak_bytes}
    return [r.value for r in lives.ranges if not over.isdisjoint(range(r.writer, r.users[-1] + 1))]


def _rank(kernels: Sequence[Kernel]) -> tuple[int, int, int]:
    return (time_of(kernels), sum(k.cost.hbm_bytes for k in kernels), len(kernels))
