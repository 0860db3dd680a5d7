"""Emit a group as a Pallas Mosaic kernel (Google TPUs).

Mosaic's pipeline copies blocks between HBM and VMEM, so every access becomes a
``BlockSpec``. The grid runs in order on a core: the streamed axis is its innermost, and
accumulators stay in scratch memory from one turn to the next. A stream that is walked in passes
has a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from costmodel.graph import DimMap
from costmodel.kernel import Access, KernelSpec
from fuseplan.codegen import body as bodies
from fuseplan.codegen.body import Body
from fuseplan.codegen.mosaic_tpu import blocks as blocks_of
from fuseplan.codegen.mosaic_tpu import passes
from fuseplan.codegen.nest import Nest
from fuseplan.codegen.step import kernel_name
from fuseplan.frontend.lower import Lowered


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: Any = False) -> Callable[..., tuple[Any, ...]]:
    """The group as one Mosaic kernel; see ``fuseplan.codegen.emit``."""
    run: Callable[[Sequence[Any]], None]
    made_in: dict[int, int] = {}
    nest = Nest(spec, lowered) if spec.passes else None
    n_tables = 0 if nest is None else nest.n_tables
    if nest is not None:
        run, scratch, made_in = partial(passes.run, nest), passes.scratch(nest), passes.made_in(nest)
    else:
        body = bodies.make_body(spec, lowered)
        run, scratch = _Program(body, lowered).run, _scratch(body)
    avals = lowered.avals
    sources = bodies.live_ins(spec)

    call = pl.pallas_call(
        lambda *refs: run(refs),
        out_shape=[blocks_of.outer(spec, w, avals[w.value]) for w in spec.writes],
        grid=blocks_of.grid(spec),
        in_specs=[*blocks_of.table_specs(n_tables), *blocks_of.read_specs(lowered.graph, spec)],
        out_specs=blocks_of.write_specs(spec, made_in),
        scratch_shapes=scratch,
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=blocks_of.semantics(spec)),
        name=kernel_name(spec, lowered),
    )

    def group(*arrays: Any) -> tuple[Any, ...]:
        given = dict(zip(sources, arrays, strict=True))
        tables = nest.tables(arrays) if nest is not None else []
        outer = (blocks_of.to_outer(spec, r, given[r.value], avals[r.value]) for r in spec.reads)
        results = call(*tables, *outer)
        return tuple(
            blocks_of.from_outer(x, avals[w.value]) for x, w in zip(results, spec.writes, strict=True)
        )

    return group


def _scratch(body: Body) -> list[Any]:
    """Scratch memory for every accumulator."""
    return [
        blocks_of.accumulator(body.spec, axes, dtype)
        for step in body.accumulators
        for axes, dtype in zip(step.out_axes, step.accumulator_dtypes(), strict=True)
    ]


class _Program:
    """One grid step while it is traced."""

    def __init__(self, body: Body, lowered: Lowered) -> None:
        self.body, self.spec, self.lowered = body, body.spec, lowered

    def run(self, refs: Sequence[Any]) -> None:
        body, spec = self.body, self.spec
        self.position: list[Any] = [0] * len(spec.axes)
        for i, a in enumerate(blocks_of.grid_axes(spec)):
            self.position[a] = pl.program_id(i)
        n_in, n_out = len(spec.reads), len(spec.writes)
        self.in_refs = {(r.value, r.axes): ref for r, ref in zip(spec.reads, refs, strict=False)}
        self.out_refs = refs[n_in : n_in + n_out]
        scratch = iter(refs[n_in + n_out :])
        blocks: bodies.Blocks = {}
        bodies.evaluate(body, body.before, blocks, self.position, self._load)
        if not body.accumulators:
            self._finish(blocks)
            return
        bodies.evaluate(body, body.loop, blocks, self.position, self._load)
        carried = []
        for step in body.accumulators:
            parts = bodies.partial_results(body, step, blocks, self.position, self._load)
            carried.append(
                [(next(scratch), axes, part) for axes, part in zip(step.out_axes, parts, strict=True)]
            )
        self._accumulate(carried, blocks)
        streamed = spec.streamed
        assert streamed is not None
        turns = spec.axes[streamed].n_tiles

        @pl.when(self.position[streamed] == turns - 1)
        def _() -> None:
            final = dict(blocks)
            for i, refs_and_parts in enumerate(carried):
                totals = [blocks_of.read(ref, axes, spec) for ref, axes, _ in refs_and_parts]
                bodies.put(body.finals(i), totals, final)
            self._finish(final)

    def _accumulate(self, carried: list[list[tuple[Any, DimMap, Any]]], blocks: bodies.Blocks) -> None:
        assert self.spec.streamed is not None
        k = self.position[self.spec.streamed]

        @pl.when(k == 0)
        def _() -> None:
            for i, results in enumerate(carried):
                for ref, _, part in results:
                    seed = self.body.seeds.get(i)
                    blocks_of.write(ref, part if seed is None else self._start(seed, blocks) + part)

        @pl.when(k > 0)
        def _() -> None:
            for step, results in zip(self.body.accumulators, carried, strict=True):
                for ref, axes, part in results:
                    combine = step.rule.reduction.combine  # type: ignore[union-attr]
                    blocks_of.write(ref, combine(blocks_of.read(ref, axes, self.spec), part))

    def _start(self, seed: bodies.Seed, blocks: bodies.Blocks) -> Any:
        key = seed.start.value, seed.start.axes
        return seed.block(blocks[key] if key in blocks else self._load(seed.start), self.spec)

    def _finish(self, blocks: bodies.Blocks) -> None:
        """Evaluate what comes after the loop, and store the results."""
        bodies.evaluate(self.body, self.body.after, blocks, self.position, self._load)
        for access, ref in zip(self.spec.writes, self.out_refs, strict=True):
            blocks_of.write(ref, blocks[access.value, access.axes])

    def _load(self, access: Access) -> Any:
        aval = self.lowered.avals[access.value]
        return blocks_of.load(self.in_refs[access.value, access.axes], access, self.spec, aval)
