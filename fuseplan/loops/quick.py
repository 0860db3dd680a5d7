"""What a program takes by a plan that is found at once: enough to tell which of two to search."""

from __future__ import annotations

import math
import time

from costmodel.device import DeviceSpec
from fuseplan.features import Features
from fuseplan.lower import Lowered
from fuseplan.planners import Budget, get_planner
from fuseplan.repeated import with_repeats
from fuseplan.schedule import Scheduler


class LateError(Exception):
    """The deadline came before it was known whether a rewritten program is faster."""


def quick_ps(
    lowered: Lowered,
    device: DeviceSpec,
    features: Features,
    *,
    repeats: bool = False,
    expires_at: float = math.inf,
) -> int:
    """Picoseconds of the plan that merging best first ends with; with ``repeats``, of that or of one in which
    each kernel computes for itself what it can, XLA's by priority, if it is faster: a sum then reads what
    its operand is made of (test_published.py::test_a_sum_that_computes_its_operand_is_not_split).

    Raises:
        LateError: ``time.monotonic`` has reached ``expires_at``. A plan that is cut short tells nothing.
    """
    scheduler = Scheduler(lowered.graph, device, lowered, features)
    once_ps = get_planner("best_first")(lowered.graph, scheduler, Budget(_left_s(expires_at))).time_ps
    _left_s(expires_at)
    if not repeats:
        return once_ps
    grouping = get_planner("xla_priority")(lowered.graph, scheduler, Budget())
    if grouping.repeats:
        grouping = with_repeats(lowered, scheduler, grouping.repeats).grouping
    _left_s(expires_at)
    return min(once_ps, grouping.time_ps)


def _left_s(expires_at: float) -> float:
    left_s = expires_at - time.monotonic()
    if left_s <= 0:
        raise LateError
    return left_s
