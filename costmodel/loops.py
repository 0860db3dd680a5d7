"""Estimate the cost on a CPU of a loop nest, of a matrix product and of a reduction.

A loop nest runs its operations one after another, each on all cores, tile by tile. The time of a tile is the
sum of the times of its contractions, its other arithmetic and its traffic, where the traffic passes through
the smallest level of memory that holds the tile's blocks. A nest saves the traffic and the memory of large
intermediates: the first touch of a page costs far more than its reuse.

``nest_work`` counts the arithmetic and the traffic of a nest in a form that all tile sizes of one nest share.
Nodes with the same work share an entry, so the time of ``nest_cost`` grows with the number of kinds of nodes.

XLA computes a matrix product from the rows of its left operand and the columns of its right one. It first
transposes an operand with another layout, which for a large one can take longer than the product. Swapping
the operands can avoid that, as ``(rᵀ lᵀ)ᵀ = l r`` (``swap_is_faster``).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from costmodel import dtypes
from costmodel.axes import NodeAxes, compose, made_map, reduced_axes
from costmodel.cpu_functions import IN_TURN, flops_on_cpu
from costmodel.device import DeviceSpec, time_ps
from costmodel.graph import DimMap, DimRole, Flops, Graph, Node, OpKind
from costmodel.kernel import Axis, Cost, KernelSpec, visits_of_passes
from costmodel.temporaries import LARGE_BYTES, are_new_pages
from costmodel.traffic import least_read_bytes
from costmodel.xla_loops import LEAST_LIBRARY_ELEMENTS, absorbed_in_group, library_rows, shared_broadcasts

Axes = tuple[int, ...]
"""Some axes of a nest, ascending."""


class Arithmetic(NamedTuple):
    """The floating-point operations of a node, other than those of contractions."""

    axes: Axes
    vector: int
    transcendental: int
    reduced: int
    """Input elements of a reduction."""
    rows: int
    """Rows of them that a library walks (``xla_loops.library_rows``)."""
    in_turn: Axes
    """The axes whose rows a tile combines one after the other: those that a user's ``jax.lax.reduce``
    reduces."""
    moved_bytes: int
    """Bytes of operands and results, where XLA's library computes them in the call of a reduction: it runs
    one operation after the other on small blocks."""


class Lookup(NamedTuple):
    """How a tile reads a table by index: not the table's elements one after the other, but runs of them."""

    run: tuple[Axes, ...]
    """The axes of the dimensions whose elements lie side by side in the table, the innermost first."""
    runs: int
    """The number of indices along the dimensions that are looked up."""
    others: Axes
    """The axes of the other dimensions, which lie outside of these."""


class Block(NamedTuple):
    """The part of an array that one tile reads or writes: the axes that index it, and the bits of an
    element."""

    axes: Axes
    bits: int
    lookup: Lookup | None = None
    """Set for a table that is read by index."""


class Moves(NamedTuple):
    """The memory traffic of arrays with blocks of one shape: the number of arrays, of reads and writes of
    their blocks, and of the arrays that the same nodes compute."""

    arrays: int
    times: int
    made: int


@dataclass(frozen=True, slots=True)
class PartWork:
    """The work of some nodes of a nest on one tile."""

    nodes: int
    """The number of nodes."""
    arithmetic: tuple[tuple[Arithmetic, int], ...]
    """Each kind of arithmetic, and the number of nodes that do it."""
    products: Axes
    """The contractions among the nodes, as positions in the group."""
    reductions: int
    """The number of reductions among the nodes."""
    moved: tuple[tuple[Block, Moves], ...]


@dataclass(frozen=True, slots=True)
class NestWork:
    """The work of a loop nest, pass by pass."""

    passes: tuple[PartWork, ...]
    """The work of each pass along the streamed axis, on one tile."""
    outside: PartWork
    """The work of the nodes outside the passes, which run once for each tile of the outer loops."""
    kept: tuple[Block, ...]
    """Blocks of contraction results that one pass stores for a later pass, over the whole streamed axis."""


def nest_work(graph: Graph, spec: KernelSpec) -> NestWork:
    """The work of the nest ``spec``, and of every nest that differs from it only in tile sizes."""
    nodes = _Nodes(graph, spec)
    in_loop = {i for p in spec.passes for i in p}
    outside = [i for i in range(len(spec.nodes)) if i not in in_loop]
    kept = _kept(graph, spec) if spec.keeps else ()
    return NestWork(tuple(map(nodes.part, spec.passes)), nodes.part(outside), kept)


class _Nodes:
    """The nodes of a nest, each with the kind of its arithmetic and of the blocks that it touches."""

    def __init__(self, graph: Graph, spec: KernelSpec) -> None:
        self.nodes = [graph.nodes[n] for n in spec.nodes]
        arithmetic: dict[Arithmetic, int] = {}
        blocks: dict[Block, int] = {}
        bits = [dtypes.bits(value.dtype) for value in graph.values]
        self.arithmetic: list[int] = []
        """For each node, the index of its arithmetic in ``every_arithmetic``."""
        self.blocks: list[list[tuple[int, int]]] = []
        """For each node, the arrays that it reads and writes, each with the index of its block in
        ``every_block``."""
        absorbed = absorbed_in_group(graph, spec.nodes, {access.value for access in spec.writes})
        for node, own in zip(self.nodes, spec.node_axes, strict=True):
            reduces, flops = node.kind == OpKind.REDUCTION, flops_on_cpu(graph, node, tiled=True)
            done = Arithmetic(
                _axes(own),
                flops.vector,
                flops.transcendental,
                sum(graph.values[v].size for v in node.inputs) if reduces else 0,
                library_rows(graph, node) if reduces else 0,
                tuple(sorted(reduced_axes(node, own))) if node.op == IN_TURN else (),
                _moved_bytes(graph, node) if node.id in absorbed else 0,
            )
            self.arithmetic.append(arithmetic.setdefault(done, len(arithmetic)))
            maps = zip(node.inputs + node.outputs, node.input_maps + node.output_maps, strict=True)
            touched = [(v, Block(_axes(compose(dim_map, own)), bits[v])) for v, dim_map in maps]
            lookup = _lookup(node, own)
            # It reads no more of its first operand than it makes; a reduction compares all indices.
            if lookup is not None or (node.takes_part and not reduces):
                touched[0] = (touched[0][0], Block(touched[-1][1].axes, touched[0][1].bits, lookup))
            self.blocks.append([(v, blocks.setdefault(block, len(blocks))) for v, block in touched])
        self.every_arithmetic, self.every_block = list(arithmetic), list(blocks)

    def part(self, positions: Sequence[int]) -> PartWork:
        """The work of some of the nodes."""
        moved: Counter[tuple[int, int]] = Counter()
        products = []
        reductions = 0
        made = {v: block for i in positions for v, block in self.blocks[i][len(self.nodes[i].inputs) :]}
        for i in positions:
            node = self.nodes[i]
            # XLA fuses elementwise operations into these; their operands and results pass through memory.
            if node.kind >= OpKind.REDUCTION:
                moved.update(self.blocks[i])
                reductions += node.kind == OpKind.REDUCTION
                if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
                    products.append(i)
            else:
                moved.update(read for read in self.blocks[i][: len(node.inputs)] if read[0] not in made)
        # A result that is read in another block than it is made in takes its own, too.
        moved.update({(v, made[v]): 0 for v, _ in moved if v in made})
        sums: dict[int, list[int]] = {}
        for (v, block), times in moved.items():
            counts = sums.setdefault(block, [0, 0, 0])
            counts[0] += 1
            counts[1] += times
            counts[2] += made.get(v) == block
        kinds = Counter([self.arithmetic[i] for i in positions])
        return PartWork(
            len(positions),
            tuple([(self.every_arithmetic[k], count) for k, count in kinds.items()]),
            tuple(products),
            reductions,
            tuple([(self.every_block[b], Moves(*counts)) for b, counts in sums.items()]),
        )


def _lookup(node: Node, own: NodeAxes) -> Lookup | None:
    """How a node reads its first operand, if it reads it by index."""
    addressed = {d for d, role in enumerate(node.roles) if role == DimRole.ADDRESSED}
    table = node.input_maps[0] if node.inputs else ()
    places = [i for i, dims in enumerate(table) if not addressed.isdisjoint(dims)]
    if not places:
        return None
    run = [tuple(sorted({a for d in dims for a in own[d]})) for dims in table[: places[-1] : -1]]
    others = {a for d in itertools.chain(*table[: places[-1]]) if d not in addressed for a in own[d]}
    return Lookup(tuple(run), math.prod(node.dims[d] for d in addressed), tuple(sorted(others)))


def _axes(maps: DimMap) -> Axes:
    return tuple(sorted({a for dims in maps for a in dims}))


def _kept(graph: Graph, spec: KernelSpec) -> tuple[Block, ...]:
    """The blocks of ``NestWork.kept``."""
    position = {n: i for i, n in enumerate(spec.nodes)}
    first = {i: k for k, p in reversed(list(enumerate(spec.passes))) for i in p}
    kept: dict[int, tuple[Node, NodeAxes]] = {}
    for k, nodes in enumerate(spec.passes):
        inside = set(nodes)
        for i in nodes:
            for v in graph.nodes[spec.nodes[i]].inputs:
                j = position.get(graph.values[v].producer, -1)
                if first.get(j, k) < k and j not in inside:
                    kept[v] = graph.nodes[spec.nodes[j]], spec.node_axes[j]
    every = [
        Block(_axes(compose(made_map(maker, v), own)), dtypes.bits(graph.values[v].dtype))
        for v, (maker, own) in kept.items()
    ]
    return tuple([block for block in every if spec.streamed in block.axes])


_TOUCH_FLOPS = 10
"""The cost of packing or storing an element of an operand or result of XLA's matrix product on a CPU, in
flops.

Fitted within 20 % to float32 products with sides of 3 to 20,000 (two server cores, jax 0.10), hand-off
included: 128x64x128 runs at 100 GFLOP/s, 512x64x512 at 180, 2048x768x768 at 200, of 210 at best."""


_TRANSPOSE_FLOPS = 60
"""The cost of transposing an element, in flops (measured: 0.1 to 0.5 ns at 200 GFLOP/s)."""


@dataclass(frozen=True, slots=True)
class Sides:
    """The dimensions of a contraction, by the operands and the result that they index.

    Example:
        >>> Sides.of((((0,), (1,)), ((2,), (1,)), ((0,), (2,))))
        Sides(batch=frozenset(), rows=frozenset({0}), depth=frozenset({1}), columns=frozenset({2}))
    """

    batch: frozenset[int]
    rows: frozenset[int]
    depth: frozenset[int]
    columns: frozenset[int]

    @classmethod
    def of(cls, maps: Sequence[DimMap]) -> Sides:
        """Classify the dimensions by the maps of the left operand, the right one and the result."""
        left, right, result = (frozenset(d for dims in m for d in dims) for m in maps)
        return cls(left & right & result, left & result - right, left - result, right & result - left)


def swap_is_faster(maps: Sequence[DimMap], extents: Sequence[int]) -> bool:
    """Whether the product is faster with its operands swapped.

    Args:
        maps: dimensions of the left operand, the right one and the result.
        extents: of each dimension.

    Example: ``x.T @ y`` of ``x[4096, 64]`` and ``y[4096, 512]``, and of ``x[4096, 512]`` and ``y[4096, 64]``:
        >>> swap_is_faster((((0,), (1,)), ((0,), (2,)), ((1,), (2,))), (4096, 64, 512))
        False
        >>> swap_is_faster((((0,), (1,)), ((0,), (2,)), ((1,), (2,))), (4096, 512, 64))
        True
    """
    as_is, swapped = _transposed_elements(maps, extents)
    return swapped < as_is


def product_ps(graph: Graph, node: Node, device: DeviceSpec, tile: Sequence[int] | None = None) -> int:
    """Picoseconds of a contraction on a CPU, or of one tile, of the extents ``tile``: flops, packing,
    transposing and storing, at the rate of the first operand's dtype."""
    rate = device.matrix_rate(graph.values[node.inputs[0]].dtype)
    extents = node.dims if tile is None else tile
    flops = -(-node.flops.matrix * math.prod(extents) // max(math.prod(node.dims), 1))
    if node.op == "dot_general" and len(node.inputs) == 2:
        maps = (*node.input_maps, *node.output_maps)
        flops += sum(_size({d for dims in m for d in dims}, extents) for m in maps) * _TOUCH_FLOPS
        flops += min(_transposed_elements(maps, extents)) * _TRANSPOSE_FLOPS
    return time_ps(flops, rate)


def _transposed_elements(maps: Sequence[DimMap], extents: Sequence[int]) -> tuple[int, int]:
    """The elements that XLA transposes for the product as it is, and with its operands swapped."""
    sides = Sides.of(maps)
    if _size(sides.rows, extents) == 1 or _size(sides.columns, extents) == 1:
        return 0, 0  # XLA multiplies a matrix in either layout with a vector
    left, right, result = maps

    def moved(dim_map: DimMap, *order: frozenset[int]) -> int:
        dims = [d for dims in dim_map for d in dims if extents[d] > 1]
        ranks = [next(i for i, group in enumerate(order) if d in group) for d in dims]
        return 0 if ranks == sorted(ranks) else _size(dims, extents)

    batch, rows, depth, columns = sides.batch, sides.rows, sides.depth, sides.columns

    def moved_right(dim_map: DimMap, columns: frozenset[int]) -> int:
        # Without batches XLA multiplies by a second side in either layout.
        lies = [moved(dim_map, batch, depth, columns)]
        if _size(batch, extents) == 1:
            lies.append(moved(dim_map, batch, columns, depth))
        return min(lies)

    as_is = moved(left, batch, rows, depth) + moved_right(right, columns)
    swapped = moved(right, batch, columns, depth) + moved_right(left, rows)
    return as_is, swapped + moved(result, batch, columns, rows)


def _size(dims: Sequence[int] | set[int] | frozenset[int], extents: Sequence[int]) -> int:
    return math.prod(extents[d] for d in dims)


_SPLIT_BYTES = 256 << 10
"""XLA runs a kernel whose blocks are no larger on one core (measured: jax 0.10 and 0.12)."""

_KEPT_MOVES = 5
"""How often the blocks that one pass keeps for another are moved: they are set to zero, written in place, and
copied from there for the later pass."""

_MARGIN = (11, 10)
"""The surcharge on the time of a nest beside its matrix products, as (numerator, denominator).

The model is not exact, and leaving a group to XLA is always safe. Products run at the same rate either way.
``fuseplan bench cpu`` prints modelled and measured times."""


def nest_cost(graph: Graph, spec: KernelSpec, device: DeviceSpec, work: NestWork | None = None) -> Cost:
    """The cost of the loop nest ``spec`` on ``device``; ``work`` is its ``nest_work``, computed if not given.

    ``hbm_read_bytes`` and ``hbm_write_bytes`` are compulsory: each array from outside once, and of a table
    what is looked up. The time counts what every tile moves through the nearest level of memory that holds
    its blocks."""
    work = work or nest_work(graph, spec)
    outer = math.prod(a.n_tiles for i, a in enumerate(spec.axes) if i != spec.streamed)
    counts = (*visits_of_passes(spec), outer)
    parts = zip((*work.passes, work.outside), counts, strict=True)
    tiles = [(_tile_cost(graph, spec, device, part), count) for part, count in parts]
    total = {name: sum([getattr(tile, name) * count for tile, count in tiles]) for name in _TILE_PARTS}
    temp_bytes = max(tile.onchip_bytes for tile, _ in tiles)
    write_bytes = sum(graph.values[w.value].nbytes for w in spec.writes)
    read_bytes = sum(least_read_bytes(graph, spec, v) for v in {r.value for r in spec.reads})
    # A kept product is there for the whole streamed axis.
    extents = [axis.size if a == spec.streamed else axis.tile for a, axis in enumerate(spec.axes)]
    kept_bytes = sum(math.prod([extents[a] for a in block.axes]) * block.bits // 8 for block in work.kept)
    total["cache_ps"] += time_ps(_KEPT_MOVES * kept_bytes * outer, _bandwidth(device, kept_bytes))
    # Results are set to zero, then written in place.
    total["memory_ps"] += time_ps(2 * write_bytes, device.hbm_bytes_per_s)
    once_ps = time_ps(read_bytes + write_bytes, device.hbm_bytes_per_s)
    moved_ps = total["memory_ps"] + total["cache_ps"] + total["sums_ps"]
    if once_ps > moved_ps:  # each array is moved at least once
        moved_ps = once_ps
        total |= {"memory_ps": once_ps, "cache_ps": 0, "sums_ps": 0}
    rest_ps = max(moved_ps, total["vector_ps"] + total["transcendental_ps"])
    rest_ps += total["launch_ps"] + total["step_ps"] + total["sync_ps"]
    total["launch_ps"] += device.launch_ps
    tile_bytes = temp_bytes + kept_bytes
    new_bytes = write_bytes + tile_bytes
    if new_bytes < LARGE_BYTES:
        is_new = are_new_pages(graph) and tile_bytes >= device.least_large_bytes
        new_bytes = tile_bytes if is_new else 0
    return Cost(
        **total,
        fresh_ps=time_ps(new_bytes, device.fresh_bytes_per_s),
        surcharge_ps=rest_ps * _MARGIN[0] // _MARGIN[1] - rest_ps,
        hbm_read_bytes=read_bytes,
        hbm_write_bytes=write_bytes,
        onchip_bytes=tile_bytes,
        flops=sum([tile.flops.times(count) for tile, count in tiles], Flops()),
        in_turns=True,
    )


def reduction_ps(graph: Graph, node: Node, device: DeviceSpec) -> int:
    """Picoseconds of a reduction on a CPU with operands in cache: XLA adds the elements of a row one by one,
    more slowly than its vector arithmetic, and a library takes some time for each row."""
    if node.kind != OpKind.REDUCTION:
        return 0
    added_ps = time_ps(sum(graph.values[v].size for v in node.inputs), device.reduction_per_s)
    return added_ps + library_rows(graph, node) * device.reduction_row_ps


def library_ps(graph: Graph, nodes: Sequence[int], device: DeviceSpec) -> int:
    """Picoseconds in which a library moves what it fuses into a reduction through the private caches; 0 for
    groups without one. The library runs one operation after the other on small blocks, where a loop of XLA
    keeps their results in registers."""
    members = [graph.nodes[n] for n in nodes]
    if len(members) < 2 or not any(library_rows(graph, n) for n in members if n.kind == OpKind.REDUCTION):
        return 0
    nbytes = sum(_moved_bytes(graph, node) for node in members)
    return time_ps(nbytes, device.private_cache_bytes_per_s or device.hbm_bytes_per_s)


def broadcasts_cost(graph: Graph, nodes: Sequence[int], device: DeviceSpec) -> tuple[int, int]:
    """Picoseconds for the broadcasts that several calls of XLA:CPU's library share: to read them, with this
    call's part of writing them, and to touch their pages for the first time."""
    shared = shared_broadcasts(graph)
    moved = fresh = 0
    for n in nodes:
        node = graph.nodes[n]
        for i, calls in shared.get(n, ()):
            nbytes = math.prod(node.dims) * dtypes.bits(graph.values[node.inputs[i]].dtype) // 8
            moved += nbytes + nbytes // calls
            fresh += nbytes // calls if nbytes >= LARGE_BYTES or are_new_pages(graph) else 0
    return time_ps(moved, device.hbm_bytes_per_s), time_ps(fresh, device.fresh_bytes_per_s)


def _moved_bytes(graph: Graph, node: Node) -> int:
    """Bytes that a library moves for an operation that it fuses; a product's are in its own time."""
    is_moved = not node.bitcast and node.kind != OpKind.OUT_ELEMENTWISE_FUSABLE
    return 0 if not is_moved else sum(graph.values[v].nbytes for v in (*node.inputs, *node.outputs))


def fresh_ps(graph: Graph, spec: KernelSpec, device: DeviceSpec) -> int:
    """Picoseconds to touch the new pages of large results that cannot reuse the memory of an operand. The
    program's own arguments stay as they are."""
    made = (graph.values[v] for v in {access.value for access in spec.reads})
    operands = sorted(value.nbytes for value in made if value.producer >= 0)
    fresh = []
    # Of results of one size, temporaries come first, whatever their ids.
    results = dict.fromkeys(access.value for access in spec.writes)
    for v in sorted(results, key=lambda v: (-graph.values[v].nbytes, v in graph.results)):
        if operands and operands[-1] >= graph.values[v].nbytes:
            operands.pop()
        else:
            fresh.append(v)
    return time_ps(_new_bytes(graph, fresh, device), device.fresh_bytes_per_s)


def _new_bytes(graph: Graph, made: Iterable[int], device: DeviceSpec) -> int:
    """The bytes of the arrays ``made`` that are new pages: of the program's results those of ``LARGE_BYTES``
    or more together; of temporaries these, and all large ones where they are new pages together."""
    own = temporary = 0
    least_bytes = min(device.least_large_bytes, LARGE_BYTES) if are_new_pages(graph) else LARGE_BYTES
    for v in made:
        if v in graph.results:
            own += graph.values[v].nbytes
        elif graph.values[v].nbytes >= least_bytes:
            temporary += graph.values[v].nbytes
    return temporary + (own if own >= LARGE_BYTES else 0)


_TILE_PARTS = (
    "launch_ps", "step_ps", "sync_ps", "memory_ps", "cache_ps", "sums_ps", "matrix_ps", "vector_ps",
    "transcendental_ps",
)  # fmt: skip
"""The parts of a nest's cost that are sums over its tiles."""


def _tile_cost(graph: Graph, spec: KernelSpec, device: DeviceSpec, work: PartWork) -> Cost:
    """The cost of some nodes of a nest on one tile; its ``onchip_bytes`` are those of their results."""
    axes = spec.axes
    largest = traffic = block_bytes = temp_bytes = lookups_ps = 0
    for block, moves in work.moved:
        nbytes = -(-math.prod([axes[a].tile for a in block.axes]) * block.bits // 8)
        largest = max(largest, nbytes)
        if block.lookup is None:
            traffic += nbytes * moves.times
        else:
            lookups_ps += _lookup_ps(spec, device, block, nbytes * moves.times)
        block_bytes += nbytes * moves.arrays
        temp_bytes += nbytes * moves.made
    idle = 1 if largest > _SPLIT_BYTES else device.core_count
    reduction = vector = transcendental = matrix = products = matrix_ps = turns = library = 0
    for done, count in work.arithmetic:
        part, whole = _tile_share(axes, done.axes)
        times = count
        if done.in_turn:  # Each row is a small kernel, on one core.
            turns += math.prod([axes[a].tile for a in done.in_turn]) * count
            times *= device.core_count // idle
        vector += -(-done.vector * part // whole) * times
        transcendental += -(-done.transcendental * part // whole) * times
        added = -(-done.reduced * part // whole)
        reduction += time_ps(added, device.reduction_per_s) * count
        if added >= LEAST_LIBRARY_ELEMENTS:
            reduction += -(-done.rows * part // whole) * device.reduction_row_ps * count
        if part >= LEAST_LIBRARY_ELEMENTS:
            library += -(-done.moved_bytes * part // whole) * count
    for i in work.products:
        node, own = graph.nodes[spec.nodes[i]], spec.node_axes[i]
        products += _batch_size(axes, node, own)
        tile = [math.prod([axes[a].tile for a in dims]) for dims in own]
        matrix_ps += product_ps(graph, node, device, tile)
        part, whole = _tile_share(axes, {a for dims in own for a in dims})
        matrix += -(-node.flops.matrix * part // whole)
    # A reduction is fused with the operations before it: the slower of adding and moving counts.
    traffic_ps = time_ps(traffic, _bandwidth(device, block_bytes)) + lookups_ps
    sums_ps = reduction * idle if reduction * idle > traffic_ps else 0
    is_cached = block_bytes <= device.cache_bytes
    library_ps = time_ps(library, device.private_cache_bytes_per_s or device.hbm_bytes_per_s)
    return Cost(
        # Only products are calls; other kernels are part of the program. Each product and each large
        # reduction is handed to all cores, and so is the elementwise work before it.
        launch_ps=device.launch_ps * products,
        step_ps=device.step_ps * (bool(work.nodes) + turns),
        sync_ps=2 * device.handoff_ps * (products + work.reductions * (idle == 1)),
        memory_ps=0 if sums_ps or is_cached else traffic_ps,
        cache_ps=library_ps * idle + (traffic_ps if is_cached and not sums_ps else 0),
        sums_ps=sums_ps,
        matrix_ps=matrix_ps,
        vector_ps=time_ps(vector, device.vector_flops_per_s) * idle,
        transcendental_ps=time_ps(transcendental, device.transcendental_per_s) * idle,
        onchip_bytes=temp_bytes,
        flops=Flops(matrix, vector, transcendental),
    )


_LINE_BYTES = 64
"""The size of a cache line, which a CPU moves whole to read one byte, on all x86 processors and most ARM
servers."""


def _lookup_ps(spec: KernelSpec, device: DeviceSpec, block: Block, nbytes: int) -> int:
    """Picoseconds to load ``nbytes`` of a table by index: whole cache lines, from the nearest memory that
    holds the lines of all that may be looked up. Each core has them in its own private cache."""
    assert block.lookup is not None
    run, runs = block.bits, block.lookup.runs * math.prod([spec.axes[a].tile for a in block.lookup.others])
    is_cut = False
    for dims in block.lookup.run:
        extent = math.prod([spec.axes[a].tile for a in dims])
        run, runs = (run, runs * extent) if is_cut else (run * extent, runs)
        is_cut = is_cut or any(spec.axes[a].tile < spec.axes[a].size for a in dims)
    run_bytes = max(run // 8, 1)
    line_bytes = max(run_bytes, _LINE_BYTES)
    held_bytes = runs * line_bytes
    if held_bytes * device.core_count > device.private_cache_bytes:
        held_bytes = max(held_bytes, device.private_cache_bytes + 1)
    rate = _bandwidth(device, held_bytes)
    return time_ps(-(-nbytes * line_bytes // run_bytes), rate)


def _tile_share(axes: Sequence[Axis], own: Iterable[int]) -> tuple[int, int]:
    """The share of one tile in the work along the axes ``own``, as (numerator, denominator)."""
    part = whole = 1
    for a in own:
        part *= axes[a].tile
        whole *= axes[a].size
    return part, max(whole, 1)


def _batch_size(axes: Sequence[Axis], node: Node, own: NodeAxes) -> int:
    """The number of products that XLA runs for a tile of a contraction: one for each index of the batch."""
    if len(node.input_maps) != 2:
        return 1
    batch = Sides.of((*node.input_maps, *node.output_maps)).batch
    return math.prod(axes[a].tile for d in batch for a in own[d])


def _bandwidth(device: DeviceSpec, block_bytes: int) -> int:
    """Bytes per second of the nearest level of memory that holds ``block_bytes``."""
    if block_bytes <= device.private_cache_bytes and device.private_cache_bytes_per_s:
        return device.private_cache_bytes_per_s
    fits = block_bytes <= device.cache_bytes and device.cache_bytes_per_s
    return device.cache_bytes_per_s if fits else device.hbm_bytes_per_s
