"""Convert plans, comparisons and the device table to pandas frames."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.device import DeviceSpec
from costmodel.devices import DEVICES, backends_of, device_names
from costmodel.graph import Graph
from costmodel.roofline import estimate, work_of
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.plan.kernel_names import anchor, kernel_name
from fuseplan.report.columns import COLUMNS, Column, columns_of
from fuseplan.report.comparison import NO_PLAN, Compared, Timing, baseline_of
from fuseplan.report.text import grid, makes, parts_text, skipped, tile
from fuseplan.schedule.layout import whole_array_spec
from fuseplan.support.digraph import reachable
from fuseplan.support.errors import InvalidArgumentError
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


def compare_frame(
    rows: Sequence[Compared], timings: Sequence[Timing] | None = None, device: str | None = None
) -> pd.DataFrame:
    """A frame with a row for each planner of one program on one device. The columns are those of
    ``fuseplan.compare``, with those of ``timings`` and ``device`` if they are given."""
    baseline = baseline_of(row.plan for row in rows if row.plan is not None)
    lines = [
        {
            **_columns(row, baseline),
            "device": device,
            "planner": row.planner,
            "notes": "; ".join(row.notes),
            "unrewritten_us": None if row.unrewritten_ps is None else row.unrewritten_ps / 1e6,
            "baseline": "" if baseline is None else baseline.planner,
        }
        for row in rows
    ]
    left_out = set() if device is not None else {"device"}
    if timings is None:
        left_out |= _MEASURED
    else:
        for line, timing in zip(lines, timings, strict=True):
            line |= {
                "measured_us": None if timing.time_s is None else timing.time_s * 1e6,
                "measured_ratio": timing.time_ratio,
                "temp_bytes": timing.temp_bytes,
                "temp_ratio": timing.temp_ratio,
            }
    return typed_frame(lines, [c for c in COLUMNS["compare"] if c.name not in left_out])


_MEASURED = frozenset(("measured_us", "measured_ratio", "temp_bytes", "temp_ratio"))


def joined_frame(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The rows of frames with the same columns in one, numbered anew."""
    import pandas as pd  # imported on use, as it takes half a second

    joined = pd.concat(frames, ignore_index=True)
    joined.attrs = dict(frames[0].attrs)
    return joined


def _columns(row: Compared, baseline: FusionPlan | None) -> dict[str, Any]:
    """The columns that follow from the plan of ``row``; None where there is none."""
    plan = row.plan
    if plan is None:
        return {**{c.name: None for c in COLUMNS["compare"]}, "status": NO_PLAN, "assumed": ""}
    return {
        **figures(plan),
        "gap": plan.gap,
        "planning_s": plan.planning_s,
        "ratio": None if baseline is None else plan.objective_ps / baseline.objective_ps,
        "assumed": ", ".join(plan.device.assumed),
    }


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
                "intensity": flops / cost.hbm_bytes if cost.hbm_bytes else None,
                "roofline": roofline_share(graph, kernel, plan.device),
                "source": anchor(graph, spec.nodes).source,
            }
        )
    return typed_frame(rows, COLUMNS["kernels"])


def operations_frame(plan: FusionPlan) -> pd.DataFrame:
    """A frame with a row for each operation of a plan: see ``Plan.ops_frame``."""
    graph = plan.graph
    origins = graph.origins or tuple(range(len(graph.nodes)))
    copies = Counter(origins)
    place: dict[int, tuple[int, str]] = {}
    for k, kernel in enumerate(plan.kernels):
        place |= {n: (k, role) for n, role in roles(graph, kernel.spec.nodes).items()}
    rows = []
    for node in graph.nodes:
        results = [graph.values[v] for v in node.outputs]
        alone = estimate(graph, whole_array_spec(graph, (node.id,)), plan.device)
        rows.append(
            {
                "operation": node.id,
                "primitive": node.op,
                "kind": node.kind.name.lower(),
                "scope": node.scope,
                "shape": " ".join(f"[{','.join(map(str, value.shape))}]" for value in results),
                "dtype": " ".join(value.dtype for value in results),
                "flops": node.flops.total,
                "read_bytes": alone.hbm_read_bytes,
                "write_bytes": alone.hbm_write_bytes,
                "kernel": place[node.id][0],
                "role": place[node.id][1],
                "copies": copies[origins[node.id]],
                "copy_of": origins[node.id],
                "source": node.source,
            }
        )
    return typed_frame(rows, COLUMNS["operations"])


def roles(graph: Graph, nodes: Sequence[int]) -> dict[int, str]:
    """For each operation of a group, ``main`` (see ``anchor``), ``prologue`` (the main operation depends on
    it), ``epilogue`` (it depends on the main operation) or ``beside``."""
    main = anchor(graph, nodes).id
    inside = set(nodes)

    def producers(n: int) -> list[int]:
        return [p for v in graph.nodes[n].inputs if (p := graph.values[v].producer) in inside]

    def consumers(n: int) -> list[int]:
        return [c for v in graph.nodes[n].outputs for c in graph.consumers[v] if c in inside]

    before, after = reachable([main], producers), reachable([main], consumers)
    named = {n: "prologue" if n in before else "epilogue" if n in after else "beside" for n in nodes}
    return named | {main: "main"}


def study_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A frame of the rows of ``fuseplan.study``."""
    return typed_frame(rows, COLUMNS["study"])


def typed_frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> pd.DataFrame:
    """A frame whose columns have the given dtypes, also where it has no rows. ``attrs["units"]`` maps columns
    to their units."""
    import pandas as pd  # imported on use, as it takes half a second

    frame = pd.DataFrame({c.name: pd.Series([row[c.name] for row in rows], dtype=c.dtype) for c in columns})
    frame.attrs["units"] = {c.name: c.unit for c in columns if c.unit}
    return frame


def read_frame(path: str | PathLike[str]) -> pd.DataFrame:
    """Read a frame that fuseplan returned and pandas wrote, with the dtypes of ``fuseplan.COLUMNS``.

    Args:
        path: a file that ``frame.to_csv(path, index=False)`` wrote, with the name ``….csv``, or a Parquet
            file of ``frame.to_parquet(path)``, which needs the extra ``report``.

    Raises:
        InvalidArgumentError: the file cannot be read, or its columns are those of no frame of
            ``fuseplan.COLUMNS``.

    Example:
        >>> import fuseplan, jax, tempfile
        >>> x = jax.ShapeDtypeStruct((256, 512), "float32")
        >>> frame = fuseplan.make_plan(jax.nn.softmax, device="h200")(x).ops_frame()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     frame.to_csv(f"{folder}/ops.csv", index=False)
        ...     fuseplan.read_frame(f"{folder}/ops.csv").equals(frame)
        True
    """
    import pandas as pd  # imported on use, as it takes half a second

    try:
        is_csv = Path(path).suffix == ".csv"
    except TypeError:
        raise InvalidArgumentError(f"expected the path of a file with a frame, got {path!r}") from None
    try:
        if is_csv:
            frame = pd.read_csv(path, dtype="str", keep_default_na=False)
        else:
            frame = pd.read_parquet(path)
    except (OSError, ValueError, ImportError) as error:  # pandas' own errors are ValueErrors
        raise InvalidArgumentError(f"cannot read a frame from {path}: {error}") from None
    columns = columns_of(map(str, frame.columns))
    if columns is None:
        known = "; ".join(f"{name}: {', '.join(c.name for c in cs)}" for name, cs in COLUMNS.items())
        raise InvalidArgumentError(
            f"expected the columns of a frame of fuseplan in {path}, got "
            f"{', '.join(map(str, frame.columns))}. The frames and their columns: {known}"
        )
    if is_csv:
        cells = frame.itertuples(index=False, name=None)
        try:
            rows = [{c.name: _parsed(x, c) for c, x in zip(columns, row, strict=True)} for row in cells]
            return typed_frame(rows, columns)
        except (ValueError, OverflowError) as error:
            raise InvalidArgumentError(f"a cell of {path} is no number of its column: {error}") from None
    for column in columns:
        try:
            frame = frame.astype({column.name: column.dtype})
        except (ValueError, TypeError, OverflowError) as error:  # as pandas and pyarrow have it
            raise InvalidArgumentError(
                f"the column {column.name!r} of {path} should be {column.dtype}: {error}"
            ) from None
    frame.attrs["units"] = {c.name: c.unit for c in columns if c.unit}
    return frame


def _parsed(text: str, column: Column) -> Any:
    """The value that a cell of a CSV file holds. Raises ``ValueError`` if it is none of the column."""
    if column.dtype == "str":
        return text
    if not text:
        if column.dtype == "int64":
            raise ValueError(f"one of the column {column.name!r} is empty")
        return None
    return float(text) if column.dtype == "float64" else int(text)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as dictionaries by column. Missing values are NaN."""
    import pandas as pd  # imported on use, as it takes half a second

    return [
        {str(name): math.nan if value is pd.NA else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]


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


def _frame(rows: Sequence[Any]) -> pd.DataFrame:
    import pandas as pd  # imported on use, as it takes half a second

    return pd.DataFrame(rows)
