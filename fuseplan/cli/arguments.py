"""Arguments and options that several commands share, and the functions that parse their values. Nothing here
imports JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fuseplan.plan.constraints import Constraints
from fuseplan.support.atomic_file import check_writable
from fuseplan.support.errors import InvalidArgumentError


def writable(path: Path | None) -> Path | None:
    """Return ``path``. Raises ``OutputError``, before any other work, if the file cannot be written."""
    return None if path is None else check_writable(path)


_WORKLOAD_HELP = "A named workload, or package.module:function or file.py:function, which returns (f, args)."
WorkloadName = Annotated[str, typer.Argument(metavar="WORKLOAD", help=_WORKLOAD_HELP, show_default=False)]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="One of `fuseplan devices`, or NAME:BACKEND. Default: this machine's.",
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME[,NAME]",
        help="Some of `fuseplan devices`, or NAME:BACKEND. Default: this machine's.",
    ),
]
DeviceFile = Annotated[
    Path | None,
    typer.Option("--device-file", metavar="SPEC.toml", help="A device of your own, in place of --device."),
]
DeviceFiles = Annotated[
    list[Path] | None,
    typer.Option("--device-file", metavar="SPEC.toml", help="A device of your own. Repeatable."),
]
PlannerModules = Annotated[
    list[str] | None,
    typer.Option(
        "--planner-module", metavar="MODULE", help="A module or file.py that registers planners. Repeatable."
    ),
]
Planner = Annotated[
    str, typer.Option("--planner", metavar="NAME", help="A planner that `compare` lists, or xla.")
]
Planners = Annotated[
    str | None,
    typer.Option("--planners", metavar="NAME,…", help="Default: all, with xla if its compiler is installed."),
]
Dtype = Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="Of a named workload's arrays.")]
Small = Annotated[bool, typer.Option("--small", help="A named workload's small, ragged size.")]
Deadline = Annotated[float, typer.Option("--deadline", metavar="SECONDS", min=0, help="For each plan.")]
MustFuse = Annotated[
    list[str] | None,
    typer.Option("--must-fuse", metavar="A,B", help="One kernel holds these and all between. Repeatable."),
]
NeverFuse = Annotated[
    list[str] | None,
    typer.Option(
        "--never-fuse", metavar="A,B", help="No kernel holds both; of one name: it is alone. Repeatable."
    ),
]
MaxPeak = Annotated[
    int | None,
    typer.Option("--max-peak-bytes", metavar="N", min=1, help="Most HBM bytes of temporaries at once."),
]
MaxGroup = Annotated[
    int | None, typer.Option("--max-group-size", metavar="N", min=1, help="Most operations in a kernel.")
]
MaxArgs = Annotated[
    int | None,
    typer.Option("--max-kernel-args", metavar="N", min=1, help="Most arrays a kernel reads and writes."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", callback=writable, help="A file to write.")
]


def names_in(text: str, option: str) -> list[str]:
    """Split the value of ``option`` at commas. Raises ``InvalidArgumentError`` if it holds no name."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidArgumentError(f"{option} expects one or more names with commas between, got {text!r}")
    return names


def operation(text: str) -> int | str:
    """Parse an operation: its id if the text is a number, else its name."""
    text = text.strip()
    return int(text) if text.isdigit() else text


def constraints_of(
    must_fuse: list[str] | None,
    never_fuse: list[str] | None,
    max_peak_bytes: int | None,
    max_group_size: int | None,
    max_kernel_args: int | None,
) -> Constraints:
    """The ``Constraints`` that the five constraint options describe."""

    def entries(texts: list[str] | None, option: str) -> list[Any]:
        found = [[operation(name) for name in names_in(text, option)] for text in texts or ()]
        return [entry[0] if len(entry) == 1 else entry for entry in found]

    return Constraints(
        entries(must_fuse, "--must-fuse"),
        entries(never_fuse, "--never-fuse"),
        max_peak_bytes,
        max_group_size,
        max_kernel_args,
    )
