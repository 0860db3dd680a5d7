"""``fuseplan verify``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fuseplan.cli.arguments import Json
from fuseplan.console import print_json, progress
from fuseplan.plan.json_codec import read_plan
from fuseplan.support.errors import InvalidPlanError
from fuseplan.verify.report import NOT_CHECKED, REFUTED, VERIFIED, verify_plan


def verify(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN.json", help="As `fuseplan plan --out` writes it; - is stdin.", show_default=False
        ),
    ],
    json: Json = False,
) -> None:
    """Re-check a plan's kernels, costs and bound, without the solver.

    Exit code 0: all of it holds. 1: refuted, with the reason. 2: not a plan.
    3: the kernels are right, but the bound was not re-checked.
    """
    made = read_plan(_read_text(file))
    with progress(1) as steps:
        steps.start(f"verifying {file}")

        def tell(done: int, total: int) -> None:
            steps.total(total)
            if done:
                steps.done()

        result = verify_plan(made, tell=tell)
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
