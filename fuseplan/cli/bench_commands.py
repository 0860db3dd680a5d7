"""``fuseplan bench plan``, ``bench solver`` and ``bench cpu``: their options and help. Their code is in
``bench``."""

from __future__ import annotations

from typing import Annotated

import typer

from fuseplan.cli.arguments import (
    Deadline,
    Device,
    DeviceFile,
    DeviceFiles,
    Devices,
    Dtype,
    Json,
    Out,
    Planner,
    PlannerModules,
    Small,
)
from fuseplan.cli.lazily import command
from fuseplan.support.work import DEFAULT_DEADLINE_S

FAMILIES = ("general", "published", "large", "stress", "packages")
"""The groups of workloads that ``bench solver`` takes by name: those of ``fuseplan.workloads.GROUPS``, whose
module imports JAX."""

PEERS = ("torch", "keops")
"""The other systems of ``bench cpu``: those of ``fuseplan.bench.cpu.PEERS``."""

bench = typer.Typer(no_args_is_help=True, help="Measure fuseplan itself.")


@command(bench, "fuseplan.cli.bench")
def plan(
    workloads: Annotated[
        str, typer.Option("--workloads", metavar="NAME,…", help="As WORKLOAD of the other commands.")
    ] = "gpt2_block,gpt2_block_grad,gpt2_train_4,gpt2_train_24",
    device: Device = None,
    device_file: DeviceFile = None,
    planner: Planner = "solver",
    planner_module: PlannerModules = None,
    dtype: Dtype = "float32",
    small: Small = False,
    deadline: Deadline = DEFAULT_DEADLINE_S,
    xla: Annotated[bool, typer.Option("--xla/--no-xla", help="Time XLA's compiler here too.")] = True,
    out: Out = None,
    json: Json = False,
) -> None:
    """Time the planning of each workload, stage by stage.

    XLA's compile time is beside it. The device is an h200 by default.
    """


@command(bench, "fuseplan.cli.bench")
def solver(
    workloads: Annotated[
        str | None,
        typer.Option(
            "--workloads",
            metavar="NAME,…",
            help=f"Workloads, or groups of them: {', '.join(FAMILIES)}. Default: those made for it.",
        ),
    ] = None,
    device: Devices = None,
    device_file: DeviceFiles = None,
    dtype: Dtype = "float32",
    small: Small = False,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", min=0, help="For the proofs and the stages.")
    ] = DEFAULT_DEADLINE_S,
    deadlines: Annotated[
        str, typer.Option("--deadlines", metavar="SECONDS,…", help="What is reached in this time.")
    ] = "0.1,1,5",
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Plans of each kind.")] = 3,
    ablation: Annotated[
        bool, typer.Option("--ablation/--no-ablation", help="Switch each feature off alone.")
    ] = True,
    with_xla: Annotated[bool, typer.Option("--with-xla", help="Time XLA's compiler here too.")] = False,
    out: Out = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV on stdout.")] = False,
    json: Json = False,
) -> None:
    """Measure how well and how fast each workload is planned.

    No kernel is run. The device is an h200 by default. --out writes CSV.
    """


@command(bench, "fuseplan.cli.bench")
def cpu(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORKLOAD]...", help="As of the other commands. Default: all."),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Samples of each.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Small, ragged sizes: does it work?")] = False,
    huge: Annotated[bool, typer.Option("--huge", help="What jax.jit cannot hold in memory.")] = False,
    beside: Annotated[
        str, typer.Option("--beside", metavar="NAME,…", help=f"Other systems: {', '.join(PEERS)}.")
    ] = "",
    out: Out = None,
    json: Json = False,
) -> None:
    """Time fuseplan.jit against jax.jit on this CPU.

    Memory and results are compared, too.

    Exit code 1 if a result is wrong or a workload fails; a missed goal is a finding, not an error.
    """
