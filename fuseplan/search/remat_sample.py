"""A sample of a graph: one of each distinct region in which something may be computed again.

Where an operation gets a copy for each of its readers (``fuseplan.search.duplicates``), groups may hold what
was in several components before: theirs. Such components are a *region*. The layers of a network
have equal regions, and what is worth computing again in one is so in all of them; to find it out
for one of each is enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import rustworkx as rx

from costmodel.graph import Graph, Node, Value, check_graph, make_graph
from fuseplan.schedule.outside_paths import Edge, paths_back
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.schedule.structure import Signatures
from fuseplan.search.components import data_edges, effect_edges
from fuseplan.search.duplicates import readers_of_copies
from fuseplan.search.grouping import Components
from fuseplan.support.bitset import bits

Nodes = tuple[int, ...]


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


def _cut_out(
    graph: Graph,
    regions: Sequence[Nodes],
    below: Sequence[tuple[int, ...]],
    alike: Sequence[tuple[Nodes, ...]],
) -> Sample:
    """The graph of some regions: what they read of others are inputs, what others read of them results."""
    values: list[Value] = []
    nodes: list[Node] = []
    inputs: dict[int, int] = {}
    results: list[int] = []
    waits: list[Edge] = []

    def add(v: int, producer: int) -> int:
        values.append(replace(graph.values[v], id=len(values), producer=producer))
        return values[-1].id

    for region, paths in zip(regions, below, strict=True):
        members = frozenset(region)
        made: dict[int, int] = {}
        first = len(nodes)
        for n in region:
            node = graph.nodes[n]
            for v in node.inputs:
                if v not in made and v not in inputs:
                    inputs[v] = add(v, -1)
            reads = tuple([made[v] if v in made else inputs[v] for v in node.inputs])
            made.update({v: add(v, len(nodes)) for v in node.outputs})
            nodes.append(
                replace(node, id=len(nodes), inputs=reads, outputs=tuple([made[v] for v in node.outputs]))
            )
        results += [
            w for v, w in made.items() if v in graph.results or not members.issuperset(graph.consumers[v])
        ]
        waits += [(first + i, first + j) for i, j in _direct(graph, region, paths)]
    cut = check_graph(make_graph(values, nodes, inputs.values(), results, waits=waits))
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
