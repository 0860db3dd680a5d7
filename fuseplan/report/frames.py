"""Convert plans, comparisons and the device table to pandas frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from costmodel.device import DeviceSpec
from costmodel.devices import DEVICES, backends_of, device_names
from costmodel.graph import Graph
from costmodel.roofline import estimate, work_of
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.plan.kernel_names import anchor, kernel_name
from fuseplan.report.comparison import NO_PLAN, Compared, Timing, baseline_of
from fuseplan.report.text import grid, makes, parts_text, skipped, tile
from fuseplan.schedule.layout import whole_array_spec
from fuseplan.targets.detect import find_device

if TYPE_CHECKING:
    import pandas as pd


def figures(plan: FusionPlan) -> dict[str, Any]:
    """The figures of a plan in a row of a table; ``bound_us`` is None where there is no bound."""
    return {
        "kernels": len(plan.kernels),
        "time_us": plan.objective_us,
        "hbm_bytes": plan.hbm_bytes,
        "peak_bytes": plan.peak_bytes,
        "recomputed_flops": plan.recomputed_flops,
        "status": plan.status,
        "bound_us": plan.bound_us,
    }


def compare_frame(rows: Sequence[Compared], timings: Sequence[Timing] | None = None) -> pd.DataFrame:
    """A frame with a row for each planner of one program on one device. The columns are those of
    ``fuseplan.compare``, with those of ``timings`` if they are given."""
    baseline = baseline_of(row.plan for row in rows if row.plan is not None)
    lines = [
        {
            **_columns(row, baseline),
            "planner": row.planner,
            "notes": "; ".join(row.notes),
            "unrewritten_us": math.nan if row.unrewritten_ps is None else row.unrewritten_ps / 1e6,
            "baseline": "" if baseline is None else baseline.planner,
        }
        for row in rows
    ]
    frame = _frame(lines, _COMPARE)
    if timings is not None:
        frame["measured_us"] = [_number(t.time_s) * 1e6 for t in timings]
        frame["measured_ratio"] = [_number(t.time_ratio) for t in timings]
        frame["temp_bytes"] = [_number(t.temp_bytes) for t in timings]
        frame["temp_ratio"] = [_number(t.temp_ratio) for t in timings]
    return frame


def _columns(row: Compared, baseline: FusionPlan | None) -> dict[str, Any]:
    """The columns that follow from the plan of ``row``; NaN where there is none."""
    plan = row.plan
    if plan is None:
        return {**dict.fromkeys(_COMPARE, math.nan), "status": NO_PLAN, "assumed": ""}
    return {
        **figures(plan),
        "bound_us": _number(plan.bound_us),
        "gap": _number(plan.gap),
        "planning_s": plan.planning_s,
        "ratio": math.nan if baseline is None else plan.objective_ps / baseline.objective_ps,
        "assumed": ", ".join(plan.device.assumed),
    }


def _number(known: float | None) -> float:
    return math.nan if known is None else known


_COMPARE = (
    "planner", "kernels", "time_us", "unrewritten_us", "hbm_bytes", "peak_bytes", "recomputed_flops",
    "status", "bound_us", "gap", "planning_s", "ratio", "baseline", "notes", "assumed",
)  # fmt: skip


def kernels_frame(plan: FusionPlan) -> pd.DataFrame:
    """A frame with a row for each kernel of a plan: see ``Plan.to_frame``."""
    graph = plan.graph
    rows = []
    for k, kernel in enumerate(plan.kernels):
        spec, cost = kernel.spec, kernel.cost
        flops = cost.flops.total
        rows.append(
            {
                "kernel": k,
                "name": kernel_name(graph, spec.nodes),
                "ops": " ".join(graph.nodes[n].op for n in spec.nodes),
                "n_ops": len(spec.nodes),
                "makes": makes(graph, spec),
                "backend": spec.backend,
                "grid": grid(spec),
                "tile": tile(spec),
                "skipped": skipped(spec),
                "time_us": cost.time_us,
                "bound_by": cost.bound_by,
                "parts": parts_text(cost),
                "hbm_bytes": cost.hbm_bytes,
                "onchip_bytes": cost.onchip_bytes,
                "flops": flops,
                "intensity": flops / cost.hbm_bytes if cost.hbm_bytes else float("nan"),
                "roofline": roofline_share(graph, kernel, plan.device),
                "source": anchor(graph, spec.nodes).source,
            }
        )
    return _frame(rows, _KERNELS)


_KERNELS = (
    "kernel", "name", "ops", "n_ops", "makes", "backend", "grid", "tile", "skipped", "time_us",
    "bound_by", "parts", "hbm_bytes", "onchip_bytes", "flops", "intensity", "roofline", "source",
)  # fmt: skip


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as dictionaries by column."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def roofline_share(graph: Graph, kernel: Kernel, device: DeviceSpec) -> float:
    """The roofline time of the kernel over its modelled time; NaN for a kernel that takes no time.

    The roofline time is that of its arrays and operations at the device's peak rates: each array moved once,
    no launch, no recomputation, and no operations on tiles that a mask leaves out."""
    cost = kernel.cost
    if not cost.time_ps:
        return float("nan")
    spec = whole_array_spec(graph, kernel.spec.nodes)
    ideal = estimate(graph, spec, device, work=work_of(graph, spec))
    matrix_ps, vector_ps = ideal.matrix_ps, ideal.vector_ps + ideal.transcendental_ps
    if kernel.spec.capabilities.loop_nest:
        matrix_ps = min(matrix_ps, cost.matrix_ps)
        vector_ps = min(vector_ps, cost.vector_ps + cost.transcendental_ps)
    return max(ideal.memory_ps, matrix_ps, vector_ps) / cost.time_ps


def devices_frame(measure_cpu: bool = True) -> pd.DataFrame:
    """A frame with a row for each device, indexed by name.

    ``attrs["sources"][name]`` maps each field to the source of its figure; the column ``assumed`` lists the
    fields whose figures are neither measured nor published. The first call measures the CPU, which takes some
    seconds; ``measure_cpu=False`` leaves it out."""
    devices = [find_device(name) for name in device_names() if name in DEVICES or measure_cpu]
    frame = _frame([_device_row(device) for device in devices]).set_index("name")
    frame.attrs["sources"] = {device.name: dict(device.sources) for device in devices}
    return frame


def _device_row(device: DeviceSpec) -> dict[str, object]:
    return {
        "name": device.name,
        "description": device.description,
        "platform": device.platform,
        "backends": ", ".join(backends_of(device)),
        "cores": device.core_count,
        "hbm_gb": device.hbm_capacity_bytes / 1e9,
        "hbm_gb_per_s": device.hbm_bytes_per_s / 1e9,
        "cache_mib": device.cache_bytes / 2**20,
        "onchip_kib": device.onchip_bytes / 2**10,
        "launch_us": device.launch_ps / 1e6,
        "bf16_tflops": device.matrix_rate("bfloat16") / 1e12,
        "f32_tflops": device.matrix_rate("float32") / 1e12,
        "vector_tflops": device.vector_flops_per_s / 1e12,
        "ridge_point": device.ridge_point,
        "assumed": ", ".join(device.assumed),
    }


def _frame(rows: Sequence[Any], columns: Sequence[str] | None = None) -> pd.DataFrame:
    import pandas as pd  # imported on use, as it takes half a second

    return pd.DataFrame(rows, columns=None if columns is None else list(columns))
