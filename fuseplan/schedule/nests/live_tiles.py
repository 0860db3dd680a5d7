"""For each pass of a nest, the tiles to visit when those that a mask makes dead are skipped.

A tiled loop of a CPU visits the live tiles alone, in ascending order (``skips_of``). A kernel of a GPU or a
TPU visits one interval of tiles at each position of the grid, from the first live tile to the last
(``ranges_of``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from costmodel.kernel import KernelSpec, tile_count, visits_of_passes
from fuseplan.frontend.lower import Lowered
from fuseplan.masks.dead_tiles import Skips, find_skips
from fuseplan.masks.index_ranges import IndexArithmetic
from fuseplan.schedule.nests.multipass import Program


def skips_of(
    lowered: Lowered, spec: KernelSpec, program: Program, index: IndexArithmetic | None = None
) -> list[Skips | None]:
    """For each pass, the tiles that a mask excludes. Passes that store products and those that load them
    again visit the same tiles."""
    stream = program.stream
    if stream is None or spec.axes[stream].n_tiles == 1:
        return [None] * len(program.passes)
    skips = []
    for p in program.passes:
        # Masks apply to the products that are loaded as well.
        nodes = [spec.nodes[i] for i in sorted((*p.loop, *p.recalled))]
        skips.append(find_skips(lowered, spec, stream, nodes, index))
    if not any(p.kept for p in program.passes):
        return skips
    linked = [k for k, p in enumerate(program.passes) if p.kept or p.recalled]
    common = reduce(_both, (skips[k] for k in linked))
    return [common if k in linked else s for k, s in enumerate(skips)]


def tiles_visited(
    lowered: Lowered, spec: KernelSpec, program: Program, index: IndexArithmetic | None = None
) -> tuple[int, ...]:
    """For each pass of a tiled loop, how many tiles it visits if the data allow all skips."""
    counts = []
    for skips, every in zip(skips_of(lowered, spec, program, index), visits_of_passes(spec), strict=True):
        part = 1.0 if skips is None else float(skips.live.mean())
        counts.append(max(round(every * part), 1))
    return tuple(counts)


def _both(one: Skips | None, other: Skips | None) -> Skips | None:
    """The tiles that both of two passes may skip; None if their masks depend on different axes."""
    if one is None or other is None or one.axes != other.axes:
        return None

    def safe(arrays: Mapping[int, Any]) -> Any:
        return one.safe(arrays) & other.safe(arrays)

    return replace(one, live=one.live | other.live, safe=safe)


@dataclass(frozen=True, slots=True)
class TileRange:
    """The interval of tiles that one pass visits, by position in the grid."""

    axes: tuple[int, ...]
    """The grid axes that ``tiles`` depends on, its first dimensions."""
    tiles: np.ndarray
    """int32, of shape (tiles of each of ``axes``, 2): the first tile visited, and the number of tiles."""
    skips: Skips
    n_tiles: int

    @property
    def every(self) -> np.ndarray:
        """As ``tiles``, with the full interval everywhere."""
        return np.broadcast_to(np.array([0, self.n_tiles], np.int32), self.tiles.shape)

    def index(self, spec: KernelSpec, position: Any) -> Any:
        """The offset in the table of the interval at a position of the grid."""
        row: Any = 0
        for a in self.axes:
            row = row * spec.axes[a].n_tiles + position[a]
        return row * 2


def ranges_of(
    lowered: Lowered, spec: KernelSpec, program: Program, index: IndexArithmetic | None = None
) -> list[TileRange | None]:
    """For each pass, the interval of tiles that it visits; None if that is all of them."""
    if spec.streamed is None:
        return [None] * len(program.passes)
    n_tiles = spec.axes[spec.streamed].n_tiles
    every = skips_of(lowered, spec, program, index)
    return [None if skips is None else _range(skips, n_tiles) for skips in every]


def _range(skips: Skips, n_tiles: int) -> TileRange | None:
    live = skips.live
    first = live.argmax(axis=-1)
    last = n_tiles - 1 - live[..., ::-1].argmax(axis=-1)
    count = np.where(live.any(axis=-1), last - first + 1, 0)
    if (count == n_tiles).all():
        return None
    return TileRange(skips.axes[:-1], np.stack([first, count], axis=-1).astype(np.int32), skips, n_tiles)


def tiles_visited_in_ranges(
    lowered: Lowered, spec: KernelSpec, program: Program, index: IndexArithmetic | None = None
) -> tuple[int, ...]:
    """For each pass of a kernel, how many tiles it visits if the data allow all skips; empty if all."""
    ranges = ranges_of(lowered, spec, program, index)
    if all(r is None for r in ranges):
        return ()
    every = tile_count(spec)
    shares = (1.0 if r is None else float(r.tiles[..., 1].mean()) / r.n_tiles for r in ranges)
    return tuple(max(round(every * share), 1) for share in shares)
