"""Lower bounds on the time of any partition of a set of nodes into kernels (``Floor``)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import isqrt, prod

from costmodel import dtypes
from costmodel.cpu_functions import flops_on_cpu
from costmodel.device import DeviceSpec, time_ps
from costmodel.graph import DimRole, Flops, Graph, Node, OpKind, arrays_of
from costmodel.memory import least_array_bytes
from costmodel.model import modelled_floor_ps, plain_device
from costmodel.onchip import ACCUMULATOR_BITS
from costmodel.roofline import library_matmul
from costmodel.traffic import part_bytes


class Floor:
    """``floor(nodes)`` is a lower bound, in picoseconds, on the time of every partition of ``nodes`` into
    kernels by ``costmodel.roofline.estimate``.

    The bound counts:

    - one launch; on a CPU, where each kernel of XLA has one result, a launch for each operation whose result
      is needed outside, but for those in ``nested``;
    - one read of every array from outside (of an array that slices read, the smallest slice) and one write of
      every result that is needed outside;
    - one execution of every flop. Of copies of an operation (``Graph.origins``), one is executed and one
      result written;
    - with two or more operations on arrays, either the wait of a tiled kernel for its first block, or a
      second launch;
    - the loads of a contraction of arrays from outside, tile by tile (``ContractionLoads``). They are not
      counted for the nodes in ``nested``, which may be in a loop nest: there a block stays on chip, and no
      more than the given share (numerator, denominator) of the tiles are visited.

    A bitcast by itself is free: its result counts as the array that it renames. A sum of maxima is no less
    than the maximum of the sums, so the bound holds for any number of kernels.
    """

    def __init__(
        self, graph: Graph, device: DeviceSpec, nested: Mapping[int, tuple[int, int]] | None = None
    ) -> None:
        self.graph, self.device = graph, device
        nested = nested or {}
        is_of_xla = device.platform == "cpu" and not device.capabilities.emits_kernels
        self.has_own_kernel = [is_of_xla and node.id not in nested for node in graph.nodes]
        """For each node, whether no kernel that writes its result writes that of another."""
        wait_ps = device.grid_step_ps if device.sequential_grid else device.hbm_latency_ps
        self.wait_ps = 0 if device.platform == "cpu" else min(wait_ps, device.launch_ps)
        self.of_arrays = frozenset([node.id for node in graph.nodes if node.dims])
        root = list(range(len(graph.values)))
        for node in graph.nodes:
            if node.bitcast:
                for v in node.outputs:
                    root[v] = root[node.inputs[0]]
        self.nbytes = [value.nbytes for value in graph.values]
        self.read_bytes = list(self.nbytes)
        """For each array, the least bytes that a reader reads of it."""
        self.is_tiled = device.capabilities.emits_kernels
        """Whether a kernel of several operations on arrays is tiled."""
        self.kernel_bytes = self.nbytes
        """For each array, the least bytes that a tiled kernel moves of it that writes it, or reads blocks."""
        self.origins = graph.origins or range(len(graph.nodes))
        self.name = name = arrays_of(graph)
        """For each value, the array that it is: copies of an operation make one."""
        self.array_of = [name[u] for u in root]
        """For each value, the array that it is or renames."""
        if device.sequential_grid:
            self.kernel_bytes = [sys.maxsize] * len(graph.values)
            for v, value in enumerate(graph.values):  # the least over all layouts that a bitcast gives it
                u = name[root[v]]
                self.kernel_bytes[u] = min(self.kernel_bytes[u], least_array_bytes(value))
        self.kernel_read_bytes = list(self.kernel_bytes)
        """For each array, the least bytes that a tiled kernel reads of it."""
        # The readers of each array, also through bitcasts; -1 stands for the caller.
        readers: dict[int, set[int]] = {}
        for v, consumers in enumerate(graph.consumers):
            readers.setdefault(root[v], set()).update(n for n in consumers if not graph.nodes[n].bitcast)
        for v in graph.outputs:
            readers.setdefault(root[v], set()).add(-1)
        self.readers = [frozenset(readers.get(v, ())) for v in range(len(graph.values))]
        self.reads: list[tuple[int, ...]] = []
        self.writes: list[tuple[int, ...]] = []
        self.made: list[tuple[int, ...]] = []
        self.work: list[tuple[int, int, int]] = []
        self.loads: dict[int, ContractionLoads] = {}
        self.beside: dict[int, dict[int, int]] = {}
        """By contraction and elementwise reader, the bits of the reader's result."""
        alike: dict[object, ContractionLoads] = {}
        for node in graph.nodes:
            if node.takes_part:
                v, part = name[root[node.inputs[0]]], part_bytes(graph, node, node.inputs[0])
                self.read_bytes[v] = min(self.read_bytes[v], part)
                if device.capabilities.loads_by_index and node.addresses(node.input_maps[0]):
                    self.kernel_read_bytes[v] = min(self.kernel_read_bytes[v], part)
            is_free = node.bitcast or node.given_ps is not None  # A given time may be less than any bound.
            self.reads.append(() if is_free else tuple({name[root[v]]: None for v in node.inputs}))
            self.writes.append(() if is_free else node.outputs)
            self.made.append(tuple([name[v] for v in self.writes[-1]]))
            part, whole = nested.get(node.id, (1, 1))
            flops = flops_on_cpu(graph, node, tiled=True) if device.platform == "cpu" else node.flops
            flops = Flops() if node.given_ps is not None else flops.share(min(part, whole), whole)
            rate = device.matrix_rate(graph.values[node.inputs[0]].dtype) if flops.matrix else 0
            matrix_ps = time_ps(flops.matrix, rate)
            self.work.append((matrix_ps, flops.vector, flops.transcendental))
            if flops.matrix and node.id not in nested:
                key = _load_key(graph, node)
                if key not in alike:
                    alike[key] = ContractionLoads(graph, node, device)
                self.loads[node.id] = alike[key]
                self.beside[node.id] = {
                    n: dtypes.bits(graph.values[graph.nodes[n].outputs[0]].dtype)
                    for n in graph.consumers[node.outputs[0]]
                    if graph.nodes[n].kind == OpKind.ELEMENTWISE
                }

    def __call__(self, nodes: tuple[int, ...]) -> int:
        return self.parts(nodes)[0]

    def one_kernel(self, nodes: tuple[int, ...]) -> int:
        """A lower bound, in picoseconds, on the time of ``nodes`` as one kernel. It is no lower than that of
        all partitions, as two or more operations are then one tiled kernel."""
        return self.parts(nodes, together=True)[0]

    def on_one_core(self, nodes: tuple[int, ...]) -> int:
        """A lower bound, in picoseconds, on the time of ``nodes`` as one kernel that one core runs."""
        return self.parts(nodes, together=True, on_one_core=True)[0]

    def parts(
        self, nodes: tuple[int, ...], together: bool = False, on_one_core: bool = False
    ) -> tuple[int, int]:
        """Lower bounds on picoseconds and on bytes moved of every partition of ``nodes``; with ``together``,
        of ``nodes`` as one kernel, or as one ``on_one_core``."""
        inside = set(nodes)
        made: set[int] = set()
        moved = matrix_ps = vector = transcendental = launched = 0
        read: set[int] = set()
        written: set[int] = set()
        ends: set[int] = set()
        name, origins, readers = self.name, self.origins, self.readers
        done: set[int] = set()
        anchors: list[int] = []
        for n in nodes:
            writes, reads = self.writes[n], self.reads[n]
            if not writes and not reads:
                continue
            for v in writes:
                if not inside >= readers[v]:
                    written.add(name[v])
                    if self.has_own_kernel[n]:
                        ends.add(origins[n])
            if origins[n] in done:
                continue
            done.add(origins[n])
            launched += 1
            if n in self.loads and made.isdisjoint(reads):
                anchors.append(n)
            read.update(reads)
            made.update(self.made[n])
            m, v_flops, t = self.work[n]
            matrix_ps += m
            vector += v_flops
            transcendental += t
        if not launched:
            return 0, 0
        device = self.device
        waits = launched > 1 and not self.of_arrays.isdisjoint(nodes)
        is_tiled = together and waits and self.is_tiled
        read_bytes, write_bytes = self.read_bytes, self.nbytes
        if is_tiled:
            read_bytes, write_bytes = self.kernel_read_bytes, self.kernel_bytes
        for v in read - made:
            moved += read_bytes[v]
        loaded = moved
        for v in written:
            moved += write_bytes[v]
        compute_ps = time_ps(vector, device.vector_flops_per_s)
        compute_ps += time_ps(transcendental, device.transcendental_per_s)
        memory_ps = time_ps(moved, device.hbm_bytes_per_s)
        if on_one_core:
            compute_ps *= device.core_count
            if not device.sequential_grid:
                loads_ps = time_ps(loaded, device.cache_bytes_per_s) * device.core_count
                memory_ps = max(memory_ps, loads_ps)
        if waits:
            if device.sequential_grid:
                compute_ps += self.wait_ps
            else:
                memory_ps = max(memory_ps, self.wait_ps)
        if anchors:
            if together and launched > 1:
                beside = (read - made).difference(*(self.reads[n] for n in anchors))
                loads = sum(read_bytes[v] for v in beside)
                for n in anchors:
                    bits = max([b for reader, b in self.beside[n].items() if reader in inside], default=0)
                    loads += self.loads[n].tiled(bits)
            else:
                # Other kernels may be the library's, which loads what its epilogue reads while it multiplies:
                # the times overlap, and only the product's loads are certain.
                loads = sum(self.loads[n].anyhow for n in anchors)
            memory_ps = max(memory_ps, time_ps(loads, device.cache_bytes_per_s))
        return device.launch_ps * max(len(ends), 1) + max(memory_ps, matrix_ps, compute_ps), moved


class ModelledFloor(Floor):
    """As ``Floor``, by the cost model of a device that has one. It says nothing of the bytes moved."""

    def __init__(
        self, graph: Graph, device: DeviceSpec, nested: Mapping[int, tuple[int, int]] | None = None
    ) -> None:
        super().__init__(graph, plain_device(device), nested)
        self._modelled = device

    def parts(
        self, nodes: tuple[int, ...], together: bool = False, on_one_core: bool = False
    ) -> tuple[int, int]:
        """As ``Floor.parts``, with 0 for the bytes."""
        if not any(self.writes[n] or self.reads[n] for n in nodes):
            return 0, 0  # They rename arrays.
        estimated_ps, _ = super().parts(nodes, together, on_one_core)
        return modelled_floor_ps(self.graph, nodes, self._modelled, estimated_ps), 0


def floor_of(graph: Graph, device: DeviceSpec, nested: Mapping[int, tuple[int, int]] | None = None) -> Floor:
    """The lower bounds of a graph on a device, by its cost model if it has one. ``nested``: as for
    ``Floor``."""
    return (Floor if device.cost_model is None else ModelledFloor)(graph, device, nested)


class ContractionLoads:
    """Lower bound of the bytes that pass the shared cache to run the contraction ``node``, both of whose
    operands are read from memory; 0 where there is no bound.

    In a tiled kernel a tile of m x n results loads K (a m + b n) bytes, where K elements are
    contracted, of a and b bytes. ``costmodel.roofline.estimate`` counts that for max(cores,
    tiles) of them: cores without a tile do not help the others. Of R results there are R / (m n)
    tiles or more, and a m + b n >= 2 sqrt(a b m n). With s = m n the bound is

        2 K sqrt(a b s) max(cores, R / s)  bytes,  s <= L,

    where L results fit into half of the registers (``Footprint.fits``): least at min(R / cores, L).
    Other members of the kernel may split the axes of ``node``, which cuts its tiles as well, or add
    axes, along which its tiles are computed again; no member makes a tile larger. But each member that
    computes an elementwise result from the products needs another block of the same shape. The argument is
    that of Hong and Kung, "I/O complexity: the red-blue pebble game" (STOC 1981), with registers
    for their fast memory.
    """

    def __init__(self, graph: Graph, node: Node, device: DeviceSpec) -> None:
        self.anyhow = 0
        """The bound of any kernel, tiled or the library's (``library_matmul``)."""
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
        """The bound of a tiled kernel that also holds ``beside_bits`` for each result at once."""
        if self._facts is None:
            return 0
        if beside_bits not in self._tiled:
            depth, results, bits, cores, register_bytes = self._facts
            fit = register_bytes // 2 * 8 // (ACCUMULATOR_BITS + beside_bits) or results
            squared = 4 * depth**2 * bits * max(results * cores, results**2 // fit)
            self._tiled[beside_bits] = isqrt(squared) // 8
        return self._tiled[beside_bits]


def _load_key(graph: Graph, node: Node) -> tuple[object, ...]:
    """A key that is equal for contractions with equal ``ContractionLoads``."""
    arrays = [(graph.values[v].shape, graph.values[v].dtype) for v in node.inputs + node.outputs]
    return (node.dims, node.roles, node.input_maps, len(set(node.inputs)), *arrays)
