"""The interface between planners and prices, and a cache of prices.

A planner decides which nodes share a kernel. ``Pricing`` tells it whether a group is legal and the cost of
its best schedule; ``scheduler.Scheduler`` is the implementation. A ``PricingWrapper`` changes some answers of
another pricing. A ``PriceBook`` asks about each structure once, through ``CheckedPricing``, since a pricing
may be a user's own.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Self

from costmodel.device import DeviceSpec
from costmodel.graph import Graph, copies_of
from costmodel.kernel import Access, Cost
from costmodel.model import CostModelError, operations_text
from costmodel.partial_floor import PartialFloor
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.plan.notes import Note, NoteKind
from fuseplan.schedule.footprint import Capacity
from fuseplan.schedule.structure import Key, Signatures, Structure
from fuseplan.support.errors import ExtensionError, FuseplanError, Verdict
from fuseplan.support.work import unlimited

Nodes = tuple[int, ...]

OPERATIONS_BEFORE_DEADLINE = 3_000
"""Heuristics ignore the deadline until the groups that they asked about have this many operations in total:
0.1 s of work, 0.3 s with reductions."""


class Pricing(ABC):
    """Legality and prices of groups of nodes of one graph. A group is a tuple of node ids, ascending.

    Four methods are abstract. The others, and the attributes, have defaults that hold for any prices.
    """

    offers: tuple[Nodes, ...] = ()
    """Convex, connected groups that may be kernels even if ``compatible`` refuses them. Such a group may
    have another price than one of equal structure that is not offered."""
    settled: frozenset[int] = frozenset()
    """Nodes that are alone or in one of the ``offers``: ``compatible`` refuses every other group with one of
    them, even if it allows groups of equal structure."""
    capacity: Capacity | None = None
    """Bounds on the on-chip footprint of many groups at once; None if kernels need not fit on chip."""
    absorbs_moves: bool = False
    """Whether it is always best to fuse data movement into the kernel that reads its result."""
    merges_copies: bool = False
    """Whether a kernel that holds several copies of an operation (``Graph.origins``) computes it once
    (``fuseplan.search.remat.duplicates``)."""
    crosses_hubs: bool = True
    """Whether kernels may be fused that have no more in common than a scalar that ties many operations
    together (``fuseplan.schedule.shared_operands``)."""
    device: DeviceSpec | None = None
    """The device whose rates the prices are computed from, if there is one."""

    @abstractmethod
    def compatible(self, nodes: Nodes) -> Verdict | None:
        """Why ``nodes`` break a *monotone* rule, or None. Monotone: a set of two or more that is refused is
        refused in every superset. ``nodes`` need not be connected or convex; planners ensure that groups
        are."""

    @abstractmethod
    def oversized(self, nodes: Nodes, crossing: frozenset[int]) -> Verdict | None:
        """Why neither ``nodes`` nor any superset fits on chip, or None; monotone.

        ``crossing`` are values that every superset reads or writes.
        """

    def oversized_beside(
        self, nodes: Nodes, crossing: frozenset[int], joiners: Collection[int]
    ) -> Verdict | None:
        """``oversized``, of supersets that hold no other nodes than ``nodes`` and ``joiners``."""
        return self.oversized(nodes, crossing)

    @abstractmethod
    def renames(self, n: int) -> bool:
        """Whether node ``n`` costs nothing and does not change a kernel that it is fused into."""

    @abstractmethod
    def price(self, nodes: Nodes) -> Kernel | Verdict:
        """The kernel of the group's best schedule, or why there is none. A single node always has a
        kernel."""

    def floor(self, nodes: Nodes) -> int:
        """A lower bound in picoseconds on every partition of any ``nodes`` (``costmodel.floor``). A tighter
        one saves the pricing of groups, and gives a better bound if the search hits a limit."""
        return 0

    def least(self, nodes: Nodes) -> int:
        """A lower bound in picoseconds on ``nodes`` as one kernel; at least ``floor``."""
        return self.floor(nodes)

    def floors(self, nodes: Nodes) -> tuple[int, int]:
        """Lower bounds of ``nodes`` as one kernel, in picoseconds and in HBM bytes moved."""
        return self.least(nodes), 0

    def partial_floor(self, members: Sequence[Nodes]) -> PartialFloor | None:
        """Lower bounds on kernels of which only some members are known; None if there are none. A position
        stands for the nodes in its element of ``members``. None may hold copies of another's."""
        return None

    def full_size_operands(self, n: int) -> tuple[int, ...]:
        """The largest operands of node ``n``, if its results are no larger. Nodes that have one in common may
        share a kernel even if no value passes between them (``fuseplan.schedule.shared_operands``)."""
        return ()

    def cache_key(self, nodes: Nodes, signatures: Signatures) -> str | None:
        """Text for all that legality and prices of groups among ``nodes`` depend on, with the same meaning in
        every process: components with equal keys are planned once (``fuseplan.search.cache``).

        None if nothing may be cached. ``signatures`` are those of the graph that the planner sees.
        """
        return None

    def unsettled(self) -> Pricing:
        """The same prices without ``settled`` nodes, for planners that do not use the ``offers``."""
        return self


class PricingWrapper(Pricing):
    """Delegates to another pricing; subclasses override some of its answers."""

    def __init__(self, pricing: Pricing) -> None:
        self._pricing = pricing
        self.offers, self.settled = pricing.offers, pricing.settled
        self.capacity, self.device = pricing.capacity, pricing.device
        self.absorbs_moves, self.merges_copies = pricing.absorbs_moves, pricing.merges_copies
        self.crosses_hubs = pricing.crosses_hubs

    def compatible(self, nodes: Nodes) -> Verdict | None:
        return self._pricing.compatible(nodes)

    def oversized(self, nodes: Nodes, crossing: frozenset[int]) -> Verdict | None:
        return self._pricing.oversized(nodes, crossing)

    def oversized_beside(
        self, nodes: Nodes, crossing: frozenset[int], joiners: Collection[int]
    ) -> Verdict | None:
        return self._pricing.oversized_beside(nodes, crossing, joiners)

    def renames(self, n: int) -> bool:
        return self._pricing.renames(n)

    def price(self, nodes: Nodes) -> Kernel | Verdict:
        return self._pricing.price(nodes)

    def floor(self, nodes: Nodes) -> int:
        return self._pricing.floor(nodes)

    def least(self, nodes: Nodes) -> int:
        return self._pricing.least(nodes)

    def floors(self, nodes: Nodes) -> tuple[int, int]:
        return self._pricing.floors(nodes)

    def partial_floor(self, members: Sequence[Nodes]) -> PartialFloor | None:
        return self._pricing.partial_floor(members)

    def full_size_operands(self, n: int) -> tuple[int, ...]:
        return self._pricing.full_size_operands(n)

    def cache_key(self, nodes: Nodes, signatures: Signatures) -> str | None:
        return self._pricing.cache_key(nodes, signatures)

    def unsettled(self) -> Self:
        other = copy(self)
        other._pricing, other.settled = self._pricing.unsettled(), frozenset()
        return other


_PARTS = tuple(f.name for f in fields(Cost) if f.name.endswith(("_ps", "_bytes")))
_parts_of = attrgetter(*_PARTS)


class CheckedPricing(PricingWrapper):
    """Checks the answers of another pricing, where they enter a ``PriceBook``.

    An answer that nothing can be made of is an error. One that contradicts another is a ``fault``: there is a
    plan all the same, but no proof, and nothing is cached. Where a user's cost model contradicts itself, the
    group is named in a ``CostModelError``.
    """

    def __init__(self, pricing: Pricing, graph: Graph) -> None:
        super().__init__(pricing)
        self._graph = graph
        self._model = None if pricing.device is None else pricing.device.cost_model
        self.name = type(pricing).__name__
        self.fault: Note | None = None
        """The first contradiction among the answers."""

    def compatible(self, nodes: Nodes) -> Verdict | None:
        return self._verdict("compatible", self._pricing.compatible, nodes)

    def oversized(self, nodes: Nodes, crossing: frozenset[int]) -> Verdict | None:
        return self._verdict("oversized", self._pricing.oversized, nodes, crossing)

    def oversized_beside(
        self, nodes: Nodes, crossing: frozenset[int], joiners: Collection[int]
    ) -> Verdict | None:
        return self._verdict("oversized_beside", self._pricing.oversized_beside, nodes, crossing, joiners)

    def renames(self, n: int) -> bool:
        return self._asked("renames", self._pricing.renames, n)

    def price(self, nodes: Nodes) -> Kernel | Verdict:
        kernel = self._asked("price", self._pricing.price, nodes)
        if isinstance(kernel, Verdict) and len(nodes) > 1:
            return kernel
        if not isinstance(kernel, Kernel):
            raise self._error(f"price({nodes})", kernel, "a Kernel, or of several nodes a Verdict")
        if kernel.spec.nodes != nodes:
            raise self._error(f"price({nodes})", kernel.spec.nodes, "a kernel of these nodes")
        # Each part: the sum leaves out those that overlap with slower ones, and so with NaN.
        for what, figure in zip(_PARTS, _parts_of(kernel.cost), strict=True):
            self._whole(f"{what} of price({nodes})", figure)
        time_ps = kernel.cost.time_ps
        # The price of a single node is known from the start, and no search asks for its floor.
        floor_ps = self.floors(nodes)[0] if len(nodes) > 1 or self._model is not None else 0
        if time_ps < floor_ps:
            self.contradicts(NoteKind.BELOW_FLOOR, nodes, time_ps=time_ps, floor_ps=floor_ps)
        return kernel

    def floor(self, nodes: Nodes) -> int:
        return self._whole("floor", self._asked("floor", self._pricing.floor, nodes))

    def least(self, nodes: Nodes) -> int:
        return self._whole("least", self._asked("least", self._pricing.least, nodes))

    def floors(self, nodes: Nodes) -> tuple[int, int]:
        time_ps, nbytes = self._asked("floors", self._pricing.floors, nodes)
        return self._whole("floors[0]", time_ps), self._whole("floors[1]", nbytes)

    def partial_floor(self, members: Sequence[Nodes]) -> PartialFloor | None:
        return self._asked("partial_floor", self._pricing.partial_floor, members)

    def full_size_operands(self, n: int) -> tuple[int, ...]:
        return self._asked("full_size_operands", self._pricing.full_size_operands, n)

    def cache_key(self, nodes: Nodes, signatures: Signatures) -> str | None:
        return self._asked("cache_key", self._pricing.cache_key, nodes, signatures)

    def contradicts(self, kind: NoteKind, nodes: Nodes, **figures: int) -> None:
        """Note a contradiction about a group or a plan of ``nodes``.

        Raises:
            CostModelError: the prices are those of a user's cost model, and its lower bound is too high.
        """
        if self._model is not None and kind is NoteKind.BELOW_FLOOR:
            time_ps, floor_ps = figures["time_ps"], figures["floor_ps"]
            raise CostModelError(
                f"floor_ps of the cost model {self._model.name!r} is no lower bound: "
                f"{operations_text(self._graph, nodes)} take {time_ps:,} ps by its cost, and at least "
                f"{floor_ps:,} ps by its floor_ps. Lower floor_ps; 0 always holds"
            )
        figures["count"] = len(nodes)
        self.fault = self.fault or Note(kind, None, nodes[0], (("pricing", self.name), *figures.items()))

    def _verdict(self, name: str, ask: Callable[..., Any], nodes: Nodes, *more: Any) -> Verdict | None:
        verdict = self._asked(name, ask, nodes, *more)
        if verdict is not None and not isinstance(verdict, Verdict):
            raise self._error(f"{name}({nodes})", verdict, "None, or a Verdict that says why not")
        return verdict

    def _asked(self, name: str, ask: Callable[..., Any], *question: Any) -> Any:
        try:
            return ask(*question)
        except (FuseplanError, CostModelError, MemoryError):
            raise
        except Exception as error:
            # Not as it is: a RuntimeError, say, would be taken for one of OR-Tools.
            raise ExtensionError(
                f"expected an answer of the pricing {self.name} to {name}({question[0]}), and it raised "
                f"{type(error).__name__}: {error}. Mend {self.name}.{name}, or plan without this pricing"
            ) from error

    def _whole(self, what: str, figure: int) -> int:
        if not isinstance(figure, int) or figure < 0:
            raise self._error(what, figure, "a whole number, at least 0 (round it by int())")
        return figure

    def _error(self, what: str, got: object, expected: str) -> ExtensionError:
        return ExtensionError(f"{what} of the pricing {self.name} should be {expected}, got {got!r}")


@dataclass(frozen=True, slots=True, order=True)
class Price:
    """The objectives of one kernel, the most important first."""

    time_ps: int
    hbm_bytes: int
    kernels: int = 1

    def __add__(self, other: Price) -> Price:
        return Price(
            self.time_ps + other.time_ps, self.hbm_bytes + other.hbm_bytes, self.kernels + other.kernels
        )

    @property
    def objectives(self) -> tuple[int, int, int]:
        return (self.time_ps, self.hbm_bytes, self.kernels)


FREE = Price(0, 0, 0)


def total_of(prices: Iterable[Price | Verdict]) -> Price:
    """The sum of prices. None of them may be a refusal."""
    total = FREE
    for price in prices:
        assert isinstance(price, Price), price
        total += price
    return total


class PriceBook:
    """Caches the answers of a ``Pricing`` by structure, so that equal layers of a network are priced once.
    Answers are relocated to the nodes of the question. It also counts the work of a search.
    """

    def __init__(self, graph: Graph, pricing: Pricing) -> None:
        self.graph = graph
        is_on_cpu = pricing.device is not None and pricing.device.platform == "cpu"
        self.signatures = Signatures(graph, of_caller=is_on_cpu)
        self.outputs = graph.results
        self._pricing = pricing = CheckedPricing(pricing, graph)
        # Not cached: these are cheap, or asked once.
        self.floor, self.least, self.floors = pricing.floor, pricing.least, pricing.floors
        self.partial_floor = pricing.partial_floor
        self.full_size_operands, self.renames = pricing.full_size_operands, pricing.renames
        self.offers, self.capacity = pricing.offers, pricing.capacity
        self.absorbs_moves, self._settled = pricing.absorbs_moves, pricing.settled
        self.crosses_hubs = pricing.crosses_hubs
        self.is_for_xla = pricing.device is None or not pricing.device.capabilities.emits_kernels
        """Whether all kernels but loop nests are XLA's, which need no tile that fits on chip."""
        self.copies: tuple[Nodes, ...] = tuple(copies_of(graph)) if pricing.merges_copies else ()
        """The copies of each operation that has several, if ``merges_copies``."""
        self._compatible: dict[Key, tuple[Nodes, Verdict | None]] = {}
        self._oversized: dict[tuple[Key, tuple[int, ...]], tuple[Nodes, Verdict | None]] = {}
        self._offered = frozenset(pricing.offers)
        self._offers_from: dict[int, list[Nodes]] = {}
        """The offered groups by lowest node."""
        for nodes in pricing.offers:
            self._offers_from.setdefault(nodes[0], []).append(nodes)
        self._kernels: dict[tuple[Key, bool], tuple[Nodes, tuple[int, ...], Kernel | Verdict]] = {}
        """Of each structure, offered or not, the group that was priced, its values, and the answer."""
        self.expires_at = math.inf
        """The deadline, by ``time.monotonic``."""
        self.work = unlimited()
        """The counted work of the search of this graph, and its limit."""
        self.looked = 0
        """Operations in all groups that heuristics asked about."""
        self.was_late = False
        """Whether the deadline has cut a heuristic short."""

    def clock(self) -> float:
        """``time.monotonic``, or infinity (past every deadline) when the counted work is spent."""
        return math.inf if self.work.is_spent else time.monotonic()

    def is_past(self, t: float) -> bool:
        """Whether ``t``, a time of ``time.monotonic``, has come, or the counted work is spent."""
        return self.clock() >= t

    def is_late(self) -> bool:
        """Whether a heuristic has to end; every loop that asks for prices tests it. It is false for the first
        ``OPERATIONS_BEFORE_DEADLINE``, so that a short deadline gives the same plan on any machine."""
        return self.looked > OPERATIONS_BEFORE_DEADLINE and self.has_expired()

    def is_overdue(self) -> bool:
        """Whether ``expires_at`` has passed, for steps that cut no heuristic short."""
        return time.monotonic() >= self.expires_at

    def has_expired(self) -> bool:
        """Whether ``expires_at`` has passed, independent of the work done."""
        self.was_late = self.was_late or self.is_overdue()
        return self.was_late

    @property
    def fault(self) -> Note | None:
        """The first contradiction among the pricing's answers: nothing is proven then."""
        return self._pricing.fault

    def check_bound(self, nodes: Nodes, time_ps: int, bound_ps: int) -> None:
        """Note a fault if a plan of ``nodes`` takes less than the floors say."""
        if time_ps < bound_ps:
            self._pricing.contradicts(NoteKind.BELOW_FLOOR, nodes, time_ps=time_ps, floor_ps=bound_ps)

    def check_monotone(self, refused: Nodes, kernel: Nodes) -> None:
        """Note a fault if the rules refuse a group, and allow a kernel that is equal to it or holds it.

        That they allow a group of which there is no kernel is none: ``DuplicatePricing`` leaves some refusals
        to its prices.
        """
        if self.compatible(refused) is None or (refused != kernel and self.compatible(kernel) is not None):
            return
        if isinstance(self.price(kernel), Price):
            self._pricing.contradicts(NoteKind.NOT_MONOTONE, refused)

    @property
    def n_priced(self) -> int:
        """The number of distinct groups priced."""
        return len(self._kernels)

    def compatible(self, nodes: Nodes) -> Verdict | None:
        """As ``Pricing.compatible``."""
        if not self._settled.isdisjoint(nodes):
            return self._pricing.compatible(nodes)
        key = self.signatures.key(nodes)[0]
        if key not in self._compatible:
            self._compatible[key] = (nodes, self._pricing.compatible(nodes))
        return _moved(*self._compatible[key], nodes)

    def oversized(self, nodes: Nodes, crossing: frozenset[int]) -> Verdict | None:
        """As ``Pricing.oversized``."""
        structure, number = self.signatures.key(nodes)
        key = (structure, tuple([k for v, k in number.items() if v in crossing]))
        if key not in self._oversized:
            self._oversized[key] = (nodes, self._pricing.oversized(nodes, crossing))
        return _moved(*self._oversized[key], nodes)

    def oversized_beside(
        self, nodes: Nodes, crossing: frozenset[int], joiners: Collection[int]
    ) -> Verdict | None:
        """As ``Pricing.oversized_beside``."""
        return self._pricing.oversized_beside(nodes, crossing, joiners)

    def offers_within(self, nodes: Nodes) -> tuple[tuple[int, ...], ...]:
        """The offered groups among ``nodes``, as their positions there."""
        if not self._offers_from:
            return ()
        place = {n: i for i, n in enumerate(nodes)}
        return tuple(
            tuple([place[n] for n in offer])
            for first in nodes
            for offer in self._offers_from.get(first, ())
            if place.keys() >= set(offer)
        )

    def cache_key(self, nodes: Nodes) -> str | None:
        """As ``Pricing.cache_key``."""
        return self._pricing.cache_key(nodes, self.signatures)

    def price(self, nodes: Nodes) -> Price | Verdict:
        """The price of the group, or why it cannot be one kernel."""
        kernel = self._lookup(nodes, self.signatures.of(nodes))[2]
        if isinstance(kernel, Verdict):
            return kernel
        return Price(kernel.cost.time_ps, kernel.cost.hbm_bytes)

    def kernel(self, nodes: Nodes) -> Kernel:
        """The kernel of a group that has a price."""
        structure = self.signatures.of(nodes)
        known_nodes, known_values, kernel = self._lookup(nodes, structure)
        if isinstance(kernel, Verdict):
            raise AssertionError(f"asked for the kernel of a refused group {nodes}: {kernel}")
        if known_nodes == nodes:
            return kernel
        return relocate(kernel, nodes, known_values, structure.values)

    def _lookup(self, nodes: Nodes, structure: Structure) -> tuple[Nodes, tuple[int, ...], Kernel | Verdict]:
        key = structure.key, nodes in self._offered
        known = self._kernels.get(key)
        if known is None:
            known = self._kernels[key] = (nodes, structure.values, self._pricing.price(nodes))
        return known


def _moved(known: Nodes, verdict: Verdict | None, nodes: Nodes) -> Verdict | None:
    """A verdict about ``known`` for ``nodes``, a group of equal structure."""
    if verdict is None or known == nodes:
        return verdict
    moved = dict(zip(known, nodes, strict=True))
    return replace(verdict, nodes=tuple([moved[n] for n in verdict.nodes if n in moved]))


def relocate(kernel: Kernel, nodes: Nodes, old_values: Sequence[int], new_values: Sequence[int]) -> Kernel:
    """The kernel for ``nodes``, a group of equal structure: each of ``old_values`` is replaced by the value
    at its position in ``new_values``."""
    moved = dict(zip(old_values, new_values, strict=True))
    spec = kernel.spec
    moved_spec = replace(
        spec,
        nodes=nodes,
        reads=tuple([Access(moved[a.value], a.axes) for a in spec.reads]),
        writes=tuple([Access(moved[a.value], a.axes) for a in spec.writes]),
    )
    return Kernel(moved_spec, kernel.cost)
