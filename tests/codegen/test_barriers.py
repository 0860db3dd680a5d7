"""Barriers keep groups apart that XLA would merge, and only where that is not slower."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import fuseplan
from costmodel.devices import get_device
from fuseplan.codegen.xla import apart
from fuseplan.runtime.executor import make_runner


def planned(f, *args, device, **options):
    plan = fuseplan.make_plan(f, device=device, **options)(*args)
    return plan, apart(plan.graph, plan.kernels, get_device(device))


def arrays(*shapes):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape), "float32") for shape in shapes]


def test_a_cpu_has_no_barriers():
    x, w, v = arrays((256, 128), (128, 256), (256, 256))
    _, barriers = planned(lambda x, w, v: jnp.tanh(x @ w) @ v, x, w, v, device="cpu")
    assert not any(barriers)


def test_groups_of_which_one_loop_is_faster_may_be_merged():
    """As of a plan that fuses nothing."""
    (x,) = arrays((512, 512))
    plan, barriers = planned(lambda x: jnp.tanh(x) * 2 + 1, x, device="h200", planner="unfused")
    assert len(plan.kernels) == 3
    assert not any(barriers)


def test_each_reader_of_an_array_has_a_barrier_of_its_own():
    """XLA takes equal barriers for one, and then joins the products."""
    x, w, v = arrays((256, 128), (128, 256), (128, 256))
    plan, barriers = planned(lambda x, w, v: (x @ w, x @ v), x, w, v, device="h200")
    assert len(plan.kernels) == 2
    assert sorted(map(len, barriers)) == [0, 1]
    run = make_runner(plan.lowered, plan, platform="cpu", interpret=True)
    assert jax.jit(run).lower(x, w, v).as_text().count("optimization_barrier") == 1
    for found, expected in zip(jax.jit(run)(x, w, v), (x @ w, x @ v), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_data_movement_has_none():
    """XLA folds a transpose into the product that reads it."""
    x, w = arrays((256, 128), (256, 256))
    _, barriers = planned(lambda x, w: x.T @ w, x, w, device="h200")
    assert not any(barriers)
