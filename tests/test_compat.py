"""The private names of JAX that are relied on, on each supported version."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fuseplan import _compat


def traced():
    def f(x):
        return jnp.tanh(x) + jax.jit(lambda y: y * 2)(x)

    return jax.make_jaxpr(f)(jnp.ones(3))


def test_source_line_names_the_users_frame():
    assert "test_compat.py" in _compat.source_line(traced().jaxpr.eqns[0].source_info)


def test_scope_names_are_those_of_the_user():
    def f(x):
        with jax.named_scope("block"), jax.named_scope("attention"):
            return jnp.tanh(x)

    for g in (f, lambda x: jax.jvp(f, (x,), (x,)), jax.vmap(f)):
        tanh = jax.make_jaxpr(g)(jnp.ones(3)).jaxpr.eqns[0]
        assert _compat.scope_names(tanh.source_info) == ("block", "attention")
    assert _compat.scope_names(jax.make_jaxpr(jnp.tanh)(1.0).jaxpr.eqns[0].source_info) == ()


def test_unspecified_shardings_are_recognised():
    inner = next(e for e in traced().jaxpr.eqns if "jaxpr" in e.params)
    assert _compat.all_unspecified(inner.params["in_shardings"])
    mesh = jax.make_mesh((1,), ("x",))
    given = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert not _compat.all_unspecified((given,))


def test_eval_jaxpr_evaluates():
    closed = traced()
    (result,) = _compat.eval_jaxpr(closed.jaxpr, closed.consts, jnp.ones(3))
    assert jnp.allclose(result, jnp.tanh(1.0) + 2)


def test_calls_inside_transformations_are_not_eager():
    seen = []

    def f(x):
        seen.append(_compat.is_eager())
        return x

    f(1.0), jax.jit(f)(1.0), jax.vmap(f)(jnp.ones(2)), jax.grad(f)(1.0)
    assert seen == [True, False, False, False]
    assert _compat.is_eager()


def test_optimization_barrier_is_the_primitive_of_lax():
    closed = jax.make_jaxpr(jax.lax.optimization_barrier)(jnp.ones(3))
    assert closed.jaxpr.eqns[0].primitive is _compat.optimization_barrier_p
