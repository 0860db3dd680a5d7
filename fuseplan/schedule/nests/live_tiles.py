"""Walks: which tiles of the stream each pass of a nest visits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

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
