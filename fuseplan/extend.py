"""Extend and study fuseplan: the public names for adding operations, planners, devices, cost models and
backends, and for looking inside a plan.

To extend:

- an operation: ``register_rule`` with a ``Rule``, or ``elementwise`` for elementwise ones;
- a planner: ``register_planner`` with a function from a graph, prices and a budget to a ``Grouping``, such as
  ``plan_decided`` of a function that returns groups of nodes;
- a device: a ``DeviceSpec``, passed as ``device=``; ``DeviceSpec.from_toml`` reads one from a file;
- a cost model: a ``CostModel``, passed as ``cost_model=``;
- a kernel, in the place of a part of a program: a ``fuseplan.Pattern``, passed as ``patterns=``;
- a backend: ``register_backend`` with a ``Backend``, whose ``emitter`` is the module that makes its kernels.

To study:

- a program: ``lower(trace(f, *args))``, a ``Lowered``, which ``fuseplan.make_plan`` and ``fuseplan.compare``
  plan as often as one likes; ``using_cache(SolutionCache())`` plans without what earlier plans have found;
- a kernel of a plan: ``emit(kernel.spec, plan.lowered)`` is a function of arrays, and ``kernel_name`` its
  name in profiles;
- a compiler: ``compile_for`` compiles a function for a device that is not present, or raises
  ``MissingCompilerError``, and ``read_refusal`` finds the reason in the error that a compiler raises;
  ``gpu_report`` and ``tpu_report`` return the registers, spills and memory of a compiled kernel, and inside
  ``dump_cycles`` the second knows its cycles.

Example:
    >>> import jax, jax.numpy as jnp, fuseplan
    >>> from fuseplan.extend import plan_decided, register_planner
    >>> def alone(book):  # every operation is a kernel
    ...     return [[node.id] for node in book.graph.nodes]
    >>> register_planner("alone", lambda graph, pricing, budget: plan_decided(graph, pricing, alone))
    >>> x = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    >>> len(fuseplan.make_plan(jax.nn.softmax, device="h200", planner="alone")(x).kernels) > 1
    True
"""

from __future__ import annotations

from costmodel.backends import Backend, backend_names, backend_of, register_backend
from costmodel.device import DeviceSpec
from costmodel.devices import get_device
from costmodel.graph import DimRole, Flops, Graph, Node, OpKind, Value
from costmodel.kernel import Access, Axis, AxisRole, Cost, KernelSpec
from costmodel.model import CostModel
from fuseplan.codegen import emit
from fuseplan.codegen.tile import kernel_name
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.ops import register_rule, rules
from fuseplan.frontend.ops.elementwise import elementwise
from fuseplan.frontend.ops.rule import Reduction, Rule, Space, Tile
from fuseplan.frontend.trace import trace
from fuseplan.plan.fusion_plan import Kernel, PlanStats
from fuseplan.planners import (
    ProgramPlanner,
    get_planner,
    graph_colouring,
    nnc_tensorexpr,
    planner_names,
    register_planner,
)
from fuseplan.runtime.replan import read_refusal
from fuseplan.schedule.pricing import PriceBook, Pricing, PricingWrapper
from fuseplan.search.cache import SolutionCache, using_cache
from fuseplan.search.decided import plan_decided
from fuseplan.search.grouping import Budget, Grouping, PlanGroups
from fuseplan.support.errors import Verdict
from fuseplan.targets.compile_only import MissingCompilerError, compile_for
from fuseplan.targets.compiler_reports import (
    GpuReport,
    TpuReport,
    dump_cycles,
    gpu_report,
    tpu_report,
)

__all__ = [
    "Access",
    "Axis",
    "AxisRole",
    "Backend",
    "Budget",
    "Cost",
    "CostModel",
    "DeviceSpec",
    "DimRole",
    "Flops",
    "GpuReport",
    "Graph",
    "Grouping",
    "Kernel",
    "KernelSpec",
    "Lowered",
    "MissingCompilerError",
    "Node",
    "OpKind",
    "PlanGroups",
    "PlanStats",
    "PriceBook",
    "Pricing",
    "PricingWrapper",
    "ProgramPlanner",
    "Reduction",
    "Rule",
    "SolutionCache",
    "Space",
    "Tile",
    "TpuReport",
    "Value",
    "Verdict",
    "backend_names",
    "backend_of",
    "compile_for",
    "dump_cycles",
    "elementwise",
    "emit",
    "get_device",
    "get_planner",
    "gpu_report",
    "graph_colouring",
    "kernel_name",
    "lower",
    "nnc_tensorexpr",
    "plan_decided",
    "planner_names",
    "read_refusal",
    "register_backend",
    "register_planner",
    "register_rule",
    "rules",
    "tpu_report",
    "trace",
    "using_cache",
]
