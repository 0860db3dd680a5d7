"""Plans of one function for several devices, by several planners."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.device import DeviceSpec
from fuseplan.cli.arguments import load, names_in
from fuseplan.console import progress
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.constraints import Constraints
from fuseplan.plan.options import Options
from fuseplan.report.comparison import Compared
from fuseplan.runtime.compare import compare_plan, default_planners
from fuseplan.settings import make_options, resolve_device


@dataclass(frozen=True, slots=True)
class OfDevice:
    """The plans of a function on one device; ``rows[i]`` is by ``options[i]``."""

    device: DeviceSpec
    options: tuple[Options, ...]
    rows: tuple[Compared, ...]


def options_of(
    device: str | None, planners: str | None, deadline: float, constraints: Constraints
) -> list[list[Options]]:
    """For each device, the options of each planner."""
    chosen: list[str | None] = list(names_in(device, "--device")) if device is not None else [None]
    named = names_in(planners, "--planners") if planners is not None else None
    return [
        [
            make_options(spec, name, deadline, constraints=constraints)
            for name in named or default_planners(spec)
        ]
        for spec in map(resolve_device, chosen)
    ]


def plan_all(
    workload: str,
    device: str | None,
    planners: str | None,
    dtype: str,
    small: bool,
    deadline: float,
    constraints: Constraints,
) -> list[OfDevice]:
    """Trace a function once, and plan it for each device by each planner."""
    options = options_of(device, planners, deadline, constraints)
    f, args = load(workload, dtype, small)
    result = []
    with progress(sum(map(len, options))) as steps:
        steps.start(f"tracing {workload}")
        lowered = lower(trace(f, *args))
        for of_device in options:
            spec = of_device[0].device
            rows = []
            for option in of_device:
                steps.start(f"{spec.name}: {option.planner}")
                rows.append(compare_plan(lowered, option))
                steps.done()
            result.append(OfDevice(spec, tuple(of_device), tuple(rows)))
    return result
