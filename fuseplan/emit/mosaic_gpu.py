"""Emit a group as a Pallas Mosaic GPU kernel (NVIDIA Hopper and newer).

One warpgroup computes one tile: it loads all that the tile reads, loops over the streamed axis
if there is one with accumulators in registers, and stores. A contraction has a module of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from costmodel.graph import OpKind
from costmodel.kernel import Access, KernelSpec, block_shape
from fuseplan import _compat
from fuseplan.emit import body as bodies
from fuseplan.emit.body import Body, Step
from fuseplan.emit.mosaic_gpu_blocks import BlockRefs
from fuseplan.emit.mosaic_gpu_product import Product
from fuseplan.emit.mosaic_gpu_steps import squeeze_body, squeezed
from fuseplan.emit.naming import kernel_name
from fuseplan.lower import Lowered


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The group as one Mosaic GPU kernel; see ``fuseplan.emit.emit``. Interpreted, it raises
    where two threads race, unless some elements are computed twice for the last tile to be full."""
    shifted = any(axis.ragged for axis in spec.axes)
    body = bodies.make_body(spec, lowered)
    product = next((Product(spec, lowered, s) for s in body.accumulators if s.rule.kind == OpKind.OUT_ELEMENTWISE_FUSABLE), None)
    body = squeeze_body(body)
    count = len(bodies.live_ins(spec)) + len(spec.writes)

    def kernel(*refs: Any) -> None:
        arrays = BlockRefs(spec, lowered, refs[:count], interpret)
        _Program(body, arrays, product, refs[count:]).run()

    kernel.__name__ = kernel_name(spec, lowered)
    call = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (lowered.avals[w.value] for w in spec.writes)],
        grid=(math.prod(spec.grid),),
        grid_names=("program",),
        scratch_types=[] if product is None else product.scratch(),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=_compat.interpret_gpu(detect_races=not shifted) if interpret else None,
    )

    def group(*arrays: Any) -> tuple[Any, ...]:
        return tuple(call(*arrays))

    return group


class _Program:
    """One program of the grid while it is traced."""

    def __init__(self, body: Body, refs: BlockRefs, product: Product | None, scratch: Sequence[Any]) -> None:
        self.body, self.refs, self.spec = body, refs, body.spec
        self.product, self.scratch = product, scratch

    def run(self) -> None:
        body, position = self.body, self.refs.position
        blocks: bodies.Blocks = {}
        load = self._loader(position)
        bodies.evaluate(body, body.before, blocks, position, load)
        if self.product is not None:
            (step,) = body.accumulators
            bodies.put(step, [self.product.run(self.refs, self.scratch)], blocks)
        elif body.accumulators:
            for access in body.invariant_reads:
                blocks.setdefault((access.value, access.axes), load(access))
            for step, totals in zip(body.accumulators, self._loop(blocks), strict=True):
                bodies.put(step, totals, blocks)
        bodies.evaluate(body, body.after, blocks, position, load)
        for access in self.spec.writes:
            self.refs.store(access, blocks[access.value, access.axes], position)

    def _loop(self, outer: bodies.Blocks) -> list[list[Any]]:
        body, streamed = self.body, self.spec.streamed
        assert streamed is not None

        def turn(k: Any, totals: list[list[Any]]) -> list[list[Any]]:
            position = list(self.refs.position)
            position[streamed] = k
            blocks, load = dict(outer), self._loader(position)
            bodies.evaluate(body, body.loop, blocks, position, load)
            combined = []
            for step, total in zip(body.accumulators, totals, strict=True):
                parts = bodies.partial_results(body, step, blocks, position, load)
                combine = step.rule.reduction.combine  # type: ignore[union-attr]
                combined.append([combine(t, p) for t, p in zip(total, parts, strict=True)])
            return combined

        start = [_neutral(self.spec, step) for step in body.accumulators]
        turns = self.spec.axes[streamed].n_tiles
        return turn(0, start) if turns == 1 else lax.fori_loop(0, turns, turn, start)

    def _loader(self, position: Sequence[Any]) -> Callable[[Access], Any]:
        return lambda access: self.refs.load(access, position)


def _neutral(spec: KernelSpec, step: Step) -> list[Any]:
    assert step.rule.reduction is not None
    shapes = [block_shape(spec.axes, squeezed(spec, axes)) for axes in step.out_axes]
    dtypes = step.accumulator_dtypes()
    neutral = step.rule.reduction.neutral
    return [jnp.full(shape, neutral(d), d) for shape, d in zip(shapes, dtypes, strict=True)]
