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
    out: Out = None,
    json: Json = False,
) -> None:
    """Plan WORKLOAD by each planner: a row each. --out writes them as CSV."""
    from fuseplan.bench import csv_of
    from fuseplan.console import print_json, print_table
    from fuseplan.output import write_text
    from fuseplan.report import compare_frame, records

    constraints = constraints_of(must_fuse, never_fuse, max_peak_bytes, max_group_size, max_kernel_args)
    by_device = plan_all(workload, device, planners, dtype, small, deadline, constraints)
    lines: list[dict[str, Any]] = []
    for plans in by_device:
        frame = compare_frame(plans)
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
        print_table(
            *_rows(plans),
            right=(1, 2, 3, 4, 5, 7),
            title=f"{workload} on {plans[0].device.name}, modelled",
        )
        for note in dict.fromkeys(note for plan in plans for note in plan.notes):
            print(f"note: {note}")


def _rows(plans: list[Plan]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The head and the rows of a table of plans of one function on one device."""
    from fuseplan.text import seconds_text, time_text

    first_ps = plans[0].objective_ps
    head = ("planner", "kernels", "µs", "speed-up", "HBM MB", "peak MB", "proof", "planning")
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
    """As ``status_text``, shorter."""
    from fuseplan.text import status_text

    if plan.status == "OPTIMAL" or plan.gap is None:
        return status_text(plan)
    return f"gap {100 * plan.gap:.1f} %"
