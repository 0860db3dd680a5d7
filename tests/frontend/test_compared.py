"""What is compared with its own maximum is computed once: passes and copies may round differently."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel.devices import get_device
from costmodel.graph import make_graph
from fuseplan import Plan
from fuseplan.frontend import compared
from fuseplan.frontend.compared import copies_apart, needed_once
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.remat.duplicates import split
from fuseplan.support.errors import InvalidPlanError
from fuseplan.verify.plan import check_plan

X = jax.ShapeDtypeStruct((64, 512), "float32")


def ties(x):
    """For each row, how many elements are the largest."""
    y = jnp.tanh(x) * 3
    return (y == -jnp.min(-y, 1, keepdims=True)).sum(1), y


def graph_of(f, *args):
    return lower(trace(f, *args)).graph


def ops(graph, nodes):
    return {graph.nodes[n].op for n in nodes}


def test_what_both_operands_follow_from():
    graph = graph_of(ties, X)
    assert ops(graph, needed_once(graph)) == {"mul"}
    # Each operand rounds anew: they need not agree to the bit.
    graph = graph_of(lambda x: (jnp.tanh(x) == jnp.max(jnp.sin(x), 1, keepdims=True)).sum(1), X)
    assert not needed_once(graph)
    graph = graph_of(lambda x: (y := jnp.sin(x)) == jax.lax.top_k(y, 1)[0], X)
    assert ops(graph, needed_once(graph)) == {"sin"}
    # Integers do not round, and arguments are in memory.
    for f in (lambda x: x == x.max(1, keepdims=True), lambda x: (y := x.astype(int) * 2) == y.max()):
        assert not needed_once(graph_of(f, X))
    graph = graph_of(lambda x: jnp.maximum(y := jnp.sin(x), jnp.cos(x)) == y, X)
    assert ops(graph, needed_once(graph)) == {"sin"}


def test_a_comparison_of_many_operations_is_assumed_to_need_one_evaluation(monkeypatch):
    monkeypatch.setattr(compared, "MAX_OPERATIONS", 3)
    graph = graph_of(ties, X)
    assert needed_once(graph) == frozenset(range(len(graph.nodes)))


def test_no_copies_of_what_is_compared():
    graph = graph_of(ties, X)
    (made,) = needed_once(graph)
    copies = split(graph, range(len(graph.nodes)))
    assert copies is None or copies.copies[made] == 1


def with_a_copy(graph):
    """The graph with its first operation once more, for the comparison alone."""
    first, *others = graph.nodes
    (made,), new = first.outputs, len(graph.values)
    nodes = [first, replace(first, id=1, outputs=(new,))]
    for node in others:
        reads = tuple(new if node.op == "eq" and v == made else v for v in node.inputs)
        nodes.append(replace(node, id=node.id + 1, inputs=reads))
    values = [replace(v, producer=v.producer + (v.producer > 0)) for v in graph.values]
    values.append(replace(graph.values[made], id=new, producer=1))
    return make_graph(values, nodes, graph.inputs, graph.outputs, [0, 0, *range(2, len(nodes))])


def test_copies_that_are_compared_are_found():
    graph = graph_of(lambda x: (y := x * 3) == jnp.max(y, 1, keepdims=True), X)
    apart = with_a_copy(graph)
    assert [n.op for n in copies_apart(apart)] == ["eq"]
    assert not list(copies_apart(graph))
    device = get_device("h200")
    for g, is_legal in ((graph, True), (apart, False)):
        kernels = get_planner("unfused")(g, Scheduler(g, device), Budget()).kernels
        with (
            nullcontext()
            if is_legal
            else pytest.raises(InvalidPlanError, match="two copies of one operation")
        ):
            check_plan(Plan(g, device, "unfused", kernels))


@pytest.mark.parametrize("device", ["cpu", "h200", "tpu_v5e"])
def test_gradients_of_a_maximum(device):
    """Rows that no kernel holds whole: none is walked in passes that evaluate the compared values anew."""

    def f(x, w):
        return jnp.max(jnp.tanh(x @ w) * 3, axis=1).sum()

    shapes = jax.ShapeDtypeStruct((4096, 64), "float32"), jax.ShapeDtypeStruct((64, 300_000), "float32")
    plan = fuseplan.make_plan(jax.grad(f), device=device)(*shapes)
    graph = plan.graph
    compared = needed_once(graph)
    assert compared
    for kernel in plan.kernels:
        for n in compared.intersection(kernel.spec.nodes):
            place = kernel.spec.nodes.index(n)
            assert sum(place in loop for loop in kernel.spec.passes) <= 1
    x = np.random.default_rng(0).standard_normal((64, 8), np.float32)
    w = np.random.default_rng(1).standard_normal((8, 700), np.float32)
    got = fuseplan.jit(jax.grad(f))(x, w)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, jax.grad(f)(x, w), rtol=1e-3, atol=1e-3)
