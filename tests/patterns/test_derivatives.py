"""A match changes no derivative: neither where a program stops one, nor where a function has a rule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fuseplan
from fuseplan import Pattern, patterns

X = jnp.linspace(0.5, 2, 24, dtype=jnp.float32).reshape(4, 6)


def matched(pattern, f, x=X):
    """The number of matches; the rewritten function has to have the value and the gradient of ``f``."""
    fast = patterns.rewrite(f, [pattern])
    np.testing.assert_allclose(fast(x), f(x), rtol=1e-5, atol=1e-6)
    got, expected = (jax.grad(lambda x, g=g: jnp.sin(g(x)).sum())(x) for g in (fast, f))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    return len(fuseplan.match(pattern, f)(x))


def largest(x):
    return x.max(-1, keepdims=True)


def stopped(x):
    return lax.stop_gradient(largest(x))


def softmax(x, shift, times=None):
    e = jnp.exp(x - shift(x))
    return e / e.sum(-1, keepdims=True) if times is None else (e @ times) / e.sum(-1, keepdims=True)


W = jnp.cos(jnp.arange(18.0)).reshape(6, 3)
# A pattern and a program, either of which may be the other, and whether they match.
STOPPED = {
    "divided by": (lambda x: x / largest(jnp.abs(x)), lambda x: x / stopped(jnp.abs(x)), 0),
    "subtracted": (lambda x: jnp.sin(x - largest(x)), lambda x: jnp.sin(x - stopped(x)), 0),
    "exponentials alone": (lambda x: jnp.exp(x - largest(x)) * 2, lambda x: jnp.exp(x - stopped(x)) * 2, 0),
    "a sum alone": (
        lambda x: jnp.exp(x - largest(x)).sum(-1), lambda x: jnp.exp(x - stopped(x)).sum(-1), 0,
    ),
    "a softmax": (lambda x: softmax(x, largest), lambda x: softmax(x, stopped), 1),
    "divided last": (lambda x: softmax(x, largest, W), lambda x: softmax(x, stopped, W), 1),
    "the same": (lambda x: x / stopped(jnp.abs(x)), lambda x: x / stopped(jnp.abs(x)), 1),
}  # fmt: skip


@pytest.mark.parametrize("is_reverse", [False, True])
@pytest.mark.parametrize("case", STOPPED)
def test_a_stopped_maximum_matches_one_in_a_softmax_alone(case, is_reverse):
    mine, theirs, expected = STOPPED[case]
    f, program = (theirs, mine) if is_reverse else (mine, theirs)
    assert matched(Pattern("p", f, args=(X,)), program) == expected


@pytest.mark.parametrize("after", [lambda m: m, lambda m: m.astype(jnp.bfloat16).astype(jnp.float32)])
def test_a_derivative_that_is_stopped_behind_a_match_stays_stopped(after):
    pattern = Pattern("s", lambda x: jnp.abs(x * x).max(-1), args=("a b",))
    assert matched(pattern, lambda x: x / after(lax.stop_gradient(jnp.abs(x * x).max(-1)))[:, None]) == 1
