"""Every kind of result and of rule under every transformation of JAX: ``fuseplan.jit`` has the outcome
of ``jax.jit``, in values, dtypes, weak types, pytrees, or the type of the error."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex_core
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fuseplan
from fuseplan.targets.calibrate import described_cpu
from tests.helpers.arrays import ramp
from tests.helpers.quickly import on_both

pytestmark = pytest.mark.usefixtures("compiled_quickly")

J = functools.partial(fuseplan.jit, device="test", planner="greedy")
X = ramp(-1.5, 2, 2, 3)
ON_HOST, ON_DEVICE = np.linspace(0.0, 1.0, 3, dtype=np.float32), ramp(1, 2, 3)

RESULTS = {
    "numbers": lambda x: {
        "y": x * x,
        "scale": 2.0,
        "n": 3,
        "flag": True,
        "none": None,
        "np": np.float32(1.5),
    },
    "nothing but numbers": lambda x: (1.0, 2, np.int8(3)),
    "constants": lambda x: (x * ON_HOST, ON_HOST, ON_DEVICE),
    "the argument": lambda x: (x, jnp.sin(x), x),
    "the argument alone": lambda x: x,
    "the same twice": lambda x: (lambda y: (y, y, {"again": y}))(jnp.tanh(x)),
    "integers": lambda x: (x * x, jnp.argmax(x), x > 0, jnp.round(x).astype(jnp.int32)),
    "integers alone": lambda x: jnp.argmax(x, -1),
    "complex": lambda x: (x + 1j * x) * x,
    "narrow": lambda x: (x.astype(jnp.bfloat16) * x, x.astype(jnp.float16).sum()),
    "empty": lambda x: (x[:0] * 2, jnp.zeros((0, 3)), x.sum()),
    "weak types": lambda x: (jnp.full(x.shape, 2.0) * 3, x.sum() * 2, 2.0 * jnp.arange(3) / 3),
    "stopped": lambda x: (lax.stop_gradient(x * x), x * lax.stop_gradient(jnp.sin(x))),
    "a key": lambda x: (x * x, jax.random.key(0)),
    "a token": lambda x: (x * x, lax.create_token(x)),
}


@jax.custom_jvp
def kinked(x):
    return jnp.maximum(x, 0)


kinked.defjvp(lambda x, t: (kinked(*x), jnp.where(x[0] > 0, 3.0, 0.5) * t[0]))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def applied(f, x):
    return f(x)


applied.defjvp(lambda f, x, t: (applied(f, *x), 2 * f(t[0])))


@jax.custom_jvp
def by_symbol(x, y):
    return x * y


@functools.partial(by_symbol.defjvp, symbolic_zeros=True)
def _by_symbol(primals, tangents):
    x, y = primals
    known = [t for t in tangents if type(t) is not jax.custom_derivatives.SymbolicZero]
    return x * y, 5 * len(known) * sum(known)


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -0.1, 0.1),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def applied_back(f, x):
    return f(x)


applied_back.defvjp(lambda f, x: (f(x), x), lambda f, x, g: (3 * f(x) * g,))


@jax.custom_vjp
def back_by_symbol(x, y):
    return x * y, x + y


def _forward_by_symbol(x, y):
    return (x.value * y.value, x.value + y.value), (x.perturbed, y.perturbed)


def _back_by_symbol(perturbed, cotangents):
    known = [g for g in cotangents if type(g) is not jax.custom_derivatives.SymbolicZero]
    return tuple((1 + i + 10 * p) * sum(known) for i, p in enumerate(perturbed))


back_by_symbol.defvjp(_forward_by_symbol, _back_by_symbol, symbolic_zeros=True)


def told_apart(cotangent=lambda g: g, **options):
    """Its forward rule differs from the function, so that results tell which of the two ran."""

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (10 * jnp.sin(x), jnp.cos(x)), lambda c, g: (cotangent(g * c),), **options)
    return f


@jax.custom_gradient
def scaled(x):
    return jnp.sin(x), lambda g: (g * 7,)


def converted(x):
    f, consts = jax.closure_convert(lambda y: y * jnp.sin(x), x)
    return applied_on(f, x, *consts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def applied_on(f, x, *consts):
    return f(x, *consts)


applied_on.defvjp(
    lambda f, x, *consts: (f(x, *consts), (x, consts)),
    lambda f, saved, g: (2 * g, *(3 * g * c for c in saved[1])),
)


@jax.custom_batching.custom_vmap
def by_rule(x):
    return jnp.sin(x)


by_rule.def_vmap(lambda n, batched, x: (3 * jnp.sin(x), True))


def named(policy):
    def f(x):
        inner = lambda x: jnp.sin(jax.ad_checkpoint.checkpoint_name(jnp.exp(x), "kept"))  # noqa: E731
        return jax.checkpoint(inner, policy=policy)(x)

    return f


def said(f):
    def g(x):
        jax.debug.callback(lambda y: None, x.sum())
        return f(x)

    return g


saved = jax.checkpoint_policies
RULES = {
    "custom_jvp": kinked,
    "custom_jvp of a function": lambda x: applied(jnp.sin, x) * x,
    "custom_jvp of symbolic zeros": lambda x: (by_symbol(x, x), by_symbol(x, ON_DEVICE)),
    "custom_vjp": lambda x: clipped(x) * 5,
    "custom_vjp of a function": lambda x: applied_back(jnp.sin, x) * x,
    "custom_vjp of symbolic zeros": lambda x: (back_by_symbol(x, x)[0], back_by_symbol(x, ON_DEVICE)),
    "custom_vjp of another dtype": told_apart(lambda g: g.astype(jnp.bfloat16)),
    "custom_vjp that is told apart": lambda x: told_apart()(x) * x,
    "custom_vjp for remat": lambda x: told_apart(optimize_remat=True)(x) * x,
    "the result of custom_vjp for remat": lambda x: jax.vjp(told_apart(optimize_remat=True), x)[0],
    "in a branch": lambda x: lax.cond(
        x[..., 0].sum() < 9, lambda x: jax.vjp(told_apart(optimize_remat=True), x)[0], jnp.cos, x
    ),
    "custom_gradient": scaled,
    "closure_convert": converted,
    "custom_vmap": by_rule,
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.exp(x))),
    "a name is saved": named(saved.save_only_these_names("kept")),
    "all is saved": named(saved.everything_saveable),
    "a name is moved": named(saved.save_anything_except_these_names("kept")),
    "scan": lambda x: lax.scan(lambda c, y: (c * jnp.cos(y), c), x[0], x),
    "while": lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x)),
    "a side effect": said(jnp.sin),
    "a side effect and custom_vjp": said(clipped),
    "a side effect and a number": said(lambda x: (jnp.sin(x), 1.0)),
}
FUNCTIONS = RESULTS | RULES


def total(result):
    leaves = [jnp.asarray(y) for y in jax.tree.leaves(result) if y is not None]
    leaves = [y for y in leaves if jnp.issubdtype(y.dtype, jnp.inexact)]
    return sum(jnp.sum(jnp.real(y).astype(jnp.float32) ** 2) for y in leaves)


def cotangents(result):
    def one(y):
        y = jnp.asarray(y)
        inexact = jnp.issubdtype(y.dtype, jnp.inexact)
        return jnp.ones_like(y) if inexact else np.zeros(y.shape, jax.dtypes.float0)

    return jax.tree.map(one, result)


def vjp(j, f):
    def g(x):
        y, back = jax.vjp(j(f), x)
        return y, back(cotangents(y))

    return g


def on_shards(j, f):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    shards = lambda x: jax.tree.map(jnp.atleast_1d, jax.value_and_grad(lambda x: total(j(f)(x)))(x))  # noqa: E731
    return jax.jit(jax.shard_map(shards, mesh=mesh, in_specs=P("d"), out_specs=P("d")))


TRANSFORMATIONS = {
    "jit": lambda j, f: j(f),
    "jit of jit": lambda j, f: jax.jit(lambda x: j(f)(x * 1)),
    "of a weak type": lambda j, f: lambda x: j(lambda s: f(s * X))(2.0),
    "eval_shape": lambda j, f: (
        lambda x: jax.tree.map(lambda s: (s.shape, str(s.dtype), s.weak_type), jax.eval_shape(j(f), x))
    ),
    "grad": lambda j, f: jax.grad(lambda x: total(j(f)(x))),
    "grad with results": lambda j, f: jax.grad(j(lambda x: (total(f(x)), f(x))), has_aux=True),
    "vjp": vjp,
    "jvp": lambda j, f: lambda x: jax.jvp(j(f), (x,), (x + 1,)),
    "jacfwd": lambda j, f: jax.jacfwd(j(f)),
    "hessian": lambda j, f: jax.hessian(lambda x: total(j(f)(x))),
    "vmap": lambda j, f: jax.vmap(j(f)),
    "vmap of vjp": lambda j, f: jax.vmap(vjp(j, f)),
    "checkpoint": lambda j, f: jax.value_and_grad(lambda x: total(jax.checkpoint(j(f))(x))),
    "jit of checkpoint": lambda j, f: jax.jit(vjp(lambda f: jax.checkpoint(j(f)), f)),
    "shard_map": on_shards,
    "scan": lambda j, f: lambda x: lax.scan(lambda c, x: (c, j(f)(x)), 0, jnp.stack([x, x]))[1],
    "cond": lambda j, f: lambda x: lax.cond(x[0, 0] < 0, lambda: j(f)(x), lambda: j(f)(x * 2)),
}


def outcome(f):
    """What calling it gives: pytree, and of each leaf shape, dtype, weak type, value; or an error's type."""
    try:
        leaves, tree = jax.tree.flatten(f())
    except Exception as error:
        return type(error).__name__, []
    return tree, leaves


def kind_of(leaf):
    """Shape, dtype and weak type of an array; another leaf as it is, or its type."""
    if isinstance(leaf, jax.Array):
        return jax.typeof(leaf)
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf)


def assert_same_outcome(got, want):
    (tree, some), (expected_tree, others) = got, want
    assert tree == expected_tree
    for one, other in zip(some, others, strict=True):
        assert kind_of(one) == kind_of(other)
        if isinstance(one, jax.Array) and not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            narrow = jnp.issubdtype(one.dtype, jnp.inexact) and one.dtype.itemsize < 4
            a, b = (np.asarray(y, np.float32) if narrow else np.asarray(y) for y in (one, other))
            np.testing.assert_allclose(a, b, rtol=2e-2 if narrow else 2e-5, atol=1e-2 if narrow else 2e-5)


UNDEFINED = {
    ("jacfwd", "custom_vmap"): "the rule calls the result batched where jacfwd wants it to be unbatched",
    (
        "hessian",
        "custom_vjp of symbolic zeros",
    ): "which error comes first depends on the order of transformations",
    ("hessian", "custom_vjp for remat"): "its forward rule and its function must agree, and here do not",
}
"""What JAX leaves open."""


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "transformation", on_both(TRANSFORMATIONS, ["grad with results", "vjp", "vmap", "jit of checkpoint"])
)
def test_the_outcome_is_that_of_jax(transformation, function):
    if (transformation, function) in UNDEFINED:
        pytest.skip(UNDEFINED[transformation, function])
    f = FUNCTIONS[function]
    x = jnp.stack([X, -X]) if "vmap" in transformation else X
    want = outcome(lambda: TRANSFORMATIONS[transformation](jax.jit, f)(x))
    assert_same_outcome(outcome(lambda: TRANSFORMATIONS[transformation](J, f)(x)), want)


@pytest.mark.slow
def test_effects_that_an_equation_cannot_carry_stay_with_jax():
    """A reference from outside is written to in the program around."""

    def f(ref, x):
        ref[...] += x
        return (clipped(x) * 5).sum()

    for j in (jax.jit, J):
        ref = jax.new_ref(jnp.ones(3))
        got = jax.grad(lambda x, j=j, ref=ref: j(f)(ref, lax.stop_gradient(x)) + (clipped(x) * 5).sum())(X[0])
        np.testing.assert_allclose(ref[...], 1 + X[0], rtol=1e-6)
        np.testing.assert_allclose(got, 0.1, rtol=1e-5)


def test_ordered_effects_keep_their_order_in_an_equation():
    heard = []

    def f(x):
        jax.debug.callback(lambda y: heard.append(float(y)), x[0, 0], ordered=True)
        y = clipped(x)
        jax.debug.callback(lambda y: heard.append(float(y)), y[0, 0] + 10, ordered=True)
        return y

    got = jax.jit(lambda x: J(f)(J(f)(x)))(X)
    jax.effects_barrier()
    assert heard == pytest.approx([-1.5, 10 + np.sin(-1.5), np.sin(-1.5), 10 + np.sin(np.sin(-1.5))])
    np.testing.assert_allclose(got, jnp.sin(jnp.sin(X)), rtol=1e-6)


@pytest.mark.parametrize(
    ("flag", "function"),
    [
        *(("jax_remat3", name) for name in ("checkpoint", "a name is saved", "custom_vjp", "custom_jvp")),
        *(("jax_custom_vjp3", name) for name in ("checkpoint", "custom_vjp")),
    ],
)
def test_high_level_types_are_lowered(flag, function):
    f = FUNCTIONS[function]
    before = getattr(jax.config, flag)
    try:
        jax.config.update(flag, True)
        for transformation in ("jit", "vjp", "vmap of vjp", "jvp", "jit of checkpoint"):
            x = jnp.stack([X, -X]) if "vmap" in transformation else X
            want = outcome(lambda: TRANSFORMATIONS[transformation](jax.jit, f)(x))  # noqa: B023
            assert_same_outcome(outcome(lambda: TRANSFORMATIONS[transformation](J, f)(x)), want)  # noqa: B023
    finally:
        jax.config.update(flag, before)


def test_a_linear_function_is_transposed():
    f = lambda w, x: (x @ w, 2 * x.sum())  # noqa: E731
    w = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)
    transposed = lambda j: jax.linear_transpose(functools.partial(j(f), w), X)((X + 1, 3.0))  # noqa: E731
    np.testing.assert_allclose(transposed(J)[0], transposed(jax.jit)[0], rtol=1e-6)


def test_checkpoint_bars_the_operands_it_is_asked_to():
    def loss(j):
        f = jax.checkpoint(lambda w, x: jnp.sin(x @ w), prevent_cse=(False, True))
        text = jax.jit(jax.grad(lambda w, x: j(f)(w, x).sum(), (0, 1))).lower(jnp.ones((3, 3)), X).as_text()
        lines = [line for line in text.splitlines() if "optimization_barrier" in line]
        return [line.partition(":")[2].count("tensor") for line in lines]

    assert loss(J) == loss(jax.jit) != []


def explicit(mesh):
    """Programs whose arrays are, or become, reduced or unreduced along axes of the mesh."""

    def product(x, y):
        z = jnp.einsum("ab,bc->ac", x, y, out_sharding=P("x", None, unreduced={"y"}))
        return jax.reshard(z, P("x", None))

    def of_reduced(x, y):
        y = jax.reshard(y, P(None, None, reduced={"x"}))
        return jnp.einsum("ab,bc->ac", jax.reshard(x, P("x", None)), y, out_sharding=P("x", None)).sum()

    return product, of_reduced, jax.grad(lambda x, y: product(x, y).sum()), jax.grad(of_reduced, 1)


@pytest.mark.slow
def test_axes_that_are_reduced_or_not_yet():
    mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(8.0).reshape(4, 2), P("x", "y"))
        y = jax.device_put(jnp.arange(8.0).reshape(2, 4), P("y", None))
        for f in explicit(mesh):
            assert_same_outcome(outcome(lambda: J(f)(x, y)), outcome(lambda: jax.jit(f)(x, y)))  # noqa: B023
        f = explicit(mesh)[0]
        got, want = (jax.grad(lambda x, y, j=j: j(f)(x, y).sum(), (0, 1))(x, y) for j in (J, jax.jit))
        for one, other in zip(got, want, strict=True):
            assert jax.typeof(one) == jax.typeof(other)
            np.testing.assert_array_equal(one, other)


def rows(q, k):
    """Attention of weak types all through."""
    scores = lax.dot_general(q, k, (((1,), (1,)), ((), ())))
    e = jnp.exp(scores - lax.reduce_max(scores, (1,))[:, None])
    return lax.dot_general(e / lax.reduce_sum(e, (1,))[:, None], k, (((1,), (0,)), ((), ())))


def replayed(closed, *args):
    """The equations inside of the outermost ``jit``, evaluated one by one."""
    return jex_core.jaxpr_as_fun(closed.eqns[0].params["jaxpr"])(*args)


WEAK_PATHS = {
    "eager": lambda j, q: j(rows)(q, q),
    "jit": lambda j, q: jax.jit(j(rows))(q, q),
    "a side effect": lambda j, q: j(said(lambda q: rows(q, q)))(q),
    "vjp": lambda j, q: jax.vjp(j(rows), q, q)[0],
    "vmap": lambda j, q: jax.vmap(j(rows), (0, None))(q[None], q),
    "a body": lambda j, q: j(lambda q: lax.scan(lambda c, _: (rows(c, q), None), q, length=2)[0])(q),
    "replayed": lambda j, q: replayed(jax.make_jaxpr(j(rows))(q, q), q, q),
}


@pytest.mark.parametrize("path", on_both(WEAK_PATHS, ["a side effect", "replayed"]))
def test_results_of_kernels_keep_their_weak_type(path):
    q = jnp.full((2048, 16), 0.5)
    fast = functools.partial(fuseplan.jit, device=described_cpu(), planner="greedy")
    assert "loops" in {k.spec.backend for k in fast(rows).plan(q, q).kernels}
    got, want = (jax.tree.leaves(WEAK_PATHS[path](j, q)) for j in (fast, jax.jit))
    assert [jax.typeof(y) for y in got] == [jax.typeof(y) for y in want]
    assert got[0].weak_type
