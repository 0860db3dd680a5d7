"""Decide which blocks a backend can address: padding to powers of two, reshapes, warpgroup layouts.

A block of a kernel has ``tile`` elements along each axis; the array may have fewer. The tiles of Triton are
powers of two, so a whole axis of 5 is a tile of 8 with 3 elements of padding, which loads fill, stores
drop and reductions mask.

An operation may be given a padded block if it handles axis after axis. Elementwise operations, transposes,
broadcasts and reductions do, and so does a reshape that splits or merges whole axes of the
kernel: both blocks then have the same axes in the same order, padding included. A reshape between
dimensions without common factors (3 x 5 to 5 x 3) does not: it *regroups* elements by their row-major rank.
Padding changes that rank, unless only the outermost axis of each side is padded, so that all elements
come before all padding.

A warpgroup of Mosaic GPU has 128 threads, four warps of 32 lanes. Its blocks have their axes that are longer
than one, at most two of them, and every value of a kernel has them in one order: threads exchange
elements in reductions and nowhere else. Of two axes the first is spread over the warps and the second over
the lanes; a vector is spread over all threads. The blocks of the operands of a contraction lie in shared
memory, with the contracted axis.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from costmodel.backends import backend_of
from costmodel.graph import DimMap, Graph, Node, OpKind
from fuseplan.support.errors import Verdict

WARPS, LANES = 4, 32
"""Of a warpgroup of Mosaic GPU."""

SWIZZLED = 64
"""16-bit elements in the 128 bytes over which shared memory is swizzled; rows of a wgmma, too."""

_COPY = 256
"""Elements along a dimension that one copy takes (CUDA driver API, ``cuTensorMapEncodeTiled``)."""


def whole_tile(size: int, backend: str) -> int:
    """The tile that holds all of an axis: Triton's blocks are powers of two.

    Example:
        >>> whole_tile(5, "triton"), whole_tile(5, "mosaic_tpu")
        (8, 5)
    """
    return 1 << max(size - 1, 0).bit_length() if backend_of(backend).power_of_two_tiles else max(size, 1)


def is_contiguous(sizes: Sequence[int], tiles: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether the elements of a block are contiguous in an array along a dimension that merges the axes
    ``dims``. Seen from the innermost axis, they are if tiles first cover whole axes, then part of one axis,
    then one element of each. Only Triton loads and stores other blocks, element by element."""
    whole_so_far = True
    for a in reversed(dims):
        if not whole_so_far and tiles[a] != 1:
            return False
        # The outermost may reach past its end, where it is masked; an inner one would write
        # over its neighbour.
        if a != dims[0] and sizes[a] % tiles[a]:
            return False
        if tiles[a] != sizes[a]:
            whole_so_far = False
    return True


Order = tuple[int, ...]
"""The axes of a block, the outermost first."""


def order(dim_map: DimMap) -> Order:
    """The axes, or iteration dimensions, of a block in row-major order.

    Example:
        >>> order(((0,), (), (1, 2)))
        (0, 1, 2)
    """
    return tuple(a for dims in dim_map for a in dims)


def regroups(node: Node) -> bool:
    """Whether it is a reshape that gives the elements of its operand, in row-major order, to other axes."""
    if node.kind != OpKind.INJECTIVE or len(node.inputs) != 1 or len(node.outputs) != 1:
        return False
    before, after = (order(m) for m in (*node.input_maps, *node.output_maps))
    size = math.prod(node.dims[d] for d in before)
    return set(before) != set(after) and size == math.prod(node.dims[d] for d in after) != 0


def keeps_ranks(sizes: Sequence[int], tiles: Sequence[int], axes: Order) -> bool:
    """Whether all elements of a block come before its padding, in row-major order.

    Example:
        >>> keeps_ranks((3, 4), (4, 4), (0, 1)), keeps_ranks((4, 3), (4, 4), (0, 1))
        (True, False)
    """
    return all(tiles[a] == sizes[a] for a in axes[1:])


def can_regroup(node: Node, backend: str) -> bool:
    """Whether a kernel of ``backend`` can hold a node that ``regroups`` elements, with all of them in one
    block. A Mosaic GPU kernel cannot: each of its threads keeps the elements that it holds."""
    if not backend_of(backend).regroups_elements:
        return False
    tiles = [whole_tile(n, backend) for n in node.dims]
    return all(keeps_ranks(node.dims, tiles, order(m)) for m in (*node.input_maps, *node.output_maps))


def refuse_regrouping(graph: Graph, node: Node, backend: str) -> Verdict | None:
    """Why no kernel of ``backend`` can hold ``node`` with its blocks as they are, or None."""
    if not regroups(node) or can_regroup(node, backend):
        return None
    source, result = graph.values[node.inputs[0]], graph.values[node.outputs[0]]
    if not backend_of(backend).regroups_elements:
        why = "needs elements of other threads"
    else:
        blocks = [_block(node, m, backend) for m in (node.input_maps[0], node.output_maps[0])]
        why = f"would move the padding of its block {blocks[0]} between the elements of {blocks[1]}"
    reason = f"in a {backend} kernel {node.op} of {source} to {result} {why}"
    return Verdict("backend", reason, (node.id,))


def _block(node: Node, dim_map: DimMap, backend: str) -> str:
    tiles = (math.prod(whole_tile(node.dims[d], backend) for d in dims) for dims in dim_map)
    return f"[{','.join(map(str, tiles))}]"


def held(tiles: Sequence[int], dim_map: DimMap) -> tuple[int, ...]:
    """The axes of a warpgroup's block that are longer than one, outermost first.

    Example:
        >>> held((1, 8, 64), ((0,), (1, 2)))
        (1, 2)
    """
    return tuple(a for dims in dim_map for a in dims if tiles[a] > 1)


def block_order(tiles: Sequence[int], dim_maps: Iterable[DimMap]) -> tuple[int, ...] | None:
    """All axes that are longer than one, in the order that the blocks of a warpgroup have in common; None
    if there is no such order.

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
    """Whether the operands of a contraction can be copied and multiplied: a copy that reaches past an end, or
    starts between two swizzled rows, gives wrong elements. The innermost axis must be contiguous."""
    long = {a for m in dim_maps for a in held(tiles, m)}
    if any(tiles[a] % SWIZZLED or tiles[a] > _COPY or sizes[a] % tiles[a] for a in long):
        return False
    inner = [[dims for dims in m if dims][-1][-1] for m in dim_maps if held(tiles, m)]
    return all(len(held(tiles, m)) == 2 for m in operands) and all(a in long for a in inner)
