"""Pack small kernels that a scalar ties together: the last step, on a plan that has none.

The kernels at one hub and at one distance from the end of the plan wait for none of each other, nor
does anything that one of them waits for, wherever they are merged. Put in a line by size, they are
cut into runs: a shortest path, from before the first to behind the last, along runs that fit
(``fuseplan.packs`` says what a run takes at least). Only runs on such a path are scheduled, until one
path has no other. The lengths of the paths to each piece are the proof: a piece's share is by how
much they grow.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from costmodel.graph import Graph
from fuseplan.hubs import wide_hubs
from fuseplan.join import execution_order
from fuseplan.layout import boundary
from fuseplan.pack_room import Room
from fuseplan.packs import InOneTile, Line, arrays_read, may_pack
from fuseplan.plan import Kernel, already_optimal
from fuseplan.planners.base import Grouping, order_groups
from fuseplan.pricing import Nodes, Price, PriceBook, total_of
from fuseplan.proof import Piece
from fuseplan.schedule import Scheduler
from fuseplan.ties import Ties

_MOST_ROUNDS = 200
"""Paths looked at for one line before some run on the last may turn out to be slower than its floor:
no line of the workloads needs more than 20."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """A line cut into runs."""

    starts: tuple[int, ...]
    """Where the runs start; the last ends with the line."""
    shares_ps: tuple[int, ...]
    """For each piece, such that no run takes less than its pieces' shares."""


def with_packs(graph: Graph, scheduler: Scheduler, grouping: Grouping, expires_at: float) -> Grouping:
    """``grouping`` with small kernels packed, and a bound on every plan with packs of its kernels."""
    book = PriceBook(graph, InOneTile(scheduler))
    found = _Lines(graph, scheduler, book, grouping)
    lines = found.lines()
    if not lines:
        return grouping
    packed: list[Nodes] = []
    proofs: list[tuple[Piece, ...]] = []
    gone: set[Nodes] = set()
    for pieces in lines:
        alone = list(map(found.alone, pieces))
        line = Line(graph, scheduler.device, list(map(_union, pieces)))
        room = Room(graph, scheduler.device, [book.kernel(nodes).spec for nodes in line.pieces])
        cut = _Runs(line, room, alone, book).cut(expires_at)
        for a, b in pairwise((*cut.starts, len(pieces))):
            if b > a + 1:
                packed.append(line.nodes(a, b))
                gone.update(kernel for kernels in pieces[a:b] for kernel in kernels)
        shares = zip(pieces, alone, cut.shares_ps, strict=True)
        proofs.append(tuple([Piece(kernels, price.time_ps, share_ps) for kernels, price, share_ps in shares]))
    ranked, after = order_groups(graph, [*packed, *(g for g in grouping.groups if g not in gone)])
    kernel_of = {kernel.spec.nodes: kernel for kernel in grouping.kernels}
    kernels = tuple([kernel_of.get(ranked[g]) or book.kernel(ranked[g]) for g in execution_order(after)])
    saved_ps = sum(piece.alone_ps - piece.share_ps for pieces in proofs for piece in pieces)
    bound_ps = None if grouping.bound_ps is None else grouping.bound_ps - saved_ps
    time_ps = sum(kernel.cost.time_ps for kernel in kernels)
    proof = None if grouping.proof is None else replace(grouping.proof, packs=tuple(proofs))
    notes, stats = grouping.notes, grouping.stats
    if packed:
        known = already_optimal(stats.certified)
        notes = tuple([note for note in notes if note != known])
        notes += (f"{len(gone)} kernels that a scalar ties together are packed into {len(packed)}",)
        stats = replace(stats, certified="")
    return replace(
        grouping,
        kernels=kernels,
        status="OPTIMAL" if bound_ps == time_ps else "FEASIBLE",
        bound_ps=bound_ps,
        proof=proof,
        notes=notes,
        stats=stats,
    )


class _Runs:
    """Prices of the runs of one line, asked for where a shortest path leads."""

    def __init__(self, line: Line, room: Room, alone: Sequence[Price], book: PriceBook) -> None:
        self._line, self._book = line, book
        self._n = n = len(alone)
        self._last = [n] * n
        """For each piece, where a run that starts there ends at the latest."""
        self._prices: list[list[Price]] = []
        """For each piece, of the runs that start there, the shortest first; what is not known yet is
        as low as it can be."""
        self._known: set[tuple[int, int]] = set()
        end = 0
        for start in range(n):
            end = max(end, start + 1)
            while end < n and line.allows(start, end + 1) and room.holds(start, end + 1):
                end += 1
            self._last[start] = end
            longer = range(start + 2, end + 1)
            floors = [Price(line.least_ps(start, b), line.hbm_bytes(start, b)) for b in longer]
            self._prices.append([alone[start], *floors])

    def cut(self, expires_at: float) -> _Cut:
        """The best cut; where time is short, the best of runs whose price is known, and shares that
        are as true."""
        for _ in range(_MOST_ROUNDS):
            lengths, starts = self._paths()
            shares = tuple([b - a for a, b in pairwise(lengths)])
            runs = [(a, b) for a, b in pairwise((*starts, self._n)) if b > a + 1]
            unknown = [run for run in runs if run not in self._known]
            if not unknown:
                return _Cut(starts, shares)
            if time.monotonic() >= expires_at:
                break
            for run in unknown:
                self._ask(*run)
        return _Cut(self._paths(only_known=True)[1], shares)

    def _paths(self, only_known: bool = False) -> tuple[list[int], tuple[int, ...]]:
        """The picoseconds of the shortest path to each place, and the runs on that to the last."""
        best: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]
        """Time, bytes, kernels, and where the last run starts."""
        for b in range(1, self._n + 1):
            ways = []
            for a in range(b - 1, -1, -1):
                if self._last[a] < b:
                    break  # nor may one that starts before
                if a == b - 1 or not only_known or (a, b) in self._known:
                    time_ps, hbm_bytes, kernels, _ = best[a]
                    run = self._prices[a][b - a - 1]
                    ways.append((time_ps + run.time_ps, hbm_bytes + run.hbm_bytes, kernels + run.kernels, a))
            best.append(min(ways))
        starts = [best[self._n][-1]]
        while starts[-1]:
            starts.append(best[starts[-1]][-1])
        return [way[0] for way in best], tuple(reversed(starts))

    def _ask(self, a: int, b: int) -> None:
        """Find out what a run costs, or, if it cannot be, how long one that starts there may be."""
        fits, end, fails = a + 1, b, b + 1
        while fails - fits > 1:
            price = self._book.price(self._line.nodes(a, end))
            if isinstance(price, Price):
                self._prices[a][end - a - 1] = price
                self._known.add((a, end))
                fits = end
            else:
                fails = end
            end = fails - 1  # what may fit mostly does
        if fails <= b:
            for start in range(a + 1):  # what does not fit does not fit with more in it
                self._last[start] = min(self._last[start], max(fits, start + 1))


class _Lines:
    """The kernels of a plan that may be pieces of packs, in lines."""

    def __init__(self, graph: Graph, scheduler: Scheduler, book: PriceBook, grouping: Grouping) -> None:
        self._graph, self._scheduler, self._book = graph, scheduler, book
        self._groups = grouping.groups
        self._price = {k.spec.nodes: Price(k.cost.time_ps, k.cost.hbm_bytes) for k in grouping.kernels}
        self._at = wide_hubs(graph).at
        self._busy: dict[tuple[Nodes, ...], int] = {}

    def lines(self) -> list[list[tuple[Nodes, ...]]]:
        """Lines of two pieces or more; each piece is one kernel, or several that can be one."""
        pieces: list[tuple[Nodes, ...]]
        pieces = [(nodes,) for nodes in self._groups if self._hubs(nodes) and self._gains((nodes,))]
        if len(pieces) < 2:
            return []
        wider = self._with_neighbours(pieces)
        levels = self._levels(wider)
        if levels is None:
            wider = pieces
            levels = self._levels(wider)
            assert levels is not None, "the kernels of a plan do not wait for each other"
        found: dict[tuple[int, int], list[tuple[Nodes, ...]]] = defaultdict(list)
        read: dict[tuple[int, int], set[int]] = defaultdict(set)
        for kernels, level in zip(wider, levels, strict=True):
            nodes = _union(kernels)
            key = (min(self._hubs(nodes)), level)
            arrays = arrays_read(self._graph, boundary(self._graph, nodes))
            if read[key].isdisjoint(arrays):
                read[key].update(arrays)
                found[key].append(kernels)
        every = [
            sorted(line, key=lambda kernels: (self._busy_ps(kernels), kernels)) for line in found.values()
        ]
        return [line for line in every if len(line) > 1]

    def alone(self, kernels: Sequence[Nodes]) -> Price:
        """What the kernels of a piece cost."""
        return total_of([self._price[nodes] for nodes in kernels])

    def _hubs(self, nodes: Nodes) -> set[int]:
        return {hub for n in nodes for hub in self._at[n]}

    def _busy_ps(self, kernels: tuple[Nodes, ...]) -> int:
        if kernels not in self._busy:
            line = Line(self._graph, self._scheduler.device, [_union(kernels)])
            self._busy[kernels] = line.busy_ps(0, 1)
        return self._busy[kernels]

    def _gains(self, kernels: tuple[Nodes, ...]) -> bool:
        """Whether one core has room for these kernels, and a pack may be faster with them than they are
        alone, if the resource that they need most is what bounds it."""
        nodes = _union(kernels)
        if not may_pack(self._graph, nodes) or self._busy_ps(kernels) >= self.alone(kernels).time_ps:
            return False
        return isinstance(self._book.price(nodes), Price)

    def _with_neighbours(self, pieces: Sequence[tuple[Nodes, ...]]) -> list[tuple[Nodes, ...]]:
        """Each piece with the kernels around it that it exchanges arrays with and could be one with."""
        graph = self._graph
        group_of = {n: nodes for nodes in self._groups for n in nodes}
        taken = {nodes for kernels in pieces for nodes in kernels}
        ties = Ties(graph)
        found: list[tuple[Nodes, ...]] = []
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
        nodes = _union(kernels)
        return isinstance(self._scheduler.price(nodes), Kernel) and ties.between(set(nodes)) == set(nodes)

    def _levels(self, pieces: Sequence[tuple[Nodes, ...]]) -> list[int] | None:
        """For each piece, how many kernels at most wait for it one after the other, if pieces are
        kernels; None if they would wait for each other then."""
        inside = {nodes for kernels in pieces for nodes in kernels}
        unions = list(map(_union, pieces))
        ranked, after = order_groups(self._graph, [*unions, *(g for g in self._groups if g not in inside)])
        order = execution_order(after)
        if len(order) < len(ranked):
            return None
        level = [0] * len(ranked)
        for g in reversed(order):
            level[g] = max((level[s] + 1 for s in after[g]), default=0)
        level_of = dict(zip(ranked, level, strict=True))
        return [level_of[nodes] for nodes in unions]


def _union(groups: Sequence[Nodes]) -> Nodes:
    return tuple(sorted([n for nodes in groups for n in nodes]))
