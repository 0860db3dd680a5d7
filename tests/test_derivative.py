"""Derivatives of fused functions: JAX's own numbers in every mode and inside every transformation,
by a pass back that is planned together with the pass forward."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fuseplan

J = functools.partial(fuseplan.jit, device="test", planner="greedy")
X = jnp.linspace(-1.5, 2.0, 6).reshape(2, 3)
W = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)


def layer(x, w):
    return jnp.tanh(x @ w) * x


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -0.1, 0.1),))


@jax.custom_jvp
def kinked(x):
    return jnp.maximum(x, 0)


kinked.defjvp(lambda primals, tangents: (kinked(*primals), jnp.where(primals[0] > 0, 3.0, 0.0) * tangents[0]))


@jax.custom_batching.custom_vmap
def by_rule(x):
    return jnp.sin(x)


by_rule.def_vmap(lambda n, batched, x: (3 * jnp.sin(x), True))


@jax.custom_vjp
def tripled(x):
    return by_rule(x)


tripled.defvjp(lambda x: (by_rule(x), by_rule(2 * x)), lambda y, g: (g * y * by_rule(g),))


def total(f):
    return lambda *args: jnp.sum(f(*args) ** 2)


def twice(h):
    return lambda x, w: jax.grad(lambda x: (jax.grad(total(h))(x, w) ** 2).sum())(x)


def layers(h):
    def f(x, w):
        return lax.scan(lambda c, w: (h(c, w), c.sum()), x, jnp.stack([w, 2 * w]))[0]

    return jax.grad(total(f), (0, 1))


def branches(h):
    f = lambda x, w: lax.cond(x[0, 0] < 0, lambda: h(x, w), lambda: x)  # noqa: E731
    return jax.grad(total(f), (0, 1))


def in_a_loop(h):
    return lambda x, w: lax.fori_loop(0, 2, lambda _, x: x - 0.1 * jax.grad(total(h))(x, w), x)


def aux(h):
    f = lambda x, w: (lambda y: ((y * y).sum(), (y, jnp.log(y - y))))(h(x, w))  # noqa: E731
    return jax.grad(f, (0, 1), has_aux=True)


MODES = {
    "grad": lambda h: jax.grad(total(h), (0, 1)),
    "value_and_grad": lambda h: jax.jit(jax.value_and_grad(total(h), 1)),
    "jvp": lambda h: lambda x, w: jax.jvp(h, (x, w), (w[:2], x[:1] * w)),
    "linearize": lambda h: lambda x, w: jax.linearize(h, x, w)[1](x + 1, w),
    "jacfwd": lambda h: jax.jacfwd(h, 1),
    "jacrev": lambda h: jax.jacrev(h, (0, 1)),
    "hessian": lambda h: jax.hessian(total(h)),
    "reverse over reverse": twice,
    "reverse over forward": lambda h: jax.grad(lambda x, w: jax.jvp(total(h), (x, w), (x, w))[1]),
    "third": lambda h: jax.grad(lambda x, w: twice(h)(x, w).sum()),
    "scan": layers,
    "cond": branches,
    "in a loop": in_a_loop,
    "checkpoint": lambda h: jax.grad(total(jax.checkpoint(h)), (0, 1)),
    "checkpoint of two": lambda h: jax.grad(total(jax.checkpoint(lambda x, w: h(h(x, w), w))), (0, 1)),
    "grad of vmap": lambda h: jax.grad(total(jax.vmap(h, (0, None))), (0, 1)),
    "vmap of grad": lambda h: jax.vmap(jax.grad(total(h), (0, 1)), (0, None)),
    "vmap of vmap": lambda h: lambda x, w: jax.vmap(
        jax.vmap(jax.value_and_grad(total(h)), (0, None)), (None, 1), out_axes=1
    )(x, jnp.stack([w, 2 * w], 1)),
    "vmap of jvp": lambda h: jax.vmap(lambda x, w: jax.jvp(h, (x, w), (x, w)), (0, None)),
    "vmap of hessian": lambda h: jax.vmap(jax.hessian(total(h), 1), (0, None)),
    "auxiliary": aux,
}


@pytest.mark.parametrize("mode", MODES)
def test_numbers_are_those_of_jax(mode):
    got = MODES[mode](J(layer))(X, W)
    want = MODES[mode](jax.jit(layer))(X, W)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


FUNCTIONS = {
    "integers": lambda x, n: (x * n).sum() + n.sum(),
    "custom_vjp": lambda x, n: (clipped(x) * 5 * n).sum(),
    "custom_jvp": lambda x, n: (kinked(x) * n).sum(),
    "checkpoint": lambda x, n: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y * n)))(x).sum(),
    "own batching": lambda x, n: (tripled(x) * n).sum(),
    "scan": lambda x, n: lax.scan(lambda c, y: (c * jnp.cos(y), c), n.astype(x.dtype).sum(), x.ravel())[0],
    "stopped": lambda x, n: (lax.stop_gradient(x * n) * x).sum(),
    "identity": lambda x, n: x[0, 0],
    "constant": lambda x, n: jnp.float32(3.0) + 0 * n.sum(),
    "guarded": lambda x, n: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0).sum(),
}


@pytest.mark.parametrize("outer", ["grad", "second", "vmap"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_custom_rules_at_every_order(name, outer):
    transform = {
        "grad": lambda f: jax.value_and_grad(f),
        "second": lambda f: jax.grad(lambda x, n: (jax.grad(f)(x, n) ** 2).sum()),
        "vmap": lambda f: jax.vmap(jax.grad(f), (0, None)),
    }[outer]
    if name == "own batching" and outer == "second":
        pytest.skip("JAX has no derivative of custom_vmap")
    f, n = FUNCTIONS[name], jnp.arange(1, 4)
    x = jnp.stack([X, -X]) if outer == "vmap" else X
    got, want = transform(J(f))(x, n), transform(jax.jit(f))(x, n)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
