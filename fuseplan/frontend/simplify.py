"""Simplify flat programs: constant folding, value numbering, known values as inputs.

Constant folding replaces an operation on scalar literals alone (``n - ddof`` in ``jnp.var``) by a literal.
Empty arrays are left out of concatenations (``lax.associative_scan`` has some), and reductions of single
elements are reshapes.
Value numbering finds the values of one program that another computes, too: two values are the same if they
are the same expression of the same inputs (Cocke and Schwartz, 1970). Such a value can be an input
(``given``).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax

from fuseplan.frontend.equation_text import Describer
from fuseplan.frontend.trace import Equation, Flat, Literal, Operand, live

_FOLDED = {"abs", "add", "ceil", "convert_element_type", "div", "eq", "exp", "floor", "ge", "gt"}
_FOLDED |= {"integer_pow", "le", "log", "lt", "max", "min", "mul", "ne", "neg", "not", "and", "or"}
_FOLDED |= {"pow", "rsqrt", "select_n", "sign", "sqrt", "square", "sub"}

_REDUCTIONS = {"reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}

_EXACT: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
"""NumPy's operations that give the bits that XLA gives: wrapping on integers, correctly rounded on floating
point. XLA compiles each operation that it evaluates, which takes up to 40 ms; these take microseconds."""

_EXACT_FLOATS: dict[str, Callable[..., Any]] = {"div": np.divide, "sqrt": np.sqrt}


def fold(flat: Flat) -> Flat:
    """The program without operations on scalar literals, without empty operands of concatenations, and with
    reshapes in the place of reductions of single elements, as XLA has it; the same object if it has none of
    them."""
    known: dict[int, Operand] = {}
    values: dict[Any, Any] = {}
    equations: list[Equation] = []

    def read(v: Operand) -> Operand:
        return v if isinstance(v, Literal) else known.get(v, v)

    for eqn in flat.equations:
        inputs = tuple([read(v) for v in eqn.inputs]) if known else eqn.inputs
        if _is_folded(eqn, inputs):
            known[eqn.outputs[0]] = _literal(eqn, inputs, values)
            continue
        if _is_of_single_elements(eqn):
            params = {"dimensions": tuple(sorted(eqn.params["axes"]))}
            equations.append(replace(eqn, primitive=lax.squeeze_p, params=params, inputs=inputs))
            continue
        filled = _filled(eqn)
        if len(filled) == 1 < len(inputs):
            known[eqn.outputs[0]] = inputs[filled[0]]
        elif len(filled) < len(inputs):
            some, avals = (tuple([of[k] for k in filled]) for of in (inputs, eqn.in_avals))
            equations.append(replace(eqn, inputs=some, in_avals=avals))
        else:
            equations.append(eqn if inputs == eqn.inputs else replace(eqn, inputs=inputs))
    if not known and all(map(operator.is_, equations, flat.equations)):
        return flat
    outputs = tuple([read(v) for v in flat.outputs])
    return replace(flat, equations=live(equations, outputs), outputs=outputs)


def roots(flat: Flat) -> Flat:
    """The program with square roots in the place of powers by ``k + 1/2`` for small integers ``k``; the same
    object if it has none of them. A root takes a CPU a tenth of the time of a power."""
    avals, equations = list(flat.avals), []
    for eqn in flat.equations:
        equations += _as_root(eqn, avals) if _is_half_power(eqn) else [eqn]
    return (
        replace(flat, equations=tuple(equations), avals=tuple(avals))
        if len(avals) > len(flat.avals)
        else flat
    )


_HALF_POWERS = (0.5, 1.5, 2.5)
"""By more than these, products of a number overflow before its power does."""


def _is_half_power(eqn: Equation) -> bool:
    if eqn.primitive.name != "pow" or eqn.is_set_apart or not isinstance(eqn.inputs[1], Literal):
        return False
    base, exponent = eqn.in_avals
    is_wide = base.dtype in (np.float32, np.float64) and not isinstance(eqn.inputs[0], Literal)
    return is_wide and not exponent.shape and abs(float(eqn.inputs[1].val)) in _HALF_POWERS


def _as_root(eqn: Equation, avals: list[Any]) -> list[Equation]:
    """The equations of a half-integer power. Powers of -0 and of minus infinity are those of their
    magnitudes, of other negative numbers NaN."""
    base, exponent = eqn.inputs
    (aval,) = eqn.out_avals
    flags = aval.update(dtype=np.dtype(bool), weak_type=False)
    scalar, made = aval.update(shape=()), list[Equation]()

    def literal(value: float) -> Literal:
        return Literal(np.asarray(value, aval.dtype)[()], scalar)

    def add(primitive: Any, *inputs: Operand, like: Any = aval, **params: Any) -> int:
        avals.append(like)
        types = tuple([v.aval if isinstance(v, Literal) else avals[v] for v in inputs])
        made.append(
            replace(eqn, primitive=primitive, params=params, inputs=inputs, in_avals=types,
                    outputs=(len(avals) - 1,), out_avals=(like,))
        )  # fmt: skip
        return len(avals) - 1

    power = float(exponent.val)  # type: ignore[union-attr]
    size = add(lax.abs_p, base)
    found = add(lax.sqrt_p, size, accuracy=None)
    if power < 0:
        found = add(lax.div_p, literal(1), found)
    for _ in range(_HALF_POWERS.index(abs(power))):
        found = add(lax.mul_p if power > 0 else lax.div_p, found, size)
    is_negative = add(lax.lt_p, base, literal(0), like=flags)
    is_finite = add(lax.gt_p, base, literal(-np.inf), like=flags)
    has_none = add(lax.and_p, is_negative, is_finite, like=flags)
    add(lax.select_n_p, has_none, found, _full(literal(np.nan), aval, add))
    made[-1] = replace(made[-1], outputs=eqn.outputs)
    return made


def _full(value: Literal, aval: Any, add: Callable[..., int]) -> Operand:
    """An array like ``aval`` of one value: a selection takes no scalar beside an array."""
    if not aval.shape:
        return value
    return add(lax.broadcast_in_dim_p, value, shape=aval.shape, broadcast_dimensions=(), sharding=None)


def _is_folded(eqn: Equation, inputs: tuple[Operand, ...]) -> bool:
    if eqn.primitive.name not in _FOLDED or not all(isinstance(v, Literal) for v in inputs):
        return False
    return all(getattr(aval, "shape", None) == () for aval in (*eqn.in_avals, *eqn.out_avals))


def _is_of_single_elements(eqn: Equation) -> bool:
    """Whether it reduces dimensions of size one alone."""
    if eqn.primitive.name not in _REDUCTIONS or eqn.is_set_apart:
        return False
    (aval,), axes = eqn.in_avals, eqn.params["axes"]
    return bool(axes) and all(aval.shape[a] == 1 for a in axes)


def _filled(eqn: Equation) -> Sequence[int]:
    """The indices of the operands that the result depends on: of a concatenation, those with elements. All
    of them if every operand is empty."""
    every = range(len(eqn.inputs))
    if eqn.primitive.name != "concatenate":
        return every
    return [k for k in every if 0 not in eqn.in_avals[k].shape] or every


def _literal(eqn: Equation, literals: Sequence[Any], values: dict[Any, Any]) -> Literal:
    """The result of an equation on ``literals``; ``values`` caches results by operation and operands."""
    (aval,) = eqn.out_avals
    params = tuple((k, str(v)) for k, v in eqn.params.items())
    key = (eqn.primitive.name, params, tuple((repr(v.val), str(v.aval)) for v in literals))
    if key not in values:
        values[key] = folded(eqn.primitive, literals, eqn.params, aval.dtype)
    return Literal(values[key], aval)


def folded(primitive: Any, literals: Sequence[Any], params: dict[str, Any], dtype: Any) -> Any:
    """The result of ``primitive`` on scalar literals, as a NumPy scalar.

    Example:
        >>> from jax import lax
        >>> from jax.extend.core import Literal
        >>> aval = jax.typeof(np.float32(0))
        >>> folded(lax.sub_p, [Literal(8.0, aval), Literal(1.0, aval)], {}, aval.dtype)
        np.float32(7.0)
    """
    arrays = [np.asarray(v.val, v.aval.dtype) for v in literals]
    function = _function(primitive.name, [a.dtype for a in arrays], np.dtype(dtype))
    if function is not None:
        with np.errstate(all="ignore"):
            result = np.asarray(function(*arrays)).astype(dtype)
        if not any(map(_is_subnormal, (*arrays, result))):  # A CPU may flush these to zero.
            return result[()]
    with jax.ensure_compile_time_eval():
        return np.asarray(primitive.bind(*(v.val for v in literals), **params))[()]


def _is_subnormal(x: Any) -> bool:
    return bool(x.dtype.kind == "f" and 0 < abs(x) < np.finfo(x.dtype).tiny)


def _function(name: str, dtypes: list[Any], result: Any) -> Callable[..., Any] | None:
    """NumPy's function that does exactly what the primitive does on these types, if there is one."""
    floating = all(d in (np.float32, np.float64) for d in dtypes)
    integers = all(d.kind in "iu" for d in dtypes)
    if name == "convert_element_type":  # From floating point to integers XLA saturates.
        return np.positive if (floating and result in (np.float32, np.float64)) or integers else None
    if floating and name in _EXACT_FLOATS:
        return _EXACT_FLOATS[name]
    return _EXACT.get(name) if floating or integers else None


class Expressions:
    """Numbers the values of programs that are alive all the while."""

    def __init__(self) -> None:
        self._describe = Describer()
        self._numbers: dict[Hashable, int] = {}

    def number(self, equations: Iterable[Equation], inputs: Mapping[int, Hashable]) -> dict[int, int]:
        """The number of each value that ``inputs`` lead to; these have names that all programs know
        them by."""
        found = {v: self._of(("input", name)) for v, name in inputs.items()}
        for eqn in equations:
            operands = tuple([self._operand(v, found) for v in eqn.inputs])
            if eqn.effects or eqn.is_set_apart or None in operands:
                continue
            params = self._describe.params(eqn.primitive.name, eqn.params)
            name = (eqn.primitive.name, params, operands)
            for k, v in enumerate(eqn.outputs):
                found[v] = self._of((k, *name))
        return found

    def _operand(self, v: int | Literal, found: Mapping[int, int]) -> Hashable:
        """A literal by its content, a value by its number; None if it has none."""
        return (self._describe.literal(v.val), str(v.aval)) if isinstance(v, Literal) else found.get(v)

    def _of(self, expression: Hashable) -> int:
        return self._numbers.setdefault(expression, len(self._numbers))


def given(flat: Flat, values: Sequence[int | None], avals: Sequence[Any]) -> Flat:
    """The program with ``values`` as further inputs, of these avals, and without what led to them
    alone; None is an input that it does not read."""
    unread = itertools.count(len(flat.avals))
    numbers = [next(unread) if v is None else v for v in values]
    taken = set(numbers)
    return Flat(
        live([eqn for eqn in flat.equations if taken.isdisjoint(eqn.outputs)], flat.outputs),
        (*flat.avals, *(a for v, a in zip(values, avals, strict=True) if v is None)),
        (*flat.inputs, *numbers),
        flat.outputs,
        flat.consts,
        flat.out_tree,
    )
