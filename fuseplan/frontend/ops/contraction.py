"""Rules of contractions: ``dot_general`` as a tiled matmul, and convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from costmodel.graph import DimMap, DimRole, Flops, OpKind
from costmodel.loops import swap_is_faster
from fuseplan.frontend.ops import composed
from fuseplan.frontend.ops.elementwise import elementwise
from fuseplan.frontend.ops.reduction import accumulator, masked
from fuseplan.frontend.ops.rule import (
    PALLAS,
    XLA,
    Reduction,
    Rule,
    Space,
    Tile,
    known_dtypes,
    own_dims,
    reshaped,
    whole_space,
)
from fuseplan.frontend.trace import Equation

_P, _W, _R = DimRole.PARALLEL, DimRole.WHOLE, DimRole.REDUCED


def _dot_space(eqn: Equation) -> Space:
    """The space whose result has batch dimensions, then free dimensions of the left and of the right."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = eqn.in_avals
    dims, lhs_map = own_dims(lhs.shape)
    rhs_map: list[tuple[int, ...]] = [()] * rhs.ndim
    for left, right in zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch), strict=True):
        rhs_map[right] = lhs_map[left]
    free = [d for d in range(rhs.ndim) if d not in (*rhs_contract, *rhs_batch)]
    extra, free_map = own_dims([rhs.shape[d] for d in free], len(dims))
    for d, axes in zip(free, free_map, strict=True):
        rhs_map[d] = axes
    dims += extra
    reduced = {i for d in lhs_contract for i in lhs_map[d]}
    roles = tuple(_R if i in reduced else _P for i in range(len(dims)))
    out_map: DimMap = (
        *(lhs_map[d] for d in lhs_batch),
        *(lhs_map[d] for d in range(lhs.ndim) if d not in (*lhs_contract, *lhs_batch)),
        *free_map,
    )
    return Space(dims, roles, (lhs_map, tuple(rhs_map)), (out_map,))


def _dot_flops(eqn: Equation) -> Flops:
    (contract, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.in_avals[0].shape[d] for d in contract)
    return Flops(matrix=2 * eqn.out_avals[0].size * depth)


def _dot_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """One tile's partial product."""
    return (_whole_dot if tile.language in XLA else _flat_dot)(tile, eqn, args)


def _whole_dot(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """The partial product of one tile by the primitive itself, for XLA."""
    contracts, _ = eqn.params["dimension_numbers"]
    dtype = accumulator(eqn.out_avals[0].dtype)
    params = dict(eqn.params)
    if not isinstance(params["precision"], (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        params["preferred_element_type"] = dtype  # an algorithm has its own accumulator dtype
    # Both sides are masked: an element that belongs to an earlier tile may be infinite, and 0 * inf is NaN.
    lhs, rhs = (masked(tile, i, contracts[i], x, 0) for i, x in enumerate(args))
    if tile.language != "loops":
        return [eqn.primitive.bind(lhs, rhs, **params).astype(dtype)]
    if treats_sides_alike(eqn):
        space = _dot_space(eqn)
        maps = (*space.input_maps, *space.output_maps)
        if swap_is_faster(maps, _tile_extents(space, (lhs.shape, rhs.shape))):
            return [exchanged_dot(eqn, lhs, rhs, params).astype(dtype)]
    lhs, rhs, params = _without_unit_batches(lhs, rhs, params)
    return [reshaped(eqn.primitive.bind(lhs, rhs, **params).astype(dtype), tile.out_shapes[0])]


def _without_unit_batches(lhs: Any, rhs: Any, params: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The operands and parameters of a product without its batch dimensions of size one, for which XLA would
    transpose a tile that is contracted along its rows."""
    contracts, batches = params["dimension_numbers"]
    units = [k for k, d in enumerate(batches[0]) if lhs.shape[d] == 1]
    if not units:
        return lhs, rhs, params
    sides = []
    for x, contract, batch in zip((lhs, rhs), contracts, batches, strict=True):
        dropped = {batch[k] for k in units}
        place = {d: k for k, d in enumerate(d for d in range(x.ndim) if d not in dropped)}
        kept = tuple(place[d] for d in batch if d not in dropped)
        sides.append((lax.squeeze(x, sorted(dropped)), tuple(place[d] for d in contract), kept))
    (lhs, lhs_contract, lhs_batch), (rhs, rhs_contract, rhs_batch) = sides
    numbers = ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))
    return lhs, rhs, {**params, "dimension_numbers": numbers}


def treats_sides_alike(eqn: Equation) -> bool:
    """Whether both sides have one precision, and no sharding is asked for, so that they may be exchanged."""
    precision, sharding = eqn.params["precision"], eqn.params.get("out_sharding")
    alike = isinstance(precision, tuple) and precision[0] == precision[1]
    return sharding is None and (precision is None or alike)


def _tile_extents(space: Space, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """The tile's extent in each iteration dimension, from the shapes of its operands."""
    extents = [1] * len(space.dims)
    for dim_map, shape in zip(space.input_maps, shapes, strict=True):
        for dims, extent in zip(dim_map, shape, strict=True):
            for d in dims:
                extents[d] = extent
    return extents


def exchanged_dot(eqn: Equation, lhs: Any, rhs: Any, params: dict[str, Any]) -> Any:
    """The product computed as ``rhs`` times ``lhs`` and transposed."""
    contracts, batches = eqn.params["dimension_numbers"]
    params = {**params, "dimension_numbers": (contracts[::-1], batches[::-1])}
    out = eqn.primitive.bind(rhs, lhs, **params)
    batch = len(batches[0])
    columns = rhs.ndim - len(contracts[1]) - batch
    order = (*range(batch), *range(batch + columns, out.ndim), *range(batch, batch + columns))
    # Without the barrier, XLA rewrites the transposed product as ``lhs`` times ``rhs``.
    return lax.optimization_barrier(out).transpose(order)


def _flat_dot(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """The partial product of one tile as a two-dimensional matmul, for Pallas.

    The schedule leaves at most one row, one column and one contracted axis longer than one.
    """
    (contracts, batches) = eqn.params["dimension_numbers"]
    sides = []
    dtype, accumulate = jnp.result_type(*args), accumulator(eqn.out_avals[0].dtype)
    halved = tile.language == "triton" and _is_multiplied_by_halves(eqn)
    every_free = [
        [d for d in range(x.ndim) if d not in (*contracts[i], *batches[i])] for i, x in enumerate(args)
    ]
    single = any(all(x.shape[d] == 1 for d in free) for x, free in zip(args, every_free, strict=True))
    if tile.language == "mosaic_tpu" and single:
        # A single row gains nothing from narrow operands, which not every TPU compiler accepts or masks.
        dtype = accumulate
    for i, (x, free) in enumerate(zip(args, every_free, strict=True)):
        x = masked(tile, i, contracts[i], jnp.asarray(x, jnp.result_type(x) if halved else dtype), 0)
        depth = math.prod(x.shape[d] for d in contracts[i])
        long_free = [d for d in free if x.shape[d] != 1]
        long_depth = [d for d in contracts[i] if x.shape[d] != 1]
        leading = bool(long_free and long_depth and long_depth[0] < long_free[0])
        width = math.prod(x.shape[d] for d in free)
        sides.append((reshaped(x, (depth, width) if leading else (width, depth)), leading))
    (lhs, lhs_leading), (rhs, rhs_leading) = sides
    if _avoids_matrix_unit(tile, (lhs, lhs_leading), (rhs, rhs_leading)):
        out = _multiply_and_sum((lhs, lhs_leading), (rhs, rhs_leading), accumulate)
    else:
        multiply = partial(
            lax.dot_general,
            dimension_numbers=(((0 if lhs_leading else 1,), (0 if rhs_leading else 1,)), ((), ())),
            precision=eqn.params["precision"],
            preferred_element_type=accumulate,
        )
        out = _multiply_by_halves(multiply, lhs, rhs) if halved else multiply(lhs, rhs)
    return [reshaped(out, tile.out_shapes[0])]


def _is_multiplied_by_halves(eqn: Equation) -> bool:
    """Whether a float32 operand and a bfloat16 one are multiplied, in no more than TF32's precision."""
    precision = eqn.params["precision"]
    default = lax.Precision.DEFAULT
    is_default = precision is None or precision == (default, default)
    return is_default and {str(a.dtype) for a in eqn.in_avals} == {"bfloat16", "float32"}


def _multiply_by_halves(multiply: Callable[[Any, Any], Any], lhs: Any, rhs: Any) -> Any:
    """The product of a float32 operand and a bfloat16 one, as two products of bfloat16. The float32 operand
    is the sum of its upper 8 bits and the next 8, which is more than the 11 bits that TF32 has of it. The
    tensor cores of an H100 read operands of 32 bits along the contracted dimension alone (PTX ISA, ``wgmma``:
    transposed operands have 16 bits): on an H200 the two kernels of an attention's gradient took 1,408 and
    2,102 us so, and 2,441 and 5,103 in TF32."""
    if lhs.dtype == jnp.float32:
        upper, lower = composed.bfloat16_halves(lhs)
        rest, most = multiply(lower, rhs), multiply(upper, rhs)
    else:
        upper, lower = composed.bfloat16_halves(rhs)
        rest, most = multiply(lhs, lower), multiply(lhs, upper)
    # 0 times infinity; where the product is NaN, so is that of the upper halves.
    return jnp.where(rest != rest, jnp.zeros((), rest.dtype), rest) + most


Side = tuple[Any, bool]
"""An operand of a matmul, and whether its contracted dimension comes first."""


def _avoids_matrix_unit(tile: Tile, lhs: Side, rhs: Side) -> bool:
    """Whether the tile is multiplied and summed by vector operations.

    Tensor cores take at least 16 rows, columns and contracted elements (mma.m16n8k16);
    Mosaic lowers no product of 16-bit rows with one vector.
    """
    if tile.language == "triton":
        return min(*lhs[0].shape, *rhs[0].shape) < 16
    vector = rhs[0].shape[0] == 1 and not lhs[1] and not rhs[1]
    return tile.language == "mosaic_tpu" and vector and lhs[0].dtype != jnp.float32


def _multiply_and_sum(lhs: Side, rhs: Side, dtype: Any) -> Any:
    """``lhs @ rhs`` by broadcasting: two-dimensional where one side is a vector."""
    a = jnp.asarray(lhs[0].T if lhs[1] else lhs[0], dtype)  # rows, depth
    b = jnp.asarray(rhs[0] if rhs[1] else rhs[0].T, dtype)  # depth, columns
    rows, depth = a.shape
    columns = b.shape[1]
    if columns == 1:
        total = _sum(a * reshaped(b, (1, depth)), 1)
    elif rows == 1:
        total = _sum(reshaped(a, (depth, 1)) * b, 0)
    else:
        total = _sum(reshaped(a, (rows, depth, 1)) * reshaped(b, (1, depth, columns)), 1)
    return reshaped(total, (rows, columns))


def _sum(x: Any, axis: int) -> Any:
    return lax.reduce_sum(x, axes=(axis,)) if x.shape[axis] != 1 else lax.squeeze(x, (axis,))


def _dot_supports(eqn: Equation, language: str) -> bool:
    """Floats, and int8 accumulated in int32. Mosaic takes one precision for both sides."""
    lhs, rhs = (str(a.dtype) for a in eqn.in_avals)
    if language == "mosaic_gpu":
        # wgmma takes 32-bit operands only with the contracted axis minor (wgmma.m64nNk8).
        plain = not isinstance(eqn.params["precision"], (lax.DotAlgorithm, lax.DotAlgorithmPreset))
        return plain and lhs == rhs in ("bfloat16", "float16") and known_dtypes(eqn, language)
    if lhs.startswith(("int", "uint")) or rhs.startswith(("int", "uint")):
        return lhs == rhs == "int8" and str(eqn.out_avals[0].dtype) == "int32"
    if "bool" in (lhs, rhs) or not known_dtypes(eqn, language):
        return False
    precision = eqn.params["precision"]
    if language == "mosaic_tpu":
        return precision is None or (isinstance(precision, tuple) and precision[0] == precision[1])
    return True


def _scale_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    dtype = eqn.out_avals[0].dtype
    lhs, rhs = (jnp.asarray(x).astype(dtype) for x in args)
    return [lhs * rhs]


_SCALE = elementwise(block=_scale_block, supports=known_dtypes)


def _scaling(eqn: Equation) -> Rule | None:
    """The elementwise rule of a product with a scalar, as in the gradient of ``jnp.vdot``; else None."""
    return _SCALE if any(aval.ndim == 0 for aval in eqn.in_avals) else None


def _conv_space(eqn: Equation) -> Space:
    """The space in which batch and output channels are parallel and all else is whole."""
    numbers = eqn.params["dimension_numbers"]
    dims, out_map = own_dims(eqn.out_avals[0].shape)
    spatial = {i for d in numbers.out_spec[2:] for i in out_map[d]}
    roles = tuple(_W if i in spatial else _P for i in range(len(dims)))
    maps = []
    for aval in eqn.in_avals:
        own, dim_map = own_dims(aval.shape, len(dims))
        dims, roles = dims + own, roles + (_W,) * len(own)
        maps.append(dim_map)
    return Space(dims, roles, tuple(maps), (out_map,))


def _conv_flops(eqn: Equation) -> Flops:
    numbers = eqn.params["dimension_numbers"]
    kernel = eqn.in_avals[1]
    # Each output element sums over the window and the input channels of its group.
    window = math.prod(kernel.shape[d] for d in numbers.rhs_spec[1:])
    return Flops(matrix=2 * eqn.out_avals[0].size * window)


def _ragged_flops(eqn: Equation) -> Flops:
    """Each row of the left is multiplied by the free columns of one group of the right."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    ((_, contract), (_, batch)), rhs = numbers.dot_dimension_numbers, eqn.in_avals[1]
    bound = {*contract, *batch, *numbers.rhs_group_dimensions}
    free = math.prod(n for d, n in enumerate(rhs.shape) if d not in bound)
    return Flops(matrix=2 * eqn.in_avals[0].size * free)


RULES: dict[str, Rule] = {
    "dot_general": Rule(
        OpKind.OUT_ELEMENTWISE_FUSABLE,
        _dot_space,
        _dot_flops,
        _dot_block,
        reduction=Reduction(lambda a, b: a + b, lambda dtype: 0, accumulator),
        supports=_dot_supports,
        special=_scaling,
    ),
    "conv_general_dilated": Rule(OpKind.OUT_ELEMENTWISE_FUSABLE, _conv_space, _conv_flops, None),
    "ragged_dot_general": Rule(OpKind.OPAQUE, whole_space, _ragged_flops, None, PALLAS),
}
