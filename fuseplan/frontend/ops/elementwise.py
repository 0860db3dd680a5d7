"""Rules of elementwise primitives: the table at the end has one line for each.

Before it stand the block functions of primitives that a kernel language lacks, or lowers wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from costmodel.graph import DimRole, Flops, OpKind
from fuseplan.frontend.ops import composed
from fuseplan.frontend.ops.rule import (
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
    is_float_in_triton,
    kernel_dtypes,
    known_dtypes,
    out_size,
    own_dims,
)
from fuseplan.frontend.trace import Equation


def _is_narrow_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


def _in_float32(compute: BlockFn) -> BlockFn:
    """``compute`` in float32 for 16-bit floats, rounded once at the end."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        if tile.language in XLA or not any(_is_narrow_float(jnp.result_type(a)) for a in args):
            return compute(tile, eqn, args)
        wide = [jnp.asarray(a, jnp.float32) if _is_narrow_float(jnp.result_type(a)) else a for a in args]
        results = compute(tile, eqn, wide)
        return [
            x.astype(aval.dtype) if _is_narrow_float(aval.dtype) else x
            for x, aval in zip(results, eqn.out_avals, strict=True)
        ]

    return block


_wide_block = _in_float32(bind)
"""The primitive in float32, rounded once, as XLA computes it: kernels' math libraries have no 16-bit
variants."""


def _wide_on_tpu(compute: BlockFn) -> BlockFn:
    """``_in_float32`` on TPUs only."""
    wide = _in_float32(compute)
    return lambda tile, eqn, args: (wide if tile.language == "mosaic_tpu" else compute)(tile, eqn, args)


def _plain_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """The primitive itself; in float32 for a scalar on a TPU, whose scalar unit has no 16-bit arithmetic."""
    scalar = tile.language == "mosaic_tpu" and not tile.out_shapes[0]
    return (_wide_block if scalar else bind)(tile, eqn, args)


def _on_vector_unit(compute: BlockFn) -> BlockFn:
    """``compute`` of a scalar on an array of one element, where only the vector unit has the operation."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        if tile.language in XLA | MOSAIC_GPU or tile.out_shapes[0]:
            return compute(tile, eqn, args)
        return [lax.reshape(x, ()) for x in compute(tile, eqn, [jnp.full((1, 1), a) for a in args])]

    return block


_vector_block = _in_float32(_on_vector_unit(bind))


def _composed_block(compute: Callable[..., Any], lacking: frozenset[str]) -> BlockFn:
    """``compute(x, **params)`` in the languages that lack the primitive, else the primitive."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        if tile.language not in lacking:
            return bind(tile, eqn, args)
        params = {"method": eqn.params["rounding_method"]} if "rounding_method" in eqn.params else {}
        return [compute(args[0], **params)]

    return _in_float32(_on_vector_unit(block))


def _composed_on_mosaic_gpu(compute: Callable[..., Any], native: BlockFn) -> BlockFn:
    """``compute`` in float32 on Mosaic GPU, which lacks the primitive; ``native`` elsewhere."""
    own = _in_float32(lambda tile, eqn, args: [compute(*args)])
    return lambda tile, eqn, args: (own if tile.language == "mosaic_gpu" else native)(tile, eqn, args)


def _extremum_block(
    logical: Callable[[Any, Any], Any],
    exceeds: Callable[[Any, Any], Any],
    propagating: Callable[[Any, Any], Any],
) -> BlockFn:
    """``max`` or ``min``: for booleans the logical operation (kernels have no other), for unsigned integers
    on a TPU a comparison and a selection, for floats in Triton one that returns NaN for NaN."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        dtype = eqn.out_avals[0].dtype
        if dtype == jnp.bool_ and tile.language not in XLA:
            return [logical(args[0], args[1])]
        if dtype == jnp.uint32 and tile.language == "mosaic_tpu":
            return [jnp.where(exceeds(args[0], args[1]), args[0], args[1])]
        if is_float_in_triton(tile.language, dtype):
            return [propagating(*(jnp.asarray(a, dtype) for a in args))]
        return _plain_block(tile, eqn, args)

    return block


def _compare_in_signed_order(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """A comparison; of unsigned integers on a TPU as signed ones (``composed.in_signed_order``)."""
    if tile.language == "mosaic_tpu" and jnp.uint32 in (jnp.result_type(a) for a in args):
        args = [composed.in_signed_order(a) for a in args]
    return bind(tile, eqn, args)


# The compiler for newer TPUs (v6e) does not broadcast masks of 16 bits along rows and columns.
_equal_block = _wide_on_tpu(bind)
_compare_block = _wide_on_tpu(_compare_in_signed_order)


def _clamp_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """``clamp``; of unsigned integers on a TPU by comparisons as signed ones, of floats in Triton by extrema
    that return NaN for NaN."""
    low, x, high = args
    dtype = eqn.out_avals[0].dtype
    if is_float_in_triton(tile.language, dtype):
        low, x, high = (jnp.asarray(a, dtype) for a in args)
        return [composed.propagating_minimum(composed.propagating_maximum(low, x), high)]
    if dtype != jnp.uint32 or tile.language != "mosaic_tpu":
        return _plain_block(tile, eqn, args)
    raised = jnp.where(composed.unsigned_greater(x, low), x, low)
    return [jnp.where(composed.unsigned_greater(high, raised), raised, high)]


def _add_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """``add_any``; on Mosaic GPU, which lacks it, ``add``."""
    return [lax.add(*args)] if tile.language == "mosaic_gpu" else _plain_block(tile, eqn, args)


def _neg_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """``-x`` with the sign of zero."""
    if tile.language in TRITON | MOSAIC_GPU and jnp.issubdtype(eqn.out_avals[0].dtype, jnp.floating):
        # Pallas computes 0 - x, which loses the sign of zero.
        return [args[0] * np.asarray(-1, eqn.out_avals[0].dtype)[()]]
    return _plain_block(tile, eqn, args)


def _logical_not(tile: Tile, x: Any) -> Any:
    """``~x`` of booleans. Mosaic GPU widens ``~x`` and truncates it, which is wrong."""
    return x ^ np.True_ if tile.language == "mosaic_gpu" else ~x


def _not_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """``~x``."""
    boolean = eqn.out_avals[0].dtype == jnp.bool_
    return [_logical_not(tile, args[0])] if boolean else _plain_block(tile, eqn, args)


def _select_cases(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """``select_n``. Kernels select between two cases, so more are nested; booleans are selected by logic."""
    which, *cases = args
    boolean = eqn.out_avals[0].dtype == jnp.bool_
    if tile.language in XLA or (len(cases) == 2 and not boolean):
        return bind(tile, eqn, args)
    result = cases[0]
    for i, case in enumerate(cases[1:], start=1):
        chosen = which if jnp.result_type(which) == jnp.bool_ else which == np.int32(i)
        if boolean:
            result = (chosen & case) | (_logical_not(tile, chosen) & result)
        else:
            result = jnp.where(chosen, case, result)
    return [result]


# A TPU's scalar unit has no 16-bit numbers, and its compiler does not broadcast the mask that selects
# between 16-bit rows or columns.
_select_block = _wide_on_tpu(_select_cases)


def _cast_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """``convert_element_type``. Mosaic GPU takes the lowest bit as a boolean, so it compares with zero;
    8-bit floats are converted in float32."""
    x, dtype = args[0], eqn.params["new_dtype"]
    if tile.language == "mosaic_gpu" and dtype == jnp.bool_:
        return [x != np.zeros((), eqn.in_avals[0].dtype)[()]]
    if tile.language in XLA or dtypes_of(eqn).isdisjoint(composed.FLOAT8_NAMES):
        return bind(tile, eqn, args)
    x = composed.from_float8(x) if str(x.dtype) in composed.FLOAT8_NAMES else x.astype(jnp.float32)
    return [composed.to_float8(x, dtype) if str(dtype) in composed.FLOAT8_NAMES else x.astype(dtype)]


def _bit_count_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """``population_count`` and ``clz``; Triton has them for signed integers only."""
    dtype = eqn.out_avals[0].dtype
    if tile.language != "triton" or not jnp.issubdtype(dtype, jnp.unsignedinteger):
        return bind(tile, eqn, args)
    (count,) = bind(tile, eqn, [args[0].astype(f"int{8 * dtype.itemsize}")])
    return [count.astype(dtype)]


def _keeps_all_bits(eqn: Equation) -> bool:
    """Whether ``reduce_precision`` drops no bit."""
    info = jnp.finfo(eqn.out_avals[0].dtype)
    return bool(eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant)


def _precision_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """``reduce_precision``; kernels round the mantissa."""
    if tile.language in XLA:
        return bind(tile, eqn, args)
    if _keeps_all_bits(eqn):
        return [args[0]]
    return [composed.rounded_mantissa(args[0], eqn.params["mantissa_bits"])]


def _integer_pow_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """``integer_pow``; Mosaic GPU has only exponents of two and more."""
    (x,), y = args, eqn.params["y"]
    if tile.language != "mosaic_gpu" or y > 1:
        return bind(tile, eqn, args)
    power = lax.integer_pow(x, -y) if y < -1 else x
    return [jnp.ones_like(x) if y == 0 else x if y == 1 else 1.0 / power]


def _sign_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """``sign``, which returns NaN and zeros as they are; Mosaic GPU's does not."""
    x, (sign,) = args[0], _plain_block(tile, eqn, args)
    if tile.language != "mosaic_gpu" or not jnp.issubdtype(eqn.out_avals[0].dtype, jnp.floating):
        return [sign]
    return [jnp.where(jnp.abs(x) > 0, sign, x)]


def elementwise_space(eqn: Equation) -> Space:
    """The space in which operands are indexed like the result; scalars and dimensions of size one are
    broadcast."""
    dims, out_map = own_dims(eqn.out_avals[0].shape)
    parallel = (DimRole.PARALLEL,) * len(dims)
    maps = tuple(tuple(() if n == 1 else out_map[d] for d, n in enumerate(a.shape)) for a in eqn.in_avals)
    return Space(dims, parallel, maps, (out_map,) * len(eqn.out_avals))


def _flops_per_element(vector: int, transcendental: int) -> Callable[[Equation], Flops]:
    return lambda eqn: Flops(
        vector=vector * eqn.out_avals[0].size, transcendental=transcendental * eqn.out_avals[0].size
    )


def _composed(
    vector: int,
    transcendental: int,
    compute: Callable[..., Any],
    lacking: frozenset[str],
    lacks: frozenset[str] = NONE,
) -> Rule:
    """The rule of a function that ``lacking`` languages compute by ``compute``, in float32 and so not for
    float64. Languages in ``lacks`` do not fuse it."""

    def supports(eqn: Equation, language: str) -> bool:
        return known_dtypes(eqn, language) and not (language in lacking and "float64" in dtypes_of(eqn))

    block = _composed_block(compute, lacking)
    return elementwise(
        vector, transcendental, lacks=lacks, block=block, supports=supports, temporaries=_POLYNOMIAL
    )


def _integer_pow_flops(eqn: Equation) -> Flops:
    # Square-and-multiply: one squaring for each bit, one multiplication for each set bit.
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
    """The rule of an elementwise primitive with this many vector and transcendental operations an element."""
    block = block or (_wide_block if transcendental else _plain_block)
    flops = _flops_per_element(vector, transcendental)
    return Rule(OpKind.ELEMENTWISE, elementwise_space, flops, block, lacks, None, supports, temporaries)


def _cast_supports(eqn: Equation, language: str) -> bool:
    """Mosaic converts narrow integers. 8-bit floats are rounded once, from float32, so not from float64."""
    dtypes = dtypes_of(eqn)
    if not dtypes.isdisjoint(composed.FLOAT8_NAMES):
        scalar = language == "mosaic_tpu" and not eqn.out_avals[0].ndim
        if scalar or language == "mosaic_gpu" or eqn.in_avals[0].dtype == jnp.float64:
            return False
        dtypes -= composed.FLOAT8_NAMES
    if language == "mosaic_tpu":
        dtypes -= {"int8", "int16", "uint8", "uint16"}
    return dtypes <= kernel_dtypes(language)


def _supports_dtypes(*names: str) -> Callable[[Equation, str], bool]:
    return lambda eqn, language: known_dtypes(eqn, language) and dtypes_of(eqn) <= set(names)


def _precision_supports(eqn: Equation, language: str) -> bool:
    """Kernels reduce the mantissa of float32; Mosaic GPU, which has no bitcast, does not."""
    exponent, dtype = eqn.params["exponent_bits"], eqn.out_avals[0].dtype
    drops = exponent == 8 and dtype == jnp.float32 and language != "mosaic_gpu"
    return (_keeps_all_bits(eqn) or drops) and known_dtypes(eqn, language)


def _is_integer(eqn: Equation) -> bool:
    return bool(jnp.issubdtype(eqn.out_avals[0].dtype, jnp.integer))


def _rem_supports(eqn: Equation, language: str) -> bool:
    """Mosaic GPU has only the remainder of integers."""
    return known_dtypes(eqn, language) and not (language == "mosaic_gpu" and not _is_integer(eqn))


# Temporary blocks that the TPU compiler's VMEM report shows, rounded up: for erfc 4.5 blocks, for quotient
# and remainder together 6, for two powers of the same numbers 7.5.
_POLYNOMIAL, _DIVISION, _POWER = 5, 5, 7
_DIV = elementwise(1, block=_wide_block)
_INTEGER_DIV = replace(_DIV, temporaries=_DIVISION)

_MATH = elementwise(0, 1)
_RARE = elementwise(4, 4, lacks=PALLAS)
_MOSAIC_TPU = frozenset({"mosaic_tpu"})
_MOSAIC = _MOSAIC_TPU | MOSAIC_GPU
_COUNT = elementwise(
    1,
    lacks=MOSAIC_GPU,
    block=_on_vector_unit(_bit_count_block),
    supports=_supports_dtypes("int32", "int64", "uint32", "uint64"),
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "mul", "abs"), elementwise(1)),
    "sign": elementwise(1, block=_sign_block),
    "add_any": elementwise(1, block=_add_block),
    "neg": elementwise(1, block=_neg_block),
    "max": elementwise(
        1,
        block=_extremum_block(jnp.logical_or, composed.unsigned_greater, composed.propagating_maximum),
    ),
    "min": elementwise(
        1,
        block=_extremum_block(
            jnp.logical_and, lambda a, b: composed.unsigned_greater(b, a), composed.propagating_minimum
        ),
    ),
    **dict.fromkeys(("eq", "ne"), elementwise(1, block=_equal_block)),
    **dict.fromkeys(("lt", "le", "gt", "ge"), elementwise(1, block=_compare_block)),
    **dict.fromkeys(("and", "or", "xor"), elementwise(1)),
    "not": elementwise(1, block=_not_block),
    **dict.fromkeys(("shift_left", "shift_right_logical", "shift_right_arithmetic"), elementwise(1)),
    "floor": elementwise(1, block=_composed_on_mosaic_gpu(composed.floor, _plain_block)),
    "ceil": elementwise(1, block=_composed_on_mosaic_gpu(composed.ceil, _plain_block)),
    "square": elementwise(1),
    **dict.fromkeys(("exp", "log", "tanh", "rsqrt", "exp2", "log2"), _MATH),
    "sqrt": elementwise(0, 1, block=_composed_on_mosaic_gpu(composed.sqrt, _wide_block)),
    "log1p": elementwise(0, 1, block=_composed_on_mosaic_gpu(composed.log1p, _wide_block)),
    **dict.fromkeys(("sin", "cos"), elementwise(2, 1, temporaries=_POLYNOMIAL)),
    "tan": elementwise(2, 1, lacks=MOSAIC_GPU, temporaries=_POLYNOMIAL),
    "sinh": _composed(4, 4, composed.sinh, _MOSAIC),
    "cosh": _composed(4, 4, composed.cosh, _MOSAIC),
    "asinh": _composed(4, 4, composed.asinh, _MOSAIC_TPU, lacks=MOSAIC_GPU),
    "acosh": _composed(4, 4, composed.acosh, _MOSAIC_TPU, lacks=MOSAIC_GPU),
    "atanh": _composed(4, 4, composed.atanh, _MOSAIC_TPU, lacks=MOSAIC_GPU),
    "asin": _composed(2, 1, composed.asin, _MOSAIC_TPU, lacks=MOSAIC_GPU),
    "acos": _composed(2, 1, composed.acos, _MOSAIC_TPU, lacks=MOSAIC_GPU),
    "atan": _composed(2, 1, composed.atan, _MOSAIC_TPU, lacks=MOSAIC_GPU),
    "atan2": elementwise(2, 1, lacks=MOSAIC_GPU, temporaries=_POLYNOMIAL),
    **dict.fromkeys(("lgamma", "digamma", "igamma", "igammac", "bessel_i0e", "bessel_i1e"), _RARE),
    **dict.fromkeys(("regularized_incomplete_beta", "polygamma", "zeta"), _RARE),
    **dict.fromkeys(("eq_to", "le_to", "lt_to"), elementwise(1, lacks=MOSAIC_GPU)),
    "is_finite": elementwise(1, block=_composed_on_mosaic_gpu(composed.is_finite, _wide_block)),
    **dict.fromkeys(("real", "imag", "conj", "complex"), elementwise(0, lacks=PALLAS)),
    **dict.fromkeys(("population_count", "clz"), _COUNT),
    "nextafter": elementwise(
        1, lacks=MOSAIC_GPU, block=bind, supports=_supports_dtypes("float32"), temporaries=_POWER
    ),
    **dict.fromkeys(("copy", "stop_gradient"), elementwise(0, block=lambda tile, eqn, args: args)),
    "one_minus_square": elementwise(2, lacks=PALLAS),
    "reduce_precision": elementwise(0, block=_precision_block, supports=_precision_supports),
    "div": replace(_DIV, special=lambda eqn: _INTEGER_DIV if _is_integer(eqn) else None),
    "rem": elementwise(2, block=_wide_block, supports=_rem_supports, temporaries=_DIVISION),
    "expm1": _composed(1, 1, composed.expm1, _MOSAIC),
    "cbrt": _composed(0, 1, composed.cbrt, _MOSAIC),
    "erf": _composed(4, 1, composed.erf, TRITON | MOSAIC_GPU),
    "erfc": _composed(4, 1, composed.erfc, PALLAS),
    "erf_inv": elementwise(4, 4, block=_vector_block, lacks=MOSAIC_GPU, temporaries=_POLYNOMIAL),
    "round": elementwise(1, block=_composed_block(composed.round_to, TRITON)),
    "logistic": elementwise(2, 1, block=_vector_block),
    "pow": elementwise(1, 2, block=_vector_block, lacks=MOSAIC_GPU, temporaries=_POWER),
    "integer_pow": Rule(
        OpKind.ELEMENTWISE, elementwise_space, _integer_pow_flops, _in_float32(_integer_pow_block)
    ),
    "select_n": elementwise(1, block=_select_block),
    "clamp": elementwise(2, block=_clamp_block),
    "convert_element_type": elementwise(0, block=_cast_block, supports=_cast_supports),
    "threefry2x32": Rule(OpKind.ELEMENTWISE, elementwise_space, _flops_per_element(112, 0), None),
}
