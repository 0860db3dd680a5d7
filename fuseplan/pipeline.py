"""The pipeline: from a function to a checked plan, pass by pass.

    trace → lower → rewrite → (constrain → search → duplicate → rematerialise → fit_memory
                               → order → assemble → check) of each program → merge → report

``PASSES`` lists them. The passes of one program are functions in ``fuseplan.stages``; several programs are
planned where a rewrite may or may not pay, and their plans and bounds merged (``fuseplan.plan.attempt``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from costmodel.model import CostModelError
from fuseplan.console import planning_line
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.scans import with_lean_scans
from fuseplan.frontend.trace import Flat, trace
from fuseplan.memory.liveness import plan_peak_bound
from fuseplan.passes.rewriting import (
    is_faster_as_traced,
    leaner_programs,
    may_stream,
    rewritten_programs,
)
from fuseplan.plan.attempt import Attempt
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.notes import NoteKind, limit_reached, note
from fuseplan.plan.options import Options
from fuseplan.planners import has_fixed_kernels
from fuseplan.report.debug import report_plan
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler, make_scheduler, whole_floor_ps
from fuseplan.search.heuristic_plans import HEURISTICS
from fuseplan.stages import PASSES as PROGRAM_PASSES
from fuseplan.stages import Planning, order, until_deadline
from fuseplan.support import progress
from fuseplan.support.collector import paused_collector
from fuseplan.support.errors import ExtensionError, MemoryLimitError
from fuseplan.support.memo import memo_scope
from fuseplan.support.work import (
    DIVISION,
    ONLY_LOOPS,
    PEER,
    SLACK_S,
    Limit,
    StageTimer,
    Work,
    least_planning_s,
    limit_of,
    may_begin,
    seconds_of,
    share_of,
)

PASSES = ("trace", "lower", "rewrite", *(step.__name__ for step in PROGRAM_PASSES), "merge", "report")
"""The names of all passes, in order."""


def plan_function(f: Callable[..., Any], args: Any, kwargs: Any, options: Options) -> FusionPlan:
    """Trace ``f`` at the shapes of its arguments, then plan it."""
    started = time.perf_counter()
    traced = trace(f, *args, **kwargs)
    return plan_traced(traced, options, time.perf_counter() - started)


def plan_traced(traced: Flat, options: Options, trace_s: float = 0.0) -> FusionPlan:
    """Lower a traced function, then plan it."""
    clock = StageTimer(trace_s)
    lowered = clock.time("lower", lambda: lower(with_lean_scans(traced), strict=options.strict))
    return plan_best(lowered, options, clock)


@paused_collector()
@memo_scope()
def plan_best(lowered: Lowered, options: Options, clock: StageTimer | None = None) -> FusionPlan:
    """Plan a program as traced and rewritten (``fuseplan.passes.rewriting``): the faster plan.

    The solver plans the program as traced, beside a rewritten one, only where that could be faster.

    Raises:
        MemoryLimitError: none was found that keeps to the constraints.
        ExtensionError: the cost model of the device failed, or contradicts itself.
    """
    try:
        return _plan_best(lowered, options, clock or StageTimer())
    except CostModelError as error:
        raise ExtensionError(str(error)) from error


def _plan_best(lowered: Lowered, options: Options, clock: StageTimer) -> FusionPlan:
    # Lowering cannot be cut short, but the deadline covers it.
    expires_at = time.monotonic() + options.deadline_s - clock.seconds.get("lower", 0.0)
    what = f"{len(lowered.graph.nodes):,} operations for {options.device.name}"
    with planning_line(what, options.deadline_s):
        progress.begin(expires_at)
        progress.enter("rewrite")
        programs, notes = rewritten_programs(lowered, options, clock, expires_at)
        plan_one = _Planner(lowered, options, expires_at, clock)
        plan = _certified(plan_one.best(programs).required(), lowered)
        progress.found(plan.objective_ps, plan.bound_ps or 0)
    if plan.features != options.features:
        count, deadline_s = len(lowered.graph.nodes), options.deadline_s
        notes += (note(NoteKind.NO_TIME_FOR_OFFERS, deadline_s=deadline_s, count=count),)
    stats = replace(plan.stats, seconds=tuple(clock.seconds.items()))
    plan = replace(plan, notes=(*plan.notes, *map(str, notes)), stats=stats)
    report_plan(plan)
    return plan


def plan_program(lowered: Lowered, options: Options, clock: StageTimer | None = None) -> Attempt:
    """Plan one program, as it is, by the passes of ``fuseplan.stages``."""
    found = _plan_below(math.inf, lowered, options, clock or StageTimer())
    assert found is not None, "every plan takes less than forever"
    return found


def _plan_below(
    limit_ps: float,
    lowered: Lowered,
    options: Options,
    clock: StageTimer,
    scheduler: Scheduler | None = None,
    work: Work | None = None,
) -> Attempt | None:
    """As ``plan_program``; None if the kernels would take ``limit_ps`` or more, before they are ordered.
    ``scheduler``: one of the same program, which other planners have used; ``work``: what the planner may
    do."""
    state = Planning(lowered, options, clock, time.monotonic() + options.deadline_s, scheduler, work)
    try:
        for step in PROGRAM_PASSES:
            if step is order and state.grouping.time_ps >= limit_ps:
                return None
            progress.enter(step.__name__)
            step(state)
    except MemoryLimitError as error:
        return Attempt(error)
    assert state.plan is not None
    stats = replace(state.plan.stats, seconds=tuple(state.clock.seconds.items()))
    return Attempt(replace(state.plan, stats=stats), limit_reached(state.notes))


COPYING_PEERS = ("nnc_tensorexpr", "xla_priority")
"""Planners that choose for themselves which operations several kernels compute. The solver's plan is compared
with theirs even if it is proven, as its proof is about copies of the operations that it chose."""

PEERS = ("inductor", "tvm_fuse_ops", *COPYING_PEERS)
"""Other systems' algorithms, with whose plans the solver's is compared where it is not proven. Heuristics are
asked only where the deadline cut the search short: it starts from their plans of its components."""

_SHARE_OF_PEERS = 8
"""At most one in so many seconds of the deadline is kept for other systems' algorithms; less if ``PEER``
units for each operation take less."""

_MOST_PROGRAMS = 4
"""The number of programs that are planned within a limit of memory: the rewritten one, the traced one, and
two that need less memory."""


class _Planner:
    """Plans equivalent programs of ``traced`` until the deadline."""

    def __init__(self, traced: Lowered, options: Options, expires_at: float, clock: StageTimer) -> None:
        self.traced = traced
        limited = options.constraints is not None and options.constraints.max_peak_bytes is not None
        self.has_leaner = limited and may_stream(options, traced)
        """Whether time is left for programs that need less memory."""
        self.options = replace(options, shares=_MOST_PROGRAMS if self.has_leaner else 1)
        self.expires_at, self.clock = expires_at, clock
        # Under a limit of memory the searches for plans that keep to it count their own work.
        is_shared = options.planner == "solver" and not limited
        limit = limit_of(options.whole_s)
        if options.only_loops:
            limit = min(limit, ONLY_LOOPS * len(traced.graph.nodes))
        self._work = Work(limit) if is_shared else None

    def best(self, programs: Sequence[Lowered]) -> Attempt:
        """The fastest plan of ``programs`` and, where that may be faster, of the program as traced; of
        programs that need less memory where these have none within the limit."""
        own = self._of_programs(programs)
        found = self.clock.time("peers", lambda: self._no_slower_than_peers(own, programs))
        if found is not own and self.options.planner == "solver" and not self.options.only_loops:
            found = self._with_copies_of_peer(found, programs)
        if not self.has_leaner:
            return found
        if found.plan is None:
            return self._of_leaner(found)
        return found if found.plan.stats.bound_of else found.bound_of("as traced")

    def _of_programs(self, programs: Sequence[Lowered]) -> Attempt:
        found: Attempt | None = None
        for left, program in zip(range(len(programs), 0, -1), programs, strict=True):
            with share_of(self._work, 1 / left):
                shares = 1 if found else 1 + self.has_leaner
                attempt = self._attempt(program, shares)
            found = attempt if found is None else found.faster(attempt)
        assert found is not None, "there is a program"
        if any(program is self.traced for program in programs):
            return found
        best, has_time = found, self._has_time(found)

        def may_gain() -> bool:
            return is_faster_as_traced(self.traced, self.options, best.time_ps, self.expires_at)

        if has_time and self.clock.time("estimate", may_gain):
            return found.faster(self._attempt(self.traced))
        is_decided = has_time and time.monotonic() < self.expires_at
        return found.cut_short(None if is_decided else Limit.DEADLINE).bound_of("as rewritten")

    def _has_time(self, found: Attempt) -> bool:
        """Whether there is time to plan the program as traced, too, after ``found``."""
        if self.options.deadline_s <= 0:
            return True
        left_s = self.expires_at - time.monotonic()
        return found.ended_by is not Limit.DEADLINE and self._least_s(self.traced) <= left_s

    def _least_s(self, program: Lowered) -> float:
        """Seconds that planning ``program`` takes at least."""
        has_loops = self.options.device.capabilities.emits_kernels
        return least_planning_s(len(program.graph.nodes), has_loops)

    def _no_slower_than_peers(self, found: Attempt, programs: Sequence[Lowered]) -> Attempt:
        """``found``, or the plan of a planner that the user asked for, where that is faster; where ``found``
        takes longer than the floor, also of another system's algorithm. A proof excludes faster plans without
        other copies, and not those of XLA's own kernels."""
        plan, asked = found.plan, self.options.peers
        if self.options.deadline_s <= 0 or plan is None:
            return found
        usual: tuple[str, ...] = ()
        if self.options.planner == "solver" and not self.options.only_loops:
            usual = COPYING_PEERS if plan.status == "OPTIMAL" else PEERS
            if found.ended_by is Limit.DEADLINE:
                usual = (*usual, *HEURISTICS)
        if not (usual or asked):
            return found
        if self.options.constraints is not None:
            fixed = [name for name in asked if has_fixed_kernels(name)]
            found = found.noted(*[note(NoteKind.PEER_UNCONSTRAINED, planner=name) for name in fixed])
            asked = tuple([name for name in asked if name not in fixed])
        others = [program for program in programs if program is not self.traced]
        for program in (*others, self.traced):  # As a rule, rewritten ones have the faster plans.
            every = tuple(range(len(program.graph.nodes)))
            is_least = usual and self._scheduler_of(program).floor(every) >= found.time_ps
            names = () if is_least else usual
            for name in dict.fromkeys((*asked, *names)):
                left_s, n_operations = self.expires_at - time.monotonic(), len(program.graph.nodes)
                if left_s <= 0 or not may_begin(DIVISION, n_operations, left_s):
                    return found
                is_peer = name in PEERS and name not in asked
                if is_peer and seconds_of(PEER, n_operations) > left_s:
                    continue
                if program is not self.traced and has_fixed_kernels(name):
                    continue  # It has the same kernels of any form of the program.
                scheduler, work = self._scheduler_of(program), None
                until = until_deadline(self.expires_at, self.options)
                options = replace(until, planner=name, features=scheduler.features)
                if is_peer:
                    work = Work(PEER * n_operations)
                peer = _plan_below(found.time_ps, program, options, StageTimer(), scheduler, work)
                if peer is not None:
                    found = found.or_faster_of(peer, name, whole_floor_ps)
        return found

    def _with_copies_of_peer(self, peer: Attempt, programs: Sequence[Lowered]) -> Attempt:
        """``peer``, or a plan of the program with its copies that is no slower and has a better bound."""
        plan = peer.plan
        if plan is None or plan.program is None or not self._has_time(peer):
            return peer
        if any(plan.program is program for program in (*programs, self.traced)):
            return peer
        work = self._work
        # No more than the searches before: there is a plan, and the rest would go into its bound.
        with share_of(work, min(work.spent / max(work.left, 1), 1) if work is not None else 1):
            again = self._attempt(plan.program).bound_of("as rewritten")
        if again.plan is None or again.time_ps > peer.time_ps:
            return peer
        is_better = again.time_ps < peer.time_ps or (again.plan.bound_ps or 0) > (plan.bound_ps or 0)
        # A heuristic that is as fast is so on the program with the copies, and is never asked for that alone.
        return again.uncertified() if is_better else peer

    def _of_leaner(self, failed: Attempt) -> Attempt:
        best, ended_by = failed, failed.ended_by
        programs = leaner_programs(self.traced, self.options)
        for shares, program in zip(range(len(programs), 0, -1), programs, strict=True):
            if program is None or self._needs_more(program):
                continue
            found = self._attempt(program, shares)
            ended_by = ended_by or found.ended_by
            if found.plan is None and best.plan is None:
                best = best.faster(found)
            elif found.time_ps < best.time_ps:
                best = found
        return best.cut_short(ended_by).bound_of("as rewritten")

    def _attempt(self, program: Lowered, shares: int = 1) -> Attempt:
        """Plan a program in at most ``1 / shares`` of the time that is left."""
        expires_at = self.expires_at
        if self.options.planner == "solver":
            each_s = seconds_of(PEER, len(program.graph.nodes))
            expires_at -= min(len(PEERS) * each_s, self.options.deadline_s / _SHARE_OF_PEERS)
        scheduler = self._scheduler_of(program)
        until = until_deadline(expires_at, self.options, shares)
        options = replace(until, features=scheduler.features)
        found = _plan_below(math.inf, program, options, self.clock, scheduler, self._work)
        assert found is not None, "every plan takes less than forever"
        return found

    def _scheduler_of(self, program: Lowered) -> Scheduler:
        """The scheduler of a program, which all its planners share: what is offered is found once."""
        features = self.options.features
        if 0 < self.options.deadline_s < self._least_s(program) - SLACK_S:
            # To look for what is offered cannot be cut short.
            features = replace(features, loop_nests=False, xla_loops=False)
        return make_scheduler(program, self.options.device, features)

    def _needs_more(self, program: Lowered) -> bool:
        """Whether no plan of a program keeps to ``constraints.max_peak_bytes``, whatever it groups."""
        constraints, graph = self.options.constraints, program.graph
        limit = constraints.max_peak_bytes if constraints is not None else None
        book = PriceBook(graph, self._scheduler_of(program))
        return limit is not None and plan_peak_bound(graph, book, self.expires_at) > limit


def _certified(plan: FusionPlan, traced: Lowered) -> FusionPlan:
    """``plan``, if it is proven, with a note on the heuristic whose plan of the same program is as fast."""
    name = plan.stats.certified
    if not name or plan.status != "OPTIMAL":
        return replace(plan, stats=replace(plan.stats, certified=""))
    kind = NoteKind.AS_FAST if plan.graph is traced.graph else NoteKind.AS_FAST_REWRITTEN
    return replace(plan, notes=(*plan.notes, str(note(kind, planner=name))))
