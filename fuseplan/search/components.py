"""Split a graph into components that can be planned one by one.

An edge is *crossable* if some legal group may hold both of its ends. Groups are connected by
crossable edges and siblings, so no group spans two weakly connected components of them,
and costs add up: components are planned apart, equal ones once. Only the order of
execution couples them (``fuseplan.support.digraph``).

Inside a component all edges are crossable, so a path that leaves it does so by a barrier, at one of a few
*exits*. Sets of exits are integers with a bit an exit: those that a node leads to, and those that lead to a
node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from costmodel.graph import Graph
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.shared_operands import Edge, sibling_pairs, wide_hubs
from fuseplan.support.digraph import connected_sets
from fuseplan.support.errors import Verdict

Place = tuple[int, int]
"""The component of a node, and its position there."""


@dataclass(frozen=True, slots=True)
class Crossable:
    """``kept`` are the edges that some group may cross; ``barriers`` all others, with the
    order of side effects. ``refusals`` has one verdict for each kind of dropped edge.
    ``siblings`` are pairs that a group may hold because both read one array, or a scalar of a wide hub;
    ``ties`` pairs that an offered group holds, whether or not another group may."""

    kept: tuple[Edge, ...]
    barriers: tuple[Edge, ...]
    refusals: tuple[Verdict, ...]
    siblings: tuple[Edge, ...] = ()
    ties: tuple[Edge, ...] = ()


@dataclass(frozen=True, slots=True)
class Component:
    """Nodes connected by crossable edges, siblings and offered groups. Positions index ``nodes``, which
    ascend."""

    nodes: tuple[int, ...]
    edges: tuple[Edge, ...]
    """Crossable edges, by position."""
    siblings: tuple[Edge, ...]
    """Pairs of siblings, by position."""
    apart: tuple[int, ...]
    """For each position, the set (a bit a position) of those below it on a path through a
    barrier: a group with both ends would not be convex."""


def data_edges(graph: Graph) -> tuple[Edge, ...]:
    """Each (producer, consumer) pair of nodes once, in order of the consumer."""
    edges: dict[Edge, None] = {}
    for node in graph.nodes:
        for v in node.inputs:
            producer = graph.values[v].producer
            if producer >= 0:
                edges[producer, node.id] = None
    return tuple(edges)


def effect_edges(graph: Graph) -> tuple[Edge, ...]:
    """Pairs of nodes that are ordered though no value passes between them: successive side effects, and
    ``Graph.waits``."""
    effects = [node.id for node in graph.nodes if node.effects]
    return (*pairwise(effects), *graph.waits)


def crossable_edges(graph: Graph, book: PriceBook, at_hubs: bool = True) -> Crossable:
    """Drop every edge that no legal group can cross: its ends are incompatible, or some
    other path between them runs through a dropped edge.

    At wide hubs, readers of a scalar are siblings. Without ``at_hubs``, or where kernels are not fused across
    hubs (``Pricing.crosses_hubs``), edges there are dropped.

    One pass of the second rule is a fixed point: where a path runs through an edge that
    the second rule dropped, another runs through the barrier that dropped it.
    """
    dropped: dict[tuple[str, str], list[Edge]] = defaultdict(list)
    """By rule and reason."""
    kept: list[Edge] = []
    barriers: list[Edge] = list(effect_edges(graph))
    at_hubs = at_hubs and book.crosses_hubs
    hubs = {} if at_hubs else hub_edges(graph)
    offered = _offered_edges(graph, book)
    every = tuple(range(len(graph.nodes)))
    # A set that is allowed has no part that is refused.
    all_allowed = len(every) > 1 and book.compatible(every) is None
    for edge in data_edges(graph):
        verdict = None if edge in offered else hubs.get(edge)
        if verdict is None and not all_allowed and edge not in offered:
            verdict = book.compatible(edge)
        if verdict is None:
            kept.append(edge)
        else:
            barriers.append(edge)
            dropped[verdict.rule, verdict.reason].append(edge)

    enclosed = _enclosed(len(graph.nodes), kept, barriers)
    if enclosed:
        reason = "another path between the two leaves the group: its kernel would wait for itself"
        dropped["cycle", reason] = sorted(enclosed)
        barriers += enclosed
        kept = [edge for edge in kept if edge not in enclosed]
    refusals = tuple(
        Verdict(rule, f"{reason} ({len(edges)} such edges)" if len(edges) > 1 else reason, edges[0])
        for (rule, reason), edges in dropped.items()
    )
    shared = [book.full_size_operands(node.id) for node in graph.nodes]
    if at_hubs:
        scalars = wide_hubs(graph).ports
        shared = [
            (*arrays, *(v for v in dict.fromkeys(node.inputs) if v in scalars))
            for node, arrays in zip(graph.nodes, shared, strict=True)
        ]

    def parted(pairs: Sequence[Edge]) -> Callable[[int, int], bool]:
        return _reentrant(len(graph.nodes), kept, barriers, pairs).join

    pairs = sibling_pairs(shared, parted)
    siblings = [pair for pair in pairs if all_allowed or book.compatible(pair) is None]
    siblings += [pair for copies in book.copies for pair in combinations(copies, 2)]
    ties = dict.fromkeys((nodes[0], n) for nodes in book.offers for n in nodes[1:])
    return Crossable(tuple(kept), tuple(barriers), refusals, tuple(dict.fromkeys(siblings)), tuple(ties))


def components(graph: Graph, crossable: Crossable) -> tuple[Component, ...]:
    """The sets of nodes that crossable edges, siblings and offered groups connect, by lowest node."""
    members = connected_sets(len(graph.nodes), crossable.kept + crossable.siblings + crossable.ties)
    place = _places(len(graph.nodes), members)
    edges: list[list[Edge]] = [[] for _ in members]
    pairs: list[list[Edge]] = [[] for _ in members]
    for found, given in ((edges, crossable.kept), (pairs, crossable.siblings)):
        for u, v in given:
            found[place[u][0]].append((place[u][1], place[v][1]))
    back = reentrant_paths(members, place, crossable.kept, crossable.barriers)
    return tuple(
        Component(tuple(nodes), tuple(sorted(inner)), tuple(sorted(side)), back.below(nodes))
        for nodes, inner, side in zip(members, edges, pairs, strict=True)
    )


def _places(n_nodes: int, members: Sequence[Sequence[int]]) -> list[Place]:
    places: list[Place] = [(0, 0)] * n_nodes
    for c, nodes in enumerate(members):
        for i, n in enumerate(nodes):
            places[n] = (c, i)
    return places


def _enclosed(n_nodes: int, kept: Sequence[Edge], barriers: Sequence[Edge]) -> set[Edge]:
    """The kept edges whose ends are also joined by a path through a barrier."""
    back = _reentrant(n_nodes, kept, barriers)
    return {(u, v) for u, v in kept if back.join(u, v)}


def _reentrant(
    n_nodes: int, kept: Sequence[Edge], barriers: Sequence[Edge], pairs: Sequence[Edge] = ()
) -> ReentrantPaths:
    """The paths that leave what crossable edges and ``pairs`` connect, and come back."""
    members = connected_sets(n_nodes, [*kept, *pairs])
    return reentrant_paths(members, _places(n_nodes, members), kept, barriers)


def component_key(book: PriceBook, component: Component) -> tuple:
    """Equal for components that are the same planning problem on other arrays."""
    structure = book.signatures.key(component.nodes)[0]
    offers = book.offers_within(component.nodes)
    return structure, component.edges, component.siblings, component.apart, offers


def _offered_edges(graph: Graph, book: PriceBook) -> set[Edge]:
    """The edges inside groups that the scheduler offers."""
    offered: set[Edge] = set()
    for nodes in book.offers:
        inside = set(nodes)
        for n in nodes:
            makers = {graph.values[v].producer for v in graph.nodes[n].inputs}
            offered.update((u, n) for u in makers & inside)
    return offered


def hub_edges(graph: Graph) -> dict[Edge, Verdict]:
    """The edges through which a scalar ties more than ``MAX_PORTS`` operations together."""
    hubs = wide_hubs(graph)
    dropped: dict[Edge, Verdict] = {}
    for node in graph.nodes:
        if hubs.ports.keys().isdisjoint(node.inputs):
            continue
        by_array: set[Edge] = set()
        for v in node.inputs:
            edge = (graph.values[v].producer, node.id)
            if v in hubs.ports and not (edge[0] in hubs.arithmetic and node.id in hubs.arithmetic):
                reason = (
                    f"a scalar that ties {hubs.ports[v]} operations together is passed between their kernels"
                )
                dropped[edge] = Verdict("hub", reason, edge)
            else:
                by_array.add(edge)
        for edge in by_array:
            dropped.pop(edge, None)
    return dropped


@dataclass(frozen=True, slots=True)
class ReentrantPaths:
    """Exits of a node's own component; a node without any is missing."""

    leaving: dict[int, int]
    """Those that crossable edges lead to from the node, itself one of them or not."""
    entering: dict[int, int]
    """Those from which a path that starts with a barrier leads to the node."""

    def join(self, u: int, v: int) -> bool:
        """Whether a path through a barrier leads from ``u`` to ``v``, of one component."""
        return self.leaving.get(u, 0) & self.entering.get(v, 0) != 0

    def below(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """For each node, the bitmask of positions reachable from it on a path with a barrier edge."""
        entered: dict[int, int] = {}
        for i, n in enumerate(nodes):
            if n in self.entering:
                exits = self.entering[n]
                entered[exits] = entered.get(exits, 0) | 1 << i
        if not entered:
            return (0,) * len(nodes)
        known = {
            exits: sum(positions for some, positions in entered.items() if some & exits)
            for exits in {self.leaving.get(n, 0) for n in nodes}
        }
        return tuple([known[self.leaving.get(n, 0)] for n in nodes])


def reentrant_paths(
    members: Sequence[Sequence[int]], place: Sequence[Place], kept: Sequence[Edge], barriers: Sequence[Edge]
) -> ReentrantPaths:
    """The paths that leave the components ``members`` and come back. They are connected by
    ``kept``, the crossable edges, in order of the consumer; ``place`` has every node's place."""
    exits = _exits(members, place, barriers)
    first: dict[int, int] = {}
    bit: dict[int, int] = {}
    leaving: dict[int, int] = {}
    for c, nodes in exits.items():
        first[c] = len(bit)
        for k, u in enumerate(nodes):
            bit[u] = len(bit)
            leaving[u] = 1 << k
    for u, v in reversed(kept):
        if v in leaving:
            leaving[u] = leaving.get(u, 0) | leaving[v]
    entering: dict[int, int] = {}
    for v, reached in _reached(len(place), kept, barriers, bit) if exits else ():
        c = place[v][0]
        if c in first:
            own = reached >> first[c] & ((1 << len(exits[c])) - 1)
            if own:
                entering[v] = own
    return ReentrantPaths(leaving, entering)


def _exits(
    members: Sequence[Sequence[int]], place: Sequence[Place], barriers: Sequence[Edge]
) -> dict[int, list[int]]:
    """For each component, the nodes that barriers leave it from, but for those after the last
    node to which one leads."""
    entered = [-1] * len(members)
    for _, v in barriers:
        c = place[v][0]
        entered[c] = max(entered[c], v)
    exits: dict[int, dict[int, None]] = {}
    for u, _ in barriers:
        c = place[u][0]
        if u < entered[c]:
            exits.setdefault(c, {})[u] = None
    return {c: list(leaving) for c, leaving in exits.items()}


def _reached(
    n_nodes: int, kept: Sequence[Edge], barriers: Sequence[Edge], bit: dict[int, int]
) -> Iterator[tuple[int, int]]:
    """For each node in order, the exits from which a path that starts with a barrier leads to it.
    A set is forgotten after its node's last consumer, so memory follows what is live."""
    before: list[list[Edge]] = [[] for _ in range(n_nodes)]
    last = [-1] * n_nodes
    for u, v in kept:
        before[v].append((u, 0))
        last[u] = max(last[u], v)
    for u, v in barriers:
        before[v].append((u, 1 << bit[u] if u in bit else 0))
        last[u] = max(last[u], v)
    reached = [0] * n_nodes
    for v, preds in enumerate(before):
        now = 0
        for u, own in preds:
            now |= reached[u] | own
            if last[u] == v:
                reached[u] = 0
        if now:
            yield v, now
            reached[v] = now
