"""Enumerate the tilings of a group that a backend can address.

A tiling has a tile extent for each axis of the group. ``tilings`` yields them largest block first; the
scheduler prices all of them at once (``costmodel.tiling_costs``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import lru_cache

from costmodel.backends import backend_of
from costmodel.graph import DimMap
from costmodel.kernel import AxisRole
from costmodel.memory import LANES, SUBLANES
from fuseplan.schedule.addressing import is_addressable, is_contiguous, whole_tile
from fuseplan.schedule.layout import SHORT_AXIS, Blocks, Contraction, Layout

VECTOR_TILE_ELEMENTS = LANES * SUBLANES
"""Elements of one tile of a one-dimensional array in a TPU's memory. A kernel reads such an array as a matrix
of one row. If its length is a multiple of this, both have the same layout; otherwise XLA copies the array
first, which takes longer than the kernel."""

MOST_ROW_TILINGS = 2_048
"""The most combinations of tiles of the parallel axes that are not contiguous (``_parallel_options``)."""

Tiles = tuple[int, ...]
Rank = tuple[int, int]
"""The rank of a schedule in a fixed order: that of its roles, and that of its tiles among theirs."""


def tilings(
    layout: Layout, roles: tuple[AxisRole, ...], backend: str, in_passes: bool = False
) -> Iterator[Tiles]:
    """The tilings that ``backend`` can address, the largest blocks first, but blocks beyond its limit of
    elements last. ``in_passes``: the stream is walked several times, or written to, in parts."""
    if layout.contraction is not None:
        # Groups around one contraction have few distinct layouts, so these are cached.
        yield from _matmul_tilings(layout.sizes, layout.contraction, roles, layout.blocks, backend)
        return
    options = _options(layout, roles, backend)
    if in_passes:
        stream = roles.index(AxisRole.STREAMED)
        options[stream] = tuple(t for t in backend_of(backend).pass_tiles if t < layout.sizes[stream])
    found = False
    can = backend_of(backend)
    most = (can.most_elements_in_passes if in_passes else None) or can.most_elements
    for tiles in _sorted(options, layout.sizes, layout.blocks, backend, most):
        found = True
        yield tiles
    if not found and can.gathers_blocks and not in_passes:
        yield from _scattered(options, layout)


@lru_cache(maxsize=256)
def _matmul_tilings(
    sizes: Tiles, dot: Contraction, roles: tuple[AxisRole, ...], blocks: Blocks, backend: str
) -> tuple[Tiles, ...]:
    options = _matmul_options(sizes, dot, roles, backend)
    return () if options is None else tuple(_sorted(options, sizes, blocks, backend))


def _sorted(
    options: list[tuple[int, ...]], sizes: Tiles, blocks: Blocks, backend: str, most: int | None = None
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


def _options(layout: Layout, roles: tuple[AxisRole, ...], backend: str) -> list[tuple[int, ...]]:
    can = backend_of(backend)
    contiguous = layout.contiguous_axes
    along_rows = can.contiguous_tiles if len(contiguous) == 1 else can.transpose_tiles
    others = _parallel_options(
        layout, [a for a, r in enumerate(roles) if r == AxisRole.PARALLEL and a not in contiguous], backend
    )
    options: list[tuple[int, ...]] = []
    for a, (size, role) in enumerate(zip(layout.sizes, roles, strict=True)):
        if role == AxisRole.RESIDENT:
            options.append((whole_tile(size, backend),))
        elif role == AxisRole.STREAMED:
            options.append(_up_to(size, can.stream_tiles, backend))
        elif a in contiguous:
            options.append(_up_to(size, along_rows, backend))
        else:
            options.append(others[a])
    return options


def _parallel_options(layout: Layout, axes: list[int], backend: str) -> dict[int, tuple[int, ...]]:
    """The tiles of parallel ``axes``, none of which is contiguous in the largest arrays. From the innermost
    axis outwards: an axis whose tiles would raise the number of combinations above ``MOST_ROW_TILINGS`` has
    tiles of one."""
    can = backend_of(backend)
    inner = _innermost(layout, axes)
    options: dict[int, tuple[int, ...]] = {}
    count = 1
    for a in (*inner, *[a for a in reversed(axes) if a not in inner]):
        size = layout.sizes[a]
        if a in inner:
            options[a] = _up_to(size, can.row_tiles, backend)
        elif size <= SHORT_AXIS:
            options[a] = tuple(dict.fromkeys((1, whole_tile(size, backend))))
        else:
            options[a] = _up_to(size, can.outer_tiles, backend)
        if count * len(options[a]) > MOST_ROW_TILINGS:
            options[a] = (1,)
        count *= len(options[a])
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


def least_contiguous_tile(may_stream: bool, backend: str) -> int:
    """The least tile of an axis of a kernel without contractions along which its largest arrays are
    contiguous, unless the axis is shorter; ``may_stream``: the axis may be streamed."""
    can = backend_of(backend)
    return can.stream_tiles[0] if may_stream else min(can.transpose_tiles[0], can.contiguous_tiles[0])


def least_stream_tile(backend: str) -> int:
    """The least tile of a streamed axis of a kernel without contractions, unless the axis is shorter."""
    return min(backend_of(backend).stream_tiles[0], backend_of(backend).pass_tiles[0])


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
    sizes, blocks = layout.sizes, layout.blocks
    return lambda tiles: _addressable(sizes, blocks, tiles, backend, lifts)


def _addressable(sizes: Tiles, blocks: Blocks, tiles: Tiles, backend: str, lifts: bool = False) -> bool:
    if not all(is_contiguous(sizes, tiles, dims) for dims in blocks.merged):
        return False
    if backend_of(backend).warpgroup_blocks:
        return is_addressable(sizes, tiles, blocks.every, blocks.depth)
    if not backend_of(backend).lane_tiles:
        return True
    if blocks.are_vectors and any(_is_copied(sizes, tiles, *axes) for axes in blocks.exchanged if axes):
        return False
    return all(_mosaic_block(sizes, axes, tiles, lifts) for axes in blocks.exchanged) and not any(
        sum(tiles[a] > 1 for a in dims) > 1 for dims in blocks.vectors
    )


def _is_copied(sizes: Tiles, tiles: Tiles, dims: tuple[int, ...]) -> bool:
    """Whether XLA copies a vector along the axes ``dims`` for a kernel that reads it block by block."""
    is_cut = any(tiles[a] != sizes[a] for a in dims)
    return is_cut and math.prod([sizes[a] for a in dims]) % VECTOR_TILE_ELEMENTS != 0


def _mosaic_block(sizes: Tiles, axes: DimMap, tiles: Tiles, lifts: bool) -> bool:
    # Not of a matrix: a block for each single row has more overhead than work.
    single = lifts and len(axes) > 2 and all(tiles[a] == 1 for dims in axes[:-1] for a in dims)
    quanta = (LANES,) if single else (LANES, SUBLANES)
    for dims, quantum in zip(reversed(axes), quanta, strict=False):
        block, extent = (math.prod([of[a] for a in dims]) for of in (tiles, sizes))
        if block != extent and block % quantum:
            return False
    return True
