"""How kernels compute elementwise operations where a backend has not quite the primitive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fuseplan.frontend.ops import composed, float8
from fuseplan.frontend.ops.rule import MOSAIC_GPU, TRITON, XLA, BlockFn, Tile, bind, dtypes_of
from fuseplan.frontend.trace import Equation


def _is_small(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


def in_float32(compute: BlockFn) -> BlockFn:
    """``compute`` on 16-bit floats in float32, rounded once at the end."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        if tile.language in XLA or not any(_is_small(jnp.result_type(a)) for a in args):
            return compute(tile, eqn, args)
        wide = [jnp.asarray(a, jnp.float32) if _is_small(jnp.result_type(a)) else a for a in args]
        results = compute(tile, eqn, wide)
        return [
            x.astype(aval.dtype) if _is_small(aval.dtype) else x
            for x, aval in zip(results, eqn.out_avals, strict=True)
        ]

    return block


wide_block = in_float32(bind)
"""Math libraries of kernels have no 16-bit variants: compute in float32 and round once, as
XLA does (test_emit_body.py::test_sixteen_bit_math)."""


def wide_on_tpu(compute: BlockFn) -> BlockFn:
    """``in_float32`` on a TPU alone."""
    wide = in_float32(compute)
    return lambda tile, eqn, args: (wide if tile.language == "mosaic_tpu" else compute)(tile, eqn, args)


def plain_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """The primitive itself. A TPU's scalar unit has no 16-bit arithmetic."""
    scalar = tile.language == "mosaic_tpu" and not tile.out_shapes[0]
    return (wide_block if scalar else bind)(tile, eqn, args)


def on_vectors(compute: BlockFn) -> BlockFn:
    """``compute``, which only the vector unit can; of a scalar, on an array of one element."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        if tile.language in XLA | MOSAIC_GPU or tile.out_shapes[0]:
            return compute(tile, eqn, args)
        return [lax.reshape(x, ()) for x in compute(tile, eqn, [jnp.full((1, 1), a) for a in args])]

    return block


vector_block = in_float32(on_vectors(bind))


def composed_block(compute: Callable[..., Any], lacking: frozenset[str]) -> BlockFn:
    """``compute(x, **params)`` on the backends that lack the primitive."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        if tile.language not in lacking:
            return bind(tile, eqn, args)
        params = {"method": eqn.params["rounding_method"]} if "rounding_method" in eqn.params else {}
        return [compute(args[0], **params)]

    return in_float32(on_vectors(block))


def instead(compute: Callable[..., Any], native: BlockFn) -> BlockFn:
    """``compute`` of floats, in float32, on Mosaic GPU, which lacks the primitive; elsewhere ``native``."""
    own = in_float32(lambda tile, eqn, args: [compute(*args)])
    return lambda tile, eqn, args: (own if tile.language == "mosaic_gpu" else native)(tile, eqn, args)


def extremum_block(logical: Callable[[Any, Any], Any], exceeds: Callable[[Any, Any], Any]) -> BlockFn:
    """``max`` and ``min``: of booleans, kernels know only the logical operation; of unsigned integers,
    TPUs can but compare."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        dtype = eqn.out_avals[0].dtype
        if dtype == jnp.bool_ and tile.language not in XLA:
            return [logical(args[0], args[1])]
        if dtype == jnp.uint32 and tile.language == "mosaic_tpu":
            return [jnp.where(exceeds(args[0], args[1]), args[0], args[1])]
        return plain_block(tile, eqn, args)

    return block


def _in_order(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Of unsigned integers, a TPU's by the order of signed ones (``composed.unsigned_greater``)."""
    if tile.language == "mosaic_tpu" and jnp.uint32 in (jnp.result_type(a) for a in args):
        args = [composed.in_signed_order(a) for a in args]
    return bind(tile, eqn, args)


# Masks of 16 bits, which newer TPUs have, their compiler does not spread over rows and columns
# (tests/aot/test_compile_primitives.py: v6e).
equal_block = wide_on_tpu(bind)
compare_block = wide_on_tpu(_in_order)


def clamp_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Of unsigned integers, a TPU's by the order of signed ones."""
    if eqn.out_avals[0].dtype != jnp.uint32 or tile.language != "mosaic_tpu":
        return plain_block(tile, eqn, args)
    low, x, high = args
    raised = jnp.where(composed.unsigned_greater(x, low), x, low)
    return [jnp.where(composed.unsigned_greater(high, raised), raised, high)]


def add_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Of gradients, too, which Mosaic GPU knows no sum of."""
    return [lax.add(*args)] if tile.language == "mosaic_gpu" else plain_block(tile, eqn, args)


def neg_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """``-x``, zeros and all."""
    if tile.language in TRITON | MOSAIC_GPU and jnp.issubdtype(eqn.out_avals[0].dtype, jnp.floating):
        # Pallas would compute 0 - x, which loses the sign of zero.
        return [args[0] * np.asarray(-1, eqn.out_avals[0].dtype)[()]]
    return plain_block(tile, eqn, args)


def _opposite(tile: Tile, x: Any) -> Any:
    """``~x`` of booleans, which Mosaic GPU would widen and cut off again."""
    return x ^ np.True_ if tile.language == "mosaic_gpu" else ~x


def not_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """``~x``; of booleans as each backend has it."""
    boolean = eqn.out_avals[0].dtype == jnp.bool_
    return [_opposite(tile, args[0])] if boolean else plain_block(tile, eqn, args)


def _select_cases(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Kernels know two cases; more are nested. Booleans are selected by logic."""
    which, *cases = args
    boolean = eqn.out_avals[0].dtype == jnp.bool_
    if tile.language in XLA or (len(cases) == 2 and not boolean):
        return bind(tile, eqn, args)
    result = cases[0]
    for i, case in enumerate(cases[1:], start=1):
        chosen = which if jnp.result_type(which) == jnp.bool_ else which == np.int32(i)
        if boolean:
            result = (chosen & case) | (_opposite(tile, chosen) & result)
        else:
            result = jnp.where(chosen, case, result)
    return [result]


# A TPU's scalar unit has no numbers of 16 bits, and its compiler does not spread the bits that choose
# between such rows or columns (tests/aot/test_compile_primitives.py).
select_block = wide_on_tpu(_select_cases)


def identity_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """The operand itself."""
    return [args[0]]


def cast_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """To Mosaic GPU the last bit would say whether a number is true."""
    x, dtype = args[0], eqn.params["new_dtype"]
    if tile.language == "mosaic_gpu" and dtype == jnp.bool_:
        return [x != np.zeros((), eqn.in_avals[0].dtype)[()]]
    if tile.language in XLA or dtypes_of(eqn).isdisjoint(float8.NAMES):
        return bind(tile, eqn, args)
    x = float8.from_float8(x) if str(x.dtype) in float8.NAMES else x.astype(jnp.float32)
    return [float8.to_float8(x, dtype) if str(dtype) in float8.NAMES else x.astype(dtype)]


def bits_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Counts of bits: Triton knows those of signed integers."""
    dtype = eqn.out_avals[0].dtype
    if tile.language != "triton" or not jnp.issubdtype(dtype, jnp.unsignedinteger):
        return bind(tile, eqn, args)
    (count,) = bind(tile, eqn, [args[0].astype(f"int{8 * dtype.itemsize}")])
    return [count.astype(dtype)]


def keeps_all(eqn: Equation) -> bool:
    """Whether ``reduce_precision`` drops no bit."""
    info = jnp.finfo(eqn.out_avals[0].dtype)
    return bool(eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant)


def precision_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """``reduce_precision``: kernels round the bits of the mantissa."""
    if tile.language in XLA:
        return bind(tile, eqn, args)
    if keeps_all(eqn):
        return [args[0]]
    return [composed.rounded_mantissa(args[0], eqn.params["mantissa_bits"])]


def integer_pow(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Mosaic GPU knows no powers below two."""
    (x,), y = args, eqn.params["y"]
    if tile.language != "mosaic_gpu" or y > 1:
        return bind(tile, eqn, args)
    power = lax.integer_pow(x, -y) if y < -1 else x
    return [jnp.ones_like(x) if y == 0 else x if y == 1 else 1.0 / power]


def sign_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Of a NaN and of zeros it is themselves, but not to Mosaic GPU."""
    x, (sign,) = args[0], plain_block(tile, eqn, args)
    if tile.language != "mosaic_gpu" or not jnp.issubdtype(eqn.out_avals[0].dtype, jnp.floating):
        return [sign]
    return [jnp.where(jnp.abs(x) > 0, sign, x)]
