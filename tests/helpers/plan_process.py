"""Plan some programs and print for each a digest of the plan without its seconds. It is run in processes
of other hash seeds, with a clock that runs faster than this machine."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from costmodel.device import DeviceSpec
from experiments.deadlines import norms, sums, web
from fuseplan import Plan
from fuseplan.plan.constraints import Constraints
from fuseplan.planners import Budget, get_planner
from fuseplan.search import cache
from fuseplan.search.grouping import Grouping
from fuseplan.settings import make_options
from fuseplan.support.errors import MemoryLimitError
from fuseplan.workloads import get_workload
from tests.helpers import body_programs
from tests.helpers.plans import plan_function
from tests.helpers.small_graphs import Bytes, graph

Answer = Plan | MemoryLimitError


def _small(name: str) -> Any:
    return get_workload(name).build(small=True)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "layernorm_grad": partial(_small, "layernorm_grad"),
    "adam_update": partial(_small, "adam_update"),
    "gpt2_block": partial(_small, "gpt2_block"),
    "web": partial(web, 60),
    "sums": partial(sums, 12),
    "norms": partial(norms, 3),
    "mlp": partial(_small, "mlp"),
    "causal_attention_grad": partial(_small, "causal_attention_grad"),
    "attention": partial(_small, "attention"),
    **{name: partial(body_programs.build, name) for name in body_programs.PROGRAMS},
}

MOST_BYTES = {"mlp": 2_000, "causal_attention_grad": 17_000, "attention": 8_500}
"""Limits of memory that make plans slower, or that none keeps to."""

CIRCLE = ("eeooee", [[], [], [0], [1], [0, 3], [1, 2]])
"""Two components that wait for each other, so that they are solved together."""


def _limits(name: str) -> Constraints | None:
    return Constraints(max_peak_bytes=MOST_BYTES[name]) if name in MOST_BYTES else None


def planned(
    name: str, device: str | DeviceSpec, deadline_s: float = 90.0, kept: cache.SolutionCache | None = None
) -> Answer:
    """The plan of a program, or why it has none; with nothing remembered, or what ``kept`` has.

    The slowest takes ten seconds: limits of counted work end its search, and the deadline must not."""
    f, args = PROGRAMS[name]()
    options = make_options(device, "solver", deadline_s, constraints=_limits(name))
    with cache.using_cache(cache.SolutionCache() if kept is None else kept):
        try:
            return plan_function(f, args, {}, options)[1]
        except MemoryLimitError as error:
            return error


def planned_together(budget: Budget | None = None) -> Grouping:
    """Kernels of components that wait for each other."""
    g = graph(*CIRCLE)
    with cache.using_cache(cache.SolutionCache()):
        return get_planner("solver")(g, Bytes(g), budget or Budget())


def digest(answer: Answer | Grouping) -> str:
    """Of all that a plan says, but for how long it took and what was remembered."""
    if isinstance(answer, MemoryLimitError):
        return str(answer)
    if isinstance(answer, Grouping):
        said = (answer.groups, answer.status, answer.bound_ps, answer.notes, answer.refusals, answer.proof)
        return hashlib.sha256(repr(said).encode()).hexdigest()
    read: dict[str, Any] = json.loads(answer.to_json())
    del read["plan"]["stats"]["seconds"], read["plan"]["stats"]["remembered"]
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()


def digests(device: str, kept: cache.SolutionCache | None = None) -> list[str]:
    """Of all plans."""
    plans = [planned(name, device, kept=cache.SolutionCache() if kept is None else kept) for name in PROGRAMS]
    return [digest(plan) for plan in (*plans, planned_together())]


def slow_machine(times: float) -> None:
    """Let the clock run as on a machine that is so many times as slow."""
    started, now = time.process_time(), time.process_time
    time.monotonic = lambda: started + times * (now() - started)


if __name__ == "__main__":
    slow_machine(float(sys.argv[1]))
    print("\n".join(digests(sys.argv[2])))
