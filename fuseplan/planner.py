"""The planner, all stages on one screen: trace, lower, group, schedule, order, check."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from costmodel.graph import Graph
from fuseplan.again import Answer, plan_again
from fuseplan.atoms import plan_constrained, require_possible
from fuseplan.check import check_plan
from fuseplan.clock import Clock
from fuseplan.collector import collector_at_rest
from fuseplan.config import Options
from fuseplan.constraints import Resolved
from fuseplan.debug import report_plan
from fuseplan.errors import ConstraintError, InvalidArgumentError, InvalidPlanError, MemoryLimitError
from fuseplan.loops.columns import by_columns
from fuseplan.loops.offered import least_bytes
from fuseplan.loops.recompute import recompute
from fuseplan.loops.splits import split_sums
from fuseplan.loops.streams import along_streams, with_less_memory
from fuseplan.lower import Lowered, lower
from fuseplan.memory.again import Within
from fuseplan.memory.least import least_peak_of_any
from fuseplan.memory.limit import plan_within
from fuseplan.memory.order import least_peak
from fuseplan.plan import Plan, already_optimal
from fuseplan.planners import Budget, Grouping, PlanGroups, ProgramPlanner, decides_nothing, get_planner
from fuseplan.planners.base import left_s
from fuseplan.planners.packs import with_packs
from fuseplan.pricing import PriceBook, Pricing
from fuseplan.repeated import with_repeats
from fuseplan.schedule import Scheduler
from fuseplan.selectors import resolve
from fuseplan.text import bytes_text
from fuseplan.trace import Flat, trace

_STREAMS = 5
"""How many times as long as to lower a program it takes to find what is computed again for each axis (a
training step of GPT-2 of 24 layers: 5)."""


def plan_function(f: Callable[..., Any], args: Any, kwargs: Any, options: Options) -> tuple[Lowered, Plan]:
    """Trace ``f`` at the shapes of its arguments, then plan it."""
    started = time.perf_counter()
    traced = trace(f, *args, **kwargs)
    return plan_traced(traced, options, time.perf_counter() - started)


@collector_at_rest()
def plan_traced(traced: Flat, options: Options, trace_s: float = 0.0) -> tuple[Lowered, Plan]:
    """The flow from equations to a checked plan."""
    clock = Clock(trace_s)
    lowered = clock.time("lower", lambda: lower(traced, strict=options.strict))
    return plan_best(lowered, options, clock)


@collector_at_rest()
def plan_best(lowered: Lowered, options: Options, clock: Clock | None = None) -> tuple[Lowered, Plan]:
    """Plan a program; the plan with the program that it is of, in which some values are computed
    again. For XLA's loops, short rows become columns, and another program, with large values computed
    again for distant readers, is planned too; for kernels, that is part of the decision.

    Raises:
        MemoryLimitError: none was found that keeps to the constraints.
    """
    clock = clock or Clock()
    # Lowering cannot be cut short, and neither can the heuristics: the deadline is for all of them.
    expires_at = time.monotonic() + options.deadline_s - clock.seconds.get("lower", 0.0)
    whole, scheduler, again = lowered, None, None
    if options.device.backend == "xla" and not decides_nothing(options.planner):
        min_bytes = least_bytes(options.device)
        columns = _possible(clock.time("lower", lambda: by_columns(lowered, min_bytes)), options)
        lowered, scheduler = columns or (lowered, None)
        if options.features.recompute and options.features.loop_nests:
            again = _possible(clock.time("lower", lambda: recompute(lowered, min_bytes)), options)
    elif _may_stream(options, clock.seconds.get("lower", 0.0)):
        found = clock.time("streams", lambda: _for_kernels(lowered, options))
        lowered, scheduler = _possible(found, options) or (lowered, None)
    # Within a limit, time is left for programs that need less memory.
    has_leaner = _has_limit(options) and _may_stream(options, clock.seconds.get("lower", 0.0))
    lowered, plan = _attempt(lowered, _until(expires_at, options, 1 + has_leaner), clock, scheduler)
    if again is not None:
        _, other = _attempt(again[0], _until(expires_at, options), clock, again[1])
        if isinstance(plan, MemoryLimitError) and isinstance(other, MemoryLimitError):
            plan = plan.joined(other)
        else:
            if _time_ps(other) < _time_ps(plan):
                lowered, plan, other = again[0], other, plan
            assert isinstance(plan, Plan), "one of the two is a plan, and takes less than forever"
            # Proven is what holds of both graphs.
            bound = plan.bound_ps if _is_impossible(other) else _lower(plan.bound_ps, other.bound_ps)
            proven = bound is not None and bound >= plan.objective_ps
            status = "OPTIMAL" if proven else "FEASIBLE"
            plan = replace(plan, bound_ps=plan.objective_ps if proven else bound, status=status)
            if not proven:  # What is optimal for one graph need not be for both.
                known = already_optimal(plan.stats.certified)
                plan = replace(plan, notes=tuple(note for note in plan.notes if note != known))
                plan = replace(plan, stats=replace(plan.stats, certified=""))
    if isinstance(plan, MemoryLimitError) and has_leaner:
        lowered, plan = _within_less(whole, plan, options, expires_at, clock)
    if isinstance(plan, MemoryLimitError):
        raise plan
    plan = replace(plan, stats=replace(plan.stats, seconds=tuple(clock.seconds.items())))
    report_plan(plan)
    return lowered, plan


def _within_less(
    lowered: Lowered, error: MemoryLimitError, options: Options, expires_at: float, clock: Clock
) -> tuple[Lowered, Plan | MemoryLimitError]:
    """The fastest plan of the programs that need less memory than ``lowered``, which has none."""
    best: tuple[Lowered, Plan | MemoryLimitError] = lowered, error
    programs = [_possible(p, options) for p in with_less_memory(lowered, options.device, options.features)]
    for shares, possible in zip(range(len(programs), 0, -1), programs, strict=True):
        if possible is None or _needs_more(*possible, options, expires_at):
            continue
        program, plan = _attempt(possible[0], _until(expires_at, options, shares), clock, possible[1])
        if _time_ps(plan) < _time_ps(best[1]):
            best = program, plan
    return best


def _needs_more(lowered: Lowered, scheduler: Scheduler | None, options: Options, expires_at: float) -> bool:
    """Whether no plan of a program keeps to ``options.constraints.max_peak_bytes``, whatever it groups."""
    limit = options.constraints.max_peak_bytes if options.constraints is not None else None
    scheduler = scheduler or Scheduler(lowered.graph, options.device, lowered, options.features)
    book = PriceBook(lowered.graph, scheduler)
    return limit is not None and least_peak_of_any(lowered.graph, book, expires_at) > limit


def _for_kernels(lowered: Lowered, options: Options) -> Lowered | None:
    """The program as kernels gain by it: sums in steps, and large values computed again."""
    split = split_sums(lowered, options.device, options.features)
    return along_streams(split or lowered, options.device, options.features) or split


def _possible(lowered: Lowered | None, options: Options) -> tuple[Lowered, Scheduler | None] | None:
    """A rewritten graph, unless the constraints cannot hold there; with the scheduler that was asked."""
    if lowered is None or options.constraints is None:
        return None if lowered is None else (lowered, None)
    scheduler = Scheduler(lowered.graph, options.device, lowered, options.features)
    try:
        require_possible(resolve(options.constraints, lowered), lowered.graph, scheduler)
    except ConstraintError:
        return None
    return lowered, scheduler


def _has_limit(options: Options) -> bool:
    return options.constraints is not None and options.constraints.max_peak_bytes is not None


def _until(expires_at: float, options: Options, shares: int = 1) -> Options:
    """``options`` with the time that is left, or one of ``shares`` of it: never 0 where more was asked
    for, so that the notes do not say that it was 0."""
    left = left_s(expires_at) / shares if options.deadline_s > 0 else 0.0
    return replace(options, deadline_s=left)


def _attempt(
    lowered: Lowered, options: Options, clock: Clock, scheduler: Scheduler | None
) -> tuple[Lowered, Plan | MemoryLimitError]:
    try:
        return plan_lowered(lowered, options, clock, scheduler)
    except MemoryLimitError as error:
        return lowered, error


def _time_ps(plan: Plan | MemoryLimitError) -> float:
    return plan.objective_ps if isinstance(plan, Plan) else math.inf


def _is_impossible(plan: Plan | MemoryLimitError) -> bool:
    return isinstance(plan, MemoryLimitError) and plan.limit_bytes < plan.least_bytes


def _lower(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else min(one, other)


def plan_lowered(
    lowered: Lowered, options: Options, clock: Clock | None = None, scheduler: Scheduler | None = None
) -> tuple[Lowered, Plan]:
    """Plan a program: which operations share a kernel, which are computed again for whom, each kernel's
    schedule, and the proof; with the program that the plan is of."""
    clock = clock or Clock()
    expires_at = time.monotonic() + options.deadline_s
    graph = lowered.graph
    limits = resolve(options.constraints, lowered) if options.constraints is not None else None
    planner = get_planner(options.planner)
    if isinstance(planner, ProgramPlanner):
        answer = Answer(*planner.plan_program(lowered, options.device), limits)
        clock.add(answer.grouping.stats.seconds)
    else:
        if scheduler is None:
            scheduler = clock.time(
                "lower", lambda: Scheduler(graph, options.device, lowered, options.features)
            )
        answer = _grouped(lowered, scheduler, limits, options, expires_at, clock)
    lowered, grouping, limits = answer.lowered, answer.grouping, answer.limits
    graph = lowered.graph
    if _may_pack(options) and time.monotonic() < expires_at:
        if scheduler is None or graph is not scheduler.graph:
            scheduler = Scheduler(graph, options.device, lowered, options.features)
        apart, pricing = grouping, scheduler
        grouping = clock.time("packs", lambda: with_packs(graph, pricing, apart, expires_at))
    kernels = grouping.kernels
    if not grouping.is_ordered:
        order = clock.time("order", lambda: least_peak(graph, kernels, expires_at=expires_at))
        kernels = order.kernels
    plan = Plan(
        graph=graph,
        device=options.device,
        planner=options.planner,
        kernels=kernels,
        refusals=grouping.refusals,
        status=grouping.status,
        bound_ps=grouping.bound_ps,
        notes=(*_switched_off(options), *_without_rule(lowered), *grouping.notes),
        stats=grouping.stats,
        features=options.features,
        proof=grouping.proof,
    )
    if limits is not None:
        plan = _with_limits(plan, limits)
    try:
        clock.time("check", lambda: check_plan(plan))
    except InvalidPlanError as error:
        raise InvalidPlanError(f"the planner {options.planner!r} makes no legal plan: {error}") from error
    return lowered, replace(plan, stats=replace(plan.stats, seconds=tuple(clock.seconds.items())))


def _grouped(
    lowered: Lowered,
    scheduler: Scheduler,
    limits: Resolved | None,
    options: Options,
    expires_at: float,
    clock: Clock,
) -> Answer:
    """The kernels within ``limits``, and the program that they are of, in which some values may be
    computed again."""
    planner = partial(_planner, options)
    budget = Budget(_until(expires_at, options).deadline_s, solved=set())
    if not _may_recompute(options):
        grouping = planner(limits)(lowered.graph, scheduler, budget)
        clock.add(grouping.stats.seconds)
        if grouping.repeats and limits is None and options.features.recompute:
            return clock.time("copies", lambda: with_repeats(lowered, scheduler, grouping.repeats))
        return Answer(lowered, grouping, limits)
    free = None if limits is None else replace(limits, max_peak_bytes=None)
    once = planner(free)(lowered.graph, scheduler, budget)
    clock.add(once.stats.seconds)
    left = replace(budget, deadline_s=left_s(expires_at))
    answer = plan_again(lowered, scheduler, planner, once, left, clock, free)
    if limits is None or limits.max_peak_bytes is None:
        return answer
    until = _until(expires_at, options)
    within = Within(lowered, scheduler, planner, limits, limits.max_peak_bytes, until, clock)
    return within.plan(once, answer)


def _may_recompute(options: Options) -> bool:
    """Whether the solver also decides what kernels compute again."""
    decides = options.planner == "solver" and options.features.recompute and options.deadline_s > 0
    return decides and options.device.backend != "xla"


def _may_stream(options: Options, lower_s: float) -> bool:
    """Whether large values may be computed again before the search, which no deadline can cut short."""
    has_time = options.deadline_s >= _STREAMS * lower_s
    return _may_recompute(options) and options.features.loop_nests and has_time


def _may_pack(options: Options) -> bool:
    """Whether small kernels that a scalar ties together become one. XLA's own loops on a CPU are
    launched for next to nothing, and constraints are about groups that hold together."""
    decides = options.planner == "solver" and options.features.packs and options.deadline_s > 0
    return decides and options.device.backend != "xla" and options.constraints is None


def _with_limits(plan: Plan, limits: Resolved) -> Plan:
    """``plan`` with notes on what of the constraints it does not hold to."""
    if isinstance(get_planner(plan.planner), ProgramPlanner):
        note = f"constraints do not hold: the planner {plan.planner!r} decides nothing"
        return replace(plan, notes=(*plan.notes, note))
    notes = []
    if plan.planner == "unfused" and limits.together:
        notes.append("must_fuse does not hold: the planner 'unfused' leaves every operation by itself")
        limits = replace(limits, together=())
    if limits.max_peak_bytes is not None and plan.peak_bytes > limits.max_peak_bytes:
        notes.append(
            f"temporaries occupy {bytes_text(plan.peak_bytes)} at the peak, more than max_peak_bytes allows "
            f"({bytes_text(limits.max_peak_bytes)}): the planner 'unfused' decides nothing"
        )
        limits = replace(limits, max_peak_bytes=None)
    return replace(plan, constraints=limits, notes=(*plan.notes, *notes))


def _planner(options: Options, limits: Resolved | None) -> PlanGroups:
    """The planner, within the constraints: what must share a kernel is one node for whoever
    looks for a plan that needs less memory."""
    plan_groups: PlanGroups = partial(_answer, options.planner)
    if limits is None or decides_nothing(options.planner):
        return plan_groups
    if limits.max_peak_bytes is not None:
        plan_groups = partial(plan_within, plan_groups=plan_groups, max_peak_bytes=limits.max_peak_bytes)
    return partial(plan_constrained, limits, plan_groups) if limits.shapes_groups else plan_groups


def _answer(name: str, graph: Graph, pricing: Pricing, budget: Budget) -> Grouping:
    """What the planner of that name makes of a graph. Who calls ``register_planner`` may err."""
    found = get_planner(name)(graph, pricing, budget)
    if not isinstance(found, Grouping):
        raise InvalidArgumentError(f"the planner {name!r} should return a Grouping, and returned {found!r}")
    return found


def _switched_off(options: Options) -> tuple[str, ...]:
    names = options.features.switched_off
    return (f"switched off: {', '.join(names)}",) if names else ()


def _without_rule(lowered: Lowered) -> tuple[str, ...]:
    return tuple(
        f"{name} has no rule: {count} of them left to XLA as opaque steps "
        "(fuseplan.register_rule declares one)"
        for name, count in lowered.without_rule
    )
