"""Every kernel of the workloads' plans, compiled for devices that are not there.

    python -m experiments.compiled --out compiled.csv

A row a distinct kernel: does it compile, and if not, why; registers, spills and shared memory on
GPUs; on TPUs VMEM, and the compiler's estimate of cycles beside that of XLA's own kernels for the
same operations. Needs the extra ``aot``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import pandas as pd

from costmodel.device import DeviceSpec
from experiments.compiler_reports import dump_cycles, gpu_report, tpu_report
from experiments.workloads import WORKLOADS, get_workload
from fuseplan.bench import csv_of
from fuseplan.config import DEFAULT_DEADLINE_S, make_options
from fuseplan.console import progress
from fuseplan.emit import emit
from fuseplan.emit.body import live_ins
from fuseplan.emit.naming import kernel_name
from fuseplan.fallback import described
from fuseplan.lower import Lowered
from fuseplan.output import write_text
from fuseplan.plan import Kernel, Plan
from fuseplan.planner import plan_function
from fuseplan.refusal import read_refusal
from fuseplan.runtime import left_to_xla
from fuseplan.signature import Signatures

Task = tuple[str, str, str]
"""A workload, a device and a dtype."""

DEVICES = ("h200", "h200:mosaic_gpu", "tpu_v5e", "tpu_v6e")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Row:
    """One distinct kernel; None where something does not apply, or is not known."""

    workload: str
    device: str
    dtype: str
    kernel: int
    """The first of its kind in the plan."""
    count: int
    """How often the plan has it."""
    name: str
    nodes: int
    tile: str
    compiled: bool
    cause: str = ""
    """Why it does not compile."""
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    threads: int | None = None
    serialized: bool | None = None
    """The tensor cores wait for the other instructions (``ptxas``, C7514)."""
    modelled_onchip_bytes: int = 0
    vmem_bytes: int | None = None
    cycles: int | None = None
    xla_cycles: int | None = None
    """Of XLA's own kernels for the same operations."""
    hbm_bytes: int = 0
    xla_hbm_bytes: int | None = None
    modelled_us: float = 0.0
    cycles_us: float | None = None
    """The larger of cycles at the device's clock and bytes at its bandwidth."""
    xla_cycles_us: float | None = None
    compile_s: float = 0.0


def rows_of(task: Task, deadline_s: float = DEFAULT_DEADLINE_S, first: int = 0) -> Iterator[Row]:
    """A row for each distinct kernel of the workload's plan in full size, from the ``first`` on."""
    workload, device, dtype = task
    f, args = get_workload(workload).build(dtype=dtype)
    lowered, plan = plan_function(f, args, {}, make_options(device, deadline_s=deadline_s))
    for k, count in _distinct(plan)[first:]:
        kernel = plan.kernels[k]
        started = time.perf_counter()
        found = _found(kernel, lowered, plan.device)
        spec = kernel.spec
        yield Row(
            *task,
            k,
            count,
            kernel_name(spec, lowered),
            len(spec.nodes),
            "×".join(f"{a.tile}/{a.size}{a.role.name[0].lower()}" for a in spec.axes),
            modelled_onchip_bytes=kernel.cost.onchip_bytes,
            hbm_bytes=kernel.cost.hbm_bytes,
            modelled_us=kernel.cost.time_us,
            compile_s=time.perf_counter() - started,
            **found,
        )


def _distinct(plan: Plan) -> list[tuple[int, int]]:
    """The first kernel of each kind that is not XLA's, and how many there are."""
    signatures = Signatures(plan.graph)
    kinds: dict[Hashable, list[int]] = {}
    for k, kernel in enumerate(plan.kernels):
        if kernel.spec.backend != "xla":
            kinds.setdefault(described(kernel.spec, signatures), []).append(k)
    return [(ks[0], len(ks)) for ks in kinds.values()]


def _found(kernel: Kernel, lowered: Lowered, device: DeviceSpec) -> dict[str, Any]:
    spec = kernel.spec
    avals = [jax.ShapeDtypeStruct(lowered.avals[v].shape, lowered.avals[v].dtype) for v in live_ins(spec)]
    try:
        if device.platform == "gpu":
            report = gpu_report(emit(spec, lowered), avals, device.name)[kernel_name(spec, lowered)]
            return {"compiled": True, **asdict(report)}
        ours = tpu_report(emit(spec, lowered), avals, device.name)
    except Exception as error:  # Whatever the compiler raises is the finding.
        return {"compiled": False, "cause": read_refusal(error).said}
    found: dict[str, Any] = {"compiled": True, "vmem_bytes": ours.vmem_bytes, "cycles": ours.cycles}
    if ours.cycles is None:
        return found
    try:
        xla = tpu_report(emit(left_to_xla(spec), lowered), avals, device.name)
    except Exception:  # Ours is what is asked about.
        return found
    found |= {"xla_cycles": xla.cycles, "xla_hbm_bytes": xla.hbm_bytes}
    if xla.cycles is not None:
        found["cycles_us"] = _us(ours.cycles, kernel.cost.hbm_bytes, device)
        found["xla_cycles_us"] = _us(xla.cycles, xla.hbm_bytes, device)
    return found


def _us(cycles: int, hbm_bytes: int, device: DeviceSpec) -> float:
    """Cycles are too few where a kernel waits for memory."""
    cycles_per_s = device.transcendental_per_s / (device.core_count * 8 * 128)  # one 8 x 128 result a clock
    return 1e6 * max(cycles / cycles_per_s, hbm_bytes / device.hbm_bytes_per_s)


@dataclass(frozen=True, slots=True)
class _Work:
    """What one process does: tasks, from a kernel of the first on."""

    tasks: tuple[Task, ...]
    deadline_s: float
    with_cycles: bool
    first: int = 0
    only_one: bool = False


def _send(work: _Work, rows: Connection) -> None:
    """Each row as it is known, None after each task."""
    with dump_cycles() if work.with_cycles else nullcontext():
        first = work.first
        for task in work.tasks:
            for row in rows_of(task, work.deadline_s, first):
                rows.send(row)
                if work.only_one:
                    return
            rows.send(None)
            first = 0


def _received(work: _Work) -> Iterator[Row | None]:
    """What a process sends, until it ends or dies."""
    context = get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(work, there), daemon=True)
    process.start()
    there.close()
    try:
        while True:
            yield here.recv()
    except EOFError:
        process.join()


def _all_rows(work: _Work) -> Iterator[Row | None]:
    """A row a kernel, and None after each task, in processes of their own: libtpu ends the process that
    asks for the cycles of some kernels that it does compile. Those are compiled once more, without."""
    left = work
    while left.tasks:
        for row in _received(left):
            left = (
                replace(left, first=left.first + 1) if row else replace(left, tasks=left.tasks[1:], first=0)
            )
            yield row
        if left.tasks:
            alone = replace(left, tasks=left.tasks[:1], with_cycles=False, only_one=True)
            lost = Row(*left.tasks[0], -1, 1, "?", 0, "", False, "the compiler ended the process")
            yield next(_received(alone), None) or lost
            left = replace(left, first=left.first + 1)


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a device and dtype: kernels, the share that compiles, those that spill, and the median and
    the worst of our time over XLA's, by cycles and bytes."""
    rows = []
    for (device, dtype), part in frame.groupby(["device", "dtype"], sort=False):
        ratio = (part["cycles_us"] / part["xla_cycles_us"]).dropna()
        rows.append(
            {
                "device": device,
                "dtype": dtype,
                "kernels": len(part),
                "compiled": f"{part['compiled'].mean():.1%}",
                "spilling": int((part["spill_bytes"].fillna(0) > 0).sum()),
                "serialized": int(part["serialized"].eq(True).sum()),
                "median time/XLA": round(float(ratio.median()), 2) if len(ratio) else None,
                "worst": round(float(ratio.max()), 2) if len(ratio) else None,
            }
        )
    return pd.DataFrame(rows)


def ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Cycles of our kernels over XLA's for the same work, a row a workload, all kernels together."""
    known = frame.dropna(subset=["cycles", "xla_cycles"])
    if known.empty:
        return pd.DataFrame()

    def ratio(part: pd.DataFrame, ours: str, xla: str) -> float:
        return float((part[ours] * part["count"]).sum() / max((part[xla] * part["count"]).sum(), 1e-9))

    rows = [
        {
            "workload": workload,
            "on": f"{device} {dtype}",
            "cycles": ratio(part, "cycles", "xla_cycles"),
            "time": ratio(part, "cycles_us", "xla_cycles_us"),
        }
        for (workload, device, dtype), part in known.groupby(["workload", "device", "dtype"], sort=False)
    ]
    return pd.DataFrame(rows).pivot_table(index="workload", columns="on", values=["cycles", "time"]).round(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, write and sum up; 1 if a kernel does not compile."""
    options = _parser().parse_args(argv)
    tasks = [
        (workload, device, dtype)
        for device in options.devices.split(",")
        for dtype in options.dtypes.split(",")
        for workload in (options.only.split(",") if options.only else WORKLOADS)
    ]
    rows: list[dict[str, Any]] = []
    with progress(len(tasks)) as steps:
        for row in _all_rows(_Work(tuple(tasks), options.deadline_s, options.cycles)):
            if row is None:
                steps.done()
                continue
            steps.start(f"{row.workload} {row.device} {row.dtype}")
            rows.append(asdict(row))
            if options.out is not None:  # what is known is kept, whatever comes next
                write_text(options.out, csv_of(rows))
    frame = pd.DataFrame(rows)
    _print(frame)
    return 0 if frame["compiled"].all() else 1


def _print(frame: pd.DataFrame) -> None:
    def say(title: str, part: pd.DataFrame, index: bool = False) -> None:
        if len(part):
            print(f"\n{title}\n{part.to_string(index=index)}")

    say("Kernels:", summary(frame))
    at = ["workload", "device", "dtype", "name", "tile"]
    say("Do not compile:", frame.loc[~frame["compiled"], [*at, "cause"]])
    spills = frame["spill_bytes"].fillna(0) > 0
    say("Spill:", frame.loc[spills, [*at, "registers", "spill_bytes", "threads", "shared_bytes"]])
    say("Tensor cores serialized:", frame.loc[frame["serialized"].eq(True), [*at, "registers"]])
    say("Ours over XLA's, in cycles, and in time with bytes:", ratios(frame), index=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.compiled", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, help="a CSV file, a row a kernel")
    parser.add_argument("--only", default="", metavar="NAME,…", help="workloads; default: all")
    parser.add_argument("--devices", default=",".join(DEVICES))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--deadline-s", type=float, default=DEFAULT_DEADLINE_S, help="of each planning")
    parser.add_argument("--no-cycles", dest="cycles", action="store_false", help="compile only")
    return parser


if __name__ == "__main__":
    sys.exit(main())
