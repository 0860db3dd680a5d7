"""Edit a lowered program: duplicate, replace or remove operations, then renumber its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from costmodel.graph import ORIGINAL, GraphRewriter, Item, boundary
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.trace import Equation, Flat, Literal, Operand, Primitive, live, trace


class Rewriter(GraphRewriter):
    """Builds a program of the operations of ``old``, as ``GraphRewriter`` builds its graph."""

    def __init__(self, old: Lowered, inputs: Iterable[int] | None = None) -> None:
        super().__init__(old.graph, inputs)
        self.old = old
        self._foreign: dict[int, tuple[Equation, tuple[Any, ...]]] = {}
        """For each new node that ``put`` made, its equation, and the types of its results."""

    def put(self, n: int, by: Lowered) -> int:
        """Replace node ``n`` by the program ``by`` of the arrays that it reads; the id of its first node."""
        old, equation = self.old.graph.nodes[n], self.old.equations[n]
        first = len(self.nodes)
        ids = {v: self.ids[u, ORIGINAL] for v, u in zip(by.graph.inputs, old.inputs, strict=True)}
        for node, eqn in zip(by.graph.nodes, by.equations, strict=True):
            new = len(self.nodes)
            inputs = tuple([ids[v] for v in node.inputs])
            for v in node.outputs:
                ids[v] = len(self.values)
                self.values.append(replace(by.graph.values[v], id=ids[v], producer=new))
                self.value_of.append(-1)
            outputs = tuple([ids[v] for v in node.outputs])
            self.nodes.append(
                replace(node, id=new, inputs=inputs, outputs=outputs, source=old.source, scope=old.scope)
            )
            self.node_of.append(n)
            self.places[n].append(new)
            as_old = replace(
                equation, primitive=eqn.primitive, params=eqn.params, inputs=eqn.inputs,
                in_avals=eqn.in_avals, out_avals=eqn.out_avals,
            )  # fmt: skip
            self._foreign[new] = as_old, tuple(by.avals[v] for v in node.outputs)
        for v, u in zip(by.graph.outputs, old.outputs, strict=True):
            self.ids[u, ORIGINAL] = ids[v]
        return first

    def finish(self, read: Callable[[int], Item] = lambda v: (v, ORIGINAL)) -> Lowered:
        """The new program, whose results are ``read(v)`` for each old result ``v``."""
        old = self.old
        outputs = tuple(o if isinstance(o, Literal) else self.ids[read(o)] for o in old.outputs)
        graph = self.finished([o for o in outputs if not isinstance(o, Literal)])
        avals = [None if v < 0 else old.avals[v] for v in self.value_of]
        equations: list[Equation] = []
        for node, n in zip(graph.nodes, self.node_of, strict=True):
            equation = old.equations[n]
            if node.id in self._foreign:
                equation, types = self._foreign[node.id]
                for v, aval in zip(node.outputs, types, strict=True):
                    avals[v] = aval
            arrays = iter(node.inputs)
            operands = tuple([v if isinstance(v, Literal) else next(arrays) for v in equation.inputs])
            equations.append(replace(equation, inputs=operands, outputs=node.outputs))
        return replace(old, graph=graph, equations=tuple(equations), avals=tuple(avals), outputs=outputs)


def part(lowered: Lowered, nodes: Sequence[int]) -> Lowered:
    """The program of ``nodes`` (ascending) alone."""
    edge = boundary(lowered.graph, tuple(nodes))
    rewriter = Rewriter(replace(lowered, outputs=edge.writes), edge.reads)
    for n in nodes:
        rewriter.add(n, ORIGINAL, lambda v: (v, ORIGINAL))
    return rewriter.finish()


def with_copies(
    lowered: Lowered,
    items: Sequence[Item],
    copy_of: Callable[[Item, int], int | None],
    result: Callable[[int], int | None] = lambda v: ORIGINAL,
) -> tuple[Lowered, dict[Item, int]]:
    """The program of ``items``, copies of operations in order, without those that nothing needs, and the new
    node of each that is left. The item ``i`` reads the copy ``copy_of(i, v)`` of value ``v``; the program
    returns the copy ``result(v)`` of its result ``v``."""
    graph = lowered.graph

    def read(item: Item, v: int) -> Item:
        return v, copy_of(item, v)

    needed: set[Item] = {(v, result(v)) for v in graph.outputs}
    alive: list[Item] = []
    for item in reversed(items):
        node = graph.nodes[item[0]]
        if node.effects or any((v, item[1]) in needed for v in node.outputs):
            alive.append(item)
            needed.update(read(item, v) for v in node.inputs)
    rewriter = Rewriter(lowered)
    node_id: dict[Item, int] = {}
    for item in reversed(alive):
        node_id[item] = rewriter.add(*item, partial(read, item))
    return rewriter.finish(lambda v: (v, result(v))), node_id


def with_one_copy(lowered: Lowered) -> Lowered:
    """The program with one copy of each operation, and the graph ``costmodel.graph.without_copies``."""
    graph = lowered.graph
    if not graph.origins:
        return lowered
    rewriter = Rewriter(replace(lowered, graph=replace(graph, origins=())))
    return rewriter.finish(rewriter.add_once(graph))


class EquationRewriter:
    """Collects the equations of a program that is rewritten, with new values, and lowers them."""

    def __init__(self, old: Lowered) -> None:
        self.old = old
        self.avals = list(old.avals)
        self.equations: list[Equation] = []

    def new_value(self, aval: Any) -> int:
        """The number of a new value of that type."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def add(
        self,
        like: Equation,
        primitive: Primitive,
        params: dict[str, Any],
        inputs: Sequence[Operand],
        out_avals: Sequence[Any],
        outputs: tuple[int, ...] | None = None,
    ) -> tuple[int, ...]:
        """Append an equation in the place of ``like``; its results, which are ``outputs`` or new values."""
        if outputs is None:
            outputs = tuple([self.new_value(aval) for aval in out_avals])
        in_avals = tuple([v.aval if isinstance(v, Literal) else self.avals[v] for v in inputs])
        self.equations.append(
            replace(like, primitive=primitive, params=params, inputs=tuple(inputs), outputs=outputs,
                    in_avals=in_avals, out_avals=tuple(out_avals))
        )  # fmt: skip
        return outputs

    def add_traced(
        self, like: Equation, f: Callable[..., Any], inputs: Sequence[Operand]
    ) -> tuple[Operand, ...]:
        """Append the equations of ``f``, a function of arrays, in the place of ``like``; its results."""
        avals: list[Any] = [v.aval if isinstance(v, Literal) else self.avals[v] for v in inputs]
        traced = trace(f, *[jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals])
        new: dict[int, Operand] = dict(zip(traced.inputs, inputs, strict=True))

        def read(v: Operand) -> Operand:
            return v if isinstance(v, Literal) else new[v]

        for eqn in traced.equations:
            results = self.add(like, eqn.primitive, eqn.params, [read(v) for v in eqn.inputs], eqn.out_avals)
            new.update(zip(eqn.outputs, results, strict=True))
        return tuple(read(v) for v in traced.outputs)

    def lowered(self, outputs: tuple[Operand, ...] | None = None) -> Lowered:
        """The program of the equations that are needed for ``outputs``, by default those of the old one."""
        old = self.old
        results = old.outputs if outputs is None else outputs
        equations, avals = live(self.equations, results), tuple(self.avals)
        return lower(Flat(equations, avals, old.graph.inputs, results, old.consts, old.out_tree))
