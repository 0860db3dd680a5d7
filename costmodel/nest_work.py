"""Count the arithmetic and the memory traffic of a loop nest, grouped by what costs the same on a tile of any
size.

Nests of one group that differ only in their tile sizes share these counts. Nodes that do the same work share
one entry, so that pricing a nest takes time by the number of kinds of nodes, not of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from costmodel import dtypes
from costmodel.axes import NodeAxes, compose, made_map
from costmodel.graph import DimMap, Graph, Node, OpKind
from costmodel.kernel import KernelSpec

Axes = tuple[int, ...]
"""Some axes of a nest, ascending."""


class Arithmetic(NamedTuple):
    """The floating-point operations of a node, other than those of contractions."""

    axes: Axes
    vector: int
    transcendental: int
    reduced: int
    """Input elements of a reduction."""


class Block(NamedTuple):
    """One tile's part of an array that some axes index."""

    axes: Axes
    bits: int
    """Of an element."""


class Moves(NamedTuple):
    """The memory traffic of arrays whose blocks have one shape: their number, how often blocks of them are
    read or written, and how many of the arrays the same nodes make."""

    arrays: int
    times: int
    made: int


@dataclass(frozen=True, slots=True)
class PartWork:
    """The work of some nodes of a nest on one tile."""

    nodes: int
    """The number of nodes."""
    arithmetic: tuple[tuple[Arithmetic, int], ...]
    """Each kind of arithmetic, and the number of nodes that do it."""
    products: Axes
    """The contractions among the nodes, as positions in the group."""
    reductions: int
    """The number of reductions among the nodes."""
    moved: tuple[tuple[Block, Moves], ...]


@dataclass(frozen=True, slots=True)
class NestWork:
    """The work of a loop nest, pass by pass."""

    passes: tuple[PartWork, ...]
    """The work of each pass along the streamed axis, on one tile."""
    off: PartWork
    """The work of the nodes outside of the passes, which run once for each outer tile."""
    kept: tuple[Block, ...]
    """Blocks of contraction results that one pass stores for a later pass, over the whole streamed axis."""


def nest_work(graph: Graph, spec: KernelSpec) -> NestWork:
    """The work of the nest ``spec``, and of every nest that differs from it only in tile sizes."""
    nodes = _Nodes(graph, spec.nodes, spec.node_axes)
    in_loop = {i for p in spec.passes for i in p}
    off = [i for i in range(len(spec.nodes)) if i not in in_loop]
    kept = _kept(graph, spec) if spec.keeps else ()
    return NestWork(tuple(map(nodes.part, spec.passes)), nodes.part(off), kept)


class _Nodes:
    """The nodes of a nest, each with the kind of its arithmetic and of the blocks that it touches."""

    def __init__(self, graph: Graph, nodes: Sequence[int], node_axes: Sequence[NodeAxes]) -> None:
        self.nodes = [graph.nodes[n] for n in nodes]
        arithmetic: dict[Arithmetic, int] = {}
        blocks: dict[Block, int] = {}
        bits = [dtypes.bits(value.dtype) for value in graph.values]
        self.arithmetic: list[int] = []
        """For each node, the index of its arithmetic in ``every_arithmetic``."""
        self.blocks: list[list[tuple[int, int]]] = []
        """For each node, the arrays that it reads and writes, each with the index of its block in
        ``every_block``."""
        for node, own in zip(self.nodes, node_axes, strict=True):
            reduces = node.kind == OpKind.REDUCTION
            done = Arithmetic(
                _axes(own),
                node.flops.vector,
                node.flops.transcendental,
                sum(graph.values[v].size for v in node.inputs) if reduces else 0,
            )
            self.arithmetic.append(arithmetic.setdefault(done, len(arithmetic)))
            maps = zip(node.inputs + node.outputs, node.input_maps + node.output_maps, strict=True)
            touched = [(v, Block(_axes(compose(dim_map, own)), bits[v])) for v, dim_map in maps]
            self.blocks.append([(v, blocks.setdefault(block, len(blocks))) for v, block in touched])
        self.every_arithmetic, self.every_block = list(arithmetic), list(blocks)

    def part(self, positions: Sequence[int]) -> PartWork:
        """The work of some of the nodes."""
        block: dict[int, int] = {}
        moved: Counter[int] = Counter()
        products = []
        reductions = 0
        made = {v for i in positions for v in self.nodes[i].outputs}
        for i in positions:
            node = self.nodes[i]
            block.update(self.blocks[i])
            # XLA fuses the rest into these; what they read and make passes through memory.
            if node.kind >= OpKind.REDUCTION:
                moved.update(node.inputs + node.outputs)
                reductions += node.kind == OpKind.REDUCTION
                if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
                    products.append(i)
            else:
                for v in node.inputs:
                    if v not in made:
                        moved[v] += 1
        sums: dict[int, list[int]] = {}
        for v, times in moved.items():
            counts = sums.setdefault(block[v], [0, 0, 0])
            counts[0] += 1
            counts[1] += times
            counts[2] += v in made
        kinds = Counter([self.arithmetic[i] for i in positions])
        return PartWork(
            len(positions),
            tuple([(self.every_arithmetic[k], count) for k, count in kinds.items()]),
            tuple(products),
            reductions,
            tuple([(self.every_block[b], Moves(*counts)) for b, counts in sums.items()]),
        )


def _axes(maps: DimMap) -> Axes:
    return tuple(sorted({a for dims in maps for a in dims}))


def _kept(graph: Graph, spec: KernelSpec) -> tuple[Block, ...]:
    position = {n: i for i, n in enumerate(spec.nodes)}
    first = {i: k for k, p in reversed(list(enumerate(spec.passes))) for i in p}
    kept: dict[int, tuple[Node, NodeAxes]] = {}
    for k, nodes in enumerate(spec.passes):
        inside = set(nodes)
        for i in nodes:
            for v in graph.nodes[spec.nodes[i]].inputs:
                j = position.get(graph.values[v].producer, -1)
                if first.get(j, k) < k and j not in inside:
                    kept[v] = graph.nodes[spec.nodes[j]], spec.node_axes[j]
    every = [
        Block(_axes(compose(made_map(maker, v), own)), dtypes.bits(graph.values[v].dtype))
        for v, (maker, own) in kept.items()
    ]
    return tuple([block for block in every if spec.streamed in block.axes])
