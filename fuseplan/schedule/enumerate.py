"""The schedules of a group that fit on chip: roles of its axes, and tiles, in a fixed order.

Every axis of a group is *parallel* (a grid axis), *streamed* (an inner loop with carried
accumulators) or *resident* (whole in the block); how large its tile is follows from what
the backend can address and what fits on chip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from costmodel.axes import Conflict, GroupAxes
from costmodel.device import DeviceSpec
from costmodel.graph import Boundary, Graph
from costmodel.kernel import AxisRole, KernelSpec
from costmodel.onchip import Footprint, KernelFootprint, footprint
from fuseplan.plan.options import Features
from fuseplan.schedule.footprint import Capacity
from fuseplan.schedule.layout import (
    Layout,
    SpecMaker,
    axis_roles,
    group_layout,
    roles_in_passes,
    whole_array_spec,
)
from fuseplan.schedule.nests.cpu import passes_of
from fuseplan.schedule.tilings import DepthDominance, Rank, Tiles, largest_block, most_promising, tilings

_PRICED = 4
"""At most so many tilings of a group without a contraction are priced, the largest that fit
first: larger blocks never read more (test_schedule.py::test_more_tilings_gain_nothing)."""


@dataclass(frozen=True, slots=True)
class Schedules:
    """The schedules of groups of one graph on one device; ``axes`` tells those of a group,
    ``capacity`` what cannot fit, None where XLA's own kernels are all there is."""

    graph: Graph
    device: DeviceSpec
    features: Features
    capacity: Capacity | None
    axes: Callable[[tuple[int, ...]], GroupAxes | Conflict]

    def fitting(
        self,
        nodes: tuple[int, ...],
        edge: Boundary,
        tried: list[Tiles],
        is_wanted: Callable[[float, Rank], bool] | None = None,
    ) -> Iterator[tuple[Rank, KernelSpec, Footprint]]:
        """Schedules that fit, each with its rank in a fixed order and what it needs; with
        ``is_wanted(picoseconds, rank)``, only those of which it holds, a contraction's most
        promising first. ``tried`` receives every tiling looked at."""
        device = self.device
        if not device.capabilities.emits_kernels:
            spec = whole_array_spec(self.graph, nodes, edge)
            yield (0, 0), spec, footprint(self.graph, spec, device)
            return
        axes = self.axes(nodes)
        if isinstance(axes, Conflict):
            return
        layout = group_layout(self.graph, nodes, axes, edge)
        limit_bytes = device.block_limit_bytes
        block_bytes = largest_block(layout)
        priced = _PRICED if self.features.choice_of_tile else 1
        for place, (roles, in_passes) in enumerate(self._ways(nodes, axes, layout)):
            make_spec = SpecMaker(nodes, axes, layout, roles, device.backend)
            if in_passes:
                passes = passes_of(self.graph, make_spec(axes.sizes))
                if passes is None:
                    continue
                make_spec.passes = passes
            of_tiles: KernelFootprint | None = None
            found = 0
            deeper = DepthDominance(layout, roles)
            every = enumerate(tilings(layout, roles, device.backend, in_passes))
            ranked: Iterator[tuple[Rank, Tiles]] = (((place, k), tiles) for k, tiles in every)
            if layout.contraction is not None and is_wanted is not None and priced > 1:
                kernel = (self.graph, device, nodes, axes, layout, roles)
                ranked = most_promising(*kernel, list(ranked), is_wanted)
            for rank, tiles in ranked:
                tried.append(tiles)
                if block_bytes(tiles) > limit_bytes:
                    continue
                if device.sequential_grid and deeper.is_dominated(tiles):
                    continue
                spec = make_spec(tiles)
                of_tiles = of_tiles or KernelFootprint(self.graph, spec, device.sequential_grid)
                need = of_tiles(spec.axes)
                if need.fits(device):
                    yield rank, spec, need
                    deeper.add(tiles)
                    found += 1
                    if found == priced and (layout.contraction is None or priced == 1):
                        break

    def _ways(
        self, nodes: tuple[int, ...], axes: GroupAxes, layout: Layout
    ) -> Iterator[tuple[tuple[AxisRole, ...], bool]]:
        """The roles that the group's axes may have, and whether its stream is walked in passes."""
        streaming = self.features.streaming or layout.contraction is not None
        for roles in axis_roles(self.graph, nodes, axes, layout):
            if streaming or AxisRole.STREAMED not in roles:
                yield roles, False
        # Last: most groups that fit with all of the axis reach their floor so.
        on_the_way = self.device.sequential_grid
        if streaming and (on_the_way or (self.capacity is not None and self.capacity.may_stream(nodes))):
            for walked in roles_in_passes(self.graph, nodes, axes, layout):
                yield walked, True
