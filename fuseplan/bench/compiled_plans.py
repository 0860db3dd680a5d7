"""Compare a plan's kernels with those of the module that XLA compiles of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from costmodel.graph import Graph, OpKind
from costmodel.roofline import scan_launches
from costmodel.xla_loops import is_one_loop
from fuseplan.codegen import emit
from fuseplan.codegen.single_pass import live_ins
from fuseplan.codegen.xla import apart, read_apart
from fuseplan.frontend.trace import Literal, literal_array, run_equations
from fuseplan.planners.hlo.kernels import HloKernel, read_kernels
from fuseplan.planners.hlo.module import SCOPE, read_module
from fuseplan.public_plan import Plan
from fuseplan.targets.compile_only import compile_for


class KernelCounts(NamedTuple):
    """How many of a plan's kernels a compiled module has, without those that only rename arrays."""

    kernels: int
    as_planned: int
    """Kernels of which the module's kernels compute nothing else, and are as many as planned."""
    merged: int
    """Kernels of whose operations a kernel of the module computes others, too."""
    divided: int
    """The other kernels, of which there are more, or fewer, in the module than were planned."""
    beside: int
    """Kernels of the module that compute nothing of the plan, such as copies."""


def count_compiled_kernels(plan: Plan) -> KernelCounts:
    """Compile a plan's program for its device, which need not be present, and compare the module's kernels
    with the plan's. Needs the extra ``aot``.

    Raises:
        MissingCompilerError: it is not installed.
    """
    graph, found = plan.graph, [made for made in compiled_kernels(plan) if not made.is_scalar]
    own = {n: k for k, kernel in enumerate(plan.kernels) for n in kernel.spec.nodes}
    hosts: dict[int, set[int]] = {}
    """For each operation as traced, the kernels that compute a copy of it."""
    for n, k in own.items():
        hosts.setdefault(_origin(graph, n), set()).add(k)
    alone: dict[int, list[bool]] = {k: [] for k, kernel in enumerate(plan.kernels) if kernel.cost.time_ps}
    """For each kernel, without those that only rename arrays, whether each of the module's kernels that
    compute any of it computes nothing else."""
    for made in found:
        named = Counter(own[n] for n in made.works_on)
        # XLA computes equal operations once, and gives them the name of one.
        whole = [k for k in named if all(k in hosts[_origin(graph, n)] for n in made.works_on)]
        for k in [max(whole, key=named.__getitem__)] if whole else named:
            if k in alone:
                alone[k].append(bool(whole))
    merged = sum(not all(each) for each in alone.values())
    divided = sum(all(each) and not _has_launches(plan, k, len(each)) for k, each in alone.items())
    beside = sum(not made.works_on for made in found)
    # XLA's copies have no name. They stand for the steps that only move data, as many as there are.
    copies = min(beside, sum(not each and _moves(plan, k) for k, each in alone.items()))
    divided, beside = divided - copies, beside - copies
    return KernelCounts(len(alone), len(alone) - merged - divided, merged, divided, beside)


def _moves(plan: Plan, k: int) -> bool:
    return all(plan.graph.nodes[n].kind == OpKind.INJECTIVE for n in plan.kernels[k].spec.nodes)


def _origin(graph: Graph, n: int) -> int:
    return graph.origins[n] if graph.origins else n


def _has_launches(plan: Plan, k: int, n: int) -> bool:
    """Whether kernel ``k`` was planned as ``n`` launches. One operation of XLA's, such as a sort, may take
    any number."""
    kernel = plan.kernels[k]
    is_step = kernel.spec.backend == "xla" and not is_one_loop(plan.graph, kernel.spec.nodes)
    if is_step:
        return n > 0
    planned = kernel.cost.launch_ps // plan.device.launch_ps
    # XLA reads an array once that several kernels scan for infinities.
    return planned <= n <= planned + scan_launches(kernel.spec, plan.device)


def compiled_kernels(plan: Plan) -> tuple[HloKernel, ...]:
    """The kernels of the module that XLA makes of a plan. Each names the nodes of the plan that it computes;
    one of Pallas' names its first."""
    program, run = plan.lowered, _labelled(plan)
    avals = [program.avals[v] for v in program.graph.inputs[len(program.consts) :]]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    compiled = compile_for(lambda *args: run(*program.consts, *args), *shapes, device=plan.device.name)
    (module,) = compiled.runtime_executable().hlo_modules()
    return read_kernels(read_module(module.as_serialized_hlo_module_proto()))


def _labelled(plan: Plan) -> Callable[..., list[Any]]:
    """The plan's kernels as a function of flat arrays, each node or kernel of Pallas' in a named scope with
    its number."""
    program = plan.lowered
    barriers = apart(program.graph, plan.kernels, plan.device)

    def run(*flat: Any) -> list[Any]:
        values: dict[int, Any] = dict(zip(program.graph.inputs, flat, strict=True))
        last: dict[int, Any] = {}
        for kernel, behind in zip(plan.kernels, barriers, strict=True):
            spec = kernel.spec
            if spec.backend == "xla":
                own = values | read_apart(values, behind, last)
                for n in spec.nodes:
                    with jax.named_scope(f"{SCOPE}{n}"):
                        run_equations([program.equations[n]], own)
                values.update((access.value, own[access.value]) for access in spec.writes)
                continue
            with jax.named_scope(f"{SCOPE}{spec.nodes[0]}"):
                results = emit(spec, program)(*(values[v] for v in live_ins(spec)))
            values.update(zip((access.value for access in spec.writes), results, strict=True))
        return [literal_array(o) if isinstance(o, Literal) else values[o] for o in program.outputs]

    return run
