"""Estimate the cost of a kernel on a device by a roofline model (``estimate``).

The model is that of Williams, Waterman and Patterson ("Roofline", CACM 2009), extended by the effects in
which two schedules of one group differ: recomputation, repeated reads, idle cores, and latency that too few
tiles cannot hide. A kernel that XLA compiles (no axes) is assumed to fill the device, except for a matrix
product, which is priced as a tiled kernel of a vendor library (``library_matmul``). All arithmetic is in
integers, rounded up, so that a plan does not depend on the machine that makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod

from costmodel import dtypes
from costmodel.axes import NodeAxes
from costmodel.cpu_functions import flops_on_cpu
from costmodel.device import TRANSPOSED, DeviceSpec, time_ps
from costmodel.graph import DimRole, Flops, Graph, Node, OpKind
from costmodel.kernel import Access, AxisRole, Compiled, Cost, KernelSpec, evaluations, pass_count
from costmodel.loops import (
    NestWork,
    broadcasts_cost,
    fresh_ps,
    library_ps,
    nest_cost,
    product_ps,
    reduction_ps,
)
from costmodel.memory import is_bitcast
from costmodel.model import modelled_cost, plain_device
from costmodel.onchip import Footprint, concurrent_tiles, footprint
from costmodel.split_products import product_extents
from costmodel.traffic import bytes_moved
from costmodel.xla_loops import (
    absorbed_in_group,
    ends_loop,
    evaluations_in_loop,
    is_call_with_product,
    is_one_loop,
    is_scatter,
    loops_of_results,
)

_NOTHING = Compiled(0, 0, 0)
"""The result of compilation of nodes for which XLA emits no kernel."""


def estimate(
    graph: Graph,
    spec: KernelSpec,
    device: DeviceSpec,
    need: Footprint | None = None,
    work: Work | NestWork | None = None,
) -> Cost:
    """The cost of one run of the kernel ``spec`` on ``device``; times in picoseconds.

    ``need`` is its ``footprint``, and ``work`` its ``work_of`` (of a CPU's loop nest, its ``nest_work``);
    they are computed where they are not given. A device with a cost model of its own
    (``costmodel.model.with_cost_model``) is asked for its price.

    Limits: a vector operation costs the same for every dtype, and data that the previous kernel left in the
    cache save no traffic.

    Example:
        >>> from costmodel.devices import TEST_DEVICE
        >>> from costmodel.graph import make_graph
        >>> estimate(make_graph((), (), (), ()), KernelSpec((), (), (), (), ()), TEST_DEVICE).time_ps
        0
    """
    if is_bitcast(graph, spec) if spec.compiled is None else spec.compiled == _NOTHING:
        return Cost()
    given_ps = graph.nodes[spec.nodes[0]].given_ps if len(spec.nodes) == 1 else None
    if given_ps is not None:
        return _given_cost(graph, spec, device, given_ps)
    if device.cost_model is not None:
        own = estimate(graph, spec, plain_device(device), need, work)
        return modelled_cost(graph, spec, device, own)
    if _has_loop_for_each_result(graph, spec, device):
        loops = loops_of_results(graph, spec.nodes, [access.value for access in spec.writes])
        parts = [_loop_of(graph, spec, nodes, end) for end, nodes in loops.items()]
        return _sum_of([estimate(graph, part, device) for part in parts])
    if _is_call_with_product(graph, spec, device):
        whole = _sum_of([estimate(graph, _alone(graph, spec, n), device) for n in spec.nodes])
        launches = 1 if spec.compiled is None else spec.compiled.launches
        return replace(whole, launch_ps=launches * device.launch_ps)
    if spec.capabilities.loop_nest:
        return nest_cost(graph, spec, device, work if isinstance(work, NestWork) else None)
    assert not isinstance(work, NestWork), "only a loop nest has NestWork"
    if need is None:
        need = footprint(graph, spec, device)
    moved = bytes_moved(graph, spec, device)
    is_of_xla = device.capabilities.emits_kernels and _is_loop_of_xla(graph, spec)
    is_loop = is_of_xla and spec.compiled is None
    if is_loop and work is None:  # It evaluates operations where they are read.
        work = work_of(graph, spec, evaluations_in_loop(graph, spec.nodes, device.capabilities.loop_indices))
    work = work or work_of(graph, spec, on_cpu=device.platform == "cpu")
    flops, matrix_ps = _executed(work, spec, device)
    hbm_bytes = moved.hbm_read_bytes + moved.hbm_write_bytes
    memory_ps = time_ps(hbm_bytes, device.hbm_bytes_per_s)
    cache_ps = time_ps(moved.loaded_bytes, device.cache_bytes_per_s)
    vector_ps = time_ps(flops.vector, device.vector_flops_per_s)
    transcendental_ps = time_ps(flops.transcendental, device.transcendental_per_s)
    launch_ps = device.launch_ps * (1 if spec.compiled is None else spec.compiled.launches)
    scan_ps = fresh = sums_ps = latency_ps = step_ps = 0
    if spec.tiles_visited:  # tiles may be skipped only if no array has an infinity: each is scanned for one
        scanned = {access.value for access in spec.reads}
        scan_ps = device.launch_ps * scan_launches(spec, device)
        scan_ps += time_ps(sum(graph.values[v].nbytes for v in scanned), device.hbm_bytes_per_s)
    if not spec.axes and matrix_ps:
        products = [graph.nodes[n] for n in spec.nodes if graph.nodes[n].flops.matrix]
        if device.platform == "cpu":
            matrix_ps = sum(product_ps(graph, node, device) for node in products)
        for node in products:
            known = library_matmul(graph, node, device)
            if known is not None:
                matrix_ps, cache_ps = max(matrix_ps, known[0]), max(cache_ps, known[1])
    if device.platform == "cpu":
        read_ps, touched_ps = broadcasts_cost(graph, spec.nodes, device)
        memory_ps += read_ps
        fresh = fresh_ps(graph, spec, device) + touched_ps
        cache_ps += library_ps(graph, spec.nodes, device)
        sums_ps = sum(reduction_ps(graph, graph.nodes[n], device) for n in spec.nodes)
    if is_loop and any(_is_reduced_in_blocks(graph, graph.nodes[n], device) for n in spec.nodes):
        launch_ps *= device.capabilities.reduction_loop_kernels
    if is_of_xla:  # It waits for its first elements, as a tiled kernel does for its first block.
        if device.sequential_grid:
            step_ps = device.grid_step_ps
        else:
            latency_ps = device.hbm_latency_ps
    if spec.axes:
        tiles = prod(spec.grid)
        steps = 1 if spec.streamed is None else spec.axes[spec.streamed].n_tiles
        if tiles:
            cores = device.core_count
            waves = -(-tiles // cores)  # the last wave may leave cores idle (tail effect)
            matrix_ps, vector_ps, transcendental_ps = (
                -(-ps * waves * cores // tiles) for ps in (matrix_ps, vector_ps, transcendental_ps)
            )
            # Each core has an equal share of the bandwidth: its port to the cache (GPU) or its DMA engine
            # (TPU).
            busy = min(tiles, cores)
            cache_ps = -(-cache_ps * cores // busy)
            if device.sequential_grid:
                memory_ps = -(-memory_ps * cores // busy)
                step_ps = waves * steps * pass_count(spec) * device.grid_step_ps
            else:
                # Little's law: the loads of a tile take at least one latency, half of it with double
                # buffering in a loop. Only tiles on the same core hide each other's latency.
                rounds = pass_count(spec) * -(-tiles // (cores * concurrent_tiles(need, device)))
                latency_ps = rounds * max(steps // 2, 1) * device.hbm_latency_ps
    return Cost(
        launch_ps=launch_ps,
        scan_ps=scan_ps,
        fresh_ps=fresh,
        step_ps=step_ps,
        memory_ps=memory_ps,
        latency_ps=latency_ps,
        cache_ps=cache_ps,
        sums_ps=sums_ps,
        matrix_ps=matrix_ps,
        vector_ps=vector_ps,
        transcendental_ps=transcendental_ps,
        hbm_read_bytes=moved.hbm_read_bytes,
        hbm_write_bytes=moved.hbm_write_bytes,
        onchip_bytes=need.onchip_bytes,
        flops=flops,
    )


def _given_cost(graph: Graph, spec: KernelSpec, device: DeviceSpec, given_ps: int) -> Cost:
    """The cost of a kernel whose time is given: it is memory-bound if its bytes take all of it, else bound by
    its arithmetic."""
    moved = bytes_moved(graph, spec, device)
    launch_ps = min(device.launch_ps, given_ps)
    memory_ps = time_ps(moved.hbm_read_bytes + moved.hbm_write_bytes, device.hbm_bytes_per_s)
    flops, rest_ps = graph.nodes[spec.nodes[0]].flops, given_ps - launch_ps
    is_product = bool(flops.matrix)
    return Cost(
        launch_ps=launch_ps,
        memory_ps=min(memory_ps, rest_ps),
        matrix_ps=rest_ps if is_product else 0,
        vector_ps=0 if is_product else rest_ps,
        hbm_read_bytes=moved.hbm_read_bytes,
        hbm_write_bytes=moved.hbm_write_bytes,
        flops=flops,
    )


def _has_loop_for_each_result(graph: Graph, spec: KernelSpec, device: DeviceSpec) -> bool:
    """Whether XLA makes several loops of a group: on a CPU each writes the results of one operation."""
    is_of_xla = device.platform == "cpu" and spec.compiled is None and not spec.axes
    ends = {graph.values[access.value].producer for access in spec.writes}
    return is_of_xla and len(ends) > 1 and is_one_loop(graph, spec.nodes)


def _is_call_with_product(graph: Graph, spec: KernelSpec, device: DeviceSpec) -> bool:
    """Whether a call of XLA:CPU's library holds a matrix product: it then computes one operation after the
    other, each into memory of its own. XLA decides by itself what else it takes into a call."""
    if device.platform != "cpu" or spec.axes or spec.capabilities.loop_nest:
        return False
    if not is_one_loop(graph, spec.nodes):
        return False
    if spec.compiled is not None:
        return is_call_with_product(graph, spec.nodes)
    products = {n for n in spec.nodes if graph.nodes[n].kind == OpKind.OUT_ELEMENTWISE_FUSABLE}
    writes = {access.value for access in spec.writes}
    return bool(products) and products <= absorbed_in_group(graph, spec.nodes, writes)


def _alone(graph: Graph, spec: KernelSpec, n: int) -> KernelSpec:
    """The kernel of one node of a group."""
    node = graph.nodes[n]

    def whole(values: Iterable[int]) -> tuple[Access, ...]:
        return tuple(Access(v, ((),) * len(graph.values[v].shape)) for v in dict.fromkeys(values))

    node_axes = (((),) * len(node.dims),)
    return replace(
        spec,
        nodes=(n,),
        node_axes=node_axes,
        reads=whole(node.inputs),
        writes=whole(node.outputs),
        compiled=None,
    )


def _loop_of(graph: Graph, spec: KernelSpec, nodes: tuple[int, ...], end: int) -> KernelSpec:
    """The loop of some of the nodes of a group that XLA compiles, which writes the results of ``end``."""
    node_axes = dict(zip(spec.nodes, spec.node_axes, strict=True))
    written = {access.value for access in spec.writes} - set(graph.nodes[end].outputs)
    read = dict.fromkeys(v for n in nodes for v in graph.nodes[n].inputs)
    outside = [v for v in read if v in written or graph.values[v].producer not in nodes]
    return replace(
        spec,
        nodes=nodes,
        node_axes=tuple(node_axes[n] for n in nodes),
        reads=tuple(Access(v, ((),) * len(graph.values[v].shape)) for v in outside),
        writes=tuple(access for access in spec.writes if access.value not in written),
    )


def _sum_of(costs: Sequence[Cost]) -> Cost:
    """The cost of kernels that run one after the other."""
    names = [f.name for f in fields(Cost) if f.name not in ("flops", "in_turns")]
    total = {name: sum(getattr(cost, name) for cost in costs) for name in names}
    in_turns = any(cost.in_turns for cost in costs)
    return Cost(**total, flops=sum((cost.flops for cost in costs), Flops()), in_turns=in_turns)


@dataclass(frozen=True, slots=True)
class Work:
    """The operations of a group, summed over nodes with the same axes. Schedules that number the axes of the
    group alike share it."""

    terms: tuple[tuple[NodeAxes, bool, Flops], ...]
    """Axes; whether the nodes run in every step of a sequential grid (``_rerun_each_step``); flops."""
    products: tuple[tuple[NodeAxes, int, str], ...]
    """Axes, flops and the name of the rate (``_rate_of``) of each contraction."""


def work_of(
    graph: Graph, spec: KernelSpec, times: Sequence[tuple[int, int]] | None = None, on_cpu: bool = False
) -> Work:
    """The work of ``spec``, and of every schedule with the same nodes, axes, streamed axis and passes.

    ``times``: how often each node is evaluated, if not as often as its ``evaluations`` say. ``on_cpu``:
    whether a CPU runs it, some of whose functions take as long as many exponentials.
    """
    rerun = _rerun_each_step(graph, spec)
    terms: dict[tuple[NodeAxes, bool], Flops] = {}
    products = []
    for i, (n, share) in enumerate(zip(spec.nodes, times or evaluations(spec), strict=True)):
        node = graph.nodes[n]
        flops = flops_on_cpu(graph, node) if on_cpu else node.flops
        if not flops.total:
            continue
        key = (spec.node_axes[i] if spec.axes else (), i in rerun)
        flops = flops.share(*share)
        terms[key] = terms.get(key, Flops()) + flops
        if flops.matrix:
            products.append((key[0], flops.matrix, _rate_of(graph, node, spec)))
    return Work(tuple((*key, flops) for key, flops in terms.items()), tuple(products))


def _rate_of(graph: Graph, node: Node, spec: KernelSpec) -> str:
    """The name of a contraction's rate: the dtype of its first operand, followed by ``TRANSPOSED`` where a
    tiled kernel around it reads an operand along another dimension than the contracted one. Of operands with
    different dtypes the narrow one needs no such copy, and the wide one is multiplied in halves. Kernels of
    several passes have the plain rate: half of an attention's products need no copy, and none of its
    alternatives avoids writing the scores."""
    dtypes_of = [graph.values[v].dtype for v in node.inputs]
    rows = [next((dims[-1] for dims in reversed(own) if dims), None) for own in node.input_maps]
    along = all(d is None or node.roles[d] == DimRole.REDUCED for d in rows)
    is_copied = bool(spec.axes) and not spec.passes and len(set(dtypes_of)) == 1 and not along
    return dtypes_of[0] + (TRANSPOSED if is_copied else "")


def scan_launches(spec: KernelSpec, device: DeviceSpec) -> int:
    """The launches before a kernel that skips tiles: a reduction of each array that it reads, which looks for
    infinities, and one that makes the table of tiles; 0 if it skips none."""
    if not spec.tiles_visited:
        return 0
    return len({access.value for access in spec.reads}) * device.capabilities.reduction_loop_kernels + 1


def _is_reduced_in_blocks(graph: Graph, node: Node, device: DeviceSpec) -> bool:
    return not is_scatter(node) and ends_loop(graph, node, device.capabilities)


def _is_loop_of_xla(graph: Graph, spec: KernelSpec) -> bool:
    """Whether XLA fuses the group into a loop of several operations on arrays."""
    if spec.capabilities.emits_kernels or not is_one_loop(graph, spec.nodes):
        return False
    return any(graph.nodes[n].dims for n in spec.nodes)


def _executed(work: Work, spec: KernelSpec, device: DeviceSpec) -> tuple[Flops, int]:
    """All flops executed, recomputation and padding included, and the matrix units' time."""
    matrix = vector = transcendental = matrix_ps = 0
    for own, rerun, flops in work.terms:
        times, per = repeat_factor(spec, own)
        if rerun and device.sequential_grid:
            times *= spec.axes[spec.streamed or 0].n_tiles * pass_count(spec)
        vector += -(-flops.vector * times // per)
        transcendental += -(-flops.transcendental * times // per)
    for own, product, dtype in work.products:
        times, per = repeat_factor(spec, own)
        done = -(-product * times // per)
        matrix += done
        matrix_ps += time_ps(done, device.matrix_rate(dtype))
    return Flops(matrix, vector, transcendental), matrix_ps


def _rerun_each_step(graph: Graph, spec: KernelSpec) -> frozenset[int]:
    """The nodes, by position, that do not have the streamed axis and yet run in every step of it on a
    sequential grid.

    Only accumulators are kept from one step to the next, so every step recomputes what it reads."""
    streamed = spec.streamed
    if streamed is None:
        return frozenset()
    carries = [any(streamed in axes for axes in own) for own in spec.node_axes]
    needed: set[int] = set()
    rerun: list[int] = []
    for i in range(len(spec.nodes) - 1, -1, -1):
        node = graph.nodes[spec.nodes[i]]
        if carries[i]:
            needed.update(node.inputs)
        elif not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            rerun.append(i)
    return frozenset(rerun)


def repeat_factor(spec: KernelSpec, node_axes: NodeAxes) -> tuple[int, int]:
    """How often the flops of a node are executed, as (numerator, denominator).

    A node runs once for each tile of a parallel axis that it does not have, and over the padded extent of the
    axes that it has. A node without the streamed axis runs once, before or after the loop (on a sequential
    grid see ``_rerun_each_step``)."""
    carried = {a for axes in node_axes for a in axes}
    times, per = 1, 1
    for i, axis in enumerate(spec.axes):
        if i in carried:
            padded = axis.n_tiles * axis.tile
            if padded != axis.size and axis.size:
                times *= padded
                per *= axis.size
        elif axis.role == AxisRole.PARALLEL:
            times *= axis.n_tiles
    return times, per


# Tiles of the result and splits of the contracted axis that cuBLAS and CUTLASS build kernels for
# (CUTLASS, "Efficient GEMM in CUDA", and its default configurations).
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_SPLITS = (1, 2, 4, 8)


def library_matmul(graph: Graph, node: Node, device: DeviceSpec) -> tuple[int, int] | None:
    """Picoseconds on the matrix units and at the shared cache that a vendor library takes for the contraction
    ``node``, with the best of its tiles; None for other nodes and on other devices than GPUs.

    The library's kernel is subject to the same effects as a generated one: it runs in tiles, in waves over
    the cores, and reads its operands from the shared cache once per tile. With a library priced at the peak
    rate, no epilogue would ever be fused."""
    extents = product_extents(graph, node)
    if device.platform != "gpu" or extents is None or not prod(node.dims):
        return None
    lhs_bits, rhs_bits = (dtypes.bits(graph.values[v].dtype) for v in node.inputs)
    out_bytes = graph.values[node.outputs[0]].nbytes
    rate = device.matrix_rate(graph.values[node.inputs[0]].dtype)
    return _best_tile(
        extents, lhs_bits, rhs_bits, out_bytes, rate, device.core_count, device.cache_bytes_per_s
    )


@lru_cache(maxsize=1024)
def _best_tile(
    extents: tuple[int, int, int, int],
    lhs_bits: int,
    rhs_bits: int,
    out_bytes: int,
    rate: int,
    cores: int,
    cache_bytes_per_s: int,
) -> tuple[int, int] | None:
    """Picoseconds on the matrix units and at the cache, for the tile with the shorter of the longer one."""
    batch, rows, columns, k = extents
    best: tuple[int, int] | None = None
    for tile_rows, tile_columns in _TILES:
        across, down = -(-rows // tile_rows), -(-columns // tile_columns)
        loaded = batch * k * (rows * down * lhs_bits + columns * across * rhs_bits) // 8
        for split in _SPLITS:
            tiles = batch * across * down * split
            waves = -(-tiles // cores)
            flops = waves * cores * 2 * tile_rows * tile_columns * -(-k // split)
            matrix_ps = time_ps(flops, rate)
            moved = loaded + split * out_bytes
            cache_ps = time_ps(moved * cores, cache_bytes_per_s * min(tiles, cores))
            if best is None or max(matrix_ps, cache_ps) < max(best):
                best = matrix_ps, cache_ps
    return best
