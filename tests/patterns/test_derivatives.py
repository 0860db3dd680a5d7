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


def with_rule(f, rule, kind=jax.custom_vjp):
    """``f`` with the derivative ``rule(x)`` of its argument."""
    marked = kind(lambda x: f(x))
    if kind is jax.custom_jvp:
        marked.defjvp(lambda p, t: (marked(*p), rule(p[0]) * t[0]))
    else:
        marked.defvjp(lambda x: (marked(x), x), lambda x, ct: (rule(x) * ct,))
    return marked


KINDS = pytest.mark.parametrize("kind", [jax.custom_vjp, jax.custom_jvp])


@KINDS
def test_a_derivative_of_its_own_is_kept_in_a_match_of_all_of_it(kind):
    through = with_rule(jnp.round, jnp.ones_like, kind)
    pattern = Pattern("rounded", lambda x: jnp.round(x) * 2)
    f = lambda x: through(x) * 2  # noqa: E731
    assert matched(pattern, f) == 0
    np.testing.assert_array_equal(jax.grad(lambda x: patterns.rewrite(f, [pattern])(x).sum())(X), 2)
    report = fuseplan.match(pattern, f)(X)
    assert f"{kind.__name__}_call with a derivative of its own" in str(report)
    # Inside of the function, the derivative stays where it is.
    assert matched(Pattern("round", jnp.round), f) == 1


@KINDS
def test_a_replacement_has_the_derivative_where_the_pattern_has_one_too(kind):
    through = with_rule(jnp.round, jnp.ones_like, kind)
    five = with_rule(lambda x: jnp.round(x) * 2, lambda x: 5 * jnp.ones_like(x), kind)
    f = lambda x: through(x) * 2  # noqa: E731
    for mine, expected in ((f, 5), (lambda x: jnp.round(x) * 2, 2)):
        fast = patterns.rewrite(f, [Pattern("rounded", mine, replacement=five)])
        np.testing.assert_array_equal(jax.grad(lambda x, g=fast: g(x).sum())(X), expected)
    assert not fuseplan.match(Pattern("rounded", f), f)(X).matches
    around = Pattern("rounded", with_rule(lambda x: jnp.round(x) * 2, jnp.ones_like, kind), replacement=five)
    assert not fuseplan.match(around, f)(X).matches, "the function with the derivative is another"


@pytest.mark.parametrize(
    ("f", "program"),
    [
        (lambda x: jnp.maximum(x - 1, 0) * 3, lambda x: jax.nn.relu(x - 1) * 3),
        (lambda x: x * jax.nn.sigmoid(x) * 3, lambda x: jax.nn.silu(x) * 3),
        (lambda x: jax.nn.softmax(x) * 3, lambda x: softmax(x, largest) * 3),
        (lambda x: softmax(x, largest) * 3, lambda x: jax.nn.softmax(x) * 3),
        (lambda x: jnp.minimum(jnp.maximum(x, 0), 6) * 3, lambda x: jax.nn.relu6(x) * 3),
    ],
)
def test_the_rules_of_jax_are_those_of_the_operations(f, program):
    assert matched(Pattern("p", f), program, X + 0.01) == 1


@KINDS
@pytest.mark.parametrize(
    "f", [lambda x: x, jax.jit(lambda x: x), lambda x: jax.jit(lambda a, b: (b, a))(x, 1)[1]]
)
def test_a_function_that_only_has_another_derivative_keeps_it(kind, f):
    turned = with_rule(f, lambda x: -jnp.ones_like(x), kind)
    program = lambda x: jnp.tanh(turned(x)) * jnp.cos(x)  # noqa: E731
    both = lambda x, y: jnp.tanh(x) * jnp.cos(y)  # noqa: E731
    for pattern in (Pattern("p", jnp.tanh), Pattern("p", jnp.cos), Pattern("p", both, args=("a b", "a b"))):
        assert matched(pattern, program) == 1


@KINDS
def test_equal_values_with_other_derivatives_are_not_one_argument(kind):
    through = with_rule(lambda x: jnp.round(x), jnp.ones_like, kind)
    turned, tripled = (with_rule(lambda x: x, lambda x, c=c: c * jnp.ones_like(x), kind) for c in (-1, 3))
    pattern = Pattern("p", lambda a: jnp.tanh(a) * a)
    assert matched(pattern, lambda x: jnp.tanh(through(x)) * jnp.round(x)) == 0
    assert matched(pattern, lambda x: jnp.tanh(turned(x)) * tripled(x)) == 0
    assert matched(pattern, lambda x: (lambda r: jnp.tanh(r) * r)(through(x))) == 1
    assert matched(pattern, lambda x: jnp.tanh(jnp.round(x)) * jnp.round(x)) == 1
