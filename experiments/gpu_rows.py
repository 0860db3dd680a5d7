"""Rows of ``experiments.gpu_bench``, their file, and their summary."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from experiments.gpu_cases import NEVER_BELOW, OF_COPY, OF_CUDNN
from fuseplan.bench import columns, divergence_lines


@dataclass(frozen=True, slots=True)
class Row:
    """What was found out about one workload; None where it was not, or does not apply."""

    workload: str
    status: str = "measured"
    """``met`` or ``missed`` (its goals), ``tiny`` (without a GPU), ``wrong`` or ``failed``."""
    missed: str = ""
    dtype: str = ""
    sizes: str = ""
    ours_us: float | None = None
    jax_us: float | None = None
    torch_us: float | None = None
    library_us: float | None = None
    copy_us: float | None = None
    library: str = ""
    faster_than_jax: float | None = None
    faster_than_torch: float | None = None
    faster_than_library: float | None = None
    gb_per_s: float | None = None
    """Of arguments and results, each once."""
    copy_gb_per_s: float | None = None
    of_copy: float | None = None
    tflops: float | None = None
    ours_queued_us: float | None = None
    """Wall-clock time of a call among many, gaps between kernels included."""
    jax_queued_us: float | None = None
    modelled_us: float | None = None
    kernels: int | None = None
    modelled_kernels: str = ""
    """Each kernel of the plan and its modelled microseconds, as JSON."""
    measured_kernels: str = ""
    """Each kernel that ran and its microseconds, as JSON."""
    plan_status: str = ""
    plan_s: float | None = None
    compile_s: float | None = None
    jax_compile_s: float | None = None
    relative_error: float | None = None
    """The largest difference from float64, over the root mean square of its array."""
    jax_relative_error: float | None = None
    timer: str = ""
    repeats: int | None = None
    notes: str = ""
    error: str = ""
    device: str = ""
    driver: str = ""
    torch: str = ""
    cpu: str = ""
    cores: int | None = None
    memory_bytes: int | None = None
    fuseplan: str = ""
    jax: str = ""
    jaxlib: str = ""
    python: str = ""
    date: str = ""


def kept_rows(path: Path | None, device: str) -> Iterator[dict[str, Any]]:
    """The rows of an earlier run on this device that need not be measured again."""
    if path is None or not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row.get("device") == device and row.get("status") in ("met", "missed", "tiny"):
                yield {f.name: row.get(f.name, "") for f in fields(Row)}


_HEAD = ("workload", "status", "µs", "jax.jit", "torch", "library", "of copy", "TFLOP/s", "modelled")


def head_line() -> str:
    """The head of the table."""
    return _line(_HEAD)


def row_line(row: dict[str, Any]) -> str:
    """A row of the table; one that failed says why."""
    if row["status"] in ("wrong", "failed"):
        return f"{row['workload']:22} {row['status']}: {' '.join(str(row['error']).split())[:200]}"
    times = [_number(row[k], "8.1f") for k in ("ours_us", "jax_us", "torch_us", "library_us")]
    more = [
        _number(row["of_copy"], "7.0%"),
        _number(row["tflops"], "7.0f"),
        _number(row["modelled_us"], "8.1f"),
    ]
    return _line((row["workload"], row["status"], *times, *more))


def _known(value: Any) -> float | None:
    return None if value in (None, "") else float(value)


def _number(value: Any, form: str) -> str:
    return "–" if value in (None, "") else format(float(value), form).strip()


def _line(cells: Sequence[str]) -> str:
    name, status, *numbers = cells
    return f"{name:22} {status:8}" + "".join(f"{cell:>10}" for cell in numbers)


def summary_lines(rows: Sequence[dict[str, Any]], machine: dict[str, Any], timer: str) -> list[str]:
    """The machine, the goals, and what was missed."""
    judged = [r for r in rows if r["status"] in ("met", "missed")]
    met = sum(r["status"] == "met" for r in judged)
    lines = [
        "",
        f"{machine['device']}, driver {machine['driver'] or '–'}; JAX {machine['jax']}, "
        f"PyTorch {machine['torch'] or '–'}; timer: {timer}",
        f"Goals: {OF_COPY:.0%} of a copy's bandwidth where memory is the limit, 2 × jax.jit for "
        f"layernorm_vjp and layernorm_columns, {OF_CUDNN:.0%} of cuDNN's attention, never below "
        f"{NEVER_BELOW} × jax.jit: met by {met} of {len(judged)} workloads.",
    ]
    if missed := [[f"{r['workload']}:", r["missed"]] for r in judged if r["missed"]]:
        lines += columns(missed, set())
    times = [(str(r["workload"]), _known(r.get("modelled_us")), _known(r.get("ours_us"))) for r in rows]
    lines += divergence_lines(times, "gpu")
    lines += [f"{r['workload']}: {r['notes']}" for r in rows if r["notes"]]
    return lines
