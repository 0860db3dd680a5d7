"""Primitives that consume axes: sums, extrema, products, scans along an axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core

from costmodel.graph import DimRole, Flops, OpKind
from fuseplan.ops.rule import (
    NONE,
    PALLAS,
    TRITON,
    Reduction,
    Rule,
    Space,
    Tile,
    dtypes_of,
    in_size,
    known_dtypes,
    own_dims,
    reshaped,
)
from fuseplan.trace import Equation


def _reduced_dims(eqn: Equation) -> set[int]:
    return {int(d) for d in eqn.params["axes"]}


def _reduce_space(eqn: Equation) -> Space:
    dims, in_map = own_dims(eqn.in_avals[0].shape)
    reduced = _reduced_dims(eqn)
    gone = {i for d in reduced for i in in_map[d]}
    roles = tuple(DimRole.REDUCED if i in gone else DimRole.PARALLEL for i in range(len(dims)))
    out_map = tuple(m for d, m in enumerate(in_map) if d not in reduced)
    return Space(dims, roles, (in_map,) * len(eqn.in_avals), (out_map,) * len(eqn.out_avals))


def _reduce_flops(eqn: Equation) -> Flops:
    return Flops(vector=max(in_size(eqn) - sum(a.size for a in eqn.out_avals), 0))


def accumulator(dtype: Any) -> Any:
    """Partial results of 16-bit floats are carried in float32, as XLA carries them."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if small else jnp.dtype(dtype)


def masked(tile: Tile, operand: int, dims: Sequence[int], x: Any, neutral: Any) -> Any:
    """``x`` with ``neutral`` wherever the tile reaches past the end of the array."""
    for dim in dims:
        valid = tile.valid(operand, dim)
        if valid is not None:
            x = jnp.where(valid, x, jnp.asarray(neutral, x.dtype))
    return x


def _supports(eqn: Equation, backend: str) -> bool:
    """Mosaic reduces no unsigned integers."""
    return known_dtypes(eqn, backend) and not (backend == "mosaic_tpu" and "uint32" in dtypes_of(eqn))


def _reduce(
    combine: Callable[[Any, Any], Any],
    neutral: Callable[[Any], Any],
    *,
    lacks: frozenset[str] = NONE,
) -> Rule:
    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        dims = sorted(_reduced_dims(eqn))
        x = jnp.asarray(args[0], accumulator(eqn.out_avals[0].dtype))
        x = masked(tile, 0, dims, x, neutral(x.dtype))
        # Dimensions of size one are dropped by a reshape: nothing is combined there.
        real = tuple(d for d in dims if x.shape[d] != 1)
        if real:
            x = eqn.primitive.bind(x, **{**eqn.params, "axes": real})
        return [reshaped(x, tile.out_shapes[0])]

    return Rule(
        OpKind.REDUCTION,
        _reduce_space,
        _reduce_flops,
        block,
        lacks,
        Reduction(combine, neutral, accumulator),
        _supports,
    )


def _quantifier(reduce: jex_core.Primitive, combine: Callable[[Any, Any], Any], neutral: int) -> Rule:
    """``all`` and ``any``: extrema of zeros and ones, since Triton reduces no booleans."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        dims = sorted(_reduced_dims(eqn))
        x = masked(tile, 0, dims, jnp.where(args[0], jnp.int32(1), jnp.int32(0)), neutral)
        real = tuple(d for d in dims if x.shape[d] != 1)
        if real:
            x = reduce.bind(x, **{**eqn.params, "axes": real})
        return [reshaped(x, tile.out_shapes[0])]

    return Rule(
        OpKind.REDUCTION,
        _reduce_space,
        _reduce_flops,
        block,
        # The TPU compiler that goes with JAX 0.10.2 cannot lay out the row of booleans.
        frozenset({"mosaic_tpu"}),
        Reduction(combine, lambda dtype: neutral, lambda dtype: jnp.dtype(jnp.int32)),
    )


def _lowest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf
    return False if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return np.inf
    return True if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).max


def _whole_axis_space(eqn: Equation) -> Space:
    """The result along the axis may depend on all of it: scans and arg-extrema."""
    dims, in_map = own_dims(eqn.in_avals[0].shape)
    axes = eqn.params.get("axes") or (eqn.params["axis"],)
    gone = {i for d in axes for i in in_map[int(d)]}
    roles = tuple(DimRole.WHOLE if i in gone else DimRole.PARALLEL for i in range(len(dims)))
    if eqn.out_avals[0].ndim == eqn.in_avals[0].ndim:
        out_map = in_map
    else:
        out_map = tuple(m for d, m in enumerate(in_map) if d not in {int(a) for a in axes})
    return Space(dims, roles, (in_map,) * len(eqn.in_avals), (out_map,) * len(eqn.out_avals))


def _one_an_element(eqn: Equation) -> Flops:
    return Flops(vector=in_size(eqn))


RULES: dict[str, Rule] = {
    "reduce_sum": _reduce(lambda a, b: a + b, lambda dtype: 0),
    "reduce_max": _reduce(jnp.maximum, _lowest),
    "reduce_min": _reduce(jnp.minimum, _highest),
    "reduce_prod": _reduce(lambda a, b: a * b, lambda dtype: 1, lacks=PALLAS),
    "reduce_and": _quantifier(lax.reduce_min_p, jnp.minimum, 1),
    "reduce_or": _quantifier(lax.reduce_max_p, jnp.maximum, 0),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "argmax", "argmin"),
        Rule(OpKind.REDUCTION, _whole_axis_space, _one_an_element, None, TRITON),
    ),
}
