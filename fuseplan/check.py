"""Check a plan from scratch: nothing here shares code with the planners, but for the
statement of the rules (``legality``), of the cost (``costmodel``) and of a nest's passes.

Run after every planner and on every plan read from a file. Each message names the kernel
and says what was expected and what came.
"""

from __future__ import annotations

import math
from collections import Counter

from costmodel.axes import Unifier, compose
from costmodel.graph import DimRole, Graph, OpKind
from costmodel.kernel import Access, AxisRole, KernelSpec
from costmodel.memory import footprint
from costmodel.roofline import estimate
from fuseplan.errors import InvalidPlanError
from fuseplan.legality import refuse
from fuseplan.loops.nest import program_of
from fuseplan.plan import Plan
from fuseplan.prologues import gated


def check_plan(plan: Plan) -> Plan:
    """Return ``plan`` unchanged if every kernel is legal, they can run in the order given,
    and costs and bound are what they claim.

    Raises:
        InvalidPlanError: otherwise.
    """
    _check_cover(plan)
    _check_order(plan)
    results = frozenset(plan.graph.outputs)
    unifier = Unifier(plan.graph)
    is_gated = gated(plan.graph)
    for k, kernel in enumerate(plan.kernels):
        where = _where(plan.graph, k, kernel.spec)
        _check_group(plan.graph, kernel.spec, where)
        _check_boundary(plan.graph, kernel.spec, results, where)
        _check_axes(plan.graph, kernel.spec, where)
        need = footprint(plan.graph, kernel.spec, plan.device)
        _require(
            need.fits(plan.device),
            f"{where} needs {need.onchip_bytes:,} bytes on chip and {need.register_bytes:,} bytes of "
            f"registers a tile; {plan.device.name} has {plan.device.onchip_bytes:,} and "
            f"{plan.device.register_bytes:,}, of which values may use half",
        )
        cost = estimate(plan.graph, kernel.spec, plan.device, need)
        _require(
            cost == kernel.cost,
            f"{where} claims {kernel.cost.time_ps:,} ps and {kernel.cost.hbm_bytes:,} bytes but costs "
            f"{cost.time_ps:,} ps and {cost.hbm_bytes:,} bytes on {plan.device.name}",
        )
        backend = "loops" if kernel.spec.backend == "loops" else plan.device.backend
        refused = refuse(plan.graph, backend, kernel.spec.nodes, unifier, is_gated)
        _require(refused is None, f"{where} breaks a rule: {refused}")
    _check_bound(plan)
    return plan


def _require(ok: bool, what: str) -> None:
    if not ok:
        raise InvalidPlanError(what)


def _where(graph: Graph, k: int, spec: KernelSpec) -> str:
    ops = [graph.nodes[n].op for n in spec.nodes[:3]]
    more = f", … {len(spec.nodes) - 3} more" if len(spec.nodes) > 3 else ""
    return f"kernel {k} ({', '.join(ops)}{more}; nodes {', '.join(map(str, spec.nodes[:6]))})"


def _check_cover(plan: Plan) -> None:
    """Every node is computed exactly once."""
    n_nodes = len(plan.graph.nodes)
    times = Counter(n for kernel in plan.kernels for n in kernel.spec.nodes)
    unknown = [n for n in times if not 0 <= n < n_nodes]
    _require(not unknown, f"the plan computes nodes {unknown[:5]}, but the graph has {n_nodes} nodes")
    twice = sorted(n for n, count in times.items() if count > 1)
    _require(not twice, f"nodes {twice[:5]} are computed by more than one kernel")
    missing = [n for n in range(n_nodes) if n not in times]
    _require(not missing, f"nodes {missing[:5]} are computed by no kernel")
    for k, kernel in enumerate(plan.kernels):
        nodes = kernel.spec.nodes
        _require(
            bool(nodes) and list(nodes) == sorted(nodes),
            f"kernel {k} must list its nodes in ascending order, got {nodes}",
        )


def _check_order(plan: Plan) -> None:
    """Each kernel reads only what is there, and side effects keep their order."""
    graph = plan.graph
    kernel_of = {n: k for k, kernel in enumerate(plan.kernels) for n in kernel.spec.nodes}
    last_effect = -1
    for k, kernel in enumerate(plan.kernels):
        where = _where(graph, k, kernel.spec)
        for n in kernel.spec.nodes:
            node = graph.nodes[n]
            for v in node.inputs:
                producer = graph.values[v].producer
                if producer < 0 or kernel_of[producer] <= k:
                    continue
                later = kernel_of[producer]
                _require(
                    not _leads_to(plan, kernel_of, k, later),
                    f"{where} is not convex: it needs v{v} of kernel {later}, which waits for it",
                )
                _require(False, f"{where} reads v{v}, which kernel {later} makes only later")
            if node.effects:
                _require(
                    len(kernel.spec.nodes) == 1,
                    f"{where} holds {node.op}, which has side effects and must be alone",
                )
                _require(n > last_effect, f"{where} has side effects that must come before n{last_effect}'s")
                last_effect = n


def _leads_to(plan: Plan, kernel_of: dict[int, int], start: int, goal: int) -> bool:
    """Whether kernel ``goal`` needs, directly or not, a result of kernel ``start``."""
    graph = plan.graph
    seen, queue = {goal}, [goal]
    while queue:
        for n in plan.kernels[queue.pop()].spec.nodes:
            for v in graph.nodes[n].inputs:
                producer = graph.values[v].producer
                before = kernel_of[producer] if producer >= 0 else -1
                if before == start:
                    return True
                if before >= 0 and before not in seen:
                    seen.add(before)
                    queue.append(before)
    return False


def _check_group(graph: Graph, spec: KernelSpec, where: str) -> None:
    """Producer-consumer edges inside the kernel connect it; what must be alone is alone."""
    if len(spec.nodes) == 1:
        return
    inside = set(spec.nodes)
    for n in spec.nodes:
        _require(
            graph.nodes[n].kind != OpKind.OPAQUE, f"{where} holds {graph.nodes[n].op}, which must be alone"
        )
    near: dict[int, set[int]] = {n: set() for n in inside}
    for n in inside:
        for v in graph.nodes[n].inputs:
            producer = graph.values[v].producer
            if producer in inside:
                near[n].add(producer)
                near[producer].add(n)
    found, queue = {spec.nodes[0]}, [spec.nodes[0]]
    while queue:
        new = near[queue.pop()] - found
        found |= new
        queue += new
    _require(found == inside, f"{where} is not connected: nothing ties {sorted(inside - found)[:5]} to it")


def _check_boundary(graph: Graph, spec: KernelSpec, results: frozenset[int], where: str) -> None:
    """It reads exactly what comes from outside and writes exactly what is needed outside."""
    inside = set(spec.nodes)
    made = {v for n in inside for v in graph.nodes[n].outputs}
    live_in = {v for n in inside for v in graph.nodes[n].inputs} - made
    live_out = {v for v in made if v in results or not inside.issuperset(graph.consumers[v])}
    for verb, accesses, expected in (("reads", spec.reads, live_in), ("writes", spec.writes, live_out)):
        values = {a.value for a in accesses}
        _require(
            values == expected,
            f"{where} {verb} {_names(values)}, expected {_names(expected)}",
        )
        _require(len(set(accesses)) == len(accesses), f"{where} {verb} one block twice")
    _require(len(spec.writes) == len(live_out), f"{where} writes a value twice")


def _names(values: set[int]) -> str:
    return ", ".join(f"v{v}" for v in sorted(values)) or "nothing"


def _check_axes(graph: Graph, spec: KernelSpec, where: str) -> None:
    """The axes cover each node's iteration space, the accesses are those of the nodes, and
    no tile needs what another tile computes."""
    _require(len(spec.node_axes) == len(spec.nodes), f"{where} must give axes for each of its nodes")
    if not spec.axes:
        return
    for axis in spec.axes:
        _require(axis.tile >= 1, f"{where} has an axis with tiles of {axis.tile}")
        _require(
            axis.role != AxisRole.RESIDENT or axis.tile >= axis.size,
            f"{where} keeps an axis of {axis.size} resident in tiles of {axis.tile}",
        )
    streamed = [a for a in spec.axes if a.role == AxisRole.STREAMED]
    if spec.backend == "loops":
        _check_passes(graph, spec, where)
    else:
        _require(len(streamed) <= 1, f"{where} streams {len(streamed)} axes, at most one is possible")
        _check_loop(graph, spec, where)
    reads: set[Access] = set()
    writes: set[Access] = set()
    outside = {a.value for a in spec.reads}
    written = {a.value for a in spec.writes}
    for n, own in zip(spec.nodes, spec.node_axes, strict=True):
        node = graph.nodes[n]
        _require(len(own) == len(node.dims), f"{where}: n{n} has {len(node.dims)} dimensions, not {len(own)}")
        for extent, axes, role in zip(node.dims, own, node.roles, strict=True):
            _require(
                all(0 <= a < len(spec.axes) for a in axes)
                and math.prod(spec.axes[a].size for a in axes) == extent,
                f"{where}: the axes {axes} of n{n} do not make up its extent {extent}",
            )
            for axis in (spec.axes[a] for a in axes if spec.axes[a].n_tiles > 1):
                accumulates = role == DimRole.REDUCED and axis.role == AxisRole.STREAMED
                need = "combined" if role == DimRole.REDUCED else "whole"
                _require(
                    role == DimRole.PARALLEL or accumulates,
                    f"{where}: n{n} {node.op} needs an axis of {axis.size} {need}, but it is cut in tiles "
                    f"of {axis.tile}",
                )
        reads |= {
            Access(v, compose(m, own))
            for v, m in zip(node.inputs, node.input_maps, strict=True)
            if v in outside
        }
        writes |= {
            Access(v, compose(m, own))
            for v, m in zip(node.outputs, node.output_maps, strict=True)
            if v in written
        }
    _require(reads == set(spec.reads), f"{where} does not read the blocks that its nodes need")
    _require(writes == set(spec.writes), f"{where} does not write the blocks that its nodes make")
    for access in spec.writes:
        for a, axis in enumerate(spec.axes):
            _require(
                axis.role != AxisRole.PARALLEL or axis.n_tiles == 1 or a in access.axis_set,
                f"{where} writes v{access.value} from each of {axis.n_tiles} tiles of an axis that does "
                "not index it",
            )


def _check_loop(graph: Graph, spec: KernelSpec, where: str) -> None:
    """The one loop of a kernel needs no result that it completes, and what it makes on each
    tile stays inside."""
    streamed = spec.streamed
    if streamed is None:
        return
    complete: set[int] = set()
    for n, own in zip(spec.nodes, spec.node_axes, strict=True):
        node = graph.nodes[n]
        waits = not complete.isdisjoint(node.inputs)
        carries = any(streamed in axes for axes in own)
        _require(
            not (waits and carries),
            f"{where}: n{n} {node.op} walks the streamed axis again after a reduction of it",
        )
        sums = any(
            streamed in axes and role == DimRole.REDUCED for axes, role in zip(own, node.roles, strict=True)
        )
        if waits or sums:
            complete.update(node.outputs)
    for access in spec.writes:
        _require(
            streamed not in access.axis_set,
            f"{where} writes v{access.value} from inside its loop over an axis of {spec.axes[streamed].size}",
        )


def _check_passes(graph: Graph, spec: KernelSpec, where: str) -> None:
    """A loop nest has the passes that it claims, and skips no more tiles than there are."""
    program = program_of(graph, spec)
    _require(program is not None, f"{where} needs a result before the loops that complete it are over")
    assert program is not None
    passes = tuple(p.loop for p in program.passes)
    _require(passes == spec.passes, f"{where} claims passes {spec.passes}, expected {passes}")
    every = math.prod(a.n_tiles for a in spec.axes)
    _require(
        not spec.walked or (len(spec.walked) == len(passes) and all(1 <= n <= every for n in spec.walked)),
        f"{where} claims to walk {spec.walked} of {every} tiles in {len(passes)} passes",
    )


def _check_bound(plan: Plan) -> None:
    _require(
        plan.status in ("OPTIMAL", "FEASIBLE"), f"status must be OPTIMAL or FEASIBLE, got {plan.status!r}"
    )
    if plan.bound_ps is not None:
        _require(
            plan.bound_ps <= plan.objective_ps,
            f"the bound of {plan.bound_ps:,} ps exceeds the plan's own {plan.objective_ps:,} ps",
        )
    _require(
        plan.status != "OPTIMAL" or plan.bound_ps == plan.objective_ps,
        f"an OPTIMAL plan of {plan.objective_ps:,} ps needs a bound that equals it, got {plan.bound_ps}",
    )
