"""A time that no way of cutting a set of nodes into kernels can beat."""

from __future__ import annotations

from costmodel import dtypes
from costmodel.device import DeviceSpec
from costmodel.graph import Graph, OpKind
from costmodel.loads import Loads, load_key
from costmodel.picoseconds import time_ps
from costmodel.roofline import HBM_LATENCY_PS, TPU_STEP_PS


class Floor:
    """``floor(nodes)``: picoseconds that every partition of ``nodes`` into kernels takes at
    least, by ``costmodel.roofline.estimate``.

    One launch; every array from outside read once, every result needed outside written
    once; every flop executed once. A sum of maxima is no less than the maximum of the
    sums, so the bound holds for any number of kernels. Bitcasts alone are free: their
    result counts as the array that they rename. Two operations on arrays or more are one tiled
    kernel, which waits for its first block, or at least two launches. A contraction of arrays
    from outside loads them tile by tile, wherever its kernel ends (``costmodel.loads``). Of copies of
    an operation (``Graph.origins``) one is executed at least, and one result written.
    """

    def __init__(self, graph: Graph, device: DeviceSpec) -> None:
        self._device = device
        wait_ps = TPU_STEP_PS if device.sequential_grid else HBM_LATENCY_PS
        self._wait_ps = 0 if device.platform == "cpu" else min(wait_ps, device.launch_ps)
        # What computes nothing, because an array is empty, is left to XLA whole.
        self._walks = [bool(node.dims) for node in graph.nodes]
        self._is_empty = [0 in node.dims for node in graph.nodes]
        root = list(range(len(graph.values)))
        for node in graph.nodes:
            if node.bitcast:
                for v in node.outputs:
                    root[v] = root[node.inputs[0]]
        self._nbytes = [value.nbytes for value in graph.values]
        self._origins = graph.origins or range(len(graph.nodes))
        name = list(range(len(graph.values)))  # one for all copies of an array
        for node, origin in zip(graph.nodes, self._origins, strict=True):
            for v, w in zip(node.outputs, graph.nodes[origin].outputs, strict=True):
                name[v] = w
        self._name = name
        # Who reads the bytes of an array, under whatever name; -1 stands for the caller.
        readers: dict[int, set[int]] = {}
        for v, consumers in enumerate(graph.consumers):
            readers.setdefault(root[v], set()).update(n for n in consumers if not graph.nodes[n].bitcast)
        for v in graph.outputs:
            readers.setdefault(root[v], set()).add(-1)
        self._readers = [frozenset(readers.get(v, ())) for v in range(len(graph.values))]
        self._reads: list[tuple[int, ...]] = []
        self._writes: list[tuple[int, ...]] = []
        self._made: list[tuple[int, ...]] = []
        self._work: list[tuple[int, int, int]] = []
        self._loads: dict[int, Loads] = {}
        self._beside: dict[int, dict[int, int]] = {}  # by reader, bits that it makes of each result
        alike: dict[object, Loads] = {}
        for node in graph.nodes:
            self._reads.append(() if node.bitcast else tuple({name[root[v]]: None for v in node.inputs}))
            self._writes.append(() if node.bitcast else node.outputs)
            self._made.append(tuple([name[v] for v in self._writes[-1]]))
            flops = node.flops
            rate = device.matrix_rate(graph.values[node.inputs[0]].dtype) if flops.matrix else 0
            matrix_ps = time_ps(flops.matrix, rate)
            self._work.append((matrix_ps, flops.vector, flops.transcendental))
            if flops.matrix:
                key = load_key(graph, node)
                if key not in alike:
                    alike[key] = Loads(graph, node, device)
                self._loads[node.id] = alike[key]
                self._beside[node.id] = {
                    n: dtypes.bits(graph.values[graph.nodes[n].outputs[0]].dtype)
                    for n in graph.consumers[node.outputs[0]]
                    if graph.nodes[n].kind == OpKind.ELEMENTWISE
                }

    def __call__(self, nodes: tuple[int, ...]) -> int:
        return self.parts(nodes)[0]

    def one_kernel(self, nodes: tuple[int, ...]) -> int:
        """Picoseconds that ``nodes`` take at least as one kernel, which is more than all partitions
        do: two operations or more are not left to XLA."""
        return self.parts(nodes, together=True)[0]

    def parts(self, nodes: tuple[int, ...], together: bool = False) -> tuple[int, int]:
        """Picoseconds that no partition of ``nodes`` beats, and bytes that no kernel of them does;
        with ``together``, picoseconds of one kernel."""
        inside = set(nodes)
        made: set[int] = set()
        moved = matrix_ps = vector = transcendental = launched = 0
        read: set[int] = set()
        written: set[int] = set()
        name, origins = self._name, self._origins
        done: set[int] = set()
        anchors: list[int] = []
        for n in nodes:
            writes = self._writes[n]
            if not writes and not self._reads[n]:
                continue
            for v in writes:
                if not inside.issuperset(self._readers[v]):
                    written.add(name[v])
            if origins[n] in done:
                continue
            done.add(origins[n])
            launched += 1
            if n in self._loads and made.isdisjoint(self._reads[n]):
                anchors.append(n)
            read.update(self._reads[n])
            made.update(self._made[n])
            m, v_flops, t = self._work[n]
            matrix_ps += m
            vector += v_flops
            transcendental += t
        if not launched:
            return 0, 0
        for v in read - made | written:
            moved += self._nbytes[v]
        device = self._device
        compute_ps = time_ps(vector, device.vector_flops_per_s)
        compute_ps += time_ps(transcendental, device.transcendental_per_s)
        memory_ps = time_ps(moved, device.hbm_bytes_per_s)
        waits = launched > 1 and any(self._walks[n] for n in nodes)
        if waits and not any(self._is_empty[n] for n in nodes):
            if device.sequential_grid:
                compute_ps += self._wait_ps
            else:
                memory_ps = max(memory_ps, self._wait_ps)
        if anchors:
            beside = (read - made).difference(*(self._reads[n] for n in anchors))
            loads = sum(self._nbytes[v] for v in beside)
            for n in anchors:
                bits = max([b for reader, b in self._beside[n].items() if reader in inside], default=0)
                tiled = together and launched > 1
                loads += self._loads[n].tiled(bits) if tiled else self._loads[n].anyhow
            memory_ps = max(memory_ps, time_ps(loads, device.cache_bytes_per_s))
        return device.launch_ps + max(memory_ps, matrix_ps, compute_ps), moved
