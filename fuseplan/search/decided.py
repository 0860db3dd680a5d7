"""Split the groups that another system's rules ask for into groups that are legal kernels here.

A planner that imitates another system follows that system's rules, not our prices, and may ask for groups
that no kernel of ours can hold: a sum along rows and one down columns, say. Such a group is divided into
pieces: each operation joins the piece of an operand where that is legal. A note says so. The plan is legal,
and its cost is that of the kernels that would run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from costmodel.graph import Graph
from fuseplan.plan.fusion_plan import PlanStats
from fuseplan.plan.notes import AnyNote, NoteKind, note
from fuseplan.schedule.pricing import Nodes, PriceBook, Pricing
from fuseplan.search.components import hub_edges
from fuseplan.search.grouping import Grouping, break_cycles
from fuseplan.search.selectors import Ties
from fuseplan.search.space import Mask
from fuseplan.support.bitset import bits, pick, union_at
from fuseplan.support.errors import InvalidArgumentError, Verdict
from fuseplan.support.work import StageTimer

Decide = Callable[[PriceBook], Iterable[Sequence[int]]]
"""Returns the groups of two or more operations of a price book's graph. An operation in several groups is
to be computed in each of them."""


def plan_decided(graph: Graph, pricing: Pricing, decide: Decide) -> Grouping:
    """Plan the groups that ``decide`` makes, and one kernel for each operation in no group.

    Raises:
        InvalidArgumentError: a group has a node that the graph has not.
    """
    watch = StageTimer()
    # A planner that does not ask for loop nests gets none.
    book = PriceBook(graph, pricing.unsettled())
    asked = tuple(tuple(sorted(set(group))) for group in decide(book))
    n = len(graph.nodes)
    strange = next((m for group in asked for m in group if not 0 <= m < n), None)
    if strange is not None:
        raise InvalidArgumentError(f"a group has node {strange}, but the graph has {n} nodes, from 0")
    wanted, repeated = _once(asked)
    watch.lap("decide")
    divided = _GroupSplitter(graph, book)
    groups = [piece for group in wanted for piece in divided.pieces(group)]
    inside = {m for group in wanted for m in group}
    groups += [(node.id,) for node in graph.nodes if node.id not in inside]
    ordered, broken = break_cycles(graph, book, groups)
    watch.lap("join")
    kernels = tuple(book.kernel(group) for group in ordered)
    stats = PlanStats(n, n, book.n_priced, book.n_priced, tuple(watch.seconds.items()))
    notes = divided.notes(broken)
    if repeated:
        notes += (note(NoteKind.REPEATS_DROPPED, count=repeated),)
    refusals = tuple(divided.refusals)
    return Grouping(kernels, refusals=refusals, notes=notes, stats=stats, repeats=asked if repeated else ())


def _once(groups: Sequence[Nodes]) -> tuple[list[Nodes], int]:
    """Keep each operation only in the first group that has it; also how many were in several groups."""
    seen: set[int] = set()
    kept: list[Nodes] = []
    for group in groups:
        kept.append(tuple(n for n in group if n not in seen))
        seen.update(group)
    repeated = {n for n, count in Counter(n for group in groups for n in group).items() if count > 1}
    return [group for group in kept if group], len(repeated)


class _GroupSplitter:
    """Divides groups that cannot be one kernel, groups of equal structure alike."""

    def __init__(self, graph: Graph, book: PriceBook) -> None:
        self.graph, self.book = graph, book
        self.refusals: list[Verdict] = []
        """For each group that was divided, why it cannot be one kernel."""
        self._known: dict[object, list[Nodes]] = {}
        self._offers = frozenset(book.offers)
        hubs = () if book.crosses_hubs else hub_edges(graph)
        self._ties = Ties(graph, book.full_size_operands, hubs)
        self._untied = 0

    def pieces(self, group: Nodes) -> list[Nodes]:
        """Split a group into legal kernels; the group alone if it is one."""
        parts = self._ties.parts(group)
        self._untied += len(parts) > 1
        return [piece for part in parts for piece in self._kernels(part)]

    def _kernels(self, group: Nodes) -> list[Nodes]:
        refused = self._refuse(group)
        if refused is None:
            return [group]
        self.refusals.append(refused)
        key = self.book.signatures.of(group).key, self.book.offers_within(group)
        if key not in self._known:
            place = {n: i for i, n in enumerate(group)}
            self._known[key] = [tuple(place[n] for n in piece) for piece in self._divide(group)]
        return [tuple(group[i] for i in piece) for piece in self._known[key]]

    def _refuse(self, group: Nodes) -> Verdict | None:
        """Why the group cannot be one kernel. A group that the rules refuse can be one only if the scheduler
        offers it: the price of other loops is not the time that they take."""
        if len(group) == 1:
            return None
        verdict = None if group in self._offers else self.book.compatible(group)
        price = self.book.price(group) if verdict is None else verdict
        return price if isinstance(price, Verdict) else None

    def notes(self, broken: int) -> tuple[AnyNote, ...]:
        """The notes on groups that are several kernels; ``broken`` were split for their cycles."""
        found = []
        if self.refusals:
            count, reason = len(self.refusals), self.refusals[0].reason
            found.append(note(NoteKind.GROUPS_REFUSED, count=count, reason=reason))
        if self._untied:
            found.append(note(NoteKind.GROUPS_UNTIED, count=self._untied))
        if broken:
            found.append(note(NoteKind.CYCLES_SPLIT, count=broken))
        return tuple(found)

    def _divide(self, group: Nodes) -> list[Nodes]:
        """The pieces of a group: each operation joins the pieces of its operands, the last operand first."""
        place, values = {n: i for i, n in enumerate(group)}, self.graph.values
        above = [0] * len(group)
        owner: dict[int, Mask] = {}
        for i, n in enumerate(group):
            makers = {place[m] for v in self.graph.nodes[n].inputs if (m := values[v].producer) in place}
            for j in makers:
                above[i] |= above[j] | 1 << j
            piece = owner[i] = 1 << i
            for j in sorted(makers, reverse=True):
                both = piece | owner[j]
                if both != piece and self._is_kernel(group, both, above):
                    piece = both
                    owner.update(dict.fromkeys(bits(both), both))
        return [tuple(pick(mask, group)) for mask in sorted(set(owner.values()), key=lambda m: m & -m)]

    def _is_kernel(self, group: Nodes, mask: Mask, above: Sequence[Mask]) -> bool:
        """Whether a kernel may hold these positions of a group, and no operation between them is outside."""
        if any(above[i] & mask for i in bits(union_at(mask, above) & ~mask)):
            return False
        return self._refuse(tuple(pick(mask, group))) is None
