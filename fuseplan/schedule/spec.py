"""The spec of a kernel from its parts: a group, its layout, and the role and tile of each axis."""

from __future__ import annotations

from costmodel.axes import GroupAxes
from costmodel.graph import Boundary, Graph, boundary
from costmodel.kernel import Access, Axis, AxisRole, KernelSpec
from fuseplan.schedule.layout import Layout
from fuseplan.schedule.tilings import Tiles


def whole_array_spec(graph: Graph, nodes: tuple[int, ...], edge: Boundary | None = None) -> KernelSpec:
    """The group left to XLA as it is: whole arrays in, whole arrays out."""
    edge = edge or boundary(graph, nodes)

    def whole(v: int) -> Access:
        return Access(v, ((),) * len(graph.values[v].shape))

    no_axes = tuple(((),) * len(graph.nodes[n].dims) for n in nodes)
    return KernelSpec(nodes, (), no_axes, tuple(map(whole, edge.reads)), tuple(map(whole, edge.writes)))


def is_nest(graph: Graph, spec: KernelSpec) -> bool:
    """Whether the kernel is one of those that are offered beside what the rules allow: it has contractions,
    and makes more than one pass along their axis, or none."""
    if spec.capabilities.loop_nest:
        return True
    products = any(graph.nodes[n].flops.matrix for n in spec.nodes)
    return products and bool(spec.axes) and (bool(spec.passes) or spec.streamed is None)


class SpecMaker:
    """Makes the specs of one group and one choice of roles, which differ in tiles alone.

    Axes are put in grid order: parallel, streamed (``stream`` innermost), resident.
    """

    def __init__(
        self,
        nodes: tuple[int, ...],
        axes: GroupAxes,
        layout: Layout,
        roles: tuple[AxisRole, ...],
        backend: str,
        stream: int | None = None,
        keeps: bool = False,
    ) -> None:
        self.nodes, self.backend, self.keeps = nodes, backend, keeps
        self.passes: tuple[tuple[int, ...], ...] = ()
        ranked = sorted(range(len(roles)), key=lambda a: (roles[a], a == stream, a))
        self.order = [(a, axes.sizes[a], roles[a]) for a in ranked]
        new = {old: i for i, (old, _, _) in enumerate(self.order)}

        def renumber(access: Access) -> Access:
            return Access(access.value, tuple(tuple(new[a] for a in dims) for dims in access.axes))

        self.node_axes = tuple(tuple(tuple(new[a] for a in dims) for dims in own) for own in axes.node_axes)
        self.reads = tuple(map(renumber, layout.reads))
        self.writes = tuple(map(renumber, layout.writes))

    def __call__(self, tiles: Tiles) -> KernelSpec:
        axes = tuple(Axis(size, role, tiles[a]) for a, size, role in self.order)
        return KernelSpec(
            self.nodes, axes, self.node_axes, self.reads, self.writes, self.backend, self.passes, self.keeps
        )
