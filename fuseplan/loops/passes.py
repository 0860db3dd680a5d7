"""Passes: the order in which a tiled loop nest evaluates its group.

The innermost streamed axis of a nest, its *stream*, is walked once or several times. A
node that carries it and needs a finished reduction over it, as the backward pass of a
softmax does, has to wait for the next pass, in which what it needs is computed again.

One dependence need not wait. In ``sum(exp(x - max(x)) * v)`` the maximum of the tiles seen
so far may stand in for the final one: what has been added up is multiplied by ``exp(old -
new)`` whenever it grows (online softmax: Milakov and Gimelshein, arXiv:1805.02867), and
what a sum is divided by can be divided by afterwards. Both follow from how the group
computes, not from the name of what it computes: a value is *scaled* if its final value is
what a tile can compute now, times factors that do not depend on the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class Pass:
    """One walk along the stream. Nodes are positions in the group."""

    loop: tuple[int, ...]
    """Evaluated on every tile, in order; the sinks among them."""
    sinks: tuple[tuple[int, Scale], ...]
    """Reductions whose partial results are accumulated, and what the totals lack."""
    pending: dict[int, int]
    """Of ``loop``, products and quotients whose other operand is not known yet: they pass on
    the operand at this position."""
    stored: frozenset[int]
    """Of ``loop``, nodes whose tiles are final in this pass and wanted outside."""
    after: tuple[int, ...]
    """Off the tiles, once the pass is over: sinks are finished, other nodes evaluated."""
    recalled: tuple[int, ...] = ()
    """Products that an earlier pass kept; they are not in ``loop``."""
    kept: tuple[int, ...] = ()
    """Of ``loop``, products that a later pass recalls."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a nest evaluates at each outer tile: ``before``, then the passes."""

    stream: int | None
    before: tuple[int, ...]
    passes: tuple[Pass, ...]
    shifts: dict[int, Shift]


NodeAxes = Sequence[tuple[tuple[int, ...], ...]]


def make_program(
    graph: Graph,
    nodes: Sequence[int],
    node_axes: NodeAxes,
    tiled: frozenset[int],
    stream: int | None,
    written: frozenset[int],
    keeps: bool = False,
) -> Program | None:
    """The passes of a group whose ``tiled`` axes are cut, ``stream`` innermost. With ``keeps``
    a pass recalls the products of earlier ones.

    None if there are none: what is accumulated over an outer axis is complete only when the
    nest is over, and some node of the group needs it.
    """
    return _Planner(graph, nodes, node_axes, tiled, stream).program(written, keeps)


class _Planner:
    """Node by node: the pass in which each value is final, and how it is scaled before."""

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

    def program(self, written: frozenset[int], keeps: bool) -> Program | None:
        for i, node in enumerate(self.nodes):
            if any(self._outer(self.maker[v]) for v in node.inputs if v in self.maker):
                return None
            self._place(i, node)
        targets: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            if i in self.runs:
                targets.setdefault(self.runs[i], []).append(i)
            elif self.carries(i) and not written.isdisjoint(node.outputs):
                targets.setdefault(self.final[i], []).append(i)
        late = [final for i, final in enumerate(self.final) if not self._in_loop(i)]
        count = max([*targets, *late], default=-1) + 1
        passes: list[Pass] = []
        for at in range(count):
            known = {i for p in passes if keeps for i in p.loop if self._is_product(i, p)}
            passes.append(self._pass(at, targets.get(at, []), known))
        recalled = {i for p in passes for i in p.recalled}
        passes = [replace(p, kept=tuple(i for i in p.loop if i in recalled)) for p in passes]
        return Program(self.stream, self._known_after(-1), tuple(passes), dict(self.shifts))

    def _is_product(self, i: int, p: Pass) -> bool:
        """Whether a pass computes a product, final, that costs more than to keep it."""
        return self._in_loop(i) and self.nodes[i].flops.matrix > 0 and i not in p.pending

    def carries(self, i: int) -> bool:
        return self.stream in self.carried[i]

    def _outer(self, i: int) -> bool:
        """Whether the node's result is accumulated over more than the stream."""
        return bool(self.reduced[i] - {self.stream})

    def _in_loop(self, i: int) -> bool:
        """Whether the node has a value for every tile of the stream."""
        return self.carries(i) and i not in self.runs

    def _place(self, i: int, node: Node) -> None:
        if not self.carries(i):
            known = [self.final[self.maker[v]] for v in node.inputs if v in self.maker]
            self.final.append(max(known, default=-1))
            return
        run = final = max([0, *map(self._usable, node.inputs)])
        scaled = None if final == 0 or self._outer(i) else self._scaled(i, node)
        if scaled is not None and scaled[0] < final and self._fits(i, scaled[1]):
            self.early[i], run = scaled, scaled[0]
        if self.reduced[i]:
            self.runs[i] = run
            if i in self.early:
                final = max([run, *(self.final[self.maker[v]] for _, v in self.early[i][1].factors)])
        self.final.append(final)

    def _usable(self, v: int) -> int:
        """The first pass that can read the final value of ``v`` on its tiles."""
        i = self.maker.get(v)
        if i is None:
            return 0
        return self.final[i] if self._in_loop(i) else self.final[i] + 1

    def _scaled(self, i: int, node: Node) -> tuple[int, Scale] | None:
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
            if self._usable(other) <= at:
                return scaled
            both = self._operand(other)
            if both is not None and both[0] == at and None in (scale.shift, both[1].shift):
                return at, _product(scale, both[1])
            late = self.maker.get(other)
            # exp(x - max(x)) is at most one; other float16 may not be in range without a factor.
            in_range = bits > _RANGE["float16"] or scale.shift is not None
            if node.op != "dot_general" and in_range and late is not None and not self._in_loop(late):
                self.factored[i] = other
                return at, Scale(scale.shift, (*scale.factors, (node.op, other)))
        return None

    def _operand(self, v: int) -> tuple[int, Scale] | None:
        """What is computed before it is final; what is final early enough has no scale."""
        i = self.maker.get(v)
        if i is not None and not self._in_loop(i):
            return None
        if i is not None and i in self.early:
            return self.early[i]
        return self._usable(v), Scale()

    def _shifted(self, node: Node) -> tuple[int, Scale] | None:
        """``exp(x - f(max(x)))`` with guards ``f``: it can be computed where x can."""
        i = self.maker.get(node.inputs[0])
        if i is None or self.nodes[i].op != "sub" or len(self.nodes[i].inputs) != 2:
            return None
        x, shift = self.nodes[i].inputs
        top = self._guarded_maximum(shift)
        if top is None or self._read(top, 0) != self._read(i, 0) or self.runs[top] != self._usable(x):
            return None
        self.shifts[shift] = Shift(top, self._chain(shift))
        return self.runs[top], Scale(shift)

    def _guarded_maximum(self, v: int) -> int | None:
        """The one maximum over the stream that ``v`` follows from by guards alone."""
        tops: set[int] = set()
        queue = [v]
        while queue:
            i = self.maker.get(queue.pop())
            if i is None:
                return None
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

    def _fits(self, i: int, scale: Scale) -> bool:
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

    def _known_after(self, at: int) -> tuple[int, ...]:
        """What is computed off the tiles, in order: sinks are finished there too."""
        return tuple(
            i
            for i, final in enumerate(self.final)
            if final == at and not self._in_loop(i) and not (i in self.runs and self._outer(i))
        )

    def _pass(self, at: int, targets: list[int], known: set[int]) -> Pass:
        needed: set[int] = set()
        pending: dict[int, int] = {}
        queue = list(targets)
        while queue:
            i = queue.pop()
            if i in needed:
                continue
            needed.add(i)
            if i in known:
                continue
            inputs = self.nodes[i].inputs
            if i in self.factored and self.final[i] > at:
                pending[i] = next(k for k, v in enumerate(inputs) if v != self.factored[i])
                inputs = (inputs[pending[i]],)
            for v in inputs:
                j = self.maker.get(v)
                if j is not None and self._in_loop(j):
                    queue.append(j)
        sinks = tuple(
            (i, self.early[i][1] if i in self.early else Scale()) for i in sorted(targets) if i in self.runs
        )
        stored = frozenset(i for i in targets if i not in self.runs)
        loop, recalled = tuple(sorted(needed - known)), tuple(sorted(needed & known))
        return Pass(loop, sinks, pending, stored, self._known_after(at), recalled)


def reduced_axes(node: Node, own: Sequence[Sequence[int]]) -> set[int]:
    """The axes of a nest that a node reduces."""
    roles = zip(own, node.roles, strict=True)
    return {a for dims, role in roles if role == DimRole.REDUCED for a in dims}


def _product(x: Scale, y: Scale) -> Scale:
    """What the product of two scaled values lacks; one of them at most has a shift."""
    return Scale(y.shift if x.shift is None else x.shift, x.factors + y.factors)
