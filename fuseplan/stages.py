"""The passes that plan one program: each reads a ``Planning`` and writes to it, in the order of
``PASSES``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from costmodel.graph import Graph
from costmodel.model import CostModelError
from fuseplan.frontend.lower import Lowered
from fuseplan.memory.limit import plan_within
from fuseplan.memory.order import minimise_peak
from fuseplan.memory.rematerialise import MemoryFit
from fuseplan.passes.rewriting import may_recompute
from fuseplan.plan.constraints import Resolved
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.plan.notes import AnyNote, NoteKind, note, worded
from fuseplan.plan.options import Options
from fuseplan.planners import ProgramPlanner, get_planner, has_fixed_kernels, is_built_in
from fuseplan.schedule.pricing import Pricing
from fuseplan.schedule.scheduler import Scheduler, make_scheduler
from fuseplan.search.grouping import Answer, Budget, Grouping, PlanGroups, left_s
from fuseplan.search.must_fuse import plan_constrained
from fuseplan.search.remat.duplicates import roots_of
from fuseplan.search.remat.materialise import materialise_overlapping
from fuseplan.search.remat.search import plan_rematerialised
from fuseplan.search.selectors import resolve
from fuseplan.support.errors import ExtensionError, FuseplanError, InvalidArgumentError, InvalidPlanError
from fuseplan.support.work import COPIES, Limit, StageTimer, Work, seconds_of, share_of
from fuseplan.verify.plan import check_cover, check_plan


@dataclass(slots=True)
class Planning:
    """A program on its way to a plan, with the results of the passes so far."""

    lowered: Lowered
    options: Options
    clock: StageTimer
    expires_at: float
    """The deadline, by ``time.monotonic``."""
    scheduler: Scheduler | None = None
    """The scheduler of the program's graph, once there is one."""
    work: Work | None = None
    """The counted work of all searches; None: each may do as much as the deadline allows."""
    limits: Resolved | None = None
    """The constraints by node of the program."""
    budget: Budget = field(default_factory=Budget)
    """The budget that the searches share."""
    once: Grouping | None = None
    """The groups in which every operation stands once; None where another compiler's plan was read."""
    overlapping: Answer | None = None
    """The groups of a planner that assigns an operation to several of them."""
    answer: Answer | None = None
    """The groups, the program that they are of, and the limits by its nodes."""
    kernels: tuple[Kernel, ...] = ()
    notes: tuple[AnyNote, ...] = ()
    plan: FusionPlan | None = None

    @property
    def grouping(self) -> Grouping:
        """The groups found so far."""
        assert self.answer is not None, "the pass `search` comes first"
        return self.answer.grouping

    @property
    def graph(self) -> Graph:
        """The graph that the groups are of."""
        return self.lowered.graph if self.answer is None else self.answer.lowered.graph

    @property
    def planner_of(self) -> Callable[[Resolved | None], PlanGroups]:
        """The planner within constraints."""
        return partial(_planner, self.options)

    def scheduled(self) -> Scheduler:
        """The scheduler of the graph that the groups are of."""
        if self.scheduler is None or self.scheduler.graph is not self.graph:
            lowered = self.lowered if self.answer is None else self.answer.lowered
            self.scheduler = make_scheduler(lowered, self.options.device, self.options.features)
        return self.scheduler

    @property
    def free_limits(self) -> Resolved | None:
        """The constraints of the first searches: where values may be rematerialised, what memory allows is
        seen to by ``fit_memory``."""
        if self.limits is None or not may_recompute(self.options):
            return self.limits
        return replace(self.limits, max_peak_bytes=None)


def constrain(state: Planning) -> None:
    """Say which nodes the constraints are about."""
    if state.options.constraints is not None:
        state.limits = resolve(state.options.constraints, state.lowered)


_SHARE_OF_WORK = 0.5
"""The part of the counted work for the search without copies, where one with copies follows."""

_SHARE_OF_COPIES = 4
"""The search without copies leaves ``COPIES`` units for each operation to the one with copies, if that is at
most one in so many seconds of its own time. A short deadline is not divided."""


def search(state: Planning) -> None:
    """Decide which operations share a kernel, each computed once."""
    options = state.options
    planner = get_planner(options.planner)
    if isinstance(planner, ProgramPlanner):
        plan_program = planner.plan_program
        program, found = _asked(options.planner, lambda: plan_program(state.lowered, options.device))
        state.answer = Answer(program, _of_graph(options.planner, program.graph, found), state.limits)
        state.clock.add(state.grouping.stats.seconds)
        return
    scheduler = state.clock.time("lower", state.scheduled)
    # Rematerialisation searches again, and starts from this plan.
    is_first = options.planner == "solver" and may_recompute(options) and not options.only_loops
    is_first = is_first and bool(roots_of(state.graph, options.device))
    until = until_deadline(state.expires_at, options)
    for_copies_s = seconds_of(COPIES, len(state.graph.nodes))
    leaves_time = is_first and _SHARE_OF_COPIES * for_copies_s <= until.deadline_s
    state.budget = Budget(
        until.deadline_s - for_copies_s if leaves_time else until.deadline_s,
        asked_s=until.asked_s,
        only_loops=options.only_loops,
        work=state.work,
        solved=set(),
    )
    plan_groups = state.planner_of(state.free_limits)
    with share_of(state.work, _SHARE_OF_WORK if is_first else 1):
        state.once = plan_groups(state.graph, scheduler, state.budget)
    state.clock.add(state.once.stats.seconds)
    state.answer = Answer(state.lowered, state.once, state.limits)


def duplicate(state: Planning) -> None:
    """Copy operations that several groups hold into each of them, where the planner decided so."""
    once = state.once
    if once is None or not once.repeats or state.limits is not None or not state.options.features.recompute:
        return
    scheduler = state.scheduled()
    state.overlapping = state.clock.time(
        "copies", lambda: materialise_overlapping(state.lowered, scheduler, once.repeats)
    )
    state.answer = state.overlapping or state.answer


def rematerialise(state: Planning) -> None:
    """Search again for plans that compute some values in several kernels; keep the faster."""
    if state.once is None or state.options.only_loops or not may_recompute(state.options):
        return
    left = replace(state.budget, deadline_s=left_s(state.expires_at))
    assert state.scheduler is not None, "the search has made one"
    found = plan_rematerialised(
        state.lowered, state.scheduler, state.planner_of, state.once, left, state.clock, state.free_limits
    )
    if state.overlapping is None or found.grouping.time_ps < state.overlapping.grouping.time_ps:
        state.answer = found


def fit_memory(state: Planning) -> None:
    """Find the fastest plan whose temporaries keep to ``max_peak_bytes``.

    Raises:
        MemoryLimitError: none was found.
    """
    limits = state.limits
    if state.once is None or not may_recompute(state.options) or limits is None:
        return
    if limits.max_peak_bytes is None or state.answer is None or state.scheduler is None:
        return
    until = until_deadline(state.expires_at, state.options)
    within = MemoryFit(
        state.lowered, state.scheduler, state.planner_of, limits, limits.max_peak_bytes, until, state.clock
    )
    state.answer = within.plan(state.once, state.answer)


def order(state: Planning) -> None:
    """Put the kernels in the order in which temporaries need the least memory."""
    found = state.grouping
    state.kernels, state.notes = found.kernels, found.notes
    if found.is_ordered:
        return
    ordered = state.clock.time(
        "order", lambda: minimise_peak(state.graph, found.kernels, expires_at=state.expires_at)
    )
    state.kernels = ordered.kernels
    if ordered.status != "OPTIMAL" and time.monotonic() >= state.expires_at:
        state.notes += (note(NoteKind.ORDER_CUT, limit=Limit.DEADLINE),)


def assemble(state: Planning) -> None:
    """Make the plan of the kernels, with its notes in words."""
    found, options = state.grouping, state.options
    assert state.answer is not None
    lowered = state.answer.lowered
    switched_off = ", ".join(options.features.switched_off)
    notes: list[AnyNote] = [note(NoteKind.SWITCHED_OFF, features=switched_off)] if switched_off else []
    if options.device.cost_model is not None:
        notes.append(note(NoteKind.COST_MODEL, model=options.device.cost_model.name))
    if options.only_loops:
        notes.append(note(NoteKind.ONLY_LOOPS))
    for name, count in lowered.without_rule:
        notes.append(note(NoteKind.WITHOUT_RULE, operation=name, count=count))
    plan = FusionPlan(
        graph=state.graph,
        device=options.device,
        planner=options.planner,
        kernels=state.kernels,
        refusals=found.refusals,
        status=found.status,
        bound_ps=found.bound_ps,
        notes=worded([*notes, *state.notes], state.graph),
        stats=found.stats,
        features=options.features,
        proof=found.proof,
        program=lowered,
    )
    state.plan = plan if state.answer.limits is None else _with_limits(plan, state.answer.limits)


def check(state: Planning) -> None:
    """Check the plan without the code that made it.

    Raises:
        InvalidPlanError: it is not legal; the message names the planner.
    """
    plan = state.plan
    assert plan is not None, "the pass `assemble` comes first"
    try:
        state.clock.time("check", lambda: check_plan(plan))
    except InvalidPlanError as error:
        raise InvalidPlanError(
            f"the planner {state.options.planner!r} makes no legal plan: {error}"
        ) from error


PASSES = (constrain, search, duplicate, rematerialise, fit_memory, order, assemble, check)
"""The passes of one program, in order."""


def until_deadline(expires_at: float, options: Options, shares: int = 1) -> Options:
    """``options`` with the time that is left, or one of ``shares`` equal parts of it; never 0 where the
    user's deadline is not 0."""
    left = left_s(expires_at) / shares if options.deadline_s > 0 else 0.0
    return replace(options, deadline_s=left, asked_s=options.whole_s)


def _with_limits(plan: FusionPlan, limits: Resolved) -> FusionPlan:
    """``plan`` with its constraints, and with notes on those that it does not keep."""
    if isinstance(get_planner(plan.planner), ProgramPlanner):
        told = note(NoteKind.UNCONSTRAINED, planner=plan.planner)
        return replace(plan, notes=(*plan.notes, str(told)))
    notes = []
    if plan.planner == "unfused" and limits.together:
        notes.append(note(NoteKind.MUST_FUSE_IGNORED))
        limits = replace(limits, together=())
    most = limits.max_peak_bytes
    if most is not None and has_fixed_kernels(plan.planner) and plan.peak_bytes > most:
        notes.append(note(NoteKind.PEAK_IGNORED, peak_bytes=plan.peak_bytes, most_bytes=most))
        limits = replace(limits, max_peak_bytes=None)
    return replace(plan, constraints=limits, notes=(*plan.notes, *map(str, notes)))


def _planner(options: Options, limits: Resolved | None) -> PlanGroups:
    """The planner within the constraints: operations that must share a kernel are contracted to one node
    before the search for a plan that needs less memory."""
    plan_groups: PlanGroups = partial(_answer, options.planner)
    if limits is None or has_fixed_kernels(options.planner):
        return plan_groups
    if limits.max_peak_bytes is not None:
        plan_groups = partial(plan_within, plan_groups=plan_groups, max_peak_bytes=limits.max_peak_bytes)
    return partial(plan_constrained, limits, plan_groups) if limits.shapes_groups else plan_groups


def _answer(name: str, graph: Graph, pricing: Pricing, budget: Budget) -> Grouping:
    """The groups of the named planner for a graph, checked, since users can register planners."""
    plan_groups = get_planner(name)
    return _of_graph(name, graph, _asked(name, lambda: plan_groups(graph, pricing, budget)))


_T = TypeVar("_T")


def _asked(name: str, ask: Callable[[], _T]) -> _T:
    """What a planner returns.

    Raises:
        ExtensionError: a registered planner failed. Errors of fuseplan's own planners stay as they are.
    """
    try:
        return ask()
    except (FuseplanError, CostModelError, MemoryError):
        raise
    except Exception as error:
        if is_built_in(name):
            raise
        raise ExtensionError(
            f"expected groups of the registered planner {name!r}, and it raised {type(error).__name__}: "
            f"{error}. Mend it, or plan with planner='solver'"
        ) from error


def _of_graph(name: str, graph: Graph, found: Grouping) -> Grouping:
    """``found``, if it holds each node of ``graph`` once."""
    if not isinstance(found, Grouping):
        raise InvalidArgumentError(f"the planner {name!r} should return a Grouping, and returned {found!r}")
    strange = next((kernel for kernel in found.kernels if not isinstance(kernel, Kernel)), None)
    if strange is not None:
        raise InvalidArgumentError(
            f"the kernels of the planner {name!r} should be Kernels (PriceBook.kernel makes them), "
            f"and one is {strange!r}"
        )
    try:
        check_cover(graph, found.groups)
    except InvalidPlanError as error:
        raise InvalidPlanError(f"the planner {name!r} makes no legal plan: {error}") from error
    return found
