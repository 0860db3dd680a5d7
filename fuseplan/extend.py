"""Extend fuseplan: the public names for adding operations, planners, devices and backends.

- an operation: ``register_rule`` with a ``Rule``, or ``elementwise`` for elementwise ones;
- a planner: ``register_planner`` with a function from a graph, prices and a budget to a ``Grouping``, such as
  ``plan_decided`` of a function that returns groups of nodes;
- a device: a ``DeviceSpec``, passed as ``device=``;
- a backend: ``register_backend`` with a ``Backend``, whose ``emitter`` is the module that makes its kernels.

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
from fuseplan.frontend.ops import register_rule, rules
from fuseplan.frontend.ops.elementwise import elementwise
from fuseplan.frontend.ops.rule import Reduction, Rule, Space, Tile
from fuseplan.plan.fusion_plan import Kernel, PlanStats
from fuseplan.planners import (
    ProgramPlanner,
    get_planner,
    graph_colouring,
    nnc_tensorexpr,
    planner_names,
    register_planner,
)
from fuseplan.schedule.pricing import PriceBook, Pricing, PricingWrapper
from fuseplan.search.decided import plan_decided
from fuseplan.search.grouping import Budget, Grouping, PlanGroups
from fuseplan.support.errors import Verdict

__all__ = [
    "Access",
    "Axis",
    "AxisRole",
    "Backend",
    "Budget",
    "Cost",
    "DeviceSpec",
    "DimRole",
    "Flops",
    "Graph",
    "Grouping",
    "Kernel",
    "KernelSpec",
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
    "Space",
    "Tile",
    "Value",
    "Verdict",
    "backend_names",
    "backend_of",
    "elementwise",
    "get_device",
    "get_planner",
    "graph_colouring",
    "nnc_tensorexpr",
    "plan_decided",
    "planner_names",
    "register_backend",
    "register_planner",
    "register_rule",
    "rules",
]
