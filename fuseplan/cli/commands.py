"""The command line: its commands with their options and help, and the version, warnings and errors of all.

A function here declares a command; its code is the function of the same name in another module, which is
imported when the command runs (``lazily.command``). Nothing here imports JAX.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from fuseplan.cli.arguments import (
    Deadline,
    Device,
    DeviceFile,
    DeviceFiles,
    Devices,
    Dtype,
    Json,
    MaxArgs,
    MaxGroup,
    MaxPeak,
    MustFuse,
    NeverFuse,
    Out,
    Planner,
    PlannerModules,
    Planners,
    Small,
    WorkloadName,
    writable,
)
from fuseplan.cli.bench_commands import bench
from fuseplan.cli.failures import show_failure
from fuseplan.cli.lazily import command
from fuseplan.support.environment import installed_version
from fuseplan.support.errors import FuseplanError, FuseplanWarning
from fuseplan.support.work import DEFAULT_DEADLINE_S


class _Commands(typer.core.TyperGroup):
    """Commands that print a ``FuseplanError`` as one line on stderr and exit with code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FuseplanError as error:
            print(f"fuseplan: {_one_line(error)}", file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes longer to import than all the rest of the help
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Decide which operations of a JAX function share a kernel, with a proof.",
    epilog="Exit codes: 0 done; 1 what was checked does not hold (verify, diff, bench cpu, calibrate), or "
    "your function failed; 2 a mistake in the command, told in one line on stderr; 3 verify did not re-check "
    "a bound.",
)


@command(app, "fuseplan.cli.tools")
def demo(
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", callback=writable, help="The HTML page.")
    ] = Path("fuseplan-demo.html"),
    small: Small = False,
    dtype: Dtype = "float32",
    deadline: Deadline = DEFAULT_DEADLINE_S,
    json: Json = False,
) -> None:
    """Plan a GPT-2 block and its gradient, and run both here.

    The plans are for an H200, a TPU v5e and this CPU.
    """


@command(app, "fuseplan.cli.planning")
def compare(
    workload: WorkloadName,
    device: Devices = None,
    device_file: DeviceFiles = None,
    planners: Planners = None,
    planner_module: PlannerModules = None,
    dtype: Dtype = "float32",
    small: Small = False,
    deadline: Deadline = DEFAULT_DEADLINE_S,
    must_fuse: MustFuse = None,
    never_fuse: NeverFuse = None,
    max_peak_bytes: MaxPeak = None,
    max_group_size: MaxGroup = None,
    max_kernel_args: MaxArgs = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run each program here, beside jax.jit's.")
    ] = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Plan WORKLOAD by each planner, and print a row for each.

    --measure also runs them. --out writes CSV.
    """


@command(app, "fuseplan.cli.planning")
def plan(
    workload: WorkloadName,
    device: Device = None,
    device_file: DeviceFile = None,
    planner: Planner = "solver",
    planner_module: PlannerModules = None,
    dtype: Dtype = "float32",
    small: Small = False,
    deadline: Deadline = DEFAULT_DEADLINE_S,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on an operation without a rule.")] = False,
    peers: Annotated[
        str | None,
        typer.Option(
            "--peers", metavar="NAME,…", help="Planners whose plans are made too; the fastest is used."
        ),
    ] = None,
    must_fuse: MustFuse = None,
    never_fuse: NeverFuse = None,
    max_peak_bytes: MaxPeak = None,
    max_group_size: MaxGroup = None,
    max_kernel_args: MaxArgs = None,
    show_kernel: Annotated[
        int | None,
        typer.Option(
            "--show-kernel", metavar="K", min=0, help="Print the code of kernel K, and nothing else."
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="With --show-kernel: as compiled (extra aot).")
    ] = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Plan WORKLOAD, and print its kernels.

    --out and --json write the plan as JSON, for `fuseplan verify`, `explain` and `diff`.
    """


@command(app, "fuseplan.cli.planning")
def explain(
    workload: Annotated[
        str,
        typer.Argument(
            metavar="WORKLOAD|PLAN.json",
            help="A workload, as for `fuseplan plan`, or a plan that it wrote; - is a plan on stdin.",
            show_default=False,
        ),
    ],
    operations: Annotated[
        str,
        typer.Argument(metavar="A,B", help="Two operations, by name or number.", show_default=False),
    ],
    device: Device = None,
    device_file: DeviceFile = None,
    planner: Planner = "solver",
    planner_module: PlannerModules = None,
    dtype: Dtype = "float32",
    small: Small = False,
    deadline: Deadline = DEFAULT_DEADLINE_S,
    must_fuse: MustFuse = None,
    never_fuse: NeverFuse = None,
    max_peak_bytes: MaxPeak = None,
    max_group_size: MaxGroup = None,
    max_kernel_args: MaxArgs = None,
    json: Json = False,
) -> None:
    """Say why two operations do, or do not, share a kernel.

    The answer has what the opposite would cost.
    """


@command(app, "fuseplan.cli.plans")
def diff(
    one: Annotated[
        Path, typer.Argument(metavar="A.json", help="As `fuseplan plan --out` writes it.", show_default=False)
    ],
    other: Annotated[Path, typer.Argument(metavar="B.json", help="Another; - is stdin.", show_default=False)],
    json: Json = False,
) -> None:
    """Compare two plans, kernel by kernel.

    The kernels that differ are listed with their costs, and the operations that moved.
    Exit code 0: the plans have the same kernels. 1: they differ. 2: a file holds no plan.
    """


@command(app, "fuseplan.cli.plans")
def verify(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN.json", help="As `fuseplan plan --out` writes it; - is stdin.", show_default=False
        ),
    ],
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            metavar="SECONDS",
            min=0,
            help="Seconds after which the bound is not re-checked.",
            show_default="none",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Re-check a plan's kernels, costs and bound, without the solver.

    Exit code 0: all of it holds. 1: refuted, with the reason. 2: not a plan.
    3: the kernels are right, but the bound was not re-checked.
    """


@command(app, "fuseplan.cli.planning")
def report(
    workload: WorkloadName,
    device: Devices = None,
    device_file: DeviceFiles = None,
    planners: Planners = None,
    planner_module: PlannerModules = None,
    dtype: Dtype = "float32",
    small: Small = False,
    deadline: Deadline = DEFAULT_DEADLINE_S,
    must_fuse: MustFuse = None,
    never_fuse: NeverFuse = None,
    max_peak_bytes: MaxPeak = None,
    max_group_size: MaxGroup = None,
    max_kernel_args: MaxArgs = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The page. Default: fuseplan-WORKLOAD.html.")
    ] = None,
    json: Json = False,
) -> None:
    """Write an HTML page about the plans of WORKLOAD.

    The last planner's plan is shown in detail.
    """


@command(app, "fuseplan.cli.tools")
def workloads(
    text: Annotated[
        str, typer.Argument(metavar="[TEXT]", help="Only those with this text.", show_default=False)
    ] = "",
    operations: Annotated[
        bool, typer.Option("--operations", help="Trace each, which takes a while, and count its operations.")
    ] = False,
    json: Json = False,
) -> None:
    """List the named workloads, and what they compute."""


@command(app, "fuseplan.cli.tools")
def devices(
    toml: Annotated[
        str | None,
        typer.Option("--toml", metavar="NAME", help="Print this one as a file for --device-file, to edit."),
    ] = None,
    json: Json = False,
) -> None:
    """List the known devices; --json adds the source of each figure."""


@command(app, "fuseplan.cli.tools")
def calibrate(
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", min=0, help="How long to try on a busy machine.")
    ] = 60.0,
    json: Json = False,
) -> None:
    """Measure this machine's CPU anew, and keep the figures.

    It takes some ten seconds when the machine is idle. A figure is taken when its timings agree. Exit code
    1: some did not in time; they keep the values of an earlier measurement, or stay assumed.
    """


@command(app, "fuseplan.cli.tools")
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete all of them.")] = False, json: Json = False
) -> None:
    """Show how many solutions of earlier plans are on disk.

    FUSEPLAN_CACHE=1 keeps them there.
    """


app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line."""
    warnings.showwarning = _show_warning
    try:
        app(prog_name="fuseplan")
    except Exception as error:  # of the user's function or module, or a defect
        show_failure(error)
        sys.exit(1)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _show_warning(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, FuseplanWarning):
        print(f"warning: {_one_line(message)}", file=sys.stderr)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"fuseplan {installed_version('fuseplan', '0+unknown (not installed)')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass
