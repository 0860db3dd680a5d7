"""Elementwise primitives: one line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from costmodel.graph import DimMap, DimRole, Flops, OpKind
from fuseplan.ops import composed
from fuseplan.ops.rule import (
    MOSAIC_GPU,
    NONE,
    PALLAS,
    TRITON,
    XLA,
    BlockFn,
    Rule,
    Space,
    Tile,
    bind,
    dtypes_of,
    kernel_dtypes,
    known_dtypes,
    out_size,
    own_dims,
)
from fuseplan.trace import Equation


def elementwise_space(eqn: Equation) -> Space:
    """Operands are indexed as the result is; where one has size one, or is a scalar, it
    is broadcast."""
    shape = eqn.out_avals[0].shape
    dims, out_map = own_dims(shape)
    maps: list[DimMap] = []
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


def _is_small(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


def _in_float32(compute: BlockFn) -> BlockFn:
    """``compute`` on 16-bit floats in float32, rounded once at the end."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        if tile.backend in XLA or not any(_is_small(jnp.result_type(a)) for a in args):
            return compute(tile, eqn, args)
        wide = [jnp.asarray(a, jnp.float32) if _is_small(jnp.result_type(a)) else a for a in args]
        results = compute(tile, eqn, wide)
        return [
            x.astype(aval.dtype) if _is_small(aval.dtype) else x
            for x, aval in zip(results, eqn.out_avals, strict=True)
        ]

    return block


wide_block = _in_float32(bind)
"""Math libraries of kernels have no 16-bit variants: compute in float32 and round once, as
XLA does (test_emit_body.py::test_sixteen_bit_math)."""


def plain_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """The primitive itself. A TPU's scalar unit has no 16-bit arithmetic."""
    scalar = tile.backend == "mosaic_tpu" and not tile.out_shapes[0]
    return (wide_block if scalar else bind)(tile, eqn, args)


def _lifted(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    if tile.backend in XLA | MOSAIC_GPU or tile.out_shapes[0]:
        return bind(tile, eqn, args)
    return [lax.reshape(x, ()) for x in bind(tile, eqn, [jnp.full((1, 1), a) for a in args])]


_vector_block = _in_float32(_lifted)
"""Functions that only the vector unit computes: of a scalar, on an array of one element."""


def _composed(compute: Callable[..., Any], lacking: frozenset[str]) -> BlockFn:
    """``compute(x, **params)`` on the backends that lack the primitive."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        if tile.backend not in lacking:
            return bind(tile, eqn, args)
        params = {"method": eqn.params["rounding_method"]} if "rounding_method" in eqn.params else {}
        return [compute(args[0], **params)]

    return _in_float32(block)


def _extremum_block(logical: Callable[[Any, Any], Any]) -> BlockFn:
    """``max`` and ``min``: of booleans, kernels know only the logical operation."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        if eqn.out_avals[0].dtype == jnp.bool_ and tile.backend not in XLA:
            return [logical(args[0], args[1])]
        return plain_block(tile, eqn, args)

    return block


def _add_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Of gradients, too, which Mosaic GPU knows no sum of."""
    return [lax.add(*args)] if tile.backend == "mosaic_gpu" else plain_block(tile, eqn, args)


def _neg_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    if tile.backend in TRITON | MOSAIC_GPU and jnp.issubdtype(eqn.out_avals[0].dtype, jnp.floating):
        # Pallas would compute 0 - x, which loses the sign of zero.
        return [args[0] * np.asarray(-1, eqn.out_avals[0].dtype)[()]]
    return plain_block(tile, eqn, args)


def _opposite(tile: Tile, x: Any) -> Any:
    """``~x`` of booleans, which Mosaic GPU would widen and cut off again."""
    return x ^ np.True_ if tile.backend == "mosaic_gpu" else ~x


def _not_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    boolean = eqn.out_avals[0].dtype == jnp.bool_
    return [_opposite(tile, args[0])] if boolean else plain_block(tile, eqn, args)


def _select_cases(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Kernels know two cases; more are nested. Booleans are selected by logic."""
    which, *cases = args
    boolean = eqn.out_avals[0].dtype == jnp.bool_
    if tile.backend in XLA or (len(cases) == 2 and not boolean):
        return bind(tile, eqn, args)
    result = cases[0]
    for i, case in enumerate(cases[1:], start=1):
        chosen = which if jnp.result_type(which) == jnp.bool_ else which == np.int32(i)
        if boolean:
            result = (chosen & case) | (_opposite(tile, chosen) & result)
        else:
            result = jnp.where(chosen, case, result)
    return [result]


def _select_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    scalar = tile.backend == "mosaic_tpu" and not tile.out_shapes[0]
    return (_in_float32(_select_cases) if scalar else _select_cases)(tile, eqn, args)


def _identity_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    return [args[0]]


def _integer_pow_flops(eqn: Equation) -> Flops:
    # Square-and-multiply: one squaring a bit, one multiplication a set bit.
    y = abs(eqn.params["y"])
    steps = max(y.bit_length() - 1, 0) + max(y.bit_count() - 1, 0) + (eqn.params["y"] < 0)
    return Flops(vector=steps * out_size(eqn))


def elementwise(
    vector: int = 1,
    transcendental: int = 0,
    *,
    lacks: frozenset[str] = NONE,
    block: BlockFn | None = None,
    supports: Callable[[Equation, str], bool] = known_dtypes,
    temporaries: int = 0,
) -> Rule:
    """A rule of so many vector and transcendental operations an element."""
    block = block or (wide_block if transcendental else plain_block)
    flops = _per_element(vector, transcendental)
    return Rule(OpKind.ELEMENTWISE, elementwise_space, flops, block, lacks, None, supports, temporaries)


def _signed_on_mosaic(eqn: Equation, backend: str) -> bool:
    """TPU compilers have no unsigned extrema, which a selection among three compares by."""
    return known_dtypes(eqn, backend) and not (backend == "mosaic_tpu" and "uint32" in dtypes_of(eqn))


def _cast_supports(eqn: Equation, backend: str) -> bool:
    """Mosaic converts narrow integers, though it computes with none."""
    narrow = {"int8", "int16", "uint8", "uint16"} if backend == "mosaic_tpu" else set()
    rest = dtypes_of(eqn) - narrow
    return not rest or (rest <= kernel_dtypes(backend))


def _integer_pow(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Mosaic GPU knows no powers below two."""
    (x,), y = args, eqn.params["y"]
    if tile.backend != "mosaic_gpu" or y > 1:
        return bind(tile, eqn, args)
    power = lax.integer_pow(x, -y) if y < -1 else x
    return [jnp.ones_like(x) if y == 0 else x if y == 1 else 1.0 / power]


def _sign(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Of a NaN and of zeros it is themselves, but not to Mosaic GPU."""
    x, (sign,) = args[0], plain_block(tile, eqn, args)
    if tile.backend != "mosaic_gpu" or not jnp.issubdtype(eqn.out_avals[0].dtype, jnp.floating):
        return [sign]
    return [jnp.where(jnp.abs(x) > 0, sign, x)]


def _cast_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Whatever is not zero is true, though Mosaic GPU would look at its last bit."""
    if tile.backend == "mosaic_gpu" and eqn.out_avals[0].dtype == jnp.bool_:
        return [args[0] != np.zeros((), eqn.in_avals[0].dtype)[()]]
    return bind(tile, eqn, args)


def _rem_supports(eqn: Equation, backend: str) -> bool:
    """Mosaic GPU has the remainder of integers alone."""
    is_float = jnp.issubdtype(eqn.out_avals[0].dtype, jnp.floating)
    return known_dtypes(eqn, backend) and not (backend == "mosaic_gpu" and is_float)


# A polynomial with its branches, evaluated block by block (Mosaic): partial sums, powers and
# selections that the TPU compiler's VMEM report shows for erfc: 4.5 blocks.
_POLYNOMIAL = 5

_MATH = elementwise(0, 1)
_COMPARE = elementwise(1)
_FREE = elementwise(0)
_RARE = elementwise(4, 4, lacks=PALLAS)
_MOSAIC = frozenset({"mosaic_tpu"})
_EITHER = _MOSAIC | MOSAIC_GPU
_TPU_LACKS = elementwise(2, 1, lacks=_EITHER)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "mul", "abs"), elementwise(1)),
    "sign": elementwise(1, block=_sign),
    "add_any": elementwise(1, block=_add_block),
    "neg": elementwise(1, block=_neg_block),
    "max": elementwise(1, block=_extremum_block(jnp.logical_or), supports=_signed_on_mosaic),
    "min": elementwise(1, block=_extremum_block(jnp.logical_and), supports=_signed_on_mosaic),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _COMPARE),
    **dict.fromkeys(("and", "or", "xor"), elementwise(1)),
    "not": elementwise(1, block=_not_block),
    **dict.fromkeys(("shift_left", "shift_right_logical", "shift_right_arithmetic"), elementwise(1)),
    "floor": elementwise(1, block=_composed(composed.floor, MOSAIC_GPU)),
    "ceil": elementwise(1, block=_composed(composed.ceil, MOSAIC_GPU)),
    "square": elementwise(1),
    **dict.fromkeys(("exp", "log", "tanh", "rsqrt", "exp2", "log2"), _MATH),
    "sqrt": elementwise(0, 1, block=_composed(composed.sqrt, MOSAIC_GPU)),
    "log1p": elementwise(0, 1, block=_composed(composed.log1p, MOSAIC_GPU)),
    **dict.fromkeys(("sin", "cos"), elementwise(2, 1, temporaries=_POLYNOMIAL)),
    "tan": elementwise(2, 1, lacks=MOSAIC_GPU, temporaries=_POLYNOMIAL),
    **dict.fromkeys(("sinh", "cosh", "asinh", "acosh", "atanh"), elementwise(4, 4, lacks=_EITHER)),
    **dict.fromkeys(("asin", "acos", "atan"), _TPU_LACKS),
    "atan2": elementwise(2, 1, lacks=MOSAIC_GPU, temporaries=_POLYNOMIAL),
    **dict.fromkeys(("lgamma", "digamma", "igamma", "igammac", "bessel_i0e", "bessel_i1e"), _RARE),
    **dict.fromkeys(("regularized_incomplete_beta", "polygamma", "zeta"), _RARE),
    **dict.fromkeys(("eq_to", "le_to", "lt_to"), elementwise(1, lacks=MOSAIC_GPU)),
    "is_finite": elementwise(1, block=_composed(composed.is_finite, MOSAIC_GPU)),
    **dict.fromkeys(("real", "imag", "conj", "complex"), elementwise(0, lacks=PALLAS)),
    **dict.fromkeys(("population_count", "clz", "nextafter"), elementwise(1, lacks=PALLAS)),
    **dict.fromkeys(("copy", "copy_p", "stop_gradient"), elementwise(0, block=_identity_block)),
    "one_minus_square": elementwise(2, lacks=PALLAS),
    "reduce_precision": elementwise(0, lacks=PALLAS),
    "div": elementwise(1, block=wide_block),
    "rem": elementwise(2, block=wide_block, supports=_rem_supports),
    "expm1": elementwise(1, 1, block=_composed(composed.expm1, _EITHER), temporaries=_POLYNOMIAL),
    "cbrt": elementwise(0, 1, lacks=_EITHER),
    "erf": elementwise(4, 1, block=_composed(composed.erf, TRITON | MOSAIC_GPU), temporaries=_POLYNOMIAL),
    "erfc": elementwise(4, 1, block=_composed(composed.erfc, PALLAS), temporaries=_POLYNOMIAL),
    "erf_inv": elementwise(4, 4, block=_vector_block, lacks=MOSAIC_GPU, temporaries=_POLYNOMIAL),
    "round": elementwise(1, block=_composed(composed.round_to, TRITON)),
    "logistic": elementwise(2, 1, block=_vector_block),
    "pow": elementwise(1, 2, block=_vector_block, lacks=MOSAIC_GPU),
    "integer_pow": Rule(OpKind.ELEMENTWISE, elementwise_space, _integer_pow_flops, _in_float32(_integer_pow)),
    "select_n": elementwise(1, block=_select_block, supports=_signed_on_mosaic),
    "clamp": elementwise(2, supports=_signed_on_mosaic),
    "convert_element_type": elementwise(0, block=_cast_block, supports=_cast_supports),
    "threefry2x32": Rule(OpKind.ELEMENTWISE, elementwise_space, _per_element(112, 0), None),
}
