"""Room: how many pieces of a line one core may hold at most, without scheduling their pack.

A pack evaluates its nodes in their order at the shape of whole arrays, and what is alive at a time
(``costmodel.memory``) is what is alive in its pieces then; on a TPU, beside two buffers of all that is
read and written. Both are sums over the pieces. So a run that is too large for what is counted here
does not fit, and neither does a longer one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from costmodel import dtypes
from costmodel.axes import compose
from costmodel.device import DeviceSpec
from costmodel.graph import DimMap, Graph, OpKind
from costmodel.kernel import KernelSpec
from costmodel.memory import block_bytes

_MOST_TIMES = 1024
"""Times that are looked at. Where pieces take turns step by step, what is alive changes slowly."""


class Room:
    """``holds(start, end)``: whether the pieces from ``start`` to before ``end`` may fit together.

    ``specs`` are those of the pieces as packs of one, by ``Scheduler.in_one_tile``; no two read one
    array of more than one element, or exchange a value.
    """

    def __init__(self, graph: Graph, device: DeviceSpec, specs: Sequence[KernelSpec]) -> None:
        self._graph, self._tiled = graph, device.sequential_grid
        limited = device.register_bytes // 2 if device.capabilities.in_registers else device.onchip_bytes
        self._limit_bytes = limited or None
        self._step = {n: t for t, n in enumerate(sorted(n for spec in specs for n in spec.nodes))}
        stride = -(-len(self._step) // _MOST_TIMES)
        alive = np.array([self._alive_bytes(spec)[::stride] for spec in specs], dtype=np.int64)
        # Row k is the sum over the pieces before the k-th, at each time.
        self._up_to = np.concatenate((np.zeros_like(alive[:1]), np.cumsum(alive, axis=0)))

    def holds(self, start: int, end: int) -> bool:
        """False if they do not fit, and then no more do; else they may or may not."""
        need = int((self._up_to[end] - self._up_to[start]).max(initial=0))
        return self._limit_bytes is None or need <= self._limit_bytes

    def _alive_bytes(self, spec: KernelSpec) -> npt.NDArray[np.int64]:
        """What a piece holds before each node of the line is evaluated, or, of its own, while it is."""
        values, step, tiled = self._graph.values, self._step, self._tiled
        alive = np.zeros(len(step), dtype=np.int64)
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for n in spec.nodes:
            for v in self._graph.nodes[n].inputs:
                first.setdefault(v, step[n])
                last[v] = step[n]

        def nbytes(v: int, axes: DimMap, least_bits: int) -> int:
            return block_bytes(spec.axes, axes, max(dtypes.bits(values[v].dtype), least_bits), tiled)

        for access in spec.reads:
            v = access.value
            if values[v].size > 1 and not tiled:
                alive[first[v] : last[v] + 1] += nbytes(v, access.axes, 0)
        if tiled:
            exchanged = [a for a in (*spec.reads, *spec.writes) if values[a.value].size > 1]
            alive += 2 * sum(nbytes(a.value, a.axes, 0) for a in exchanged)
        for n, own in zip(spec.nodes, spec.node_axes, strict=True):
            node = self._graph.nodes[n]
            if node.kind == OpKind.BROADCAST and node.inputs:
                continue  # it is made where it is used
            for v, dim_map in zip(node.outputs, node.output_maps, strict=True):
                # An elementwise node overwrites an operand; a TPU computes in 32 bits.
                start = step[n] + (node.kind == OpKind.ELEMENTWISE)
                end = last.get(v, step[n]) + 1
                alive[start:end] += nbytes(v, compose(dim_map, own), 32 if tiled else 0)
        return alive
