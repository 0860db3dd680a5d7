"""TVM's ``FuseOps``, by the groups that its documentation shows and the rules that it states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fuseplan
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.planners import tvm_fuse_ops
from fuseplan.planners.tvm_fuse_ops import fuse_ops, post_dominators

pytestmark = pytest.mark.one_python

IMAGE = jax.ShapeDtypeStruct((1, 16, 32, 32), "float32")
WEIGHTS = jax.ShapeDtypeStruct((16, 16, 3, 3), "float32")
X = jax.ShapeDtypeStruct((64, 64), "float32")


def groups(f, *args):
    """The operations of each group, by name, and of what is alone."""
    graph = lower(trace(f, *args)).graph
    found = list(fuse_ops(graph))
    inside = {n for group in found for n in group}
    found += [(node.id,) for node in graph.nodes if node.id not in inside]
    return sorted([graph.nodes[n].op for n in group] for group in found)


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME")


def diamond(x, w):
    y = conv(x, w)
    return jnp.exp(y) + jnp.tanh(y) + lax.neg(y)


def test_a_diamond_is_one_group():
    """A convolution, three branches, and the additions in which they meet."""
    together = ["conv_general_dilated", "exp", "tanh", "add", "neg", "add"]
    assert groups(diamond, IMAGE, WEIGHTS) == [together]


def test_the_post_dominator_of_a_branching_value_is_where_its_branches_meet():
    graph = lower(trace(diamond, IMAGE, WEIGHTS)).graph
    tree = post_dominators(graph)
    last = len(graph.nodes) - 1
    assert tree[0].parent == last
    assert tree[last].parent == -1
    assert [graph.nodes[n].op for n in range(len(tree)) if tree[n].parent == last] == [
        "conv_general_dilated",
        "add",
        "neg",
    ]


def test_add_exp_squeeze():
    x = jax.ShapeDtypeStruct((1, 10, 20), "float32")
    assert groups(lambda x, y: jnp.exp(x + y).squeeze(0), x, x) == [["add", "exp", "squeeze"]]


RULES = {
    # Reductions receive, and never begin.
    "sink": (lambda x: jnp.exp(x).sum(0) * 2, (X,), [["exp", "reduce_sum"], ["mul"]]),
    "softmax": (
        lambda x: (e := jnp.exp(x - lax.reduce_max(x, (1,))[:, None])) / e.sum(1)[:, None],
        (X,),
        [["broadcast_in_dim", "div"], ["broadcast_in_dim", "sub", "exp"], ["reduce_max"], ["reduce_sum"]],
    ),
    # Two contractions are two groups; each takes in what is elementwise after it, not a reduction.
    "contractions": (
        lambda x, w: jnp.tanh(jnp.exp(x @ w) @ w + 1),
        (X, X),
        [["dot_general", "add", "tanh"], ["dot_general", "exp"]],
    ),
    "contraction and sum": (
        lambda x, w: jnp.exp(x @ w).sum(0),
        (X, X),
        [["dot_general", "exp"], ["reduce_sum"]],
    ),
    # What is elementwise joins the contraction's group, whose sink it meets.
    "beside": (lambda x, w: x @ w + jnp.exp(x), (X, X), [["dot_general", "exp", "add"]]),
    # A contraction's result is not moved in its group, whatever is after that.
    "moved": (lambda x, w: (x @ w).T + 1, (X, X), [["dot_general"], ["transpose", "add"]]),
    "moves": (lambda x: jnp.exp(x.T).reshape(8, 512).T, (X,), [["transpose", "exp", "reshape", "transpose"]]),
    # A barrier.
    "opaque": (lambda x: jnp.exp(jnp.sort(jnp.tanh(x))) + 1, (X,), [["exp", "add"], ["sort"], ["tanh"]]),
    # Who reads a result of the function is not known.
    "result": (lambda x: ((y := jnp.exp(x)), y + 1), (X,), [["add"], ["exp"]]),
}


@pytest.mark.parametrize("name", RULES)
def test_the_rules(name):
    f, args, want = RULES[name]
    assert groups(f, *args) == sorted(want)


def test_a_group_has_so_many_operations(monkeypatch):
    def chain(x):
        for _ in range(299):
            x = jnp.sin(x)
        return x

    sizes = sorted(map(len, groups(chain, X)))
    assert sizes == [43, 256]
    monkeypatch.setattr(tvm_fuse_ops, "MAX_FUSED_OPS", 100)
    assert sorted(map(len, groups(chain, X))) == [99, 100, 100]


def test_a_group_has_any_number_of_arguments():
    def total(*xs):
        return sum(xs[1:], xs[0])

    assert groups(total, *[X] * 200) == [["add"] * 199]


@pytest.mark.parametrize("device", ["h200", "tpu_v5e", "cpu"])
def test_what_kernels_cannot_hold_is_several_and_said(device):
    plan = fuseplan.make_plan(diamond, device=device, planner="tvm_fuse_ops")(IMAGE, WEIGHTS)
    assert [len(kernel.spec.nodes) for kernel in plan.kernels] == [1, 5]
    assert any("are several kernels here" in note for note in plan.notes)
    assert plan.verify()
