"""Bodies of loops, branches and shard_map: planned as functions of their own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fuseplan
from fuseplan.frontend.trace import trace
from fuseplan.runtime.executor import make_runner
from fuseplan.settings import make_options
from fuseplan.targets.calibrate import described_cpu
from tests.helpers.arrays import normal
from tests.helpers.plans import plan_traced

pytestmark = pytest.mark.usefixtures("compiled_quickly")

J = functools.partial(fuseplan.jit, device=described_cpu())
N = 1536
SCORES = 4 * N * N
X = normal(N, 8)
W = jnp.asarray(np.asarray(normal(2, 8, 8, seed=1)) / 4)


def attention(q, k, v):
    scores = jnp.einsum("qd,kd->qk", q, k) / 8
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -1e30)
    return jax.nn.softmax(scores) @ v


def layer(c, w):
    return c + attention(c @ w, c, c)


def of_shards(x, w):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    f = lambda x, w: lax.psum(layer(x, w[0]), "d")  # noqa: E731
    return jax.shard_map(f, mesh=mesh, in_specs=(P("d"), P()), out_specs=P())(x, w)


BODIES = {
    "scan": lambda x, w: lax.scan(lambda c, w: (layer(c, w), c.sum()), x, w),
    "while": lambda x, w: lax.while_loop(
        lambda c: c[1] < w.shape[0], lambda c: (layer(c[0], w[c[1]]), c[1] + 1), (x, 0)
    )[0],
    "cond": lambda x, w: lax.cond(w[0, 0, 0] < 9, lambda: layer(x, w[0]), lambda: x),
    "shard_map": of_shards,
    "scan in a scan": lambda x, w: lax.scan(
        lambda c, _: (lax.scan(lambda c, w: (layer(c, w), None), c, w)[0], None), x, None, length=1
    )[0],
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_planned(name):
    f = BODIES[name]
    fast, plain = (g.lower(X, W).compile() for g in (J(f), jax.jit(f)))
    assert plain.memory_analysis().temp_size_in_bytes > SCORES
    assert fast.memory_analysis().temp_size_in_bytes < SCORES / 2
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)  # noqa: E731
    jax.tree.map(compare, fast(X, W), plain(X, W))


@pytest.mark.slow
def test_layers_that_are_fused_each_keep_little_under_a_gradient():
    def loss(h):
        return lambda x, w: (lax.scan(lambda c, w: (c + h(c @ w, c, c), None), x, w)[0] ** 2).sum()

    fast, plain = (
        jax.jit(jax.grad(loss(h), (0, 1))).lower(X, W).compile() for h in (J(attention), attention)
    )
    assert plain.memory_analysis().temp_size_in_bytes > 2 * len(W) * SCORES
    assert fast.memory_analysis().temp_size_in_bytes < 2 * SCORES
    for a, b in zip(fast(X, W), plain(X, W), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max())


def test_effects_stay_where_they_are():
    said = []

    def f(x):
        def body(c, y):
            jax.debug.callback(lambda v: said.append(float(v)), y, ordered=True)
            return jnp.tanh(c) * 2 + y, c

        return lax.scan(body, 0.0, x)

    x = jnp.arange(4.0)
    got = J(f)(x)
    jax.effects_barrier()
    assert said == [0, 1, 2, 3]
    jax.tree.map(np.testing.assert_allclose, got, jax.jit(f)(x))


@pytest.mark.parametrize("device", ["tpu_v5e", "h200"])
def test_pallas_kernels_run_in_a_shard(device):
    """JAX wants to be told of every result of a ``pallas_call`` along which axes it differs."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])

    def shard(x):
        traced = trace(lambda x: jax.nn.softmax(x * 2.0), x)
        lowered, plan = plan_traced(traced, make_options(device))
        assert plan.kernels[0].spec.backend != "xla"
        return make_runner(lowered, plan, platform="cpu", interpret=True)(x)[0]

    x = jnp.linspace(0.0, 1.0, 16 * 128).reshape(16, 128)
    f = jax.shard_map(shard, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    np.testing.assert_allclose(jax.jit(f)(x), jax.nn.softmax(x * 2.0), rtol=1e-6)
