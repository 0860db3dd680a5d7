"""What the planners ask of a scheduler, and a memory of its answers.

Planners decide which nodes share a kernel. Whether a group is possible, and what its
best schedule costs, is the scheduler's to say; it is asked through ``Pricing``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from costmodel.floors import Floors
from costmodel.graph import Graph
from costmodel.kernel import Access
from fuseplan.copies import copies_of
from fuseplan.errors import Verdict
from fuseplan.plan import Kernel
from fuseplan.residency import Residency
from fuseplan.signature import Key, Signatures, Structure
from fuseplan.work import unlimited

Nodes = tuple[int, ...]

_ALWAYS_LOOKED = 3_000
"""Operations in the groups that heuristics ask about, up to which the clock is ignored: a tenth of a second
of work, three tenths with reductions."""


class Pricing(Protocol):
    """Answers about groups of nodes. ``nodes`` always ascend.

    It may also have ``floor(nodes) -> int``: picoseconds that no partition of ``nodes``
    beats, whatever the set, such as ``costmodel.floor.Floor``. The tighter it is, the
    fewer groups have to be priced, and the better the bound where a limit is hit.

    Likewise ``least(nodes) -> int``: picoseconds that ``nodes`` take at least as one kernel, where
    that is known to be more than ``floor(nodes)``.

    Likewise ``floor_bytes(nodes) -> int``: HBM bytes that a kernel of ``nodes`` moves at least.

    Likewise ``floors(members) -> Floors | None`` (``costmodel.floors``), which tells ``least`` and
    ``floor_bytes`` of many groups at once.

    And it may have ``offers``: convex, connected groups that planners should ask for although
    they break the monotone conditions. A plan may hold them beside the groups that do not.

    Nodes that are ``settled``, a frozenset, are alone or in such a group: ``compatible`` refuses them
    wherever they stand, whatever is said of others of their structure.

    And it may have a ``residency`` (``fuseplan.residency.Residency``), which tells for many
    groups at once that they are not ``oversized``.

    And it may have ``walked(n) -> tuple[int, ...]``: the arrays that node ``n`` walks. A kernel may hold
    nodes for no more than that both walk one (``fuseplan.siblings``).

    And it may say ``merges_copies``: a kernel that holds several copies of an operation
    (``Graph.origins``) computes it once (``fuseplan.closure``).

    And it may say ``absorbs_moves``: kernels need not fit on chip, so that what only moves data
    is best in the kernel that reads it.

    And it may have ``imprint(nodes, signatures) -> str | None``: all that its answers about groups
    among ``nodes`` follow from, in words that mean the same in every process. What is planned by
    equal imprints is planned once (``fuseplan.memo``); None, and without it, nothing is remembered.
    ``signatures`` are those of the graph that the planner sees.
    """

    def compatible(self, nodes: Nodes) -> Verdict | None:
        """None if ``nodes`` could be one kernel as far as *monotone* conditions go: what
        refuses a set of two or more refuses every set that contains it. Asked of any set,
        connected or not; that groups are connected and convex is the planners' business."""
        ...

    def oversized(self, nodes: Nodes, crossing: frozenset[int]) -> Verdict | None:
        """Why neither ``nodes`` nor any larger group can fit on chip, or None; monotone as
        ``compatible`` is. ``crossing`` are values that the group reads or writes however it
        grows."""
        ...

    def renames(self, n: int) -> bool:
        """Whether node ``n`` is free and changes nothing about a kernel that takes it in."""
        ...

    def price(self, nodes: Nodes) -> Kernel | Verdict:
        """The group with its best schedule and cost. A single node always has one."""
        ...


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
        self._floor: Callable[[Nodes], int] = getattr(pricing, "floor", lambda nodes: 0)
        self._least: Callable[[Nodes], int] = getattr(pricing, "least", self._floor)
        self._floor_bytes: Callable[[Nodes], int] = getattr(pricing, "floor_bytes", lambda nodes: 0)
        self.floors: Callable[[Sequence[Nodes]], Floors | None]
        self.floors = getattr(pricing, "floors", lambda members: None)
        self.offers: tuple[Nodes, ...] = getattr(pricing, "offers", ())
        """Groups that break ``compatible`` and yet may have a price."""
        self._settled: frozenset[int] = getattr(pricing, "settled", frozenset())
        self.residency: Residency | None = getattr(pricing, "residency", None)
        self.walked: Callable[[int], Nodes] = getattr(pricing, "walked", lambda n: ())
        self.absorbs_moves: bool = getattr(pricing, "absorbs_moves", False)
        self.copies: tuple[Nodes, ...] = (
            tuple(copies_of(graph)) if getattr(pricing, "merges_copies", False) else ()
        )
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

    def renames(self, n: int) -> bool:
        """As ``Pricing.renames``."""
        return self._pricing.renames(n)

    def floor(self, nodes: Nodes) -> int:
        """As ``Pricing.floor``; 0, which is always true, of a pricing that has none."""
        return self._floor(nodes)

    def least(self, nodes: Nodes) -> int:
        """As ``Pricing.least``; the floor of a pricing that has none."""
        return self._least(nodes)

    def floor_bytes(self, nodes: Nodes) -> int:
        """As ``Pricing.floor_bytes``; 0 of a pricing that has none."""
        return self._floor_bytes(nodes)

    def imprint(self, nodes: Nodes) -> str | None:
        """As ``Pricing``'s; None of a pricing that has none."""
        imprint: Callable[[Nodes, Signatures], str | None] | None
        imprint = getattr(self._pricing, "imprint", None)
        return None if imprint is None else imprint(nodes, self.signatures)

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
