"""The floors of thousands of groups of one set of nodes, all at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from costmodel.floor import Floor
from costmodel.picoseconds import time_ps

Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


class Floors:
    """What ``floor`` says of groups of ``members``, each one or more nodes; groups are bitmasks of them.

    Example:
        ``Floors(floor, [(0,), (3, 4)]).one_kernel([0b11])[0]`` has ``floor.one_kernel((0, 3, 4))``.
    """

    def __init__(self, floor: Floor, members: Sequence[Sequence[int]]) -> None:
        self._floor = floor
        self._members = members
        self._n_bytes = -(-len(members) // 8) or 1
        position = {n: i for i, nodes in enumerate(members) for n in nodes}
        copies: dict[int, list[int]] = defaultdict(list)
        read_by: dict[int, set[int]] = defaultdict(set)
        made_by: dict[int, set[int]] = defaultdict(set)
        self._written: dict[int, list[tuple[int, list[int] | None]]] = defaultdict(list)
        """By array, who makes it, with those that must join lest it be written; None if none can."""
        for n, i in position.items():
            if not floor.reads[n] and not floor.writes[n]:
                continue
            copies[floor.origins[n]].append(n)
            for v in floor.reads[n]:
                read_by[v].add(i)
            for v, name in zip(floor.writes[n], floor.made[n], strict=True):
                made_by[name].add(i)
                inner = floor.readers[v] <= position.keys()
                readers = sorted({position[r] for r in floor.readers[v]} - {i}) if inner else None
                self._written[name].append((i, readers))
        self._arrays = [(v, sorted(read_by[v]), sorted(made_by[v])) for v in {**read_by, **made_by}]
        self._ops = [
            (floor.work[nodes[0]], sorted({position[n] for n in nodes})) for nodes in copies.values()
        ]
        self._walks = sorted({i for n, i in position.items() if floor.walks[n]})
        self._empty = sorted({i for n, i in position.items() if floor.is_empty[n]})
        self._anchors = sum({1 << i for n, i in position.items() if floor.work[n][0]})

    def one_kernel(self, groups: Sequence[int]) -> list[tuple[int, int]]:
        """For each group, picoseconds that it takes and bytes that it moves at least, as one kernel."""
        tiled = [k for k, mask in enumerate(groups) if mask & self._anchors]
        known = self._without_contraction(groups) if len(tiled) < len(groups) else [(0, 0)] * len(groups)
        for k in tiled:
            nodes = [n for i, nodes in enumerate(self._members) if groups[k] >> i & 1 for n in nodes]
            known[k] = self._floor.parts(tuple(sorted(nodes)), together=True)
        return known

    def _without_contraction(self, groups: Sequence[int]) -> list[tuple[int, int]]:
        packed = b"".join(mask.to_bytes(self._n_bytes, "little") for mask in groups)
        columns = np.frombuffer(packed, np.uint8).reshape(len(groups), self._n_bytes)
        inside = np.unpackbits(columns, axis=1, bitorder="little").astype(bool).T

        def some(positions: Sequence[int], of: Bools = inside) -> Bools:
            found: Bools = np.logical_or.reduce(of[positions], axis=0)
            return found

        outside = ~inside
        launched, vector, transcendental, moved = np.zeros((4, len(groups)), np.int64)
        for (_, *work), positions in self._ops:
            here = some(positions)
            launched += here
            for total, amount in zip((vector, transcendental), work, strict=True):
                if amount:
                    total += here * amount
        waits = (launched > 1) & some(self._walks) & ~some(self._empty)
        floor, device = self._floor, self._floor.device
        padded = waits & device.sequential_grid
        for v, readers, makers in self._arrays:
            read_bytes = np.where(padded, floor.kernel_bytes[v], floor.read_bytes[v])
            moved += (some(readers) & ~some(makers)) * read_bytes
            written = np.zeros(len(groups), np.bool_)
            for maker, joining in self._written[v]:
                written |= inside[maker] if joining is None else inside[maker] & some(joining, outside)
            moved += written * np.where(padded, floor.kernel_bytes[v], floor.nbytes[v])
        compute_ps = _each(vector, lambda n: time_ps(n, device.vector_flops_per_s))
        compute_ps += _each(transcendental, lambda n: time_ps(n, device.transcendental_per_s))
        memory_ps = _each(moved, lambda n: time_ps(n, device.hbm_bytes_per_s))
        if device.sequential_grid:
            compute_ps += waits * self._floor.wait_ps
        else:
            memory_ps = np.maximum(memory_ps, waits * self._floor.wait_ps)
        least_ps = device.launch_ps + np.maximum(memory_ps, compute_ps)
        return list(zip((least_ps * (launched > 0)).tolist(), moved.tolist(), strict=True))


def _each(amounts: Integers, of: Callable[[int], int]) -> Integers:
    """``of`` each amount, in Python's integers, which do not overflow on the way; few differ."""
    different, which = np.unique(amounts, return_inverse=True)
    return np.array([of(int(n)) for n in different], dtype=np.int64)[which]
