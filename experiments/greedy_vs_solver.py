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
import sys
from collections.abc import Sequence
from pathlib import Path

import fuseplan
from experiments.planner_tables import plot, short_table, tables
from fuseplan import FuseplanError, planner_names
from fuseplan.bench import print_table, write_text
from fuseplan.workloads import PUBLISHED, WORKLOADS

DEVICES = ("h200", "a100", "tpu_v5e", "tpu_v6e", "cpu")
MORE = ("alibi_attention", "grouped_attention", "grouped_attention_vjp", "window_attention", "lstm_cell",
        "shallow_water", "euler_fluxes", "nbody")  # fmt: skip
ZOO = (*(name for name in WORKLOADS if name != "gpt2_train_24"), *MORE, *PUBLISHED)
"""A deep training step is left out: its layers are those of the one of four."""
DEADLINE_S = 40.0
"""Of each planning: fuseplan's own default."""
RESULTS = Path(__file__).parent / "results" / "greedy_vs_solver.csv"


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, write and sum up."""
    parser = _parser()
    options = parser.parse_args(argv)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        rows = fuseplan.study(
            options.workloads.split(","),
            options.devices.split(","),
            options.planners.split(","),
            dtypes=options.dtypes.split(","),
            deadline_s=options.deadline,
            processes=options.processes,
            path=options.out,
        )
    except FuseplanError as error:
        parser.error(str(error))
    command = " ".join(["python -m experiments.greedy_vs_solver", *(sys.argv[1:] if argv is None else argv)])
    versions = " and ".join(dict.fromkeys(rows.versions))
    write_text(options.out.with_suffix(".md"), tables(rows, command, versions, _dates(rows.date.tolist())))
    plot(rows, options.out.with_suffix(".svg"))
    for title, head, lines in short_table(rows):
        print_table(head, lines, right=range(1, len(head)), title=title)
        print()
    print(f"{len(rows)} rows in {options.out}; tables and a plot beside it")
    return 0


def _dates(dates: Sequence[str]) -> str:
    """The days on which rows were made."""
    days = sorted(set(dates))
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", default=",".join(DEVICES), metavar="NAME,…")
    parser.add_argument("--dtypes", default="float32", metavar="DTYPE,…")
    parser.add_argument("--planners", default=",".join(planner_names()), metavar="NAME,…")
    parser.add_argument(
        "--workloads", default=",".join(ZOO), metavar="NAME,…", help="also package.module:function, file.py:f"
    )
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, metavar="SECONDS")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that plan at a time")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE.csv")
    return parser


if __name__ == "__main__":
    sys.exit(main())
