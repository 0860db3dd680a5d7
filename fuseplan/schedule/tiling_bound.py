"""For all tilings of a contraction at once, a time that no kernel with these tiles beats.

A group around a contraction has dozens of tilings, and pricing one takes as long as this takes
for all. Counted is what weighs most in a matmul, by the laws of ``costmodel.roofline`` and
``costmodel.traffic``: what is read, and the matrix units' work, padding and idle cores included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import numpy as np
import numpy.typing as npt

from costmodel.axes import GroupAxes, NodeAxes
from costmodel.device import DeviceSpec
from costmodel.graph import Graph, Node
from costmodel.kernel import AxisRole
from fuseplan.schedule.layout import Layout
from fuseplan.schedule.tilings import Tiles

_ROUNDING = 1e-9
"""Relative error allowed for: the laws are of integers, this is floating point."""

Times = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


Rank = tuple[int, int]
"""The place of a schedule in a fixed order: of its roles, and of its tiles among theirs."""


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
    """Tilings of a contraction, the most promising first, while they are wanted: asked is with
    the picoseconds that each takes at least."""
    if ranked:
        members = (graph.nodes[n] for n in nodes)
        anchor = next(m for m in zip(members, axes.node_axes, strict=True) if m[0].flops.matrix)
        tilings = np.array([tiles for _, tiles in ranked], dtype=np.int64)
        least_ps = least_times(graph, device, layout, roles, anchor, tilings)
        for k in np.argsort(least_ps, kind="stable").tolist():
            if is_wanted(least_ps[k], ranked[k][0]):
                yield ranked[k]


def least_times(
    graph: Graph,
    device: DeviceSpec,
    layout: Layout,
    roles: tuple[AxisRole, ...],
    anchor: tuple[Node, NodeAxes],
    tilings: Counts,
) -> Times:
    """Picoseconds for each row of ``tilings``, a tile for each axis; ``anchor`` is the
    contraction, with its axes."""
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
    """Flops of the matrix units: over padded extents, and again for every tile along other axes."""
    carried = [a for axes in own for a in axes]
    others = [a for a in parallel if a not in carried]
    padded = n_tiles[:, carried] * tilings[:, carried]
    repeats = padded.prod(axis=1) * (n_tiles[:, others].prod(axis=1) / prod(sizes[carried].tolist()))
    return node.flops.matrix * repeats


def _fetches(n_tiles: Counts, grid: list[int], indexed: frozenset[int]) -> Counts:
    """How often a sequential grid fetches what ``indexed`` axes index (``costmodel.traffic``)."""
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
