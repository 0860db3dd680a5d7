"""Planners by name: algorithms that decide which nodes of a graph share a kernel.

In: a graph and its ``schedule.pricing.Pricing``. Out: a ``search.grouping.Grouping``. ``solver`` is optimal;
``greedy``, ``best_first`` and ``unfused`` are in ``fuseplan.search``; the others follow other compilers. Open
``solver`` first.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from fuseplan.frontend.lower import Lowered
from fuseplan.planners import (
    graph_colouring,
    inductor,
    nnc_tensorexpr,
    solver,
    tvm_fuse_ops,
    xla,
    xla_priority,
)
from fuseplan.schedule.pricing import Pricing
from fuseplan.search.grouping import Budget, Grouping, PlanGroups
from fuseplan.search.heuristics import best_first, greedy, unfused
from fuseplan.support.errors import InvalidArgumentError, UnknownNameError


@dataclass(frozen=True, slots=True)
class ProgramPlanner:
    """A planner that reads another compiler's decisions from the whole program; constraints do not apply."""

    plan_program: Callable[[Lowered, DeviceSpec], tuple[Lowered, Grouping]]
    """The kernels on a device, with the program that they belong to, in which values may be recomputed."""

    def __call__(self, graph: Graph, pricing: Pricing, budget: Budget) -> Grouping:
        raise InvalidArgumentError(
            "expected a planner of graphs, got one that needs the program behind the graph: pass the "
            "function to fuseplan.make_plan"
        )


_PLANNERS: dict[str, PlanGroups] = {
    "unfused": unfused,
    "greedy": greedy,
    "best_first": best_first,
    "tvm_fuse_ops": tvm_fuse_ops.plan_groups,
    "nnc_tensorexpr": nnc_tensorexpr.make_planner(),
    "inductor": inductor.plan_groups,
    "graph_colouring": graph_colouring.plan_groups,
    "xla_priority": xla_priority.plan_groups,
    "xla": ProgramPlanner(xla.plan_program),
    "solver": solver.plan_groups,
}

_BUILT_IN = dict(_PLANNERS)


def register_planner(name: str, plan_groups: PlanGroups) -> None:
    """Make ``planner=name`` use ``plan_groups(graph, pricing, budget) -> Grouping``.

    Raises:
        InvalidArgumentError: ``plan_groups`` cannot be called.
    """
    if not callable(plan_groups):
        raise InvalidArgumentError(
            f"a planner is a function (graph, pricing, budget) -> Grouping, got {plan_groups!r}"
        )
    _PLANNERS[name] = plan_groups


def unregister_planner(name: str) -> None:
    """Forget what ``register_planner`` added: a name of fuseplan's own has fuseplan's planner again."""
    if name in _BUILT_IN:
        _PLANNERS[name] = _BUILT_IN[name]
    else:
        _PLANNERS.pop(name, None)


def get_planner(name: str) -> PlanGroups:
    """The planner of that name.

    Raises:
        UnknownNameError: there is none; the message lists the known names.
    """
    if name in _PLANNERS:
        return _PLANNERS[name]
    close = difflib.get_close_matches(name, _PLANNERS, n=1)
    did_you_mean = f" Did you mean {close[0]!r}?" if close else ""
    raise UnknownNameError(f"no planner is called {name!r}; there are {', '.join(_PLANNERS)}.{did_you_mean}")


def has_fixed_kernels(name: str) -> bool:
    """Whether the planner of that name has the kernels that the program has anyway: one for each operation,
    or those of another compiler. Neither prices nor constraints change them."""
    return name == "unfused" or isinstance(get_planner(name), ProgramPlanner)


def is_built_in(name: str) -> bool:
    """Whether the planner of that name is built in and not replaced."""
    return get_planner(name) is _BUILT_IN.get(name)


def planner_names(*, of_graphs: bool = False) -> tuple[str, ...]:
    """The names of all planners, or of those that plan a graph without its program."""
    return tuple(
        name for name, planner in _PLANNERS.items() if not (of_graphs and isinstance(planner, ProgramPlanner))
    )


__all__ = [
    "Budget",
    "Grouping",
    "PlanGroups",
    "ProgramPlanner",
    "get_planner",
    "has_fixed_kernels",
    "is_built_in",
    "planner_names",
    "register_planner",
    "unregister_planner",
]
