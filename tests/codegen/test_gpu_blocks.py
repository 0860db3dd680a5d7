"""Blocks of GPU kernels: no dimension of one, sums combined late, NaN as XLA has it, products in halves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import fuseplan
from fuseplan.codegen.triton.unit_dims import without_unit_dims
from fuseplan.extend import emit
from fuseplan.frontend.ops import composed
from fuseplan.workloads import functions, make_args, of_shapes

SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -1.5, 1e-40, -1e-40, 3e38, -3e38]


def kernels(f: Any, *args: Any) -> list[Any]:
    """The jaxprs of the Triton kernels of a plan for an H200."""
    plan = fuseplan.make_plan(f, device="h200")(*args)
    found = []
    for kernel in plan.kernels:
        if kernel.spec.backend == "triton":
            reads = dict.fromkeys(read.value for read in kernel.spec.reads)
            avals = [plan.lowered.avals[v] for v in reads]
            whole = jax.make_jaxpr(emit(kernel.spec, plan.lowered))(*avals)
            found += [e.params["jaxpr"] for e in whole.eqns if e.primitive.name == "pallas_call"]
    return found


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in inner(eqn):
            yield from equations(sub)


def inner(eqn: Any) -> list[Any]:
    nested = [p for p in eqn.params.values() if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
    return [getattr(p, "jaxpr", p) for p in nested]


def loops(jaxpr: Any) -> list[Any]:
    return [sub for e in equations(jaxpr) if e.primitive.name in ("scan", "while") for sub in inner(e)]


def shape_args(**sizes: int) -> Any:
    shape = "batch tokens heads width"
    return of_shapes(functions.causal_attention, shape, shape, shape)("bfloat16", **sizes)


def test_attention_computes_on_blocks_of_rank_two():
    f, shapes = shape_args(batch=2, tokens=512, heads=4, width=64)
    (kernel,) = kernels(f, *shapes)
    moves = {"masked_load", "load", "get", "swap", "masked_swap", "reshape"}
    computed = [
        v.aval.shape
        for loop in loops(kernel)
        for eqn in equations(loop)
        if eqn.primitive.name not in moves
        for v in eqn.outvars
        if type(v.aval) is jax.core.ShapedArray
    ]
    assert len([shape for shape in computed if len(shape) == 2]) > 8
    assert max(map(len, computed)) == 2


def test_what_blocks_of_rank_two_compute_is_the_same():
    f, shapes = shape_args(batch=2, tokens=130, heads=3, width=16)
    args = make_args(shapes)
    plan = fuseplan.make_plan(f, device="h200")(*args)
    assert any(k.spec.backend == "triton" for k in plan.kernels)
    got, want = (np.asarray(x, np.float32) for x in (plan.run(*args), jax.jit(f)(*args)))
    np.testing.assert_allclose(got, want, atol=0.02)


def body(x_ref: Any, y_ref: Any, out_ref: Any, sums_ref: Any) -> None:
    """Operations that keep, drop, add and move dimensions of one, in a loop and outside."""
    x = x_ref[...]  # (1, 8, 1, 4)
    y = jnp.transpose(x, (2, 1, 0, 3)) * 2.0 + x.sum(axis=(0, 2), keepdims=True)
    at = lax.broadcasted_iota(jnp.int32, x.shape, 1) + lax.broadcasted_iota(jnp.int32, x.shape, 2)
    y = jnp.where(at > 2, y, y_ref[...].reshape(1, 8, 1, 1))
    joined = lax.concatenate([y[..., None], x[..., None]], 4).sum(axis=4)

    def turn(k: Any, carry: Any) -> Any:
        total, least = carry
        return total + joined * k, jnp.minimum(least, joined.min(axis=1, keepdims=True))

    total, least = lax.fori_loop(0, 3, turn, (jnp.zeros_like(x), jnp.full((1, 1, 1, 4), jnp.inf)))
    size, _ = lax.while_loop(lambda c: c[0].sum() < 50.0, lambda c: (c[0] + 7.0, c[1]), (jnp.ones((1, 1)), 0))
    out_ref[...] = total - least
    sums_ref[...] = (total.sum(axis=(0, 1, 2), keepdims=True) + size.reshape(1, 1, 1, 1)).reshape(1, 4)


def test_operations_without_unit_dims():
    rng = np.random.default_rng(2)
    args = rng.standard_normal((1, 8, 1, 4), np.float32), rng.standard_normal((8, 1), np.float32)
    out = jax.ShapeDtypeStruct((1, 8, 1, 4), np.float32), jax.ShapeDtypeStruct((1, 4), np.float32)

    def call(kernel: Any) -> Any:
        return pl.pallas_call(kernel, out_shape=out, interpret=True)

    (traced,) = jax.make_jaxpr(call(body))(*args).eqns
    short = without_unit_dims(traced.params["jaxpr"])
    for got, want in zip(call(short)(*args), call(body)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    (again,) = jax.make_jaxpr(call(short))(*args).eqns
    ranks = [len(v.aval.shape) for loop in loops(again.params["jaxpr"]) for v in loop.outvars]
    assert max(ranks) == 2


def test_sums_are_combined_after_the_loop():
    x = jax.ShapeDtypeStruct((4096, 16384), "float32")
    (kernel,) = kernels(lambda x: (x.sum(0), jnp.exp(x).sum(0)), x)
    (loop,) = loops(kernel)
    assert "reduce_sum" not in [e.primitive.name for e in equations(loop)]
    assert [e.primitive.name for e in kernel.eqns].count("reduce_sum") == 2


@pytest.mark.parametrize("rows", [4097, 5000, 8192])
def test_several_turns_at_once_leave_no_tile_out(rows):
    x = np.random.default_rng(rows).standard_normal((rows, 140), np.float32)

    def f(x: Any) -> Any:
        return x.sum(0), x.max(0), (x * x).mean(0)

    plan = fuseplan.make_plan(f, device="h200")(x)
    for got, want in zip(plan.run(x), f(x.astype(np.float64)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("largest", [True, False])
def test_integers_of_the_order_of_floats(largest):
    x = jnp.array(SPECIAL, jnp.float32)
    ordered = np.asarray(composed.as_ordered_integers(x, nan_is_largest=largest))
    back = np.asarray(composed.from_ordered_integers(jnp.asarray(ordered), jnp.float32))
    is_nan = np.isnan(SPECIAL)
    assert np.isnan(back[is_nan]).all()
    assert back[~is_nan].tobytes() == np.asarray(x)[~is_nan].tobytes()
    assert (np.argsort(ordered[~is_nan]) == np.lexsort((np.signbit(x[~is_nan]) * -1, x[~is_nan]))).all()
    nans, numbers = ordered[is_nan], ordered[~is_nan]
    assert nans.min() > numbers.max() if largest else nans.max() < numbers.min()


def test_extrema_return_nan_even_if_the_operation_ignores_it(monkeypatch):
    monkeypatch.setattr(composed.jnp, "maximum", jnp.fmax)
    monkeypatch.setattr(composed.jnp, "minimum", jnp.fmin)
    normal = [x for x in SPECIAL if not 0 < abs(x) < 1e-30]  # a CPU flushes others to zero
    a, b = (jnp.array(x.ravel(), jnp.float32) for x in np.meshgrid(normal, normal))
    np.testing.assert_array_equal(composed.propagating_maximum(a, b), np.maximum(a, b))
    np.testing.assert_array_equal(composed.propagating_minimum(a, b), np.minimum(a, b))


def test_no_kernel_reduces_floats_by_an_extremum_that_ignores_nan():
    def f(x: Any) -> Any:
        return jnp.clip(jnp.maximum(x, 0), 0, 1).sum(1), x.max(1), x.min(1), lax.cummax(x, 1)

    names = [
        (e.primitive.name, str(e.invars[0].aval.dtype))
        for kernel in kernels(f, jax.ShapeDtypeStruct((64, 128), "float32"))
        for e in equations(kernel)
    ]
    assert ("reduce_max", "int32") in names
    assert ("reduce_min", "int32") in names
    assert not {("reduce_max", "float32"), ("reduce_min", "float32"), ("clamp", "float32")}.intersection(
        names
    )


def test_halves_of_float32():
    x = np.concatenate([np.random.default_rng(0).standard_normal(1000), SPECIAL]).astype(np.float32)
    upper, lower = (np.asarray(half, np.float32) for half in composed.bfloat16_halves(jnp.asarray(x)))
    is_finite = np.isfinite(x)
    np.testing.assert_array_equal(upper[~is_finite], x[~is_finite])
    assert not lower[~is_finite].any()
    off = np.abs(upper[is_finite].astype(np.float64) + lower[is_finite] - x[is_finite])
    assert (off <= np.abs(x[is_finite]) * 2.0**-15 + 1e-38).all()
    assert (np.signbit(lower) == np.signbit(x))[is_finite & (lower != 0)].all()


def test_float32_times_bfloat16_is_as_exact_as_tf32_and_keeps_infinities():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((64, 100)).astype(np.float32)
    w = rng.standard_normal((100, 72)).astype(np.float32)
    x[3, 5], x[7, 2], x[10] = np.inf, np.nan, 0
    w[8, 4], w[50, 10] = np.inf, -np.inf
    w = jnp.asarray(w, jnp.bfloat16)

    def f(x: Any, w: Any) -> Any:
        return lax.dot_general(jnp.abs(x), w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    plan = fuseplan.make_plan(f, device="h200")(x, w)
    assert [k.spec.backend for k in plan.kernels] == ["triton"]
    dots = [e for k in kernels(f, x, w) for e in equations(k) if e.primitive.name == "dot_general"]
    assert [str(v.aval.dtype) for e in dots for v in e.invars] == ["bfloat16"] * 4
    got, want = np.asarray(plan.run(x, w)), np.asarray(jax.jit(f)(x, w))
    is_finite = np.isfinite(want)
    assert 0 < is_finite.sum() < want.size
    np.testing.assert_array_equal(got[~is_finite], want[~is_finite])
    with np.errstate(invalid="ignore"):
        exact = np.abs(x.astype(np.float64)) @ np.asarray(w, np.float64)
    got, exact = got[is_finite], exact[is_finite]
    assert np.abs(got - exact).max() < 2.0**-14 * np.sqrt(np.mean(exact**2))
