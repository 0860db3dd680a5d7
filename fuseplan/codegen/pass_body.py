"""A group evaluated in passes along its stream: what all backends that stream share.

A backend says where blocks come from and where results go; here is what is computed on one tile
of a pass, and off the tiles once a pass is over, with the scales of what is accumulated before
all it depends on is known (``fuseplan.schedule.nests.online_rescaling``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from costmodel.graph import DimMap
from costmodel.kernel import Access, block_shape
from fuseplan.codegen.block_tile import BlockTile
from fuseplan.codegen.body import Blocks, put, scalar
from fuseplan.codegen.cpu_loops.tiles import Position, aligned
from fuseplan.codegen.nest import Nest, finish, finished
from fuseplan.codegen.step import Step
from fuseplan.frontend.ops.reduction import accumulator
from fuseplan.frontend.trace import Literal
from fuseplan.schedule.nests.multipass import Pass

Totals = dict[int, Any]
"""What sinks have accumulated along the stream, by position in the group."""
Results = dict[int, Any]
"""The arrays that a nest returns, under construction, by value; and, under ``~value``, the
products that one pass keeps for another. Empty where results are stored at once."""


class PassTurn:
    """The passes at one position of the axes around the stream."""

    tile: type[BlockTile] = BlockTile

    def __init__(self, nest: Nest, position: Position, results: Results) -> None:
        self.nest, self.spec, self.position = nest, nest.spec, position
        self.results = dict(results)
        self.known: Blocks = {}
        """Blocks that are the same for all tiles of the stream."""

    def load(self, access: Access, position: Position) -> Any:
        """The block of an array from outside at ``position``."""
        raise NotImplementedError

    def written(self, results: Results, step: Step, blocks: Blocks, position: Position) -> Results:
        """``results`` with those of a step, if they are wanted outside."""
        raise NotImplementedError

    def recalled(self, p: Pass, results: Results, blocks: Blocks, position: Position) -> None:
        """Put what an earlier pass kept among ``blocks``; only loop nests of the CPU keep any."""

    def kept(self, results: Results, step: Step, blocks: Blocks, position: Position) -> Results:
        """``results`` with a product that a later pass recalls."""
        raise NotImplementedError

    def accumulated(self, results: Results, i: int, part: Any, position: Position) -> Results:
        """``results`` with a tile's part of a sum over more than the stream."""
        raise NotImplementedError

    def before(self) -> None:
        """Evaluate what is known before the first pass."""
        for i in self.nest.program.before:
            self._off_stream(i)

    def after(self, p: Pass, totals: Totals) -> None:
        """Evaluate what is known once a pass is over, of ``totals`` of all passes so far."""
        for i in p.after:
            if i in totals:
                self._finish_sink(i, totals[i])
            else:
                self._off_stream(i)

    def _off_stream(self, i: int) -> None:
        step = self.nest.steps[i]
        parts = self._evaluate(step, self.known, self.position)
        if self.nest.accumulates_outside(i):
            self.results = self.accumulated(self.results, i, parts[0], self.position)
        else:
            put(step, finished(step, parts), self.known)
            self.results = self.written(self.results, step, self.known, self.position)

    def load_invariant(self, p: Pass) -> None:
        """Load what a pass reads that is the same on all of its tiles."""
        for i in p.loop:
            for access in self.nest.steps[i].reads:
                changes = access.axis_set.intersection([self.nest.program.stream, *self.nest.inner])
                if access.value in self.nest.reads and not changes:
                    self._operand(access, self.known, self.position)

    def on_tile(
        self, p: Pass, position: Position, totals: Totals, results: Results
    ) -> tuple[Totals, Results]:
        """Evaluate a pass on one tile of the stream."""
        totals, blocks, scales = dict(totals), dict(self.known), dict(p.sinks)
        shifts = {scale.shift for scale in scales.values() if scale.shift is not None}
        factors: dict[int, tuple[Any, DimMap]] = {}
        self.recalled(p, results, blocks, position)
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
                    results = self.kept(results, step, blocks, position)
                if i in p.stored:
                    results = self.written(results, step, blocks, position)
            elif self.nest.accumulates_outside(i):
                results = self.accumulated(results, i, parts[0], position)
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
            return _is_lowest(aligned(total, top.out_axes[0], axes, self.spec))

        before, now = shifted_by(old), shifted_by(new)
        # So far all x are -inf: exp(x - -inf) is no number, but may become zero.
        blocks[shift, axes] = jnp.where(unseen(new) & _is_lowest(now), 0, now).astype(now.dtype)
        before, now = _widened(before), _widened(now)
        return jnp.where(unseen(old) | (before == now), 1, jnp.exp(before - now)), axes

    def _finish_sink(self, i: int, total: Any) -> None:
        step, scale = self.nest.steps[i], self.nest.scales[i]
        if scale.shift is not None:
            maximum = self.nest.steps[self.nest.program.shifts[scale.shift].maximum].equation.outputs[0]
            # All x are -inf to the end.
            lost = [_is_lowest(self._known(v, step)) for v in (scale.shift, maximum)]
            total = jnp.where(lost[0] & lost[1], jnp.nan, total)
        for operation, v in scale.factors:
            factor = self._known(v, step).astype(total.dtype)
            total = total * factor if operation == "mul" else total / factor
        put(step, [finish(step, total)], self.known)
        self.results = self.written(self.results, step, self.known, self.position)

    def _known(self, v: int, step: Step) -> Any:
        """A value made off the stream, so that it broadcasts against the result of ``step``."""
        x, axes = next((x, axes) for (u, axes), x in self.known.items() if u == v)
        return self._aligned(x, axes, step)

    def _aligned(self, x: Any, axes: DimMap, step: Step) -> Any:
        return aligned(x, axes, step.out_axes[0], self.spec)

    def out_shape(self, i: int) -> tuple[int, ...]:
        """The block shape of the result of the node at a position of the group."""
        return block_shape(self.spec.axes, self.nest.steps[i].out_axes[0])

    def _operand(self, access: Access, blocks: Blocks, position: Position) -> Any:
        """An array that a step reads: among ``blocks``, or loaded once."""
        key = access.value, access.axes
        if key not in blocks:
            blocks[key] = self.load(access, position)
        return blocks[key]

    def contracted(self, step: Step, axis: int, position: Position) -> Sequence[Any]:
        """The result of a contraction of arrays from outside, over tiles of an inner axis; only Triton's
        kernels have any."""
        raise NotImplementedError

    def _evaluate(self, step: Step, blocks: Blocks, position: Position) -> Sequence[Any]:
        assert step.rule.block is not None
        for axis in self.nest.inner:
            if any(axis in dims for dims in step.node_axes):
                return self.contracted(step, axis, position)
        reads = iter(step.reads)
        operands = [
            scalar(v) if isinstance(v, Literal) else self._operand(next(reads), blocks, position)
            for v in step.equation.inputs
        ]
        return step.rule.block(self.tile(self.spec, step, position), step.equation, operands)


def _widened(x: Any) -> Any:
    return x.astype(accumulator(x.dtype))


def _is_lowest(x: Any) -> Any:
    return _widened(x) == -jnp.inf  # a TPU compares no scalars of 16 bits
