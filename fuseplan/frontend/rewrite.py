"""Rewrite a lowered program: some operations stand more than once, some no more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from costmodel.graph import Node, Value, boundary, check_graph, make_graph
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import Equation, Literal

Item: TypeAlias = tuple[int, int | None]
"""A node of the old program, or a value that it makes, and which copy."""

ORIGINAL = None
"""The copy that an input is, and whatever else there is one of."""


def part(lowered: Lowered, nodes: Sequence[int]) -> Lowered:
    """The program of ``nodes`` (ascending) alone."""
    edge = boundary(lowered.graph, tuple(nodes))
    inputs = replace(lowered.graph, inputs=edge.reads)
    rewriter = Rewriter(replace(lowered, graph=inputs, outputs=edge.writes))
    for n in nodes:
        rewriter.add(n, ORIGINAL, lambda v: (v, ORIGINAL))
    return rewriter.finish(lambda v: (v, ORIGINAL))


class Rewriter:
    """Builds the new program node by node, in order; numbers nodes and values anew."""

    def __init__(self, old: Lowered) -> None:
        self.old = old
        self.values: list[Value] = []
        self.avals: list[Any] = []
        self.nodes: list[Node] = []
        self.equations: list[Equation] = []
        self.ids: dict[Item, int] = {}
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        """Where each old node stands now."""
        for v in old.graph.inputs:
            self._value((v, ORIGINAL), -1)

    def _value(self, item: Item, producer: int) -> int:
        new = self.ids[item] = len(self.values)
        self.values.append(replace(self.old.graph.values[item[0]], id=new, producer=producer))
        self.avals.append(self.old.avals[item[0]])
        return new

    def add(self, n: int, copy: int | None, read: Callable[[int], Item]) -> int:
        """Node ``n`` as ``copy``, which reads ``read(v)`` for each of its inputs ``v``; its new id."""
        node, equation = self.old.graph.nodes[n], self.old.equations[n]
        new = len(self.nodes)
        self._places[n].append(new)
        inputs = tuple([self.ids[read(v)] for v in node.inputs])
        operands = tuple(v if isinstance(v, Literal) else self.ids[read(v)] for v in equation.inputs)
        outputs = tuple([self._value((v, copy), new) for v in node.outputs])
        self.nodes.append(replace(node, id=new, inputs=inputs, outputs=outputs))
        self.equations.append(replace(equation, inputs=operands, outputs=outputs))
        return new

    def put(self, n: int, by: Lowered) -> int:
        """``by``, a program of the arrays that node ``n`` reads, in its place; the id of its first node."""
        old, equation = self.old.graph.nodes[n], self.old.equations[n]
        first = len(self.nodes)
        ids = {v: self.ids[u, ORIGINAL] for v, u in zip(by.graph.inputs, old.inputs, strict=True)}
        results = dict(zip(by.graph.outputs, old.outputs, strict=True))
        for node, eqn in zip(by.graph.nodes, by.equations, strict=True):
            new = len(self.nodes)
            self._places[n].append(new)
            for v in node.outputs:
                ids[v] = len(self.values)
                self.values.append(replace(by.graph.values[v], id=ids[v], producer=new))
                self.avals.append(by.avals[v])
                if v in results:
                    self.ids[results[v], ORIGINAL] = ids[v]
            inputs, outputs = tuple([ids[v] for v in node.inputs]), tuple([ids[v] for v in node.outputs])
            operands = tuple(v if isinstance(v, Literal) else ids[v] for v in eqn.inputs)
            self.nodes.append(
                replace(node, id=new, inputs=inputs, outputs=outputs, source=old.source, scope=old.scope)
            )
            self.equations.append(
                replace(equation, primitive=eqn.primitive, params=eqn.params, inputs=operands,
                        outputs=outputs, in_avals=eqn.in_avals, out_avals=eqn.out_avals)
            )  # fmt: skip
        return first

    def finish(self, read: Callable[[int], Item], origins: tuple[int, ...] = ()) -> Lowered:
        """The new program, whose results are ``read(v)`` for each old result ``v``."""
        outputs = tuple(o if isinstance(o, Literal) else self.ids[read(o)] for o in self.old.outputs)
        inputs = [self.ids[v, ORIGINAL] for v in self.old.graph.inputs]
        results = [o for o in outputs if not isinstance(o, Literal)]
        places = self._places
        pairs = [(c, d) for u, v in self.old.graph.waits for c in places[u] for d in places[v]]
        waits = [(c, d) for c, d in pairs if c < d]  # a copy that stands behind is another's
        graph = check_graph(make_graph(self.values, self.nodes, inputs, results, origins, waits))
        return replace(
            self.old,
            graph=graph,
            equations=tuple(self.equations),
            avals=tuple(self.avals),
            outputs=outputs,
        )
