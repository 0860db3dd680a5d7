"""Emit a group for XLA: its equations on whole arrays, one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from costmodel.device import DeviceSpec
from costmodel.graph import Graph, Node, OpKind
from costmodel.kernel import KernelSpec
from costmodel.roofline import estimate
from costmodel.split_products import contracted_parts
from fuseplan.codegen.single_pass import live_ins
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import evaluator
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.layout import whole_array_spec
from fuseplan.schedule.legality import refuse_loop


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The group as a function that XLA compiles; see ``fuseplan.codegen.emit``."""
    equations = [lowered.equations[n] for n in spec.nodes]
    group = evaluator(equations, live_ins(spec), [w.value for w in spec.writes])
    return lambda *arrays: tuple(group(*arrays))


def apart(graph: Graph, kernels: Sequence[Kernel], device: DeviceSpec) -> list[tuple[int, ...]]:
    """For each kernel, the values that it reads behind a barrier, so that XLA runs the groups that are left
    to it as they were planned.

    XLA would merge a group with the one that makes an array that it reads, and products or loops that read
    the same array. It may, where one loop of both is known to be faster. The results of a product in parts
    are read without a barrier: their reader adds them up. So are those of convolutions, of which it is not
    known what XLA merges with them, and of groups that only move data, which may cost nothing where they are
    read.
    """
    last: dict[int, Kernel] = {}
    """For each value, the last kernel that makes or reads it, of those that XLA could merge with a reader."""
    found = []
    for kernel in kernels:
        computes = _computes(graph, kernel.spec, device)
        others = {v: last[v] for v in live_ins(kernel.spec) if v in last} if computes else {}
        gains = {id(other): _gains(graph, other, kernel, device) for other in others.values()}
        found.append(tuple([v for v, other in others.items() if not gains[id(other)]]))
        if not computes:
            continue
        last.update((v, kernel) for v in live_ins(kernel.spec) if graph.values[v].size > 1)
        if not any(_leaves_to_reader(graph, graph.nodes[n], device) for n in kernel.spec.nodes):
            last.update((access.value, kernel) for access in kernel.spec.writes)
    return found


def _leaves_to_reader(graph: Graph, node: Node, device: DeviceSpec) -> bool:
    """Whether the reader of a product may do a part of it, or it is not known what XLA merges with it."""
    if node.kind != OpKind.OUT_ELEMENTWISE_FUSABLE:
        return False
    can = device.capabilities
    is_known = node.op in can.loop_products or (node.op == "dot_general" and can.fuses_epilogues)
    return not is_known or contracted_parts(graph, node, device) > 1


def _gains(graph: Graph, one: Kernel, other: Kernel, device: DeviceSpec) -> bool:
    """Whether XLA makes one loop of two groups, which is faster than both."""
    nodes = tuple(sorted((*one.spec.nodes, *other.spec.nodes)))
    if refuse_loop(graph, nodes, device.backend) is not None:
        return False
    merged = estimate(graph, whole_array_spec(graph, nodes), device)
    return merged.time_ps < one.cost.time_ps + other.cost.time_ps


def _computes(graph: Graph, spec: KernelSpec, device: DeviceSpec) -> bool:
    """Whether XLA makes a kernel of a group that does more than move data, which is no kernel of XLA's own
    plan."""
    is_left = device.capabilities.is_compiled_apart and not spec.capabilities.emits_kernels
    return (
        is_left and spec.compiled is None and any(graph.nodes[n].kind != OpKind.INJECTIVE for n in spec.nodes)
    )


def read_apart(values: Mapping[int, Any], behind: Sequence[int], last: dict[int, Any]) -> dict[int, Any]:
    """The values ``behind`` a barrier, each behind one more than its last reader had, which is in ``last``:
    XLA takes equal barriers for one."""
    last.update((v, jax.lax.optimization_barrier(last.get(v, values[v]))) for v in behind)
    return {v: last[v] for v in behind}
