"""Rows of ``fuseplan bench cpu`` in 80 columns, a line each as it is known, and their sum."""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.bench.cpu import Row
from fuseplan.report.comparison import divergence_lines
from fuseplan.support.format import bytes_text, wrapped

_WIDTHS = (25, 7, 7, 7, 4, 8, 8, 6)
_HEAD = ("workload", "jax ms", "ms", "faster", "±%", "temp MB", "of jax's", "goal")


def head_line() -> str:
    """The head of the table."""
    return _line(_HEAD)


def row_line(row: Row) -> str:
    """A row of the table; one that failed says why."""
    return _failure_line(row) if row.status in ("failed", "wrong") else _measured_line(row)


def colour(row: Row) -> str | None:
    """What a row is printed in on a terminal: misses and failures stand out."""
    return {"met": "green", "measured": None}.get(row.status, "red")


def _failure_line(row: Row) -> str:
    name, reason = _cut(row.workload, _WIDTHS[0]).ljust(_WIDTHS[0]), " ".join(row.error.split())
    return _cut(f"{name} {row.status}: {reason}", 80)


def _measured_line(row: Row) -> str:
    spread = ""
    if row.speedup and row.speedup_low is not None and row.speedup_high is not None:
        spread = f"{50 * (row.speedup_high - row.speedup_low) / row.speedup:.0f}"
    return _line(
        (
            row.workload,
            "" if row.jax_ms is None else _digits(row.jax_ms),
            "" if row.fuseplan_ms is None else _digits(row.fuseplan_ms),
            "" if row.speedup is None else _times(row.speedup),
            spread,
            "" if row.fuseplan_temp_bytes is None else _mb(row.fuseplan_temp_bytes),
            "" if row.less_temp is None else _part(row.less_temp),
            row.status if row.status in ("met", "missed") else "",
        )
    )


def summary_lines(rows: Sequence[Row]) -> list[str]:
    """What the rows come to: checks, goals, those missed, and everything that went wrong."""
    lines = []
    if rows and rows[0].cpu:
        row = rows[0]
        memory = "" if row.memory_bytes is None else f", {bytes_text(row.memory_bytes)}"
        lines.append(f"{row.cpu}, {row.cores} cores{memory}; JAX {row.jax}, Python {row.python}")
    repeats = max((row.repeats or 0 for row in rows), default=0)
    if repeats > 1:
        lines.append(f"Medians of {repeats} runs each, in turns; ±%: half of the quartiles' distance.")
    for checked, same in _grouped_by_check(rows).items():
        count = "all" if len(same) == len(rows) else f"{len(same)} of {len(rows)}"
        lines.append(f"Results checked against {checked}: {count}.")
    for row in rows:
        if row.peak_rss_bytes is not None and row.jax_temp_bytes is not None:
            lines.append(f"{row.workload}: peak memory {bytes_text(row.peak_rss_bytes)} with the arguments; "
                         f"jax.jit needs {bytes_text(row.jax_temp_bytes)} of temporaries")  # fmt: skip
    judged = [row for row in rows if row.goal_speedup is not None]
    if judged:
        lines.append(f"Goals met: {sum(row.status == 'met' for row in judged)} of {len(judged)}.")
    times = [(row.workload, row.predicted_ms, row.fuseplan_ms) for row in rows]
    for line in divergence_lines(times, "cpu"):
        lines += wrapped(line, 80, "  ")
    lines += [_missed(row) for row in rows if row.status == "missed"]
    lines += [f"{row.status.upper()}: {row.workload}: {row.error}" for row in rows
              if row.status in ("wrong", "failed")]  # fmt: skip
    return lines


def _missed(row: Row) -> str:
    parts = []
    if row.speedup is not None and row.goal_speedup is not None and round(row.speedup, 2) < row.goal_speedup:
        parts.append(f"{_times(row.speedup)} as fast, goal {row.goal_speedup:g}×")
    if (
        row.less_temp is not None
        and row.goal_less_temp is not None
        and round(row.less_temp, 2) < row.goal_less_temp
    ):
        parts.append(f"{_part(row.less_temp)} of the temporaries, goal {_part(row.goal_less_temp)}")
    return f"missed: {row.workload}: {'; '.join(parts)}"


def _grouped_by_check(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.checked and row.status != "wrong":
            groups.setdefault(row.checked, []).append(row)
    return groups


def _line(cells: Sequence[str]) -> str:
    first, *numbers = (_cut(cell, width) for cell, width in zip(cells, _WIDTHS, strict=True))
    return " ".join(
        [first.ljust(_WIDTHS[0]), *(n.rjust(w) for n, w in zip(numbers, _WIDTHS[1:], strict=True))]
    ).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _digits(x: float) -> str:
    """Four significant digits or so: ``1,204``, ``120.4``, ``12.04``, ``0.120``."""
    if x >= 1000:
        return f"{x:,.0f}"
    return f"{x:.1f}" if x >= 100 else f"{x:.2f}" if x >= 1 else f"{x:.3f}"


def _mb(n: int) -> str:
    return _digits(n / 1e6)


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:,.0f}×"


def _part(less: float) -> str:
    """``1/100`` of as much; ``1.00×`` and above where it is about as much or more."""
    if less < 0.01:
        return ">100×"
    return f"{1 / less:.2f}×" if less < 1.5 else f"1/{less:,.3g}" if less < 1000 else f"1/{less:,.0f}"
