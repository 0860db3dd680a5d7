"""Where a wrapper of ``jax.jit`` goes wrong in silence: custom rules, constants under
differentiation, settings of equations, batching, donation, effects."""

from __future__ import annotations

import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import fuseplan
from fuseplan.runtime import executor, primitive

pytestmark = pytest.mark.usefixtures("compiled_quickly")

J = functools.partial(fuseplan.jit, device="test")


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@jax.custom_batching.custom_vmap
def plus_one(x):
    return x + 1


plus_one.def_vmap(lambda n, batched, x: (x + 100, True))

GRADIENTS = {
    "softplus": (lambda x: jax.nn.softplus(x).sum(), jnp.asarray(np.float32([0, 1000, -1000]))),
    "relu at zero": (lambda x: jax.nn.relu(x).sum(), jnp.zeros(3)),
    "custom_vjp": (lambda x: (clipped(x) * 5).sum(), jnp.ones(3)),
    "checkpoint": (lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x).sum(), jnp.ones(3)),
    "norm of a constant": (lambda x: (x * jnp.linalg.norm(jnp.zeros(3))).sum(), jnp.ones(3)),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_use_custom_rules(name, outer):
    f, x = GRADIENTS[name]
    np.testing.assert_array_equal(jax.grad(outer(J(f)))(x), jax.grad(jax.jit(f))(x))


def test_checkpoint_survives_an_outer_gradient():
    f, x = GRADIENTS["checkpoint"]
    # Only the argument is kept, and XLA must not merge what is computed again with what was.
    assert [leaf.shape for leaf in jax.tree.leaves(jax.vjp(J(f), x)[1])] == [(3,)]
    assert "optimization_barrier" in jax.jit(jax.grad(J(f))).lower(x).as_text()


def test_constants_are_not_differentiated():
    c, x = jnp.zeros(3), jnp.ones(3)
    f = J(lambda x, y: x + jnp.sqrt(y))
    np.testing.assert_array_equal(jax.jvp(lambda x: f(x, c), (x,), (x,))[1], 1.0)


def test_custom_batching_rule():
    np.testing.assert_array_equal(jax.vmap(J(plus_one))(jnp.zeros(3)), 100.0)


def test_unbatched_results_stay_unbatched():
    f = lambda a, b: (a * b.sum(), b)  # noqa: E731
    args = jnp.ones((3, 4)), jnp.ones(3)
    got = jax.vmap(J(f), in_axes=(1, None), out_axes=(1, None))(*args)
    assert [g.shape for g in got] == [(3, 4), (3,)]


def test_settings_of_equations_are_kept():
    def draw(key):
        with jax.threefry_partitionable(False):
            return jax.random.uniform(key, (7,))

    key = jax.random.key(0)
    np.testing.assert_array_equal(J(draw)(key), jax.jit(draw)(key))


def test_keys_of_literals():
    def f(x):
        return x + jax.random.uniform(jax.random.PRNGKey(0), x.shape) + jax.random.normal(jax.random.key(1))

    np.testing.assert_array_equal(J(f)(jnp.ones(3)), jax.jit(f)(jnp.ones(3)))


@pytest.mark.parametrize("order", ["fused outside", "fused inside"])
def test_shard_map_with_literals(order):
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("d")
    wrap = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    f = lambda x: x * 2 + 1.0  # noqa: E731
    fast = J(wrap(f)) if order == "fused outside" else wrap(J(f))
    np.testing.assert_array_equal(fast(jnp.ones((8, 8))), 3.0)


def test_checking_respects_donation_tracers_and_effects(monkeypatch):
    monkeypatch.setenv("FUSEPLAN_CHECK", "1")
    np.testing.assert_array_equal(J(lambda a: a * 2, donate_argnums=0)(jnp.arange(9.0)), 2 * jnp.arange(9.0))
    np.testing.assert_array_equal(jax.grad(lambda x: J(lambda y: y * 2)(x).sum())(jnp.ones(3)), 2.0)
    called = []
    shape = jax.ShapeDtypeStruct((), "float32")
    J(lambda x: jax.experimental.io_callback(lambda v: called.append(v) or np.float32(0), shape, x))(1.0)
    assert len(called) == 1


def test_check_finds_a_wrong_result(monkeypatch):
    monkeypatch.setenv("FUSEPLAN_CHECK", "1")
    fast = J(lambda x: x * 2)
    fast._jitted = jax.jit(lambda x: x * 3)
    with pytest.raises(fuseplan.MismatchError, match="elements beyond"):
        fast(jnp.ones(3))


def test_a_fused_function_of_a_fused_function_has_its_own_device():
    inner = fuseplan.jit(jnp.sin, device="h200")
    inner.plan(jnp.ones(3))
    assert fuseplan.jit(inner, device="tpu_v5e").plan(jnp.ones(3)).device.name == "tpu_v5e"


def test_static_pytrees_keep_their_identity():
    @jax.tree_util.register_pytree_node_class
    class Static:
        extra = 5

        def tree_flatten(self):
            return (), None

        @classmethod
        def tree_unflatten(cls, _, children):
            raise AssertionError("a static argument must not be rebuilt")

    got = J(lambda x, s: x * s.extra, static_argnums=1)(jnp.ones(3), Static())
    np.testing.assert_array_equal(got, 5.0)


def test_symbolic_shapes_export():
    from jax import export

    x = jax.ShapeDtypeStruct(export.symbolic_shape("n, 4"), "float32")
    exported = export.export(jax.jit(J(jnp.tanh)))(x)
    np.testing.assert_allclose(exported.call(jnp.ones((3, 4))), np.tanh(1.0), rtol=1e-6)


def test_dump_to_a_file_is_a_warning(monkeypatch, tmp_path):
    target = tmp_path / "file"
    target.write_text("mine")
    monkeypatch.setenv("FUSEPLAN_DUMP", str(target))
    with pytest.warns(fuseplan.FuseplanWarning, match="not kept"):
        J(lambda x: x + 1)(jnp.ones(3))
    assert target.read_text() == "mine"


def test_peers_are_names_of_planners():
    with pytest.raises(fuseplan.InvalidArgumentError, match=r"such as \['xla'\], got 'xla'"):
        fuseplan.jit(jnp.tanh, peers="xla")
    with pytest.raises(fuseplan.FuseplanError, match="Did you mean 'greedy'"):
        fuseplan.jit(jnp.tanh, peers=["greedi"])


@pytest.mark.parametrize("planner", [["solver"], None, 3])
def test_planner_must_be_a_name(planner):
    with pytest.raises(fuseplan.InvalidArgumentError, match="one planner"):
        fuseplan.jit(jnp.tanh, planner=planner)


def test_containers_without_arrays_are_passed_on():
    def f(x, options, more, *, none, empty):
        assert (options, more, none, empty) == ({}, ((), {}), None, [])
        return x + 1

    np.testing.assert_array_equal(J(f)(1, {}, ((), {}), none=None, empty=[]), 2)


def depends_on_a_value(params, x):
    return x if params["w"].sum() > 0 else -x


def returns_text(x):
    return "text"


@pytest.mark.parametrize("f", [depends_on_a_value, returns_text])
def test_errors_while_tracing_are_those_of_jax_with_its_frames(f):
    args = ({"w": jnp.ones(3)}, 1.0) if f is depends_on_a_value else (1.0,)
    seen = []
    for jit in (jax.jit, J):
        with pytest.raises(TypeError) as caught:
            jit(f)(*args)
        frames = [(frame.path, frame.lineno) for frame in caught.traceback[1:]]
        seen.append((caught.type, str(caught.value), frames))
    assert seen[0] == seen[1]


def test_arguments_that_are_not_used_are_not_inputs():
    def f(x, unused, y):
        return x + y

    args = 1.0, np.ones(9), 2.0
    ours, theirs = (jit(f).lower(*args).compile().memory_analysis() for jit in (J, jax.jit))
    assert ours.argument_size_in_bytes == theirs.argument_size_in_bytes == 8
    np.testing.assert_array_equal(J(f)(*args), 3)


def test_a_function_is_traced_once_for_all_uses():
    traces = []

    def f(x):
        traces.append(x)
        return x * 2

    for fast in (J(f), J(f)):
        for use in (fast, fast.eval_shape, fast.lower, fast):
            use(1.0)
    assert len(traces) == 1


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="caches of JAX keep constants of jaxprs")
def test_nothing_keeps_a_dropped_function_alive():
    x = jnp.ones(10)
    fast = J((lambda x: lambda y: x + y)(x))
    fast(1.0)
    x = weakref.ref(x)
    del fast
    assert x() is None


def test_attributes_of_the_function_and_of_what_jax_jit_returns():
    def f(x):
        return x

    f.version = 3
    fast = J(f)
    assert fast.version == 3
    fast(1)
    assert fast._cache_size() == 1
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(fast, "nothing")  # noqa: B009


def test_a_device_of_jax_is_where_the_function_runs():
    device = jax.devices()[-1]
    with pytest.warns(DeprecationWarning, match="device"):  # jax.jit's
        fast = fuseplan.jit(lambda x: x * 2, device=device)
    assert fast(1.0).devices() == {device}
    assert fast.plan(1.0).device.name == "cpu"


def fails(*_, **__):
    raise ZeroDivisionError("no such luck")


def test_a_failure_of_the_planner_is_a_warning(monkeypatch):
    monkeypatch.setattr(primitive, "planned", fails)
    fast = J(lambda x: jnp.tanh(x) + 1)
    with pytest.warns(fuseplan.FuseplanWarning, match="not be planned.*ZeroDivisionError: no such luck"):
        result = fast(1.0)
    np.testing.assert_allclose(result, np.tanh(1.0) + 1, rtol=1e-6)
    np.testing.assert_allclose(fast(1.0), result)
    np.testing.assert_allclose(jax.jit(fast)(2.0), np.tanh(2.0) + 1, rtol=1e-6)
    with pytest.raises(ZeroDivisionError):
        J(lambda x: jnp.tanh(x) + 2, strict=True)(1.0)


def test_a_failure_of_emission_is_a_warning(monkeypatch):
    def smoothed(x, w):
        return jnp.exp(-((x[:, None] - x[None]) ** 2)) @ w

    monkeypatch.setattr(executor, "emit", lambda *_, **__: fails)
    args = jnp.linspace(0, 1, 3000), jnp.ones((3000, 16))
    with pytest.warns(fuseplan.FuseplanWarning, match="not be emitted.*ZeroDivisionError: no such luck"):
        result = fuseplan.jit(smoothed)(*args)
    np.testing.assert_allclose(result, smoothed(*args), rtol=1e-4)
    with pytest.raises(ZeroDivisionError):
        fuseplan.jit(lambda *args: smoothed(*args) + 1, strict=True)(*args)


def test_the_compiled_program_names_the_users_lines():
    def f(x):
        return jnp.tanh(x) + 1

    line = f.__code__.co_firstlineno + 1
    text = fuseplan.jit(f).lower(1.0).as_text(debug_info=True)
    assert f'test_semantics.py":{line}' in text
