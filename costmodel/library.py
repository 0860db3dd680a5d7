"""What a vendor library's matmul costs: its best tile, under the laws our own obey.

A library's matmul also works in tiles, in waves over the cores, and reads its operands
from the shared cache once a tile. Pricing it at the peak rate, and a fused matmul with its
waves and re-reads, would decide every epilogue against fusion.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from costmodel import dtypes
from costmodel.device import DeviceSpec
from costmodel.graph import DimRole, Graph, Node
from costmodel.picoseconds import time_ps

# Output tiles and splits of the contraction that cuBLAS and CUTLASS build kernels for
# (CUTLASS, "Efficient GEMM in CUDA", and its default configurations).
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_SPLITS = (1, 2, 4, 8)


def library_matmul(graph: Graph, node: Node, device: DeviceSpec) -> tuple[int, int] | None:
    """Picoseconds on the matrix units and at the cache of one library call for ``node``, by
    its best tile; None where that is not how it is run (no contraction of two operands, or a
    device without a shared cache in front of many cores)."""
    if device.platform != "gpu" or len(node.inputs) != 2 or DimRole.REDUCED not in node.roles:
        return None
    if DimRole.WHOLE in node.roles or not prod(node.dims):
        return None
    lhs, rhs = ({d for dims in dim_map for d in dims} for dim_map in node.input_maps)
    depth = {d for d, role in enumerate(node.roles) if role == DimRole.REDUCED}

    def extent(dims: set[int]) -> int:
        return prod(node.dims[d] for d in dims)

    batch, rows, columns, k = (extent(dims) for dims in (lhs & rhs - depth, lhs - rhs, rhs - lhs, depth))
    lhs_bits, rhs_bits = (dtypes.bits(graph.values[v].dtype) for v in node.inputs)
    out_bytes = graph.values[node.outputs[0]].nbytes
    rate = device.matrix_rate(graph.values[node.inputs[0]].dtype)
    extents = (batch, rows, columns, k)
    return _best(extents, lhs_bits, rhs_bits, out_bytes, rate, device.core_count, device.cache_bytes_per_s)


@lru_cache(maxsize=1024)
def _best(
    extents: tuple[int, int, int, int],
    lhs_bits: int,
    rhs_bits: int,
    out_bytes: int,
    rate: int,
    cores: int,
    cache_bytes_per_s: int,
) -> tuple[int, int] | None:
    """Picoseconds on the matrix units and at the cache by the best tile."""
    batch, rows, columns, k = extents
    best: tuple[int, int] | None = None
    for tile_rows, tile_columns in _TILES:
        across, down = -(-rows // tile_rows), -(-columns // tile_columns)
        loaded = batch * k * (rows * down * lhs_bits + columns * across * rhs_bits) // 8
        for split in _SPLITS:
            tiles = batch * across * down * split
            waves = -(-tiles // cores)
            flops = waves * cores * 2 * tile_rows * tile_columns * -(-k // split)
            matrix_ps = time_ps(flops, rate)
            moved = loaded + split * out_bytes
            cache_ps = time_ps(moved * cores, cache_bytes_per_s * min(tiles, cores))
            if best is None or max(matrix_ps, cache_ps) < max(best):
                best = matrix_ps, cache_ps
    return best
