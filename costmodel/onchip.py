"""On-chip footprint of a kernel: shared memory, registers or VMEM that one tile occupies on a core.

``footprint`` is exact for a kernel with given tiles, ``KernelFootprint`` for all tilings of one kernel, and
``LeastFootprint`` is a lower bound for a group of nodes in every tiling. All follow from one walk through the
nodes in their order (``_walk``), which says when values are loaded and when they die.

The accounting follows what each backend's compiler does with a block:

- *Mosaic TPU*: everything is in VMEM. The pipeline double-buffers every read and written
  block; carried accumulators and the intermediates that are alive at once come on top.
- *Triton*: shared memory holds the operands of contractions, double-buffered when
  streamed (``num_stages=2``); everything else lives in registers. Checked against the
  compiler on an H200, bf16: matmul 128x128x64 in 3 stages 98,304 bytes = 3 x 32,768, and
  attention D=64 with 128x128 blocks 81,920 bytes = q 16,384 + 2 x (k + v) 32,768.
  The arrays from which a kernel computes a streamed operand pass through shared memory too, in one
  buffer less, and of computed operands only the right one lies there: (silu(x) * y) @ w in 2 stages
  65,536 = x + y + 2 w; x @ tanh(w) in 3 stages 98,304 = 3 x + 2 w + tanh(w).
- *Mosaic GPU*: as Triton, but the registers are those of the one or two warpgroups that compute
  a tile (``warpgroups``).
- A kernel in several passes needs the largest of its passes, and in each of them the accumulators
  and all values that are computed once before the passes and needed on every tile.
- *XLA loops* (CPU): blocks and intermediates all lie in the caches of the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from costmodel import dtypes
from costmodel.axes import GroupAxes, NodeAxes, compose, reduced_axes
from costmodel.device import DeviceSpec
from costmodel.graph import DimMap, DimRole, Graph, Node, OpKind
from costmodel.kernel import Access, Axis, AxisRole, KernelSpec, looked_up
from costmodel.memory import LANES, SUBLANES, WORD_BITS, padded_size

STAGES = 2
"""Buffers of a streamed operand: one is filled while the other is used."""

ACCUMULATOR_BITS = 32
"""Matrix units and streamed reductions accumulate in float32 at least."""

_WARPGROUP_SHARE = 2
"""A warpgroup is 128 threads of at most 255 registers: half of a core's file."""

_ADDRESS_BYTES = 16 * 4 * 128
"""Registers of one warpgroup for addresses, 16 a thread: without them a 128x128 tile of bfloat16 that is
computed in float32 is modelled to fit, and ptxas spills."""


def warpgroups(rows: int) -> int:
    """How many warpgroups of Mosaic GPU compute a tile of a contraction of so many rows: each has
    a multiple of 64 (wgmma.m64n8k16). Any other tile is computed by one warpgroup."""
    return 1 if rows % 128 else 2


Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one tile occupies on a core."""

    onchip_bytes: int
    """Shared memory, VMEM or cache, against ``DeviceSpec.onchip_bytes``."""
    register_bytes: int = 0
    """Simultaneously live blocks held in registers (a GPU's), else 0."""

    def fits(self, device: DeviceSpec) -> bool:
        """Whether a kernel of this footprint can run without spilling. Half of the register
        file is for values; addresses, masks and layout conversions need the other half (a
        256x256x64 Triton matmul, whose accumulator is the whole file, spills)."""
        return self.onchip_bytes <= device.onchip_bytes and (
            not device.register_bytes or self.register_bytes <= device.register_bytes // 2
        )


def onchip_bytes(graph: Graph, spec: KernelSpec, device: DeviceSpec) -> int:
    """Bytes of on-chip memory that ``spec`` needs per core (``footprint`` has registers too)."""
    return footprint(graph, spec, device).onchip_bytes


def footprint(graph: Graph, spec: KernelSpec, device: DeviceSpec) -> Footprint:
    """What one tile of ``spec`` occupies. A group left to XLA whole (no axes) occupies
    nothing that a plan could exhaust; a CPU's loops may exceed the caches, which costs time."""
    return KernelFootprint(graph, spec, device.sequential_grid)(spec.axes)


MOST_TILES_PER_CORE = 16
"""Tiles that one core runs at a time at most."""


def concurrent_tiles(need: Footprint, device: DeviceSpec) -> int:
    """Tiles of this footprint that share one core at a time. At most 16 blocks of four
    warps fill a GPU core's 64 warp slots (CUDA C++ programming guide, compute capability)."""
    limit = MOST_TILES_PER_CORE
    if need.onchip_bytes:
        limit = min(limit, device.onchip_bytes // need.onchip_bytes)
    if need.register_bytes and device.register_bytes:
        limit = min(limit, device.register_bytes // need.register_bytes)
    return max(limit, 1)


def block_bytes(axes: tuple[Axis, ...], dim_map: DimMap, bits: int, tiled: bool) -> int:
    """Bytes of one block with ``bits`` an element. ``tiled``: padded to a TPU's registers,
    the last dimension to 128 and the one before to 8, 16 or 32; a vector to 8 x 128 of 32
    bits once; a scalar stays in scalar memory, unpadded."""
    return _padded_bytes([prod([axes[a].tile for a in dims]) for dims in dim_map], bits, tiled)


def _padded_bytes(extents: Sequence[int], bits: int, tiled: bool) -> int:
    """``block_bytes`` of a block with these extents along its dimensions."""
    size = prod(extents)
    if tiled and extents:
        rows = max(SUBLANES * WORD_BITS // max(bits, 1), 1)
        if len(extents) == 1:
            size = -(-size // (rows * LANES)) * rows * LANES
        else:
            size = padded_size(size, extents[-2], extents[-1], rows)
    return -(-size * bits // 8)


class _Step(NamedTuple):
    """What is loaded, used up and made when one node of a kernel is computed."""

    loads: tuple[int, ...]
    """Values from outside that are first needed in registers."""
    dying: tuple[int, ...]
    """Values that no later node needs."""
    used: tuple[int, ...]
    """Results that later nodes need. A broadcast has none: it is never materialised, so the value that it
    repeats lives until the last use of the result."""


def _walk(nodes: Sequence[Node], loaded: Collection[int]) -> list[_Step]:
    """A liveness step for each node: the values loaded, last used, and still live.

    ``loaded`` are values from outside that are held in registers from the first use on. A contraction is no
    such use: it takes its operands from shared memory.
    """
    last: dict[int, int] = {}
    repeated: dict[int, int] = {}  # the value that a broadcast result repeats
    for step, node in enumerate(nodes):
        for v in node.inputs:
            last[repeated.get(v, v)] = step
        if is_virtual(node):
            repeated[node.outputs[0]] = repeated.get(node.inputs[0], node.inputs[0])
    waiting = set(loaded)
    steps: list[_Step] = []
    for step, node in enumerate(nodes):
        loads: tuple[int, ...] = ()
        if waiting and not node.flops.matrix and not waiting.isdisjoint(node.inputs):
            loads = tuple([v for v in dict.fromkeys(node.inputs) if v in waiting])
            waiting.difference_update(loads)
        dying: dict[int, None] = {}
        for v in node.inputs:
            v = repeated.get(v, v)
            if last[v] == step:
                dying[v] = None
        used = () if is_virtual(node) else tuple([v for v in node.outputs if v in last])
        steps.append(_Step(loads, tuple(dying), used))
    return steps


def is_virtual(node: Node) -> bool:
    """Whether the node is a broadcast, which is made where it is used and occupies nothing."""
    return node.kind is OpKind.BROADCAST and bool(node.inputs)


_DIGIT_BITS = 32
"""A sum of blocks is one integer with a digit for each kind of block: no kernel holds 2**32
blocks of a kind."""

_MOST_BYTES = 1 << 50
"""No core holds a block so large; thousands of them can be added up in 64 bits."""


class _Blocks:
    """The kinds of block in one kernel: axes of each dimension, and bits an element."""

    def __init__(self, tiled: bool) -> None:
        self._tiled = tiled
        self._kinds: dict[tuple[DimMap, int], int] = {}

    def symbol(self, dim_map: DimMap, bits: int) -> int:
        """One such block, as a sum of blocks."""
        return 1 << _DIGIT_BITS * self._kinds.setdefault((dim_map, bits), len(self._kinds))

    def counts(self, sums: Sequence[int]) -> Counts:
        """For each of ``sums``, how many blocks of each kind it has."""
        size = len(self._kinds) * _DIGIT_BITS // 8
        digits = np.frombuffer(b"".join([s.to_bytes(size, "little") for s in sums]), dtype="<u4")
        return digits.reshape(len(sums), len(self._kinds)).astype(np.int64)

    def sizes(self, axes: tuple[Axis, ...]) -> Counts:
        """The bytes of a block of each kind with these tiles; at most ``_MOST_BYTES``."""
        every = [min(block_bytes(axes, *kind, self._tiled), _MOST_BYTES) for kind in self._kinds]
        return np.array(every, dtype=np.int64)

    def sizes_of_tilings(self, tiles: Counts) -> Counts:
        """As ``sizes``, a row for each row of ``tiles``."""
        return np.stack([_blocks_bytes(tiles, *kind, self._tiled) for kind in self._kinds], axis=1)


def largest_block(graph: Graph, accesses: Iterable[Access]) -> Callable[[Sequence[int]], int]:
    """A function from the tile of each axis to the bytes of the largest block of ``accesses``, unpadded. A
    kernel with these tiles needs no less, and the function costs far less than a ``KernelFootprint``."""
    blocks = {(access.axis_set, dtypes.bits(graph.values[access.value].dtype)) for access in accesses}

    def nbytes(tiles: Sequence[int]) -> int:
        largest = 0
        for axes, bits in blocks:
            for a in axes:
                bits *= tiles[a]
            if bits > largest:
                largest = bits
        return largest // 8

    return nbytes


def _blocks_bytes(tiles: Counts, dim_map: DimMap, bits: int, tiled: bool) -> Counts:
    """As ``block_bytes``, with each row of ``tiles``."""
    size = minor = second = np.ones(len(tiles), dtype=np.int64)
    for dims in dim_map:
        second, minor = minor, tiles[:, list(dims)].prod(axis=1)
        size = size * minor
    if tiled and dim_map:
        rows = max(SUBLANES * WORD_BITS // max(bits, 1), 1)
        if len(dim_map) == 1:
            size = -(-size // (rows * LANES)) * rows * LANES
        else:
            minor_up, second_up = -(-minor // LANES) * LANES, -(-second // rows) * rows
            size = size // np.maximum(minor * second, 1) * minor_up * second_up
    return -(-size * bits // 8)


class KernelFootprint:
    """``footprint`` for all tilings of one kernel: called with other axes, it is that of ``spec`` with their
    tiles. The nodes are walked once, with a symbol for each block; a tiling only gives the symbols
    their bytes.

    ``tiled``: blocks are padded and buffered as a TPU's pipeline does (``DeviceSpec.sequential_grid``).
    Otherwise nothing depends on the device. ``stages``: buffers of a streamed operand.
    """

    def __init__(self, graph: Graph, spec: KernelSpec, tiled: bool = False, stages: int = STAGES) -> None:
        self._graph, self._spec, self._tiled, self._stages = graph, spec, tiled, stages
        self._sums: tuple[int, ...] = ()
        """Sums of blocks that may be the largest: of registers behind the first, of on-chip memory else."""
        self._can = spec.capabilities
        if not spec.axes or self._can.loop_nest:
            return
        self._streamed = spec.streamed
        self._blocks = _Blocks(tiled)
        self._rows = self._row_axis() if self._can.warpgroup_blocks else None
        by_index = looked_up(graph, spec)
        read = {a: self._blocks.symbol(a.axes, self._bits(a.value)) for a in spec.reads if a not in by_index}
        if self._can.in_registers:
            shared, loaded = self._shared(read)
            self._sums = (shared, *self._peaks(loaded))
        else:
            peaks = self._peaks({})
            if tiled:
                peaks |= dict.fromkeys(self._widened())
            written = sum(self._blocks.symbol(a.axes, self._bits(a.value)) for a in spec.writes)
            always = (stages if tiled else 1) * (sum(read.values()) + written)
            self._sums = tuple([peak + always for peak in peaks])

    @cached_property
    def _counts(self) -> Counts:
        return self._blocks.counts(self._sums)

    def __call__(self, axes: tuple[Axis, ...]) -> Footprint:
        """The footprint with these tiles."""
        if not self._sums:
            return Footprint(0)
        nbytes = (self._counts @ self._blocks.sizes(axes)).tolist()
        if not self._can.in_registers:
            return Footprint(max(nbytes))
        registers = max(nbytes[1:])
        if self._can.warpgroup_blocks:
            count = 1 if self._rows is None else warpgroups(axes[self._rows].tile)
            beside = _ADDRESS_BYTES if count == 1 else 0
            registers = (registers + beside) * _WARPGROUP_SHARE // count
        return Footprint(nbytes[0], registers)

    def of_tilings(self, tiles: Counts) -> tuple[Counts, Counts]:
        """The bytes on chip and in registers with each row of ``tiles``, which has a tile for each axis."""
        nothing = np.zeros(len(tiles), dtype=np.int64)
        if not self._sums:
            return nothing, nothing
        nbytes = self._blocks.sizes_of_tilings(tiles) @ self._counts.T
        if not self._can.in_registers:
            return nbytes.max(axis=1), nothing
        registers = nbytes[:, 1:].max(axis=1)
        if self._can.warpgroup_blocks:
            two = np.zeros(len(tiles), dtype=bool) if self._rows is None else tiles[:, self._rows] % 128 == 0
            count = np.where(two, 2, 1)
            registers = (registers + np.where(two, 0, _ADDRESS_BYTES)) * _WARPGROUP_SHARE // count
        return nbytes[:, 0], registers

    def _bits(self, v: int) -> int:
        return dtypes.bits(self._graph.values[v].dtype)

    def _members(self) -> Iterator[tuple[Node, NodeAxes]]:
        return (
            (self._graph.nodes[n], own) for n, own in zip(self._spec.nodes, self._spec.node_axes, strict=True)
        )

    def _row_axis(self) -> int | None:
        """The innermost of the axes that only the left operand and the result of a contraction have."""
        for node, own in self._members():
            if node.flops.matrix:
                lhs, rhs, out = (
                    [a for dims in compose(m, own) for a in dims]
                    for m in (*node.input_maps, node.output_maps[0])
                )
                return next((a for a in reversed(out) if a in lhs and a not in rhs), None)
        return None

    def _shared(self, read: dict[Access, int]) -> tuple[int, dict[int, int]]:
        """Shared memory that the contractions of a Triton kernel take, and the registers of other arrays
        that are read, by value.

        Loaded operands are there in full, in several stages when streamed; of those made in the kernel
        only the right one (the left is in registers), and the arrays that they are made from.
        """
        spec, streamed = self._spec, self._streamed
        operands: dict[Access, int] = {}
        for node, own in self._members():
            if not node.flops.matrix:
                continue
            for i, (v, dim_map) in enumerate(zip(node.inputs, node.input_maps, strict=True)):
                access = Access(v, compose(dim_map, own))
                if access in read:
                    through = any(
                        a == streamed or spec.axes[a].role == AxisRole.INNER for a in access.axis_set
                    )
                    operands[access] = read[access] * (self._stages if through else 1)
                elif i:
                    operands[access] = self._blocks.symbol(access.axes, self._bits(v))
        shared = sum(operands.values())
        loaded: dict[int, int] = {}
        for access, size in read.items():
            if access not in operands:
                loaded[access.value] = loaded.get(access.value, 0) + size
                if operands and streamed in access.axis_set:
                    shared += size * (self._stages - 1)
        return shared, loaded

    def _widened(self) -> Iterator[int]:
        """The arrays of fewer than 32 bits that a TPU reads and computes with several times, at each step:
        each is widened once and kept until its last use, while results pass through registers."""
        steps: dict[int, list[int]] = {
            a.value: [] for a in self._spec.reads if self._bits(a.value) < ACCUMULATOR_BITS
        }
        for i, (node, _) in enumerate(self._members()):
            if node.kind in (OpKind.ELEMENTWISE, OpKind.REDUCTION):
                for v in steps.keys() & node.inputs:
                    steps[v].append(i)
        kept = [
            (self._blocks.symbol(a.axes, ACCUMULATOR_BITS), steps[a.value])
            for a in self._spec.reads
            if len(steps.get(a.value, ())) > 1
        ]
        for i in range(len(self._spec.nodes)):
            yield sum(size for size, uses in kept if uses[0] <= i <= uses[-1])

    def _peaks(self, loaded: dict[int, int]) -> dict[int, None]:
        """The blocks that are alive at each step of the passes, with all accumulators, and after the passes;
        of one pass, at each step. ``loaded`` are the blocks in registers of values from outside."""
        spec = self._spec
        if not spec.passes:
            accumulators, steps = self._scan(range(len(spec.nodes)), loaded)
            return _largest(steps, accumulators)
        before, after = self._off_tiles()
        accumulators, steps = self._scan(before, loaded, keeps=True)
        for positions in spec.passes:
            carried, more = self._scan(positions, loaded)
            accumulators += carried
            steps += more
        # Registers are free again once nothing needs them; a TPU's accumulators have memory of their own.
        held = accumulators if self._tiled else self._needed(after)
        return _largest(steps, accumulators) | _largest(self._scan(after, loaded)[1], held)

    def _off_tiles(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The positions computed before the passes and after them. In registers, they are told apart where
        the passes accumulate products and make none: causal attention's gradient in float32 spilled 24 bytes
        on an H200 with the tiles that would fit otherwise (ptxas)."""
        spec, nodes = self._spec, self._spec.nodes
        in_loop = {i for positions in spec.passes for i in positions}
        accumulated = {self._is_carried(node, own) for node, own in self._members() if node.flops.matrix}
        if not self._tiled and accumulated != {True}:
            return tuple([i for i in range(len(nodes)) if i not in in_loop]), ()
        needed: set[int] = set()
        before: list[int] = []
        after: list[int] = []
        for i in reversed(range(len(nodes))):
            node = self._graph.nodes[nodes[i]]
            is_needed = not needed.isdisjoint(node.outputs)
            if i in in_loop or is_needed:
                needed.update(node.inputs)
            if i not in in_loop:
                (before if is_needed else after).append(i)
        return tuple(before[::-1]), tuple(after[::-1])

    def _needed(self, after: Sequence[int]) -> int:
        """The results of the passes that the nodes at positions ``after`` read."""
        read = {v for i in after for v in self._graph.nodes[self._spec.nodes[i]].inputs}
        held = 0
        for i, (node, own) in enumerate(self._members()):
            if i not in after:
                for v, dim_map in zip(node.outputs, node.output_maps, strict=True):
                    if v in read:
                        bits = max(self._bits(v), ACCUMULATOR_BITS)
                        held += self._blocks.symbol(compose(dim_map, own), bits)
        return held

    def _scan(
        self, positions: Sequence[int], loaded: dict[int, int], keeps: bool = False
    ) -> tuple[int, list[tuple[int, int, int]]]:
        """Evaluate the nodes at ``positions`` in order at block shape, and watch which blocks are alive.

        Returns sums of blocks: the carried accumulators, and for each step the blocks alive before, during
        and after it. A value dies with its last consumer in the group; with ``keeps`` it is carried, too.
        An elementwise node overwrites an operand that dies in it.
        """
        graph, spec = self._graph, self._spec
        live: dict[int, int] = {}
        steps: list[tuple[int, int, int]] = []
        accumulators = now = 0
        nodes = [graph.nodes[spec.nodes[i]] for i in positions]
        for i, node, (loads, dying, used) in zip(positions, nodes, _walk(nodes, loaded), strict=True):
            own = spec.node_axes[i]
            for v in loads:
                live[v] = loaded[v]
                now += loaded[v]
            if is_virtual(node):
                steps.append((now, now, now))
                # A broadcast that is only written is made when it is stored, at the end.
                continue
            before = now
            carried = self._is_carried(node, own)
            results = self._results(node, own, carried)
            made = sum([size for _, size in results])
            if carried or keeps:
                accumulators += made
                made = 0
            else:
                live.update(results)
            freed = sum([live.pop(v, 0) for v in dying])
            during = now + made + self._scratch(node, own, made, live)
            now += made - freed
            if len(used) < len(results):  # A result that is only written dies once it is stored.
                now -= sum([live.pop(v, 0) for v, _ in results if v not in used])
            steps.append((before, during - (freed if node.kind is OpKind.ELEMENTWISE else 0), now))
        return accumulators, steps

    def _results(self, node: Node, own: NodeAxes, carried: bool) -> list[tuple[int, int]]:
        """The values that a node makes, each with its block. A TPU's vector unit computes in 32 bits, and
        narrower intermediates are kept so (v5e and older); so are operations composed of float32 ones."""
        wide = carried or node.flops.matrix or self._tiled or node.temporaries or self._joins(node)
        least_bits = ACCUMULATOR_BITS if wide else 0
        in_rows = carried and self._spec.passes and node.kind is OpKind.REDUCTION
        in_rows = in_rows and self._streamed in compose(node.input_maps[0], own)[-1]
        found = []
        for v, dim_map in zip(node.outputs, node.output_maps, strict=True):
            axes = compose(dim_map, own)
            if in_rows and axes:
                axes = (*axes, ())  # a pass carries it as a column (codegen.mosaic_tpu.passes)
            found.append((v, self._blocks.symbol(axes, max(self._bits(v), least_bits))))
        return found

    def _scratch(self, node: Node, own: NodeAxes, made: int, live: dict[int, int]) -> int:
        """Blocks that exist only while the node is computed, ``made`` being its results."""
        scratch = node.temporaries * made
        if self._tiled and node.kind is OpKind.INJECTIVE:
            scratch += self._stacked(node, own)
        if self._joins(node):  # the joined halves lie beside the result (frontend.ops.scans)
            scratch += made
        if node.flops.matrix and self._can.relayouts_operands:
            # An operand made in one layout is multiplied in another; and no matrix unit reads 32 bits from
            # shared memory: causal attention's gradient in float32 spilled 24 bytes on an H200 with 64 keys
            # a tile, with 32 none (ptxas).
            scratch += live.get(node.inputs[0], 0)
            for v, dim_map in zip(node.inputs, node.input_maps, strict=True):
                if self._bits(v) >= ACCUMULATOR_BITS:
                    scratch += self._blocks.symbol(compose(dim_map, own), self._bits(v))
        return scratch

    def _stacked(self, node: Node, own: NodeAxes) -> int:
        """The arrays that a TPU stacks along a new last dimension, or takes apart along it: each is padded
        along its own, of size one. The first of a stack is where the result is made."""
        stacks = len(node.outputs) == 1
        shorts, (long, *_) = (
            (node.input_maps, node.output_maps) if stacks else (node.output_maps, node.input_maps)
        )
        if len(shorts) < 2 or any(short != long[:-1] for short in shorts):
            return 0
        block = self._blocks.symbol(compose((*shorts[0], ()), own), self._bits(node.inputs[0]))
        return (len(shorts) - stacks) * block

    def _is_carried(self, node: Node, own: NodeAxes) -> bool:
        """Whether the node accumulates over the streamed axis."""
        return self._streamed is not None and self._streamed in reduced_axes(node, own)

    def _joins(self, node: Node) -> bool:
        """Whether the node is a scan that is made by joining halves."""
        return self._can.scans_by_joining and node.kind == OpKind.REDUCTION and DimRole.WHOLE in node.roles


def _largest(steps: list[tuple[int, int, int]], beside: int) -> dict[int, None]:
    """The sums of blocks that may be the largest of some steps, with blocks that are always there."""
    alive = dict.fromkeys(blocks for before, during, _ in steps for blocks in (before, during))
    return dict.fromkeys([blocks + beside for blocks in alive or (0,)])


_AxesBlock = tuple[int, DimMap]
"""Bits of an element, and the axes of each dimension."""
_Change = tuple[tuple[_AxesBlock, ...], tuple[_AxesBlock, ...]]
"""Blocks that are alive from a node on, and those that are not alive after it."""


class _Operand(NamedTuple):
    """A value that a node reads or makes."""

    value: int
    bits: int
    """Of an element."""
    map: DimMap
    is_large: bool = False
    """Whether every larger group still holds its block: the value comes from outside of the graph, or it is
    reduced and is no broadcast."""
    is_loaded: bool = False
    """Whether it is held in registers if it comes from outside of a group."""


class LeastFootprints:
    """Makes the ``LeastFootprint`` of groups of one graph on one device: what is known of each node is found
    once."""

    def __init__(self, graph: Graph, device: DeviceSpec) -> None:
        self._nodes, self._device = graph.nodes, device
        # As ``KernelFootprint._results``: a TPU computes in 32 bits.
        self._least_bits = ACCUMULATOR_BITS if device.sequential_grid else 0
        in_registers = bool(device.register_bytes)
        self._reads: list[list[_Operand]] = []
        self._makes: list[list[_Operand]] = []
        for node in graph.nodes:
            reads: list[_Operand] = []
            for v, dim_map in zip(node.inputs, node.input_maps, strict=True):
                if node.addresses(dim_map):  # A kernel of a GPU or TPU has no block of it.
                    continue
                producer = graph.values[v].producer
                # A larger group may hold the broadcast that makes the value, and then not the value.
                is_held = producer < 0 or not is_virtual(graph.nodes[producer])
                is_large = producer < 0 or (node.kind == OpKind.REDUCTION and is_held)
                is_loaded = in_registers and is_held and not node.flops.matrix
                bits = dtypes.bits(graph.values[v].dtype)
                reads.append(_Operand(v, bits, dim_map, is_large, is_loaded))
            self._reads.append(reads)
            self._makes.append(
                [
                    _Operand(v, dtypes.bits(graph.values[v].dtype), dim_map)
                    for v, dim_map in zip(node.outputs, node.output_maps, strict=True)
                ]
            )

    def __call__(self, nodes: Sequence[int], axes: GroupAxes, crossing: Set[int]) -> LeastFootprint:
        """The lower bound for all groups that hold ``nodes``. ``crossing`` are values that they read or write
        however they grow."""
        largest: set[_AxesBlock] = set()
        exchanged: dict[int, _AxesBlock] = {}
        loaded: dict[int, _AxesBlock] = {}
        made: dict[int, _AxesBlock] = {}
        for n, own in zip(nodes, axes.node_axes, strict=True):
            for v, bits, dim_map, is_large, is_loaded in self._reads[n]:
                is_read = v not in made
                crosses = is_read and v in crossing
                if not (is_large or crosses or (is_read and is_loaded)):
                    continue
                block = _axes_block(bits, dim_map, own)
                if crosses:
                    exchanged.setdefault(v, block)
                if is_read and is_loaded:
                    loaded.setdefault(v, block)
                if is_large:
                    largest.add(block)
            for v, bits, dim_map, _, _ in self._makes[n]:
                block = _axes_block(bits, dim_map, own)
                made[v] = block if bits >= self._least_bits else (self._least_bits, block[1])
                if v in crossing:
                    exchanged[v] = block
                    largest.add(block)
        always = () if self._device.register_bytes else STAGES * tuple(exchanged.values())
        steps: list[_Change] = []
        alive: dict[int, _AxesBlock] = {}
        begun: list[_AxesBlock] = []
        for step in _walk([self._nodes[n] for n in nodes], loaded):
            for v in step.loads:
                if v not in alive:
                    alive[v] = loaded[v]
                    begun.append(loaded[v])
            ended = [alive.pop(v) for v in step.dying if v in alive]
            steps.append((tuple(begun), tuple(ended)))
            fresh = [v for v in step.used if v not in alive]
            begun = [made[v] for v in fresh]
            alive.update(zip(fresh, begun, strict=True))
        device = self._device
        limits = (device.block_limit_bytes, device.sequential_grid)
        return LeastFootprint(axes.sizes, *limits, frozenset(largest), always, tuple(steps))


@dataclass(frozen=True, slots=True)
class LeastFootprint:
    """Lower bound of the footprint of a group, and of every group that contains it, in any tiling.

    It counts the blocks that all schedules have, with some axes whole and all others of one element, and
    those alive at one time.
    """

    _sizes: tuple[int, ...]
    _limit_bytes: int
    _tiled: bool
    _largest: frozenset[_AxesBlock]
    """Of values that cross for good, come from outside the graph, or are reduced."""
    _always: tuple[_AxesBlock, ...]
    """Blocks that are there throughout: a TPU has two buffers for each value that crosses."""
    _steps: tuple[_Change, ...]
    """The changes at each node, in order."""

    def fits(self, whole: Set[int]) -> bool:
        """Whether the group could fit with the axes ``whole`` not cut."""
        return self.fits_with({a: self._sizes[a] for a in whole})

    def fits_with(self, tiles: Mapping[int, int]) -> bool:
        """Whether the group could fit with these tiles of some axes, and of one element of the others."""
        nbytes: dict[_AxesBlock, int] = {}

        def size(block: _AxesBlock) -> int:
            if block not in nbytes:
                bits, of = block
                extents = [prod([tiles.get(a, 1) for a in dims]) for dims in of]
                nbytes[block] = _padded_bytes(extents, bits, self._tiled)
            return nbytes[block]

        if any(size(block) > self._limit_bytes for block in self._largest):
            return False
        total = sum(map(size, self._always))
        for begun, ended in self._steps:
            total += sum(map(size, begun))
            if total > self._limit_bytes:
                return False
            total -= sum(map(size, ended))
        return True


@lru_cache(maxsize=10_000)
def _axes_block(bits: int, dim_map: DimMap, own: NodeAxes) -> _AxesBlock:
    return bits, compose(dim_map, own)
