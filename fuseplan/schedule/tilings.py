"""Tiles: which block sizes a group's axes may have, by what each backend can address."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from costmodel.backends import backend_of
from costmodel.graph import DimMap
from costmodel.kernel import Access, AxisRole
from costmodel.memory import LANES, SUBLANES
from fuseplan.schedule.layout import Contraction, Layout
from fuseplan.schedule.padding import is_contiguous, whole_tile
from fuseplan.schedule.warpgroup import is_addressable

_LANE_TILES = (128, 512, 2048)
# Where two axes are both contiguous somewhere (a transpose), square tiles of a few cache
# lines a side serve both.
_TRANSPOSE_TILES = (32, 64, 128, 512)
_ROW_TILES = (1, 4, 8, 16, 32, 64, 128, 256)
_STREAM_TILES = (8, 64, 256, 1024)
# A stream walked in passes is as long as a row that does not fit: each step waits for its loads.
_PASS_TILES = (8, 32, 128, 512, 2048, 8192, 32768)
_SMALL = 32

Tiles = tuple[int, ...]


def tilings(
    layout: Layout, roles: tuple[AxisRole, ...], backend: str, in_passes: bool = False
) -> Iterator[Tiles]:
    """Tiles for each axis that ``backend`` can address, the largest blocks first, but in registers those
    of more than 16 a thread last. ``in_passes``: of a stream that is walked several times, or written
    to, less than all of it."""
    if layout.contraction is not None:
        # Groups around one contraction differ in little else: most are asked for again.
        yield from _matmul_tilings(layout.sizes, layout.contraction, roles, _blocks(layout), backend)
        return
    options = _options(layout, roles, backend)
    if in_passes:
        stream = roles.index(AxisRole.STREAMED)
        options[stream] = tuple(t for t in _PASS_TILES if t < layout.sizes[stream])
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
    """The largest first; of more than ``most`` elements last, and the smallest of those first."""

    def rank(tiles: Tiles) -> tuple[int, int, Tiles]:
        size = math.prod(tiles)
        return max(size - most, 0) if most else 0, -size, tiles

    for tiles in sorted(itertools.product(*options), key=rank):
        if _addressable(sizes, blocks, tiles, backend):
            yield tiles


def _scattered(options: list[tuple[int, ...]], layout: Layout) -> Iterator[Tiles]:
    """Tiles whose blocks are in several places of memory: Triton loads each element from where it
    is, though runs of neighbours are faster. What is needed whole has no gaps between its elements."""
    for tiles in sorted(itertools.product(*options), key=lambda t: (-math.prod(t), t)):
        if all(tiles[a] == layout.sizes[a] for dims in layout.joint for a in dims[1:]):
            yield tiles


class Deeper:
    """Tilings of a contraction that differ in the depth of a step alone: on a sequential grid
    the deeper never costs more, unless it pads more. It reads the same, in fewer steps
    (test_schedule.py::test_deeper_steps_cost_no_more)."""

    def __init__(self, layout: Layout, roles: tuple[AxisRole, ...]) -> None:
        streamed = AxisRole.STREAMED in roles and layout.contraction is not None
        self._depth = roles.index(AxisRole.STREAMED) if streamed else -1
        self._size = layout.sizes[self._depth] if streamed else 0
        self._padded: dict[Tiles, int] = {}

    def is_known(self, tiles: Tiles) -> bool:
        """Whether one that differs from it in a deeper step, and pads no more, was added."""
        others, padded = self._split(tiles)
        return self._padded.get(others, padded + 1) <= padded

    def add(self, tiles: Tiles) -> None:
        """It was priced, the deepest first."""
        others, padded = self._split(tiles)
        self._padded[others] = min(self._padded.get(others, padded), padded)

    def _split(self, tiles: Tiles) -> tuple[Tiles, int]:
        depth = self._depth
        if depth < 0:
            return tiles, 0
        tile = tiles[depth]
        return (*tiles[:depth], *tiles[depth + 1 :]), -(-self._size // tile) * tile


def largest_block(layout: Layout) -> Callable[[Tiles], int]:
    """For any tiles, the bytes of the largest block read or written: a kernel needs at least so
    much on chip."""
    blocks = list(
        {
            (access.axis_set, width): None
            for access, width in zip(layout.reads + layout.writes, layout.element_bytes, strict=True)
        }
    )

    def nbytes(tiles: Tiles) -> int:
        largest = 0
        for axes, width in blocks:
            size = width
            for a in axes:
                size *= tiles[a]
            if size > largest:
                largest = size
        return largest

    return nbytes


def _options(layout: Layout, roles: tuple[AxisRole, ...], backend: str) -> list[tuple[int, ...]]:
    lanes = _lanes(layout)
    rows = [a for a, r in enumerate(roles) if r == AxisRole.PARALLEL and a not in lanes]
    tiled = _innermost(layout, rows)
    options: list[tuple[int, ...]] = []
    for a, (size, role) in enumerate(zip(layout.sizes, roles, strict=True)):
        if role == AxisRole.RESIDENT:
            options.append((whole_tile(size, backend),))
        elif role == AxisRole.STREAMED:
            options.append(_up_to(size, _STREAM_TILES, backend))
        elif a in lanes:
            options.append(_up_to(size, _LANE_TILES if len(lanes) == 1 else _TRANSPOSE_TILES, backend))
        elif a in tiled:
            options.append(_up_to(size, _ROW_TILES, backend))
        else:
            options.append((1, whole_tile(size, backend)) if size <= _SMALL else (1,))
    return options


def _matmul_options(
    sizes: Tiles, dot: Contraction, roles: tuple[AxisRole, ...], backend: str
) -> list[tuple[int, ...]] | None:
    """One row, one column and one depth axis get tiles; the others are of one."""
    long = {axes[-1] for axes in (dot.rows, dot.columns) if axes}
    extra_depth = [a for a in dot.depth if roles[a] != AxisRole.STREAMED]
    if len(extra_depth) > 1:
        return None
    options: list[tuple[int, ...]] = []
    for a, (size, role) in enumerate(zip(sizes, roles, strict=True)):
        if role == AxisRole.STREAMED:
            depths = backend_of(backend).depth_tiles
            beside = math.prod(sizes[b] for b in extra_depth)
            options.append(
                _several(size, beside, backend) if extra_depth else _dot_tiles(size, depths, backend)
            )
        elif role == AxisRole.RESIDENT:
            if a not in extra_depth:
                return None
            options.append((whole_tile(size, backend),))
        elif a in long:
            options.append(_dot_tiles(size, backend_of(backend).matmul_tiles, backend))
        else:
            options.append((1,))
    return options


def _several(size: int, beside: int, backend: str) -> tuple[int, ...]:
    """How many of a contracted axis, such as heads, one step takes with all of another, of size ``beside``:
    a TPU's accumulators are in VMEM, and are read and written again by each of many shallow steps
    (tests/schedule/test_scheduler.py::test_a_step_contracts_several_heads)."""
    can = backend_of(backend)
    most = max(can.depth_tiles) // beside if can.accumulates_in_memory else 1
    return tuple(t for t in range(1, size + 1) if t == 1 or (t <= most and size % t == 0))


def dot_tiles(size: int, backend: str, held: bool = False) -> tuple[int, ...]:
    """Tiles of an axis along which a kernel of several contractions is cut; ``held``: beside one that is
    contracted whole."""
    can = backend_of(backend)
    return _dot_tiles(size, can.matmul_tiles + (can.held_tiles if held else ()), backend)


def _dot_tiles(size: int, tiles: tuple[int, ...], backend: str) -> tuple[int, ...]:
    """As ``_up_to``, but a GPU's matrix instructions want at least 16 of each (mma.m16n8k16):
    what is missing is masked."""
    least = backend_of(backend).least_dot_tile
    return tuple(dict.fromkeys(max(t, least) for t in _up_to(size, tiles, backend)))


def _lanes(layout: Layout) -> set[int | None]:
    """The axes along which the largest arrays lie in memory: their tiles must be long, or
    loads are not coalesced. Row statistics are small enough not to matter
    (test_schedule.py::test_row_statistics_keep_small_tiles)."""
    accesses = layout.reads + layout.writes + layout.inner
    extents = [math.prod(layout.sizes[i] for i in a.axis_set) for a in accesses]
    largest = max(extents)
    return {_minor(a) for a, n in zip(accesses, extents, strict=True) if n == largest}


def _minor(access: Access) -> int | None:
    """The axis along which neighbouring elements of an array lie in memory."""
    for dims in reversed(access.axes):
        if dims:
            return dims[-1]
    return None


def _innermost(layout: Layout, axes: list[int]) -> list[int]:
    """Of ``axes``, those that lie innermost in the first written array, up to one that is long: a few
    heads a token make no block."""
    order = [a for dims in layout.writes[0].axes for a in dims]
    inner = [a for a in reversed(order) if a in axes]
    short = next((i for i, a in enumerate(inner) if layout.sizes[a] > _SMALL), len(inner))
    return inner[: short + 1]


def _up_to(size: int, tiles: tuple[int, ...], backend: str) -> tuple[int, ...]:
    """The tiles smaller than the axis, and the whole of it where that is no larger than the
    largest of them."""
    whole = whole_tile(size, backend)
    smaller = tuple(dict.fromkeys(_even(size, t, backend) for t in tiles if t < size))
    return (*smaller, whole) if whole <= tiles[-1] or not smaller else smaller


def _even(size: int, tile: int, backend: str) -> int:
    """As many tiles as ``tile`` makes, but of one length, as far as lanes go: a TPU computes what the last
    of them has past the end, too (test_schedule.py::test_tiles_of_a_tpu_are_even)."""
    if not backend_of(backend).lane_tiles or tile < LANES:
        return tile
    count = -(-size // tile)
    return -(-size // (count * LANES)) * LANES


def addressing(layout: Layout, backend: str, lifts: bool = False) -> Callable[[Tiles], bool]:
    """Whether the backend can load, compute and store blocks of any tiles. Mosaic reshapes
    blocks of rank two and more as it likes, but splits or merges no vector
    (tests/aot/test_compile_kernels.py). With ``lifts``, one of a single row is a block of its own."""
    sizes, blocks = layout.sizes, _blocks(layout)
    return lambda tiles: _addressable(sizes, blocks, tiles, backend, lifts)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How the blocks of a group lie, each way once: its values are of few shapes."""

    merged: tuple[tuple[int, ...], ...]
    """Axes that one dimension merges."""
    vectors: tuple[tuple[int, ...], ...]
    """Axes that the only dimension of a value merges."""
    exchanged: tuple[DimMap, ...]
    """Of what is read and written."""
    every: tuple[DimMap, ...]
    depth: tuple[int, ...]
    """Axes that are contracted."""


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
    # Of a matrix, single rows would be a block each: more steps than work.
    single = lifts and len(axes) > 2 and all(tiles[a] == 1 for dims in axes[:-1] for a in dims)
    quanta = (LANES,) if single else (LANES, SUBLANES)
    for dims, quantum in zip(reversed(axes), quanta, strict=False):
        block = extent = 1
        for a in dims:
            block *= tiles[a]
            extent *= sizes[a]
        if block != extent and block % quantum:
            return False
    return True
