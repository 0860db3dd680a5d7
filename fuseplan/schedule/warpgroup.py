"""Blocks that a warpgroup of Mosaic GPU holds: 128 threads, four warps of 32 lanes.

A block has its axes that are longer than one, at most two of them, and every value of a kernel
has them in one order: threads exchange elements in reductions and nowhere else. Of two axes the
first is dealt to the warps and the second to the lanes; a vector is dealt to all threads. The
blocks of a contraction's operands lie in shared memory, with the contracted axis.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from costmodel.graph import DimMap

WARPS, LANES = 4, 32

SWIZZLED = 64
"""16-bit elements in the 128 bytes over which shared memory is swizzled; rows of a wgmma, too."""

_COPY = 256
"""Elements along a dimension that one copy takes (CUDA driver API, ``cuTensorMapEncodeTiled``)."""


def held(tiles: Sequence[int], dim_map: DimMap) -> tuple[int, ...]:
    """The axes of a block that are longer than one, in the order in which they lie.

    Example:
        >>> held((1, 8, 64), ((0,), (1, 2)))
        (1, 2)
    """
    return tuple(a for dims in dim_map for a in dims if tiles[a] > 1)


def block_order(tiles: Sequence[int], dim_maps: Iterable[DimMap]) -> tuple[int, ...] | None:
    """All axes that are longer than one, in the order that every block has them in; None where
    they have none in common.

    Example:
        >>> block_order((1, 8, 64), [((0,), (1,), (2,)), ((1,),), ((2,),)])
        (1, 2)
        >>> block_order((8, 64), [((0,), (1,)), ((1,), (0,))]) is None
        True
    """
    blocks = [held(tiles, m) for m in dim_maps]
    order = max(blocks, key=len, default=())
    alike = all(block == tuple(a for a in order if a in block) for block in blocks)
    return order if alike else None


def is_addressable(
    sizes: Sequence[int], tiles: Sequence[int], dim_maps: Collection[DimMap], depth: Sequence[int] = ()
) -> bool:
    """Whether a warpgroup can load, compute and store blocks of ``dim_maps``; those with an axis of
    ``depth`` are operands of a contraction."""
    if any(len(held(tiles, (dims,))) > 1 for m in dim_maps for dims in m):
        return False
    operands = [m for m in dim_maps if any(a in depth for dims in m for a in dims)]
    order = block_order(tiles, [m for m in dim_maps if m not in operands])
    if order is None:
        return False
    if operands:
        return len(order) == 2 and _is_product(sizes, tiles, dim_maps, operands)
    if len(order) == 2:
        return tiles[order[0]] % WARPS == 0 and tiles[order[1]] % LANES == 0
    return not order or (len(order) == 1 and tiles[order[0]] % (WARPS * LANES) == 0)


def _is_product(
    sizes: Sequence[int], tiles: Sequence[int], dim_maps: Collection[DimMap], operands: Sequence[DimMap]
) -> bool:
    """Whether operands are copied and multiplied whole: a copy of what reaches past an end, or starts
    between two swizzled rows, is not what it seems. What lies innermost is contiguous."""
    long = {a for m in dim_maps for a in held(tiles, m)}
    if any(tiles[a] % SWIZZLED or tiles[a] > _COPY or sizes[a] % tiles[a] for a in long):
        return False
    inner = [[dims for dims in m if dims][-1][-1] for m in dim_maps if held(tiles, m)]
    return all(len(held(tiles, m)) == 2 for m in operands) and all(a in long for a in inner)
