"""Schedule: a group of nodes becomes kernels to choose from, each with its tiles.

Every axis of a group is *parallel* (a grid axis), *streamed* (an inner loop with carried
accumulators) or *resident* (whole in the block). Which of them it may be follows from how
the group's nodes and results use it; how large its tile is, from what fits on chip.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from costmodel.axes import Conflict, GroupAxes, NodeAxes, compose, unify
from costmodel.device import DeviceSpec
from costmodel.graph import DimRole, Graph, Node, OpKind
from costmodel.kernel import Access, Axis, AxisRole, KernelSpec
from costmodel.memory import footprint
from costmodel.roofline import estimate
from fuseplan.errors import Verdict
from fuseplan.plan import Kernel
from fuseplan.tiles import Contraction, Layout, tilings


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a group exchanges with the rest: values read, and values that must be written."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


def boundary(graph: Graph, nodes: tuple[int, ...]) -> Boundary:
    """Live-in values by first use, and live-out values by node order."""
    inside = set(nodes)
    made = {v for n in nodes for v in graph.nodes[n].outputs}
    reads = dict.fromkeys(v for n in nodes for v in graph.nodes[n].inputs if v not in made)
    results = set(graph.outputs)
    writes = [
        v
        for n in nodes
        for v in graph.nodes[n].outputs
        if v in results or any(c not in inside for c in graph.consumers[v])
    ]
    return Boundary(tuple(reads), tuple(writes))


class Scheduler:
    """Prices groups of one graph on one device: legality first, then the best schedule."""

    def __init__(self, graph: Graph, device: DeviceSpec) -> None:
        self.graph = graph
        self.device = device
        self.outputs = frozenset(graph.outputs)

    def compatible(self, nodes: tuple[int, ...]) -> Verdict | None:
        """Why ``nodes`` can never share a kernel, or None.

        Only what stays true of every larger group is tested here, so that a refusal prunes
        them all.
        """
        members = [self.graph.nodes[n] for n in nodes]
        if len(members) == 1:
            return None
        refused = self._kinds(members) or self._contractions(members)
        if refused is None and self.device.backend == "xla":
            refused = self._reductions_end_loops(members)
        return refused or self._shapes(self.graph, nodes)

    def _kinds(self, members: list[Node]) -> Verdict | None:
        for node in members:
            if node.effects:
                return Verdict("side-effects", f"{node.op} has side effects", (node.id,))
            if node.kind == OpKind.OPAQUE:
                return Verdict("opaque", f"{node.op} is a step of its own", (node.id,))
            if self.device.backend not in node.backends:
                return Verdict(
                    "backend", f"{self.device.backend} kernels cannot contain {node.op}", (node.id,)
                )
        return None

    def _contractions(self, members: list[Node]) -> Verdict | None:
        anchors = [n for n in members if n.kind == OpKind.OUT_ELEMENTWISE_FUSABLE]
        if not anchors:
            return None
        if len(anchors) > 1:
            return Verdict(
                "shapes",
                f"{anchors[0].op} and {anchors[1].op} would each need the other's result whole",
                tuple(n.id for n in anchors),
            )
        made = {v for n in members for v in n.outputs}
        anchor = anchors[0]
        if made.intersection(anchor.inputs):
            return Verdict("shapes", f"nothing is fused into the operands of {anchor.op}", (anchor.id,))
        for node in members:
            if node.kind == OpKind.REDUCTION:
                return Verdict(
                    "shapes", f"{node.op} needs whole rows of the result of {anchor.op}", (anchor.id, node.id)
                )
        return None

    def _reductions_end_loops(self, members: list[Node]) -> Verdict | None:
        """XLA's CPU loops take elementwise work and movement into a reduction or each other,
        but nothing after a reduction or around a contraction."""
        made_by = {v: n for n in members if n.kind >= OpKind.REDUCTION for v in n.outputs}
        for node in members:
            if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
                return Verdict("backend", f"XLA runs {node.op} on its own on this device", (node.id,))
            for v in node.inputs:
                if v in made_by:
                    return Verdict(
                        "backend",
                        f"XLA ends a loop at {made_by[v].op}: {node.op} starts another",
                        (made_by[v].id, node.id),
                    )
        return None

    @staticmethod
    def _shapes(graph: Graph, nodes: tuple[int, ...]) -> Verdict | None:
        axes = unify(graph, nodes)
        if isinstance(axes, Conflict):
            return Verdict("shapes", axes.reason, (axes.producer, axes.consumer))
        return None

    def price(self, nodes: tuple[int, ...]) -> Kernel | Verdict:
        """The fastest kernel for ``nodes`` (ascending ids), or why there is none.

        A single node is always possible: it can be left to XLA. Ties are broken by memory
        traffic, then by on-chip bytes, then by the order of enumeration.
        """
        if len(nodes) == 1:
            spec = whole_array_spec(self.graph, nodes)
            return Kernel(spec, estimate(self.graph, spec, self.device))
        refused = self.compatible(nodes)
        if refused is not None:
            return refused
        best: Kernel | None = None
        best_key: tuple[int, int, int] | None = None
        for spec in self.schedules(nodes):
            cost = estimate(self.graph, spec, self.device)
            key = (cost.time_ps, cost.hbm_bytes, cost.onchip_bytes)
            if best_key is None or key < best_key:
                best, best_key = Kernel(spec, cost), key
        if best is None:
            return Verdict(
                "on-chip",
                f"no tile of these {len(nodes)} operations fits {self.device.onchip_bytes:,} bytes on chip",
                nodes,
            )
        return best

    def floor(self, nodes: tuple[int, ...]) -> int:
        """Picoseconds that no partition of ``nodes`` beats: one launch, and each value that
        crosses the set's boundary moved once at full bandwidth. Bitcasts are free."""
        moving = [n for n in map(self.graph.nodes.__getitem__, nodes) if not n.bitcast]
        if not moving:
            return 0
        inside = set(nodes)
        values = self.graph.values
        read = {v for n in moving for v in n.inputs if values[v].producer not in inside}
        written = {
            v
            for n in moving
            for v in n.outputs
            if v in self.outputs or any(c not in inside for c in self.graph.consumers[v])
        }
        moved_bytes = sum(values[v].nbytes for v in read) + sum(values[v].nbytes for v in written)
        return self.device.launch_ps + moved_bytes * 10**12 // self.device.hbm_bytes_per_s

    def schedules(self, nodes: tuple[int, ...]) -> Iterator[KernelSpec]:
        """Every schedule of the group that fits on chip, in a fixed order."""
        if self.device.backend == "xla":
            yield whole_array_spec(self.graph, nodes)
            return
        axes = unify(self.graph, nodes)
        if isinstance(axes, Conflict):
            return
        layout = group_layout(self.graph, nodes, axes)
        for roles in axis_roles(self.graph, nodes, axes, layout):
            for tiles in tilings(layout, roles, self.device, self._fits(nodes, axes, layout, roles)):
                yield make_spec(nodes, axes, layout, roles, tiles, self.device.backend)

    def _fits(self, nodes, axes, layout, roles):  # type: ignore[no-untyped-def]
        def fits(tiles: tuple[int, ...]) -> bool:
            spec = make_spec(nodes, axes, layout, roles, tiles, self.device.backend)
            return footprint(self.graph, spec, self.device).fits(self.device)

        return fits


def whole_array_spec(graph: Graph, nodes: tuple[int, ...]) -> KernelSpec:
    """The group left to XLA as it is: whole arrays in, whole arrays out."""
    edge = boundary(graph, nodes)

    def whole(v: int) -> Access:
        return Access(v, ((),) * len(graph.values[v].shape))

    no_axes = tuple(((),) * len(graph.nodes[n].dims) for n in nodes)
    return KernelSpec(nodes, (), no_axes, tuple(map(whole, edge.reads)), tuple(map(whole, edge.writes)))


def group_layout(graph: Graph, nodes: tuple[int, ...], axes: GroupAxes) -> Layout:
    """How the group's axes lie in the arrays it reads and writes."""
    edge = boundary(graph, nodes)
    external, written = set(edge.reads), set(edge.writes)
    reads: dict[Access, None] = {}
    writes: list[Access] = []
    inner: dict[Access, None] = {}
    contraction: Contraction | None = None
    for n, own in zip(nodes, axes.node_axes, strict=True):
        node = graph.nodes[n]
        for v, dim_map in zip(node.inputs, node.input_maps, strict=True):
            if v in external:
                reads[Access(v, compose(dim_map, own))] = None
        for v, dim_map in zip(node.outputs, node.output_maps, strict=True):
            access = Access(v, compose(dim_map, own))
            inner[access] = None
            if v in written:
                writes.append(access)
        if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
            contraction = contraction_axes(node, own)
    by_id = {a.value: a for a in writes}
    return Layout(
        axes.sizes,
        tuple(reads),
        tuple(by_id[v] for v in edge.writes),
        tuple(inner),
        contraction,
    )


def contraction_axes(node: Node, own: NodeAxes) -> Contraction:
    """Sort the axes of a two-operand contraction: batch, rows, columns, depth."""
    lhs, rhs = (Access(0, compose(m, own)).axis_set for m in node.input_maps)
    depth = {a for dims, role in zip(own, node.roles, strict=True) if role == DimRole.REDUCED for a in dims}
    order = [a for dims in own for a in dims]
    return Contraction(
        tuple(a for a in order if a in lhs and a in rhs and a not in depth),
        tuple(a for a in order if a in lhs and a not in rhs),
        tuple(a for a in order if a in rhs and a not in lhs),
        tuple(a for a in order if a in depth),
    )


def axis_roles(
    graph: Graph, nodes: tuple[int, ...], axes: GroupAxes, layout: Layout
) -> Iterator[tuple[AxisRole, ...]]:
    """The ways to treat each axis: at most one streamed, the others fixed by their use."""
    count = len(axes.sizes)
    parallel = []
    written = [w.axis_set for w in layout.writes]
    for a in range(count):
        indexes_all = all(a in w for w in written)
        parallel.append(indexes_all and not axes.reduced[a] and not axes.whole[a])
    base = [AxisRole.PARALLEL if p else AxisRole.RESIDENT for p in parallel]
    streamable = [
        a
        for a in range(count)
        if axes.reduced[a]
        and not axes.whole[a]
        and not any(a in w for w in written)
        and not _repeats(graph, nodes, axes, a)
    ]
    if layout.contraction is not None:
        # A matmul always streams what it contracts: a whole operand rarely fits.
        depth = layout.contraction.depth
        if depth and depth[0] in streamable:
            roles = list(base)
            roles[depth[0]] = AxisRole.STREAMED
            yield tuple(roles)
        return
    if any(parallel) or not streamable:
        yield tuple(base)
    for a in streamable:
        roles = list(base)
        roles[a] = AxisRole.STREAMED
        yield tuple(roles)


def _repeats(graph: Graph, nodes: tuple[int, ...], axes: GroupAxes, axis: int) -> bool:
    """Whether a node that walks ``axis`` needs a result of reducing it: a second pass."""
    reduced: set[int] = set()
    for n, own in zip(nodes, axes.node_axes, strict=True):
        node = graph.nodes[n]
        depends = any(v in reduced for v in node.inputs)
        carries = any(axis in dims for dims in own)
        if depends and carries:
            return True
        consumes = any(
            axis in dims and role == DimRole.REDUCED for dims, role in zip(own, node.roles, strict=True)
        )
        if depends or consumes:
            reduced.update(node.outputs)
    return False


def make_spec(
    nodes: tuple[int, ...],
    axes: GroupAxes,
    layout: Layout,
    roles: tuple[AxisRole, ...],
    tiles: tuple[int, ...],
    backend: str,
) -> KernelSpec:
    """Put axes in grid order (parallel, streamed, resident) and renumber the accesses."""
    order = sorted(range(len(roles)), key=lambda a: (roles[a], a))
    new = {old: i for i, old in enumerate(order)}

    def renumber(access: Access) -> Access:
        return Access(access.value, tuple(tuple(new[a] for a in dims) for dims in access.axes))

    return KernelSpec(
        nodes,
        tuple(Axis(axes.sizes[a], roles[a], tiles[a]) for a in order),
        tuple(tuple(tuple(new[a] for a in dims) for dims in own) for own in axes.node_axes),
        tuple(map(renumber, layout.reads)),
        tuple(map(renumber, layout.writes)),
        backend,
    )
