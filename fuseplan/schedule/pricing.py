"""What the planners ask of a scheduler, and a memory of its answers.

Planners decide which nodes share a kernel. Whether a group is possible, and what its
best schedule costs, is the scheduler's to say; it is asked through ``Pricing``.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

from costmodel.device import DeviceSpec
from costmodel.floor import Floors
from costmodel.graph import Graph, copies_of
from costmodel.kernel import Access
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.footprint import Capacity
from fuseplan.schedule.structure import Key, Signatures, Structure
from fuseplan.support.errors import Verdict
from fuseplan.support.work import unlimited

Nodes = tuple[int, ...]

_ALWAYS_LOOKED = 3_000
"""Operations in the groups that heuristics ask about, up to which the clock is ignored: a tenth of a second
of work, three tenths with reductions."""


class Pricing(ABC):
    """Answers about groups of nodes of one graph, given by their ids in ascending order.

    Four methods must be there. What else may be known of prices has a default that claims nothing, so that a
    pricing of a few lines is one; ``PricingWrapper`` hands all questions on to another.
    """

    offers: tuple[Nodes, ...] = ()
    """Convex, connected groups to ask for although they break ``compatible``. A plan may hold them beside
    the groups that do not."""
    settled: frozenset[int] = frozenset()
    """Nodes that are alone or in one of the ``offers``: ``compatible`` refuses them wherever they stand,
    whatever is said of others of their structure."""
    capacity: Capacity | None = None
    """Tells of many groups at once that they are not ``oversized``."""
    absorbs_moves: bool = False
    """Kernels need not fit on chip, so that what only moves data is best in the kernel that reads it."""
    merges_copies: bool = False
    """A kernel that holds several copies of an operation (``Graph.origins``) computes it once
    (``fuseplan.search.remat.duplicates``)."""
    device: DeviceSpec | None = None
    """The device whose rates the prices follow from, if there is one."""

    @abstractmethod
    def compatible(self, nodes: Nodes) -> Verdict | None:
        """None if ``nodes`` could be one kernel as far as *monotone* conditions go: what
        refuses a set of two or more refuses every set that contains it. Asked of any set,
        connected or not; that groups are connected and convex is the planners' business."""

    @abstractmethod
    def oversized(self, nodes: Nodes, crossing: frozenset[int]) -> Verdict | None:
        """Why neither ``nodes`` nor any larger group can fit on chip, or None; monotone as
        ``compatible`` is. ``crossing`` are values that the group reads or writes however it
        grows."""

    @abstractmethod
    def renames(self, n: int) -> bool:
        """Whether node ``n`` is free and changes nothing about a kernel that takes it in."""

    @abstractmethod
    def price(self, nodes: Nodes) -> Kernel | Verdict:
        """The group with its best schedule and cost. A single node always has one."""

    def floor(self, nodes: Nodes) -> int:
        """Picoseconds that no partition of ``nodes`` beats, whatever the set (``costmodel.floor``). The
        tighter it is, the fewer groups are priced, and the better is the bound where a limit is hit."""
        return 0

    def least(self, nodes: Nodes) -> int:
        """Picoseconds that ``nodes`` take at least as one kernel; no less than ``floor``."""
        return self.floor(nodes)

    def floor_bytes(self, nodes: Nodes) -> int:
        """HBM bytes that a kernel of ``nodes`` moves at least."""
        return 0

    def floors(self, members: Sequence[Nodes]) -> Floors | None:
        """``least`` and ``floor_bytes`` of many groups of ``members`` at once; None: ask one by one."""
        return None

    def walked(self, n: int) -> tuple[int, ...]:
        """The arrays that node ``n`` walks. A kernel may hold nodes for no more than that both walk one
        (``fuseplan.schedule.shared_operands``)."""
        return ()

    def imprint(self, nodes: Nodes, signatures: Signatures) -> str | None:
        """All that the answers about groups among ``nodes`` follow from, in words that mean the same in
        every process: what has equal imprints is planned once (``fuseplan.search.cache``). None: nothing is
        remembered. ``signatures`` are those of the graph that the planner sees."""
        return None

    def unsettled(self) -> Pricing:
        """The same prices with nothing ``settled``, for planners that do not ask for the ``offers``."""
        return self


class PricingWrapper(Pricing):
    """A pricing that gives another one's answers; subclasses change some of them."""

    def __init__(self, pricing: Pricing) -> None:
        self._pricing = pricing
        self.offers, self.settled = pricing.offers, pricing.settled
        self.capacity, self.device = pricing.capacity, pricing.device
        self.absorbs_moves, self.merges_copies = pricing.absorbs_moves, pricing.merges_copies

    def compatible(self, nodes: Nodes) -> Verdict | None:
        return self._pricing.compatible(nodes)

    def oversized(self, nodes: Nodes, crossing: frozenset[int]) -> Verdict | None:
        return self._pricing.oversized(nodes, crossing)

    def renames(self, n: int) -> bool:
        return self._pricing.renames(n)

    def price(self, nodes: Nodes) -> Kernel | Verdict:
        return self._pricing.price(nodes)

    def floor(self, nodes: Nodes) -> int:
        return self._pricing.floor(nodes)

    def least(self, nodes: Nodes) -> int:
        return self._pricing.least(nodes)

    def floor_bytes(self, nodes: Nodes) -> int:
        return self._pricing.floor_bytes(nodes)

    def floors(self, members: Sequence[Nodes]) -> Floors | None:
        return self._pricing.floors(members)

    def walked(self, n: int) -> tuple[int, ...]:
        return self._pricing.walked(n)

    def imprint(self, nodes: Nodes, signatures: Signatures) -> str | None:
        return self._pricing.imprint(nodes, signatures)

    def unsettled(self) -> Self:
        other = copy(self)
        other._pricing, other.settled = self._pricing.unsettled(), frozenset()
        return other


@dataclass(frozen=True, slots=True)
class Price:
    """The objectives of one kernel, in the order in which they matter."""

    time_ps: int
    hbm_bytes: int
    kernels: int = 1

    def __add__(self, other: Price) -> Price:
        return Price(
            self.time_ps + other.time_ps, self.hbm_bytes + other.hbm_bytes, self.kernels + other.kernels
        )

    def __lt__(self, other: Price) -> bool:
        return self.objectives < other.objectives

    def __le__(self, other: Price) -> bool:
        return self.objectives <= other.objectives

    @property
    def objectives(self) -> tuple[int, int, int]:
        return (self.time_ps, self.hbm_bytes, self.kernels)


FREE = Price(0, 0, 0)


def total_of(prices: Iterable[Price | Verdict]) -> Price:
    """The sum of prices, none of which is a refusal."""
    total = FREE
    for price in prices:
        assert isinstance(price, Price), price
        total += price
    return total


class PriceBook:
    """Asks a ``Pricing`` at most once about each *structure*, not about each group: the
    layers of a network are priced as one. Answers are relocated to the nodes asked for.
    """

    def __init__(self, graph: Graph, pricing: Pricing) -> None:
        self.graph = graph
        self.signatures = Signatures(graph)
        self.outputs = graph.results
        self._pricing = pricing
        # These answers are given as they are: they are known, or not asked for twice.
        self.floor, self.least, self.floor_bytes = pricing.floor, pricing.least, pricing.floor_bytes
        self.floors, self.walked, self.renames = pricing.floors, pricing.walked, pricing.renames
        self.offers, self.capacity = pricing.offers, pricing.capacity
        self.absorbs_moves, self._settled = pricing.absorbs_moves, pricing.settled
        self.copies: tuple[Nodes, ...] = tuple(copies_of(graph)) if pricing.merges_copies else ()
        """The copies of each operation that has several, where a kernel computes it once."""
        self._compatible: dict[Key, tuple[Nodes, Verdict | None]] = {}
        self._oversized: dict[tuple[Key, tuple[int, ...]], tuple[Nodes, Verdict | None]] = {}
        self._kernels: dict[tuple[int, ...], tuple[Nodes, tuple[int, ...], Kernel | Verdict]] = {}
        self.expires_at = math.inf
        """The deadline, by ``time.monotonic``, of loops that ask for many prices."""
        self.work = unlimited()
        """The counted work of the search of this graph, and its limit."""
        self.looked = 0
        """How many operations were in the groups that heuristics asked about, summed over the questions."""
        self.was_late = False
        """Whether ``is_late`` or ``has_expired`` has been true: a heuristic was cut short."""

    def clock(self) -> float:
        """``time.monotonic``, or infinity (past every deadline) when the counted work is spent."""
        return math.inf if self.work.is_spent else time.monotonic()

    def is_late(self) -> bool:
        """Whether a heuristic has to end; every loop that asks for prices asks this, too. It is false for a
        first, counted amount of work, so that a short deadline gives the same plan on any machine."""
        return self.looked > _ALWAYS_LOOKED and self.has_expired()

    def has_expired(self) -> bool:
        """Whether ``expires_at`` has passed, however little work is done."""
        self.was_late = self.was_late or time.monotonic() >= self.expires_at
        return self.was_late

    @property
    def n_priced(self) -> int:
        """How many distinct groups have been scheduled."""
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

    def imprint(self, nodes: Nodes) -> str | None:
        """As ``Pricing.imprint``."""
        return self._pricing.imprint(nodes, self.signatures)

    def price(self, nodes: Nodes) -> Price | Verdict:
        """What the group costs, or why it cannot be one kernel."""
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
        known = self._kernels.get(structure.key)
        if known is None:
            known = self._kernels[structure.key] = (nodes, structure.values, self._pricing.price(nodes))
        return known


def _moved(known: Nodes, verdict: Verdict | None, nodes: Nodes) -> Verdict | None:
    """What was said of ``known``, said of ``nodes``, a group of equal structure."""
    if verdict is None or known == nodes:
        return verdict
    moved = dict(zip(known, nodes, strict=True))
    return replace(verdict, nodes=tuple([moved[n] for n in verdict.nodes if n in moved]))


def relocate(kernel: Kernel, nodes: Nodes, old_values: Sequence[int], new_values: Sequence[int]) -> Kernel:
    """The same kernel on ``nodes``, a group of equal structure, with each of ``old_values``
    replaced by the one at its position in ``new_values``."""
    moved = dict(zip(old_values, new_values, strict=True))
    spec = kernel.spec
    moved_spec = replace(
        spec,
        nodes=nodes,
        reads=tuple([Access(moved[a.value], a.axes) for a in spec.reads]),
        writes=tuple([Access(moved[a.value], a.axes) for a in spec.writes]),
    )
    return Kernel(moved_spec, kernel.cost)
