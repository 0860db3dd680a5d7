"""Emit a group as a Pallas Mosaic GPU kernel (NVIDIA Hopper and newer).

One warpgroup computes one tile in registers, in a single pass over the streamed axis, if there is one. The
operands of a contraction are copied to shared memory while tensor cores multiply the previous blocks (wgmma);
two warpgroups share the rows of a tile that has enough of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from costmodel.graph import OpKind
from costmodel.kernel import KernelSpec
from costmodel.onchip import warpgroups
from fuseplan.codegen.mosaic_gpu.blocks import BlockRefs, Registers, squeeze_body, squeezed
from fuseplan.codegen.single_pass import finish_in_registers, live_ins, make_body, run_in_registers
from fuseplan.codegen.tile import Step, grid_position, kernel_name, make_step
from fuseplan.frontend.lower import Lowered
from fuseplan.schedule.addressing import SWIZZLED, held
from fuseplan.support import jax_compat

_STAGES, _DEEP_STAGES = 2, 3
"""Buffers for each operand: the schedule assumes two (``costmodel.onchip``), and a small tile has three."""

_DEEP_BYTES = 112 * 1024
"""The most bytes of three buffers: two tiles share an SM's 227 KiB of shared memory (CUDA C++ Programming
Guide, table "Technical Specifications per Compute Capability")."""


class _Product:
    """One tile of a contraction, accumulated in float32.

    ``own`` is the kernel's spec with the tiles of one warpgroup, which has some of the tile's rows.
    """

    def __init__(self, spec: KernelSpec, lowered: Lowered, step: Step) -> None:
        assert spec.streamed is not None
        self.spec, self.stream, self.operands = spec, spec.streamed, step.reads
        tiles = [axis.tile for axis in spec.axes]
        self._blocks = [tuple(tiles[a] for a in held(tiles, r.axes)) for r in step.reads]
        self._dtypes = [lowered.avals[r.value].dtype for r in step.reads]
        written = {a for axes in step.out_axes[0] for a in axes}
        kept_first = [held(tiles, r.axes)[0] in written for r in step.reads]
        self._transposed = (not kept_first[0], kept_first[1])
        self.row, column = held(tiles, step.out_axes[0])
        self.warpgroups = warpgroups(tiles[self.row])
        self.shape = tiles[self.row] // self.warpgroups, tiles[column]
        axes = list(spec.axes)
        axes[self.row] = replace(axes[self.row], tile=self.shape[0])
        self.own = replace(spec, axes=tuple(axes))
        self.turns = spec.axes[spec.streamed].n_tiles
        turn_bytes = sum(math.prod(b) * d.itemsize for b, d in zip(self._blocks, self._dtypes, strict=True))
        deep = _DEEP_STAGES * turn_bytes <= _DEEP_BYTES
        self.stages = min(_DEEP_STAGES if deep else _STAGES, self.turns)

    def scratch(self) -> list[Any]:
        """Buffers in shared memory for the operands, and barriers for full and for free buffers."""
        swizzled = (plgpu.TilingTransform((8, SWIZZLED)), plgpu.SwizzleTransform(128))
        buffers = [
            plgpu.SMEM((self.stages, *block), dtype, transforms=swizzled)
            for block, dtype in zip(self._blocks, self._dtypes, strict=True)
        ]
        copied = plgpu.Barrier(num_arrivals=len(buffers), num_barriers=self.stages)
        used = plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.stages)
        return [*buffers, copied, used]

    def own_position(self, position: Sequence[Any]) -> list[Any]:
        """The position of this warpgroup's rows of the tile at ``position``, in tiles of ``own``."""
        own = list(position)
        own[self.row] = position[self.row] * self.warpgroups + self._warpgroup()
        return own

    def run(self, refs: BlockRefs, position: Sequence[Any], scratch: Sequence[Any]) -> Any:
        """The product's rows of this warpgroup in the tile at ``position``."""
        return pl.run_scoped(
            lambda total: self._multiply(refs, position, scratch, total), plgpu.ACC(self.shape, jnp.float32)
        )

    def _warpgroup(self) -> Any:
        return lax.axis_index("warpgroup") if self.warpgroups > 1 else 0

    def _multiply(self, refs: BlockRefs, position: Sequence[Any], scratch: Sequence[Any], total: Any) -> Any:
        *buffers, copied, used = scratch
        copies = self._warpgroup() == 0

        def copy(k: Any, stage: Any) -> None:
            at = [*position[: self.stream], k, *position[self.stream + 1 :]]
            for access, buffer in zip(self.operands, buffers, strict=True):
                plgpu.copy_gmem_to_smem(refs.window(access, at), buffer.at[stage], copied.at[stage])

        def turn(k: Any, carry: None) -> None:
            stage = lax.rem(k, jnp.int32(self.stages))
            plgpu.barrier_wait(copied.at[stage])
            plgpu.wgmma(total, self._left(buffers[0].at[stage]), self._right(buffers[1].at[stage]))
            plgpu.wgmma_wait(0)

            def copy_next() -> None:
                plgpu.barrier_wait(used.at[stage])
                copy(k + self.stages, stage)

            @pl.when(k + self.stages < self.turns)
            def _() -> None:
                # Each warpgroup has waited for its own rows, but all of them read the right operand.
                plgpu.barrier_arrive(used.at[stage])
                pl.when(copies)(copy_next)

        def start() -> None:
            for stage in range(self.stages):
                copy(stage, stage)

        pl.when(copies)(start)

        lax.fori_loop(0, self.turns, turn, None)
        return total[...]

    def _left(self, block: Any) -> Any:
        """This warpgroup's rows of the left operand."""
        rows = pl.ds(self._warpgroup() * self.shape[0], self.shape[0])
        if self._transposed[0]:
            return block.at[:, rows].T
        return block.at[rows]

    def _right(self, block: Any) -> Any:
        return block.T if self._transposed[1] else block


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The group as one Mosaic GPU kernel; see ``fuseplan.codegen.emit``. Interpreted, it raises
    where two threads race, unless shifted tiles compute some elements twice."""
    shifted = any(axis.ragged for axis in spec.axes)
    product = _product(spec, lowered)
    own = spec if product is None else product.own
    registers = Registers(own, lowered)
    body = squeeze_body(
        make_body(own, lowered, seeded=False), (lambda x, _: x) if interpret else registers.place
    )
    count = len(live_ins(spec)) + len(spec.writes)

    def kernel(*refs: Any) -> None:
        arrays, scratch = refs[:count], refs[count:]
        position = grid_position(spec, lax.axis_index("program"))
        refs_of_tile = BlockRefs(spec, registers, arrays, interpret)
        if product is None:
            run_in_registers(body, refs_of_tile, position, lambda axes: squeezed(spec, axes))
            return
        total = product.run(refs_of_tile, position, scratch)
        own_refs = BlockRefs(own, registers, arrays, interpret)
        finish_in_registers(body, own_refs, product.own_position(position), {}, [total])

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

    return lambda *arrays: tuple(call(*arrays))


def _product(spec: KernelSpec, lowered: Lowered) -> _Product | None:
    """The contraction of a kernel, if it has one."""
    for position, n in enumerate(spec.nodes):
        if lowered.graph.nodes[n].kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
            return _Product(spec, lowered, make_step(spec, lowered, position))
    return None
