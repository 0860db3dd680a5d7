"""Lower flat equations to a graph whose nodes have kinds, iteration spaces and flops.

The rule of each primitive is evaluated here, once for all equal equations.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from costmodel.graph import DimRole, Flops, Graph, Node, OpKind, Value, check_graph, make_graph
from fuseplan.frontend.equation_text import Describer
from fuseplan.frontend.ops import has_rule, rule_of
from fuseplan.frontend.ops.rule import Rule, Space
from fuseplan.frontend.simplify import fold, roots
from fuseplan.frontend.trace import PATTERN, Equation, Flat, Literal, Operand
from fuseplan.support.errors import ExtensionError, FuseplanError, UnsupportedOperationError
from fuseplan.support.memo import memoised


@dataclass(frozen=True, slots=True)
class Lowered:
    """A graph together with the equations of its nodes.

    ``equations[i]`` belongs to ``graph.nodes[i]``, ``avals[v]`` to ``graph.values[v]``. Operands and results
    of the equations are value ids of the graph. ``outputs`` are value ids or literals, in the order of the
    function's flat results.
    """

    graph: Graph
    equations: tuple[Equation, ...]
    avals: tuple[Any, ...]
    outputs: tuple[Operand, ...]
    consts: tuple[Any, ...]
    out_tree: Any
    without_rule: tuple[tuple[str, int], ...] = ()
    """The primitives without a rule, and how often each occurs."""


@memoised
def lower(flat: Flat, *, strict: bool = False) -> Lowered:
    """Build the graph of a function's equations. An equation without a rule becomes an OPAQUE node.

    Raises:
        UnsupportedOperationError: with ``strict=True``, an equation has no rule.

    Example:
        >>> import jax.numpy as jnp
        >>> from fuseplan.frontend.trace import trace
        >>> print(lower(trace(lambda x: jnp.exp(x).sum(), jnp.ones((2, 3)))).graph)
        in   v0:f32[2,3]
        n0   v1:f32[2,3] = exp v0    [elementwise]
        n1   v2:f32[] = reduce_sum v1    [reduction]
        out  v2
    """
    flat = roots(fold(flat))
    builder = _Builder(flat)
    unknown: Counter[str] = Counter()
    for eqn in flat.equations:
        if not has_rule(eqn):
            unknown[eqn.primitive.name] += 1
            if strict:
                raise UnsupportedOperationError(
                    f"expected primitives with a rule, got {eqn.primitive.name!r} in `{eqn}` at "
                    f"{eqn.source or 'an unknown line'}. Declare it with fuseplan.register_rule, or "
                    "drop strict=True to leave it to XLA."
                )
        builder.add(eqn)
    return builder.finish(tuple(unknown.most_common()))


class NodeTemplates:
    """The nodes of equations, without position, values and scope: one for equal equations."""

    def __init__(self, describe: Describer) -> None:
        self._describe = describe
        self._known: dict[Any, Node] = {}

    def of(self, eqn: Equation) -> Node:
        """The attributes of an equation's node that follow from its primitive, parameters and shapes."""
        describe = self._describe
        name = eqn.primitive.name
        literals = tuple(
            [(i, describe.literal(v.val)) for i, v in enumerate(eqn.inputs) if isinstance(v, Literal)]
        )
        params = describe.params(name, eqn.params)
        alone = eqn.effects or eqn.is_set_apart
        shapes = tuple([describe.array(a) for a in (*eqn.in_avals, *eqn.out_avals)])
        key = (name, eqn.op, params, literals, shapes, alone, eqn.effects)
        found = self._known.get(key)
        if found is None:
            text = repr((name, params.items, literals))
            rule, space, flops, backends = _evaluated(eqn)
            digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
            arrays = [i for i, v in enumerate(eqn.inputs) if not isinstance(v, Literal)]
            found = self._known[key] = Node(
                -1,
                eqn.op,
                OpKind.OPAQUE if alone else rule.kind,
                (),
                (),
                space.dims,
                space.roles,
                tuple([space.input_maps[i] for i in arrays]),
                space.output_maps,
                flops,
                _is_bitcast(eqn),
                eqn.effects,
                () if alone else backends,
                rule.temporaries,
                digest if params.portable else -1 - digest,
                reciprocal=_is_reciprocal(eqn),
                takes_part=name in ("slice", "dynamic_slice", "gather") or DimRole.ADDRESSED in space.roles,
                given_ps=eqn.params["time_ps"] if name == PATTERN else None,
            )
        return found


class _Builder:
    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.values: list[Value] = []
        self.avals: list[Any] = []
        self.nodes: list[Node] = []
        self.equations: list[Equation] = []
        self.ids: dict[int, int] = {}
        self.constants: dict[int, Equation] = {}
        self.made: dict[tuple[int, tuple[int, ...]], int] = {}
        """The node of each distinct computation: its template (by identity) and operands."""
        self.describe = Describer()
        self.templates = NodeTemplates(self.describe)
        self.inputs = [self._value(number, -1) for number in flat.inputs]

    def _value(self, number: int, producer: int) -> int:
        aval = self.flat.avals[number]
        new = len(self.values)
        shape, dtype = self.describe.array(aval)
        self.values.append(Value(new, shape, dtype, producer))
        self.avals.append(aval)
        self.ids[number] = new
        return new

    def add(self, eqn: Equation) -> None:
        arrays = [v for v in eqn.inputs if not isinstance(v, Literal)]
        if not arrays and not eqn.effects and not eqn.is_set_apart and rule_of(eqn).block is not None:
            # A computed constant (iota, a filled array): each consumer computes its own copy, which costs no
            # memory traffic and does not tie consumers together.
            self.constants[eqn.outputs[0]] = eqn
            return
        self._emit(eqn)

    def _read(self, number: int) -> int:
        if number in self.constants:
            self._emit(self.constants[number])
        return self.ids[number]

    def _emit(self, eqn: Equation) -> None:
        operands = tuple([v if isinstance(v, Literal) else self._read(v) for v in eqn.inputs])
        node_id = len(self.nodes)
        template = self.templates.of(eqn)
        arrays = tuple([v for v in operands if not isinstance(v, Literal)])
        if arrays and template.kind != OpKind.OPAQUE:
            # Common subexpressions are computed once, as in XLA.
            same = self.made.setdefault((id(template), arrays), node_id)
            if same != node_id:
                self.ids.update(zip(eqn.outputs, self.nodes[same].outputs, strict=True))
                return
        outputs = tuple([self._value(number, node_id) for number in eqn.outputs])
        scope = "/".join(eqn.scope)
        self.nodes.append(
            replace(template, id=node_id, inputs=arrays, outputs=outputs, source=eqn.source, scope=scope)
        )
        origin = node_id if eqn.origin < 0 else eqn.origin
        self.equations.append(replace(eqn, inputs=operands, outputs=outputs, origin=origin))

    def finish(self, unknown: tuple[tuple[str, int], ...]) -> Lowered:
        outputs = tuple([v if isinstance(v, Literal) else self._read(v) for v in self.flat.outputs])
        arrays = [v for v in outputs if not isinstance(v, Literal)]
        graph = check_graph(make_graph(self.values, self.nodes, self.inputs, arrays))
        return Lowered(
            graph,
            tuple(self.equations),
            tuple(self.avals),
            outputs,
            self.flat.consts,
            self.flat.out_tree,
            unknown,
        )


def _evaluated(eqn: Equation) -> tuple[Rule, Space, Flops, tuple[str, ...]]:
    """The rule of an equation, its iteration space, its flops and the backends that can emit it.

    Raises:
        ExtensionError: the rule fails, or its answers do not fit the equation.
    """
    where = f"of {eqn.primitive.name!r} in `{eqn}`"
    try:
        rule = rule_of(eqn)
        space, flops = rule.space(eqn), rule.flops(eqn)
        backends = rule.backends(eqn) if isinstance(space, Space) else ()
    except Exception as error:
        if isinstance(error, (FuseplanError, MemoryError)):
            raise
        raise ExtensionError(
            f"expected a space and flops from the rule {where}, and it raised {type(error).__name__}: "
            f"{error}. Mend the rule that was registered, or replace it by fuseplan.register_rule"
        ) from error
    if not isinstance(space, Space):
        raise ExtensionError(f"the space of the rule {where} should be a Space, got {space!r}")
    maps = (space.input_maps, space.output_maps)
    if tuple(map(len, maps)) != (len(eqn.in_avals), len(eqn.out_avals)):
        raise ExtensionError(
            f"the space of the rule {where} should have {len(eqn.in_avals)} input_maps and "
            f"{len(eqn.out_avals)} output_maps, got {space!r}"
        )
    counts = (flops.matrix, flops.vector, flops.transcendental) if isinstance(flops, Flops) else (flops,)
    if len(counts) == 1 or not all(isinstance(n, int) and n >= 0 for n in counts):
        raise ExtensionError(
            f"the flops of the rule {where} should be Flops of whole numbers, at least 0 (round them by "
            f"int()), got {flops!r}"
        )
    return rule, space, flops, backends


def _is_bitcast(eqn: Equation) -> bool:
    """Whether the equation only renames dimensions: XLA lays arrays out row-major on CPU and GPU."""
    if not eqn.inputs or isinstance(eqn.inputs[0], Literal):
        return False
    name = eqn.primitive.name
    same_size = name == "broadcast_in_dim" and eqn.in_avals[0].size == eqn.out_avals[0].size
    return same_size or name in ("reshape", "squeeze")


def _is_reciprocal(eqn: Equation) -> bool:
    name = eqn.primitive.name
    if name == "integer_pow":
        return bool(eqn.params["y"] < 0)
    if name == "div" and isinstance(eqn.inputs[0], Literal):
        return bool(np.isfinite(np.asarray(eqn.inputs[0].val, np.float64)).all())
    return name == "rsqrt"
