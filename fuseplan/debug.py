"""Look inside: ``FUSEPLAN_DEBUG=1..4`` prints plans as they are made, ``FUSEPLAN_DUMP``
keeps them."""

from __future__ import annotations

import hashlib
import sys

from fuseplan.config import debug_level, dump_dir
from fuseplan.plan import Plan


def report_plan(plan: Plan) -> None:
    """Print and keep ``plan`` as the environment asks."""
    level = debug_level()
    if level >= 1:
        print(plan.summary(), file=sys.stderr)
    if level >= 2:
        for refusal in plan.refusals:
            print(f"refused  {refusal}", file=sys.stderr)
    if level >= 3:
        print(plan, file=sys.stderr)
    if level >= 4:
        print(plan.graph, file=sys.stderr)
    folder = dump_dir()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        text = plan.to_json()
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        (folder / f"plan-{plan.device.name}-{plan.planner}-{digest}.json").write_text(text)
