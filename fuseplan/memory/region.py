"""Some nodes of a graph that run one after the other, and every way to group and order them.

Which bitcasts are kernels of their own, and so rename a buffer instead of filling one, must be
said before memory can be counted (``fuseplan.memory.order_dp``): all choices are tried.

Groups and order together, exactly, for small graphs.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import combinations, pairwise
from operator import add

from costmodel.graph import Graph
from costmodel.memory import is_bitcast
from fuseplan.memory.order_dp import Cost, Group, Paths, Steps, TooLargeError, Way
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.pricing import Nodes, PriceBook, Pricing
from fuseplan.search.components import crossable_edges
from fuseplan.support.bitset import bits
from fuseplan.support.errors import Verdict
from fuseplan.support.work import Work

_GROUP_STEPS = 500
"""To find and price a group takes as long as to look at so many steps, half a millisecond."""


class Region:
    """``nodes``, ascending, of which none is grouped with another node of the graph. ``earlier``
    have run when the first of them does, all others run when the last of them has; ``renamed``
    are those outside that are bitcasts of their own, and ``siblings`` pairs of ``nodes`` that a kernel may
    hold because of what both read.

    Raises:
        TooLargeError: there are too many groups, or bitcasts, for the steps allowed.
    """

    def __init__(
        self,
        graph: Graph,
        book: PriceBook,
        nodes: Nodes,
        allowed: Steps,
        earlier: Set[int] = frozenset(),
        renamed: Set[int] = frozenset(),
        max_renamed: int = 6,
        siblings: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._siblings = siblings
        self._graph, self._nodes, self._allowed = graph, nodes, allowed
        self._place = {n: i for i, n in enumerate(nodes)}
        self._groups = self._find_groups(book)
        alone = [g.mask for g in self._groups if g.renames and g.mask.bit_count() == 1]
        if len(alone) > max_renamed:
            raise TooLargeError
        choices = (sum(some) for n in range(len(alone) + 1) for some in combinations(alone, n))
        self._paths = [
            Paths(self._groups, len(nodes), allowed, *self._lives(choice, earlier, renamed), choice)
            for choice in choices
        ]

    def fastest(self, limit_bytes: int) -> Way | None:
        """The fastest way of which no step exceeds the limit, of those the one that moves the
        fewest bytes, then of the fewest kernels; None if there is none."""

        def extend(cost: Cost, group: Group, need: int) -> Cost | None:
            return tuple(map(add, cost, group.objectives)) if need <= limit_bytes else None

        ways = [path.best((0, 0, 0), extend) for path in self._paths]
        return min((w for w in ways if w is not None), key=lambda w: w.cost, default=None)

    def lowest(self) -> Way:
        """The way whose highest step, which is its ``cost``, is lowest."""
        ways = [path.best((0,), lambda peak, _, need: (max(*peak, need),)) for path in self._paths]
        return min((w for w in ways if w is not None), key=lambda w: w.cost)

    def _find_groups(self, book: PriceBook) -> list[Group]:
        """Every group that has a price, connected and convex."""
        place, n = self._place, len(self._nodes)
        near, before = [0] * n, [0] * n
        for v, node in enumerate(self._nodes):
            for value in self._graph.nodes[node].inputs:
                u = place.get(self._graph.values[value].producer, -1)
                if u >= 0:
                    near[u] |= 1 << v
                    near[v] |= 1 << u
                    before[v] |= 1 << u
        for one, other in self._siblings:
            near[place[one]] |= 1 << place[other]
            near[place[other]] |= 1 << place[one]
        effects = [i for i, node in enumerate(self._nodes) if self._graph.nodes[node].effects]
        for u, v in pairwise(effects):
            before[v] |= 1 << u
        above = list(before)
        for v in range(n):
            above[v] |= _union(above, before[v])
        below = [sum(1 << v for v in range(n) if above[v] >> u & 1) for u in range(n)]
        # What refuses a set refuses every larger one, and each group grows node by node.
        found = dict.fromkeys(1 << v for v in range(n))
        waiting = list(found)
        for mask in waiting:
            for v in bits(_union(near, mask) & ~mask):
                larger = mask | 1 << v
                if larger not in found and book.compatible(self._members(larger)) is None:
                    self._allowed.spend(_GROUP_STEPS)
                    found[larger] = None
                    waiting.append(larger)
        offers = [sum(1 << place[v] for v in o) for o in book.offers if all(v in place for v in o)]
        groups: list[Group] = []
        for mask in dict.fromkeys([*found, *offers]):
            if _union(below, mask) & _union(above, mask) & ~mask:
                continue  # a path leaves it and comes back
            price = book.price(self._members(mask))
            self._allowed.spend(_GROUP_STEPS)
            if not isinstance(price, Verdict):
                kernel = book.kernel(self._members(mask))
                renames = is_bitcast(self._graph, kernel.spec)
                groups.append(Group(kernel, mask, _union(before, mask) & ~mask, price.objectives, renames))
        return groups

    def _members(self, mask: int) -> Nodes:
        return tuple(self._nodes[i] for i in bits(mask))

    def _lives(
        self, choice: int, earlier: Set[int], renamed: Set[int]
    ) -> tuple[int, list[tuple[int, int, int]]]:
        """What is alive throughout, and for each other buffer its bytes, its maker (0: it is there
        at the start) and its readers, with a bit above all nodes for those that come after."""
        graph, place = self._graph, self._place
        buffer = list(range(len(graph.values)))
        for node in graph.nodes:
            if node.id in renamed or (node.id in place and choice >> place[node.id] & 1):
                for v in node.outputs:
                    buffer[v] = buffer[node.inputs[0]]
        kept = {*graph.inputs, *(buffer[v] for v in graph.outputs)}
        after = 1 << len(self._nodes)
        readers: dict[int, int] = {}
        for v, b in enumerate(buffer):
            maker = graph.values[b].producer
            if b not in kept and (maker in place or maker in earlier):
                mask = readers.get(b, 0)
                for n in graph.consumers[v]:
                    mask |= 1 << place[n] if n in place else 0 if n in earlier else after
                readers[b] = mask
        base, lives = 0, []
        for b, mask in readers.items():
            maker = place.get(graph.values[b].producer, -1)
            size = graph.values[b].nbytes
            if maker < 0 and mask == after:
                base += size
            elif mask and size:
                lives.append((size, 1 << maker if maker >= 0 else 0, mask))
        return base, lives


def _union(sets: Sequence[int], of: int) -> int:
    result = 0
    for n in bits(of):
        result |= sets[n]
    return result


MAX_NODES, MAX_STEPS = 40, 3_000_000
"""Nodes of a graph and steps looked at: a second of work, and pricing of 6,000 groups at most. A
graph that exceeds them is not searched exactly."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The fastest kernels under the limit in an order that keeps to it, None if there are none;
    then ``smallest_bytes`` is the smallest peak of any plan."""

    kernels: tuple[Kernel, ...] | None
    smallest_bytes: int


def plan_exactly(graph: Graph, pricing: Pricing, max_peak_bytes: int, work: Work) -> Exact | None:
    """The fastest plan whose peak is at most ``max_peak_bytes``, of those the one that moves the
    fewest bytes, then of the fewest kernels; None where the graph is too large to say, or
    ``work`` is over."""
    if len(graph.nodes) > MAX_NODES:
        return None
    try:
        nodes = tuple(range(len(graph.nodes)))
        book = PriceBook(graph, pricing)
        siblings = crossable_edges(graph, book).siblings
        region = Region(graph, book, nodes, Steps(MAX_STEPS, work), siblings=siblings)
        way = region.fastest(max_peak_bytes)
        if way is not None:
            return Exact(way.kernels, max_peak_bytes)
        return Exact(None, region.lowest().cost[0])
    except TooLargeError:
        return None
