"""The code of ``fuseplan verify`` and ``diff``, which read plans from files."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import typer

from fuseplan.console import print_json, progress
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.json_codec import read_plan
from fuseplan.report.difference import compare_plans
from fuseplan.support.errors import InvalidPlanError
from fuseplan.verify.plan import checked_plan_from_json
from fuseplan.verify.report import NOT_CHECKED, REFUTED, VERIFIED, verify_plan


def read_file(file: Path) -> FusionPlan:
    """Read and check the plan in a file; ``-`` is stdin. Raises ``InvalidPlanError``, which names the file,
    if there is none."""
    text = _read_text(file)
    try:
        return checked_plan_from_json(text)
    except InvalidPlanError as error:
        raise InvalidPlanError(f"{file}: {error}") from None


def diff(one: Path, other: Path, json: bool) -> None:
    """``fuseplan diff``."""
    if str(one) == str(other) == "-":
        raise InvalidPlanError("expected two plans, and both are to be read from stdin")
    found = compare_plans(read_file(one), read_file(other))
    if json:
        print_json(found.as_dict())
    else:
        print(found.text(str(one), str(other)))
    if not found.is_empty:
        raise typer.Exit(1)


def verify(file: Path, deadline: float | None, json: bool) -> None:
    """``fuseplan verify``."""
    plan_read = read_plan(_read_text(file))
    with progress(1) as steps:
        steps.start(f"verifying {file}")

        def tell(done: int, total: int) -> None:
            steps.total(total)
            if done:
                steps.done()

        result = verify_plan(plan_read, tell, math.inf if deadline is None else deadline)
    if json:
        print_json(result.as_dict())
    else:
        print(result)
    code = {VERIFIED: 0, REFUTED: 1, NOT_CHECKED: 3}[result.status]
    if code:
        raise typer.Exit(code)


def _read_text(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPlanError(f"cannot read {file}: {error}") from None
