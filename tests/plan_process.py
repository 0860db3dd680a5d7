"""Plan some programs and print a line each: a digest of the plan but for its seconds. Run by
``test_same_plan.py`` under other hash seeds, with a clock that runs faster than this machine."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from functools import partial
from typing import Any

from experiments.deadlines import sums, web
from experiments.workloads import get_workload
from fuseplan import memo
from fuseplan.config import make_options
from fuseplan.plan import Plan
from fuseplan.planner import plan_function
from tests import body_programs

PROGRAMS = {
    "layernorm_grad": lambda: get_workload("layernorm_grad").build(small=True),
    "gpt2_block": lambda: get_workload("gpt2_block").build(small=True),
    "web": lambda: web(60),
    "sums": lambda: sums(12),
    **{name: partial(body_programs.build, name) for name in body_programs.PROGRAMS},
}


def digest(plan: Plan) -> str:
    """Of all that a plan says, but for how long it took and what was remembered."""
    read: dict[str, Any] = json.loads(plan.to_json())
    del read["plan"]["stats"]["seconds"], read["plan"]["stats"]["remembered"]
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()


def digests(device: str, kept: memo.Memo | None = None) -> list[str]:
    """Of each program's plan; with nothing remembered, or what ``kept`` has."""
    found = []
    for make in PROGRAMS.values():
        f, args = make()
        with memo.using(memo.Memo() if kept is None else kept):
            plan = plan_function(f, args, {}, make_options(device))[1]
        found.append(digest(plan))
    return found


def slow_machine(times: float) -> None:
    """Let the clock run as on a machine that is so many times as slow."""
    started, now = time.process_time(), time.process_time
    time.monotonic = lambda: started + times * (now() - started)


if __name__ == "__main__":
    slow_machine(float(sys.argv[1]))
    print("\n".join(digests(sys.argv[2])))
