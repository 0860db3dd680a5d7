"""``fuseplan compare``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fuseplan.bench.planning import csv_of
from fuseplan.cli.arguments import (
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
    load,
)
from fuseplan.cli.plans import OfDevice, options_of, plan_all
from fuseplan.console import print_json, print_table, progress
from fuseplan.plan.constraints import Constraints
from fuseplan.planners import decides_nothing
from fuseplan.report.comparison import Compared, Timing, baseline_of, divergence_lines, gains_text, speed_up
from fuseplan.report.frames import compare_frame, records
from fuseplan.report.text import bound_lines, bound_text
from fuseplan.runtime.compare import require_measurable, time_rows
from fuseplan.support.atomic_file import write_text
from fuseplan.support.format import seconds_text, time_text, times_text, wrapped
from fuseplan.workloads.sampling import make_args


def compare(
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
    measure: Measure = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Plan WORKLOAD by each planner and print a row for each; --measure also runs them. --out writes CSV."""
    constraints = constraints_of(must_fuse, never_fuse, max_peak_bytes, max_group_size, max_kernel_args)
    asked = (workload, device, planners, dtype, small, deadline, constraints)
    run = _to_run(*asked) if measure else None
    by_device = plan_all(*asked)
    timings = [None if run is None else _timed(*run, of_device) for of_device in by_device]
    lines: list[dict[str, Any]] = []
    for of_device, measured in zip(by_device, timings, strict=True):
        frame = compare_frame(of_device.rows, measured)
        frame.insert(0, "device", of_device.device.name)
        lines += records(frame)
    if out is not None:
        write_text(out, csv_of(lines))
    if json:
        print_json(lines)
        return
    for i, (of_device, measured) in enumerate(zip(by_device, timings, strict=True)):
        if i:
            print()
        name, rows = of_device.device.name, of_device.rows
        head, lines_of_plans = _plans(rows)
        over = f" ({head[3]}: speed-up)" if head[3] else ""
        title = f"{workload} on {name}, modelled{over}"
        print_table(head, lines_of_plans, right=(1, 2, 3, 4, 5, 7), title=title)
        print()
        print_table(*_gains(rows), right=(1, 2, 3), title="the same plans as traced, and rewritten")
        if measured is not None:
            print()
            print_table(*_measured(rows, measured), right=(1, 2, 3, 4), title=f"{workload} here, measured")
        for text in _sentences(of_device, measured):
            print("\n".join(wrapped(text, 80, "      ")))


def _to_run(
    workload: str,
    device: str | None,
    planners: str | None,
    dtype: str,
    small: bool,
    deadline: float,
    constraints: Constraints,
) -> tuple[Any, Any]:
    """The function and random arguments; refused before anything is planned."""
    options = options_of(device, planners, deadline, constraints)
    f, shapes = load(workload, dtype, small)
    args = make_args(shapes)
    require_measurable([option for of_device in options for option in of_device], args, {})
    return f, args


def _timed(f: Any, args: Any, of_device: OfDevice) -> list[Timing]:
    """Each planner's program against ``jax.jit``'s."""
    running = time_rows(f, args, {}, of_device.options, of_device.rows)
    timings = []
    with progress(len(of_device.rows)) as steps:
        for row in of_device.rows:
            steps.start(f"running {row.planner}")
            timings.append(next(running))
            steps.done()
    return timings


_Printable = tuple[Sequence[str], Sequence[Sequence[str]]]
"""The head and the rows of a table."""


def _measured(rows: Sequence[Compared], timings: Sequence[Timing]) -> _Printable:
    """The table of measured times and temporaries, over ``jax.jit``'s."""
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
    """The table of the plans of one function on one device."""
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
    """The table of what rewriting gains each planner that decides."""
    head = ("planner", "as traced µs", "rewritten µs", "rewriting gains")
    return head, [
        (
            row.planner,
            "" if row.unrewritten_ps is None else time_text(row.unrewritten_ps / 1e6),
            time_text(row.plan.objective_us),
            "" if row.rewriting_gains is None else times_text(row.rewriting_gains),
        )
        for row in rows
        if row.plan is not None and not decides_nothing(row.planner)
    ]


def _sentences(of_device: OfDevice, timings: Sequence[Timing] | None) -> list[str]:
    """The sentences below the tables of a device: gains, bounds, differences from measured times, notes."""
    rows = of_device.rows
    found = [gains_text(rows)] if gains_text(rows) else []
    found += bound_lines((row.planner, row.plan) for row in rows if row.plan is not None)
    if timings is not None:
        times = [
            (row.planner, row.plan.objective_us, None if t.time_s is None else 1e6 * t.time_s)
            for row, t in zip(rows, timings, strict=True)
            if row.plan is not None
        ]
        found += divergence_lines(times, of_device.device.platform)
    for note in dict.fromkeys(note for row in rows for note in row.notes):
        by = [row.planner for row in rows if note in row.notes]
        found.append(f"{'note' if len(by) == len(rows) else ', '.join(by)}: {note}")
    return found
