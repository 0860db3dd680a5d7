"""What a nest of XLA loops costs on a CPU, and what XLA's own kernels cost beside it.

A nest runs its operations one after another, each on all cores, tile by tile: the time of a
tile is the sum of what its contractions, its other arithmetic and its traffic take, where the
traffic passes through the level of cache that a tile's blocks fit. What it saves is the
traffic of large intermediates, and their memory: pages that a program touches for the first
time cost far more than pages it reuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from costmodel.axes import NodeAxes
from costmodel.device import DeviceSpec
from costmodel.graph import Flops, Graph, Node, OpKind
from costmodel.kernel import Axis, Cost, KernelSpec
from costmodel.nest_work import NestWork, PartWork, nest_work
from costmodel.picoseconds import time_ps
from costmodel.products import Sides, product_ps

_SPLIT_BYTES = 256 << 10
"""XLA runs a kernel with no larger block on one core (measured: jax 0.10 and 0.12)."""

_HANDOFF_PS = 6_000_000
"""Handing a kernel to all cores and waiting for them (measured on two cores, jax 0.10: 5 us in a
loop of alike kernels, up to 20 where those of two thread pools take turns)."""

_LARGE_BYTES = 32 << 20
"""Allocations from here on are returned to the system when freed, so that each run touches
fresh pages (glibc's mallopt(3): the largest dynamic M_MMAP_THRESHOLD)."""

_MARGIN = (11, 10)
"""What a nest takes beside its products is priced so much higher than the model says: the
model is not exact, and XLA's own kernels are safe. Products run at the same rate in both.
Predicted and measured times are in the table of ``fuseplan bench cpu``."""


def nest_cost(graph: Graph, spec: KernelSpec, device: DeviceSpec, work: NestWork | None = None) -> Cost:
    """What the loop nest ``spec`` costs on ``device``; ``work`` is its ``nest_work``, if it is at hand."""
    work = work or nest_work(graph, spec)
    outer = math.prod(a.n_tiles for i, a in enumerate(spec.axes) if i != spec.streamed)
    total = _Total()
    for part, count in zip(work.passes, tiles_walked(spec), strict=True):
        total.add(_Tile(graph, spec, device, part), count)
    total.add(_Tile(graph, spec, device, work.off), outer)
    write_bytes = sum(graph.values[w.value].nbytes for w in spec.writes)
    read_bytes = sum(graph.values[v].nbytes for v in {r.value for r in spec.reads})
    # Results are cleared, then written in place.
    memory_ps = total.memory_ps + time_ps(2 * write_bytes, device.hbm_bytes_per_s)
    cache_ps, sums_ps = total.cache_ps, total.sums_ps
    once_ps = time_ps(read_bytes + write_bytes, device.hbm_bytes_per_s)
    if (
        once_ps > memory_ps + cache_ps + sums_ps
    ):  # Each array is moved once, whatever lies in caches meanwhile.
        memory_ps, cache_ps, sums_ps = once_ps, 0, 0
    rest_ps = max(memory_ps + cache_ps + sums_ps, total.vector_ps + total.transcendental_ps)
    rest_ps += total.launch_ps + total.step_ps + total.sync_ps
    kept_bytes = _kept_bytes(spec, work)
    return Cost(
        launch_ps=device.launch_ps + total.launch_ps,
        sync_ps=total.sync_ps,
        fresh_ps=touched_ps(write_bytes + total.temp_bytes + kept_bytes, device),
        surcharge_ps=rest_ps * _MARGIN[0] // _MARGIN[1] - rest_ps,
        step_ps=total.step_ps,
        memory_ps=memory_ps,
        cache_ps=cache_ps,
        sums_ps=sums_ps,
        matrix_ps=total.matrix_ps,
        vector_ps=total.vector_ps,
        transcendental_ps=total.transcendental_ps,
        hbm_read_bytes=read_bytes,
        hbm_write_bytes=write_bytes,
        onchip_bytes=total.temp_bytes + kept_bytes,
        flops=total.flops,
        in_turns=True,
    )


def tiles_walked(spec: KernelSpec) -> tuple[int, ...]:
    """For each pass, the tiles of all loops together that it visits."""
    every = math.prod(a.n_tiles for a in spec.axes)
    return spec.walked or (every,) * len(spec.passes)


def reduction_ps(graph: Graph, node: Node, device: DeviceSpec) -> int:
    """The time of a reduction on a CPU where its operands come from cache: XLA adds the elements of a row up
    one by one, more slowly than it computes."""
    if node.kind != OpKind.REDUCTION or not device.reduction_per_s:
        return 0
    return time_ps(sum(graph.values[v].size for v in node.inputs), device.reduction_per_s)


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


def _kept_bytes(spec: KernelSpec, work: NestWork) -> int:
    """What the products take that one pass keeps for another, for all of the stream."""
    extents = [axis.size if a == spec.streamed else axis.tile for a, axis in enumerate(spec.axes)]
    return sum(math.prod([extents[a] for a in block.axes]) * block.bits // 8 for block in work.kept)


class _Total:
    """The parts of a nest's cost, summed over its tiles."""

    def __init__(self) -> None:
        self.launch_ps = self.step_ps = self.sync_ps = self.memory_ps = self.cache_ps = self.sums_ps = 0
        self.matrix_ps = self.vector_ps = self.transcendental_ps = 0
        self.temp_bytes = 0
        self.flops = Flops()

    def add(self, tile: _Tile, count: int) -> None:
        self.launch_ps += tile.launch_ps * count
        self.step_ps += tile.step_ps * count
        self.sync_ps += tile.sync_ps * count
        self.memory_ps += tile.memory_ps * count
        self.cache_ps += tile.cache_ps * count
        self.sums_ps += tile.sums_ps * count
        self.matrix_ps += tile.matrix_ps * count
        self.vector_ps += tile.vector_ps * count
        self.transcendental_ps += tile.transcendental_ps * count
        self.temp_bytes = max(self.temp_bytes, tile.temp_bytes)
        self.flops += tile.flops.times(count)


class _Tile:
    """Some nodes of a nest evaluated on one tile."""

    def __init__(self, graph: Graph, spec: KernelSpec, device: DeviceSpec, work: PartWork) -> None:
        axes = spec.axes
        reduction = vector = transcendental = matrix = products = 0
        self.matrix_ps = 0
        for done, count in work.arithmetic:
            part, whole = _share(axes, done.axes)
            vector += -(-done.vector * part // whole) * count
            transcendental += -(-done.transcendental * part // whole) * count
            if done.reduced and device.reduction_per_s:
                reduction += time_ps(-(-done.reduced * part // whole), device.reduction_per_s) * count
        for i in work.products:
            node, own = graph.nodes[spec.nodes[i]], spec.node_axes[i]
            products += _batch(axes, node, own)
            tile = [math.prod([axes[a].tile for a in dims]) for dims in own]
            self.matrix_ps += product_ps(graph, node, device, tile)
            part, whole = _share(axes, {a for dims in own for a in dims})
            matrix += -(-node.flops.matrix * part // whole)
        self.flops = Flops(matrix, vector, transcendental)
        largest = traffic = block_bytes = self.temp_bytes = 0
        for block, moves in work.moved:
            nbytes = -(-math.prod([axes[a].tile for a in block.axes]) * block.bits // 8)
            largest = max(largest, nbytes)
            traffic += nbytes * moves.times
            block_bytes += nbytes * moves.arrays
            self.temp_bytes += nbytes * moves.made
        idle = 1 if largest > _SPLIT_BYTES else device.core_count
        # Only products are calls; other kernels are part of the program. Each product is handed
        # out, and each large reduction, and so is what is computed elementwise before it.
        self.launch_ps = device.launch_ps * products
        self.step_ps = device.step_ps * bool(work.nodes)
        self.sync_ps = 2 * _HANDOFF_PS * (products + work.reductions * (idle == 1))
        self.vector_ps = time_ps(vector, device.vector_flops_per_s) * idle
        self.transcendental_ps = time_ps(transcendental, device.transcendental_per_s) * idle
        # A reduction is fused with what it sums up: the slower of the two counts.
        traffic_ps = time_ps(traffic, _bandwidth(device, block_bytes))
        self.memory_ps = self.cache_ps = self.sums_ps = 0
        if reduction * idle > traffic_ps:
            self.sums_ps = reduction * idle
        elif block_bytes > device.cache_bytes:
            self.memory_ps = traffic_ps
        else:
            self.cache_ps = traffic_ps


def _share(axes: Sequence[Axis], own: Iterable[int]) -> tuple[int, int]:
    """What part one tile is of work along some axes."""
    part = whole = 1
    for a in own:
        part *= axes[a].tile
        whole *= axes[a].size
    return part, max(whole, 1)


def _batch(axes: Sequence[Axis], node: Node, own: NodeAxes) -> int:
    """How many products one contraction is: XLA runs those of a batch one by one."""
    if len(node.input_maps) != 2:
        return 1
    batch = Sides.of((*node.input_maps, *node.output_maps)).batch
    return math.prod(axes[a].tile for d in batch for a in own[d])


def _bandwidth(device: DeviceSpec, block_bytes: int) -> int:
    """Bytes a second of the level of memory that holds so much."""
    if block_bytes <= device.private_cache_bytes and device.private_cache_bytes_per_s:
        return device.private_cache_bytes_per_s
    fits = block_bytes <= device.cache_bytes and device.cache_bytes_per_s
    return device.cache_bytes_per_s if fits else device.hbm_bytes_per_s
