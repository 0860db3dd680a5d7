"""Check one kernel of a plan: its legality, its schedule and its cost.

The check of a kernel depends on its nodes, its schedule, the values that are needed outside, the operations
that may be computed inside a contraction, and the high-fan-out scalars that its nodes touch; on nothing else
of the plan. ``fuseplan.verify.plan`` checks kernels that agree in all of this once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from costmodel.axes import NodeAxes, Unifier, compose
from costmodel.graph import DimRole, Graph, Node, OpKind, boundary
from costmodel.kernel import Access, AxisRole, KernelSpec
from costmodel.onchip import footprint
from costmodel.roofline import estimate
from costmodel.xla_loops import is_one_loop
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.schedule.addressing import is_contiguous, keeps_ranks, order, regroups, whole_tile
from fuseplan.schedule.layout import contraction_axes, is_nest
from fuseplan.schedule.legality import refuse, refuse_call, refuse_loop, refuse_nest
from fuseplan.schedule.nests.multipass import program_of
from fuseplan.schedule.shared_operands import Hubs, full_size_operands
from fuseplan.support.digraph import reachable
from fuseplan.support.errors import InvalidPlanError


def check_kernel(
    plan: FusionPlan,
    k: int,
    results: frozenset[int],
    unifier: Unifier,
    prologues: Sequence[bool],
    hubs: Hubs,
) -> None:
    """Check kernel ``k`` of ``plan``.

    Args:
        plan: the plan.
        k: the position of the kernel.
        results: the results of the function.
        unifier: of the plan's graph.
        prologues: for each node, whether it may be computed inside a contraction (``possible_prologues``).
        hubs: the high-fan-out scalars of the graph.

    Raises:
        InvalidPlanError: the kernel is illegal, its schedule is impossible, or its cost is wrong.
    """
    graph, device, kernel = plan.graph, plan.device, plan.kernels[k]
    where = name_of(plan, k)
    may_pass = device.capabilities.walks_in_passes or not kernel.spec.passes
    require(may_pass, f"{where} walks a stream in passes, as no kernel of {device.backend} does")
    if kernel.spec.compiled is None:
        _check_group(graph, kernel.spec, where, hubs if device.capabilities.emits_kernels else None)
    _check_boundary(graph, kernel.spec, results, where)
    _check_axes(graph, kernel.spec, where)
    need = footprint(graph, kernel.spec, device)
    require(
        need.fits(device),
        f"{where} needs {need.onchip_bytes:,} bytes on chip and {need.register_bytes:,} bytes of "
        f"registers a tile; {device.name} has {device.onchip_bytes:,} and "
        f"{device.register_bytes:,}, of which values may use half",
    )
    cost = estimate(graph, kernel.spec, device, need)
    require(
        cost == kernel.cost,
        f"{where} claims {kernel.cost.time_ps:,} ps and {kernel.cost.hbm_bytes:,} bytes but costs "
        f"{cost.time_ps:,} ps and {cost.hbm_bytes:,} bytes on {device.name}",
    )
    nodes = kernel.spec.nodes
    if kernel.spec.compiled is not None:  # XLA decides the content of its own kernels.
        whole = not kernel.spec.capabilities.emits_kernels and not kernel.spec.axes
        require(whole, f"{where} is XLA's own and has a schedule of ours")
        return
    refused = refuse(graph, device.backend, nodes, unifier, prologues)
    refused = refused or refuse_call(graph, device.backend, nodes, boundary(graph, nodes))
    is_of_xla = device.capabilities.emits_kernels and not kernel.spec.capabilities.emits_kernels
    if is_of_xla and is_one_loop(graph, nodes):
        refused = refuse_loop(graph, nodes, device.backend)
    if is_nest(graph, kernel.spec):
        require(
            refused is not None or kernel.spec.capabilities.loop_nest,
            f"{where} walks an axis in passes beside a contraction that streams its own",
        )
        refused = refuse_nest(graph, kernel.spec.backend, nodes, unifier)
    require(refused is None, f"{where} breaks a rule: {refused}")


def require(ok: bool, what: str) -> None:
    """Raise ``InvalidPlanError`` with ``what`` unless ``ok``."""
    if not ok:
        raise InvalidPlanError(what)


def name_of(plan: FusionPlan, k: int) -> str:
    """The name of kernel ``k`` in messages."""
    nodes = plan.kernels[k].spec.nodes
    ops = [plan.graph.nodes[n].op for n in nodes[:3]]
    more = f", … {len(nodes) - 3} more" if len(nodes) > 3 else ""
    return f"kernel {k} ({', '.join(ops)}{more}; nodes {', '.join(map(str, nodes[:6]))})"


def _check_group(graph: Graph, spec: KernelSpec, where: str, hubs: Hubs | None) -> None:
    """Check that the nodes are connected, and that no opaque operation shares the kernel.

    Nodes are connected by values inside the kernel, and, in kernels with tiles, by arrays and scalars of wide
    hubs that several of them read."""
    if len(spec.nodes) == 1:
        return
    inside = set(spec.nodes)
    near: dict[int, list[int]] = {n: [] for n in inside}
    reader: dict[int, int] = {}
    for n in inside:
        node = graph.nodes[n]
        if node.kind == OpKind.OPAQUE:
            require(False, f"{where} holds {node.op}, which must be alone")
        others = [m for v in node.inputs if (m := graph.values[v].producer) in inside]
        if hubs is not None:
            shared = (*full_size_operands(graph, node), *hubs.ports.keys() & set(node.inputs))
            others += [reader.setdefault(v, n) for v in shared]
        near[n] += others
        for other in others:
            near[other].append(n)
    found = {spec.nodes[0]} | reachable(spec.nodes[:1], near.__getitem__)
    require(found == inside, f"{where} is not connected: nothing ties {sorted(inside - found)[:5]} to it")


def _check_boundary(graph: Graph, spec: KernelSpec, results: frozenset[int], where: str) -> None:
    """Check that the kernel reads exactly its live-in values and writes exactly its live-out values."""
    inside = set(spec.nodes)
    made = {v for n in inside for v in graph.nodes[n].outputs}
    live_in = {v for n in inside for v in graph.nodes[n].inputs} - made
    live_out = {v for v in made if v in results or not inside.issuperset(graph.consumers[v])}
    for verb, accesses, expected in (("reads", spec.reads, live_in), ("writes", spec.writes, live_out)):
        values = {a.value for a in accesses}
        require(
            values == expected,
            f"{where} {verb} {_names(values)}, expected {_names(expected)}",
        )
        require(len(set(accesses)) == len(accesses), f"{where} {verb} one block twice")
    require(len(spec.writes) == len(live_out), f"{where} writes a value twice")


def _names(values: set[int]) -> str:
    return ", ".join(f"v{v}" for v in sorted(values)) or "nothing"


def _check_axes(graph: Graph, spec: KernelSpec, where: str) -> None:
    """Check that the axes cover each node's iteration space, that the accesses are those of the nodes, and
    that no tile needs results of another tile."""
    require(len(spec.node_axes) == len(spec.nodes), f"{where} must give axes for each of its nodes")
    if not spec.axes:
        return
    for axis in spec.axes:
        require(axis.tile >= 1, f"{where} has an axis with tiles of {axis.tile}")
        require(
            axis.role != AxisRole.RESIDENT or axis.tile == whole_tile(axis.size, spec.backend),
            f"{where} keeps an axis of {axis.size} resident in tiles of {axis.tile}",
        )
        require(
            axis.tile == whole_tile(axis.tile, spec.backend),
            f"{where} has tiles of {axis.tile}; those of {spec.backend} kernels are powers of two",
        )
    streamed = [a for a in spec.axes if a.role == AxisRole.STREAMED]
    if spec.capabilities.loop_nest:
        _check_passes(graph, spec, where)
    else:
        require(len(streamed) <= 1, f"{where} streams {len(streamed)} axes, at most one is possible")
        (_check_passes if spec.passes else _check_loop)(graph, spec, where)
    reads: set[Access] = set()
    writes: set[Access] = set()
    outside = {a.value for a in spec.reads}
    written = {a.value for a in spec.writes}
    checked: set[object] = set()
    for n, own in zip(spec.nodes, spec.node_axes, strict=True):
        node = graph.nodes[n]
        of_reads = bool(node.flops.matrix) and outside.issuperset(node.inputs)
        # Everything that the check of a node's tiles depends on; most nodes of a kernel share it.
        key = (own, node.dims, node.roles, node.kind, node.input_maps, node.output_maps, of_reads)
        if key not in checked:
            checked.add(key)
            _check_tiles(spec, node, own, of_reads, where)
        for v, dim_map in zip(node.inputs, node.input_maps, strict=True):
            if v in outside:
                reads.add(Access(v, compose(dim_map, own)))
        for v, dim_map in zip(node.outputs, node.output_maps, strict=True):
            if v in written:
                writes.add(Access(v, compose(dim_map, own)))
    require(reads == set(spec.reads), f"{where} does not read the blocks that its nodes need")
    require(writes == set(spec.writes), f"{where} does not write the blocks that its nodes make")
    for access in spec.writes:
        for a, axis in enumerate(spec.axes):
            require(
                axis.role != AxisRole.PARALLEL or axis.n_tiles == 1 or a in access.axis_set,
                f"{where} writes v{access.value} from each of {axis.n_tiles} tiles of an axis that does "
                "not index it",
            )


def _check_tiles(spec: KernelSpec, node: Node, own: NodeAxes, of_reads: bool, where: str) -> None:
    """Check that the axes ``own`` cover the iteration space of ``node``, and that only dimensions that can be
    tiled are tiled; ``of_reads``: whether it is a contraction of arrays from memory."""
    what = f"{where}: n{node.id} {node.op}"
    require(len(own) == len(node.dims), f"{what} has {len(node.dims)} dimensions, not {len(own)}")
    for extent, axes, role in zip(node.dims, own, node.roles, strict=True):
        if role == DimRole.ADDRESSED and spec.capabilities.loads_by_index:
            require(not axes, f"{what} looks up places along {extent} elements, which has axes {axes}")
            continue
        require(
            all(0 <= a < len(spec.axes) for a in axes)
            and math.prod(spec.axes[a].size for a in axes) == extent,
            f"{what}: the axes {axes} do not make up its extent {extent}",
        )
        require(
            not role.is_whole or all(spec.axes[a].tile == spec.axes[a].size for a in axes[1:]),
            f"{what} needs {extent} elements whole, but its block has gaps between them",
        )
        for axis in (spec.axes[a] for a in axes if spec.axes[a].n_tiles > 1):
            loops = axis.role == AxisRole.STREAMED or (axis.role == AxisRole.INNER and of_reads)
            accumulates = role == DimRole.REDUCED and loops
            need = "combined" if role == DimRole.REDUCED else "whole"
            require(
                (role == DimRole.PARALLEL and axis.role != AxisRole.INNER) or accumulates,
                f"{what} needs an axis of {axis.size} {need}, but it is cut in tiles of {axis.tile}",
            )
    _check_blocks(spec, node, own, where)


def _check_blocks(spec: KernelSpec, node: Node, own: NodeAxes, where: str) -> None:
    """Check that the elements of each block of ``node`` lie where its operation, loads and stores access them
    (``fuseplan.schedule.addressing``)."""
    sizes, tiles = [axis.size for axis in spec.axes], [axis.tile for axis in spec.axes]
    counts = regroups(node)
    for v, dim_map in zip(node.inputs + node.outputs, node.input_maps + node.output_maps, strict=True):
        access = Access(v, compose(dim_map, own))
        require(
            spec.capabilities.gathers_blocks
            or all(is_contiguous(sizes, tiles, dims) for dims in access.axes),
            f"{where}: the block {list(spec.block_shape(access))} of v{v} has gaps between its elements",
        )
        require(
            not counts or keeps_ranks(sizes, tiles, order(access.axes)),
            f"{where}: n{node.id} {node.op} counts the elements of v{v} in row-major order, but its block "
            f"{list(spec.block_shape(access))} has padding between them",
        )


def _check_loop(graph: Graph, spec: KernelSpec, where: str) -> None:
    """Check that the loop of a kernel without passes reads no result that it completes, and writes nothing
    from inside."""
    streamed = spec.streamed
    if streamed is None:
        return
    complete: set[int] = set()
    for n, own in zip(spec.nodes, spec.node_axes, strict=True):
        node = graph.nodes[n]
        waits = not complete.isdisjoint(node.inputs)
        carries = any(streamed in axes for axes in own)
        require(
            not (waits and carries),
            f"{where}: n{n} {node.op} walks the streamed axis again after a reduction of it",
        )
        sums = any(
            streamed in axes and role == DimRole.REDUCED for axes, role in zip(own, node.roles, strict=True)
        )
        if waits or sums:
            complete.update(node.outputs)
    for access in spec.writes:
        require(
            streamed not in access.axis_set,
            f"{where} writes v{access.value} from inside its loop over an axis of {spec.axes[streamed].size}",
        )


def _check_passes(graph: Graph, spec: KernelSpec, where: str) -> None:
    """Check the passes and the numbers of visited tiles, and that each contraction on a tile is a product of
    two matrices (or of arrays, on a CPU)."""
    tiles = tuple(axis.tile for axis in spec.axes)
    for n, own in zip(spec.nodes, spec.node_axes, strict=True):
        node = graph.nodes[n]
        flat = (
            spec.capabilities.loop_nest or not node.flops.matrix or contraction_axes(node, own).is_flat(tiles)
        )
        require(flat, f"{where}: a tile of n{n} {node.op} is no product of two matrices")
    program = program_of(graph, spec)
    require(program is not None, f"{where} needs a result before the loops that complete it are over")
    assert program is not None
    passes = tuple(p.loop for p in program.passes)
    require(passes == spec.passes, f"{where} claims passes {spec.passes}, expected {passes}")
    every, visits = math.prod(a.n_tiles for a in spec.axes), spec.tiles_visited
    require(
        not visits or (len(visits) == len(passes) and all(1 <= n <= every for n in visits)),
        f"{where} claims to visit {visits} of {every} tiles in {len(passes)} passes",
    )
