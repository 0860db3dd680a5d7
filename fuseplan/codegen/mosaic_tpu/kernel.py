"""Emit a group as a Pallas Mosaic kernel (Google TPUs).

Mosaic's pipeline copies blocks between HBM and VMEM, so every access becomes a ``BlockSpec``. The grid runs
in order on a core. The streamed axis is its innermost dimension, and accumulators stay in scratch memory from
one step to the next. Several passes over the stream are a grid dimension around it; values that follow from
the accumulators of earlier passes are computed again in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from costmodel.graph import DimMap, OpKind
from costmodel.kernel import Access, KernelSpec
from costmodel.memory import LANES
from fuseplan.codegen.mosaic_tpu import blocks as tpu_blocks
from fuseplan.codegen.mosaic_tpu.blocks import PASS
from fuseplan.codegen.pass_evaluator import Nest, PassEvaluator, Results
from fuseplan.codegen.single_pass import (
    Blocks,
    Body,
    Seed,
    evaluate,
    live_ins,
    make_body,
    partial_results,
    put_results,
)
from fuseplan.codegen.tile import Position, Step, kernel_name
from fuseplan.frontend.lower import Lowered


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: Any = False) -> Callable[..., tuple[Any, ...]]:
    """The group as one Mosaic kernel; see ``fuseplan.codegen.emit``."""
    run: Callable[[Sequence[Any]], None]
    writing_passes: dict[int, int] = {}
    nest = Nest(spec, lowered) if spec.passes else None
    tables = [pl.BlockSpec(memory_space=pltpu.SMEM)] * (0 if nest is None else nest.n_tables)
    if nest is not None:
        run, scratch, writing_passes = partial(_run_pass, nest), _pass_scratch(nest), passes_of_writes(nest)
    else:
        body = make_body(spec, lowered)
        scratch = [
            tpu_blocks.accumulator(spec, step.out_axes[0], step.accumulator_dtype())
            for step in body.accumulators
        ]

        def run(refs: Sequence[Any]) -> None:
            _Program(body, lowered, refs).run()

    avals = lowered.avals
    sources = live_ins(spec)

    call = pl.pallas_call(
        lambda *refs: run(refs),
        out_shape=[tpu_blocks.outer(spec, w, avals[w.value]) for w in spec.writes],
        grid=tpu_blocks.grid(spec),
        in_specs=[*tables, *tpu_blocks.read_specs(lowered.graph, spec)],
        out_specs=tpu_blocks.write_specs(spec, writing_passes),
        scratch_shapes=scratch,
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=tpu_blocks.semantics(spec)),
        name=kernel_name(spec, lowered),
    )

    def group(*arrays: Any) -> tuple[Any, ...]:
        given = dict(zip(sources, arrays, strict=True))
        ranges = nest.tables(arrays) if nest is not None else []
        outer = (tpu_blocks.to_outer(spec, r, given[r.value], avals[r.value]) for r in spec.reads)
        results = call(*ranges, *outer)
        own = [avals[w.value] for w in spec.writes]
        return tuple(lax.reshape(x.astype(a.dtype), a.shape) for x, a in zip(results, own, strict=True))

    return group


class _Program:
    """One grid step of a kernel in a single pass."""

    def __init__(self, body: Body, lowered: Lowered, refs: Sequence[Any]) -> None:
        self.body, self.spec, self.lowered = body, body.spec, lowered
        index, ref = _grid_index(body.spec), iter(refs)
        self.position = [index.get(a, 0) for a in range(len(body.spec.axes))]
        self.in_refs = {access: next(ref) for access in self.spec.reads}
        self.out_refs = {access: next(ref) for access in self.spec.writes}
        self.totals_refs = list(ref)

    def run(self) -> None:
        body, spec = self.body, self.spec
        blocks: Blocks = {}
        evaluate(body, body.before, blocks, self.position, self._load)
        if not body.accumulators:
            self._finish(blocks)
            return
        evaluate(body, body.loop, blocks, self.position, self._load)
        parts = [partial_results(spec, s, blocks, self.position, self._load)[0] for s in body.accumulators]
        assert spec.streamed is not None
        k, turns = self.position[spec.streamed], spec.axes[spec.streamed].n_tiles

        def total(i: int) -> Any:
            return tpu_blocks.read(self.totals_refs[i], body.accumulators[i].out_axes[0], spec)

        @pl.when(k == 0)
        def start() -> None:
            for i, part in enumerate(parts):
                seed = body.seeds.get(i)
                first = part if seed is None else self._start(seed, blocks) + part
                tpu_blocks.write(self.totals_refs[i], first)

        @pl.when(k > 0)
        def accumulate() -> None:
            for i, (step, part) in enumerate(zip(body.accumulators, parts, strict=True)):
                tpu_blocks.write(self.totals_refs[i], step.combine(total(i), part))

        @pl.when(k == turns - 1)
        def finish() -> None:
            final = dict(blocks)
            for i in range(len(parts)):
                put_results(body.final_step(i), [total(i)], final)
            self._finish(final)

    def _start(self, seed: Seed, blocks: Blocks) -> Any:
        key = seed.start.value, seed.start.axes
        return seed.block(blocks[key] if key in blocks else self._load(seed.start), self.spec)

    def _finish(self, blocks: Blocks) -> None:
        """Evaluate the steps after the loop, and store the results."""
        evaluate(self.body, self.body.after, blocks, self.position, self._load)
        for access, ref in self.out_refs.items():
            tpu_blocks.write(ref, blocks[access.value, access.axes])

    def _load(self, access: Access) -> Any:
        return tpu_blocks.load(self.in_refs[access], access, self.spec, self.lowered.avals[access.value])


def _grid_index(spec: KernelSpec) -> dict[int, Any]:
    """The index of the current grid step along each dimension of the grid."""
    return {a: pl.program_id(i) for i, a in enumerate(tpu_blocks.grid_axes(spec))}


def _pass_scratch(nest: Nest) -> list[Any]:
    """Scratch memory for every accumulator of every pass.

    A reduction of the last dimension keeps it with size one, so that the vector unit holds the result in
    rows. ``costmodel.onchip`` counts it so.
    """
    found = []
    for step in (nest.steps[i] for i in _sinks(nest)):
        axes, operand = step.out_axes[0], step.reads[0]
        in_rows = step.rule.kind == OpKind.REDUCTION and nest.spec.streamed in operand.axes[-1]
        if axes and in_rows:
            axes = (*axes, ())
        found.append(tpu_blocks.accumulator(nest.spec, axes, step.accumulator_dtype()))
    return found


def passes_of_writes(nest: Nest) -> dict[int, int]:
    """For each value made along the stream, the pass that writes it."""
    passes = enumerate(nest.program.passes)
    return {v: k for k, p in passes for i in p.stored for v in nest.steps[i].equation.outputs}


def _sinks(nest: Nest) -> list[int]:
    return [i for p in nest.program.passes for i, _ in p.sinks]


def _run_pass(nest: Nest, refs: Sequence[Any]) -> None:
    """Run one grid step, of the pass at the grid's ``PASS`` dimension."""
    spec = nest.spec
    index = _grid_index(spec)
    position = tuple(index.get(a, 0) for a in range(len(spec.axes)))
    for q in range(len(nest.program.passes)):

        def step(q: int = q) -> None:
            _PassStep(nest, position, refs).run_pass(q)

        if PASS in index:
            pl.when(index[PASS] == q)(step)
        else:
            step()


class _PassStep(PassEvaluator):
    """One grid step of one pass."""

    def __init__(self, nest: Nest, position: Position, refs: Sequence[Any]) -> None:
        super().__init__(nest, position, {})
        self.tables, ref = refs[: nest.n_tables], iter(refs[nest.n_tables :])
        self.in_refs = {access: next(ref) for access in nest.spec.reads}
        self.out_refs = {access: next(ref) for access in nest.spec.writes}
        self.totals_refs = {i: next(ref) for i in _sinks(nest)}
        self.is_replay = False
        """Whether an earlier pass has stored the values that are computed now."""

    def run_pass(self, q: int) -> None:
        """Evaluate pass ``q`` at this position."""
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
                tpu_blocks.write(self.totals_refs[i], self.nest.steps[i].initial(self.out_shape(i)))

        def step() -> None:
            totals, _ = self.on_tile(passes[q], self.position, {i: self._total(i) for i in sinks}, {})
            for i in sinks:
                tpu_blocks.write(self.totals_refs[i], totals[i])

        if self.nest.ranges[q] is None:
            step()
        else:
            first, count = self.nest.range_at(q, self.tables, self.position)
            pl.when((k >= first) & (k < first + count))(step)

        @pl.when(k == turns - 1)
        def finish() -> None:
            self.after(passes[q], {i: self._total(i) for i in sinks})

    def _align(self, x: Any, axes: DimMap, step: Step) -> Any:
        out_axes = step.out_axes[0]
        if not self._is_row(axes, out_axes) or x.size % LANES or x.dtype != jnp.float32:
            return super()._align(x, axes, step)
        # The result of a reduction along rows is a column. The compiler's own conversion to a row may take as
        # much memory as the block that it scales.
        columns = jnp.broadcast_to(lax.reshape(x, (x.size, 1)), (x.size, LANES))
        return lax.reshape(columns.T[:1], (*(1 for _ in out_axes[1:]), x.size))

    def _is_row(self, axes: DimMap, out_axes: DimMap) -> bool:
        """Whether a block indexed by ``axes`` lies along the last of several dimensions."""
        tiled = [a for dims in axes for a in dims if self.spec.axes[a].tile > 1]
        return len(out_axes) > 1 and tiled == [a for a in out_axes[-1] if self.spec.axes[a].tile > 1]

    def _total(self, i: int) -> Any:
        return tpu_blocks.read(self.totals_refs[i], self.nest.steps[i].out_axes[0], self.spec)

    def load(self, access: Access, position: Position) -> Any:
        return tpu_blocks.load(self.in_refs[access], access, self.spec, self.nest.avals[access.value])

    def store(self, results: Results, access: Access, block: Any, position: Position) -> Results:
        if not self.is_replay:
            tpu_blocks.write(self.out_refs[access], block)
        return results
