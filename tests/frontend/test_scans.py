"""Scans stack nothing that is only reduced, and slice nothing that is the same in each step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fuseplan
from fuseplan.frontend import scans as scans_module
from fuseplan.frontend.scans import with_lean_scans
from fuseplan.frontend.trace import evaluator, trace

X = jnp.asarray(np.random.default_rng(0).standard_normal((7, 5, 3)), "float32")


def mapped(x):
    return lax.map(jnp.tanh, x)


def running(x):
    def step(c, row):
        c = 0.5 * c + row
        return c, (c, c > 0, c.sum(), (4 * c).astype("int32"))

    return lax.scan(step, jnp.zeros(x.shape[1:], x.dtype), x)


def mean_gradient(x):
    """The mean of the gradients of batches, as of a large batch in parts."""
    w = x[0].T

    def gradient(batch):
        return jax.grad(lambda w: (jnp.tanh(batch @ w) ** 2).sum())(w)

    return lax.map(gradient, x).mean(0)


@pytest.fixture(autouse=True)
def every_stack_is_large(monkeypatch):
    monkeypatch.setattr(scans_module, "LEAST_BYTES", 0)


LEAN = {
    "sum": lambda x: mapped(x).sum(0),
    "sum of all": lambda x: mapped(x).sum(),
    "mean": lambda x: mapped(x).mean((0, 2)),
    "extrema": lambda x: (mapped(x).max(0), mapped(x).min((0, 1))),
    "several of one": lambda x: (lambda y: (y.sum(0), y.max(0), y.min((0, 1, 2))))(mapped(x)),
    "product": lambda x: lax.map(lambda r: 1 + r / 8, x).prod(0),
    "with the carry": lambda x: (lambda c, ys: (c, ys[0].sum(0), ys[2].sum()))(*running(x)),
    "one of several": lambda x: (lambda c, ys: (ys[0].sum(0), ys[3], ys[1]))(*running(x)),
    "booleans counted": lambda x: running(x)[1][1].sum(0),
    "integers": lambda x: (running(x)[1][3].sum(0), running(x)[1][3].max()),
    "from the end": lambda x: lax.scan(lambda c, r: (c + 1, c * r), 0.0, x, reverse=True)[1].sum(0),
    "unrolled": lambda x: lax.scan(lambda c, r: (c, r * r), 0.0, x, unroll=2)[1].sum(0),
    "gradients": mean_gradient,
    "in a scan": lambda x: lax.map(lambda row: mapped(row).sum(0), x).sum(0),
    "complex": lambda x: lax.map(lambda r: jnp.exp(1j * r), x).sum(0),
}


def scans(flat):
    return [eqn for eqn in flat.equations if eqn.primitive.name == "scan"]


def stacked(flat):
    """The shapes of what the scans stack."""
    return [
        aval.shape
        for eqn in scans(flat)
        for aval in eqn.out_avals
        if aval.shape[:1] == (eqn.params["length"],) and eqn.params["length"] == len(X)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LEAN)
def test_the_results_are_the_same(name, dtype):
    f, x = LEAN[name], X.astype(dtype)
    flat = trace(f, x)
    lean = with_lean_scans(flat)
    assert len(stacked(lean)) < len(stacked(flat))
    assert with_lean_scans(lean) is lean
    run = evaluator(lean.equations, lean.inputs, lean.outputs)
    for got, want in zip(run(*flat.consts, x), jax.tree.leaves(f(x)), strict=True):
        assert (got.shape, got.dtype, got.weak_type) == (want.shape, want.dtype, want.weak_type)
        tolerance = 2e-2 if got.dtype == "bfloat16" else 2e-6
        scale = float(jnp.abs(want).max()) or 1.0
        np.testing.assert_allclose(
            np.asarray(got, "complex64"), np.asarray(want, "complex64"), tolerance, tolerance * scale
        )


KEPT = {
    "a result": lambda x: (lambda y: (y, y.sum(0)))(mapped(x)),
    "read otherwise": lambda x: (lambda y: (y.sum(0), y[0]))(mapped(x)),
    "reduced within a step": lambda x: mapped(x).sum(1),
    "positions": lambda x: mapped(x).argmax(0),
    "quantified": lambda x: running(x)[1][1].any(0),
    "with side effects": lambda x: lax.map(lambda r: (jax.debug.print("{}", r[0, 0]), r)[1], x).sum(0),
    "no scan": lambda x: jnp.tanh(x).sum(0),
    "complex extrema": lambda x: lax.map(lambda r: r + 1j, x).max(0),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_else_needs_a_stack_keeps_it(name):
    flat = trace(KEPT[name], X)
    assert with_lean_scans(flat) is flat


def test_sums_of_16_bits_are_rounded_once():
    x = jnp.ones((1000, 4), "bfloat16")
    got = jax.jit(evaluator(*(lambda p: (p.equations, p.inputs, p.outputs))(
        with_lean_scans(trace(lambda x: lax.map(lambda r: r, x).sum(0), x)))))(x)  # fmt: skip
    np.testing.assert_array_equal(got[0], jnp.full(4, 1000, "bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_sum_of_many_steps_is_as_exact_as_one_of_a_stack(dtype):
    x = jnp.full((100_000, 2), 0.1, dtype)
    f = lambda x: lax.map(lambda r: r * 1, x).sum(0)  # noqa: E731
    exact = 100_000 * np.float64(np.float32(0.1))
    np.testing.assert_allclose(fuseplan.jit(f)(x), exact, 1e-6)
    in_order = lax.scan(lambda c, r: (c + r, None), jnp.zeros(2, dtype), x)[0]
    assert abs(in_order[0] - exact) > 1e-4 * exact  # each addition rounds to the same side


def test_numbers_that_are_none_stay_so():
    x = X.at[3, 1, 2].set(jnp.nan).at[0, 0, 0].set(jnp.inf).at[1, 1, 1].set(-jnp.inf)
    for f in (lambda x: lax.map(lambda r: r, x).sum(0), lambda x: lax.map(lambda r: r, x).max(0)):
        np.testing.assert_allclose(fuseplan.jit(f)(x), jax.jit(f)(x), 1e-6)


def test_an_array_that_is_the_same_in_each_step_is_passed_once():
    def gradient(w, x):
        return jax.grad(lambda w: lax.map(lambda r: jnp.tanh(r * w), x).sum())(w)

    w = X[0]
    flat = trace(gradient, w, X)
    lean = with_lean_scans(flat)
    assert len(lean.equations) <= len(flat.equations) + 3
    sizes = [sum(a.size for a in eqn.in_avals) for eqn in scans(flat)]
    assert sum(sum(a.size for a in eqn.in_avals) for eqn in scans(lean)) < sum(sizes)
    np.testing.assert_allclose(fuseplan.jit(gradient)(w, X), gradient(w, X), 1e-5)


def test_small_stacks_stay(monkeypatch):
    monkeypatch.undo()
    for rows, is_lean in ((7, False), (9, True)):
        flat = trace(LEAN["sum"], jax.ShapeDtypeStruct((rows, 1_000_000), "float32"))
        assert (with_lean_scans(flat) is not flat) == is_lean


def test_nothing_is_stacked_in_memory():
    x = jax.ShapeDtypeStruct((64, 100_000), "float32")
    f = fuseplan.jit(lambda x: lax.map(jnp.sin, x).mean(0))
    assert f.lower(x).compile().memory_analysis().temp_size_in_bytes < x.size
    assert "but scans stack nothing that is only reduced" in f.plan(x).notes[-1]
    y = jnp.asarray(np.random.default_rng(1).standard_normal((64, 1000)), "float32")
    np.testing.assert_allclose(f(y), jnp.sin(y).mean(0), 1e-4, 1e-6)
    ct = jax.grad(lambda y: f(y).sum())(y)
    np.testing.assert_allclose(ct, jnp.cos(y) / 64, 1e-5, 1e-7)
    np.testing.assert_allclose(jax.vmap(f)(y[None])[0], f(y), 1e-5, 1e-6)
