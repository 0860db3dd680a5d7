"""Functions that a backend lacks, composed of those it has: accuracy against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fuseplan.frontend.ops import composed

pytestmark = pytest.mark.one_python

# Units in the last place that the docstrings promise.
PROMISED = {
    "sinh": (np.sinh, 6), "cosh": (np.cosh, 4), "asinh": (np.arcsinh, 4), "acosh": (np.arccosh, 4),
    "atanh": (np.arctanh, 4), "asin": (np.arcsin, 4), "acos": (np.arccos, 4), "atan": (np.arctan, 6),
    "cbrt": (np.cbrt, 2), "log1p": (np.log1p, 5), "sqrt": (np.sqrt, 3), "floor": (np.floor, 0),
    "ceil": (np.ceil, 0),
}  # fmt: skip
SPECIAL = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -1.0, 2.0, -2.0], np.float32)


@pytest.mark.parametrize("name", PROMISED)
def test_accuracy(name):
    exact, units = PROMISED[name]
    rng = np.random.default_rng(0)
    large = np.exp(rng.uniform(-80, 80, 30_000))
    x = np.concatenate([large, -large, 1 + large, rng.uniform(-1, 1, 30_000), rng.uniform(-90, 90, 30_000)])
    x = np.concatenate([x.astype(np.float32), SPECIAL])
    got = np.asarray(jax.jit(getattr(composed, name))(x)).astype(np.float64)
    with np.errstate(all="ignore"):
        want = exact(x.astype(np.float64))
    info = np.finfo(np.float32)
    normal = (np.abs(want) < info.max) & (np.abs(want) > info.tiny)
    off = np.abs(got[normal] - want[normal]) / np.spacing(np.abs(want[normal]).astype(np.float32))
    assert off.max() <= units
    ends = slice(-len(SPECIAL), None)
    np.testing.assert_allclose(got[ends], want[ends], rtol=1e-6)
    np.testing.assert_array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))


@pytest.mark.parametrize("name", sorted(composed.FLOAT8_NAMES))
def test_numbers_of_eight_bits(name):
    """All of them, everything half way between two, and what is next to that: to the bit."""
    dtype = jnp.dtype(name)
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    numbers = codes.astype(np.float32)
    np.testing.assert_array_equal(jax.jit(composed.from_float8)(jnp.asarray(codes)), numbers)
    finite = np.sort(numbers[np.isfinite(numbers)])
    halves = (finite[1:] + finite[:-1]) / 2
    largest = finite[-1] * np.float32([1.01, 1.0357, 1.04, 1.07, 1.08, 1.125, 1.2, 1e30])
    rest = np.float32([np.inf, np.nan, 0.0, 1e-40, *np.random.default_rng(1).standard_normal(1000)])
    x = np.concatenate([finite, halves, np.nextafter(halves, np.float32(np.inf)), largest, rest])
    x = np.concatenate([x, -x])
    got = np.asarray(jax.jit(lambda x: composed.to_float8(x, dtype))(x))
    want = x.astype(dtype)
    is_number = ~np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(got.view(np.uint8)[is_number], want.view(np.uint8)[is_number])
    assert np.isnan(got.astype(np.float32)[~is_number]).all()


@pytest.mark.parametrize("kept", [1, 7, 10, 22])
def test_fewer_bits_of_a_mantissa(kept):
    x = np.random.default_rng(2).integers(-(2**31), 2**31, 10_000).astype(np.int32).view(np.float32)
    x = np.concatenate([x, SPECIAL, [np.finfo(np.float32).max]]).astype(np.float32)
    got = jax.jit(lambda x: composed.rounded_mantissa(x, kept))(x)
    np.testing.assert_array_equal(got, jax.jit(lambda x: lax.reduce_precision(x, 8, kept))(x))
