"""Nests of a graph: the best one of a group, and the groups that are worth asking for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property

from costmodel.axes import Conflict, GroupAxes, unify
from costmodel.device import DeviceSpec
from costmodel.graph import Boundary, Graph, boundary
from costmodel.roofline import estimate
from fuseplan.frontend.lower import Lowered
from fuseplan.masks.index_ranges import IndexArithmetic
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.nests.connected import Nodes, loopable
from fuseplan.schedule.nests.regions import is_index_arithmetic, regions
from fuseplan.schedule.pricing import relocate
from fuseplan.schedule.spec import whole_array_spec
from fuseplan.schedule.structure import Signatures


def least_bytes(device: DeviceSpec) -> int:
    """How large an intermediate must be for a nest to gain by keeping it on chip."""
    return 2 * max(device.private_cache_bytes, 1 << 20)


class Nests(ABC):
    """Nests of one graph on one device: tiled loops of a CPU, or kernels of several contractions.

    ``lowered`` has the equations from which masks are read; without it no tile is skipped.
    """

    def __init__(self, graph: Graph, device: DeviceSpec, lowered: Lowered | None, backend: str) -> None:
        self.graph, self.device, self.lowered, self.backend = graph, device, lowered, backend
        self._positions = is_index_arithmetic(graph, backend)
        self._known: dict[Nodes, Kernel | None] = {}
        self._alike: dict[object, tuple[tuple[int, ...], Kernel | None]] = {}
        self._gaining: dict[tuple[int, ...], bool] = {}

    @abstractmethod
    def choose(
        self, nodes: Nodes, axes: GroupAxes, edge: Boundary, below_ps: int | None = None
    ) -> Kernel | None:
        """The cheapest nest of a group that has one by its operations, if any fits, and takes less than
        ``below_ps``."""

    @abstractmethod
    def may_be(self, nodes: Nodes) -> bool:
        """Whether a group that the rules refuse may be a nest all the same."""

    @property
    def nested(self) -> dict[int, tuple[int, int]]:
        """Of the operations of nests that may leave out tiles, what part of these they walk at least."""
        return {}

    @property
    def settled(self) -> frozenset[int]:
        """Operations that no other kernel of several is asked for than the nests that are offered."""
        return frozenset()

    def skips(self, nodes: Nodes) -> bool:
        """Whether a partition of ``nodes`` may leave out work, that of tiles behind a mask, without a
        floor for what is left (``nested``)."""
        return False

    def _groups(self) -> Iterable[Nodes]:
        return regions(self.graph, least_bytes(self.device), self.backend)

    @cached_property
    def offers(self) -> tuple[Nodes, ...]:
        """Groups whose intermediates exceed the cores' own caches, and that cost less as a nest
        than operation by operation."""
        return tuple(r for r in dict.fromkeys(self._groups()) if self._gains(r))

    @property
    def has_offers(self) -> bool:
        """Whether there is one."""
        return any(map(self._gains, self._groups()))

    def _gains(self, nodes: Nodes) -> bool:
        """Layers of one structure are asked about once."""
        key = self._signatures.of(nodes).key
        if key not in self._gaining:
            apart_ps = self.apart_ps(nodes)
            kernel = self.best(nodes, apart_ps)
            self._gaining[key] = kernel is not None and kernel.cost.time_ps < apart_ps
        return self._gaining[key]

    def apart_ps(self, nodes: Iterable[int]) -> int:
        """What operations take as a kernel each."""
        singles = (whole_array_spec(self.graph, (n,)) for n in nodes)
        return sum(estimate(self.graph, spec, self.device).time_ps for spec in singles)

    def best(self, nodes: Nodes, below_ps: int | None = None) -> Kernel | None:
        """The cheapest nest of the group, or None; with ``below_ps``, None where it takes longer. Layers of
        one structure are searched once."""
        if nodes not in self._known:
            structure = self._signatures.of(nodes)
            key = (structure.key, self._behind(nodes))
            if key not in self._alike:
                found = self._search(nodes, below_ps)
                if found is None and below_ps is not None:
                    return None  # One that takes longer was not looked for.
                self._alike[key] = (structure.values, found)
            values, kernel = self._alike[key]
            self._known[nodes] = kernel and relocate(kernel, nodes, values, structure.values)
        return self._known[nodes]

    def _search(self, nodes: Nodes, below_ps: int | None) -> Kernel | None:
        graph = self.graph
        if not all(loopable(graph.nodes[n], self.backend) for n in nodes):
            return None
        axes = unify(graph, nodes)
        # Arrays of one element have no axis to walk.
        if isinstance(axes, Conflict) or not axes.sizes or 0 in axes.sizes:
            return None
        return self.choose(nodes, axes, boundary(graph, nodes), below_ps)

    def masked(self, nodes: Nodes) -> bool:
        """Whether tiles may be left out that a mask made of indices makes nothing of."""
        return self.lowered is not None and any(self._positions[n] for n in nodes)

    def mask_makers(self, nodes: Nodes) -> Nodes:
        """The nodes beside ``nodes`` that the masks inside are computed by, from indices."""
        if self._index is None:
            return ()
        found: set[int] = set()
        waiting, inside = list(nodes), set(nodes)
        while waiting:
            for v in self.graph.nodes[waiting.pop()].inputs:
                maker = self.graph.values[v].producer
                if maker >= 0 and maker not in inside and maker not in found and v in self._index:
                    found.add(maker)
                    waiting.append(maker)
        return tuple(sorted(found))

    @cached_property
    def _signatures(self) -> Signatures:
        return Signatures(self.graph)

    @cached_property
    def _index(self) -> IndexArithmetic | None:
        return None if self.lowered is None else IndexArithmetic(self.lowered)

    def _behind(self, nodes: Nodes) -> tuple[object, ...]:
        """How masks inside of ``nodes`` are computed beside them."""
        makers = self.mask_makers(nodes)
        every = tuple(sorted({*makers, *nodes}))
        return (self._signatures.of(every).key, tuple(every.index(n) for n in makers)) if makers else ()
