"""Shortest paths over sets of nodes that can have run: each step is a kernel.

What temporaries are alive after some nodes have run depends on the nodes alone, not on how they
were grouped: a value is there if its producer has run and one of its consumers has not. So the
fastest kernels under a limit are a shortest path on which each step fits beside what is alive;
and the smallest peak is that of the path whose highest step is lowest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fuseplan.plan.fusion_plan import Kernel, tile_bytes
from fuseplan.support.work import Work

Cost = tuple[int, ...]
Extend = Callable[[Cost, "Group", int], Cost | None]
"""The cost of a path with one more group, which needs so many bytes; None if it must not be."""


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that may be a kernel; masks have a bit for each node of the region."""

    kernel: Kernel
    mask: int
    before: int
    """Nodes that must have run."""
    objectives: Cost
    renames: bool
    """Whether it only gives its operands' buffers other names."""


@dataclass(frozen=True, slots=True)
class Way:
    """Kernels in an order. ``cost`` is their time, bytes and number, or their highest step."""

    kernels: tuple[Kernel, ...]
    cost: Cost


class TooLargeError(Exception):
    """The work allowed is spent."""


class Steps:
    """Steps left of one search, which is part of some ``work``: a pair of a set and a group is one step,
    about 0.4 µs."""

    def __init__(self, most: int, work: Work) -> None:
        self._left, self._work = most, work

    def spend(self, steps: int) -> None:
        """Raises ``TooLargeError`` when there are none left, or the work is over."""
        self._left -= steps
        self._work.spend(-(-2 * steps // 5))
        if self._left < 0 or self._work.is_over:
            raise TooLargeError


class Paths:
    """Sets of ``n`` nodes that can have run, if the nodes ``choice`` are bitcasts of their own.

    ``base_bytes`` are alive throughout. ``lives`` has for each other buffer its bytes, its maker's
    bit (0: it is there at the start) and its readers', with a bit above all for later ones.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        n: int,
        allowed: Steps,
        base_bytes: int,
        lives: list[tuple[int, int, int]],
        choice: int,
    ) -> None:
        self._allowed, self._base_bytes, self._lives = allowed, base_bytes, lives
        self._everything = (1 << n) - 1
        self._steps = [
            (g, self._written(g.mask) + tile_bytes(g.kernel))
            for g in groups
            if (not g.mask & ~choice if g.renames else not g.mask & choice)
        ]

    def _written(self, mask: int) -> int:
        return sum(size for size, maker, readers in self._lives if maker & mask and readers & ~mask)

    def _alive(self, done: int) -> int:
        return self._base_bytes + sum(
            size for size, maker, readers in self._lives if (not maker or maker & done) and readers & ~done
        )

    def best(self, start: Cost, extend: Extend) -> Way | None:
        """The cheapest path by costs that ``extend(cost, group, bytes in use)`` sums up."""
        reached: dict[int, tuple[Cost, int, Group | None]] = {0: (start, 0, None)}
        layers: list[list[int]] = [[0], *([] for _ in range(self._everything.bit_count()))]
        for layer in layers:  # a step leads to a larger set
            for done in layer:
                self._allowed.spend(len(self._steps))
                cost, alive = reached[done][0], self._alive(done)
                for group, need in self._steps:
                    if group.mask & done or group.before & ~done:
                        continue
                    then = done | group.mask
                    total = extend(cost, group, alive + need)
                    if total is None:
                        continue
                    if then not in reached:
                        layers[then.bit_count()].append(then)
                    elif reached[then][0] <= total:
                        continue
                    reached[then] = (total, done, group)
        if self._everything not in reached:
            return None
        total, done, last = reached[self._everything]
        path: list[Kernel] = []
        while last is not None:
            path.append(last.kernel)
            _, done, last = reached[done]
        return Way(tuple(reversed(path)), total)
