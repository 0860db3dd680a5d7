"""What can be set: options of one call, and the ``FUSEPLAN_*`` environment variables
(``FUSEPLAN_MEMO`` is ``fuseplan.memo``'s)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from costmodel.device import DeviceSpec, UnknownDeviceError
from fuseplan.calibrate import measured
from fuseplan.constraints import Constraints
from fuseplan.errors import InvalidArgumentError, UnknownNameError
from fuseplan.features import ALL_FEATURES, Features
from fuseplan.local import find_device, local_device
from fuseplan.planners import get_planner

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


def make_options(
    device: str | DeviceSpec | None = None,
    planner: str = "solver",
    deadline_s: float = DEFAULT_DEADLINE_S,
    strict: bool = False,
    constraints: Constraints | None = None,
    features: Features = ALL_FEATURES,
) -> Options:
    """Resolve and check options.

    ``device=None`` is the default backend's own device. Raises ``UnknownNameError`` for a
    device or planner that is not known and ``InvalidArgumentError`` for a deadline that is
    not a number of seconds, at least zero, or constraints or features of another type.
    """
    if not isinstance(planner, str):
        raise InvalidArgumentError(
            f"planner expects the name of one planner, got {planner!r}; fuseplan.compare takes several"
        )
    get_planner(planner)
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, (int, float)) or not deadline_s >= 0:
        raise InvalidArgumentError(
            f"deadline_s expects a number of seconds >= 0, got {deadline_s!r}. "
            "With 0 the planner answers at once with a heuristic's plan."
        )
    if constraints is not None and not isinstance(constraints, Constraints):
        raise InvalidArgumentError(
            f"constraints expects a fuseplan.Constraints, got {type(constraints).__name__}: write "
            "fuseplan.Constraints(must_fuse=[...], never_fuse=[...])"
        )
    if not isinstance(features, Features):
        raise InvalidArgumentError(
            f"features expects a fuseplan.Features, got {type(features).__name__}: write "
            "fuseplan.Features(siblings=False)"
        )
    return Options(resolve_device(device), planner, float(deadline_s), strict, constraints or None, features)


def with_figures(options: Options) -> Options:
    """``options`` with a device whose figures prices can rest on: a CPU that has not been measured is
    measured now, which takes seconds."""
    return replace(options, device=measured(options.device))


def resolve_device(device: str | DeviceSpec | None) -> DeviceSpec:
    """The device of that name; None is the device JAX runs on by default."""
    if device is None:
        return local_device()
    if not isinstance(device, (str, DeviceSpec)):
        raise InvalidArgumentError(
            f"device expects a name such as 'h200' or a costmodel.DeviceSpec, got {type(device).__name__}"
        )
    try:
        return find_device(device)
    except UnknownDeviceError as error:
        raise UnknownNameError(str(error)) from None


def debug_level() -> int:
    """``FUSEPLAN_DEBUG``: 1 the plan, 2 refusals too, 3 kernels too, 4 the graph too."""
    text = os.environ.get("FUSEPLAN_DEBUG", "0")
    return int(text) if text.isdigit() else 0


def dump_dir() -> Path | None:
    """``FUSEPLAN_DUMP``: a folder that receives every plan made, as JSON."""
    text = os.environ.get("FUSEPLAN_DUMP", "")
    return Path(text) if text else None


def is_disabled() -> bool:
    """``FUSEPLAN_DISABLE=1``: ``fuseplan.jit`` is ``jax.jit``."""
    return os.environ.get("FUSEPLAN_DISABLE", "") not in ("", "0")


def is_checked() -> bool:
    """``FUSEPLAN_CHECK=1``: every call is compared with JAX's own result."""
    return os.environ.get("FUSEPLAN_CHECK", "") not in ("", "0")
