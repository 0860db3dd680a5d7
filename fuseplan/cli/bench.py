"""The code of ``fuseplan bench plan``, ``bench solver`` and ``bench cpu``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from fuseplan.bench.cpu import PEERS, Case, bench_cases, colour, head_line, row_line, summary_lines
from fuseplan.bench.machine import machine_columns
from fuseplan.bench.planning import PlanTiming, Printable, csv_of, plan_table, time_plan
from fuseplan.bench.solver import (
    WORKLOADS,
    SolverTiming,
    bench_solver,
    solver_tables,
    steps_of,
    summary_line,
)
from fuseplan.cli.arguments import names_in
from fuseplan.cli.inputs import device_of, devices_of, load, load_planners
from fuseplan.console import print_json, print_table, progress
from fuseplan.settings import make_options
from fuseplan.support.atomic_file import write_text
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.workloads import GROUPS, load_workload
from fuseplan.workloads.cpu import get_cases
from fuseplan.workloads.own import OwnWorkload
from fuseplan.workloads.workload import make_args


def plan(
    workloads: str,
    device: str | None,
    device_file: Path | None,
    planner: str,
    planner_module: list[str] | None,
    dtype: str,
    small: bool,
    deadline: float,
    xla: bool,
    out: Path | None,
    json: bool,
) -> None:
    """``fuseplan bench plan``."""
    load_planners(planner_module)
    options = make_options(device_of(device, device_file, "h200"), planner, deadline)
    programs = _programs(workloads, dtype, small)
    rows: list[PlanTiming] = []
    with progress(len(programs) * (1 + xla)) as steps:
        for name, f, args in programs:
            rows.append(time_plan(name, f, args, options, xla, steps))
            if out is not None:  # after each row, so that an interrupted run keeps its results
                write_text(out, csv_of([asdict(row) | machine_columns() for row in rows]))
    if json:
        print_json([asdict(row) for row in rows])
    else:
        _print_tables(plan_table(rows))


def solver(
    workloads: str | None,
    device: str | None,
    device_file: list[Path] | None,
    dtype: str,
    small: bool,
    deadline: float,
    deadlines: str,
    repeats: int,
    ablation: bool,
    with_xla: bool,
    out: Path | None,
    csv: bool,
    json: bool,
) -> None:
    """``fuseplan bench solver``."""
    if json and csv:
        raise InvalidArgumentError("--csv and --json: expected one of the two")
    options = [make_options(d, "solver", deadline) for d in devices_of(device, device_file, "h200")]
    for option in options:
        if not option.device.capabilities.emits_kernels:
            raise InvalidArgumentError(
                f"on {option.device.name} XLA decides most itself: choose a GPU or TPU, such as --device h200"
            )
    limits = _seconds(deadlines, "--deadlines")
    programs = _programs(workloads or WORKLOADS, dtype, small)
    rows: list[SolverTiming] = []
    each = steps_of(limits, repeats, ablation, with_xla)
    with progress(len(options) * len(programs) * each) as steps:
        for option in options:
            for name, f, args in programs:
                rows.append(bench_solver(name, f, args, option, limits, repeats, ablation, with_xla, steps))
                if out is not None:  # after each row, so that an interrupted run keeps its results
                    write_text(out, csv_of([row.as_dict() | machine_columns() for row in rows]))
    records = [row.as_dict() for row in rows]
    if json:
        print_json(records)
    elif csv:
        print(csv_of(records), end="")
    else:
        by_device = [rows[i : i + len(programs)] for i in range(0, len(rows), len(programs))]
        _print_tables(table for of_device in by_device for table in solver_tables(of_device))
        print()
        if limits:
            print("–: within the deadline; !: over it by more than 0.1 s and a tenth.")
        for of_device in by_device:
            print(summary_line(of_device))


def cpu(
    names: list[str] | None,
    repeats: int,
    quick: bool,
    huge: bool,
    beside: str,
    out: Path | None,
    json: bool,
) -> None:
    """``fuseplan bench cpu``."""
    own = [name for name in names or () if ":" in name]
    cases = get_cases([name for name in names or () if name not in own], quick, huge) if names != own else []
    cases += [_own_case(name, quick) for name in own]
    others = names_in(beside, "--beside") if beside else ()
    if unknown := [name for name in others if name not in PEERS]:
        raise InvalidArgumentError(f"--beside expects some of {', '.join(PEERS)}, got {unknown[0]!r}")
    rows = []
    # On a terminal the progress bar redirects print(); in a pipe, write to the original stdout.
    on_terminal = sys.stdout.isatty()
    stdout = None if on_terminal else sys.stdout
    if not json:
        print(head_line())
    with progress(len(cases)) as steps:
        quickly = {"sample_s": 0.0} if quick else {}
        for row in bench_cases(cases, make_args, repeats, **quickly, steps=steps, beside=others):
            rows.append(row)
            if out is not None:  # after each row, so that an interrupted run keeps its results
                write_text(out, csv_of([asdict(row) for row in rows]))
            if not json:
                line = typer.style(row_line(row), fg=colour(row)) if on_terminal else row_line(row)
                print(line, file=stdout, flush=True)
    if json:
        print_json([asdict(row) for row in rows])
    else:
        print("\n".join(["", *summary_lines(rows)]))
    if any(row.status in ("wrong", "failed") for row in rows):
        raise typer.Exit(1)


def _own_case(name: str, small: bool) -> Case:
    """The case of a user's own workload. A function that returns ``(f, args)`` has one size."""
    workload = load_workload(name)
    return Case(name, *workload.build("float32", small and not isinstance(workload, OwnWorkload)))


def _programs(
    workloads: str, dtype: str, small: bool
) -> list[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """The name, the function and the arguments of each workload; of a group, of those whose packages are
    installed. The others are named on stderr."""
    names: list[str] = []
    for name in names_in(workloads, "--workloads"):
        for one, workload in GROUPS.get(name, {name: None}).items():
            if workload is None or not workload.missing:
                names.append(one)
            else:
                missing = " and ".join(workload.missing)
                print(f"left out: {one}, which needs {missing}, not installed", file=sys.stderr)
    return [(name, *load(name, dtype, small)) for name in dict.fromkeys(names)]


def _print_tables(tables: Iterable[Printable]) -> None:
    for i, (head, rows, right) in enumerate(tables):
        if i:
            print()
        print_table(head, rows, right=right)


def _seconds(text: str, option: str) -> list[float]:
    try:
        seconds = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        seconds = [-1.0]
    if not all(0 < s < float("inf") for s in seconds):
        raise InvalidArgumentError(f"{option} expects seconds above 0 with commas between, got {text!r}")
    return seconds
