"""TorchInductor's scheduler, by the groups that its loops and scores lead to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fuseplan
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.planners import inductor
from fuseplan.planners.inductor import fuse_pairwise

pytestmark = pytest.mark.one_python

X = jax.ShapeDtypeStruct((64, 64), "float32")
ROW = jax.ShapeDtypeStruct((64,), "float32")


def groups(f, *args):
    """The operations of each group, by name."""
    graph = lower(trace(f, *args)).graph
    return sorted([graph.nodes[n].op for n in group] for group in fuse_pairwise(graph))


RULES = {
    # A row's maximum, its sum, and what is elementwise over the row have the same loops.
    "softmax": (
        lambda x: (e := jnp.exp(x - lax.reduce_max(x, (1,))[:, None])) / e.sum(1)[:, None],
        (X,),
        [["reduce_max", "broadcast_in_dim", "sub", "exp", "reduce_sum", "broadcast_in_dim", "div"]],
    ),
    # What is read once is inlined, even in another loop's shape.
    "inlined": (lambda x, r: jnp.exp(r)[:, None] * x, (X, ROW), [["exp", "broadcast_in_dim", "mul"]]),
    "siblings": (lambda x: (jnp.exp(x), jnp.tanh(x)), (X,), [["exp", "tanh"]]),
    "reductions of one loop": (lambda x: (x.sum(1), x.max(1)), (X,), [["reduce_sum", "reduce_max"]]),
    "another reduced size": (
        lambda x: (x.sum(), x.max(1)),
        (jax.ShapeDtypeStruct((64, 32), "float32"),),
        [],
    ),
    "nothing shared": (lambda x, y: (jnp.exp(x), jnp.tanh(y)), (X, X), []),
    "library calls": (lambda x, w: jnp.exp(jnp.tanh(x) @ w) + 1, (X, X), [["exp", "add"]]),
    "another order": (
        lambda x: ((y := jnp.exp(x) + 1), y.T * 2),
        (X,),
        [["exp", "add"], ["transpose", "mul"]],
    ),
    "deadlock": (
        lambda x, w: ((y := jnp.exp(x)), jnp.tanh(y @ w) + y),
        (X, X),
        [["tanh", "add"]],
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_the_rules(name):
    f, args, want = RULES[name]
    assert groups(f, *args) == sorted(want)


def test_what_shares_more_bytes_goes_first(monkeypatch):
    """Three loops over one small array, two of which also read a large one."""
    monkeypatch.setattr(inductor, "MAX_FUSION_SIZE", 2)
    small, large = jax.ShapeDtypeStruct((64,), "float32"), jax.ShapeDtypeStruct((64, 640), "float32")

    def f(s, x):
        return s[:, None] + x, s[:, None] * jnp.ones((64, 640)), s[:, None] - x

    assert ["add", "sub"] in groups(f, small, large)


def test_rounds_and_sizes_are_limited(monkeypatch):
    def several(x):
        return [jnp.sin(x * k) for k in range(1, 101)]

    assert sorted(len(g) // 2 for g in groups(several, X)) == [36, 64]
    monkeypatch.setattr(inductor, "ROUNDS", 0)
    assert all(len(g) == 2 for g in groups(several, X))  # inlined only


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])  # Planners of groups offer no CPU loops.
def test_layer_norm_is_one_kernel(device):
    def norm(x, g, b):
        mean = x.mean(1, keepdims=True)
        return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + 1e-5) * g + b

    plan = fuseplan.make_plan(norm, device=device, planner="inductor")(X, ROW, ROW)
    assert len(plan.kernels) == 1
    assert plan.verify()
