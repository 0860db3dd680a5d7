"""Blocks of published models: what they compute, and that no planner's plan beats the solver's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel.devices import get_device
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.passes.recompute_streams import along_streams
from fuseplan.plan.options import ALL_FEATURES
from fuseplan.planners import planner_names
from fuseplan.workloads.published import (
    PUBLISHED,
    clip_loss_grad,
    gray_scott,
    lorenz_96,
    moe_combine,
    moe_routing,
    selective_scan,
)
from fuseplan.workloads.workload import make_args

pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("compiled_quickly")]

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", PUBLISHED)
def test_fused_results_are_right(name):
    f, shapes = PUBLISHED[name].build(small=True)
    args = make_args(shapes)
    found, expected = fuseplan.jit(f)(*args), f(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_a_scan_is_a_loop_over_time():
    x, delta, b, c = normal(7, 3), normal(7, 3), normal(7, 2), normal(7, 2)
    a, skip = normal(3, 2), normal(3)
    state, rows = np.zeros((3, 2)), []
    for t in range(7):
        step = np.log1p(np.exp(delta[t].astype(float)))
        state = np.exp(-step[:, None] * np.exp(a)) * state + (step * x[t])[:, None] * b[t]
        rows.append(state @ c[t] + skip * x[t])
    np.testing.assert_allclose(selective_scan(x, delta, a, b, c, skip), np.stack(rows), rtol=1e-4, atol=1e-5)


def test_experts_are_chosen_and_combined():
    x, w, outputs = normal(5, 6), normal(6, 4), normal(4, 5, 6)
    weights, experts, balance = moe_routing(x, w, top=2)
    logits = x @ w
    assert (np.sort(experts, 1) == np.sort(np.argsort(-logits, 1)[:, :2], 1)).all()
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    assert balance.shape == ()
    expected = x + sum(weights[:, k, None] * outputs[experts[:, k], np.arange(5)] for k in range(2))
    np.testing.assert_allclose(moe_combine(x, outputs, weights, experts), expected, rtol=1e-5, atol=1e-5)


def test_what_is_uniform_does_not_diffuse():
    u, v = jnp.full((5, 6), 0.5), jnp.full((5, 6), 0.25)
    du, dv = gray_scott(u, v)
    np.testing.assert_allclose(du, -0.5 * 0.0625 + 0.037 * 0.5, rtol=1e-5)
    np.testing.assert_allclose(dv, 0.5 * 0.0625 - 0.097 * 0.25, rtol=1e-5)
    np.testing.assert_allclose(lorenz_96(jnp.full((2, 9), 8.0)), 0, atol=1e-5)


@pytest.mark.slow
def test_a_contrastive_gradient_is_that_of_both_cross_entropies():
    x, y = normal(4, 5), normal(4, 5)

    def loss(x, y, scale):
        unit = [z / jnp.sqrt(jnp.square(z).sum(1, keepdims=True) + 1e-6) for z in (x, y)]
        logits = jnp.exp(scale) * unit[0] @ unit[1].T
        return -(jnp.diag(jax.nn.log_softmax(logits, 0)) + jnp.diag(jax.nn.log_softmax(logits, 1))).mean() / 2

    found, expected = clip_loss_grad(x, y, 0.5), jax.grad(loss, (0, 1, 2))(x, y, 0.5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_kernels_that_wait_for_each_other():
    # Each direction's gradient needs the other's statistic: two kernels that stream one axis each, and make
    # their own statistic, cannot run. In VMEM of a v5e nothing is gained by computing the logits again.
    f, shapes = PUBLISHED["clip_loss_grad"].build()
    lowered = lower(trace(f, *shapes))
    assert along_streams(lowered, get_device("tpu_v5e"), ALL_FEATURES) == (None, False)


@pytest.mark.slow
def test_a_sum_that_computes_its_operand_is_not_split():
    f, shapes = PUBLISHED["unet_block"].build()
    frame = fuseplan.compare(f, device="h200", planners=("xla_priority", "solver"), deadline_s=100)(*shapes)
    assert frame.status[1] == "OPTIMAL"
    assert frame.time_us[1] <= frame.time_us[0]


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("name", ["moe_routing", "moe_combine", "lorenz_96", "neural_ode"])
def test_no_plan_is_faster_than_the_proven_one(name, device):
    f, shapes = PUBLISHED[name].build()
    names = planner_names(of_graphs=True)
    frame = fuseplan.compare(f, device=device, planners=names, deadline_s=100)(*shapes).set_index("planner")
    assert frame.status["solver"] == "OPTIMAL"
    assert frame.time_us["solver"] <= frame.time_us.min() * (1 + 1e-9)
