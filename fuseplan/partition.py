"""Split a graph into components that can be planned one by one.

An edge is *crossable* if some legal group may hold both of its ends. Groups are
connected by crossable edges, so no group spans two weakly connected components of them,
and costs add up: components are planned apart, equal ones once. Only the order of
execution couples them (``fuseplan.join``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import rustworkx as rx

from costmodel.graph import Graph
from fuseplan.errors import Verdict
from fuseplan.pricing import PriceBook
from fuseplan.signature import Signatures

Edge = tuple[int, int]

MAX_PORTS = 4
"""A scalar may tie so many operations on arrays together. Normalising a single row needs 3
(its mean is made once and read twice). Where a norm of all gradients or Adam's bias
correction ties a whole optimizer step together, groups that meet only in that scalar
would be horizontal fusion, and their number is exponential in the number of parameters."""


@dataclass(frozen=True, slots=True)
class Crossable:
    """``kept`` are the edges that some group may cross; ``barriers`` all others, with the
    order of side effects. ``refusals`` has one verdict for each kind of dropped edge."""

    kept: tuple[Edge, ...]
    barriers: tuple[Edge, ...]
    refusals: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class Component:
    """Nodes connected by crossable edges. Positions index ``nodes``, which ascend."""

    nodes: tuple[int, ...]
    edges: tuple[Edge, ...]
    """Crossable edges, by position."""
    apart: tuple[int, ...]
    """For each position, the set (a bit a position) of those below it on a path through a
    barrier: a group with both ends would not be convex."""

    @property
    def shape(self) -> tuple[tuple[Edge, ...], tuple[int, ...]]:
        return (self.edges, self.apart)


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
    """Nodes with side effects, each before the next."""
    effects = [node.id for node in graph.nodes if node.effects]
    return tuple(pairwise(effects))


def crossable_edges(graph: Graph, book: PriceBook) -> Crossable:
    """Drop every edge that no legal group can cross: its ends are incompatible, or some
    other path between them runs through a dropped edge.

    One pass of the second rule is a fixed point: where a path runs through an edge that
    the second rule dropped, another runs through the barrier that dropped it.
    """
    tally: dict[tuple[str, str], list] = {}
    kept: list[Edge] = []
    barriers: list[Edge] = list(effect_edges(graph))
    hubs = _hub_edges(graph)
    offered = _offered_edges(graph, book)
    for edge in data_edges(graph):
        verdict = None if edge in offered else hubs.get(edge) or book.compatible(edge)
        if verdict is None:
            kept.append(edge)
        else:
            barriers.append(edge)
            tally.setdefault((verdict.rule, verdict.reason), [replace(verdict, nodes=edge), 0])[1] += 1

    enclosed = _ends_of_barrier_paths(len(graph.nodes), kept, barriers)
    if enclosed:
        reason = "another path between the two leaves the group: its kernel would wait for itself"
        first = min(enclosed)
        tally["cycle", reason] = [Verdict("cycle", reason, first), len(enclosed)]
        barriers += enclosed
        kept = [edge for edge in kept if edge not in enclosed]
    refusals = tuple(
        replace(verdict, reason=f"{verdict.reason} ({count} such edges)") if count > 1 else verdict
        for verdict, count in tally.values()
    )
    return Crossable(tuple(kept), tuple(barriers), refusals)


def components(graph: Graph, crossable: Crossable) -> tuple[Component, ...]:
    """The weakly connected components of the crossable edges, by lowest node."""
    n_nodes = len(graph.nodes)
    undirected: rx.PyGraph = rx.PyGraph(multigraph=False)
    undirected.add_nodes_from(range(n_nodes))
    undirected.add_edges_from_no_data(list(crossable.kept))
    members = sorted(sorted(nodes) for nodes in rx.connected_components(undirected))

    where = [0] * n_nodes
    position = [0] * n_nodes
    for c, nodes in enumerate(members):
        for i, n in enumerate(nodes):
            where[n], position[n] = c, i
    edges: list[list[Edge]] = [[] for _ in members]
    for u, v in crossable.kept:
        edges[where[u]].append((position[u], position[v]))

    level = _barrier_levels(n_nodes, crossable.kept, crossable.barriers)
    watched = [nodes for nodes in members if len({level[n] for n in nodes}) > 1]
    below = _reached_through_barriers(n_nodes, crossable.kept, crossable.barriers, watched)
    return tuple(
        Component(tuple(nodes), tuple(sorted(inner)), tuple(below.get(n, 0) for n in nodes))
        for nodes, inner in zip(members, edges, strict=True)
    )


def component_key(signatures: Signatures, component: Component) -> tuple:
    """Equal for components that are the same planning problem on other arrays."""
    return (signatures.of(component.nodes).key, component.shape)


def _offered_edges(graph: Graph, book: PriceBook) -> set[Edge]:
    """The edges inside groups that the scheduler offers."""
    offered: set[Edge] = set()
    for nodes in book.offers:
        inside = set(nodes)
        for n in nodes:
            makers = {graph.values[v].producer for v in graph.nodes[n].inputs}
            offered.update((u, n) for u in makers & inside)
    return offered


def _hub_edges(graph: Graph) -> dict[Edge, Verdict]:
    """The edges through which a scalar ties more than ``MAX_PORTS`` operations together.

    One-element values that scalar arithmetic connects are one hub; its ports are the
    operations on arrays that make or read one of them.
    """
    scalar = [value.size == 1 for value in graph.values]
    arithmetic = [all(scalar[v] for v in node.inputs + node.outputs) for node in graph.nodes]
    linked: rx.PyGraph = rx.PyGraph(multigraph=False)
    linked.add_nodes_from(range(len(graph.values)))
    for node in graph.nodes:
        if arithmetic[node.id]:
            touched = node.inputs + node.outputs
            linked.add_edges_from_no_data([(touched[0], v) for v in touched[1:]])
    hub = [-1] * len(graph.values)
    for h, values in enumerate(rx.connected_components(linked)):
        for v in values:
            hub[v] = h if scalar[v] else -1
    ports: dict[int, set[int]] = {}
    for node in graph.nodes:
        if not arithmetic[node.id]:
            for v in node.inputs + node.outputs:
                if hub[v] >= 0:
                    ports.setdefault(hub[v], set()).add(node.id)
    dropped: dict[Edge, Verdict] = {}
    by_array: set[Edge] = set()
    for node in graph.nodes:
        for v in node.inputs:
            producer = graph.values[v].producer
            if producer < 0:
                continue
            edge = (producer, node.id)
            n_ports = len(ports.get(hub[v], ())) if hub[v] >= 0 else 0
            if n_ports > MAX_PORTS and not (arithmetic[producer] and arithmetic[node.id]):
                reason = f"a scalar that ties {n_ports} operations together is passed between their kernels"
                dropped[edge] = Verdict("producer-consumer", reason, edge)
            else:
                by_array.add(edge)
    return {edge: verdict for edge, verdict in dropped.items() if edge not in by_array}


def _predecessors(
    n_nodes: int, kept: Iterable[Edge], barriers: Iterable[Edge]
) -> list[list[tuple[int, bool]]]:
    before: list[list[tuple[int, bool]]] = [[] for _ in range(n_nodes)]
    for u, v in kept:
        before[v].append((u, False))
    for u, v in barriers:
        before[v].append((u, True))
    return before


def _barrier_levels(n_nodes: int, kept: Iterable[Edge], barriers: Iterable[Edge]) -> list[int]:
    """For each node, the most barriers on a path that ends there. A path through a barrier
    ends on a higher level than it starts, so equal levels need no further look."""
    level = [0] * n_nodes
    for v, before in enumerate(_predecessors(n_nodes, kept, barriers)):
        for u, barrier in before:
            level[v] = max(level[v], level[u] + barrier)
    return level


def _ends_of_barrier_paths(n_nodes: int, kept: Sequence[Edge], barriers: Sequence[Edge]) -> set[Edge]:
    """The kept edges whose ends are also joined by a path through a barrier."""
    level = _barrier_levels(n_nodes, kept, barriers)
    suspects: dict[int, list[int]] = {}
    for u, v in kept:
        if level[v] > level[u]:
            suspects.setdefault(v, []).append(u)
    sources = sorted({u for us in suspects.values() for u in us})
    bit = {u: i for i, u in enumerate(sources)}
    enclosed: set[Edge] = set()
    for v, through in _barrier_sets(n_nodes, kept, barriers, bit, _last_use(suspects)):
        enclosed.update((u, v) for u in suspects.get(v, ()) if through >> bit[u] & 1)
    return enclosed


def _last_use(suspects: dict[int, list[int]]) -> dict[int, int]:
    last: dict[int, int] = {}
    for v, us in suspects.items():
        for u in us:
            last[u] = max(last.get(u, v), v)
    return last


def _reached_through_barriers(
    n_nodes: int, kept: Sequence[Edge], barriers: Sequence[Edge], watched: Sequence[Sequence[int]]
) -> dict[int, int]:
    """For each node of a watched component, the positions *below* it on a barrier path."""
    bit: dict[int, int] = {}
    base: dict[int, tuple[int, int, Sequence[int]]] = {}
    for nodes in watched:
        for i, n in enumerate(nodes):
            base[n] = (len(bit), i, nodes)
            bit[n] = len(bit)
    below = dict.fromkeys(bit, 0)
    last = {n: nodes[-1] for nodes in watched for n in nodes}
    for v, through in _barrier_sets(n_nodes, kept, barriers, bit, last):
        if v not in base:
            continue
        own_bit, i, nodes = base[v]
        above = through >> (own_bit - i) & ((1 << i) - 1)
        while above:
            low = above & -above
            below[nodes[low.bit_length() - 1]] |= 1 << i
            above ^= low
    return below


def _barrier_sets(
    n_nodes: int,
    kept: Iterable[Edge],
    barriers: Iterable[Edge],
    bit: dict[int, int],
    last_use: dict[int, int],
) -> Iterable[tuple[int, int]]:
    """For each node in order, the sources (``bit[source]`` set in an int) from which a path
    through a barrier leads to it. A source is forgotten after ``last_use``, a set after its
    node's last consumer, so memory follows what is live, not the square of the graph."""
    if not bit:
        return
    before = _predecessors(n_nodes, kept, barriers)
    pending = [0] * n_nodes
    for preds in before:
        for u, _ in preds:
            pending[u] += 1
    forget: dict[int, int] = {}
    for source, v in last_use.items():
        forget[v] = forget.get(v, 0) | 1 << bit[source]
    alive = (1 << len(bit)) - 1
    reached: dict[int, int] = {}
    through: dict[int, int] = {}
    for v, preds in enumerate(before):
        any_path = barrier_path = 0
        for u, barrier in preds:
            any_path |= reached[u]
            barrier_path |= reached[u] if barrier else through[u]
            pending[u] -= 1
            if not pending[u]:
                del reached[u], through[u]
        yield v, barrier_path
        alive &= ~forget.get(v, 0)
        if pending[v]:
            own = 1 << bit[v] if v in bit else 0
            reached[v] = (any_path | own) & alive
            through[v] = barrier_path & alive
