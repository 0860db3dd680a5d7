"""``fuseplan report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fuseplan.cli.arguments import (
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
    Planners,
    Small,
    WorkloadName,
    constraints_of,
)
from fuseplan.cli.plans import plan_all
from fuseplan.console import print_json
from fuseplan.report.page import Page, Study, write_page
from fuseplan.support.atomic_file import check_writable


def report(
    workload: WorkloadName,
    device: Devices = None,
    planners: Planners = None,
    dtype: Dtype = "float32",
    small: Small = False,
    deadline: Deadline = DEADLINE_S,
    must_fuse: MustFuse = None,
    never_fuse: NeverFuse = None,
    max_peak_bytes: MaxPeak = None,
    max_group_size: MaxGroup = None,
    max_kernel_args: MaxArgs = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The page. Default: fuseplan-WORKLOAD.html."),
    ] = None,
    json: Json = False,
) -> None:
    """Write an HTML page about WORKLOAD; the last planner's plan is shown in detail."""
    target = check_writable(out or f"fuseplan-{workload.rpartition(':')[2]}.html")
    constraints = constraints_of(must_fuse, never_fuse, max_peak_bytes, max_group_size, max_kernel_args)
    by_device = plan_all(workload, device, planners, dtype, small, deadline, constraints)
    studies = tuple(Study.of(workload, of_device.rows) for of_device in by_device)
    write_page(Page(workload, studies), target)
    if json:
        print_json({"page": str(target)})
    else:
        print(f"wrote {target}")
