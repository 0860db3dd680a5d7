"""Lower: flat equations become a graph. Each primitive's rule is evaluated here, once."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from costmodel.graph import Graph, Node, OpKind, Value, check_graph, make_graph
from fuseplan.errors import UnsupportedOperationError
from fuseplan.ops import has_rule, rule_of
from fuseplan.trace import Equation, Flat, Literal, Operand


@dataclass(frozen=True, slots=True)
class Lowered:
    """A graph together with what emitting it needs: the equation behind each node.

    ``equations[i]`` belongs to ``graph.nodes[i]``, ``avals[v]`` to ``graph.values[v]``;
    operands and results of the equations are value ids of the graph. ``outputs`` are
    value ids or literals, in the order of the function's flat results.
    """

    graph: Graph
    equations: tuple[Equation, ...]
    avals: tuple[Any, ...]
    outputs: tuple[Operand, ...]
    consts: tuple[Any, ...]
    out_tree: Any
    without_rule: tuple[tuple[str, int], ...] = ()
    """Primitives that no rule describes, and how often each occurs."""


def lower(flat: Flat, *, strict: bool = False) -> Lowered:
    """Build the graph of a function's equations.

    With ``strict=True`` an equation without a rule raises ``UnsupportedOperationError``
    instead of becoming OPAQUE.

    Example:
        >>> import jax.numpy as jnp
        >>> from fuseplan.trace import trace
        >>> print(lower(trace(lambda x: jnp.exp(x).sum(), jnp.ones((2, 3)))).graph)
        in   v0:f32[2,3]
        n0   v1:f32[2,3] = exp v0    [elementwise]
        n1   v2:f32[] = reduce_sum v1    [reduction]
        out  v2
    """
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


class _Builder:
    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.values: list[Value] = []
        self.avals: list[Any] = []
        self.nodes: list[Node] = []
        self.equations: list[Equation] = []
        self.ids: dict[int, int] = {}
        self.constants: dict[int, Equation] = {}
        self.facts: dict[Any, tuple[Any, ...]] = {}
        self.inputs = [self._value(number, -1) for number in flat.inputs]

    def _value(self, number: int, producer: int) -> int:
        aval = self.flat.avals[number]
        new = len(self.values)
        self.values.append(Value(new, tuple(getattr(aval, "shape", ())), _dtype_name(aval), producer))
        self.avals.append(aval)
        self.ids[number] = new
        return new

    def add(self, eqn: Equation) -> None:
        arrays = any(not isinstance(v, Literal) for v in eqn.inputs)
        if not arrays and not eqn.effects and not eqn.is_set_apart and rule_of(eqn).block is not None:
            # A constant in disguise (iota, a filled array): each consumer makes its own, which
            # costs no memory traffic and ties no two consumers together.
            self.constants[eqn.outputs[0]] = eqn
            return
        self._emit(eqn)

    def _read(self, operand: Operand) -> Operand:
        if isinstance(operand, Literal):
            return operand
        if operand in self.constants:
            self._emit(self.constants[operand])
        return self.ids[operand]

    def _emit(self, eqn: Equation) -> None:
        operands = tuple(self._read(v) for v in eqn.inputs)
        node_id = len(self.nodes)
        outputs = tuple(self._value(number, node_id) for number in eqn.outputs)
        rule, space, flops, backends, signature = self._facts(eqn)
        arrays = [i for i, v in enumerate(operands) if not isinstance(v, Literal)]
        alone = eqn.effects or eqn.is_set_apart
        self.nodes.append(
            Node(
                node_id,
                eqn.primitive.name,
                OpKind.OPAQUE if alone else rule.kind,
                tuple(operands[i] for i in arrays),  # type: ignore[misc]
                outputs,
                space.dims,
                space.roles,
                tuple(space.input_maps[i] for i in arrays),
                space.output_maps,
                flops,
                _is_bitcast(eqn),
                eqn.effects,
                () if alone else backends,
                rule.temporaries,
                signature,
                eqn.source,
                _is_reciprocal(eqn),
            )
        )
        origin = node_id if eqn.origin < 0 else eqn.origin
        self.equations.append(replace(eqn, inputs=operands, outputs=outputs, origin=origin))

    def _facts(self, eqn: Equation) -> tuple[Any, ...]:
        """Rule, space, flops, backends and signature; equal equations share one evaluation."""
        literals = tuple((i, repr(v.val)) for i, v in enumerate(eqn.inputs) if isinstance(v, Literal))
        params = tuple((k, _stable(v)) for k, v in sorted(eqn.params.items()))
        shapes = tuple((getattr(a, "shape", ()), _dtype_name(a)) for a in (*eqn.in_avals, *eqn.out_avals))
        key = (eqn.primitive.name, params, literals, shapes)
        if key not in self.facts:
            rule = rule_of(eqn)
            text = repr((eqn.primitive.name, params, literals))
            signature = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
            self.facts[key] = (rule, rule.space(eqn), rule.flops(eqn), rule.backends(eqn), signature)
        return self.facts[key]

    def finish(self, unknown: tuple[tuple[str, int], ...]) -> Lowered:
        outputs = tuple(self._read(v) for v in self.flat.outputs)
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


def _dtype_name(aval: Any) -> str:
    dtype = getattr(aval, "dtype", None)
    return "token" if dtype is None else _name_of(dtype)


@cache
def _name_of(dtype: Any) -> str:
    # NumPy builds the name of a dtype anew each time.
    return str(dtype)


def _is_bitcast(eqn: Equation) -> bool:
    """Whether it only renames dimensions: XLA lays arrays out row-major on CPU and GPU."""
    if not eqn.inputs or isinstance(eqn.inputs[0], Literal):
        return False
    name = eqn.primitive.name
    same_size = name == "broadcast_in_dim" and eqn.in_avals[0].size == eqn.out_avals[0].size
    return same_size or name in ("reshape", "squeeze", "expand_dims")


def _is_reciprocal(eqn: Equation) -> bool:
    name = eqn.primitive.name
    if name == "integer_pow":
        return bool(eqn.params["y"] < 0)
    if name == "div" and isinstance(eqn.inputs[0], Literal):
        return bool(np.isfinite(np.asarray(eqn.inputs[0].val, np.float64)).all())
    return name == "rsqrt"


def _stable(param: Any) -> Any:
    """A parameter as a hashable key: by identity where it holds code (a loop's body)."""
    if param is None or isinstance(param, (int, float, str, bool, tuple)):
        return repr(param) if isinstance(param, tuple) else param
    if hasattr(param, "eqns") or hasattr(param, "jaxpr") or (callable(param) and not isinstance(param, type)):
        return id(param)
    return repr(param)
