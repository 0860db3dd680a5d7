"""The list of passes, and how the plans of equivalent programs are merged."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel import TEST_DEVICE
from fuseplan import pipeline
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.attempt import Attempt
from fuseplan.plan.options import Options
from fuseplan.search import heuristic_plans
from fuseplan.support.errors import MemoryLimitError
from fuseplan.support.work import Limit
from fuseplan.workloads.packages import PACKAGES

X = jax.ShapeDtypeStruct((256, 512), "float32")


def test_the_passes_in_order():
    assert pipeline.PASSES == (
        "trace", "lower", "rewrite",
        "constrain", "search", "duplicate", "rematerialise", "fit_memory", "order", "assemble",
        "check", "merge", "report",
    )  # fmt: skip


@pytest.mark.parametrize("file", ["docs/index.md", "CONTRIBUTING.md"])
def test_the_flow_that_is_documented_is_the_list(file):
    text = (Path(__file__).resolve().parents[2] / file).read_text()
    (flow,) = re.findall(r"^trace → [^`]*?report$", text, re.MULTILINE)
    assert tuple(re.findall(r"\w+", flow)) == pipeline.PASSES


@pytest.fixture(scope="module")
def found():
    lowered = lower(trace(jax.nn.softmax, X))
    attempt = pipeline.plan_program(lowered, Options(TEST_DEVICE, "greedy"))
    plan = replace(attempt.plan, bound_ps=attempt.plan.objective_ps - 10)
    return replace(attempt, outcome=plan)


def slower(attempt, bound_ps, notes=()):
    """The same plan with a kernel twice: it takes longer."""
    plan = attempt.plan
    kernels = (*plan.kernels, plan.kernels[-1])
    return replace(attempt, outcome=replace(plan, kernels=kernels, bound_ps=bound_ps, notes=notes))


def test_the_faster_plan_wins_and_the_lower_bound_holds(found):
    other = slower(found, found.plan.objective_ps - 1_000)
    for best in (found.faster(other), other.faster(found)):
        assert best.plan.kernels == found.plan.kernels
        assert (best.plan.status, best.plan.bound_ps) == ("FEASIBLE", found.plan.objective_ps - 1_000)


def test_of_equal_plans_the_first_wins(found):
    other = replace(found, outcome=replace(found.plan, notes=("other",)))
    assert found.faster(other).plan.notes == found.plan.notes
    assert other.faster(found).plan.notes == ("other",)


def test_a_bound_at_the_time_is_a_proof(found):
    proven = replace(found, outcome=replace(found.plan, bound_ps=found.plan.objective_ps))
    best = proven.faster(slower(found, found.plan.objective_ps + 7))
    assert (best.plan.status, best.plan.bound_ps) == ("OPTIMAL", found.plan.objective_ps)
    assert found.faster(slower(found, None)).plan.bound_ps is None


def test_a_program_that_cannot_fit_bounds_nothing(found):
    bound_ps = found.plan.bound_ps
    impossible = Attempt(MemoryLimitError(100, 300, 200, 5))
    assert impossible.faster(found).plan.bound_ps == bound_ps
    unknown = Attempt(MemoryLimitError(100, 300, 50, 5))
    assert unknown.faster(found).plan.bound_ps == 5
    assert found.faster(unknown).plan.status == "FEASIBLE"


def test_where_nothing_fits_both_errors_are_joined(found):
    one = Attempt(MemoryLimitError(10, 300, 100))
    other = Attempt(MemoryLimitError(10, 200, 150))
    with pytest.raises(MemoryLimitError) as caught:
        one.faster(other).required()
    assert (caught.value.smallest_bytes, caught.value.least_bytes) == (200, 100)


def test_a_faster_plan_of_another_planner_is_used_and_named(found):
    peer = replace(found, outcome=replace(found.plan, planner="inductor", proof=None))
    unproven = slower(found, 1_000)
    assert found.or_faster_of(unproven, "inductor", pytest.fail) is found
    used = unproven.or_faster_of(peer, "inductor", pytest.fail).plan
    assert (used.kernels, used.planner, used.status) == (found.plan.kernels, "greedy", "FEASIBLE")
    assert used.notes[-1] == "inductor's plan is used: it is faster than the best that the search found"
    assert used.bound_ps == 1_000
    # A plan below what was called a bound refutes it.
    refuted = slower(found, found.plan.objective_ps + 1)
    assert refuted.or_faster_of(peer, "inductor", lambda other: 7).plan.bound_ps == 7


@pytest.mark.one_python
@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_the_solver_is_no_slower_than_any_cheap_planner(device):
    """Also where no plan is proven."""
    f, args = PACKAGES["log_density_grad"].build()
    of = {
        name: fuseplan.make_plan(f, device=device, planner=name, deadline_s=30)(*args)
        for name in (*heuristic_plans.HEURISTICS, *pipeline.PEERS, "solver")
    }
    best = of.pop("solver")
    assert best.objective_us <= min(plan.objective_us for plan in of.values())
    assert best.bound_us <= best.objective_us


def test_a_search_that_was_cut_short_is_noted_once(found):
    note = "the deadline came before all equivalent programs had been searched"
    assert found.cut_short(None).plan.notes == found.plan.notes
    cut = found.cut_short(Limit.DEADLINE)
    assert cut.plan.notes == (*found.plan.notes, note)
    assert cut.ended_by is Limit.DEADLINE
    assert cut.cut_short(Limit.DEADLINE) == cut
    assert found.faster(replace(slower(found, 0), cut_by=Limit.DEADLINE)).plan.notes[-1] == note
    failed = Attempt(MemoryLimitError(10, 300, 100)).cut_short(Limit.DEADLINE)
    assert failed.ended_by is Limit.DEADLINE


def test_a_bound_names_its_form_of_the_program(found):
    assert found.bound_of("as traced").plan.stats.bound_of == "as traced"
    failed = Attempt(MemoryLimitError(10, 300, 100))
    assert failed.bound_of("as traced") == failed


def transport_cost(x, y):
    """Five steps of Sinkhorn's algorithm, unrolled: the search of the gradient needs more time."""
    cost = ((x[:, None] - y[None]) ** 2).sum(-1)
    a, b = jnp.zeros(x.shape[0]), jnp.zeros(y.shape[0])
    for _ in range(5):
        a = -jax.nn.logsumexp(b[None] - cost, axis=1)
        b = -jax.nn.logsumexp(a[:, None] - cost, axis=0)
    return (jnp.exp(a[:, None] + b[None] - cost) * cost).sum()


@pytest.mark.one_python
def test_a_program_that_is_too_large_for_the_search_is_no_slower_than_its_peers():
    points = [jax.ShapeDtypeStruct((n, 5), "float32") for n in (1500, 1300)]

    def time_us(planner, deadline_s):
        make = fuseplan.make_plan(
            jax.value_and_grad(transport_cost), device="h200", planner=planner, deadline_s=deadline_s
        )
        return make(*points).objective_us

    found_us = time_us("solver", 8.0)
    assert found_us <= min(time_us(name, 20.0) for name in ("inductor", "tvm_fuse_ops"))


def test_the_seconds_of_planning_are_those_of_other_planners_too(monkeypatch):
    plan_below = pipeline._plan_below

    def slowly(limit_ps, lowered, options, *more):
        if options.planner == "greedy":
            time.sleep(0.2)
        return plan_below(limit_ps, lowered, options, *more)

    monkeypatch.setattr(pipeline, "_plan_below", slowly)
    plan = fuseplan.make_plan(jax.nn.softmax, device="test", peers=["greedy"])(X)
    assert dict(plan.stats.seconds)["peers"] >= 0.2
    assert plan.planning_s >= 0.2


@pytest.mark.one_python
def test_the_copies_of_a_peer_are_one_more_program_to_plan():
    """XLA's queue computes ``tanh`` again for each sum down columns and for the result; the search chooses
    other copies, and its best plan takes longer. That of the program with the queue's copies is proven."""

    def loss(x):
        return jnp.sum(jnp.tanh(x) ** 2 / (1 + jnp.sum(x * x, 0)))

    x = jax.ShapeDtypeStruct((8192, 512), "float32")
    plan = fuseplan.make_plan(jax.grad(loss), device="h200", deadline_s=100)(x)
    peer = fuseplan.make_plan(jax.grad(loss), device="h200", planner="xla_priority")(x)
    assert plan.status == "OPTIMAL"
    assert plan.stats.bound_of == "as rewritten"
    assert plan.objective_ps < peer.objective_ps
    assert plan.verify()
