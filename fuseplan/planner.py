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
from fuseplan.planners.base import MAX_GROUPS, MAX_XLA_GROUPS
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
    """Plan a graph and, where that may pay, another with large values computed again for
    distant readers; the faster plan with its graph. For XLA's loops, short rows become columns."""
    clock = clock or Clock()
    started = time.monotonic()
    again = None
    if options.device.backend == "xla" and options.planner != "unfused":
        min_bytes = least_bytes(options.device)
        lowered = clock.time("lower", lambda: by_columns(lowered, min_bytes)) or lowered
        again = clock.time("lower", lambda: recompute(lowered, min_bytes))
    plan = plan_lowered(lowered, options, clock)
    if again is not None:
        left = max(options.deadline_s - (time.monotonic() - started), 0.0)
        other = plan_lowered(again, replace(options, deadline_s=left), clock)
        bound = _lower(plan.bound_ps, other.bound_ps)
        if other.objective_ps < plan.objective_ps:
            lowered, plan = again, other
        # Proven is what holds of both graphs.
        proven = bound is not None and bound >= plan.objective_ps
        status = "OPTIMAL" if proven else "FEASIBLE"
        plan = replace(plan, bound_ps=plan.objective_ps if proven else bound, status=status)
    plan = replace(plan, stats=replace(plan.stats, seconds=tuple(clock.seconds.items())))
    report_plan(plan)
    return lowered, plan


def _lower(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else min(one, other)


def plan_lowered(lowered: Lowered, options: Options, clock: Clock | None = None) -> Plan:
    """Plan a graph: which nodes share a kernel, each kernel's schedule, and the proof."""
    clock = clock or Clock()
    graph = lowered.graph
    scheduler = Scheduler(graph, options.device, lowered, options.features)
    max_groups = MAX_XLA_GROUPS if options.device.backend == "xla" else MAX_GROUPS
    grouping = get_planner(options.planner)(graph, scheduler, Budget(options.deadline_s, max_groups))
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
