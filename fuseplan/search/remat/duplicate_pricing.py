"""Pricing of the graph with copies: the cost of a kernel that rematerialises some operations for itself.

A group of a split graph (``fuseplan.search.remat.duplicates``) is a kernel of the whole graph's operations,
each once, that writes a value only if some copy of it has a reader outside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

from costmodel.axes import Conflict
from costmodel.floor import floor_of
from costmodel.graph import Boundary, OpKind, boundary
from costmodel.kernel import Access
from costmodel.model import has_partial_bounds
from costmodel.partial_floor import PartialFloor
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.footprint import Capacity
from fuseplan.schedule.layout import is_nest
from fuseplan.schedule.legality import Prologues, possible_prologues, refuse_leak
from fuseplan.schedule.pricing import Nodes, Pricing
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.schedule.structure import Signatures
from fuseplan.schedule.xla_loops import XlaLoops, faster
from fuseplan.search.remat.duplicates import SplitGraph
from fuseplan.support.errors import Verdict

_Schedule = Callable[[Nodes, Boundary, Prologues, int], Kernel | Verdict]


class DuplicatePricing(Pricing):
    """``Pricing`` of the graph with copies, by the ``scheduler`` of the whole graph. ``also``: groups of the
    copies that may be loops of XLA, too."""

    merges_copies = True

    def __init__(self, copies: SplitGraph, scheduler: Scheduler, also: Sequence[Nodes] = ()) -> None:
        self.graph = copies.graph
        self.device = scheduler.device
        self.capacity = None if scheduler.capacity is None else Capacity(copies.graph, scheduler.device)
        self.crosses_hubs = scheduler.crosses_hubs
        self._whole, self._node, self._value = copies.whole, copies.node, copies.value
        self._places = copies.places
        self._scheduler = scheduler
        self._prologues = possible_prologues(copies.graph)
        nested = {c: scheduler.nested[n] for c, n in enumerate(copies.node) if n in scheduler.nested}
        self._floor = floor_of(copies.graph, scheduler.device, nested)
        self._whole_loops = frozenset(copies.lifted(scheduler.loops))
        self._loops = None
        if scheduler.has_loops:
            self._loops = XlaLoops(copies.graph, scheduler.device, self._floor, self._searched, also)
        own = [] if self._loops is None else [o for o in self._loops.offers if self._has_own_loop(o)]
        self.offers = tuple(dict.fromkeys((*copies.lifted(scheduler.offers), *own)))
        self.settled = frozenset(c for c, n in enumerate(copies.node) if n in scheduler.settled)

    def unsettled(self) -> DuplicatePricing:
        """As ``Scheduler.unsettled``."""
        other = copy(self)
        other._scheduler, other.settled = self._scheduler.unsettled(), frozenset()
        return other

    def floor(self, nodes: Nodes) -> int:
        return 0 if self._scheduler.skips_tiles(self._once(nodes)) else self._floor(nodes)

    def least(self, nodes: Nodes) -> int:
        return self.floors(nodes)[0]

    def floors(self, nodes: Nodes) -> tuple[int, int]:
        if self._scheduler.skips_tiles(self._once(nodes)):
            return 0, 0
        is_loop = nodes in self._whole_loops or self._has_own_loop(nodes)
        return self._floor.parts(nodes, together=not is_loop)

    def _has_own_loop(self, nodes: Nodes) -> bool:
        """Whether a group that holds no operation twice is offered as a loop of XLA."""
        return self._loops is not None and self._loops.has(nodes) and len(self._once(nodes)) == len(nodes)

    def partial_floor(self, members: Sequence[Nodes]) -> PartialFloor | None:
        """As ``Scheduler.partial_floor``."""
        if not has_partial_bounds(self._scheduler.device):
            return None
        skips = self._scheduler.skips_tiles(self._once([n for nodes in members for n in nodes]))
        return None if skips else PartialFloor(self._floor, members)

    def full_size_operands(self, n: int) -> tuple[int, ...]:
        """As ``Pricing.full_size_operands``: copies of an array are one."""
        return self._scheduler.full_size_operands(self._node[n])

    def renames(self, n: int) -> bool:
        return self._scheduler.renames(self._node[n])

    def compatible(self, nodes: Nodes) -> Verdict | None:
        refused = self._scheduler.compatible(self._once(nodes), self._prologues_among(nodes))
        return None if refused is None else self._here(nodes, refused)

    def oversized(self, nodes: Nodes, crossing: frozenset[int]) -> Verdict | None:
        values = self._exchanged(nodes, crossing, range(len(self._node)))
        refused = self._scheduler.oversized(self._once(nodes), values)
        return None if refused is None else self._here(nodes, refused)

    def oversized_beside(
        self, nodes: Nodes, crossing: frozenset[int], joiners: Collection[int]
    ) -> Verdict | None:
        values = self._exchanged(nodes, crossing, joiners)
        others = [self._node[n] for n in joiners]
        refused = self._scheduler.oversized_beside(self._once(nodes), values, others)
        return None if refused is None else self._here(nodes, refused)

    def _exchanged(self, nodes: Nodes, crossing: Iterable[int], joiners: Container[int]) -> frozenset[int]:
        """The values of the whole graph that every group of ``nodes`` and some ``joiners`` reads or writes,
        if it reads or writes the copies ``crossing``. A group that holds another copy of an operation
        computes its value, and does not read it."""
        members = set(nodes)

        def is_certain(v: int) -> bool:
            producer = self.graph.values[v].producer
            if producer < 0 or producer in members:
                return True
            copies = self._places[self._node[producer]]
            return all(c == producer or (c not in members and c not in joiners) for c in copies)

        return frozenset([self._value[v] for v in filter(is_certain, crossing)])

    def price(self, nodes: Nodes) -> Kernel | Verdict:
        schedule = self._scheduler.schedule if nodes in self._whole_loops else self._scheduler.tiled
        found = self._priced(nodes, schedule)
        loop = None
        if self._loops is not None and self._has_own_loop(nodes):
            loop = self._loops.kernel(nodes, boundary(self.graph, nodes))
        return faster(found, loop)

    def _searched(self, nodes: Nodes) -> Kernel | Verdict:
        return self._priced(nodes, self._scheduler.searched)

    def _priced(self, nodes: Nodes, schedule: _Schedule) -> Kernel | Verdict:
        """The kernel that ``schedule`` makes of the operations of ``nodes``, each once."""
        once, edge = self._once(nodes), self._boundary(nodes)
        answer = schedule(once, edge, self._prologues_among(nodes), self._floor.one_kernel(nodes))
        if isinstance(answer, Verdict):
            return self._here(nodes, answer)
        is_free = is_nest(self._whole, answer.spec) or not answer.spec.capabilities.emits_kernels
        refused = None if is_free else self._leak(once, edge)
        if refused is not None:
            return self._here(nodes, refused)
        members = [self.graph.nodes[n] for n in reversed(nodes)]
        name = {self._value[v]: v for node in members for v in node.inputs + node.outputs}

        def here(accesses: Iterable[Access]) -> tuple[Access, ...]:
            return tuple([Access(name[a.value], a.axes) for a in accesses])

        spec = answer.spec
        return Kernel(
            replace(spec, nodes=nodes, reads=here(spec.reads), writes=here(spec.writes)), answer.cost
        )

    def cache_key(self, nodes: Nodes, signatures: Signatures) -> str | None:
        if self._scheduler.device.cost_model is not None:
            return None
        if signatures.graph is not self.graph:
            signatures = self._signatures
        masks = self._scheduler.behind_masks(self._once(nodes))
        if masks is None or not signatures.are_told(nodes):
            return None
        return "\n".join([self._scheduler.settings, signatures.text(nodes), *masks])

    @cached_property
    def _signatures(self) -> Signatures:
        return Signatures(self.graph)

    def _once(self, nodes: Iterable[int]) -> Nodes:
        """The operations of a group, each once, as nodes of the whole graph."""
        return tuple(sorted({self._node[n] for n in nodes}))

    def _prologues_among(self, nodes: Nodes) -> dict[int, bool]:
        """For each operation, whether all uses of its copies in the group pass through one contraction. A
        group that needs the value beside the contraction too has no price."""
        prologues: dict[int, bool] = {}
        for n in nodes:
            prologues[self._node[n]] = self._prologues[n] and prologues.get(self._node[n], True)
        return prologues

    def _boundary(self, nodes: Nodes) -> Boundary:
        edge, value = boundary(self.graph, nodes), self._value
        made = {value[v] for n in nodes for v in self.graph.nodes[n].outputs}
        reads = dict.fromkeys([value[v] for v in edge.reads])
        writes = dict.fromkeys([value[v] for v in edge.writes])
        return Boundary(tuple([v for v in reads if v not in made]), tuple(writes))

    def _leak(self, once: Nodes, edge: Boundary) -> Verdict | None:
        members = [self._whole.nodes[n] for n in once]
        anchor = next((m for m in members if m.kind == OpKind.OUT_ELEMENTWISE_FUSABLE), None)
        axes = self._scheduler.axes(once)
        if anchor is None or len(once) == 1 or isinstance(axes, Conflict):
            return None
        return refuse_leak(members, anchor, axes, edge.writes)

    def _here(self, nodes: Nodes, verdict: Verdict) -> Verdict:
        """Translate a verdict about nodes of the whole graph to their copies among ``nodes``."""
        return replace(verdict, nodes=tuple([n for n in nodes if self._node[n] in verdict.nodes]))
