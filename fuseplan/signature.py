"""The exact structure of a set of nodes, relative to itself.

Two sets with equal structures are the same program on other arrays: they can be priced,
and partitioned, once. A structure says, node by node, what the node is, which values it
reads (numbered by first appearance), and which of its results are needed outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.graph import Graph, Node
from fuseplan.prologues import gated

Key = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Structure:
    """``key`` compares equal for equal structures; ``values[i]`` is the value that ``key``
    calls ``i``, so two sets of one key correspond value by value."""

    key: Key
    values: tuple[int, ...]


class Signatures:
    """Structures of sets of nodes of one graph.

    Example:
        In a stack of equal layers, ``of(layer_1).key == of(layer_2).key``.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        known: dict[tuple, int] = {}
        # What may be computed inside a contraction depends on who reads it, and whoever reads that.
        self._class = [
            known.setdefault((*_node_key(graph, node), inside), len(known))
            for node, inside in zip(graph.nodes, gated(graph), strict=True)
        ]
        self._is_output = set(graph.outputs)

    def of(self, nodes: Sequence[int]) -> Structure:
        """The structure of ``nodes``, which must ascend."""
        graph, classes, is_output = self.graph, self._class, self._is_output
        inside = set(nodes)
        number: dict[int, int] = {}
        key: list[int] = []
        for n in nodes:
            node = graph.nodes[n]
            key.append(classes[n])
            for v in node.inputs:
                key.append(number.setdefault(v, len(number)))
            for v in node.outputs:
                number[v] = len(number)
                # -1: needed outside, so a kernel of these nodes has to write it.
                key.append(-1 if v in is_output or not inside.issuperset(graph.consumers[v]) else -2)
        return Structure(tuple(key), tuple(number))


def _node_key(graph: Graph, node: Node) -> tuple:
    """Everything of a node but where it stands in the graph."""
    avals = tuple((graph.values[v].shape, graph.values[v].dtype) for v in node.inputs + node.outputs)
    return (
        node.op,
        node.kind,
        node.dims,
        node.roles,
        node.input_maps,
        node.output_maps,
        avals,
        node.flops,
        node.bitcast,
        node.effects,
        node.backends,
        node.temporaries,
        node.signature,
    )
