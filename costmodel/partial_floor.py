"""Lower bounds on a kernel of which only some members are known (``PartialFloor``), for many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from costmodel.device import PS_PER_S
from costmodel.floor import Floor

Sets: TypeAlias = Any
"""An array of bool: sets of positions, each a row, with a column for each position."""
Figures = npt.NDArray[np.float64]
"""A figure for each set. Those below 2**53 are exact."""

_QUOTIENT = 1 - 1e-12
"""A quotient of figures, times this, is no more than the exact one."""


class PartialFloor:
    """Bounds every kernel that holds all of one set of positions, and others of a larger set at most.

    The terms are those of ``Floor.one_kernel``; each counts what is certain of all these kernels. An array is
    read if a known member reads it and no possible member makes it. It is written if a known member makes it,
    and a reader of it cannot join. All known members execute their flops. If both sets are equal, the bound
    is ``Floor.one_kernel``, rounded down by a picosecond or two.

    Args:
        floor: of the whole graph.
        members: the nodes at each position. No two of them may be copies of one operation.
    """

    def __init__(self, floor: Floor, members: Sequence[Sequence[int]]) -> None:
        self._floor, self._device = floor, floor.device
        self._position = {m: i for i, nodes in enumerate(members) for m in nodes}
        working = [[m for m in nodes if floor.reads[m] or floor.writes[m]] for nodes in members]
        touched = {v for nodes in working for m in nodes for v in (*floor.reads[m], *floor.made[m])}
        self._column = {v: k for k, v in enumerate(sorted(touched))}
        self._read = self._table([[v for m in nodes for v in floor.reads[m]] for nodes in working])
        self._made = self._table([[v for m in nodes for v in floor.made[m]] for nodes in working])
        self._read_bytes, self._kernel_bytes = self._bytes(floor.read_bytes), self._bytes(floor.kernel_bytes)
        written = [(v, i) for i, nodes in enumerate(working) for m in nodes for v in floor.writes[m]]
        self._maker = np.array([i for _, i in written], dtype=np.intp)
        readers = [[self._position.get(r, -1) for r in floor.readers[v]] for v, _ in written]
        self._leaves = np.array([-1 in of for of in readers], dtype=bool)
        """Whether a node outside, or the caller, reads the result."""
        self._readers = np.zeros((len(members), len(written)), dtype=np.float32)
        for k, of in enumerate(readers):
            self._readers[[i for i in of if i >= 0], k] = 1
        names = [floor.name[v] for v, _ in written]
        self._write_bytes = np.array([floor.nbytes[v] for v in names], dtype=np.float64)
        self._tiled_write_bytes = np.array([floor.kernel_bytes[v] for v in names], dtype=np.float64)
        self._work = np.array([_total([floor.work[m] for m in nodes]) for nodes in working], dtype=np.float64)
        self._executed = np.array([len(nodes) for nodes in working], dtype=np.float32)
        self._of_arrays, self._of_empty_arrays = (
            np.array([not some.isdisjoint(nodes) for nodes in members], dtype=bool)
            for some in (floor.of_arrays, floor.of_empty_arrays)
        )
        self._contractions = [(i, m) for i, nodes in enumerate(working) for m in nodes if m in floor.loads]

    def __call__(self, known: Sets, possible: Sets) -> Figures:
        """Lower bounds in picoseconds: for each row, of every kernel that holds the positions in ``known``,
        and of the others only such as are in ``possible``, which holds ``known``."""
        device, floor = self._device, self._floor
        some, most = known.astype(np.float32), possible.astype(np.float32)
        read = (some @ self._read > 0) & ~(most @ self._made > 0)
        written = known[:, self._maker] & (self._leaves | ((1 - most) @ self._readers > 0))
        executed = some @ self._executed
        waits = (executed > 1) & (known @ self._of_arrays) & ~(possible @ self._of_empty_arrays)
        moved = np.where(
            waits & device.sequential_grid,
            read @ self._kernel_bytes + written @ self._tiled_write_bytes,
            read @ np.minimum(self._read_bytes, self._kernel_bytes)
            + written @ np.minimum(self._write_bytes, self._tiled_write_bytes),
        )
        matrix_ps, vector, transcendental = (known @ self._work).T
        compute_ps = _time_ps(vector, device.vector_flops_per_s)
        compute_ps = compute_ps + _time_ps(transcendental, device.transcendental_per_s)
        memory_ps = _time_ps(moved, device.hbm_bytes_per_s)
        if device.sequential_grid:
            compute_ps = compute_ps + waits * floor.wait_ps
        else:
            memory_ps = np.maximum(memory_ps, waits * floor.wait_ps)
        loads = self._loads(known, possible, read, executed > 1)
        slowest = np.maximum(memory_ps, _time_ps(loads, device.cache_bytes_per_s))
        slowest = np.maximum(np.maximum(slowest, matrix_ps), compute_ps)
        return np.where(executed > 0, np.floor(device.launch_ps + slowest), 0)

    def _loads(self, known: Sets, possible: Sets, read: Sets, tiled: Sets) -> Figures:
        """The bytes that pass the shared cache where a contraction of arrays from outside is known."""
        floor = self._floor
        loads, certain = np.zeros(len(known)), np.zeros(len(known), dtype=bool)
        beside = read
        for i, m in self._contractions:
            columns = [self._column[v] for v in floor.reads[m]]
            if self._made[i, columns].any():
                continue
            makers = np.flatnonzero(self._made[:, columns].any(axis=1))
            # What a contraction of arrays from outside reads is among its own loads.
            own = possible[:, i] & ~known[:, makers].any(axis=1)
            if own.any():
                beside = beside.copy() if beside is read else beside
                beside[:, columns] &= ~own[:, None]
            anchored = known[:, i] & ~possible[:, makers].any(axis=1)
            if not anchored.any():
                continue
            bits = np.zeros(len(known), dtype=np.int64)
            for reader, width in floor.beside[m].items():
                if reader in self._position:
                    bits = np.maximum(bits, width * known[:, self._position[reader]])
            for width in np.unique(bits[anchored]).tolist():
                of = floor.loads[m]
                nbytes = np.where(tiled, of.tiled(width), of.anyhow)
                loads += np.where(anchored & (bits == width), nbytes, 0)
            certain |= anchored
        return np.where(certain, loads + beside @ self._read_bytes, 0)

    def _table(self, rows: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """For each position, which arrays are in its row."""
        table = np.zeros((len(rows), len(self._column)), dtype=np.float32)
        for i, arrays in enumerate(rows):
            table[i, [self._column[v] for v in arrays]] = 1
        return table

    def _bytes(self, of: Sequence[int]) -> Figures:
        return np.array([of[v] for v in self._column], dtype=np.float64)


def _total(work: Sequence[tuple[int, int, int]]) -> list[int]:
    return [sum(column) for column in zip((0, 0, 0), *work, strict=True)]


def _time_ps(amount: Figures, rate: int) -> Figures:
    """As ``costmodel.device.time_ps``, but for rounding; no more than that."""
    return amount * (PS_PER_S / rate) * _QUOTIENT if rate else np.zeros_like(amount)
