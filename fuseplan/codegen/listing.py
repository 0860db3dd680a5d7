"""Print an emitted kernel as text: its jaxpr, and on request what the device's compiler makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from costmodel.kernel import Access
from fuseplan.codegen import emit
from fuseplan.codegen.single_pass import live_ins
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.plan.kernel_names import kernel_name
from fuseplan.report.text import grid, parts_text, tile
from fuseplan.support import jax_compat
from fuseplan.support.format import bytes_text, counted, time_text
from fuseplan.targets.compiler_reports import GpuReport, compile_gpu, compile_tpu


def kernel_code(
    kernel: Kernel, number: int, lowered: Lowered, device: DeviceSpec, compiled: bool = False
) -> str:
    """See ``PlanKernel.code``."""
    spec, graph = kernel.spec, lowered.graph
    function = emit(spec, lowered)
    avals = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in (lowered.avals[v] for v in live_ins(spec))
    ]
    head = _heading(kernel, number, graph, device)
    if compiled:
        return "\n".join([*head, "", *_compiled(function, avals, kernel, device)]) + "\n"
    return "\n".join([*head, "", _traced(function, avals)]) + "\n"


def _heading(kernel: Kernel, number: int, graph: Graph, device: DeviceSpec) -> list[str]:
    """Lines that begin with ``#``: the kernel, its arrays, and the model's figures."""
    spec, cost = kernel.spec, kernel.cost
    form = {"xla": "operations that XLA compiles", "loops": "a nest of XLA loops"}.get(
        spec.backend, f"a kernel in {spec.backend}"
    )
    tiles = f", tiles of {tile(spec)}" if tile(spec) else ""
    lines = [
        f"kernel {number}: {kernel_name(graph, spec.nodes)}, {counted(len(spec.nodes), 'operation')}",
        f"for {device.name}: {form}" + (f", grid {grid(spec)}{tiles}" if spec.axes else ""),
        f"reads   {_arrays(graph, spec.reads)}",
        f"writes  {_arrays(graph, spec.writes)}",
        f"modelled {time_text(cost.time_us)} µs: {parts_text(cost)}; HBM {bytes_text(cost.hbm_bytes)}, "
        f"on chip {bytes_text(cost.onchip_bytes)}",
    ]
    return [_comment(line) for line in lines]


def _comment(text: str) -> str:
    """One line that begins with ``#``, also where a name in it has several."""
    return f"# {' '.join(text.splitlines())}"


def _arrays(graph: Graph, accesses: Sequence[Access]) -> str:
    values = dict.fromkeys(access.value for access in accesses)
    return ", ".join(f"v{v}:{graph.values[v]}" for v in values) or "nothing"


def _traced(function: Callable[..., Any], avals: Sequence[Any]) -> str:
    """The jaxpr of a function; of one that calls Pallas kernels, these kernels, each with its grid."""
    closed = jax.make_jaxpr(function)(*avals)
    kernels = jax_compat.pallas_kernels(closed)
    if not kernels:
        return str(closed)
    lines = []
    for kernel in kernels:
        lines.append(f"# Pallas kernel {kernel.name}, grid {kernel.grid}")
        lines += [f"#   {block}" for block in kernel.blocks or ("the kernel gets whole arrays",)]
        if kernel.options:
            lines.append(f"#   options: {kernel.options}")
        lines += [kernel.body, ""]
    around = [eqn.primitive.name for eqn in closed.eqns if not _calls_kernel(eqn)]
    if around:
        lines.append(f"# XLA runs beside it: {', '.join(around)}")
    return "\n".join(lines).rstrip()


def _calls_kernel(eqn: Any) -> bool:
    """Whether an equation is, or holds, the call of a Pallas kernel."""
    return eqn.primitive.name in ("pallas_call", "mpmd_map") or any(
        jax_compat.pallas_kernels(value) for value in eqn.params.values() if hasattr(value, "eqns")
    )


def _compiled(
    function: Callable[..., Any], avals: Sequence[Any], kernel: Kernel, device: DeviceSpec
) -> list[str]:
    """The output of the device's compiler, below a line of its figures."""
    if device.platform == "cpu":
        placement = SingleDeviceSharding(jax.devices("cpu")[0])
        placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placement) for a in avals]
        program = jax.jit(function, out_shardings=placement).lower(*placed).compile()
        memory = program.memory_analysis()
        used = "" if memory is None else f", {bytes_text(memory.temp_size_in_bytes)} of temporaries"
        return [f"# compiled by XLA for this CPU{used}", program.as_text() or ""]
    if device.platform == "gpu":
        gpu = compile_gpu(function, avals, device.name)
        lines = [_gpu_line(name, report) for name, report in gpu.reports.items()]
        is_own = kernel.spec.capabilities.emits_kernels
        return [*lines, gpu.ptx if is_own and gpu.ptx else gpu.hlo]
    tpu = compile_tpu(function, avals, device.name)
    vmem = "" if tpu.report.vmem_bytes is None else f", at most {bytes_text(tpu.report.vmem_bytes)} of VMEM"
    return [_comment(f"compiled by libtpu for {device.name}{vmem}"), *(tpu.mosaic or (tpu.hlo,))]


def _gpu_line(name: str, report: GpuReport) -> str:
    figures = [f"{report.registers} registers a thread", f"{bytes_text(report.spill_bytes)} of spills"]
    if report.shared_bytes is not None:
        figures.append(f"{bytes_text(report.shared_bytes)} of shared memory")
    if report.threads is not None:
        figures.append(f"{report.threads} threads")
    if report.serialized:
        figures.append("tensor cores wait for the rest")
    return f"# {name}: {', '.join(figures)}"
