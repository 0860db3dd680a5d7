"""Measure planning: proofs, seconds by stage, and the cost of a deadline, of heuristics and of each feature.

No kernel is run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from fuseplan.bench.machine import peak_rss_bytes, reset_peak_rss
from fuseplan.bench.planning import Printable, xla_compile_s
from fuseplan.console import Steps
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import Traced, trace
from fuseplan.pipeline import plan_best
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.plan.options import Features, Options
from fuseplan.planners import Budget, get_planner
from fuseplan.report.text import bound_text
from fuseplan.schedule.pricing import Nodes, PricingWrapper
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.cache import SolutionCache, using_cache
from fuseplan.support.errors import Verdict
from fuseplan.support.format import cut, seconds_text, time_text
from fuseplan.support.work import StageTimer

WORKLOADS = (
    "gpt2_block_grad,gpt2_train_4,gpt2_train_24,gpt2_train_72,fan_out_40,fan_in_40,random_dag_60,"
    "random_sums_60,lstm_cell,gru_cell,shallow_water,euler_fluxes,adam_100,norm_grads"
)
"""Of ``fuseplan.workloads``: transformers, and functions that are hard to plan."""

HEURISTICS = ("unfused", "greedy", "best_first")
"""Planners that the solver's plan is compared with."""

SLACK_S, SLACK_SHARE = 0.1, 0.1
"""A deadline is kept if planning exceeds it by no more than a tenth of a second and a tenth."""

NEAR = 0.01
"""Plans whose certified gap is at most this are counted as near their bound."""

STAGES = {
    "trace": ("trace",),
    "lower": ("lower",),
    "part": ("partition", "cache", "copies"),
    "heuristics": ("heuristics", "merge"),
    "enumerate": ("enumerate",),
    "solve": ("solve", "join"),
    "order": ("order",),
    "check": ("check",),
}
"""The columns of seconds, and the stages each sums up."""


_NAME = 16
"""Characters of a workload's name in tables, which fit in 80 columns."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of several runs: the median, the least and the most."""

    median_s: float
    least_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class AtDeadline:
    """A separate planning with this deadline. ``seconds`` are of all that the deadline is for:
    planning without tracing."""

    deadline_s: float
    status: str
    gap: float | None
    seconds: Spread

    @property
    def overshoot_ms(self) -> float:
        """By how much the slowest run exceeded the deadline, 0 if it did not."""
        return 1000 * max(self.seconds.most_s - self.deadline_s, 0.0)

    @property
    def kept(self) -> bool:
        """Whether the slowest run exceeded the deadline by no more than the slack."""
        return self.seconds.most_s <= self.deadline_s * (1 + SLACK_SHARE) + SLACK_S


@dataclass(frozen=True, slots=True)
class Ablation:
    """The plan without one feature, in units of the plan with all of them."""

    feature: str
    time_ratio: float
    kernels_ratio: float


@dataclass(frozen=True, slots=True)
class SolverTiming:
    """One workload on one device. ``total`` is with tracing, ``planning`` all that follows it.
    ``peak_rss_bytes`` is the most memory of this process while it planned, with what it held before.
    ``excess`` has for each heuristic planner how much slower its plan is in modelled time, 0.01 for one per
    cent; ``xla_compile_s``, of the same function for the CPU, is None where XLA was not asked."""

    workload: str
    device: str
    equations: int
    components: int
    distinct_components: int
    candidates: int
    priced: int
    kernels: int
    time_us: float
    status: str
    gap: float | None
    stages: tuple[tuple[str, float], ...]
    total: Spread
    planning: Spread
    peak_rss_bytes: int | None
    at_deadlines: tuple[AtDeadline, ...]
    excess: tuple[tuple[str, float], ...]
    ablation: tuple[Ablation, ...]
    xla_compile_s: float | None

    @property
    def of_xla(self) -> float | None:
        """The median planning time in units of XLA's compile time, both without tracing."""
        return self.planning.median_s / self.xla_compile_s if self.xla_compile_s else None

    def as_dict(self) -> dict[str, Any]:
        """One flat record, as the CSV file has it."""
        names = [field.name for field in fields(self)]
        record = {name: getattr(self, name) for name in names[: names.index("stages")]}
        record.update((f"{stage}_s", seconds) for stage, seconds in self.stages)
        record.update(total_s=self.total.median_s, total_least_s=self.total.least_s)
        record.update(total_most_s=self.total.most_s, planning_s=self.planning.median_s)
        record.update(planning_least_s=self.planning.least_s, planning_most_s=self.planning.most_s)
        record.update(peak_rss_bytes=self.peak_rss_bytes)
        for at in self.at_deadlines:
            key = f"at_{at.deadline_s:g}s"
            record.update({f"{key}_status": at.status, f"{key}_gap": at.gap, f"{key}_kept": at.kept})
            record.update({f"{key}_s": at.seconds.median_s, f"{key}_overshoot_ms": at.overshoot_ms})
        record.update((f"excess_{name}", excess) for name, excess in self.excess)
        for without in self.ablation:
            record[f"without_{without.feature}_time"] = without.time_ratio
            record[f"without_{without.feature}_kernels"] = without.kernels_ratio
        record.update(xla_compile_s=self.xla_compile_s, of_xla=self.of_xla)
        return record


def steps_of(
    deadlines_s: Sequence[float], repeats: int, ablation: bool = True, with_xla: bool = False
) -> int:
    """How many steps ``bench_solver`` reports."""
    features = len(fields(Features)) if ablation else 0
    return 1 + repeats * (1 + len(deadlines_s)) + len(HEURISTICS) + features + with_xla


def bench_solver(
    name: str,
    f: Callable[..., Any],
    args: tuple[Any, ...],
    options: Options,
    deadlines_s: Sequence[float],
    repeats: int,
    ablation: bool = True,
    with_xla: bool = False,
    steps: Steps | None = None,
) -> SolverTiming:
    """Plan ``f`` as often as the columns need; ``args`` may be ``ShapeDtypeStruct``\\ s.

    Every planning lowers the traced function anew, as a first call does; tracing is timed once in
    each of the ``repeats``. Proof, stages and ablation are those of ``options.deadline_s``.
    """
    steps = steps or Steps()

    def plan(text: str, traced: Traced, option: Options) -> tuple[FusionPlan, float]:
        steps.start(f"{name}: {text}")
        clock, started = StageTimer(), time.perf_counter()
        with using_cache(SolutionCache()):  # without cached solutions of earlier plans
            lowered = clock.time("lower", lambda: lower(traced, strict=option.strict))
            made = plan_best(lowered, option, clock)
        steps.done()
        return made, time.perf_counter() - started

    runs: list[tuple[FusionPlan, float, float]] = []
    reset_peak_rss()
    for i in range(repeats):
        started = time.perf_counter()
        traced = trace(f, *args)
        trace_s = time.perf_counter() - started
        runs.append((*plan(f"plan {i + 1} of {repeats}", traced, options), trace_s))
    peak = peak_rss_bytes()
    best = runs[0][0]
    steps.start(f"{name}: groups priced")
    priced = _count_priced(traced, options)
    steps.done()
    at_deadlines = []
    for deadline_s in deadlines_s:
        made = [
            plan(f"in {deadline_s:g} s", traced, replace(options, deadline_s=deadline_s))
            for _ in range(repeats)
        ]
        worst = max((m for m, _ in made), key=lambda m: m.gap or 0.0)
        at_deadlines.append(
            AtDeadline(deadline_s, worst.status, worst.gap, _spread([seconds for _, seconds in made]))
        )
    excess = [
        (other, _excess(plan(other, traced, replace(options, planner=other))[0], best))
        for other in HEURISTICS
    ]
    ablations = []
    for field in fields(Features) if ablation else ():
        features = replace(options.features, **{field.name: False})
        without = plan(f"without {field.name}", traced, replace(options, features=features))[0]
        kernels = len(without.kernels) / max(len(best.kernels), 1)
        ablations.append(Ablation(field.name, 1 + _excess(without, best), kernels))
    return SolverTiming(
        workload=name,
        device=options.device.name,
        equations=len(traced.equations),
        components=best.stats.components,
        distinct_components=best.stats.distinct_components,
        candidates=best.stats.candidates,
        priced=priced,
        kernels=len(best.kernels),
        time_us=best.objective_us,
        status=best.status,
        gap=best.gap,
        stages=_stages(runs),
        total=_spread([seconds + trace_s for _, seconds, trace_s in runs]),
        planning=_spread([seconds for _, seconds, _ in runs]),
        peak_rss_bytes=peak,
        at_deadlines=tuple(at_deadlines),
        excess=tuple(excess),
        ablation=tuple(ablations),
        xla_compile_s=xla_compile_s(name, f, args, steps) if with_xla else None,
    )


class _Counted(PricingWrapper):
    """Counts the groups that are priced."""

    count = 0

    def price(self, nodes: Nodes) -> Kernel | Verdict:
        self.count += 1
        return super().price(nodes)


def _count_priced(traced: Traced, options: Options) -> int:
    """Distinct groups that are scheduled and priced; the planning is one of its own."""
    lowered = lower(traced, strict=options.strict)
    counted = _Counted(Scheduler(lowered.graph, options.device, lowered, options.features))
    with using_cache(SolutionCache()):
        get_planner(options.planner)(lowered.graph, counted, Budget(options.deadline_s))
    return counted.count


def _spread(seconds: Sequence[float]) -> Spread:
    return Spread(statistics.median(seconds), min(seconds), max(seconds))


def _stages(runs: Sequence[tuple[FusionPlan, float, float]]) -> tuple[tuple[str, float], ...]:
    """For each column, the median of the runs' seconds."""
    by_run = [{**dict(plan.stats.seconds), "trace": trace_s} for plan, _, trace_s in runs]
    return tuple(
        (column, statistics.median(sum(laps.get(stage, 0.0) for stage in of) for laps in by_run))
        for column, of in STAGES.items()
    )


def _excess(plan: FusionPlan, best: FusionPlan) -> float:
    return plan.objective_ps / best.objective_ps - 1 if best.objective_ps else 0.0


def solver_tables(rows: Sequence[SolverTiming]) -> list[Printable]:
    """Tables of rows of one device: the problems and proofs, seconds by stage, seconds after tracing beside
    XLA's, deadlines, the loss of heuristics, and the ablation."""
    if not rows:
        return []

    def table(head: tuple[str, ...], cells: Callable[[SolverTiming], Iterable[str]]) -> Printable:
        """A table with a line for each workload, all of numbers."""
        return head, [(cut(row.workload, _NAME), *cells(row)) for row in rows], tuple(range(1, len(head)))

    first = rows[0]
    with_xla = any(row.xla_compile_s is not None for row in rows)
    xla = ("XLA compile", "of XLA") if with_xla else ()
    tables = [
        table((first.device, "equations", "parts", "distinct", "candidates", "priced", "proof"), _problem),
        table(("seconds, median", *STAGES), lambda row: [f"{seconds:.2f}" for _, seconds in row.stages]),
        table(
            ("after tracing", "median", "least", "most", "peak MB", *xla), lambda row: _totals(row, with_xla)
        ),
    ]
    if deadlines := [f"{at.deadline_s:g} s" for at in first.at_deadlines]:
        tables += [
            table(
                ("of bound after", *deadlines),
                lambda row: [bound_text(at.status, at.gap) for at in row.at_deadlines],
            ),
            table(("ms over the deadline", *deadlines), lambda row: map(_overshoot_text, row.at_deadlines)),
        ]
    over = [f"{name} +" for name, _ in first.excess]
    tables.append(table(("solver's plan", "kernels", "µs", *over), _loss))
    if first.ablation:
        lines = [
            (
                without.feature,
                cut(row.workload, _NAME),
                f"{without.time_ratio:.3f}×",
                f"{without.kernels_ratio:.2f}×",
            )
            for i in range(len(first.ablation))
            for row in rows
            for without in (row.ablation[i],)
        ]
        tables.append((("without", "workload", "time", "kernels"), lines, (2, 3)))
    return tables


def summary_line(rows: Sequence[SolverTiming]) -> str:
    """How many of the workloads, all on one device, are planned near their bound, and as fast as XLA
    compiles."""
    near = sum(row.gap is not None and row.gap <= NEAR for row in rows)
    proven = sum(row.status == "OPTIMAL" for row in rows)
    line = (
        f"{rows[0].device}: {near} of {len(rows)} within {100 * NEAR:.0f} % of their bound, {proven} proven"
    )
    if timed := [row.of_xla for row in rows if row.of_xla is not None]:
        quick = sum(share <= 1 for share in timed)
        line += f"; {quick} of {len(timed)} planned in XLA's compile time"
    return line


def _problem(row: SolverTiming) -> list[str]:
    counts = (row.equations, row.components, row.distinct_components, row.candidates, row.priced)
    bound_us = None if row.gap is None else row.time_us / (1 + row.gap)
    return [*(f"{n:,}" for n in counts), bound_text(row.status, row.gap, bound_us)]


def _totals(row: SolverTiming, with_xla: bool) -> list[str]:
    spread, peak = row.planning, row.peak_rss_bytes
    cells = [seconds_text(s) for s in (spread.median_s, spread.least_s, spread.most_s)]
    cells.append("" if peak is None else f"{peak / 1e6:,.0f}")
    if with_xla:
        cells.append("" if row.xla_compile_s is None else seconds_text(row.xla_compile_s))
        cells.append("" if row.of_xla is None else f"{row.of_xla:.2f}×")
    return cells


def _overshoot_text(at: AtDeadline) -> str:
    if at.overshoot_ms < 1:
        return "–"
    return f"{at.overshoot_ms:,.0f}{'' if at.kept else ' !'}"


def _loss(row: SolverTiming) -> list[str]:
    return [
        f"{row.kernels:,}", time_text(row.time_us), *(f"{100 * excess:.2f} %" for _, excess in row.excess)
    ]  # fmt: skip
