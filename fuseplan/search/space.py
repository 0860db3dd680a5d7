"""The search space of one component: adjacency, legal groups and prices, with groups as bitmasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakMethod

from costmodel.set_tables import UnionTable, as_sets
from fuseplan.schedule.footprint import ComponentCapacity
from fuseplan.schedule.pricing import Price, PriceBook, total_of
from fuseplan.search.components import Component
from fuseplan.search.limits import LIMITS
from fuseplan.search.nogoods import MonotoneRefusals
from fuseplan.search.remat.duplicates import DuplicateRules
from fuseplan.support.bitset import bits, pick, transposed, union_at
from fuseplan.support.digraph import ancestors, cyclic_sets, descendants, group_successors
from fuseplan.support.errors import Verdict

Mask = int


def _method(reference: WeakMethod[Any]) -> Any:
    method = reference()
    assert method is not None, "a space outlives its rules"
    return method


class Space:
    """One component: adjacency and reachability as bitmasks, answers and prices remembered.

    ``below[i]`` and ``above[i]`` are the positions on paths from and to ``i``;
    ``conflicts[i]`` those that can never share a group with it. ``made[i]`` and ``read[i]`` are
    masks of ``values``, those that members make; ``kept`` are those that are needed outside,
    ``given`` values from outside that members read.
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
        readers: list[list[int]] = [[] for _ in range(n)]
        for u, v in component.edges:
            self.producers[v].append(u)
            readers[u].append(v)
        for u, v in component.edges + component.siblings:
            self.neighbours[u] |= 1 << v
            self.neighbours[v] |= 1 << u
        self.inner_below, self.inner_above = (
            [mask ^ 1 << i for i, mask in enumerate(reach(readers))] for reach in (descendants, ancestors)
        )
        self.conflicts = [a | b for a, b in zip(component.apart, transposed(component.apart), strict=True)]
        if book.offers:
            # Only an offered group may hold both ends of an edge that the rules refuse.
            for u, v in component.edges:
                if book.compatible(self.members[u] + self.members[v]) is not None:
                    self.conflicts[u] |= 1 << v
                    self.conflicts[v] |= 1 << u
        self.below = [
            inner | apart if apart else inner  # else not a copy: together they need as many bits as n squared
            for inner, apart in zip(self.inner_below, component.apart, strict=True)
        ]
        """The positions that wait for each position, on any path."""
        self.above = transposed(self.below)
        """The positions that each position waits for, on any path."""
        self._exchange()
        self.duplicate_rules = (
            DuplicateRules(book.graph, book.copies, self.members, book.renames) if book.copies else None
        )
        """The rules of groups with copies; None where no operation has copies."""
        if self.duplicate_rules is not None and not self.duplicate_rules.classes:
            self.duplicate_rules = None
        self.offers = tuple(self._offered())
        """Groups that the scheduler offers beside the compatible ones."""
        # By weak references: a space in a cycle would stay until the garbage collector comes.
        clash, overflow = WeakMethod(self._clash), WeakMethod(self._overflow)
        misfit = WeakMethod(self._misfit)
        late, has_copies = book.is_overdue, self.duplicate_rules is not None
        most = LIMITS.max_learning_bits_with_copies if has_copies else LIMITS.max_learning_bits
        self.learns = not book.absorbs_moves
        """Whether nogoods are learnt. Where a question is cheap, as about loops of XLA on a CPU, that pays
        only for a search that lists groups (``component.solve_component``)."""
        self.rules = MonotoneRefusals(lambda mask: _method(clash)(mask), self.everything, late, most)
        self.overflowing = MonotoneRefusals(lambda mask: _method(overflow)(mask), 0, late, most)
        self.misfits = MonotoneRefusals(lambda question: _method(misfit)(question), 0, late, most)
        """Nogoods of ``question``s: no group between two sets of positions has a tile that fits."""
        self._room = None
        if book.capacity is not None:
            values = {v: 1 << k for k, v in enumerate(self.values)}
            self._room = ComponentCapacity(book.capacity, self.members, values, self.inner_above)
        graph = book.graph
        self._n_dims = [
            sum(
                len(graph.values[v].shape)
                for n in nodes
                for v in graph.nodes[n].inputs + graph.nodes[n].outputs
            )
            for nodes in self.members
        ]
        """For each position, the dimensions of its operands and results."""
        self._prices: dict[Mask, Price | Verdict] = {}

    @cached_property
    def below_table(self) -> UnionTable:
        """``below``, for many sets at a time."""
        return UnionTable(as_sets(self.below, self.n))

    @cached_property
    def above_table(self) -> UnionTable:
        """``above``, for many sets at a time."""
        return UnionTable(as_sets(self.above, self.n))

    def _exchange(self) -> None:
        graph, outputs = self.book.graph, self.book.outputs
        self.values = tuple(
            v
            for nodes in self.members
            for n in nodes
            for v in graph.nodes[n].outputs
            if v in outputs or any(self.position.get(c) != self.position[n] for c in graph.consumers[v])
        )
        number = {v: k for k, v in enumerate(self.values)}
        self.made = [0] * self.n
        self.read = [0] * self.n
        self.readers: list[Mask] = [0] * len(self.values)
        """For each of ``values``, the positions that read it, but for the one that makes it."""
        self.kept = 0
        given: set[int] = set()
        for i, nodes in enumerate(self.members):
            for v in {v for n in nodes for v in graph.nodes[n].inputs}:
                maker = self.position.get(graph.values[v].producer)
                if maker is None:
                    given.add(v)
                elif maker != i:
                    self.read[i] |= 1 << number[v]
                    self.readers[number[v]] |= 1 << i
        self.given = frozenset(given)
        for v, k in number.items():
            self.made[self.position[graph.values[v].producer]] |= 1 << k
            if v in outputs or any(c not in self.position for c in graph.consumers[v]):
                self.kept |= 1 << k

    def _offered(self) -> Iterator[Mask]:
        for nodes in self.book.offers:
            if all(n in self.position for n in nodes):
                mask = self.mask(nodes)
                waits = any(self.component.apart[i] & mask for i in bits(mask))
                if self.nodes(mask) == nodes and not waits:
                    yield mask

    @property
    def singles(self) -> list[Mask]:
        """The partition in which every operation is a kernel of its own, which computes it once."""
        if self.duplicate_rules is None:
            return [1 << i for i in range(self.n)]
        classes = self.duplicate_rules.classes
        copied = sum(classes)
        return sorted(
            [*classes, *(1 << i for i in range(self.n) if not copied >> i & 1)], key=lambda mask: mask & -mask
        )

    def nodes(self, mask: Mask) -> tuple[int, ...]:
        """The nodes of the graph that ``mask`` stands for."""
        if self.n == len(self.component.nodes):
            return tuple(pick(mask, self.component.nodes))
        return tuple(sorted([n for i in bits(mask) for n in self.members[i]]))

    def mask(self, nodes: Iterable[int]) -> Mask:
        """The positions of nodes of the graph."""
        mask = 0
        for n in nodes:
            mask |= 1 << self.position[n]
        return mask

    def crossing(self, mask: Mask) -> Mask:
        """Those of ``values`` that the group exchanges with other members or writes for others."""
        made, read = union_at(mask, self.made), union_at(mask, self.read)
        crossing = read & ~made | made & self.kept
        for k in bits(made & ~self.kept):
            if self.readers[k] & ~mask:
                crossing |= 1 << k
        return crossing

    def allows(self, mask: Mask) -> bool:
        """Whether no rule refuses the group; it may still have no price."""
        if self.clashes(mask) or self.breaks_rules(mask):
            return False
        return not (self.is_tight(mask) and self.overflows(mask, self.crossing(mask)))

    def breaks_rules(self, mask: Mask) -> bool:
        """Whether the rules refuse the group and every larger one (``Pricing.compatible``)."""
        return self.rules.refused(mask) if self.learns else self._clash(mask) is not None

    def is_tight(self, mask: Mask) -> bool:
        """Whether the group may be too large for the chip, so that ``overflows`` must be checked."""
        if self.book.absorbs_moves:  # no kernel need fit
            return False
        return self._room is None or self._room.is_tight(mask)

    def may_misfit(self, mask: Mask) -> bool:
        """Whether no tiles may serve the group, so that ``misfits`` must be checked."""
        if self.is_tight(mask):
            return True
        return self._room is not None and self._room.has_contraction(mask)

    def misfits_alone(self, mask: Mask) -> bool:
        """Whether no tiles serve the group, if nothing joins it; learns from one of which that is so."""
        if not mask & (mask - 1) or not self.may_misfit(mask):
            return False
        return self.misfits.refused(self.question(mask, mask, self.crossing(mask)))

    def overflows(self, mask: Mask, crossing: Mask) -> bool:
        """Whether no superset of the group that still loads or stores ``crossing`` fits on chip
        (``Pricing.oversized``)."""
        return self.overflowing.refused(mask | crossing << self.n)

    def is_known_to_overflow(self, mask: Mask, crossing: Mask) -> bool:
        """``overflows``, as far as that follows from groups that were asked about before."""
        return self.overflowing.holds_core(mask | crossing << self.n)

    def question(self, known: Mask, possible: Mask, crossing: Mask) -> Mask:
        """The question, as bits, whether a group that holds ``known`` within ``possible`` fits on chip while
        it exchanges ``crossing``. The more bits, the fewer such groups."""
        return known | crossing << self.n | (self.everything & ~possible) << self.n + len(self.values)

    @property
    def question_width(self) -> int:
        """The bits of a ``question``."""
        return 2 * self.n + len(self.values)

    # Questions are counted though another component may have asked them of groups of such a structure: what
    # a search may do does not depend on what was searched before.

    def _clash(self, mask: Mask) -> Mask | None:
        """None if the rules allow the group; else the positions that the refusal names."""
        self.book.work.spend_rules(sum([self._n_dims[i] for i in bits(mask)]))
        verdict = self.book.compatible(self.nodes(mask))
        return None if verdict is None else mask & self.mask(verdict.nodes)

    def _overflow(self, question: Mask) -> Mask | None:
        """None if the group may fit on chip while it exchanges some values."""
        mask = question & self.everything
        if self._room is not None and self._room.is_roomy(mask, question >> self.n):
            return None
        self.book.work.spend_room(mask.bit_count(), loops=self.book.is_for_xla)
        return None if self._oversized(question) is None else question

    def _misfit(self, question: Mask) -> Mask | None:
        """None if a group that the question asks about may fit on chip."""
        mask = question & self.everything
        if not mask:
            return None
        crossing = question >> self.n & (1 << len(self.values)) - 1
        joiners = self.everything & ~(question >> self.n + len(self.values)) & ~mask
        self.book.work.spend_room(mask.bit_count(), loops=self.book.is_for_xla)
        outside = self._exchanged(mask, crossing)
        refused = self.book.oversized_beside(self.nodes(mask), outside, self.nodes(joiners))
        return None if refused is None else question

    def _exchanged(self, mask: Mask, crossing: Mask) -> frozenset[int]:
        """The values, of the whole graph, that the group exchanges if it exchanges ``crossing``."""
        touched = union_at(mask, self.made) | union_at(mask, self.read)
        return self.given.union([self.values[k] for k in bits(crossing & touched)])

    def _oversized(self, question: Mask) -> Verdict | None:
        mask, crossing = question & self.everything, question >> self.n
        return self.book.oversized(self.nodes(mask), self._exchanged(mask, crossing))

    def price(self, mask: Mask) -> Price | Verdict:
        """The price of the group, or why it is refused."""
        if mask not in self._prices:
            nodes = self.nodes(mask)
            self.book.work.spend_price(len(nodes), loops=self.book.is_for_xla)
            self._prices[mask] = self.book.price(nodes)
        return self._prices[mask]

    @property
    def priced_ps(self) -> dict[Mask, int]:
        """The groups that have been asked for and can be kernels, with their times in picoseconds."""
        return {mask: price.time_ps for mask, price in self._prices.items() if isinstance(price, Price)}

    def known_price(self, mask: Mask) -> Price | Verdict | None:
        """The price of a group that has been asked for before, else None. What other components
        asked for is not looked up: a plan must not depend on which of them are remembered."""
        return self._prices.get(mask)

    def floor(self, mask: Mask) -> int:
        """Picoseconds that no partition of the group beats."""
        return self.book.floor(self.nodes(mask))

    def least(self, mask: Mask) -> int:
        """Picoseconds that the group takes at least as one kernel."""
        return self.book.least(self.nodes(mask))

    def floors(self, mask: Mask) -> tuple[int, int]:
        """Picoseconds and HBM bytes that the group takes and moves at least as one kernel."""
        return self.book.floors(self.nodes(mask))

    def total(self, groups: Iterable[Mask]) -> Price:
        """The cost of a partition, each group of which has a price."""
        return total_of(map(self.price, groups))

    @cached_property
    def is_ideal(self) -> bool:
        """Whether the component is one kernel that costs no more than any plan must.

        One question instead of a search: the scalar arithmetic of a large optimizer is a thousand
        operations that all fuse.
        """
        if not self.allows(self.everything):
            return False
        price = self.price(self.everything)
        return isinstance(price, Price) and price.time_ps == self.floor_ps

    @cached_property
    def floor_ps(self) -> int:
        """Picoseconds that no plan of the component beats."""
        return self.floor(self.everything)

    @property
    def refusals(self) -> list[tuple[Mask, Verdict]]:
        """The smallest groups that the rules refuse, and those that have no price."""
        found: list[tuple[Mask, Price | Verdict | None]] = list(self._prices.items())
        found += [(core, self.book.compatible(self.nodes(core))) for core in self.rules.cores]
        found += [(core & self.everything, self._oversized(core)) for core in self.overflowing.cores]
        return [(mask, verdict) for mask, verdict in found if isinstance(verdict, Verdict)]

    def clashes(self, mask: Mask) -> bool:
        """Whether two members can never share a group."""
        return any(self.conflicts[i] & mask for i in bits(mask))

    def followers(self, groups: Sequence[Mask]) -> list[set[int]]:
        """For each group of a partition, by index, the groups that directly wait for it: those that read from
        it, or that a path outside of the component leads to. Its transitive closure is that of
        ``successors``, so both give the same orders and cycles."""
        return group_successors(self.component.edges + self._far_edges, list(map(bits, groups)))

    @cached_property
    def _far_edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of positions that, with the edges inside, imply all paths through the outside."""
        readers = [0] * self.n
        for u, v in self.component.edges:
            readers[u] |= 1 << v
        apart = self.component.apart
        found: list[tuple[int, int]] = []
        for u, far in enumerate(apart):
            fresh = far
            for v in bits(readers[u]) if far else ():
                fresh &= ~apart[v]
            found += [(u, v) for v in bits(fresh) if not any(far >> p & 1 for p in self.producers[v])]
        return tuple(found)

    def can_run(self, groups: Sequence[Mask]) -> bool:
        """Whether the groups of a partition can run in some order: none wait for each other in a cycle."""
        return not cyclic_sets(self.followers(groups))

    def successors(self, groups: Sequence[Mask]) -> list[set[int]]:
        """For each group of a partition, the groups that wait for it, by index."""
        owner = {i: g for g, mask in enumerate(groups) for i in bits(mask)}
        return [{owner[i] for i in bits(union_at(mask, self.below) & ~mask)} for mask in groups]
