"""Move copies of operations from the kernels that compute them to kernels that read them.

A move prices only the kernels that it changes. It tells whether to compute a value again may gain
(``Moves.worthwhile``), and moves that gain, one after the other, make a plan with copies from one without
(``Moves.improved``).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from fuseplan.plan.constraints import Resolved
from fuseplan.schedule.pricing import Nodes, Price, PriceBook, Pricing
from fuseplan.search.components import hub_edges
from fuseplan.search.constrained_pricing import limited
from fuseplan.search.grouping import order_groups
from fuseplan.search.remat.duplicates import DuplicateRules, SplitGraph
from fuseplan.search.selectors import Ties
from fuseplan.support.digraph import cyclic_sets, reachable
from fuseplan.support.work import Work, unlimited

_Move = tuple[set[int], int]
"""Copies, and the kernel to which they move."""


class Moves:
    """A plan of the graph with copies, and the price of moving some of them.

    Args:
        copies: the graph with copies.
        pricing: the prices of its groups.
        groups: the plan; every copy is in one.
        limits: the constraints, by node of the graph without copies.
    """

    def __init__(
        self, copies: SplitGraph, pricing: Pricing, groups: Sequence[Nodes], limits: Resolved | None
    ) -> None:
        self._copies, self._graph = copies, copies.graph
        there = None if limits is None else limits.moved(copies.places)
        self._book = PriceBook(*limited(copies.graph, pricing, there))
        self._work = unlimited()
        self._kernel = [0] * len(copies.node)
        """For each copy, where its operation is computed."""
        for g, nodes in enumerate(groups):
            for c in nodes:
                self._kernel[c] = g
        self._members = [set(nodes) for nodes in groups]
        self._roots = frozenset(copies.roots)
        self._several = {c for c, n in enumerate(copies.node) if copies.copies[n] > 1}
        self._of_root: dict[int, list[int]] = defaultdict(list)
        for c, n in enumerate(copies.node):
            if n in self._roots:
                self._of_root[n].append(c)

    def worthwhile(self) -> Iterator[int]:
        """The roots of which some move gains, if it is the only one."""
        found: set[int] = set()
        for root in self._of_root:
            for moves in self._moves(root):
                wanted = {self._copies.node[c] for moved, _ in moves for c in moved} & self._roots
                if not wanted <= found and self._extra_ps(self._after(moves)) < 0:
                    found |= wanted
        yield from found

    def improved(self, work: Work, expires_at: float) -> tuple[Nodes, ...]:
        """The plan after moves that gain, until none does, ``work`` is spent, or the time ``expires_at`` has
        come. All of its groups are ones that are searched."""
        self._work = work
        gains = True
        while gains:
            gains = False
            for root in self._of_root:
                if work.is_spent or time.monotonic() >= expires_at:
                    break
                gains = self._move(root) or gains
        return tuple([tuple(sorted(nodes)) for nodes in self._members if nodes])

    def _move(self, root: int) -> bool:
        """Make the move of copies of ``root`` that gains the most; whether there is one."""
        ways = [self._after(moves) for moves in self._moves(root)]
        for after in sorted(ways, key=self._extra_ps):
            if self._extra_ps(after) >= 0:
                return False
            if all(self._is_searched(nodes) for nodes in after.values() if nodes) and self._can_run(after):
                for g, nodes in after.items():
                    self._members[g] = nodes
                    for c in nodes:
                        self._kernel[c] = g
                return True
        return False

    def _moves(self, root: int) -> Iterator[list[_Move]]:
        """Each way to rematerialise ``root``."""
        to: dict[int, list[int]] = defaultdict(list)
        for c in self._of_root[root]:
            for reader in {r for v in self._graph.nodes[c].outputs for r in self._graph.consumers[v]}:
                if self._kernel[reader] != self._kernel[c]:
                    to[self._kernel[reader]].append(c)
        for deep in (False, True):
            each = [(self._cone(some, g, deep), g) for g, some in to.items()]
            yield from ([one] for one in each)
            if len(each) > 1:
                yield each

    def _cone(self, copies: Sequence[int], g: int, deep: bool) -> set[int]:
        """``copies`` with the copies of operations that only lead to them; if ``deep``, with all copies that
        they need. Operations that kernel ``g`` computes anyway are left out."""
        values, nodes, node, kernel = self._graph.values, self._graph.nodes, self._copies.node, self._kernel

        def leading(c: int) -> Iterator[int]:
            for m in (values[v].producer for v in nodes[c].inputs):
                if m in self._several and kernel[m] != g and (deep or node[m] not in self._roots):
                    yield m

        return {*copies} | reachable(copies, leading)

    def _after(self, moves: Sequence[_Move]) -> dict[int, set[int]]:
        """The kernels that ``moves`` change, as they are then."""
        after: dict[int, set[int]] = {}
        for moved, g in moves:
            after.setdefault(g, set(self._members[g])).update(moved)
            for c in moved:
                source = self._kernel[c]
                after.setdefault(source, set(self._members[source])).discard(c)
        return after

    def _extra_ps(self, after: dict[int, set[int]]) -> float:
        """Picoseconds that the plan takes more; infinity if it cannot be."""
        extra = 0.0
        for g, nodes in after.items():
            extra += self._price_ps(nodes) - self._price_ps(self._members[g])
        return extra

    def _price_ps(self, nodes: Iterable[int]) -> float:
        group, n_priced = tuple(sorted(nodes)), self._book.n_priced
        price = self._book.price(group) if group else Price(0, 0, 0)
        if self._book.n_priced > n_priced:
            self._work.spend_price(len(group))
        return price.time_ps if isinstance(price, Price) else float("inf")

    def _is_searched(self, nodes: set[int]) -> bool:
        """Whether the search looks at such a group: it is connected, and no rule refuses it."""
        group = tuple(sorted(nodes))
        if not self._rules.allows(sum(1 << c for c in group)):
            return False
        if len(group) == 1 or group in self._book.offers:
            return True
        return len(self._ties.parts(group)) == 1 and self._book.compatible(group) is None

    def _can_run(self, after: dict[int, set[int]]) -> bool:
        """Whether no kernels wait for each other."""
        every = [after.get(g, nodes) for g, nodes in enumerate(self._members)]
        groups = [tuple(sorted(nodes)) for nodes in every if nodes]
        return not cyclic_sets(order_groups(self._graph, groups)[1])

    @cached_property
    def _rules(self) -> DuplicateRules:
        members = [(c,) for c in range(len(self._graph.nodes))]
        return DuplicateRules(self._graph, self._book.copies, members, self._book.renames)

    @cached_property
    def _ties(self) -> Ties:
        hubs = () if self._book.crosses_hubs else hub_edges(self._graph)
        return Ties(self._graph, self._book.full_size_operands, hubs)
