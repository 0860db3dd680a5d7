"""How much a contraction loads at least, whatever its tiles and whatever shares its kernel."""

from __future__ import annotations

from math import isqrt, prod

from costmodel import dtypes
from costmodel.device import DeviceSpec
from costmodel.graph import DimRole, Graph, Node
from costmodel.roofline import library_matmul

_ACCUMULATOR_BITS = 32
"""A block of results is held in float32 at least (``costmodel.onchip``)."""


class Loads:
    """Bytes whose time at the shared cache nothing beats that runs the contraction ``node`` and
    reads both of its operands from memory; 0 where nothing is known.

    In a tiled kernel a tile of m x n results loads K (a m + b n) bytes, where K elements are
    contracted, of a and b bytes; ``costmodel.roofline.estimate`` takes as long as for max(cores,
    tiles) of them: cores without a tile do not help the others. Of R results there are R / (m n)
    tiles or more, and a m + b n >= 2 sqrt(a b m n). With s = m n it is at least as for

        2 K sqrt(a b s) max(cores, R / s)  bytes,  s <= L,

    where L results fit into half of the registers (``Footprint.fits``): least at min(R / cores, L).
    Other members of the kernel may split the axes of ``node``, which cuts its tiles as well, or add
    axes, along which its tiles are computed again; no member makes a tile larger. But each that
    makes something elementwise of the results needs a block for that beside them. The argument is
    that of Hong and Kung, "I/O complexity: the red-blue pebble game" (STOC 1981), with registers
    for their fast memory.
    """

    def __init__(self, graph: Graph, node: Node, device: DeviceSpec) -> None:
        self.anyhow = 0
        """By a tiled kernel or by XLA's own, which follows ``library_matmul``."""
        self._tiled: dict[int, int] = {}
        self._facts: tuple[int, int, int, int, int] | None = None
        has_cache = device.platform == "gpu" and not device.sequential_grid and device.cache_bytes_per_s
        known = library_matmul(graph, node, device) if has_cache else None
        if known is None or node.inputs[0] == node.inputs[1]:
            return
        reduced = {d for d, role in enumerate(node.roles) if role == DimRole.REDUCED}
        for v, dim_map in zip(node.inputs, node.input_maps, strict=True):
            indexed = {d for dims in dim_map for d in dims}
            if not reduced <= indexed or graph.values[v].size != prod(node.dims[d] for d in indexed):
                return
        depth = prod(node.dims[d] for d in reduced)
        bits = prod(dtypes.bits(graph.values[v].dtype) for v in node.inputs)
        results = prod(node.dims) // depth
        self._facts = (depth, results, bits, device.core_count, device.register_bytes)
        self.anyhow = min(self.tiled(0), max(known) * device.cache_bytes_per_s // 10**12)

    def tiled(self, beside_bits: int) -> int:
        """By a tiled kernel that makes an element of ``beside_bits`` of each result at once."""
        if self._facts is None:
            return 0
        if beside_bits not in self._tiled:
            depth, results, bits, cores, register_bytes = self._facts
            fit = register_bytes // 2 * 8 // (_ACCUMULATOR_BITS + beside_bits) or results
            squared = 4 * depth**2 * bits * max(results * cores, results**2 // fit)
            self._tiled[beside_bits] = isqrt(squared) // 8
        return self._tiled[beside_bits]


def load_key(graph: Graph, node: Node) -> tuple[object, ...]:
    """Equal for contractions of equal ``Loads``."""
    arrays = [(graph.values[v].shape, graph.values[v].dtype) for v in node.inputs + node.outputs]
    return (node.dims, node.roles, node.input_maps, len(set(node.inputs)), *arrays)
