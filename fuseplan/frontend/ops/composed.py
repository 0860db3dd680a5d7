"""Primitives that a kernel backend lacks, composed of those it has. All in float32.

Each is checked against float64 over the whole range: test_composed.py. Errors in units in the last
place (ulp) are those with XLA's ``exp``, ``log1p``, ``sqrt`` and ``atan2`` on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
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
    """``log(1 + x)`` of a float32 array, within 5 ulp: near zero, where adding one would round off digits,
    a series in ``x / (2 + x)`` (Abramowitz and Stegun, Handbook of Mathematical Functions, 4.1.27)."""
    z = jnp.where(jnp.abs(x) < 0.25, x, 0.0)
    z = z / (2.0 + z)
    near = 2.0 * z * _polynomial(z * z, (1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0))
    return jnp.where(jnp.abs(x) < 0.25, near, lax.log(1.0 + x))


def sqrt(x: Any) -> Any:
    """The square root of a float32 array, within 3 ulp, from its inverse, which zero and infinity have
    not."""
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
    rounded = jnp.where(x == down, x, jnp.where(up, down + 1.0, down))
    return jnp.where((rounded == 0.0) & (x < 0.0), -0.0, rounded).astype(x.dtype)


_LOG_2 = 0.6931471805599453

# Below this x + x**3 / 6 is x in float32, its sign and that of zero included.
_TINY = 1e-4


def _odd(x: Any, positive: Any) -> Any:
    """An odd function that is ``x`` near zero, of its values at ``|x|``."""
    return jnp.where(jnp.abs(x) < _TINY, x, jnp.where(x < 0.0, -positive, positive))


def sinh(x: Any) -> Any:
    """Within 6 ulp. Of large arguments half of ``exp(|x| / 2)`` squared, which overflows no earlier."""
    a = jnp.abs(x)
    e = expm1(jnp.minimum(a, 20.0))
    half = lax.exp(a * 0.5)
    return _odd(x, jnp.where(a < 20.0, 0.5 * (e + e / (e + 1.0)), 0.5 * half * half))


def cosh(x: Any) -> Any:
    """Within 4 ulp."""
    half = lax.exp(jnp.abs(x) * 0.5)
    large = 0.5 * half * half
    return large + 0.25 / large


def asinh(x: Any) -> Any:
    """Within 4 ulp. What is large is not squared."""
    a = jnp.minimum(jnp.abs(x), 1e9)
    near = lax.log1p(a + a * a / (1.0 + lax.sqrt(1.0 + a * a)))
    return _odd(x, jnp.where(jnp.abs(x) < 1e9, near, lax.log(jnp.abs(x)) + _LOG_2))


def acosh(x: Any) -> Any:
    """Within 4 ulp; no number below one."""
    t = jnp.minimum(x, 1e9) - 1.0
    return jnp.where(x > 1e9, lax.log(x) + _LOG_2, lax.log1p(t + lax.sqrt(2.0 * t + t * t)))


def atanh(x: Any) -> Any:
    """Within 4 ulp; infinite at one, and no number beyond."""
    a = jnp.abs(x)
    return _odd(x, 0.5 * lax.log1p(2.0 * a / (1.0 - a)))


def asin(x: Any) -> Any:
    """Within 4 ulp; no number beyond one."""
    return lax.atan2(x, lax.sqrt((1.0 - x) * (1.0 + x)))


def acos(x: Any) -> Any:
    """Within 4 ulp; no number beyond one."""
    return lax.atan2(lax.sqrt((1.0 - x) * (1.0 + x)), x)


def atan(x: Any) -> Any:
    """Within 6 ulp."""
    return lax.atan2(x, jnp.ones_like(x))


def cbrt(x: Any) -> Any:
    """Within 2 ulp: a power of a third and one step of Newton's method."""
    a = jnp.abs(x)
    # Cubes of small roots would have no digits left.
    scale = jnp.where(a < 1e-30, jnp.float32(2.0**48), jnp.float32(1.0))
    wide = a * scale
    y = lax.exp(lax.log(wide) * (1.0 / 3.0))
    y = y - (y - wide / (y * y)) * (1.0 / 3.0)
    y = y * jnp.where(a < 1e-30, jnp.float32(2.0**-16), jnp.float32(1.0))
    return jnp.where((a > 0.0) & (a < jnp.inf), jnp.where(x < 0.0, -y, y), x)


def rounded_mantissa(x: Any, kept: int) -> Any:
    """A float32 array with ``kept`` of its 23 bits, rounded to even, exactly."""
    dropped = 23 - kept
    bits = lax.bitcast_convert_type(x, jnp.int32)
    half = (1 << dropped - 1) - 1 + ((bits >> dropped) & 1)
    rounded = lax.bitcast_convert_type((bits + half) & -(1 << dropped), jnp.float32)
    return jnp.where(x != x, x, rounded)


TOP_BIT = np.uint32(1 << 31)
"""It orders signed integers as unsigned ones, of which a TPU reduces and compares none."""


def unsigned_greater(a: Any, b: Any) -> Any:
    """``a > b`` of uint32, by signed numbers: a TPU's vector unit has no other order, and what its compiler
    makes of a comparison and a choice between the same two is an extremum that it does not have."""
    return in_signed_order(a) > in_signed_order(b)


def in_signed_order(x: Any) -> Any:
    """int32 that compare as these uint32 do."""
    return (x ^ TOP_BIT).astype(jnp.int32)


def unsigned_less(a: Any, b: Any) -> Any:
    """``a < b`` of uint32; see ``unsigned_greater``."""
    return unsigned_greater(b, a)
