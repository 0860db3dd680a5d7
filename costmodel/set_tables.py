"""Unions and sums over sets, for many sets at a time (``UnionTable``, ``total``).

Sets are rows of bool. A product of matrices would say the same; but NumPy leaves it to a library that starts
a thread for each core, and these wait for each other busily where other processes have the cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Sets: TypeAlias = Any
"""An array of bool: a set in each row, with a column for each position."""
Figures = npt.NDArray[np.float64]
"""A figure for each set. Those below 2**53 are exact."""


class UnionTable:
    """The union of those of some sets that are named by another set.

    Each byte of a row chooses one of 256 unions that are computed before: the method of Arlazarov, Dinic,
    Kronrod and Faradžev (1970) for products of Boolean matrices.

    Args:
        table: a set for each position.

    Example:
        >>> union = UnionTable(as_sets([0b01, 0b10, 0b10], 2))
        >>> union(as_sets([0b001, 0b101, 0b000], 3)).astype(int).tolist()
        [[1, 0], [1, 1], [0, 0]]
    """

    def __init__(self, table: Sets) -> None:
        n, self._width = table.shape
        words = -(-self._width // 64)
        n_bytes = -(-n // 8)
        packed = np.zeros((n_bytes * 8, words * 8), dtype=np.uint8)
        bits = np.packbits(table, axis=1, bitorder="little")
        packed[:n, : bits.shape[1]] = bits
        rows = packed.view(np.uint64).reshape(n_bytes, 8, words)
        self._unions = np.zeros((n_bytes, 256, words), dtype=np.uint64)
        for b in range(8):
            np.bitwise_or(self._unions[:, : 1 << b], rows[:, b, None], out=self._unions[:, 1 << b : 2 << b])

    def __call__(self, sets: Sets) -> Sets:
        """For each of ``sets``, the union of the rows of the table that it names."""
        found = np.zeros((len(sets), self._unions.shape[2]), dtype=np.uint64)
        if len(self._unions):
            chosen = np.packbits(sets, axis=1, bitorder="little")
            some = np.empty_like(found)
            for unions, byte in zip(self._unions, chosen.T, strict=True):
                unions.take(byte, axis=0, out=some, mode="clip")  # Bytes need no check of bounds.
                np.bitwise_or(found, some, out=found)
        bits = np.unpackbits(found.view(np.uint8), axis=1, count=self._width, bitorder="little")
        return bits.view(bool)


def total(sets: Any, figures: Any) -> Any:
    """For each row of ``sets``, the sum of the figures at its positions; the rows may have weights.

    ``figures``: one for each position, or a row of several.
    """
    return np.einsum("ij,j...->i...", sets, figures)


def as_sets(masks: Iterable[int], width: int) -> Sets:
    """A row for each mask."""
    n_bytes = -(-width // 8)
    rows = [mask.to_bytes(n_bytes, "little") for mask in masks]
    table = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), n_bytes)
    return np.unpackbits(table, axis=1, count=width, bitorder="little").astype(bool)


def sets_of(members: Sequence[Iterable[int]], width: int) -> Sets:
    """A row for each of ``members``, which are positions."""
    table = np.zeros((len(members), width), dtype=bool)
    for row, positions in zip(table, members, strict=True):
        row[list(positions)] = True
    return table
