"""The sets of duplicates (``fuseplan.search.remat.duplicates``) that can be one kernel, and those searched.

A kernel computes an operation once, whoever of its readers it is for. So

1. who reads a value in a kernel that computes it reads it there: a group that holds a reader and
   some copy of what it reads holds that reader's own copy;

and, so that the number of groups stays near what it is without copies,

2. an operation with three or more copies is computed once for all readers or by each for itself:
   a group that holds a copy without its reader holds all of them;
3. what only leads to a copied operation is computed again together with it: a group that holds
   some copies of an operation but not all holds, with each, what is made for it alone, renamed on
   the way (``Pricing.renames``) or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from costmodel.graph import Graph
from fuseplan.support.bitset import bits

Mask = int

_PARTLY = 2
"""Copies of an operation of which some may be for readers elsewhere while others are not."""


class Closure:
    """What a group that holds some positions holds too, and what it then must not leave out."""

    def __init__(
        self,
        graph: Graph,
        copies_of: Sequence[Sequence[int]],
        members: Sequence[Sequence[int]],
        renames: Callable[[int], bool],
    ) -> None:
        position = {n: i for i, nodes in enumerate(members) for n in nodes}
        n_positions = len(members)
        self._own: list[list[tuple[Mask, Mask]]] = [[] for _ in members]
        """For each reader, its copy of what it reads, and all copies (1)."""
        self._served: list[list[tuple[Mask, Mask]]] = [[] for _ in members]
        """For each copy of many, its readers, and all copies (2)."""
        self._led: list[list[tuple[Mask, Mask]]] = [[] for _ in members]
        """For each copy, what leads to it alone, and all copies (3)."""
        self.classes: list[Mask] = []
        """The copies of each operation that has several."""
        outside = 1 << n_positions
        origin = graph.origins
        every = {copies[0]: copies for copies in copies_of if copies[0] in position}
        mask_of = {first: sum(1 << position[n] for n in copies) for first, copies in every.items()}
        for first, copies in every.items():
            together = mask_of[first]
            # What is merged into a reader that has no copies is no operation to decide about.
            if any(mask_of.get(origin[m]) != together for n in copies for m in members[position[n]]):
                continue
            if together not in self.classes:
                self.classes.append(together)
            for n in copies:
                i, node = position[n], graph.nodes[n]
                readers = 0 if graph.results.isdisjoint(node.outputs) else outside
                for reader in {r for v in node.outputs for r in graph.consumers[v]}:
                    readers |= 1 << position[reader] if reader in position else outside
                    if reader in position and position[reader] != i:
                        self._own[position[reader]].append((1 << i, together))
                if len(copies) > _PARTLY and not readers >> i & 1:
                    self._served[i].append((readers, together))
                for maker in _leading(graph, every, n, renames):
                    if position[maker] != i:
                        self._led[i].append((1 << position[maker], together))
        self.ruled = sum(
            1 << i for i in range(n_positions) if self._own[i] or self._served[i] or self._led[i]
        )
        self.outside = outside
        """Stands in a mask for what is in no group: the caller, and other components."""

    def decided(self, group: Mask, out: Mask) -> tuple[Mask, Mask]:
        """What else belongs to ``group``, and what else does not, if the positions ``out`` do not;
        where the two meet each other, or what is decided, the group is none."""
        out |= self.outside
        wanted = unwanted = 0
        for i in bits(group & self.ruled):
            for own, together in self._own[i]:
                if group & together:
                    wanted |= own
                elif own & out:
                    unwanted |= together
            for readers, together in self._served[i]:
                if together & out:
                    wanted |= readers
                elif readers & out and not readers & group:
                    wanted |= together
            for own, together in self._led[i]:
                if together & out:
                    wanted |= own
                elif own & out:
                    wanted |= together
        return wanted & ~group, unwanted & ~out

    def allows(self, group: Mask) -> bool:
        """Whether the group, without any other position, is one."""
        return not self.decided(group, ~group)[0]


def _leading(
    graph: Graph, every: dict[int, Sequence[int]], n: int, renames: Callable[[int], bool]
) -> Iterator[int]:
    """What is made for copy ``n`` alone."""
    for v in graph.nodes[n].inputs:
        maker = graph.values[v].producer
        makers = every.get(graph.origins[maker], ()) if maker >= 0 else ()
        if makers and _readers(graph, makers) == {graph.origins[n]}:
            yield maker
            if renames(maker):
                yield from _leading(graph, every, maker, renames)


def _readers(graph: Graph, copies: Sequence[int]) -> set[int]:
    """The operations that read copies of one; -1 is the caller."""
    made = [v for n in copies for v in graph.nodes[n].outputs]
    readers = {graph.origins[r] for v in made for r in graph.consumers[v]}
    return readers if graph.results.isdisjoint(made) else readers | {-1}
