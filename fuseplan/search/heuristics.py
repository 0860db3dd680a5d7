"""Heuristic planners, and the groups that they make of one component.

``unfused`` makes one kernel of each operation. ``greedy`` fuses edge by edge in topological order, as fusing
compilers do: a consumer joins its producer's group if the result is legal and costs no more than the two
apart. It never revises a decision, so the result depends on the order of operations, as TorchInductor's does
(pytorch#142316). ``best_first`` takes the merge that saves the most from a queue, as XLA's priority fusion
does, but merges pairs of groups and compares real prices; it skips a queue entry whose groups have changed.

A group that grows by one operation at a time is priced anew each time, which takes time quadratic in its
size. So after ``LIMITS.max_looked`` operations both heuristics merge the rest in rounds
(``_merge_in_rounds``).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from operator import neg, or_, sub

from costmodel.graph import Graph
from fuseplan.plan.fusion_plan import PlanStats
from fuseplan.plan.notes import NoteKind, note
from fuseplan.schedule.pricing import FREE, Nodes, Price, PriceBook, Pricing, total_of
from fuseplan.search.components import crossable_edges
from fuseplan.search.grouping import Budget, Grouping, break_cycles, decompose, place
from fuseplan.search.limits import LIMITS
from fuseplan.search.presolve import fold
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits, connected_parts, union_at
from fuseplan.support.digraph import connected_sets, execution_order
from fuseplan.support.errors import Verdict
from fuseplan.support.work import DIVISION, WHOLE, Limit, StageTimer, lead_s, may_begin


def unfused(graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
    """One kernel for each operation, in the order of the graph. ``budget`` is not needed."""
    watch = StageTimer()
    return _of_groups(PriceBook(graph, pricing), [(node.id,) for node in graph.nodes], watch)


def undivided(book: PriceBook, left_s: float, watch: StageTimer) -> Grouping:
    """One kernel of all operations if there is one and it is better than one for each, else those: what there
    is time for ``left_s`` before the deadline where a graph is too large to be divided (``DIVISION``)."""
    graph = book.graph
    every = tuple(range(len(graph.nodes)))
    groups: list[Nodes] = [(n,) for n in every]
    if may_begin(WHOLE, len(every), left_s) and book.compatible(every) is None:
        crossable = crossable_edges(graph, book)
        is_connected = len(connected_sets(len(every), crossable.kept + crossable.siblings)) == 1
        together = book.price(every) if is_connected else None
        if isinstance(together, Price) and _is_cheaper(together, map(book.price, groups)):
            groups = [every]
    bound_ps = book.floor(every)
    watch.lap("heuristics")
    found = _of_groups(book, groups, watch)
    return replace(
        found,
        status="OPTIMAL" if found.time_ps == bound_ps else "FEASIBLE",
        bound_ps=bound_ps,
        notes=(note(NoteKind.DIVISION_CUT, limit=Limit.DEADLINE, count=len(every)),),
    )


def _of_groups(book: PriceBook, groups: Sequence[Nodes], watch: StageTimer) -> Grouping:
    """The kernels of ``groups``, which can run in their order."""
    kernels = tuple([book.kernel(nodes) for nodes in groups])
    watch.lap("join")
    n_operations, n_groups, seconds = len(book.graph.nodes), len(groups), tuple(watch.seconds.items())
    n_distinct = min(n_groups, book.n_priced)
    return Grouping(kernels, stats=PlanStats(n_operations, n_groups, n_distinct, book.n_priced, seconds))


def greedy(graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
    """Greedy fusion, until the deadline of ``budget``."""
    return _plan_apart(graph, pricing, greedy_groups, budget)


def best_first(graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
    """Best-first fusion, until the deadline of ``budget``."""
    return _plan_apart(graph, pricing, best_first_groups, budget)


def _plan_apart(
    graph: Graph, pricing: Pricing, merge: Callable[[Space], list[Mask]], budget: Budget | None = None
) -> Grouping:
    """Plan each distinct component by ``merge`` and put the groups in order."""
    watch = StageTimer()
    book = PriceBook(graph, pricing)
    budget = budget or Budget()
    has_deadline = budget.deadline_s > 0
    if has_deadline and not may_begin(DIVISION, len(graph.nodes), budget.deadline_s):
        return undivided(book, budget.deadline_s, watch)
    book.expires_at = watch.started + budget.deadline_s - lead_s(len(graph.nodes))
    book.work = budget.work or book.work
    parts = decompose(graph, book, at_hubs=False)
    watch.lap("partition")
    merged = [heuristic_groups(space, merge) for space in parts.spaces]
    watch.lap("merge")
    groups = [g for part, nodes in parts.instances for g in place(merged[part], nodes)]
    ordered, broken = break_cycles(graph, book, groups)
    left_s = book.expires_at - time.monotonic()
    may_divide = not has_deadline or may_begin(DIVISION, len(graph.nodes), left_s)
    if book.crosses_hubs and parts.splits_hubs and may_divide and not book.is_late():
        parts = decompose(graph, book)
        merged = [
            merge_further(space, groups, merge)
            for space, groups in zip(parts.spaces, parts.groups_within(ordered), strict=True)
        ]
        groups = [g for part, nodes in parts.instances for g in place(merged[part], nodes)]
        ordered, more = break_cycles(graph, book, groups)
        broken += more
        watch.lap("merge")
    kernels = tuple(book.kernel(g) for g in ordered)
    watch.lap("join")
    notes = [note(NoteKind.CYCLES_SPLIT, count=broken)] if broken else []
    notes += [note(NoteKind.MERGES_CUT, limit=Limit.DEADLINE)] if book.was_late else []
    stats = PlanStats(
        len(graph.nodes), len(parts.instances), len(parts.spaces), book.n_priced, tuple(watch.seconds.items())
    )
    refusals = parts.crossable.refusals
    return Grouping(kernels, refusals=refusals, notes=tuple(notes), stats=stats)


def heuristic_groups(space: Space, merge: Callable[[Space], list[Mask]]) -> list[Mask]:
    """A heuristic's groups of a component; where the component is large, or the deadline cut the heuristic
    short, a single kernel if that is better."""
    if space.is_ideal:
        return [space.everything]
    together = space.known_price(space.everything)
    if space.n >= LIMITS.large_component and isinstance(together, Price) and space.book.has_expired():
        # There is no time to merge so many.
        singles = space.singles
        return [space.everything] if _is_cheaper(together, map(space.price, singles)) else singles
    groups = with_offers(space, merge(space))
    may_be_better = space.n >= LIMITS.large_component or space.book.was_late
    if may_be_better and isinstance(together, Price) and _is_cheaper(together, map(space.price, groups)):
        return [space.everything]
    return groups


def merge_further(space: Space, groups: Sequence[Mask], merge: Callable[[Space], list[Mask]]) -> list[Mask]:
    """``groups``, a partition of ``space`` that can run, with those merged that a heuristic merges."""
    small = fold(space, map(bits, groups))
    return [space.mask(small.nodes(mask)) for mask in heuristic_groups(small, merge)]


def _is_cheaper(price: Price, others: Iterable[Price | Verdict]) -> bool:
    """Whether ``price`` is below the sum of ``others``, of which no more are asked for than it takes to
    tell."""
    total = FREE
    return any(price < (total := total_of((total, other))) for other in others)


def with_offers(space: Space, groups: list[Mask]) -> list[Mask]:
    """Put each offered group into ``groups`` that is cheaper than what it replaces, until none is. What an
    offer leaves of a group stays together where that is cheaper. Offers end where ``space.book`` is late."""
    changed = space.everything
    while changed:  # What an offer leaves together may make another one worth its price.
        tried, changed = changed, 0
        for offer in space.offers:
            if space.book.is_late():
                return groups
            if not offer & tried or offer in groups or not isinstance(space.price(offer), Price):
                continue
            apart = [mask for mask in groups if mask & offer]
            left = [part for mask in apart for part in connected_parts(mask & ~offer, space.neighbours)]
            kept = [mask for mask in groups if not mask & offer]
            together = [mask for part in left for mask in _together_or_apart(space, part)]
            singles = [1 << i for part in left for i in bits(part)]
            for rest in (together, singles):  # A rest that stays together may make a cycle with the offer.
                new = [*kept, offer, *rest]
                if space.total([offer, *rest]) < space.total(apart) and space.can_run(new):
                    groups, changed = new, changed | reduce(or_, apart)
                    break
    return groups


def _together_or_apart(space: Space, mask: Mask) -> list[Mask]:
    """``mask`` as one group, or as its nodes where these are cheaper or it can be no kernel."""
    singles = [1 << i for i in bits(mask)]
    price = space.price(mask) if len(singles) > 1 and space.allows(mask) else None
    return singles if not isinstance(price, Price) or space.total(singles) < price else [mask]


def heuristic_plan(space: Space) -> list[Mask]:
    """A good plan, found without enumerating groups."""
    singles = space.singles
    return better(space, singles, with_offers(space, best_first_groups(space)))


def better(space: Space, one: list[Mask], other: list[Mask]) -> list[Mask]:
    """The cheaper of two partitions; the first where they are equal."""
    return other if space.total(other) < space.total(one) else one


def greedy_groups(space: Space) -> list[Mask]:
    """Greedy groups of one component; where ``space.book`` is late, those that were made until then."""
    merging = Merging(space)
    for v in range(space.n):
        for u in space.producers[v]:
            if merging.looked > LIMITS.max_looked:
                _merge_in_rounds(merging)
                return merging.groups()
            if space.book.is_late():
                return merging.groups()
            a, b = merging.owner[u], merging.owner[v]
            if a != b and merging.saving(a, b) is not None and not merging.deadlocks(a, b):
                merging.merge(a, b)
    return merging.groups()


def best_first_groups(space: Space) -> list[Mask]:
    """Best-first groups of one component; where ``space.book`` is late, those that were made until then.

    A merge is queued with what it saves at most, and priced when it comes first: most are
    overtaken by others and never are.
    """
    merging = Merging(space)
    queue: list[tuple[tuple[int, ...], bool, Mask, Mask]] = []

    def offer(a: Mask, b: Mask, priced: bool) -> None:
        saving = merging.saving(a, b) if priced else merging.saving_at_most(a, b)
        if saving is not None:
            heapq.heappush(queue, (tuple(map(neg, saving)), priced, min(a, b), max(a, b)))

    for u, v in space.component.edges + space.component.siblings:
        if merging.owner[u] != merging.owner[v]:
            if merging.looked > LIMITS.max_looked or space.book.is_late():
                break
            offer(merging.owner[u], merging.owner[v], False)
    while queue and merging.looked <= LIMITS.max_looked and not space.book.is_late():
        _, priced, a, b = heapq.heappop(queue)
        if a not in merging.reach or b not in merging.reach or merging.deadlocks(a, b):
            continue
        if not priced:
            offer(a, b, True)
            continue
        both = merging.merge(a, b)
        for other in sorted(merging.neighbours(both)):
            if merging.looked > LIMITS.max_looked or space.book.is_late():
                break
            offer(both, other, False)
    if merging.looked > LIMITS.max_looked:
        _merge_in_rounds(merging)
    return merging.groups()


def _merge_in_rounds(merging: Merging) -> None:
    """Merge each group with the neighbour that saves the most, once a round, until no merge gains or
    ``Merging.space``'s book is late."""
    book = merging.space.book
    refused: set[Mask] = set()
    """Unions that are illegal or lose."""
    gains = True
    while gains:
        gains = False
        merged: set[Mask] = set()
        for group in merging.groups():
            if group not in merging.reach or group in merged:
                continue
            near = [other for other in merging.neighbours(group) if other not in merged]
            near = [other for other in near if group | other not in refused]
            near.sort(key=lambda mask: (mask.bit_count(), mask))
            best: tuple[tuple[int, ...], Mask] | None = None
            for other in near[: LIMITS.max_tried_neighbours]:
                if book.is_late() or merging.looked > LIMITS.max_looked_in_rounds:
                    return
                saving = merging.saving(group, other)
                if saving is None:
                    refused.add(group | other)
                elif (best is None or saving > best[0]) and not merging.deadlocks(group, other):
                    best = saving, other
            if best is not None:
                merged.add(merging.merge(group, best[1]))
                gains = True


class Merging:
    """Groups of a component, at first one an operation. A group is named by its mask.

    The groups are kept in an order in which they could run. Only what stands between two groups in that
    order can wait for one and be waited for by the other, so that a merge of two groups is tested and
    made without looking at the rest (as Pearce and Kelly, "A dynamic topological sort algorithm for
    directed acyclic graphs", JEA 2007, keep an order).
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.owner: list[Mask] = [0] * space.n
        self.reach: dict[Mask, Mask] = {}
        """For each group, the positions that wait for one of its members."""
        self.looked = 0
        """Operations in all groups that were asked about: a count of the work done."""
        self._sizes = list(map(len, space.members))
        singles = space.singles
        for group in singles:
            for i in bits(group):
                self.owner[i] = group
            self.reach[group] = union_at(group, space.below) & ~group
        several = len(singles) < space.n  # else the order of positions is one
        self._order = [singles[g] for g in execution_order(space.followers(singles))] if several else singles
        self._place = {group: k for k, group in enumerate(self._order)}

    def groups(self) -> list[Mask]:
        """The groups as they are now, by lowest member."""
        return sorted(self.reach, key=lambda mask: mask & -mask)

    def saving(self, a: Mask, b: Mask) -> tuple[int, ...] | None:
        """What merging saves in each objective; None if it is illegal or a loss."""
        both = a | b
        self._count(both)
        if not self.space.allows(both):
            return None
        apart = self.space.total((a, b))
        if self.space.known_price(both) is None and apart.time_ps < self.space.least(both):
            return None
        price = self.space.price(both)
        if not isinstance(price, Price) or apart < price:
            return None
        return tuple(map(sub, apart.objectives, price.objectives))

    def saving_at_most(self, a: Mask, b: Mask) -> tuple[int, ...] | None:
        """No less than ``saving``, without pricing the two together."""
        both = a | b
        self._count(both)
        apart = self.space.total((a, b))
        known = self.space.known_price(both)
        least_ps = self.space.least(both) if known is None else 0
        if known is not None or apart.time_ps < least_ps:
            return self.saving(a, b) if known is not None else None
        return (apart.time_ps - least_ps, apart.hbm_bytes, apart.kernels) if self.space.allows(both) else None

    def _count(self, both: Mask) -> None:
        size = sum([self._sizes[i] for i in bits(both)])
        self.looked += size
        self.space.book.looked += size

    def neighbours(self, group: Mask) -> set[Mask]:
        """The groups that share an edge or an array with ``group``."""
        return {self.owner[i] for i in bits(union_at(group, self.space.neighbours) & ~group)}

    def deadlocks(self, a: Mask, b: Mask) -> bool:
        """Whether a third group waits for one of the two and is waited for by the other."""
        first, last = sorted((self._place[a], self._place[b]))
        start, goal = self._order[first], self._order[last]
        waiting = self.reach[start]
        for group in self._order[first + 1 : last]:
            if group & waiting:
                if self.reach[group] & goal:
                    return True
                waiting |= self.reach[group]
        return False

    def merge(self, a: Mask, b: Mask) -> Mask:
        """Make the two groups one; they must not deadlock."""
        both = a | b
        first, last = sorted((self._place.pop(a), self._place.pop(b)))
        waiting = self.reach[self._order[first]]
        before: list[Mask] = []
        after: list[Mask] = []
        for group in self._order[first + 1 : last]:
            if group & waiting:
                waiting |= self.reach[group]
                after.append(group)
            elif group:
                before.append(group)
        moved = [*before, both, *after]
        # Places that are left over hold the empty group.
        self._order[first : last + 1] = [0] * (last + 1 - first - len(moved)) + moved
        for k, group in enumerate(moved, last + 1 - len(moved)):
            self._place[group] = k
        self.reach[both] = (self.reach.pop(a) | self.reach.pop(b)) & ~both
        for i in bits(both):
            self.owner[i] = both
        return both
