"""The best loop nest of a group, and the groups worth asking for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from costmodel.axes import Conflict, unify
from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from costmodel.kernel import KernelSpec
from costmodel.memory import footprint
from costmodel.passes import evaluations
from costmodel.roofline import estimate
from fuseplan.layout import boundary
from fuseplan.loops.joined import joined
from fuseplan.loops.kernels import kernel_nests
from fuseplan.loops.nest import nests, program_of
from fuseplan.loops.ranges import walked_in_ranges
from fuseplan.loops.regions import Nodes, is_index_arithmetic, loopable, regions
from fuseplan.loops.walks import walked
from fuseplan.lower import Lowered
from fuseplan.masks import IndexArithmetic
from fuseplan.plan import Kernel
from fuseplan.pricing import relocate
from fuseplan.signature import Signatures
from fuseplan.spec import whole_array_spec

_AS_FAST = (103, 100)
"""Tilings within 3 % of the fastest are as fast as it, for all the model knows: the one
that needs the least memory is taken."""

_SETTLED = (9, 10)
"""By so much a nest has to be faster than its contractions alone, whose kernels may also write what is
narrower than their results."""

_RANGED = 4
"""Of a GPU's and a TPU's kernels, so many of the fastest are looked at for tiles that a mask leaves out."""

_SEARCHED = 24
"""Of all tilings, so many of the cheapest are looked at for tiles that a mask leaves out:
finding them takes milliseconds, and a mask changes the order of tilings little."""


def least_bytes(device: DeviceSpec) -> int:
    """How large an intermediate must be for a nest to gain by keeping it on chip."""
    return 2 * max(device.private_cache_bytes, 1 << 20)


class Nests:
    """Loop nests of one graph on one device. ``lowered`` has the equations from which masks
    are read; without it no tile is skipped."""

    def __init__(self, graph: Graph, device: DeviceSpec, lowered: Lowered | None) -> None:
        self.graph, self.device, self.lowered = graph, device, lowered
        self._backend = "loops" if device.backend == "xla" else device.backend
        self._positions = is_index_arithmetic(graph, self._backend)
        self._known: dict[Nodes, Kernel | None] = {}
        self._alike: dict[object, tuple[tuple[int, ...], Kernel | None]] = {}
        self._signatures = Signatures(graph)
        self._gaining: dict[tuple[int, ...], bool] = {}

    @cached_property
    def offers(self) -> tuple[Nodes, ...]:
        """Groups whose intermediates exceed the cores' own caches, and that cost less as a nest
        than operation by operation."""
        every = dict.fromkeys(regions(self.graph, least_bytes(self.device), self._backend))
        if self._backend != "loops":
            every |= dict.fromkeys(joined(self.graph, self._backend))
        return tuple(r for r in every if self._gains(r))

    @cached_property
    def nested(self) -> dict[int, tuple[int, int]]:
        """Of the operations of a GPU's or a TPU's nests, what part of their tiles they walk at least."""
        shares: dict[int, tuple[int, int]] = {}
        for nodes in self.offers if self._backend != "loops" else ():
            kernel = self.best(nodes)
            assert kernel is not None, "what is offered has a nest"
            for n, share in zip(nodes, evaluations(kernel.spec), strict=True):
                shares[n] = min(share, shares.get(n, share), key=lambda s: s[0] / s[1])
        return shares

    @cached_property
    def settled(self) -> frozenset[int]:
        """Operations of a GPU's or a TPU's nests that no other kernel of several is asked for: alone, each
        of the nest's contractions is a kernel, and these take longer than the nest."""
        if self._backend == "loops":
            return frozenset()
        return frozenset(n for nodes in self.offers if self._settles(nodes) for n in nodes)

    def _settles(self, nodes: Nodes) -> bool:
        kernel = self.best(nodes)
        assert kernel is not None, "what is offered has a nest"
        products = (n for n in nodes if self.graph.nodes[n].flops.matrix)
        return kernel.cost.time_ps * _SETTLED[1] < self._apart_ps(products) * _SETTLED[0]

    def _apart_ps(self, nodes: Iterable[int]) -> int:
        singles = (whole_array_spec(self.graph, (n,)) for n in nodes)
        return sum(estimate(self.graph, spec, self.device).time_ps for spec in singles)

    def _gains(self, nodes: Nodes) -> bool:
        """Layers of one structure are asked about once."""
        key = self._signatures.of(nodes).key
        if key not in self._gaining:
            self._gaining[key] = self._is_cheaper(nodes)
        return self._gaining[key]

    def _is_cheaper(self, nodes: Nodes) -> bool:
        kernel = self.best(nodes)
        return kernel is not None and kernel.cost.time_ps < self._apart_ps(nodes)

    @cached_property
    def _skipping_offers(self) -> tuple[frozenset[int], ...]:
        return tuple(frozenset(r) for r in self.offers if self._masked(r))

    def skips(self, nodes: Nodes) -> bool:
        """Whether a partition of ``nodes`` may leave out work, that of tiles behind a mask, without a
        floor for what is left (``nested``)."""
        if self._backend != "loops":
            return False
        inside = set(nodes)
        return any(offer <= inside for offer in self._skipping_offers)

    def _masked(self, nodes: Nodes) -> bool:
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
    def _index(self) -> IndexArithmetic | None:
        return None if self.lowered is None else IndexArithmetic(self.lowered)

    def may_be(self, nodes: Nodes) -> bool:
        """Whether a group that the rules refuse may be a nest all the same: on a GPU or a TPU, one that is
        offered, or holds one that is, because it must (``fuseplan.Constraints``)."""
        if self._backend == "loops":
            return True
        inside = frozenset(nodes)
        return any(inside.issuperset(offer) for offer in self.offers)

    def best(self, nodes: Nodes) -> Kernel | None:
        """The cheapest nest of the group, or None; layers of one structure are searched once."""
        if nodes not in self._known:
            structure = self._signatures.of(nodes)
            key = (structure.key, self._behind(nodes))
            if key not in self._alike:
                self._alike[key] = (structure.values, self._search(nodes))
            values, kernel = self._alike[key]
            self._known[nodes] = kernel and relocate(kernel, nodes, values, structure.values)
        return self._known[nodes]

    def _behind(self, nodes: Nodes) -> tuple[object, ...]:
        """How masks inside of ``nodes`` are computed beside them."""
        makers = self.mask_makers(nodes)
        every = tuple(sorted({*makers, *nodes}))
        return (self._signatures.of(every).key, tuple(every.index(n) for n in makers)) if makers else ()

    def _search(self, nodes: Nodes) -> Kernel | None:
        graph = self.graph
        if not all(loopable(graph.nodes[n], self._backend) for n in nodes):
            return None
        axes = unify(graph, nodes)
        if isinstance(axes, Conflict) or 0 in axes.sizes:
            return None
        edge = boundary(graph, nodes)
        if self._backend != "loops":
            return self._kernel(kernel_nests(graph, nodes, axes, edge, self._backend))
        priced = [
            (estimate(graph, spec, self.device).time_ps, i, spec)
            for i, spec in enumerate(nests(graph, nodes, axes, edge))
        ]
        kernels = [self._priced(spec) for _, _, spec in sorted(priced)[:_SEARCHED]]
        if not kernels:
            return None
        limit_ps = min(k.cost.time_ps for k in kernels) * _AS_FAST[0] // _AS_FAST[1]
        fast = (k for k in kernels if k.cost.time_ps <= limit_ps)
        return min(fast, key=lambda k: (k.cost.onchip_bytes, k.cost.time_ps))

    def _kernel(self, specs: Iterable[KernelSpec]) -> Kernel | None:
        """The fastest of some kernels of a GPU or a TPU that fit on chip; of equals, the one of the
        largest tiles, which walks its stream in the fewest steps."""
        fitting = ((spec, footprint(self.graph, spec, self.device)) for spec in specs)
        kernels = [
            Kernel(spec, estimate(self.graph, spec, self.device, need))
            for spec, need in fitting
            if need.fits(self.device)
        ]
        kernels.sort(key=_rank)
        return min([*kernels, *map(self._in_ranges, kernels[:_RANGED])], key=_rank, default=None)

    def _in_ranges(self, kernel: Kernel) -> Kernel:
        """The same kernel, which leaves out the tiles at either end that a mask makes nothing of."""
        spec = kernel.spec
        program = program_of(self.graph, spec)
        assert program is not None
        if self.lowered is None or not self._masked(spec.nodes):
            return kernel
        spec = replace(spec, walked=walked_in_ranges(self.lowered, spec, program))
        return Kernel(spec, estimate(self.graph, spec, self.device))

    def _priced(self, spec: KernelSpec) -> Kernel:
        if self._masked(spec.nodes):
            spec = self._skipping(spec)
        return Kernel(spec, estimate(self.graph, spec, self.device))

    def _skipping(self, spec: KernelSpec) -> KernelSpec:
        """``spec`` with the tiles that its passes walk."""
        program = program_of(self.graph, spec)
        assert program is not None
        assert self.lowered is not None
        return replace(spec, walked=walked(self.lowered, spec, program))


def _rank(kernel: Kernel) -> tuple[int, int, int]:
    steps = math.prod(axis.n_tiles for axis in kernel.spec.axes)
    return kernel.cost.time_ps, kernel.cost.hbm_bytes, steps
