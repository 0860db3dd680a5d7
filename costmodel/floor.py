"""A time that no way of cutting a set of nodes into kernels can beat.

The floors of thousands of groups of one set of nodes, all at once.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from costmodel import dtypes
from costmodel.device import DeviceSpec
from costmodel.graph import Graph, OpKind
from costmodel.loads import Loads, load_key
from costmodel.memory import least_array_bytes
from costmodel.picoseconds import time_ps
from costmodel.roofline import HBM_LATENCY_PS, TPU_STEP_PS
from costmodel.traffic import part_bytes


class Floor:
    """``floor(nodes)``: picoseconds that every partition of ``nodes`` into kernels takes at
    least, by ``costmodel.roofline.estimate``.

    One launch; every array from outside read once (of one that slices read, what the least of
    them takes), every result needed outside written once; every flop executed once. A sum of
    maxima is no less than the maximum of the sums, so the bound holds for any number of
    kernels. Bitcasts alone are free: their
    result counts as the array that they rename. Two operations on arrays or more are one tiled
    kernel, which waits for its first block, or at least two launches. A contraction of arrays
    from outside loads them tile by tile, wherever its kernel ends (``costmodel.loads``). But what is
    ``nested`` may be part of a nest of loops, in which a block stays on chip, and which walks no
    more than a share of its tiles (numerator, denominator). Of copies of
    an operation (``Graph.origins``) one is executed at least, and one result written.
    """

    def __init__(
        self, graph: Graph, device: DeviceSpec, nested: Mapping[int, tuple[int, int]] | None = None
    ) -> None:
        self.device = device
        nested = nested or {}
        wait_ps = TPU_STEP_PS if device.sequential_grid else HBM_LATENCY_PS
        self.wait_ps = 0 if device.platform == "cpu" else min(wait_ps, device.launch_ps)
        # What computes nothing, because an array is empty, is left to XLA whole.
        self.walks = [bool(node.dims) for node in graph.nodes]
        self.is_empty = [0 in node.dims for node in graph.nodes]
        root = list(range(len(graph.values)))
        for node in graph.nodes:
            if node.bitcast:
                for v in node.outputs:
                    root[v] = root[node.inputs[0]]
        self.nbytes = [value.nbytes for value in graph.values]
        self.read_bytes = list(self.nbytes)
        """Of each array, what whoever reads it reads of it at least."""
        self.kernel_bytes = self.read_bytes
        """Of each array, what a tiled kernel moves of it at least."""
        self.origins = graph.origins or range(len(graph.nodes))
        name = list(range(len(graph.values)))  # one for all copies of an array
        for node, origin in zip(graph.nodes, self.origins, strict=True):
            for v, w in zip(node.outputs, graph.nodes[origin].outputs, strict=True):
                name[v] = w
        self._name = name
        if device.sequential_grid:
            self.kernel_bytes = [sys.maxsize] * len(graph.values)
            for v, value in enumerate(graph.values):  # whichever of an array's names it goes by
                u = name[root[v]]
                self.kernel_bytes[u] = min(self.kernel_bytes[u], least_array_bytes(value))
        # Who reads the bytes of an array, under whatever name; -1 stands for the caller.
        readers: dict[int, set[int]] = {}
        for v, consumers in enumerate(graph.consumers):
            readers.setdefault(root[v], set()).update(n for n in consumers if not graph.nodes[n].bitcast)
        for v in graph.outputs:
            readers.setdefault(root[v], set()).add(-1)
        self.readers = [frozenset(readers.get(v, ())) for v in range(len(graph.values))]
        self.reads: list[tuple[int, ...]] = []
        self.writes: list[tuple[int, ...]] = []
        self.made: list[tuple[int, ...]] = []
        self.work: list[tuple[int, int, int]] = []
        self.loads: dict[int, Loads] = {}
        self._beside: dict[int, dict[int, int]] = {}  # by reader, bits that it makes of each result
        alike: dict[object, Loads] = {}
        for node in graph.nodes:
            if node.takes_part:
                v = name[root[node.inputs[0]]]
                self.read_bytes[v] = min(self.read_bytes[v], part_bytes(graph, node, node.inputs[0]))
            self.reads.append(() if node.bitcast else tuple({name[root[v]]: None for v in node.inputs}))
            self.writes.append(() if node.bitcast else node.outputs)
            self.made.append(tuple([name[v] for v in self.writes[-1]]))
            part, whole = nested.get(node.id, (1, 1))
            flops = node.flops.share(min(part, whole), whole)
            rate = device.matrix_rate(graph.values[node.inputs[0]].dtype) if flops.matrix else 0
            matrix_ps = time_ps(flops.matrix, rate)
            self.work.append((matrix_ps, flops.vector, flops.transcendental))
            if flops.matrix and node.id not in nested:
                key = load_key(graph, node)
                if key not in alike:
                    alike[key] = Loads(graph, node, device)
                self.loads[node.id] = alike[key]
                self._beside[node.id] = {
                    n: dtypes.bits(graph.values[graph.nodes[n].outputs[0]].dtype)
                    for n in graph.consumers[node.outputs[0]]
                    if graph.nodes[n].kind == OpKind.ELEMENTWISE
                }

    def __call__(self, nodes: tuple[int, ...]) -> int:
        return self.parts(nodes)[0]

    def one_kernel(self, nodes: tuple[int, ...]) -> int:
        """Picoseconds that ``nodes`` take at least as one kernel, which is more than all partitions
        do: two operations or more are not left to XLA."""
        return self.parts(nodes, together=True)[0]

    def parts(self, nodes: tuple[int, ...], together: bool = False) -> tuple[int, int]:
        """Picoseconds that no partition of ``nodes`` beats, and bytes that none does; with ``together``,
        of one kernel."""
        inside = set(nodes)
        made: set[int] = set()
        moved = matrix_ps = vector = transcendental = launched = 0
        read: set[int] = set()
        written: set[int] = set()
        name, origins = self._name, self.origins
        done: set[int] = set()
        anchors: list[int] = []
        for n in nodes:
            writes = self.writes[n]
            if not writes and not self.reads[n]:
                continue
            for v in writes:
                if not inside.issuperset(self.readers[v]):
                    written.add(name[v])
            if origins[n] in done:
                continue
            done.add(origins[n])
            launched += 1
            if n in self.loads and made.isdisjoint(self.reads[n]):
                anchors.append(n)
            read.update(self.reads[n])
            made.update(self.made[n])
            m, v_flops, t = self.work[n]
            matrix_ps += m
            vector += v_flops
            transcendental += t
        if not launched:
            return 0, 0
        device = self.device
        waits = (
            launched > 1 and any(self.walks[n] for n in nodes) and not any(self.is_empty[n] for n in nodes)
        )
        padded = together and waits and device.sequential_grid
        read_bytes, write_bytes = (self.kernel_bytes,) * 2 if padded else (self.read_bytes, self.nbytes)
        for v in read - made:
            moved += read_bytes[v]
        for v in written:
            moved += write_bytes[v]
        compute_ps = time_ps(vector, device.vector_flops_per_s)
        compute_ps += time_ps(transcendental, device.transcendental_per_s)
        memory_ps = time_ps(moved, device.hbm_bytes_per_s)
        if waits:
            if device.sequential_grid:
                compute_ps += self.wait_ps
            else:
                memory_ps = max(memory_ps, self.wait_ps)
        if anchors:
            beside = (read - made).difference(*(self.reads[n] for n in anchors))
            loads = sum(self.read_bytes[v] for v in beside)
            for n in anchors:
                bits = max([b for reader, b in self._beside[n].items() if reader in inside], default=0)
                tiled = together and launched > 1
                loads += self.loads[n].tiled(bits) if tiled else self.loads[n].anyhow
            memory_ps = max(memory_ps, time_ps(loads, device.cache_bytes_per_s))
        return device.launch_ps + max(memory_ps, matrix_ps, compute_ps), moved


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
