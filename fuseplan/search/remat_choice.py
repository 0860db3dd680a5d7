"""Which values a kernel would better compute for itself: found by moving them, one after the other.

With copies of everything that could be computed again, there are several times as many groups as
without. Of many, those are left to the search that some kernel of the best plan without would better compute
for itself. In the gradient of a GPT-2 block for an H200 these are 7 of 17; it is planned in half of
the time, and the plan is the same.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from costmodel.graph import Graph
from fuseplan.plan.constraints import Resolved
from fuseplan.schedule.pricing import Nodes, Price, PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.constrained_pricing import limited
from fuseplan.search.duplicate_pricing import Recomputing
from fuseplan.search.duplicates import Copies, roots_of, split
from fuseplan.search.grouping import Components
from fuseplan.search.remat_sample import by_place, sample_of

_FEW = 6
"""So many values are all left to the search: a GPT-2 block has 5, and the best plan of it on a GPU
computes one again that a kernel would not, were the others as they are."""


def computed_once(limits: Resolved | None) -> frozenset[int]:
    """What nothing may compute again: what must share a kernel."""
    return frozenset() if limits is None else limits.fused


def worth_again(
    graph: Graph,
    scheduler: Scheduler,
    components: Components,
    groups: Sequence[Nodes],
    limits: Resolved | None = None,
) -> Nodes:
    """The operations that could be computed again; of many, those that one kernel of ``groups``, or all
    that read the result, would better compute for themselves, with what leads there. What is found
    of one holds of all at such a place in components of these kinds, but where ``limits`` may tell
    them apart, or a planner does not go by components and gives none."""
    roots = roots_of(graph, scheduler.device)
    if len(roots) <= _FEW:
        return roots
    if not components or (limits is not None and limits.shapes_groups):
        copies = split(graph, roots, computed_once(limits))
        return (
            () if copies is None else tuple(sorted(_Trials(copies, scheduler, groups, limits).worthwhile()))
        )
    places = by_place(graph, components, roots)
    some = _side_by_side(graph, places)
    # With all that may be computed again beside them, and all that reads it: as in the whole.
    close = sample_of(graph, components, some)
    sample = sample_of(graph, components, [n for n, *_ in close.alike if n in frozenset(roots)])
    every = split(sample.graph, roots_of(sample.graph, scheduler.device))
    if every is None:
        return ()
    trials = _Trials(every, sample.scheduler(scheduler), sample.here(groups), None)
    found = {sample.alike[i][0] for i in trials.worthwhile()}
    return tuple(sorted(n for nodes, one in zip(places, some, strict=True) if one in found for n in nodes))


def _side_by_side(graph: Graph, places: Sequence[Nodes]) -> Nodes:
    """One node of each of ``places``, near each other in the program: those of one layer, if there
    are layers."""

    def span(n: int) -> list[int]:
        return [n, *(r for v in graph.nodes[n].outputs for r in graph.consumers[v])]

    def distance(n: int, near: Sequence[int]) -> int:
        return min(abs(m - other) for m in span(n) for other in _around(near, m))

    chosen: dict[Nodes, int] = {}
    near: list[int] = []
    for nodes in sorted(places, key=len, reverse=True):
        one = min(nodes, key=partial(distance, near=near)) if near else nodes[len(nodes) // 2]
        chosen[nodes] = one
        near = sorted({*near, *span(one)})
    return tuple(chosen[nodes] for nodes in places)


def _around(numbers: Sequence[int], n: int) -> Sequence[int]:
    """Of ascending ``numbers``, those next to ``n``."""
    i = bisect(numbers, n)
    return numbers[max(i - 1, 0) : i + 1]


class _Trials:
    """Kernels of a plan, each with all copies of its operations, and what moving some would cost."""

    def __init__(
        self, copies: Copies, scheduler: Scheduler, groups: Sequence[Nodes], limits: Resolved | None
    ) -> None:
        self._copies, self._graph = copies, copies.graph
        there = None if limits is None else limits.moved(copies.places)
        self._book = PriceBook(*limited(copies.graph, Recomputing(copies, scheduler), there))
        kernel_of = {n: g for g, nodes in enumerate(groups) for n in nodes}
        self._kernel = [kernel_of[n] for n in copies.node]
        """For each copy, where its operation is computed."""
        self._members: list[list[int]] = [[] for _ in groups]
        for c, g in enumerate(self._kernel):
            self._members[g].append(c)
        self._now_ps: dict[int, float] = {}
        self._roots = frozenset(copies.roots)
        self._several = {c for c, n in enumerate(copies.node) if copies.copies[n] > 1}

    def worthwhile(self) -> Iterator[int]:
        found: set[int] = set()
        for moves in self._moves():
            wanted = {self._copies.node[c] for moved, _ in moves for c in moved} & self._roots
            if not wanted <= found and self._extra_ps(moves) < 0:
                found |= wanted
        yield from found

    def _moves(self) -> Iterator[list[tuple[list[int], int]]]:
        """For each root, each way to compute it again: copies, and the kernel that they move to."""
        of_root: dict[int, list[int]] = defaultdict(list)
        for c, n in enumerate(self._copies.node):
            if n in self._roots:
                of_root[n].append(c)
        for copies in of_root.values():
            to: dict[int, list[int]] = defaultdict(list)
            for c in copies:
                for reader in {r for v in self._graph.nodes[c].outputs for r in self._graph.consumers[v]}:
                    if self._kernel[reader] != self._kernel[c]:
                        to[self._kernel[reader]].append(c)
            for deep in (False, True):
                each = [(self._cone(some, g, deep), g) for g, some in to.items()]
                yield from ([one] for one in each)
                if len(each) > 1:
                    yield each

    def _cone(self, copies: Iterable[int], g: int, deep: bool) -> list[int]:
        """``copies`` with what leads to them and is computed again with them; if ``deep``, with all
        copies that they need, as far as kernel ``g`` does not compute them anyway."""
        cone: dict[int, None] = {}
        waiting = list(copies)
        while waiting:
            c = waiting.pop()
            if c in cone or self._kernel[c] == g:
                continue
            cone[c] = None
            makers = (self._graph.values[v].producer for v in self._graph.nodes[c].inputs)
            for m in makers:
                if m in self._several and (deep or self._copies.node[m] not in self._roots):
                    waiting.append(m)
        return list(cone)

    def _extra_ps(self, moves: Sequence[tuple[list[int], int]]) -> float:
        """Picoseconds that the plan takes more after the moves; infinity if it cannot be."""
        after: dict[int, set[int]] = {}
        for moved, g in moves:
            after.setdefault(g, set(self._members[g])).update(moved)
            for c in moved:
                source = self._kernel[c]
                after.setdefault(source, set(self._members[source])).discard(c)
        extra = 0.0
        for g, nodes in after.items():
            if g not in self._now_ps:
                self._now_ps[g] = self._price_ps(self._members[g])
            extra += self._price_ps(nodes) - self._now_ps[g]
        return extra

    def _price_ps(self, nodes: Iterable[int]) -> float:
        group = tuple(sorted(nodes))
        price = self._book.price(group) if group else Price(0, 0, 0)
        return price.time_ps if isinstance(price, Price) else float("inf")
