"""Which values a kernel would better compute for itself: found by moving them, one after the other.

With copies of everything that could be computed again, there are several times as many groups as
without. Of many, those are left to the search that some kernel of the best plan without would better compute
for itself. In the gradient of a GPT-2 block for an H200 these are 7 of 17; it is planned in half of
the time, and the plan is the same.

A sample of a graph: one of each distinct region in which something may be computed again.

Where an operation gets a copy for each of its readers (``fuseplan.search.remat.duplicates``), groups may hold
what was in several components before: theirs. Such components are a *region*. The layers of a network have
equal regions, and what is worth computing again in one is so in all of them; to find it out for one of each
is enough.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import rustworkx as rx

from costmodel.graph import ORIGINAL, Graph, GraphRewriter, Item, boundary
from fuseplan.plan.constraints import Resolved
from fuseplan.schedule.pricing import Nodes, Price, PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.schedule.shared_operands import Edge
from fuseplan.schedule.structure import Signatures
from fuseplan.search.components import data_edges, effect_edges, paths_back
from fuseplan.search.constrained_pricing import limited
from fuseplan.search.grouping import Components
from fuseplan.search.limits import LIMITS
from fuseplan.search.remat.duplicate_pricing import Recomputing
from fuseplan.search.remat.duplicates import Copies, readers_of_copies, roots_of, split
from fuseplan.support.bitset import bits


@dataclass(frozen=True, slots=True)
class Sample:
    """A graph of one region of each kind, and where the others are."""

    graph: Graph
    """Its nodes wait for each other (``Graph.waits``) where a path between them leaves their region."""
    alike: tuple[Nodes, ...]
    """For each node of ``graph``, those of the whole graph that stand as it does in regions of its
    kind; the first is the one itself."""

    def everywhere(self, nodes: Iterable[int]) -> Nodes:
        """The nodes of the whole graph that are as ``nodes`` are."""
        return tuple(sorted(n for i in nodes for n in self.alike[i]))

    def first(self, nodes: Iterable[int]) -> Nodes:
        """Those of ``nodes``, of the whole graph, that lie in the sample, by its own numbers."""
        wanted = frozenset(nodes)
        return tuple(i for i, same in enumerate(self.alike) if same[0] in wanted)

    def scheduler(self, whole: Scheduler) -> Scheduler:
        """Prices of the sample's groups on the same device, with the same features."""
        return Scheduler(self.graph, whole.device, features=whole.features)

    def here(self, groups: Iterable[Nodes]) -> tuple[Nodes, ...]:
        """Those of ``groups``, of nodes of the whole graph, that lie in the sample."""
        number = {nodes[0]: i for i, nodes in enumerate(self.alike)}
        inside = (group for group in groups if group[0] in number)
        return tuple(tuple(sorted(number[n] for n in group)) for group in inside)


def sample_of(graph: Graph, components: Components, roots: Collection[int]) -> Sample:
    """The regions that copies of ``roots`` would make, one of each kind. ``components`` has, for each
    component of ``graph``, its kind and its nodes."""
    regions = _regions(graph, components, roots)
    place = {n: (r, i) for r, nodes in enumerate(regions) for i, n in enumerate(nodes)}
    made_of: list[list[tuple[int, Nodes]]] = [[] for _ in regions]
    for kind, nodes in components:
        if nodes[0] in place:
            positions = tuple([place[n][1] for n in nodes])
            made_of[place[nodes[0]][0]].append((kind, positions))
    below = _paths_outside(graph, regions)
    signatures = Signatures(graph)
    equal: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for r, nodes in enumerate(regions):
        equal[signatures.key(nodes)[0], tuple(made_of[r]), below[r]].append(r)
    chosen = [rs[0] for rs in equal.values()]
    alike = [tuple(zip(*[regions[r] for r in rs], strict=True)) for rs in equal.values()]
    return _cut_out(graph, [regions[r] for r in chosen], [below[r] for r in chosen], alike)


def by_place(graph: Graph, components: Components, roots: Iterable[int]) -> list[Nodes]:
    """``roots`` by the kinds and positions of what they and their readers are."""
    place = {n: (kind, i) for kind, nodes in components for i, n in enumerate(nodes)}
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for n in roots:
        made = graph.nodes[n].outputs
        readers = [place[r] for v in made for r in graph.consumers[v]]
        found[place[n], tuple(readers), graph.results.isdisjoint(made)].append(n)
    return [tuple(nodes) for nodes in found.values()]


def _regions(graph: Graph, components: Components, roots: Collection[int]) -> list[Nodes]:
    """The nodes of components between which copies may stand: those of what is copied and of what
    reads it."""
    component_of = {n: c for c, (_, nodes) in enumerate(components) for n in nodes}
    joined: rx.PyGraph = rx.PyGraph(multigraph=False)
    joined.add_nodes_from(range(len(components)))
    touched: set[int] = set()
    for n, copies in enumerate(readers_of_copies(graph, frozenset(roots))):
        if len(copies) > 1:
            for r in {n, *(r for readers in copies for r, _ in readers if r >= 0)}:
                touched.add(component_of[r])
                joined.add_edge(component_of[n], component_of[r], None)
    together = (cs for cs in rx.connected_components(joined) if not touched.isdisjoint(cs))
    return sorted(tuple(sorted(n for c in cs for n in components[c][1])) for cs in together)


def _paths_outside(graph: Graph, regions: Sequence[Nodes]) -> list[tuple[int, ...]]:
    """For each region, for each of its positions, those to which a path leads that leaves it."""
    inside = {n for nodes in regions for n in nodes}
    members = [*regions, *((n.id,) for n in graph.nodes if n.id not in inside)]
    place = [(0, 0)] * len(graph.nodes)
    for r, nodes in enumerate(members):
        for i, n in enumerate(nodes):
            place[n] = (r, i)
    within: list[Edge] = []
    leaving: list[Edge] = list(effect_edges(graph))
    for u, v in data_edges(graph):
        (within if place[u][0] == place[v][0] else leaving).append((u, v))
    back = paths_back(members, place, within, leaving)
    return [back.below(nodes) for nodes in regions]


_GIVEN = 0
"""The copy of a value that a region reads and another node makes."""


def _cut_out(
    graph: Graph,
    regions: Sequence[Nodes],
    below: Sequence[tuple[int, ...]],
    alike: Sequence[tuple[Nodes, ...]],
) -> Sample:
    """The graph of some regions: what they read of others are inputs, what others read of them results."""
    rewriter = GraphRewriter(replace(graph, origins=()), ())
    results: list[int] = []
    waits: list[Edge] = []
    for region, paths in zip(regions, below, strict=True):
        members = frozenset(region)

        def read(v: int, members: frozenset[int] = members) -> Item:
            maker = graph.values[v].producer
            return (v, ORIGINAL) if maker in members else (v, _GIVEN)

        first = len(rewriter.nodes)
        for n in region:
            for item in map(read, graph.nodes[n].inputs):
                if item[1] == _GIVEN and item not in rewriter.ids:
                    rewriter.add_value(*item)
            rewriter.add(n, ORIGINAL, read)
        results += [rewriter.ids[v, ORIGINAL] for v in boundary(graph, region).writes]
        waits += [(first + i, first + j) for i, j in _direct(graph, region, paths)]
    cut = rewriter.finished(results, waits)
    return Sample(cut, tuple([same for positions in alike for same in positions]))


def _direct(graph: Graph, region: Nodes, below: Sequence[int]) -> Iterator[Edge]:
    """Pairs of positions from which, with the edges of a region, follows all that ``below`` says."""
    position = {n: i for i, n in enumerate(region)}
    before, after = [0] * len(region), [0] * len(region)
    for i, n in enumerate(region):
        for v in graph.nodes[n].inputs:
            p = position.get(graph.values[v].producer)
            if p is not None:
                before[i] |= 1 << p
                after[p] |= below[i]
    first = {later: sum(1 << j for j in bits(later) if not before[j] & later) for later in set(below)}
    for i, later in enumerate(below):
        yield from ((i, j) for j in bits(first[later] & ~after[i]))


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
    if len(roots) <= LIMITS.untried_copies:
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
