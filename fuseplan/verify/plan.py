"""Check a plan and its buffers, independently of the planners.

The check shares only definitions with the planners: the rules (``legality``), the cost (``costmodel``) and
the passes of a loop nest. It runs after every planner and on every plan from a file. Each message names the
kernel, the expected and the actual value. Kernels that differ only in the arrays that they work on are
checked once.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from costmodel.axes import Unifier
from costmodel.graph import Graph, Node
from costmodel.kernel import KernelSpec
from costmodel.memory import is_bitcast
from costmodel.model import CostModel
from fuseplan.frontend.compared import copies_apart
from fuseplan.memory.allocation import ALIGNMENT_BYTES, Buffer, place_buffers
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.plan.json_codec import CONTRADICTIONS, contradiction, read_plan
from fuseplan.schedule.legality import possible_prologues
from fuseplan.schedule.shared_operands import Hubs, wide_hubs
from fuseplan.support.digraph import reachable
from fuseplan.support.errors import InvalidPlanError
from fuseplan.verify.kernel import check_kernel, name_of, require


def check_plan(plan: FusionPlan) -> FusionPlan:
    """Return ``plan`` unchanged.

    Raises:
        InvalidPlanError: a kernel is illegal, the kernels cannot run in their order, a cost or the bound is
        wrong, or
            a constraint is violated.
    """
    check_cover(plan.graph, [kernel.spec.nodes for kernel in plan.kernels])
    kernel_of = {n: k for k, kernel in enumerate(plan.kernels) for n in kernel.spec.nodes}
    _check_order(plan, kernel_of)
    _check_comparisons(plan, kernel_of)
    prologues, hubs = possible_prologues(plan.graph), wide_hubs(plan.graph)
    key_of = _CheckKey(plan.graph, prologues, hubs)
    unifier = Unifier(plan.graph, plan.device.capabilities.loads_by_index)
    checked: set[Any] = set()
    for k, kernel in enumerate(plan.kernels):
        key = key_of(kernel)
        if key not in checked:
            check_kernel(plan, k, key_of.results, unifier, prologues, hubs)
            checked.add(key)
    _check_bound(plan)
    _check_constraints(plan, kernel_of)
    return plan


_NOT_CHECKED = ("id", "inputs", "outputs", "source", "scope", "signature")


class _CheckKey:
    """Returns a key that is equal for kernels with equal checks: all fields of nodes, schedule and cost that
    ``check_kernel`` uses, with values and hubs numbered by first appearance. It does not use parameters and
    literals (``signature``)."""

    _of_node = attrgetter(*(f.name for f in fields(Node) if f.name not in _NOT_CHECKED))
    _of_spec = attrgetter(*(f.name for f in fields(KernelSpec) if f.name not in ("nodes", "reads", "writes")))

    def __init__(self, graph: Graph, prologues: Sequence[bool], hubs: Hubs) -> None:
        self.graph, self.hubs = graph, hubs
        self.results = frozenset(graph.outputs)
        shapes: dict[Any, int] = {}
        arrays = [shapes.setdefault((v.shape, v.dtype), len(shapes)) for v in graph.values]
        known: dict[Any, int] = {}
        of_node = self._of_node
        self.kinds = [
            known.setdefault(
                (of_node(node), inside, *[arrays[v] for v in node.inputs + node.outputs]), len(known)
            )
            for node, inside in zip(graph.nodes, prologues, strict=True)
        ]

    def __call__(self, kernel: Kernel) -> tuple[Any, ...]:
        graph, spec = self.graph, kernel.spec
        inside = set(spec.nodes)
        number: dict[int, int] = {}
        key: list[Any] = [len(spec.nodes)]
        for n in spec.nodes:
            node = graph.nodes[n]
            key.append(self.kinds[n])
            for v in node.inputs:
                key.append(number.setdefault(v, len(number)))
                key.append(v in self.hubs.ports)
            for v in node.outputs:
                key.append(number.setdefault(v, len(number)))
                key.append(v in self.results or not inside.issuperset(graph.consumers[v]))
        for accesses in (spec.reads, spec.writes):
            key.append(len(accesses))
            for access in accesses:
                key.append(number.setdefault(access.value, len(number)))
                key.append(access.axes)
        return (*key, self._of_spec(spec), kernel.cost)


def check_cover(graph: Graph, groups: Sequence[Sequence[int]]) -> None:
    """Check that every node is computed exactly once.

    Raises:
        InvalidPlanError: it is not, or a group's nodes are not in ascending order.
    """
    n_nodes = len(graph.nodes)
    times = Counter([n for nodes in groups for n in nodes])
    unknown = [n for n in times if not 0 <= n < n_nodes]
    require(not unknown, f"the plan computes nodes {unknown[:5]}, but the graph has {n_nodes} nodes")
    twice = sorted(n for n, count in times.items() if count > 1)
    require(not twice, f"nodes {twice[:5]} are computed by more than one kernel")
    missing = [n for n in range(n_nodes) if n not in times]
    require(not missing, f"nodes {missing[:5]} are computed by no kernel")
    for k, nodes in enumerate(groups):
        if not nodes or list(nodes) != sorted(nodes):
            require(False, f"kernel {k} must list its nodes in ascending order, got {nodes}")


def _check_comparisons(plan: FusionPlan, kernel_of: dict[int, int]) -> None:
    """Check that no comparison reads copies of one value from two kernels, unless both are XLA's own."""
    for node in copies_apart(plan.graph):
        k = kernel_of[node.id]
        require(
            plan.kernels[k].spec.compiled is not None,
            f"{name_of(plan, k)}: n{node.id} {node.op} compares values that follow from two copies of one "
            "operation, which may round differently",
        )


def _check_order(plan: FusionPlan, kernel_of: dict[int, int]) -> None:
    """Check that each kernel reads only values that are computed before it, and that side effects keep their
    order."""
    graph = plan.graph
    last_effect = -1
    for k, kernel in enumerate(plan.kernels):
        for n in kernel.spec.nodes:
            node = graph.nodes[n]
            for v in node.inputs:
                producer = graph.values[v].producer
                if producer < 0 or kernel_of[producer] <= k:
                    continue
                later, where = kernel_of[producer], name_of(plan, k)
                require(
                    not _leads_to(plan, kernel_of, k, later),
                    f"{where} is not convex: it needs v{v} of kernel {later}, which waits for it",
                )
                require(False, f"{where} reads v{v}, which kernel {later} makes only later")
            if node.effects:
                where = name_of(plan, k)
                require(
                    len(kernel.spec.nodes) == 1,
                    f"{where} holds {node.op}, which has side effects and must be alone",
                )
                require(n > last_effect, f"{where} has side effects that must come before n{last_effect}'s")
                last_effect = n


def _leads_to(plan: FusionPlan, kernel_of: dict[int, int], start: int, goal: int) -> bool:
    """Whether kernel ``goal`` depends, directly or not, on kernel ``start``."""
    graph = plan.graph

    def before(k: int) -> set[int]:
        read = {v for n in plan.kernels[k].spec.nodes for v in graph.nodes[n].inputs}
        return {kernel_of[p] for v in read if (p := graph.values[v].producer) >= 0}

    return start in reachable([goal], before)


def _check_bound(plan: FusionPlan) -> None:
    objective_ps = plan.objective_ps
    require(
        plan.status in ("OPTIMAL", "FEASIBLE"), f"status must be OPTIMAL or FEASIBLE, got {plan.status!r}"
    )
    if plan.bound_ps is not None:
        require(
            plan.bound_ps <= objective_ps,
            f"the bound of {plan.bound_ps:,} ps exceeds the plan's own {objective_ps:,} ps",
        )
    require(
        plan.status != "OPTIMAL" or plan.bound_ps == objective_ps,
        f"an OPTIMAL plan of {objective_ps:,} ps needs a bound that equals it, got {plan.bound_ps}",
    )


def _check_constraints(plan: FusionPlan, kernel_of: dict[int, int]) -> None:
    """Check that the kernels obey the constraints of the plan."""
    limits = plan.constraints
    if limits is None:
        return
    most = limits.max_peak_bytes
    require(
        most is None or plan.peak_bytes <= most,
        f"temporaries need {plan.peak_bytes:,} bytes at once, max_peak_bytes allows {most}",
    )
    for together in limits.together:
        kernels = sorted({kernel_of[n] for n in together.nodes})
        require(len(kernels) <= 1, f"kernels {kernels[:5]} share what one is to hold: {together.text}")
    for k, kernel in enumerate(plan.kernels):
        spec, where = kernel.spec, name_of(plan, k)
        if len(spec.nodes) == 1:
            continue
        for apart in limits.apart:
            others = set(spec.nodes if apart.b is None else apart.b).intersection(spec.nodes)
            one = set(apart.a).intersection(spec.nodes)
            require(not (one and others) or len(one | others) == 1, f"{where}: {apart.text}")
        most = limits.max_group_size
        require(
            most is None or len(spec.nodes) <= most,
            f"{where} holds {len(spec.nodes)} operations, max_group_size allows {most}",
        )
        arrays = len({a.value for a in spec.reads}) + len({a.value for a in spec.writes})
        most = limits.max_kernel_args
        require(
            most is None or arrays <= most,
            f"{where} reads and writes {arrays} arrays, max_kernel_args allows {most}",
        )


def checked_plan_from_json(text: str, cost_model: CostModel | None = None) -> FusionPlan:
    """Read and check a plan that ``plan_to_json`` wrote, priced by ``cost_model`` if it is not None.

    Raises:
        InvalidPlanError: the text is not such a plan, or the plan is not legal; the message names the field
        or kernel.
    """
    plan = read_plan(text, cost_model)
    try:
        check_plan(plan)
    except InvalidPlanError:
        raise
    except CONTRADICTIONS as error:
        raise InvalidPlanError(f"{contradiction(error)}. Write it anew with Plan.to_json") from None
    return plan


def plan_buffers(plan: FusionPlan) -> tuple[Buffer, ...]:
    """The checked buffers of the plan's temporaries in one arena, ordered by first kernel. Takes up to 0.2
    s."""
    return check_buffers(plan, place_buffers(plan.graph, plan.kernels))


def check_buffers(plan: FusionPlan, buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
    """Return ``buffers`` unchanged.

    Raises:
        InvalidPlanError: a temporary of ``plan`` has no buffer while it is in use, or two buffers overlap at
        a time.
    """
    graph = plan.graph
    home = list(range(len(graph.values)))
    uses: dict[int, list[int]] = {}
    tiles: list[Buffer] = []
    for k, kernel in enumerate(plan.kernels):
        if is_bitcast(graph, kernel.spec):
            for node in (graph.nodes[n] for n in kernel.spec.nodes):
                for v in node.outputs:
                    home[v] = home[node.inputs[0]]
        for access in kernel.spec.reads + kernel.spec.writes:
            uses.setdefault(home[access.value], []).append(k)
        if kernel.spec.capabilities.loop_nest and kernel.cost.onchip_bytes:
            tiles.append(Buffer(-1, 0, kernel.cost.onchip_bytes, k, k))
    kept = {*graph.inputs, *(home[v] for v in graph.outputs)}
    temporaries = {v: ks for v, ks in uses.items() if v not in kept and graph.values[v].nbytes}
    expected = [Buffer(v, 0, graph.values[v].nbytes, ks[0], ks[-1]) for v, ks in temporaries.items()] + tiles
    given = [replace(b, offset_bytes=0) for b in buffers]
    odd = Counter(expected) - Counter(given) or Counter(given) - Counter(expected)
    require(not odd, f"expected a buffer for each temporary while it is in use, but for {next(iter(odd), 0)}")
    alive: list[tuple[int, int, int]] = []  # start, end and last kernel, by start
    for b in sorted(buffers, key=lambda b: b.first):
        require(b.offset_bytes >= 0 and b.offset_bytes % ALIGNMENT_BYTES == 0, f"{b} is not aligned")
        alive = [row for row in alive if row[2] >= b.first]
        at = bisect(alive, (b.offset_bytes, b.end_bytes, b.last))
        require(not at or alive[at - 1][1] <= b.offset_bytes, f"{b} overlaps what lies below it")
        require(at == len(alive) or b.end_bytes <= alive[at][0], f"{b} overlaps what lies above it")
        alive.insert(at, (b.offset_bytes, b.end_bytes, b.last))
    return buffers
