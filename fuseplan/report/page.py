"""Write an HTML page about one or more plans: one file with its data and scripts, which needs no network.

Jinja writes the texts and the tables of plans; the scripts draw the rest from the data of
``fuseplan.report.page_data``: graph, table of kernels, charts, reasons and proof.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

from costmodel.device import DeviceSpec
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.notes import all_notes
from fuseplan.report.comparison import Compared, baseline_of, gains_text
from fuseplan.report.page_data import MAX_EXPLAINED_KERNELS, page_json
from fuseplan.report.text import status_text, unfused_plan
from fuseplan.support.atomic_file import check_writable, write_text
from fuseplan.support.environment import installed_version
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.support.format import bytes_text, counted, seconds_text, time_text

_FOLDER = Path(__file__).resolve().parent
_TEMPLATES = _FOLDER / "templates"
_VENDOR = _FOLDER / "vendor"

_LIBRARIES = ("d3", "dagre")
"""The libraries that the scripts use, in ``vendor``, whose README says where they are from."""

_SCRIPTS = ("model.js", "graph.js", "charts.js", "panels.js", "page.js")
"""The page's own scripts, in the order in which they run."""

_NAMES = {"xla": "XLA's own plan", "unfused": "each operation by itself"}


@dataclass(frozen=True, slots=True)
class Study:
    """The plans of one function for one device by several planners; the page shows the last one first."""

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
    return environment.get_template("page.html.jinja").render(
        page=page,
        studies=[_study(study, i) for i, study in enumerate(page.studies)],
        matrix=_matrix(page.studies),
        lead=_lead(page.studies),
        devices=list({s.device.name: s.device for s in page.studies}.values()),
        explained=MAX_EXPLAINED_KERNELS,
        versions=_versions(),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=_read(_TEMPLATES / "page.css"),
        data=page_json([(s.name, s.plans, s.baseline) for s in page.studies]),
        scripts=[*map(_library, _LIBRARIES), *(_read(_TEMPLATES / name) for name in _SCRIPTS)],
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
        f"{best.name} on {best.device.name}: {counted(len(last.kernels), 'kernel')} in place of "
        f"{len(first.kernels)}, "
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
    first = study.baseline
    traced = {row.planner: row.unrewritten_ps for row in study.compared}
    return {
        "id": f"study-{number}",
        "name": study.name,
        "device": study.device,
        "plans": [_plan_line(plan, first, traced.get(plan.planner)) for plan in study.plans],
        "baseline": first.planner,
        "has_traced": bool(study.compared),
        "gains": gains_text(study.compared),
        "without_plan": [row for row in study.compared if row.plan is None],
        "notes": _notes(study.plans),
    }


def _notes(plans: Sequence[FusionPlan]) -> list[str]:
    """Each note once, after the planners whose plans have it where not all have."""
    notes = {plan.planner: all_notes(plan) for plan in plans}
    found = []
    for note in dict.fromkeys(note for of_one in notes.values() for note in of_one):
        having = [planner for planner, of_one in notes.items() if note in of_one]
        found.append(note if len(having) == len(notes) else f"{', '.join(having)}: {note}")
    return found


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


def _versions() -> list[tuple[str, str]]:
    names = ("fuseplan", "jax", "ortools")
    found = [(name, installed_version(name, "not installed as a package")) for name in names]
    return [("Python", platform.python_version()), *found]


def _library(name: str) -> str:
    """The script of a library after its licence, which goes with every copy."""
    return f"/*\n{_read(_VENDOR / f'{name}.LICENSE.txt')}*/\n{_read(_VENDOR / f'{name}.min.js')}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
