"""Interval arithmetic: bounds of an equation's result from bounds of its operands.

It works on NumPy arrays when a plan is made (a bound for each tile, ``exact``: index
arithmetic, whose bounds are those of the values themselves), and on traced scalars when the
plan is run (``exact`` off: bounds are widened by what the equation itself may round).

An interval claims that no element is NaN. What cannot be bounded is (NaN, NaN), which no
comparison holds for; of booleans it is (0, 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fuseplan.frontend.trace import Equation
from fuseplan.masks.interval_operations import OPERATIONS, UNKNOWN, Interval, unless

MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"})
MOVES |= {"copy", "copy_p", "stop_gradient"}

# Their results are among their operands, or among these and zero: nothing is rounded.
_CHOOSES = frozenset({"neg", "abs", "max", "min", "clamp", "select_n", "sign", "floor", "ceil"})
# Results are within a few units in the last place of the true ones; bounds are kept in float32.
_ULPS = 8
_EPS = 2.0**-23


def apply(xp: Any, eqn: Equation, operands: Sequence[Interval], *, exact: bool) -> Interval:
    """Bounds of the result of an elementwise equation, or of one that moves data.

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
        if name in _CHOOSES and jnp.issubdtype(dtype, jnp.floating):
            return result
        return rounded(xp, dtype, result, exact=exact)


def unknown(dtype: Any) -> Interval:
    """Bounds of an array of which nothing is known."""
    return (np.float64(0), np.float64(1)) if dtype == jnp.bool_ else UNKNOWN


def rounded(xp: Any, dtype: Any, x: Interval, *, exact: bool, terms: int = 0) -> Interval:
    """``x`` as bounds of a computed result: rounded once, and over ``terms`` partial sums."""
    lo, hi = x
    nan = xp.isnan(lo) | xp.isnan(hi)
    if dtype == jnp.bool_:
        return xp.where(nan, 0.0, lo), xp.where(nan, 1.0, hi)
    if not jnp.issubdtype(dtype, jnp.floating):
        # Integers wrap around; beyond 2^53 (2^24 in float32) bounds are not exact themselves.
        whole = jnp.iinfo(dtype)
        limit = 2.0**53 if exact else 2.0**24
        nan |= (lo < max(float(whole.min), -limit)) | (hi > min(float(whole.max), limit))
        return xp.where(nan, np.nan, lo), xp.where(nan, np.nan, hi)
    info = jnp.finfo(dtype)
    if exact:
        same = [np.asarray(b).astype(dtype).astype(np.float64) == b for b in x]
        slack = 2 * float(info.eps)
        lo, hi = (np.where(s | ~np.isfinite(b), 0.0, slack * np.abs(b)) for s, b in zip(same, x, strict=True))
        return x[0] - lo, x[1] + hi
    slack = _ULPS * max(float(info.eps), _EPS) + terms * _EPS
    # Where signs differ, partial sums may be as large as the larger bound.
    size = xp.where((lo < 0) & (hi > 0), xp.maximum(-lo, hi), 0.0) if terms else 0.0
    lo = xp.where(xp.isfinite(lo), lo - slack * xp.maximum(abs(lo), size), lo)
    hi = xp.where(xp.isfinite(hi), hi + slack * xp.maximum(abs(hi), size), hi)
    tiny, limit = float(info.tiny), float(info.max) / 16
    lo = xp.where((lo > 0) & (lo < tiny), 0.0, xp.where(lo < -limit, -np.inf, lo))
    hi = xp.where((hi < 0) & (hi > -tiny), 0.0, xp.where(hi > limit, np.inf, hi))
    return unless(xp, nan, lo, hi)
