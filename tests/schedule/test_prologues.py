"""Which operands a contraction may compute itself, and what planning makes of it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from costmodel.devices import TEST_DEVICE, get_device
from costmodel.graph import OpKind
from fuseplan import Kernel
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.options import Features
from fuseplan.schedule.legality import ancestors_among, possible_prologues
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.settings import make_options
from fuseplan.support.errors import Verdict
from tests.helpers.graphs import GraphBuilder
from tests.helpers.plans import plan_function

X, W = jax.ShapeDtypeStruct((512, 1024), "float32"), jax.ShapeDtypeStruct((1024, 768), "float32")
ROW = jax.ShapeDtypeStruct((512, 1), "float32")


def glu(a, b, w):
    return (jax.nn.silu(a) * b) @ w


def graph_of(f, *args):
    return lower(trace(f, *args)).graph


def whole(f, *args, device=TEST_DEVICE, features=None):
    graph = graph_of(f, *args)
    scheduler = Scheduler(graph, device) if features is None else Scheduler(graph, device, features=features)
    return scheduler.price(tuple(range(len(graph.nodes))))


def test_what_may_be_a_prologue():
    def f(x, y, w, r):
        left = jnp.tanh(jnp.exp(x) * r)  # exp, mul and tanh end in the product
        shared = jnp.exp(y)  # read by the product and by a sum
        return left @ (w * 2 + shared), shared.sum(), jnp.cos(x)

    graph = graph_of(f, X, W, W, ROW)
    found = {(graph.nodes[n].op, graph.nodes[n].inputs) for n, g in enumerate(possible_prologues(graph)) if g}
    ops = sorted(op for op, _ in found)
    assert ops == ["add", "exp", "mul", "mul", "tanh"]
    assert ("exp", (graph.inputs[0],)) in found
    assert ("exp", (graph.inputs[1],)) not in found


def test_two_products_of_one_operand_write_it():
    b = GraphBuilder()
    x = b.elementwise(b.input((128, 128)), op="exp")
    graph = b.build(b.matmul(x, b.input((128, 128))), b.matmul(b.input((128, 128)), x))
    assert not any(possible_prologues(graph))
    verdict = Scheduler(graph, TEST_DEVICE).compatible((0, 1))
    assert verdict is not None
    assert "needed elsewhere too" in verdict.reason


def test_what_is_behind_a_product_by_a_path_in_the_group():
    graph = graph_of(lambda x, w: jnp.tanh(jnp.exp(x)) @ w + 1, X, W)
    dot = next(n for n in graph.nodes if n.kind == OpKind.OUT_ELEMENTWISE_FUSABLE)
    assert [n.op for n in ancestors_among(graph.nodes, dot)] == ["tanh", "exp"]
    assert ancestors_among([graph.nodes[0], dot], dot) == []


@pytest.mark.parametrize("device", ["test", "h200", "tpu_v5e"])
def test_switched_off_nothing_is_fused_into_an_operand(device):
    args = (X, X, W)
    assert isinstance(whole(glu, *args, device=get_device(device)), Kernel)
    refused = whole(
        glu, *args, device=get_device(device), features=Features(prologues=False, xla_loops=False)
    )
    assert isinstance(refused, Verdict)
    assert "nothing is fused into the operands" in refused.reason


def test_switched_off_for_a_plan():
    options = make_options("test")
    args = (jax.ShapeDtypeStruct((8192, 1024), "float32"),) * 2 + (
        jax.ShapeDtypeStruct((1024, 128), "float32"),
    )
    _, fused = plan_function(glu, args, {}, options)
    _, apart = plan_function(glu, args, {}, replace(options, features=Features(prologues=False)))
    assert fused.objective_ps < apart.objective_ps
    assert len(fused.kernels) < len(apart.kernels)
    assert fused.status == apart.status == "OPTIMAL"


def test_a_scale_of_rows_may_serve_both_ends():
    """It lacks the contracted axis, so that it is at hand before the loop and after it."""

    def f(x, r, w):
        s = jnp.exp(r)
        return (x * s) @ w * s

    assert isinstance(whole(f, X, ROW, W), Kernel)


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_a_residual_of_what_the_product_reads(device):
    square = jax.ShapeDtypeStruct((512, 512), "float32")
    for f in (lambda x, w: x @ w + x, lambda x, w: jax.nn.silu(x) @ w + x):
        kernel = whole(f, square, square, device=get_device(device), features=Features(xla_loops=False))
        assert isinstance(kernel, Kernel)
        assert len({r.value for r in kernel.spec.reads}) == 2
        assert len(kernel.spec.reads) == 3  # x along the depth, and along the columns


def test_layers_with_another_reader_are_not_taken_for_equal():
    """Two operands that look alike, one of which is a result too: what is decided about the
    first says nothing of the second."""

    def f(x, w):
        y, z = jnp.exp(x), jnp.exp(x * 2)
        return y @ w, z @ w, z

    _, plan = plan_function(f, (X, W), {}, make_options("test"))
    groups = {kernel.spec.nodes for kernel in plan.kernels}
    exps = [n.id for n in plan.graph.nodes if n.op == "exp"]
    assert plan.status == "OPTIMAL"
    assert any(exps[0] in g and len(g) > 1 for g in groups)
    assert not any(
        exps[1] in g and plan.graph.nodes[g[-1]].kind == OpKind.OUT_ELEMENTWISE_FUSABLE for g in groups
    )


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda y, w: (y * 2).sum(1, keepdims=True) * y @ w, "whole rows of an operand of dot_general"),
        (lambda y, w: (y @ w).sum(1), "whole rows of the result of dot_general"),
        # The sum comes later than the product, and does not depend on it.
        (lambda y, w: ((y * 2) @ w, (y * 2 + 1).sum(1)), "whole rows beside dot_general"),
    ],
)
def test_a_reduction_is_refused_by_what_depends_on_what(f, reason):
    graph = graph_of(f, X, W)
    refused = Scheduler(graph, TEST_DEVICE).compatible(tuple(range(len(graph.nodes))))
    assert refused is not None
    assert refused.rule == "shapes"
    assert reason in refused.reason
