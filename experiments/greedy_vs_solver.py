"""Compare all planners on all workloads and devices under one cost model.

Each planner plans the program as traced and with the rewrites that all planners are given, which separates
the gain from rewriting from the gain of the solver over greedy.

    python -m experiments.greedy_vs_solver

Each plan is a row of ``experiments/results/greedy_vs_solver.csv``, written at once; an interrupted run
continues where it stopped. At the end, tables (``.md``) and a plot (``.svg``) of all rows are written beside
it. No device is needed; the rows of ``xla`` need the extra ``aot``.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuseplan
from experiments.planner_tables import plot, short_table, tables
from experiments.rows import RowFile
from fuseplan import FuseplanError, planner_names
from fuseplan.bench import check_writable, machine_columns, print_table, progress, write_text
from fuseplan.extend import Lowered, lower, trace
from fuseplan.workloads import PUBLISHED, WORKLOADS, get_workload

DEVICES = ("h200", "a100", "tpu_v5e", "tpu_v6e", "cpu")
MORE = ("alibi_attention", "grouped_attention", "grouped_attention_vjp", "window_attention", "lstm_cell",
        "shallow_water", "euler_fluxes", "nbody")  # fmt: skip
ZOO = (*(name for name in WORKLOADS if name != "gpt2_train_24"), *MORE, *PUBLISHED)
"""A deep training step is left out: its layers are those of the one of four."""
DEADLINE_S = 40.0
"""Of each planning: fuseplan's own default."""
RESULTS = Path(__file__).parent / "results" / "greedy_vs_solver.csv"


@dataclass(frozen=True, slots=True)
class Row:
    """One plan; None where there is none."""

    workload: str
    device: str
    dtype: str
    planner: str
    operations: int
    kernels: int | None = None
    time_us: float | None = None
    unrewritten_us: float | None = None
    """Of the planner's plan of the program as traced."""
    hbm_bytes: int | None = None
    peak_bytes: int | None = None
    recomputed_flops: int | None = None
    status: str = ""
    bound_us: float | None = None
    planning_s: float | None = None
    notes: str = ""
    """What the plan says of itself; of no plan, why there is none."""
    deadline_s: float = DEADLINE_S
    date: str = ""
    """When the row was made."""
    versions: str = ""

    @property
    def task(self) -> tuple[str, str, str, str]:
        return self.workload, self.device, self.dtype, self.planner


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, write and sum up."""
    parser = _parser()
    options = parser.parse_args(argv)
    versions, today = _versions(), time.strftime("%Y-%m-%d")
    try:
        names = [get_workload(name).name for name in options.workloads.split(",")]
        chosen = list(itertools.product(options.devices.split(","), options.planners.split(",")))
        for device, planner in chosen:  # a wrong name costs no planning
            fuseplan.make_plan(abs, device=device, planner=planner, deadline_s=options.deadline)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        check_writable(options.out)
        file = RowFile(options.out, Row, lambda r: (r.versions, r.deadline_s) == (versions, options.deadline))
    except (FuseplanError, ValueError) as error:
        parser.error(str(error))
    known = {row.task for row in file.rows}
    tasks = [
        (name, device, dtype, planner)
        for name in names
        for dtype in options.dtypes.split(",")
        for device, planner in chosen
    ]
    with progress(len(tasks)) as steps:
        lowered: tuple[tuple[str, str], Lowered] | None = None
        for name, device, dtype, planner in tasks:
            steps.start(f"{name} on {device}: {planner}")
            if (name, device, dtype, planner) not in known:
                if lowered is None or lowered[0] != (name, dtype):
                    f, args = get_workload(name).build(dtype)
                    lowered = (name, dtype), lower(trace(f, *args))
                found = _found(lowered[1], device, planner, options.deadline)
                task = {"workload": name, "device": device, "dtype": dtype, "planner": planner}
                file.add(Row(**task, **found, deadline_s=options.deadline, date=today, versions=versions))
            steps.done()
    place = {task: i for i, task in enumerate(tasks)}
    rows = sorted((row for row in file.rows if row.task in place), key=lambda row: place[row.task])
    command = " ".join(["python -m experiments.greedy_vs_solver", *(sys.argv[1:] if argv is None else argv)])
    write_text(options.out.with_suffix(".md"), tables(rows, command, versions, _dates(rows)))
    plot(rows, options.out.with_suffix(".svg"))
    for title, head, lines in short_table(rows):
        print_table(head, lines, right=range(1, len(head)), title=title)
        print()
    print(f"{len(rows)} rows in {options.out}; tables and a plot beside it")
    return 0


_COMPARED = ("kernels", "time_us", "unrewritten_us", "hbm_bytes", "peak_bytes", "recomputed_flops", "status",
             "bound_us", "planning_s", "notes")  # fmt: skip
"""The columns of ``fuseplan.compare`` that are kept."""


def _found(lowered: Lowered, device: str, planner: str, deadline_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {"operations": len(lowered.graph.nodes)}
    try:
        frame = fuseplan.compare(lowered, device=device, planners=[planner], deadline_s=deadline_s)()
    except Exception as error:  # Hours of other rows are worth more than a traceback.
        kind = "" if isinstance(error, FuseplanError) else f"{type(error).__name__}: "
        return found | {"status": "NONE", "notes": kind + " ".join(str(error).split())}
    (row,) = frame.to_dict("records")
    return found | {name: None if row[name] != row[name] else row[name] for name in _COMPARED}


def _dates(rows: Sequence[Row]) -> str:
    """The days on which rows were made."""
    days = sorted({row.date for row in rows})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""


def _versions() -> str:
    machine = machine_columns()
    names = ("fuseplan", "jax", "python")
    # The figures of the device "cpu" are those of the machine.
    return "; ".join(
        [*(f"{name} {machine[name]}" for name in names), f"{machine['cpu']}, {machine['cores']} cores"]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", default=",".join(DEVICES), metavar="NAME,…")
    parser.add_argument("--dtypes", default="float32", metavar="DTYPE,…")
    parser.add_argument("--planners", default=",".join(planner_names()), metavar="NAME,…")
    parser.add_argument("--workloads", default=",".join(ZOO), metavar="NAME,…")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, metavar="SECONDS")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE.csv")
    return parser


if __name__ == "__main__":
    sys.exit(main())
