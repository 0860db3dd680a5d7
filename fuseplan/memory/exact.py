"""Plan small graphs exactly under a limit of memory (shortest path), and repair larger plans part by part.

The temporaries that are live after some nodes have run depend on those nodes and not on how they were
grouped. So the fastest kernels under a limit are a shortest path over sets of nodes, on which each step, a
kernel, fits beside the live bytes. The least peak is that of the path whose highest step is lowest. A bitcast
that is a kernel by itself renames a buffer instead of filling one; all choices of such bitcasts are tried.

``repair`` is a large neighbourhood search: it plans a few kernels around the peak anew by ``Region``, while
all other kernels keep their nodes and their position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import combinations, pairwise
from operator import add

from costmodel.graph import Graph
from costmodel.memory import is_bitcast
from fuseplan.memory.liveness import needs_of
from fuseplan.plan.fusion_plan import Kernel, tile_bytes
from fuseplan.schedule.pricing import Nodes, PriceBook, Pricing
from fuseplan.search.components import crossable_edges
from fuseplan.support.bitset import bits, union_at
from fuseplan.support.errors import Verdict
from fuseplan.support.work import Work

_STEPS_PER_GROUP = 500
"""To find and price a group takes half a millisecond, as long as 500 steps (see ``StepBudget``)."""

Kernels = tuple[Kernel, ...]
Cost = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExactOptions:
    """Limits of the exact searches."""

    max_nodes: int = 40
    """A larger graph is not searched exactly."""
    max_steps: int = 3_000_000
    """Steps of the search of a whole graph: a second, or the pricing of 6,000 groups."""
    max_bitcasts: int = 6
    """Bitcasts that may be kernels of their own: of n, 2**n choices are searched."""
    repair_nodes: int = 24
    """Nodes of one part that ``repair`` plans anew."""
    repair_steps: int = 400_000
    """Steps of the search of one part: a fifth of a second."""
    repair_bitcasts: int = 4
    repair_rounds: int = 40
    """Parts that are replaced in one plan."""


DEFAULTS = ExactOptions()


@dataclass(frozen=True, slots=True)
class _Group:
    """Nodes that may be a kernel; masks have a bit for each node of the region."""

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

    ``base_bytes`` are live throughout. ``buffers`` has the bytes of each other buffer, its producer's bit
    (0: it is live at the start), and its readers' bits, with bit ``n`` for readers after the region.
    """

    def __init__(
        self,
        groups: Sequence[_Group],
        n: int,
        budget: StepBudget,
        base_bytes: int,
        buffers: list[tuple[int, int, int]],
        bitcasts: int,
    ) -> None:
        self._budget, self._base_bytes, self._buffers = budget, base_bytes, buffers
        self._everything = (1 << n) - 1
        self._steps = [
            (g, self._written_bytes(g.mask) + tile_bytes(g.kernel))
            for g in groups
            if (not g.mask & ~bitcasts if g.renames else not g.mask & bitcasts)
        ]

    def _written_bytes(self, mask: int) -> int:
        return sum(size for size, producer, readers in self._buffers if producer & mask and readers & ~mask)

    def _live_bytes(self, done: int) -> int:
        return self._base_bytes + sum(
            size
            for size, producer, readers in self._buffers
            if (not producer or producer & done) and readers & ~done
        )

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


class Region:
    """All ways to group and order ``nodes`` of a graph, none of which is grouped with another node.

    Args:
        nodes: ascending.
        earlier: the nodes that run before the first of ``nodes``; all others run after the last.
        renamed: the bitcasts among the other nodes that are kernels of their own.
        max_bitcasts: bitcasts among ``nodes`` that may be kernels of their own.
        siblings: pairs of ``nodes`` that may share a kernel because they read one array.

    Raises:
        TooLargeError: there are too many groups, or bitcasts, for the steps allowed.
    """

    def __init__(
        self,
        graph: Graph,
        book: PriceBook,
        nodes: Nodes,
        budget: StepBudget,
        *,
        max_bitcasts: int,
        earlier: Set[int] = frozenset(),
        renamed: Set[int] = frozenset(),
        siblings: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._siblings = siblings
        self._graph, self._nodes, self._budget = graph, nodes, budget
        self._place = {n: i for i, n in enumerate(nodes)}
        groups = self._find_groups(book)
        alone = [g.mask for g in groups if g.renames and g.mask.bit_count() == 1]
        if len(alone) > max_bitcasts:
            raise TooLargeError
        choices = (sum(some) for n in range(len(alone) + 1) for some in combinations(alone, n))
        self._paths = [
            _ShortestPaths(groups, len(nodes), budget, *self._buffers(choice, earlier, renamed), choice)
            for choice in choices
        ]

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
            above[v] |= union_at(before[v], above)
        below = [sum(1 << v for v in range(n) if above[v] >> u & 1) for u in range(n)]
        # Refusals are monotone, so every group that is not refused is found node by node.
        found = dict.fromkeys(1 << v for v in range(n))
        waiting = list(found)
        for mask in waiting:
            for v in bits(union_at(mask, near) & ~mask):
                larger = mask | 1 << v
                if larger not in found and book.compatible(self._members(larger)) is None:
                    self._budget.spend(_STEPS_PER_GROUP)
                    found[larger] = None
                    waiting.append(larger)
        offers = [sum(1 << place[v] for v in o) for o in book.offers if all(v in place for v in o)]
        groups: list[_Group] = []
        for mask in dict.fromkeys([*found, *offers]):
            if union_at(mask, below) & union_at(mask, above) & ~mask:
                continue  # not convex
            price = book.price(self._members(mask))
            self._budget.spend(_STEPS_PER_GROUP)
            if not isinstance(price, Verdict):
                kernel = book.kernel(self._members(mask))
                renames = is_bitcast(self._graph, kernel.spec)
                groups.append(_Group(kernel, mask, union_at(mask, before) & ~mask, price.objectives, renames))
        return groups

    def _members(self, mask: int) -> Nodes:
        return tuple(self._nodes[i] for i in bits(mask))

    def _buffers(
        self, bitcasts: int, earlier: Set[int], renamed: Set[int]
    ) -> tuple[int, list[tuple[int, int, int]]]:
        """``base_bytes`` and ``buffers`` of ``_ShortestPaths``."""
        graph, place = self._graph, self._place
        buffer = list(range(len(graph.values)))
        for node in graph.nodes:
            if node.id in renamed or (node.id in place and bitcasts >> place[node.id] & 1):
                for v in node.outputs:
                    buffer[v] = buffer[node.inputs[0]]
        kept = {*graph.inputs, *(buffer[v] for v in graph.outputs)}
        after = 1 << len(self._nodes)
        readers: dict[int, int] = {}
        for v, b in enumerate(buffer):
            producer = graph.values[b].producer
            if b not in kept and (producer in place or producer in earlier):
                mask = readers.get(b, 0)
                for n in graph.consumers[v]:
                    mask |= 1 << place[n] if n in place else 0 if n in earlier else after
                readers[b] = mask
        base_bytes, buffers = 0, []
        for b, mask in readers.items():
            own = place.get(graph.values[b].producer, -1)
            size = graph.values[b].nbytes
            if own < 0 and mask == after:
                base_bytes += size
            elif mask and size:
                buffers.append((size, 1 << own if own >= 0 else 0, mask))
        return base_bytes, buffers


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
        nodes = tuple(range(len(graph.nodes)))
        book = PriceBook(graph, pricing)
        region = Region(
            graph,
            book,
            nodes,
            StepBudget(options.max_steps, work),
            max_bitcasts=options.max_bitcasts,
            siblings=crossable_edges(graph, book).siblings,
        )
        path = region.fastest(max_peak_bytes)
        if path is not None:
            return Exact(path.kernels, max_peak_bytes)
        return Exact(None, region.lowest().cost[0])
    except TooLargeError:
        return None


def repair(
    graph: Graph,
    book: PriceBook,
    kernels: Kernels,
    max_peak_bytes: int,
    work: Work,
    options: ExactOptions = DEFAULTS,
) -> Kernels:
    """``kernels`` with a lower peak, as far as replacing small parts lowers it towards ``max_peak_bytes``.

    Each part loses the least time if it can keep to the limit, and else has the least peak. The peak does not
    rise.
    """
    for _ in range(options.repair_rounds):
        needs = needs_of(graph, kernels)
        if max(needs, default=0) <= max_peak_bytes or work.is_over:
            break
        better = _lower_peak(graph, book, kernels, needs, max_peak_bytes, work, options)
        if better is None:
            break
        kernels = better
    return kernels


def _lower_peak(
    graph: Graph,
    book: PriceBook,
    kernels: Kernels,
    needs: list[int],
    limit: int,
    work: Work,
    options: ExactOptions,
) -> Kernels | None:
    """Plan parts around the highest step anew, small parts first, until one lowers the peak."""
    worst = max(needs)
    found: Kernels | None = None
    for start, stop in _parts(kernels, needs.index(worst), options.repair_nodes):
        region = region_of_part(graph, book, kernels, start, stop, work, options)
        if region is None:
            continue
        try:
            fitting = region.fastest(limit)
            path = fitting or region.lowest()
        except TooLargeError:
            continue
        new = (*kernels[:start], *path.kernels, *kernels[stop:])
        after = needs_of(graph, new)
        # Whether a bitcast is a kernel of its own also changes the buffers that are live outside.
        inside = max(after[start : start + len(path.kernels)])
        outside = max([*after[:start], *after[start + len(path.kernels) :]], default=0)
        before = max([*needs[:start], *needs[stop:]], default=0)
        if outside > max(before, limit):
            continue
        if fitting is not None and inside <= limit:
            return new
        if inside < worst and found is None:
            found = new
    return found


def _parts(kernels: Kernels, top: int, max_nodes: int) -> list[tuple[int, int]]:
    """Intervals of kernels around position ``top``, small ones first."""
    found: list[tuple[int, int]] = []
    for width in (1, 2, 3, 4, 6, 8, 11, 15):
        for start in range(top - width + 1, top + 1):
            stop = start + width
            if start < 0 or stop > len(kernels):
                continue
            centred = width <= 2 or start in (top - width + 1, top - width // 2, top)
            if centred and sum(len(k.spec.nodes) for k in kernels[start:stop]) <= max_nodes:
                found.append((start, stop))
    return found


def region_of_part(
    graph: Graph,
    book: PriceBook,
    kernels: Sequence[Kernel],
    start: int,
    stop: int,
    work: Work,
    options: ExactOptions = DEFAULTS,
) -> Region | None:
    """The nodes of ``kernels[start:stop]`` as a region; None if they have too many groups."""
    outside = (*kernels[:start], *kernels[stop:])
    try:
        return Region(
            graph,
            book,
            tuple(sorted(n for k in kernels[start:stop] for n in k.spec.nodes)),
            StepBudget(options.repair_steps, work),
            max_bitcasts=options.repair_bitcasts,
            earlier={n for k in kernels[:start] for n in k.spec.nodes},
            renamed={n for k in outside if is_bitcast(graph, k.spec) for n in k.spec.nodes},
        )
    except TooLargeError:
        return None
