"""Elementwise primitives: one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from costmodel.graph import DimMap, DimRole, Flops, OpKind
from fuseplan.frontend.ops import composed, float8
from fuseplan.frontend.ops.block_functions import (
    add_block,
    bits_block,
    cast_block,
    clamp_block,
    compare_block,
    composed_block,
    equal_block,
    extremum_block,
    identity_block,
    in_float32,
    instead,
    integer_pow,
    keeps_all,
    neg_block,
    not_block,
    on_vectors,
    plain_block,
    precision_block,
    select_block,
    sign_block,
    vector_block,
    wide_block,
)
from fuseplan.frontend.ops.rule import (
    MOSAIC_GPU,
    NONE,
    PALLAS,
    TRITON,
    BlockFn,
    Rule,
    Space,
    bind,
    dtypes_of,
    kernel_dtypes,
    known_dtypes,
    out_size,
    own_dims,
)
from fuseplan.frontend.trace import Equation


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


def _composite(
    vector: int,
    transcendental: int,
    compute: Callable[..., Any],
    lacking: frozenset[str],
    lacks: frozenset[str] = NONE,
) -> Rule:
    """A function that ``lacking`` backends get from others, in float32: so not of 64 bits. Those that
    it ``lacks`` have not even these."""

    def supports(eqn: Equation, language: str) -> bool:
        return known_dtypes(eqn, language) and not (language in lacking and "float64" in dtypes_of(eqn))

    block = composed_block(compute, lacking)
    return elementwise(
        vector, transcendental, lacks=lacks, block=block, supports=supports, temporaries=_POLYNOMIAL
    )


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


_NARROW = frozenset({"int8", "int16", "uint8", "uint16"})


def _cast_supports(eqn: Equation, language: str) -> bool:
    """Mosaic converts narrow integers, though it computes with none. Numbers of eight bits are
    rounded once, from 32."""
    dtypes = dtypes_of(eqn)
    if not dtypes.isdisjoint(float8.NAMES):
        scalar = language == "mosaic_tpu" and not eqn.out_avals[0].ndim
        if scalar or language == "mosaic_gpu" or eqn.in_avals[0].dtype == jnp.float64:
            return False
        dtypes -= float8.NAMES
    if language == "mosaic_tpu":
        dtypes -= _NARROW
    return dtypes <= kernel_dtypes(language)


def _of_dtypes(*names: str) -> Callable[[Equation, str], bool]:
    return lambda eqn, language: known_dtypes(eqn, language) and dtypes_of(eqn) <= set(names)


def _precision_supports(eqn: Equation, language: str) -> bool:
    """Kernels drop bits of the mantissa alone; those of Mosaic GPU, which has no bits of scalars, none."""
    exponent, dtype = eqn.params["exponent_bits"], eqn.out_avals[0].dtype
    drops = exponent == 8 and dtype == jnp.float32 and language != "mosaic_gpu"
    kept = keeps_all(eqn) or drops
    return kept and known_dtypes(eqn, language)


def _is_integer(eqn: Equation) -> bool:
    return bool(jnp.issubdtype(eqn.out_avals[0].dtype, jnp.integer))


def _rem_supports(eqn: Equation, language: str) -> bool:
    """Mosaic GPU has the remainder of integers alone."""
    return known_dtypes(eqn, language) and not (language == "mosaic_gpu" and not _is_integer(eqn))


# A polynomial with its branches, evaluated block by block (Mosaic): partial sums, powers and
# selections that the TPU compiler's VMEM report shows for erfc: 4.5 blocks.
_POLYNOMIAL = 5

# Steps of a reciprocal with corrections: quotient and remainder together are 6 blocks in that report.
_DIVISION = 5
# Cases of zeros, infinities and whole exponents: two powers of the same numbers are 7.5 blocks.
_POWER = 7
_DIV = elementwise(1, block=wide_block)
_INTEGER_DIV = replace(_DIV, temporaries=_DIVISION)

_MATH = elementwise(0, 1)
_FREE = elementwise(0)
_RARE = elementwise(4, 4, lacks=PALLAS)
_MOSAIC = frozenset({"mosaic_tpu"})
_EITHER = _MOSAIC | MOSAIC_GPU
_COUNT = elementwise(
    1,
    lacks=MOSAIC_GPU,
    block=on_vectors(bits_block),
    supports=_of_dtypes("int32", "int64", "uint32", "uint64"),
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "mul", "abs"), elementwise(1)),
    "sign": elementwise(1, block=sign_block),
    "add_any": elementwise(1, block=add_block),
    "neg": elementwise(1, block=neg_block),
    "max": elementwise(1, block=extremum_block(jnp.logical_or, composed.unsigned_greater)),
    "min": elementwise(1, block=extremum_block(jnp.logical_and, composed.unsigned_less)),
    **dict.fromkeys(("eq", "ne"), elementwise(1, block=equal_block)),
    **dict.fromkeys(("lt", "le", "gt", "ge"), elementwise(1, block=compare_block)),
    **dict.fromkeys(("and", "or", "xor"), elementwise(1)),
    "not": elementwise(1, block=not_block),
    **dict.fromkeys(("shift_left", "shift_right_logical", "shift_right_arithmetic"), elementwise(1)),
    "floor": elementwise(1, block=instead(composed.floor, plain_block)),
    "ceil": elementwise(1, block=instead(composed.ceil, plain_block)),
    "square": elementwise(1),
    **dict.fromkeys(("exp", "log", "tanh", "rsqrt", "exp2", "log2"), _MATH),
    "sqrt": elementwise(0, 1, block=instead(composed.sqrt, wide_block)),
    "log1p": elementwise(0, 1, block=instead(composed.log1p, wide_block)),
    **dict.fromkeys(("sin", "cos"), elementwise(2, 1, temporaries=_POLYNOMIAL)),
    "tan": elementwise(2, 1, lacks=MOSAIC_GPU, temporaries=_POLYNOMIAL),
    "sinh": _composite(4, 4, composed.sinh, _EITHER),
    "cosh": _composite(4, 4, composed.cosh, _EITHER),
    "asinh": _composite(4, 4, composed.asinh, _MOSAIC, lacks=MOSAIC_GPU),
    "acosh": _composite(4, 4, composed.acosh, _MOSAIC, lacks=MOSAIC_GPU),
    "atanh": _composite(4, 4, composed.atanh, _MOSAIC, lacks=MOSAIC_GPU),
    "asin": _composite(2, 1, composed.asin, _MOSAIC, lacks=MOSAIC_GPU),
    "acos": _composite(2, 1, composed.acos, _MOSAIC, lacks=MOSAIC_GPU),
    "atan": _composite(2, 1, composed.atan, _MOSAIC, lacks=MOSAIC_GPU),
    "atan2": elementwise(2, 1, lacks=MOSAIC_GPU, temporaries=_POLYNOMIAL),
    **dict.fromkeys(("lgamma", "digamma", "igamma", "igammac", "bessel_i0e", "bessel_i1e"), _RARE),
    **dict.fromkeys(("regularized_incomplete_beta", "polygamma", "zeta"), _RARE),
    **dict.fromkeys(("eq_to", "le_to", "lt_to"), elementwise(1, lacks=MOSAIC_GPU)),
    "is_finite": elementwise(1, block=instead(composed.is_finite, wide_block)),
    **dict.fromkeys(("real", "imag", "conj", "complex"), elementwise(0, lacks=PALLAS)),
    **dict.fromkeys(("population_count", "clz"), _COUNT),
    "nextafter": elementwise(
        1, lacks=MOSAIC_GPU, block=bind, supports=_of_dtypes("float32"), temporaries=_POWER
    ),
    **dict.fromkeys(("copy", "copy_p", "stop_gradient"), elementwise(0, block=identity_block)),
    "one_minus_square": elementwise(2, lacks=PALLAS),
    "reduce_precision": elementwise(0, block=precision_block, supports=_precision_supports),
    "div": replace(_DIV, special=lambda eqn: _INTEGER_DIV if _is_integer(eqn) else None),
    "rem": elementwise(2, block=wide_block, supports=_rem_supports, temporaries=_DIVISION),
    "expm1": _composite(1, 1, composed.expm1, _EITHER),
    "cbrt": _composite(0, 1, composed.cbrt, _EITHER),
    "erf": _composite(4, 1, composed.erf, TRITON | MOSAIC_GPU),
    "erfc": _composite(4, 1, composed.erfc, PALLAS),
    "erf_inv": elementwise(4, 4, block=vector_block, lacks=MOSAIC_GPU, temporaries=_POLYNOMIAL),
    "round": elementwise(1, block=composed_block(composed.round_to, TRITON)),
    "logistic": elementwise(2, 1, block=vector_block),
    "pow": elementwise(1, 2, block=vector_block, lacks=MOSAIC_GPU, temporaries=_POWER),
    "integer_pow": Rule(OpKind.ELEMENTWISE, elementwise_space, _integer_pow_flops, in_float32(integer_pow)),
    "select_n": elementwise(1, block=select_block),
    "clamp": elementwise(2, block=clamp_block),
    "convert_element_type": elementwise(0, block=cast_block, supports=_cast_supports),
    "threefry2x32": Rule(OpKind.ELEMENTWISE, elementwise_space, _per_element(112, 0), None),
}
