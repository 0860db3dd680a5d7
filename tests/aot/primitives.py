"""One small function for every primitive that a kernel may contain, by dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

X, Y = (24, 128), (24, 128)

FLOAT_UNARY: dict[str, Callable[..., Any]] = {
    "neg": lax.neg,
    "abs": lax.abs,
    "sign": lax.sign,
    "floor": lax.floor,
    "ceil": lax.ceil,
    "square": lax.square,
    "exp": lax.exp,
    "log": lax.log,
    "tanh": lax.tanh,
    "sqrt": lax.sqrt,
    "rsqrt": lax.rsqrt,
    "exp2": lax.exp2,
    "log1p": lax.log1p,
    "expm1": lax.expm1,
    "cbrt": lax.cbrt,
    "bitcast": lambda x: lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}"),
    "reduce_precision_kept": lambda x: lax.reduce_precision(x, 8, 23),
    "reduce_precision_mantissa": lambda x: lax.reduce_precision(x, 8, 7),
    "sin": lax.sin,
    "cos": lax.cos,
    "tan": lax.tan,
    "sinh": lax.sinh,
    "cosh": lax.cosh,
    "asinh": lax.asinh,
    "acosh": lax.acosh,
    "atanh": lax.atanh,
    "asin": lax.asin,
    "acos": lax.acos,
    "atan": lax.atan,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erf_inv": lax.erf_inv,
    "logistic": lax.logistic,
    "is_finite": lax.is_finite,
    "lgamma": lax.lgamma,
    "digamma": lax.digamma,
    "round": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "integer_pow_negative": lambda x: lax.integer_pow(x, -2),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 10),
    "round_away": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "stop_gradient": lax.stop_gradient,
    "copy": jnp.copy,
}

BINARY: dict[str, Callable[..., Any]] = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "max": lax.max,
    "min": lax.min,
    "eq": lax.eq,
    "ne": lax.ne,
    "lt": lax.lt,
    "le": lax.le,
    "gt": lax.gt,
    "ge": lax.ge,
    "select_n": lambda x, y: lax.select(x > y, x, y),
    "select_n_three": lambda x, y: lax.select_n(
        (x > y).astype(jnp.int32) + (x > 0).astype(jnp.int32), x, y, x
    ),
    "clamp": lambda x, y: lax.clamp(x * 0, x, y),
    "clamp_scalar": lambda x, y: lax.clamp(jnp.zeros((), x.dtype), x, jnp.ones((), x.dtype)) + y,
}

FLOAT_BINARY: dict[str, Callable[..., Any]] = {
    "atan2": lax.atan2,
    "pow": lax.pow,
    "nextafter": lax.nextafter,
    "pow_integer": lambda x, y: lax.pow(x, y.astype(jnp.int32)),
}

INTEGER: dict[str, Callable[..., Any]] = {
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lambda x, y: lax.bitwise_not(x) + y,
    "shift_left": lax.shift_left,
    "shift_right_logical": lax.shift_right_logical,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "population_count": lambda x, y: lax.population_count(x) + y,
    "clz": lambda x, y: lax.clz(x) + y,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: abs(x),
    "sign": lambda x, y: lax.sign(x),
    "integer_pow": lambda x, y: lax.integer_pow(x, 3),
}

BOOLEAN: dict[str, Callable[..., Any]] = {
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lambda x, y: lax.bitwise_not(x) & y,
    "eq": lax.eq,
    "ne": lax.ne,
    "select_n": lambda x, y: lax.select(x, y, ~y),
    "max": lax.max,
    "min": lax.min,
}

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "reduce_sum_minor": lambda x: x.sum(1),
    "reduce_sum_major": lambda x: x.sum(0),
    "reduce_sum_all": lambda x: x.sum(),
    "reduce_max_minor": lambda x: x.max(1),
    "reduce_max_major": lambda x: x.max(0),
    "reduce_min_minor": lambda x: x.min(1),
    "reduce_min_all": lambda x: x.min(),
    "reduce_sum_kept": lambda x: x - x.sum(1, keepdims=True),
    "reduce_max_kept": lambda x: x - x.max(0, keepdims=True),
}

FOLDS: dict[str, Callable[..., Any]] = {
    "reduce_prod_minor": lambda x: x.prod(1),
    "reduce_prod_major": lambda x: x.prod(0),
    "reduce_prod_all": lambda x: x.prod(),
    "cumsum": lambda x: lax.cumsum(x, 1),
    "cumsum_back": lambda x: lax.cumsum(x, 1, reverse=True),
    "cumsum_major": lambda x: lax.cumsum(x, 0),
    "cumprod": lambda x: lax.cumprod(x, 1),
    "cummax": lambda x: lax.cummax(x, 1, reverse=True),
    "cummin": lambda x: lax.cummin(x, 0),
}

FLOAT_FOLDS: dict[str, Callable[..., Any]] = {
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1),
    "cumlogsumexp_back": lambda x: lax.cumlogsumexp(x, 0, reverse=True),
}

BITWISE: dict[str, Callable[..., Any]] = {
    "reduce_and_bits": lambda x: jnp.bitwise_and.reduce(x, axis=1),
    "reduce_or_bits": lambda x: jnp.bitwise_or.reduce(x, axis=0),
    "reduce_xor_bits": lambda x: lax.reduce_xor(x, (1,)),
}

WINDOWS: dict[str, Callable[..., Any]] = {
    "slice": lambda x: x[:, 32:64] + x[:, 96:],
    "slice_major": lambda x: x[:8] + x[16:],
    "slice_strided": lambda x: x[:, ::2] + x[:, 1::2],
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (0, 64), (24, 64)),
    "split": lambda x: tuple(jnp.split(x, 2, 1)),
    "concatenate": lambda x: jnp.concatenate([x[:, 64:], x], 1),
    "stack": lambda x: jnp.stack([x, x + x], 0),
    "stack_minor": lambda x: jnp.stack([x[:, 64:], x[:, :64]], -1).reshape(24, 128),
    "unstack": lambda x: jnp.unstack(x.reshape(3, 8, 128))[1],
    "pad": lambda x: jnp.pad(x[:, :64], ((0, 0), (0, 64))),
    "pad_gaps": lambda x: lax.pad(x[:, :64], jnp.zeros((), x.dtype), ((0, 0, 0), (1, 0, 1))),
    "tile": lambda x: jnp.tile(x, (1, 2)),
}


def _window(x: Any, i: Any) -> Any:
    return lax.dynamic_slice(x, (i, 0), (2, 64))


LOOKUPS: dict[str, Callable[..., Any]] = {
    "lookup_rows": lambda x: jnp.take(x, x.max(1).astype(jnp.int32), 0, mode="clip"),
    "lookup_columns": lambda x: x.at[:, x.max(1).astype(jnp.int32)].get(mode="promise_in_bounds"),
    "lookup_or_fill": lambda x: jnp.take(x, x.max(1).astype(jnp.int8), 0, mode="fill"),
    "lookup_by_uint32": lambda x: jnp.take(x, x.max(1).astype(jnp.uint32), 0, mode="clip"),
    "lookup_elements": lambda x: x[x.max(1).astype(jnp.int32), x.min(1).astype(jnp.int32)],
    "lookup_windows": lambda x: jax.vmap(partial(_window, x))(x.max(1).astype(jnp.int32)),
    "lookup_along": lambda x: jnp.take_along_axis(x, (2 * x).astype(jnp.int32), 1),
}

QUANTIFIERS: dict[str, Callable[..., Any]] = {
    "reduce_and_minor": lambda x: (x > 0).all(1),
    "reduce_or_major": lambda x: (x > 0).any(0),
    "reduce_or_all": lambda x: (x > 0).any(),
}

SELECTIONS: dict[str, Callable[..., Any]] = {
    "select_row": lambda x: jnp.where(x > 0, x.max(0), 0),
    "select_column": lambda x: jnp.where(x > 0, x.max(1, keepdims=True), 0),
    "select_of_rows": lambda x: jnp.where(x > 0, x.max(0), 2 * x.max(0)),
    "select_statistic": lambda x: jnp.where(x.min(1) > 0, x.max(1), 0),
    "select_by_row_of": lambda x: jnp.where((x > 0).any(1)[:, None], x, 0),
    "select_constants": lambda x: jnp.where(x > 0, 1, 0).sum(1),
    "select_constants_by_column": lambda x: jnp.where(x.max(1) > x.min(1), x.dtype.type(1), x.dtype.type(0)),
    "select_constants_by_row": lambda x: jnp.where(x.max(0) == x.min(0), x.dtype.type(1), x.dtype.type(0)),
}

MOVEMENT: dict[str, Callable[..., Any]] = {
    "transpose": lambda x: x.T,
    "iota": lambda x: x + lax.broadcasted_iota(x.dtype, x.shape, 1),
    "broadcast_minor": lambda x: jnp.broadcast_to(x.sum(1)[:, None], (24, 128)) + x,
    "broadcast_scalar": lambda x: jnp.broadcast_to(x.sum(), (24, 128)) + x,
    "reshape": lambda x: x.reshape(3, 8, 128) + x.reshape(3, 8, 128),
    "reshape_to_columns": lambda x: x.sum(0).reshape(1, 128, 1, 1) * 2,
    "log2": lambda x: jnp.log2(x.astype(jnp.float32)),
    "expand": lambda x: x[:, None, :] * 2,
    "squeeze": lambda x: x.sum(1, keepdims=True)[:, 0] + 1,
}

BOOLEAN_MOVEMENT: dict[str, Callable[..., Any]] = {
    "transpose": lambda x: x.T,
    "broadcast_major": lambda x: jnp.broadcast_to(x[None], (3, 24, 128)) | True,
    "reshape": lambda x: ~x.reshape(3, 8, 128),
    "expand": lambda x: ~x[:, None, :],
    "convert": lambda x: x + 1.0,
    "reduce_or": lambda x: x.any(1),
    "reduce_and": lambda x: x.all(),
    "select_rows": lambda x: jnp.where(x, jnp.sum(x, 1, keepdims=True), 0),
    "select_columns": lambda x: jnp.where(x.T, jnp.sum(x.T, 0), 0),
    "select_constants": lambda x: jnp.where(x, 1.0, 0.0).sum(1),
    "select_by_column": lambda x: jnp.where(x[:, :1], 1.0, 2.0) + x,
    "select_by_reshaped": lambda x: jnp.where(x.reshape(3, 8, 128), jnp.sum(x, 0), 0),
}

CAST_DTYPES = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float32",
    "bfloat16",
    "float16",
    "int32",
    "int8",
    "int16",
    "uint8",
    "uint32",
    "bool",
)


def _cast(dtype: str) -> Callable[..., Any]:
    def f(x: Any) -> Any:
        return x.astype(dtype)

    return f


CASTS: dict[str, Callable[..., Any]] = {f"to_{d}": _cast(d) for d in CAST_DTYPES}
