"""Compare planners on one program: the plan of each, as traced and rewritten, beside XLA's own plan.

Two ratios separate the sources of a gain. What *rewriting* gains is, for one planner, the time of its plan of
the program as traced over that of its best plan (``fuseplan.rewriting``). What *solving* gains is the time of
greedy's best plan over that of the solver's, both given the same rewrites.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from costmodel.device import DeviceSpec
from fuseplan.config import Options
from fuseplan.contest import Timing, time_each
from fuseplan.errors import FuseplanError, MemoryLimitError
from fuseplan.hlo.compiled import has_compiler
from fuseplan.lower import Lowered
from fuseplan.plan import Plan
from fuseplan.planner import plan_best
from fuseplan.planners import ProgramPlanner, decides_nothing, get_planner, planner_names
from fuseplan.text import all_notes, times_text

_REASON = 300
"""Characters of a reason that are kept: a compiler's message may be a page."""

NO_PLAN = "NONE"
"""The status of a planner that has made no plan; ``Compared.reason`` says why."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One planner's plan of a program, or the reason why it has none."""

    planner: str
    plan: Plan | None
    unrewritten_ps: int | None = None
    """Picoseconds of its plan of the program as traced, with ``Features(rewrites=False)``. None if it has no
    such plan, for example within ``max_peak_bytes``."""
    reason: str = ""
    """Why there is no plan."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the plan, or the reason why there is none."""
        return (self.reason,) if self.plan is None else all_notes(self.plan)

    @property
    def rewriting_gains(self) -> float | None:
        """The time of its plan of the program as traced over that of its best plan."""
        if self.plan is None or not self.plan.objective_ps or self.unrewritten_ps is None:
            return None
        return self.unrewritten_ps / self.plan.objective_ps


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


def baseline_of(plans: Iterable[Plan]) -> Plan | None:
    """The plan that speed-ups are relative to: XLA's own, which is what runs without fuseplan; without that,
    the ``unfused`` plan; else the first plan that takes any time."""
    timed = [plan for plan in plans if plan.objective_ps]
    by_name = {plan.planner: plan for plan in reversed(timed)}
    return by_name.get("xla") or by_name.get("unfused") or (timed[0] if timed else None)


def speed_up(plan: Plan | None, baseline: Plan | None) -> float | None:
    """The time of the baseline over that of a plan."""
    if plan is None or baseline is None or not plan.objective_ps:
        return None
    return baseline.objective_ps / plan.objective_ps


def solving_gains(rows: Iterable[Compared]) -> float | None:
    """The time of greedy's best plan over that of the solver's; None without both."""
    plans = {row.planner: row.plan for row in rows}
    return speed_up(plans.get("solver"), plans.get("greedy"))


def gains_text(rows: Sequence[Compared]) -> str:
    """One sentence on the gains of rewriting, one on the gain of solving; empty where neither is known."""
    rewriting = [
        f"{row.planner} {times_text(gains)}"
        for row in rows
        if row.planner in ("greedy", "solver") and (gains := row.rewriting_gains) is not None
    ]
    solving = solving_gains(rows)
    found = [f"Rewriting gains {' and '.join(rewriting)}."] if rewriting else []
    if solving is not None:
        same = "With the same rewrites,"
        if solving >= 1:
            found.append(f"{same} solving gains {times_text(solving)} over greedy.")
        else:  # a search that the deadline or the limit of counted work cut short
            found.append(f"{same} the solver's plan takes {times_text(1 / solving)} as long as greedy's.")
    return " ".join(found)
