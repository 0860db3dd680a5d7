"""``fuseplan demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fuseplan.cli.arguments import DEADLINE_S, Deadline, Dtype, Json, Small, load, writable
from fuseplan.console import print_json, progress
from fuseplan.demo import Program, print_demo, run_demo
from fuseplan.workloads.sampling import make_args


def demo(
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", callback=writable, help="The HTML page.")
    ] = Path("fuseplan-demo.html"),
    small: Small = False,
    dtype: Dtype = "float32",
    deadline: Deadline = DEADLINE_S,
    json: Json = False,
) -> None:
    """Plan a GPT-2 block and its gradient for three devices, and run both here."""
    programs = []
    for name in ("gpt2_block", "gpt2_block_grad"):
        f, args = load(name, dtype, small)
        programs.append(Program(name, f, args, make_args(args)))
    with progress(1) as steps:
        result = run_demo(programs, out, deadline, steps)
    if json:
        print_json(result.as_dict())
    else:
        print_demo(result)
