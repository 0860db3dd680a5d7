"""Compile every kernel of the workloads' plans for devices that are not present.

    python -m experiments.compiled --out compiled.csv

Writes a row for each distinct kernel: whether it compiles, or the error; registers, spills and shared memory
on GPUs; VMEM and the compiler's estimate of cycles on TPUs, beside the estimate for XLA's own kernels of the
same operations. Kernels that the file has, by the same versions of the compilers, are not compiled again.
Needs the extra ``aot``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pandas as pd

from experiments.compiled_processes import LIMIT_S, Work, all_rows
from experiments.compiled_rows import DEADLINE_S, Row, Task, compiler_versions, kept_rows, records
from experiments.compiled_tables import cycles_csv, cycles_table, summary
from fuseplan.bench import check_writable, csv_of, progress, write_text
from fuseplan.workloads import WORKLOADS

DEVICES = ("h200", "h200:mosaic_gpu", "tpu_v5e", "tpu_v6e")
DTYPES = ("float32", "bfloat16")


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, write and sum up; 1 if a kernel does not compile."""
    options = _parser().parse_args(argv)
    for path in filter(None, (options.out, options.cycles_out)):
        check_writable(path)
    left_out = options.without.split(",")
    tasks = [
        (workload, device, dtype)
        for device in options.devices.split(",")
        for dtype in options.dtypes.split(",")
        for workload in (options.only.split(",") if options.only else WORKLOADS)
        if workload not in left_out
    ]
    versions = {compiler_versions(platform) for platform in ("gpu", "tpu")}
    rows = kept_rows(options.out, versions, options.cycles)
    if options.kept:
        tasks = [task for task in tasks if _is_whole(rows.get(task, []))]
    _find_out(tasks, rows, options)
    found = records({task: rows.get(task, []) for task in tasks})
    frame = pd.DataFrame(found, columns=[field.name for field in fields(Row)])
    if options.cycles_out is not None:
        write_text(options.cycles_out, cycles_csv(frame, _command(options)))
    _print(frame)
    return 0 if frame["compiled"].all() else 1


def _find_out(tasks: Sequence[Task], rows: dict[Task, list[Row]], options: argparse.Namespace) -> None:
    """Add to ``rows`` what they lack of ``tasks``."""
    left = tuple((task, len(rows.get(task, []))) for task in tasks if not _is_whole(rows.get(task, [])))
    with progress(len(tasks)) as steps:
        for _ in range(len(tasks) - len(left)):
            steps.done()
        for row in all_rows(Work(left, options.deadline_s, options.cycles, options.limit_s)):
            if row is None:
                steps.done()
                continue
            part = rows.setdefault(row.task, [])
            part.append(row)
            steps.start(f"{row.workload} {row.device} {row.dtype}: {len(part)} of {row.kinds}")
            if options.out is not None:  # what is known is kept, whatever comes next
                write_text(options.out, csv_of(records(rows)))


def _is_whole(part: Sequence[Row]) -> bool:
    return bool(part) and len(part) >= part[0].kinds


def _command(options: argparse.Namespace) -> str:
    """The command that finds out the same, wherever it is written."""
    given = {
        "devices": options.devices,
        "dtypes": options.dtypes,
        "only": options.only,
        "without": options.without,
    }
    return " ".join(["python -m experiments.compiled", *(f"--{k} {v}" for k, v in given.items() if v)])


def _print(frame: pd.DataFrame) -> None:
    def say(title: str, part: pd.DataFrame) -> None:
        if len(part):
            print(f"\n{title}\n{part.to_string(index=False)}")

    say("Kernels:", summary(frame))
    at = ["workload", "device", "dtype", "name", "tile"]
    say("Do not compile:", frame.loc[frame["compiled"].eq(False), [*at, "cause"]])
    spills = frame["spill_bytes"].fillna(0) > 0
    say("Spill:", frame.loc[spills, [*at, "registers", "spill_bytes", "threads", "shared_bytes"]])
    say("Tensor cores serialized:", frame.loc[frame["serialized"].eq(True), [*at, "registers"]])
    on_tpus = frame[frame["device"].str.startswith("tpu")]
    if on_tpus["cycles"].notna().any():
        say("Cycles, and time with bytes, beside XLA's own:", cycles_table(on_tpus))
        say("Without cycles:", on_tpus.loc[on_tpus["no_cycles"] != "", [*at, "no_cycles"]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.compiled", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, help="a CSV file, a row a kernel; what it has is kept")
    parser.add_argument("--cycles-out", type=Path, help="a CSV file, a row a workload: cycles beside XLA's")
    parser.add_argument("--kept", action="store_true", help="compile nothing: of plans that --out has whole")
    parser.add_argument("--only", default="", metavar="NAME,…", help="workloads; default: all")
    parser.add_argument("--without", default="", metavar="NAME,…", help="workloads to leave out")
    parser.add_argument("--devices", default=",".join(DEVICES))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S, help="of each planning")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of each kernel's estimate")
    parser.add_argument("--no-cycles", dest="cycles", action="store_false", help="compile only")
    return parser


if __name__ == "__main__":
    sys.exit(main())
