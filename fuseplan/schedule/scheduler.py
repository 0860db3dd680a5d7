"""What a group costs as a kernel: that of the best of its schedules, or why it has none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property, lru_cache

from costmodel.axes import Conflict, GroupAxes, Unifier
from costmodel.device import DeviceSpec
from costmodel.floor import Floor, Floors
from costmodel.graph import Boundary, Graph, boundary
from costmodel.kernel import AxisRole, KernelSpec
from costmodel.onchip import footprint
from costmodel.roofline import Work, estimate, work_of
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.plan.options import ALL_FEATURES, Features
from fuseplan.schedule.enumerate import Schedules
from fuseplan.schedule.footprint import Capacity
from fuseplan.schedule.layout import SpecMaker, group_layout, whole_array_spec
from fuseplan.schedule.legality import refuse, refuse_exchange
from fuseplan.schedule.nests.accelerator import KernelNests
from fuseplan.schedule.nests.cpu import CpuNests
from fuseplan.schedule.nests.offered import Nests
from fuseplan.schedule.pricing import Pricing
from fuseplan.schedule.prologues import Gates, gated
from fuseplan.schedule.shared_operands import walked
from fuseplan.schedule.structure import Signatures
from fuseplan.schedule.tilings import Rank, Tiles, tilings
from fuseplan.support.errors import Verdict

_REMEMBERED = 1_000
"""Groups whose axes are kept: a search of a component comes back to them."""


def _make_nests(graph: Graph, device: DeviceSpec, lowered: Lowered | None) -> Nests:
    return (CpuNests if not device.capabilities.emits_kernels else KernelNests)(graph, device, lowered)


class Scheduler(Pricing):
    """Prices groups of one graph on one device: legality first, then the best schedule."""

    device: DeviceSpec

    def __init__(
        self,
        graph: Graph,
        device: DeviceSpec,
        lowered: Lowered | None = None,
        features: Features = ALL_FEATURES,
    ) -> None:
        self.graph = graph
        self.device = device
        self.absorbs_moves = not device.capabilities.emits_kernels  # XLA's own loops hold no tile on chip.
        self.features = features
        self._gated = gated(graph)
        self._nests = _make_nests(graph, device, lowered) if features.loop_nests else None
        self.capacity = Capacity(graph, device) if device.capabilities.emits_kernels else None
        # Whoever asks for a group asks again, for what else it may exchange and for its price.
        self.axes = lru_cache(_REMEMBERED)(Unifier(graph))
        self._schedules = Schedules(graph, device, features, self.capacity, self.axes)

    @cached_property
    def offers(self) -> tuple[tuple[int, ...], ...]:  # type: ignore[override]
        """Groups that may be tiled loops, beside those that ``compatible`` allows."""
        return () if self._nests is None else self._nests.offers

    @property
    def nested(self) -> dict[int, tuple[int, int]]:
        """Of the operations that an offered group holds, what part of their tiles it walks at least."""
        return {} if self._nests is None else self._nests.nested

    @cached_property
    def settled(self) -> frozenset[int]:  # type: ignore[override]
        """As ``Pricing.settled``."""
        return frozenset() if self._nests is None else self._nests.settled

    def unsettled(self) -> Scheduler:
        """The same, where constraints may forbid what is offered: all that the rules allow is asked for."""
        other = copy(self)
        other.settled = frozenset()
        return other

    @cached_property
    def _floor(self) -> Floor:
        return Floor(self.graph, self.device, self.nested)

    def walked(self, n: int) -> tuple[int, ...]:
        """The arrays that node ``n`` walks; none for XLA, whose own loops each make one array."""
        alone = not self.device.capabilities.emits_kernels or not self.features.siblings
        return () if alone else walked(self.graph, self.graph.nodes[n])

    def floor(self, nodes: tuple[int, ...]) -> int:
        """Picoseconds that no partition of ``nodes`` beats: 0 where masked tiles may be skipped,
        so that not every operation runs."""
        if self._nests is not None and self._nests.skips(nodes):
            return 0
        return self._floor(nodes)

    def least(self, nodes: tuple[int, ...]) -> int:
        """Picoseconds that ``nodes`` take at least as one kernel."""
        if self._nests is not None and self._nests.skips(nodes):
            return 0
        return self._floor.one_kernel(nodes)

    def floor_bytes(self, nodes: tuple[int, ...]) -> int:
        """HBM bytes that a kernel of ``nodes`` moves at least."""
        if self._nests is not None and self._nests.skips(nodes):
            return 0
        return self._floor.parts(nodes, together=True)[1]

    def floors(self, members: Sequence[tuple[int, ...]]) -> Floors | None:
        """``least`` and ``floor_bytes`` of many groups of ``members``; not where tiles may be skipped."""
        nodes = tuple(sorted(n for several in members for n in several))
        skips = self._nests is not None and self._nests.skips(nodes)
        return None if skips else Floors(self._floor, members)

    def compatible(self, nodes: tuple[int, ...], is_gated: Gates | None = None) -> Verdict | None:
        """Why ``nodes`` (ascending ids) can never share a kernel, or None."""
        settled = next((n for n in nodes if n in self.settled), None)
        if settled is not None and len(nodes) > 1:
            reason = f"{self.graph.nodes[settled].op} belongs to loops that are faster than all others"
            return Verdict("nest", reason, (settled,))
        gates = self._gated if is_gated is None else is_gated
        return refuse(self.graph, self.device.backend, nodes, self.axes, gates, self.features)

    def oversized(self, nodes: tuple[int, ...], crossing: frozenset[int]) -> Verdict | None:
        """Why neither ``nodes`` nor a larger group can fit on chip, or None."""
        if self.capacity is None:
            return None
        axes = self.axes(nodes)
        return None if isinstance(axes, Conflict) else self.capacity.refuse(nodes, axes, crossing)

    def price(self, nodes: tuple[int, ...]) -> Kernel | Verdict:
        """The fastest kernel for ``nodes`` (ascending ids), or why there is none.

        A single node is always possible: it is left to XLA, and so is one with bitcasts
        around it, and what computes nothing because an array is empty. Ties are broken by
        memory traffic, then by on-chip bytes, then by the order of enumeration; of those that take no
        longer than any kernel must, the first is taken.
        """
        edge = boundary(self.graph, nodes)
        return self.schedule(nodes, edge, self._gated, self._floor.one_kernel(nodes) if len(nodes) > 1 else 0)

    def schedule(
        self, nodes: tuple[int, ...], edge: Boundary, is_gated: Gates, floor_ps: int
    ) -> Kernel | Verdict:
        """As ``price``, for a group that exchanges ``edge`` and cannot be faster than ``floor_ps``."""
        if len(nodes) == 1:
            return self._left_to_xla(nodes, edge)
        if len(edge.writes) > 1 and not self.features.several_results:
            return Verdict("backend", f"its kernel would write {len(edge.writes)} arrays", nodes)
        refused = self.compatible(nodes, is_gated) or self._exchange(nodes, edge)
        if refused is not None:
            nests = self._nests
            return (nests.best(nodes) if nests is not None and nests.may_be(nodes) else None) or refused
        axes = self.axes(nodes)
        empty = isinstance(axes, GroupAxes) and 0 in axes.sizes
        if empty or sum(not self.graph.nodes[n].bitcast for n in nodes) < 2:
            return self._left_to_xla(nodes, edge)
        best: Kernel | None = None
        best_key: tuple[int, int, int, Rank] | None = None
        tried: list[Tiles] = []
        numbered: object = None
        work = Work((), ())

        def is_wanted(least_ps: float, rank: Rank) -> bool:
            if best_key is None:
                return True
            # Of those that nothing beats, the first.
            return least_ps <= best_key[0] and (best_key[0] > floor_ps or rank < best_key[3])

        for rank, spec, need in self._schedules.fitting(nodes, edge, tried, is_wanted):
            if spec.node_axes is not numbered:  # Schedules of the same roles share it.
                numbered, work = spec.node_axes, work_of(self.graph, spec)
            cost = estimate(self.graph, spec, self.device, need, work)
            key = (cost.time_ps, cost.hbm_bytes, cost.onchip_bytes, rank)
            if cost.time_ps <= floor_ps:
                key = (cost.time_ps, 0, 0, rank)
            if best_key is None or key < best_key:
                best, best_key = Kernel(spec, cost), key
            if cost.time_ps <= floor_ps and not work.products:
                break  # They come in order of rank.
        return best or self._without_schedule(nodes, edge, bool(tried))

    def in_one_tile(self, nodes: tuple[int, ...]) -> Kernel | Verdict:
        """The kernel of ``nodes`` that has all of every axis on one core, or why there is none."""
        edge = boundary(self.graph, nodes)
        if len(edge.writes) > 1 and not self.features.several_results:
            return Verdict("backend", f"its kernel would write {len(edge.writes)} arrays", nodes)
        refused = self.compatible(nodes) or self._exchange(nodes, edge)
        if refused is not None:
            return refused
        axes = self.axes(nodes)
        assert isinstance(axes, GroupAxes), "what has no common axes is refused"
        layout = group_layout(self.graph, nodes, axes, edge)
        roles = (AxisRole.RESIDENT,) * len(axes.sizes)
        make_spec = SpecMaker(nodes, axes, layout, roles, self.device.backend)
        for tiles in tilings(layout, roles, self.device.backend):
            spec = make_spec(tiles)
            need = footprint(self.graph, spec, self.device)
            if need.fits(self.device):
                return Kernel(spec, estimate(self.graph, spec, self.device, need))
        return Verdict("on-chip", "one core has no room for all of its arrays", nodes)

    def schedules(self, nodes: tuple[int, ...]) -> Iterator[KernelSpec]:
        """The schedules of the group that are priced, in a fixed order."""
        return (spec for _, spec, _ in self._schedules.fitting(nodes, boundary(self.graph, nodes), []))

    def _exchange(self, nodes: tuple[int, ...], edge: Boundary) -> Verdict | None:
        return refuse_exchange(self.graph, self.device.backend, nodes, (*edge.reads, *edge.writes))

    def renames(self, n: int) -> bool:
        """Whether node ``n`` changes nothing about a kernel that contains its neighbours: a
        bitcast that only adds or drops dimensions of size one. Mosaic lays out the last two
        dimensions, so there it does change something."""
        node = self.graph.nodes[n]
        if not node.bitcast or not self.device.capabilities.ignores_unit_dims:
            return False
        source, result = (
            [d for d in self.graph.values[v].shape if d != 1] for v in node.inputs + node.outputs
        )
        return source == result

    def imprint(self, nodes: tuple[int, ...], signatures: Signatures) -> str | None:
        """As ``Pricing.imprint``: the device, and ``nodes`` with all that their masks come from."""
        if signatures.graph is not self.graph:
            signatures = self._signatures
        masks = self.behind_masks(nodes, signatures)
        if masks is None or not signatures.are_told(nodes):
            return None
        return "\n".join([self.settings, signatures.text(nodes), *masks])

    def behind_masks(self, nodes: tuple[int, ...], signatures: Signatures | None = None) -> list[str] | None:
        """What masks inside of ``nodes`` are computed by, beside them, in words; None if no words mean
        that in every process."""
        makers = () if self._nests is None else self._nests.mask_makers(nodes)
        if not makers:
            return []
        every = tuple(sorted({*makers, *nodes}))
        signatures = signatures or self._signatures
        if not signatures.are_told(every):
            return None
        return [repr([every.index(n) for n in makers]), signatures.text(every)]

    @cached_property
    def settings(self) -> str:
        """All but the graph that answers follow from, in words."""
        masked = self._nests is not None and self._nests.lowered is not None
        # Another kind of scheduler may answer otherwise.
        return repr((type(self).__module__, type(self).__qualname__, self.device, self.features, masked))

    @cached_property
    def _signatures(self) -> Signatures:
        return Signatures(self.graph)

    def _left_to_xla(self, nodes: tuple[int, ...], edge: Boundary) -> Kernel:
        spec = whole_array_spec(self.graph, nodes, edge)
        return Kernel(spec, estimate(self.graph, spec, self.device))

    def _without_schedule(self, nodes: tuple[int, ...], edge: Boundary, addressable: bool) -> Verdict:
        device = self.device
        # As if the group were never to grow: that says more than that nothing was found.
        refused = self.oversized(nodes, frozenset(edge.reads + edge.writes))
        if refused is not None:
            return refused
        names = " and ".join(dict.fromkeys(self.graph.nodes[n].op for n in (nodes[0], nodes[-1])))
        if addressable:
            reason = f"no tile of {names} fits on chip ({device.onchip_bytes:,} bytes a core)"
            return Verdict("on-chip", reason, nodes)
        return Verdict("backend", f"{device.backend} cannot address a common block of {names}", nodes)
