"""Emit a group as a nest of XLA loops over tiles: the kernels of the CPU.

One loop walks the tiles of all outer axes; inside it, each pass of the group walks the
stream. Large intermediates exist a tile at a time, results are written into place by
dynamic slices, and XLA runs each operation of a tile on all cores.

The last tile of an axis that its tile does not divide is shifted back to end where the
axis ends: every tile is full, and what an earlier tile covered already is masked where it
would count twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from costmodel.graph import DimMap
from costmodel.kernel import Access, KernelSpec, block_shape
from fuseplan.emit.body import Blocks, Step, live_ins, make_step, put, scalar
from fuseplan.loops.nest import program_of
from fuseplan.loops.passes import Pass, Scale, reduced_axes
from fuseplan.lower import Lowered
from fuseplan.skipping import Skips, find_skips
from fuseplan.trace import Literal

Position = tuple[Any, ...]
"""For each axis of the nest, the index of the current tile; 0 for an axis in one tile."""
Totals = dict[int, Any]
"""What sinks have accumulated along the stream, by position in the group."""
Results = dict[int, Any]
"""The arrays that the nest returns, under construction, by value."""


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The group as a loop nest; see ``fuseplan.emit.emit``."""
    return _Nest(spec, lowered).run


class _Nest:
    """One nest; nothing in it depends on the arrays it is run on."""

    def __init__(self, spec: KernelSpec, lowered: Lowered) -> None:
        program = program_of(lowered.graph, spec)
        assert program is not None, "the schedule offers no nest without passes"
        self.spec, self.program = spec, program
        self.steps = [make_step(spec, lowered, i) for i in range(len(spec.nodes))]
        self.avals = lowered.avals
        self.reads = live_ins(spec)
        self.writes = {w.value: w for w in spec.writes}
        self.outer = [a for a, axis in enumerate(spec.axes) if axis.n_tiles > 1 and a != program.stream]
        tiled = set(self.outer) | ({program.stream} if program.stream is not None else set())
        nodes = [lowered.graph.nodes[n] for n in spec.nodes]
        self.reduced = [
            reduced_axes(node, own) & tiled for node, own in zip(nodes, spec.node_axes, strict=True)
        ]
        self.skips = [self._skips(lowered, p) for p in program.passes]

    def _skips(self, lowered: Lowered, p: Pass) -> Skips | None:
        stream = self.program.stream
        if stream is None or self.spec.axes[stream].n_tiles == 1:
            return None
        return find_skips(lowered, self.spec, stream, [self.spec.nodes[i] for i in p.loop])

    def run(self, *arrays: Any) -> tuple[Any, ...]:
        values = dict(zip(self.reads, arrays, strict=True))
        walks = [_Walk(self, skips, values) for skips in self.skips]
        results = {v: self._empty(v) for v in self.writes}
        counts = [self.spec.axes[a].n_tiles for a in self.outer]

        def body(t: Any, results: Results) -> Results:
            position: list[Any] = [0] * len(self.spec.axes)
            for a, count in zip(reversed(self.outer), reversed(counts), strict=True):
                t, position[a] = lax.div(t, jnp.int32(count)), lax.rem(t, jnp.int32(count))
            return _Turn(self, values, tuple(position), results).run(walks)

        turns = math.prod(counts)
        if turns == 1:
            results = body(jnp.int32(0), results)
        else:
            results = lax.fori_loop(jnp.int32(0), jnp.int32(turns), body, results)
        return tuple(self._finished(v, results[v]) for v in self.writes)

    def accumulates_outside(self, i: int) -> bool:
        """Whether the result of a node is summed up over more than the stream."""
        return bool(self.reduced[i] - {self.program.stream})

    def maker(self, v: int) -> int:
        return next(i for i, step in enumerate(self.steps) if v in step.equation.outputs)

    def _empty(self, v: int) -> Any:
        """A result before the first tile: neutral where tiles are summed up."""
        aval = self.avals[v]
        i = self.maker(v)
        if self.accumulates_outside(i):
            return _neutral(self.steps[i], aval.shape)
        return jnp.zeros(aval.shape, aval.dtype)

    def _finished(self, v: int, result: Any) -> Any:
        i = self.maker(v)
        return _finish(self.steps[i], result) if self.accumulates_outside(i) else result


class _Walk:
    """Which tiles of the stream a pass visits."""

    def __init__(self, nest: _Nest, skips: Skips | None, values: dict[int, Any]) -> None:
        stream = nest.program.stream
        self.count = 1 if stream is None else nest.spec.axes[stream].n_tiles
        self.skips = skips
        if skips is None:
            return
        # Of each row of tiles, first the live ones, in order.
        order = np.argsort(~skips.live, axis=-1, kind="stable").astype(np.int32)
        live = skips.live.sum(axis=-1, dtype=np.int32)
        safe = skips.safe(values)
        self.order = jnp.where(safe, order, np.arange(self.count, dtype=np.int32))
        self.live = jnp.where(safe, live, np.int32(self.count))

    def at(self, position: Position) -> tuple[Any, Callable[[Any], Any]]:
        """How many tiles are visited at an outer position, and which is the j-th."""
        if self.skips is None:
            return self.count, lambda j: j
        row = tuple(position[a] for a in self.skips.axes[:-1])
        order = self.order[row]
        return self.live[row], lambda j: order[j]


class _Turn:
    """One turn of the outer loop: the group on one outer tile."""

    def __init__(self, nest: _Nest, values: dict[int, Any], position: Position, results: Results) -> None:
        self.nest, self.spec = nest, nest.spec
        self.values, self.position = values, position
        self.results = dict(results)
        self.known: Blocks = {}
        """Blocks that are the same for all tiles of the stream."""

    def run(self, walks: Sequence[_Walk]) -> Results:
        for i in self.nest.program.before:
            self._off_stream(i)
        for p, walk in zip(self.nest.program.passes, walks, strict=True):
            totals = self._walk(p, walk)
            scales = dict(p.sinks)
            for i in p.after:
                if i in totals:
                    self._finish_sink(i, scales[i], totals[i])
                else:
                    self._off_stream(i)
        return self.results

    def _off_stream(self, i: int) -> None:
        step = self.nest.steps[i]
        parts = self._evaluate(step, self.known, self.position)
        if self.nest.accumulates_outside(i):
            self.results = self._accumulated(self.results, i, parts[0], self.position)
        else:
            put(step, _finished(step, parts), self.known)
            self.results = self._written(self.results, step, self.known, self.position)

    def _walk(self, p: Pass, walk: _Walk) -> Totals:
        """Walk the stream once: what its sinks have accumulated."""
        if not p.loop:
            return {}
        scales = dict(p.sinks)
        inner = [i for i in scales if not self.nest.accumulates_outside(i)]
        totals = {i: _neutral(self.nest.steps[i], self._out_shape(i)) for i in inner}
        count, tile_at = walk.at(self.position)
        stream = self.nest.program.stream
        for i in p.loop:
            for access in self.nest.steps[i].reads:
                if access.value in self.values and stream not in access.axis_set:
                    self.known[access.value, access.axes] = self._load(access, self.position)

        def body(j: Any, carry: tuple[Totals, Results]) -> tuple[Totals, Results]:
            position = self.position
            if stream is not None:
                position = (*position[:stream], tile_at(j), *position[stream + 1 :])
            return self._tile(p, position, *carry)

        start = (totals, self.results)
        if isinstance(count, int) and count == 1:
            totals, self.results = body(jnp.int32(0), start)
        else:
            totals, self.results = lax.fori_loop(jnp.int32(0), jnp.int32(count), body, start)
        return totals

    def _tile(self, p: Pass, position: Position, totals: Totals, results: Results) -> tuple[Totals, Results]:
        """Evaluate a pass on one tile of the stream."""
        totals, blocks, scales = dict(totals), dict(self.known), dict(p.sinks)
        shifts = {scale.shift for scale in scales.values() if scale.shift is not None}
        factors: dict[int, tuple[Any, DimMap]] = {}
        for i in p.loop:
            step = self.nest.steps[i]
            if i in p.pending:
                operand = p.pending[i]
                blocks[step.equation.outputs[0], step.out_axes[0]] = self._operand(
                    step, operand, blocks, position
                )
                continue
            parts = self._evaluate(step, blocks, position)
            if i not in scales:
                put(step, _finished(step, parts), blocks)
                results = self._written(results, step, blocks, position)
            elif self.nest.accumulates_outside(i):
                results = self._accumulated(results, i, parts[0], position)
            else:
                assert step.rule.reduction is not None
                old, shifted = totals[i], scales[i].shift
                if shifted is not None:
                    old = old * self._aligned(*factors[shifted], step).astype(old.dtype)
                totals[i] = step.rule.reduction.combine(old, parts[0])
                for shift in shifts:
                    if self.nest.program.shifts[shift].maximum == i:
                        factors[shift] = self._shift(shift, old, totals[i], blocks)
        return totals, results

    def _shift(self, shift: int, old: Any, new: Any, blocks: Blocks) -> tuple[Any, DimMap]:
        """Put the shift of the running maximum among ``blocks``; the factor by which what was
        accumulated under the old one is rescaled, and the axes it has."""
        source = self.nest.program.shifts[shift]
        top = self.nest.steps[source.maximum]

        def shifted_by(total: Any) -> Any:
            chain = dict(blocks)
            put(top, [_finish(top, total)], chain)
            for i in source.chain:
                step = self.nest.steps[i]
                put(step, _finished(step, self._evaluate(step, chain, self.position)), chain)
            return next(x for (v, _), x in chain.items() if v == shift)

        before, now = shifted_by(old), shifted_by(new)
        step = self.nest.steps[source.chain[-1] if source.chain else source.maximum]
        axes = step.out_axes[0]
        # Under a maximum of -inf nothing was added up, and -inf - -inf is no number.
        seen = _align(old > -jnp.inf, top.out_axes[0], axes, self.spec)
        blocks[shift, axes] = jnp.where(now == -jnp.inf, 0, now).astype(now.dtype)
        return jnp.where(seen | jnp.isnan(before), jnp.exp(before - now), 1), axes

    def _finish_sink(self, i: int, scale: Scale, total: Any) -> None:
        step = self.nest.steps[i]
        if scale.shift is not None:
            shift, axes = next((x, a) for (v, a), x in self.known.items() if v == scale.shift)
            # exp(x - -inf) is no number, as x is -inf everywhere.
            total = jnp.where(self._aligned(shift == -jnp.inf, axes, step), jnp.nan, total)
        for operation, v in scale.factors:
            factor, axes = next((x, a) for (u, a), x in self.known.items() if u == v)
            factor = self._aligned(factor, axes, step).astype(total.dtype)
            total = total * factor if operation == "mul" else total / factor
        put(step, [_finish(step, total)], self.known)
        self.results = self._written(self.results, step, self.known, self.position)

    def _aligned(self, x: Any, axes: DimMap, step: Step) -> Any:
        return _align(x, axes, step.out_axes[0], self.spec)

    def _out_shape(self, i: int) -> tuple[int, ...]:
        return block_shape(self.spec.axes, self.nest.steps[i].out_axes[0])

    def _operand(self, step: Step, operand: int, blocks: Blocks, position: Position) -> Any:
        """An array operand of a step: among ``blocks``, or loaded once."""
        axes, v = step.in_axes[operand], step.equation.inputs[operand]
        assert axes is not None
        assert not isinstance(v, Literal)
        if (v, axes) not in blocks:
            blocks[v, axes] = self._load(Access(v, axes), position)
        return blocks[v, axes]

    def _evaluate(self, step: Step, blocks: Blocks, position: Position) -> Sequence[Any]:
        assert step.rule.block is not None
        operands = [
            scalar(v) if isinstance(v, Literal) else self._operand(step, k, blocks, position)
            for k, v in enumerate(step.equation.inputs)
        ]
        return step.rule.block(LoopTile(self.spec, step, position), step.equation, operands)

    def _load(self, access: Access, position: Position) -> Any:
        array = self.values[access.value]
        shape = block_shape(self.spec.axes, access.axes)
        if shape == array.shape:
            return array
        return lax.dynamic_slice(array, self._starts(access.axes, position), shape)

    def _starts(self, axes: DimMap, position: Position) -> list[Any]:
        return [jnp.int32(first_index(self.spec, dims, position)) for dims in axes]

    def _written(self, results: Results, step: Step, blocks: Blocks, position: Position) -> Results:
        """``results`` with those of a step in place."""
        for v, axes in zip(step.equation.outputs, step.out_axes, strict=True):
            if v in self.nest.writes:
                starts = self._starts(axes, position)
                results = {**results, v: _placed(results[v], blocks[v, axes], starts)}
        return results

    def _accumulated(self, results: Results, i: int, part: Any, position: Position) -> Results:
        """``results`` with a tile's part of a sum over outer axes added in its place."""
        step = self.nest.steps[i]
        v, axes = step.equation.outputs[0], step.out_axes[0]
        shape = self._out_shape(i)
        whole = results[v]
        starts = self._starts(axes, position)
        old = jax.tree.map(lambda x: x if x.shape == shape else lax.dynamic_slice(x, starts, shape), whole)
        for dim, dims in enumerate(axes):
            valid = fresh(self.spec, dims, position, shape, dim)
            if valid is not None:
                part = jax.tree.map(functools.partial(jnp.where, valid), part, _neutral(step, shape))
        assert step.rule.reduction is not None
        new = step.rule.reduction.combine(old, part)
        return {**results, v: jax.tree.map(lambda x, part: _placed(x, part, starts), whole, new)}


class LoopTile:
    """The tile of one step; see ``fuseplan.ops.rule.Tile``."""

    backend = "loops"

    def __init__(self, spec: KernelSpec, step: Step, position: Position) -> None:
        self._spec, self._step, self._position = spec, step, position
        self.in_shapes = tuple(() if m is None else block_shape(spec.axes, m) for m in step.in_axes)
        self.out_shapes = tuple(block_shape(spec.axes, m) for m in step.out_axes)

    def indices(self, shape: tuple[int, ...], dim: int, node_dim: int) -> Any:
        start = first_index(self._spec, self._step.node_axes[node_dim], self._position)
        return lax.broadcasted_iota(jnp.int32, shape, dim) + jnp.int32(start)

    def valid(self, operand: int, dim: int) -> Any | None:
        axes = self._step.in_axes[operand]
        if axes is None:
            return None
        return fresh(self._spec, axes[dim], self._position, self.in_shapes[operand], dim)


def first_index(spec: KernelSpec, axes: Sequence[int], position: Position) -> Any:
    """The first index, along a dimension that merges ``axes``, of the tile at ``position``."""
    start: Any = 0
    stride = 1
    for a in reversed(axes):
        axis = spec.axes[a]
        if axis.n_tiles > 1:
            first = position[a] * axis.tile
            start = start + (jnp.minimum(first, axis.size - axis.tile) if axis.ragged else first) * stride
        stride *= axis.size
    return start


def fresh(
    spec: KernelSpec, axes: Sequence[int], position: Position, shape: tuple[int, ...], dim: int
) -> Any | None:
    """Which elements of a block no earlier tile covered along ``dim``, which merges ``axes``;
    None where the tiles of all of them are disjoint. Only the outermost may be ragged."""
    inner = 1
    for a in reversed(axes):
        axis = spec.axes[a]
        if axis.ragged and axis.n_tiles > 1:
            first = position[a] * axis.tile
            covered = (first - jnp.minimum(first, axis.size - axis.tile)) * inner
            return lax.broadcasted_iota(jnp.int32, shape, dim) >= covered
        inner *= axis.tile
    return None


def _placed(whole: Any, block: Any, starts: list[Any]) -> Any:
    """``whole`` with ``block`` in its place."""
    return block if block.shape == whole.shape else lax.dynamic_update_slice(whole, block, starts)


def _neutral(step: Step, shape: tuple[int, ...]) -> Any:
    assert step.rule.reduction is not None
    return step.rule.reduction.init(shape, step.equation)


def _finish(step: Step, total: Any) -> Any:
    assert step.rule.reduction is not None
    return step.rule.reduction.finish(total, step.equation)


def _finished(step: Step, parts: Sequence[Any]) -> Sequence[Any]:
    """The results of a step; of a reduction whose axes are whole, its total."""
    return parts if step.rule.reduction is None else [_finish(step, parts[0])]


def _align(x: Any, axes: DimMap, target: DimMap, spec: KernelSpec) -> Any:
    """``x``, whose dimensions merge ``axes``, so that it broadcasts against a block whose
    dimensions merge ``target``."""
    flat = [a for dims in axes for a in dims]
    order = [a for dims in target for a in dims]
    x = x.reshape([spec.axes[a].tile for a in flat])
    x = x.transpose([flat.index(a) for a in order if a in flat])
    x = x.reshape([spec.axes[a].tile if a in flat else 1 for a in order])
    if any(len(dims) > 1 for dims in target):
        x = jnp.broadcast_to(x, [spec.axes[a].tile for a in order])
        return x.reshape(block_shape(spec.axes, target))
    shape = [spec.axes[dims[0]].tile if dims and dims[0] in flat else 1 for dims in target]
    return x.reshape(shape)
