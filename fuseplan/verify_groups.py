"""Every legal group of a component, listed by the shortest program that does it.

For the verifier: it has nothing in common with ``fuseplan.candidates`` but the rules
(``Pricing.compatible``, ``Pricing.oversized``), and none of its memory of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from fuseplan.bits import bits
from fuseplan.partition import Component
from fuseplan.pricing import Nodes, PriceBook
from fuseplan.verify_copies import CopyRules


class Groups:
    """The groups of one component: connected by crossable edges and siblings, convex, refused by no
    rule that refuses larger ones as well; of copies, as ``fuseplan.closure`` says. Sets are bitmasks of
    positions in ``component.nodes``."""

    def __init__(self, component: Component, book: PriceBook) -> None:
        self.nodes = component.nodes
        self.book = book
        self.n = n = len(component.nodes)
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
        # What two nodes break, every group that holds them breaks.
        self._apart = [0] * n
        for u in range(n):
            for v in range(u + 1, n):
                waits = (component.apart[u] >> v | component.apart[v] >> u) & 1
                if waits or book.compatible((self.nodes[u], self.nodes[v])) is not None:
                    self._apart[u] |= 1 << v
                    self._apart[v] |= 1 << u
        self._position = {node: i for i, node in enumerate(self.nodes)}
        self._copies = CopyRules(self.nodes, book.graph, book.copies, book.renames) if book.copies else None
        self._compatible: dict[int, bool] = {}
        self._roomy: dict[frozenset[int], bool] = {}

    def members(self, mask: int) -> Nodes:
        """The nodes in ``mask``."""
        return tuple([self.nodes[i] for i in bits(mask)])

    def __iter__(self) -> Iterator[int]:
        """Each group once: from its lowest member, its neighbours are one after the other in or
        out, and with what is in comes what lies between."""
        for seed in range(self.n):
            lower = (1 << seed) - 1
            waiting = [(1 << seed, lower)]
            while waiting:
                group, out = waiting.pop()
                if self._copies and self._copies.contradict(group, out):
                    continue
                border = 0
                for i in bits(group):
                    border |= self._near[i]
                    out |= self._apart[i]
                border &= ~(group | out)
                if not border:
                    if not self._copies or not self._copies.contradict(group, ~group):
                        yield group
                    continue
                new = border & -border
                waiting.append((group, out | new))
                grown = self._closed(group | new)
                if not grown & out and self._is_compatible(grown) and self._fits(grown, out):
                    waiting.append((grown, out))
        for nodes in self.book.offers:
            if self._position.keys() >= set(nodes):
                yield sum(1 << self._position[node] for node in nodes)

    def _closed(self, group: int) -> int:
        """``group`` with what lies on a path between two of its members, and with the copies that
        they cannot do without."""
        while True:
            down = up = 0
            for i in bits(group):
                down |= self._below[i]
                up |= self._above[i]
            closed = group | (down & up)
            closed |= self._copies.read_there(closed) if self._copies else 0
            if closed == group:
                return group
            group = closed

    def _is_compatible(self, group: int) -> bool:
        if group not in self._compatible:
            clash = any(self._apart[i] & group for i in bits(group))
            self._compatible[group] = not clash and self.book.compatible(self.members(group)) is None
        return self._compatible[group]

    def _fits(self, group: int, out: int) -> bool:
        """Whether the group may be small enough; what is ``out`` never joins it."""
        graph, results, residency = self.book.graph, self.book.outputs, self.book.residency
        inside = self.members(group)
        if residency is not None:  # To ask less only leaves more groups to look at.
            held = frozenset[int]().union(*map(residency.held, inside))
            if held not in self._roomy:
                self._roomy[held] = residency.fits_at_once(self.nodes, held)
            if self._roomy[held]:
                return True
        may_join = set(self.members(~out & ((1 << self.n) - 1)))
        crossing = set()
        for node in inside:
            for v in graph.nodes[node].inputs:
                if graph.values[v].producer not in may_join:
                    crossing.add(v)
            for v in graph.nodes[node].outputs:
                if v in results or not may_join.issuperset(graph.consumers[v]):
                    crossing.add(v)
        return self.book.oversized(inside, frozenset(crossing)) is None
