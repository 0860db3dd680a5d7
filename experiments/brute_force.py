"""Compare the solver with brute force on random graphs of up to nine operations.

``python -m experiments.brute_force --graphs 10000`` makes the graphs of so many seeds, for devices whose
launches are long and short, and tries every plan of each: which operations share a kernel, and which kernels
compute an operation again (``tests.helpers.brute_force``). The solver's time, bound and claim must be those
of the best plan. Exit code 1 if one is not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from fuseplan.bench import print_table, progress
from tests.helpers.brute_force import MOST_COPIES, Comparison, compare, random_case

COLUMNS = ("graphs", "with copies", "copies gain", "too many", "unoffered nests", "ties", "wrong")
"""Graphs; those of which plans with copies were compared, and where such a plan is the best; those that have
more copies than brute force takes; those of which loop nests that are not offered make a faster plan; those
whose plan is the fastest, and another as fast moves fewer bytes; those whose plan or proof is wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print what is wrong at once, and a table at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--graphs", type=int, default=1_000, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="SEED")
    parser.add_argument("--ties", action="store_true", help="print these, too")
    options = parser.parse_args(argv)
    counts: dict[tuple[str, str], Counter[str]] = {}
    started = time.process_time()
    with progress(options.graphs) as steps:
        for seed in range(options.first_seed, options.first_seed + options.graphs):
            case = random_case(seed)
            steps.start(f"seed {seed}")
            found = compare(case)
            counts.setdefault((case.kind, case.device), Counter()).update(_counted(found))
            for text in found.wrong + (found.ties if options.ties else ()):
                print(f"seed {seed}, for {case.device}: {text}\n{case.graph}", flush=True)
            steps.done()
    total = sum(counts.values(), Counter[str]())
    rows = [(*key, *[f"{row[name]:,}" for name in COLUMNS]) for key, row in sorted(counts.items())]
    rows.append(("all", "", *[f"{total[name]:,}" for name in COLUMNS]))
    title = f"Brute force, up to {MOST_COPIES} operations with copies; {time.process_time() - started:.0f} s"
    print_table(("kind", "device", *COLUMNS), rows, right=range(2, 2 + len(COLUMNS)), title=title)
    return 1 if total["wrong"] else 0


def _counted(found: Comparison) -> Counter[str]:
    """The columns that a comparison counts in."""
    return Counter(
        {
            "graphs": 1,
            "with copies": found.copies == "compared",
            "copies gain": found.gains,
            "too many": found.copies == "too many",
            "unoffered nests": found.is_slower,
            "ties": bool(found.ties),
            "wrong": bool(found.wrong),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
