"""A Triton kernel that walks its streamed axis in passes, or writes what it makes on the way.

Each pass is a loop over tiles with accumulators in registers; what a later pass needs of the
arrays it loads again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from costmodel.kernel import Access, block_shape
from fuseplan.codegen.body import Blocks
from fuseplan.codegen.cpu_loops.tiles import Position
from fuseplan.codegen.nest import Nest, neutral
from fuseplan.codegen.pass_body import PassTurn, Results, Totals
from fuseplan.codegen.step import Step
from fuseplan.codegen.triton.blocks import BlockRefs
from fuseplan.schedule.nests.multipass import Pass


class Passes(PassTurn):
    """One program of the grid while it is traced."""

    def __init__(self, nest: Nest, refs: BlockRefs, tables: Sequence[Any]) -> None:
        super().__init__(nest, tuple(refs.position), {})
        self.refs, self.tables = refs, tables

    def run(self) -> None:
        """Walk the stream once for each pass."""
        self.before()
        totals: Totals = {}
        for q, p in enumerate(self.nest.program.passes):
            if p.loop:
                totals |= self._walk(q, p)
            self.after(p, totals)

    def _walk(self, q: int, p: Pass) -> Totals:
        stream = self.spec.streamed
        assert stream is not None
        # The compiler does not hoist loads out of loops by itself.
        self.load_invariant(p)

        def turn(k: Any, totals: Totals) -> Totals:
            position = (*self.position[:stream], k, *self.position[stream + 1 :])
            return self.on_tile(p, position, totals, {})[0]

        start = {i: neutral(self.nest.steps[i], self.out_shape(i)) for i, _ in p.sinks}
        if self.nest.ranges[q] is not None:
            first, count = self.nest.range_at(q, self.tables, self.position)
            return lax.fori_loop(first, first + count, turn, start)
        turns = self.spec.axes[stream].n_tiles
        return turn(0, start) if turns == 1 else lax.fori_loop(0, turns, turn, start)

    def contracted(self, step: Step, axis: int, position: Position) -> Sequence[Any]:
        block, reduction = step.rule.block, step.rule.reduction
        assert block is not None
        assert reduction is not None

        def turn(k: Any, total: Any) -> Any:
            at = (*position[:axis], k, *position[axis + 1 :])
            operands = [self.load(access, at) for access in step.reads]
            (part,) = block(self.tile(self.spec, step, at), step.equation, operands)
            return reduction.combine(total, part)

        start = neutral(step, block_shape(self.spec.axes, step.out_axes[0]))
        return [lax.fori_loop(0, self.spec.axes[axis].n_tiles, turn, start)]

    def load(self, access: Access, position: Position) -> Any:
        return self.refs.load(access, position)

    def written(self, results: Results, step: Step, blocks: Blocks, position: Position) -> Results:
        for v, axes in zip(step.equation.outputs, step.out_axes, strict=True):
            if v in self.nest.writes:
                self.refs.store(Access(v, axes), blocks[v, axes], position)
        return results
