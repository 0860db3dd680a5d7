"""Time planning, stage by stage, beside XLA's own compiler in the same run."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from fuseplan.console import Steps
from fuseplan.frontend.trace import trace
from fuseplan.pipeline import plan_traced
from fuseplan.plan.options import Options
from fuseplan.report.text import bound_text
from fuseplan.search.cache import SolutionCache, using_cache
from fuseplan.support.format import seconds_text

_FOLDED = {
    "trace": ("trace",),
    "lower": ("lower",),
    "enumerate": ("partition", "cache", "heuristics", "merge", "copies", "enumerate"),
    "solve": ("solve", "join", "order"),
    "check": ("check",),
}
"""The columns of seconds, and the stages each sums up."""


@dataclass(frozen=True, slots=True)
class PlanTiming:
    """One workload planned once. ``xla_compile_s`` is None where XLA was not asked."""

    workload: str
    device: str
    planner: str
    equations: int
    nodes: int
    components: int
    distinct_components: int
    candidates: int
    kernels: int
    status: str
    gap: float | None
    trace_s: float
    lower_s: float
    enumerate_s: float
    solve_s: float
    check_s: float
    total_s: float
    xla_compile_s: float | None


def time_plan(
    name: str,
    f: Callable[..., Any],
    args: tuple[Any, ...],
    options: Options,
    with_xla: bool = True,
    steps: Steps | None = None,
) -> PlanTiming:
    """Plan ``f`` once and time it; with ``with_xla``, also time XLA compiling it for this
    machine (tracing and lowering to StableHLO excluded).

    ``args`` may be ``ShapeDtypeStruct``\\ s: nothing is run.
    """
    steps = steps or Steps()
    steps.start(f"planning {name}")
    started = time.perf_counter()
    traced = trace(f, *args)
    with using_cache(SolutionCache()):  # without cached solutions of earlier plans
        plan = plan_traced(traced, options, time.perf_counter() - started)
    total_s = time.perf_counter() - started
    steps.done()
    xla_s = xla_compile_s(name, f, args, steps) if with_xla else None
    stages = dict(plan.stats.seconds)
    spent = {f"{column}_s": sum(stages.get(stage, 0.0) for stage in of) for column, of in _FOLDED.items()}
    return PlanTiming(
        workload=name,
        device=options.device.name,
        planner=options.planner,
        equations=len(traced.equations),
        nodes=len(plan.graph.nodes),
        components=plan.stats.components,
        distinct_components=plan.stats.distinct_components,
        candidates=plan.stats.candidates,
        kernels=len(plan.kernels),
        status=plan.status,
        gap=plan.gap,
        **spent,
        total_s=total_s,
        xla_compile_s=xla_s,
    )


def xla_compile_s(name: str, f: Callable[..., Any], args: tuple[Any, ...], steps: Steps) -> float:
    """Seconds that XLA takes to compile for this machine, without tracing and lowering."""
    steps.start(f"XLA compiles {name}")
    lowered = jax.jit(lambda *args: f(*args)).lower(*args)  # of f itself, JAX may have kept the program
    started = time.perf_counter()
    lowered.compile()
    seconds = time.perf_counter() - started
    steps.done()
    return seconds


_COUNTS = ("equations", "nodes", "parts", "distinct", "candidates", "kernels")
Printable = tuple[Sequence[str], Sequence[Sequence[str]], tuple[int, ...]]
"""A table's head, its rows, and which columns are numbers."""


def plan_table(rows: Sequence[PlanTiming]) -> list[Printable]:
    """Two tables of 80 columns: the problems and their proofs, and the seconds."""
    problems = [
        (
            row.workload,
            *(f"{n:,}" for n in (row.equations, row.nodes, row.components)),
            *(f"{n:,}" for n in (row.distinct_components, row.candidates, row.kernels)),
            row.status,
            bound_text(row.status, row.gap),
        )
        for row in rows
    ]
    seconds = [
        (
            row.workload,
            *(
                seconds_text(s)
                for s in (row.trace_s, row.lower_s, row.enumerate_s, row.solve_s, row.check_s, row.total_s)
            ),
            "" if row.xla_compile_s is None else seconds_text(row.xla_compile_s),
        )
        for row in rows
    ]
    device = rows[0].device if rows else "workload"
    return [
        ((device, *_COUNTS, "status", "bound"), problems, (1, 2, 3, 4, 5, 6, 8)),
        (("seconds", *_FOLDED, "total", "XLA compile"), seconds, tuple(range(1, 8))),
    ]


def csv_of(records: Sequence[dict[str, Any]]) -> str:
    """Records of equal keys as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]) if records else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()
