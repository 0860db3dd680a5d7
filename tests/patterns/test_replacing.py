"""Replacements run in the place of matches: the same numbers under every transformation, and clear errors."""

from __future__ import annotations

import copy
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import fuseplan
from fuseplan import Pattern, PatternError, patterns
from fuseplan.patterns.replace import rewrite_closed

X = jnp.linspace(-1, 1, 24, dtype=jnp.float32).reshape(4, 6)
Y = jnp.linspace(0, 2, 24, dtype=jnp.float32).reshape(4, 6)


def gate(x, y):
    return jnp.tanh(x) * y + y


@jax.custom_vjp
def marked(x, y):
    return gate(x, y)


marked.defvjp(
    lambda x, y: (gate(x, y), (x, y)),
    # Three times the derivative, so that a test sees whose rule was used.
    lambda kept, ct: tuple(3 * g for g in jax.vjp(gate, *kept)[1](ct)),
)


@jax.custom_vjp
def by_hand(x, y):
    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = gate(x_ref[...], y_ref[...])

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, y)


by_hand.defvjp(lambda x, y: (by_hand(x, y), (x, y)), lambda kept, ct: jax.vjp(gate, *kept)[1](ct))

GATE = Pattern("gate", gate, replacement=by_hand)
MARKED = Pattern("gate", gate, replacement=marked)
J = functools.partial(fuseplan.jit, device="test", planner="greedy")


def model(x, y):
    return jnp.sin(y + y * jnp.tanh(x.T * 2).T).sum(axis=0)


def pattern_ops(f, *args):
    """How often a replacement is called in a traced function, at any depth."""

    def inside(jaxpr):
        for eqn in jaxpr.eqns:
            name = eqn.params.get("name", "")
            yield from [eqn.primitive.name] if eqn.primitive.name == "pattern" else []
            yield from ["jit"] if str(name).startswith("pattern:") else []
            for value in jax.tree.leaves(
                eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns") and eqn.primitive.name != "pattern":
                    yield from inside(inner)

    return list(inside(jax.make_jaxpr(f)(*args).jaxpr))


def test_a_call_runs_the_replacement():
    fast = J(model, patterns=[GATE])
    np.testing.assert_allclose(fast(X, Y), model(X, Y), rtol=1e-6)
    text = jax.jit(patterns.rewrite(model, [GATE])).lower(X, Y).as_text()
    assert pattern_ops(patterns.rewrite(model, [GATE]), X, Y) == ["pattern"]
    assert text


def test_the_plain_function_is_what_a_disabled_call_runs(monkeypatch):
    monkeypatch.setenv("FUSEPLAN_DISABLE", "1")
    wrong = Pattern("gate", gate, replacement=lambda x, y: gate(x, y) + 1)
    np.testing.assert_allclose(J(model, patterns=[wrong])(X, Y), model(X, Y), rtol=1e-6)


def test_the_replacement_has_its_own_derivative():
    fast = J(model, patterns=[MARKED])
    grads = jax.grad(lambda x, y: fast(x, y).sum(), (0, 1))(X, Y)
    plain = jax.grad(lambda x, y: model(x, y).sum(), (0, 1))(X, Y)
    for got, once in zip(grads, plain, strict=True):
        np.testing.assert_allclose(got, 3 * once, rtol=1e-5, atol=1e-6)


def test_a_custom_jvp_is_used_in_forward_mode():
    @jax.custom_jvp
    def doubled(x, y):
        return gate(x, y)

    doubled.defjvp(lambda p, t: (doubled(*p), 2 * jax.jvp(gate, p, t)[1]))
    fast = J(gate, patterns=[Pattern("gate", gate, replacement=doubled)])
    _, got = jax.jvp(fast, (X, Y), (Y, X))
    _, once = jax.jvp(gate, (X, Y), (Y, X))
    np.testing.assert_allclose(got, 2 * once, rtol=1e-5, atol=1e-6)


TRANSFORMED = {
    "grad": lambda f: jax.grad(lambda x, y: f(x, y).sum(), (0, 1)),
    "vjp of a vmap": lambda f: jax.grad(
        lambda x, y: jax.vmap(f)(jnp.stack([x, 2 * x]), jnp.stack([y, y])).sum(), (0, 1)
    ),
    "vmap": lambda f: lambda x, y: jax.vmap(f)(jnp.stack([x, 2 * x]), jnp.stack([y, 3 * y])),
    "vmap of one argument": lambda f: lambda x, y: jax.vmap(f, (0, None), 1)(jnp.stack([x, 2 * x]), y),
    "jvp": lambda f: lambda x, y: jax.jvp(f, (x, y), (y, x)),
    "a hessian": lambda f: lambda x, y: jax.hessian(lambda v: f(v, y[:1, :2]).sum())(x[:1, :2]),
    "jit": jax.jit,
    "checkpoint": lambda f: jax.grad(lambda x, y: jax.checkpoint(f)(x, y).sum()),
    "a scan": lambda f: lambda x, y: lax.scan(lambda c, row: (c + 1, f(row[None] * c, row[None])), 1.0, y),
}
PLAIN = Pattern("gate", gate)


@pytest.mark.parametrize("how", TRANSFORMED)
@pytest.mark.parametrize(
    "pattern", [PLAIN, Pattern("gate", gate, replacement=lambda x, y: y * (jnp.tanh(x) + 1))]
)
def test_every_transformation_has_the_plain_result(how, pattern):
    wrap = TRANSFORMED[how]
    got, expected = wrap(J(model, patterns=[pattern]))(X, Y), wrap(model)(X, Y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


def test_a_gradient_of_the_loss_is_taken_through_rewrite():
    loss = lambda x, y: patterns.rewrite(model, [MARKED])(x, y).sum()  # noqa: E731
    got = J(jax.grad(loss))(X, Y)
    np.testing.assert_allclose(got, 3 * jax.grad(lambda x: model(x, Y).sum())(X), rtol=1e-5, atol=1e-6)


def test_rewrite_keeps_pytrees_and_static_arguments():
    def f(tree, *, how):
        return {"out": gate(tree["x"], tree["y"]) if how == "gate" else tree["x"]}

    got = patterns.rewrite(f, [GATE])({"x": X, "y": Y}, how="gate")
    np.testing.assert_allclose(got["out"], gate(X, Y), rtol=1e-6)


def test_bodies_of_loops_and_branches_are_replaced():
    def f(x, y):
        def step(c, row):
            return gate(c, row), c.sum()

        last, sums = lax.scan(step, x[0], y)
        last = lax.fori_loop(0, 3, lambda i, c: gate(c, y[0]), last)
        return lax.cond(x[0, 0] < 0, gate, lambda a, b: a - b, last, y[0]), sums

    fast = patterns.rewrite(f, [GATE])
    assert len(pattern_ops(fast, X, Y)) == 3
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), fast(X, Y), f(X, Y))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), J(f, patterns=[GATE])(X, Y), f(X, Y)
    )


def test_what_is_read_outside_is_still_computed():
    def f(x, y):
        t = jnp.tanh(x)
        return t * y + y, t.sum(axis=1)

    fast = J(f, patterns=[GATE])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), fast(X, Y), f(X, Y))


def test_side_effects_stay():
    seen = []

    def f(x, y):
        t = jnp.tanh(x)
        jax.debug.callback(seen.append, t[0, 0], ordered=True)
        return t * y + y

    patterns.rewrite(f, [GATE])(X, Y)
    jax.effects_barrier()
    assert len(seen) == 1


def test_a_custom_derivative_that_is_matched_in_part_is_kept():
    @jax.custom_jvp
    def kinked(x):
        return jnp.tanh(x)

    kinked.defjvp(lambda p, t: (kinked(*p), 5 * t[0]))
    other = lambda x, y: (lambda k: k * y + y)(kinked(x))  # noqa: E731

    @jax.custom_jvp
    def two(x):
        return jnp.tanh(x), jnp.sin(x)

    two.defjvp(lambda p, t: (two(*p), (5 * t[0], 7 * t[0])))

    def split(x, y):
        t, s = two(x)
        return t * y + y + s

    for f in (other, split):
        report = fuseplan.match(PLAIN, f)(X, Y)
        assert not report.matches
        assert "custom_jvp_call" in str(report.near_misses[0])


def test_a_pattern_inside_a_custom_derivative_or_a_checkpoint_stays_there():
    @jax.custom_jvp
    def kinked(x, y):
        return jnp.sin(gate(x, y))

    kinked.defjvp(lambda p, t: (kinked(*p), 5 * t[0]))
    fast = patterns.rewrite(kinked, [GATE])
    assert pattern_ops(fast, X, Y) == ["pattern"]
    np.testing.assert_allclose(jax.jvp(fast, (X, Y), (Y, X))[1], 5 * Y)
    saved = patterns.rewrite(lambda x, y: jax.checkpoint(lambda a, b: jnp.sin(gate(a, b)))(x, y), [PLAIN])
    (name,) = [e.primitive.name for e in jax.make_jaxpr(saved)(X, Y).eqns]
    assert name in ("checkpoint", "remat2")
    got = jax.grad(lambda x: saved(x, Y).sum())(X)
    np.testing.assert_allclose(got, jax.grad(lambda x: jnp.sin(gate(x, Y)).sum())(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("results", "f"),
    [
        (lambda x: (lambda t: (t, t.T))(jnp.tanh(x)), lambda x, y: (lambda t: (t, t.T))(jnp.tanh(x))),
        (lambda x: (lambda t: (t.T, jnp.sin(t), t))(jnp.tanh(x)), lambda x, y: jnp.sin(jnp.tanh(x)) + y),
        (lambda x, y: (jnp.tanh(x), jnp.tanh(y)), lambda x, y: jnp.tanh(x) * 2),
    ],
)
@pytest.mark.parametrize("has_replacement", [False, True])
def test_two_results_that_are_one_value_have_one_variable(results, f, has_replacement):
    pattern = Pattern("several", results, replacement=results if has_replacement else None)
    made = rewrite_closed(jax.make_jaxpr(f)(X, Y), [pattern])
    assert made.count(pattern) == 1
    jax.extend.core.check_jaxpr(made.closed.jaxpr)
    got = jax.core.eval_jaxpr(made.closed.jaxpr, made.closed.consts, X, Y)
    for value, expected in zip(got, jax.tree.leaves(f(X, Y)), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_results_have_the_dtypes_of_the_program():
    def f(x, y):
        return (jnp.tanh(x.astype(jnp.bfloat16)) * y.astype(jnp.bfloat16) + y.astype(jnp.bfloat16)).astype(
            jnp.float32
        )

    fast = J(f, patterns=[PLAIN])
    assert fast(X, Y).dtype == jnp.float32
    np.testing.assert_array_equal(fast(X, Y), jax.jit(f)(X, Y))


def test_a_result_that_is_read_in_more_bits_than_the_pattern_gives_is_no_match():
    f = lambda q, k: jnp.einsum("td,sd->ts", q, k, preferred_element_type=jnp.float32)  # noqa: E731
    pattern = Pattern("product", lambda q, k: jnp.einsum("td,sd->ts", q, k), args=("t d", "s d"))
    narrow = X.astype(jnp.bfloat16)
    assert len(fuseplan.match(pattern, lambda q, k: f(q, k).astype(q.dtype))(narrow, narrow)) == 1
    report = fuseplan.match(pattern, f)(narrow, narrow)
    assert not report.matches
    assert "narrower" in report.near_misses[0].found


def test_a_match_and_constants_are_passed_to_the_replacement():
    def replacement(x, *, scale, match):
        assert match.named["scaled"].shape == (4, 6)
        return jnp.sin(x * scale)

    def scaled(x):
        return jnp.sin(patterns.name(x * patterns.constant("scale"), "scaled"))

    pattern = Pattern("scaled", scaled, replacement=replacement)
    f = lambda x: jnp.sin(x / 4) + 1  # noqa: E731
    np.testing.assert_allclose(J(f, patterns=[pattern])(X), f(X), rtol=1e-6)
    own = Pattern("scaled", scaled)
    np.testing.assert_allclose(J(f, patterns=[own])(X), f(X), rtol=1e-6)


@pytest.mark.parametrize(
    ("replacement", "got"),
    [
        (lambda x, y: gate(x, y)[0], r"float32\[6\]"),
        (lambda x, y: gate(x, y).astype(jnp.bfloat16), r"bfloat16\[4, 6\]"),
        (lambda x, y: (gate(x, y), x), r"float32\[4, 6\], float32\[4, 6\]"),
    ],
)
def test_a_replacement_with_another_result_is_an_error_that_names_both(replacement, got):
    pattern = Pattern("gate", gate, replacement=replacement)
    expected = rf"pattern 'gate' returns {got} where the pattern has float32\[4, 6\]"
    with pytest.raises(PatternError, match=expected):
        J(gate, patterns=[pattern])(X, Y)
    with pytest.raises(PatternError, match=expected):
        fuseplan.make_plan(gate, device="test", patterns=[pattern])(X, Y)


def test_a_replacement_that_raises_is_named_and_left_out():
    def broken(x, y):
        raise RuntimeError("no such kernel")

    pattern = Pattern("gate", gate, replacement=broken)
    with pytest.warns(fuseplan.FuseplanWarning, match=r"'gate' .*RuntimeError: no such kernel"):
        got = J(model, patterns=[pattern])(X, Y)
    np.testing.assert_allclose(got, model(X, Y), rtol=1e-6)
    with pytest.warns(fuseplan.FuseplanWarning, match="'gate'"):
        plan = fuseplan.make_plan(model, device="test", patterns=[pattern])(X, Y)
    assert any("'gate' is not used" in n and "no such kernel" in n for n in plan.notes)


def test_a_replacement_that_does_not_lower_here_is_named_and_left_out():
    def elsewhere(x, y):
        def kernel(x_ref, y_ref, out_ref):
            out_ref[...] = gate(x_ref[...], y_ref[...])

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)

    pattern = Pattern("gate", gate, replacement=elsewhere)
    with pytest.warns(fuseplan.FuseplanWarning, match="'gate'"):
        got = fuseplan.jit(model, patterns=[pattern])(X, Y)
    np.testing.assert_allclose(got, model(X, Y), rtol=1e-6)


def test_a_pattern_that_matches_nothing_is_an_error_that_names_both():
    f = lambda x, y: jnp.sin(x) * y + y  # noqa: E731
    f.__name__ = "waves"
    for call in (fuseplan.jit(f, patterns=[GATE]), fuseplan.make_plan(f, device="test", patterns=[GATE])):
        with pytest.raises(PatternError, match=r"'gate' matches nothing in waves\. Nearest: gate: 2 of 3"):
            call(X, Y)
    quiet = Pattern("gate", gate, required=False)
    plan = fuseplan.make_plan(f, device="test", patterns=[quiet])(X, Y)
    assert any(n == "patterns that match nothing: gate" for n in plan.notes)


def test_a_replacement_for_another_platform_is_not_used():
    pattern = Pattern("gate", gate, replacement={"tpu": by_hand})
    plan = fuseplan.make_plan(model, device="h200", patterns=[pattern])(X, Y)
    assert all(node.op != "gate" for node in plan.graph.nodes)
    assert any("no replacement for gpu" in n for n in plan.notes)


def test_a_function_with_patterns_can_be_copied():
    fast = J(model, patterns=[GATE])
    np.testing.assert_allclose(copy.deepcopy(fast)(X, Y), model(X, Y), rtol=1e-6)


def test_without_patterns_nothing_of_theirs_is_run(monkeypatch):
    from fuseplan.patterns import choice

    def fail(*args, **kwargs):
        raise AssertionError("looked for patterns")

    monkeypatch.setattr(choice, "rewrite_closed", fail)
    np.testing.assert_allclose(J(model)(X, Y), model(X, Y), rtol=1e-6)
