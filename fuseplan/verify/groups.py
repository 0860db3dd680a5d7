"""Enumerate the legal groups of a component, for the verifier.

This is written independently of ``fuseplan.search.candidates`` and ``fuseplan.search.group_search``. They
share the rules (``Pricing.compatible``, ``Pricing.oversized``) and the lower bounds
(``Pricing.partial_floor``) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from costmodel.graph import Graph
from costmodel.partial_floor import PartialFloor
from fuseplan.schedule.pricing import Nodes, PriceBook
from fuseplan.search.components import Component
from fuseplan.support.bitset import bits, union_at

_LEARNT = 200
"""The number of refused and of allowed sets that are kept for each rule. Searching more takes longer than the
rule."""


_STEPS = 100_000
"""Partial groups that are looked at to list all groups of a component, some seconds of work. Where there are
more, bounds are used: to bound a partial group takes ten times as long as to look at it."""


class _TooManyStepsError(Exception):
    """A listing reached its number of steps."""


class Groups:
    """The legal groups of one component, as bitmasks of positions in ``component.nodes``.

    A group is connected by crossable edges and siblings, convex, and refused by no rule that refuses all
    larger groups too. Copies obey ``_CopyRules``. ``look`` is called at each step of an enumeration, which
    ends where it raises."""

    def __init__(
        self, component: Component, book: PriceBook, look: Callable[[], None] = lambda: None
    ) -> None:
        self._look = look
        self.nodes = component.nodes
        self.book = book
        self.n = n = len(component.nodes)
        self._everything = (1 << n) - 1
        self._near = [0] * n
        self._below = [0] * n
        self._above = [0] * n
        for u, v in sorted(component.edges, reverse=True):
            self._near[u] |= 1 << v
            self._near[v] |= 1 << u
            self._below[u] |= 1 << v | self._below[v]
        for u, v in component.siblings:
            self._near[u] |= 1 << v
            self._near[v] |= 1 << u
        for u in range(n):
            for v in bits(self._below[u]):
                self._above[v] |= 1 << u
        # A rule that two nodes break is broken by every group that holds them.
        self._apart = [0] * n
        for u in range(n):
            for v in range(u + 1, n):
                waits = (component.apart[u] >> v | component.apart[v] >> u) & 1
                if waits or book.compatible((self.nodes[u], self.nodes[v])) is not None:
                    self._apart[u] |= 1 << v
                    self._apart[v] |= 1 << u
        self._position = {node: i for i, node in enumerate(self.nodes)}
        self._offers = dict.fromkeys(self._offered())
        self._copies = _CopyRules(self.nodes, book.graph, book.copies, book.renames) if book.copies else None
        self._values: list[int] = []
        self._crosses = self._boundaries()
        self._rules = _Monotone(lambda mask: book.compatible(self.members(mask)) is not None, True)
        # A part of a group that fits may not fit, as it may exchange more values.
        self._crowds = _Monotone(self._is_crowded, True)
        self._room = _Monotone(self._is_oversized, False)

    def members(self, mask: int) -> Nodes:
        """The nodes in ``mask``."""
        return tuple([self.nodes[i] for i in bits(mask)])

    def __iter__(self) -> Iterator[int]:
        """Yield each group once."""
        return self._listed(inf)

    def _listed(self, max_steps: float) -> Iterator[int]:
        """Yield each group once: starting from its lowest member, add or exclude one neighbour after another;
        an added one brings all nodes on paths between members.

        Raises:
            _TooManyStepsError: it takes more than ``max_steps``.
        """
        steps = 0
        for seed in range(self.n):
            waiting = [(1 << seed, (1 << seed) - 1, 0)]
            while waiting:
                self._look()
                steps += 1
                if steps > max_steps:
                    raise _TooManyStepsError
                group, out, border = waiting.pop()
                if self._copies and self._copies.contradict(group, out):
                    continue
                if not border:  # the group has just grown
                    border, out = union_at(group, self._near), out | union_at(group, self._apart)
                border &= ~(group | out)
                # A group that excludes more nodes exchanges more values.
                question = self._question(group, out)
                if self._room.follows(question):
                    continue
                if not border:
                    allowed = not self._copies or not self._copies.contradict(group, ~group)
                    if allowed and group not in self._offers:
                        yield group
                    continue
                new = border & -border
                waiting.append((group, out | new, border ^ new))
                grown = self._closed(group | new)
                if grown & out or any(self._apart[i] & grown for i in bits(grown)):
                    continue
                if not self._rules.refuses(grown) and self._may_fit(grown, self._question(grown, out)):
                    waiting.append((grown, out, 0))
        yield from self._offers

    def below(self, prices: Sequence[int], room_ps: int) -> Iterator[int]:
        """Yield, once, every group that takes at most ``room_ps`` longer than its members' ``prices``, and
        some others: all groups, if ``_STEPS`` steps list them."""
        floor = self.book.partial_floor([(node,) for node in self.nodes])
        if floor is None:
            yield from self
            return
        try:
            every = list(self._listed(_STEPS))
        except _TooManyStepsError:
            yield from self._bounded(floor, prices, room_ps)
        else:
            yield from every

    def _bounded(self, floor: PartialFloor, prices: Sequence[int], room_ps: int) -> Iterator[int]:
        """Yield, once, every group that takes at most ``room_ps`` longer than its members' ``prices``, and
        some others.

        A partial group (some nodes are in, others out, the rest open) is left out where a lower bound
        excludes all groups that come of it. From its dearest member on, the dearest open node is decided.
        """
        order = sorted(range(self.n), key=lambda i: (-prices[i], i))
        cliques = self._cliques([i for i in order if prices[i] > 0])
        before = 0
        busy = sum(1 << i for i in np.flatnonzero(floor.executes).tolist())
        for seed in order:
            if prices[seed] == 0 and room_ps <= 0:
                break  # No kernel takes less than nothing.
            waiting = [(1 << seed, before, False)]
            if busy >> seed & 1 and not self._copies:
                # More is known of kernels that execute several operations than of those that execute one.
                waiting = [(1 << seed, before, True), (1 << seed, before | busy & ~(1 << seed), False)]
            before |= 1 << seed
            while waiting:
                self._look()
                group, out, several = waiting.pop()
                group = self._closed(group)
                out |= union_at(group, self._apart)
                for reach in (self._below, self._above):
                    # Whatever lies beyond an excluded node on a path from the group would bring it in.
                    out |= union_at(out & union_at(group, reach), reach)
                if group & out or (self._copies and self._copies.contradict(group, out)):
                    continue
                possible = self._connected(1 << seed, ~out)
                if group & ~possible:
                    continue
                open_ = possible & ~group
                if several and not (group | open_) & busy & ~(1 << seed):
                    continue
                if self._least_margin(floor, group, open_, several, prices, cliques) >= room_ps:
                    continue
                # XLA runs a single node, whatever the rules say.
                refused = group & (group - 1) and (
                    self._rules.refuses(group) or not self._may_fit(group, self._question(group, ~possible))
                )
                if refused:
                    continue
                if not open_:
                    allowed = not self._copies or not self._copies.contradict(group, ~group)
                    if allowed and group not in self._offers:
                        yield group
                    continue
                (stakes,) = floor.stakes(self._row(group))
                new = max(bits(open_), key=lambda i: (prices[i] + stakes[i], -i))
                waiting += [(group, out | 1 << new, several), (group | 1 << new, out, several)]
        yield from self._offers

    def _least_margin(
        self,
        floor: PartialFloor,
        group: int,
        open_: int,
        several: bool,
        prices: Sequence[int],
        cliques: Sequence[int],
    ) -> float:
        """Picoseconds by which each kernel that holds ``group``, and others of ``open_`` alone, takes longer
        than the prices of its nodes, at least; with ``several``, each that executes several operations."""
        worth = sum(prices[i] for i in bits(group))

        def most(costs: Sequence[float] | None) -> float:
            gains = [[prices[i] - (costs[i] if costs else 0) for i in bits(c & open_)] for c in cliques]
            return worth + sum(max([0, *some]) for some in gains)

        row, possible = self._row(group), self._row(group | open_)
        bounds = floor.bounds(row, possible, np.array([several]))
        margins = [bounds.floor_ps[0] - most(None)]
        if open_:
            # Each resource alone bounds the kernel, and so does the mean of the memory and the vector units.
            each = [(resource.known_ps[0], resource.added_ps[0]) for resource in bounds.additive]
            (memory_ps, of_memory), (compute_ps, of_compute) = each[:2]
            each.append(((memory_ps + compute_ps) / 2, (of_memory + of_compute) / 2))
            margins += [least - most(costs.tolist()) for least, costs in each]
        return float(max(margins))

    def _offered(self) -> Iterator[int]:
        for nodes in self.book.offers:
            if self._position.keys() >= set(nodes):
                yield sum(1 << self._position[node] for node in nodes)

    def _cliques(self, positions: Sequence[int]) -> list[int]:
        """A partition of ``positions`` into sets of which a group holds one node each at most."""
        cliques: list[int] = []
        for i in positions:
            for k, clique in enumerate(cliques):
                if not clique & ~self._apart[i]:
                    cliques[k] |= 1 << i
                    break
            else:
                cliques.append(1 << i)
        return cliques

    def _connected(self, start: int, among: int) -> int:
        """The positions that crossable edges and siblings ``among`` these connect with ``start``."""
        found = new = start
        while new:
            new = union_at(new, self._near) & among & ~found
            found |= new
        return found

    def _row(self, mask: int) -> npt.NDArray[np.bool_]:
        return np.array([[mask >> i & 1 for i in range(self.n)]], dtype=bool)

    def _closed(self, group: int) -> int:
        """The smallest convex group that contains ``group`` and the copies that its members read."""
        while True:
            closed = group | (union_at(group, self._below) & union_at(group, self._above))
            closed |= self._copies.read_there(closed) if self._copies else 0
            if closed == group:
                return group
            group = closed

    def _boundaries(self) -> list[list[tuple[int, int, bool]]]:
        """For each position, the values that it reads or computes: the bit of the value, the positions of its
        producer or of its readers, and whether it is exchanged in any case: with a node outside the
        component, or as a result of the program."""
        graph, results = self.book.graph, self.book.outputs
        position = self._position
        number: dict[int, int] = {}
        touched: list[list[tuple[int, int, bool]]] = []
        for n in self.nodes:
            node = graph.nodes[n]
            own = []
            for v in dict.fromkeys(node.inputs):
                maker = graph.values[v].producer
                bit = 1 << number.setdefault(v, len(number))
                own.append((bit, 1 << position[maker] if maker in position else 0, maker not in position))
            for v in node.outputs:
                readers = graph.consumers[v]
                bit = 1 << number.setdefault(v, len(number))
                inner = sum(1 << position[r] for r in readers if r in position)
                outside = v in results or any(r not in position for r in readers)
                own.append((bit, inner, outside))
            touched.append(own)
        self._values = list(number)
        return touched

    def _question(self, group: int, out: int) -> int:
        """The bits of a group, and of the values that it exchanges even with all positions not in ``out``
        added."""
        crossing = 0
        for i in bits(group):
            for bit, others, always in self._crosses[i]:
                if always or others & out:
                    crossing |= bit
        return group | crossing << self.n

    def _may_fit(self, group: int, question: int) -> bool:
        # Most groups fit whatever they exchange, and then all of their parts do too. A group that is admitted
        # although it does not fit costs the computation of one price.
        return not self._crowds.refuses(group) or not self._room.refuses(question)

    def fits(self, group: int) -> bool:
        """Whether the group, as it is, is small enough for a kernel."""
        return group & (group - 1) == 0 or not self._room.refuses(self._question(group, ~group))

    def _is_crowded(self, group: int) -> bool:
        return self.book.oversized(self.members(group), frozenset(self._values)) is not None

    def _is_oversized(self, question: int) -> bool:
        """Whether the group of ``question`` does not fit on chip, given the values that it exchanges."""
        crossing = frozenset([self._values[k] for k in bits(question >> self.n)])
        return self.book.oversized(self.members(question & self._everything), crossing) is not None


class _Monotone:
    """A monotone predicate on bitmasks, with a cache: a superset of a refused set is refused, so a few
    minimal refused sets decide thousands. ``ask`` returns whether a set is refused."""

    def __init__(self, ask: Callable[[int], bool], learns_allowed: bool) -> None:
        self._ask = ask
        self._learns_allowed = learns_allowed
        self._allowed: list[int] = []
        self._refused: list[int] = []
        self._known: dict[int, bool] = {}

    def refuses(self, mask: int) -> bool:
        """Whether the set is refused."""
        if mask not in self._known:
            told = self._inferred(mask)
            self._known[mask] = self._learnt(mask) if told is None else told
        return self._known[mask]

    def follows(self, mask: int) -> bool:
        """Whether the set contains one that is known to be refused; does not call ``ask``."""
        # Called for every group, where a loop is faster than any().
        for small in self._refused:  # noqa: SIM110
            if not small & ~mask:
                return True
        return False

    def _inferred(self, mask: int) -> bool | None:
        if self.follows(mask):
            return True
        for large in self._allowed:
            if not mask & ~large:
                return False
        return None

    def _learnt(self, mask: int) -> bool:
        refused = self._ask(mask)
        if refused and len(self._refused) < _LEARNT:
            self._refused.append(self._least(0, 0, mask))
        elif not refused and self._learns_allowed:
            self._allowed = [mask, *(other for other in self._allowed if other & ~mask)][:_LEARNT]
        return refused

    def _is_refused(self, mask: int) -> bool:
        told = self._inferred(mask)
        return self._ask(mask) if told is None else told

    def _least(self, base: int, added: int, rest: int) -> int:
        """A minimal part of ``rest`` that is refused together with ``base``; ``added`` is the part added to
        ``base`` last (Junker, "QuickXplain", AAAI 2004)."""
        if added and self._is_refused(base):
            return 0
        if not rest & (rest - 1):
            return rest
        positions = bits(rest)
        low = sum(1 << i for i in positions[: len(positions) // 2])
        high = self._least(base | low, low, rest ^ low)
        return high | self._least(base | high, high, low)


_PARTLY = 2
"""With more copies of an operation, a kernel computes the copies whose readers it holds, or all of them."""


class _CopyRules:
    """The rules for groups of copies among ``nodes``, as the search states them in
    ``fuseplan.search.remat.duplicates``, written independently. Sets are masks of positions in ``nodes``."""

    def __init__(
        self, nodes: Nodes, graph: Graph, copies_of: Sequence[Nodes], renames: Callable[[int], bool]
    ) -> None:
        position = {node: i for i, node in enumerate(nodes)}
        every = {n: copies for copies in copies_of for n in copies if copies[0] in position}
        mask = {n: sum(1 << position[m] for m in copies) for n, copies in every.items()}
        self._own: dict[int, list[tuple[int, int]]] = {}
        """For each reader, the copies that it reads, each with all copies of the operation."""
        self._alone: dict[int, tuple[int, int, int]] = {}
        """For each copy: all copies, its readers, and the copies that only its value depends on and that
        rename or make no less."""

        def leading(n: int) -> Iterator[int]:
            for m in (graph.values[v].producer for v in graph.nodes[n].inputs):
                if m in mask and _leads(graph, every[m], every[n]):
                    if renames(m) or n_bytes(m) >= n_bytes(n):
                        yield m
                    yield from leading(m) if renames(m) else ()

        def n_bytes(n: int) -> int:
            """The bytes that the operation makes, or of one that renames for a single reader, the reader."""
            made = graph.nodes[n].outputs
            readers = {r for v in made for r in graph.consumers[v]}
            if renames(n) and len(readers) == 1 and graph.results.isdisjoint(made):
                return n_bytes(*readers)
            return sum(graph.values[v].nbytes for v in made)

        for n in position:
            makers = [graph.values[v].producer for v in graph.nodes[n].inputs]
            own = [(1 << position[m], mask[m]) for m in makers if m in mask]
            if own:
                self._own[position[n]] = own
            if n in mask:
                readers = {r for v in graph.nodes[n].outputs for r in graph.consumers[v]}
                self._alone[position[n]] = (
                    mask[n],
                    sum(1 << position[r] for r in readers if r in position),
                    sum({1 << position[m] for m in leading(n)}),
                )

    def read_there(self, group: int) -> int:
        """The copies that members read, of operations that the group computes."""
        wanted = 0
        for i in bits(group):
            for own, every in self._own.get(i, ()):
                if every & group:
                    wanted |= own
        return wanted

    def contradict(self, group: int, out: int) -> bool:
        """Whether ``group`` breaks a rule of duplicates that only the excluded nodes ``out`` could repair."""
        if self.read_there(group) & ~group & out:
            return True
        for i in bits(group):
            every, readers, leading = self._alone.get(i, (0, 0, 0))
            if every & out and (leading & out or (every.bit_count() > _PARTLY and not readers & ~out)):
                return True
        return False


def _leads(graph: Graph, makers: Nodes, copies: Nodes) -> bool:
    """Whether only ``copies`` read the results of ``makers``."""
    made = {v for m in makers for v in graph.nodes[m].outputs}
    readers = {r for v in made for r in graph.consumers[v]}
    return made.isdisjoint(graph.results) and readers == set(copies)
