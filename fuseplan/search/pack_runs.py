"""A line of pieces cut into packs: a shortest path from before the first to behind the last.

Only runs on such a path are scheduled, until one path has no other; of all others a floor is known
(``fuseplan.search.horizontal``). The lengths of the paths to each piece are the proof: a piece's share is by
how much they grow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from fuseplan.schedule.pricing import Price, PriceBook
from fuseplan.search.horizontal import Line
from fuseplan.search.horizontal_capacity import Room
from fuseplan.support.work import Work

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

    def __init__(self, line: Line, room: Room, alone: Sequence[Price], book: PriceBook) -> None:
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
            while end < n and line.allows(start, end + 1) and room.holds(start, end + 1):
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
