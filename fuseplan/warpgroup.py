"""Blocks that a warpgroup of Mosaic GPU holds: 128 threads, four warps of 32 lanes.

A block has its axes that are longer than one, at most two of them, and every value of a kernel
has them in one order: threads exchange elements in reductions and nowhere else. Of two axes the
first is dealt to the warps and the second to the lanes; a vector is dealt to all threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from costmodel.graph import DimMap

WARPS, LANES = 4, 32


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


def is_addressable(tiles: Sequence[int], dim_maps: Sequence[DimMap]) -> bool:
    """Whether a warpgroup can load, compute and store blocks of ``dim_maps``."""
    order = block_order(tiles, dim_maps)
    if order is None or any(len(held(tiles, (dims,))) > 1 for m in dim_maps for dims in m):
        return False
    if len(order) == 2:
        return tiles[order[0]] % WARPS == 0 and tiles[order[1]] % LANES == 0
    return not order or (len(order) == 1 and tiles[order[0]] % (WARPS * LANES) == 0)
