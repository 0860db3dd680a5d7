"""Elementwise primitives: one line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from costmodel.graph import DimRole, Flops, OpKind
from fuseplan.ops.rule import NONE, PALLAS, TRITON, Rule, Space, Tile, bind, out_size, own_dims
from fuseplan.trace import Equation


def elementwise_space(eqn: Equation) -> Space:
    """Operands are indexed as the result is; where one has size one, or is a scalar, it
    is broadcast."""
    shape = eqn.out_avals[0].shape
    dims, out_map = own_dims(shape)
    maps = []
    for aval in eqn.in_avals:
        if aval.ndim == 0:
            maps.append(())
        else:
            maps.append(tuple(() if extent == 1 else out_map[d] for d, extent in enumerate(aval.shape)))
    parallel = (DimRole.PARALLEL,) * len(dims)
    return Space(dims, parallel, tuple(maps), (out_map,) * len(eqn.out_avals))


def _per_element(vector: int, transcendental: int) -> Callable[[Equation], Flops]:
    return lambda eqn: Flops(
        vector=vector * eqn.out_avals[0].size, transcendental=transcendental * eqn.out_avals[0].size
    )


def _upcast_on_triton(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Triton's math library has no 16-bit variants: compute in float32 and round once, as
    XLA does (test_emit_body.py::test_sixteen_bit_math)."""
    out_dtype = eqn.out_avals[0].dtype
    small = jnp.issubdtype(out_dtype, jnp.floating) and out_dtype.itemsize < 4
    if tile.backend != "triton" or not small:
        return bind(tile, eqn, args)
    wide = [
        jnp.asarray(a, jnp.float32) if jnp.issubdtype(jnp.result_type(a), jnp.floating) else a for a in args
    ]
    return [o.astype(out_dtype) for o in bind(tile, eqn, wide)]


def _integer_pow_flops(eqn: Equation) -> Flops:
    # Square-and-multiply: one squaring a bit, one multiplication a set bit.
    y = abs(eqn.params["y"])
    steps = max(y.bit_length() - 1, 0) + max(y.bit_count() - 1, 0) + (eqn.params["y"] < 0)
    return Flops(vector=steps * out_size(eqn))


def elementwise(vector: int = 1, transcendental: int = 0, *, lacks: frozenset[str] = NONE) -> Rule:
    """A rule of so many vector and transcendental operations an element."""
    block = _upcast_on_triton if transcendental else bind
    return Rule(OpKind.ELEMENTWISE, elementwise_space, _per_element(vector, transcendental), block, lacks)


_MATH = elementwise(0, 1)
_COMPARE = elementwise(1)
_FREE = elementwise(0)
_RARE = elementwise(4, 4, lacks=PALLAS)
_TPU_LACKS = elementwise(2, 1, lacks=frozenset({"mosaic_tpu"}))

RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "add_any", "sub", "mul", "max", "min", "neg", "abs", "sign"), elementwise(1)),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _COMPARE),
    **dict.fromkeys(("and", "or", "xor", "not"), elementwise(1)),
    **dict.fromkeys(("shift_left", "shift_right_logical", "shift_right_arithmetic"), elementwise(1)),
    **dict.fromkeys(("floor", "ceil", "square"), elementwise(1)),
    **dict.fromkeys(("exp", "log", "tanh", "sqrt", "rsqrt", "exp2", "log1p"), _MATH),
    **dict.fromkeys(("sin", "cos", "tan"), elementwise(2, 1)),
    **dict.fromkeys(("sinh", "cosh", "asinh", "acosh", "atanh"), _RARE),
    **dict.fromkeys(("asin", "acos", "atan", "atan2"), _TPU_LACKS),
    **dict.fromkeys(("lgamma", "digamma", "igamma", "igammac", "bessel_i0e", "bessel_i1e"), _RARE),
    **dict.fromkeys(("erf_inv", "erfc", "regularized_incomplete_beta", "polygamma", "zeta"), _RARE),
    **dict.fromkeys(("eq_to", "le_to", "lt_to", "is_finite"), _COMPARE),
    **dict.fromkeys(("real", "imag", "conj", "complex"), elementwise(0, lacks=PALLAS)),
    **dict.fromkeys(("population_count", "clz", "nextafter"), elementwise(1, lacks=PALLAS)),
    **dict.fromkeys(("copy", "copy_p", "reduce_precision"), elementwise(0, lacks=PALLAS)),
    "one_minus_square": elementwise(2, lacks=PALLAS),
    "div": Rule(OpKind.ELEMENTWISE, elementwise_space, _per_element(1, 0), _upcast_on_triton),
    "rem": elementwise(2),
    "expm1": elementwise(1, 1, lacks=frozenset({"mosaic_tpu"})),
    "cbrt": elementwise(0, 1, lacks=frozenset({"mosaic_tpu"})),
    "erf": elementwise(4, 1, lacks=TRITON),
    "round": elementwise(1, lacks=TRITON),
    "logistic": elementwise(2, 1),
    "pow": elementwise(1, 2),
    "integer_pow": Rule(OpKind.ELEMENTWISE, elementwise_space, _integer_pow_flops, bind),
    "select_n": elementwise(1),
    "clamp": elementwise(2),
    "convert_element_type": _FREE,
    "stop_gradient": _FREE,
    "threefry2x32": Rule(OpKind.ELEMENTWISE, elementwise_space, _per_element(112, 0), None),
}
