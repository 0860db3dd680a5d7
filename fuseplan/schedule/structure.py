"""Structural keys of groups: equal for sets of nodes that are the same program on other arrays.

Two sets with equal structures are the same program on other arrays: they can be priced,
and partitioned, once. A structure says, node by node, what the node is, which values it
reads (numbered by first appearance), and which of its results are needed outside; of copies
(``Graph.origins``), which are of one operation, and which arrays that they read are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from costmodel.graph import Graph, Node, copies_of
from costmodel.xla_loops import absorbed_nodes, shared_broadcasts
from fuseplan.schedule.legality import possible_prologues

Key = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Structure:
    """``key`` compares equal for equal structures; ``values[i]`` is the value that ``key``
    calls ``i``, so two sets of one key correspond value by value."""

    key: Key
    values: tuple[int, ...]


class Signatures:
    """Structures of sets of nodes of one graph.

    With ``of_caller``, the caller's own arrays, arguments and results, are told apart from those of the
    program, and the operations that a library takes into its calls from others: on a CPU a price depends on
    whose memory an array takes, and XLA groups these operations itself.

    Example:
        In a stack of equal layers, ``of(layer_1).key == of(layer_2).key``.
    """

    def __init__(self, graph: Graph, of_caller: bool = False) -> None:
        self.graph = graph
        known: dict[Any, int] = {}
        shapes: dict[Any, int] = {}
        arrays = [shapes.setdefault((v.shape, v.dtype), len(shapes)) for v in graph.values]
        indices = _index_arithmetic(graph, arrays)
        taken = absorbed_nodes(graph) if of_caller else frozenset()
        shared = shared_broadcasts(graph) if of_caller else {}
        # Whether an operation may be computed inside a contraction depends on all of its transitive readers.
        # Which tiles a kernel may skip depends on the indices in its masks, also where these are given.
        self._class = [
            known.setdefault(
                (
                    _but_place(node),
                    inside,
                    tuple([indices.get(v) for v in node.inputs]),
                    (node.id in taken, shared.get(node.id), *_of_caller(graph, node)) if of_caller else (),
                    *[arrays[v] for v in node.inputs + node.outputs],
                ),
                len(known),
            )
            for node, inside in zip(graph.nodes, possible_prologues(graph), strict=True)
        ]
        self._contents, self._arrays = list(known), list(shapes)
        self._is_output = graph.results
        self._origin: dict[int, int] = {n: nodes[0] for nodes in copies_of(graph) for n in nodes}
        self._first: dict[int, int] = {
            v: -1 - len(graph.nodes) - w
            for n, first in self._origin.items()
            for v, w in zip(graph.nodes[n].outputs, graph.nodes[first].outputs, strict=True)
        }
        """For each value of a copy, a number for its array that is no value's number."""

    def of(self, nodes: Sequence[int]) -> Structure:
        """The structure of ``nodes``, which must ascend."""
        key, number = self.key(nodes)
        return Structure(key, tuple(number))

    def key(self, nodes: Sequence[int]) -> tuple[Key, dict[int, int]]:
        """The key of the structure, and its number for each value."""
        graph, classes, is_output = self.graph, self._class, self._is_output
        origin, first = self._origin, self._first
        consumers = graph.consumers
        inside = set(nodes)
        number: dict[int, int] = {}
        key: list[int] = []
        for n in nodes:
            node = graph.nodes[n]
            key.append(classes[n])
            if n in origin:  # numbered like a value: none is negative
                key.append(number.setdefault(-1 - origin[n], len(number)))
            for v in node.inputs:
                key.append(number.setdefault(v, len(number)))
                if v in first and graph.values[v].producer not in inside:
                    # No other entry is below -2.
                    key.append(-3 - number.setdefault(first[v], len(number)))
            for v in node.outputs:
                number[v] = len(number)
                # -1: needed outside, so a kernel of these nodes has to write it.
                key.append(-1 if v in is_output or not inside.issuperset(consumers[v]) else -2)
        return tuple(key), number

    def are_told(self, nodes: Sequence[int]) -> bool:
        """Whether ``text(nodes)`` means the same in every graph and process: not if a parameter of an
        operation has no textual form, as a function has none (``Node.signature``)."""
        return all(self.graph.nodes[n].signature >= 0 for n in nodes)

    def text(self, nodes: Sequence[int]) -> str:
        """The structure as text that means the same in every graph and process, if ``are_told(nodes)``."""
        key, at, words, inside = self.key(nodes)[0], 0, [], set(nodes)
        known: dict[int, int] = {}
        for n in nodes:
            node = self.graph.nodes[n]
            kind = self._class[n]
            # The properties that several nodes share are written once, with the first of them.
            words.append(str(known[kind]) if kind in known else self._told(kind))
            known.setdefault(kind, len(known))
            read = [v for v in node.inputs if v in self._first]
            given = sum(self.graph.values[v].producer not in inside for v in read)
            end = at + 1 + (n in self._origin) + len(node.inputs) + given + len(node.outputs)
            words.append(repr(key[at + 1 : end]))
            at = end
        return "\n".join(words)

    def _told(self, kind: int) -> str:
        # Numbers of index arithmetic mean nothing elsewhere: a user of the text adds that of the masks.
        facts, inside, _, of_caller, *arrays = self._contents[kind]
        return repr((facts, inside, of_caller, [self._arrays[a] for a in arrays]))


def _of_caller(graph: Graph, node: Node) -> tuple[bool, ...]:
    """Of each operand whether it is an argument of the program, and of each result whether it is one."""
    given = [graph.values[v].producer < 0 for v in node.inputs]
    return (*given, *(v in graph.results for v in node.outputs))


def _index_arithmetic(graph: Graph, arrays: Sequence[int]) -> dict[int, int]:
    """For each value that is computed from indices and literals alone, or is a mask that depends on such a
    value, a number: equal for equal computations. ``arrays`` has a number for the type of each value."""
    known: dict[Any, int] = {}
    found: dict[int, int] = {}
    for node in graph.nodes:
        operands = tuple([found.get(v) for v in node.inputs])
        is_known = [number is not None for number in operands]
        for place, v in enumerate(node.outputs):
            if all(is_known) or (any(is_known) and graph.values[v].dtype == "bool"):
                key = (_but_place(node), operands, place, arrays[v])
                found[v] = known.setdefault(key, len(known))
    return found


_ELSEWHERE = ("id", "inputs", "outputs", "source", "scope", "reciprocal", "takes_part")
"""Fields of a node that say where it is, or that follow from other fields."""

_but_place = attrgetter(*(f.name for f in fields(Node) if f.name not in _ELSEWHERE))
"""All other fields of a node."""
