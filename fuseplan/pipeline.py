"""The planner, all stages on one screen: trace, lower, group, schedule, order, check."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from costmodel.graph import Graph
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.trace import Flat, trace
from fuseplan.memory.limit import plan_within
from fuseplan.memory.order import least_peak
from fuseplan.memory.plan_bound import least_peak_of_any
from fuseplan.memory.rematerialise import Within
from fuseplan.passes.rewriting import (
    Program,
    is_faster_as_traced,
    leaner_programs,
    may_pack,
    may_recompute,
    may_stream,
    rewritten_programs,
)
from fuseplan.plan.constraints import Resolved
from fuseplan.plan.fusion_plan import FusionPlan, no_longer
from fuseplan.plan.options import Options
from fuseplan.planners import Budget, Grouping, PlanGroups, ProgramPlanner, decides_nothing, get_planner
from fuseplan.report.debug import report_plan
from fuseplan.schedule.pricing import PriceBook, Pricing
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.grouping import left_s
from fuseplan.search.must_fuse import plan_constrained
from fuseplan.search.overlapping import with_repeats
from fuseplan.search.pack_pass import with_packs
from fuseplan.search.rematerialise import Answer, plan_again
from fuseplan.search.selectors import resolve
from fuseplan.support.errors import InvalidArgumentError, InvalidPlanError, MemoryLimitError
from fuseplan.support.format import bytes_text
from fuseplan.support.gc_pause import collector_at_rest
from fuseplan.support.stage_timer import Clock
from fuseplan.support.work import LATE, Work, ended, limit_of
from fuseplan.verify.plan import check_plan


def plan_function(
    f: Callable[..., Any], args: Any, kwargs: Any, options: Options
) -> tuple[Lowered, FusionPlan]:
    """Trace ``f`` at the shapes of its arguments, then plan it."""
    started = time.perf_counter()
    traced = trace(f, *args, **kwargs)
    return plan_traced(traced, options, time.perf_counter() - started)


@collector_at_rest()
def plan_traced(traced: Flat, options: Options, trace_s: float = 0.0) -> tuple[Lowered, FusionPlan]:
    """The flow from equations to a checked plan."""
    clock = Clock(trace_s)
    lowered = clock.time("lower", lambda: lower(traced, strict=options.strict))
    return plan_best(lowered, options, clock)


@collector_at_rest()
def plan_best(lowered: Lowered, options: Options, clock: Clock | None = None) -> tuple[Lowered, FusionPlan]:
    """Plan a program as traced and rewritten (``fuseplan.passes.rewriting``); the faster plan, with its
    program.

    The solver plans the program as traced, beside a rewritten one, only where that could be faster.

    Raises:
        MemoryLimitError: none was found that keeps to the constraints.
    """
    clock = clock or Clock()
    # Lowering cannot be cut short, but the deadline covers it.
    expires_at = time.monotonic() + options.deadline_s - clock.seconds.get("lower", 0.0)
    traced = lowered
    programs, notes = rewritten_programs(traced, options, clock, expires_at)
    # Within a limit, time is left for programs that need less memory.
    has_leaner = _has_limit(options) and may_stream(options, traced)
    options = replace(options, shares=_MOST_PROGRAMS if has_leaner else 1)
    lowered, plan = _of_programs(traced, programs, options, expires_at, 1 + has_leaner, clock)
    if isinstance(plan, MemoryLimitError) and has_leaner:
        lowered, plan = _within_less(traced, plan, options, expires_at, clock)
    elif has_leaner and isinstance(plan, FusionPlan) and not plan.stats.bound_of:
        lowered, plan = _bounded((lowered, plan), "as traced")
    if isinstance(plan, MemoryLimitError):
        raise plan
    plan = _claimed(plan, traced)
    stats = replace(plan.stats, seconds=tuple(clock.seconds.items()))
    plan = replace(plan, notes=(*plan.notes, *notes), stats=stats)
    report_plan(plan)
    return lowered, plan


_MOST_PROGRAMS = 4
"""The number of programs that are planned within a limit of memory: the rewritten one, the traced one, and
two that need less memory."""

_Found = tuple[Lowered, FusionPlan | MemoryLimitError]
"""A program, and its plan or why it has none."""


def _of_programs(
    traced: Lowered,
    programs: Sequence[Program],
    options: Options,
    expires_at: float,
    shares: int,
    clock: Clock,
) -> _Found:
    """The fastest plan of ``programs``, and of the program as traced where that may be faster. Planning the
    first one takes at most ``1 / shares`` of the time that is left."""
    first, *others = programs
    found = _attempt(first, _until(expires_at, options, shares), clock)
    for program in others:
        found = _faster(found, _attempt(program, _until(expires_at, options), clock))
    is_planned = any(program.lowered is traced for program in programs)
    if is_planned:
        return found
    if is_faster_as_traced(traced, options, _time_ps(found[1]), expires_at):
        return _faster(found, _attempt(Program(traced), _until(expires_at, options), clock))
    return _bounded(_noted(found, LATE if time.monotonic() >= expires_at else ""), "as rewritten")


def _faster(one: _Found, other: _Found) -> _Found:
    """The faster of two plans of one function, the first if they are equal; its bound holds for both
    programs."""
    plans = one[1], other[1]
    if isinstance(plans[0], MemoryLimitError) and isinstance(plans[1], MemoryLimitError):
        return one[0], plans[0].joined(plans[1])
    if _time_ps(plans[1]) < _time_ps(plans[0]):
        one, other = other, one
    lowered, plan = one
    assert isinstance(plan, FusionPlan), "one of the two is a plan, and takes less than forever"
    _, plan = _noted((lowered, plan), _ended(other[1]))
    assert isinstance(plan, FusionPlan)
    bound = plan.bound_ps if _is_impossible(other[1]) else _lower(plan.bound_ps, other[1].bound_ps)
    proven = bound is not None and bound >= plan.objective_ps
    return lowered, replace(
        plan, bound_ps=plan.objective_ps if proven else bound, status="OPTIMAL" if proven else "FEASIBLE"
    )


def _bounded(found: _Found, form: str) -> _Found:
    """``found``, which says that its bound holds for this form of the program alone."""
    lowered, plan = found
    if isinstance(plan, MemoryLimitError):
        return found
    return lowered, replace(plan, stats=replace(plan.stats, bound_of=form))


def _noted(found: _Found, why: str) -> _Found:
    """``found``, which says that a limit (``fuseplan.support.work.ENDED``) cut the search of an equivalent
    program short, if one did and it says of none yet."""
    lowered, plan = found
    if not why or _ended(plan):
        return found
    if isinstance(plan, FusionPlan):
        note = f"{why} all equivalent programs had been searched"
        return lowered, replace(plan, notes=(*plan.notes, note))
    numbers = plan.limit_bytes, plan.smallest_bytes, plan.least_bytes, plan.bound_ps
    return lowered, MemoryLimitError(*numbers, why)


def _ended(plan: FusionPlan | MemoryLimitError) -> str:
    return ended(plan.notes) if isinstance(plan, FusionPlan) else plan.ended


def _claimed(plan: FusionPlan, traced: Lowered) -> FusionPlan:
    """``plan``, if it is proven, with a note on the heuristic whose plan of the same program is as fast."""
    name = plan.stats.certified
    if not name or plan.status != "OPTIMAL":
        return replace(plan, stats=replace(plan.stats, certified=""))
    note = no_longer(name, is_rewritten=plan.graph is not traced.graph)
    return replace(plan, notes=(*plan.notes, note))


def _within_less(
    lowered: Lowered, error: MemoryLimitError, options: Options, expires_at: float, clock: Clock
) -> _Found:
    """The fastest plan of the programs that need less memory than ``lowered``, which has none."""
    best: _Found = lowered, error
    why = error.ended
    programs = leaner_programs(lowered, options)
    for shares, program in zip(range(len(programs), 0, -1), programs, strict=True):
        if program is None or _needs_more(program, options, expires_at):
            continue
        found = _attempt(program, _until(expires_at, options, shares), clock)
        why = why or _ended(found[1])
        if _time_ps(found[1]) < _time_ps(best[1]):
            best = found
    return _bounded(_noted(best, why), "as rewritten")


def _needs_more(program: Program, options: Options, expires_at: float) -> bool:
    """Whether no plan of a program keeps to ``options.constraints.max_peak_bytes``, whatever it groups."""
    limit = options.constraints.max_peak_bytes if options.constraints is not None else None
    graph = program.lowered.graph
    scheduler = program.scheduler or Scheduler(graph, options.device, program.lowered, options.features)
    return limit is not None and least_peak_of_any(graph, PriceBook(graph, scheduler), expires_at) > limit


def _has_limit(options: Options) -> bool:
    return options.constraints is not None and options.constraints.max_peak_bytes is not None


def _until(expires_at: float, options: Options, shares: int = 1) -> Options:
    """``options`` with the time that is left, or one of ``shares`` of it: never 0 where more was asked
    for, so that the notes do not say that it was 0."""
    left = left_s(expires_at) / shares if options.deadline_s > 0 else 0.0
    return replace(options, deadline_s=left, asked_s=options.whole_s)


def _attempt(program: Program, options: Options, clock: Clock) -> _Found:
    try:
        return plan_lowered(program.lowered, options, clock, program.scheduler)
    except MemoryLimitError as error:
        return program.lowered, error


def _time_ps(plan: FusionPlan | MemoryLimitError) -> float:
    return plan.objective_ps if isinstance(plan, FusionPlan) else math.inf


def _is_impossible(plan: FusionPlan | MemoryLimitError) -> bool:
    return isinstance(plan, MemoryLimitError) and plan.limit_bytes < plan.least_bytes


def _lower(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else min(one, other)


def plan_lowered(
    lowered: Lowered, options: Options, clock: Clock | None = None, scheduler: Scheduler | None = None
) -> tuple[Lowered, FusionPlan]:
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
    if may_pack(options):
        if scheduler is None or graph is not scheduler.graph:
            scheduler = Scheduler(graph, options.device, lowered, options.features)
        apart, pricing = grouping, scheduler
        work = Work(limit_of(options.whole_s), expires_at=expires_at)
        grouping = clock.time("packs", lambda: with_packs(graph, pricing, apart, work))
    kernels, notes = grouping.kernels, grouping.notes
    if not grouping.is_ordered:
        order = clock.time("order", lambda: least_peak(graph, kernels, expires_at=expires_at))
        kernels = order.kernels
        if order.status != "OPTIMAL" and time.monotonic() >= expires_at:
            notes += (f"{LATE} the order that needs the least memory was found",)
    plan = FusionPlan(
        graph=graph,
        device=options.device,
        planner=options.planner,
        kernels=kernels,
        refusals=grouping.refusals,
        status=grouping.status,
        bound_ps=grouping.bound_ps,
        notes=(*_switched_off(options), *_without_rule(lowered), *notes),
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
    until = _until(expires_at, options)
    budget = Budget(until.deadline_s, asked_s=until.asked_s, solved=set())
    searches_again = may_recompute(options)
    free = limits
    if searches_again and limits is not None:
        free = replace(limits, max_peak_bytes=None)
    once = planner(free)(lowered.graph, scheduler, budget)
    clock.add(once.stats.seconds)
    repeated = None
    if once.repeats and limits is None and options.features.recompute:
        repeated = clock.time("copies", lambda: with_repeats(lowered, scheduler, once.repeats))
    if not searches_again:
        return repeated or Answer(lowered, once, limits)
    left = replace(budget, deadline_s=left_s(expires_at))
    answer = plan_again(lowered, scheduler, planner, once, left, clock, free)
    if repeated is not None and repeated.grouping.time_ps <= answer.grouping.time_ps:
        return repeated
    if limits is None or limits.max_peak_bytes is None:
        return answer
    until = _until(expires_at, options)
    within = Within(lowered, scheduler, planner, limits, limits.max_peak_bytes, until, clock)
    return within.plan(once, answer)


def _with_limits(plan: FusionPlan, limits: Resolved) -> FusionPlan:
    """``plan`` with notes on what of the constraints it does not hold to."""
    if isinstance(get_planner(plan.planner), ProgramPlanner):
        note = f"constraints do not hold: the planner {plan.planner!r} decides nothing"
        return replace(plan, notes=(*plan.notes, note))
    notes = []
    if plan.planner == "unfused" and limits.together:
        notes.append("must_fuse does not hold: the planner 'unfused' leaves every operation by itself")
        limits = replace(limits, together=())
    most = limits.max_peak_bytes
    if most is not None and decides_nothing(plan.planner) and plan.peak_bytes > most:
        notes.append(
            f"temporaries occupy {bytes_text(plan.peak_bytes)} at the peak, more than max_peak_bytes allows "
            f"({bytes_text(most)}): the planner 'unfused' decides nothing"
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
