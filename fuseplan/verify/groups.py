"""Enumerate the legal groups of a component, for the verifier.

This is written independently of ``fuseplan.search.candidates`` and ``fuseplan.search.group_search``. They
share the rules (``Pricing.compatible``, ``Pricing.oversized``) and the lower bounds
(``Pricing.partial_floor``) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from math import inf

import numpy as np

from costmodel.partial_floor import PartialFloor
from fuseplan.schedule.pricing import Nodes, PriceBook
from fuseplan.search.components import Component
from fuseplan.support.bitset import bits, union_at
from fuseplan.support.digraph import cyclic_sets
from fuseplan.verify.copies import CopyRules
from fuseplan.verify.partial_groups import PartialGroup, Worths, rows

_LEARNT = 200
"""The number of refused and of allowed sets that are kept for each rule. Searching more takes longer than the
rule."""


_STEPS = 20_000
"""Partial groups that are looked at to list all groups of a component, a second of work. Where there are
more, bounds are used: to bound a partial group takes as long as to look at some."""


_BATCH = 128
"""Partial groups that are bounded at a time."""


class _TooManyStepsError(Exception):
    """A listing reached its number of steps."""


class Groups:
    """The legal groups of one component, as bitmasks of positions in ``component.nodes``.

    A group is connected by crossable edges and siblings, convex, and refused by no rule that refuses all
    larger groups too. Copies obey ``CopyRules``. ``look`` is called at each step of an enumeration, which
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
        self._waits = [below | apart for below, apart in zip(self._below, component.apart, strict=True)]
        self._wholes: list[int] = []
        self._pairs: list[int] = []
        self._position = {node: i for i, node in enumerate(self.nodes)}
        self._offers = dict.fromkeys(self._offered())
        self._copies = CopyRules(self.nodes, book.graph, book.copies, book.renames) if book.copies else None
        self._values: list[int] = []
        self._crosses = self._boundaries()
        self._rules = _Monotone(lambda mask: book.compatible(self.members(mask)) is not None, True)
        # A part of a group that fits may not fit, as it may exchange more values.
        self._crowds = _Monotone(self._is_crowded, True)
        self._room = _Monotone(self._is_oversized, False)
        self._tiles = _Monotone(self._has_no_tile, False)

    def under(self, together: Sequence[tuple[int, int]], apart: Sequence[tuple[int, int]]) -> Groups:
        """The groups of the plans in which one kernel holds each pair of ``together``, and none a pair of
        ``apart``. Pairs are positions."""
        other = copy(self)
        other._all = self._all
        other._wholes = self._connected_by(together)
        other._pairs = [1 << i | 1 << j for i, j in apart]
        other._apart = list(self._apart)
        for i, j in apart:
            other._apart[i] |= 1 << j
            other._apart[j] |= 1 << i
        return other

    def _connected_by(self, together: Sequence[tuple[int, int]]) -> list[int]:
        """The sets of positions that one kernel holds if one holds each pair: also what lies between them,
        and sets of which each waits for the other, as the kernels of a plan can run in some order."""
        after = [set(bits(mask)) for mask in self._waits]
        for i, j in together:
            after[i].add(j)
            after[j].add(i)
        return [sum(1 << i for i in found) for found in cyclic_sets(after)] if together else []

    def _is_in_case(self, group: int) -> bool:
        """Whether the group holds all or nothing of each set that one kernel holds, and no pair that none
        holds."""
        return all(group & whole in (0, whole) for whole in self._wholes) and all(
            group & pair != pair for pair in self._pairs
        )

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
        every = self._all
        found = self._bounded(floor, prices, room_ps) if every is None else every
        yield from (group for group in found if self._is_in_case(group))

    @cached_property
    def _all(self) -> list[int] | None:
        """All groups, whatever the case; None if that takes too many steps."""
        try:
            return list(self._listed(_STEPS))
        except _TooManyStepsError:
            return None

    def _bounded(self, floor: PartialFloor, prices: Sequence[int], room_ps: int) -> Iterator[int]:
        """Yield, once, every group that takes at most ``room_ps`` longer than its members' ``prices``, and
        some others.

        A partial group (some nodes are in, others out, the rest open) is left out where a lower bound
        excludes all groups that come of it. From its dearest member on, the dearest open node is decided.
        """
        worths = Worths(prices, self._cliques(sorted(range(self.n), key=lambda i: (-prices[i], i))), self.n)
        waiting = self._seeds(prices, room_ps, floor)
        while waiting:
            self._look()
            batch, waiting = waiting[-_BATCH:], waiting[:-_BATCH]
            found = [partial for partial in map(self._propagated, batch) if partial is not None]
            if not found:
                continue
            near = worths.least_margins(floor, found) < room_ps
            # XLA runs a single node, whatever the rules say.
            found = [
                partial
                for partial, is_near in zip(found, near.tolist(), strict=True)
                if is_near and not (partial.group & (partial.group - 1) and self._is_refused(partial))
            ]
            for partial in found:
                if not partial.open:
                    group = partial.group
                    allowed = not self._copies or not self._copies.contradict(group, ~group)
                    if allowed and group not in self._offers:
                        yield group
            divided = [partial for partial in found if partial.open]
            if divided:
                stakes = floor.stakes(rows([p.group for p in divided], self.n)) + worths.prices
                stakes[~rows([p.open for p in divided], self.n)] = -inf
                for partial, new in zip(
                    divided, (1 << i for i in stakes.argmax(axis=1).tolist()), strict=True
                ):
                    waiting.append(replace(partial, out=partial.out | new))
                    waiting.append(replace(partial, group=partial.group | new))
        yield from self._offers

    def _seeds(self, prices: Sequence[int], room_ps: int, floor: PartialFloor) -> list[PartialGroup]:
        """Partial groups, of which each group that ``_bounded`` looks for is in one: that of its dearest
        member."""
        busy = sum(1 << i for i in np.flatnonzero(floor.executes).tolist())
        found: list[PartialGroup] = []
        before = 0
        for seed in sorted(range(self.n), key=lambda i: (-prices[i], i)):
            if prices[seed] <= 0 and room_ps <= 0:
                break  # No kernel takes less than nothing.
            own = 1 << seed
            if busy & own and not self._copies:
                # More is known of kernels that execute several operations than of those that execute one.
                found.append(PartialGroup(own, before, seed, needs=busy & ~own))
                found.append(PartialGroup(own, before | busy & ~own, seed))
            else:
                found.append(PartialGroup(own, before, seed))
            before |= own
        return found[::-1]

    def _propagated(self, partial: PartialGroup) -> PartialGroup | None:
        """A partial group with all that its groups hold, and what they may hold beside; None if there are
        none."""
        group = self._closed(partial.group)
        out = partial.out | union_at(group, self._apart)
        for whole in self._wholes:
            out |= whole if whole & out else 0
        for reach in (self._below, self._above):
            # Whatever lies beyond an excluded node on a path from the group would bring it in.
            out |= union_at(out & union_at(group, reach), reach)
        if group & out or (self._copies and self._copies.contradict(group, out)):
            return None
        possible = self._connected(1 << partial.seed, ~out)
        if group & ~possible or (partial.needs and not possible & partial.needs):
            return None
        return replace(partial, group=group, out=out, open=possible & ~group)

    def _is_refused(self, partial: PartialGroup) -> bool:
        """Whether a rule refuses what all groups of a partial one hold, or no tile can fit."""
        group, never = partial.group, ~(partial.group | partial.open)
        return (
            self._rules.refuses(group)
            or not self._may_fit(group, self._question(group, never))
            or self._tiles.follows(self._question_of_tiles(group, never))
        )

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

    def _closed(self, group: int) -> int:
        """The smallest convex group that contains ``group`` and the copies that its members read."""
        while True:
            closed = group | (union_at(group, self._below) & union_at(group, self._above))
            closed |= self._copies.read_there(closed) if self._copies else 0
            for whole in self._wholes:
                closed |= whole if whole & closed else 0
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
        """Whether the group, as it is, is small enough for a kernel. What is learnt of it excludes partial
        groups. XLA's loops and offered nests need no common tile."""
        return (
            group & (group - 1) == 0
            or group in self._offers
            or not (
                self._room.refuses(self._question(group, ~group))
                or self._tiles.refuses(self._question_of_tiles(group, ~group))
            )
        )

    def _question_of_tiles(self, group: int, out: int) -> int:
        """As ``_question``, with the bits of the positions that never join."""
        return self._question(group, out) | (out & self._everything) << self.n + len(self._values)

    def _has_no_tile(self, question: int) -> bool:
        """Whether no tile fits on chip, whatever positions that ``question`` leaves open join."""
        group, out = question & self._everything, question >> self.n + len(self._values)
        if not group:
            return False
        crossing = frozenset([v for k, v in enumerate(self._values) if question >> self.n + k & 1])
        others = self.members(self._everything & ~(out | group))
        return self.book.oversized_beside(self.members(group), crossing, others) is not None

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
