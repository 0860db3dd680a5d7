"""Plan one program by several planners, as traced and rewritten, and time what they make."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from costmodel.device import DeviceSpec
from fuseplan.frontend.lower import Lowered
from fuseplan.pipeline import plan_best
from fuseplan.plan.options import Options
from fuseplan.planners import ProgramPlanner, decides_nothing, get_planner, planner_names
from fuseplan.planners.hlo.compiled import has_compiler
from fuseplan.report.comparison import Compared, Timing
from fuseplan.runtime.compare_timing import time_each
from fuseplan.support.errors import FuseplanError, MemoryLimitError

_REASON = 300
"""Characters of a reason that are kept: a compiler's message may be a page."""


def default_planners(device: DeviceSpec) -> tuple[str, ...]:
    """Every planner of graphs, and XLA's own plan if its compiler for the device is installed."""
    graphs = planner_names(of_graphs=True)
    return tuple(name for name in planner_names() if name in graphs or has_compiler(device))


def compare_plan(lowered: Lowered, options: Options) -> Compared:
    """Plan a program by one planner, rewritten and as traced. Where XLA fails to compile it, or another
    process holds its compiler, the row has no plan but the reason."""
    is_compiled = isinstance(get_planner(options.planner), ProgramPlanner)
    try:
        plan = plan_best(lowered, options)[1]
    except Exception as error:
        if not is_compiled:
            raise
        kind = "" if isinstance(error, FuseplanError) else f"{type(error).__name__}: "
        reason = textwrap.shorten(kind + str(error), _REASON, placeholder=" …")
        return Compared(options.planner, None, reason=reason)
    if decides_nothing(options.planner) or not options.features.rewrites:
        return Compared(options.planner, plan, plan.objective_ps)
    as_traced = replace(options, features=replace(options.features, rewrites=False))
    try:
        return Compared(options.planner, plan, plan_best(lowered, as_traced)[1].objective_ps)
    except MemoryLimitError:
        return Compared(options.planner, plan)


def time_rows(
    f: Callable[..., Any], args: Any, kwargs: Any, options: Sequence[Options], rows: Sequence[Compared]
) -> Iterator[Timing]:
    """For each of ``rows``, its program timed here; an empty timing where there is no plan."""
    planned = [option for option, row in zip(options, rows, strict=True) if row.plan is not None]
    running = time_each(f, args, kwargs, planned)
    return (Timing() if row.plan is None else next(running) for row in rows)
