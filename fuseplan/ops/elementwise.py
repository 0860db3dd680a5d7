"""Elementwise primitives: one line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from costmodel.graph import DimMap, DimRole, Flops, OpKind
from fuseplan.ops import composed, float8
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


def _on_vectors(compute: BlockFn) -> BlockFn:
    """``compute``, which only the vector unit can; of a scalar, on an array of one element."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        if tile.backend in XLA | MOSAIC_GPU or tile.out_shapes[0]:
            return compute(tile, eqn, args)
        return [lax.reshape(x, ()) for x in compute(tile, eqn, [jnp.full((1, 1), a) for a in args])]

    return block


_vector_block = _in_float32(_on_vectors(bind))


def _composed(compute: Callable[..., Any], lacking: frozenset[str]) -> BlockFn:
    """``compute(x, **params)`` on the backends that lack the primitive."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        if tile.backend not in lacking:
            return bind(tile, eqn, args)
        params = {"method": eqn.params["rounding_method"]} if "rounding_method" in eqn.params else {}
        return [compute(args[0], **params)]

    return _in_float32(_on_vectors(block))


def _instead(compute: Callable[..., Any], native: BlockFn) -> BlockFn:
    """``compute`` of floats, in float32, on Mosaic GPU, which lacks the primitive; elsewhere ``native``."""
    own = _in_float32(lambda tile, eqn, args: [compute(*args)])
    return lambda tile, eqn, args: (own if tile.backend == "mosaic_gpu" else native)(tile, eqn, args)


def _composite(
    vector: int,
    transcendental: int,
    compute: Callable[..., Any],
    lacking: frozenset[str],
    lacks: frozenset[str] = NONE,
) -> Rule:
    """A function that ``lacking`` backends get from others, in float32: so not of 64 bits. Those that
    it ``lacks`` have not even these."""

    def supports(eqn: Equation, backend: str) -> bool:
        return known_dtypes(eqn, backend) and not (backend in lacking and "float64" in dtypes_of(eqn))

    block = _composed(compute, lacking)
    return elementwise(
        vector, transcendental, lacks=lacks, block=block, supports=supports, temporaries=_POLYNOMIAL
    )


def _extremum_block(logical: Callable[[Any, Any], Any], exceeds: Callable[[Any, Any], Any]) -> BlockFn:
    """``max`` and ``min``: of booleans, kernels know only the logical operation; of unsigned integers,
    TPUs can but compare."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        dtype = eqn.out_avals[0].dtype
        if dtype == jnp.bool_ and tile.backend not in XLA:
            return [logical(args[0], args[1])]
        if dtype == jnp.uint32 and tile.backend == "mosaic_tpu":
            return [jnp.where(exceeds(args[0], args[1]), args[0], args[1])]
        return plain_block(tile, eqn, args)

    return block


def _compare_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Of unsigned integers, a TPU's by the order of signed ones (``composed.unsigned_greater``)."""
    if tile.backend == "mosaic_tpu" and jnp.uint32 in (jnp.result_type(a) for a in args):
        args = [composed.in_signed_order(a) for a in args]
    return plain_block(tile, eqn, args)


def _clamp_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    if eqn.out_avals[0].dtype != jnp.uint32 or tile.backend != "mosaic_tpu":
        return plain_block(tile, eqn, args)
    low, x, high = args
    raised = jnp.where(composed.unsigned_greater(x, low), x, low)
    return [jnp.where(composed.unsigned_greater(high, raised), raised, high)]


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
    """A TPU's scalar unit has no numbers of 16 bits, and its compiler does not spread the bits that choose
    between such rows or columns (tests/aot/test_compile_primitives.py)."""
    return (_in_float32(_select_cases) if tile.backend == "mosaic_tpu" else _select_cases)(tile, eqn, args)


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


_NARROW = frozenset({"int8", "int16", "uint8", "uint16"})


def _cast_supports(eqn: Equation, backend: str) -> bool:
    """Mosaic converts narrow integers, though it computes with none. Numbers of eight bits are
    rounded once, from 32."""
    dtypes = dtypes_of(eqn)
    if not dtypes.isdisjoint(float8.NAMES):
        scalar = backend == "mosaic_tpu" and not eqn.out_avals[0].ndim
        if scalar or backend == "mosaic_gpu" or eqn.in_avals[0].dtype == jnp.float64:
            return False
        dtypes -= float8.NAMES
    if backend == "mosaic_tpu":
        dtypes -= _NARROW
    return dtypes <= kernel_dtypes(backend)


def _cast_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """To Mosaic GPU the last bit would say whether a number is true."""
    x, dtype = args[0], eqn.params["new_dtype"]
    if tile.backend == "mosaic_gpu" and dtype == jnp.bool_:
        return [x != np.zeros((), eqn.in_avals[0].dtype)[()]]
    if tile.backend in XLA or dtypes_of(eqn).isdisjoint(float8.NAMES):
        return bind(tile, eqn, args)
    x = float8.from_float8(x) if str(x.dtype) in float8.NAMES else x.astype(jnp.float32)
    return [float8.to_float8(x, dtype) if str(dtype) in float8.NAMES else x.astype(dtype)]


def _of_dtypes(*names: str) -> Callable[[Equation, str], bool]:
    return lambda eqn, backend: known_dtypes(eqn, backend) and dtypes_of(eqn) <= set(names)


def _bits_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Counts of bits: Triton knows those of signed integers."""
    dtype = eqn.out_avals[0].dtype
    if tile.backend != "triton" or not jnp.issubdtype(dtype, jnp.unsignedinteger):
        return bind(tile, eqn, args)
    (count,) = bind(tile, eqn, [args[0].astype(f"int{8 * dtype.itemsize}")])
    return [count.astype(dtype)]


def _precision_supports(eqn: Equation, backend: str) -> bool:
    """Kernels drop bits of the mantissa alone; those of Mosaic GPU, which has no bits of scalars, none."""
    exponent, dtype = eqn.params["exponent_bits"], eqn.out_avals[0].dtype
    drops = exponent == 8 and dtype == jnp.float32 and backend != "mosaic_gpu"
    kept = _keeps_all(eqn) or drops
    return kept and known_dtypes(eqn, backend)


def _keeps_all(eqn: Equation) -> bool:
    info = jnp.finfo(eqn.out_avals[0].dtype)
    return bool(eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant)


def _precision_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    if tile.backend in XLA:
        return bind(tile, eqn, args)
    if _keeps_all(eqn):
        return [args[0]]
    return [composed.rounded_mantissa(args[0], eqn.params["mantissa_bits"])]


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


def _rem_supports(eqn: Equation, backend: str) -> bool:
    """Mosaic GPU has the remainder of integers alone."""
    is_float = jnp.issubdtype(eqn.out_avals[0].dtype, jnp.floating)
    return known_dtypes(eqn, backend) and not (backend == "mosaic_gpu" and is_float)


# A polynomial with its branches, evaluated block by block (Mosaic): partial sums, powers and
# selections that the TPU compiler's VMEM report shows for erfc: 4.5 blocks.
_POLYNOMIAL = 5

_MATH = elementwise(0, 1)
_FREE = elementwise(0)
_RARE = elementwise(4, 4, lacks=PALLAS)
_MOSAIC = frozenset({"mosaic_tpu"})
_EITHER = _MOSAIC | MOSAIC_GPU
_COUNT = elementwise(
    1,
    lacks=MOSAIC_GPU,
    block=_on_vectors(_bits_block),
    supports=_of_dtypes("int32", "int64", "uint32", "uint64"),
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "mul", "abs"), elementwise(1)),
    "sign": elementwise(1, block=_sign),
    "add_any": elementwise(1, block=_add_block),
    "neg": elementwise(1, block=_neg_block),
    "max": elementwise(1, block=_extremum_block(jnp.logical_or, composed.unsigned_greater)),
    "min": elementwise(1, block=_extremum_block(jnp.logical_and, composed.unsigned_less)),
    **dict.fromkeys(("eq", "ne"), elementwise(1)),
    **dict.fromkeys(("lt", "le", "gt", "ge"), elementwise(1, block=_compare_block)),
    **dict.fromkeys(("and", "or", "xor"), elementwise(1)),
    "not": elementwise(1, block=_not_block),
    **dict.fromkeys(("shift_left", "shift_right_logical", "shift_right_arithmetic"), elementwise(1)),
    "floor": elementwise(1, block=_instead(composed.floor, plain_block)),
    "ceil": elementwise(1, block=_instead(composed.ceil, plain_block)),
    "square": elementwise(1),
    **dict.fromkeys(("exp", "log", "tanh", "rsqrt", "exp2", "log2"), _MATH),
    "sqrt": elementwise(0, 1, block=_instead(composed.sqrt, wide_block)),
    "log1p": elementwise(0, 1, block=_instead(composed.log1p, wide_block)),
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
    "is_finite": elementwise(1, block=_instead(composed.is_finite, wide_block)),
    **dict.fromkeys(("real", "imag", "conj", "complex"), elementwise(0, lacks=PALLAS)),
    **dict.fromkeys(("population_count", "clz"), _COUNT),
    "nextafter": elementwise(1, lacks=MOSAIC_GPU, block=bind, supports=_of_dtypes("float32")),
    **dict.fromkeys(("copy", "copy_p", "stop_gradient"), elementwise(0, block=_identity_block)),
    "one_minus_square": elementwise(2, lacks=PALLAS),
    "reduce_precision": elementwise(0, block=_precision_block, supports=_precision_supports),
    "div": elementwise(1, block=wide_block),
    "rem": elementwise(2, block=wide_block, supports=_rem_supports),
    "expm1": _composite(1, 1, composed.expm1, _EITHER),
    "cbrt": _composite(0, 1, composed.cbrt, _EITHER),
    "erf": _composite(4, 1, composed.erf, TRITON | MOSAIC_GPU),
    "erfc": _composite(4, 1, composed.erfc, PALLAS),
    "erf_inv": elementwise(4, 4, block=_vector_block, lacks=MOSAIC_GPU, temporaries=_POLYNOMIAL),
    "round": elementwise(1, block=_composed(composed.round_to, TRITON)),
    "logistic": elementwise(2, 1, block=_vector_block),
    "pow": elementwise(1, 2, block=_vector_block, lacks=MOSAIC_GPU),
    "integer_pow": Rule(OpKind.ELEMENTWISE, elementwise_space, _integer_pow_flops, _in_float32(_integer_pow)),
    "select_n": elementwise(1, block=_select_block),
    "clamp": elementwise(2, block=_clamp_block),
    "convert_element_type": elementwise(0, block=_cast_block, supports=_cast_supports),
    "threefry2x32": Rule(OpKind.ELEMENTWISE, elementwise_space, _per_element(112, 0), None),
}
