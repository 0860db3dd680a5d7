"""PyTorch's ``FuseTensorExprs``, by what its overview says of each step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.planners import nnc_tensorexpr
from fuseplan.planners.nnc_tensorexpr import fuse_tensor_exprs, make_planner
from fuseplan.support.errors import InvalidArgumentError

pytestmark = pytest.mark.one_python

X = jax.ShapeDtypeStruct((64, 64), "float32")


def groups(f, *args, **options):
    """The operations of each group, by name."""
    graph = lower(trace(f, *args)).graph
    return sorted([graph.nodes[n].op for n in group] for group in fuse_tensor_exprs(graph, **options))


RULES = {
    # A group pulls in what it reads until nothing fits: contractions never do.
    "producers": (lambda x, w: jnp.tanh(x @ w) * jnp.exp(x), (X, X), [["tanh", "exp", "mul"]]),
    "moves": (lambda x: jnp.exp(x.T) + 1, (X,), [["transpose", "exp", "add"]]),
    # A view is an alias, and no group begins with a slice.
    "views": (
        lambda x: jnp.exp(jnp.tanh(x * 2).reshape(8, 512)) + 1,
        (X,),
        [["exp", "add"], ["mul", "tanh"]],
    ),
    "slices": (lambda x: jnp.exp(x)[:8], (X,), []),
    "slices inside": (lambda x: jnp.exp(x[:8]) + 1, (X,), [["slice", "exp", "add"]]),
    "reductions": (lambda x: jnp.exp(x + 1).sum(0) * 2 + 1, (X,), [["add", "exp"], ["mul", "add"]]),
    # What would wait for itself is not moved: the sum lies between.
    "deadlock": (
        lambda x: (y := jnp.exp(x + 1)) * y.sum(1)[:, None] + 1,
        (X,),
        [["add", "exp"], ["broadcast_in_dim", "mul", "add"]],
    ),
    "effects": (
        lambda x: (jax.debug.print("{}", (y := jnp.exp(x) + 1)[0, 0]), y * 2)[1],
        (X,),
        [["exp", "add", "mul"]],
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_the_steps(name):
    f, args, want = RULES[name]
    found = groups(f, *args)
    assert [g for g in found if "squeeze" not in g and "debug_callback" not in g] == sorted(want)


def test_groups_next_to_each_other_are_merged_unless_one_waits_for_the_other():
    def f(x, y):
        return jnp.exp(x) + 1, jnp.tanh(y) * 2

    assert groups(f, X, X) == [["exp", "add", "tanh", "mul"]]
    waits = groups(lambda x, w: jnp.exp((jnp.tanh(x) * 2) @ w) + 1, X, X)
    assert waits == [["exp", "add"], ["tanh", "mul"]]


def test_small_groups_are_inlined():
    def f(x, w):
        return jnp.exp(jnp.tanh(x) @ w) + 1

    assert groups(f, X, X) == [["exp", "add"]]
    assert groups(f, X, X, min_group_size=3) == []


def test_reductions_where_they_are_enabled():
    def f(x):
        return jnp.exp(x).sum(0) * 2

    assert groups(f, X) == []
    assert groups(f, X, reductions=True) == [["exp", "reduce_sum", "mul"]]


def test_the_limit_of_arguments(monkeypatch):
    def total(*xs):
        return sum(xs[1:], xs[0])

    (found,) = groups(total, *[X] * 100)
    assert len(found) == 99
    sizes = sorted(map(len, groups(total, *[X] * 200)))
    assert sizes == [75, 124]
    monkeypatch.setattr(nnc_tensorexpr, "MAX_ARGUMENTS", 10)
    assert max(map(len, groups(total, *[X] * 100))) == 6


def two(x, y):
    return jnp.exp(x) + 1, jnp.tanh(y) * 2


@pytest.mark.parametrize("device", ["h200", "tpu_v5e", "cpu"])
def test_what_nothing_ties_is_several_kernels(device):
    plan = fuseplan.make_plan(two, device=device, planner="nnc_tensorexpr")(X, X)
    assert [len(kernel.spec.nodes) for kernel in plan.kernels] == [2, 2]
    assert any("no value passes between their parts" in note for note in plan.notes)
    assert plan.verify()


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, "2"])
def test_a_group_size_is_a_positive_integer(wrong):
    with pytest.raises(InvalidArgumentError, match="min_group_size expects a positive integer"):
        make_planner(min_group_size=wrong)


def test_settings_are_a_planner_of_their_own():
    fuseplan.register_planner("large", make_planner(min_group_size=4))
    fuseplan.register_planner("reducing", make_planner(reductions=True))

    def f(x):
        return jnp.exp(x) * 2, jnp.tanh(x).sum(1)

    by = ("nnc_tensorexpr", "large", "reducing")
    assert fuseplan.compare(f, device="h200", planners=by)(X).kernels.tolist() == [3, 4, 1]
