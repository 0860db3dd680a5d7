"""What a group must hold on chip whatever its tiles, and whatever joins it.

An axis that a member reduces is never a grid axis again, however the group grows. It is streamed or it is
resident; only one axis can be streamed, in one pass that on a GPU writes nothing, but for what
``fuseplan.schedule.streaming`` allows. If what remains resident exceeds a core, no schedule of this group or
of any larger one can fit: that prunes a search early.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import lru_cache

from costmodel import dtypes
from costmodel.axes import GroupAxes, NodeAxes, compose
from costmodel.device import DeviceSpec
from costmodel.graph import DimMap, DimRole, Graph, OpKind
from fuseplan.schedule.axis_classes import axis_classes
from fuseplan.schedule.layout import repeats
from fuseplan.schedule.streaming import Walks
from fuseplan.support.errors import Verdict


class Residency:
    """What groups of a graph must hold on a core of a device."""

    def __init__(self, graph: Graph, device: DeviceSpec) -> None:
        self.graph = graph
        self.device = device
        self.limit_bytes = device.block_limit_bytes
        self._axes = axis_classes(graph, graph.nodes)
        self._held = [
            frozenset(c for c, role in zip(own, node.roles, strict=True) if role != DimRole.PARALLEL)
            for own, node in zip(self._axes, graph.nodes, strict=True)
        ]
        self.walks = Walks(graph, device, self._axes)
        self.on_the_way = device.sequential_grid
        self._buffers = 2 if device.sequential_grid else 1
        self._at_once: dict[frozenset[int], dict[int, dict[int, int]]] = {}

    def held(self, n: int) -> frozenset[int]:
        """The axes, roughly, that node ``n`` reduces or needs whole."""
        return self._held[n]

    def axes(self, n: int) -> Sequence[int]:
        """The axis, roughly, that each dimension of node ``n`` is."""
        return self._axes[n]

    def fits_at_once(self, nodes: tuple[int, ...], held: frozenset[int]) -> bool:
        """Whether all groups of ``nodes`` fit that hold no axes but ``held``: all that can be
        alive at a time does (on a TPU, two buffers of all values)."""
        of_node = self._at_once.setdefault(held, {})
        alive: dict[int, int] = {}
        last = {v: n for n in nodes for v in self.graph.nodes[n].inputs}
        now = peak = 0
        for n in nodes:
            if n not in of_node:
                of_node[n] = self._touched(n, held)
            for v, nbytes in of_node[n].items():
                if v not in alive:
                    alive[v] = nbytes
                    now += nbytes
            peak = max(peak, now)
            if self._buffers == 1:
                for v in self.graph.nodes[n].inputs:
                    if last[v] == n:
                        now -= alive.pop(v, 0)
        return peak * self._buffers <= self.limit_bytes

    def may_walk(self, nodes: tuple[int, ...]) -> bool:
        """Whether the axis that ``nodes`` reduce may be streamed in several passes, or written to on
        the way, so that none of it has to be on chip."""
        return self.walks.allowed(nodes)

    def is_roomy(self, nodes: tuple[int, ...], crossing: Set[int]) -> bool:
        """Whether ``nodes`` fit for sure, with every axis whole that may have to be, or all but
        one that can be streamed: most groups need no closer look."""
        held = frozenset[int]().union(*[self._held[n] for n in nodes])
        if not held or self.may_walk(nodes):
            return True
        return any(self.fits_at_once(nodes, held - {a}) and self.streams(nodes, a, crossing) for a in held)

    def streams(self, nodes: tuple[int, ...], axis: int, crossing: Set[int] = frozenset()) -> bool:
        """Whether the axis is reduced in one pass and indexes nothing that is written for good, but
        where it may be written to on the way."""
        reduced: set[int] = set()
        for n in nodes:
            node, own = self.graph.nodes[n], self._axes[n]
            depends = not reduced.isdisjoint(node.inputs)
            if axis in own:
                is_written = any(
                    own[d] == axis
                    for v, dim_map in zip(node.outputs, node.output_maps, strict=True)
                    if v in crossing
                    for dims in dim_map
                    for d in dims
                )
                if depends or (is_written and not self.on_the_way):
                    return False
                for c, role in zip(own, node.roles, strict=True):
                    if c == axis and role == DimRole.WHOLE:
                        return False
                    depends = depends or (c == axis and role == DimRole.REDUCED)
            if depends:
                reduced.update(node.outputs)
        return True

    def _touched(self, n: int, held: frozenset[int]) -> dict[int, int]:
        """The bytes of each value that a node reads or makes. A broadcast is never held."""
        node, own = self.graph.nodes[n], self._axes[n]
        sizes: dict[int, int] = {}
        outputs = () if node.kind == OpKind.BROADCAST else node.outputs
        for v, dim_map in zip(node.inputs + outputs, node.input_maps + node.output_maps, strict=False):
            size = -(-dtypes.bits(self.graph.values[v].dtype) // 8)
            for d in {d for dims in dim_map for d in dims}:
                if own[d] in held:
                    size *= node.dims[d]
            sizes[v] = size
        return sizes

    def refuse(self, nodes: tuple[int, ...], axes: GroupAxes, crossing: Set[int]) -> Verdict | None:
        """Why no tile of ``nodes`` or of a larger group can fit on a core, or None.

        ``crossing`` are values that the group reads or writes however it grows: arguments and
        results of the function, and what it exchanges with nodes that can never join.
        """
        graph = self.graph
        held = [a for a in range(len(axes.sizes)) if axes.reduced[a] or axes.whole[a]]
        if not held:
            return None
        need = _Need(graph, self.device, nodes, axes, crossing)
        if need.fits(held):
            return None
        # That an axis is missing from a written value proves nothing: joiners may yet tie it to
        # one that is there (test_residency.py::test_refusals_hold_for_every_larger_group).
        indexed = {
            a
            for n, own in zip(nodes, axes.node_axes, strict=True)
            for v, dim_map in zip(graph.nodes[n].outputs, graph.nodes[n].output_maps, strict=True)
            if v in crossing
            for dims in compose(dim_map, own)
            for a in dims
        }
        if self.may_walk(nodes) and not any(axes.whole):
            return None
        known = self._classes(nodes, axes)
        repeated = repeats(graph, nodes, axes)
        for a in held:
            # Axes of one class may be one axis of a larger group, and streamed together.
            others = [b for b in held if known[b] != known[a]]
            streamable = axes.reduced[a] and not axes.whole[a] and (self.on_the_way or a not in indexed)
            if streamable and need.fits(others) and a not in repeated:
                return None
        names = " and ".join(dict.fromkeys(graph.nodes[n].op for n in (nodes[0], nodes[-1])))
        return Verdict(
            "on-chip",
            f"{names} would hold more whole rows and columns than fit on chip "
            f"({self.limit_bytes:,} bytes a core)",
            nodes,
        )

    def _classes(self, nodes: tuple[int, ...], axes: GroupAxes) -> dict[int, int]:
        """Which of the graph's axes, roughly, each axis of a group is."""
        return {
            a: c
            for n, own in zip(nodes, axes.node_axes, strict=True)
            for c, dims in zip(self._axes[n], own, strict=True)
            for a in dims
        }


Block = tuple[int, frozenset[int]]
"""Bytes of an element, and the axes that index it."""


class _Need:
    """What a group holds on a core at least, with some axes held whole and every other of one:
    every block that all schedules have, and what is alive at one time."""

    def __init__(
        self,
        graph: Graph,
        device: DeviceSpec,
        nodes: tuple[int, ...],
        axes: GroupAxes,
        crossing: Set[int],
    ) -> None:
        self._limit_bytes = device.block_limit_bytes
        self._sizes = axes.sizes
        self._in_registers = bool(device.register_bytes)
        self._buffers = 2 if device.sequential_grid else 1
        self._largest: set[Block] = set()
        """Of values that cross for good, come from outside the graph, or are reduced."""
        self._crossing: dict[int, Block] = {}
        """Of values that cross for good; a TPU has two buffers for each all the time."""
        self._alive: dict[tuple[Block, ...], None] = {}
        """What is alive before each node."""
        self._scan(graph, nodes, axes, crossing)

    def fits(self, held: list[int]) -> bool:
        """Whether it could fit with the axes ``held`` whole."""
        nbytes: dict[Block, int] = {}

        def size(block: Block) -> int:
            if block not in nbytes:
                width, own = block
                for a in held:
                    if a in own:
                        width *= self._sizes[a]
                nbytes[block] = width
            return nbytes[block]

        if any(size(block) > self._limit_bytes for block in self._largest):
            return False
        always = 0 if self._in_registers else self._buffers * sum(map(size, self._crossing.values()))
        return all(always + sum(map(size, alive)) <= self._limit_bytes for alive in self._alive)

    def _scan(self, graph: Graph, nodes: tuple[int, ...], axes: GroupAxes, crossing: Set[int]) -> None:
        """As ``costmodel.memory`` evaluates a group, but only what holds of larger ones, too."""
        block: dict[int, Block] = {}
        last: dict[int, int] = {}
        root: dict[int, int] = {}
        counted: set[int] = set()
        for step, (n, own) in enumerate(zip(nodes, axes.node_axes, strict=True)):
            node = graph.nodes[n]
            for v, dim_map in zip(node.inputs, node.input_maps, strict=True):
                last[root.get(v, v)] = step
                producer = graph.values[v].producer
                # A broadcast is never held: it is made where it is used, from what it repeats.
                real = producer < 0 or graph.nodes[producer].kind != OpKind.BROADCAST
                if v not in block and v not in root:
                    block[v] = _block(graph, v, dim_map, own)
                    if v in crossing:
                        self._crossing[v] = block[v]
                    # Operands of a contraction lie in shared memory, not in registers.
                    if self._in_registers and real and not node.flops.matrix:
                        counted.add(v)
                if producer < 0 or (node.kind == OpKind.REDUCTION and real):
                    self._largest.add(_block(graph, v, dim_map, own))
            for v, dim_map in zip(node.outputs, node.output_maps, strict=True):
                if v in crossing:
                    self._crossing[v] = _block(graph, v, dim_map, own)
                    self._largest.add(self._crossing[v])
                if node.kind == OpKind.BROADCAST and node.inputs:
                    root[v] = root.get(node.inputs[0], node.inputs[0])
                else:
                    block[v] = _block(graph, v, dim_map, own)
                    counted.add(v)
        alive: dict[int, Block] = {}
        for step, n in enumerate(nodes):
            node = graph.nodes[n]
            alive.update((v, block[v]) for v in node.inputs if v in counted)
            if node.kind != OpKind.BROADCAST:
                self._alive[tuple(alive.values())] = None
            for v in node.inputs:
                if last[root.get(v, v)] == step:
                    alive.pop(root.get(v, v), None)
            alive.update((v, block[v]) for v in node.outputs if v in counted and v in last)


def _block(graph: Graph, v: int, dim_map: DimMap, own: NodeAxes) -> Block:
    return _make_block(graph.values[v].dtype, dim_map, own)


@lru_cache(maxsize=10_000)
def _make_block(dtype: str, dim_map: DimMap, own: NodeAxes) -> Block:
    width = -(-dtypes.bits(dtype) // 8)
    return width, frozenset([a for dims in compose(dim_map, own) for a in dims])
