"""Compare the plans of two checkouts: ``python -m experiments.plan_differences OTHER``.

A change of the code's structure must leave every plan as it is. For each workload, device and planner, the
checkout in the folder ``OTHER`` and this one plan in processes of their own, without a cache and with a
deadline that is not reached. The plans that differ in kernels, time, traffic, bound, status or notes
are listed; exit code 1 if some do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 3_600.0
DEVICES = ("cpu", "h200", "h200:mosaic_gpu", "a100", "tpu_v5e", "tpu_v6e")

Plans = dict[tuple[str, str, str], dict[str, Any]]
"""For each workload, device and planner, the facts of its plan."""


def facts_of(workload: str, device: str, planner: str) -> dict[str, Any]:
    """All of a plan that a user can see, but for the seconds that planning took."""
    # Here, not above: which checkout they come from is decided by the process.
    import fuseplan

    f, args = _first_of("fuseplan.workloads", "experiments.workloads").get_workload(workload).build()
    cache = _first_of("fuseplan.search.cache", "fuseplan.memo")
    spec = _first_of("costmodel.calibrate").described_cpu() if device == "cpu" else device
    empty = (getattr(cache, "SolutionCache", None) or cache.Memo)()
    using_cache = getattr(cache, "using_cache", None) or cache.using
    with using_cache(empty):
        try:
            plan = fuseplan.make_plan(f, device=spec, planner=planner, deadline_s=DEADLINE_S)(*args)
        except fuseplan.FuseplanError as error:
            return {"error": str(error)}
    return {
        "time_ps": plan.objective_ps,
        "hbm_bytes": plan.hbm_bytes,
        "peak_bytes": plan.peak_bytes,
        "bound_ps": plan.bound_ps,
        "status": plan.status,
        "kernels": [[list(k.spec.nodes), [[a.size, a.tile] for a in k.spec.axes]] for k in plan.kernels],
        "notes": list(plan.notes),
    }


def _first_of(*modules: str) -> Any:
    """The first of ``modules`` that this checkout has: an older one may have another layout."""
    for name in modules:
        if importlib.util.find_spec(name.rpartition(".")[0]) and importlib.util.find_spec(name):
            return importlib.import_module(name)
    raise ImportError(f"this checkout has none of {', '.join(modules)}")


def plans_of(checkout: Path, chosen: argparse.Namespace) -> Plans:
    """The plans of a checkout, made in a process that imports from it."""
    command = [sys.executable, str(Path(__file__).resolve()), "--dump", str(checkout)]
    command += ["--workloads", chosen.workloads, "--devices", chosen.devices, "--planners", chosen.planners]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(row["workload"], row["device"], row["planner"]): row["plan"] for row in rows}


def differences(one: Plans, other: Plans) -> Iterator[str]:
    """A line for each plan that differs: which of its facts do, and the numbers among them."""
    for key in sorted({*one, *other}):
        name = " ".join(key)
        if key not in one or key not in other:
            yield f"{name}: only in {'the other checkout' if key in one else 'this one'}"
            continue
        a, b = one[key], other[key]
        differing = [fact for fact in sorted({*a, *b}) if a.get(fact) != b.get(fact)]
        if differing:
            yield f"{name}: " + ", ".join(_difference(fact, a.get(fact), b.get(fact)) for fact in differing)


def _difference(fact: str, one: Any, other: Any) -> str:
    return fact if isinstance(one, list) or isinstance(other, list) else f"{fact} {one} -> {other}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the differences; 1 if there are some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("other", type=Path, metavar="OTHER", help="the folder of the other checkout")
    parser.add_argument("--workloads", default="", metavar="NAME,…", help="these alone (all)")
    parser.add_argument("--devices", default=",".join(DEVICES), metavar="NAME,…")
    parser.add_argument("--planners", default="greedy,solver", metavar="NAME,…")
    parser.add_argument("--dump", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.dump:
        _dump(chosen)
        return 0
    if not (chosen.other / "fuseplan").is_dir():
        parser.error(f"{chosen.other} is no checkout: it has no folder fuseplan")
    with ThreadPoolExecutor(2) as both:
        before, after = both.map(lambda folder: plans_of(folder, chosen), (chosen.other.resolve(), ROOT))
    found = list(differences(before, after))
    print("\n".join([*found, f"{len(found)} of {len({*before, *after})} plans differ"]))
    return 1 if found else 0


def _dump(chosen: argparse.Namespace) -> None:
    from experiments.greedy_vs_solver import ZOO

    for workload in chosen.workloads.split(",") if chosen.workloads else ZOO:
        for device in chosen.devices.split(","):
            for planner in chosen.planners.split(","):
                plan = facts_of(workload, device, planner)
                row = {"workload": workload, "device": device, "planner": planner, "plan": plan}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
