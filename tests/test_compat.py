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


def test_the_interpreter_of_mosaic_gpu_looks_for_races():
    """The other names of Mosaic GPU are run in tests/test_emit_mosaic_gpu.py and compiled in tests/aot."""
    assert _compat.interpret_gpu(detect_races=True).detect_races
    assert not _compat.interpret_gpu(detect_races=False).detect_races


def test_optimization_barrier_is_the_primitive_of_lax():
    closed = jax.make_jaxpr(jax.lax.optimization_barrier)(jnp.ones(3))
    assert closed.jaxpr.eqns[0].primitive is _compat.optimization_barrier_p
