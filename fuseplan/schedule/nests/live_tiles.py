"""Walks: which tiles of the stream each pass of a nest visits.

Ranges: which tiles of its stream each pass of a GPU's or a TPU's kernel walks.

Where a mask leaves nothing of the first tiles or of the last, they are not walked: at each place of the
grid a pass walks from the first tile that counts to the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np

from costmodel.kernel import KernelSpec
from costmodel.loops import tiles_walked
from fuseplan.frontend.lower import Lowered
from fuseplan.masks.dead_tiles import Skips, find_skips
from fuseplan.masks.index_ranges import IndexArithmetic
from fuseplan.schedule.nests.multipass import Program


def skips_of(
    lowered: Lowered, spec: KernelSpec, program: Program, index: IndexArithmetic | None = None
) -> list[Skips | None]:
    """For each pass, the tiles that a mask leaves out. Passes of which one recalls what
    another has kept visit the same tiles."""
    stream = program.stream
    if stream is None or spec.axes[stream].n_tiles == 1:
        return [None] * len(program.passes)
    skips = []
    for p in program.passes:
        # What is recalled is part of the pass as far as masks go.
        nodes = [spec.nodes[i] for i in sorted((*p.loop, *p.recalled))]
        skips.append(find_skips(lowered, spec, stream, nodes, index))
    if not any(p.kept for p in program.passes):
        return skips
    linked = [k for k, p in enumerate(program.passes) if p.kept or p.recalled]
    common = reduce(_both, (skips[k] for k in linked))
    return [common if k in linked else s for k, s in enumerate(skips)]


def walked(
    lowered: Lowered, spec: KernelSpec, program: Program, index: IndexArithmetic | None = None
) -> tuple[int, ...]:
    """For each pass, how many tiles it visits where nothing in the data forbids to skip."""
    counts = []
    for skips, every in zip(skips_of(lowered, spec, program, index), tiles_walked(spec), strict=True):
        part = 1.0 if skips is None else float(skips.live.mean())
        counts.append(max(round(every * part), 1))
    return tuple(counts)


def _both(one: Skips | None, other: Skips | None) -> Skips | None:
    """Tiles that neither of two passes needs; None if that cannot be told."""
    if one is None or other is None or one.axes != other.axes:
        return None

    def safe(arrays: Mapping[int, Any]) -> Any:
        return one.safe(arrays) & other.safe(arrays)

    return replace(one, live=one.live | other.live, safe=safe)


@dataclass(frozen=True, slots=True)
class Range:
    """The tiles that one pass walks."""

    axes: tuple[int, ...]
    """The grid axes that ``tiles`` depends on."""
    tiles: np.ndarray
    """int32, as many tiles as each of ``axes`` has, and two: the first one walked, and how many."""
    skips: Skips
    n_tiles: int

    def table(self, arrays: Mapping[int, Any]) -> Any:
        """``tiles``, in one row, or all of them where leaving some out could change the result;
        ``arrays`` are those that the kernel reads, by value."""
        every = np.broadcast_to(np.array([0, self.n_tiles], np.int32), self.tiles.shape)
        return jnp.where(self.skips.safe(arrays), self.tiles, every).reshape(-1)

    def index(self, spec: KernelSpec, position: Any) -> Any:
        """Where in the table the range stands at a position of the grid."""
        row: Any = 0
        for a in self.axes:
            row = row * spec.axes[a].n_tiles + position[a]
        return row * 2


def ranges_of(
    lowered: Lowered, spec: KernelSpec, program: Program, index: IndexArithmetic | None = None
) -> list[Range | None]:
    """For each pass, the tiles that it walks; None if all of them."""
    if spec.streamed is None:
        return [None] * len(program.passes)
    n_tiles = spec.axes[spec.streamed].n_tiles
    every = skips_of(lowered, spec, program, index)
    return [None if skips is None else _range(skips, n_tiles) for skips in every]


def _range(skips: Skips, n_tiles: int) -> Range | None:
    live = skips.live
    first = live.argmax(axis=-1)
    last = n_tiles - 1 - live[..., ::-1].argmax(axis=-1)
    count = np.where(live.any(axis=-1), last - first + 1, 0)
    if (count == n_tiles).all():
        return None
    return Range(skips.axes[:-1], np.stack([first, count], axis=-1).astype(np.int32), skips, n_tiles)


def walked_in_ranges(
    lowered: Lowered, spec: KernelSpec, program: Program, index: IndexArithmetic | None = None
) -> tuple[int, ...]:
    """For each pass, how many tiles it walks where nothing in the data forbids to leave some out;
    empty if all."""
    ranges = ranges_of(lowered, spec, program, index)
    if all(r is None for r in ranges):
        return ()
    every = int(np.prod([axis.n_tiles for axis in spec.axes], dtype=np.int64))
    shares = (1.0 if r is None else float(r.tiles[..., 1].mean()) / r.n_tiles for r in ranges)
    return tuple(max(round(every * share), 1) for share in shares)
