"""Whether some plan is faster than a bound says: a search through the few groups it could use.

Prices of nodes below which no group costs leave little room where they add up to nearly the
bound: a group that costs much more than its nodes is in no plan below it.
"""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.graph import Graph
from fuseplan.search.components import data_edges, effect_edges
from fuseplan.support.bitset import bits

MAX_STEPS = 2_000_000
"""Partial covers to look at before giving up: some ten seconds."""


class TooManyCoversError(Exception):
    """The search was given up."""


def reach_of(graph: Graph, nodes: Sequence[int]) -> list[int]:
    """For each of ``nodes``, those that wait for it, whatever the path, as a mask of positions."""
    position = {node: i for i, node in enumerate(nodes)}
    after: list[list[int]] = [[] for _ in graph.nodes]
    for u, v in data_edges(graph) + effect_edges(graph):
        after[u].append(v)
    reach = [0] * len(graph.nodes)
    for u in reversed(range(len(graph.nodes))):
        for v in after[u]:
            reach[u] |= reach[v] | (1 << position[v] if v in position else 0)
    return [reach[node] for node in nodes]


class Covers:
    """Exact covers of ``n`` items by ``groups`` (masks with their cost, and no others).

    Args:
        prices: of the items; no group costs less than its items.
        groups: pairs of mask and cost.
        reach: for each item the items that wait for it.
    """

    def __init__(
        self, prices: Sequence[int], groups: Sequence[tuple[int, int]], reach: Sequence[int]
    ) -> None:
        self._reach = reach
        self._everything = (1 << len(prices)) - 1
        self._base = sum(prices)
        self._by_lowest: list[list[tuple[int, int, int]]] = [[] for _ in prices]
        for mask, cost in groups:
            extra = cost - sum(prices[i] for i in bits(mask))
            after = 0
            for i in bits(mask):
                after |= reach[i]
            self._by_lowest[(mask & -mask).bit_length() - 1].append((extra, mask, after & ~mask))
        for options in self._by_lowest:
            options.sort()
        self.steps = 0
        self._circles = 0

    def below(self, bound: int) -> list[int] | None:
        """A cover that costs less than ``bound`` and whose groups can run one after the other, or
        None if there is none.

        Raises:
            TooManyCoversError: that takes too long to tell.
        """
        return self._extend(0, bound - 1 - self._base, [], {})

    def _extend(
        self, covered: int, room: int, chosen: list[tuple[int, int]], hopeless: dict[int, int]
    ) -> list[int] | None:
        """A way to cover the rest at ``room`` picoseconds above its prices, or None; ``hopeless``
        says up to which room a rest is known to have none, circles aside."""
        if room < 0 or hopeless.get(covered, -1) >= room:
            return None
        if covered == self._everything:
            return None if self._in_circles(chosen) else [mask for mask, _ in chosen]
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TooManyCoversError
        lowest = (~covered & (covered + 1)).bit_length() - 1
        circles = self._circles
        for extra, mask, after in self._by_lowest[lowest]:
            if extra > room:
                break
            if mask & covered:
                continue
            if any(after & other and waits & mask for other, waits in chosen):
                self._circles += 1
                continue
            chosen.append((mask, after))
            found = self._extend(covered | mask, room - extra, chosen, hopeless)
            chosen.pop()
            if found is not None:
                return found
        if self._circles == circles:
            hopeless[covered] = room
        return None

    def _in_circles(self, chosen: Sequence[tuple[int, int]]) -> bool:
        """Whether some groups wait for each other."""
        left = list(chosen)
        while left:
            waiting = 0
            for _, after in left:
                waiting |= after
            ready = [group for group in left if not waiting & group[0]]
            if not ready:
                self._circles += 1
                return True
            left = [group for group in left if waiting & group[0]]
        return False
