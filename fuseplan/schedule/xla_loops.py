"""Find the groups of a GPU's or TPU's program that XLA fuses into one loop, and price them.

XLA's loops hold what a tiled kernel cannot: slices, concatenations, pads and gathers of computed arrays, of
which each element is evaluated where it is needed. They also keep XLA's own layout of arrays, which on a TPU
pads less than that of a tiled kernel; there a loop may hold a contraction, too. On a GPU, XLA also runs a
matrix product and the elementwise operations after it as one kernel (its epilogue); such groups are treated
as loops here. A group is *offered* (``Pricing.offers``) where no tiled kernel could hold it, or none could be
nearly as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from math import prod

from costmodel.device import DeviceSpec
from costmodel.floor import Floor
from costmodel.graph import Boundary, Graph, Node, OpKind, boundary
from costmodel.memory import least_array_bytes
from costmodel.roofline import estimate
from costmodel.split_products import contracted_parts
from costmodel.xla_loops import ends_loop, epilogues_of_product, is_one_loop, is_scatter, repeated_in_loop
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.layout import whole_array_spec
from fuseplan.schedule.legality import joins_at_end, refuse_loop
from fuseplan.schedule.pricing import Nodes
from fuseplan.schedule.shared_operands import full_size_operands
from fuseplan.schedule.structure import Signatures
from fuseplan.support.digraph import connected_sets
from fuseplan.support.errors import Verdict
from fuseplan.support.work import Work

MAX_OPERATIONS = 1_000
"""Operations of a loop: XLA's own fusions have hundreds at most."""

GAIN_DIVISOR = 20
"""A loop is offered beside a tiled kernel if it saves this part of its time: the model is no more exact."""

MAX_ATTEMPTS = 8
"""Times that a loop is made smaller because it would evaluate an expensive operation more than once."""

MAX_WORK = 50_000
"""Operations in all loops that are looked at, some tenths of a second of work."""

MAX_PRICING = 100_000
"""Units of work (``fuseplan.support.work``) of comparing loops with tiled kernels."""


class XlaLoops:
    """The loops of one graph that are offered on a device that has kernels of its own.

    Args:
        graph: the graph.
        device: the device.
        floor: lower bounds on kernels of ``graph`` on ``device``.
        tiled: the fastest tiled kernel of a group, or why there is none. It is not kept.
        also: groups that are candidates, too, such as the fusions of XLA's own rules.
    """

    def __init__(
        self,
        graph: Graph,
        device: DeviceSpec,
        floor: Floor,
        tiled: Callable[[Nodes], Kernel | Verdict],
        also: Iterable[Nodes] = (),
    ) -> None:
        self._graph, self._device = graph, device
        self.offers = _Candidates(graph, device, floor, tiled).offers(also)
        """The loops that no tiled kernel could hold, or none nearly as fast."""
        self._offered = frozenset(self.offers)

    def has(self, nodes: Nodes) -> bool:
        """Whether the group is offered."""
        return nodes in self._offered

    def kernel(self, nodes: Nodes, edge: Boundary) -> Kernel | None:
        """The loop of an offered group that reads and writes ``edge``; None if it cannot be one."""
        return _loop(self._graph, self._device, nodes, edge) if self.has(nodes) else None


def faster(tiled: Kernel | Verdict, loop: Kernel | None) -> Kernel | Verdict:
    """The faster of a tiled kernel and a loop of one group; the tiled one of equals."""
    if loop is None:
        return tiled
    return loop if isinstance(tiled, Verdict) or loop.cost.time_ps < tiled.cost.time_ps else tiled


def _loop(graph: Graph, device: DeviceSpec, nodes: Nodes, edge: Boundary) -> Kernel | None:
    if refuse_loop(graph, nodes, device.backend, edge) is not None:
        return None
    if any(contracted_parts(graph, graph.nodes[n], device) > 1 for n in nodes):
        return None  # The kernel of such a product has no epilogue.
    spec = whole_array_spec(graph, nodes, edge)
    return Kernel(spec, estimate(graph, spec, device))


class _Candidates:
    """The groups that may be loops, and the comparison of each with its tiled kernel."""

    def __init__(
        self, graph: Graph, device: DeviceSpec, floor: Floor, tiled: Callable[[Nodes], Kernel | Verdict]
    ) -> None:
        self.graph, self.device = graph, device
        self._floor, self._tiled = floor, tiled
        self._left = MAX_WORK
        self._pricing = Work(MAX_PRICING)
        self._better_by_structure: dict[tuple[int, ...], bool] = {}

    def offers(self, also: Iterable[Nodes] = ()) -> tuple[Nodes, ...]:
        """As ``XlaLoops.offers``, of ``also`` and its own candidates."""
        candidates = [*also, *self._products(), *(self._loops() if any(self._prefers_loop) else ())]
        return tuple(nodes for nodes in dict.fromkeys(candidates) if self._is_better(nodes))

    def _products(self) -> Iterable[Nodes]:
        """Candidates: each matrix product with every prefix of its epilogue."""
        for node in self.graph.nodes if self.device.capabilities.fuses_epilogues else ():
            for nodes in epilogues_of_product(self.graph, node.id):
                self._left -= len(nodes)
                if self._left <= 0:
                    return
                yield nodes

    @cached_property
    def _fuses(self) -> list[bool]:
        """For each node, whether a loop may hold it: alone, or, if it moves data, with the contraction that
        reads it."""
        graph, backend = self.graph, self.device.backend

        def fuses(n: int) -> bool:
            if refuse_loop(graph, (n,), backend) is None:
                return True
            readers = {r for v in graph.nodes[n].outputs for r in graph.consumers[v]}
            is_operand = [graph.nodes[r].kind == OpKind.OUT_ELEMENTWISE_FUSABLE for r in readers] == [True]
            # A transposed operand may be in the loop of its contraction.
            moves = graph.nodes[n].kind == OpKind.INJECTIVE
            return moves and is_operand and refuse_loop(graph, (n, *readers), backend) is None

        return [fuses(node.id) for node in graph.nodes]

    @cached_property
    def _prefers_loop(self) -> list[bool]:
        """For each node, whether a loop may be better than a tiled kernel because of it: the kernel cannot
        hold it, or pads an array of it more, or has too few tiles for its sums, or reads an operand of its
        contraction for each tile of the other."""
        graph, backend = self.graph, self.device.backend
        found = []
        for node, fuses in zip(graph.nodes, self._fuses, strict=True):
            touched = [graph.values[v] for v in node.inputs + node.outputs]
            pads = self.device.sequential_grid and any(least_array_bytes(v) > v.nbytes for v in touched)
            is_costly = node.kind in (OpKind.INJECTIVE, OpKind.REDUCTION, OpKind.OUT_ELEMENTWISE_FUSABLE)
            found.append(fuses and (pads or backend not in node.backends or is_costly))
        return found

    def _loops(self) -> Iterable[Nodes]:
        """Candidates: for each node whose result must be written, or is moved, the operations from which it
        alone is computed; for each data movement that several loops read, these loops as one; for each result
        that no loop reads, also all from which it is computed, of which others may be written, too; and those
        of several results of one shape that overlap."""
        graph = self.graph
        whole: list[set[int]] = []
        for node in graph.nodes:
            if not self._fuses[node.id] or self._left <= 0:
                continue
            readers = {r for v in node.outputs for r in graph.consumers[v]}
            goes_on = [r for r in readers if self._fuses[r] and not self._ends(node)]
            is_read = any(v in graph.results for v in node.outputs) or len(readers) != 1
            moves = node.kind == OpKind.INJECTIVE
            leaves_mover = moves and not all(self._prefers_loop[r] for r in goes_on)
            is_moved = any(graph.nodes[r].kind == OpKind.INJECTIVE for r in goes_on)
            if is_read or not goes_on or leaves_mover or is_moved:
                yield from self._worth_pricing(self._cone([node.id], alone=True))
            if moves and len(goes_on) > 1:
                cone = self._cone(map(self._end_of, goes_on), alone=True)
                if node.id in cone and self._is_convex(cone):
                    yield from self._worth_pricing(cone)
            if not goes_on:
                whole.append(self._cone([node.id], alone=False))
        for cone in (*whole, *self._merged(whole)):
            if self._left > 0 and self._is_convex(cone):
                yield from self._worth_pricing(cone)

    def _worth_pricing(self, cone: set[int]) -> Iterable[Nodes]:
        if not is_one_loop(self.graph, cone) or not any(self._prefers_loop[n] for n in cone):
            return
        members = [self.graph.nodes[n] for n in cone]
        # Tiled kernels, too, reduce a few elements: a loop does so beside what they cannot hold.
        reduces_few = any(node.kind == OpKind.REDUCTION and not self._ends(node) for node in members)
        if not reduces_few or any(self.device.backend not in node.backends for node in members):
            yield tuple(sorted(cone))

    def _end_of(self, n: int) -> int:
        """The last operation of a loop that holds ``n`` and writes one array: the first one whose result is
        needed outside of the graph, or read by several, or by no loop."""
        graph = self.graph
        while not self._ends(graph.nodes[n]):
            made = graph.nodes[n].outputs
            readers = list({r for v in made for r in graph.consumers[v]})
            if len(readers) != 1 or any(v in graph.results for v in made) or not self._fuses[readers[0]]:
                break
            n = readers[0]
            self._left -= 1
        return n

    def _cone(self, roots: Iterable[int], alone: bool) -> set[int]:
        """``roots`` and the operations from which they are computed, of such as may be in their loop; with
        ``alone``, only those whose results nothing else needs."""
        roots = sorted(set(roots))
        apart: set[int] = set()
        for _ in range(MAX_ATTEMPTS):
            cone = self._grown(roots, alone, apart)
            self._left -= len(cone)
            repeated = repeated_in_loop(
                self.graph, tuple(sorted(cone)), self.device.capabilities.loop_indices
            )
            if not repeated:
                break
            apart.update(repeated)
        return cone

    def _grown(self, roots: Sequence[int], alone: bool, apart: Collection[int]) -> set[int]:
        """As ``_cone``, without the operations ``apart``."""
        graph, cone = self.graph, set(roots)
        waiting = list(roots)
        has_product = any(graph.nodes[n].kind == OpKind.OUT_ELEMENTWISE_FUSABLE for n in roots)
        while waiting and len(cone) < MAX_OPERATIONS:
            n = waiting.pop()
            for v in self._fused_operands(n, n in roots):
                producer = graph.values[v].producer
                if producer < 0 or producer in cone or producer in apart or not self._fuses[producer]:
                    continue
                kind = graph.nodes[producer].kind
                if self._ends(graph.nodes[producer]) or (
                    kind == OpKind.OUT_ELEMENTWISE_FUSABLE and has_product
                ):
                    continue
                made = graph.nodes[producer].outputs
                is_inner = all(v not in graph.results and cone.issuperset(graph.consumers[v]) for v in made)
                if not alone or is_inner:
                    cone.add(producer)
                    waiting.append(producer)
                    has_product = has_product or kind == OpKind.OUT_ELEMENTWISE_FUSABLE
        return cone

    def _fused_operands(self, n: int, is_root: bool) -> Sequence[int]:
        """The operands that a loop may compute for node ``n``: not the table of a scatter, nor what the
        device's loops only move after it was written."""
        node, can = self.graph.nodes[n], self.device.capabilities
        if node.op in can.loop_movers and not can.loops_move_computed:
            return node.inputs if is_root and joins_at_end(self.graph, node, ()) else ()
        return node.inputs[1:] if is_scatter(node) else node.inputs

    def _ends(self, node: Node) -> bool:
        """Whether a loop ends at a node."""
        return ends_loop(self.graph, node, self.device.capabilities)

    def _merged(self, cones: list[set[int]]) -> list[set[int]]:
        """The unions of cones whose last operations have one iteration space, and that have an array of that
        size in common, as XLA fuses siblings. A contraction reads its operands in another order."""
        graph = self.graph
        first: dict[tuple[tuple[int, ...], int], int] = {}
        """The first cone of an iteration space that has an array."""
        pairs: list[tuple[int, int]] = []
        for k, cone in enumerate(cones):
            dims = graph.nodes[max(cone)].dims
            size = prod(dims)
            touched = {v for n in cone for v in self._touched[n]}
            self._left -= len(touched)
            pairs += [(first.setdefault((dims, v), k), k) for v in touched if graph.values[v].size >= size]
        return [set().union(*(cones[k] for k in some)) for some in connected_sets(len(cones), pairs)]

    @cached_property
    def _touched(self) -> list[tuple[int, ...]]:
        """For each node, its results and its full-size operands: a scalar ties no operations, nor does an
        array that is small beside another."""
        return [(*node.outputs, *full_size_operands(self.graph, node)) for node in self.graph.nodes]

    def _is_better(self, nodes: Nodes) -> bool:
        """Whether the group is a loop, and no tiled kernel is nearly as fast; groups of one structure are
        compared once. False where there is no work left to compare them."""
        key = self._signatures.of(nodes).key
        if key not in self._better_by_structure:
            self._better_by_structure[key] = self._beats_tiles(nodes)
        return self._better_by_structure[key]

    def _beats_tiles(self, nodes: Nodes) -> bool:
        if self._pricing.is_spent:
            return False
        self._pricing.spend_price(len(nodes), loops=True)
        kernel = _loop(self.graph, self.device, nodes, boundary(self.graph, nodes))
        if kernel is None:
            return False
        gains_from_ps = kernel.cost.time_ps + kernel.cost.time_ps // GAIN_DIVISOR
        if self._floor.one_kernel(nodes) >= gains_from_ps:
            return True
        self._pricing.spend_price(len(nodes))
        tiled = self._tiled(nodes)
        return isinstance(tiled, Verdict) or tiled.cost.time_ps >= gains_from_ps

    @cached_property
    def _signatures(self) -> Signatures:
        return Signatures(self.graph)

    @cached_property
    def _producers(self) -> list[tuple[int, ...]]:
        """The operations that each node reads from."""
        values = self.graph.values
        return [
            tuple({p for v in node.inputs if (p := values[v].producer) >= 0}) for node in self.graph.nodes
        ]

    def _is_convex(self, nodes: set[int]) -> bool:
        """Whether no path leaves the group and returns."""
        low, high = min(nodes), max(nodes)
        self._left -= high - low  # the operations that paths may lead through
        left: set[int] = set()
        """Operations outside that wait for one inside."""
        for n in range(low, high + 1):
            if n in nodes:
                if not left.isdisjoint(self._producers[n]):
                    return False
            elif any(p in nodes or p in left for p in self._producers[n]):
                left.add(n)
        return True
