"""Rows of ``experiments.compiled``, one for each distinct kernel, and their file."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fuseplan.bench import parsed_row

Task = tuple[str, str, str]
"""A workload, a device and a dtype."""

DEADLINE_S = 20.0
"""Of each planning: fuseplan's own default."""

NOT_ASKED = "not asked for"
ENDED = "the compiler ended the process"

_COMPILERS = {"tpu": ("jax", "libtpu"), "gpu": ("jax", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")}


@dataclass(frozen=True, slots=True)
class Row:
    """The results for one distinct kernel; None for a figure that does not apply or is unknown."""

    workload: str
    device: str
    dtype: str
    kernel: int
    """The position of the first such kernel in the plan."""
    kinds: int
    """The number of distinct kernels of the plan."""
    count: int
    """The number of such kernels in the plan."""
    name: str
    nodes: int
    tile: str
    compiled: bool
    cause: str = ""
    """The reason why it does not compile."""
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
    """The cycles of XLA's own kernels for the same operations."""
    no_cycles: str = ""
    """The reason why one of the two is unknown."""
    in_hbm: bool = False
    """Both were estimated with all arrays in HBM: libtpu estimates no copies from VMEM to scalar memory."""
    hbm_bytes: int = 0
    xla_hbm_bytes: int | None = None
    modelled_us: float = 0.0
    cycles_us: float | None = None
    """The larger of cycles at the device's clock and bytes at its bandwidth."""
    xla_cycles_us: float | None = None
    compile_s: float = 0.0
    versions: str = ""
    """Of JAX and the device's compiler; the last column, so that a line cut short has another."""

    @property
    def task(self) -> Task:
        """Which plan has it."""
        return self.workload, self.device, self.dtype


def compiler_versions(platform: str) -> str:
    """The versions that a platform's kernels depend on.

    Example:
        >>> compiler_versions("tpu").startswith("jax ")
        True
    """
    return "; ".join(f"{name} {_version(name)}" for name in _COMPILERS[platform])


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "–"


def kept_rows(path: Path | None, versions: set[str], with_cycles: bool) -> dict[Task, list[Row]]:
    """The rows of an earlier run that need not be found out again: of each task its kernels from the
    first on, without a gap. A line that was not written to its end is none."""
    kept: dict[Task, list[Row]] = {}
    if path is None or not path.exists():
        return kept
    broken: set[Task] = set()
    with path.open(newline="", encoding="utf-8") as file:
        for record in csv.DictReader(file):
            row = parsed_row(Row, record)
            if row is None or row.versions not in versions:
                broken.add((record["workload"], record["device"] or "", record["dtype"] or ""))
            elif with_cycles and row.no_cycles == NOT_ASKED:
                broken.add(row.task)
            elif row.task not in broken:
                kept.setdefault(row.task, []).append(row)
    return kept


def records(rows: dict[Task, list[Row]]) -> list[dict[str, Any]]:
    """All rows as a file has them."""
    return [asdict(row) for part in rows.values() for row in part]
