"""Partial groups, of which some positions are in, some out and the rest open: rows of boolean matrices, the
queue of a branch and bound over them, and what open positions add to a group at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from costmodel.set_tables import Figures, Sets
from fuseplan.search.space import Mask

BATCH = 256
"""Partial groups that are bounded at a time."""

_BATCHES_PER_SORT = 4
"""Batches that ``Waiting.least`` takes from one sort of all partial groups by share."""


@dataclass(slots=True)
class PartialGroups:
    """Partial groups: for each row, the positions that are in and those that are out, one that is in, and
    whether only groups that execute several operations are meant."""

    known: Sets
    out: Sets
    seed: npt.NDArray[np.intp]
    several: Sets
    share: Figures
    """The part of its positions' prices that each group costs at least: a lower bound, at first 0."""

    def __len__(self) -> int:
        return len(self.seed)

    def __getitem__(self, rows: slice | Sets | npt.NDArray[np.intp]) -> PartialGroups:
        """Some of the rows."""
        return PartialGroups(
            self.known[rows], self.out[rows], self.seed[rows], self.several[rows], self.share[rows]
        )

    @staticmethod
    def joined(parts: Sequence[PartialGroups]) -> PartialGroups:
        """All rows of ``parts``."""
        if len(parts) == 1:
            return parts[0]
        return PartialGroups(
            np.concatenate([p.known for p in parts]),
            np.concatenate([p.out for p in parts]),
            np.concatenate([p.seed for p in parts]),
            np.concatenate([p.several for p in parts]),
            np.concatenate([p.share for p in parts]),
        )


class Cliques:
    """A partition of the positions with a price into cliques of conflicts: a group holds one of each."""

    def __init__(self, conflicts: Sequence[Mask], prices: Figures) -> None:
        left = [i for i in np.argsort(-prices, kind="stable").tolist() if prices[i] > 0]
        order: list[int] = []
        self._starts: list[int] = []
        while left:
            self._starts.append(len(order))
            common, rest = conflicts[left[0]], []
            order.append(left[0])
            for i in left[1:]:
                if common >> i & 1:
                    order.append(i)
                    common &= conflicts[i]
                else:
                    rest.append(i)
            left = rest
        self._order = np.array(order, dtype=np.intp)
        self._prices = prices[self._order]

    def most(self, open_: Sets, costs: Figures | None = None) -> Figures:
        """For each row, what the open positions add to the worth of a group at most, less ``costs`` if they
        are taken."""
        if not self._starts:
            return np.zeros(len(open_))
        gains = self._prices
        if costs is not None:
            gains = np.maximum(gains - costs[:, self._order], 0)
        worth = open_[:, self._order] * gains
        return np.maximum.reduceat(worth, self._starts, axis=1).sum(axis=1)


class Waiting:
    """The queue of partial groups of a branch and bound, which is depth-first (``last``) or best-first
    (``least``)."""

    def __init__(self, parts: Sequence[PartialGroups]) -> None:
        self._parts = list(parts)
        self._least: list[PartialGroups] = []
        """Batches of those that had the least shares at the last sort; the batch of least shares is last."""

    def __bool__(self) -> bool:
        return bool(self._parts or self._least)

    def add(self, partial: PartialGroups) -> None:
        """Add partial groups to the queue."""
        if len(partial):
            self._parts.append(partial)

    def last(self) -> PartialGroups:
        """Remove and return a batch of the partial groups that were added last."""
        taken: list[PartialGroups] = []
        count = 0
        while self._parts and count < BATCH:
            last = self._parts.pop()
            room = BATCH - count
            if len(last) > room:
                self._parts.append(last[: len(last) - room])
                last = last[len(last) - room :]
            taken.append(last)
            count += len(last)
        return PartialGroups.joined(taken)

    def least(self) -> PartialGroups:
        """Remove and return a batch of the partial groups of least share. Groups that were added since the
        last sort, which serves ``_BATCHES_PER_SORT`` batches, are not among them."""
        if not self._least:
            every = PartialGroups.joined(self._parts)
            order = np.argsort(every.share, kind="stable")
            first, rest = order[: _BATCHES_PER_SORT * BATCH], np.sort(order[_BATCHES_PER_SORT * BATCH :])
            self._least = [every[first[k : k + BATCH]] for k in range(0, len(first), BATCH)][::-1]
            self._parts = [every[rest]] if len(rest) else []
        return self._least.pop()

    def batches(self) -> Iterator[PartialGroups]:
        """The partial groups in the queue."""
        for part in (*self._least, *self._parts):
            yield from (part[k : k + BATCH] for k in range(0, len(part), BATCH))


def masks(rows: Sets) -> Iterator[Mask]:
    """A mask for each row."""
    packed = np.packbits(rows, axis=1, bitorder="little")
    return (int.from_bytes(row.tobytes(), "little") for row in packed)
