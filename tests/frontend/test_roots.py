"""Powers by half-integers are square roots: as exact, and equal where powers are zero, infinite or NaN."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fuseplan.frontend.simplify import fold, roots
from fuseplan.frontend.trace import evaluator, trace

pytestmark = pytest.mark.one_python

EDGES = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 3e38, 2.6e15, 2.4e15, 1e-26, 3e-26, 2e-38])


def rewritten(f, x):
    flat = fold(trace(f, x))
    new = roots(flat)
    return flat is not new, evaluator(new.equations, new.inputs, new.outputs)


@pytest.mark.parametrize("exponent", [0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
def test_half_powers(exponent):
    sizes = 10 ** np.random.default_rng(0).uniform(-37, 38, 2000)
    x = np.concatenate([EDGES, sizes]).astype("float32")
    is_changed, f = rewritten(lambda x: x**exponent, x)
    assert is_changed
    got, expected = np.asarray(jax.jit(f)(x)[0]), np.asarray(jax.jit(lambda x: x**exponent)(x))
    tiny = np.finfo(np.float32).tiny  # A CPU may flush smaller numbers to zero.
    normal = (np.abs(expected) > tiny) & np.isfinite(expected)
    exact = np.power(x[normal].astype(np.float64), exponent)
    assert (np.abs(got[normal] / exact - 1) < 3 * 2.0**-23).all()
    np.testing.assert_array_equal(got[~normal], expected[~normal])
    assert not np.signbit(got[: len(EDGES)][[0, 1]]).any()


def test_in_its_gradient():
    x = np.linspace(0.1, 3, 7, dtype="float32")
    is_changed, f = rewritten(jax.grad(lambda x: (x**1.5).sum()), x)
    assert is_changed
    np.testing.assert_allclose(f(x)[0], 1.5 * np.sqrt(x), rtol=1e-6)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x**3.5,  # its products overflow earlier
        lambda x: x**0.3,
        lambda x: x**x,
        lambda x: x.astype("bfloat16") ** 1.5,  # each step would be rounded to 8 bits
    ],
)
def test_other_powers_stay(f):
    assert not rewritten(f, np.ones(3, "float32"))[0]
