"""Schedule: a group of nodes becomes kernels to choose from, each with its tiles.

Every axis of a group is *parallel* (a grid axis), *streamed* (an inner loop with carried
accumulators) or *resident* (whole in the block); how large its tile is follows from what
the backend can address and what fits on chip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache

from costmodel.axes import Conflict, GroupAxes, Unifier
from costmodel.device import DeviceSpec
from costmodel.floor import Floor
from costmodel.graph import Graph
from costmodel.kernel import AxisRole, Cost, KernelSpec
from costmodel.memory import Footprint, Occupancy, footprint
from costmodel.roofline import Work, estimate, work_of
from fuseplan.errors import Verdict
from fuseplan.features import ALL_FEATURES, Features
from fuseplan.layout import Boundary, Layout, axis_roles, boundary, group_layout, roles_in_passes
from fuseplan.legality import refuse
from fuseplan.loops.nest import passes_of
from fuseplan.loops.nests import Nests
from fuseplan.lower import Lowered
from fuseplan.plan import Kernel
from fuseplan.prologues import gated
from fuseplan.residency import Residency
from fuseplan.signature import Signatures
from fuseplan.spec import SpecMaker, whole_array_spec
from fuseplan.tiles import Deeper, Tiles, largest_block, tilings

# At most so many tilings of a group without a contraction are priced, the largest that fit
# first: larger blocks never read more (test_schedule.py::test_more_tilings_gain_nothing).
_PRICED = 4


_REMEMBERED = 1_000
"""Groups whose axes are kept: a search of a component comes back to them."""


class Scheduler:
    """Prices groups of one graph on one device: legality first, then the best schedule."""

    def __init__(
        self,
        graph: Graph,
        device: DeviceSpec,
        lowered: Lowered | None = None,
        features: Features = ALL_FEATURES,
    ) -> None:
        self.graph = graph
        self.device = device
        self.features = features
        self._gated = gated(graph)
        self._floor = Floor(graph, device)
        nests = features.loop_nests and device.backend == "xla"
        self._nests = Nests(graph, device, lowered) if nests else None
        self.residency = None if device.backend == "xla" else Residency(graph, device)
        # Whoever asks for a group asks again, for what else it may exchange and for its price.
        self._axes = lru_cache(_REMEMBERED)(Unifier(graph))

    @property
    def offers(self) -> tuple[tuple[int, ...], ...]:
        """Groups that may be tiled loops, beside those that ``compatible`` allows."""
        return () if self._nests is None else self._nests.offers

    @property
    def fuses_siblings(self) -> bool:
        """XLA's own loops each make one array."""
        return self.features.siblings and self.device.backend != "xla"

    @property
    def absorbs_moves(self) -> bool:
        """XLA's own loops hold no tile on chip."""
        return self.device.backend == "xla"

    def floor(self, nodes: tuple[int, ...]) -> int:
        """Picoseconds that no partition of ``nodes`` beats: 0 where masked tiles may be skipped,
        so that not every operation runs."""
        if self._nests is not None and self._nests.skips(nodes):
            return 0
        return self._floor(nodes)

    def floor_bytes(self, nodes: tuple[int, ...]) -> int:
        """HBM bytes that a kernel of ``nodes`` moves at least."""
        if self._nests is not None and self._nests.skips(nodes):
            return 0
        return self._floor.parts(nodes)[1]

    def compatible(self, nodes: tuple[int, ...]) -> Verdict | None:
        """Why ``nodes`` (ascending ids) can never share a kernel, or None."""
        return refuse(self.graph, self.device.backend, nodes, self._axes, self._gated, self.features)

    def oversized(self, nodes: tuple[int, ...], crossing: frozenset[int]) -> Verdict | None:
        """Why neither ``nodes`` nor a larger group can fit on chip, or None."""
        if self.residency is None or self.residency.is_roomy(nodes, crossing):
            return None
        axes = self._axes(nodes)
        return None if isinstance(axes, Conflict) else self.residency.refuse(nodes, axes, crossing)

    def price(self, nodes: tuple[int, ...]) -> Kernel | Verdict:
        """The fastest kernel for ``nodes`` (ascending ids), or why there is none.

        A single node is always possible: it is left to XLA, and so is one with bitcasts
        around it, and what computes nothing because an array is empty. Ties are broken by
        memory traffic, then by on-chip bytes, then by the order of enumeration.
        """
        if len(nodes) == 1:
            return self._left_to_xla(nodes)
        edge = boundary(self.graph, nodes)
        if len(edge.writes) > 1 and not self.features.several_results:
            return Verdict("backend", f"its kernel would write {len(edge.writes)} arrays", nodes)
        # As if the group were never to grow: most that do not fit are found here, early.
        refused = self.compatible(nodes) or self.oversized(nodes, frozenset(edge.reads + edge.writes))
        if refused is not None:
            nest = None if self._nests is None else self._nests.best(nodes)
            return nest or refused
        axes = self._axes(nodes)
        empty = isinstance(axes, GroupAxes) and 0 in axes.sizes
        if empty or sum(not self.graph.nodes[n].bitcast for n in nodes) < 2:
            return self._left_to_xla(nodes)
        floor_ps = self._floor(nodes)
        best: Kernel | None = None
        best_key: tuple[int, int, int] | None = None
        tried: list[Tiles] = []

        numbered: object = None
        work = Work((), ())

        def cost_of(spec: KernelSpec, need: Footprint) -> Cost:
            nonlocal numbered, work
            if spec.node_axes is not numbered:  # Schedules of the same roles share it.
                numbered, work = spec.node_axes, work_of(self.graph, spec)
            return estimate(self.graph, spec, self.device, need, work)

        def hopeless(spec: KernelSpec) -> bool:
            # What a tile needs on chip only ever costs time: without it nothing is overestimated.
            return best_key is not None and best_key[0] < cost_of(spec, Footprint(0)).time_ps

        for spec, need in self._fitting(nodes, edge, tried, hopeless):
            cost = cost_of(spec, need)
            key = (cost.time_ps, cost.hbm_bytes, cost.onchip_bytes)
            if best_key is None or key < best_key:
                best, best_key = Kernel(spec, cost), key
            if cost.time_ps <= floor_ps:
                break
        return best or self._without_schedule(nodes, bool(tried))

    def renames(self, n: int) -> bool:
        """Whether node ``n`` changes nothing about a kernel that contains its neighbours: a
        bitcast that only adds or drops dimensions of size one. Mosaic lays out the last two
        dimensions, so there it does change something."""
        node = self.graph.nodes[n]
        if not node.bitcast or self.device.backend != "triton":
            return False
        source, result = (
            [d for d in self.graph.values[v].shape if d != 1] for v in node.inputs + node.outputs
        )
        return source == result

    def imprint(self, nodes: tuple[int, ...], signatures: Signatures) -> str:
        """As ``Pricing.imprint``: the device, and ``nodes`` with all that their masks come from."""
        if signatures.graph is not self.graph:
            signatures = self._signatures
        words = [self._settings, signatures.text(nodes)]
        if self._nests is not None and (makers := self._nests.mask_makers(nodes)):
            every = tuple(sorted({*makers, *nodes}))
            words += [repr([every.index(n) for n in makers]), signatures.text(every)]
        return "\n".join(words)

    @cached_property
    def _settings(self) -> str:
        masked = self._nests is not None and self._nests.lowered is not None
        # Another kind of scheduler may answer otherwise.
        return repr((type(self).__module__, type(self).__qualname__, self.device, self.features, masked))

    @cached_property
    def _signatures(self) -> Signatures:
        return Signatures(self.graph)

    def _left_to_xla(self, nodes: tuple[int, ...]) -> Kernel:
        spec = whole_array_spec(self.graph, nodes)
        return Kernel(spec, estimate(self.graph, spec, self.device))

    def _without_schedule(self, nodes: tuple[int, ...], addressable: bool) -> Verdict:
        device = self.device
        names = " and ".join(dict.fromkeys(self.graph.nodes[n].op for n in (nodes[0], nodes[-1])))
        if addressable:
            reason = f"no tile of {names} fits on chip ({device.onchip_bytes:,} bytes a core)"
            return Verdict("on-chip", reason, nodes)
        return Verdict("backend", f"{device.backend} cannot address a common block of {names}", nodes)

    def schedules(self, nodes: tuple[int, ...]) -> Iterator[KernelSpec]:
        """The schedules of the group that are priced, in a fixed order."""
        return (spec for spec, _ in self._fitting(nodes, boundary(self.graph, nodes), []))

    def _fitting(
        self,
        nodes: tuple[int, ...],
        edge: Boundary,
        tried: list[Tiles],
        hopeless: Callable[[KernelSpec], bool] = lambda spec: False,
    ) -> Iterator[tuple[KernelSpec, Footprint]]:
        """Schedules that fit and, of a contraction's many, are not ``hopeless``, with what they
        need; ``tried`` receives every tiling looked at."""
        device = self.device
        if device.backend == "xla":
            spec = whole_array_spec(self.graph, nodes)
            yield spec, footprint(self.graph, spec, device)
            return
        axes = self._axes(nodes)
        if isinstance(axes, Conflict):
            return
        layout = group_layout(self.graph, nodes, axes, edge)
        limit_bytes = device.block_limit_bytes
        block_bytes = largest_block(layout)
        priced = _PRICED if self.features.choice_of_tile else 1
        for roles, in_passes in self._ways(nodes, axes, layout):
            make_spec = SpecMaker(nodes, axes, layout, roles, device.backend)
            if in_passes:
                make_spec.passes = passes_of(self.graph, make_spec(axes.sizes))
            occupancy: Occupancy | None = None
            found = 0
            deeper = Deeper(layout, roles)
            for tiles in tilings(layout, roles, device.backend, in_passes):
                tried.append(tiles)
                if block_bytes(tiles) > limit_bytes:
                    continue
                if device.sequential_grid and deeper.is_known(tiles):
                    continue
                spec = make_spec(tiles)
                if layout.contraction is not None and hopeless(spec):
                    deeper.add(tiles)
                    continue
                occupancy = occupancy or Occupancy(self.graph, spec, device)
                need = occupancy(spec.axes)
                if need.fits(device):
                    yield spec, need
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
        if streaming and (on_the_way or (self.residency is not None and self.residency.may_walk(nodes))):
            for walked in roles_in_passes(self.graph, nodes, axes, layout):
                yield walked, True
