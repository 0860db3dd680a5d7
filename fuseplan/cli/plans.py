"""Plans of one function for several devices, by several planners."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplan.cli.arguments import load, names_in

if TYPE_CHECKING:
    from fuseplan.constraints import Constraints
    from fuseplan.plan import Plan


def plan_all(
    workload: str,
    device: str | None,
    planners: str,
    dtype: str,
    small: bool,
    deadline: float,
    constraints: Constraints,
) -> list[list[Plan]]:
    """For each device, a plan by each planner, all of one trace."""
    from fuseplan.config import make_options
    from fuseplan.console import progress
    from fuseplan.lower import lower
    from fuseplan.planner import plan_best
    from fuseplan.trace import trace

    names = names_in(planners, "--planners")
    chosen: list[str | None] = list(names_in(device, "--device")) if device is not None else [None]
    options = [[make_options(d, p, deadline, constraints=constraints) for p in names] for d in chosen]
    f, args = load(workload, dtype, small)
    result = []
    with progress(len(names) * len(chosen)) as steps:
        steps.start(f"tracing {workload}")
        lowered = lower(trace(f, *args))
        for of_device in options:
            plans = []
            for option in of_device:
                steps.start(f"{option.device.name}: {option.planner}")
                plans.append(plan_best(lowered, option)[1])
                steps.done()
            result.append(plans)
    return result
