"""Primitives that a kernel backend lacks, composed of those it has. All in float32.

Each is checked against float64 over the whole range: test_emit_body.py::test_composed_accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

# Cephes (S. L. Moshier), single/ndtrf.c: erf(x) = x T(x^2) below one; above it
# erfc(x) = exp(-x^2) / x * P(1/x^2) up to two and R(1/x^2) beyond.
_ERF_T = (
    7.853861353153693e-5, -8.010193625184903e-4, 5.188327685732524e-3, -2.685381193529856e-2,
    1.128358514861418e-1, -3.761262582423300e-1, 1.128379165726710e0,
)  # fmt: skip
_ERFC_P = (
    2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1, -5.824733027278666e-1,
    6.210004621745983e-1, -4.944515323274145e-1, 3.404879937665872e-1, -2.741127028184656e-1,
    5.638259427386472e-1,
)  # fmt: skip
_ERFC_R = (
    -1.047766399936249e1, 1.297719955372516e1, -7.495518717768503e0, 2.921019019210786e0,
    -1.015265279202700e0, 4.218463358204948e-1, -2.820767439740514e-1, 5.641895067754075e-1,
)  # fmt: skip


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    total = x * coefficients[0] + coefficients[1]
    for c in coefficients[2:]:
        total = total * x + c
    return total


def _erf_small(x: Any) -> Any:
    return x * _polynomial(x * x, _ERF_T)


def _erfc_large(x: Any) -> Any:
    a = jnp.abs(x)
    # One, where the other branch is taken: no division by zero.
    inverse = 1.0 / jnp.where(a > 1.0, a, 1.0)
    y = inverse * inverse
    p = jnp.where(a < 2.0, _polynomial(y, _ERFC_P), _polynomial(y, _ERFC_R))
    tail = lax.exp(-x * x) * inverse * p
    return jnp.where(x < 0.0, 2.0 - tail, tail)


def erf(x: Any) -> Any:
    """The error function of a float32 array."""
    return jnp.where(jnp.abs(x) > 1.0, 1.0 - _erfc_large(x), _erf_small(x))


def erfc(x: Any) -> Any:
    """``1 - erf(x)`` of a float32 array, without cancellation for large ``x``."""
    return jnp.where(jnp.abs(x) > 1.0, _erfc_large(x), 1.0 - _erf_small(x))


def expm1(x: Any) -> Any:
    """``exp(x) - 1`` of a float32 array: ``tanh(x / 2) (exp(x) + 1)`` near zero, where the
    difference would cancel."""
    return jnp.where(jnp.abs(x) < 0.5, lax.tanh(x * 0.5) * (lax.exp(x) + 1.0), lax.exp(x) - 1.0)


def log1p(x: Any) -> Any:
    """``log(1 + x)`` of a float32 array: what adding one rounds off is put back as a factor
    (W. Kahan; HP-15C Advanced Functions Handbook, 1982)."""
    above = 1.0 + x
    factor = x / jnp.where(above == 1.0, 1.0, above - 1.0)
    # Infinity has no factor, and what vanishes beside one is its own logarithm.
    return jnp.where(above == 1.0, x, jnp.where(above == jnp.inf, x, lax.log(above) * factor))


def sqrt(x: Any) -> Any:
    """The square root of a float32 array, from its inverse, which zero and infinity have not."""
    return jnp.where((x == 0.0) | (x == jnp.inf), x, x * lax.rsqrt(x))


def floor(x: Any) -> Any:
    """The largest integers that are not above a float32 array."""
    near = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(near > x, near - 1.0, near)


def ceil(x: Any) -> Any:
    """The least integers that are not below a float32 array."""
    return -floor(-x)


def is_finite(x: Any) -> Any:
    """Whether numbers are neither infinite nor NaN."""
    return jnp.abs(x) < jnp.inf


def round_to(x: Any, method: lax.RoundingMethod) -> Any:
    """Round a float array to integers: halves to even, or away from zero."""
    down = lax.floor(x)
    rest = x - down
    if method == lax.RoundingMethod.TO_NEAREST_EVEN:
        half_up = down - 2.0 * lax.floor(down * 0.5) == 1.0
    else:
        half_up = x > 0.0
    up = (rest > 0.5) | ((rest == 0.5) & half_up)
    # Infinities have no rest: what is integral already is its own result.
    return jnp.where(x == down, x, jnp.where(up, down + 1.0, down))
