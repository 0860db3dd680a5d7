"""Debug output: ``FUSEPLAN_DEBUG=1..4`` prints plans and measurements, ``FUSEPLAN_DUMP`` writes plans to a
folder."""

from __future__ import annotations

import hashlib
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.json_codec import plan_to_json
from fuseplan.report.text import kernel_table, summary
from fuseplan.support.atomic_file import write_text
from fuseplan.support.environment import debug_level, dump_dir
from fuseplan.support.errors import FuseplanWarning
from fuseplan.support.format import bytes_text


def report_plan(plan: FusionPlan) -> None:
    """Print and write ``plan`` as the environment variables request."""
    level = debug_level()
    if level >= 1:
        print(summary(plan), file=sys.stderr)
    if level >= 2:
        for refusal in plan.refusals:
            print(f"refused  {refusal}", file=sys.stderr)
    if level >= 3:
        print(kernel_table(plan), file=sys.stderr)
    if level >= 4:
        print(plan.graph, file=sys.stderr)
    folder = dump_dir()
    if folder is not None:
        _keep(plan, folder)


def report_left() -> None:
    """Print that a program was not planned, at ``FUSEPLAN_DEBUG=1``."""
    if debug_level() >= 1:
        print("not planned: no tiled loop could gain on this CPU, so jax.jit's program runs", file=sys.stderr)


def report_refused(plan: FusionPlan, notes: list[str]) -> None:
    """Print the kernels that the device's compiler refused, and the new plan, at ``FUSEPLAN_DEBUG=1`` and
    ``3``."""
    level = debug_level()
    if level >= 1:
        print("\n".join(notes), file=sys.stderr)
    if level >= 3:
        print(kernel_table(plan), file=sys.stderr)


def report_passes(forward: int, back: int, n_kept: int, kept_bytes: int) -> None:
    """Print the partition of a plan into forward and backward pass, at ``FUSEPLAN_DEBUG=1``."""
    if debug_level() >= 1:
        kept = f"{n_kept} arrays kept, {bytes_text(kept_bytes)}" if n_kept else "nothing kept"
        print(
            f"passes   {forward} kernels forward, {back} back; {kept} beside arguments and results",
            file=sys.stderr,
        )


def report_measurement(name: str, measurement: object) -> None:
    """Print the choice of ``fuseplan.jit(measure=True)``, at ``FUSEPLAN_DEBUG=1``."""
    if debug_level() >= 1:
        print(f"measured {name}: {measurement}", file=sys.stderr)


def _keep(plan: FusionPlan, folder: Path) -> None:
    """Write the plan to a file named by its content; a failure to write is a warning."""
    # Without times and cache hits, so that equal plans have one file.
    text = plan_to_json(replace(plan, stats=replace(plan.stats, seconds=(), remembered=0)))
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"plan-{plan.device.name}-{plan.planner}-{digest}.json", text)
    except OSError as error:
        warnings.warn(f"FUSEPLAN_DUMP={folder}: the plan is not kept: {error}", FuseplanWarning, stacklevel=2)
