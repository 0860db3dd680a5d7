"""Count the kernels of plans that XLA's compiler leaves as they were planned.

    python -m experiments.what_runs --devices h200,tpu_v5e --out what_runs.csv

A plan's kernels run in one program, which XLA compiles: those of Pallas as they are, and each group that is
left to XLA by its own rules, which may merge it with a neighbour or divide it. The program of each workload's
plan is compiled for devices that are not present, with each kernel's operations named after it, and the
kernels of the module are read. A kernel is *as planned* if the module's kernels that compute any of it
compute nothing else, and are as many as were planned. Needs the extra ``aot``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import fuseplan
from experiments.greedy_vs_solver import ZOO
from fuseplan.bench import RowFile, count_compiled_kernels, machine_columns, print_table, progress
from fuseplan.workloads import get_workload

DEVICES = ("h200", "tpu_v5e")


@dataclass(frozen=True, slots=True)
class Row:
    """The kernels of one plan, without those that only rename arrays."""

    workload: str
    device: str
    kernels: int
    as_planned: int
    merged: int
    """Kernels of whose operations a kernel of the module computes others, too."""
    divided: int
    """The other kernels of which there are more kernels, or fewer, in the module than were planned."""
    beside: int
    """Kernels of the module that compute nothing of the plan, such as copies."""
    fuseplan: str
    jax: str
    jaxlib: str
    python: str
    date: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile each workload's plan for each device, and print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", default=",".join(DEVICES), metavar="NAMES", help="such as h200")
    parser.add_argument("--only", default=",".join(ZOO), metavar="NAMES", help="these workloads")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="add the rows to this file")
    chosen = parser.parse_args(arguments)
    cases = [(name, device) for device in chosen.devices.split(",") for name in chosen.only.split(",")]
    rows = []
    with progress(len(cases)) as steps:
        for name, device in cases:
            steps.start(f"{name} for {device}")
            row = counted(name, device)
            rows.append(row)
            if chosen.out:
                RowFile(chosen.out, Row, lambda other, own=row: _key(other) != _key(own)).add(row)
            steps.done()
    head = ("workload", "device", "kernels", "as planned", "merged", "divided", "beside")
    lines = [(r.workload, r.device, r.kernels, r.as_planned, r.merged, r.divided, r.beside) for r in rows]
    print_table(head, [tuple(map(str, line)) for line in lines], right=range(2, len(head)))
    return 0


def _key(row: Row) -> tuple[str, str, str]:
    return row.workload, row.device, row.jax


def counted(name: str, device: str) -> Row:
    """The row of a workload's plan for a device."""
    f, args = get_workload(name).build()
    plan = fuseplan.make_plan(f, device=device)(*args)
    machine = machine_columns()
    versions = [str(machine[key]) for key in ("fuseplan", "jax", "jaxlib", "python", "date")]
    return Row(name, device, *count_compiled_kernels(plan), *versions)


if __name__ == "__main__":
    raise SystemExit(main())
