"""Numbers of eight bits: kernels convert them, and compute with none.

By integer arithmetic on float32, so that every target rounds as XLA does: to the nearest, ties to
even, and beyond the largest to infinity, or to no number where there is no infinity. The
conversions of GPUs saturate instead (PTX ISA, ``cvt.satfinite``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp


@dataclass(frozen=True, slots=True)
class _Format:
    """A sign, an exponent of ``bias`` and ``mantissa`` bits; ``beyond`` is the code of what is larger
    than the largest number, ``none`` one that is no number."""

    mantissa: int
    bias: int
    beyond: int
    none: int

    @property
    def least(self) -> float:
        """The distance of the smallest numbers."""
        return 2.0 ** (1 - self.bias - self.mantissa)


# OCP 8-bit Floating Point Specification, section 5: E4M3 has no infinity.
_FORMATS = {"float8_e4m3fn": _Format(3, 7, 0x7F, 0x7F), "float8_e5m2": _Format(2, 15, 0x7C, 0x7E)}

NAMES = frozenset(_FORMATS)


def to_float8(x: Any, dtype: Any) -> Any:
    """A float32 array in ``dtype``, one of ``NAMES``."""
    form = _FORMATS[str(dtype)]
    bits = lax.bitcast_convert_type(x, jnp.int32)
    size = bits & 0x7FFFFFFF
    dropped = 23 - form.mantissa
    even = (size >> dropped) & 1
    normal = ((size + ((1 << dropped - 1) - 1) + even) >> dropped) - (127 - form.bias << form.mantissa)
    # Added to this the smallest numbers are rounded to the distance between them.
    magic = jnp.float32(form.least * 2.0**23)
    small = jnp.minimum(lax.bitcast_convert_type(size, jnp.float32), magic)
    few = lax.bitcast_convert_type(small + magic, jnp.int32) - _bits_of(form.least * 2.0**23)
    code = jnp.where(size < _bits_of(2.0 ** (1 - form.bias)), few, jnp.minimum(normal, form.beyond))
    code = jnp.where(size > 0x7F800000, form.none, code) | ((bits >> 24) & 0x80)
    signed = jnp.where(code > 127, code - 256, code)
    return lax.bitcast_convert_type(signed.astype(jnp.int8), jnp.dtype(dtype))


def from_float8(x: Any) -> Any:
    """An array of one of ``NAMES`` in float32, exactly."""
    form = _FORMATS[str(x.dtype)]
    code = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int32)
    size = code & 0x7F
    up = 23 - form.mantissa
    normal = lax.bitcast_convert_type((size << up) + (127 - form.bias << 23), jnp.float32)
    value = jnp.where(size < 1 << form.mantissa, size.astype(jnp.float32) * form.least, normal)
    if form.beyond != form.none:
        value = jnp.where(size == form.beyond, jnp.inf, value)
    value = jnp.where((size > form.beyond) | (size == form.none), jnp.nan, value)
    return jnp.where(code < 0, -value, value)


def _bits_of(x: float) -> int:
    return int(np.float32(x).view(np.int32))
