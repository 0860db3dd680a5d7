"""The extents of a matrix product, and the parts into which XLA divides its contracted axis on a GPU.

A product of few tiles and a long contracted axis leaves cores idle. XLA then computes it in parts along that
axis, and a later kernel adds up the results of the parts: a kernel of its own, or that which reads the
product. So the kernel of such a product has no epilogue.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from costmodel import dtypes
from costmodel.device import DeviceSpec
from costmodel.graph import DimRole, Graph, Node

# What XLA's ``SplitkRewriter`` weighs, without a unit, as it was fitted to Hopper (jax 0.10): an operation of
# a tile, a byte of the product, and a byte and the launch of the sum of the parts.
_TILE = 128
_OPERATION, _BYTE, _SUMMED_BYTE, _SUM = 100, 0.194136, 193.1384, 4.36e7
_MOST_PARTS = 2048


def product_extents(graph: Graph, node: Node) -> tuple[int, int, int, int] | None:
    """The batch, the rows, the columns and the contracted elements of a matrix product; None for other
    nodes."""
    if len(node.inputs) != 2 or DimRole.REDUCED not in node.roles or DimRole.WHOLE in node.roles:
        return None
    lhs, rhs = ({d for dims in dim_map for d in dims} for dim_map in node.input_maps)
    depth = {d for d, role in enumerate(node.roles) if role == DimRole.REDUCED}

    def extent(dims: set[int]) -> int:
        return prod(node.dims[d] for d in dims)

    return extent(lhs & rhs - depth), extent(lhs - rhs), extent(rhs - lhs), extent(depth)


def contracted_parts(graph: Graph, node: Node, device: DeviceSpec) -> int:
    """The number of parts into which XLA divides the contracted axis of ``node`` on ``device``: 1 where it
    divides nothing, as on other devices than GPUs.

    Example:
        >>> from costmodel.devices import get_device
        >>> from costmodel.graph import OpKind, Value, make_graph
        >>> values = [Value(k, (256, 8192), "float32", -1) for k in (0, 1)]
        >>> values.append(Value(2, (256, 256), "float32", 0))
        >>> roles = DimRole.PARALLEL, DimRole.PARALLEL, DimRole.REDUCED
        >>> maps = (((0,), (2,)), ((1,), (2,))), (((0,), (1,)),)
        >>> kind = OpKind.OUT_ELEMENTWISE_FUSABLE
        >>> node = Node(0, "dot_general", kind, (0, 1), (2,), (256, 256, 8192), roles, *maps)
        >>> graph = make_graph(tuple(values), (node,), (0, 1), (2,))
        >>> contracted_parts(graph, node, get_device("h200")) > 1
        True
    """
    extents = product_extents(graph, node) if node.op == "dot_general" else None
    is_divisible = sum(role == DimRole.REDUCED for role in node.roles) == 1
    if device.platform != "gpu" or extents is None or not is_divisible or not prod(extents):
        return 1
    bits = [dtypes.bits(graph.values[v].dtype) for v in (*node.inputs, node.outputs[0])]
    return _cheapest_parts(extents, (bits[0], bits[1], bits[2]), device.core_count)


@lru_cache(maxsize=1024)
def _cheapest_parts(extents: tuple[int, int, int, int], bits: tuple[int, int, int], cores: int) -> int:
    batch, rows, columns, depth = extents
    lhs_bits, rhs_bits, out_bits = bits
    sum_bits = max(out_bits, 32)  # parts are added in float32
    tile_rows, tile_columns = min(rows, _TILE), min(columns, _TILE)
    tiles = batch * -(-rows // _TILE) * -(-columns // _TILE)
    slots = cores * _TILE * _TILE / (tile_rows * tile_columns)
    made = batch * rows * columns

    def cost(parts: int) -> float:
        of_tile = 2 * tile_rows * tile_columns * -(-depth // parts)
        operations = of_tile * max(1.0, tiles * parts / slots) * _OPERATION
        written = parts * made * (sum_bits if parts > 1 else out_bits)
        moved = batch * depth * (rows * lhs_bits + columns * rhs_bits) + written
        whole = max(operations, moved / 8 * _BYTE)
        if parts == 1:
            return whole
        return whole + _SUM + made * (parts * sum_bits + out_bits) / 8 * _SUMMED_BYTE

    every = [1 << k for k in range(_MOST_PARTS.bit_length())]
    return min(every, key=cost)
