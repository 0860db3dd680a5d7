"""Planners by name: each decides which nodes share a kernel, by another algorithm."""

from __future__ import annotations

import difflib

from fuseplan.errors import InvalidArgumentError, UnknownNameError
from fuseplan.planners import (
    best_first,
    graph_colouring,
    greedy,
    inductor,
    nnc_tensorexpr,
    solver,
    tvm_fuse_ops,
    unfused,
    xla_priority,
)
from fuseplan.planners.base import Budget, Grouping, PlanGroups

_PLANNERS: dict[str, PlanGroups] = {
    "unfused": unfused.plan_groups,
    "greedy": greedy.plan_groups,
    "best_first": best_first.plan_groups,
    "tvm_fuse_ops": tvm_fuse_ops.plan_groups,
    "nnc_tensorexpr": nnc_tensorexpr.make_planner(),
    "inductor": inductor.plan_groups,
    "graph_colouring": graph_colouring.plan_groups,
    "xla_priority": xla_priority.plan_groups,
    "solver": solver.plan_groups,
}


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


def get_planner(name: str) -> PlanGroups:
    """The planner of that name.

    Raises:
        UnknownNameError: there is none; the message lists those that there are.
    """
    if name in _PLANNERS:
        return _PLANNERS[name]
    close = difflib.get_close_matches(name, _PLANNERS, n=1)
    did_you_mean = f" Did you mean {close[0]!r}?" if close else ""
    raise UnknownNameError(f"no planner is called {name!r}; there are {', '.join(_PLANNERS)}.{did_you_mean}")


def planner_names() -> tuple[str, ...]:
    """Every planner, the peers first."""
    return tuple(_PLANNERS)


__all__ = ["Budget", "Grouping", "PlanGroups", "get_planner", "planner_names", "register_planner"]
