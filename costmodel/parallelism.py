"""Upper bounds on how many tiles work in parallel, of kernels of which only some members are known.

A tiled kernel computes along an axis in parallel only if no member reduces the axis or needs it whole, and if
the axis indexes every array that the kernel writes. So a sum that is written out leaves the kernel no more
tiles than the sum has elements, and each core its share of the bandwidth alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from costmodel.axes import axis_classes
from costmodel.graph import DimMap, DimRole, Graph, Node, OpKind
from costmodel.set_tables import Figures, Sets, UnionTable, as_sets


class Parallelism:
    """Bounds the tiles of every kernel that is convex and holds all of a set of known members.

    A *slot* is a dimension of a node. Two slots are one axis in every such kernel if the values on a path
    between their nodes tie them; so a slot is known not to be parallel if it is tied to one that a known
    member reduces or needs whole. It is not parallel either if an array is written that has no axis of its
    class: dimensions of different classes are different axes in every kernel (``axis_classes``).

    Args:
        graph: of the operations.
        nodes: that a kernel may hold, and for each of them its position.
        written: for each array that may be written, the node that makes it, and its map.
        least_dot_tile: the smallest tile of the rows and columns of a contraction.
    """

    def __init__(
        self,
        graph: Graph,
        nodes: dict[int, int],
        written: Sequence[tuple[int, DimMap]],
        least_dot_tile: int = 1,
    ) -> None:
        self._first: dict[int, int] = {}
        slots: list[tuple[int, int]] = []
        for n in sorted(nodes):
            self._first[n] = len(slots)
            slots += [(n, d) for d in range(len(graph.nodes[n].dims))]
        self._position = np.array([nodes[n] for n, _ in slots], dtype=np.intp)
        self._extent = np.array([max(graph.nodes[n].dims[d], 1) for n, d in slots], dtype=np.float64)
        self._held = np.array([graph.nodes[n].roles[d] != DimRole.PARALLEL for n, d in slots], dtype=bool)
        classes = axis_classes(graph, [graph.nodes[n] for n in sorted(nodes)])
        class_of = [classes[n][d] for n, d in slots]
        self._ties = list(self._tied(graph, nodes, class_of))
        excludes = np.ones((len(written), len(slots)), dtype=bool)
        members: dict[int, list[int]] = {}
        for s, c in enumerate(class_of):
            members.setdefault(c, []).append(s)
        self._uniform = {c for c, at in members.items() if len(set(self._extent[at])) == 1}
        """Classes of slots of one extent, which are never split."""
        self._classes = classes
        for n in nodes:
            for d in _innermost(graph.nodes[n]):
                if self.is_uniform(n, d):
                    s = self._first[n] + d
                    self._extent[s] = -(-self._extent[s] // least_dot_tile)
        for k, (n, dim_map) in enumerate(written):
            for c in {classes[n][d] for dims in dim_map for d in dims}:
                excludes[k, members[c]] = False
        self._excludes = UnionTable(excludes)

    def is_uniform(self, n: int, d: int) -> bool:
        """Whether dimension ``d`` of node ``n`` is one axis in every kernel: no member splits it."""
        return self._classes[n][d] in self._uniform

    def slots(self, n: int, dims: Iterable[int]) -> list[int]:
        """The slots of some dimensions of a node."""
        return [self._first[n] + d for d in dims]

    def extents(self, known: Sets, written: Sets) -> Figures:
        """For each row and slot, an upper bound on the tiles along it: 1 where it is not parallel.

        Args:
            known: rows of positions, those of known members.
            written: rows of bool, whether the arrays given are surely written.
        """
        inside = known[:, self._position]
        held = inside & self._held
        for at, down, up in self._ties:
            of, within = held[:, at], inside[:, at]
            while of.any():
                more = of | (down(of) | up(of)) & within
                if (more == of).all():
                    break
                of = more
            held[:, at] = of
        held |= self._excludes(written)
        return np.where(held, 1.0, self._extent)

    def _tied(
        self, graph: Graph, nodes: dict[int, int], class_of: Sequence[int]
    ) -> Iterator[tuple[npt.NDArray[np.intp], UnionTable, UnionTable]]:
        """For each class that some node reduces or needs whole: its slots, and two tables of which of them
        are tied to which others along paths, down from the row's node and up from it."""
        count = len(class_of)
        readers: list[list[int]] = [[] for _ in range(count)]
        makers: list[list[int]] = [[] for _ in range(count)]
        for n in nodes:
            node = graph.nodes[n]
            for v, in_map in zip(node.inputs, node.input_maps, strict=True):
                maker = graph.values[v].producer
                if maker not in nodes:
                    continue
                of = graph.nodes[maker]
                out_map = of.output_maps[of.outputs.index(v)]
                for made, read in zip(out_map, in_map, strict=True):
                    # Where one side splits the dimension, only that of the other holds all of its parts.
                    if len(made) == 1:
                        readers[self._first[maker] + made[0]] += self.slots(n, read)
                    if len(read) == 1:
                        makers[self._first[n] + read[0]] += self.slots(maker, made)
        below, above = [0] * count, [0] * count
        for s in reversed(range(count)):
            for t in readers[s]:
                below[s] |= 1 << t | below[t]
        for s in range(count):
            for t in makers[s]:
                above[s] |= 1 << t | above[t]
        held = {class_of[s] for s in np.flatnonzero(self._held).tolist()}
        for c in held:
            at = [s for s in range(count) if class_of[s] == c]
            down, up = (UnionTable(as_sets([of[s] for s in at], count)[:, at]) for of in (below, above))
            yield np.array(at, dtype=np.intp), down, up


def _innermost(node: Node) -> list[int]:
    """The innermost row and the innermost column of a contraction, which its tiles extend along."""
    if node.kind != OpKind.OUT_ELEMENTWISE_FUSABLE:
        return []
    lhs, rhs = ({d for dims in dim_map for d in dims} for dim_map in node.input_maps)
    return [max(own) for own in (lhs - rhs, rhs - lhs) if own]
