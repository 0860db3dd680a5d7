"""Generate random programs, check fuseplan's results, kernels and proofs on them, and count what was covered:
``python -m experiments.fuzz --programs 10000 --seed 0 --out rows.jsonl``.

Programs run in batches, a process each, so that a crash belongs to one program. An existing file is
continued. Every program runs on CPU loops and as kernels of one other backend, in turns of five; every fourth
with its derivatives, every seventh planned by the solver, every ninth on devices as they are: no two of these
numbers have a factor in common, so that all combinations occur.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

KERNELS = ("triton", "mosaic_tpu", "mosaic_gpu", "triton", "mosaic_tpu")


def main() -> None:
    """Run what is not in the file yet, then print the summary; exit code 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m experiments.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many programs")
    parser.add_argument("--seed", type=int, default=0, help="programs of another seed are others")
    parser.add_argument("--out", type=Path, default=Path("fuzz.jsonl"), help="a line a program; resumed")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--batch", type=int, default=50, help="programs a process")
    parser.add_argument("--only", type=int, help="run one program, and print it")
    parser.add_argument("--range", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.only is not None:
        print(json.dumps(checked(options.seed, options.only), indent=1).replace("\\n", "\n"))
    elif options.range is not None:
        with options.out.open("a") as out:
            for index in range(*options.range):
                out.write(json.dumps(checked(options.seed, index)) + "\n")
                out.flush()
    else:
        sys.exit(_run(options))


def checked(seed: int, index: int) -> dict[str, Any]:
    """The result of checking one program, for JSON; a failing program is shrunk."""
    from experiments.fuzz.checks import check_program
    from experiments.fuzz.generate import random_program
    from experiments.fuzz.program import Program
    from experiments.fuzz.shrink import shrink

    started = time.process_time()
    program = random_program(seed, index)

    def report_of(program: Program) -> Any:
        backends = ("cpu", KERNELS[index % len(KERNELS)])
        return check_program(program, backends, index % 4 == 0, small=index % 9 != 8, solver=index % 7 == 0)

    report = report_of(program)
    row: dict[str, Any] = {"seed": seed, "index": index, "counts": dict(report.counts)}
    if report.failures:
        first = report.failures[0]

        def fails(smaller: Program) -> bool:
            return any((f.check, f.kind) == (first.check, first.kind) for f in report_of(smaller).failures)

        if first.kind not in ("xla", "generator"):
            program = shrink(program, fails)
            report = report_of(program)
        row["failures"] = [[f.check, f.kind, f.detail] for f in report.failures or [first]]
        row["source"], row["program"] = program.source(), repr(program)
    return row | {"seconds": round(time.process_time() - started, 3)}


def _run(options: argparse.Namespace) -> int:
    done = _rows(options)
    todo = [i for i in range(options.programs) if i not in done]
    batches: list[list[int]] = []
    for i in todo:
        if not batches or len(batches[-1]) >= options.batch or batches[-1][-1] != i - 1:
            batches.append([])
        batches[-1].append(i)
    with ThreadPoolExecutor(options.jobs) as pool:
        finished = 0
        for batch in pool.map(lambda b: _batch(options, b), batches):
            finished += len(batch)
            print(
                f"\r{len(done) + finished:,} of {options.programs:,} programs",
                end="",
                file=sys.stderr,
                flush=True,
            )
    print(file=sys.stderr)
    rows = _rows(options)
    print(summary(list(rows.values())))
    kinds = {kind for row in rows.values() for _, kind, _ in row.get("failures", [])}
    return int(bool(kinds - {"xla"}))


def _batch(options: argparse.Namespace, batch: list[int]) -> list[int]:
    """Run a batch in processes of its own; a program that ends its process is a failure."""
    left = batch
    while left:
        command = [
            sys.executable,
            "-m",
            "experiments.fuzz",
            "--seed",
            str(options.seed),
            "--out",
            str(options.out),
        ]
        code = subprocess.run([*command, "--range", str(left[0]), str(left[-1] + 1)]).returncode
        rows = _rows(options)
        left = [i for i in left if i not in rows]
        if left and code:
            killed = ["the process", "crash", f"exit code {code}"]
            with options.out.open("a") as out:
                row = {"seed": options.seed, "index": left[0], "counts": {}, "failures": [killed]}
                out.write(json.dumps(row) + "\n")
            left = left[1:]
    return batch


def _rows(options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    if not options.out.exists():
        return {}
    rows = (json.loads(line) for line in options.out.read_text().splitlines())
    return {row["index"]: row for row in rows if row["seed"] == options.seed}


def summary(rows: list[dict[str, Any]]) -> str:
    """How many programs had what, and what failed."""
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for row in rows:
        counts.update(row["counts"])
        kinds.update(f"{kind}: {check}" for check, kind, _ in row.get("failures", []))
    seconds = sum(row.get("seconds", 0.0) for row in rows)
    lines = [f"{len(rows):,} programs, {seconds:,.0f} s of CPU time"]
    lines += [f"  {name:<44} {count:>9,}" for name, count in sorted(counts.items()) if count]
    lines += [f"failures: {sum(kinds.values()):,}"]
    lines += [f"  {name:<60} {count:>6,}" for name, count in kinds.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
