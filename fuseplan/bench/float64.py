"""Evaluate a program in float64, as a reference for its results in float32.

A user's function may say float32 itself (``astype``, ``preferred_element_type``), so that float64
arguments alone would not do: every dtype in its equations is widened.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuseplan.frontend.trace import Equation, Flat, Literal, flatten, trace
from fuseplan.support import jax_compat


def in_float64(f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """``f(*args)`` with every floating-point value in float64, as NumPy arrays.

    Equations inside loops and branches stay as they are, and what these return is rounded to their dtypes.

    Example:
        >>> in_float64(lambda x: (x + 1e-12).astype("float32") - 1, (np.ones(1, np.float32),))[0] > 0
        np.True_
    """
    traced = trace(f, *args)
    with jax.enable_x64(True):
        flat = [_widened(a) for a in (*traced.consts, *jax.tree.leaves(args))]
        results = jax.jit(lambda *flat: _evaluate(traced, flat))(*flat)
        return jax.tree.unflatten(traced.out_tree, [np.asarray(r) for r in results])


def is_right_in_float64(f: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether XLA can be trusted with ``f`` in float64: on the CPU it has computed wrong elements
    of ``a + b - 2 * (x @ y.T)`` from 2³¹ bytes on (jaxlib 0.10.2, ``[20000, 20000]``)."""
    return all(8 * math.prod(aval.shape) < 2**31 for aval in trace(f, *args).avals)


def _evaluate(traced: Flat, flat: tuple[Any, ...]) -> list[Any]:
    values: dict[int, Any] = dict(zip(traced.inputs, flat, strict=True))

    def read(operand: Any) -> Any:
        return _widened(operand.val) if isinstance(operand, Literal) else values[operand]

    for equation in traced.equations:
        made = _bind(equation, [read(v) for v in equation.inputs])
        results = made if equation.primitive.multiple_results else [made]
        values.update(zip(equation.outputs, results, strict=True))
    return [read(v) for v in traced.outputs]


_WITH_BODIES = frozenset({"scan", "while", "cond"})
"""Primitives that evaluate equations of the dtypes that the program has."""


def _bind(equation: Equation, operands: list[Any]) -> Any:
    params: dict[str, Any] = {
        k: np.dtype(np.float64) if _is_narrow(v) else v for k, v in equation.params.items()
    }
    if equation.primitive.name == "scatter-add":  # a parameter of it is a jaxpr of the narrow type
        names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        kept: dict[str, Any] = {name: params[name] for name in names}
        return jax.lax.scatter_add(*operands, **kept)
    if equation.primitive.name == "reduce":
        return _reduce(equation, operands)
    if equation.primitive.name in _WITH_BODIES:
        narrow = [jnp.asarray(x, aval.dtype) for x, aval in zip(operands, equation.in_avals, strict=True)]
        return [_widened(x) for x in equation.primitive.bind(*narrow, **equation.params)]
    return equation.primitive.bind(*operands, **params)


def _reduce(equation: Equation, operands: list[Any]) -> Any:
    """A reduction by a function of the user, which is traced for the narrow type."""
    function, n = flatten(jax_compat.closed(equation.params["jaxpr"])), len(equation.out_avals)

    def combine(a: Any, b: Any) -> Any:
        return tuple(_evaluate(function, (*map(_widened, function.consts), *a, *b)))

    return jax.lax.reduce(tuple(operands[:n]), tuple(operands[n:]), combine, equation.params["dimensions"])


def _is_narrow(value: Any) -> bool:
    """Whether a parameter is a floating-point dtype."""
    is_dtype = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
    return is_dtype and bool(jnp.issubdtype(value, jnp.floating))


def _widened(x: Any) -> Any:
    if jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return jnp.asarray(x, jnp.float64)
    return jnp.asarray(x)
