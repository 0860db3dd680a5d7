"""Planners by name: algorithms that decide which nodes of a graph share a kernel.

In: a graph and its ``schedule.pricing.Pricing``. Out: a ``search.grouping.Grouping``. ``solver`` is optimal;
``greedy``, ``best_first`` and ``unfused`` are in ``fuseplan.search``; the others follow other compilers. Open
``solver`` first.

Other packages add planners by an entry point of the group ``fuseplan.planners``: its name is the planner's,
and it is a function ``(graph, pricing, budget) -> Grouping``, or a module that calls ``register_planner``.
Entry points are loaded when an unknown name is asked for, or all names are.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType

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
from fuseplan.support.errors import FuseplanWarning, InvalidArgumentError, UnknownNameError
from fuseplan.support.modules import import_place


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


ENTRY_POINTS = "fuseplan.planners"
"""The group of entry points by which other packages add planners."""


@cache
def _load_entry_points() -> None:
    """Register the planners of other packages, once. One that cannot be loaded, or has the name of a known
    planner, is left out with a warning."""
    for entry in entry_points(group=ENTRY_POINTS):
        problem = ""
        if entry.name in _PLANNERS:
            problem = "there is a planner of this name already"
        else:
            try:
                found = entry.load()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if callable(found):
                    register_planner(entry.name, found)
                elif not isinstance(found, ModuleType):
                    problem = f"expected a function or a module, got {found!r}"
        if problem:
            warnings.warn(
                f"the planner {entry.name!r} of the entry point {entry.value!r} is left out: {problem}",
                FuseplanWarning,
                stacklevel=3,
            )


def import_planners(place: str) -> None:
    """Import a module, or a file that ends in ``.py``, that calls ``register_planner``.

    Raises:
        UnknownNameError: there is no such module or file.
        InvalidArgumentError: it registers no planner.
    """
    is_new, before = place not in sys.modules, dict(_PLANNERS)
    import_place(place, "a module with planners as package.module or file.py")
    if is_new and before == _PLANNERS:
        raise InvalidArgumentError(
            f"expected {place} to call fuseplan.register_planner(name, plan_groups), and it registers no "
            "planner"
        )


def get_planner(name: str) -> PlanGroups:
    """The planner of that name.

    Raises:
        UnknownNameError: there is none; the message lists the known names.
    """
    if name not in _PLANNERS:
        _load_entry_points()
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
    _load_entry_points()
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
    "import_planners",
    "is_built_in",
    "planner_names",
    "register_planner",
    "unregister_planner",
]
