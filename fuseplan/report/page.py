"""Write an HTML page about one or more plans: one file without scripts or references to the network."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

from costmodel.device import DeviceSpec
from costmodel.kernel import BOUNDS
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.kernel_names import anchor, kernel_name
from fuseplan.plan.notes import all_notes
from fuseplan.report.comparison import Compared, baseline_of, gains_text
from fuseplan.report.explain import borders
from fuseplan.report.frames import roofline_share
from fuseplan.report.plots import roofline, strip
from fuseplan.report.text import grid, makes, parts_text, rows, skipped, status_text, tile, unfused_plan
from fuseplan.support.atomic_file import check_writable, write_text
from fuseplan.support.environment import installed_version
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.support.format import bytes_text, seconds_text, time_text

_TEMPLATES = Path(__file__).resolve().parent / "templates"

_NAMES = {"xla": "XLA's own plan", "unfused": "each operation by itself"}

_MAX_BORDERS = 150
"""The number of kernels up to which the page explains why neighbours are not fused; each takes
milliseconds."""


@dataclass(frozen=True, slots=True)
class Study:
    """The plans of one function for one device by several planners; the page shows the last one in detail."""

    name: str
    plans: tuple[FusionPlan, ...]
    compared: tuple[Compared, ...] = ()
    """The rows that the plans are from, with the times as traced; empty if unknown."""

    @classmethod
    def of(cls, name: str, rows: Sequence[Compared]) -> Study:
        """A study of the plans of ``rows``. Raises ``InvalidArgumentError`` if there are none."""
        plans = tuple(row.plan for row in rows if row.plan is not None)
        if not plans:
            reasons = "; ".join(f"{row.planner}: {row.reason}" for row in rows)
            raise InvalidArgumentError(f"expected a plan of {name} by some planner, got none: {reasons}")
        return cls(name, plans, tuple(rows))

    @property
    def baseline(self) -> FusionPlan:
        """The plan that speed-ups are relative to."""
        return baseline_of(self.plans) or self.plans[0]

    @property
    def device(self) -> DeviceSpec:
        return self.plans[0].device


@dataclass(frozen=True, slots=True)
class Table:
    """A table of other results, such as measured times."""

    title: str
    text: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Page:
    """The content of a page."""

    title: str
    studies: tuple[Study, ...]
    tables: tuple[Table, ...] = ()


def write_plan_page(plan: FusionPlan, path: str | PathLike[str], title: str = "") -> None:
    """See ``Plan.to_html``."""
    plans = (plan,) if plan.planner == "unfused" else (unfused_plan(plan), plan)
    name = title or f"{len(plan.graph.nodes)} operations"
    write_page(Page(title or f"A plan for {plan.device.name}", (Study(name, plans),)), path)


def write_page(page: Page, path: str | PathLike[str]) -> Path:
    """Write the page atomically. Raises ``OutputError`` if it cannot be written."""
    target = check_writable(path)
    return write_text(target, render_page(page))


def render_page(page: Page) -> str:
    """Render the page as HTML."""
    import jinja2  # imported on use, to keep the import of fuseplan short

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    studies = [_study(study, i) for i, study in enumerate(page.studies)]
    return environment.get_template("page.html.jinja").render(
        page=page,
        studies=studies,
        matrix=_matrix(page.studies),
        lead=_lead(page.studies),
        missing_plots=any(s["roofline"] is None for s in studies),
        install_plots="pip install 'fuseplan[report]'",
        devices=list({s.device.name: s.device for s in page.studies}.values()),
        versions=_versions(),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _lead(studies: Sequence[Study]) -> str:
    """A sentence on the study with the largest gain."""
    gains = [
        (s.baseline.objective_ps / s.plans[-1].objective_ps, s)
        for s in studies
        if len(s.plans) > 1 and s.plans[-1].objective_ps
    ]
    if not gains:
        return ""
    gain, best = max(gains, key=lambda g: g[0])
    first, last = best.baseline, best.plans[-1]
    proof = status_text(last) + (" in this model" if last.status == "OPTIMAL" else "")
    return (
        f"{best.name} on {best.device.name}: {len(last.kernels)} kernels in place of {len(first.kernels)}, "
        f"{time_text(last.objective_us)} µs in place of {time_text(first.objective_us)} µs "
        f"({gain:.2f} times as fast as {_NAMES.get(first.planner, first.planner)}), {proof}."
    )


def _matrix(studies: Sequence[Study]) -> dict[str, Any]:
    """The table of studies by planners: the modelled time of each, the best marked."""
    planners = list(dict.fromkeys(plan.planner for study in studies for plan in study.plans))
    lines = []
    for i, study in enumerate(studies):
        best = min(plan.objective_ps for plan in study.plans)
        cell_of = {
            plan.planner: {
                "time": time_text(plan.objective_us),
                "best": plan.objective_ps == best,
                "proven": plan.status == "OPTIMAL",
            }
            for plan in study.plans
        }
        cells = [cell_of.get(planner) for planner in planners]
        lines.append({"id": f"study-{i}", "name": study.name, "device": study.device.name, "cells": cells})
    return {"planners": planners, "lines": lines}


def _study(study: Study, number: int) -> dict[str, Any]:
    first, last = study.baseline, study.plans[-1]
    traced = {row.planner: row.unrewritten_ps for row in study.compared}
    longest = max(first.objective_ps, last.objective_ps)
    shown = (last,) if first is last else (first, last)
    return {
        "id": f"study-{number}",
        "name": study.name,
        "device": study.device,
        "plans": [_plan_line(plan, first, traced.get(plan.planner)) for plan in study.plans],
        "baseline": first.planner,
        "has_traced": bool(study.compared),
        "gains": gains_text(study.compared),
        "without_plan": [row for row in study.compared if row.plan is None],
        "strips": [strip(plan, longest) for plan in shown],
        "roofline": roofline(shown, f"study-{number}"),
        "planner": last.planner,
        "kernels": _kernel_lines(last),
        "borders": _border_lines(last),
        "bounds": [b for b in BOUNDS if any(k.cost.bound_by == b for plan in shown for k in plan.kernels)],
        "grouped": len(rows(last)) < len(last.kernels),
        "refusals": [_refusal(last, v) for v in last.refusals],
        "proof": _proof(last),
        "notes": all_notes(last),
    }


def _plan_line(plan: FusionPlan, first: FusionPlan, traced_ps: int | None) -> dict[str, str]:
    faster = first.objective_ps / plan.objective_ps if plan.objective_ps else 1.0
    return {
        "planner": plan.planner,
        "kernels": f"{len(plan.kernels):,}",
        "time": time_text(plan.objective_us),
        "traced": "" if traced_ps is None else time_text(traced_ps / 1e6),
        "faster": f"{faster:.2f}×",
        "hbm": bytes_text(plan.hbm_bytes),
        "peak": bytes_text(plan.peak_bytes),
        "status": status_text(plan),
        "planning": seconds_text(plan.planning_s),
    }


def _kernel_lines(plan: FusionPlan) -> list[dict[str, Any]]:
    total = plan.objective_ps or 1
    lines = []
    for row in rows(plan):
        spec, cost = row.kernel.spec, row.kernel.cost
        roof = roofline_share(plan.graph, row.kernel, plan.device)
        lines.append(
            {
                "number": row.first,
                "count": row.count,
                "name": kernel_name(plan.graph, spec.nodes),
                "ops": [plan.graph.nodes[n].op for n in spec.nodes],
                "makes": makes(plan.graph, spec),
                "grid": grid(spec),
                "tile": tile(spec) + (f", {skipped(spec)} skipped" if skipped(spec) else ""),
                "time": time_text(cost.time_us * row.count),
                "share": f"{100 * row.count * cost.time_ps / total:.1f}",
                "bound": cost.bound_by,
                "parts": parts_text(cost),
                "hbm": f"{cost.hbm_bytes * row.count / 1e6:.2f}",
                "onchip": bytes_text(cost.onchip_bytes) if cost.onchip_bytes else "",
                "intensity": f"{cost.flops.total / cost.hbm_bytes:.2f}" if cost.hbm_bytes else "",
                "roofline": f"{100 * roof:.0f}" if cost.time_ps else "",
                # The name of the file without its folders, which may be private.
                "source": anchor(plan.graph, spec.nodes).source.replace("\\", "/").rpartition("/")[2],
            }
        )
    return lines


def _border_lines(plan: FusionPlan) -> list[dict[str, Any]]:
    """For each kernel, at most three reasons why it is not fused with its readers."""
    if len(plan.kernels) > _MAX_BORDERS:
        return []
    return [
        {
            "number": border.producer,
            "name": kernel_name(plan.graph, plan.kernels[border.producer].spec.nodes),
            "to": _numbers(border.consumers),
            "reason": border.reason,
        }
        for of_one in borders(plan)
        for border in of_one[:3]
    ]


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", …" if len(numbers) > 4 else "")


def _refusal(plan: FusionPlan, verdict: Any) -> dict[str, str]:
    nodes = verdict.nodes
    shown = ", ".join(f"n{n} {plan.graph.nodes[n].op}" for n in nodes[:3])
    return {
        "rule": verdict.rule,
        "reason": verdict.reason,
        "nodes": shown + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""),
    }


def _proof(plan: FusionPlan) -> dict[str, Any]:
    stats = plan.stats
    return {
        "status": status_text(plan),
        "objective": f"{plan.objective_us:,.3f}",
        "bound": None if plan.bound_us is None else f"{plan.bound_us:,.3f}",
        "nodes": f"{len(plan.graph.nodes):,}",
        "components": f"{stats.components:,}",
        "distinct": f"{stats.distinct_components:,}",
        "candidates": f"{stats.candidates:,}",
        "seconds": [(name, seconds_text(s)) for name, s in stats.seconds],
        "total": seconds_text(plan.planning_s),
    }


def _versions() -> list[tuple[str, str]]:
    names = ("fuseplan", "jax", "ortools")
    found = [(name, installed_version(name, "not installed as a package")) for name in names]
    return [("Python", platform.python_version()), *found]
