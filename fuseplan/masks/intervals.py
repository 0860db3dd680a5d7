"""Interval arithmetic: bounds of an equation's result from bounds of its operands.

It works on NumPy arrays when a plan is made (``exact``: index arithmetic, with one bound for each tile, which
are bounds of the computed values), and on traced scalars when the plan is run (not ``exact``: bounds are
widened by the equation's rounding error).

An interval implies that no element is NaN. An unbounded value has (NaN, NaN), for which every comparison is
false, and an unbounded boolean has (0, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from fuseplan.frontend.trace import Equation

Interval = tuple[Any, Any]
"""The least and the greatest value, both inclusive; (NaN, NaN) if not bounded."""

UNKNOWN: Interval = (np.float64(np.nan), np.float64(np.nan))

# Below it, exp is zero: in float32 (2^-150, half the smallest denormal) and in float64 (2^-1075).
_EXP_ZERO = {4: -104.0, 8: -746.0}


def unless(xp: Any, bad: Any, lo: Any, hi: Any) -> Interval:
    """The interval, unbounded where ``bad``."""
    return xp.where(bad, np.nan, lo), xp.where(bad, np.nan, hi)


def _infinite(xp: Any, a: Interval) -> Any:
    return xp.isinf(a[0]) | xp.isinf(a[1])


def _has_zero(a: Interval) -> Any:
    return (a[0] <= 0) & (a[1] >= 0)


def _add(xp: Any, eqn: Equation, a: Interval, b: Interval) -> Interval:
    clash = ((a[1] == np.inf) & (b[0] == -np.inf)) | ((a[0] == -np.inf) & (b[1] == np.inf))
    return unless(xp, clash, a[0] + b[0], a[1] + b[1])


def _sub(xp: Any, eqn: Equation, a: Interval, b: Interval) -> Interval:
    return _add(xp, eqn, a, (-b[1], -b[0]))


def _corners(xp: Any, eqn: Equation, a: Interval, b: Interval, f: Callable[[Any, Any], Any]) -> Interval:
    """The extrema of products or quotients, which are at corners, except that corners may underflow to
    zero."""
    values = [f(x, y) for x in a for y in b]
    dtype = eqn.out_avals[0].dtype
    tiny = float(jnp.finfo(dtype).tiny) if jnp.issubdtype(dtype, jnp.floating) else 0.0
    negative = ((a[0] < 0) & (b[1] > 0)) | ((a[1] > 0) & (b[0] < 0))
    positive = ((a[1] > 0) & (b[1] > 0)) | ((a[0] < 0) & (b[0] < 0))
    lo, hi = values[0], values[0]
    for value in values[1:]:
        lo, hi = xp.minimum(lo, value), xp.maximum(hi, value)
    return xp.where(negative, xp.minimum(lo, -tiny), lo), xp.where(positive, xp.maximum(hi, tiny), hi)


def product(xp: Any, eqn: Equation, a: Interval, b: Interval) -> Interval:
    """Bounds of products; zero times infinity is NaN."""
    lo, hi = _corners(xp, eqn, a, b, lambda x, y: x * y)
    bad = (_infinite(xp, a) & _has_zero(b)) | (_infinite(xp, b) & _has_zero(a))
    return unless(xp, bad, lo, hi)


def _div(xp: Any, eqn: Equation, a: Interval, b: Interval) -> Interval:
    lo, hi = _corners(xp, eqn, a, b, lambda x, y: x / y)
    if jnp.issubdtype(eqn.out_avals[0].dtype, jnp.integer):
        lo, hi = xp.trunc(lo), xp.trunc(hi)
    return unless(xp, _has_zero(b) | (_infinite(xp, a) & _infinite(xp, b)), lo, hi)


def _rem(xp: Any, eqn: Equation, a: Interval, b: Interval) -> Interval:
    """Bounds of the remainder of integers by one positive number, with the sign of the dividend."""
    d = b[0]
    same = (xp.trunc(a[0] / d) == xp.trunc(a[1] / d)) & ((a[0] >= 0) | (a[1] < 0))
    lo = xp.where(same, xp.fmod(a[0], d), xp.where(a[0] < 0, 1 - d, 0.0))
    hi = xp.where(same, xp.fmod(a[1], d), xp.where(a[1] > 0, d - 1, 0.0))
    whole = jnp.issubdtype(eqn.out_avals[0].dtype, jnp.integer)
    return unless(xp, (b[0] != b[1]) | (d < 1) | (not whole), lo, hi)


def _max(xp: Any, eqn: Equation, a: Interval, b: Interval) -> Interval:
    return xp.maximum(a[0], b[0]), xp.maximum(a[1], b[1])


def _min(xp: Any, eqn: Equation, a: Interval, b: Interval) -> Interval:
    return xp.minimum(a[0], b[0]), xp.minimum(a[1], b[1])


def _abs(xp: Any, eqn: Equation, a: Interval) -> Interval:
    hi = xp.maximum(-a[0], a[1])
    return xp.where(_has_zero(a), 0.0, xp.minimum(abs(a[0]), abs(a[1]))), hi


def _power(xp: Any, eqn: Equation, a: Interval, y: int) -> Interval:
    if y < 0:
        return _div(xp, eqn, (1.0, 1.0), _power(xp, eqn, a, -y))
    base = a if y % 2 else _abs(xp, eqn, a)
    return base[0] ** y, base[1] ** y


def _truth(xp: Any, lo: Any, hi: Any) -> Interval:
    return xp.where(lo, 1.0, 0.0), xp.where(hi, 1.0, 0.0)


def _less(xp: Any, eqn: Equation, a: Interval, b: Interval) -> Interval:
    return _truth(xp, a[1] < b[0], xp.logical_not(a[0] >= b[1]))


def _less_equal(xp: Any, eqn: Equation, a: Interval, b: Interval) -> Interval:
    return _truth(xp, a[1] <= b[0], xp.logical_not(a[0] > b[1]))


def _equal(xp: Any, eqn: Equation, a: Interval, b: Interval) -> Interval:
    same = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    return _truth(xp, same, xp.logical_not((a[1] < b[0]) | (b[1] < a[0])))


def _flip(a: Interval) -> Interval:
    return 1.0 - a[1], 1.0 - a[0]


def _logical(f: Callable[..., Interval]) -> Callable[..., Interval]:
    """``f`` for booleans; unbounded for bits of integers."""

    def bounds(xp: Any, eqn: Equation, *operands: Interval) -> Interval:
        return f(xp, eqn, *operands) if eqn.out_avals[0].dtype == jnp.bool_ else UNKNOWN

    return bounds


def _select(xp: Any, eqn: Equation, which: Interval, *cases: Interval) -> Interval:
    lo, hi = cases[0]
    for case in cases[1:]:
        lo, hi = xp.minimum(lo, case[0]), xp.maximum(hi, case[1])
    for i, case in enumerate(cases):
        chosen = (which[0] == i) & (which[1] == i)
        lo, hi = xp.where(chosen, case[0], lo), xp.where(chosen, case[1], hi)
    return lo, hi


def _convert(xp: Any, eqn: Equation, a: Interval) -> Interval:
    dtype = eqn.out_avals[0].dtype
    if dtype == jnp.bool_:
        return _truth(xp, (a[0] > 0) | (a[1] < 0), xp.logical_not((a[0] == 0) & (a[1] == 0)))
    return (xp.trunc(a[0]), xp.trunc(a[1])) if jnp.issubdtype(dtype, jnp.integer) else a


def _exp(xp: Any, eqn: Equation, a: Interval, scale: float = 1.0) -> Interval:
    """Zero where the result certainly underflows, else at least the smallest normal number."""
    info = jnp.finfo(eqn.out_avals[0].dtype)
    zero = _EXP_ZERO[8 if info.bits == 64 else 4]
    least = float(np.log(float(info.tiny))) + 1
    lo, hi = a
    if scale != 1.0:  # exp2 is computed as exp, of a product that is rounded
        less, more = scale * (1 - 2.0**-22), scale * (1 + 2.0**-22)
        lo, hi = xp.minimum(lo * less, lo * more), xp.maximum(hi * less, hi * more)
    hi = xp.where(hi < zero, 0.0, xp.exp(xp.maximum(hi, least)))
    return xp.where(lo < least, 0.0, xp.exp(lo)), hi


def _within(lo: float, hi: float, *, of_infinity: bool = True) -> Callable[..., Interval]:
    """A function whose values lie between ``lo`` and ``hi`` for every operand."""

    def bounds(xp: Any, eqn: Equation, a: Interval) -> Interval:
        bad = xp.isnan(a[0]) | (False if of_infinity else _infinite(xp, a))
        return unless(xp, bad, lo, hi)

    return bounds


def _monotone(name: str) -> Callable[..., Interval]:
    return lambda xp, eqn, a: (getattr(xp, name)(a[0]), getattr(xp, name)(a[1]))


OPERATIONS: dict[str, Callable[..., Interval]] = {
    **dict.fromkeys(("add", "add_any"), _add),
    "sub": _sub,
    "mul": product,
    "div": _div,
    "rem": _rem,
    "neg": lambda xp, eqn, a: (-a[1], -a[0]),
    "abs": _abs,
    "square": lambda xp, eqn, a: _power(xp, eqn, a, 2),
    "one_minus_square": lambda xp, eqn, a: _sub(xp, eqn, (1.0, 1.0), _power(xp, eqn, a, 2)),
    "integer_pow": lambda xp, eqn, a: _power(xp, eqn, a, int(eqn.params["y"])),
    "max": _max,
    "min": _min,
    "clamp": lambda xp, eqn, low, a, high: _min(xp, eqn, _max(xp, eqn, a, low), high),
    "select_n": _select,
    "convert_element_type": _convert,
    "lt": _less,
    "le": _less_equal,
    "gt": lambda xp, eqn, a, b: _less(xp, eqn, b, a),
    "ge": lambda xp, eqn, a, b: _less_equal(xp, eqn, b, a),
    "eq": _equal,
    "ne": lambda xp, eqn, a, b: _flip(_equal(xp, eqn, a, b)),
    "and": _logical(_min),
    "or": _logical(_max),
    "not": _logical(lambda xp, eqn, a: _flip(a)),
    "is_finite": lambda xp, eqn, a: _truth(xp, xp.isfinite(a[0]) & xp.isfinite(a[1]), True),
    "exp": _exp,
    "exp2": partial(_exp, scale=float(np.log(2.0))),
    "log": lambda xp, eqn, a: unless(xp, a[0] < 0, xp.log(a[0]), xp.log(a[1])),
    "sqrt": lambda xp, eqn, a: unless(xp, a[0] < 0, xp.sqrt(a[0]), xp.sqrt(a[1])),
    "rsqrt": lambda xp, eqn, a: unless(xp, a[0] <= 0, 1 / xp.sqrt(a[1]), 1 / xp.sqrt(a[0])),
    **{name: _monotone(name) for name in ("tanh", "sign", "floor", "ceil")},
    "logistic": _within(0.0, 1.0),
    "erf": _within(-1.0, 1.0),
    **dict.fromkeys(("sin", "cos"), _within(-1.0, 1.0, of_infinity=False)),
}


MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
MOVES |= {"copy", "stop_gradient"}

# The results of these are operands, negated operands or constants: nothing is rounded.
_UNROUNDED = frozenset({"neg", "abs", "max", "min", "clamp", "select_n", "sign", "floor", "ceil"})
_MAX_ERROR_ULPS = 8
"""A bound of the error of an elementwise operation in units in the last place. XLA's CPU approximations err
by a few ulp."""
_FLOAT32_EPS = 2.0**-23
"""The epsilon of float32, in which bounds are computed when a plan is run."""


def apply(xp: Any, eqn: Equation, operands: Sequence[Interval], *, exact: bool) -> Interval:
    """Bounds of the result of an elementwise equation, or of an equation that moves data.

    Example:
        >>> import jax, numpy as np
        >>> from fuseplan.frontend.trace import trace
        >>> (eqn,) = trace(jax.numpy.tanh, jax.numpy.ones(3)).equations
        >>> [round(float(x), 3) for x in apply(np, eqn, [(0.0, np.inf)], exact=False)]
        [0.0, 1.0]
    """
    name, dtype = eqn.primitive.name, eqn.out_avals[0].dtype
    if name in MOVES:
        return operands[0]
    real = dtype == jnp.bool_ or any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer))
    if name not in OPERATIONS or not real or (name == "rem" and not exact):
        return unknown(dtype)
    with np.errstate(all="ignore"):
        result = OPERATIONS[name](xp, eqn, *operands)
        if name in _UNROUNDED and jnp.issubdtype(dtype, jnp.floating):
            return result
        return rounded(xp, dtype, result, exact=exact)


def unknown(dtype: Any) -> Interval:
    """The bounds of an array without known bounds."""
    return (np.float64(0), np.float64(1)) if dtype == jnp.bool_ else UNKNOWN


def rounded(xp: Any, dtype: Any, x: Interval, *, exact: bool, terms: int = 0) -> Interval:
    """``x`` widened to bounds of a computed result, rounded once and in each of ``terms`` partial sums."""
    lo, hi = x
    nan = xp.isnan(lo) | xp.isnan(hi)
    if dtype == jnp.bool_:
        return xp.where(nan, 0.0, lo), xp.where(nan, 1.0, hi)
    if not jnp.issubdtype(dtype, jnp.floating):
        # Integers wrap around, and bounds beyond 2^53 (2^24 in float32) are not exact.
        whole = jnp.iinfo(dtype)
        limit = 2.0**53 if exact else 2.0**24
        nan |= (lo < max(float(whole.min), -limit)) | (hi > min(float(whole.max), limit))
        return unless(xp, nan, lo, hi)
    info = jnp.finfo(dtype)
    if exact:
        same = [np.asarray(b).astype(dtype).astype(np.float64) == b for b in x]
        slack = 2 * float(info.eps)
        lo, hi = (np.where(s | ~np.isfinite(b), 0.0, slack * np.abs(b)) for s, b in zip(same, x, strict=True))
        return x[0] - lo, x[1] + hi
    slack = _MAX_ERROR_ULPS * max(float(info.eps), _FLOAT32_EPS) + terms * _FLOAT32_EPS
    # If the bounds differ in sign, partial sums may be as large as the larger bound.
    size = xp.where((lo < 0) & (hi > 0), xp.maximum(-lo, hi), 0.0) if terms else 0.0
    lo = xp.where(xp.isfinite(lo), lo - slack * xp.maximum(abs(lo), size), lo)
    hi = xp.where(xp.isfinite(hi), hi + slack * xp.maximum(abs(hi), size), hi)
    tiny, limit = float(info.tiny), float(info.max) / 16
    lo = xp.where((lo > 0) & (lo < tiny), 0.0, xp.where(lo < -limit, -np.inf, lo))
    hi = xp.where((hi < 0) & (hi > -tiny), 0.0, xp.where(hi > limit, np.inf, hi))
    return unless(xp, nan, lo, hi)
