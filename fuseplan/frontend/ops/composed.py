"""Functions of float32 arrays composed of primitives that every kernel language has.

Errors in units in the last place (ulp) are with XLA's ``exp``, ``log1p``, ``sqrt`` and ``atan2`` on a CPU,
against float64 over the whole range. 8-bit floats are converted by integer arithmetic on float32, so that
every target rounds as XLA does: to nearest, ties to even, overflow to infinity (to NaN where the format has
no infinity). The conversions of GPUs saturate instead (PTX ISA, ``cvt.satfinite``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    # 1 where the other branch is taken, to avoid a division by zero.
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
    """``exp(x) - 1`` of a float32 array; near zero ``tanh(x / 2) (exp(x) + 1)``, which does not cancel."""
    return jnp.where(jnp.abs(x) < 0.5, lax.tanh(x * 0.5) * (lax.exp(x) + 1.0), lax.exp(x) - 1.0)


def log1p(x: Any) -> Any:
    """``log(1 + x)`` of a float32 array, within 5 ulp; near zero, where ``1 + x`` loses digits, by a series
    in ``x / (2 + x)`` (Abramowitz and Stegun, Handbook of Mathematical Functions, 4.1.27)."""
    z = jnp.where(jnp.abs(x) < 0.25, x, 0.0)
    z = z / (2.0 + z)
    near = 2.0 * z * _polynomial(z * z, (1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0))
    return jnp.where(jnp.abs(x) < 0.25, near, lax.log(1.0 + x))


def sqrt(x: Any) -> Any:
    """The square root of a float32 array, within 3 ulp, as ``x * rsqrt(x)``."""
    return jnp.where((x == 0.0) | (x == jnp.inf), x, x * lax.rsqrt(x))


def floor(x: Any) -> Any:
    """The floor of a float32 array."""
    near = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(near > x, near - 1.0, near)


def ceil(x: Any) -> Any:
    """The ceiling of a float32 array."""
    return -floor(-x)


def is_finite(x: Any) -> Any:
    """Whether each element is neither infinite nor NaN."""
    return jnp.abs(x) < jnp.inf


def round_to(x: Any, method: lax.RoundingMethod) -> Any:
    """A float array rounded to integers: ties to even, or away from zero."""
    down = lax.floor(x)
    rest = x - down
    if method == lax.RoundingMethod.TO_NEAREST_EVEN:
        half_up = down - 2.0 * lax.floor(down * 0.5) == 1.0
    else:
        half_up = x > 0.0
    up = (rest > 0.5) | ((rest == 0.5) & half_up)
    # Integral values, and infinities, whose fraction is NaN, are returned as they are.
    rounded = jnp.where(x == down, x, jnp.where(up, down + 1.0, down))
    return jnp.where((rounded == 0.0) & (x < 0.0), -0.0, rounded).astype(x.dtype)


_LOG_2 = 0.6931471805599453

# Below this x + x**3 / 6 rounds to x in float32, and the sign of zero is kept.
_TINY = 1e-4


def _odd(x: Any, positive: Any) -> Any:
    """An odd function that equals ``x`` near zero, from its values at ``|x|``."""
    return jnp.where(jnp.abs(x) < _TINY, x, jnp.where(x < 0.0, -positive, positive))


def sinh(x: Any) -> Any:
    """Within 6 ulp; for large arguments ``exp(|x| / 2) ** 2 / 2``, which overflows only where sinh does."""
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
    """Within 4 ulp; large arguments are not squared."""
    a = jnp.minimum(jnp.abs(x), 1e9)
    near = lax.log1p(a + a * a / (1.0 + lax.sqrt(1.0 + a * a)))
    return _odd(x, jnp.where(jnp.abs(x) < 1e9, near, lax.log(jnp.abs(x)) + _LOG_2))


def acosh(x: Any) -> Any:
    """Within 4 ulp; NaN below one."""
    t = jnp.minimum(x, 1e9) - 1.0
    return jnp.where(x > 1e9, lax.log(x) + _LOG_2, lax.log1p(t + lax.sqrt(2.0 * t + t * t)))


def atanh(x: Any) -> Any:
    """Within 4 ulp; infinite at one and NaN beyond."""
    a = jnp.abs(x)
    return _odd(x, 0.5 * lax.log1p(2.0 * a / (1.0 - a)))


def asin(x: Any) -> Any:
    """Within 4 ulp; NaN beyond one."""
    return lax.atan2(x, lax.sqrt((1.0 - x) * (1.0 + x)))


def acos(x: Any) -> Any:
    """Within 4 ulp; NaN beyond one."""
    return lax.atan2(lax.sqrt((1.0 - x) * (1.0 + x)), x)


def atan(x: Any) -> Any:
    """Within 6 ulp."""
    return lax.atan2(x, jnp.ones_like(x))


def cbrt(x: Any) -> Any:
    """Within 2 ulp: ``exp(log(x) / 3)`` and one step of Newton's method."""
    a = jnp.abs(x)
    # Squares of small roots underflow.
    scale = jnp.where(a < 1e-30, jnp.float32(2.0**48), jnp.float32(1.0))
    wide = a * scale
    y = lax.exp(lax.log(wide) * (1.0 / 3.0))
    y = y - (y - wide / (y * y)) * (1.0 / 3.0)
    y = y * jnp.where(a < 1e-30, jnp.float32(2.0**-16), jnp.float32(1.0))
    return jnp.where((a > 0.0) & (a < jnp.inf), jnp.where(x < 0.0, -y, y), x)


def rounded_mantissa(x: Any, kept: int) -> Any:
    """A float32 array rounded to ``kept`` of its 23 mantissa bits, ties to even."""
    dropped = 23 - kept
    bits = lax.bitcast_convert_type(x, jnp.int32)
    half = (1 << dropped - 1) - 1 + ((bits >> dropped) & 1)
    rounded = lax.bitcast_convert_type((bits + half) & -(1 << dropped), jnp.float32)
    return jnp.where(x != x, x, rounded)


def bfloat16_halves(x: Any) -> tuple[Any, Any]:
    """Two bfloat16 arrays whose sum is a float32 array but for its last 8 bits. Infinities and NaN are in the
    first alone."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    is_finite = jnp.abs(x) < jnp.inf
    upper = jnp.where(is_finite, lax.bitcast_convert_type(bits & np.int32(-(1 << 16)), jnp.float32), x)
    lower = jnp.where(is_finite, x - upper, jnp.zeros((), x.dtype))
    return upper.astype(jnp.bfloat16), lower.astype(jnp.bfloat16)


TOP_BIT = np.uint32(1 << 31)
"""XOR with it maps the order of uint32 to that of int32, which a TPU can reduce and compare."""


def unsigned_greater(a: Any, b: Any) -> Any:
    """``a > b`` of uint32, compared as int32: a TPU's vector unit compares no unsigned integers, and its
    compiler turns a comparison and a selection of the same two into a maximum that it does not have."""
    return in_signed_order(a) > in_signed_order(b)


def in_signed_order(x: Any) -> Any:
    """int32 values with the order of the uint32 values ``x``."""
    return (x ^ TOP_BIT).astype(jnp.int32)


def propagating_maximum(a: Any, b: Any) -> Any:
    """The larger of two floats, NaN where either is, as XLA has it: Triton's maximum returns the other
    (PTX ISA, ``max`` without ``.NaN``)."""
    return jnp.where((a != a) | (b != b), jnp.asarray(jnp.nan, a.dtype), jnp.maximum(a, b))


def propagating_minimum(a: Any, b: Any) -> Any:
    """The smaller of two floats, NaN where either is."""
    return jnp.where((a != a) | (b != b), jnp.asarray(jnp.nan, a.dtype), jnp.minimum(a, b))


_INTEGER_OF = {4: jnp.int32, 8: jnp.int64}
"""By the bytes of a float."""


def as_ordered_integers(x: Any, nan_is_largest: bool) -> Any:
    """Integers with the order of the floats ``x``; a NaN is the largest or the smallest of all."""
    integer = _INTEGER_OF[x.dtype.itemsize]
    limits = jnp.iinfo(integer)
    ordered = _with_reversed_negatives(lax.bitcast_convert_type(x, integer))
    # A NaN has the largest magnitude of all.
    return jnp.where(x != x, limits.max if nan_is_largest else limits.min, ordered).astype(integer)


def from_ordered_integers(ordered: Any, dtype: Any) -> Any:
    """The floats of ``as_ordered_integers``."""
    return lax.bitcast_convert_type(_with_reversed_negatives(ordered), dtype)


def _with_reversed_negatives(bits: Any) -> Any:
    """The integers ``bits``, the negative ones in reverse order: a float has a sign and a magnitude, an
    integer is the complement of two. The function is its own inverse."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


@dataclass(frozen=True, slots=True)
class _Format:
    """An 8-bit float format: mantissa bits, exponent bias, and the codes of overflow and of NaN."""

    mantissa: int
    bias: int
    overflow: int
    nan: int

    @property
    def denormal_step(self) -> float:
        """The spacing of denormal numbers."""
        return 2.0 ** (1 - self.bias - self.mantissa)


# OCP 8-bit Floating Point Specification, section 5: E4M3 has no infinity.
_FORMATS = {"float8_e4m3fn": _Format(3, 7, 0x7F, 0x7F), "float8_e5m2": _Format(2, 15, 0x7C, 0x7E)}

FLOAT8_NAMES = frozenset(_FORMATS)


def to_float8(x: Any, dtype: Any) -> Any:
    """A float32 array in ``dtype``, one of ``FLOAT8_NAMES``."""
    form = _FORMATS[str(dtype)]
    bits = lax.bitcast_convert_type(x, jnp.int32)
    size = bits & 0x7FFFFFFF
    dropped = 23 - form.mantissa
    even = (size >> dropped) & 1
    normal = ((size + ((1 << dropped - 1) - 1) + even) >> dropped) - (127 - form.bias << form.mantissa)
    # The sum of this and a denormal number is rounded to the spacing of denormals.
    magic = jnp.float32(form.denormal_step * 2.0**23)
    small = jnp.minimum(lax.bitcast_convert_type(size, jnp.float32), magic)
    few = lax.bitcast_convert_type(small + magic, jnp.int32) - _bits_of(form.denormal_step * 2.0**23)
    code = jnp.where(size < _bits_of(2.0 ** (1 - form.bias)), few, jnp.minimum(normal, form.overflow))
    code = jnp.where(size > 0x7F800000, form.nan, code) | ((bits >> 24) & 0x80)
    signed = jnp.where(code > 127, code - 256, code)
    return lax.bitcast_convert_type(signed.astype(jnp.int8), jnp.dtype(dtype))


def from_float8(x: Any) -> Any:
    """An array of one of ``FLOAT8_NAMES`` in float32, exactly."""
    form = _FORMATS[str(x.dtype)]
    code = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int32)
    size = code & 0x7F
    up = 23 - form.mantissa
    normal = lax.bitcast_convert_type((size << up) + (127 - form.bias << 23), jnp.float32)
    value = jnp.where(size < 1 << form.mantissa, size.astype(jnp.float32) * form.denormal_step, normal)
    if form.overflow != form.nan:
        value = jnp.where(size == form.overflow, jnp.inf, value)
    value = jnp.where((size > form.overflow) | (size == form.nan), jnp.nan, value)
    return jnp.where(code < 0, -value, value)


def _bits_of(x: float) -> int:
    return int(np.float32(x).view(np.int32))
