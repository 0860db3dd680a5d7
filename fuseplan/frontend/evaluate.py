"""Evaluate equations by JAX's own operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import jax.numpy as jnp
import numpy as np

from fuseplan.frontend.trace import Equation, Literal, Operand
from fuseplan.support import jax_compat

FlatFunction = Callable[..., list[Any]]


def evaluator(
    equations: Iterable[Equation], inputs: Sequence[int], outputs: Sequence[Operand]
) -> FlatFunction:
    """A function by JAX's own operations."""

    def run(*flat: Any) -> list[Any]:
        values: dict[int, Any] = dict(zip(inputs, flat, strict=True))
        run_equations(equations, values)
        return [literal_array(o) if isinstance(o, Literal) else values[o] for o in outputs]

    return run


def literal_array(literal: Literal) -> Any:
    """The value of a literal as an array of its dtype, weakly typed where the literal is."""
    aval: Any = literal.aval
    if getattr(aval, "weak_type", False):
        return jnp.asarray(np.asarray(literal.val).item())
    return jnp.asarray(literal.val, dtype=aval.dtype)


def run_equations(equations: Iterable[Equation], values: dict[int, Any]) -> None:
    """Evaluate equations in order, adding their results to ``values``."""
    for equation in equations:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in equation.inputs]
        with nullcontext() if equation.context is None else equation.context.manager:
            values.update(zip(equation.outputs, evaluate(equation, operands), strict=True))


def evaluate(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluate one equation, whatever its primitive, on arrays or tracers."""
    primitive = equation.primitive
    if any(map(jax_compat.varying_axes, equation.in_avals)):
        operands = [jax_compat.varying(x, aval) for x, aval in zip(operands, equation.in_avals, strict=True)]
    # Calls of functions (custom_jvp_call …) are bound to the function, not to its jaxpr.
    results = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
    return results if primitive.multiple_results else [results]
