"""Programs that leave a planner little or nothing to decide: its plan is legal all the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fuseplan
from costmodel.calibrate import described_cpu
from fuseplan.plan.options import Features
from fuseplan.planners import planner_names
from fuseplan.search.decided import plan_decided
from fuseplan.search.grouping import Grouping
from fuseplan.support.errors import FuseplanError

pytestmark = pytest.mark.one_python

X = jax.ShapeDtypeStruct((64, 64), "float32")
NOTHING = {
    "empty": (lambda: (), ()),
    "one operation": (jnp.exp, (X,)),
    "an input": (lambda x: (x, x + 1), (X,)),
    "a constant": (lambda x: (jnp.ones(3), 2.0), (X,)),
    "no elements": (lambda x: jnp.exp(x).sum(0) + 1, (jax.ShapeDtypeStruct((0, 4), "float32"),)),
    "no rule": (lambda x: jnp.exp(lax.linalg.cholesky(x)) + 1, (X,)),
}


@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("planner", planner_names())
def test_whatever_it_is_given_its_plan_is_legal(planner, name):
    f, args = NOTHING[name]
    plan = fuseplan.make_plan(f, device="h200", planner=planner)(*args)
    assert plan.verify()


@pytest.mark.parametrize("device", ["h200", "tpu_v5e", "test"])
@pytest.mark.parametrize("planner", planner_names(of_graphs=True))
def test_what_makes_nothing_for_others(planner, device):
    def f(x):
        y = jnp.tanh(x)
        jax.debug.print("{}", y.sum())
        return jnp.exp(y)

    assert fuseplan.make_plan(f, device=device, planner=planner)(X).verify()


def test_loops_that_nobody_offers():
    # Inductor asks for softmax as one kernel. Tiled loops of it touch no less memory than XLA's own: several,
    # where rows are few.
    plan = fuseplan.make_plan(jax.nn.softmax, device=described_cpu(), planner="inductor")(
        jax.ShapeDtypeStruct((2048, 1024), "float32")
    )
    assert {kernel.spec.backend for kernel in plan.kernels} == {"xla"}
    assert any("several kernels here" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("decided", "message"),
    [
        (lambda g, pricing: None, "'mine' should return a Grouping, and returned None"),
        (
            lambda g, pricing: Grouping(()),
            r"'mine' makes no legal plan: nodes \[0, 1, 2, 3, 4\] are computed",
        ),
        (
            lambda g, pricing: plan_decided(g, pricing, lambda book: [(0, 9)]),
            "node 9, but the graph has . nodes",
        ),
    ],
)
def test_a_planner_from_outside_may_err(decided, message):
    fuseplan.register_planner("mine", lambda graph, pricing, budget: decided(graph, pricing))
    with pytest.raises(FuseplanError, match=message):
        fuseplan.make_plan(jax.nn.softmax, device="h200", planner="mine")(X)


def test_a_group_that_names_an_operation_twice():
    fuseplan.register_planner(
        "mine", lambda g, pricing, _: plan_decided(g, pricing, lambda book: [(0, 0, 1)])
    )
    f = lambda x: jnp.tanh(jnp.exp(x))  # noqa: E731
    once = Features(recompute=False)
    plan = fuseplan.make_plan(f, device="h200", planner="mine", features=once)(X)
    assert [kernel.spec.nodes for kernel in plan.kernels] == [(0, 1)]
    assert not any("are computed once" in note for note in plan.notes)
