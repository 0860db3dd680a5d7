"""``fuseplan compare``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fuseplan.cli.arguments import (
    ALL_PLANNERS,
    DEADLINE_S,
    Deadline,
    Devices,
    Dtype,
    Json,
    MaxArgs,
    MaxGroup,
    MaxPeak,
    Measure,
    MustFuse,
    NeverFuse,
    Out,
    Planners,
    Small,
    WorkloadName,
    constraints_of,
)
from fuseplan.cli.plans import plan_all

if TYPE_CHECKING:
    from fuseplan.config import Options
    from fuseplan.constraints import Constraints
    from fuseplan.contest import Timing
    from fuseplan.plan import Plan


def compare(
    workload: WorkloadName,
    device: Devices = None,
    planners: Planners = ALL_PLANNERS,
    dtype: Dtype = "float32",
    small: Small = False,
    deadline: Deadline = DEADLINE_S,
    must_fuse: MustFuse = None,
    never_fuse: NeverFuse = None,
    max_peak_bytes: MaxPeak = None,
    max_group_size: MaxGroup = None,
    max_kernel_args: MaxArgs = None,
    measure: Measure = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Plan WORKLOAD by each planner: a row each. --measure runs them here, too. --out writes CSV."""
    from fuseplan.bench import csv_of
    from fuseplan.console import print_json, print_table
    from fuseplan.output import write_text
    from fuseplan.report import compare_frame, records
    from fuseplan.text import all_notes, wrapped

    constraints = constraints_of(must_fuse, never_fuse, max_peak_bytes, max_group_size, max_kernel_args)
    asked = (workload, device, planners, dtype, small, deadline, constraints)
    run = _to_run(*asked) if measure else None
    by_device = plan_all(*asked)
    timings = _timed(*run) if run is not None else None
    lines: list[dict[str, Any]] = []
    for plans in by_device:
        frame = compare_frame(plans, timings)
        frame.insert(0, "device", plans[0].device.name)
        lines += records(frame)
    if out is not None:
        write_text(out, csv_of(lines))
    if json:
        print_json(lines)
        return
    for i, plans in enumerate(by_device):
        if i:
            print()
        title = f"{workload} on {plans[0].device.name}, modelled"
        print_table(*_rows(plans), right=(1, 2, 3, 4, 5, 7), title=title)
        if timings is not None:
            print()
            print_table(*_measured(plans, timings), right=(1, 2, 3, 4), title=f"{workload} here, measured")
        for note in dict.fromkeys(note for plan in plans for note in all_notes(plan)):
            by = [plan.planner for plan in plans if note in all_notes(plan)]
            whose = "note" if len(by) == len(plans) else ", ".join(by)
            print("\n".join(wrapped(f"{whose}: {note}", 80, "      ")))


def _to_run(
    workload: str,
    device: str | None,
    planners: str,
    dtype: str,
    small: bool,
    deadline: float,
    constraints: Constraints,
) -> tuple[Any, Any, list[Options]]:
    """The function, random arguments, and how each planner plans it; refused before anything is planned."""
    from experiments.sampling import make_args
    from fuseplan.cli.arguments import load, names_in
    from fuseplan.config import make_options
    from fuseplan.contest import require_measurable

    chosen = names_in(device, "--device") if device is not None else [None]
    names = names_in(planners, "--planners")
    options = [make_options(d, p, deadline, constraints=constraints) for d in chosen for p in names]
    f, shapes = load(workload, dtype, small)
    args = make_args(shapes)
    require_measurable(options, args, {})
    return f, args, options


def _timed(f: Any, args: Any, options: list[Options]) -> list[Timing]:
    """Each planner's program against ``jax.jit``'s."""
    from fuseplan.console import progress
    from fuseplan.contest import time_each

    running = time_each(f, args, {}, options)
    timings = []
    with progress(len(options)) as steps:
        for option in options:
            steps.start(f"running {option.planner}")
            timings.append(next(running))
            steps.done()
    return timings


def _measured(plans: list[Plan], timings: list[Timing]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The head and the rows of a table of what was measured."""
    from fuseplan.text import time_text

    head = ("planner", "µs", "of jax.jit's", "temporary MB", "of jax.jit's")
    rows = [
        (
            plan.planner,
            "" if t.time_s is None else time_text(1e6 * t.time_s),
            "" if t.time_ratio is None else f"{t.time_ratio:.2f}",
            "" if t.temp_bytes is None else f"{t.temp_bytes / 1e6:,.1f}",
            "" if t.temp_ratio is None else f"{t.temp_ratio:.2f}",
        )
        for plan, t in zip(plans, timings, strict=True)
    ]
    return head, rows


def _rows(plans: list[Plan]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The head and the rows of a table of plans of one function on one device."""
    from fuseplan.text import seconds_text, time_text

    first_ps = plans[0].objective_ps
    head = ("planner", "kernels", "µs", "speed-up", "HBM MB", "peak MB", "optimal", "planning")
    rows = [
        (
            plan.planner,
            str(len(plan.kernels)),
            time_text(plan.objective_us),
            f"{first_ps / plan.objective_ps:.2f}×" if plan.objective_ps else "",
            f"{plan.hbm_bytes / 1e6:,.1f}",
            f"{plan.peak_bytes / 1e6:,.1f}",
            _proof_text(plan),
            seconds_text(plan.planning_s),
        )
        for plan in plans
    ]
    return head, rows


def _proof_text(plan: Plan) -> str:
    """As ``status_text``, shorter: a table of every planner fits 80 columns."""
    if plan.status == "OPTIMAL":
        return "proven"
    return "" if plan.gap is None else f"gap {100 * plan.gap:.1f} %"
