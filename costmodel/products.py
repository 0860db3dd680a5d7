"""Matrix products on a CPU: what one costs, and which side XLA had better be given first.

XLA computes a product from rows of its left operand and columns of its right one; where an
operand lies otherwise in memory, it transposes it first, and a large one for longer than the
product takes. The two sides can change places instead: ``(rᵀ lᵀ)ᵀ = l r``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.device import DeviceSpec
from costmodel.graph import DimMap, Graph, Node
from costmodel.picoseconds import time_ps

_TOUCH_FLOPS = 10
"""What XLA's matrix product spends on an element of its operands and of its result beside the
flops, in flops: packing, and storing. Fitted within 20 % to float32 products of 3 to 20,000 on a
side (two server cores, jax 0.10), with the time to hand them out: 128x64x128 runs at 100 GFLOP/s,
512x64x512 at 180, 2048x768x768 at 200, of 210 at best."""

_TRANSPOSE_FLOPS = 60
"""And on an element that it transposes (measured: 0.1 to 0.5 ns at 200 GFLOP/s)."""


@dataclass(frozen=True, slots=True)
class Sides:
    """A contraction by the dimensions that it sums over, and those that its result has.

    Example:
        >>> Sides.of((((0,), (1,)), ((2,), (1,)), ((0,), (2,))))
        Sides(batch=frozenset(), rows=frozenset({0}), depth=frozenset({1}), columns=frozenset({2}))
    """

    batch: frozenset[int]
    rows: frozenset[int]
    depth: frozenset[int]
    columns: frozenset[int]

    @classmethod
    def of(cls, maps: Sequence[DimMap]) -> Sides:
        """Of the maps of its left operand, its right one and its result."""
        left, right, result = (frozenset(d for dims in m for d in dims) for m in maps)
        return cls(left & right & result, left & result - right, left - result, right & result - left)


def exchanges(maps: Sequence[DimMap], extents: Sequence[int]) -> bool:
    """Whether the product is faster as that of its right side with its left one.

    Args:
        maps: dimensions of the left operand, the right one and the result.
        extents: of each dimension.

    Example: ``x.T @ y``, of ``x[4096, 64]`` and ``y[4096, 512]``, and the other way round:
        >>> exchanges((((0,), (1,)), ((0,), (2,)), ((1,), (2,))), (4096, 64, 512))
        False
        >>> exchanges((((0,), (1,)), ((0,), (2,)), ((1,), (2,))), (4096, 512, 64))
        True
    """
    as_is, exchanged = _transposed(maps, extents)
    return exchanged < as_is


def product_ps(graph: Graph, node: Node, device: DeviceSpec, tile: Sequence[int] | None = None) -> int:
    """The time of a contraction on a CPU, or of one tile of it: ``tile`` has the extent of
    each of its dimensions. Flops, packing, transposing and storing, at the rate of its first
    operand's dtype."""
    rate = device.matrix_rate(graph.values[node.inputs[0]].dtype)
    extents = node.dims if tile is None else tile
    flops = -(-node.flops.matrix * math.prod(extents) // max(math.prod(node.dims), 1))
    if node.op == "dot_general" and len(node.inputs) == 2:
        maps = (*node.input_maps, *node.output_maps)
        flops += sum(_size({d for dims in m for d in dims}, extents) for m in maps) * _TOUCH_FLOPS
        flops += min(_transposed(maps, extents)) * _TRANSPOSE_FLOPS
    return time_ps(flops, rate)


def _transposed(maps: Sequence[DimMap], extents: Sequence[int]) -> tuple[int, int]:
    """How many elements are transposed if the product is computed as it is, and if its sides
    change places."""
    sides = Sides.of(maps)
    if _size(sides.rows, extents) == 1 or _size(sides.columns, extents) == 1:
        return 0, 0  # XLA reads a matrix by rows or by columns to multiply it with a vector
    left, right, result = maps

    def moved(dim_map: DimMap, *order: frozenset[int]) -> int:
        dims = [d for dims in dim_map for d in dims if extents[d] > 1]
        ranks = [next(i for i, group in enumerate(order) if d in group) for d in dims]
        return 0 if ranks == sorted(ranks) else _size(dims, extents)

    batch, rows, depth, columns = sides.batch, sides.rows, sides.depth, sides.columns
    as_is = moved(left, batch, rows, depth) + moved(right, batch, depth, columns)
    exchanged = moved(right, batch, columns, depth) + moved(left, batch, depth, rows)
    return as_is, exchanged + moved(result, batch, columns, rows)


def _size(dims: Sequence[int] | set[int] | frozenset[int], extents: Sequence[int]) -> int:
    return math.prod(extents[d] for d in dims)
