"""The planner, all stages on one screen: trace, lower, group, schedule, check."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from fuseplan.check import check_plan
from fuseplan.config import Options
from fuseplan.debug import report_plan
from fuseplan.loops.columns import by_columns
from fuseplan.loops.nests import least_bytes
from fuseplan.loops.recompute import recompute
from fuseplan.lower import Lowered, lower
from fuseplan.plan import Plan
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule import Scheduler
from fuseplan.trace import Traced, trace


def plan_function(f: Callable[..., Any], args: Any, kwargs: Any, options: Options) -> tuple[Lowered, Plan]:
    """Trace ``f`` at the shapes of its arguments, then plan it."""
    started = time.perf_counter()
    traced = trace(f, *args, **kwargs)
    return plan_traced(traced, options, time.perf_counter() - started)


def plan_traced(traced: Traced, options: Options, trace_s: float = 0.0) -> tuple[Lowered, Plan]:
    """The flow from equations to a checked plan."""
    clock = Clock(trace_s)
    lowered = clock.time("lower", lambda: lower(traced, strict=options.strict))
    return plan_best(lowered, options, clock)


def plan_best(lowered: Lowered, options: Options, clock: Clock | None = None) -> tuple[Lowered, Plan]:
    """Plan a graph as it is and, where that may pay, as rewritten for tiled loops; the fastest
    plan with its graph."""
    clock = clock or Clock()
    started = time.monotonic()
    best = lowered, plan_lowered(lowered, options, clock)
    bounds = [best[1].bound_ps]
    for other in clock.time("lower", lambda: _rewritten(lowered, options)):
        left = max(options.deadline_s - (time.monotonic() - started), 0.0)
        plan = plan_lowered(other, replace(options, deadline_s=left), clock)
        bounds.append(plan.bound_ps)
        if plan.objective_ps < best[1].objective_ps:
            best = other, plan
    lowered, plan = best
    if len(bounds) > 1:
        # Proven is what holds of all graphs.
        bound = None if None in bounds else min(b for b in bounds if b is not None)
        proven = bound is not None and bound >= plan.objective_ps
        status = "OPTIMAL" if proven else "FEASIBLE"
        plan = replace(plan, bound_ps=plan.objective_ps if proven else bound, status=status)
    plan = replace(plan, stats=replace(plan.stats, seconds=tuple(clock.seconds.items())))
    report_plan(plan)
    return lowered, plan


def _rewritten(lowered: Lowered, options: Options) -> list[Lowered]:
    """Other graphs of the same results, where large values are computed by columns, or again
    for distant readers."""
    if options.device.backend != "xla" or options.planner == "unfused":
        return []
    min_bytes = least_bytes(options.device)
    columns = by_columns(lowered, min_bytes)
    again = recompute(columns or lowered, min_bytes)
    return [graph for graph in (columns, again) if graph is not None]


def plan_lowered(lowered: Lowered, options: Options, clock: Clock | None = None) -> Plan:
    """Plan a graph: which nodes share a kernel, each kernel's schedule, and the proof."""
    clock = clock or Clock()
    graph = lowered.graph
    scheduler = Scheduler(graph, options.device, lowered)
    grouping = get_planner(options.planner)(graph, scheduler, Budget(options.deadline_s))
    clock.add(grouping.stats.seconds)
    plan = Plan(
        graph=graph,
        device=options.device,
        planner=options.planner,
        kernels=grouping.kernels,
        refusals=grouping.refusals,
        status=grouping.status,
        bound_ps=grouping.bound_ps,
        notes=(*_without_rule(lowered), *grouping.notes),
        stats=grouping.stats,
    )
    clock.time("check", lambda: check_plan(plan))
    return replace(plan, stats=replace(plan.stats, seconds=tuple(clock.seconds.items())))


class Clock:
    """Wall-clock seconds by stage."""

    def __init__(self, trace_s: float = 0.0) -> None:
        self.seconds: dict[str, float] = {"trace": trace_s} if trace_s else {}

    def add(self, laps: Iterable[tuple[str, float]]) -> None:
        for stage, seconds in laps:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def time(self, stage: str, step: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = step()
        self.add([(stage, time.perf_counter() - started)])
        return result


def _without_rule(lowered: Lowered) -> tuple[str, ...]:
    return tuple(
        f"{name} has no rule: {count} of them left to XLA as opaque steps "
        "(fuseplan.register_rule declares one)"
        for name, count in lowered.without_rule
    )
