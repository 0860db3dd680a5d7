"""The fastest plan whose temporaries never need more than so many bytes at once.

The fastest plan of all, in its order of least peak, often fits, and then keeps its proof. Else a
small graph is searched exactly (``fuseplan.memory.region``). A large one is repaired where it needs
too much (``fuseplan.memory.repair``), and planned again by the same planner at prices that make
memory dear (``fuseplan.memory.limit``): the surcharge is a Lagrange multiplier of the limit,
raised until a plan fits and then lowered as far as plans do. The faster plan of the two is taken.

Prices that make memory dear: so much more for each byte that is written for later kernels.

A planner takes equal groups to cost the same wherever they are, so a surcharge must follow from a
group's structure alone. It is on the results of *kinds* of nodes: a value that is alive at the
peak makes those of all nodes like its producer dear.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from costmodel.graph import Graph, arrays_of
from costmodel.kernel import KernelSpec
from costmodel.memory import is_bitcast
from fuseplan.memory.liveness import lives_of, profile
from fuseplan.memory.order import Order, least_peak
from fuseplan.memory.plan_bound import least_peak_of_any
from fuseplan.memory.region import plan_exactly
from fuseplan.memory.repair import repair
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.planners import PlanGroups
from fuseplan.schedule.pricing import Nodes, PriceBook, Pricing
from fuseplan.schedule.structure import Signatures
from fuseplan.search.grouping import Budget, Grouping
from fuseplan.support.errors import MemoryLimitError, Verdict
from fuseplan.support.work import Work, ended, limit_of

UNIT_BYTES = 2**20
"""Surcharges are integers: picoseconds for so many bytes."""


class Penalised(Pricing):
    """``pricing`` with a surcharge on what kernels write; nothing at first. Groups are priced
    once, whatever the surcharge is changed to."""

    def __init__(self, graph: Graph, pricing: Pricing) -> None:
        self.graph = graph
        self.ps_per_unit = 0
        self._pricing, self.device = pricing, pricing.device
        self.book = PriceBook(graph, pricing)
        """Prices without the surcharge."""
        self._kind = [self.book.signatures.of((node.id,)).key for node in graph.nodes]
        self._dear: set[tuple[int, ...]] = set()
        self.offers, self.residency = pricing.offers, pricing.residency
        self.absorbs_moves = pricing.absorbs_moves
        self.merges_copies = bool(self.book.copies)
        self._array = arrays_of(graph)
        self._every = {n: copies for copies in self.book.copies for n in copies}
        self._outputs = frozenset(graph.outputs)

    def charge(self, values: Iterable[int]) -> None:
        """Make ``values``, and all like them, dear."""
        makers = (self.graph.values[v].producer for v in values)
        copies = (m for n in makers if n >= 0 for m in self._every.get(n, (n,)))
        self._dear.update(self._kind[n] for n in copies)

    def surcharge_ps(self, spec: KernelSpec) -> int:
        """What is added to the kernel's time."""
        if not self.ps_per_unit or is_bitcast(self.graph, spec):
            return 0
        return sum(self._surcharge_ps(a.value) for a in spec.writes)

    def _surcharge_ps(self, v: int) -> int:
        value = self.graph.values[v]
        if self._kind[value.producer] not in self._dear:
            return 0
        return value.nbytes * self.ps_per_unit // UNIT_BYTES

    def floor(self, nodes: Nodes) -> int:
        """``pricing``'s floor, and the surcharge on what is written however ``nodes`` are grouped."""
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

    def compatible(self, nodes: Nodes) -> Verdict | None:
        """As ``Pricing.compatible``."""
        return self._pricing.compatible(nodes)

    def oversized(self, nodes: Nodes, crossing: frozenset[int]) -> Verdict | None:
        """As ``Pricing.oversized``."""
        return self._pricing.oversized(nodes, crossing)

    def renames(self, n: int) -> bool:
        """As ``Pricing.renames``."""
        return self._pricing.renames(n)

    def walked(self, n: int) -> Nodes:
        """As ``Pricing.walked``."""
        return self._pricing.walked(n)

    def imprint(self, nodes: Nodes, signatures: Signatures) -> str | None:
        """As ``Pricing.imprint``; with a surcharge, nothing is remembered."""
        return None if self.ps_per_unit else self.book.imprint(nodes)

    def price(self, nodes: Nodes) -> Kernel | Verdict:
        """The group as ``pricing`` schedules it, with the surcharge."""
        answer = self.book.price(nodes)
        if isinstance(answer, Verdict):
            return answer
        return self._plus(self.book.kernel(nodes), 1)

    def real(self, kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
        """Kernels that a planner chose by these prices, at what they cost without."""
        return tuple(self._plus(kernel, -1) for kernel in kernels)

    def _plus(self, kernel: Kernel, sign: int) -> Kernel:
        extra = sign * self.surcharge_ps(kernel.spec)
        if not extra:
            return kernel
        surcharge_ps = kernel.cost.surcharge_ps + extra
        return replace(kernel, cost=replace(kernel.cost, surcharge_ps=surcharge_ps))


_RAISES, _FACTOR, _HALVINGS = 4, 8, 5
"""Plans made with a surcharge that is raised, eightfold each time, and with one between the
smallest that fits and the largest that does not."""


def plan_within(
    graph: Graph, pricing: Pricing, budget: Budget, plan_groups: PlanGroups, max_peak_bytes: int
) -> Grouping:
    """The fastest kernels found whose temporaries need at most ``max_peak_bytes`` at once, in an
    order that keeps to it. ``budget.work`` is for what comes after the search for the fastest plan of all.

    ``status`` is OPTIMAL if no plan under the limit is faster, which is known where the fastest of
    all plans fits or the graph is small; ``bound_ps`` is a bound on every plan under the limit.

    Raises:
        MemoryLimitError: no plan that fits was found; it names the smallest peak that was.
    """
    work = budget.work
    if work is None:
        work = Work(limit_of(budget.whole_s), expires_at=time.monotonic() + budget.deadline_s)
    priced = Penalised(graph, pricing)
    fastest = plan_groups(graph, priced, replace(budget, work=None))
    order = arrange_within(graph, fastest.kernels, max_peak_bytes)
    if order.peak_bytes <= max_peak_bytes:
        return replace(fastest, kernels=order.kernels)
    # A planner that proves nothing may search any space: a plan that it cannot make is not its.
    if fastest.bound_ps is not None and not priced.merges_copies:
        exact = plan_exactly(graph, pricing, max_peak_bytes, work)
        if exact is not None and exact.kernels is not None:
            best = least_peak(graph, exact.kernels)
            return _answer(fastest, order, best, max_peak_bytes, time_of(best.kernels))
        if exact is not None:
            raise MemoryLimitError(
                max_peak_bytes, exact.smallest_bytes, exact.smallest_bytes, fastest.bound_ps
            )
    least_bytes = least_peak_of_any(graph, priced.book, math.inf)
    shared = replace(budget, work=work)
    search = _Search(graph, priced, shared, plan_groups, max_peak_bytes, work, order, ended(fastest.notes))
    found = search.run(order)
    why = work.why if work.is_over else search.ended
    if found is None:
        raise MemoryLimitError(max_peak_bytes, search.lowest.peak_bytes, least_bytes, fastest.bound_ps, why)
    answer = _answer(fastest, order, found, max_peak_bytes, fastest.bound_ps)
    return replace(answer, notes=noted(answer.notes, why))


def arrange_within(graph: Graph, kernels: Sequence[Kernel], max_peak_bytes: int) -> Order:
    """The order of least peak, sought harder where that decides whether it fits."""
    order = least_peak(graph, kernels)
    if order.bound_bytes <= max_peak_bytes < order.peak_bytes:
        order = least_peak(graph, kernels, close=0)
    return order


def _answer(
    fastest: Grouping, before: Order, best: Order, max_peak_bytes: int, bound_ps: int | None
) -> Grouping:
    """``best`` in the place of the fastest plan, with a word on what the limit cost."""
    time_ps = time_of(best.kernels)
    note = slowed(time_of(fastest.kernels), before.peak_bytes, time_ps, max_peak_bytes)
    return replace(
        fastest.uncertified(),
        kernels=best.kernels,
        status="OPTIMAL" if bound_ps == time_ps else "FEASIBLE",
        bound_ps=bound_ps,
        notes=(*fastest.notes, note),
    )


def noted(notes: tuple[str, ...], why: str) -> tuple[str, ...]:
    """``notes`` with one on ``why``, which of ``ENDED``, the search within the limit of memory was cut short,
    unless they say that already."""
    if not why or ended(notes):
        return notes
    return (*notes, f"{why} all plans within the limit of memory had been tried")


def slowed(fastest_ps: int, fastest_bytes: int, time_ps: int, max_peak_bytes: int) -> str:
    """A note on what the limit cost."""
    extra_ps = max(time_ps - fastest_ps, 0)
    slower = f"{extra_ps / fastest_ps:.1%}".replace("%", " %") if fastest_ps else "0 %"
    return (
        f"the limit of {max_peak_bytes:,} bytes makes the plan {slower} slower: the fastest one "
        f"needs {fastest_bytes:,} bytes"
    )


def time_of(kernels: Sequence[Kernel]) -> int:
    """Picoseconds of kernels that run one after the other."""
    return sum(k.cost.time_ps for k in kernels)


@dataclass(slots=True)
class _Search:
    """Plans at rising and falling surcharges, and what can be made of others."""

    graph: Graph
    priced: Penalised
    budget: Budget
    plan_groups: PlanGroups
    max_peak_bytes: int
    work: Work
    lowest: Order
    """The plan of the lowest peak so far."""
    ended: str
    """Which limit has cut a plan short (``fuseplan.support.work.ENDED``), if one has."""
    best: Order | None = None
    """The fastest that fits."""

    def run(self, order: Order) -> Order | None:
        """The fastest plan found that fits; ``order`` is that of the fastest one, which does not."""
        self._repair(order)
        self._charge(order)
        written = sum(k.cost.hbm_bytes for k in order.kernels)
        # At first memory costs what moving it costs.
        rate = max(time_of(order.kernels) * UNIT_BYTES // max(written, 1), 1)
        too_low = 0
        for _ in range(_RAISES):
            if self.work.is_over or self._fits(rate):
                break
            too_low, rate = rate, rate * _FACTOR
        enough = rate
        for _ in range(_HALVINGS):
            middle = (too_low + enough) // 2
            if self.best is None or self.work.is_over or not too_low < middle < enough:
                break
            if self._fits(middle):
                enough = middle
            else:
                too_low = middle
        if self.best is None and self.lowest is not order:
            self._repair(self.lowest)
        return self.best

    def _repair(self, order: Order) -> None:
        if self.priced.merges_copies:  # What is alive depends on which copies are one.
            return
        kernels = repair(self.graph, self.priced.book, order.kernels, self.max_peak_bytes, self.work)
        if kernels != order.kernels:
            self._keep(arrange_within(self.graph, kernels, self.max_peak_bytes))

    def _fits(self, ps_per_unit: int) -> bool:
        """Plan at this surcharge; whether the plan keeps to the limit."""
        self.priced.ps_per_unit = ps_per_unit
        left = self.budget.until(self.work.expires_at)
        found = self.plan_groups(self.graph, self.priced, left)
        self.ended = self.ended or ended(found.notes)
        kernels = self.priced.real(found.kernels)
        order = arrange_within(self.graph, kernels, self.max_peak_bytes)
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
        """What is alive where too much is becomes dear."""
        self.priced.charge(over_limit(self.graph, order.kernels, self.max_peak_bytes))


def over_limit(graph: Graph, kernels: Sequence[Kernel], max_peak_bytes: int) -> list[int]:
    """The temporaries that are there while some kernel runs and more than the limit is in use."""
    lives = lives_of(graph, kernels)
    needs = profile(lives, range(len(kernels)))
    over = {step for step, need in enumerate(needs) if need > max_peak_bytes}
    return [
        v
        for v, writer, users in zip(lives.values, lives.writers, lives.users, strict=True)
        if not over.isdisjoint(range(writer, users[-1] + 1))
    ]


def _rank(kernels: Sequence[Kernel]) -> tuple[int, int, int]:
    return (time_of(kernels), sum(k.cost.hbm_bytes for k in kernels), len(kernels))
