"""Every legal group of a component, listed by the shortest program that does it.

For the verifier: it has nothing in common with ``fuseplan.search.candidates`` but the rules
(``Pricing.compatible``, ``Pricing.oversized``), and none of its memory of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fuseplan.schedule.pricing import Nodes, PriceBook
from fuseplan.search.components import Component
from fuseplan.support.bitset import bits
from fuseplan.verify.duplicates import CopyRules

_LEARNT = 200
"""Refused and allowed sets that are kept for each rule: searching more of them takes longer than asking."""


class Groups:
    """The groups of one component: connected by crossable edges and siblings, convex, refused by no rule that
    refuses larger ones as well; of copies, as ``fuseplan.search.remat.duplicates`` says. Sets are
    bitmasks of positions in ``component.nodes``."""

    def __init__(self, component: Component, book: PriceBook) -> None:
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
        self._values: list[int] = []
        self._crosses = self._boundaries()
        self._rules = _Monotone(lambda mask: book.compatible(self.members(mask)) is not None, True)
        # A part of a group that fits may exchange more values, and then not fit.
        self._crowds = _Monotone(self._is_crowded, True)
        self._room = _Monotone(self._is_oversized, False)

    def members(self, mask: int) -> Nodes:
        """The nodes in ``mask``."""
        return tuple([self.nodes[i] for i in bits(mask)])

    def __iter__(self) -> Iterator[int]:
        """Each group once: from its lowest member, its neighbours are one after the other in or
        out, and with what is in comes what lies between."""
        for seed in range(self.n):
            waiting = [(1 << seed, (1 << seed) - 1, 0)]
            while waiting:
                group, out, border = waiting.pop()
                if self._copies and self._copies.contradict(group, out):
                    continue
                if not border:  # of a group that has just grown
                    for i in bits(group):
                        border |= self._near[i]
                        out |= self._apart[i]
                border &= ~(group | out)
                # The more is out, the more the group exchanges.
                question = self._question(group, out)
                if self._room.follows(question):
                    continue
                if not border:
                    if not self._copies or not self._copies.contradict(group, ~group):
                        yield group
                    continue
                new = border & -border
                waiting.append((group, out | new, border ^ new))
                grown = self._closed(group | new)
                if grown & out or not self._is_compatible(grown):
                    continue
                if self._may_fit(grown, self._question(grown, out)):
                    waiting.append((grown, out, 0))
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
        return not any(self._apart[i] & group for i in bits(group)) and not self._rules.refuses(group)

    def _boundaries(self) -> list[list[tuple[int, int, bool]]]:
        """For each position, the values that it reads or makes: the bit of the value, the positions of
        its maker, or of its readers, and whether some are outside of the component or the caller."""
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
        """A group, and the values that it exchanges even if all positions not ``out`` join it, as bits."""
        crossing = 0
        for i in bits(group):
            for bit, others, always in self._crosses[i]:
                if always or others & out:
                    crossing |= bit
        return group | crossing << self.n

    def _may_fit(self, group: int, question: int) -> bool:
        # Most groups are small enough whatever they exchange, and then so are all of their parts. To
        # let one in that is not costs no more than a look at its price.
        return not self._crowds.refuses(group) or not self._room.refuses(question)

    def fits(self, group: int) -> bool:
        """Whether the group may be a kernel as it is, as far as its size goes."""
        return group & (group - 1) == 0 or not self._room.refuses(self._question(group, ~group))

    def _is_crowded(self, group: int) -> bool:
        return self.book.oversized(self.members(group), frozenset(self._values)) is not None

    def _is_oversized(self, question: int) -> bool:
        """Whether a group is too large for the chip that exchanges some values."""
        crossing = frozenset([self._values[k] for k in bits(question >> self.n)])
        return self.book.oversized(self.members(question & self._everything), crossing) is not None


class _Monotone:
    """Answers to a question about sets whose refusal refuses all larger sets as well, as bitmasks: a few
    smallest refused sets tell of thousands. ``ask`` says whether a set is refused."""

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
        """Whether the set is known to be refused; nothing is asked."""
        # Asked of every group: faster than any().
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
        """What of ``rest`` is refused together with ``base``, and nothing of it can be left out; ``added``
        is what was last put into ``base`` (Junker, "QuickXplain", AAAI 2004)."""
        if added and self._is_refused(base):
            return 0
        if not rest & (rest - 1):
            return rest
        positions = bits(rest)
        low = sum(1 << i for i in positions[: len(positions) // 2])
        high = self._least(base | low, low, rest ^ low)
        return high | self._least(base | high, high, low)
