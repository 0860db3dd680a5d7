"""Enumerate the tilings of a group that a backend can address, and bound the time of each from below.

A tiling has a tile extent for each axis of the group. ``tilings`` yields them largest block first. A group
around a contraction has dozens of tilings, so ``most_promising`` sorts them by a lower bound on their time,
which costs as much for all of them as pricing one. The bound counts the reads and the matrix units' work,
with padding and idle cores, by the model of ``costmodel.roofline`` and ``costmodel.traffic``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from costmodel.axes import GroupAxes, NodeAxes
from costmodel.backends import backend_of
from costmodel.device import DeviceSpec
from costmodel.graph import DimMap, Graph, Node
from costmodel.kernel import Access, AxisRole
from costmodel.memory import LANES, SUBLANES
from fuseplan.schedule.addressing import is_addressable, is_contiguous, whole_tile
from fuseplan.schedule.layout import Contraction, Layout

CONTIGUOUS_TILES = (128, 512, 2048)
"""Candidate tiles of the axis along which the largest arrays are contiguous."""
TRANSPOSE_TILES = (32, 64, 128, 512)
"""Those where two axes are contiguous in some array: square tiles of a few cache lines a side serve both."""
ROW_TILES = (1, 4, 8, 16, 32, 64, 128, 256)
"""Those of the innermost other parallel axes."""
STREAM_TILES = (8, 64, 256, 1024)
"""Those of a stream walked once; ``Backend.pass_tiles`` are those of one walked in several passes."""
SHORT_AXIS = 32
"""A parallel axis of at most this extent is whole or has tiles of one, and is tiled together with the
next."""

_ROUNDING = 1e-9
"""Relative rounding error of the lower bound in floating point; the cost model computes in integers."""

Tiles = tuple[int, ...]
Times = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Rank = tuple[int, int]
"""The rank of a schedule in a fixed order: that of its roles, and that of its tiles among theirs."""


def tilings(
    layout: Layout, roles: tuple[AxisRole, ...], backend: str, in_passes: bool = False
) -> Iterator[Tiles]:
    """The tilings that ``backend`` can address, the largest blocks first, but blocks beyond its limit of
    elements last. ``in_passes``: the stream is walked several times, or written to, in parts."""
    if layout.contraction is not None:
        # Groups around one contraction have few distinct layouts, so these are cached.
        yield from _matmul_tilings(layout.sizes, layout.contraction, roles, _blocks(layout), backend)
        return
    options = _options(layout, roles, backend)
    if in_passes:
        stream = roles.index(AxisRole.STREAMED)
        options[stream] = tuple(t for t in backend_of(backend).pass_tiles if t < layout.sizes[stream])
    found = False
    most = backend_of(backend).most_elements
    for tiles in _sorted(options, layout.sizes, _blocks(layout), backend, most):
        found = True
        yield tiles
    if not found and backend_of(backend).gathers_blocks and not in_passes:
        yield from _scattered(options, layout)


@lru_cache(maxsize=256)
def _matmul_tilings(
    sizes: Tiles, dot: Contraction, roles: tuple[AxisRole, ...], blocks: _Blocks, backend: str
) -> tuple[Tiles, ...]:
    options = _matmul_options(sizes, dot, roles, backend)
    return () if options is None else tuple(_sorted(options, sizes, blocks, backend))


def _sorted(
    options: list[tuple[int, ...]], sizes: Tiles, blocks: _Blocks, backend: str, most: int | None = None
) -> Iterator[Tiles]:
    """The largest first; those of more than ``most`` elements last, the smallest of them first."""

    def rank(tiles: Tiles) -> tuple[int, int, Tiles]:
        size = math.prod(tiles)
        return max(size - most, 0) if most else 0, -size, tiles

    for tiles in sorted(itertools.product(*options), key=rank):
        if _addressable(sizes, blocks, tiles, backend):
            yield tiles


def _scattered(options: list[tuple[int, ...]], layout: Layout) -> Iterator[Tiles]:
    """Tilings whose blocks are not contiguous in memory: Triton loads each element by its own address, though
    runs of neighbours are faster. Dimensions that a node needs whole are whole."""
    for tiles in sorted(itertools.product(*options), key=lambda t: (-math.prod(t), t)):
        if all(tiles[a] == layout.sizes[a] for dims in layout.joint for a in dims[1:]):
            yield tiles


class DepthDominance:
    """Dominance between tilings of a contraction that differ only in the depth of a step: on a sequential
    grid the deeper one reads the same in fewer steps, and so costs no more unless it pads more."""

    def __init__(self, layout: Layout, roles: tuple[AxisRole, ...]) -> None:
        streamed = AxisRole.STREAMED in roles and layout.contraction is not None
        self._depth = roles.index(AxisRole.STREAMED) if streamed else -1
        self._size = layout.sizes[self._depth] if streamed else 0
        self._padded: dict[Tiles, int] = {}

    def is_dominated(self, tiles: Tiles) -> bool:
        """Whether a tiling was added that differs in a deeper step only, and pads no more."""
        others, padded = self._split(tiles)
        return self._padded.get(others, padded + 1) <= padded

    def add(self, tiles: Tiles) -> None:
        """Record a tiling that was priced; deeper ones are added first."""
        others, padded = self._split(tiles)
        self._padded[others] = min(self._padded.get(others, padded), padded)

    def _split(self, tiles: Tiles) -> tuple[Tiles, int]:
        depth = self._depth
        if depth < 0:
            return tiles, 0
        tile = tiles[depth]
        return (*tiles[:depth], *tiles[depth + 1 :]), -(-self._size // tile) * tile


def _options(layout: Layout, roles: tuple[AxisRole, ...], backend: str) -> list[tuple[int, ...]]:
    contiguous = _contiguous_axes(layout)
    rows = [a for a, r in enumerate(roles) if r == AxisRole.PARALLEL and a not in contiguous]
    tiled = _innermost(layout, rows)
    options: list[tuple[int, ...]] = []
    for a, (size, role) in enumerate(zip(layout.sizes, roles, strict=True)):
        if role == AxisRole.RESIDENT:
            options.append((whole_tile(size, backend),))
        elif role == AxisRole.STREAMED:
            options.append(_up_to(size, STREAM_TILES, backend))
        elif a in contiguous:
            candidates = CONTIGUOUS_TILES if len(contiguous) == 1 else TRANSPOSE_TILES
            options.append(_up_to(size, candidates, backend))
        elif a in tiled:
            options.append(_up_to(size, ROW_TILES, backend))
        else:
            options.append((1, whole_tile(size, backend)) if size <= SHORT_AXIS else (1,))
    return options


def _matmul_options(
    sizes: Tiles, dot: Contraction, roles: tuple[AxisRole, ...], backend: str
) -> list[tuple[int, ...]] | None:
    """The innermost row, column and depth axes get tiles; the others have tiles of one."""
    tiled = {axes[-1] for axes in (dot.rows, dot.columns) if axes}
    extra_depth = [a for a in dot.depth if roles[a] != AxisRole.STREAMED]
    if len(extra_depth) > 1:
        return None
    options: list[tuple[int, ...]] = []
    for a, (size, role) in enumerate(zip(sizes, roles, strict=True)):
        if role == AxisRole.STREAMED:
            if extra_depth:
                options.append(_outer_depth_tiles(size, sizes[extra_depth[0]], backend))
            else:
                options.append(_dot_tiles(size, backend_of(backend).depth_tiles, backend))
        elif role == AxisRole.RESIDENT:
            if a not in extra_depth:
                return None
            options.append((whole_tile(size, backend),))
        elif a in tiled:
            options.append(_dot_tiles(size, backend_of(backend).matmul_tiles, backend))
        else:
            options.append((1,))
    return options


def _outer_depth_tiles(size: int, beside: int, backend: str) -> tuple[int, ...]:
    """Tiles of a contracted axis, such as heads, beside another that is whole and has ``beside`` elements.

    Accumulators in memory are read and written again by each step, so that a step takes several."""
    can = backend_of(backend)
    most = max(can.depth_tiles) // beside if can.accumulates_in_memory else 1
    return tuple(t for t in range(1, size + 1) if t == 1 or (t <= most and size % t == 0))


def dot_tiles(size: int, backend: str, held: bool = False) -> tuple[int, ...]:
    """Tiles of an axis in a kernel of several contractions; ``held``: the contracted axis is whole."""
    can = backend_of(backend)
    return _dot_tiles(size, can.matmul_tiles + (can.held_tiles if held else ()), backend)


def _dot_tiles(size: int, tiles: tuple[int, ...], backend: str) -> tuple[int, ...]:
    """As ``_up_to``, but at least the backend's least tile, since matrix instructions have a least extent;
    the excess is masked."""
    least = backend_of(backend).least_dot_tile
    return tuple(dict.fromkeys(max(t, least) for t in _up_to(size, tiles, backend)))


def _contiguous_axes(layout: Layout) -> set[int | None]:
    """The axes along which the largest arrays are contiguous: their tiles must be long, or loads are not
    coalesced. Smaller arrays, such as statistics of rows, do not matter."""
    accesses = layout.reads + layout.writes + layout.inner
    extents = [math.prod(layout.sizes[i] for i in a.axis_set) for a in accesses]
    largest = max(extents)
    return {_minor(a) for a, n in zip(accesses, extents, strict=True) if n == largest}


def _minor(access: Access) -> int | None:
    """The axis along which an array is contiguous in memory."""
    return next((dims[-1] for dims in reversed(access.axes) if dims), None)


def _innermost(layout: Layout, axes: list[int]) -> list[int]:
    """The innermost of ``axes`` in the first written array, up to the first long one: a short axis alone,
    such as a few heads, would make small blocks."""
    order = [a for dims in layout.writes[0].axes for a in dims]
    inner = [a for a in reversed(order) if a in axes]
    short = next((i for i, a in enumerate(inner) if layout.sizes[a] > SHORT_AXIS), len(inner))
    return inner[: short + 1]


def _up_to(size: int, tiles: tuple[int, ...], backend: str) -> tuple[int, ...]:
    """The tiles smaller than the axis, and the whole axis unless it exceeds the largest tile."""
    whole = whole_tile(size, backend)
    smaller = tuple(dict.fromkeys(_even(size, t, backend) for t in tiles if t < size))
    return (*smaller, whole) if whole <= tiles[-1] or not smaller else smaller


def _even(size: int, tile: int, backend: str) -> int:
    """The least multiple of the lanes that makes as many tiles as ``tile``: a TPU also computes the elements
    of the last tile past the end of the axis."""
    if not backend_of(backend).lane_tiles or tile < LANES:
        return tile
    count = -(-size // tile)
    return -(-size // (count * LANES)) * LANES


def addressing(layout: Layout, backend: str, lifts: bool = False) -> Callable[[Tiles], bool]:
    """A predicate of tiles: whether the backend can load, compute and store their blocks.

    Mosaic reshapes blocks of rank two and more, but splits or merges no vector. With ``lifts``, a single row
    may be a block.
    """
    sizes, blocks = layout.sizes, _blocks(layout)
    return lambda tiles: _addressable(sizes, blocks, tiles, backend, lifts)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The distinct layouts of a group's blocks."""

    merged: tuple[tuple[int, ...], ...]
    """Axes merged in one dimension of a value."""
    vectors: tuple[tuple[int, ...], ...]
    """Axes merged in the only dimension of a value."""
    exchanged: tuple[DimMap, ...]
    """Axes of the dimensions of each array read or written."""
    every: tuple[DimMap, ...]
    """Those of all values."""
    depth: tuple[int, ...]
    """The contracted axes."""


def _blocks(layout: Layout) -> _Blocks:
    exchanged = dict.fromkeys(a.axes for a in layout.reads + layout.writes)
    every = dict.fromkeys([*exchanged, *(a.axes for a in layout.inner)])
    merged = dict.fromkeys(dims for axes in every for dims in axes if len(dims) > 1)
    vectors = tuple(axes[0] for axes in every if len(axes) == 1)
    depth = layout.contraction.depth if layout.contraction is not None else ()
    return _Blocks(tuple(merged), vectors, tuple(exchanged), tuple(every), depth)


def _addressable(sizes: Tiles, blocks: _Blocks, tiles: Tiles, backend: str, lifts: bool = False) -> bool:
    if not all(is_contiguous(sizes, tiles, dims) for dims in blocks.merged):
        return False
    if backend_of(backend).warpgroup_blocks:
        return is_addressable(sizes, tiles, blocks.every, blocks.depth)
    if not backend_of(backend).lane_tiles:
        return True
    return all(_mosaic_block(sizes, axes, tiles, lifts) for axes in blocks.exchanged) and not any(
        sum(tiles[a] > 1 for a in dims) > 1 for dims in blocks.vectors
    )


def _mosaic_block(sizes: Tiles, axes: DimMap, tiles: Tiles, lifts: bool) -> bool:
    # Not of a matrix: a block for each single row has more overhead than work.
    single = lifts and len(axes) > 2 and all(tiles[a] == 1 for dims in axes[:-1] for a in dims)
    quanta = (LANES,) if single else (LANES, SUBLANES)
    for dims, quantum in zip(reversed(axes), quanta, strict=False):
        block, extent = (math.prod([of[a] for a in dims]) for of in (tiles, sizes))
        if block != extent and block % quantum:
            return False
    return True


def most_promising(
    graph: Graph,
    device: DeviceSpec,
    nodes: tuple[int, ...],
    axes: GroupAxes,
    layout: Layout,
    roles: tuple[AxisRole, ...],
    ranked: list[tuple[Rank, Tiles]],
    is_wanted: Callable[[float, Rank], bool],
) -> Iterator[tuple[Rank, Tiles]]:
    """Tilings of a contraction by ascending lower bound, of those for which ``is_wanted(bound in picoseconds,
    rank)`` holds when they are reached."""
    if ranked:
        members = (graph.nodes[n] for n in nodes)
        anchor = next(m for m in zip(members, axes.node_axes, strict=True) if m[0].flops.matrix)
        tilings = np.array([tiles for _, tiles in ranked], dtype=np.int64)
        least_ps = least_times_ps(graph, device, layout, roles, anchor, tilings)
        for k in np.argsort(least_ps, kind="stable").tolist():
            if is_wanted(least_ps[k], ranked[k][0]):
                yield ranked[k]


def least_times_ps(
    graph: Graph,
    device: DeviceSpec,
    layout: Layout,
    roles: tuple[AxisRole, ...],
    anchor: tuple[Node, NodeAxes],
    tilings: Counts,
) -> Times:
    """A lower bound in picoseconds for each row of ``tilings``, which has a tile for each axis.

    ``anchor`` is the contraction with its axes.
    """
    sizes = np.array(layout.sizes, dtype=np.int64)
    n_tiles = -(-sizes // tilings)
    parallel = [a for a, role in enumerate(roles) if role == AxisRole.PARALLEL]
    tiles = n_tiles[:, parallel].prod(axis=1)
    cores = device.core_count
    idle = cores / np.minimum(tiles, cores)
    waves = -(-tiles // cores)
    node, own = anchor
    flops = _executed(node, own, parallel, sizes, tilings, n_tiles) * (waves * cores / tiles)
    matrix_ps = flops * _ps_each(device.matrix_rate(graph.values[node.inputs[0]].dtype))
    reads = ((graph.values[access.value].nbytes, access.axis_set) for access in layout.reads)
    if device.sequential_grid:
        streamed = [a for a, role in enumerate(roles) if role == AxisRole.STREAMED]
        grid = parallel + streamed
        loaded = sum(nbytes * _fetches(n_tiles, grid, axes) for nbytes, axes in reads)
        step_ps = waves * n_tiles[:, streamed].prod(axis=1) * device.grid_step_ps
        read_ps = np.maximum(loaded * idle * _ps_each(device.hbm_bytes_per_s), step_ps)
    else:
        loaded = sum(
            nbytes * n_tiles[:, [a for a in parallel if a not in axes]].prod(axis=1) for nbytes, axes in reads
        )
        read_ps = loaded * idle * _ps_each(device.cache_bytes_per_s)
    return (device.launch_ps + np.maximum(matrix_ps, read_ps)) * (1 - _ROUNDING)


def _ps_each(rate: int) -> float:
    return 1e12 / rate if rate else 0.0  # a rate of 0 is no limit


def _executed(
    node: Node, own: NodeAxes, parallel: list[int], sizes: Counts, tilings: Counts, n_tiles: Counts
) -> Times:
    """Flops of the matrix units: over padded extents, and repeated for every tile of other parallel axes."""
    carried = [a for axes in own for a in axes]
    others = [a for a in parallel if a not in carried]
    padded = n_tiles[:, carried] * tilings[:, carried]
    repeats = padded.prod(axis=1) * (n_tiles[:, others].prod(axis=1) / math.prod(sizes[carried].tolist()))
    return node.flops.matrix * repeats


def _fetches(n_tiles: Counts, grid: list[int], indexed: frozenset[int]) -> Counts:
    """How often a sequential grid fetches an array with the axes ``indexed`` (``costmodel.traffic``)."""
    fetches = np.ones(len(n_tiles), dtype=np.int64)
    pending = fetches
    for a in grid:
        count = n_tiles[:, a]
        if a in indexed:
            changes = count > 1
            fetches = np.where(changes, fetches * pending, fetches)
            pending = np.where(changes, 1, pending)
        else:
            pending = pending * count
    return fetches
