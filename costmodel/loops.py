"""What a nest of XLA loops costs on a CPU, and what XLA's own kernels cost beside it.

A nest runs its operations one after another, each on all cores, tile by tile: the time of a
tile is the sum of what its contractions, its other arithmetic and its traffic take, where the
traffic passes through the level of cache that a tile's blocks fit. What it saves is the
traffic of large intermediates, and their memory: pages that a program touches for the first
time cost far more than pages it reuses.
"""

from __future__ import annotations

import math

from costmodel import dtypes
from costmodel.device import DeviceSpec
from costmodel.graph import Flops, Graph, Node, OpKind
from costmodel.kernel import AxisRole, Cost, KernelSpec
from costmodel.picoseconds import time_ps

_PACKING = 3
"""Vector operations an element of a product costs beside its flops: packing operands, and
storing the result. XLA's 512x512x64 takes 270 us where its flops at the rate of a large
product take 168 (float32, two server cores, jax 0.10)."""

_LARGE_BYTES = 32 << 20
"""Allocations from here on are returned to the system when freed, so that each run touches
fresh pages (glibc's mallopt(3): the largest dynamic M_MMAP_THRESHOLD)."""

_MARGIN = (12, 10)
"""What a nest takes beside its products is priced so much higher than the model says: the
model is not exact, and XLA's own kernels are safe. Products run at the same rate in both.
Predicted and measured times are in the table of ``fuseplan bench cpu``."""


def nest_cost(graph: Graph, spec: KernelSpec, device: DeviceSpec) -> Cost:
    """What the loop nest ``spec`` costs on ``device``."""
    outer = math.prod(a.n_tiles for i, a in enumerate(spec.axes) if i != _stream(spec))
    in_loop = {i for p in spec.passes for i in p}
    off = [i for i in range(len(spec.nodes)) if i not in in_loop]
    total = _Total()
    for nodes, count in zip(spec.passes, tiles_walked(spec), strict=True):
        total.add(_Tile(graph, spec, device, nodes), count)
    total.add(_Tile(graph, spec, device, off), outer)
    write_bytes = sum(graph.values[w.value].nbytes for w in spec.writes)
    # Results are cleared, then written in place.
    memory_ps = total.memory_ps + time_ps(2 * write_bytes, device.hbm_bytes_per_s)
    read_bytes = sum(graph.values[v].nbytes for v in {r.value for r in spec.reads})
    memory_ps = max(memory_ps, time_ps(read_bytes + write_bytes, device.hbm_bytes_per_s))
    serial_ps = memory_ps + total.matrix_ps + total.vector_ps + total.transcendental_ps
    uncertain_ps = serial_ps - total.matrix_ps + total.launch_ps
    surcharge = uncertain_ps * _MARGIN[0] // _MARGIN[1] - uncertain_ps
    slowest = max(memory_ps, total.matrix_ps, total.vector_ps + total.transcendental_ps)
    blocks = total.block_bytes

    return Cost(
        # Operations of a tile do not overlap: what is not the slowest part is added to it.
        launch_ps=total.launch_ps
        + serial_ps
        - slowest
        + surcharge
        + touched_ps(write_bytes + blocks, device),
        memory_ps=memory_ps,
        matrix_ps=total.matrix_ps,
        vector_ps=total.vector_ps,
        transcendental_ps=total.transcendental_ps,
        hbm_read_bytes=read_bytes,
        hbm_write_bytes=write_bytes,
        onchip_bytes=total.block_bytes,
        flops=total.flops,
    )


def tiles_walked(spec: KernelSpec) -> tuple[int, ...]:
    """For each pass, the tiles of all loops together that it visits."""
    every = math.prod(a.n_tiles for a in spec.axes)
    return spec.walked or (every,) * len(spec.passes)


def product_ps(graph: Graph, node: Node, device: DeviceSpec, share: tuple[int, int] = (1, 1)) -> int:
    """The time of a contraction on a CPU, or of ``share`` of it: flops, and packing."""
    rate = device.matrix_rate(graph.values[node.inputs[0]].dtype)
    elements = sum(graph.values[v].size for v in node.outputs)
    flops, packed = (-(-n * share[0] // share[1]) for n in (node.flops.matrix, elements * _PACKING))
    return time_ps(flops, rate) + time_ps(packed, device.vector_flops_per_s)


def fresh_ps(graph: Graph, spec: KernelSpec, device: DeviceSpec) -> int:
    """What touching new pages costs: those of large results that could take no operand's place."""
    operands = sorted(graph.values[v].nbytes for v in {access.value for access in spec.reads})
    fresh = 0
    for nbytes in sorted((graph.values[w.value].nbytes for w in spec.writes), reverse=True):
        if operands and operands[-1] >= nbytes:
            operands.pop()
        else:
            fresh += nbytes
    return touched_ps(fresh, device)


def touched_ps(nbytes: int, device: DeviceSpec) -> int:
    """The time it takes to touch so much memory for the first time."""
    if nbytes < _LARGE_BYTES or not device.fresh_bytes_per_s:
        return 0
    return time_ps(nbytes, device.fresh_bytes_per_s)


def _stream(spec: KernelSpec) -> int | None:
    streamed = [i for i, a in enumerate(spec.axes) if a.role == AxisRole.STREAMED]
    return streamed[-1] if streamed else None


class _Total:
    """The parts of a nest's cost, summed over its tiles."""

    def __init__(self) -> None:
        self.launch_ps = self.memory_ps = self.matrix_ps = self.vector_ps = self.transcendental_ps = 0
        self.block_bytes = 0
        self.flops = Flops()

    def add(self, tile: _Tile, count: int) -> None:
        self.launch_ps += tile.launch_ps * count
        self.memory_ps += tile.memory_ps * count
        self.matrix_ps += tile.matrix_ps * count
        self.vector_ps += tile.vector_ps * count
        self.transcendental_ps += tile.transcendental_ps * count
        self.block_bytes = max(self.block_bytes, tile.block_bytes)
        self.flops += tile.flops.times(count)


class _Tile:
    """Some nodes of a nest evaluated on one tile."""

    def __init__(
        self, graph: Graph, spec: KernelSpec, device: DeviceSpec, nodes: list[int] | tuple[int, ...]
    ) -> None:
        self.graph, self.spec = graph, spec
        self.matrix_ps = vector = transcendental = matrix = kernels = 0
        made = {v: i for i in nodes for v in graph.nodes[spec.nodes[i]].outputs}
        moved: dict[int, int] = {}
        for i in nodes:
            node = graph.nodes[spec.nodes[i]]
            share = self._share(i)
            if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
                self.matrix_ps += product_ps(graph, node, device, share)
                matrix += -(-node.flops.matrix * share[0] // share[1])
            vector += -(-node.flops.vector * share[0] // share[1])
            transcendental += -(-node.flops.transcendental * share[0] // share[1])
            if node.kind >= OpKind.REDUCTION:
                # XLA fuses the rest into these; what they read and make passes through memory.
                kernels += 1
                for v in (*node.inputs, *node.outputs):
                    moved[v] = moved.get(v, 0) + 1
            else:
                for v in node.inputs:
                    if v not in made:
                        moved.setdefault(v, 1)
        self.flops = Flops(matrix, vector, transcendental)
        self.launch_ps = device.launch_ps * max(kernels, 1) + device.step_ps if nodes else 0
        self.vector_ps = time_ps(vector, device.vector_flops_per_s)
        self.transcendental_ps = time_ps(transcendental, device.transcendental_per_s)
        sizes = self._block_bytes(nodes)
        traffic = sum(sizes[v] * count for v, count in moved.items())
        self.block_bytes = sum(sizes[v] for v in moved)
        self.memory_ps = time_ps(traffic, _bandwidth(device, self.block_bytes))

    def _share(self, i: int) -> tuple[int, int]:
        """What part of a node's work one tile is."""
        part = whole = 1
        for a in {a for dims in self.spec.node_axes[i] for a in dims}:
            part *= self.spec.axes[a].tile
            whole *= self.spec.axes[a].size
        return part, max(whole, 1)

    def _block_bytes(self, nodes: list[int] | tuple[int, ...]) -> dict[int, int]:
        """Bytes of one tile's block of every value that the nodes touch."""
        sizes: dict[int, int] = {}
        for i in nodes:
            node = self.graph.nodes[self.spec.nodes[i]]
            maps = zip(node.inputs + node.outputs, node.input_maps + node.output_maps, strict=True)
            for v, dim_map in maps:
                own = self.spec.node_axes[i]
                axes = {a for dims in dim_map for d in dims for a in own[d]}
                elements = math.prod(self.spec.axes[a].tile for a in axes)
                sizes[v] = -(-elements * dtypes.bits(self.graph.values[v].dtype) // 8)
        return sizes


def _bandwidth(device: DeviceSpec, block_bytes: int) -> int:
    """Bytes a second of the level of memory that holds so much."""
    if block_bytes <= device.private_cache_bytes:
        return device.private_cache_bytes_per_s
    return device.cache_bytes_per_s if block_bytes <= device.cache_bytes else device.hbm_bytes_per_s
