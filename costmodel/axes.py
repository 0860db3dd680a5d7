"""Find the axes of a group: classes of iteration dimensions that are tiled together.

A value that one node of the group computes and another reads unifies the producer's dimensions with the
consumer's. Where one side splits a dimension that the other keeps (a reshape), the kept one is split too. A
group whose dimensions cannot be unified has no common tiling: the result is a ``Conflict`` with the value and
its two different blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from costmodel.graph import DimMap, DimRole, Graph, Node

NodeAxes = tuple[tuple[int, ...], ...]
"""For each iteration dimension of a node, the axes it splits into, major first."""


@dataclass(frozen=True, slots=True)
class GroupAxes:
    """The axes of a group: their sizes, their use, and the axes of each node."""

    sizes: tuple[int, ...]
    reduced: tuple[bool, ...]
    """Whether some node of the group reduces along the axis."""
    whole: tuple[bool, ...]
    """Whether some node needs the whole axis at once, so that it cannot be tiled."""
    node_axes: tuple[NodeAxes, ...]
    """For each node of the group, its axes."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two nodes of a group need different blocks of one value."""

    value: int
    producer: int
    consumer: int
    reason: str


def unify(graph: Graph, nodes: tuple[int, ...], by_index: bool = False) -> GroupAxes | Conflict:
    """The axes of the group ``nodes`` (ascending ids), or the conflict that it has none for.

    Producer and reader of a value inside the group *must* agree on its axes. Several readers of a value from
    outside *may* agree: their axes are unified, so that they share one block, unless that leads to a conflict
    (``x + x.T`` reads two different blocks of ``x``).

    ``by_index``: kernels load by index (``Backend.loads_by_index``). An ``ADDRESSED`` dimension has no axes
    then, and its operand must come from outside of the group, since only arrays in memory have addresses.
    """
    return Unifier(graph, by_index)(nodes)


Link = tuple[int, int, tuple[tuple[int, int], ...] | None]
"""An operand computed by a node: the value, its producer, and pairs of dimensions (producer's, consumer's) to
unify; None where a dimension merges several."""


class Unifier:
    """``unify`` for many groups of one graph; caches the links of each node."""

    def __init__(self, graph: Graph, by_index: bool = False) -> None:
        self.graph, self.by_index = graph, by_index
        self._links: dict[int, tuple[Link, ...]] = {}

    def __call__(self, nodes: tuple[int, ...]) -> GroupAxes | Conflict:
        return GroupUnifier(self, nodes).run()

    def links(self, node: Node) -> tuple[Link, ...]:
        """The operands of ``node`` that other nodes compute."""
        found = self._links.get(node.id)
        if found is None:
            found = self._links[node.id] = tuple(self._link(node))
        return found

    def _link(self, node: Node) -> Iterator[Link]:
        for v, in_map in zip(node.inputs, node.input_maps, strict=True):
            producer = self.graph.values[v].producer
            if producer < 0:
                continue
            out_map = made_map(self.graph.nodes[producer], v)
            pairs = [(out, dims) for out, dims in zip(out_map, in_map, strict=True) if out]
            simple = all(len(out) == len(dims) == 1 for out, dims in pairs)
            yield v, producer, tuple((out[0], dims[0]) for out, dims in pairs) if simple else None


def made_map(node: Node, v: int) -> DimMap:
    """The map of the result ``v`` of ``node``."""
    return node.output_maps[node.outputs.index(v)]


def compose(dim_map: DimMap, node_axes: NodeAxes) -> DimMap:
    """A node's map of a value, in terms of the group's axes."""
    return tuple(
        [
            node_axes[dims[0]] if len(dims) == 1 else tuple([a for d in dims for a in node_axes[d]])
            for dims in dim_map
        ]
    )


def reduced_axes(node: Node, own: NodeAxes) -> set[int]:
    """The axes of a group that a node with the axes ``own`` reduces."""
    if DimRole.REDUCED not in node.roles:
        return set()
    roles = zip(own, node.roles, strict=True)
    return {a for dims, role in roles if role is DimRole.REDUCED for a in dims}


Classes = list[list[int]]
"""For each node of a graph, the class of each of its dimensions."""


def axis_classes(graph: Graph, nodes: Iterable[Node]) -> Classes:
    """Classes of dimensions that values connect which ``nodes`` make or read. Every dimension of
    another node is a class of its own. Copies of an operation, which a group computes once, have one class
    for each dimension.

    Dimensions of different classes are different axes in every group of ``nodes``.
    """
    slots = _Slots(graph)
    first = slots.first
    seen: dict[int, tuple[int, DimMap]] = {}
    for node in nodes:
        slots.join_copies(node)
        for v, dim_map in zip(node.inputs + node.outputs, node.input_maps + node.output_maps, strict=True):
            other, known = seen.setdefault(v, (node.id, dim_map))
            if other == node.id:
                continue
            for left, right in zip(known, dim_map, strict=True):
                for a in left:
                    for b in right:
                        slots.join(first[other] + a, first[node.id] + b)
    return slots.by_node([slots.root(slot) for slot in range(len(slots.extents))])


def minor_extents(graph: Graph) -> list[list[int]]:
    """For each dimension of each node, the least extent that its innermost axis has in any group.

    ``GroupUnifier.unify`` splits from the minor end: the innermost axis of dimensions that are innermost
    wherever they are merged is as long as the shortest of them. Of other dimensions nothing is known: 1.
    """
    slots = _Slots(graph)
    first = slots.first
    seen: dict[int, tuple[int, DimMap]] = {}
    unknown: set[int] = set()
    for node in graph.nodes:
        slots.join_copies(node)
        for v, dim_map in zip(node.inputs + node.outputs, node.input_maps + node.output_maps, strict=True):
            other, known = seen.setdefault(v, (node.id, dim_map))
            for left, right in zip(known, dim_map, strict=True):
                ends = [[first[n] + d for d in dims] for n, dims in ((other, left), (node.id, right))]
                unknown.update(slot for of in ends for slot in of[:-1])
                if len(left) > 1 < len(right):
                    unknown.update(ends[0] + ends[1])
                if left and right and other != node.id:
                    slots.join(ends[0][-1], ends[1][-1])
    least = {slots.root(slot): 1 for slot in unknown}
    for slot, extent in enumerate(slots.extents):
        root = slots.root(slot)
        least[root] = min(least.get(root, extent), extent)
    return slots.by_node([least[slots.root(slot)] for slot in range(len(slots.extents))])


class _Slots:
    """The dimensions of all nodes of a graph, numbered, in disjoint sets; the root of a set is its lowest."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.extents = [extent for node in graph.nodes for extent in node.dims]
        self.first: list[int] = []
        """For each node, the slot of its first dimension."""
        count = 0
        for node in graph.nodes:
            self.first.append(count)
            count += len(node.dims)
        self._parent = list(range(count))

    def root(self, slot: int) -> int:
        """The lowest slot that is joined with ``slot``."""
        parent = self._parent
        while parent[slot] != slot:
            parent[slot] = slot = parent[parent[slot]]
        return slot

    def join(self, a: int, b: int) -> None:
        """Unite the sets of two slots."""
        one, other = sorted((self.root(a), self.root(b)))
        self._parent[other] = one

    def join_copies(self, node: Node) -> None:
        """Join the dimensions of a copy with those of the first copy of its operation."""
        if self._graph.origins:
            for d in range(len(node.dims)):
                self.join(self.first[self._graph.origins[node.id]] + d, self.first[node.id] + d)

    def by_node(self, values: list[int]) -> list[list[int]]:
        """A value for each slot, as a list for each node."""
        starts = zip(self.first, self._graph.nodes, strict=True)
        return [values[start : start + len(node.dims)] for start, node in starts]


_REDUCED, _WHOLE = 1, 2
_FLAGS = {role: _WHOLE if role.is_whole else 0 for role in DimRole} | {DimRole.REDUCED: _REDUCED}


class GroupUnifier:
    """Union-find over slots. A slot is an iteration dimension of a node, or a part of one that was split. A
    root that was split has two children, major and minor."""

    def __init__(self, unifier: Unifier, nodes: tuple[int, ...]) -> None:
        self.unifier = unifier
        self.graph = graph = unifier.graph
        self.nodes = [graph.nodes[n] for n in nodes]
        self.parent: list[int] = []
        self.size: list[int] = []
        self.flags: list[int] = []
        self.children: dict[int, tuple[int, int]] = {}
        self.first: dict[int, int] = {}  # the first slot of each node
        self.addressed: set[int] = set()  # slots of dimensions that are no axes
        self.holders: dict[int, set[int]] = {}  # by axis, the nodes that have it; filled on first use
        for node in self.nodes:
            self.first[node.id] = len(self.parent)
            for extent, role in zip(node.dims, node.roles, strict=True):
                if unifier.by_index and role == DimRole.ADDRESSED:
                    self.addressed.add(len(self.parent))
                self._slot(extent, _FLAGS[role])

    def _slot(self, size: int, flags: int) -> int:
        self.parent.append(len(self.parent))
        self.size.append(size)
        self.flags.append(flags)
        return len(self.parent) - 1

    def find(self, slot: int) -> int:
        parent = self.parent
        while (above := parent[slot]) != slot:
            parent[slot] = slot = parent[above]
        return slot

    def leaves(self, slot: int) -> list[int]:
        root = self.find(slot)
        if root not in self.children:  # the common case
            return [root]
        major, minor = self.children[root]
        return self.leaves(major) + self.leaves(minor)

    def union(self, a: int, b: int) -> None:
        if a != b:
            self.parent[b] = a
            self.flags[a] |= self.flags[b]

    def split(self, root: int, minor_size: int) -> int:
        """Split a leaf into major and minor parts; returns the minor's slot."""
        major = self._slot(self.size[root] // minor_size, self.flags[root])
        minor = self._slot(minor_size, self.flags[root])
        self.children[root] = (major, minor)
        return minor

    def unify(self, left: list[int], right: list[int]) -> bool:
        """Unify two lists of slots with the same total extent, from the minor end. False if that is
        impossible."""
        left = [leaf for slot in left for leaf in self.leaves(slot)]
        right = [leaf for slot in right for leaf in self.leaves(slot)]
        while left and right:
            a, b = self.find(left.pop()), self.find(right.pop())
            if a in self.children or b in self.children:
                # split in an earlier turn, as the same axis was on the other side
                left += self.leaves(a)
                right += self.leaves(b)
                continue
            if a == b:
                continue
            big, small = (a, b) if self.size[a] >= self.size[b] else (b, a)
            if self.size[big] != self.size[small]:
                if self.size[small] == 0 or self.size[big] % self.size[small]:
                    return False
                rest = left if big == a else right
                minor = self.split(big, self.size[small])
                rest.append(self.children[big][0])
                big = minor
            self.union(big, small)
        return not left and not right

    def slots(self, node: Node, dims: tuple[int, ...]) -> list[int]:
        first = self.first[node.id]
        return [first + d for d in dims if first + d not in self.addressed]

    def run(self) -> GroupAxes | Conflict:
        conflict = self._unify_inside()
        if conflict is not None:
            return conflict
        self._unify_reads()
        return self._number_axes()

    def _unify_inside(self) -> Conflict | None:
        first, find, size, children = self.first, self.find, self.size, self.children
        for node in self.nodes:
            other = first[node.id]
            for v, producer, pairs in self.unifier.links(node):
                start = first.get(producer)
                if start is None:
                    continue
                if self.addressed and self._is_addressed(node, v):
                    return Conflict(v, producer, node.id, self._describe_address(v, producer, node))
                if pairs is None:
                    if not self._unify_value(v, self.graph.nodes[producer], node):
                        return Conflict(v, producer, node.id, self._describe(v, producer, node))
                    continue
                for made, read in pairs:  # by far the most frequent case
                    a, b = find(start + made), find(other + read)
                    if a == b:
                        continue
                    if a in children or b in children or size[a] != size[b]:
                        if not self.unify([a], [b]):
                            return Conflict(v, producer, node.id, self._describe(v, producer, node))
                    else:
                        self.union(a, b)
        return None

    @staticmethod
    def _is_addressed(node: Node, v: int) -> bool:
        maps = zip(node.inputs, node.input_maps, strict=True)
        return any(read == v and node.addresses(in_map) for read, in_map in maps)

    def _describe_address(self, v: int, made_by: int, consumer: Node) -> str:
        return (
            f"{consumer.op} reads {self.graph.values[v]} at addresses in memory, and "
            f"{self.graph.nodes[made_by].op} would make it in the same kernel"
        )

    def _unify_value(self, v: int, producer: Node, node: Node) -> bool:
        """Unify the maps of a value with a dimension that merges several iteration dimensions."""
        out_map = made_map(producer, v)
        return all(
            self.unify(self.slots(producer, out_dims), self.slots(node, in_dims))
            for read, in_map in zip(node.inputs, node.input_maps, strict=True)
            if read == v
            for out_dims, in_dims in zip(out_map, in_map, strict=True)
            if out_dims
        )

    def _describe(self, v: int, made_by: int, consumer: Node) -> str:
        producer = self.graph.nodes[made_by]
        return (
            f"{self.graph.values[v]} is made by {producer.op} over {list(producer.dims)} and read by "
            f"{consumer.op} over {list(consumer.dims)}: no tiling splits both alike"
        )

    def _unify_reads(self) -> None:
        made = {v for node in self.nodes for v in node.outputs}
        seen: dict[int, tuple[Node, DimMap]] = {}
        for node in self.nodes:
            for v, in_map in zip(node.inputs, node.input_maps, strict=True):
                if v in made:
                    continue
                if v not in seen:
                    seen[v] = (node, in_map)
                    continue
                other, other_map = seen[v]
                for left, right in zip(other_map, in_map, strict=True):
                    self._unify_read(self.slots(other, left), self.slots(node, right))

    def _unify_read(self, left: list[int], right: list[int]) -> None:
        left = [leaf for slot in left for leaf in self.leaves(slot)]
        right = [leaf for slot in right for leaf in self.leaves(slot)]
        if [self.size[a] for a in left] != [self.size[b] for b in right]:
            return
        for a, b in zip(left, right, strict=True):
            a, b = self.find(a), self.find(b)
            if a != b and not self._in_one_node(a, b):
                self.holders[a] |= self.holders.pop(b)
                self.union(a, b)

    def _in_one_node(self, a: int, b: int) -> bool:
        """Whether some node has both axes: unified, they would make it compute a diagonal."""
        if not self.holders:
            for k, node in enumerate(self.nodes):
                for slot in self.slots(node, tuple(range(len(node.dims)))):
                    for leaf in self.leaves(slot):
                        self.holders.setdefault(leaf, set()).add(k)
        return not self.holders[a].isdisjoint(self.holders[b])

    def _number_axes(self) -> GroupAxes:
        number: dict[int, int] = {}
        node_axes = []
        for node in self.nodes:
            first = self.first[node.id]
            own: list[tuple[int, ...]] = []
            for slot in range(first, first + len(node.dims)):
                leaves = () if slot in self.addressed else self.leaves(slot)
                own.append(tuple([number.setdefault(leaf, len(number)) for leaf in leaves]))
            self._mark_diagonal(own, number)
            node_axes.append(tuple(own))
        roots = list(number)
        return GroupAxes(
            tuple([self.size[r] for r in roots]),
            tuple([bool(self.flags[r] & _REDUCED) for r in roots]),
            tuple([bool(self.flags[r] & _WHOLE) for r in roots]),
            tuple(node_axes),
        )

    def _mark_diagonal(self, own: Sequence[tuple[int, ...]], number: dict[int, int]) -> None:
        """Mark an axis that a node has twice (``y + y.T`` of a ``y`` computed in the group) as whole: tiles
        of it would compute only the diagonal blocks."""
        if len(own) < 2:
            return
        axes = [a for dims in own for a in dims]
        if len(set(axes)) == len(axes):
            return
        for root, a in number.items():
            if axes.count(a) > 1:
                self.flags[root] |= _WHOLE
