"""Plan small graphs exactly under a limit of memory: a shortest path over sets of executed nodes.

The temporaries that are live after some nodes have run depend on those nodes and not on how they were
grouped. So the fastest kernels under a limit are a shortest path over sets of nodes, on which each step, a
kernel, fits beside the live bytes. The least peak is that of the path whose highest step is lowest. A bitcast
that is a kernel by itself renames a buffer instead of filling one; all choices of such bitcasts are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import add

from costmodel.graph import Graph
from costmodel.memory import is_bitcast
from fuseplan.plan.fusion_plan import Kernel, tile_bytes
from fuseplan.schedule.pricing import PriceBook, Pricing
from fuseplan.search.components import crossable_edges, data_edges, effect_edges
from fuseplan.support.bitset import bits, union_at
from fuseplan.support.errors import Verdict
from fuseplan.support.work import Work

_STEPS_PER_GROUP = 500
"""To find and price a group takes half a millisecond, as long as 500 steps (see ``StepBudget``)."""

Kernels = tuple[Kernel, ...]
Cost = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExactOptions:
    """Limits of the exact search."""

    max_nodes: int = 40
    """A larger graph is not searched exactly."""
    max_steps: int = 3_000_000
    """Steps of the search: a second, or the pricing of 6,000 groups."""
    max_bitcasts: int = 6
    """Bitcasts that may be kernels of their own: of n, 2**n choices are searched."""


DEFAULTS = ExactOptions()


@dataclass(frozen=True, slots=True)
class _Group:
    """Nodes that may be a kernel; masks have a bit for each node."""

    kernel: Kernel
    mask: int
    before: int
    """Nodes that must have run."""
    objectives: Cost
    renames: bool
    """Whether the kernel only renames its operands' buffers."""


@dataclass(frozen=True, slots=True)
class Path:
    """Kernels in the order of execution. ``cost`` is their time, bytes and number, or their peak."""

    kernels: Kernels
    cost: Cost


class TooLargeError(Exception):
    """The steps allowed are spent."""


class StepBudget:
    """The steps left of one search that counts towards ``work``. A step looks at one group after one set of
    nodes, and takes about 0.4 µs."""

    def __init__(self, most: int, work: Work) -> None:
        self._left, self._work = most, work

    def spend(self, steps: int) -> None:
        """Count ``steps``.

        Raises:
            TooLargeError: none are left, or the work is over.
        """
        self._left -= steps
        self._work.spend(-(-2 * steps // 5))
        if self._left < 0 or self._work.is_over:
            raise TooLargeError


_Extend = Callable[[Cost, _Group, int], Cost | None]
"""The cost of a path with one more group, during which some bytes are in use; None if it is not allowed."""


class _ShortestPaths:
    """Shortest paths over sets of executed nodes out of ``n``; nodes of the mask ``bitcasts`` are kernels.

    ``buffers`` has the bytes of each buffer, its producer's bit, and its readers' bits.
    """

    def __init__(
        self,
        groups: Sequence[_Group],
        n: int,
        budget: StepBudget,
        buffers: list[tuple[int, int, int]],
        bitcasts: int,
    ) -> None:
        self._budget, self._buffers = budget, buffers
        self._everything = (1 << n) - 1
        self._steps = [
            (g, self._written_bytes(g.mask) + tile_bytes(g.kernel))
            for g in groups
            if (not g.mask & ~bitcasts if g.renames else not g.mask & bitcasts)
        ]

    def _written_bytes(self, mask: int) -> int:
        return sum(size for size, producer, readers in self._buffers if producer & mask and readers & ~mask)

    def _live_bytes(self, done: int) -> int:
        return sum(size for size, producer, readers in self._buffers if producer & done and readers & ~done)

    def best(self, start: Cost, extend: _Extend) -> Path | None:
        """The cheapest path to all nodes, by costs that ``extend(cost, group, bytes in use)`` adds up."""
        reached: dict[int, tuple[Cost, int, _Group | None]] = {0: (start, 0, None)}
        layers: list[list[int]] = [[0], *([] for _ in range(self._everything.bit_count()))]
        for layer in layers:  # a step leads to a larger set
            for done in layer:
                self._budget.spend(len(self._steps))
                cost, live_bytes = reached[done][0], self._live_bytes(done)
                for group, step_bytes in self._steps:
                    if group.mask & done or group.before & ~done:
                        continue
                    then = done | group.mask
                    total = extend(cost, group, live_bytes + step_bytes)
                    if total is None:
                        continue
                    if then not in reached:
                        layers[then.bit_count()].append(then)
                    elif reached[then][0] <= total:
                        continue
                    reached[then] = (total, done, group)
        if self._everything not in reached:
            return None
        total, done, last = reached[self._everything]
        kernels: list[Kernel] = []
        while last is not None:
            kernels.append(last.kernel)
            _, done, last = reached[done]
        return Path(tuple(reversed(kernels)), total)


class _Groupings:
    """All ways to group and order the nodes of a graph.

    Raises:
        TooLargeError: there are too many groups, or bitcasts, for the steps allowed.
    """

    def __init__(self, graph: Graph, book: PriceBook, budget: StepBudget, max_bitcasts: int) -> None:
        self._graph, self._budget = graph, budget
        groups = self._find_groups(book)
        alone = [g.mask for g in groups if g.renames and g.mask.bit_count() == 1]
        if len(alone) > max_bitcasts:
            raise TooLargeError
        choices = (sum(some) for n in range(len(alone) + 1) for some in combinations(alone, n))
        n = len(graph.nodes)
        self._paths = [_ShortestPaths(groups, n, budget, self._buffers(choice), choice) for choice in choices]

    def fastest(self, limit_bytes: int) -> Path | None:
        """The fastest kernels of which no step exceeds the limit; of equals, those that move the fewest
        bytes, then the fewest kernels. None if there are none."""

        def extend(cost: Cost, group: _Group, used_bytes: int) -> Cost | None:
            return tuple(map(add, cost, group.objectives)) if used_bytes <= limit_bytes else None

        found = [paths.best((0, 0, 0), extend) for paths in self._paths]
        return min((path for path in found if path is not None), key=lambda path: path.cost, default=None)

    def lowest(self) -> Path:
        """The kernels of the least peak, which is the path's ``cost``."""
        found = [paths.best((0,), lambda peak, _, used: (max(*peak, used),)) for paths in self._paths]
        return min((path for path in found if path is not None), key=lambda path: path.cost)

    def _find_groups(self, book: PriceBook) -> list[_Group]:
        """Every connected, convex group that has a price."""
        graph, n = self._graph, len(self._graph.nodes)
        near, before = [0] * n, [0] * n
        for u, v in data_edges(graph):
            near[u] |= 1 << v
            near[v] |= 1 << u
            before[v] |= 1 << u
        for one, other in crossable_edges(graph, book).siblings:
            near[one] |= 1 << other
            near[other] |= 1 << one
        for u, v in effect_edges(graph):
            before[v] |= 1 << u
        above = list(before)
        for v in range(n):
            above[v] |= union_at(before[v], above)
        below = [sum(1 << v for v in range(n) if above[v] >> u & 1) for u in range(n)]
        # Refusals are monotone, so every group that is not refused is found node by node.
        found = dict.fromkeys(1 << v for v in range(n))
        waiting = list(found)
        for mask in waiting:
            for v in bits(union_at(mask, near) & ~mask):
                larger = mask | 1 << v
                if larger not in found and book.compatible(tuple(bits(larger))) is None:
                    self._budget.spend(_STEPS_PER_GROUP)
                    found[larger] = None
                    waiting.append(larger)
        offers = [sum(1 << v for v in offer) for offer in book.offers]
        groups: list[_Group] = []
        for mask in dict.fromkeys([*found, *offers]):
            if union_at(mask, below) & union_at(mask, above) & ~mask:
                continue  # not convex
            price = book.price(tuple(bits(mask)))
            self._budget.spend(_STEPS_PER_GROUP)
            if not isinstance(price, Verdict):
                kernel = book.kernel(tuple(bits(mask)))
                renames = is_bitcast(graph, kernel.spec)
                groups.append(_Group(kernel, mask, union_at(mask, before) & ~mask, price.objectives, renames))
        return groups

    def _buffers(self, bitcasts: int) -> list[tuple[int, int, int]]:
        """The ``buffers`` of ``_ShortestPaths``."""
        graph = self._graph
        buffer = list(range(len(graph.values)))
        for node in graph.nodes:
            if bitcasts >> node.id & 1:
                for v in node.outputs:
                    buffer[v] = buffer[node.inputs[0]]
        kept = {*graph.inputs, *(buffer[v] for v in graph.outputs)}
        readers: dict[int, int] = {}
        for v, b in enumerate(buffer):
            if b not in kept:
                readers[b] = readers.get(b, 0) | sum(1 << n for n in set(graph.consumers[v]))
        return [
            (graph.values[b].nbytes, 1 << graph.values[b].producer, mask)
            for b, mask in readers.items()
            if mask and graph.values[b].nbytes
        ]


@dataclass(frozen=True, slots=True)
class Exact:
    """The answer of ``plan_exactly``."""

    kernels: Kernels | None
    """The fastest kernels under the limit, in an order that keeps to it; None if there are none."""
    smallest_bytes: int
    """Where there are none, the smallest peak of any plan."""


def plan_exactly(
    graph: Graph, pricing: Pricing, max_peak_bytes: int, work: Work, options: ExactOptions = DEFAULTS
) -> Exact | None:
    """The fastest plan whose peak is at most ``max_peak_bytes``; of equals, the one that moves the fewest
    bytes, then that of the fewest kernels. None where the graph is too large, or ``work`` is over."""
    if len(graph.nodes) > options.max_nodes:
        return None
    try:
        budget = StepBudget(options.max_steps, work)
        groupings = _Groupings(graph, PriceBook(graph, pricing), budget, options.max_bitcasts)
        path = groupings.fastest(max_peak_bytes)
        if path is not None:
            return Exact(path.kernels, max_peak_bytes)
        return Exact(None, groupings.lowest().cost[0])
    except TooLargeError:
        return None
