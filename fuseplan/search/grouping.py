"""The planner interface (a ``Budget`` in, a ``Grouping`` out), and the components of a graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from costmodel.graph import Graph
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.constraints import Resolved
from fuseplan.plan.fusion_plan import Case, Kernel, PlanStats, Proof
from fuseplan.plan.notes import AnyNote, Note, NoteKind, note
from fuseplan.plan.options import DEFAULT_DEADLINE_S
from fuseplan.schedule.pricing import Nodes, Price, PriceBook, Pricing, total_of
from fuseplan.schedule.shared_operands import Edge, wide_hubs
from fuseplan.search.components import (
    Component,
    Crossable,
    component_key,
    components,
    crossable_edges,
    data_edges,
    effect_edges,
)
from fuseplan.search.limits import LIMITS
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits
from fuseplan.support.digraph import (
    connected_sets,
    cyclic_sets,
    execution_order,
    group_successors,
    reachable,
)
from fuseplan.support.errors import Verdict
from fuseplan.support.work import Limit, Work, seconds_of


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a planner may spend. A deadline of 0 asks for the best heuristic plan."""

    deadline_s: float = DEFAULT_DEADLINE_S
    """Wall-clock seconds of all stages of the planner together. The deadline cannot cut short the division
    into components, which does not begin where it would end long after (``DIVISION``), nor the first, counted
    part of the heuristics' work (``PriceBook.is_late``)."""
    max_groups: int = LIMITS.max_groups
    """Candidate groups of one component."""
    asked_s: float | None = None
    """The deadline of the whole planning, of which ``deadline_s`` is left. Decisions by the length of the
    deadline use this one, since it does not depend on the machine's speed. None: it is ``deadline_s``."""
    only_loops: bool = False
    """As ``Options.only_loops``."""
    work: Work | None = None
    """The counted work that several searches share. None: each search has ``limit_of`` the deadline."""
    known: tuple[Nodes, ...] = ()
    """The groups of a plan no slower than the heuristics', which the solver starts from."""
    solved: set[bytes] | None = None
    """Collects the keys of components that the searches of one planning solve."""

    @property
    def whole_s(self) -> float:
        """The deadline of the whole planning."""
        return self.deadline_s if self.asked_s is None else self.asked_s

    def limit_reached(self, expires_at: float) -> Limit | None:
        """The limit that leaves nothing for another search before ``expires_at``, if there is one."""
        if time.monotonic() >= expires_at:
            return Limit.DEADLINE
        return Limit.WORK if self.work is not None and self.work.is_spent else None

    def until(self, expires_at: float) -> Budget:
        """The same with the time that is left until ``expires_at``, by ``time.monotonic``."""
        return replace(self, deadline_s=left_s(expires_at), asked_s=self.whole_s)


@dataclass(frozen=True, slots=True)
class Grouping:
    """A planner's answer: kernels in an order that can run, and how sure it is."""

    kernels: tuple[Kernel, ...]
    status: str = "FEASIBLE"
    bound_ps: int | None = None
    refusals: tuple[Verdict, ...] = ()
    notes: tuple[AnyNote, ...] = ()
    stats: PlanStats = field(default_factory=PlanStats)
    proof: Proof | None = None
    """The proof of ``bound_ps``."""
    with_too_many_copies: tuple[Nodes, ...] = ()
    """The components whose plans were not proven, because copies make too many groups."""
    repeats: tuple[Nodes, ...] = ()
    """The groups that a planner asks for if they overlap: kernels that compute an operation each for itself.
    ``kernels`` compute it once."""
    is_ordered: bool = False
    """Whether the order of the kernels is part of the answer."""

    @property
    def groups(self) -> tuple[Nodes, ...]:
        return tuple(kernel.spec.nodes for kernel in self.kernels)

    @property
    def time_ps(self) -> int:
        return sum(k.cost.time_ps for k in self.kernels)

    def uncertified(self) -> Grouping:
        """The same without the name of a heuristic whose plan is as fast, which holds only of this plan and
        this search space."""
        return replace(self, stats=replace(self.stats, certified=""))

    def unproven(self, why: AnyNote) -> Grouping:
        """The same kernels without bound and proof; ``why`` is added to the notes."""
        bare = self.uncertified()
        return replace(bare, status="FEASIBLE", bound_ps=None, proof=None, notes=(*bare.notes, why))


PlanGroups = Callable[[Graph, Pricing, Budget], Grouping]
"""What a planner is: it says which nodes of a graph share a kernel."""


def left_s(expires_at: float) -> float:
    """Seconds until a time of ``time.monotonic``, at least one unit of work: 0 would say that the user asked
    for heuristics alone."""
    return max(expires_at - time.monotonic(), seconds_of(1))


@dataclass(frozen=True, slots=True)
class Decomposition:
    """A graph in components. Those of equal structure are one *part* (as in ``Proof``), which is solved once:
    ``spaces[k]`` is the space of part ``k``, ``instances`` has the part and the nodes of each component."""

    crossable: Crossable
    splits_hubs: bool
    """Whether the graph has wide hubs, and no group fuses across them."""
    spaces: tuple[Space, ...]
    instances: tuple[tuple[int, Nodes], ...]

    def groups_within(self, groups: Iterable[Nodes]) -> list[list[Mask]]:
        """For each part, those of ``groups`` that are in its first component. Each group is in one."""
        group_of = {n: group for group in groups for n in group}
        first: dict[int, Nodes] = {}
        for part, nodes in self.instances:
            first.setdefault(part, nodes)
        return [
            [space.mask(group) for group in dict.fromkeys(group_of[n] for n in first[part])]
            for part, space in enumerate(self.spaces)
        ]


def decompose(graph: Graph, book: PriceBook, at_hubs: bool = True) -> Decomposition:
    """Partition the graph; equal components share a part. ``at_hubs``: as for ``crossable_edges``."""
    crossable = crossable_edges(graph, book, at_hubs)
    known: dict[tuple, int] = {}
    examples: list[Component] = []
    instances: list[tuple[int, Nodes]] = []
    for component in components(graph, crossable):
        key = component_key(book, component)
        part = known.setdefault(key, len(known))
        if part == len(examples):
            examples.append(component)
        instances.append((part, component.nodes))
    splits_hubs = not (at_hubs and book.crosses_hubs) and bool(wide_hubs(graph).ports)
    return Decomposition(crossable, splits_hubs, tuple(Space(c, book) for c in examples), tuple(instances))


def place(mask_groups: Iterable[Mask], nodes: Nodes) -> list[Nodes]:
    """Groups of positions as groups of the nodes of one instance."""
    return [tuple([nodes[i] for i in bits(mask)]) for mask in mask_groups]


def order_groups(graph: Graph, groups: Iterable[Nodes]) -> tuple[list[Nodes], list[set[int]]]:
    """The groups by lowest node, and for each the groups that wait for it."""
    ranked = sorted(groups)
    return ranked, group_successors(data_edges(graph) + effect_edges(graph), ranked)


def break_cycles(graph: Graph, book: PriceBook, groups: Iterable[Nodes]) -> tuple[list[Nodes], int]:
    """Groups that can run in the order returned, and how many had to be taken apart.

    Of the groups that wait for each other, the one that loses the least is divided into what the others wait
    for and the rest, until nothing waits in a circle. Single nodes never do, so this ends.
    """
    ranked, after = order_groups(graph, groups)
    edges = data_edges(graph) + effect_edges(graph)
    broken = 0
    while cycles := cyclic_sets(after):
        divided: dict[Nodes, list[Nodes]] = {}
        cycle_of = {n: c for c, cycle in enumerate(cycles) for g in cycle for n in ranked[g]}
        within: list[list[Edge]] = [[] for _ in cycles]
        for u, v in edges:
            if u in cycle_of and cycle_of[u] == cycle_of.get(v):
                within[cycle_of[u]].append((u, v))
        for cycle, inner in zip(cycles, within, strict=True):
            ways = [(ranked[g], parts) for g in cycle for parts in _divisions(book, ranked[g], inner)]
            if not ways:
                ways = [(ranked[g], _singles(ranked[g])) for g in cycle if len(ranked[g]) > 1]
            loss = [
                sum_prices(book, parts).time_ps - sum_prices(book, [group]).time_ps for group, parts in ways
            ]
            _, group, parts = min((ps, *way) for ps, way in zip(loss, ways, strict=True))
            divided[group] = parts
        broken += len(divided)
        whole = [nodes for nodes in ranked if nodes not in divided]
        ranked, after = order_groups(graph, whole + [nodes for parts in divided.values() for nodes in parts])
    return [ranked[g] for g in execution_order(after)], broken


def _divisions(book: PriceBook, group: Nodes, edges: Sequence[Edge]) -> Iterator[list[Nodes]]:
    """A group as several that have prices: the nodes that others wait for, with those before them, and the
    rest; the nodes that wait for others, with those behind them, and the rest. Neither, if these are all or
    none of the group.

    ``edges`` are those inside of the group and between it and the others.
    """
    members = set(group)
    following: dict[int, list[int]] = {n: [] for n in group}
    leading: dict[int, list[int]] = {n: [] for n in group}
    for u, v in edges:
        if u in members and v in members:
            following[u].append(v)
            leading[v].append(u)
    awaited = {u for u, v in edges if u in members and v not in members}
    waiting = {v for u, v in edges if v in members and u not in members}
    for first in (
        awaited | reachable(awaited, leading.__getitem__),
        members - waiting - reachable(waiting, following.__getitem__),
    ):
        if 0 < len(first) < len(members):
            parts = [nodes for half in (first, members - first) for nodes in _connected(half, following)]
            priced = [[nodes] if isinstance(book.price(nodes), Price) else _singles(nodes) for nodes in parts]
            yield [nodes for several in priced for nodes in several]


def _singles(nodes: Nodes) -> list[Nodes]:
    return [(n,) for n in nodes]


def _connected(nodes: Collection[int], following: Mapping[int, Sequence[int]]) -> list[Nodes]:
    """The sets of ``nodes`` that edges among them connect."""
    ranked = sorted(nodes)
    place = {n: i for i, n in enumerate(ranked)}
    edges = [(place[u], place[v]) for u in ranked for v in following[u] if v in place]
    return [tuple([ranked[i] for i in positions]) for positions in connected_sets(len(ranked), edges)]


def sum_prices(book: PriceBook, groups: Iterable[Nodes]) -> Price:
    """The cost of groups that all have a price."""
    return total_of(map(book.price, groups))


@dataclass(frozen=True, slots=True)
class Answer:
    """A program, its kernels, and the limits that they keep to, by node of the program."""

    lowered: Lowered
    grouping: Grouping
    limits: Resolved | None


FAILURES = (ImportError, MemoryError, RuntimeError, OverflowError, OSError, AttributeError)
"""What a missing, broken or overwhelmed OR-Tools raises; a library that does not load, OSError."""


@dataclass(slots=True)
class Solved:
    """The best partition found of one distinct component, and what is known about others."""

    groups: list[Mask]
    bound_ps: int
    optimal: bool
    columns: dict[Mask, int] = field(default_factory=dict)
    """Legal groups, each with its time or a floor under it."""
    duals: tuple[int, ...] = ()
    """A price for each position such that no column costs less than its positions."""
    note: Note | None = None
    is_repeatable: bool = True
    """Whether solving it once more gives the same: no solver was missing or failed."""
    lists_all: bool = True
    """Whether ``columns`` are all legal groups that have not been refused, if there are any."""
    has_too_many_copies: bool = False
    """Whether copies of operations make too many groups to prove a plan."""
    cases: tuple[Case, ...] = ()
    """Cases that prove the bound, by position; empty where ``duals`` or the floor do."""


def failure(error: BaseException) -> Note:
    """The note on a solver that could not be used."""
    return note(NoteKind.SOLVER_FAILED, error=str(error) or type(error).__name__)


def ended_note(space: Space, is_late: bool = True) -> Note:
    """The note on a component that the deadline, or the limit of counted work, left unproven."""
    limit = Limit.DEADLINE if is_late and not space.book.work.is_spent else Limit.WORK
    return part_note(NoteKind.UNPROVEN, space, limit)


def part_note(kind: NoteKind, space: Space, limit: Limit | None = None, **figures: int) -> Note:
    """A note on a component, which is named by its size and its first operation."""
    return note(kind, limit=limit, node=space.component.nodes[0], count=space.n, **figures)
