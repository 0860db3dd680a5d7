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
from jax.experimental.pallas import mosaic_gpu as plgpu

from costmodel.graph import OpKind
from costmodel.kernel import Access, KernelSpec, block_shape
from fuseplan.codegen import body as bodies
from fuseplan.codegen.body import Body, Totals, accumulated
from fuseplan.codegen.mosaic_gpu.blocks import BlockRefs, Registers, position_of
from fuseplan.codegen.mosaic_gpu.matmul import Product
from fuseplan.codegen.mosaic_gpu.squeezed import squeeze_body, squeezed
from fuseplan.codegen.nest import neutral
from fuseplan.codegen.step import kernel_name, make_step
from fuseplan.frontend.lower import Lowered
from fuseplan.support import jax_compat


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The group as one Mosaic GPU kernel; see ``fuseplan.codegen.emit``. Interpreted, it raises
    where two threads race, unless some elements are computed twice for the last tile to be full."""
    shifted = any(axis.ragged for axis in spec.axes)
    product = _product(spec, lowered)
    own = spec if product is None else product.own
    registers = Registers(own, lowered)
    body = squeeze_body(
        bodies.make_body(own, lowered, seeded=False), (lambda x, _: x) if interpret else registers.place
    )
    count = len(bodies.live_ins(spec)) + len(spec.writes)

    def kernel(*refs: Any) -> None:
        arrays, scratch = refs[:count], refs[count:]
        position = position_of(lax.axis_index("program"), spec)
        if product is None:
            _Program(body, BlockRefs(spec, registers, arrays, interpret), position).run()
            return
        total = product.run(BlockRefs(spec, registers, arrays, interpret), position, scratch)
        program = _Program(body, BlockRefs(own, registers, arrays, interpret), product.own_position(position))
        program.finish({}, [[total]])

    kernel.__name__ = kernel_name(spec, lowered)
    call = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (lowered.avals[w.value] for w in spec.writes)
        ],
        grid=(math.prod(spec.grid),),
        grid_names=("program",),
        scratch_types=[] if product is None else product.scratch(),
        num_threads=None if product is None else product.warpgroups,
        thread_name=None if product is None else "warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=registers.scratch_bytes,
        ),
        interpret=jax_compat.interpret_gpu(detect_races=not shifted) if interpret else None,
    )

    def group(*arrays: Any) -> tuple[Any, ...]:
        return tuple(call(*arrays))

    return group


class _Program:
    """One program of the grid while it is traced."""

    def __init__(self, body: Body, refs: BlockRefs, position: Sequence[Any]) -> None:
        self.body, self.refs, self.spec, self.position = body, refs, body.spec, position

    def run(self) -> None:
        body = self.body
        blocks: bodies.Blocks = {}
        load = self._loader(self.position)
        bodies.evaluate(body, body.before, blocks, self.position, load)
        if not body.accumulators:
            self.finish(blocks, [])
            return
        for access in body.invariant_reads:
            blocks.setdefault((access.value, access.axes), load(access))
        self.finish(blocks, self._loop(blocks))

    def finish(self, blocks: bodies.Blocks, totals: Sequence[Sequence[Any]]) -> None:
        """Evaluate what comes after the loop, which left ``totals``, and store the results."""
        body, position = self.body, self.position
        for step, total in zip(body.accumulators, totals, strict=True):
            bodies.put(step, total, blocks)
        bodies.evaluate(body, body.after, blocks, position, self._loader(position))
        for access in self.spec.writes:
            self.refs.store(access, blocks[access.value, access.axes], position)

    def _loop(self, outer: bodies.Blocks) -> Totals:
        body, spec = self.body, self.spec
        shapes = (block_shape(spec.axes, squeezed(spec, step.out_axes[0])) for step in body.accumulators)
        start = [[neutral(step, shape)] for step, shape in zip(body.accumulators, shapes, strict=True)]
        return accumulated(body, outer, self.position, self.refs.load, start)

    def _loader(self, position: Sequence[Any]) -> Callable[[Access], Any]:
        return lambda access: self.refs.load(access, position)


def _product(spec: KernelSpec, lowered: Lowered) -> Product | None:
    """The contraction of a kernel, if it has one."""
    for position, n in enumerate(spec.nodes):
        if lowered.graph.nodes[n].kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
            return Product(spec, lowered, make_step(spec, lowered, position))
    return None
