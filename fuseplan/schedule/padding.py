"""Say how long a backend's blocks are, and which operations are correct on a block that is padded.

A block of a kernel has ``tile`` elements along each axis; the array may have fewer. Triton's tiles are
powers of two, so a whole axis of 5 is a tile of 8 with 3 elements of padding, which loads fill, stores
drop and reductions mask.

The rule: an operation may be given a padded block if it handles axis after axis. Elementwise operations,
transposes, broadcasts and reductions do, and so does a reshape that splits or merges whole axes of the
kernel: both blocks then have the same axes in the same order, padding included. A reshape between
dimensions without common factors (3 x 5 to 5 x 3) does not: it *regroups* elements by their row-major rank.
Padding changes that rank, unless only the outermost axis of each side is padded, so that all elements
come before all padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from costmodel.backends import backend_of
from costmodel.graph import DimMap, Graph, Node, OpKind
from fuseplan.support.errors import Verdict


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
        # over its neighbour (test_schedule.py::test_inner_tile_divides).
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
    """Whether a kernel of ``backend`` can hold a node that ``regroups`` elements, all of which are in one
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
