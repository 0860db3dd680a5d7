"""Scalars that tie many operations together: what a plan says of the plans that fuse across them."""

import re

import pytest

from costmodel.device import get_device
from experiments.stress import STRESS
from fuseplan import hubs
from fuseplan.lower import lower
from fuseplan.planners import best_first
from fuseplan.planners.solver import plan_groups
from fuseplan.schedule import Scheduler
from fuseplan.trace import trace

pytestmark = pytest.mark.one_python


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_plans_across_a_hub_can_be_faster_and_no_less_than_the_note_says(device, monkeypatch):
    f, args = STRESS["adam_100"].build("float32", small=True)
    graph = lower(trace(f, *args)).graph
    scheduler = Scheduler(graph, get_device(device))
    plan = plan_groups(graph, scheduler)
    (note,) = (note for note in plan.notes if "fuse across" in note)
    told = re.search(r"at least ([\d.,]+) µs", note)
    assert told is not None
    time_ps = sum(kernel.cost.time_ps for kernel in plan.kernels)
    monkeypatch.setattr(hubs, "MAX_PORTS", 10**9)
    across_ps = sum(kernel.cost.time_ps for kernel in best_first.plan_groups(graph, scheduler).kernels)
    assert float(told[1].replace(",", "")) * 1e6 <= across_ps * 1.01, "three digits of it are told"
    assert across_ps < time_ps, "the space without such plans would lose nothing"
