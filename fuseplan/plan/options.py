"""The options of one planning: device, planner, deadline, constraints, and parts switched off."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.device import DeviceSpec
from fuseplan.plan.constraints import Constraints
from fuseplan.plan.features import ALL_FEATURES, Features

DEFAULT_DEADLINE_S = 20.0
"""Wall-clock seconds the planner may take before it settles for a heuristic's plan."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan: checked on construction, before any work is done."""

    device: DeviceSpec
    planner: str = "solver"
    deadline_s: float = DEFAULT_DEADLINE_S
    strict: bool = False
    constraints: Constraints | None = None
    features: Features = ALL_FEATURES
    asked_s: float | None = None
    """The user's deadline, of which ``deadline_s`` is left; None where the two are equal."""
    shares: int = 1
    """Into how many equal parts the counted work of plans within a limit of memory is divided; this planning
    may do one."""

    @property
    def whole_s(self) -> float:
        """The user's deadline."""
        return self.deadline_s if self.asked_s is None else self.asked_s
