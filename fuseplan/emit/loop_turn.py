"""One turn of a nest's outer loop: the passes along the stream, and what is done off it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from costmodel.graph import DimMap
from costmodel.kernel import Access, block_shape
from fuseplan.emit.body import Blocks, Step, put, scalar
from fuseplan.emit.loop_nest import Nest, Walk, finish, finished, neutral
from fuseplan.emit.loop_tiles import LoopTile, Position, aligned, fresh, loaded, placed
from fuseplan.loops.passes import Pass
from fuseplan.ops.reduction import accumulator
from fuseplan.trace import Literal

Totals = dict[int, Any]
"""What sinks have accumulated along the stream, by position in the group."""
Results = dict[int, Any]
"""The arrays that the nest returns, under construction, by value; and, under ``~value``, the
products that one pass keeps for another."""


class Turn:
    """One turn of the outer loop: the group on one outer tile."""

    def __init__(self, nest: Nest, values: dict[int, Any], position: Position, results: Results) -> None:
        self.nest, self.spec = nest, nest.spec
        self.values, self.position = values, position
        self.results = dict(results)
        self.known: Blocks = {}
        """Blocks that are the same for all tiles of the stream."""

    def run(self, walks: Sequence[Walk]) -> Results:
        for i in self.nest.program.before:
            self._off_stream(i)
        totals: Totals = {}
        for p, walk in zip(self.nest.program.passes, walks, strict=True):
            if p.loop:
                totals |= self._walk(p, walk)
            for i in p.after:
                if i in totals:
                    self._finish_sink(i, totals[i])
                else:
                    self._off_stream(i)
        return self.results

    def _off_stream(self, i: int) -> None:
        step = self.nest.steps[i]
        parts = self._evaluate(step, self.known, self.position)
        if self.nest.accumulates_outside(i):
            self.results = self._accumulated(self.results, i, parts[0], self.position)
        else:
            put(step, finished(step, parts), self.known)
            self.results = self._written(self.results, step, self.known, self.position)

    def _walk(self, p: Pass, walk: Walk) -> Totals:
        """Walk the stream once: what its sinks have accumulated."""
        inner = [i for i, _ in p.sinks if not self.nest.accumulates_outside(i)]
        totals = {i: neutral(self.nest.steps[i], self._out_shape(i)) for i in inner}
        count, tile_at = walk.at(self.position)
        stream = self.nest.program.stream
        assert stream is not None
        for i in p.loop:
            for access in self.nest.steps[i].reads:
                if access.value in self.values and stream not in access.axis_set:
                    self._operand(access, self.known, self.position)

        def body(j: Any, carry: tuple[Totals, Results]) -> tuple[Totals, Results]:
            position = (*self.position[:stream], tile_at(jnp.int32(j)), *self.position[stream + 1 :])
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
        for i in p.recalled:
            v, axes = self.nest.steps[i].equation.outputs[0], self.nest.steps[i].out_axes[0]
            blocks[v, axes] = loaded(results[~v], self.spec, axes, self._along_stream(position))
        for i in p.loop:
            step = self.nest.steps[i]
            if i in p.pending:
                access = step.reads[p.pending[i]]
                blocks[step.equation.outputs[0], step.out_axes[0]] = self._spread(
                    step, access, self._operand(access, blocks, position)
                )
                continue
            parts = self._evaluate(step, blocks, position)
            if i not in scales:
                put(step, finished(step, parts), blocks)
                if i in p.kept:
                    results = self._kept(results, step, blocks, position)
                if i in p.stored:
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

    def _spread(self, step: Step, access: Access, x: Any) -> Any:
        """An operand in the shape of its elementwise step's result."""
        shape = block_shape(self.spec.axes, step.out_axes[0])
        return x if x.shape == shape else jnp.broadcast_to(x, shape)

    def _shift(self, shift: int, old: Any, new: Any, blocks: Blocks) -> tuple[Any, DimMap]:
        """Put the shift of the running maximum among ``blocks``; the factor by which what was
        accumulated under the old one is rescaled, and the axes it has."""
        source = self.nest.program.shifts[shift]
        top = self.nest.steps[source.maximum]
        step = self.nest.steps[source.chain[-1] if source.chain else source.maximum]
        axes = step.out_axes[0]

        def shifted_by(total: Any) -> Any:
            chain = dict(blocks)
            put(top, [finish(top, total)], chain)
            for i in source.chain:
                step = self.nest.steps[i]
                put(step, finished(step, self._evaluate(step, chain, self.position)), chain)
            return chain[shift, axes]

        def unseen(total: Any) -> Any:
            return aligned(total == -jnp.inf, top.out_axes[0], axes, self.spec)

        before, now = shifted_by(old), shifted_by(new)
        # So far all x are -inf: exp(x - -inf) is no number, but may become zero.
        blocks[shift, axes] = jnp.where(unseen(new) & (now == -jnp.inf), 0, now).astype(now.dtype)
        wide = accumulator(now.dtype)
        factor = jnp.exp(before.astype(wide) - now.astype(wide))
        return jnp.where(unseen(old) | (before == now), 1, factor), axes

    def _finish_sink(self, i: int, total: Any) -> None:
        step, scale = self.nest.steps[i], self.nest.scales[i]
        if scale.shift is not None:
            maximum = self.nest.steps[self.nest.program.shifts[scale.shift].maximum].equation.outputs[0]
            # All x are -inf to the end.
            lost = [self._known(v, step) == -jnp.inf for v in (scale.shift, maximum)]
            total = jnp.where(lost[0] & lost[1], jnp.nan, total)
        for operation, v in scale.factors:
            factor = self._known(v, step).astype(total.dtype)
            total = total * factor if operation == "mul" else total / factor
        put(step, [finish(step, total)], self.known)
        self.results = self._written(self.results, step, self.known, self.position)

    def _known(self, v: int, step: Step) -> Any:
        """A value made off the stream, so that it broadcasts against the result of ``step``."""
        x, axes = next((x, axes) for (u, axes), x in self.known.items() if u == v)
        return self._aligned(x, axes, step)

    def _aligned(self, x: Any, axes: DimMap, step: Step) -> Any:
        return aligned(x, axes, step.out_axes[0], self.spec)

    def _out_shape(self, i: int) -> tuple[int, ...]:
        return block_shape(self.spec.axes, self.nest.steps[i].out_axes[0])

    def _operand(self, access: Access, blocks: Blocks, position: Position) -> Any:
        """An array that a step reads: among ``blocks``, or loaded once."""
        key = access.value, access.axes
        if key not in blocks:
            blocks[key] = loaded(self.values[access.value], self.spec, access.axes, position)
        return blocks[key]

    def _evaluate(self, step: Step, blocks: Blocks, position: Position) -> Sequence[Any]:
        assert step.rule.block is not None
        reads = iter(step.reads)
        operands = [
            scalar(v) if isinstance(v, Literal) else self._operand(next(reads), blocks, position)
            for v in step.equation.inputs
        ]
        return step.rule.block(LoopTile(self.spec, step, position), step.equation, operands)

    def _written(self, results: Results, step: Step, blocks: Blocks, position: Position) -> Results:
        """``results`` with those of a step in place."""
        for v, axes in zip(step.equation.outputs, step.out_axes, strict=True):
            if v in self.nest.writes:
                results = {**results, v: placed(results[v], blocks[v, axes], self.spec, axes, position)}
        return results

    def _kept(self, results: Results, step: Step, blocks: Blocks, position: Position) -> Results:
        """``results`` with a product that a later pass recalls."""
        v, axes = step.equation.outputs[0], step.out_axes[0]
        along = self._along_stream(position)
        return {**results, ~v: placed(results[~v], blocks[v, axes], self.spec, axes, along)}

    def _along_stream(self, position: Position) -> Position:
        """The position in an array that has one outer tile, and the whole stream."""
        stream = self.nest.program.stream
        return tuple(p if a == stream else 0 for a, p in enumerate(position))

    def _accumulated(self, results: Results, i: int, part: Any, position: Position) -> Results:
        """``results`` with a tile's part of a sum over outer axes added in its place."""
        step = self.nest.steps[i]
        v, axes = step.equation.outputs[0], step.out_axes[0]
        shape = self._out_shape(i)
        counted = [fresh(self.spec, dims, position, shape, dim) for dim, dims in enumerate(axes)]
        # Along outer axes that the step does not have, every turn computes the same.
        own = {a for dims in step.node_axes for a in dims}
        counted += [jnp.equal(position[a], 0) for a in self.nest.outer if a not in own]
        for valid in counted:
            if valid is not None:
                part = jax.tree.map(functools.partial(jnp.where, valid), part, neutral(step, shape))
        assert step.rule.reduction is not None
        old = jax.tree.map(lambda x: loaded(x, self.spec, axes, position), results[v])
        new = step.rule.reduction.combine(old, part)
        whole = jax.tree.map(lambda x, part: placed(x, part, self.spec, axes, position), results[v], new)
        return {**results, v: whole}
