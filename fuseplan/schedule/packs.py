"""Packs (horizontal fusion of small kernels that share only scalars): legality, lower bounds, capacity.

A *pack* does several things to small arrays that have no more in common than a scalar. Each *piece* of it
could be a kernel by itself. The pieces of one *line* are ports of one hub (``schedule.shared_operands``), in
some order. No two of them read one array or exchange a value, with one exception: the first piece may hold
the arithmetic of the hub, take scalars from the others and make some for them. A pack is a run of adjacent
pieces of a line.

**A pack runs on one core.** An axis that is cut among cores indexes all that a kernel writes
(``schedule.layout.axis_roles``). Axes are tied by arrays alone, so no axis of one piece indexes an array that
another writes. So there is one tile, which has all of every axis (``Scheduler.in_one_tile``). By
``costmodel.roofline.estimate`` it waits for its first block once, and of every resource of its core it
takes the sum over its pieces:

    launch + max over resources r of (sum over pieces i of r(i)).

This lower bound needs no schedule (``Line.least_ps``). It is not a sum of the times of the pieces: a piece
that is slow on one core is free beside pieces that are bound by another resource. So no size rules a piece
out. A piece surely loses only where one resource bounds the whole pack and the piece needs it longer than the
piece takes alone.

**If a pack does not fit, no longer pack fits.** One more piece adds its blocks to those on chip and to those
alive at a time, and changes no block of the others. There is one exception: a pack without the first piece
writes scalars for it that a pack with the first piece need not write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np

from costmodel.device import DeviceSpec, time_ps
from costmodel.graph import Boundary, Graph, OpKind, boundary
from costmodel.kernel import KernelSpec
from costmodel.onchip import live_bytes
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.pricing import Nodes, PricingWrapper
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.support.errors import Verdict

MAX_ARRAYS = 96
"""Arrays that a pack may read and write: what XLA allows a fusion on a GPU, whose launch passes a
pointer to each (``MaxOperandsAndOutputsPerFusion``)."""


def may_pack(graph: Graph, nodes: Nodes, arrays: bool = True) -> bool:
    """Whether ``nodes`` may be in a piece: they work on arrays that are not empty, or, without
    ``arrays``, on scalars alone; there is no contraction among them."""
    members = [graph.nodes[n] for n in nodes]
    simple = (node.kind <= OpKind.REDUCTION and not node.effects and 0 not in node.dims for node in members)
    return all(simple) and (not arrays or any(node.dims and not node.bitcast for node in members))


def arrays_read(graph: Graph, edge: Boundary) -> list[int]:
    """The values of more than one element that a piece reads from outside: they may tie axes."""
    return [v for v in edge.reads if graph.values[v].size > 1]


class OneTilePricing(PricingWrapper):
    """The prices of packs: of kernels that have all of every axis in one tile."""

    refuses_single = True

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._scheduler = scheduler

    def price(self, nodes: Nodes) -> Kernel | Verdict:
        return self._scheduler.in_one_tile(nodes)


class Line:
    """Pieces in an order, and lower bounds of each run of them.

    Raises:
        ValueError: the pieces do not form a line; the message says why.
    """

    def __init__(self, graph: Graph, device: DeviceSpec, pieces: Sequence[Nodes]) -> None:
        self.pieces = tuple(pieces)
        self._device = device
        edges = [boundary(graph, nodes) for nodes in pieces]
        self._check(graph, edges)
        first, others = edges[0], edges[1:]
        readers = Counter(v for edge in edges for v in edge.reads)
        made = {v for edge in edges for v in edge.writes}
        shared = {v for v, count in readers.items() if count > 1}
        inner = made & readers.keys()
        line = {n for nodes in pieces for n in nodes}
        # A value that only others of the line need is not written if they are in one pack.
        kept = {v for v in inner if v in graph.results or not line.issuperset(graph.consumers[v])}

        def nbytes(values: Iterable[int]) -> int:
            return sum(graph.values[v].nbytes for v in values)

        def up_to(counts: Iterable[int]) -> tuple[int, ...]:
            return tuple(accumulate(counts, initial=0))

        def each(values: Callable[[Boundary], Iterable[int]]) -> tuple[int, ...]:
            return up_to(nbytes(values(edge)) for edge in edges)

        flops = [[graph.nodes[n].flops for n in nodes] for nodes in pieces]
        self._read = each(lambda edge: set(edge.reads) - shared - inner)
        self._written = each(lambda edge: [v for v in edge.writes if v not in inner or v in kept])
        self._given = each(lambda edge: [v for v in edge.writes if v in inner and edge is not first])
        self._only_given = each(lambda edge: inner.difference(kept, first.writes).intersection(edge.writes))
        # A value that only some of the pieces read is not counted.
        self._common_bytes = nbytes(v for v in shared - inner if readers[v] == len(pieces))
        self._from_first_bytes = nbytes(v for v in first.writes if readers[v] == len(others) > 0)
        self._vector = up_to(sum(f.vector for f in some) for some in flops)
        self._transcendental = up_to(sum(f.transcendental for f in some) for some in flops)
        self._arrays = up_to(len(set(edge.reads) - shared - inner) + len(edge.writes) for edge in edges)
        self._n_shared, self._n_given = len(shared), len(inner.intersection(first.reads))

    def _check(self, graph: Graph, edges: Sequence[Boundary]) -> None:
        operations = [n for nodes in self.pieces for n in nodes]
        if len(set(operations)) < len(operations):
            raise ValueError("two pieces hold one operation")
        maker = {v: k for k, edge in enumerate(edges) for v in edge.writes}
        reader: dict[int, int] = {}
        for k, (nodes, edge) in enumerate(zip(self.pieces, edges, strict=True)):
            if not may_pack(graph, nodes) or not edge.writes:
                raise ValueError(f"the piece of n{nodes[0]} is none that a pack may hold")
            for v in edge.reads:
                if v in maker and (graph.values[v].size > 1 or (k and maker[v])):
                    raise ValueError(f"the piece of n{nodes[0]} reads v{v}, which another makes")
            for v in arrays_read(graph, edge):
                if reader.setdefault(v, k) != k:
                    raise ValueError(f"two pieces read v{v}")

    def allows(self, start: int, end: int) -> bool:
        """Whether the pack of the pieces from ``start`` to before ``end`` has at most ``MAX_ARRAYS``. If not,
        no longer pack has."""
        shared = self._n_shared + (0 if start else self._n_given)
        return self._arrays[end] - self._arrays[start] + shared <= MAX_ARRAYS

    def nodes(self, start: int, end: int) -> Nodes:
        """The operations of that pack, ascending."""
        return tuple(sorted([n for nodes in self.pieces[start:end] for n in nodes]))

    def hbm_bytes(self, start: int, end: int) -> int:
        """Bytes that the pack moves at least."""
        written = self._written[end] - self._written[start]
        given = self._only_given[end] - self._only_given[start] if start else 0
        return self._moved(start, end) + written + given

    def _moved(self, start: int, end: int) -> int:
        """Bytes that the pack reads at least."""
        inside = self._given[end] - self._given[start]
        scalars = self._from_first_bytes if start else self._given[-1] - inside
        return self._read[end] - self._read[start] + self._common_bytes + scalars

    def least_ps(self, start: int, end: int) -> int:
        """Picoseconds that the pack takes at least."""
        wait_ps = self._device.hbm_latency_ps  # of its first load
        if self._device.sequential_grid:
            wait_ps = self._compute_ps(start, end) + self._device.grid_step_ps
        return self._device.launch_ps + max(self.busy_ps(start, end), wait_ps)

    def busy_ps(self, start: int, end: int) -> int:
        """Picoseconds that one core's most used resource is busy with it at least."""
        device = self._device
        cores = device.core_count
        memory_ps = time_ps(self.hbm_bytes(start, end), device.hbm_bytes_per_s)
        if device.sequential_grid:  # a core's DMA engine is its share of the memory
            return max(cores * memory_ps, self._compute_ps(start, end))
        cache_ps = cores * time_ps(self._moved(start, end), device.cache_bytes_per_s)
        return max(memory_ps, cache_ps, self._compute_ps(start, end))

    def _compute_ps(self, start: int, end: int) -> int:
        device = self._device
        vector_ps = time_ps(self._vector[end] - self._vector[start], device.vector_flops_per_s)
        transcendental = self._transcendental[end] - self._transcendental[start]
        return device.core_count * (vector_ps + time_ps(transcendental, device.transcendental_per_s))


_MOST_TIMES = 1024
"""Points in time at which the live blocks are summed, evenly spread, to bound the memory of the planner."""


class PackCapacity:
    """How many pieces of a line one core may hold at most, without scheduling their pack.

    A pack evaluates its nodes in their order at the shape of whole arrays. Its blocks at a time are those of
    its pieces (``costmodel.onchip.live_bytes``), so their sum over the pieces is a lower bound.

    ``specs`` are those of the pieces as packs of one, by ``Scheduler.in_one_tile``; no two read one
    array of more than one element, or exchange a value.
    """

    def __init__(self, graph: Graph, device: DeviceSpec, specs: Sequence[KernelSpec]) -> None:
        limited = device.register_bytes // 2 if device.capabilities.in_registers else device.onchip_bytes
        self._limit_bytes = limited or None
        time = {n: t for t, n in enumerate(sorted(n for spec in specs for n in spec.nodes))}
        stride = -(-len(time) // _MOST_TIMES)
        alive = np.zeros((len(specs), len(time)), dtype=np.int64)
        for bytes_at, spec in zip(alive, specs, strict=True):
            always, steps = live_bytes(graph, spec, device)
            for n, (during, after) in zip(spec.nodes, steps, strict=True):
                bytes_at[time[n]] = during
                bytes_at[time[n] + 1 :] = after
            bytes_at += always
        alive = alive[:, ::stride]
        # Row k is the sum over the pieces before the k-th, at each time.
        self._up_to = np.concatenate((np.zeros_like(alive[:1]), np.cumsum(alive, axis=0)))

    def holds(self, start: int, end: int) -> bool:
        """Whether the pieces from ``start`` to before ``end`` may fit together. If not, no more pieces do."""
        need = int((self._up_to[end] - self._up_to[start]).max(initial=0))
        return self._limit_bytes is None or need <= self._limit_bytes
