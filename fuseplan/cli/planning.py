"""The commands that plan: ``fuseplan plan``, ``explain``, ``compare`` and ``report``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from costmodel.device import DeviceSpec
from fuseplan.bench.planning import csv_of
from fuseplan.cli.arguments import constraints_of, names_in, operation
from fuseplan.cli.inputs import device_of, devices_of, load, load_planners
from fuseplan.cli.plans import read_file
from fuseplan.console import print_json, print_table, progress
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.pipeline import plan_function
from fuseplan.plan.constraints import Constraints
from fuseplan.plan.options import Options
from fuseplan.planners import has_fixed_kernels
from fuseplan.public_plan import Plan, PlanKernel
from fuseplan.report.comparison import Compared, Timing, baseline_of, divergence_lines, gains_text, speed_up
from fuseplan.report.frames import compare_frame, records
from fuseplan.report.page import Page, Study, write_page
from fuseplan.report.text import bound_lines, bound_text
from fuseplan.runtime.compare import (
    compare_plan,
    default_planners,
    require_measurable,
    require_plan,
    time_rows,
)
from fuseplan.settings import make_options
from fuseplan.support.atomic_file import check_writable, write_text
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.support.format import seconds_text, time_text, times_text, wrapped
from fuseplan.support.work import DEFAULT_DEADLINE_S
from fuseplan.workloads.workload import make_args


def plan(
    workload: str,
    device: str | None,
    device_file: Path | None,
    planner: str,
    planner_module: list[str] | None,
    dtype: str,
    small: bool,
    deadline: float,
    strict: bool,
    peers: str | None,
    must_fuse: list[str] | None,
    never_fuse: list[str] | None,
    max_peak_bytes: int | None,
    max_group_size: int | None,
    max_kernel_args: int | None,
    show_kernel: int | None,
    compiled: bool,
    out: Path | None,
    json: bool,
) -> None:
    """``fuseplan plan``."""
    if compiled and show_kernel is None:
        raise InvalidArgumentError("--compiled shows a compiled kernel: add --show-kernel K")
    load_planners(planner_module)
    constraints = constraints_of(must_fuse, never_fuse, max_peak_bytes, max_group_size, max_kernel_args)
    names = [] if peers is None else names_in(peers, "--peers")
    chosen = device_of(device, device_file)
    result = _plan(
        workload, dtype, small, make_options(chosen, planner, deadline, strict, constraints, peers=names)
    )
    shown = None if show_kernel is None else _kernel(result, show_kernel)
    if out is not None:
        write_text(out, result.to_json())
    if shown is not None:
        code = shown.code(compiled)
        if json:
            print_json({"kernel": show_kernel, "code": code})
        else:
            print(code, end="")
        return
    if json:
        print(result.to_json())
        return
    print(f"{result}\n\n{result.summary()}")
    if result.refusals:
        print("\nrefused fusions, by kind")
        for refusal in result.refusals:
            print("\n".join(wrapped(f"  {refusal}", 80, "    ")))


def _kernel(plan: Plan, number: int) -> PlanKernel:
    if number >= len(plan.kernels):
        raise InvalidArgumentError(
            f"--show-kernel expects the number of a kernel from 0 to {len(plan.kernels) - 1}, got {number}"
            if plan.kernels
            else "--show-kernel expects a plan with kernels, and this one has none"
        )
    return plan.kernels[number]


def _plan(workload: str, dtype: str, small: bool, options: Options) -> Plan:
    f, args = load(workload, dtype, small)
    with progress(1) as steps:
        steps.start(f"planning {workload}")
        return Plan.of(plan_function(f, args, {}, options))


def explain(
    workload: str,
    operations: str,
    device: str | None,
    device_file: Path | None,
    planner: str,
    planner_module: list[str] | None,
    dtype: str,
    small: bool,
    deadline: float,
    must_fuse: list[str] | None,
    never_fuse: list[str] | None,
    max_peak_bytes: int | None,
    max_group_size: int | None,
    max_kernel_args: int | None,
    json: bool,
) -> None:
    """``fuseplan explain``."""
    ends = _two_operations(operations)
    if workload == "-" or workload.endswith(".json"):
        given = {
            "--device": device is not None,
            "--device-file": device_file is not None,
            "--planner": planner != "solver",
            "--planner-module": planner_module,
            "--dtype": dtype != "float32",
            "--small": small,
            "--deadline": deadline != DEFAULT_DEADLINE_S,
            "--must-fuse": must_fuse,
            "--never-fuse": never_fuse,
            "--max-peak-bytes": max_peak_bytes is not None,
            "--max-group-size": max_group_size is not None,
            "--max-kernel-args": max_kernel_args is not None,
        }
        _require_none(workload, [option for option, is_given in given.items() if is_given])
        result = Plan.of(read_file(Path(workload)))
    else:
        load_planners(planner_module)
        constraints = constraints_of(must_fuse, never_fuse, max_peak_bytes, max_group_size, max_kernel_args)
        chosen = device_of(device, device_file)
        options = make_options(chosen, planner, deadline, constraints=constraints)
        result = _plan(workload, dtype, small, options)
    answer = result.explain(*ends)
    if json:
        print_json(asdict(answer))
    else:
        for line in str(answer).splitlines():
            print("\n".join(wrapped(line, 80, "  ")))


def _require_none(file: str, options: Sequence[str]) -> None:
    """Raise ``InvalidArgumentError`` if there are options on planning beside a plan in a file."""
    if options:
        raise InvalidArgumentError(
            f"{', '.join(options)} and {file}: the plan of a file is explained as it is; leave out the "
            "one, or name a workload in place of the other"
        )


def _two_operations(text: str) -> tuple[int | str, int | str]:
    ends = text.split(",")
    if len(ends) != 2:
        raise InvalidArgumentError(f"expected two operations as A,B, such as 3,7 or exp,mul; got {text!r}")
    return operation(ends[0]), operation(ends[1])


@dataclass(frozen=True, slots=True)
class DevicePlans:
    """The plans of a function for one device; ``rows[i]`` is made with ``options[i]``."""

    device: DeviceSpec
    options: tuple[Options, ...]
    rows: tuple[Compared, ...]


def _make_options(
    devices: list[DeviceSpec], planners: str | None, deadline: float, constraints: Constraints
) -> list[list[Options]]:
    """For each device, the options of each planner."""
    chosen = None if planners is None else names_in(planners, "--planners")
    return [
        [
            make_options(device, planner, deadline, constraints=constraints)
            for planner in chosen or default_planners(device)
        ]
        for device in devices
    ]


def _plan_all(
    workload: str, f: Callable[..., Any], args: tuple[Any, ...], options: list[list[Options]]
) -> list[DevicePlans]:
    """Trace ``f`` once, and plan it for each device by each planner. Raises the first planner's error if none
    has a plan for any device."""
    result = []
    with progress(sum(map(len, options))) as steps:
        steps.start(f"tracing {workload}")
        lowered = lower(trace(f, *args))
        for options_of_device in options:
            device = options_of_device[0].device
            rows = []
            for option in options_of_device:
                steps.start(f"{device.name}: {option.planner}")
                rows.append(compare_plan(lowered, option))
                steps.done()
            result.append(DevicePlans(device, tuple(options_of_device), tuple(rows)))
    require_plan([row for planned in result for row in planned.rows])
    return result


def compare(
    workload: str,
    device: str | None,
    device_file: list[Path] | None,
    planners: str | None,
    planner_module: list[str] | None,
    dtype: str,
    small: bool,
    deadline: float,
    must_fuse: list[str] | None,
    never_fuse: list[str] | None,
    max_peak_bytes: int | None,
    max_group_size: int | None,
    max_kernel_args: int | None,
    measure: bool,
    out: Path | None,
    json: bool,
) -> None:
    """``fuseplan compare``."""
    load_planners(planner_module)
    constraints = constraints_of(must_fuse, never_fuse, max_peak_bytes, max_group_size, max_kernel_args)
    options = _make_options(devices_of(device, device_file), planners, deadline, constraints)
    f, args = load(workload, dtype, small)
    if measure:  # fail before planning where the programs cannot run here
        args = make_args(args)
        require_measurable([option for of_device in options for option in of_device], args, {})
    by_device = _plan_all(workload, f, args, options)
    timings = [_time(f, args, planned) if measure else None for planned in by_device]
    lines: list[dict[str, Any]] = []
    for planned, measured in zip(by_device, timings, strict=True):
        lines += records(compare_frame(planned.rows, measured, planned.device.name))
    if out is not None:
        write_text(out, csv_of(lines))
    if json:
        print_json(lines)
        return
    for i, (planned, measured) in enumerate(zip(by_device, timings, strict=True)):
        if i:
            print()
        rows = planned.rows
        head, lines_of_plans = _plans(rows)
        over = f" ({head[3]}: speed-up)" if head[3] else ""
        title = f"{workload} on {planned.device.name}, modelled{over}"
        print_table(head, lines_of_plans, right=(1, 2, 3, 4, 5, 7), title=title)
        print()
        print_table(*_gains(rows), right=(1, 2, 3), title="the same plans as traced, and rewritten")
        if measured is not None:
            print()
            print_table(*_measured(rows, measured), right=(1, 2, 3, 4), title=f"{workload} here, measured")
        for text in _sentences(planned, measured):
            print("\n".join(wrapped(text, 80, "      ")))


def _time(f: Callable[..., Any], args: tuple[Any, ...], planned: DevicePlans) -> list[Timing]:
    """Run the program of each planner here, in turns with that of ``jax.jit``."""
    running = time_rows(f, args, {}, planned.options, planned.rows)
    timings = []
    with progress(len(planned.rows)) as steps:
        for row in planned.rows:
            steps.start(f"running {row.planner}")
            timings.append(next(running))
            steps.done()
    return timings


_Printable = tuple[Sequence[str], Sequence[Sequence[str]]]
"""The head and the rows of a table."""


def _measured(rows: Sequence[Compared], timings: Sequence[Timing]) -> _Printable:
    """Make the table of measured times and temporaries, with their ratios to those of ``jax.jit``."""
    head = ("planner", "µs", "of jax.jit's", "temporary MB", "of jax.jit's")
    return head, [
        (
            row.planner,
            "" if t.time_s is None else time_text(1e6 * t.time_s),
            "" if t.time_ratio is None else f"{t.time_ratio:.2f}",
            "" if t.temp_bytes is None else f"{t.temp_bytes / 1e6:,.1f}",
            "" if t.temp_ratio is None else f"{t.temp_ratio:.2f}",
        )
        for row, t in zip(rows, timings, strict=True)
    ]


def _plans(rows: Sequence[Compared]) -> _Printable:
    """Make the table of the plans of one function for one device."""
    baseline = baseline_of(row.plan for row in rows if row.plan is not None)
    over = "" if baseline is None else f"over {baseline.planner}"
    head = ("planner", "kernels", "µs", over, "HBM MB", "peak MB", "bound", "planning")
    lines = []
    for row in rows:
        plan = row.plan
        if plan is None:
            lines.append((row.planner, *[""] * 5, "no plan", ""))
            continue
        faster = speed_up(plan, baseline)
        lines.append(
            (
                row.planner,
                str(len(plan.kernels)),
                time_text(plan.objective_us),
                "" if faster is None else times_text(faster),
                f"{plan.hbm_bytes / 1e6:,.1f}",
                f"{plan.peak_bytes / 1e6:,.1f}",
                bound_text(plan.status, plan.gap),
                seconds_text(plan.planning_s),
            )
        )
    return head, lines


def _gains(rows: Sequence[Compared]) -> _Printable:
    """Make the table of the gain from rewriting for each planner that groups operations."""
    head = ("planner", "as traced µs", "rewritten µs", "rewriting gains")
    return head, [
        (
            row.planner,
            "" if row.unrewritten_ps is None else time_text(row.unrewritten_ps / 1e6),
            time_text(row.plan.objective_us),
            "" if row.rewriting_gains is None else times_text(row.rewriting_gains),
        )
        for row in rows
        if row.plan is not None and not has_fixed_kernels(row.planner)
    ]


def _sentences(planned: DevicePlans, timings: Sequence[Timing] | None) -> list[str]:
    """Write the sentences below the tables: gains, bounds, differences from measured times, notes."""
    rows = planned.rows
    found = [gains_text(rows)] if gains_text(rows) else []
    found += bound_lines((row.planner, row.plan) for row in rows if row.plan is not None)
    if timings is not None:
        times = [
            (row.planner, row.plan.objective_us, None if t.time_s is None else 1e6 * t.time_s)
            for row, t in zip(rows, timings, strict=True)
            if row.plan is not None
        ]
        found += divergence_lines(times, planned.device.platform)
    for note in dict.fromkeys(note for row in rows for note in row.notes):
        by = [row.planner for row in rows if note in row.notes]
        found.append(f"{'note' if len(by) == len(rows) else ', '.join(by)}: {note}")
    return found


def report(
    workload: str,
    device: str | None,
    device_file: list[Path] | None,
    planners: str | None,
    planner_module: list[str] | None,
    dtype: str,
    small: bool,
    deadline: float,
    must_fuse: list[str] | None,
    never_fuse: list[str] | None,
    max_peak_bytes: int | None,
    max_group_size: int | None,
    max_kernel_args: int | None,
    out: Path | None,
    json: bool,
) -> None:
    """``fuseplan report``."""
    target = check_writable(out or f"fuseplan-{workload.rpartition(':')[2]}.html")
    load_planners(planner_module)
    constraints = constraints_of(must_fuse, never_fuse, max_peak_bytes, max_group_size, max_kernel_args)
    options = _make_options(devices_of(device, device_file), planners, deadline, constraints)
    by_device = _plan_all(workload, *load(workload, dtype, small), options)
    write_page(Page(workload, _studies(workload, by_device)), target)
    if json:
        print_json({"page": str(target)})
    else:
        print(f"wrote {target}")


def _studies(workload: str, by_device: Sequence[DevicePlans]) -> tuple[Study, ...]:
    """A study for each device that some planner has a plan for. The others are named on stderr.

    Raises:
        InvalidArgumentError: there is no plan for any device.
    """
    studies = []
    left_out = []
    for planned in by_device:
        try:
            studies.append(Study.of(workload, planned.rows))
        except InvalidArgumentError as error:
            left_out.append((planned.device.name, error))
    if not studies:
        raise left_out[0][1]
    for name, reason in left_out:
        print(f"left out: {name}: {reason}", file=sys.stderr)
    return tuple(studies)
