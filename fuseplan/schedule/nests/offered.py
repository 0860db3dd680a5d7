"""Price nests: the best nest of a group, and the groups whose nest beats their operations one by one.

A *nest* is a kernel that walks an axis in several passes or has several contractions: tiled loops on a CPU
(``cpu``), or a kernel of a GPU or a TPU (``accelerator``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from costmodel.axes import Conflict, GroupAxes, unify
from costmodel.device import DeviceSpec
from costmodel.graph import Boundary, Graph, boundary
from costmodel.roofline import estimate
from fuseplan.frontend.lower import Lowered
from fuseplan.masks.index_ranges import IndexArithmetic
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.layout import whole_array_spec
from fuseplan.schedule.nests.live_tiles import tiles_visited, tiles_visited_in_ranges
from fuseplan.schedule.nests.multipass import program_of
from fuseplan.schedule.nests.regions import can_nest, is_index_arithmetic, regions
from fuseplan.schedule.pricing import Nodes, relocate
from fuseplan.schedule.structure import Key, Signatures
from fuseplan.support.digraph import reachable


class Nests(ABC):
    """Nests of the groups of one graph on one device.

    ``lowered`` has the equations that define masks; without it no tile is skipped.
    """

    def __init__(self, graph: Graph, device: DeviceSpec, lowered: Lowered | None, backend: str) -> None:
        self.graph, self.device, self.lowered, self.backend = graph, device, lowered, backend
        self._is_index = is_index_arithmetic(graph, backend)
        self._by_structure: dict[Key, tuple[tuple[int, ...], Kernel | None]] = {}
        self._gains_by_structure: dict[Key, bool] = {}

    @abstractmethod
    def choose(
        self, nodes: Nodes, axes: GroupAxes, edge: Boundary, below_ps: int | None = None
    ) -> Kernel | None:
        """The fastest nest of a group that fits on chip and takes less than ``below_ps``, or None."""

    @abstractmethod
    def may_be(self, nodes: Nodes) -> bool:
        """Whether a group that the rules refuse as a kernel in one pass may be a nest."""

    @property
    def nested(self) -> dict[int, tuple[int, int]]:
        """For each operation of an offered nest, the least share of its tiles that a nest evaluates, as a
        fraction (numerator, denominator)."""
        return {}

    @property
    def settled(self) -> frozenset[int]:
        """Operations that are alone or in an offered nest, but in no other group (``Pricing.settled``)."""
        return frozenset()

    def skips(self, nodes: Nodes) -> bool:
        """Whether a partition of ``nodes`` may skip masked tiles, without a lower bound on the rest
        (``nested``)."""
        return False

    def _groups(self) -> Iterable[Nodes]:
        return regions(self.graph, self.device.least_large_bytes, self.backend)

    @cached_property
    def offers(self) -> tuple[Nodes, ...]:
        """The candidate groups that are faster as a nest than operation by operation."""
        return tuple(r for r in dict.fromkeys(self._groups()) if self._gains(r))

    @property
    def has_offers(self) -> bool:
        """Whether any group is offered."""
        return any(map(self._gains, self._groups()))

    def _gains(self, nodes: Nodes) -> bool:
        """Whether the group's nest is faster than its operations; groups of one structure are compared
        once."""
        key = self._signatures.of(nodes).key
        if key not in self._gains_by_structure:
            apart_ps = self.apart_ps(nodes)
            kernel = self.best(nodes, apart_ps)
            self._gains_by_structure[key] = kernel is not None and kernel.cost.time_ps < apart_ps
        return self._gains_by_structure[key]

    def apart_ps(self, nodes: Iterable[int]) -> int:
        """Picoseconds of the operations as one kernel each."""
        singles = (whole_array_spec(self.graph, (n,)) for n in nodes)
        return sum(estimate(self.graph, spec, self.device).time_ps for spec in singles)

    def best(self, nodes: Nodes, below_ps: int | None = None) -> Kernel | None:
        """The fastest nest of the group, or None; with ``below_ps``, None if it takes longer. Groups of one
        structure are searched once."""
        structure = self._signatures.of(nodes)
        if structure.key not in self._by_structure:
            found = self._search(nodes, below_ps)
            if found is None and below_ps is not None:
                return None  # Slower nests were not searched.
            self._by_structure[structure.key] = (structure.values, found)
        values, kernel = self._by_structure[structure.key]
        return kernel and relocate(kernel, nodes, values, structure.values)

    def _search(self, nodes: Nodes, below_ps: int | None) -> Kernel | None:
        graph = self.graph
        if not all(can_nest(graph.nodes[n], self.backend) for n in nodes):
            return None
        axes = unify(graph, nodes, self.device.capabilities.loads_by_index)
        # Arrays of one element have no axis.
        if isinstance(axes, Conflict) or not axes.sizes or 0 in axes.sizes:
            return None
        return self.choose(nodes, axes, boundary(graph, nodes), below_ps)

    def masked(self, nodes: Nodes) -> bool:
        """Whether a mask computed from indices may exclude tiles."""
        return self.lowered is not None and any(self._is_index[n] for n in nodes)

    def masked_kernel(self, kernel: Kernel) -> Kernel:
        """The kernel without the tiles that a mask excludes, in a pass of a GPU or a TPU those at either end
        of the stream."""
        spec = kernel.spec
        if self.lowered is None or not self.masked(spec.nodes):
            return kernel
        program = program_of(self.graph, spec)
        assert program is not None
        visited = tiles_visited if spec.capabilities.loop_nest else tiles_visited_in_ranges
        spec = replace(spec, tiles_visited=visited(self.lowered, spec, program, self._index))
        return Kernel(spec, estimate(self.graph, spec, self.device))

    def mask_makers(self, nodes: Nodes) -> Nodes:
        """The nodes outside of ``nodes`` that compute masks for them from indices."""
        if self._index is None:
            return ()
        index, inside, graph = self._index, set(nodes), self.graph

        def makers(n: int) -> set[int]:
            indices = {graph.values[v].producer for v in graph.nodes[n].inputs if v in index}
            return indices - inside - {-1}

        return tuple(sorted(reachable(nodes, makers)))

    @cached_property
    def _signatures(self) -> Signatures:
        return Signatures(self.graph, of_caller=self.device.platform == "cpu")

    @cached_property
    def _index(self) -> IndexArithmetic | None:
        return None if self.lowered is None else IndexArithmetic(self.lowered)
