"""Define each operation of generated programs twice: as jnp source and as NumPy.

A NumPy function takes a ``Rounding`` first, then the operands, then the step's parameters. Floats of all
types are float64 there; ``Rounding`` rounds what an operation makes on the way, as a working type would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Axes = Sequence[int]
Table = dict[str, tuple[str, Callable[..., Any]]]


class Rounding(Protocol):
    """How the result of one operation in a working type may differ from the exact one."""

    def __call__(self, x: Any) -> Any:
        """``x`` as the working type may hold it."""

    def total(self, x: Any, magnitudes: Any) -> Any:
        """``x``, a sum of terms in any order; ``magnitudes`` is the sum of their absolute values."""


@dataclass(frozen=True, slots=True)
class Operation:
    """``source`` is formatted with the operands' names, the parameters ``p`` and the result's type ``t``."""

    source: str
    numpy: Callable[..., Any]
    exact: bool = False
    """No result is rounded: moves, choices, and all arithmetic on integers."""
    smooth: bool = True
    """It has a derivative in reverse mode."""


OPERATIONS: dict[str, Operation] = {}


def _limited(x: Any, most: float) -> Any:
    return np.minimum(np.maximum(x, -most), most)


def _plain(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda r, *a: f(*a)


def _add(name: str, source: str, f: Callable[..., Any], exact: bool = False, smooth: bool = True) -> None:
    OPERATIONS[name] = Operation(source, f, exact, smooth)


# --- elementwise, floats -----------------------------------------------------------------------------

UNARY: Table = {
    "sin": ("jnp.sin({0})", np.sin),
    "cos": ("jnp.cos({0})", np.cos),
    "tanh": ("jnp.tanh({0})", np.tanh),
    "exp": ("jnp.exp({0})", np.exp),
    "exp2": ("jnp.exp2({0})", np.exp2),
    "expm1": ("jnp.expm1({0})", np.expm1),
    "log": ("jnp.log(abs({0}))", lambda x: np.log(abs(x))),
    "log1p": ("jnp.log1p({0} * {0})", lambda x: np.log1p(x * x)),
    "sqrt": ("jnp.sqrt(abs({0}))", lambda x: np.sqrt(abs(x))),
    "rsqrt": ("lax.rsqrt({0} * {0} + 0.5)", lambda x: 1 / np.sqrt(x * x + 0.5)),
    "square": ("jnp.square({0})", np.square),
    "cube": ("{0} ** 3", lambda x: x * x * x),
    "reciprocal": ("1 / {0}", lambda x: 1 / x),
    "logistic": ("jax.nn.sigmoid({0})", lambda x: 1 / (1 + np.exp(-x))),
    "silu": ("jax.nn.silu({0})", lambda x: x / (1 + np.exp(-x))),
    "softplus": ("jax.nn.softplus({0})", lambda x: np.logaddexp(x, 0)),
    "erf": ("lax.erf({0})", np.vectorize(math.erf, otypes=[float])),
    "cbrt": ("jnp.cbrt({0})", np.cbrt),
    "arctan": ("jnp.arctan({0})", np.arctan),
    "halved": ("{0} * 0.5", lambda x: x * 0.5),
    "shifted": ("{0} + 1.5", lambda x: x + 1.5),
    "mirrored": ("2 - {0}", lambda x: 2 - x),
}
UNARY_EXACT: Table = {
    "neg": ("-{0}", np.negative),
    "abs": ("abs({0})", abs),
    "relu": ("jax.nn.relu({0})", lambda x: np.maximum(x, 0)),
    "floor": ("jnp.floor({0})", np.floor),
    "ceil": ("jnp.ceil({0})", np.ceil),
    "round": ("jnp.round({0})", np.round),
    "sign": ("jnp.sign({0})", np.sign),
    "clip": ("jnp.clip({0}, -1, 1.5)", lambda x: np.minimum(np.maximum(x, -1), 1.5)),
    "nan_to_num": (
        "jnp.nan_to_num({0}, nan=0.5, posinf=3, neginf=-3)",
        lambda x: np.nan_to_num(x, nan=0.5, posinf=3, neginf=-3),
    ),
    "stop_gradient": ("lax.stop_gradient({0})", lambda x: x),
}
BINARY: Table = {
    "add": ("{0} + {1}", np.add),
    "sub": ("{0} - {1}", np.subtract),
    "mul": ("{0} * {1}", np.multiply),
    "div": ("{0} / {1}", np.divide),
    "safe_div": ("{0} / (1 + abs({1}))", lambda x, y: x / (1 + abs(y))),
    "power": ("(abs({0}) + 0.25) ** jnp.clip({1}, -2, 2)", lambda x, y: (abs(x) + 0.25) ** _limited(y, 2)),
    "logaddexp": ("jnp.logaddexp({0}, {1})", np.logaddexp),
    "atan2": ("jnp.arctan2({0}, {1})", np.arctan2),
    "select": ("jnp.where({0} > {1}, {0}, {1} * 0.5)", lambda x, y: np.where(x > y, x, y * 0.5)),
}
BINARY_EXACT: Table = {
    "max": ("jnp.maximum({0}, {1})", np.maximum),
    "min": ("jnp.minimum({0}, {1})", np.minimum),
}
for _name, (_source, _f) in UNARY.items():
    _add(_name, _source, _plain(_f))
for _name, (_source, _f) in (UNARY_EXACT | BINARY_EXACT).items():
    _add(_name, _source, _plain(_f), exact=True)
for _name, (_source, _f) in BINARY.items():
    _add(_name, _source, _plain(_f))


def _gelu(r: Rounding, x: Any) -> Any:
    inner = r(np.sqrt(2 / np.pi) * r(x + r(0.044715 * r(x**3))))
    return 0.5 * x * r(1 + r(np.tanh(inner)))


_add("gelu", "jax.nn.gelu({0})", _gelu)

# --- elementwise, integers and booleans --------------------------------------------------------------

INTEGER_UNARY: Table = {
    "int_neg": ("-{0}", np.negative),
    "int_not": ("~{0}", np.invert),
    "int_double": ("{0} * 2 + 1", lambda x: x * x.dtype.type(2) + x.dtype.type(1)),
    "int_square": ("{0} * {0}", lambda x: x * x),
    "popcount": (
        "lax.population_count({0})",
        lambda x: np.bitwise_count(x.view(f"u{x.itemsize}")).astype(x.dtype),
    ),
    "int_clip": ("jnp.clip({0}, 2, 5)", lambda x: np.clip(x, x.dtype.type(2), x.dtype.type(5))),
}
INTEGER_BINARY: Table = {
    "int_add": ("{0} + {1}", np.add),
    "int_sub": ("{0} - {1}", np.subtract),
    "int_mul": ("{0} * {1}", np.multiply),
    "int_and": ("{0} & {1}", np.bitwise_and),
    "int_or": ("{0} | {1}", np.bitwise_or),
    "int_xor": ("{0} ^ {1}", np.bitwise_xor),
    "int_max": ("jnp.maximum({0}, {1})", np.maximum),
    "int_min": ("jnp.minimum({0}, {1})", np.minimum),
    "int_floordiv": ("{0} // ({1} & 7 | 1)", lambda x, y: x // (y & _of(y, 7) | _of(y, 1))),
    "int_mod": ("{0} % ({1} & 7 | 1)", lambda x, y: x % (y & _of(y, 7) | _of(y, 1))),
    "int_shl": ("{0} << ({1} & 7)", lambda x, y: x << (y & _of(y, 7))),
    "int_shr": ("{0} >> ({1} & 7)", lambda x, y: x >> (y & _of(y, 7))),
}
BOOLEAN_BINARY: Table = {
    "bool_and": ("{0} & {1}", np.logical_and),
    "bool_or": ("{0} | {1}", np.logical_or),
    "bool_xor": ("{0} ^ {1}", np.logical_xor),
}
COMPARE: Table = {
    "gt": ("{0} > {1}", np.greater),
    "ge": ("{0} >= {1}", np.greater_equal),
    "eq": ("{0} == {1}", np.equal),
    "ne": ("{0} != {1}", np.not_equal),
}


def _of(x: Any, n: int) -> Any:
    return x.dtype.type(n)


for _name, (_source, _f) in (INTEGER_UNARY | INTEGER_BINARY | BOOLEAN_BINARY | COMPARE).items():
    _add(_name, _source, _plain(_f), exact=True)
_add("bool_not", "~{0}", _plain(np.logical_not), exact=True)
_add("isfinite", "jnp.isfinite({0})", _plain(np.isfinite), exact=True)
_add("positive", "{0} > 0", _plain(lambda x: x > 0), exact=True)
_add("where", "jnp.where({0}, {1}, {2})", _plain(np.where), exact=True)

# --- conversions -------------------------------------------------------------------------------------

_add("cast", "{0}.astype('{t}')", _plain(lambda x: x))  # reference.evaluate converts
_add(
    "float_to_int",
    "jnp.clip(jnp.nan_to_num({0}, nan=3, posinf=9, neginf=0) * 4, {p[0]}, 100).astype('{t}')",
    _plain(lambda x, low: np.trunc(np.clip(np.nan_to_num(x, nan=3, posinf=9, neginf=0) * 4, low, 100))),
    exact=True,
)

# --- constants ---------------------------------------------------------------------------------------

_add("full", "jnp.full({p[0]}, {p[1]}, '{t}')", _plain(lambda shape, v: np.full(shape, float(v))), exact=True)
_add("iota", "jnp.arange({p[0]}, dtype='{t}')", _plain(lambda n: np.arange(n)), exact=True)
_add("eye", "jnp.eye({p[0]}, {p[1]}, dtype='{t}')", _plain(lambda n, m: np.eye(n, m)), exact=True)
_add("scalar", "{p[0]}", _plain(lambda v: np.asarray(float(v))), exact=True)

# --- moves -------------------------------------------------------------------------------------------


def _slices(x: Any, parts: Sequence[tuple[int, int, int]]) -> Any:
    return x[tuple(slice(*p) for p in parts)]


def _interior(x: Any, fill: float, config: Sequence[tuple[int, int, int]]) -> Any:
    """``lax.pad``: edges may be negative."""
    for d, (low, high, inside) in enumerate(config):
        n = x.shape[d]
        width = n + max(n - 1, 0) * inside
        shape = (*x.shape[:d], width, *x.shape[d + 1 :])
        spread = np.full(shape, fill, x.dtype)
        spread[(slice(None),) * d + (slice(0, width, inside + 1),)] = x
        edges = [(0, 0)] * x.ndim
        edges[d] = (max(low, 0), max(high, 0))
        x = np.pad(spread, edges, constant_values=fill)
        x = x[(slice(None),) * d + (slice(max(-low, 0), x.shape[d] - max(-high, 0)),)]
    return x


def _clipped(index: Any, most: int) -> Any:
    return np.clip(index.astype(np.int32), 0, most).astype(np.int64)


def _added_at(x: Any, index: Any) -> Any:
    x = x.copy()
    np.add.at(x, _clipped(index, len(x) - 1), x.dtype.type(1))
    return x


def _dynamic(x: Any, index: Any, size: int, axis: int) -> Any:
    start = min(int(_clipped(index.ravel()[0], 100)), x.shape[axis] - size)
    return np.take(x, np.arange(start, start + size), axis)


def _updated(x: Any, index: Any, size: int, axis: int) -> Any:
    start = min(int(_clipped(index.ravel()[0], 100)), x.shape[axis] - size)
    x, new = x.copy(), np.take(x, np.arange(size), axis)
    x[(slice(None),) * axis + (slice(start, start + size),)] = new
    return x


def _triangle(x: Any, over: int, offset: int, fill: float) -> Any:
    """Positions ``row * over + offset >= column`` of the last two dimensions."""
    rows, columns = np.arange(x.shape[-2])[:, None], np.arange(x.shape[-1])
    return np.where(rows * over + offset >= columns, x, fill)


_MOVES: Table = {
    "transpose": ("{0}.transpose({p[0]})", np.transpose),
    "reshape": ("{0}.reshape({p[0]})", lambda x, shape: x.reshape(shape)),
    "expand": ("jnp.expand_dims({0}, {p[0]})", lambda x, d: np.expand_dims(x, d)),
    "broadcast": ("jnp.broadcast_to({0}, {p[0]})", lambda x, shape: np.broadcast_to(x, shape).copy()),
    "flip": ("jnp.flip({0}, {p[0]})", lambda x, d: np.flip(x, d)),
    "roll": ("jnp.roll({0}, {p[0]}, {p[1]})", np.roll),
    "slice": (
        "lax.slice({0}, {p[1]}, {p[2]}, {p[3]})",
        lambda x, p, *_: _slices(x, p),
    ),
    "pad": (
        "lax.pad({0}, jnp.array({p[0]}, {0}.dtype), {p[1]})",
        lambda x, fill, config: _interior(x, fill, config),
    ),
    "concatenate": ("jnp.concatenate([{0}, {1}], {p[0]})", lambda x, y, d: np.concatenate([x, y], d)),
    "stack": ("jnp.stack([{0}, {1}], {p[0]})", lambda x, y, d: np.stack([x, y], d)),
    "tile": ("jnp.tile({0}, {p[0]})", np.tile),
    "repeat": ("jnp.repeat({0}, {p[0]}, axis={p[1]})", np.repeat),
    "take": (
        "jnp.take({0}, jnp.array({p[0]}, 'int32'), axis={p[1]})",
        lambda x, i, d: np.take(x, np.array(i, np.int64), d),
    ),
    "take_at": (
        "jnp.take({0}, jnp.clip({1}.astype('int32'), 0, {p[0]}), axis={p[1]})",
        lambda x, i, most, d: np.take(x, _clipped(i, most), d),
    ),
    "along_axis": (
        "jnp.take_along_axis({0}, jnp.argsort({0}, axis={p[0]}), axis={p[0]})",
        lambda x, d: np.take_along_axis(x, np.argsort(x, axis=d, kind="stable"), d),
    ),
    "dynamic_slice": (
        "lax.dynamic_slice_in_dim({0}, jnp.clip({1}.ravel()[0].astype('int32'), 0, 100), {p[0]}, {p[1]})",
        _dynamic,
    ),
    "dynamic_update": (
        "lax.dynamic_update_slice_in_dim({0}, lax.slice_in_dim({0}, 0, {p[0]}, axis={p[1]}), "
        "jnp.clip({1}.ravel()[0].astype('int32'), 0, 100), {p[1]})",
        _updated,
    ),
    "sort": ("jnp.sort({0}, axis={p[0]})", lambda x, d: np.sort(x, axis=d)),
    "triangle": (
        "jnp.where(jnp.arange({0}.shape[-2])[:, None] * {p[0]} + {p[1]} >= jnp.arange({0}.shape[-1]), {0}, "
        "jnp.array({p[2]}, {0}.dtype))",
        _triangle,
    ),
}
for _name, (_source, _f) in _MOVES.items():
    _add(_name, _source, _plain(_f), exact=True)
_add("added_at", "{0}.at[jnp.clip({1}.astype('int32'), 0, {0}.shape[0] - 1)].add(1)", _plain(_added_at))
_add(
    "argsort",
    "jnp.argsort({0}, axis={p[0]}).astype('{t}')",
    _plain(lambda x, d: np.argsort(x, axis=d, kind="stable")),
    exact=True,
)

# --- reductions --------------------------------------------------------------------------------------


def _sum(r: Rounding, x: Any, axes: Axes, keep: bool = False) -> Any:
    if x.dtype.kind != "f":
        return np.sum(x, axis=tuple(axes), keepdims=keep, dtype=x.dtype)
    return r.total(
        np.sum(x, axis=tuple(axes), keepdims=keep), np.sum(abs(x), axis=tuple(axes), keepdims=keep)
    )


def _mean(r: Rounding, x: Any, axes: Axes, keep: bool = False) -> Any:
    return _sum(r, x, axes, keep) / np.prod([x.shape[d] for d in axes])


def _var(r: Rounding, x: Any, axes: Axes, keep: bool = False) -> Any:
    return r(_mean(r, r(np.square(r(x - r(_mean(r, x, axes, True))))), axes, keep))


def _logsumexp(r: Rounding, x: Any, axes: Axes, keep: bool = False) -> Any:
    largest = np.max(x, axis=tuple(axes), keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0)
    shift = largest if keep else largest.reshape(np.sum(x, axis=tuple(axes)).shape)
    return r(np.log(r(_sum(r, r(np.exp(r(x - largest))), axes, keep)))) + shift


def _prod(r: Rounding, x: Any, axes: Axes, keep: bool) -> Any:
    product = np.prod(x, axis=tuple(axes), keepdims=keep, dtype=x.dtype)
    # In another order an overflow may meet a zero, or an underflow a large factor.
    extent = np.sum(abs(np.log2(np.where(x == 0, 1, abs(x)))), axis=tuple(axes), keepdims=keep)
    return r.total(product, np.exp2(extent)) if x.dtype.kind == "f" else product


_REDUCTIONS: Table = {
    "sum": ("jnp.sum({0}, {p[0]}, keepdims={p[1]}, dtype='{t}')", _sum),
    "mean": ("jnp.mean({0}, {p[0]}, keepdims={p[1]})", _mean),
    "var": ("jnp.var({0}, {p[0]}, keepdims={p[1]})", _var),
    "logsumexp": ("jax.nn.logsumexp({0}, {p[0]}, keepdims={p[1]})", _logsumexp),
    "prod": ("jnp.prod({0}, {p[0]}, keepdims={p[1]}, dtype='{t}')", _prod),
}
for _name, (_source, _f) in _REDUCTIONS.items():
    _add(_name, _source, _f)
for _name in ("max", "min", "any", "all"):
    _f = getattr(np, _name)
    _add(
        f"reduce_{_name}",
        f"jnp.{_name}({{0}}, {{p[0]}}, keepdims={{p[1]}})",
        lambda r, x, axes, keep, f=_f: f(x, axis=tuple(axes), keepdims=keep),
        exact=True,
    )
for _name in ("argmax", "argmin"):
    _f = getattr(np, _name)
    _add(
        _name,
        f"jnp.{_name}({{0}}, {{p[0]}}, keepdims={{p[1]}}).astype('{{t}}')",
        lambda r, x, d, keep, f=_f: f(x, axis=d, keepdims=keep),
        exact=True,
    )


def _cumsum(r: Rounding, x: Any, d: int) -> Any:
    if x.dtype.kind != "f":
        return np.cumsum(x, axis=d, dtype=x.dtype)
    return r.total(np.cumsum(x, axis=d), np.cumsum(abs(x), axis=d))


_add("cumsum", "jnp.cumsum({0}, {p[0]}, dtype='{t}')", _cumsum)
_add(
    "cummax",
    "lax.cummax({0}, {p[0]})",
    _plain(lambda x, d: np.maximum.accumulate(x, axis=d)),
    exact=True,
)

# --- contractions ------------------------------------------------------------------------------------


def _einsum(r: Rounding, x: Any, y: Any, spec: str, dtype: str) -> Any:
    if x.dtype.kind != "f":
        return np.einsum(spec, x.astype(dtype), y.astype(dtype))
    return r.total(np.einsum(spec, x, y), np.einsum(spec, abs(x), abs(y)))


_add("einsum", "jnp.einsum({p[0]!r}, {0}, {1}, preferred_element_type={p[1]!r})", _einsum)

# --- normalisations ----------------------------------------------------------------------------------


def _exponentials(r: Rounding, x: Any, d: int) -> Any:
    return r(np.exp(r(x - np.max(x, axis=d, keepdims=True))))


def _softmax(r: Rounding, x: Any, d: int) -> Any:
    e = _exponentials(r, x, d)
    return e / r(_sum(r, e, (d,), True))


def _log_softmax(r: Rounding, x: Any, d: int) -> Any:
    shifted = r(x - np.max(x, axis=d, keepdims=True))
    return shifted - r(np.log(r(_sum(r, r(np.exp(shifted)), (d,), True))))


def _softmax_where(r: Rounding, x: Any, mask: Any, d: int) -> Any:
    mask = np.broadcast_to(mask, x.shape)
    largest = np.max(np.where(mask, x, -np.inf), axis=d, keepdims=True)
    e = r(np.exp(r(np.where(mask, x, -np.inf) - largest)))
    return np.where(mask, e / r(_sum(r, np.where(mask, e, 0), (d,), True)), 0)


def _guarded(r: Rounding, x: Any, d: int) -> Any:
    largest = np.max(x, axis=d, keepdims=True)
    e = r(np.exp(r(x - np.where(np.isfinite(largest), largest, 0))))
    total = r(_sum(r, e, (d,), True))
    return e / np.where(total == 0, 1, total)


def _layernorm(r: Rounding, x: Any, d: int) -> Any:
    centred = r(x - r(_mean(r, x, (d,), True)))
    return centred / r(np.sqrt(r(r(_mean(r, r(np.square(centred)), (d,), True)) + 0.125)))


def _rmsnorm(r: Rounding, x: Any, d: int) -> Any:
    return x / r(np.sqrt(r(r(_mean(r, r(np.square(x)), (d,), True)) + 0.125)))


_add("softmax", "jax.nn.softmax({0}, {p[0]})", _softmax)
_add("log_softmax", "jax.nn.log_softmax({0}, {p[0]})", _log_softmax)
_add("softmax_where", "jax.nn.softmax({0}, {p[0]}, where={1})", _softmax_where)
_add(
    "guarded_softmax",
    "(lambda e: e / jnp.where((s := e.sum({p[0]}, keepdims=True)) == 0, 1, s))(jnp.exp({0} - "
    "jnp.where(jnp.isfinite(m := lax.stop_gradient({0}.max({p[0]}, keepdims=True))), m, 0)))",
    _guarded,
)
_add(
    "layernorm",
    "(lambda c: c * lax.rsqrt(jnp.mean(c * c, {p[0]}, keepdims=True) + 0.125))"
    "({0} - jnp.mean({0}, {p[0]}, keepdims=True))",
    _layernorm,
)
_add("rmsnorm", "{0} * lax.rsqrt(jnp.mean({0} * {0}, {p[0]}, keepdims=True) + 0.125)", _rmsnorm)

# --- control flow ------------------------------------------------------------------------------------

BODIES: dict[str, Callable[..., Any]] = {
    "jnp.sin(a) * 2": lambda r, a: r(np.sin(a)) * 2,
    "a * 0.5 - 1": lambda r, a: r(a * 0.5) - 1,
    "-a": lambda r, a: -a,
    "jnp.tanh(a) / (1 + abs(a))": lambda r, a: r(np.tanh(a)) / r(1 + abs(a)),
    "jnp.exp(-a * a)": lambda r, a: np.exp(-r(a * a)),
    "a - a.sum()": lambda r, a: a - r(_sum(r, a, tuple(range(a.ndim)))),
}
SCANS: dict[str, Callable[..., Any]] = {
    "jnp.tanh(c + a), c * a": lambda r, c, a: (r(np.tanh(r(c + a))), r(c * a)),
    "c * 0.5 + a, c": lambda r, c, a: (r(r(c * 0.5) + a), c),
    "jnp.maximum(c, a), a - c": lambda r, c, a: (np.maximum(c, a), r(a - c)),
    "jnp.cos(c) * a, jnp.exp(-abs(c))": lambda r, c, a: (r(r(np.cos(c)) * a), r(np.exp(-abs(c)))),
}


def _cond(r: Rounding, flags: Any, x: Any, body: str, other: str) -> Any:
    return BODIES[body if np.any(flags) else other](r, x)


def _scan(r: Rounding, x: Any, body: str, which: int) -> Any:
    c, made = np.zeros(x.shape[1:]), []
    for a in x:
        c, y = SCANS[body](r, c, a)
        made.append(y)
    return np.stack(made) if which else c


def _turns(r: Rounding, x: Any, body: str, n: int) -> Any:
    for _ in range(n):
        x = r(BODIES[body](r, x))
    return x


def _mapped(r: Rounding, x: Any, body: str) -> Any:
    return np.stack([BODIES[body](r, a) for a in x])


_add("cond", "lax.cond(jnp.any({0}), lambda a: {p[0]}, lambda a: {p[1]}, {1})", _cond)
_add("scan", "lax.scan(lambda c, a: ({p[0]}), jnp.zeros_like({0}[0]), {0})[{p[1]}]", _scan)
_add("fori", "lax.fori_loop(0, {p[1]}, lambda i, a: {p[0]}, {0})", _turns)
_add(
    "while",
    "lax.while_loop(lambda s: s[0] < {p[1]}, lambda s: (s[0] + 1, (lambda a: {p[0]})(s[1])), (0, {0}))[1]",
    _turns,
    smooth=False,
)
_add("map", "lax.map(lambda a: {p[0]}, {0})", _mapped)
_add("vmap", "jax.vmap(lambda a: {p[0]})({0})", _mapped)
_add("checkpoint", "jax.checkpoint(lambda a: {p[0]})({0})", lambda r, x, body: BODIES[body](r, x))
_add("nested_jit", "jax.jit(lambda a: {p[0]})({0})", lambda r, x, body: BODIES[body](r, x))
