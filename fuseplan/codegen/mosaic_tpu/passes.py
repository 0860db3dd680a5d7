"""A Mosaic kernel that walks its streamed axis in passes, or writes what it makes on the way.

The passes are a dimension of the grid around that of the stream. From step to step nothing is
kept but accumulators: what follows from those of earlier passes is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl

from costmodel.graph import DimMap, OpKind
from costmodel.kernel import Access
from costmodel.memory import LANES
from fuseplan.codegen.body import Blocks
from fuseplan.codegen.cpu_loops.tiles import Position
from fuseplan.codegen.mosaic_tpu import blocks as blocks_of
from fuseplan.codegen.mosaic_tpu.blocks import PASS
from fuseplan.codegen.nest import Nest, neutral
from fuseplan.codegen.pass_body import PassTurn, Results
from fuseplan.codegen.step import Step


def scratch(nest: Nest) -> list[Any]:
    """Scratch memory for every accumulator of every pass. What reduces the last dimension keeps
    it: so the vector unit has the result, and it is read into rows again. Memory counts with it
    (``costmodel.onchip``)."""
    found = []
    for step in (nest.steps[i] for i in _sinks(nest)):
        axes, operand = step.out_axes[0], step.reads[0]
        in_rows = step.rule.kind == OpKind.REDUCTION and nest.spec.streamed in operand.axes[-1]
        if axes and in_rows:
            axes = (*axes, ())
        found.append(blocks_of.accumulator(nest.spec, axes, step.accumulator_dtypes()[0]))
    return found


def made_in(nest: Nest) -> dict[int, int]:
    """For each result made along the stream, the pass that writes it."""
    passes = enumerate(nest.program.passes)
    return {v: k for k, p in passes for i in p.stored for v in nest.steps[i].equation.outputs}


def _sinks(nest: Nest) -> list[int]:
    return [i for p in nest.program.passes for i, _ in p.sinks]


def run(nest: Nest, refs: Sequence[Any]) -> None:
    """One grid step: that of whichever pass it belongs to."""
    spec = nest.spec
    index = {a: pl.program_id(i) for i, a in enumerate(blocks_of.grid_axes(spec))}
    position = tuple(index.get(a, 0) for a in range(len(spec.axes)))
    for q in range(len(nest.program.passes)):

        def step(q: int = q) -> None:
            _PassStep(nest, position, refs).run(q)

        if PASS in index:
            pl.when(index[PASS] == q)(step)
        else:
            step()


class _PassStep(PassTurn):
    """One grid step of one pass while it is traced."""

    def __init__(self, nest: Nest, position: Position, refs: Sequence[Any]) -> None:
        super().__init__(nest, position, {})
        self.tables, ref = refs[: nest.n_tables], iter(refs[nest.n_tables :])
        self.in_refs = {access: next(ref) for access in nest.spec.reads}
        self.out_refs = {access: next(ref) for access in nest.spec.writes}
        self.totals_refs = {i: next(ref) for i in _sinks(nest)}
        self.is_replay = False
        """Whether what is computed was written by an earlier pass, if it is wanted."""

    def run(self, q: int) -> None:
        """The ``q``-th pass at this position."""
        spec, passes = self.spec, self.nest.program.passes
        assert spec.streamed is not None
        k, turns = self.position[spec.streamed], spec.axes[spec.streamed].n_tiles
        self.is_replay = q > 0
        self.before()
        for p in passes[:q]:
            self.after(p, {i: self._total(i) for i, _ in p.sinks})
        self.is_replay = False
        sinks = [i for i, _ in passes[q].sinks]

        @pl.when(k == 0)
        def start() -> None:
            for i in sinks:
                blocks_of.write(self.totals_refs[i], neutral(self.nest.steps[i], self.out_shape(i)))

        def step() -> None:
            totals, _ = self.on_tile(passes[q], self.position, {i: self._total(i) for i in sinks}, {})
            for i in sinks:
                blocks_of.write(self.totals_refs[i], totals[i])

        if self.nest.ranges[q] is None:
            step()
        else:
            first, count = self.nest.range_at(q, self.tables, self.position)
            pl.when((k >= first) & (k < first + count))(step)

        @pl.when(k == turns - 1)
        def finish() -> None:
            self.after(passes[q], {i: self._total(i) for i in sinks})

    def _aligned(self, x: Any, axes: DimMap, step: Step) -> Any:
        out_axes = step.out_axes[0]
        if not self._is_row(axes, out_axes) or x.size % LANES or x.dtype != jnp.float32:
            return super()._aligned(x, axes, step)
        # What was reduced along rows is a column, and a compiler's own way to a row of it may take as much
        # memory as the block that it scales (tests/aot/test_planned_functions.py).
        columns = jnp.broadcast_to(lax.reshape(x, (x.size, 1)), (x.size, LANES))
        return lax.reshape(columns.T[:1], (*(1 for _ in out_axes[1:]), x.size))

    def _is_row(self, axes: DimMap, out_axes: DimMap) -> bool:
        """Whether what has ``axes`` lies along the last of several dimensions."""
        tiled = [a for dims in axes for a in dims if self.spec.axes[a].tile > 1]
        return len(out_axes) > 1 and tiled == [a for a in out_axes[-1] if self.spec.axes[a].tile > 1]

    def _total(self, i: int) -> Any:
        return blocks_of.read(self.totals_refs[i], self.nest.steps[i].out_axes[0], self.spec)

    def load(self, access: Access, position: Position) -> Any:
        return blocks_of.load(self.in_refs[access], access, self.spec, self.nest.avals[access.value])

    def written(self, results: Results, step: Step, blocks: Blocks, position: Position) -> Results:
        for v, axes in zip(step.equation.outputs, step.out_axes, strict=True):
            if v in self.nest.writes and not self.is_replay:
                blocks_of.write(self.out_refs[Access(v, axes)], blocks[v, axes])
        return results
