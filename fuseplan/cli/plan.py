"""``fuseplan plan``."""

from __future__ import annotations

from typing import Annotated

import typer

from fuseplan.cli.arguments import (
    DEADLINE_S,
    Deadline,
    Device,
    Dtype,
    Json,
    MaxArgs,
    MaxGroup,
    MaxPeak,
    MustFuse,
    NeverFuse,
    Out,
    Planner,
    Small,
    WorkloadName,
    constraints_of,
    load,
    operation,
)
from fuseplan.console import progress
from fuseplan.pipeline import plan_function
from fuseplan.public_plan import Plan
from fuseplan.settings import make_options
from fuseplan.support.atomic_file import write_text
from fuseplan.support.errors import InvalidArgumentError


def plan(
    workload: WorkloadName,
    device: Device = None,
    planner: Planner = "solver",
    dtype: Dtype = "float32",
    small: Small = False,
    deadline: Deadline = DEADLINE_S,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on an operation without a rule.")] = False,
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="A,B", help="Why these operations are (not) in one kernel."),
    ] = None,
    must_fuse: MustFuse = None,
    never_fuse: NeverFuse = None,
    max_peak_bytes: MaxPeak = None,
    max_group_size: MaxGroup = None,
    max_kernel_args: MaxArgs = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Plan WORKLOAD and print its kernels. --out and --json write the plan as JSON, for `fuseplan verify`."""
    constraints = constraints_of(must_fuse, never_fuse, max_peak_bytes, max_group_size, max_kernel_args)
    options = make_options(device, planner, deadline, strict, constraints)
    ends = None if explain is None else _two_operations(explain)
    f, args = load(workload, dtype, small)
    with progress(1) as steps:
        steps.start(f"planning {workload}")
        made = Plan.of(plan_function(f, args, {}, options))
    answer = None if ends is None else made.explain(*ends)
    if out is not None:
        write_text(out, made.to_json())
    if json:
        print(made.to_json())
    elif answer is not None:
        print(answer)
    else:
        print(f"{made}\n\n{made.summary()}")
        if made.refusals:
            print("\nrefused fusions, by kind", *made.refusals, sep="\n  ")


def _two_operations(text: str) -> tuple[int | str, int | str]:
    ends = text.split(",")
    if len(ends) != 2:
        raise InvalidArgumentError(f"--explain expects two operations, such as 3,7 or exp,mul; got {text!r}")
    return operation(ends[0]), operation(ends[1])
