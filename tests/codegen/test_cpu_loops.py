"""Loop nests compute what XLA computes: in every loop order, with ragged tiles."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

import fuseplan
from fuseplan.targets.calibrate import described_cpu
from tests.helpers import random_programs
from tests.helpers.cpus import SERVER_CPU
from tests.helpers.nest_cases import (
    CASES,
    CT,
    HEADS,
    QKV,
    TILES,
    D,
    M,
    N,
    attention,
    masked,
    nearest,
    normal,
    with_gradient,
)
from tests.helpers.nests import assert_agrees, describe, function_of, specs_of
from tests.helpers.quickly import QUICKLY, on_both, run_quickly

QUICK = pytest.mark.usefixtures("compiled_quickly")
BOTH = ("attention", "gradient of masked", "cross_entropy_gradient", "gated", "nearest", "k_means")
BOTH += ("gradient of gaussian", "statistics", "monoids", "reductions", "late_factor", "partial_totals")


@QUICK
@pytest.mark.parametrize("name", on_both(CASES, BOTH))
def test_every_loop_order_agrees(name):
    f, args = CASES[name]
    with jax.enable_x64(True):
        heads = name in ("attention", "grouped", "gradient of attention")
        assert_agrees(f, *args, tiles={**(HEADS if heads else TILES), 40: 16})


SPOILED = ("masked -inf", "guarded_rows", "soft_minimum", "nearest", "k_means")
SPOILED += (
    "statistics",
    "late_factor",
    "cross_entropy_gradient",
    "reciprocal",
    "used_maximum",
    "shifted_twice",
)


@QUICK
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", on_both(SPOILED, ("masked -inf", "nearest")))
def test_one_element_that_is_no_number(name, bad):
    """What it spoils is not a number, and nothing else."""
    f, args = CASES[name]
    with jax.enable_x64(True):
        lowered, specs = specs_of(f, args, TILES)
        most = max(sum(axis.n_tiles > 1 for axis in spec.axes) for spec in specs)
        runs = [
            jax.jit(function_of(spec, lowered), compiler_options=QUICKLY)
            for spec in specs
            if sum(axis.n_tiles > 1 for axis in spec.axes) == most and not spec.keeps
        ]
        reference = jax.jit(f)
        for k, x in enumerate(args):
            if x.dtype.kind != "f":
                continue
            spoiled = x.copy()
            spoiled[tuple(min(2 + 7 * d, n - 1) for d, n in enumerate(x.shape))] = bad
            changed = [*args[:k], spoiled, *args[k + 1 :]]
            expected = jax.tree.leaves(reference(*changed))
            for run in runs:
                for got, y in zip(run(*lowered.consts, *changed), expected, strict=True):
                    np.testing.assert_allclose(got, y, 1e-9, 1e-11, err_msg=f"argument {k}")


@QUICK
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [pytest.param("float16", 4e-3, marks=pytest.mark.one_python), ("bfloat16", 4e-2), ("float32", 1e-5)],
)
@pytest.mark.slow
def test_floats(dtype, rtol):
    cast = lambda xs: [jnp.asarray(x, dtype) for x in xs]  # noqa: E731
    for f, args in [(masked(-np.inf), QKV), (with_gradient(attention), (*QKV, CT))]:
        assert_agrees(f, *cast(args), tiles=TILES, rtol=rtol, atol=rtol)
    f, args = CASES["gaussian"]
    assert_agrees(f, *cast(x * 0.3 for x in args), tiles=TILES, rtol=rtol, atol=rtol)


@QUICK
def test_sixteen_bit_values_stay_in_range():
    """What is divided by its norm afterwards would overflow before."""

    def f(x, y):
        z = (x[:, None] * y).astype(jnp.float32)
        r = jax.lax.rsqrt((z * z).mean(-1, keepdims=True))
        return (
            (z * r).astype(jnp.float16).sum(-1),
            (z.astype(jnp.float16) * r.astype(jnp.float16) * 64).sum(-1),
        )

    x, y = (np.float32(abs(normal(n)) * 200 + 50) for n in (M, N))
    assert_agrees(f, x, y, tiles=TILES, rtol=2e-2, atol=1e-3)


@QUICK
def test_sums_of_many_tiles_are_accurate():
    """The rounding error is bounded by the sum of what each loop and a tile add up, not by the product."""
    n_tiles, tile = (300, 290), 4
    x, y = (np.full(n * tile, 1 / 3, np.float32) for n in n_tiles)
    lowered, specs = specs_of(lambda x, y: (x[:, None] * y).sum(), (x, y), {x.size: tile, y.size: tile})
    exact = x.sum(dtype=np.float64) * y.sum(dtype=np.float64)
    both = [spec for spec in specs if sum(axis.n_tiles > 1 for axis in spec.axes) == 2]
    assert both
    for spec in both:
        (got,) = run_quickly(function_of(spec, lowered), x, y)
        bound = (sum(n_tiles) + tile * tile + 1) * np.finfo(np.float32).eps / 2
        assert abs(float(got) / exact - 1) <= bound, describe(spec, lowered)


@QUICK
def test_a_few_rows_are_combined_elementwise():
    """XLA:CPU may reduce them slowly; a long or the last dimension is reduced by its own operation."""

    def f(x, y):
        d = x[:, None] * y
        rows = jnp.stack([d, jnp.sin(d), jnp.cos(d), d * d, -d])
        extrema = rows.max(0).sum(1), rows.min(0).sum(1), rows.argmax(0).sum(1), rows.argmin(0).sum(1)
        return *extrema, rows.sum(0).max(1), rows.prod(0).min(1)

    x, y = normal(60), normal(33)
    x[3] = np.nan
    with jax.enable_x64(True):
        lowered, specs = assert_agrees(f, x, y, tiles={60: 8, 33: 16}, least=3)
        for spec in specs:
            text = str(jax.make_jaxpr(function_of(spec, lowered))(*lowered.consts, x, y))
            assert not re.search(r":f64\[[\d,]*\] = (reduce_(sum|max|min|prod))\[axes=\(0,\)", text)
            assert re.search(r" = reduce_max\[axes=\(1,\)", text)


@QUICK
def test_initial_values_of_the_user_count_once_in_every_loop_order():
    """No loop begins a reduction by the user's function again, whichever axes the loops around it have."""

    def add(a, b):
        return a[0] + b[0], a[1] + b[1]

    def f(x, y):
        e, d = jnp.exp(x), jnp.cos(x[:, None] - y)
        both = lax.reduce((d, d), (1000.0, 0.0), add, (0,))
        return (d * e[:, None]).sum(0), lax.reduce((e, e), (1000.0, 0.0), add, (0,)), both

    with jax.enable_x64(True):
        assert_agrees(f, normal(60), normal(33), tiles={60: 8, 33: 16}, least=3)


@QUICK
@pytest.mark.parametrize("dtype", ["int32", "uint8", "int16", "bool"])
def test_integers_are_exact(dtype):
    """Sums and products wrap around as they do in XLA; quotients do not commute with sums."""

    def f(x, y):
        z = x[:, None] ^ y
        many = z.sum(-1, dtype=z.dtype), z.max(), z.min(0), z.argmax(), z.argmin(-1), (z & 1).all(0)
        if dtype == "bool":
            return many, z.any(-1), z.all(), z.sum((0, 1))
        row = z.sum(-1, keepdims=True, dtype=z.dtype) | 1
        return (
            many,
            z.prod(0, dtype=z.dtype),
            (z // row).sum(-1),
            (z * row).sum(-1),
            z @ z.T.sum(1, dtype=z.dtype),
        )

    rng = np.random.default_rng(0)
    bits = 2 if dtype == "bool" else 8 * np.dtype(dtype).itemsize
    x, y = (rng.integers(0, 1 << min(bits, 63), n).astype(dtype) for n in (M, N))
    assert_agrees(f, x, y, tiles=TILES)


@QUICK
@pytest.mark.slow
def test_first_of_equals_and_of_nans():
    x, y = np.zeros((M, 3)), np.zeros((N, 3))
    y[[3, 6, 7, 20, 30]] = 1  # the first index within a tile, on an edge, in the overlap of the last
    x[4, 0] = np.nan
    with jax.enable_x64(True):
        assert_agrees(nearest, x, 1 - y, tiles=TILES)
        y[[13, 28]] = np.nan
        assert_agrees(nearest, x, y, tiles=TILES)


@pytest.mark.parametrize("name", ["argmin", "argmax"])
def test_a_nan_comes_first_though_the_extremum_beside_it_is_a_number(name):
    """On a CPU, XLA's minimum and maximum of a row may leave a NaN out, and its index must not."""
    extremum, sign = {"argmin": (jnp.min, 1), "argmax": (jnp.max, -1)}[name]

    def f(x, y):
        distance = sign * ((x[:, None] - y) ** 2).sum(-1)
        return getattr(jnp, name)(distance, 1), extremum(distance, 1)

    x, y = normal(1500, 4).astype("float32"), normal(900, 4).astype("float32")
    y[5, 0] = np.nan
    call = fuseplan.jit(f, device=SERVER_CPU)
    assert any(kernel.spec.capabilities.loop_nest for kernel in call.plan(x, y).kernels)
    np.testing.assert_array_equal(call(x, y)[0], np.full(1500, 5))


@QUICK
def test_functions_that_do_not_commute_combine_merged_axes_in_order():
    def then(first, second):
        return first[0] * second[0], first[1] * second[0] + second[1]

    def f(x, y):
        d = jnp.cos(x[:, :, None] * y)
        return lax.reduce((d.reshape(60, 33), d.reshape(60, 33)), (1.0, 0.0), then, (0,))

    with jax.enable_x64(True):
        assert_agrees(f, normal(6, 10), normal(33), tiles={6: 1, 10: 5, 33: 16})


@QUICK
def test_axes_of_one_and_sizes_below_the_tile():
    with jax.enable_x64(True):
        ones = normal(1, M, D), normal(1, N, D), normal(1, N, 1)
        assert_agrees(attention, *ones, tiles=TILES)
        assert_agrees(attention, *(normal(3, n, D) for n in (5, 7, 7)), tiles={5: 4, 7: 6})
        f, _ = CASES["gradient of gaussian"]
        assert_agrees(f, *(normal(*s) for s in ((1, 3), (N, 3), (N,), (1,))), tiles=TILES)


@QUICK
@pytest.mark.parametrize("tiles", [{M: 16, N: 32}, {M: 1, N: 1}, {M: 9, N: 17}, {M: 15, N: 2}])
@pytest.mark.parametrize(
    "name", on_both(("gradient of masked", "nearest", "cross_entropy_gradient"), ["nearest"])
)
def test_tiles(name, tiles):
    """One element over, single elements, two tiles that overlap, many small ones."""
    f, args = CASES[name]
    with jax.enable_x64(True):
        assert_agrees(f, *args, tiles=tiles)


@pytest.mark.parametrize(("size", "divides"), [(2002, True), (3000, True), (3001, False)])
def test_tiles_that_divide_an_axis_need_no_masks(size, divides):
    def forces(x):
        return jax.grad(lambda x: jnp.exp(-((x[:, None] - x[None]) ** 2).sum(-1)).sum())(x)

    x = jax.ShapeDtypeStruct((size, 3), "float32")
    call = fuseplan.jit(forces, device=described_cpu())
    (loop,) = [k.spec for k in call.plan(x).kernels if k.spec.capabilities.loop_nest]
    tiled = [axis for axis in loop.axes if axis.n_tiles > 1]
    assert tiled
    assert all(not axis.ragged for axis in tiled) == divides
    assert ("stablehlo.select" in call.lower(x).as_text()) != divides


@QUICK
def test_merged_axes():
    """A reshape merges what others have apart: outermost parts are cut."""

    def f(x, y):
        z = jnp.sin(x[:, :, None] + y)  # [3, M, N]
        flat = z.reshape(3 * M, N)
        p = jax.nn.softmax(flat, -1)
        return (p * y).sum(-1).reshape(3, M), jnp.exp(flat - flat.max(-1, keepdims=True)).sum(-1)

    with jax.enable_x64(True):
        assert_agrees(f, normal(3, M), normal(N), tiles=HEADS, least=3)


@QUICK
@pytest.mark.slow
def test_runs_operation_by_operation():
    f, args = CASES["gradient of masked"]
    with jax.enable_x64(True):
        lowered, specs = specs_of(f, args, TILES)
        with jax.disable_jit():
            got = function_of(specs[-1], lowered)(*map(jnp.asarray, (*lowered.consts, *args)))
        for x, y in zip(got, jax.jit(f)(*args), strict=True):
            np.testing.assert_allclose(x, y, 1e-9, 1e-11)


def test_views_that_are_not_contiguous():
    n = 1024
    x, y = np.float32(normal(2 * n, 3))[::2], np.float32(normal(3, n)).T
    f, _ = CASES["gaussian"]
    got = fuseplan.jit(f, device="cpu")(x, y, y[:, 0])
    np.testing.assert_allclose(got, jax.jit(f)(x, y, y[:, 0]), 2e-4, 1e-4)


@QUICK
@pytest.mark.one_python
@settings(max_examples=15)
@given(st.data())
@pytest.mark.slow
def test_random_programs(data):
    """``random_programs``: chains, masks, reductions over either axis, products, softmaxes, lookups."""
    length = data.draw(st.integers(3, 9))

    def pick(options):
        return data.draw(st.sampled_from(options))

    f, text = random_programs.random_program(pick, length, of_loops=True)
    args = normal(M, 1), normal(1, N), normal(M, N)
    with jax.enable_x64(True):
        try:
            assert_agrees(f, *args, tiles=TILES, rtol=1e-7, atol=1e-9, least=0)
        except AssertionError as error:
            raise AssertionError("\n".join(text)) from error
