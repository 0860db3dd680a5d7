"""Rows of ``fuseplan bench solver`` as tables of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.bench.planning import Printable
from fuseplan.bench.solver import STAGES, AtDeadline, SolverTiming
from fuseplan.report.text import bound_text
from fuseplan.support.format import seconds_text, time_text


def solver_tables(rows: Sequence[SolverTiming]) -> list[Printable]:
    """The problems and proofs, seconds by stage, deadlines, what heuristics lose, and the ablation."""
    if not rows:
        return []
    tables = [_problems(rows), _stages(rows), _totals(rows)]
    if rows[0].at_deadlines:
        tables += [_gaps(rows), _overshoots(rows)]
    tables.append(_excess(rows))
    if rows[0].ablation:
        tables.append(_ablation(rows))
    return tables


def _problems(rows: Sequence[SolverTiming]) -> Printable:
    head = (rows[0].device, "equations", "parts", "distinct", "candidates", "priced", "proof")
    lines = [
        (
            row.workload,
            *(f"{n:,}" for n in (row.equations, row.components, row.distinct_components, row.candidates)),
            f"{row.priced:,}",
            bound_text(row.status, row.gap, None if row.gap is None else row.time_us / (1 + row.gap)),
        )
        for row in rows
    ]
    return head, lines, tuple(range(1, len(head)))


def _stages(rows: Sequence[SolverTiming]) -> Printable:
    head = ("seconds, median", *STAGES)
    lines = [(row.workload, *(f"{seconds:.2f}" for _, seconds in row.stages)) for row in rows]
    return head, lines, tuple(range(1, len(head)))


def _totals(rows: Sequence[SolverTiming]) -> Printable:
    with_xla = any(row.xla_compile_s is not None for row in rows)
    head = ("planning", "median", "least", "most", *(("XLA compile", "planning / XLA") if with_xla else ()))
    lines = []
    for row in rows:
        of_xla = ("" if row.of_xla is None else f"{row.of_xla:.2f}×") if with_xla else None
        xla = "" if row.xla_compile_s is None else seconds_text(row.xla_compile_s)
        spread = (row.total.median_s, row.total.least_s, row.total.most_s)
        lines.append(
            (row.workload, *map(seconds_text, spread), *((xla, of_xla) if of_xla is not None else ()))
        )
    return head, lines, tuple(range(1, len(head)))


def _gaps(rows: Sequence[SolverTiming]) -> Printable:
    head = ("of bound after", *_deadline_heads(rows))
    lines = [(row.workload, *(bound_text(at.status, at.gap) for at in row.at_deadlines)) for row in rows]
    return head, lines, tuple(range(1, len(head)))


def _overshoots(rows: Sequence[SolverTiming]) -> Printable:
    head = ("ms over the deadline", *_deadline_heads(rows))
    lines = [(row.workload, *map(_overshoot_text, row.at_deadlines)) for row in rows]
    return head, lines, tuple(range(1, len(head)))


def _excess(rows: Sequence[SolverTiming]) -> Printable:
    head = ("solver's plan", "kernels", "µs", *(f"{name} +" for name, _ in rows[0].excess))
    lines = [
        (
            row.workload,
            f"{row.kernels:,}",
            time_text(row.time_us),
            *(f"{100 * excess:.2f} %" for _, excess in row.excess),
        )
        for row in rows
    ]
    return head, lines, tuple(range(1, len(head)))


def _ablation(rows: Sequence[SolverTiming]) -> Printable:
    head = ("without", "workload", "time", "kernels")
    lines = [
        (without.feature, row.workload, f"{without.time_ratio:.3f}×", f"{without.kernels_ratio:.2f}×")
        for i in range(len(rows[0].ablation))
        for row in rows
        for without in (row.ablation[i],)
    ]
    return head, lines, (2, 3)


def _deadline_heads(rows: Sequence[SolverTiming]) -> tuple[str, ...]:
    return tuple(f"{at.deadline_s:g} s" for at in rows[0].at_deadlines)


def _overshoot_text(at: AtDeadline) -> str:
    if at.overshoot_ms < 1:
        return "–"
    return f"{at.overshoot_ms:,.0f}{'' if at.kept else ' !'}"
