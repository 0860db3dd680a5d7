"""What ``fuseplan.search.remat.duplicates`` says of groups of copies, for the verifier, sentence by
sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from costmodel.graph import Graph
from fuseplan.schedule.pricing import Nodes
from fuseplan.support.bitset import bits

_PARTLY = 2
"""Of an operation with more copies, a kernel computes those whose reader it holds, or all."""


class CopyRules:
    """The sentences about the copies among ``nodes``. Sets are masks of positions in ``nodes``."""

    def __init__(
        self, nodes: Nodes, graph: Graph, copies_of: Sequence[Nodes], renames: Callable[[int], bool]
    ) -> None:
        position = {node: i for i, node in enumerate(nodes)}
        every = {n: copies for copies in copies_of for n in copies if copies[0] in position}
        mask = {n: sum(1 << position[m] for m in copies) for n, copies in every.items()}
        self._own: dict[int, list[tuple[int, int]]] = {}
        """By reader, its copies of what it reads, each with all copies of that."""
        self._alone: dict[int, tuple[int, int, int]] = {}
        """By copy: all copies, its readers, and the copies that lead to it alone."""

        def leading(n: int) -> Iterator[int]:
            for m in (graph.values[v].producer for v in graph.nodes[n].inputs):
                if m in mask and _leads(graph, every[m], every[n]):
                    yield m
                    yield from leading(m) if renames(m) else ()

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
        """The members' own copies of what the group computes."""
        wanted = 0
        for i in bits(group):
            for own, every in self._own.get(i, ()):
                if every & group:
                    wanted |= own
        return wanted

    def contradict(self, group: int, out: int) -> bool:
        """Whether one of them fails for ``group``, and for every larger one without ``out``."""
        if self.read_there(group) & ~group & out:
            return True
        for i in bits(group):
            every, readers, leading = self._alone.get(i, (0, 0, 0))
            if every & out and (leading & out or (every.bit_count() > _PARTLY and not readers & ~out)):
                return True
        return False


def _leads(graph: Graph, makers: Nodes, copies: Nodes) -> bool:
    """Whether ``makers`` are read by ``copies`` alone."""
    made = {v for m in makers for v in graph.nodes[m].outputs}
    readers = {r for v in made for r in graph.consumers[v]}
    return made.isdisjoint(graph.results) and readers == set(copies)
