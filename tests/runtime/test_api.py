"""``fuseplan.jit`` is a citizen of JAX: it composes, and gives JAX's own results."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from fuseplan import extend
from fuseplan.support.errors import FuseplanError, InvalidArgumentError, UnknownNameError
from tests.helpers.arrays import normal


def layernorm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + bias


def arrays(*shapes, dtype="float32", seed=0):
    return [normal(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


def assert_same(got, want, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        assert g.shape == w.shape
        np.testing.assert_allclose(np.asarray(g, "float64"), np.asarray(w, "float64"), rtol=rtol, atol=1e-5)


X, S, B = arrays((6, 33), (33,), (33,))
plan_for_test = functools.partial(fuseplan.jit, device="test")


def test_result_structure_and_dtypes_are_those_of_jax():
    def f(tree, n):
        return {"a": [tree["x"] * 2, None], "b": (tree["n"] + n, jnp.int8(3))}

    args = ({"x": X, "n": jnp.arange(3)}, 4)
    assert_same(plan_for_test(f)(*args), jax.jit(f)(*args))


def batched(f):
    """Over rows of ``x`` alone, at the other arguments' own shapes."""
    return jax.vmap(f, (0, None, None))


def total(f):
    return lambda *args: (f(*args) ** 2).sum()


TRANSFORMS = {
    "jit": jax.jit,
    "vmap": batched,
    "jit of vmap": lambda f: jax.jit(batched(f)),
    "vmap of vmap": lambda f: (
        lambda x, s, b: jax.vmap(batched(f), (None, 0, 0))(x, jnp.stack([s, 2 * s]), jnp.stack([b, b]))
    ),
    "grad": lambda f: jax.grad(total(f), argnums=(0, 1, 2)),
    "jit of value_and_grad": lambda f: jax.jit(jax.value_and_grad(total(f), argnums=(0, 2))),
    "vmap of grad": lambda f: batched(jax.grad(total(f))),
    "hessian": lambda f: jax.hessian(total(f)),
    "jacfwd": jax.jacfwd,
    "checkpoint": jax.checkpoint,
    "jvp": lambda f: lambda *args: jax.jvp(f, args, args),
    "linearize": lambda f: lambda *args: jax.linearize(f, *args)[1](*args),
}


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_composes_outside(name):
    args = (X[:3, :5], S[:5], B[:5])
    transform = TRANSFORMS[name]
    assert_same(transform(plan_for_test(layernorm))(*args), transform(layernorm)(*args), rtol=1e-4)


def test_composes_inside():
    def loss(x, s, b):
        def inner(row):
            return jax.jit(layernorm)(row, s, b)

        value, grads = jax.value_and_grad(lambda x: (jax.vmap(inner)(x) ** 2).sum())(x)
        return jax.lax.cond(value > 0, lambda: grads, lambda: -grads), jax.lax.map(jnp.sum, x)

    assert_same(plan_for_test(loss)(X, S, B), jax.jit(loss)(X, S, B))


def test_nested_fused_function_is_seen_through():
    inner = plan_for_test(layernorm)

    def outer(x, s, b):
        return jnp.tanh(inner(x, s, b))

    plan = fuseplan.make_plan(outer, device="test")(X, S, B)
    assert len(plan.kernels) == 1
    assert_same(plan_for_test(outer)(X, S, B), jax.jit(outer)(X, S, B))


def test_static_and_donated_arguments():
    def f(x, n, *, flip):
        return jnp.tanh(x) * n if flip else x

    fast = plan_for_test(f, static_argnums=1, static_argnames="flip")
    want = jax.jit(f, static_argnums=1, static_argnames="flip")
    assert_same(fast(X, 3, flip=True), want(X, 3, flip=True))
    assert_same(fast(X, 3, flip=False), want(X, 3, flip=False))
    donated = X + 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The CPU may refuse a donation.
        plan_for_test(lambda x: x + 1, donate_argnums=0)(donated)
    assert donated.is_deleted() == jax_deletes_donated()


def jax_deletes_donated() -> bool:
    x = X + 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    return x.is_deleted()


def test_decorator_and_method():
    class Model:
        @functools.partial(fuseplan.jit, device="test", static_argnums=0)
        def __call__(self, x):
            return jnp.tanh(x)

    assert_same(Model()(X), jnp.tanh(X))

    @fuseplan.jit(device="test", planner="greedy")
    def double(x):
        """Doubles."""
        return x * 2

    assert double.__doc__ == "Doubles."
    assert double.__name__ == "double"
    assert_same(double(X), X * 2)


def test_one_trace_per_shape():
    traces = []

    @functools.partial(fuseplan.jit, device="test")
    def f(x):
        traces.append(x.shape)
        return x + 1

    for _ in range(3):
        f(X), f(X[:2])
    seen = len(traces)
    f(X), f(X[:2])
    assert len(traces) == seen


def test_shape_structs_are_enough_for_a_plan():
    x = jax.ShapeDtypeStruct((128, 512), "bfloat16")
    plan = fuseplan.jit(jax.nn.softmax, device="h200").plan(x)
    assert len(plan.kernels) == 1
    assert plan.status == "OPTIMAL"
    assert plan.gap == 0.0


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 1), (), (1,)])
def test_degenerate_shapes(shape):
    def f(x):
        return jnp.tanh(x).sum(), x * 2, x.reshape(-1)

    x = jnp.ones(shape)
    assert_same(plan_for_test(f)(x), jax.jit(f)(x))


def test_outputs_that_are_inputs_constants_or_nothing():
    def f(x):
        return x, 3.0, jnp.arange(4), x

    assert_same(plan_for_test(f)(X), jax.jit(f)(X))
    assert plan_for_test(lambda x: ())(X) == ()
    assert plan_for_test(lambda: 1.5)() == 1.5
    assert_same(plan_for_test(lambda: jnp.zeros(3))(), jnp.zeros(3))


def test_closed_over_tracers_and_constants():
    table = jnp.arange(33.0)

    @jax.jit
    def outer(x, y):
        return plan_for_test(lambda z: z * y + table)(x)

    assert_same(outer(X, S), X * S + table)


def test_side_effects_stay_in_order(capfd):
    def f(x):
        jax.debug.print("first {}", x[0, 0], ordered=True)
        y = jnp.tanh(x)
        jax.debug.print("second {}", y[0, 0], ordered=True)
        return y

    assert_same(plan_for_test(f)(X), jnp.tanh(X))
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert printed.index("first") < printed.index("second")


def test_special_values_are_kept():
    x = jnp.array([[jnp.nan, jnp.inf, -jnp.inf, 0.0, 1.0]] * 3)
    got, want = plan_for_test(jax.nn.softmax)(x), jax.jit(jax.nn.softmax)(x)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


def test_environment_switches(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("FUSEPLAN_DISABLE", "1")
    monkeypatch.setenv("FUSEPLAN_DUMP", str(tmp_path))
    plan_for_test(lambda x: x + 1)(X)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("FUSEPLAN_DISABLE", "0")
    monkeypatch.setenv("FUSEPLAN_DEBUG", "4")
    monkeypatch.setenv("FUSEPLAN_CHECK", "1")
    plan_for_test(lambda x: x + 1)(X)
    (dumped,) = tmp_path.iterdir()
    assert fuseplan.Plan.from_json(dumped.read_text()).device.name == "test"
    assert "kernel" in capfd.readouterr().err


def test_errors_of_the_function_are_those_of_jax():
    def broken(x):
        return x + jnp.ones(7)

    with pytest.raises((TypeError, ValueError)) as want:
        jax.jit(broken)(X)
    with pytest.raises(want.type) as got:
        plan_for_test(broken)(X)
    assert str(got.value) == str(want.value)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        plan_for_test(lambda x: 1 if x.sum() > 0 else 2)(X)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"device": "h20"}, UnknownNameError, "h200"),
        ({"device": 3}, InvalidArgumentError, "DeviceSpec"),
        ({"planner": "solvr"}, UnknownNameError, "solver"),
        ({"deadline_s": -1}, InvalidArgumentError, "seconds"),
        ({"deadline_s": "soon"}, InvalidArgumentError, "seconds"),
        ({"deadline_s": float("nan")}, InvalidArgumentError, "seconds"),
    ],
)
def test_bad_options_name_the_remedy(options, error, says):
    with pytest.raises(error, match=says) as raised:
        fuseplan.jit(jnp.tanh, **options)
    assert isinstance(raised.value, FuseplanError)


def test_bad_function():
    with pytest.raises(InvalidArgumentError, match="Expected a callable value, got 3 of type int"):
        fuseplan.jit(3)


def test_strict_names_the_primitive_and_the_line():
    def f(x):
        return jnp.linalg.cholesky(x @ x.T + 9 * jnp.eye(len(x)))

    with pytest.raises(fuseplan.UnsupportedOperationError, match=r"'cholesky'.*test_api.py"):
        fuseplan.jit(f, device="test", strict=True)(X)
    plan = fuseplan.make_plan(f, device="test")(X)
    assert any("cholesky has no rule" in note for note in plan.notes)
    assert_same(plan_for_test(f)(X), jax.jit(f)(X))


def test_deadline_of_zero_is_a_legal_plan():
    plan = fuseplan.make_plan(layernorm, device="test", deadline_s=0)(X, S, B)
    assert plan.status in ("FEASIBLE", "OPTIMAL")
    assert plan.notes
    assert_same(plan_for_test(layernorm, deadline_s=0)(X, S, B), jax.jit(layernorm)(X, S, B))


def test_compare_has_a_row_a_planner():
    frame = fuseplan.compare(layernorm, device="test", planners=("unfused", "greedy", "solver"))(X, S, B)
    assert list(frame["planner"]) == ["unfused", "greedy", "solver"]
    assert frame["time_us"].is_monotonic_decreasing


def test_a_lowered_program_is_planned_as_often_as_one_likes():
    program = extend.lower(extend.trace(layernorm, X, S, B))
    names = ("greedy", "solver")
    plans = [fuseplan.make_plan(program, device="test", planner=name)() for name in names]
    for name, plan in zip(names, plans, strict=True):
        other = fuseplan.make_plan(layernorm, device="test", planner=name)(X, S, B)
        assert (plan.kernels, plan.bound_ps, plan.proof) == (other.kernels, other.bound_ps, other.proof)
    np.testing.assert_allclose(plans[1].run(X, S, B), layernorm(X, S, B), rtol=1e-4, atol=1e-5)
    frames = [
        fuseplan.compare(f, device="test", planners=names)(*args)
        for f, args in ((program, ()), (layernorm, (X, S, B)))
    ]
    one, other = (frame.drop(columns="planning_s") for frame in frames)
    assert one.equals(other)
    with pytest.raises(InvalidArgumentError, match="pass it instead of its lowered program"):
        fuseplan.compare(program, measure=True)
    with pytest.raises(InvalidArgumentError, match=r"strict is an option of fuseplan\.extend\.lower"):
        fuseplan.make_plan(program, strict=True)


def test_a_plan_runs_in_the_interpreter():
    plan = fuseplan.make_plan(layernorm, device="h200")(X, S, B)
    (kernel,) = plan.kernels
    assert kernel.spec.backend == "triton"
    for interpret in (False, True):
        run = functools.partial(plan.run, interpret=interpret)
        assert ("pallas_call" in str(jax.make_jaxpr(run)(X, S, B))) == interpret
    np.testing.assert_allclose(plan.run(X, S, B, interpret=True), layernorm(X, S, B), rtol=1e-4, atol=1e-5)


def test_equal_kernels_do_the_same_with_other_arrays():
    def layers(x):
        for _ in range(3):
            x = jnp.tanh(x @ x)
        return jnp.sin(x @ x)

    plan = fuseplan.make_plan(layers, device="h200", planner="unfused")(jnp.ones((256, 256)))
    groups = [[plan.to_frame().ops[k] for k in group] for group in plan.equal_kernels]
    assert groups == [["dot_general"] * 4, ["tanh"] * 3, ["sin"]]


def test_kernels_of_an_absent_device_run_as_xla():
    assert_same(fuseplan.jit(layernorm, device="tpu_v5e")(X, S, B), jax.jit(layernorm)(X, S, B))
