"""Planning makes no reference cycles: its memory is free as soon as a plan is made."""

import gc

import pytest

from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.pipeline import plan_best
from fuseplan.settings import make_options
from fuseplan.workloads import get_workload

pytestmark = pytest.mark.one_python


@pytest.mark.parametrize("planner", ["greedy", "solver"])
def test_planning_leaves_no_cyclic_garbage(planner):
    f, args = get_workload("layernorm_grad").build()
    lowered = lower(trace(f, *args))
    plan_best(lowered, make_options("h200", planner))  # imports, and fills caches
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        plan_best(lowered, make_options("h200", planner))
        gc.collect()
        kinds = {f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not {kind for kind in kinds if kind.startswith(("fuseplan.", "costmodel."))}
