"""``fuseplan demo``: plan two programs for three devices, run both here, and write a page."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from fuseplan.api import jit
from fuseplan.bench.cpu import time_in_turns
from fuseplan.console import Steps, print_table
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.kernel_names import kernel_name
from fuseplan.plan.notes import assumed_text
from fuseplan.report.comparison import baseline_of, divergence_lines, gains_text, speed_up
from fuseplan.report.page import Page, Study, Table, write_page
from fuseplan.report.text import bound_lines, bound_text, grid, makes, status_text, tile
from fuseplan.runtime.compare import compare_plan, default_planners
from fuseplan.runtime.tolerance import check_results, largest_difference
from fuseplan.settings import make_options, resolve_device
from fuseplan.support.format import bytes_text, seconds_text, time_text, times_text, wrapped
from fuseplan.targets.detect import local_platform

DEVICES = ("h200", "tpu_v5e", "cpu")
PLANNERS = ("unfused", "greedy", "best_first", "xla", "solver")
"""``xla`` is used if its compiler for the device is installed."""
_PAIRS = 5
"""Runs of each function, alternating, so that a change of the machine's load affects both."""


@dataclass(frozen=True, slots=True)
class Program:
    """A function, the shapes that it is planned for, and the arrays that it is run on."""

    name: str
    f: Callable[..., Any]
    avals: tuple[Any, ...]
    arrays: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements of ``fuseplan.jit`` and ``jax.jit`` of one program."""

    name: str
    kernels: int
    fuseplan_ms: float
    jax_ms: float
    pairs: int
    fuseplan_temp_bytes: int | None
    jax_temp_bytes: int | None
    modelled_ms: float
    """The modelled time of the plan that ran."""
    largest_difference: float
    relative_difference: float
    """The largest difference over the root mean square of its array."""


@dataclass(frozen=True, slots=True)
class Demo:
    """The results of the demo."""

    planned: tuple[Study, ...]
    """The plans of each program for each device by ``PLANNERS``."""
    runs: tuple[Run, ...]
    platform: str
    tiled_loops: int
    """The number of tiled loops in the plans that were run here."""
    page: Path
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        plans = [
            {
                "workload": planned.name,
                "device": planned.device.name,
                "planner": row.planner,
                "kernels": len(row.plan.kernels),
                "time_us": row.plan.objective_us,
                "unrewritten_us": None if row.unrewritten_ps is None else row.unrewritten_ps / 1e6,
                "hbm_bytes": row.plan.hbm_bytes,
                "ratio": row.plan.objective_ps / baseline.objective_ps,
                "baseline": baseline.planner,
                "status": row.plan.status,
                "gap": row.plan.gap,
            }
            for planned in self.planned
            if (baseline := baseline_of(planned.plans)) is not None
            for row in planned.compared
            if row.plan is not None
        ]
        return {
            "plans": plans,
            "runs": [asdict(run) for run in self.runs],
            "platform": self.platform,
            "page": str(self.page),
            "seconds": self.seconds,
        }


def run_demo(programs: Sequence[Program], page: Path, deadline_s: float, steps: Steps) -> Demo:
    """Plan and run the programs, and write the page."""
    started = time.perf_counter()
    possible = {device: default_planners(resolve_device(device)) for device in DEVICES}
    planners = {device: [name for name in PLANNERS if name in possible[device]] for device in DEVICES}
    steps.total(len(programs) * (sum(map(len, planners.values())) + 1) + 1)
    planned: list[Study] = []
    runs: list[Run] = []
    tiled_loops = 0
    for program in programs:
        steps.start(f"tracing {program.name}")
        lowered = lower(trace(program.f, *program.avals))
        for device in DEVICES:
            rows = []
            for planner in planners[device]:
                steps.start(f"{program.name}: {planner} for {device}")
                rows.append(compare_plan(lowered, make_options(device, planner, deadline_s)))
                steps.done()
            planned.append(Study.of(program.name, rows))
    for program in programs:
        steps.start(f"running {program.name} here")
        run, plan = _measure(program, deadline_s)
        runs.append(run)
        tiled_loops += sum(1 for kernel in plan.kernels if kernel.spec.axes)
        steps.done()
    steps.start("writing the page")
    _write_page(planned, runs, page)
    steps.done()
    seconds = time.perf_counter() - started
    return Demo(tuple(planned), tuple(runs), local_platform(), tiled_loops, page, seconds)


def _measure(program: Program, deadline_s: float) -> tuple[Run, FusionPlan]:
    """Compile both, compare their results, then time them in turns."""
    fast = jit(program.f, deadline_s=deadline_s)
    plan = fast.plan(*program.arrays)
    compiled = [fast.lower(*program.arrays).compile(), jax.jit(program.f).lower(*program.arrays).compile()]
    ours, reference = (jax.block_until_ready(c(*program.arrays)) for c in compiled)
    check_results(program.name, ours, reference)
    absolute, relative = largest_difference(ours, reference)
    del ours, reference
    samples = time_in_turns(compiled, program.arrays, _PAIRS, sample_s=0.0)
    fuseplan_ms, jax_ms = (1000 * statistics.median(s) for s in samples)
    analyses = (c.memory_analysis() for c in compiled)  # None if the compiler reports nothing
    temp = [None if analysis is None else int(analysis.temp_size_in_bytes) for analysis in analyses]
    run = Run(
        program.name, len(plan.kernels), fuseplan_ms, jax_ms, _PAIRS, temp[0], temp[1],
        plan.objective_us / 1000, absolute, relative,
    )  # fmt: skip
    return run, plan


def _write_page(planned: Sequence[Study], runs: Sequence[Run], path: Path) -> None:
    head, rows = _run_rows(runs)
    text = (
        f"Medians of {_PAIRS} runs each, in turns, at these sizes. The difference is the largest of "
        "any element, over the root mean square of its array."
    )
    text = " ".join([text, *_divergence(runs, local_platform())])
    measured = Table(f"Measured on this {local_platform().upper()}", text, head, rows)
    write_page(Page("fuseplan demo: a block of GPT-2 and its gradient", tuple(planned), (measured,)), path)


def _divergence(runs: Sequence[Run], platform: str) -> list[str]:
    return divergence_lines([(run.name, run.modelled_ms, run.fuseplan_ms) for run in runs], platform)


def _run_rows(runs: Sequence[Run]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    head = ("measured here", "ours ms", "modelled", "jax.jit ms", "memory", "jax.jit's", "difference")
    rows = tuple(
        (
            run.name,
            f"{run.fuseplan_ms:.1f}",
            f"{run.modelled_ms:.2f}",
            f"{run.jax_ms:.1f}",
            "" if run.fuseplan_temp_bytes is None else bytes_text(run.fuseplan_temp_bytes),
            "" if run.jax_temp_bytes is None else bytes_text(run.jax_temp_bytes),
            f"{run.relative_difference:.1e}",
        )
        for run in runs
    )
    return head, rows


def print_demo(demo: Demo) -> None:
    """Print the results in 80 columns."""
    for name in dict.fromkeys(planned.name for planned in demo.planned):
        _print_plans(name, [planned for planned in demo.planned if planned.name == name])
        print()
    print_table(*_run_rows(demo.runs), right=(1, 2, 3, 4, 5, 6))
    run = demo.runs[0]
    print(f"(medians of {run.pairs} runs each, in turns; difference relative to each result's RMS)")
    for line in _divergence(demo.runs, demo.platform):
        print("\n".join(wrapped(line, 80, "")))
    if demo.platform == "cpu" and not demo.tiled_loops:
        print(
            "On this CPU every group is left to XLA in this version: the same code as\n"
            "jax.jit's, grouped by fuseplan; equal times within the noise are expected."
        )
    elif demo.platform == "cpu":
        print(f"On this CPU {demo.tiled_loops} kernels are tiled loops; the other groups are left to XLA.")
    print()
    print(_one_kernel(demo.planned[0].plans[-1]))
    print(f"\nDone in {seconds_text(demo.seconds)}. All kernels, with reasons and proofs:\n{demo.page}")


def _print_plans(name: str, studies: Sequence[Study]) -> None:
    rows: list[tuple[str, ...]] = []
    bold: list[int] = []
    baselines = [baseline_of(planned.plans) for planned in studies]
    for planned, baseline in zip(studies, baselines, strict=True):
        bold.append(len(rows) + len(planned.compared) - 1)
        for i, row in enumerate(planned.compared):
            device = planned.device.name if i == 0 else ""
            plan, faster = row.plan, speed_up(row.plan, baseline)
            if plan is None:
                rows.append((device, row.planner, *[""] * 5, "no plan"))
                continue
            rows.append(
                (
                    device,
                    row.planner,
                    str(len(plan.kernels)),
                    "" if row.unrewritten_ps is None else time_text(row.unrewritten_ps / 1e6),
                    time_text(plan.objective_us),
                    f"{plan.hbm_bytes / 1e6:,.1f}",
                    "" if faster is None else times_text(faster),
                    bound_text(plan.status, plan.gap),
                )
            )
    head = ("device", "planner", "kernels", "as traced", "µs", "HBM MB", "speed-up", "bound")
    print_table(head, rows, right=(2, 3, 4, 5, 6), title=f"{name}, modelled, not measured:", bold=bold)
    for planned, baseline in zip(studies, baselines, strict=True):
        over = "" if baseline is None else f"speed-up over {baseline.planner}. "
        device = planned.device.name
        more = [f"{device}, {row.planner}: {row.reason}" for row in planned.compared if row.reason]
        more += bound_lines((f"{device}, {plan.planner}", plan) for plan in planned.plans)
        more += [text for plan in planned.plans[:1] if (text := assumed_text(plan.device))]
        for line in [f"{device}: {over}{gains_text(planned.compared)}", *more]:
            print("\n".join(wrapped(line, 80, "  ")))


def _one_kernel(plan: FusionPlan) -> str:
    """Describe the largest fused kernel of a plan and its tiles."""
    k, kernel = max(enumerate(plan.kernels), key=lambda item: (len(item[1].spec.nodes), -item[0]))
    spec, cost = kernel.spec, kernel.cost
    tiles = f"grid {grid(spec)}, tile {tile(spec)}, " if spec.axes else ""
    which = f"For example, kernel {k} of {plan.planner} for {plan.device.name} ({status_text(plan)}):"
    return "\n".join(
        [
            *wrapped(which, 80, "  "),
            f"  {kernel_name(plan.graph, spec.nodes)} ({len(spec.nodes)} ops) makes "
            f"{makes(plan.graph, spec)}",
            f"  {tiles}{time_text(cost.time_us)} µs, {bytes_text(cost.hbm_bytes)}, mostly {cost.bound_by}",
        ]
    )
