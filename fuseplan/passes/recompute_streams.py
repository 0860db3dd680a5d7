"""Recompute a large value in each kernel that reduces it along another axis (FlashAttention's backward pass).

A GPU or TPU kernel loops over one axis and keeps its accumulators on chip. Reductions of a large value along
two axes need two kernels: in the gradient of attention, one sums up over keys and one over queries. To keep
the value out of memory, each kernel computes it from small values (Dao et al., arXiv:2205.14135). The same
holds for distant readers: the rest of a network runs between the forward and the backward pass of a layer.

The candidates are sets of operations that large values connect (``schedule.nests.regions``). A set is
rewritten if a heuristic plan of it becomes faster. Each set is tried alone, without the rest of the program,
and the answer holds for all sets of the same structure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from costmodel.axes import Conflict, GroupAxes, compose, unify
from costmodel.backends import backend_of
from costmodel.device import DeviceSpec
from costmodel.graph import ORIGINAL, DimRole, Graph, Item, OpKind
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.rewrite import part
from fuseplan.passes.batch_major import batches_first
from fuseplan.passes.estimate import UndecidedError, quick_ps
from fuseplan.passes.recompute_large import Copies, chain_of, rewritten, stages
from fuseplan.passes.split_reductions import along_several, in_steps
from fuseplan.plan.options import Features
from fuseplan.schedule.nests.accelerator import KernelNests
from fuseplan.schedule.nests.regions import IsLarge, can_nest, connected_groups, is_index_arithmetic, levels
from fuseplan.schedule.pricing import Nodes
from fuseplan.schedule.structure import Signatures
from fuseplan.support.digraph import reachable
from fuseplan.support.work import Work, unlimited

_MAX_TIME_RATIO = (3, 4)
"""The quick plan with copies has to take at most so much of the time of the one without. The solver's plan of
a set without copies is up to 13 % faster than the quick one, and may include more operations around the set:
in a GPT-2 block's gradient for a TPU, an MLP whose set is 17 % faster makes the whole slower."""


def along_streams(
    lowered: Lowered, device: DeviceSpec, features: Features, work: Work | None = None
) -> tuple[Lowered | None, bool]:
    """``lowered`` with large values rematerialised for each axis along which they are reduced and for each
    pass of a network; for a TPU, with operands whose blocks it can address. None where that gains nothing.
    The second result says whether ``work`` was over before all was decided: then what is known to gain
    counts.
    """
    first = batches_first(lowered) if device.capabilities.batches_lead else None
    streams = _Streams(first or lowered, device, features, work or unlimited())
    found = streams.run()
    if found is None and first is not None and KernelNests(first.graph, device, first).offers:
        found = first
    return found, streams.is_cut


def with_less_memory(lowered: Lowered, device: DeviceSpec, features: Features) -> Iterator[Lowered]:
    """``lowered`` with as many large values rematerialised as possible, whatever time the plan takes: first
    all but the results of contractions, and then these, too."""
    first = batches_first(lowered) if device.capabilities.batches_lead else None
    for products in (False, True):
        found = _Streams(first or lowered, device, features, unlimited()).run(products, gains_only=False)
        if found is not None:
            yield found


class _Streams:
    def __init__(self, lowered: Lowered, device: DeviceSpec, features: Features, work: Work) -> None:
        self.lowered, self.graph = lowered, lowered.graph
        self.device, self.features, self.work = device, features, work
        self.signatures = Signatures(lowered.graph)
        self.positions = is_index_arithmetic(lowered.graph, device.backend)
        self._pays: dict[object, Nodes | None] = {}
        self.is_cut = False
        """Whether ``work`` was over before all sets of operations were tried."""

    def run(self, products: bool = True, gains_only: bool = True) -> Lowered | None:
        """The program with copies of large values; without ``products``, these stand in memory."""
        copies: Copies = {}
        steps: list[int] = []
        try:
            for found, gaining in self._found(products, gains_only):
                copies |= found
                steps += gaining
        except UndecidedError:
            self.is_cut = True
        return _again(self.lowered, copies, steps)[0] if copies else None

    def _found(self, products: bool, gains_only: bool) -> Iterator[tuple[Copies, Nodes]]:
        """The copies of each set of operations, and the contractions that are made in steps."""
        graph, backend = self.graph, self.device.backend
        taken: set[int] = set()
        for is_large in levels(graph, self.device.least_large_bytes):
            for group in connected_groups(graph, is_large, backend):
                if not any(graph.nodes[n].flops.matrix for n in group) or not taken.isdisjoint(group):
                    continue
                sides = _Sides(graph, group, is_large, self.positions, backend)
                found = sides.copies() if products else sides.between_products()
                gaining = None if len(found) < 2 else self._gaining(group, found) if gains_only else ()
                if gaining is not None:
                    taken.update(group)
                    yield found, gaining

    def _gaining(self, group: Nodes, copies: Copies) -> Nodes | None:
        """The contractions that are made in steps, where copies gain; None where they do not."""
        chains = {n for some in copies.values() for n in some}
        concerned = chains.union(*copies)
        inside = sorted(chains.union(_with_small(self.graph, group, self.device.backend)))
        # Operations before and after the rest of a network share no kernel. The rest stays as it is.
        apart = [
            s for s in stages(self.graph, tuple(inside), self.device.backend) if not concerned.isdisjoint(s)
        ]
        stage_of = {n: k for k, some in enumerate(apart) for n in some}
        nodes = tuple(sorted(stage_of))
        place = {n: i for i, n in enumerate(nodes)}
        here = {tuple(place[n] for n in side): tuple(place[n] for n in some) for side, some in copies.items()}
        own = tuple(stage_of[n] for n in nodes)
        key = (self.signatures.of(nodes).key, own, tuple(here.items()))
        if key not in self._pays:
            once_ps = sum(self._time_ps(part(self.lowered, some)) for some in apart)
            several = [n for side in copies for n in side if along_several(self.lowered.equations[n])]
            ways = dict.fromkeys([(), tuple(place[n] for n in several)])
            program = part(self.lowered, nodes)
            times = {way: self._again_ps(program, own, here, way) for way in ways}
            best = min(times, key=times.__getitem__)
            self._pays[key] = (
                best if times[best] * _MAX_TIME_RATIO[1] < once_ps * _MAX_TIME_RATIO[0] else None
            )
        found = self._pays[key]
        return None if found is None else tuple(nodes[i] for i in found)

    def _again_ps(self, lowered: Lowered, stage_of: Sequence[int], copies: Copies, steps: Nodes) -> int:
        """Picoseconds of ``lowered`` with ``copies`` and ``steps``, each stage by itself: ``stage_of`` has
        that of each operation, and copies are in the stage of their readers."""
        program, places, step_of = _again(lowered, copies, steps)
        of_side = [stage_of[side[0]] for side in copies]
        apart: dict[int, list[int]] = {}
        for (n, side), node in places.items():
            stage = stage_of[step_of[n]] if side is ORIGINAL else of_side[side]
            apart.setdefault(stage, []).append(node)
        return sum(self._time_ps(part(program, tuple(sorted(some)))) for some in apart.values())

    def _time_ps(self, lowered: Lowered) -> int:
        return quick_ps(lowered, self.device, self.features, self.work)


def _again(
    lowered: Lowered, copies: Copies, steps: Sequence[int]
) -> tuple[Lowered, dict[Item, int], list[int]]:
    """``lowered`` with the contractions ``steps`` in steps, and with ``copies``.

    Returns:
        The program; where each operation of the program in steps stands there, and each copy, as
        ``rewritten`` has it; and for each operation of the program in steps, the one of ``lowered``.
    """
    step_of = list(range(len(lowered.equations)))
    if steps:
        lowered, ids = in_steps(lowered, steps)
        copies = {tuple(ids[n] for n in side): tuple(ids[n] for n in some) for side, some in copies.items()}
        ends = [*ids[1:], len(lowered.equations)]
        step_of = [n for n, (start, end) in enumerate(zip(ids, ends, strict=True)) for _ in range(start, end)]
    return *rewritten(lowered, copies), step_of


class _Sides:
    """The readers of the large values of a ``group``: a side for each axis, and for each part of the program
    between which a path leaves the group."""

    def __init__(
        self, graph: Graph, group: Nodes, is_large: IsLarge, positions: list[bool], backend: str
    ) -> None:
        self.graph, self.group, self.is_large, self.backend = graph, group, is_large, backend
        self._positions = positions

    def copies(self) -> Copies:
        """For each side, the operations to copy for it; none unless all large values are reduced."""
        axes = unify(self.graph, self.group, backend_of(self.backend).loads_by_index)
        if isinstance(axes, Conflict) or not self._used_up():
            return {}
        found: Copies = {}
        for sinks in self._by_axis(axes):
            leading = self._chain(sinks)
            if not leading:
                return {}
            for side in self._stages(sinks, leading):
                found[side] = self._chain(side)
        return found

    def between_products(self) -> Copies:
        """For each contraction, the operations that lead to it from the results of other contractions and of
        reductions, without these."""
        cheap = {n for n in self.group if self.graph.nodes[n].kind <= OpKind.INJECTIVE}
        products = [n for n in self.group if self.graph.nodes[n].flops.matrix]
        stored = set(self.group) - cheap
        chains = {(n,): self._chain((n,), stored) for n in products}
        return {side: chain for side, chain in chains.items() if chain}

    def _used_up(self) -> bool:
        """Whether no large value is read outside of the group."""
        inside = set(self.group)
        made = [v for n in self.group for v in self.graph.nodes[n].outputs if self._is_large(v)]
        return all(v not in self.graph.results and inside.issuperset(self.graph.consumers[v]) for v in made)

    def _is_large(self, v: int) -> bool:
        return self.is_large(self.graph.values[v].size)

    def _by_axis(self, axes: GroupAxes) -> list[list[int]]:
        """The nodes that reduce large values to small ones, by the axes that they reduce."""
        sinks: dict[frozenset[int], list[int]] = {}
        for n, own in zip(self.group, axes.node_axes, strict=True):
            node = self.graph.nodes[n]
            if any(map(self._is_large, node.outputs)):
                continue
            large = (m for v, m in zip(node.inputs, node.input_maps, strict=True) if self._is_large(v))
            held = {a for m in large for dims in compose(m, own) for a in dims}
            roles = zip(own, node.roles, strict=True)
            reduced = {a for dims, role in roles if role == DimRole.REDUCED for a in dims}
            if held:
                sinks.setdefault(frozenset(held & reduced), []).append(n)
        return list(sinks.values())

    def _chain(self, sinks: Nodes | list[int], stored: Set[int] = frozenset()) -> Nodes:
        return chain_of(self.graph, sinks, self.is_large, self._positions, self.backend, stored)

    def _stages(self, sinks: list[int], leading: Nodes) -> Iterator[Nodes]:
        wanted = set(sinks)
        for stage in stages(self.graph, tuple(sorted({*sinks, *leading})), self.backend):
            side = tuple(n for n in stage if n in wanted)
            if side:
                yield side


def _with_small(graph: Graph, group: Nodes, backend: str) -> Nodes:
    """``group`` with the nodes that depend on its members alone, and those on a path between two members, as
    long as no other contraction is among them: for example operations on a maximum before it is subtracted.
    Without them, kernels that wait for each other would count as a plan."""
    alone = set(group)

    def readers(m: int) -> Iterator[int]:
        for n in {c for v in graph.nodes[m].outputs for c in graph.consumers[v]} - alone:
            if can_nest(graph.nodes[n], backend) and not graph.nodes[n].flops.matrix:
                yield n

    after = reachable(group, readers)
    before = reachable(
        group, lambda n: after.intersection([graph.values[v].producer for v in graph.nodes[n].inputs])
    )
    for n in sorted(after):
        if all(graph.values[v].producer in alone for v in graph.nodes[n].inputs):
            alone.add(n)
    return tuple(sorted(alone | before))
