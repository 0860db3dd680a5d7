"""Scaling: what a value computed from the tiles seen so far lacks to be final.

In ``sum(exp(x - max(x)) * v)`` the maximum of the tiles seen so far may stand in for the
final one: what has been added up is multiplied by ``exp(old - new)`` whenever it grows
(online softmax: Milakov and Gimelshein, arXiv:1805.02867), and what a sum is divided by can
be divided by afterwards. Both follow from how a group computes, not from the name of what it
computes: a value is *scaled* if its final value is what a tile can compute now, times factors
that do not depend on the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.axes import compose, made_map
from costmodel.graph import DimMap, DimRole, Graph, Node

_EXACT = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose"})
# From the maximum of x to what is subtracted from x: identities, and guards against infinities.
_GUARDS = _EXACT | {"stop_gradient", "copy", "copy_p", "max", "select_n", "is_finite", "convert_element_type"}
# Operations through which a factor that does not depend on the stream can be pulled out.
_LINEAR = _EXACT | {"neg", "convert_element_type", "copy", "copy_p"}
_RANGE = {"float16": 5, "bfloat16": 8, "float32": 8, "float64": 11}
"""Bits of the exponent. What lacks a factor may lie outside the range in which it is final."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What a value computed from the tiles seen so far lacks to be final.

    ``shift`` is the value subtracted inside the exponential, from the running maximum;
    ``factors`` are (multiplied or divided, value) pairs that are known after the pass.
    """

    shift: int | None = None
    factors: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Shift:
    """Where a shift comes from: the maximum, and the nodes between the two."""

    maximum: int
    chain: tuple[int, ...]


NodeAxes = Sequence[tuple[tuple[int, ...], ...]]


class Scaling:
    """What is known of a group's nodes while they are placed in passes, one after another."""

    def __init__(
        self, graph: Graph, nodes: Sequence[int], axes: NodeAxes, tiled: frozenset[int], stream: int | None
    ) -> None:
        self.stream = stream
        self.graph, self.axes = graph, axes
        self.nodes = [graph.nodes[n] for n in nodes]
        self.maker = {v: i for i, node in enumerate(self.nodes) for v in node.outputs}
        self.carried = [{a for dim in own for a in dim} for own in axes]
        self.reduced = [reduced_axes(node, own) & tiled for node, own in zip(self.nodes, axes, strict=True)]
        self.final: list[int] = []
        """Of what carries the stream, the pass that can compute it; of anything else, the pass
        after which it is known (-1: before all of them)."""
        self.runs: dict[int, int] = {}
        """For each sink, the pass that accumulates it."""
        self.early: dict[int, tuple[int, Scale]] = {}
        """What can be computed, but for a scale, before it is final: in which pass."""
        self.factored: dict[int, int] = {}
        """Of ``early`` products, the operand that is left for later."""
        self.shifts: dict[int, Shift] = {}

    def carries(self, i: int) -> bool:
        return self.stream in self.carried[i]

    def outer(self, i: int) -> bool:
        """Whether the node's result is accumulated over more than the stream."""
        return bool(self.reduced[i] - {self.stream})

    def in_loop(self, i: int) -> bool:
        """Whether the node has a value for every tile of the stream."""
        return self.carries(i) and i not in self.runs

    def usable(self, v: int) -> int:
        """The first pass that can read the final value of ``v`` on its tiles."""
        i = self.maker.get(v)
        if i is None:
            return 0
        return self.final[i] if self.in_loop(i) else self.final[i] + 1

    def scaled(self, i: int, node: Node) -> tuple[int, Scale] | None:
        """When the node can be computed but for a scale, if ever."""
        bits = _RANGE.get(self.graph.values[node.outputs[0]].dtype)
        if bits is None:
            return None
        if node.op == "exp":
            return self._shifted(node)
        if node.op in _LINEAR | {"reduce_sum"} and len(node.inputs) == 1:
            scaled = self._operand(node.inputs[0])
            fits = bits >= _RANGE.get(self.graph.values[node.inputs[0]].dtype, 0)
            return scaled if fits or scaled is None or scaled[1].shift is not None else None
        if node.op == "mul" and len(node.inputs) == 1:  # the other is a literal
            return self._operand(node.inputs[0])
        if node.op not in ("mul", "div", "dot_general") or len(node.inputs) == 1:
            return None
        x, y = node.inputs
        for one, other in ((x, y), (y, x))[: 1 if node.op == "div" else 2]:
            scaled = self._operand(one)
            if scaled is None:
                continue
            at, scale = scaled
            if self.usable(other) <= at:
                return scaled
            both = self._operand(other)
            if both is not None and both[0] == at and None in (scale.shift, both[1].shift):
                return at, _product(scale, both[1])
            # exp(x - max(x)) is at most one; other float16 may not be in range without a factor.
            in_range = bits > _RANGE["float16"] or scale.shift is not None
            if in_range and self._divides(node, other):
                self.factored[i] = other
                return at, Scale(scale.shift, (*scale.factors, (node.op, other)))
        return None

    def _divides(self, node: Node, v: int) -> bool:
        """Whether a node divides by ``v``, known after a pass, or multiplies by one over it.
        Other factors may be infinite, and stay where they are: infinity times a sum is not the
        sum of what may be ``inf * 0`` (test_passes.py::test_only_divisors_are_left_for_later)."""
        i = self.maker.get(v)
        if i is None or self.in_loop(i) or node.op == "dot_general":
            return False
        while node.op == "mul" and self.nodes[i].op in _EXACT and self.nodes[i].inputs[0] in self.maker:
            i = self.maker[self.nodes[i].inputs[0]]
        return node.op == "div" or self.nodes[i].reciprocal

    def _operand(self, v: int) -> tuple[int, Scale] | None:
        """What is computed before it is final; what is final early enough has no scale."""
        i = self.maker.get(v)
        if i is not None and not self.in_loop(i):
            return None
        if i is not None and i in self.early:
            return self.early[i]
        return self.usable(v), Scale()

    def _shifted(self, node: Node) -> tuple[int, Scale] | None:
        """``exp(x - f(max(x)))`` with guards ``f``: it can be computed where x can."""
        i = self.maker.get(node.inputs[0])
        if i is None or self.nodes[i].op != "sub" or len(self.nodes[i].inputs) != 2:
            return None
        x, shift = self.nodes[i].inputs
        top = self._guarded_maximum(shift)
        if top is None or self._read(top, 0) != self._read(i, 0) or self.runs[top] != self.usable(x):
            return None
        self.shifts[shift] = Shift(top, self._chain(shift))
        return self.runs[top], Scale(shift)

    def _guarded_maximum(self, v: int) -> int | None:
        """The one maximum over the stream that ``v`` follows from by guards alone."""
        tops: set[int] = set()
        seen: set[int] = set()
        queue = [v]
        while queue:
            i = self.maker.get(queue.pop())
            if i is None:
                return None
            if i in seen:
                continue
            seen.add(i)
            node = self.nodes[i]
            if node.op == "reduce_max" and self.reduced[i] == {self.stream}:
                tops.add(i)
            elif self.carries(i) or (node.inputs and node.op not in _GUARDS):
                return None
            else:
                queue += node.inputs
        return tops.pop() if len(tops) == 1 else None

    def _chain(self, v: int) -> tuple[int, ...]:
        """The nodes between a running maximum and the shift ``v``, in order."""
        found: set[int] = set()
        queue = [v]
        while queue:
            i = self.maker[queue.pop()]
            if not self.carries(i) and i not in found:
                found.add(i)
                queue += self.nodes[i].inputs
        return tuple(sorted(found))

    def fits(self, i: int, scale: Scale) -> bool:
        """Whether all that scales a value is constant along what it sums over."""
        values = [v for _, v in scale.factors] + ([] if scale.shift is None else [scale.shift])
        kept = self._made(self.nodes[i].outputs[0])
        return all(set(self._made(v)) <= set(kept) for v in values) and len(set(kept)) == len(kept)

    def _made(self, v: int) -> list[int]:
        """The axes that index a value made in the group."""
        i = self.maker[v]
        return [a for dims in compose(made_map(self.nodes[i], v), self.axes[i]) for a in dims]

    def _read(self, i: int, operand: int) -> tuple[int, DimMap]:
        """An array operand of a node, and the axes that index it."""
        node = self.nodes[i]
        return node.inputs[operand], compose(node.input_maps[operand], self.axes[i])


def reduced_axes(node: Node, own: Sequence[Sequence[int]]) -> set[int]:
    """The axes of a nest that a node reduces."""
    roles = zip(own, node.roles, strict=True)
    return {a for dims, role in roles if role == DimRole.REDUCED for a in dims}


def _product(x: Scale, y: Scale) -> Scale:
    """What the product of two scaled values lacks; one of them at most has a shift."""
    return Scale(y.shift if x.shift is None else x.shift, x.factors + y.factors)
