"""Time first calls of ``fuseplan.jit`` and ``jax.jit`` on programs that no tiled loop can speed up.

``python -m experiments.first_call`` prints a table.

Each program runs in a process of its own. There, new functions are jitted by ``jax.jit`` and ``fuseplan.jit``
in turns, with all of JAX's caches cleared before each; a call ends when its results are ready. Reported
are the medians of process CPU time and of wall-clock time, the medians of the ratios within a turn, the ratio
of later calls, and whether XLA counts the same operations and bytes in both compiled programs. On a machine
that others use, compare the ratios.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax

import fuseplan
from fuseplan.workloads import PACKAGES

_WARM_CALLS = 300


def main() -> None:
    """Time the programs named as arguments, or all; ``--turns=N`` times each N times (5)."""
    turns = [int(a.removeprefix("--turns=")) for a in sys.argv[1:] if a.startswith("--turns=")]
    names = [a for a in sys.argv[1:] if not a.startswith("--")]
    names = names or [name for name, program in PACKAGES.items() if not program.missing]
    if missing := {package for program in PACKAGES.values() for package in program.missing}:
        print(f"not installed: {', '.join(sorted(missing))}", file=sys.stderr)
    print(
        "| program | `jax.jit` CPU s | wall s | first call, CPU | wall | later calls, wall | same program |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |", flush=True)
    for name in names:
        command = [sys.executable, "-m", "experiments.first_call", "--one", name, str((turns or [5])[0])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"| {name} | failed: {done.stderr.strip().splitlines()[-1][:150]} | | | | | |", flush=True)
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        seconds = [f"{row[key]:.3f}" for key in ("cpu_s", "wall_s")]
        ratios = [f"{row[key]:.2f}×" for key in ("cpu_ratio", "wall_ratio", "warm_ratio")]
        print("|", " | ".join([name, *seconds, *ratios, "yes" if row["same"] else "no"]), "|", flush=True)


def measure(build: Callable[[], Any], turns: int) -> dict[str, Any]:
    """The figures of one program: medians over ``turns``."""
    fuseplan.devices()  # The CPU is measured once for all programs, and kept in a file.
    jits: dict[str, Any] = {"jax": jax.jit, "fuseplan": fuseplan.jit}
    seen: dict[str, list[tuple[float, float]]] = {side: [] for side in jits}
    for turn in range(turns + 1):
        for side in sorted(jits, reverse=turn % 2 == 1):
            jax.clear_caches()
            f, args = build()
            f = jits[side](f)
            cpu, wall = time.process_time(), time.perf_counter()
            jax.block_until_ready(f(*args))
            seen[side].append((time.process_time() - cpu, time.perf_counter() - wall))
    jax_s, ours_s = seen["jax"][1:], seen["fuseplan"][1:]  # The first turn imports.
    ratios = [[ours[k] / plain[k] for plain, ours in zip(jax_s, ours_s, strict=True)] for k in (0, 1)]
    f, args = build()
    warm = {side: jit(f) for side, jit in jits.items()}
    texts = {side: g.lower(*args).compile().cost_analysis() for side, g in warm.items()}
    return {
        "cpu_s": statistics.median(cpu for cpu, _ in jax_s),
        "wall_s": statistics.median(wall for _, wall in jax_s),
        "cpu_ratio": statistics.median(ratios[0]),
        "wall_ratio": statistics.median(ratios[1]),
        "warm_ratio": _warm(warm["fuseplan"], args, warm["jax"]),
        "same": texts["jax"] == texts["fuseplan"],
    }


def _warm(ours: Callable[..., Any], args: Any, plain: Callable[..., Any]) -> float:
    """The median ratio of later calls, in turns."""
    ratios = []
    for _ in range(7):
        spent = []
        for f in (ours, plain):
            jax.block_until_ready(f(*args))
            started = time.perf_counter()
            for _ in range(_WARM_CALLS):
                result = f(*args)
            jax.block_until_ready(result)
            spent.append(time.perf_counter() - started)
        ratios.append(spent[0] / spent[1])
    return statistics.median(ratios)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(PACKAGES[sys.argv[2]].build, int(sys.argv[3]))))
    else:
        main()
