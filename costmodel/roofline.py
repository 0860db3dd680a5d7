"""``estimate``: what a kernel costs on a device, part by part.

The roofline model (Williams, Waterman and Patterson, CACM 2009), with what makes the
difference between two schedules of one group: recomputation, re-reads, cores left idle,
and latency that too few tiles cannot hide. XLA's own kernels (no axes) are taken to fill
the device, but for matmuls, which obey the same laws (``library``). Everything is integer
arithmetic, rounded up, so that a plan never depends on the machine that made it.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.axes import NodeAxes
from costmodel.device import DeviceSpec
from costmodel.graph import Flops, Graph
from costmodel.kernel import AxisRole, Compiled, Cost, KernelSpec
from costmodel.library import library_matmul
from costmodel.loops import NestWork, fresh_ps, nest_cost, product_ps, reduction_ps
from costmodel.memory import is_bitcast
from costmodel.onchip import Footprint, concurrent_tiles, footprint
from costmodel.passes import evaluations, pass_count
from costmodel.picoseconds import time_ps
from costmodel.traffic import bytes_moved

HBM_LATENCY_PS = 600_000
"""What a GPU tile waits for a load from HBM. Unloaded it is about 480 cycles (Luo et al.,
"Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", 2024), under a quarter
of a microsecond; under load about twice that and more: taken as 0.6 us."""

TPU_STEP_PS = 400_000
"""What one step of a Pallas TPU grid costs beside its work: index arithmetic, semaphores
and DMA descriptors. From the TPU compiler's own cycle estimates of a 4096x1024 float32
rmsnorm on a v5e, 512 steps against 16: 655 cycles at 1.5 GHz a step, work included."""


_NOTHING = Compiled(0, 0, 0)
"""What XLA makes of nodes that it finds to be no work: they compute nothing."""


def estimate(
    graph: Graph,
    spec: KernelSpec,
    device: DeviceSpec,
    need: Footprint | None = None,
    work: Work | NestWork | None = None,
) -> Cost:
    """What one run of the kernel ``spec`` costs on ``device``; times in picoseconds.

    ``need`` is its ``footprint`` and ``work`` its ``work_of``, or a CPU's nest's ``nest_work``,
    where the caller has them at hand already.

    Limits: a vector operation costs the same whatever its dtype, and what the kernel
    before left in the cache saves nothing.

    Example:
        >>> from costmodel.device import TEST_DEVICE
        >>> from costmodel.graph import make_graph
        >>> estimate(make_graph((), (), (), ()), KernelSpec((), (), (), (), ()), TEST_DEVICE).time_ps
        0
    """
    if is_bitcast(graph, spec) if spec.compiled is None else spec.compiled == _NOTHING:
        return Cost()
    if spec.capabilities.loop_nest:
        return nest_cost(graph, spec, device, work if isinstance(work, NestWork) else None)
    assert not isinstance(work, NestWork), "of a CPU's nest"
    if need is None:
        need = footprint(graph, spec, device)
    moved = bytes_moved(graph, spec, device)
    flops, matrix_ps = _executed(work or work_of(graph, spec), spec, device)
    hbm_bytes = moved.hbm_read_bytes + moved.hbm_write_bytes
    memory_ps = time_ps(hbm_bytes, device.hbm_bytes_per_s)
    cache_ps = time_ps(moved.loaded_bytes, device.cache_bytes_per_s)
    vector_ps = time_ps(flops.vector, device.vector_flops_per_s)
    transcendental_ps = time_ps(flops.transcendental, device.transcendental_per_s)
    launch_ps = device.launch_ps * (1 if spec.compiled is None else spec.compiled.launches)
    scan_ps = fresh = sums_ps = latency_ps = step_ps = 0
    if (
        spec.walked
    ):  # Before tiles are left out, each array is looked at for infinities (fuseplan.masks.dead_tiles).
        looked_at = {access.value for access in spec.reads}
        scan_ps = device.launch_ps * len(looked_at)
        scan_ps += time_ps(sum(graph.values[v].nbytes for v in looked_at), device.hbm_bytes_per_s)
    if not spec.axes and matrix_ps:
        products = [graph.nodes[n] for n in spec.nodes if graph.nodes[n].flops.matrix]
        if device.platform == "cpu":
            matrix_ps = sum(product_ps(graph, node, device) for node in products)
        for node in products:
            known = library_matmul(graph, node, device)
            if known is not None:
                matrix_ps, cache_ps = max(matrix_ps, known[0]), max(cache_ps, known[1])
    if device.platform == "cpu":
        fresh = fresh_ps(graph, spec, device)
        sums_ps = sum(reduction_ps(graph, graph.nodes[n], device) for n in spec.nodes)
    if spec.axes:
        tiles = steps = 1
        for axis in spec.axes:
            if axis.role == AxisRole.PARALLEL:
                tiles *= axis.n_tiles
            elif axis.role == AxisRole.STREAMED:
                steps = axis.n_tiles
        if tiles:
            cores = device.core_count
            waves = -(-tiles // cores)  # the last wave may leave cores idle (tail effect)
            matrix_ps, vector_ps, transcendental_ps = (
                -(-ps * waves * cores // tiles) for ps in (matrix_ps, vector_ps, transcendental_ps)
            )
            # A core's port to the cache (GPU) or its DMA engine (TPU) is its share of the whole.
            busy = min(tiles, cores)
            cache_ps = -(-cache_ps * cores // busy)
            if device.sequential_grid:
                memory_ps = -(-memory_ps * cores // busy)
                step_ps = waves * steps * pass_count(spec) * TPU_STEP_PS
            else:
                # Little's law: a tile's loads take at least one latency, halved by double
                # buffering over a loop; only the tiles that share a core hide one another's.
                rounds = pass_count(spec) * -(-tiles // (cores * concurrent_tiles(need, device)))
                latency_ps = rounds * max(steps // 2, 1) * HBM_LATENCY_PS
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


@dataclass(frozen=True, slots=True)
class Work:
    """What the nodes of a group compute, summed over those that carry the same axes: equal for
    all schedules that number the group's axes alike."""

    terms: tuple[tuple[NodeAxes, bool, Flops], ...]
    """Axes; whether it runs in every step of a sequential grid without carrying that axis; flops."""
    products: tuple[tuple[NodeAxes, int, str], ...]
    """Axes, flops and dtype of each contraction: they run at the rate of their first operand's."""


def work_of(graph: Graph, spec: KernelSpec) -> Work:
    """The work of ``spec`` and of every other schedule with its nodes, axes, streamed axis and
    passes."""
    again = _each_step(graph, spec)
    times = evaluations(spec) if spec.passes else ()
    terms: dict[tuple[NodeAxes, bool], Flops] = {}
    products = []
    for i, n in enumerate(spec.nodes):
        node = graph.nodes[n]
        if not node.flops.total:
            continue
        key = (spec.node_axes[i] if spec.axes else (), i in again)
        flops = node.flops.share(*times[i]) if times else node.flops
        terms[key] = terms.get(key, Flops()) + flops
        if flops.matrix:
            products.append((key[0], flops.matrix, graph.values[node.inputs[0]].dtype))
    return Work(tuple((*key, flops) for key, flops in terms.items()), tuple(products))


def _executed(work: Work, spec: KernelSpec, device: DeviceSpec) -> tuple[Flops, int]:
    """All flops executed, recomputation and padding included, and the matrix units' time."""
    matrix = vector = transcendental = matrix_ps = 0
    for own, again, flops in work.terms:
        times, per = repeat_factor(spec, own)
        if again and device.sequential_grid:
            times *= spec.axes[spec.streamed or 0].n_tiles * pass_count(spec)
        vector += -(-flops.vector * times // per)
        transcendental += -(-flops.transcendental * times // per)
    for own, product, dtype in work.products:
        times, per = repeat_factor(spec, own)
        done = -(-product * times // per)
        matrix += done
        matrix_ps += time_ps(done, device.matrix_rate(dtype))
    return Flops(matrix, vector, transcendental), matrix_ps


def _each_step(graph: Graph, spec: KernelSpec) -> frozenset[int]:
    """The nodes, by position, that do not carry the streamed axis and yet run in every step of
    it on a sequential grid: nothing but accumulators is kept from one step to the next, so
    what the loop needs is made again."""
    streamed = spec.streamed
    if streamed is None:
        return frozenset()
    carries = [any(streamed in axes for axes in own) for own in spec.node_axes]
    if carries[0] and carries == sorted(carries, reverse=True):
        return frozenset()  # as most are: a loop, then what follows from it
    needed: set[int] = set()
    again: list[int] = []
    for i in range(len(spec.nodes) - 1, -1, -1):
        node = graph.nodes[spec.nodes[i]]
        if carries[i]:
            needed.update(node.inputs)
        elif not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            again.append(i)
    return frozenset(again)


def repeat_factor(spec: KernelSpec, node_axes: NodeAxes) -> tuple[int, int]:
    """How many times over a node's flops are executed, as (numerator, denominator): once
    for each tile of a parallel axis that it does not carry, and over the padded extent of
    the axes that it does. What does not carry the streamed axis runs before or after the
    loop: once (but on a sequential grid: ``_each_step``)."""
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
