"""Layout of a group: the arrays that it reads and writes, and the roles that each axis may have.

Whether an axis is parallel, streamed or resident follows from how the group's nodes and
results use it; nothing here depends on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod

from costmodel.axes import GroupAxes, NodeAxes, compose, reduced_axes
from costmodel.graph import Boundary, DimMap, Graph, Node, OpKind, boundary
from costmodel.kernel import Access, Axis, AxisRole, KernelSpec

SHORT_AXIS = 32
"""An axis of at most this extent is short. A parallel one is whole or has tiles of one, and is tiled together
with the next; a reduced one may be whole beside an axis that is streamed in passes."""


@dataclass(frozen=True, slots=True)
class Contraction:
    """The axes of a matmul by what they do; ``depth`` is contracted."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    depth: tuple[int, ...]

    def is_flat(self, tiles: tuple[int, ...]) -> bool:
        """Whether a tile of it, with these extents of each axis, is one product of two matrices."""
        sides = (self.rows, self.columns, self.depth)
        return all(tiles[a] == 1 for a in self.batch) and all(
            sum(tiles[a] > 1 for a in side) <= 1 for side in sides
        )


@dataclass(frozen=True, slots=True)
class Blocks:
    """The distinct layouts of a group's blocks."""

    merged: tuple[tuple[int, ...], ...]
    """Axes merged in one dimension of a value."""
    vectors: tuple[tuple[int, ...], ...]
    """Axes merged in the only dimension of a value."""
    exchanged: tuple[DimMap, ...]
    """Axes of the dimensions of each array read or written."""
    every: tuple[DimMap, ...]
    """Those of all values."""
    depth: tuple[int, ...]
    """The contracted axes."""
    are_vectors: bool
    """Whether each array read or written has one dimension at most."""


@dataclass(frozen=True)
class Layout:
    """How a group's axes lie in arrays: those it reads and writes, and its inner values."""

    sizes: tuple[int, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    inner: tuple[Access, ...]
    contraction: Contraction | None
    joint: tuple[tuple[int, ...], ...] = ()
    """Axes that a dimension which some node needs whole splits into, where they are several."""

    @cached_property
    def blocks(self) -> Blocks:
        """The distinct layouts of all blocks."""
        exchanged = dict.fromkeys(a.axes for a in self.reads + self.writes)
        every = dict.fromkeys([*exchanged, *(a.axes for a in self.inner)])
        merged = dict.fromkeys(dims for axes in every for dims in axes if len(dims) > 1)
        vectors = tuple(axes[0] for axes in every if len(axes) == 1)
        depth = self.contraction.depth if self.contraction is not None else ()
        are_vectors = all(len(axes) < 2 for axes in exchanged)
        return Blocks(tuple(merged), vectors, tuple(exchanged), tuple(every), depth, are_vectors)

    @cached_property
    def contiguous_axes(self) -> set[int | None]:
        """The axes along which the largest arrays are contiguous: their tiles must be long, or loads are not
        coalesced. Smaller arrays, such as statistics of rows, do not matter."""
        every = dict.fromkeys(a.axes for a in self.reads + self.writes + self.inner)
        extents = [prod([self.sizes[a] for a in set(chain.from_iterable(axes))]) for axes in every]
        largest = max(extents)
        return {_minor(axes) for axes, extent in zip(every, extents, strict=True) if extent == largest}


def _minor(axes: DimMap) -> int | None:
    """The axis along which an array is contiguous in memory."""
    return next((dims[-1] for dims in reversed(axes) if dims), None)


def group_layout(graph: Graph, nodes: tuple[int, ...], axes: GroupAxes, edge: Boundary) -> Layout:
    """How the group's axes lie in the arrays it reads and writes."""
    external, written = set(edge.reads), set(edge.writes)
    reads: dict[Access, None] = {}
    writes: dict[int, Access] = {}
    inner: dict[Access, None] = {}
    joint: dict[tuple[int, ...], None] = {}
    contraction: Contraction | None = None
    for n, own in zip(nodes, axes.node_axes, strict=True):
        node = graph.nodes[n]
        for dims, role in zip(own, node.roles, strict=True):
            if role.is_whole and len(dims) > 1:
                joint[dims] = None
        for v, dim_map in zip(node.inputs, node.input_maps, strict=True):
            if v in external:
                reads[Access(v, compose(dim_map, own))] = None
        for v, dim_map in zip(node.outputs, node.output_maps, strict=True):
            access = Access(v, compose(dim_map, own))
            inner[access] = None
            if v in written:
                writes[v] = access
        if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
            contraction = contraction_axes(node, own)
    ordered = tuple(writes[v] for v in edge.writes)
    return Layout(axes.sizes, tuple(reads), ordered, tuple(inner), contraction, tuple(joint))


def contraction_axes(node: Node, own: NodeAxes) -> Contraction:
    """Sort the axes of a two-operand contraction: batch, rows, columns, depth."""
    lhs, rhs = (Access(0, compose(m, own)).axis_set for m in node.input_maps)
    depth = reduced_axes(node, own)
    order = [a for dims in own for a in dims]
    return Contraction(
        tuple(a for a in order if a in lhs and a in rhs and a not in depth),
        tuple(a for a in order if a in lhs and a not in rhs),
        tuple(a for a in order if a in rhs and a not in lhs),
        tuple(a for a in order if a in depth),
    )


def has_free_axis(graph: Graph, nodes: tuple[int, ...], axes: GroupAxes) -> bool:
    """Whether the group has an axis of ``free_axes``; its layout is not needed."""
    free = _not_held(axes)
    if not free:
        return False
    written = set(boundary(graph, nodes).writes)
    for n, own in zip(nodes, axes.node_axes, strict=True):
        node = graph.nodes[n]
        for v, dim_map in zip(node.outputs, node.output_maps, strict=True):
            if v in written:
                free.intersection_update(chain.from_iterable(compose(dim_map, own)))
    return bool(free)


def free_axes(layout: Layout, axes: GroupAxes) -> set[int]:
    """The axes whose tiles can be computed independently of each other: they index all results, and no node
    reduces them or needs them whole."""
    return _not_held(axes).intersection(*(w.axis_set for w in layout.writes))


def _not_held(axes: GroupAxes) -> set[int]:
    return {a for a in range(len(axes.sizes)) if not (axes.reduced[a] or axes.whole[a])}


def axis_roles(
    graph: Graph, nodes: tuple[int, ...], axes: GroupAxes, layout: Layout
) -> Iterator[tuple[tuple[AxisRole, ...], bool]]:
    """The ways to treat the axes of a group, and whether each needs ``KernelSpec.passes``.

    At most one axis is streamed; the roles of the others follow from their use. An axis that is reduced
    in one pass, and indexes no result, needs no passes. Any other is streamed in several passes, and
    then the group holds no other long axis, or in one pass that writes results (``Capacity`` says where).
    """
    written = [w.axis_set for w in layout.writes]
    held = [a for a in range(len(axes.sizes)) if axes.reduced[a] or axes.whole[a]]
    free = free_axes(layout, axes)
    base = [AxisRole.PARALLEL if a in free else AxisRole.RESIDENT for a in range(len(axes.sizes))]

    def streaming(axis: int) -> tuple[AxisRole, ...]:
        return (*base[:axis], AxisRole.STREAMED, *base[axis + 1 :])

    repeated = repeats(graph, nodes, axes) if held else frozenset()
    streamable = [a for a in held if not axes.whole[a]]
    in_one_pass = [a for a in streamable if a not in repeated and not any(a in w for w in written)]
    if layout.contraction is not None:
        # A matmul always streams the axis that it contracts: a whole operand rarely fits.
        if layout.contraction.depth and layout.contraction.depth[0] in in_one_pass:
            yield streaming(layout.contraction.depth[0]), False
        return
    yield tuple(base), False
    for a in in_one_pass:
        yield streaming(a), False
    for a in streamable:
        others = [b for b in held if b != a]
        are_short = all(axes.sizes[b] <= SHORT_AXIS and not axes.whole[b] for b in others)
        if a not in in_one_pass and (a not in repeated or are_short):
            yield streaming(a), True


def repeats(graph: Graph, nodes: tuple[int, ...], axes: GroupAxes) -> frozenset[int]:
    """The axes that some node walks although it needs a result of reducing them: a second pass."""
    behind: dict[int, set[int]] = {}
    """For each value, the axes whose reduction it depends on."""
    found: set[int] = set()
    for n, own in zip(nodes, axes.node_axes, strict=True):
        node = graph.nodes[n]
        depends = set().union(*(behind[v] for v in node.inputs if v in behind))
        found |= depends.intersection(chain(*own))
        depends |= reduced_axes(node, own)
        if depends:
            behind.update(dict.fromkeys(node.outputs, depends))
    return frozenset(found)


def whole_array_spec(graph: Graph, nodes: tuple[int, ...], edge: Boundary | None = None) -> KernelSpec:
    """The spec of a group that XLA compiles as it is: it reads and writes whole arrays, without tiles."""
    edge = edge or boundary(graph, nodes)

    def whole(v: int) -> Access:
        return Access(v, ((),) * len(graph.values[v].shape))

    no_axes = tuple(((),) * len(graph.nodes[n].dims) for n in nodes)
    return KernelSpec(nodes, (), no_axes, tuple(map(whole, edge.reads)), tuple(map(whole, edge.writes)))


def is_nest(graph: Graph, spec: KernelSpec) -> bool:
    """Whether the kernel is a nest (``fuseplan.schedule.nests``): tiled loops, or a kernel with contractions
    in several passes or without a stream."""
    if spec.capabilities.loop_nest:
        return True
    products = any(graph.nodes[n].flops.matrix for n in spec.nodes)
    return products and bool(spec.axes) and (bool(spec.passes) or spec.streamed is None)


class SpecMaker:
    """Builds the specs of one group and one choice of roles, which differ in their tiles.

    Axes are in grid order: parallel, streamed (``stream`` innermost), resident.
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
        self._axes, self._layout = axes, layout

    @cached_property
    def _renumbered(self) -> tuple[tuple[NodeAxes, ...], tuple[Access, ...], tuple[Access, ...]]:
        """The axes of the nodes, and the arrays read and written, by the places of axes in ``order``."""
        new = {old: i for i, (old, _, _) in enumerate(self.order)}

        def renumber(access: Access) -> Access:
            return Access(access.value, tuple(tuple(new[a] for a in dims) for dims in access.axes))

        node_axes = tuple(tuple(tuple(new[a] for a in dims) for dims in own) for own in self._axes.node_axes)
        return node_axes, tuple(map(renumber, self._layout.reads)), tuple(map(renumber, self._layout.writes))

    def __call__(self, tiles: tuple[int, ...]) -> KernelSpec:
        axes = tuple(Axis(size, role, tiles[a]) for a, size, role in self.order)
        return KernelSpec(self.nodes, axes, *self._renumbered, self.backend, self.passes, self.keeps)
