"""Emit a group for XLA as it is: its equations one after another, as JAX would run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from costmodel.kernel import KernelSpec
from fuseplan import _compat
from fuseplan.emit.body import live_ins
from fuseplan.lower import Lowered
from fuseplan.trace import Equation, Literal


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The group's equations on whole arrays; see ``fuseplan.emit.emit``."""
    equations = [lowered.equations[n] for n in spec.nodes]
    reads = live_ins(spec)
    writes = tuple(w.value for w in spec.writes)

    def group(*arrays: Any) -> tuple[Any, ...]:
        values: dict[int, Any] = dict(zip(reads, arrays, strict=True))
        run(equations, values)
        return tuple(values[v] for v in writes)

    return group


def run(equations: Iterable[Equation], values: dict[int, Any]) -> None:
    """Evaluate equations in order, adding their results to ``values``."""
    for equation in equations:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in equation.inputs]
        with nullcontext() if equation.context is None else equation.context.manager:
            values.update(zip(equation.outputs, evaluate(equation, operands), strict=True))


def evaluate(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluate one equation, whatever its primitive, on arrays or tracers."""
    primitive = equation.primitive
    if any(map(_compat.varying_axes, equation.in_avals)):
        operands = [_compat.varying(x, aval) for x, aval in zip(operands, equation.in_avals, strict=True)]
    # Calls of functions (custom_jvp_call …) are bound to the function, not to its jaxpr.
    results = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
    return results if primitive.multiple_results else [results]
