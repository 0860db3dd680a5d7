"""Some nodes of a graph that run one after the other, and every way to group and order them.

What temporaries are alive after some nodes have run depends on the nodes alone, not on how they
were grouped: a value is there if its producer has run and one of its consumers has not. So the
fastest kernels under a limit are a shortest path over sets of nodes that can have run, in which
each step is a kernel that fits beside what is alive; and the smallest peak is that of the path
whose highest step is lowest. Only which bitcasts are kernels of their own, and so rename a buffer
instead of filling one, must be said beforehand: all choices are tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import combinations, pairwise
from operator import add

from costmodel.graph import Graph
from costmodel.memory import is_bitcast
from fuseplan.errors import Verdict
from fuseplan.plan import Kernel, tile_bytes
from fuseplan.pricing import Nodes, PriceBook

Cost = tuple[int, ...]
Extend = Callable[[Cost, "Group", int], Cost | None]

_GROUP_STEPS = 500
"""To find and price a group takes as long as to look at so many steps, half a millisecond."""


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that may be a kernel; masks have a bit for each node of the region."""

    kernel: Kernel
    mask: int
    before: int
    """Nodes that must have run."""
    objectives: Cost
    renames: bool
    """Whether it only gives its operands' buffers other names."""


@dataclass(frozen=True, slots=True)
class Way:
    """Kernels in an order, their time, bytes and number, and the highest step."""

    kernels: tuple[Kernel, ...]
    cost: Cost


class TooLargeError(Exception):
    """The work allowed is spent."""


class Work:
    """Steps left to spend: a pair of a set and a group is one, about 0.3 µs."""

    def __init__(self, steps: int, expires_at: float) -> None:
        self._steps, self._expires_at = steps, expires_at

    def spend(self, steps: int) -> None:
        """Raises ``TooLargeError`` when there are none left or ``time.monotonic()`` says so."""
        self._steps -= steps
        if self._steps < 0 or time.monotonic() >= self._expires_at:
            raise TooLargeError


class Region:
    """``nodes``, ascending, of which none is grouped with another node of the graph. ``earlier``
    have run when the first of them does, all others run when the last of them has; ``renamed``
    are those outside that are bitcasts of their own.

    Raises:
        TooLargeError: there are too many groups, or bitcasts, for the work allowed.
    """

    def __init__(
        self,
        graph: Graph,
        book: PriceBook,
        nodes: Nodes,
        work: Work,
        earlier: Set[int] = frozenset(),
        renamed: Set[int] = frozenset(),
        max_renamed: int = 6,
    ) -> None:
        self._graph, self._nodes, self._work = graph, nodes, work
        self._place = {n: i for i, n in enumerate(nodes)}
        self._groups = self._find_groups(book)
        alone = [g.mask for g in self._groups if g.renames and g.mask.bit_count() == 1]
        if len(alone) > max_renamed:
            raise TooLargeError
        choices = (sum(some) for n in range(len(alone) + 1) for some in combinations(alone, n))
        self._paths = [
            _Paths(self._groups, len(nodes), work, *self._lives(choice, earlier, renamed), choice)
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
                    self._work.spend(_GROUP_STEPS)
                    found[larger] = None
                    waiting.append(larger)
        offers = [sum(1 << place[v] for v in o) for o in book.offers if all(v in place for v in o)]
        groups: list[Group] = []
        for mask in dict.fromkeys([*found, *offers]):
            if _union(below, mask) & _union(above, mask) & ~mask:
                continue  # a path leaves it and comes back
            price = book.price(self._members(mask))
            self._work.spend(_GROUP_STEPS)
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


class _Paths:
    """Sets of nodes that can have run, if the nodes ``choice`` are bitcasts of their own."""

    def __init__(
        self,
        groups: Sequence[Group],
        n: int,
        work: Work,
        base: int,
        lives: list[tuple[int, int, int]],
        choice: int,
    ) -> None:
        self._work, self._base, self._lives = work, base, lives
        self._everything = (1 << n) - 1
        self._steps = [
            (g, self._written(g.mask) + tile_bytes(g.kernel))
            for g in groups
            if (not g.mask & ~choice if g.renames else not g.mask & choice)
        ]

    def _written(self, mask: int) -> int:
        return sum(size for size, maker, readers in self._lives if maker & mask and readers & ~mask)

    def _alive(self, done: int) -> int:
        return self._base + sum(
            size for size, maker, readers in self._lives if (not maker or maker & done) and readers & ~done
        )

    def best(self, start: Cost, extend: Extend) -> Way | None:
        """The cheapest path by costs that ``extend(cost, group, bytes in use)`` sums up."""
        reached: dict[int, tuple[Cost, int, Group | None]] = {0: (start, 0, None)}
        layers: list[list[int]] = [[0], *([] for _ in range(self._everything.bit_count()))]
        for layer in layers:  # a step leads to a larger set
            for done in layer:
                self._work.spend(len(self._steps))
                cost, alive = reached[done][0], self._alive(done)
                for group, need in self._steps:
                    if group.mask & done or group.before & ~done:
                        continue
                    then = done | group.mask
                    total = extend(cost, group, alive + need)
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
        path: list[Kernel] = []
        while last is not None:
            path.append(last.kernel)
            _, done, last = reached[done]
        return Way(tuple(reversed(path)), total)


def bits(mask: int) -> Iterator[int]:
    """The positions of the bits that are set, ascending."""
    while mask:
        low = mask & -mask
        mask ^= low
        yield low.bit_length() - 1


def _union(sets: Sequence[int], of: int) -> int:
    result = 0
    for n in bits(of):
        result |= sets[n]
    return result
