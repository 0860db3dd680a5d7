"""Partial groups, of which some nodes are in, some out and the rest open, for the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from costmodel.partial_floor import PartialFloor
from fuseplan.support.bitset import bits


@dataclass(frozen=True, slots=True)
class PartialGroup:
    """A partial group: nodes that are in, nodes that are out, and those that may join."""

    group: int
    out: int
    seed: int
    """A position that is in."""
    needs: int = 0
    """If not 0, one of these joins: the group executes several operations."""
    open: int = 0


class Worths:
    """What partial groups are worth at most at these prices: a group holds one node of each clique."""

    def __init__(self, prices: Sequence[int], cliques: Sequence[int], n: int) -> None:
        self.prices = np.array(prices, dtype=np.float64)
        members = [bits(clique) for clique in cliques]
        self._order = np.array([i for clique in members for i in clique], dtype=np.intp)
        self._starts = np.cumsum([0, *map(len, members[:-1])])
        self._n = n

    def least_margins(self, floor: PartialFloor, partial: Sequence[PartialGroup]) -> npt.NDArray[np.float64]:
        """For each partial group, the picoseconds by which each of its kernels takes longer than the prices
        of its nodes, at least."""
        known = rows([p.group for p in partial], self._n)
        open_ = rows([p.open for p in partial], self._n)
        worth = np.where(known, self.prices, 0).sum(axis=1)

        def most(costs: npt.NDArray[np.float64] | float) -> npt.NDArray[np.float64]:
            gains = np.where(open_, np.maximum(self.prices - costs, 0), 0)[:, self._order]
            added: npt.NDArray[np.float64] = np.maximum.reduceat(gains, self._starts, axis=1).sum(axis=1)
            return worth + added

        bounds = floor.bounds(known, known | open_, np.array([p.needs > 0 for p in partial]))
        margins = [bounds.floor_ps - most(0.0)]
        # Each resource alone bounds the kernel, and so does the mean of the memory and the vector units.
        each = [(resource.known_ps, resource.added_ps) for resource in bounds.additive]
        (memory_ps, of_memory), (compute_ps, of_compute) = each[:2]
        each.append(((memory_ps + compute_ps) / 2, (of_memory + of_compute) / 2))
        margins += [least - most(costs) for least, costs in each]
        return np.max(margins, axis=0)


def rows(masks: Sequence[int], n: int) -> npt.NDArray[np.bool_]:
    """A row of bool for each mask."""
    width = -(-n // 8)
    data = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    return np.unpackbits(data.reshape(len(masks), width), axis=1, count=n, bitorder="little").astype(bool)
