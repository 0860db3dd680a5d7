"""The columns of the frames that fuseplan returns: the name, dtype, unit and meaning of each.

``COLUMNS`` is the only list of them: frames are built, read from files and documented from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a frame."""

    name: str
    dtype: str
    """Of pandas: ``int64``, ``Int64`` (integers of which some may be missing), ``float64`` (NaN where
    missing) or ``str`` (``object`` before pandas 3; empty where missing)."""
    meaning: str
    unit: str = ""
    """``µs``, ``s``, ``B`` (bytes), ``flop``, ``flop/B``; empty for a count, a ratio or text."""
    is_optional: bool = False
    """Whether the frame has the column only where it was asked for."""


_KERNELS = (
    Column("kernel", "int64", "number of the kernel, in order of execution"),
    Column("name", "str", "place in the program and form of the computation"),
    Column("ops", "str", "its primitives in order, with spaces between"),
    Column("n_ops", "int64", "number of its operations"),
    Column("makes", "str", "its largest result, and the number of the others"),
    Column("backend", "str", "language of the kernel; xla for a group that XLA compiles"),
    Column("grid", "str", "tiles along each parallel axis, or loop, with several"),
    Column("tile", "str", "extent of a tile along each axis"),
    Column("skipped", "str", "tiles that masks leave out, of all; empty if none"),
    Column("time_us", "float64", "modelled time", "µs"),
    Column("bound_by", "str", "largest part of the time"),
    Column("parts", "str", "parts of the time in microseconds, the largest first"),
    Column("hbm_bytes", "int64", "traffic with the device's memory", "B"),
    Column("onchip_bytes", "int64", "on-chip memory of a tile", "B"),
    Column("flops", "int64", "floating-point operations", "flop"),
    Column("intensity", "float64", "operations for each byte of traffic", "flop/B"),
    Column("roofline", "float64", "time at the device's peak rates over modelled time"),
    Column("source", "str", "file:line (function) of its main operation"),
)

_OPERATIONS = (
    Column("operation", "int64", "id of the operation, a node of the plan's graph"),
    Column("primitive", "str", "JAX's name of the primitive"),
    Column("kind", "str", "elementwise, broadcast, injective, reduction, … as in TVM"),
    Column("scope", "str", "enclosing jax.named_scope names, outermost first, with / between"),
    Column("shape", "str", "shape of each result in brackets, with a space between"),
    Column("dtype", "str", "dtype of each result, with a space between"),
    Column("flops", "int64", "floating-point operations", "flop"),
    Column("read_bytes", "int64", "bytes that it would read as a kernel by itself", "B"),
    Column("write_bytes", "int64", "bytes that it would write as a kernel by itself", "B"),
    Column("kernel", "int64", "number of its kernel"),
    Column("role", "str", "its part in the kernel: main, prologue, epilogue or beside"),
    Column("copies", "int64", "operations that compute the same result; more than 1 if rematerialised"),
    Column("copy_of", "int64", "id of the first of these; its own id if there is no other"),
    Column("source", "str", "file:line (function) in the user's code"),
)

_FIGURES = (
    Column("kernels", "Int64", "number of kernels"),
    Column("time_us", "float64", "modelled time of the plan", "µs"),
    Column("unrewritten_us", "float64", "modelled time of the planner's plan of the program as traced", "µs"),
    Column("hbm_bytes", "Int64", "traffic with the device's memory", "B"),
    Column("peak_bytes", "Int64", "most bytes of temporaries at once", "B"),
    Column("recomputed_flops", "Int64", "operations beyond those of the program", "flop"),
    Column("status", "str", "OPTIMAL, FEASIBLE, or NONE if there is no plan"),
    Column("bound_us", "float64", "no plan of the search space is faster", "µs"),
)

_COMPARE = (
    Column("device", "str", "name of the device, where several were given", is_optional=True),
    Column("planner", "str", "name of the planner"),
    *_FIGURES,
    Column("gap", "float64", "time_us / bound_us - 1"),
    Column("planning_s", "float64", "wall-clock time of planning", "s"),
    Column("ratio", "float64", "time_us over that of the baseline"),
    Column("baseline", "str", "planner that ratios are relative to"),
    Column("notes", "str", "facts that a reader should know; without a plan, the reason"),
    Column("assumed", "str", "figures of the device that are neither measured nor published"),
    Column("measured_us", "float64", "measured median time", "µs", True),
    Column("measured_ratio", "float64", "measured time over that of jax.jit", is_optional=True),
    Column("temp_bytes", "float64", "temporaries, as the compiler reports them", "B", True),
    Column("temp_ratio", "float64", "temporaries over those of jax.jit", is_optional=True),
)

_STUDY = (
    Column("workload", "str", "name of the program"),
    Column("device", "str", "name of the device"),
    Column("dtype", "str", "dtype of a named workload's arrays; of another, of its largest argument"),
    Column("planner", "str", "name of the planner"),
    Column("operations", "Int64", "number of operations of the program as traced"),
    *_FIGURES,
    Column("planning_s", "float64", "wall-clock time of planning", "s"),
    Column("notes", "str", "facts that a reader should know; without a plan, the reason"),
    Column("deadline_s", "float64", "limit on the time of planning", "s"),
    Column("date", "str", "day on which the row was made"),
    Column("versions", "str", "what the row depends on: versions, machine, own programs, options"),
)

COLUMNS: Mapping[str, tuple[Column, ...]] = MappingProxyType(
    {"kernels": _KERNELS, "operations": _OPERATIONS, "compare": _COMPARE, "study": _STUDY}
)
"""The columns of ``Plan.to_frame`` (``kernels``), ``Plan.ops_frame`` (``operations``), ``fuseplan.compare``
and ``fuseplan.study``.

Example:
    >>> {column.name: column.unit for column in COLUMNS["kernels"] if column.unit == "µs"}
    {'time_us': 'µs'}
"""


def columns_of(names: Iterable[str]) -> tuple[Column, ...] | None:
    """The columns of the frame that has these names, in their order; None if no frame of ``COLUMNS`` has.

    Example:
        >>> columns_of(["time", "name"]) is None
        True
    """
    names = list(names)
    for columns in COLUMNS.values():
        of_name = {column.name: column for column in columns}
        required = {column.name for column in columns if not column.is_optional}
        if required <= set(names) <= of_name.keys() and len(names) == len(set(names)):
            return tuple(of_name[name] for name in names)
    return None
