"""Check the options of a call, and resolve its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from costmodel.device import DeviceSpec, UnknownDeviceError
from costmodel.device_fields import InvalidDeviceError
from costmodel.devices import DEVICES
from costmodel.model import CostModel, CostModelError, plain_device, with_cost_model
from fuseplan.plan.constraints import Constraints
from fuseplan.plan.options import ALL_FEATURES, DEFAULT_DEADLINE_S, Features, Options
from fuseplan.planners import get_planner
from fuseplan.support.errors import InvalidArgumentError, UnknownNameError
from fuseplan.targets.calibrate import measured, unmeasured_cpu
from fuseplan.targets.detect import find_device, local_device


def make_options(
    device: str | DeviceSpec | None = None,
    planner: str = "solver",
    deadline_s: float = DEFAULT_DEADLINE_S,
    strict: bool = False,
    constraints: Constraints | None = None,
    features: Features = ALL_FEATURES,
    peers: Sequence[str] = (),
    cost_model: CostModel | None = None,
    patterns: tuple[Any, ...] = (),
) -> Options:
    """Check the options of a call, and resolve its device; ``None`` is the device of JAX's default backend.
    With a ``cost_model`` it is the device whose kernels that model prices.

    Raises:
        UnknownNameError: the device, the planner or one of ``peers`` is unknown.
        InvalidArgumentError: the deadline is no number of at least 0, or an option has another type.
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
    if isinstance(peers, str) or not all(isinstance(name, str) for name in peers):
        raise InvalidArgumentError(f"peers expects names of planners, such as ['xla'], got {peers!r}")
    for name in peers:
        get_planner(name)
    limits = constraints or None
    resolved = resolve_device(device)
    if cost_model is not None:
        try:
            resolved = with_cost_model(resolved, cost_model)
        except CostModelError as error:
            raise InvalidArgumentError(str(error)) from None
    return Options(resolved, planner, float(deadline_s), strict, limits, features, tuple(peers), patterns)


def with_figures(options: Options) -> Options:
    """``options`` with the measured figures of the device: measures this CPU if it has not been, which takes
    seconds."""
    device = options.device
    if device.cost_model is None:
        return replace(options, device=measured(device))
    plain, described = plain_device(device), unmeasured_cpu()
    known = measured(described if plain == described else plain)
    return replace(options, device=with_cost_model(known, device.cost_model))


def read_device(path: Path) -> DeviceSpec:
    """Read a device from a TOML file, as ``DeviceSpec.from_toml``.

    Raises:
        InvalidArgumentError: the file cannot be read, a field is unknown, missing or out of its range, or it
            has other figures than the known device of its name.
    """
    try:
        device = DeviceSpec.from_toml(path)
    except OSError as error:
        raise InvalidArgumentError(f"cannot read the device file {path}: {error.strerror}") from None
    except InvalidDeviceError as error:
        raise InvalidArgumentError(str(error)) from None
    if device.name == "cpu" or DEVICES.get(device.name, device) != device:
        raise InvalidArgumentError(
            f"{path}: name: {device.name!r} is a known device, and this one has figures of its own: give it "
            "another name"
        )
    return device


def resolve_device(device: str | DeviceSpec | None) -> DeviceSpec:
    """The device of that name; None is the device that JAX runs on by default."""
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
