"""Rules of primitives that move data: broadcast, transpose, reshape. ``slices`` has those that split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from costmodel.graph import DimMap, DimRole, OpKind
from fuseplan.frontend.ops.elementwise import elementwise_space
from fuseplan.frontend.ops.rule import (
    PALLAS,
    Rule,
    Space,
    Tile,
    bind,
    known_dtypes,
    no_flops,
    own_dims,
    relayout,
    reshaped,
    whole_space,
)
from fuseplan.frontend.trace import Equation

_P, _W = DimRole.PARALLEL, DimRole.WHOLE


def _broadcast_space(eqn: Equation) -> Space:
    dims, out_map = own_dims(eqn.out_avals[0].shape)
    operand = eqn.in_avals[0]
    in_map = tuple(
        () if extent == 1 else out_map[d]
        for extent, d in zip(operand.shape, eqn.params["broadcast_dimensions"], strict=True)
    )
    return Space(dims, (_P,) * len(dims), (in_map,), (out_map,))


def _broadcast_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    dimensions = tuple(int(d) for d in eqn.params["broadcast_dimensions"])
    shape = tile.out_shapes[0]
    if not dimensions or dimensions[-1] == len(shape) - 1:
        return [lax.broadcast_in_dim(args[0], shape, dimensions)]
    return [relayout(tile, args[0], lambda x: lax.broadcast_in_dim(x, shape, dimensions))]


def _tile_space(eqn: Equation) -> Space:
    """A repeated dimension merges a dimension of repetitions with the operand's."""
    dims: list[int] = []
    in_map: list[tuple[int, ...]] = []
    out_map: list[tuple[int, ...]] = []
    for extent, times in zip(eqn.in_avals[0].shape, eqn.params["reps"], strict=True):
        own: list[tuple[int, ...]] = []
        for n in (int(times), extent):
            own.append(() if n == 1 else (len(dims),))
            dims += [] if n == 1 else [n]
        in_map.append(own[1])
        out_map.append(own[0] + own[1])
    return Space(tuple(dims), (_P,) * len(dims), (tuple(in_map),), (tuple(out_map),))


def _tile_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    own, out = args[0].shape, tile.out_shapes[0]
    repeated = tuple(n for block, kept in zip(out, own, strict=True) for n in (block // kept, kept))
    dims = tuple(range(1, len(repeated), 2))
    return [reshaped(lax.broadcast_in_dim(args[0], repeated, dims), out)]


def _transpose_space(eqn: Equation) -> Space:
    dims, in_map = own_dims(eqn.in_avals[0].shape)
    out_map = tuple(in_map[d] for d in eqn.params["permutation"])
    return Space(dims, (_P,) * len(dims), (in_map,), (out_map,))


def _transpose_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    x, order = args[0], tuple(int(d) for d in eqn.params["permutation"])
    if tile.language != "mosaic_tpu":
        return [lax.transpose(x, order)]
    # TPU compilers do not select by a transposed mask of bits.
    if x.dtype == bool:
        return [relayout(tile, x, lambda x: _transpose_in_steps(x, order))]
    return [_transpose_in_steps(x, order)]


def _transpose_in_steps(x: Any, order: tuple[int, ...]) -> Any:
    """``x`` transposed in steps that exchange either the last two dimensions or others: where another
    dimension becomes the last one, a single transpose takes 16 blocks of VMEM."""
    last = len(order) - 1
    if last < 2 or order[-1] >= last - 1:
        return lax.transpose(x, order)
    rest = tuple(d for d in range(last) if d != order[-1])
    exchanged = (*rest, last, order[-1])
    x = lax.transpose(x, (*rest, order[-1], last))
    x = lax.transpose(x, (*range(last - 1), last, last - 1))
    return lax.transpose(x, tuple(exchanged.index(d) for d in order))


def common_factors(old: Sequence[int], new: Sequence[int]) -> tuple[tuple[int, ...], DimMap, DimMap] | None:
    """The finest dimensions of which both shapes of a row-major reshape are products; None if there are none.

    Example:
        >>> common_factors((6, 4), (2, 3, 4))
        ((2, 3, 4), ((0, 1), (2,)), ((0,), (1,), (2,)))
        >>> common_factors((6, 4), (8, 3)) is None
        True
    """
    dims: list[int] = []
    maps: tuple[list[list[int]], list[list[int]]] = ([[] for _ in old], [[] for _ in new])
    shapes = (old, new)
    position = [0, 0]
    left = [1, 1]  # The factor of each shape's current dimension that is still to be split.

    def refill(side: int) -> None:
        while left[side] == 1 and position[side] < len(shapes[side]):
            left[side] = shapes[side][position[side]]
            position[side] += 1

    # From the major end on, the smaller of the two extents must divide the larger.
    while True:
        refill(0)
        refill(1)
        if left[0] == 1 and left[1] == 1:
            break
        small, large = sorted(left)
        if small <= 1 or large % small:
            return None
        for side in (0, 1):
            maps[side][position[side] - 1].append(len(dims))
            left[side] //= small
        dims.append(small)
    frozen = tuple(tuple(tuple(d) for d in side) for side in maps)
    return tuple(dims), frozen[0], frozen[1]


def _reshape_space(eqn: Equation) -> Space:
    factors = common_factors(eqn.in_avals[0].shape, eqn.out_avals[0].shape)
    if factors is None or eqn.params.get("dimensions") is not None:
        return whole_space(eqn)
    dims, old_map, new_map = factors
    return Space(dims, (_P,) * len(dims), (old_map,), (new_map,))


def _reshape_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    x, shape = args[0], tile.out_shapes[0]
    becomes_column = shape[-1:] == (1,) != x.shape[-1:]
    return [relayout(tile, x, lambda x: reshaped(x, shape)) if becomes_column else reshaped(x, shape)]


def _squeeze_space(eqn: Equation) -> Space:
    dims, in_map = own_dims(eqn.in_avals[0].shape)
    dropped = {int(d) for d in eqn.params["dimensions"]}
    out_map = tuple(m for d, m in enumerate(in_map) if d not in dropped)
    return Space(dims, (_P,) * len(dims), (in_map,), (out_map,))


def _rev_space(eqn: Equation) -> Space:
    dims, out_map = own_dims(eqn.out_avals[0].shape)
    reversed_dims = {i for d in eqn.params["dimensions"] for i in out_map[d]}
    roles = tuple(_W if i in reversed_dims else _P for i in range(len(dims)))
    return Space(dims, roles, (out_map,), (out_map,))


def _bitcast_supports(eqn: Equation, language: str) -> bool:
    """Mosaic GPU has no bitcast; a TPU has none of scalars, which are in registers of one type."""
    scalar = language == "mosaic_tpu" and not eqn.out_avals[0].ndim
    return known_dtypes(eqn, language) and not scalar and language != "mosaic_gpu"


def _bitcast_of_other_width(eqn: Equation) -> Rule | None:
    """The rule of a bitcast that splits or joins elements; None if both dtypes have the same width."""
    same = eqn.in_avals[0].dtype.itemsize == eqn.out_avals[0].dtype.itemsize
    return None if same else Rule(OpKind.INJECTIVE, whole_space, no_flops)


def _iota_block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    dim = eqn.params["dimension"]
    shape = tile.out_shapes[0]
    own = own_dims(eqn.out_avals[0].shape)[1][dim]
    if not own:
        return [lax.full(shape, 0, eqn.params["dtype"])]
    return [tile.indices(shape, dim, own[0]).astype(eqn.params["dtype"])]


RULES: dict[str, Rule] = {
    "broadcast_in_dim": Rule(OpKind.BROADCAST, _broadcast_space, no_flops, _broadcast_block),
    "transpose": Rule(OpKind.INJECTIVE, _transpose_space, no_flops, _transpose_block),
    "reshape": Rule(OpKind.INJECTIVE, _reshape_space, no_flops, _reshape_block),
    "squeeze": Rule(OpKind.INJECTIVE, _squeeze_space, no_flops, _reshape_block),
    "iota": Rule(OpKind.BROADCAST, elementwise_space, no_flops, _iota_block),
    "tile": Rule(OpKind.BROADCAST, _tile_space, no_flops, _tile_block),
    "bitcast_convert_type": Rule(
        OpKind.ELEMENTWISE,
        elementwise_space,
        no_flops,
        bind,
        supports=_bitcast_supports,
        special=_bitcast_of_other_width,
    ),
    "rev": Rule(OpKind.INJECTIVE, _rev_space, no_flops, None, PALLAS),
}
