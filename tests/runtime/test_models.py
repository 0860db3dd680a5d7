"""Whole models and training steps through ``fuseplan.jit``: equinox, optax, GPT-2."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import fuseplan
from fuseplan.runtime.tolerance import check_results
from fuseplan.workloads import get_workload, make_args

pytestmark = pytest.mark.one_python


@pytest.mark.parametrize("name", ["equinox_mlp", "equinox_mlp_train", "gpt2_block_grad"])
def test_workload_equals_jax(name):
    f, args = get_workload(name).build(small=True)
    args = make_args(args, seed=0)
    check_results(name, fuseplan.jit(f)(*args), jax.jit(f)(*args))


@pytest.mark.slow
def test_an_optax_training_step_of_an_equinox_model_learns():
    """The user's own loop: five steps fused are five steps of ``jax.jit``, and the loss falls."""
    model = eqx.nn.MLP(7, 3, 33, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    optimizer = optax.adam(1e-2)
    x, y = jax.random.normal(jax.random.key(1), (16, 7)), jnp.arange(16) % 3

    def loss(params, x, y):
        logits = jax.vmap(eqx.combine(params, static))(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def train(step):
        now, state, losses = params, optimizer.init(params), []
        for _ in range(5):
            now, state, value = step(now, state, x, y)
            losses.append(value)
        return now, losses

    got, want = train(fuseplan.jit(step, device="test")), train(jax.jit(step))
    check_results("five steps", got, want)
    assert got[1][-1] < got[1][0]


@pytest.mark.slow
def test_a_small_training_step_gains_by_groups_across_hubs():
    """With these, the step is one component."""
    f, args = get_workload("gpt2_train_4").build(small=True)
    plan, across = (
        fuseplan.make_plan(f, device="h200", deadline_s=120, features=fuseplan.Features(packs=packs))(*args)
        for packs in (False, True)
    )
    assert plan.gap < 0.25
    assert across.objective_ps < plan.objective_ps
    assert across.bound_ps < across.objective_ps
    assert plan.stats.distinct_components < plan.stats.components
