"""Tracing inlines what can be inlined, keeps what must be kept, and loses no value."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuseplan.frontend.lower import lower
from fuseplan.frontend.simplify import fold, folded
from fuseplan.frontend.trace import Literal, evaluator, trace
from fuseplan.runtime.executor import make_runner
from fuseplan.settings import make_options
from tests.helpers.arrays import ramp
from tests.helpers.plans import plan_traced

X = ramp(-2, 2, 4, 6)


def names(f, *args):
    return [eqn.primitive.name for eqn in trace(f, *args).equations]


def test_nested_calls_are_inlined():
    @jax.custom_jvp
    def double(x):
        return x * 2

    double.defjvp(lambda p, t: (double(*p), t[0] * 2))

    @jax.custom_vjp
    def triple(x):
        return x * 3

    triple.defvjp(lambda x: (triple(x), None), lambda _, g: (g * 3,))
    f = jax.jit(lambda x: jax.checkpoint(jax.jit(jnp.tanh))(double(x)) + triple(x))
    assert names(f, X) == ["mul", "tanh", "mul", "add"]


def test_dead_equations_are_dropped_but_effects_are_kept():
    def f(x):
        jnp.exp(x)
        jax.debug.print("{}", x[0, 0])
        return x + 1

    found = names(f, X)
    assert ("exp" not in found and "debug_print" in found) or "debug_callback" in found


def test_scalars_of_literals_are_folded():
    def f(x):
        return jnp.var(x, axis=-1, ddof=1)

    scalars = [e for e in fold(trace(f, X)).equations if e.out_avals[0].ndim == 0]
    assert scalars == []
    np.testing.assert_allclose(run(f, X), jnp.var(X, axis=-1, ddof=1), rtol=1e-6)


def test_empty_arrays_are_left_out_of_concatenations():
    def f(x, empty):
        pair = jnp.concatenate([empty, x, x[:0], x + 1])
        alone = jnp.concatenate([x[2:2], x])
        return pair, alone * 2, alone, jnp.concatenate([empty, x[:0]]), jax.lax.associative_scan(jnp.add, x)

    x = jnp.arange(21.0).reshape(3, 7)
    traced = trace(f, x, x[:0])
    found = [e for e in fold(traced).equations if e.primitive.name == "concatenate"]
    sizes = [[aval.shape[0] for aval in e.in_avals] for e in found]
    assert sizes[:2] == [[3, 3], [0, 0]]
    assert all(0 not in own for own in sizes[2:])
    for got, expected in zip(run(f, x, x[:0]), f(x, x[:0]), strict=True):
        np.testing.assert_array_equal(got, expected)
    for device in ("h200", "tpu_v5e"):
        lowered, plan = plan_traced(traced, make_options(device))
        got = make_runner(lowered, plan, platform="cpu", interpret=True)(x, x[:0])
        for a, b in zip(got, f(x, x[:0]), strict=True):
            np.testing.assert_array_equal(a, b)


def test_reductions_of_single_elements_are_reshapes_as_xla_has_them():
    """A zero keeps its sign."""

    def f(x):
        return x.sum(1), x.max(1), jnp.all(x > 0, 1), x.sum(0)

    x = np.float32([[-0.0], [np.nan], [2]])
    flat = fold(trace(f, x))
    reduced = [e for e in flat.equations if e.primitive.name.startswith("reduce")]
    assert [e.params["axes"] for e in reduced] == [(0,)]
    got = jax.jit(evaluator(flat.equations, flat.inputs, flat.outputs))(x)
    for ours, theirs in zip(got, jax.jit(f)(x), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(np.copysign(1, ours), np.copysign(1, theirs))


def test_the_same_twice_is_one_operation():
    def f(x, y):
        mask = jnp.arange(3) > 0, jnp.arange(3) > 0
        kept = [jnp.where(m, x, 0.0) for m in mask]
        return jnp.exp(x) + y, jnp.exp(x) - y, x > 0.0, x > -0.0, x > y, y > x, *kept, jnp.exp(x)

    x, y = jnp.asarray([[0.0, jnp.nan, -2.0]]), jnp.ones((1, 3))
    traced = trace(f, x, y)
    lowered = lower(traced)
    ops = [node.op for node in lowered.graph.nodes]
    assert ops.count("exp") == 1
    assert ops.count("gt") == 6  # of equal zeros and equal masks, too: each reader makes its own positions
    lowered, plan = plan_traced(traced, make_options("h200"))
    got = make_runner(lowered, plan, platform="cpu", interpret=True)(x, y)
    for a, b in zip(got, f(x, y), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_inner_jaxpr_may_be_inlined_many_times():
    inner = jax.jit(lambda x, y: jnp.sin(x) + y)

    def f(x):
        return inner(inner(inner(x, x), x), x)

    assert names(f, X).count("sin") == 3
    np.testing.assert_allclose(run(f, X), f(X), rtol=1e-6)


def test_recomputation_of_a_checkpoint_is_kept_apart():
    """Without the barrier XLA merges the recomputed values with the saved ones."""
    f = jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum())
    found = names(f, X)
    assert found.count("optimization_barrier") == 1
    assert found.count("sin") >= 1


def test_shardings_of_an_inner_jit_are_not_lost():
    mesh = jax.make_mesh((1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    f = lambda x: jax.jit(lambda x: x * 2, in_shardings=sharding)(x) + 1  # noqa: E731
    assert names(f, X)[0] in ("pjit", "jit")
    np.testing.assert_allclose(run(f, X), X * 2 + 1)


def test_sources_are_the_users_lines():
    jax.clear_caches()  # JAX remembers where the jitted functions in softmax and var first saw a shape.
    equations = trace(lambda x: jax.nn.softmax(x) + jnp.var(x), X).equations
    assert all("test_trace.py" in e.source for e in equations)


def test_literal_and_repeated_outputs():
    traced = trace(lambda x: (x, 2.5, x), X)
    assert traced.outputs[0] == traced.outputs[2]
    assert isinstance(traced.outputs[1], Literal)


@pytest.mark.parametrize("error", [ValueError, ZeroDivisionError])
def test_errors_of_the_function_pass_unchanged(error):
    def f(x):
        raise error("mine")

    with pytest.raises(error, match="mine"):
        trace(f, X)


def run(f, *args):
    """The flattened equations, one kernel each."""
    lowered, plan = plan_traced(trace(f, *args), make_options("test", "unfused"))
    results = make_runner(lowered, plan, platform="cpu")(*lowered.consts, *jax.tree.leaves(args))
    return jax.tree.unflatten(lowered.out_tree, results)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8", "bool", "bfloat16", "float16"])
def test_a_folded_literal_has_the_bits_that_the_primitive_gives(dtype):
    """NumPy folds what it folds as XLA does: ties, overflow, infinities and division by zero included."""
    names = ("add", "sub", "mul", "neg", "eq", "ne", "lt", "le", "gt", "ge", "div", "sqrt", "max")
    numbers = [0, 1, 2, 3, 0.1, -0.7, 1e-3, 3e38, 200, 2**31 - 1, float("inf"), float("nan")]
    whole = dtype in ("int32", "uint8", "bool")
    most = 255 if dtype == "uint8" else 2**31 - 1
    numbers = [n for n in numbers if not whole or (n == n and n == abs(n) // 1 and n <= most)]
    with jax.enable_x64(True), np.errstate(all="ignore"):
        aval = jax.typeof(np.zeros((), dtype))
        for name in names:
            arity = 1 if name in ("neg", "sqrt") else 2
            undefined = (("div", "sqrt") if whole else ()) + (names[:4] if dtype == "bool" else ())
            if name in undefined:
                continue
            primitive = getattr(jax.lax, f"{name}_p")
            for values in itertools.product(numbers, repeat=arity):
                literals = [Literal(np.asarray(v).astype(dtype)[()], aval) for v in values]
                want = np.asarray(primitive.bind(*(v.val for v in literals)))
                got = folded(primitive, literals, {}, want.dtype)
                got, want = (np.asarray(x, "float64") for x in (got, want))
                np.testing.assert_array_equal(got, want, f"{name}{values}")


def test_a_weak_literal_is_folded_in_the_type_of_its_aval():
    aval = jax.typeof(np.float32(0))
    third = Literal(0.1, aval)  # as a Python number it is not 0.1 in float32
    assert folded(jax.lax.eq_p, [third, Literal(np.float32(0.1), aval)], {}, np.dtype("bool"))
