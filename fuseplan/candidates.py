"""The legal groups of one component, as bitmasks of positions.

A group is legal if it is connected by crossable edges, convex (no path leaves it and
returns), compatible (``Pricing.compatible``), and has a price. The first three are
enumerated here, exactly once each; prices are asked for by whoever needs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from costmodel.graph import OpKind
from fuseplan.errors import Verdict
from fuseplan.partition import Component
from fuseplan.pricing import FREE, Price, PriceBook

Mask = int

_MAX_LEARNT = 256
"""Sets whose compatibility is remembered for those inside and around them: looking through
more of them takes longer than asking."""


def bits(mask: Mask) -> Iterator[int]:
    """The positions in ``mask``, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Space:
    """One component to plan: adjacency and reachability as bitmasks, prices remembered.

    ``below[i]`` and ``above[i]`` are the positions on paths from and to ``i``;
    ``conflicts[i]`` those that can never share a group with it.
    """

    def __init__(
        self, component: Component, book: PriceBook, members: tuple[tuple[int, ...], ...] | None = None
    ) -> None:
        self.component = component
        self.book = book
        self.members = members or tuple((n,) for n in component.nodes)
        """The nodes of the graph at each position: one, but in a contracted component."""
        self.position = {n: i for i, nodes in enumerate(self.members) for n in nodes}
        self.n = n = len(self.members)
        self.everything: Mask = (1 << n) - 1
        self.neighbours = [0] * n
        self.producers: list[list[int]] = [[] for _ in range(n)]
        self.inner_below = [0] * n
        for u, v in component.edges:
            self.neighbours[u] |= 1 << v
            self.neighbours[v] |= 1 << u
            self.producers[v].append(u)
        for v in reversed(range(n)):
            for u in self.producers[v]:
                self.inner_below[u] |= self.inner_below[v] | 1 << v
        self.inner_above = [0] * n
        for v in range(n):
            for u in self.producers[v]:
                self.inner_above[v] |= self.inner_above[u] | 1 << u
        self.conflicts = list(component.apart)
        for u in range(n):
            for v in bits(component.apart[u]):
                self.conflicts[v] |= 1 << u
        if book.offers:
            # Only an offered group may hold both ends of an edge that the rules refuse.
            for u, v in component.edges:
                if book.compatible(self.members[u] + self.members[v]) is not None:
                    self.conflicts[u] |= 1 << v
                    self.conflicts[v] |= 1 << u
        self.below = [inner | apart for inner, apart in zip(self.inner_below, component.apart, strict=True)]
        """What waits for each position, on any path."""
        graph, inside = book.graph, set(component.nodes)
        self._written_for_good = frozenset(
            v
            for n in component.nodes
            for v in graph.nodes[n].outputs
            if v in book.outputs or not inside.issuperset(graph.consumers[v])
        )
        self.offers = tuple(self._offered())
        """Groups that the scheduler offers beside the compatible ones."""
        self._allowed: list[Mask] = []
        self._refused: list[Mask] = []
        self._prices: dict[Mask, Price | Verdict] = {}

    def _offered(self) -> Iterator[Mask]:
        for nodes in self.book.offers:
            if all(n in self.position for n in nodes):
                mask = self.mask(nodes)
                waits = any(self.component.apart[i] & mask for i in bits(mask))
                if self.nodes(mask) == nodes and not waits:
                    yield mask

    def nodes(self, mask: Mask) -> tuple[int, ...]:
        """The nodes of the graph that ``mask`` stands for."""
        if self.n == len(self.component.nodes):
            members = self.component.nodes
            return tuple(members[i] for i in bits(mask))
        return tuple(sorted(n for i in bits(mask) for n in self.members[i]))

    def mask(self, nodes: Iterable[int]) -> Mask:
        """The positions of nodes of the graph."""
        mask = 0
        for n in nodes:
            mask |= 1 << self.position[n]
        return mask

    def refusal(self, mask: Mask) -> Verdict | None:
        """Why the group and every larger one in this component are refused, or None."""
        return self.book.compatible(self.nodes(mask), self._written_for_good)

    def compatible(self, mask: Mask) -> bool:
        """Whether the monotone rules allow the group.

        A set inside an allowed one is allowed, one around a refused one is refused: each
        answer is first widened as far as it goes, so that a few answer for thousands.
        """
        known = self._known(mask)
        if known is not None:
            return known
        answer = self.refusal(mask) is None
        if self.offers:
            # Offered groups tie together what the rules keep apart: nothing is to be learnt from
            # sets that span them.
            return answer
        if len(self._allowed) + len(self._refused) >= _MAX_LEARNT:
            return answer
        if answer:
            for i in range(self.n):
                wider = mask | 1 << i
                if wider != mask and self._known(wider) is not False:
                    if self.refusal(wider) is None:
                        mask = wider
                    elif len(self._refused) < _MAX_LEARNT:
                        self._refused.append(self._smallest_refused(wider))
            self._allowed.append(mask)
        else:
            self._refused.append(self._smallest_refused(mask))
        return answer

    def _known(self, mask: Mask) -> bool | None:
        if any(not mask & ~allowed for allowed in self._allowed):
            return True
        if any(not refused & ~mask for refused in self._refused):
            return False
        return None

    def _smallest_refused(self, mask: Mask) -> Mask:
        """A refused subset of a refused set, none of whose members can be left out."""
        for i in bits(mask):
            smaller = mask ^ 1 << i
            known = self._known(smaller)
            if known is None:
                known = self.refusal(smaller) is None
            if not known:
                mask = smaller
        return mask

    def price(self, mask: Mask) -> Price | Verdict:
        """What the group costs, or why it is refused."""
        if mask not in self._prices:
            self._prices[mask] = self.book.price(self.nodes(mask))
        return self._prices[mask]

    def known_price(self, mask: Mask) -> Price | Verdict | None:
        """The price of a group that has been asked for before, else None."""
        return self._prices.get(mask)

    def floor(self, mask: Mask) -> int:
        """Picoseconds that no partition of the group beats."""
        return self.book.floor(self.nodes(mask))

    def total(self, groups: Iterable[Mask]) -> Price:
        """The cost of a partition, each group of which has a price."""
        total = FREE
        for mask in groups:
            price = self.price(mask)
            assert isinstance(price, Price), price
            total += price
        return total

    @property
    def refused(self) -> list[tuple[Mask, Verdict]]:
        """The groups that were asked for and have no price."""
        return [(mask, price) for mask, price in self._prices.items() if isinstance(price, Verdict)]

    def clashes(self, mask: Mask) -> bool:
        """Whether two members can never share a group."""
        return any(self.conflicts[i] & mask for i in bits(mask))

    def successors(self, groups: Sequence[Mask]) -> list[set[int]]:
        """For each group of a partition, the groups that wait for it, by index."""
        owner = {i: g for g, mask in enumerate(groups) for i in bits(mask)}
        after: list[set[int]] = []
        for g, mask in enumerate(groups):
            reach = 0
            for i in bits(mask):
                reach |= self.below[i]
            after.append({owner[i] for i in bits(reach & ~mask)} - {g})
        return after


@dataclass(frozen=True, slots=True)
class Candidates:
    """Legal groups but for the price; ``complete`` unless a limit ended the search."""

    groups: tuple[Mask, ...]
    complete: bool


def enumerate_groups(
    space: Space,
    max_groups: int,
    expires_at: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> Candidates:
    """Every connected, convex, compatible group of ``space``, each exactly once.

    From the lowest member, the search decides neighbour by neighbour whether it belongs to
    the group (then what lies between belongs to it too) or not. Each branch ends in
    another group, so the time is proportional to their number.

    Args:
        space: the component.
        max_groups: stop when so many have been found.
        expires_at: stop at this time of ``clock``, in seconds.
        clock: what tells the time.
    """
    found: list[Mask] = []
    below, above, neighbours, conflicts = (
        space.inner_below,
        space.inner_above,
        space.neighbours,
        space.conflicts,
    )
    for seed in range(space.n):
        start = 1 << seed
        # Groups that hold a lower position were found from there.
        stack = [(start, below[seed], above[seed], neighbours[seed], conflicts[seed], start - 1)]
        while stack:
            group, down, up, border, clash, excluded = stack.pop()
            border &= ~(group | excluded | clash)
            if not border:
                found.append(group)
                if len(found) >= max_groups or (len(found) % 64 == 0 and clock() > expires_at):
                    return Candidates(_with_singles(found, space.n), False)
                continue
            new = border & -border
            i = new.bit_length() - 1
            stack.append((group, down, up, border, clash, excluded | new))
            down |= below[i]
            up |= above[i]
            grown = group | new | (down & up)
            if grown & (excluded | clash):
                continue
            for j in bits(grown & ~group):
                clash |= conflicts[j]
                border |= neighbours[j]
            if grown & clash or not space.compatible(grown):
                continue
            stack.append((grown, down, up, border, clash, excluded))
    return Candidates(tuple(found), True)


def _with_singles(found: list[Mask], n: int) -> tuple[Mask, ...]:
    return tuple(dict.fromkeys([*(1 << i for i in range(n)), *found]))


def contract(space: Space) -> Space:
    """``space`` with each cheap single-use producer merged into its consumer.

    A producer is merged if it is elementwise or a broadcast, all of it is used by one
    consumer, it reads nothing larger than what it makes, and the two have a price together.
    Such a merge saves traffic, but it may keep a group from fitting on chip that would fit
    without the producer: the best contracted plan need not be the best plan.
    """
    graph = space.book.graph
    values, is_output = graph.values, set(graph.outputs)
    root = list(range(space.n))
    members: dict[int, Mask] = {i: 1 << i for i in range(space.n)}
    inner = set(space.component.edges)
    for i in reversed(range(space.n)):
        if len(space.members[i]) > 1:
            continue
        node = graph.nodes[space.members[i][0]]
        readers = {n for v in node.outputs for n in graph.consumers[v]}
        if node.kind > OpKind.BROADCAST or len(readers) != 1 or is_output.intersection(node.outputs):
            continue
        reader = space.position.get(readers.pop(), -1)
        made = max(values[v].nbytes for v in node.outputs)
        if (i, reader) not in inner or any(values[v].nbytes > made for v in node.inputs):
            continue
        merged = members[root[reader]] | 1 << i
        if space.clashes(merged) or isinstance(space.price(merged), Verdict):
            continue
        root[i] = root[reader]
        members[root[i]] = merged
        del members[i]
    return _merged(space, root)


def absorb_moves(space: Space) -> Space:
    """``space`` with each operation that only moves data merged into its reader, where it has
    one, reads one other member at most, and makes no less than it reads. For kernels that need
    not fit on chip (``Pricing.absorbs_moves``).

    No plan is lost: it computes nothing, so that in its reader's kernel it costs what it reads
    there instead of what it makes; and the kernel that it leaves writes no more, and stays in
    one piece (test_candidates.py::test_absorbing_moves_loses_nothing).
    """
    graph, outputs = space.book.graph, space.book.outputs
    inner = set(space.component.edges)
    offers = [set(bits(mask)) for mask in space.offers]
    root = list(range(space.n))
    members: list[Mask] = [1 << i for i in root]
    for i in reversed(range(space.n)):
        (n,) = space.members[i]
        node = graph.nodes[n]
        readers = {m for v in node.outputs for m in graph.consumers[v]}
        if node.kind > OpKind.INJECTIVE or node.flops.total or len(readers) != 1:
            continue
        reader = space.position.get(readers.pop(), -1)
        read = sum(graph.values[v].nbytes for v in set(node.inputs))
        made = sum(graph.values[v].nbytes for v in node.outputs)
        alone = (i, reader) not in inner or len(space.producers[i]) > 1 or read > made
        if alone or outputs.intersection(node.outputs):
            continue
        merged = members[root[reader]] | 1 << i
        tied = any((i in offer) != (reader in offer) for offer in offers)
        if not tied and not space.clashes(merged) and space.compatible(merged):
            root[i] = root[reader]
            members[root[i]] = merged
    return _merged(space, root) if root != list(range(space.n)) else space


def absorb_renames(space: Space) -> Space:
    """``space`` with each renaming (``Pricing.renames``) merged into its only consumer, or
    into a producer that it is the only consumer of.

    No plan is lost: a renaming is free and of equal size on both sides, so moving it across
    a border between two kernels changes the cost of neither
    (test_candidates.py::test_absorbing_renames_loses_nothing).
    """
    graph = space.book.graph
    outputs = space.book.outputs
    position = space.position
    inner = set(space.component.edges)
    root = list(range(space.n))

    def only_reader(v: int, i: int) -> int | None:
        """The position that alone reads the value ``v`` of position ``i``."""
        readers = graph.consumers[v]
        reader = position.get(readers[0], -1) if len(readers) == 1 and v not in outputs else -1
        return reader if (i, reader) in inner else None

    def merge(i: int, other: int) -> bool:
        together = sum(1 << k for k in range(space.n) if root[k] in (root[i], root[other]))
        if space.clashes(together) or isinstance(space.price(together), Verdict):
            return False
        old = root[i]
        for k in range(space.n):
            if root[k] == old:
                root[k] = root[other]
        return True

    for i in range(space.n):
        n = space.component.nodes[i]
        if not space.book.renames(n):
            continue
        source, result = graph.nodes[n].inputs[0], graph.nodes[n].outputs[0]
        reader = only_reader(result, i)
        if reader is not None and merge(i, reader):
            continue
        producer = position.get(graph.values[source].producer)
        if producer is not None and only_reader(source, producer) == i:
            merge(i, producer)
    return _merged(space, root) if root != list(range(space.n)) else space


def _merged(space: Space, root: Sequence[int]) -> Space:
    """``space`` with the positions of one root as one position."""
    members: dict[int, Mask] = {}
    for i, r in enumerate(root):
        members[r] = members.get(r, 0) | 1 << i
    roots = sorted(members)
    index = {r: k for k, r in enumerate(roots)}
    edges = {(index[root[u]], index[root[v]]) for u, v in space.component.edges if root[u] != root[v]}
    apart = [0] * len(roots)
    for u in range(space.n):
        for v in bits(space.component.apart[u]):
            apart[index[root[u]]] |= 1 << index[root[v]]
    return Space(
        Component(space.component.nodes, tuple(sorted(edges)), tuple(apart)),
        space.book,
        tuple(space.nodes(members[r]) for r in roots),
    )
