"""Horizontal fusion of a finished plan: merge small kernels that have only a scalar in common.

This is the last step of the search, on a plan without packs; ``fuseplan.schedule.packs`` says what a pack may
be.

1. ``Lines`` puts the kernels that may be pieces into lines. The kernels at one hub and at one distance from
   the end of the plan do not wait for each other, nor does anything that one of them waits for, wherever they
   are merged. A line has them by size, so that its runs are of similar pieces.
2. ``Runs`` cuts each line into packs: a shortest path from before its first piece to behind its last. Only
   runs on such a path are scheduled, until one path has no other; all other runs have a lower bound.
3. The lengths of the paths to each piece are the proof: the share of a piece is by how much they grow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from costmodel.graph import Graph, boundary
from fuseplan.plan.fusion_plan import Kernel, Piece
from fuseplan.plan.notes import Note, NoteKind, note
from fuseplan.schedule.packs import Line, OneTilePricing, PackCapacity, arrays_read, may_pack
from fuseplan.schedule.pricing import Nodes, Price, PriceBook, total_of
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.schedule.shared_operands import wide_hubs
from fuseplan.search.grouping import Grouping, order_groups
from fuseplan.search.selectors import Ties
from fuseplan.support.digraph import execution_order
from fuseplan.support.work import Work

Kernels = tuple[Nodes, ...]
"""Those that make up a piece."""


class Lines:
    """The kernels of a plan that may be pieces of packs, in lines."""

    def __init__(self, graph: Graph, scheduler: Scheduler, book: PriceBook, grouping: Grouping) -> None:
        self._graph, self._scheduler, self._book = graph, scheduler, book
        self._groups = grouping.groups
        self._price = {k.spec.nodes: Price(k.cost.time_ps, k.cost.hbm_bytes) for k in grouping.kernels}
        self._hubs_of = wide_hubs(graph)
        self._busy: dict[Kernels, int] = {}
        self._level: dict[int, int] = {}
        """For each operation, how many kernels wait at most for its own, one after the other, if pieces
        are kernels."""

    def lines(self) -> list[list[Kernels]]:
        """Lines of two pieces or more; each piece is one kernel, or several that can be one."""
        pieces: list[Kernels]
        pieces = [(nodes,) for nodes in self._groups if self._hubs(nodes) and self._gains((nodes,))]
        if len(pieces) < 2:
            return []
        wider = self._with_neighbours(pieces)
        if not self._find_levels(wider):
            wider = pieces
            self._find_levels(wider)
        found: dict[tuple[int, int], list[Kernels]] = defaultdict(list)
        read: dict[tuple[int, int], set[int]] = defaultdict(set)
        for kernels in wider:
            nodes = union(kernels)
            key = (min(self._hubs(nodes)), self._level[nodes[0]])
            arrays = arrays_read(self._graph, boundary(self._graph, nodes))
            if read[key].isdisjoint(arrays):
                read[key].update(arrays)
                found[key].append(kernels)
        every = [
            sorted(line, key=lambda kernels: (self._busy_ps(kernels), kernels)) for line in found.values()
        ]
        return [line for line in every if len(line) > 1]

    def wider(self, lines: Sequence[list[Kernels]]) -> list[list[Kernels]]:
        """``lines`` with kernels of scalar arithmetic, each in the first piece of one that makes what it
        needs or needs what it makes."""
        lines = list(lines)
        taken: set[int] = set()
        for nodes in self._groups:
            if not self._hubs_of.arithmetic.issuperset(nodes) or not may_pack(self._graph, nodes, False):
                continue
            for k, line in enumerate(lines):
                first = union(line[0])
                if k in taken or not self._follow(first, nodes):
                    continue
                kernels = (nodes, *line[0])
                trial = [kernels, *line[1:]]
                fits = isinstance(self._book.price(union(kernels)), Price)
                if fits and Line(self._graph, self._scheduler.device, list(map(union, trial))).allows(0, 2):
                    lines[k] = trial
                    taken.add(k)
                    break
        return lines

    def _follow(self, one: Nodes, other: Nodes) -> bool:
        """Whether one group reads a result of the other, and their levels differ by one."""
        if abs(self._level[one[0]] - self._level[other[0]]) != 1:
            return False
        edges = [boundary(self._graph, nodes) for nodes in (one, other)]
        return any(not set(a.writes).isdisjoint(b.reads) for a, b in (edges, edges[::-1]))

    def alone(self, kernels: Sequence[Nodes]) -> Price:
        """What the kernels of a piece cost."""
        return total_of([self._price[nodes] for nodes in kernels])

    def _hubs(self, nodes: Nodes) -> set[int]:
        return {hub for n in nodes for hub in self._hubs_of.at[n]}

    def _busy_ps(self, kernels: Kernels) -> int:
        if kernels not in self._busy:
            line = Line(self._graph, self._scheduler.device, [union(kernels)])
            self._busy[kernels] = line.busy_ps(0, 1)
        return self._busy[kernels]

    def _gains(self, kernels: Kernels) -> bool:
        """Whether one core has room for these kernels, and a pack may be faster with them than they are
        alone, if the resource that they need most is what bounds it."""
        nodes = union(kernels)
        if not may_pack(self._graph, nodes) or self._busy_ps(kernels) >= self.alone(kernels).time_ps:
            return False
        return isinstance(self._book.price(nodes), Price)

    def _with_neighbours(self, pieces: Sequence[Kernels]) -> list[Kernels]:
        """Each piece with the kernels around it that it exchanges arrays with and could be one with."""
        graph = self._graph
        group_of = {n: nodes for nodes in self._groups for n in nodes}
        taken = {nodes for kernels in pieces for nodes in kernels}
        ties = Ties(graph)
        found: list[Kernels] = []
        for piece in pieces:
            kernels = piece
            waiting = [kernels[0]]
            while waiting:
                nodes = waiting.pop()
                for other in self._neighbours(nodes, group_of):
                    if other in taken or self._hubs(other):
                        continue
                    wider = tuple(sorted((*kernels, other)))
                    if self._gains((other,)) and self._gains(wider) and self._is_kernel(wider, ties):
                        kernels = wider
                        taken.add(other)
                        waiting.append(other)
            found.append(kernels)
        return found

    def _neighbours(self, nodes: Nodes, group_of: dict[int, Nodes]) -> list[Nodes]:
        """The kernels that exchange an array with that of ``nodes``."""
        values, consumers = self._graph.values, self._graph.consumers
        edge = boundary(self._graph, nodes)
        makers = [values[v].producer for v in edge.reads if values[v].size > 1 and values[v].producer >= 0]
        readers = [n for v in edge.writes if values[v].size > 1 for n in consumers[v]]
        return [g for g in dict.fromkeys(group_of[n] for n in makers + readers) if g != nodes]

    def _is_kernel(self, kernels: Sequence[Nodes], ties: Ties) -> bool:
        nodes = union(kernels)
        return isinstance(self._scheduler.price(nodes), Kernel) and ties.between(set(nodes)) == set(nodes)

    def _find_levels(self, pieces: Sequence[Kernels]) -> bool:
        """Find ``_level``; False if the pieces would wait for each other."""
        inside = {nodes for kernels in pieces for nodes in kernels}
        unions = list(map(union, pieces))
        ranked, after = order_groups(self._graph, [*unions, *(g for g in self._groups if g not in inside)])
        order = execution_order(after)
        level = [0] * len(ranked)
        for g in reversed(order):
            level[g] = max((level[s] + 1 for s in after[g]), default=0)
        self._level = {n: level[g] for g, nodes in enumerate(ranked) for n in nodes}
        return len(order) == len(ranked)


def union(groups: Sequence[Nodes]) -> Nodes:
    """The nodes of all groups, ascending."""
    return tuple(sorted([n for nodes in groups for n in nodes]))


_MOST_ROUNDS = 200
"""Paths looked at for one line before some run on the last may turn out to be slower than its floor:
no line of the workloads needs more than 10."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A line cut into runs."""

    packs: tuple[tuple[int, int], ...]
    """Those that are packs, by their first piece and the one behind their last; every other piece stays
    as it is."""
    shares_ps: tuple[int, ...]
    """For each piece, such that no run takes less than its pieces' shares."""


class Runs:
    """Prices of the runs of one line, asked for where a shortest path leads."""

    def __init__(self, line: Line, capacity: PackCapacity, alone: Sequence[Price], book: PriceBook) -> None:
        self._line, self._book = line, book
        self._n = n = len(alone)
        self._last = [n] * n
        """For each piece, where a run that starts there ends at the latest."""
        self._prices: list[list[Price]] = []
        """For each piece, of the runs that start there, the shortest first; what is not known yet is
        as low as it can be."""
        self._known: set[tuple[int, int]] = set()
        self._alone = set(range(n))
        """The pieces that are no faster as a pack of one."""
        end = 0
        for start in range(n):
            end = max(end, start + 1)
            while end < n and line.allows(start, end + 1) and capacity.holds(start, end + 1):
                end += 1
            self._last[start] = end
            longer = range(start + 2, end + 1)
            floors = [Price(line.least_ps(start, b), line.hbm_bytes(start, b)) for b in longer]
            one = book.price(line.pieces[start])
            if isinstance(one, Price) and one < alone[start]:
                self._alone.discard(start)
                self._prices.append([one, *floors])
            else:
                self._prices.append([alone[start], *floors])

    def cut(self, work: Work) -> Cut:
        """The best cut; where ``work`` is over, the best of runs whose price is known, and shares that
        are as true."""
        for _ in range(_MOST_ROUNDS):
            lengths, starts = self._paths()
            shares = tuple([b - a for a, b in pairwise(lengths)])
            runs = [(a, b) for a, b in pairwise((*starts, self._n)) if b > a + 1]
            unknown = [run for run in runs if run not in self._known]
            if not unknown:
                return Cut(self._packs(starts), shares)
            if work.is_over:
                break
            # A way to a piece takes about a unit.
            work.spend(sum(last - start for start, last in enumerate(self._last)))
            for run in unknown:
                self._ask(*run, work)
        return Cut(self._packs(self._paths(only_known=True)[1]), shares)

    def _packs(self, starts: Sequence[int]) -> tuple[tuple[int, int], ...]:
        runs = pairwise((*starts, self._n))
        return tuple([(a, b) for a, b in runs if b > a + 1 or a not in self._alone])

    def _paths(self, only_known: bool = False) -> tuple[list[int], tuple[int, ...]]:
        """The picoseconds of the shortest path to each place, and the runs on that to the last."""
        best: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]
        """Time, bytes, kernels, and where the last run starts."""
        for b in range(1, self._n + 1):
            ways = []
            for a in self._starts(b):
                if a == b - 1 or not only_known or (a, b) in self._known:
                    time_ps, hbm_bytes, kernels, _ = best[a]
                    run = self._prices[a][b - a - 1]
                    ways.append((time_ps + run.time_ps, hbm_bytes + run.hbm_bytes, kernels + run.kernels, a))
            best.append(min(ways))
        starts = [best[self._n][-1]]
        while starts[-1]:
            starts.append(best[starts[-1]][-1])
        return [way[0] for way in best], tuple(reversed(starts))

    def _starts(self, b: int) -> Iterator[int]:
        """Where runs of pieces before the ``b``-th may start."""
        yield from takewhile(lambda a: self._last[a] >= b, range(b - 1, 0, -1))
        if self._last[0] >= b:  # with the first piece others may fit that do not without
            yield 0

    def _ask(self, a: int, b: int, work: Work) -> None:
        """Find out what a run costs, or, if it cannot be, how long one that starts there may be."""
        fits, end, fails = a + 1, b, b + 1
        while fails - fits > 1:
            nodes = self._line.nodes(a, end)
            work.spend_price(len(nodes))
            price = self._book.price(nodes)
            if isinstance(price, Price):
                self._prices[a][end - a - 1] = price
                self._known.add((a, end))
                fits = end
            else:
                fails = end
            end = fails - 1  # what may fit mostly does
        if fails <= b:
            for start in range(min(a, 1), a + 1):  # what does not fit does not fit with more in it
                self._last[start] = min(self._last[start], max(fits, start + 1))


_Packed = tuple[list[Nodes], tuple[Piece, ...]]
"""The packs of a line, and its pieces with their shares."""


def with_packs(graph: Graph, scheduler: Scheduler, grouping: Grouping, work: Work) -> Grouping:
    """``grouping`` with small kernels packed, and a bound on every plan with packs of its kernels.

    What ``work`` leaves no time for stays as it is, and a note says so.
    """
    if not wide_hubs(graph).ports:
        return grouping
    if work.is_over:
        return _cut_short(grouping, work)
    book = PriceBook(graph, OneTilePricing(scheduler))
    found = Lines(graph, scheduler, book, grouping)

    def best(pieces: Sequence[Kernels]) -> _Packed:
        alone = list(map(found.alone, pieces))
        line = Line(graph, scheduler.device, list(map(union, pieces)))
        capacity = PackCapacity(graph, scheduler.device, [book.kernel(nodes).spec for nodes in line.pieces])
        cut = Runs(line, capacity, alone, book).cut(work)
        packs = [line.nodes(a, b) for a, b in cut.packs]
        shares = zip(pieces, alone, cut.shares_ps, strict=True)
        return packs, tuple([Piece(kernels, price.time_ps, share) for kernels, price, share in shares])

    lines = found.lines()
    if not lines:
        return grouping
    answer = _with(graph, book, grouping, list(map(best, found.wider(lines))))
    if answer is None:  # with the arithmetic inside, packs would wait for each other
        answer = _with(graph, book, grouping, list(map(best, lines)))
    assert answer is not None, "nothing between pieces of a line waits for any of them"
    return _cut_short(answer, work) if work.is_over else answer


def _cut_short(grouping: Grouping, work: Work) -> Grouping:
    return replace(grouping, notes=(*grouping.notes, note(NoteKind.PACKS_CUT, limit=work.ended_by)))


def _with(graph: Graph, book: PriceBook, grouping: Grouping, best: Sequence[_Packed]) -> Grouping | None:
    """``grouping`` with the packs of all lines; None if they would wait for each other."""
    packs = [nodes for packs, _ in best for nodes in packs]
    inside = {n for nodes in packs for n in nodes}
    others = [nodes for nodes in grouping.groups if inside.isdisjoint(nodes)]
    ranked, after = order_groups(graph, [*packs, *others])
    order = execution_order(after)
    if len(order) < len(ranked):
        return None
    kernel_of = {kernel.spec.nodes: kernel for kernel in grouping.kernels}
    kernel_of.update((nodes, book.kernel(nodes)) for nodes in packs)
    kernels = tuple([kernel_of[ranked[g]] for g in order])
    lines = tuple(pieces for _, pieces in best)
    saved_ps = sum(piece.alone_ps - piece.share_ps for pieces in lines for piece in pieces)
    bound_ps = None if grouping.bound_ps is None else grouping.bound_ps - saved_ps
    n_packed = len(grouping.groups) - len(others)
    if packs:
        grouping = grouping.uncertified()
    notes = [
        replace(n, kind=NoteKind.SCALAR_PACKED)
        if isinstance(n, Note) and n.kind is NoteKind.SCALAR_SPLIT
        else n
        for n in grouping.notes
    ]
    if packs:
        notes.append(note(NoteKind.PACKED, count=n_packed, packs=len(packs)))
    packed = replace(
        grouping,
        kernels=kernels,
        bound_ps=bound_ps,
        proof=None if grouping.proof is None else replace(grouping.proof, packs=lines),
        notes=tuple(notes),
    )
    return replace(packed, status="OPTIMAL" if bound_ps == packed.time_ps else "FEASIBLE")
