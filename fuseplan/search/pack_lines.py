"""The kernels of a plan that may be pieces of packs, in lines.

The kernels at one hub and at one distance from the end of the plan wait for none of each other, nor
does anything that one of them waits for, wherever they are merged. A line has them by size, so that
its runs are of alike pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from costmodel.boundary import boundary
from costmodel.graph import Graph
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.pricing import Nodes, Price, PriceBook, total_of
from fuseplan.schedule.scalar_hubs import wide_hubs
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.grouping import Grouping, order_groups
from fuseplan.search.horizontal import Line, arrays_read, may_pack
from fuseplan.search.ties import Ties
from fuseplan.support.digraph import execution_order

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
        """Whether one group reads what the other makes, and nothing is between them."""
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
