"""Scalars that tie many operations together: what a plan says of the plans that fuse across them."""

import re

import jax
import jax.numpy as jnp
import pytest

from costmodel.devices import get_device
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.notes import NoteKind
from fuseplan.planners.solver import plan_groups
from fuseplan.schedule import shared_operands
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.heuristics import best_first
from fuseplan.settings import make_options
from fuseplan.verify.report import VERIFIED, verify_plan
from fuseplan.workloads.stress import STRESS
from tests.helpers.plans import plan_traced

pytestmark = pytest.mark.one_python


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_plans_across_a_hub_can_be_faster_and_no_less_than_the_note_says(device, monkeypatch):
    f, args = STRESS["adam_100"].build("float32", small=True)
    graph = lower(trace(f, *args)).graph
    scheduler = Scheduler(graph, get_device(device))
    plan = plan_groups(graph, scheduler)
    (note,) = (note for note in plan.notes if note.kind is NoteKind.SCALAR_SPLIT)
    assert "hub" in {verdict.rule for verdict in plan.refusals}
    told = re.search(r"at least ([\d.,]+) µs", str(note))
    assert told is not None
    time_ps = sum(kernel.cost.time_ps for kernel in plan.kernels)
    monkeypatch.setattr(shared_operands, "MAX_PORTS", 10**9)
    across_ps = sum(kernel.cost.time_ps for kernel in best_first(graph, scheduler).kernels)
    assert float(told[1].replace(",", "")) * 1e6 <= across_ps * 1.01, "three digits of it are told"
    assert across_ps < time_ps, "the space without such plans would lose nothing"


def test_copies_of_an_operation_are_one_port_of_a_hub():
    """Else the plan without copies would fuse across a hub that the search with copies keeps apart, and be
    faster than what that search proves."""
    loss = jax.value_and_grad(lambda x: jax.nn.logsumexp(x).astype(jnp.float32) ** 2)
    x = jax.ShapeDtypeStruct((1024, 1000), "bfloat16")
    lowered, plan = plan_traced(trace(loss, x), make_options("tpu_v5e", deadline_s=100))
    assert lowered.graph.origins, "the difference is computed again"
    assert not shared_operands.wide_hubs(lowered.graph).ports
    assert plan.status == "OPTIMAL"
    assert verify_plan(plan).status == VERIFIED
