"""The private names of JAX that are relied on, on each supported version."""

from __future__ import annotations

import jax
import jax.extend
import jax.interpreters.partial_eval
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from fuseplan.support import jax_compat


def traced():
    def f(x):
        return jnp.tanh(x) + jax.jit(lambda y: y * 2)(x)

    return jax.make_jaxpr(f)(jnp.ones(3))


def test_source_line_names_the_users_frame():
    assert "test_jax_compat.py" in jax_compat.source_line(traced().jaxpr.eqns[0].source_info)


def test_scope_names_are_those_of_the_user():
    def f(x):
        with jax.named_scope("block"), jax.named_scope("attention"):
            return jnp.tanh(x)

    for g in (f, lambda x: jax.jvp(f, (x,), (x,)), jax.vmap(f)):
        tanh = jax.make_jaxpr(g)(jnp.ones(3)).jaxpr.eqns[0]
        assert jax_compat.scope_names(tanh.source_info) == ("block", "attention")
    assert jax_compat.scope_names(jax.make_jaxpr(jnp.tanh)(1.0).jaxpr.eqns[0].source_info) == ()


def test_unspecified_shardings_are_recognised():
    inner = next(e for e in traced().jaxpr.eqns if "jaxpr" in e.params)
    assert all(map(jax_compat.is_unspecified, inner.params["in_shardings"]))
    mesh = jax.make_mesh((1,), ("x",))
    given = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert not jax_compat.is_unspecified(given)


def test_primitives_are_found_by_name():
    found = jax_compat.primitives()
    for f in (
        jnp.sin,
        lambda x: x @ x,
        lambda x: jnp.split(x, 2),
        lambda x: jax.random.normal(jax.random.key(0)),
    ):
        for eqn in jax.make_jaxpr(f)(jnp.ones((2, 2))).jaxpr.eqns:
            assert found[eqn.primitive.name] is eqn.primitive


def test_a_jaxpr_is_made_of_its_parts():
    closed = jax.make_jaxpr(lambda x, y: jnp.sin(x) * y)(1.0, 2.0)
    (sin, mul), jaxpr = closed.jaxpr.eqns, closed.jaxpr
    parts = [jax_compat.make_eqn(e.invars, e.outvars, e.primitive, e.params) for e in (sin, mul)]
    made = jax_compat.make_jaxpr([], jaxpr.invars, jaxpr.outvars, parts)
    (result,) = jax_compat.eval_jaxpr(made, [], 1.0, 2.0)
    assert result == jnp.sin(1.0) * 2
    jax.extend.core.check_jaxpr(made)


def test_key_dtypes_are_found_by_their_text():
    assert jax_compat.key_dtypes()["key<fry>"] == jax.random.key(0).dtype


def test_what_an_inner_jit_was_not_told_is_recognised():
    params = jax.make_jaxpr(jax.jit(jnp.sin))(1.0).jaxpr.eqns[0].params
    assert jax_compat.is_unspecified(params["in_shardings"][0])
    assert not jax_compat.is_unspecified(None)
    mesh = params["ctx_mesh"]
    assert jax_compat.empty_mesh(type(mesh).__name__) == mesh


def test_eval_jaxpr_evaluates():
    closed = traced()
    (result,) = jax_compat.eval_jaxpr(closed.jaxpr, closed.consts, jnp.ones(3))
    assert jnp.allclose(result, jnp.tanh(1.0) + 2)


def test_calls_inside_transformations_are_not_eager():
    seen = []

    def f(x):
        seen.append(jax_compat.is_eager())
        return x

    f(1.0), jax.jit(f)(1.0), jax.vmap(f)(jnp.ones(2)), jax.grad(f)(1.0)
    assert seen == [True, False, False, False]
    assert jax_compat.is_eager()


def test_the_interpreter_of_mosaic_gpu_looks_for_races():
    """The other names of Mosaic GPU are run in tests/codegen/test_mosaic_gpu.py and compiled in tests/aot."""
    assert jax_compat.interpret_gpu(detect_races=True).detect_races
    assert not jax_compat.interpret_gpu(detect_races=False).detect_races


def test_optimization_barrier_is_the_primitive_of_lax():
    closed = jax.make_jaxpr(jax.lax.optimization_barrier)(jnp.ones(3))
    assert closed.jaxpr.eqns[0].primitive is jax_compat.optimization_barrier_p


def test_collectives_name_their_axes():
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.psum(x, "i"), axis_env=[("i", 2)])(1.0).jaxpr
    assert len(jax_compat.axis_effects(jaxpr.effects)) == 1
    assert jax_compat.axis_effects(jaxpr.effects, "i") == jaxpr.effects
    assert not jax_compat.axis_effects(jaxpr.effects, "j")


def test_what_differs_between_shards_is_seen_and_said():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, seen = jax.sharding.PartitionSpec, []

    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    copied = pl.pallas_call(copy, jax.ShapeDtypeStruct((3,), "float32"), interpret=True)

    def f(x):
        same = jnp.zeros(3)
        differs = jax_compat.varying(same, jax.typeof(x))
        seen.extend(jax_compat.varying_axes(jax.typeof(a)) for a in (x, same, differs))
        with pytest.raises(ValueError, match="vma"):
            copied(same)
        with jax_compat.same_in_all_shards():
            copied(same)
        return x

    jax.make_jaxpr(jax.shard_map(f, mesh=mesh, in_specs=spec("d"), out_specs=spec("d")))(jnp.ones(3))
    assert seen == [{"d"}, set(), {"d"}]


def test_a_batch_axis_in_front():
    aval = jax_compat.with_leading(jax.typeof(jnp.ones((3, 4), jnp.int32)), 5)
    assert (aval.shape, aval.dtype) == ((5, 3, 4), jnp.int32)


def test_dead_code_is_replaced_by_rule():
    primitive = jax.extend.core.Primitive("pair_of_tests")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda x: [x, x])
    asked = []
    jax_compat.register_dead_code(primitive, lambda used, eqn: (asked.append(used), ([True], eqn))[1])
    closed = jax.make_jaxpr(lambda x: primitive.bind(x)[0])(1.0)
    jax.interpreters.partial_eval.dce_jaxpr(closed.jaxpr, [True])
    assert [list(used) for used in asked] == [[True, False]]


def test_closed_jaxprs_stay_as_they_are():
    closed = traced()
    assert jax_compat.closed(closed) is closed
    assert jax_compat.closed(closed.jaxpr).jaxpr is closed.jaxpr


def test_a_jaxpr_as_it_is_compiled_is_without_dead_code():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (jnp.cos(x), x), lambda x, g: (g,), optimize_remat=True)
    table = jnp.arange(3.0)
    closed = jax.make_jaxpr(lambda x, unused: (jax.vjp(f, x)[0], jnp.exp(x), table)[::2])(table + 1, 2.0)
    low, consts = jax_compat.as_compiled(closed)
    assert "sin" in str(low)
    assert "cos" not in str(low)
    assert "exp" not in str(low)
    assert (len(low.invars), len(low.outvars)) == (2, 2)
    assert len(consts) == len(low.constvars) == 1


def test_high_level_types_are_lowered_by_rule():
    plain = jax.make_jaxpr(jnp.sin)(1.0)
    assert not jax_compat.is_high(plain.jaxpr)
    assert not jax_compat.is_high(jax.typeof(1.0))
    assert jax_compat.as_compiled(plain)[0] is plain.jaxpr
    primitive = jax.extend.core.Primitive("pair_in_high_types")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda x, high: [x, x])
    rule = lambda x, high: [x, jnp.cos(x)]  # noqa: E731
    jax_compat.register_low(primitive, rule, lambda aval, high: high)
    low = jax.make_jaxpr(lambda x: primitive.bind(x, high=False))(1.0)
    assert not jax_compat.is_high(low.jaxpr)
    closed = jax.make_jaxpr(lambda x: primitive.bind(x, high=True))(1.0)
    assert jax_compat.is_high(closed.jaxpr)
    jaxpr, _ = jax_compat.as_compiled(closed)
    assert not jax_compat.is_high(jaxpr)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["cos"]


def test_effects_that_an_equation_can_carry():
    def prints(x):
        jax.debug.callback(lambda y: None, x, ordered=True)
        return jax.lax.psum(x, "i")

    def writes(ref):
        ref[...] += 1.0

    def keeps(x):
        ref = jax.new_ref(x)
        ref[...] += 1.0
        return ref[...]

    assert jax_compat.can_carry(jax.make_jaxpr(prints, axis_env=[("i", 2)])(1.0).jaxpr.effects)
    assert jax_compat.can_carry(jax.make_jaxpr(keeps)(1.0).jaxpr.effects)
    assert not jax_compat.can_carry(jax.make_jaxpr(writes)(jax.new_ref(1.0)).jaxpr.effects)


def test_where_numpy_arrays_are_put():
    device = jax.devices()[-1]
    for chosen in (None, "cpu", device):
        with jax.default_device(chosen):
            x = jnp.asarray(np.ones(3))
            assert x.sharding == jax.sharding.SingleDeviceSharding(jax_compat.default_device())
    assert type(x) is jax_compat.array_type()
