"""Derive online softmax: values computed from a running maximum, and rescaled when it grows.

In ``sum(exp(x - max(x)) * v)`` the maximum of the tiles seen so far can replace the final maximum: whenever
it grows, the sum is multiplied by ``exp(old - new)`` (Milakov and Gimelshein, arXiv:1805.02867). A divisor of
a sum can be applied after the sum. Both are derived from the operations of a group, not from a pattern: a
value is *scaled* if its final value is one that a tile can compute now, times factors that do not depend on
the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.axes import compose, made_map, reduced_axes
from costmodel.graph import DimMap, Graph, Node
from costmodel.kernel import KernelSpec

_EXACT = frozenset({"reshape", "squeeze", "broadcast_in_dim", "transpose"})
# Between the maximum of x and the value subtracted from x: identities, and what replaces infinities.
_FINITE = _EXACT | {"stop_gradient", "copy", "max", "select_n", "is_finite", "convert_element_type"}
# Operations through which a factor that does not depend on the stream can be pulled out.
_LINEAR = _EXACT | {"neg", "convert_element_type", "copy"}
_EXPONENT_BITS = {"float16": 5, "bfloat16": 8, "float32": 8, "float64": 11}
"""Bits of the exponent. A value without a factor may exceed the range of the final value."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The factors between a value computed from the tiles seen so far and its final value.

    ``shift`` is the value subtracted inside the exponential, which follows from the running maximum;
    ``factors`` are pairs of ``mul`` or ``div`` and a value that is known after the pass.
    """

    shift: int | None = None
    factors: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Shift:
    """The maximum that a shift follows from, and the nodes between the two."""

    maximum: int
    chain: tuple[int, ...]


class OnlineRescaling:
    """The state of a group's nodes while they are assigned to passes, one after another."""

    def __init__(self, graph: Graph, spec: KernelSpec) -> None:
        self.graph, self.stream, self.axes = graph, spec.streamed, spec.node_axes
        self.nodes = [graph.nodes[n] for n in spec.nodes]
        tiled = frozenset(a for a, axis in enumerate(spec.axes) if not axis.role.is_whole)
        self.producer = {v: i for i, node in enumerate(self.nodes) for v in node.outputs}
        self.carried = [{a for dim in own for a in dim} for own in self.axes]
        members = zip(self.nodes, self.axes, strict=True)
        self.reduced = [reduced_axes(node, own) & tiled for node, own in members]
        self.final: list[int] = []
        """For each node with the stream, the pass that computes its final value; for any other, the pass
        after which it is known (-1: before all passes)."""
        self.runs: dict[int, int] = {}
        """For each reduction over the stream, the pass that accumulates it."""
        self.early: dict[int, tuple[int, Scale]] = {}
        """For each scaled node, the pass that can compute it, and its scale."""
        self.factored: dict[int, int] = {}
        """For each product in ``early``, the operand that is applied later."""
        self.shifts: dict[int, Shift] = {}

    def carries(self, i: int) -> bool:
        """Whether the node has the stream among its axes."""
        return self.stream in self.carried[i]

    def outer(self, i: int) -> bool:
        """Whether the node reduces a tiled axis other than the stream."""
        return bool(self.reduced[i] - {self.stream})

    def in_loop(self, i: int) -> bool:
        """Whether the node has a value for every tile of the stream."""
        return self.carries(i) and i not in self.runs

    def usable(self, v: int) -> int:
        """The first pass that can read the final value of ``v`` on its tiles."""
        i = self.producer.get(v)
        if i is None:
            return 0
        return self.final[i] if self.in_loop(i) else self.final[i] + 1

    def scaled(self, i: int, node: Node) -> tuple[int, Scale] | None:
        """The first pass that can compute the node up to a scale, and the scale; None if none can."""
        bits = _EXPONENT_BITS.get(self.graph.values[node.outputs[0]].dtype)
        if bits is None:
            return None
        if node.op == "exp":
            return self._shifted(node)
        if node.op in _LINEAR | {"reduce_sum"} and len(node.inputs) == 1:
            scaled = self._operand(node.inputs[0])
            fits = bits >= _EXPONENT_BITS.get(self.graph.values[node.inputs[0]].dtype, 0)
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
            # exp(x - max(x)) is at most one; other float16 values may overflow without the factor.
            in_range = bits > _EXPONENT_BITS["float16"] or scale.shift is not None
            if in_range and self._divides(node, other):
                self.factored[i] = other
                return at, Scale(scale.shift, (*scale.factors, (node.op, other)))
        return None

    def _divides(self, node: Node, v: int) -> bool:
        """Whether a node divides by ``v``, which is known after a pass, or multiplies by its reciprocal.

        Other factors may be infinite and are not moved: infinity times a sum differs from a sum of terms that
        may be ``inf * 0``.
        """
        i = self.producer.get(v)
        if i is None or self.in_loop(i) or node.op == "dot_general":
            return False
        while node.op == "mul" and self.nodes[i].op in _EXACT and self.nodes[i].inputs[0] in self.producer:
            i = self.producer[self.nodes[i].inputs[0]]
        return node.op == "div" or self.nodes[i].reciprocal

    def _operand(self, v: int) -> tuple[int, Scale] | None:
        """The pass that can compute ``v`` on the tiles, and its scale; empty if that pass has the final
        value."""
        i = self.producer.get(v)
        if i is not None and not self.in_loop(i):
            return None
        if i is not None and i in self.early:
            return self.early[i]
        return self.usable(v), Scale()

    def _shifted(self, node: Node) -> tuple[int, Scale] | None:
        """As ``scaled``, for ``exp(x - f(max(x)))``, where ``f`` keeps the maximum finite: the first pass
        that can compute x."""
        i = self.producer.get(node.inputs[0])
        if i is None or self.nodes[i].op != "sub" or len(self.nodes[i].inputs) != 2:
            return None
        x, shift = self.nodes[i].inputs
        top = self._finite_maximum(shift)
        if top is None or self._read(top, 0) != self._read(i, 0) or self.runs[top] != self.usable(x):
            return None
        self.shifts[shift] = Shift(top, self._chain(shift))
        return self.runs[top], Scale(shift)

    def _finite_maximum(self, v: int) -> int | None:
        """The only maximum over the stream that ``v`` follows from, by ``_FINITE`` operations; else None."""
        tops: set[int] = set()
        seen: set[int] = set()
        queue = [v]
        while queue:
            i = self.producer.get(queue.pop())
            if i is None:
                return None
            if i in seen:
                continue
            seen.add(i)
            node = self.nodes[i]
            if node.op == "reduce_max" and self.reduced[i] == {self.stream}:
                tops.add(i)
            elif self.carries(i) or (node.inputs and node.op not in _FINITE):
                return None
            else:
                queue += node.inputs
        return tops.pop() if len(tops) == 1 else None

    def _chain(self, v: int) -> tuple[int, ...]:
        """The nodes between a running maximum and the shift ``v``, in order."""
        found: set[int] = set()
        queue = [v]
        while queue:
            i = self.producer[queue.pop()]
            if not self.carries(i) and i not in found:
                found.add(i)
                queue += self.nodes[i].inputs
        return tuple(sorted(found))

    def fits(self, i: int, scale: Scale) -> bool:
        """Whether all factors of a value are constant along the axes that it is summed over."""
        values = [v for _, v in scale.factors] + ([] if scale.shift is None else [scale.shift])
        kept = self._axes_of(self.nodes[i].outputs[0])
        return all(set(self._axes_of(v)) <= set(kept) for v in values) and len(set(kept)) == len(kept)

    def _axes_of(self, v: int) -> list[int]:
        """The axes that index a value computed in the group."""
        i = self.producer[v]
        return [a for dims in compose(made_map(self.nodes[i], v), self.axes[i]) for a in dims]

    def _read(self, i: int, operand: int) -> tuple[int, DimMap]:
        """An array operand of a node, and the axes that index it."""
        node = self.nodes[i]
        return node.inputs[operand], compose(node.input_maps[operand], self.axes[i])


def _product(x: Scale, y: Scale) -> Scale:
    """The scale of a product of two scaled values, at most one of which has a shift."""
    return Scale(y.shift if x.shift is None else x.shift, x.factors + y.factors)
