"""Estimate the time of a program by a heuristic plan, to choose between two programs before the search."""

from __future__ import annotations

from costmodel.device import DeviceSpec
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.options import Features
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule.scheduler import make_scheduler
from fuseplan.search.grouping import left_s
from fuseplan.search.remat.materialise import materialise_overlapping
from fuseplan.support.work import DIVISION, Work, may_begin, unlimited


class UndecidedError(Exception):
    """A limit was reached before it was known whether a rewritten program is faster."""


def quick_ps(
    lowered: Lowered,
    device: DeviceSpec,
    features: Features,
    work: Work | None = None,
    *,
    repeats: bool = False,
) -> int:
    """Picoseconds of the plan of ``best_first``. With ``repeats``, of the plan of ``xla_priority`` if that is
    faster: there, kernels recompute their operands, so that a sum reads the operands of its operand.

    Raises:
        UndecidedError: ``work`` is over, or would be before the program is planned. A plan that was cut short
            is no estimate.
    """
    work = work or unlimited()
    budget = Budget(left_s(work.expires_at), work=work)
    if work.is_over or not may_begin(DIVISION, len(lowered.graph.nodes), budget.deadline_s):
        raise UndecidedError
    scheduler = make_scheduler(lowered, device, features)
    once_ps = get_planner("best_first")(lowered.graph, scheduler, budget).time_ps
    if work.is_over:
        raise UndecidedError
    if not repeats:
        return once_ps
    left = Budget(left_s(work.expires_at), work=work)
    grouping = get_planner("xla_priority")(lowered.graph, scheduler, left)
    if work.is_over:
        raise UndecidedError
    repeated = materialise_overlapping(lowered, scheduler, grouping.repeats) if grouping.repeats else None
    return min(once_ps, (repeated.grouping if repeated is not None else grouping).time_ps)
