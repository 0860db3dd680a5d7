"""Verify every proof: plan each workload for each device, write the plan, read it, and check its bound.

    python -m experiments.verify_all --out rows.csv

Each plan is a row of the file, written as soon as it is verified; an interrupted run continues where it
stopped. Exit code 1 if the verifier refutes a plan. No device is needed.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import fuseplan
from costmodel import DEVICES, DeviceSpec, backends_of, get_device
from experiments.greedy_vs_solver import ZOO
from fuseplan import FuseplanError, InvalidPlanError, Plan
from fuseplan.bench import RowFile, machine_columns, print_table, progress
from fuseplan.extend import Lowered, lower, trace
from fuseplan.workloads import get_workload

REFUTED = "refuted"
"""The status of a plan that is wrong."""

DEADLINE_S = 3_600.0
"""Of one plan: none of them may be cut short because other processes run."""

SLOW = (
    "layernorm_grad", "cross_entropy_grad", "linear_cross_entropy_grad", "equinox_mlp_train", "adam_update",
    "gpt2_block", "gpt2_block_grad", "gpt2_train_4", "gray_scott", "nbody", "shallow_water", "unet_block",
    "clip_loss_grad", "selective_scan",
)  # fmt: skip
"""Workloads whose plans take some ten seconds to make and to verify: CI checks them for a few devices."""


def device_names() -> tuple[str, ...]:
    """Every device of the table with each of its backends, and a CPU."""
    real = [device for name, device in DEVICES.items() if name != "test"]
    return (*(name for device in real for name in _names(device)), "cpu")


def _names(device: DeviceSpec) -> Iterator[str]:
    for backend in backends_of(device):
        yield device.name if backend == device.backend else f"{device.name}:{backend}"


@dataclass(frozen=True, slots=True)
class Row:
    """What came of verifying one plan."""

    workload: str
    device: str
    claims: str
    """The plan's status; "none" where there is no plan."""
    result: str
    """``verified``, ``refuted`` or ``bound not re-checked``; "none" where there is no plan."""
    reason: str
    """What is wrong, or was not checked and why."""
    groups: int
    plan_cpu_s: float
    verify_cpu_s: float
    """Processor seconds, of all threads."""
    versions: str

    @property
    def task(self) -> tuple[str, str]:
        return self.workload, self.device


def verify_one(lowered: Lowered, device: DeviceSpec, deadline_s: float = DEADLINE_S) -> dict[str, object]:
    """The columns of ``Row`` that a plan of ``lowered`` for ``device`` has, once it was written and read."""
    started = time.process_time()
    try:
        plan = fuseplan.make_plan(lowered, device=device, deadline_s=deadline_s)()
    except FuseplanError as error:
        return _columns("none", "none", " ".join(str(error).split()), 0, time.process_time() - started, 0.0)
    planned = time.process_time()
    try:
        again = Plan.from_json(plan.to_json())
    except InvalidPlanError as error:
        seconds = planned - started, time.process_time() - planned
        return _columns(plan.status, REFUTED, " ".join(str(error).split()), 0, *seconds)
    found = again.verify()
    checked = time.process_time()
    if found and found.bound_us is None:
        found = replace(found, status=REFUTED, reason="the solver gave no bound")
    if found and not _same(again, plan):
        found = replace(found, status=REFUTED, reason="the file holds another plan")
    return _columns(
        plan.status, found.status, found.reason, found.groups, planned - started, checked - planned
    )


def _same(one: Plan, other: Plan) -> bool:
    return (one.kernels, one.bound_ps, one.status, one.proof) == (
        other.kernels, other.bound_ps, other.status, other.proof,
    )  # fmt: skip


def _columns(
    claims: str, result: str, reason: str, groups: int, plan_cpu_s: float, verify_cpu_s: float
) -> dict[str, object]:
    return {
        "claims": claims,
        "result": result,
        "reason": reason,
        "groups": groups,
        "plan_cpu_s": round(plan_cpu_s, 3),
        "verify_cpu_s": round(verify_cpu_s, 3),
    }


def in_share(workload: str, device: str, share: int, shares: int) -> bool:
    """Whether a pair is in the share of that number: the same on every machine."""
    return zlib.crc32(f"{workload} {device}".encode()) % shares == share


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, verify, write, and sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", default=",".join(device_names()), metavar="NAME,…")
    parser.add_argument("--workloads", default=",".join(ZOO), metavar="NAME,…")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, metavar="SECONDS")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.csv")
    options = parser.parse_args(argv)
    machine = machine_columns()
    versions = f"jax {machine['jax']}; python {machine['python']}"
    try:
        names = [get_workload(name).name for name in options.workloads.split(",")]
        devices = {name: get_device(name) for name in options.devices.split(",")}
        file = RowFile(options.out, Row, lambda row: row.versions == versions)
    except (FuseplanError, ValueError) as error:
        parser.error(str(error))
    known = {row.task for row in file.rows}
    with progress(len(names) * len(devices)) as steps:
        for name in names:
            lowered: Lowered | None = None
            for device in devices:
                steps.start(f"{name} on {device}")
                if (name, device) not in known:
                    if lowered is None:
                        f, args = get_workload(name).build()
                        lowered = lower(trace(f, *args))
                    found = verify_one(lowered, devices[device], options.deadline)
                    file.add(Row(name, device, **found, versions=versions))  # type: ignore[arg-type]
                steps.done()
    rows = [row for row in file.rows if row.workload in names and row.device in devices]
    head = ("workload", "device", "claims", "result", "plan s", "verify s", "reason")
    print_table(
        head,
        [(r.workload, r.device, r.claims, r.result, f"{r.plan_cpu_s:.1f}", f"{r.verify_cpu_s:.1f}", r.reason)
         for r in rows],
        right=range(4, 6), title=f"Proofs, from their files ({versions})",
    )  # fmt: skip
    counts = Counter((row.claims, row.result) for row in rows)
    for (claims, result), count in sorted(counts.items()):
        print(f"{count:5,} {claims}: {result}")
    return 1 if any(row.result == REFUTED for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
