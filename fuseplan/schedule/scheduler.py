"""Price a group of operations: find its fastest legal schedule, or the reason why it has none.

A schedule gives each axis of the group a role and a tile: *parallel* (an axis of the grid), *streamed* (an
inner loop with carried accumulators) or *resident* (whole in the block). The backend limits the tiles, and a
tile must fit on chip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from functools import cached_property, lru_cache

import numpy as np

from costmodel.axes import Conflict, GroupAxes, Unifier
from costmodel.device import DeviceSpec
from costmodel.floor import Floor, floor_of
from costmodel.graph import Boundary, Graph, boundary
from costmodel.kernel import AxisRole, KernelSpec
from costmodel.model import has_partial_bounds, plain_device
from costmodel.onchip import KernelFootprint, largest_block
from costmodel.partial_floor import PartialFloor
from costmodel.roofline import Work, estimate, work_of
from costmodel.temporaries import are_new_pages
from costmodel.tiling_costs import tiling_costs
from costmodel.xla_loops import is_one_loop
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.plan.options import ALL_FEATURES, Features
from fuseplan.schedule.footprint import Capacity
from fuseplan.schedule.layout import (
    Layout,
    SpecMaker,
    axis_roles,
    group_layout,
    has_free_axis,
    whole_array_spec,
)
from fuseplan.schedule.least_tiles import LeastTiles
from fuseplan.schedule.legality import (
    Prologues,
    changes_rows,
    possible_prologues,
    refuse,
    refuse_call,
    refuse_exchange,
    refuse_results,
)
from fuseplan.schedule.nests.accelerator import KernelNests
from fuseplan.schedule.nests.cpu import CpuNests
from fuseplan.schedule.nests.multipass import passes_of
from fuseplan.schedule.nests.offered import Nests
from fuseplan.schedule.pricing import Nodes, Pricing
from fuseplan.schedule.shared_operands import full_size_operands
from fuseplan.schedule.structure import Signatures
from fuseplan.schedule.tilings import Rank, Tiles, tilings
from fuseplan.schedule.xla_loops import XlaLoops, faster
from fuseplan.support.errors import Verdict
from fuseplan.support.lru import LruCache
from fuseplan.support.memo import memoised

CACHED_AXES = 1_000
"""Groups whose axes are cached: a search asks for a group's legality, size and price in turn."""

CACHED_PRICES = 1_000
"""Groups whose prices are cached: the searches of one program begin with equal groups."""


class _Form:
    """The schedules of a group that differ in their tiles alone. ``tilings`` are the tiles, largest first."""

    def __init__(
        self, graph: Graph, device: DeviceSpec, layout: Layout, make_spec: SpecMaker, tilings: list[Tiles]
    ) -> None:
        self._graph, self._device, self._make_spec = graph, device, make_spec
        self.tilings = tilings
        self.is_parallel = any(role == AxisRole.PARALLEL for _, _, role in make_spec.order)
        block_bytes = largest_block(graph, layout.reads + layout.writes)
        self._possible = [k for k, t in enumerate(tilings) if block_bytes(t) <= device.block_limit_bytes]

    @property
    def in_passes(self) -> bool:
        """Whether the stream is walked in several passes."""
        return bool(self._make_spec.passes)

    @cached_property
    def _some_spec(self) -> KernelSpec:
        return self._make_spec(self.tilings[0])

    @cached_property
    def work(self) -> Work:
        return work_of(self._graph, self._some_spec)

    @cached_property
    def _footprint(self) -> KernelFootprint:
        return KernelFootprint(self._graph, self._some_spec, self._device.sequential_grid)

    def costs(self, floor_ps: int, choice_of_tile: bool) -> Iterator[tuple[int, int, int, int]]:
        """Picoseconds, bytes of HBM and on chip, and the tiling, of each that fits. Without
        ``choice_of_tile``, or where it takes ``floor_ps``, of the largest alone."""
        if self._largest is None:
            return
        largest, kernel = self._largest
        cost = kernel.cost
        if not choice_of_tile or (cost.time_ps <= floor_ps and not self.work.products):
            yield cost.time_ps, cost.hbm_bytes, cost.onchip_bytes, largest
            return
        order = [a for a, _, _ in self._make_spec.order]
        rows = np.array([self.tilings[k] for k in self._possible], dtype=np.int64)[:, order]
        device = plain_device(self._device)
        found = tiling_costs(self._graph, self._some_spec, device, rows, self._footprint, self.work)
        if self._device.cost_model is not None:
            by_estimate = sorted(zip(found.time_ps, found.hbm_bytes, found.rows, strict=True))
            yield from self._modelled_costs(by_estimate)
            return
        every = zip(found.time_ps, found.hbm_bytes, found.onchip_bytes, found.rows, strict=True)
        for time_ps, hbm_bytes, onchip_bytes, row in every:
            yield time_ps, hbm_bytes, onchip_bytes, self._possible[row]

    def _modelled_costs(
        self, by_estimate: Sequence[tuple[int, int, int]]
    ) -> Iterator[tuple[int, int, int, int]]:
        """As ``costs``, by the device's cost model. ``by_estimate`` has the time of each tiling by fuseplan's
        own, ascending, and its bytes of HBM: a model that promises no less need not be asked about slower
        ones."""
        best: tuple[float, int] = (math.inf, 0)
        for estimated_ps, hbm_bytes, row in by_estimate:
            if has_partial_bounds(self._device) and (estimated_ps, hbm_bytes) >= best:
                return
            k = self._possible[row]
            cost = self.kernel(k).cost
            best = min(best, (cost.time_ps, cost.hbm_bytes))
            yield cost.time_ps, cost.hbm_bytes, cost.onchip_bytes, k

    def leaves_room(self, other: _Form) -> bool:
        """Whether some tiling of ``other`` may fit, which streams an axis that is resident in this schedule.

        With equal tiles it needs no less: what it accumulates over the stream is alive throughout. So none
        fits if the least tile of each axis does not, and the footprint of ``other`` is never asked for.
        """
        if not (self.tilings and other._possible):
            return True
        least = tuple(map(min, zip(*[other.tilings[k] for k in other._possible], strict=True)))
        return self._footprint(self._make_spec(least).axes).fits(self._device)

    def _fits(self, k: int) -> bool:
        return self._footprint(self._make_spec(self.tilings[k]).axes).fits(self._device)

    @cached_property
    def _largest(self) -> tuple[int, Kernel] | None:
        """The first tiling that fits, with its kernel. Most groups reach their lower bound with it."""
        found = next((k for k in self._possible if self._fits(k)), None)
        return None if found is None else (found, self._kernel(found))

    def kernel(self, k: int) -> Kernel:
        """The kernel with the tiling ``k``."""
        return self._largest[1] if self._largest is not None and self._largest[0] == k else self._kernel(k)

    def _kernel(self, k: int) -> Kernel:
        spec = self._make_spec(self.tilings[k])
        cost = estimate(self._graph, spec, self._device, self._footprint(spec.axes), self.work)
        return Kernel(spec, cost)

    def specs(self) -> Iterator[KernelSpec]:
        """Those that fit on chip."""
        return (self._make_spec(self.tilings[k]) for k in self._possible if self._fits(k))


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
        self.features = features
        emits_kernels = device.capabilities.emits_kernels
        # XLA's loops hold no tile on chip. Nothing is known of the prices of a user's cost model.
        self.absorbs_moves = not emits_kernels and device.cost_model is None
        # Nor do they gain by sharing a launch.
        self.crosses_hubs = emits_kernels and features.packs
        self.capacity = Capacity(graph, device) if emits_kernels else None
        self._least_tiles = None if self.capacity is None else LeastTiles(self.capacity)
        make_nests = KernelNests if emits_kernels else CpuNests
        self._nests: Nests | None = make_nests(graph, device, lowered) if features.loop_nests else None
        self._prologues = possible_prologues(graph)
        self.has_loops = emits_kernels and features.xla_loops
        self.axes = lru_cache(CACHED_AXES)(Unifier(graph, device.capabilities.loads_by_index))
        self._prices: LruCache[Nodes, Kernel | Verdict] = LruCache(CACHED_PRICES)

    @cached_property
    def offers(self) -> tuple[Nodes, ...]:  # type: ignore[override]
        """As ``Pricing.offers``: nests, and loops of XLA."""
        nests = () if self._nests is None else self._nests.offers
        return tuple(dict.fromkeys((*nests, *self.loops)))

    @property
    def loops(self) -> tuple[Nodes, ...]:
        """The groups that are offered as loops of XLA."""
        return () if self._loops is None else self._loops.offers

    @cached_property
    def _loops(self) -> XlaLoops | None:
        def searched(nodes: Nodes) -> Kernel | Verdict:
            edge = boundary(self.graph, nodes)
            return self.searched(nodes, edge, self._prologues, self._floor.one_kernel(nodes))

        return XlaLoops(self.graph, self.device, self._floor, searched) if self.has_loops else None

    @property
    def nested(self) -> dict[int, tuple[int, int]]:
        """As ``Nests.nested``."""
        return {} if self._nests is None else self._nests.nested

    @cached_property
    def settled(self) -> frozenset[int]:  # type: ignore[override]
        """As ``Pricing.settled``."""
        return frozenset() if self._nests is None else self._nests.settled

    def unsettled(self) -> Scheduler:
        other = copy(self)
        other.settled = frozenset()
        other._prices = LruCache(CACHED_PRICES)
        return other

    @cached_property
    def _floor(self) -> Floor:
        return floor_of(self.graph, self.device, self.nested)

    def full_size_operands(self, n: int) -> tuple[int, ...]:
        """As ``Pricing.full_size_operands``; none for XLA, each of whose loops computes one array."""
        alone = not self.device.capabilities.emits_kernels or not self.features.siblings
        return () if alone else full_size_operands(self.graph, self.graph.nodes[n])

    def floor(self, nodes: Nodes) -> int:
        """As ``Pricing.floor``; 0 if masked tiles may be skipped, so that not every operation runs."""
        return 0 if self.skips_tiles(nodes) else self._floor(nodes)

    def least(self, nodes: Nodes) -> int:
        """As ``Pricing.least``; higher where no axis can be parallel, so that one core runs all tiles."""
        if self.skips_tiles(nodes):
            return 0
        if self.has_loop(nodes):
            return self._floor(nodes)
        is_idle = self.device.core_count > 1 and self._is_on_one_core(nodes)
        return self._floor.on_one_core(nodes) if is_idle else self._floor.one_kernel(nodes)

    def _is_on_one_core(self, nodes: Nodes) -> bool:
        """Whether every kernel of ``nodes`` is tiled, and none has a parallel axis."""
        if not self.device.capabilities.emits_kernels or self._is_of_xla(nodes):
            return False
        if self._nests is not None and self._nests.may_be(nodes):
            return False
        axes = self.axes(nodes)
        if isinstance(axes, Conflict) or 0 in axes.sizes:
            return False
        return not has_free_axis(self.graph, nodes, axes)

    def floors(self, nodes: Nodes) -> tuple[int, int]:
        is_tiled = not self.has_loop(nodes)
        return (0, 0) if self.skips_tiles(nodes) else self._floor.parts(nodes, together=is_tiled)

    def has_loop(self, nodes: Nodes) -> bool:
        """Whether the group is offered as a loop of XLA, which bounds of tiled kernels do not hold for."""
        return self._loops is not None and self._loops.has(nodes)

    def partial_floor(self, members: Sequence[Nodes]) -> PartialFloor | None:
        """As ``Pricing.partial_floor``; None if masked tiles may be skipped, or a user's cost model may have
        lower prices."""
        if not has_partial_bounds(self.device):
            return None
        skips = self.skips_tiles(tuple(sorted(n for nodes in members for n in nodes)))
        return None if skips else PartialFloor(self._floor, members)

    def skips_tiles(self, nodes: Nodes) -> bool:
        """Whether a kernel that holds some of ``nodes`` may leave out tiles behind a mask."""
        return self._nests is not None and self._nests.skips(nodes)

    def compatible(self, nodes: Nodes, prologues: Prologues | None = None) -> Verdict | None:
        """As ``Pricing.compatible``. ``prologues``: those of some copies, if not the graph's own."""
        settled = next((n for n in nodes if n in self.settled), None)
        if settled is not None and len(nodes) > 1:
            reason = f"{self.graph.nodes[settled].op} belongs to loops that are faster than all others"
            return Verdict("nest", reason, (settled,))
        prologues = self._prologues if prologues is None else prologues
        return refuse(self.graph, self.device.backend, nodes, self.axes, prologues, self.features)

    def oversized(self, nodes: Nodes, crossing: frozenset[int]) -> Verdict | None:
        if self.capacity is None or self._is_of_xla(nodes):
            return None
        axes = self.axes(nodes)
        return None if isinstance(axes, Conflict) else self.capacity.refuse(nodes, axes, crossing)

    def oversized_beside(
        self, nodes: Nodes, crossing: frozenset[int], joiners: Collection[int]
    ) -> Verdict | None:
        """As ``Pricing.oversized_beside``."""
        if self._least_tiles is None or self._is_of_xla(nodes):
            return None
        axes = self.axes(nodes)
        if isinstance(axes, Conflict):
            return None
        return self._least_tiles.refuse(nodes, axes, crossing, joiners)

    def _is_of_xla(self, nodes: Nodes) -> bool:
        """Whether XLA compiles the group: it has one operation at most that is no bitcast. XLA's kernels need
        no tile that fits on chip."""
        return not is_one_loop(self.graph, nodes)

    def price(self, nodes: Nodes) -> Kernel | Verdict:
        """The fastest kernel of ``nodes`` (ascending ids), or why there is none.

        XLA compiles a single node, and one with bitcasts around it. Ties are broken by memory traffic; then,
        on a sequential grid by the order of enumeration, else by on-chip bytes. Of kernels that take no
        longer than the lower bound, the first is taken.
        """
        found = self._prices.get(nodes)
        if found is None:
            edge = boundary(self.graph, nodes)
            floor_ps = self._floor.one_kernel(nodes) if len(nodes) > 1 else 0
            found = self.schedule(nodes, edge, self._prologues, floor_ps)
            self._prices.update([(nodes, found)])
        return found

    def schedule(self, nodes: Nodes, edge: Boundary, prologues: Prologues, floor_ps: int) -> Kernel | Verdict:
        """As ``price``, for a group that reads and writes ``edge`` and takes at least ``floor_ps``."""
        loop = None if self._loops is None else self._loops.kernel(nodes, edge)
        return faster(self.tiled(nodes, edge, prologues, floor_ps), loop)

    def searched(self, nodes: Nodes, edge: Boundary, prologues: Prologues, floor_ps: int) -> Kernel | Verdict:
        """As ``tiled``, if the group may be in a plan: a nest is only if it is offered."""
        refused = None
        if self._nests is not None and nodes not in self._nests.offers:
            refused = self._refuse(nodes, edge, prologues)
        return refused or self.tiled(nodes, edge, prologues, floor_ps)

    def tiled(self, nodes: Nodes, edge: Boundary, prologues: Prologues, floor_ps: int) -> Kernel | Verdict:
        """As ``schedule``, without XLA's loops of several operations."""
        if len(nodes) == 1:
            return self._kernel_of_xla(nodes, edge)
        if (refused := refuse_results(nodes, edge, self.features)) is not None:
            return refused
        refused = self._refuse(nodes, edge, prologues)
        if refused is None:
            refused = refuse_call(self.graph, self.device.backend, nodes, edge)
            if refused is not None and (self._nests is None or nodes not in self._nests.offers):
                return refused
        if refused is not None:
            nests = self._nests
            return (nests.best(nodes) if nests is not None and nests.may_be(nodes) else None) or refused
        axes = self.axes(nodes)
        if self._is_of_xla(nodes) or not self.device.capabilities.emits_kernels:
            nest = None
            if self._nests is not None and nodes in self._nests.offers:
                nest = self._nests.best(nodes)
            return faster(self._kernel_of_xla(nodes, edge), nest)
        assert isinstance(axes, GroupAxes), "a group without common axes is refused"
        best: tuple[int, int, int, Rank] | None = None
        least_ps = floor_ps
        kernel_of: Callable[[int], Kernel] | None = None
        resident: _Form | None = None
        is_addressable = False
        in_order = self.device.sequential_grid
        has_products = any(self.graph.nodes[n].flops.matrix for n in nodes)
        for place, form in enumerate(self._forms(nodes, axes, edge)):
            is_addressable = is_addressable or bool(form.tilings)
            resident = resident or form
            if place and not form.in_passes and not resident.leaves_room(form):
                continue
            for time_ps, hbm_bytes, onchip_bytes, k in form.costs(floor_ps, self.features.choice_of_tile):
                # The first kernel at the lower bound wins. Other ties: on a sequential grid, the first
                # kernel, as larger blocks come first and need fewer steps; on a parallel grid, the one with
                # the smallest blocks, as more of them share a core.
                others = (0, 0) if time_ps <= floor_ps else (hbm_bytes, 0 if in_order else onchip_bytes)
                key = (time_ps, *others, (place, k))
                if best is None or key < best:
                    best, kernel_of = key, form.kernel
            if not (place or form.is_parallel):  # Nor is any other: they differ in the axis that is streamed.
                least_ps = max(least_ps, self._floor.on_one_core(nodes))
            if best is not None and best[0] <= least_ps and not has_products:
                break  # Later schedules have higher ranks.
        if best is None or kernel_of is None:
            return self._without_schedule(nodes, edge, is_addressable)
        return kernel_of(best[3][1])

    def _forms(self, nodes: Nodes, axes: GroupAxes, edge: Boundary) -> Iterator[_Form]:
        """The schedules of a group, by the roles of its axes."""
        layout = group_layout(self.graph, nodes, axes, edge)
        for roles, in_passes in self._roles(nodes, axes, layout):
            make_spec = SpecMaker(nodes, axes, layout, roles, self.device.backend)
            if in_passes:
                passes = passes_of(self.graph, make_spec(axes.sizes))
                if passes is None:
                    continue
                make_spec.passes = passes
            every = list(tilings(layout, roles, self.device.backend, in_passes))
            yield _Form(self.graph, self.device, layout, make_spec, every)

    def _roles(
        self, nodes: Nodes, axes: GroupAxes, layout: Layout
    ) -> Iterator[tuple[tuple[AxisRole, ...], bool]]:
        """The roles that the group's axes may have, and whether its stream is walked in several passes."""
        streaming = self.features.streaming or layout.contraction is not None
        may_pass = self.device.sequential_grid or (
            self.capacity is not None and self.capacity.may_stream(nodes)
        )
        # Passes come last, since most groups whose whole axis fits reach their lower bound in one pass.
        for roles, in_passes in axis_roles(self.graph, nodes, axes, layout):
            if AxisRole.STREAMED not in roles or (streaming and (may_pass or not in_passes)):
                yield roles, in_passes

    def schedules(self, nodes: Nodes) -> Iterator[KernelSpec]:
        """The schedules of the group to price, in a fixed order."""
        edge = boundary(self.graph, nodes)
        axes = self.axes(nodes)
        if isinstance(axes, GroupAxes):
            for form in self._forms(nodes, axes, edge):
                yield from form.specs()

    def _refuse(self, nodes: Nodes, edge: Boundary, prologues: Prologues) -> Verdict | None:
        return self.compatible(nodes, prologues) or refuse_exchange(
            self.graph, self.device.backend, nodes, edge
        )

    def renames(self, n: int) -> bool:
        """As ``Pricing.renames``: a bitcast that only adds or drops dimensions of size one. On a TPU it does
        change the layout of a block."""
        node = self.graph.nodes[n]
        if self.device.cost_model is not None:
            return False  # It may charge for the operation all the same.
        if not node.bitcast or not self.device.capabilities.ignores_unit_dims:
            return False
        return not changes_rows(self.graph, node)

    def cache_key(self, nodes: Nodes, signatures: Signatures) -> str | None:
        """As ``Pricing.cache_key``: the settings, and ``nodes`` with the operations that compute their
        masks."""
        if self.device.cost_model is not None:
            return None  # What it will answer in another process is not known.
        if signatures.graph is not self.graph:
            signatures = self._signatures
        masks = self.behind_masks(nodes, signatures)
        if masks is None or not signatures.are_told(nodes):
            return None
        return "\n".join([self.settings, signatures.text(nodes), *masks])

    def behind_masks(self, nodes: Nodes, signatures: Signatures | None = None) -> list[str] | None:
        """Text for the operations outside of ``nodes`` that compute masks for them; None if they have no text
        that means the same in every process."""
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
        """Text for all that prices depend on, apart from the operations of a group."""
        masked = self._nests is not None and self._nests.lowered is not None
        # A subclass may give other prices.
        own = type(self).__module__, type(self).__qualname__
        is_new = self.device.fresh_bytes_per_s > 0 and are_new_pages(self.graph)
        return repr((*own, self.device, self.features, masked, is_new))

    @cached_property
    def _signatures(self) -> Signatures:
        return Signatures(self.graph, of_caller=self.device.platform == "cpu")

    def _kernel_of_xla(self, nodes: Nodes, edge: Boundary) -> Kernel:
        spec = whole_array_spec(self.graph, nodes, edge)
        return Kernel(spec, estimate(self.graph, spec, self.device))

    def _without_schedule(self, nodes: Nodes, edge: Boundary, addressable: bool) -> Verdict:
        device = self.device
        # The reason why a larger group does not fit either is more informative.
        refused = self.oversized(nodes, frozenset(edge.reads + edge.writes))
        if refused is not None:
            return refused
        names = " and ".join(dict.fromkeys(self.graph.nodes[n].op for n in (nodes[0], nodes[-1])))
        if addressable:
            reason = f"no tile of {names} fits on chip ({device.onchip_bytes:,} bytes a core)"
            return Verdict("on-chip", reason, nodes)
        return Verdict("backend", f"{device.backend} cannot address a common block of {names}", nodes)


@memoised
def make_scheduler(program: Lowered, device: DeviceSpec, features: Features) -> Scheduler:
    """Make the scheduler of ``program``; within a ``memo_scope`` there is one."""
    return Scheduler(program.graph, device, program, features)


def whole_floor_ps(plan: FusionPlan) -> int:
    """Picoseconds that no plan of ``plan``'s graph beats, whatever shares a kernel."""
    return make_scheduler(plan.lowered, plan.device, plan.features).floor(tuple(range(len(plan.graph.nodes))))
