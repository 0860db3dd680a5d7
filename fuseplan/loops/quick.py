"""What a program takes by a plan that is found at once: enough to tell which of two to search."""

from __future__ import annotations

from costmodel.device import DeviceSpec
from fuseplan.features import Features
from fuseplan.lower import Lowered
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule import Scheduler


def quick_ps(lowered: Lowered, device: DeviceSpec, features: Features) -> int:
    """Picoseconds of the plan that merging best first ends with."""
    scheduler = Scheduler(lowered.graph, device, lowered, features)
    return get_planner("best_first")(lowered.graph, scheduler, Budget()).time_ps
