"""How much memory a kernel needs: on a core while it runs, and in HBM between kernels.

On a core the accounting follows what each backend's compiler does with a block:

- *Mosaic TPU*: everything is in VMEM. The pipeline double-buffers every read and written
  block; carried accumulators and the intermediates that are alive at once come on top.
- *Triton*: shared memory holds the operands of contractions, double-buffered when
  streamed (``num_stages=2``); everything else lives in registers. Checked against the
  compiler on an H200, bf16: matmul 128x128x64 in 3 stages 98,304 bytes = 3 x 32,768, and
  attention D=64 with 128x128 blocks 81,920 bytes = q 16,384 + 2 x (k + v) 32,768.
  What a streamed operand is computed from passes through shared memory too, in one buffer
  less, and of the operands made so the right one lies there: (silu(x) * y) @ w in 2 stages
  65,536 = x + y + 2 w; x @ tanh(w) in 3 stages 98,304 = 3 x + 2 w + tanh(w).
- *Mosaic GPU*: registers hold everything but the operands of contractions, too, but those of the
  one or two warpgroups that compute a tile (``warpgroups``).
- Of a kernel in several passes the fullest counts, with all that is known once and needed on
  every tile: accumulators, and what follows from them.
- *XLA loops* (CPU): blocks and intermediates all lie in the caches of the cores.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from costmodel import dtypes
from costmodel.axes import compose
from costmodel.device import DeviceSpec
from costmodel.graph import DimMap, DimRole, Graph, Node, OpKind
from costmodel.kernel import Access, Axis, AxisRole, KernelSpec
from costmodel.tpu_layout import LANES, SUBLANES, WORD_BITS, padded_size

_STAGES = 2
"""Buffers of a streamed operand: one is filled while the other is used."""

_ACCUMULATOR_BITS = 32
"""Matrix units and streamed reductions accumulate in float32 at least."""


_WARPGROUP_SHARE = 2
"""A warpgroup is 128 threads of at most 255 registers: half of a core's file."""

_ADDRESS_BYTES = 16 * 4 * 128
"""What one has registers for beside its values: 16 a thread, or a 128x128 tile of bfloat16 that is computed
with in float32 spills (tests/aot/test_compiled.py::test_what_one_warpgroup_holds_does_not_spill)."""


def warpgroups(rows: int) -> int:
    """How many warpgroups of Mosaic GPU compute a tile of a contraction of so many rows: each has
    a multiple of 64 (wgmma.m64n8k16). Any other tile is one warpgroup's."""
    return 1 if rows % 128 else 2


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
    nothing that a plan could exhaust, and what a CPU's loops exceed its caches by costs time."""
    return Occupancy(graph, spec, device)(spec.axes)


class Occupancy:
    """``footprint`` for all tilings of one kernel: ``Occupancy(graph, spec, device)(axes)`` is
    that of ``spec`` with other tiles. The nodes are looked at once, with a symbol for each
    block; a tiling only has to give the symbols their bytes."""

    def __init__(self, graph: Graph, spec: KernelSpec, device: DeviceSpec) -> None:
        self._empty = not spec.axes or spec.capabilities.loop_nest
        if self._empty:
            return
        self._warpgroups = spec.capabilities.warpgroup_blocks
        self._rows = _rows(graph, spec) if self._warpgroups else None
        self._tiled = tiled = device.sequential_grid
        blocks = self._blocks = _Blocks()
        bits = {a.value: dtypes.bits(graph.values[a.value].dtype) for a in spec.reads + spec.writes}
        read = {a: blocks.symbol(a.axes, bits[a.value]) for a in spec.reads}
        if spec.capabilities.in_registers:
            shared, loaded = _shared(graph, spec, read, blocks)
            self._onchip: tuple[int, ...] = (shared,)
            self._registers = _scan_all(graph, spec, loaded, tiled, blocks)
        else:
            peaks = _scan_all(graph, spec, {}, tiled, blocks)
            if tiled:
                peaks = (*peaks, *_widened(graph, spec, blocks))
            written = sum(blocks.symbol(a.axes, bits[a.value]) for a in spec.writes)
            through = (_STAGES if tiled else 1) * (sum(read.values()) + written)
            self._onchip, self._registers = tuple([peak + through for peak in peaks]), ()

    def __call__(self, axes: tuple[Axis, ...]) -> Footprint:
        """The footprint with these tiles."""
        if self._empty:
            return Footprint(0)
        nbytes = self._blocks.nbytes(axes, self._tiled)
        registers = _largest(self._registers, nbytes)
        if self._warpgroups:
            count = 1 if self._rows is None else warpgroups(axes[self._rows].tile)
            beside = _ADDRESS_BYTES if count == 1 else 0
            registers = (registers + beside) * _WARPGROUP_SHARE // count
        return Footprint(_largest(self._onchip, nbytes), registers)


def _widened(graph: Graph, spec: KernelSpec, blocks: _Blocks) -> frozenset[int]:
    """What a TPU reads in fewer than 32 bits and computes with several times, at each step: it is widened
    once and kept until the last time, while what is made of it passes through registers
    (tests/aot/test_compiled.py::test_what_is_widened_is_within_what_is_modelled)."""
    bits = {a: dtypes.bits(graph.values[a.value].dtype) for a in spec.reads}
    steps: dict[int, list[int]] = {a.value: [] for a in spec.reads if bits[a] < _ACCUMULATOR_BITS}
    for i, n in enumerate(spec.nodes):
        if graph.nodes[n].kind in (OpKind.ELEMENTWISE, OpKind.REDUCTION):
            for v in steps.keys() & graph.nodes[n].inputs:
                steps[v].append(i)
    kept = [
        (blocks.symbol(a.axes, _ACCUMULATOR_BITS), steps[a.value])
        for a in spec.reads
        if len(steps.get(a.value, ())) > 1
    ]
    return frozenset(
        sum(size for size, uses in kept if uses[0] <= i <= uses[-1]) for i in range(len(spec.nodes))
    )


def _rows(graph: Graph, spec: KernelSpec) -> int | None:
    """The innermost of the axes that only the left operand and the result of a contraction have."""
    for n, own in zip(spec.nodes, spec.node_axes, strict=True):
        node = graph.nodes[n]
        if node.flops.matrix:
            lhs, rhs, out = (
                [a for dims in compose(m, own) for a in dims] for m in (*node.input_maps, node.output_maps[0])
            )
            return next((a for a in reversed(out) if a in lhs and a not in rhs), None)
    return None


_DIGIT_BITS = 32
"""A sum of blocks is one integer with a digit for each kind of block: no kernel holds 2**32
blocks of a kind."""


class _Blocks:
    """The kinds of block in one kernel: axes of each dimension, and bits an element."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[DimMap, int], int] = {}

    def symbol(self, dim_map: DimMap, bits: int) -> int:
        """One such block, as a sum of blocks."""
        return 1 << _DIGIT_BITS * self._kinds.setdefault((dim_map, bits), len(self._kinds))

    def nbytes(self, axes: tuple[Axis, ...], tiled: bool) -> list[int]:
        """The bytes of each kind."""
        return [block_bytes(axes, dim_map, bits, tiled) for dim_map, bits in self._kinds]


_MANY_KINDS = 16
"""From so many digits on it is faster to take all out at once."""


def _largest(sums: tuple[int, ...], nbytes: list[int]) -> int:
    largest = 0
    for blocks in sums:
        if blocks >> _DIGIT_BITS * _MANY_KINDS:
            digits = array("I", blocks.to_bytes(4 * len(nbytes), sys.byteorder))
            ordered = nbytes if sys.byteorder == "little" else nbytes[::-1]
            largest = max(largest, sum(map(mul, digits, ordered)))
            continue
        total = k = 0
        while blocks:
            total += (blocks & (1 << _DIGIT_BITS) - 1) * nbytes[k]
            blocks >>= _DIGIT_BITS
            k += 1
        largest = max(largest, total)
    return largest


def block_bytes(axes: tuple[Axis, ...], dim_map: DimMap, bits: int, tiled: bool) -> int:
    """Bytes of one block with ``bits`` an element. ``tiled``: padded to a TPU's registers,
    the last dimension to 128 and the one before to 8, 16 or 32; a vector to 8 x 128 of 32
    bits once; a scalar stays in scalar memory, unpadded."""
    size = minor = second = 1
    for dims in dim_map:
        second, minor = minor, 1
        for a in dims:
            minor *= axes[a].tile
        size *= minor
    if tiled and dim_map:
        rows = max(SUBLANES * WORD_BITS // max(bits, 1), 1)
        if len(dim_map) == 1:
            size = -(-size // (rows * LANES)) * rows * LANES
        else:
            size = padded_size(size, second, minor, rows)
    return -(-size * bits // 8)


def _scan_all(
    graph: Graph, spec: KernelSpec, loaded: dict[int, int], tiled: bool, blocks: _Blocks
) -> tuple[int, ...]:
    """What is alive at each step of the passes, with all that is carried, and when they are over; of
    one pass, all at once."""
    if not spec.passes:
        carried, alive = _scan(graph, spec, range(len(spec.nodes)), loaded, tiled, blocks)
        return tuple([peak + carried for peak in alive])
    known, late = _off_tiles(graph, spec, tiled)
    accumulators = 0
    peaks: dict[int, None] = {}
    for positions in (known, *spec.passes):
        carried, alive = _scan(graph, spec, positions, loaded, tiled, blocks, keeps=positions is known)
        accumulators += carried
        peaks |= dict.fromkeys(alive)
    _, after = _scan(graph, spec, late, loaded, tiled, blocks)
    # Registers are free again once nothing needs them; a TPU's accumulators have memory of their own.
    held = accumulators if tiled else _needed(graph, spec, late, blocks)
    return (*(peak + accumulators for peak in peaks), *(peak + held for peak in after))


def _off_tiles(graph: Graph, spec: KernelSpec, tiled: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is computed off the tiles: what some pass needs, and what is made when all are over. In
    registers, that is told apart where the passes accumulate products and make none: causal attention's
    gradient in float32 spilled 24 bytes on an H200 with the tiles that would fit otherwise (ptxas)."""
    in_loop = {i for positions in spec.passes for i in positions}
    streamed = spec.streamed
    members = ((graph.nodes[n], own) for n, own in zip(spec.nodes, spec.node_axes, strict=True))
    accumulated = {_carries(node, own, streamed) for node, own in members if node.flops.matrix}
    if not tiled and accumulated != {True}:
        return tuple(i for i in range(len(spec.nodes)) if i not in in_loop), ()
    needed: set[int] = set()
    known: list[int] = []
    late: list[int] = []
    for i in reversed(range(len(spec.nodes))):
        node = graph.nodes[spec.nodes[i]]
        is_needed = not needed.isdisjoint(node.outputs)
        if i in in_loop or is_needed:
            needed.update(node.inputs)
        if i not in in_loop:
            (known if is_needed else late).append(i)
    return tuple(known[::-1]), tuple(late[::-1])


def _needed(graph: Graph, spec: KernelSpec, late: Sequence[int], blocks: _Blocks) -> int:
    """What the passes made of which the nodes at positions ``late`` read some."""
    read = {v for i in late for v in graph.nodes[spec.nodes[i]].inputs}
    held = 0
    for i in set(range(len(spec.nodes))).difference(late):
        node = graph.nodes[spec.nodes[i]]
        for v, dim_map in zip(node.outputs, node.output_maps, strict=True):
            if v in read:
                bits = max(dtypes.bits(graph.values[v].dtype), _ACCUMULATOR_BITS)
                held += blocks.symbol(compose(dim_map, spec.node_axes[i]), bits)
    return held


def _scan(
    graph: Graph,
    spec: KernelSpec,
    positions: Sequence[int],
    loaded: dict[int, int],
    tiled: bool,
    blocks: _Blocks,
    keeps: bool = False,
) -> tuple[int, tuple[int, ...]]:
    """Evaluate the nodes at ``positions`` in order at block shape and watch what is alive.

    ``loaded`` are the blocks in registers that values from outside take from their first use.
    Returns sums of blocks: (carried accumulators, what is alive at each step). A value dies with
    its last consumer in the group; with ``keeps`` it is carried, too. An elementwise node
    overwrites an operand that dies in it; a broadcast is never materialised.
    """
    nodes = [graph.nodes[spec.nodes[i]] for i in positions]
    last: dict[int, int] = {}
    for step, node in enumerate(nodes):
        for v in node.inputs:
            last[v] = step
    streamed = spec.streamed
    sizes: dict[tuple[DimMap, DimMap, int], int] = {}  # most values of a group have one of few shapes
    live: dict[int, int] = {}
    root: dict[int, int] = {}  # a broadcast result stands for the value it repeats
    accumulators = now = 0
    peaks: dict[int, None] = {}
    for step, node in enumerate(nodes):
        if loaded and not node.flops.matrix:  # a contraction takes its operands from shared memory
            for v in node.inputs:
                if v in loaded and v not in live:
                    live[v] = loaded[v]
                    now += loaded[v]
        if node.kind == OpKind.BROADCAST and node.inputs:
            source, out = root.get(node.inputs[0], node.inputs[0]), node.outputs[0]
            root[out] = source
            last[source] = max(last[source], last.get(out, step))
            continue
        peaks[now] = None
        node_axes = spec.node_axes[positions[step]]
        carried = streamed is not None and _carries(node, node_axes, streamed)
        # A TPU's vector unit computes in 32 bits: narrower intermediates are kept so (v5e and
        # older; test_planned_functions.py::test_compiles[gelu_exact-tpu_v5e-bfloat16]).
        composed = bool(node.temporaries)  # of operations that are computed in float32
        scans = (
            spec.capabilities.scans_by_joining
            and node.kind == OpKind.REDUCTION
            and DimRole.WHOLE in node.roles
        )
        floor = _ACCUMULATOR_BITS if carried or node.flops.matrix or tiled or composed or scans else 0
        made = freed = 0
        for v, dim_map in zip(node.outputs, node.output_maps, strict=True):
            bits = max(dtypes.bits(graph.values[v].dtype), floor)
            key = (node_axes, dim_map, bits)
            size = sizes.get(key, -1)
            if size < 0:
                axes = compose(dim_map, node_axes)
                in_rows = carried and spec.passes and node.kind == OpKind.REDUCTION
                if in_rows and streamed in compose(node.input_maps[0], node_axes)[-1]:
                    axes = (*axes, ()) if axes else ()  # as it is carried (emit.mosaic_passes)
                size = sizes[key] = blocks.symbol(axes, bits)
            if carried or keeps:
                accumulators += size
            else:
                live[v] = size
                made += size
        for v in node.inputs:
            v = root.get(v, v)
            if last[v] == step and v in live:
                freed += live.pop(v)
        in_place = freed if node.kind == OpKind.ELEMENTWISE else 0
        scratch = node.temporaries * made
        if tiled and node.kind == OpKind.INJECTIVE:
            scratch += _stacked(graph, node, node_axes, blocks)
        if scans:  # what was joined lies beside what is made of it (ops.folds)
            scratch += made
        if (
            node.flops.matrix and spec.capabilities.relayouts_operands
        ):  # made in one layout, multiplied in another
            scratch += live.get(node.inputs[0], 0)
            scratch += _by_hand(graph, node, node_axes, blocks)
        peaks[now + made + scratch - in_place] = None
        now += made - freed
        for v in node.outputs:
            if v not in last:  # only written out: gone once stored
                now -= live.pop(v, 0)
    return accumulators, tuple(peaks) or (0,)


def _stacked(graph: Graph, node: Node, node_axes: tuple[tuple[int, ...], ...], blocks: _Blocks) -> int:
    """What arrays take that a TPU stacks along a new last dimension, or takes apart along it: each is
    padded along its own, of size one. The first of a stack is where the result is made
    (tests/aot/test_compiled.py::test_what_is_stacked_is_within_what_is_modelled)."""
    stacks = len(node.outputs) == 1
    shorts, (long, *_) = (
        (node.input_maps, node.output_maps) if stacks else (node.output_maps, node.input_maps)
    )
    if len(shorts) < 2 or any(short != long[:-1] for short in shorts):
        return 0
    bits = dtypes.bits(graph.values[node.inputs[0]].dtype)
    return (len(shorts) - stacks) * blocks.symbol(compose((*shorts[0], ()), node_axes), bits)


def _by_hand(graph: Graph, node: Node, node_axes: tuple[tuple[int, ...], ...], blocks: _Blocks) -> int:
    """What a contraction of 32 bits takes into registers: no matrix unit reads it from shared memory.
    Causal attention's gradient in float32 spilled 24 bytes on an H200 with 64 keys a tile, with 32 none
    (ptxas)."""
    wide = [
        (v, dim_map)
        for v, dim_map in zip(node.inputs, node.input_maps, strict=True)
        if dtypes.bits(graph.values[v].dtype) >= _ACCUMULATOR_BITS
    ]
    return sum(blocks.symbol(compose(m, node_axes), dtypes.bits(graph.values[v].dtype)) for v, m in wide)


def _carries(node: Node, node_axes: tuple[tuple[int, ...], ...], streamed: int | None) -> bool:
    """Whether the node accumulates over the streamed axis."""
    return any(
        role == DimRole.REDUCED and streamed in axes for role, axes in zip(node.roles, node_axes, strict=True)
    )


def _shared(
    graph: Graph, spec: KernelSpec, read: dict[Access, int], blocks: _Blocks
) -> tuple[int, dict[int, int]]:
    """Shared memory that the contractions of a Triton kernel take, and the registers of what is
    read beside their operands, by value.

    Loaded operands are there in full, in two stages when streamed; of those made in the kernel
    only the right one (the left is in registers), and what they are made of.
    """
    streamed = spec.streamed
    operands: dict[Access, int] = {}
    for step, n in enumerate(spec.nodes):
        node = graph.nodes[n]
        if not node.flops.matrix:
            continue
        for i, (v, dim_map) in enumerate(zip(node.inputs, node.input_maps, strict=True)):
            access = Access(
                v, tuple(tuple(a for d in dims for a in spec.node_axes[step][d]) for dims in dim_map)
            )
            if access in read:
                through = any(a == streamed or spec.axes[a].role == AxisRole.INNER for a in access.axis_set)
                operands[access] = read[access] * (_STAGES if through else 1)
            elif i:
                bits = dtypes.bits(graph.values[v].dtype)
                operands[access] = blocks.symbol(access.axes, bits)
    shared = sum(operands.values())
    loaded: dict[int, int] = {}
    for access, size in read.items():
        if access not in operands:
            loaded[access.value] = loaded.get(access.value, 0) + size
            if operands and streamed in access.axis_set:
                shared += size * (_STAGES - 1)
    return shared, loaded


def peak_bytes(graph: Graph, kernels: Sequence[KernelSpec], tile_bytes: Sequence[int] = ()) -> int:
    """The most HBM bytes that temporaries occupy at once when ``kernels`` run in order. A
    temporary is a written value that is neither an input nor an output of the graph; it is
    freed after the last kernel that reads it. A kernel of bitcasts moves nothing: its
    result is its operand's buffer. ``tile_bytes`` is what each kernel itself keeps there
    while it runs: the blocks of a CPU's loops are memory like any other."""
    buffer = buffers(graph, kernels)
    kept = set(graph.inputs) | {buffer[v] for v in graph.outputs}
    last: dict[int, int] = {}
    for step, spec in enumerate(kernels):
        for access in spec.reads + spec.writes:
            last[buffer[access.value]] = step
    dies: list[list[int]] = [[] for _ in kernels]
    for v, step in last.items():
        dies[step].append(v)
    alive: dict[int, int] = {}
    now = peak = 0
    for step, spec in enumerate(kernels):
        for access in spec.writes:
            v = buffer[access.value]
            if v not in kept and v not in alive:
                alive[v] = graph.values[v].nbytes
                now += alive[v]
        peak = max(peak, now + (tile_bytes[step] if tile_bytes else 0))
        for v in dies[step]:
            now -= alive.pop(v, 0)
    return peak


def buffers(graph: Graph, kernels: Sequence[KernelSpec]) -> list[int]:
    """For each value the one in whose buffer it lies: itself, or what bitcasts made it from."""
    buffer = list(range(len(graph.values)))
    for spec in kernels:
        if is_bitcast(graph, spec):
            for n in spec.nodes:
                node = graph.nodes[n]
                for v in node.outputs:
                    buffer[v] = buffer[node.inputs[0]]
    return buffer


def is_bitcast(graph: Graph, spec: KernelSpec) -> bool:
    """Whether the group only renames bytes: nothing is launched and nothing moves."""
    return not spec.axes and all(graph.nodes[n].bitcast for n in spec.nodes)


def concurrent_tiles(need: Footprint, device: DeviceSpec) -> int:
    """Tiles of this footprint that share one core at a time. At most 16 blocks of four
    warps fill a GPU core's 64 warp slots (CUDA C++ programming guide, compute capability)."""
    limit = 16
    if need.onchip_bytes:
        limit = min(limit, device.onchip_bytes // need.onchip_bytes)
    if need.register_bytes and device.register_bytes:
        limit = min(limit, device.register_bytes // need.register_bytes)
    return max(limit, 1)
