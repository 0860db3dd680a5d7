"""Operations that share a kernel for what both read: which pairs, the optimum, and the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import fuseplan
from costmodel.devices import get_device
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.options import Features, Options
from fuseplan.planners import Budget, get_planner
from fuseplan.runtime.tolerance import check_results
from fuseplan.schedule.pricing import PriceBook
from fuseplan.search.components import crossable_edges
from fuseplan.verify.plan import check_plan
from tests.codegen.test_planned_kernels import run_planned
from tests.helpers.plans import plan_lowered
from tests.helpers.small_graphs import Bytes, brute_force, graph, graphs

pytestmark = pytest.mark.one_python

SOLVE = get_planner("solver")
X = jax.ShapeDtypeStruct((512, 1024), "float32")


def pairs(g, **limits):
    return crossable_edges(g, PriceBook(g, Bytes(g, fuses_siblings=True, **limits))).siblings


def test_readers_of_one_array_are_siblings():
    # 0 is opaque; 1, 2 and 3 read what it makes, 4 and 5 what 3 makes.
    g = graph("oeerre", [[], [0], [0], [0], [3], [3]])
    assert pairs(g) == ((1, 2), (1, 3), (2, 3), (4, 5))


def test_what_a_barrier_lies_between_are_no_siblings():
    # 2 reads what 0 makes, and what an opaque step made of 1.
    assert pairs(graph("oeoe", [[], [0], [1], [0, 2]])) == ()


def test_rows_and_columns_are_no_siblings():
    assert pairs(graph("orc", [[], [0], [0]])) == ()


def test_siblings_share_an_operand_of_full_size():
    # Both read the row of 64, but 3 reads an array of 128 x 128 with it.
    g = graph("oree", [[], [0], [1], [1, 0]])
    assert pairs(g) == ((1, 3),)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(graphs(max_nodes=8, kinds="eeeercoo"))
def test_the_solver_is_optimal_with_siblings(g):
    for limits in ({}, {"max_nodes": 3}, {"max_made": 2, "foresees": True}):
        pricing = Bytes(g, fuses_siblings=True, **limits)
        plan = SOLVE(g, pricing, Budget())
        found = tuple(sum(getattr(k.cost, name) for k in plan.kernels) for name in ("time_ps", "hbm_bytes"))
        assert plan.status == "OPTIMAL"
        assert (*found, len(plan.kernels)) == brute_force(g, pricing)[0]


def two_sums(x):
    """Two reductions over what a sort made: nothing passes between them."""
    y = jnp.sort(x)
    return jnp.exp(y).sum(1), (y * y).sum(1)


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_two_reductions_of_one_array_are_one_kernel(device):
    plan = fuseplan.make_plan(two_sums, device=device)(X)
    assert [len(k.spec.nodes) for k in plan.kernels] == [1, 4]
    assert len(plan.kernels[1].spec.reads) == 1
    apart = plan_lowered(
        lower(trace(two_sums, X)), Options(get_device(device), features=Features(siblings=False))
    )[1]
    assert [len(k.spec.nodes) for k in apart.kernels] == [1, 2, 2]
    assert plan.objective_ps < apart.objective_ps
    assert plan.hbm_bytes < apart.hbm_bytes
    check_plan(plan)


SIDE_BY_SIDE = {
    "two sums of rows": two_sums,
    "three results": lambda x: (jnp.exp(y := jnp.sort(x)), jnp.tanh(y) * 2, y.sum(1)),
    "columns and all": lambda x: ((y := jnp.sort(x)).max(0), jnp.abs(y).sum(0), y * 3),
    "a transpose beside": lambda x: (jnp.sin(y := jnp.sort(x)).T, jnp.cos(y)),
}


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_kernels_of_siblings_are_right(name, device):
    x = np.random.default_rng(0).standard_normal((37, 130)).astype("float32")
    plan, got, want = run_planned(SIDE_BY_SIDE[name], (x,), device)
    check_results(name, got, want)
    assert len(plan.kernels) == 2


def test_on_the_cpu_nothing_is_fused_for_a_shared_array_alone():
    plan = fuseplan.make_plan(two_sums, device="cpu")(X)
    assert max(len(k.spec.nodes) for k in plan.kernels) == 2


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_explain_knows_siblings(device):
    plan = fuseplan.make_plan(two_sums, device=device)(X)
    first, second = (n.id for n in plan.graph.nodes if n.op == "reduce_sum")
    together = plan.explain(first, second)
    assert together.together
    assert together.extra_ps > 0
    options = Options(get_device(device), features=Features(siblings=False))
    apart = plan_lowered(lower(trace(two_sums, X)), options)[1].explain(first, second)
    assert not apart.together
    assert "read one array side by side" in str(apart)


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_siblings_can_be_asked_for(device):
    wanted = fuseplan.Constraints(must_fuse=[("sin", "exp")])
    plan = fuseplan.make_plan(lambda x: (jnp.sin(x), jnp.exp(x)), device=device, constraints=wanted)(X)
    assert [k.spec.nodes for k in plan.kernels] == [(0, 1)]
    check_plan(plan)
