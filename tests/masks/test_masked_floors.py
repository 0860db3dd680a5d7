"""Bounds of groups whose nests leave out masked tiles, on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel.devices import get_device
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.workloads import get_workload

pytestmark = pytest.mark.one_python

CPU = get_device("cpu")


@pytest.mark.parametrize("name", ["causal_attention", "causal_attention_grad", "window_attention"])
def test_a_floor_counts_the_tiles_that_a_nest_visits(name):
    """No more, so that it is a bound; and as many, so that a group without the nest is bounded, too."""
    f, args = get_workload(name).build()
    lowered = lower(trace(f, *args))
    scheduler = Scheduler(lowered.graph, CPU, lowered)
    masked = [nodes for nodes in scheduler.offers if scheduler._nests.masked(nodes)]
    assert masked
    for nodes in masked:
        kernel = scheduler._nests.offered(nodes)
        assert kernel.spec.tiles_visited
        assert 0 < scheduler.floor(nodes) <= kernel.cost.time_ps
    unmasked = Scheduler(lowered.graph, CPU)
    every = tuple(range(len(lowered.graph.nodes)))
    assert unmasked.floor(every) / 8 < scheduler.floor(every) < unmasked.floor(every)


def test_a_plan_with_a_masked_nest_has_a_bound():
    """More groups than are listed, beside a nest behind a mask."""

    def f(q, k, v, *weights):
        seen = jnp.arange(len(q))
        scores = jnp.where(seen[:, None] >= seen, q @ k.T, -1e30)
        y = jax.nn.softmax(scores) @ v
        for w in weights:
            y = jnp.tanh(y @ w) * y + jnp.sin(y)
        return y

    square = jax.ShapeDtypeStruct((2048, 64), "float32")
    weights = (jax.ShapeDtypeStruct((64, 64), "float32"),) * 4
    plan = fuseplan.make_plan(f, device="cpu")(square, square, square, *weights)
    assert any(kernel.spec.tiles_visited for kernel in plan.kernels)
    assert plan.bound_ps > 0.9 * plan.objective_ps
    assert plan.verify()
