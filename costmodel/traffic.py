"""Count the bytes that a kernel reads from HBM, writes to HBM, and loads through the cache.

Every tile of the grid loads its blocks, but not every load reaches HBM. Two kinds of device differ:

- *A sequential grid* (TPU): steps run in order, and a block stays in VMEM while its index does not change. A
  read is repeated only for the tiles of axes that do not index it and are *outside* the innermost axis that
  does. Every load is HBM traffic.
- *A shared cache* (GPU, CPU): every tile loads its blocks. An array that fits into the cache is fetched from
  HBM once. A larger one is fetched once by the tiles that run at the same time, one on each core, and again
  by the next wave.

A streamed axis is a loop inside a tile: a block that it does not index is loaded before the loop and kept; a
block that it indexes is loaded again in each pass that reads it. Reads past the edge of an array are masked
(Triton) or clipped (the DMA of a TPU), so the padding of a block costs no traffic; the padding of an array on
a TPU does (``costmodel.memory``). Data that an earlier kernel left in the cache are not counted as a
saving.

Of an array that a kernel reads by index, no more bytes are read than the array has, nor than the results that
are made of its elements, as in XLA's loops. They are loaded as often as the blocks of these results are made.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.device import DeviceSpec
from costmodel.graph import Graph, Node
from costmodel.kernel import Access, AxisRole, KernelSpec, looked_up, reading_passes, visited_share
from costmodel.memory import array_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one kernel moves."""

    hbm_read_bytes: int = 0
    hbm_write_bytes: int = 0
    loaded_bytes: int = 0
    """All loads of all tiles: the traffic of the shared cache."""


def bytes_moved(graph: Graph, spec: KernelSpec, device: DeviceSpec) -> Traffic:
    """The bytes that the kernel ``spec`` moves on ``device``."""
    if spec.compiled is not None:
        read = spec.compiled.read_bytes
        return Traffic(read, spec.compiled.write_bytes, read)
    values = graph.values
    padded = spec.axes and device.sequential_grid

    def array_nbytes(access: Access) -> int:
        value = values[access.value]
        return array_bytes(spec, access, value) if padded else value.nbytes

    written = sum({access.value: array_nbytes(access) for access in spec.writes}.values())
    if not spec.axes:  # a kernel that XLA compiles: each array is read once
        read = sum(least_read_bytes(graph, spec, v) for v in {access.value for access in spec.reads})
        return Traffic(read, written, read)
    hbm = loaded = 0
    fetched: set[int] = set()  # values that are in the cache, fetched by another access
    passes_of = reading_passes(graph, spec) if spec.passes else {}
    results_of = looked_up(graph, spec)
    for access in spec.reads:
        nbytes = array_nbytes(access)
        passes = passes_of.get(access, ())

        def load(nbytes: int, loads: int, passes: tuple[int, ...] = passes) -> int:
            if spec.tiles_visited and not device.sequential_grid:  # a TPU's pipeline copies every block
                part, whole = visited_share(spec, passes)
                return nbytes * loads - nbytes * loads * (whole - part) // whole
            return nbytes * loads

        if access in results_of:
            results = [(result, values[result.value].nbytes) for result in results_of[access]]
            touched, times = min(nbytes, sum(size for _, size in results)), 0
            for result, size in results:
                loads, fetches = read_counts(spec, result, touched, device, len(passes) or 1)
                loaded += load(min(nbytes, size), loads)
                times = max(times, fetches)
            hbm += 0 if access.value in fetched else touched * times
            continue
        loads, fetches = read_counts(spec, access, nbytes, device, len(passes) or 1)
        loaded += load(nbytes, loads)
        if nbytes <= device.cache_bytes:
            if access.value in fetched:
                continue
            fetched.add(access.value)
        hbm += nbytes * fetches
    return Traffic(hbm, written, loaded)


def least_read_bytes(graph: Graph, spec: KernelSpec, v: int) -> int:
    """The least bytes of an array from outside that a kernel of XLA or a loop nest reads: all, or the parts
    that slices and lookups take."""
    reading = (graph.nodes[n] for n in spec.nodes if v in graph.nodes[n].inputs)
    return min(graph.values[v].nbytes, sum(part_bytes(graph, node, v) for node in reading))


def part_bytes(graph: Graph, node: Node, v: int) -> int:
    """The least bytes of the operand ``v`` that a node reads: a slice or gather reads no more than its
    result."""
    whole = graph.values[v].nbytes
    if not node.takes_part or v in node.inputs[1:]:
        return whole
    return min(whole, graph.values[node.outputs[0]].nbytes)


def read_counts(
    spec: KernelSpec, access: Access, nbytes: int, device: DeviceSpec, n_passes: int = 1
) -> tuple[int, int]:
    """How often the array of ``access``, of ``nbytes``, is (loaded, fetched from HBM), in multiples of the
    array.

    The two are equal on a device without a shared cache. ``n_passes`` of its passes read it."""
    indexed = {a for dims in access.axes for a in dims}
    if device.sequential_grid:
        loads = pending = 1
        for i, axis in enumerate(spec.axes):  # outermost first: a later indexed axis settles `pending`
            if axis.role.is_whole:
                continue
            n = axis.n_tiles
            if i in indexed:
                if n > 1:
                    again = n_passes if axis.role == AxisRole.STREAMED else 1
                    loads, pending = loads * pending * again, 1
            else:
                pending *= n
        return loads, loads
    streamed = spec.streamed
    loads = fetches = n_passes if streamed in indexed else 1
    is_inner = any(spec.axes[a].role == AxisRole.INNER for a in indexed)
    if streamed is not None and streamed not in indexed and is_inner:  # not held from tile to tile
        loads *= n_passes * spec.axes[streamed].n_tiles
    concurrent = device.core_count
    for i in range(len(spec.axes) - 1, -1, -1):  # innermost first: neighbours run together
        axis = spec.axes[i]
        if axis.role != AxisRole.PARALLEL:
            continue
        n = axis.n_tiles
        together = min(n, concurrent) or 1
        if i not in indexed:
            loads *= n
            fetches *= -(-n // together)
        concurrent = max(1, concurrent // together)
    return (loads, 1) if nbytes <= device.cache_bytes else (loads, fetches)
