"""One turn of a nest's outer loop: the passes along the stream, and what is done off it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from costmodel.kernel import Access
from fuseplan.codegen.body import Blocks
from fuseplan.codegen.cpu_loops.tiles import LoopTile, Position, fresh, loaded, placed
from fuseplan.codegen.nest import Nest, Walk, neutral
from fuseplan.codegen.pass_body import PassTurn, Results, Totals
from fuseplan.codegen.step import Step
from fuseplan.schedule.nests.multipass import Pass


class Turn(PassTurn):
    """One turn of the outer loop: the group on one outer tile."""

    tile = LoopTile

    def __init__(self, nest: Nest, values: dict[int, Any], position: Position, results: Results) -> None:
        super().__init__(nest, position, results)
        self.values = values

    def run(self, walks: Sequence[Walk]) -> Results:
        self.before()
        totals: Totals = {}
        for p, walk in zip(self.nest.program.passes, walks, strict=True):
            if p.loop:
                totals |= self._walk(p, walk)
            self.after(p, totals)
        return self.results

    def _walk(self, p: Pass, walk: Walk) -> Totals:
        """Walk the stream once: what its sinks have accumulated."""
        inner = [i for i, _ in p.sinks if not self.nest.accumulates_outside(i)]
        totals = {i: neutral(self.nest.steps[i], self.out_shape(i)) for i in inner}
        count, tile_at = walk.at(self.position)
        stream = self.nest.program.stream
        assert stream is not None
        self.load_invariant(p)

        def body(j: Any, carry: tuple[Totals, Results]) -> tuple[Totals, Results]:
            position = (*self.position[:stream], tile_at(jnp.int32(j)), *self.position[stream + 1 :])
            return self.on_tile(p, position, *carry)

        start = (totals, self.results)
        if isinstance(count, int) and count == 1:
            totals, self.results = body(jnp.int32(0), start)
        else:
            totals, self.results = lax.fori_loop(jnp.int32(0), jnp.int32(count), body, start)
        return totals

    def load(self, access: Access, position: Position) -> Any:
        return loaded(self.values[access.value], self.spec, access.axes, position)

    def written(self, results: Results, step: Step, blocks: Blocks, position: Position) -> Results:
        """``results`` with those of a step in place."""
        for v, axes in zip(step.equation.outputs, step.out_axes, strict=True):
            if v in self.nest.writes:
                results = {**results, v: placed(results[v], blocks[v, axes], self.spec, axes, position)}
        return results

    def recalled(self, p: Pass, results: Results, blocks: Blocks, position: Position) -> None:
        for i in p.recalled:
            v, axes = self.nest.steps[i].equation.outputs[0], self.nest.steps[i].out_axes[0]
            blocks[v, axes] = loaded(results[~v], self.spec, axes, self._along_stream(position))

    def kept(self, results: Results, step: Step, blocks: Blocks, position: Position) -> Results:
        v, axes = step.equation.outputs[0], step.out_axes[0]
        along = self._along_stream(position)
        return {**results, ~v: placed(results[~v], blocks[v, axes], self.spec, axes, along)}

    def _along_stream(self, position: Position) -> Position:
        """The position in an array that has one outer tile, and the whole stream."""
        stream = self.nest.program.stream
        return tuple(p if a == stream else 0 for a, p in enumerate(position))

    def accumulated(self, results: Results, i: int, part: Any, position: Position) -> Results:
        """``results`` with a tile's part of a sum over outer axes added in its place."""
        step = self.nest.steps[i]
        v, axes = step.equation.outputs[0], step.out_axes[0]
        shape = self.out_shape(i)
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
