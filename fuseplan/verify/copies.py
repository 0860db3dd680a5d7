"""The rules for groups of copies, for the verifier: as the search states them, written independently."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from costmodel.graph import Graph
from fuseplan.schedule.pricing import Nodes
from fuseplan.support.bitset import bits

_PARTLY = 2
"""With more copies of an operation, a kernel computes the copies whose readers it holds, or all of them."""


class CopyRules:
    """The rules for groups of copies among ``nodes``, as the search states them in
    ``fuseplan.search.remat.duplicates``, written independently. Sets are masks of positions in ``nodes``."""

    def __init__(
        self, nodes: Nodes, graph: Graph, copies_of: Sequence[Nodes], renames: Callable[[int], bool]
    ) -> None:
        position = {node: i for i, node in enumerate(nodes)}
        every = {n: copies for copies in copies_of for n in copies if copies[0] in position}
        mask = {n: sum(1 << position[m] for m in copies) for n, copies in every.items()}
        self._own: dict[int, list[tuple[int, int]]] = {}
        """For each reader, the copies that it reads, each with all copies of the operation."""
        self._alone: dict[int, tuple[int, int, int]] = {}
        """For each copy: all copies, its readers, and the copies that only its value depends on and that
        rename or make no less."""

        def leading(n: int) -> Iterator[int]:
            for m in (graph.values[v].producer for v in graph.nodes[n].inputs):
                if m in mask and _leads(graph, every[m], every[n]):
                    if renames(m) or n_bytes(m) >= n_bytes(n):
                        yield m
                    yield from leading(m) if renames(m) else ()

        def n_bytes(n: int) -> int:
            """The bytes that the operation makes, or of one that renames for a single reader, the reader."""
            made = graph.nodes[n].outputs
            readers = {r for v in made for r in graph.consumers[v]}
            if renames(n) and len(readers) == 1 and graph.results.isdisjoint(made):
                return n_bytes(*readers)
            return sum(graph.values[v].nbytes for v in made)

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
        """The copies that members read, of operations that the group computes."""
        wanted = 0
        for i in bits(group):
            for own, every in self._own.get(i, ()):
                if every & group:
                    wanted |= own
        return wanted

    def contradict(self, group: int, out: int) -> bool:
        """Whether ``group`` breaks a rule of duplicates that only the excluded nodes ``out`` could repair."""
        if self.read_there(group) & ~group & out:
            return True
        for i in bits(group):
            every, readers, leading = self._alone.get(i, (0, 0, 0))
            if every & out and (leading & out or (every.bit_count() > _PARTLY and not readers & ~out)):
                return True
        return False


def _leads(graph: Graph, makers: Nodes, copies: Nodes) -> bool:
    """Whether only ``copies`` read the results of ``makers``."""
    made = {v for m in makers for v in graph.nodes[m].outputs}
    readers = {r for v in made for r in graph.consumers[v]}
    return made.isdisjoint(graph.results) and readers == set(copies)
