"""Axes: dimensions of a group's nodes that must move together become one axis.

A value that one node of the group makes and another reads ties the producer's
dimensions to the consumer's. Where one side splits a dimension that the other keeps
(a reshape), the kept one is split too. What cannot be tied has no common tiling: the
group is refused, with the value and the two blocks it would need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from costmodel.graph import DimMap, DimRole, Graph, Node

NodeAxes = tuple[tuple[int, ...], ...]
"""For each iteration dimension of a node, the axes it splits into, major first."""


@dataclass(frozen=True, slots=True)
class GroupAxes:
    """The axes of a group: their sizes, what its nodes need of each, and the way back."""

    sizes: tuple[int, ...]
    reduced: tuple[bool, ...]
    """Some node of the group consumes the axis."""
    whole: tuple[bool, ...]
    """Some node needs all of the axis at once, so it cannot be tiled."""
    node_axes: tuple[NodeAxes, ...]
    """Aligned with the group's nodes."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two members of a group need different blocks of the same value."""

    value: int
    producer: int
    consumer: int
    reason: str


def unify(graph: Graph, nodes: tuple[int, ...]) -> GroupAxes | Conflict:
    """The axes of the group ``nodes`` (ascending ids), or why it has none.

    Values made and read inside the group *must* agree. A value read from outside by
    several members *may*: its readers' axes are tied where that contradicts nothing, so
    that one block serves them all, and left apart where it does (``x + x.T`` reads two
    different blocks of ``x``).
    """
    return Unifier(graph)(nodes)


Link = tuple[int, int, tuple[tuple[int, int], ...] | None]
"""An operand that some node makes: the value, its producer, and pairs of dimensions
(producer's, consumer's) to tie; None where a dimension merges several."""


class Unifier:
    """``unify`` for many groups of one graph: what depends on a node alone is kept."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._links: dict[int, tuple[Link, ...]] = {}

    def __call__(self, nodes: tuple[int, ...]) -> GroupAxes | Conflict:
        return _aligned(self.graph, nodes) or _Group(self, nodes).run()

    def links(self, node: Node) -> tuple[Link, ...]:
        """The operands of ``node`` that other nodes make."""
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


def _aligned(graph: Graph, nodes: tuple[int, ...]) -> GroupAxes | None:
    """The axes of nodes that have one iteration space in common, dimension by dimension: most groups are of
    that kind, and need no union-find. None of others."""
    if not nodes:
        return None
    first = graph.nodes[nodes[0]]
    dims, every = first.dims, len(first.dims)
    maps: dict[int, DimMap] = {}
    tying: dict[DimMap, bool] = {}
    all_roles: dict[tuple[DimRole, ...], None] = {}
    for n in nodes:
        node = graph.nodes[n]
        if node.dims != dims:
            return None
        is_tied = node is first
        for v, dim_map in zip(node.inputs, node.input_maps, strict=True):
            known = maps.get(v)
            if known is None:
                maps[v] = dim_map
                continue
            if known != dim_map:
                return None
            if not is_tied:
                if dim_map not in tying:
                    tying[dim_map] = len({d for merged in dim_map for d in merged}) == every
                is_tied = tying[dim_map]
        if not is_tied:
            return None
        maps.update(zip(node.outputs, node.output_maps, strict=True))
        all_roles[node.roles] = None
    own = tuple([(d,) for d in range(every)])
    return GroupAxes(
        dims,
        tuple([any(roles[d] == DimRole.REDUCED for roles in all_roles) for d in range(every)]),
        tuple([any(roles[d] == DimRole.WHOLE for roles in all_roles) for d in range(every)]),
        (own,) * len(nodes),
    )


def made_map(node: Node, v: int) -> DimMap:
    """How ``node`` indexes its result ``v``."""
    return node.output_maps[node.outputs.index(v)]


def compose(dim_map: DimMap, node_axes: NodeAxes) -> DimMap:
    """A node's map of a value, in terms of the group's axes."""
    return tuple(
        node_axes[dims[0]] if len(dims) == 1 else tuple(a for d in dims for a in node_axes[d])
        for dims in dim_map
    )


_REDUCED, _WHOLE = 1, 2
_FLAGS = {DimRole.PARALLEL: 0, DimRole.REDUCED: _REDUCED, DimRole.WHOLE: _WHOLE}


class _Group:
    """Union-find over slots. A slot is one iteration dimension of one node, or a part that
    a dimension was split into; a split root has two children, major and minor."""

    def __init__(self, unifier: Unifier, nodes: tuple[int, ...]) -> None:
        self.unifier = unifier
        self.graph = graph = unifier.graph
        self.nodes = [graph.nodes[n] for n in nodes]
        self.parent: list[int] = []
        self.size: list[int] = []
        self.flags: list[int] = []
        self.children: dict[int, tuple[int, int]] = {}
        self.first: dict[int, int] = {}  # A node's first slot.
        self.holders: dict[int, set[int]] = {}  # By axis, the nodes that have it; made when first needed.
        for node in self.nodes:
            self.first[node.id] = len(self.parent)
            for extent, role in zip(node.dims, node.roles, strict=True):
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
        if root not in self.children:  # Most graphs split nothing.
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

    def tie(self, left: list[int], right: list[int]) -> bool:
        """Tie two lists of slots that index the same extent, from the minor end."""
        left = [leaf for slot in left for leaf in self.leaves(slot)]
        right = [leaf for slot in right for leaf in self.leaves(slot)]
        while left and right:
            a, b = self.find(left.pop()), self.find(right.pop())
            if a in self.children or b in self.children:
                # Split a moment ago, through the same axis on the other side.
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
        return [first + d for d in dims]

    def run(self) -> GroupAxes | Conflict:
        conflict = self._tie_inside()
        if conflict is not None:
            return conflict
        self._tie_reads()
        return self._finish()

    def _tie_inside(self) -> Conflict | None:
        first, find, size, children = self.first, self.find, self.size, self.children
        for node in self.nodes:
            other = first[node.id]
            for v, producer, pairs in self.unifier.links(node):
                start = first.get(producer)
                if start is None:
                    continue
                if pairs is None:
                    if not self._tie_value(v, self.graph.nodes[producer], node):
                        return Conflict(v, producer, node.id, self._describe(v, producer, node))
                    continue
                for made, read in pairs:  # By far the most frequent case.
                    a, b = find(start + made), find(other + read)
                    if a == b:
                        continue
                    if a in children or b in children or size[a] != size[b]:
                        if not self.tie([a], [b]):
                            return Conflict(v, producer, node.id, self._describe(v, producer, node))
                    else:
                        self.union(a, b)
        return None

    def _tie_value(self, v: int, producer: Node, node: Node) -> bool:
        """Tie the maps of a value some dimension of which merges several."""
        out_map = made_map(producer, v)
        return all(
            self.tie(self.slots(producer, out_dims), self.slots(node, in_dims))
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

    def _tie_reads(self) -> None:
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
                    self._tie_read(self.slots(other, left), self.slots(node, right))

    def _tie_read(self, left: list[int], right: list[int]) -> None:
        left = [leaf for slot in left for leaf in self.leaves(slot)]
        right = [leaf for slot in right for leaf in self.leaves(slot)]
        if [self.size[a] for a in left] != [self.size[b] for b in right]:
            return
        for a, b in zip(left, right, strict=True):
            a, b = self.find(a), self.find(b)
            if a != b and not self._together(a, b):
                self._join_holders(a, b)
                self.union(a, b)

    def _together(self, a: int, b: int) -> bool:
        """Whether some node has both as dimensions: tying them would leave a diagonal."""
        if not self.holders:
            for k, node in enumerate(self.nodes):
                for slot in self.slots(node, tuple(range(len(node.dims)))):
                    for leaf in self.leaves(slot):
                        self.holders.setdefault(leaf, set()).add(k)
        # It looks through the smaller of the two.
        return not self.holders[a].isdisjoint(self.holders[b])

    def _join_holders(self, a: int, b: int) -> None:
        """Record that the nodes with axis ``b`` now have axis ``a``."""
        small, large = sorted((self.holders[a], self.holders.pop(b)), key=len)
        large |= small
        self.holders[a] = large

    def _finish(self) -> GroupAxes:
        number: dict[int, int] = {}
        node_axes = []
        for node in self.nodes:
            first = self.first[node.id]
            own: list[tuple[int, ...]] = []
            for slot in range(first, first + len(node.dims)):
                root = self.find(slot)
                leaves = (root,) if root not in self.children else self.leaves(root)
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
        """A node with one axis twice (``y + y.T`` of a ``y`` made inside the group) walks a
        diagonal unless the axis is whole: test_axes.py::test_diagonal_is_whole."""
        if len(own) < 2:
            return
        axes = [a for dims in own for a in dims]
        if len(set(axes)) == len(axes):
            return
        for root, a in number.items():
            if axes.count(a) > 1:
                self.flags[root] |= _WHOLE
