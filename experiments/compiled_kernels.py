"""Compile the kernels of a workload's plan, one after another, for a device that is not present."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import jax

import fuseplan
from costmodel import DeviceSpec, KernelSpec
from experiments.compiled_rows import DEADLINE_S, ENDED, NOT_ASKED, Row, Task, compiler_versions
from fuseplan.extend import Lowered, TpuReport, emit, gpu_report, kernel_name, read_refusal, tpu_report
from fuseplan.workloads import get_workload


def rows_of(task: Task, deadline_s: float = DEADLINE_S, first: int = 0) -> Iterator[Row]:
    """A row for each distinct kernel of the workload's plan in full size, from the ``first`` on."""
    return (row for row, is_known in steps_of(task, deadline_s, first) if is_known)


def steps_of(
    task: Task, deadline_s: float = DEADLINE_S, first: int = 0, in_hbm: bool = False
) -> Iterator[tuple[Row, bool]]:
    """``rows_of`` (arrays all ``in_hbm``, if need be), and each row before its kernel is compiled, and
    before XLA's for the same: what is to be said where the compiler ends the process. Whether all is known
    stands beside it."""
    workload, device, dtype = task
    f, args = get_workload(workload).build(dtype=dtype)
    plan = fuseplan.make_plan(f, device=device, deadline_s=deadline_s)(*args)
    lowered = plan.lowered
    kinds = [ks for ks in plan.equal_kernels if plan.kernels[ks[0]].spec.backend != "xla"]
    for k, *others in kinds[first:]:
        kernel = plan.kernels[k]
        spec = kernel.spec
        row = Row(
            *task,
            k,
            len(kinds),
            1 + len(others),
            kernel_name(spec, lowered),
            len(spec.nodes),
            "×".join(f"{a.tile}/{a.size}{a.role.name[0].lower()}" for a in spec.axes),
            False,
            ENDED,
            modelled_onchip_bytes=kernel.cost.onchip_bytes,
            hbm_bytes=kernel.cost.hbm_bytes,
            modelled_us=kernel.cost.time_us,
            in_hbm=in_hbm,
            versions=compiler_versions(plan.device.platform),
        )
        yield row, False
        started = time.perf_counter()
        for found, is_known in _compiled(row, spec, lowered, plan.device):
            yield replace(found, compile_s=time.perf_counter() - started), is_known


def _compiled(row: Row, spec: KernelSpec, lowered: Lowered, device: DeviceSpec) -> Iterator[tuple[Row, bool]]:
    read = [lowered.avals[v] for v in dict.fromkeys(r.value for r in spec.reads)]
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in read]
    try:
        if device.platform == "gpu":
            report = gpu_report(emit(spec, lowered), avals, device.name)[row.name]
            yield replace(row, compiled=True, cause="", **asdict(report)), True
            return
        ours = tpu_report(emit(spec, lowered), avals, device.name, row.in_hbm)
    except Exception as error:  # Whatever the compiler raises is the finding.
        yield replace(row, cause=read_refusal(error).said), True
        return
    row = replace(row, compiled=True, cause="", vmem_bytes=ours.vmem_bytes, cycles=ours.cycles)
    if ours.cycles is None:
        yield replace(row, no_cycles=_why_unknown(ours)), True
        return
    yield replace(row, no_cycles=f"of XLA's own: {ENDED}"), False
    try:
        xla = tpu_report(emit(replace(spec, backend="xla"), lowered), avals, device.name, row.in_hbm)
    except Exception as error:  # Ours is what is asked about.
        yield replace(row, no_cycles=f"of XLA's own: {read_refusal(error).said}"), True
        return
    row = replace(row, xla_cycles=xla.cycles, xla_hbm_bytes=xla.hbm_bytes)
    if xla.cycles is None:
        row = replace(row, no_cycles=f"of XLA's own: {_why_unknown(xla)}")
    else:
        us = _us(ours.cycles, row.hbm_bytes, device), _us(xla.cycles, xla.hbm_bytes, device)
        row = replace(row, cycles_us=us[0], xla_cycles_us=us[1])
    yield row, True


def _why_unknown(report: TpuReport) -> str:
    return f"no estimate of {', '.join(report.unestimated)}" if report.unestimated else NOT_ASKED


def _us(cycles: int, hbm_bytes: int, device: DeviceSpec) -> float:
    """Cycles are too few where a kernel waits for memory."""
    cycles_per_s = device.transcendental_per_s / (device.core_count * 8 * 128)  # one 8 x 128 result a clock
    return 1e6 * max(cycles / cycles_per_s, hbm_bytes / device.hbm_bytes_per_s)
