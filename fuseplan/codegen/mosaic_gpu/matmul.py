"""The contraction of a Mosaic GPU kernel: operands are copied to shared memory while tensor cores
multiply what was copied before (wgmma). Two warpgroups share the rows of a tile that has enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from costmodel.kernel import KernelSpec
from costmodel.onchip import warpgroups
from fuseplan.codegen.mosaic_gpu.blocks import BlockRefs
from fuseplan.codegen.step import Step
from fuseplan.frontend.lower import Lowered
from fuseplan.schedule.addressing import SWIZZLED, held

_STAGES, _DEEP_STAGES = 2, 3
"""Buffers of the operands: the schedule counts on two (costmodel.onchip)."""

_DEEP_BYTES = 112 * 1024
"""What three buffers may take: two tiles share an SM's 227 KiB of shared memory (CUDA C++
Programming Guide, table "Technical Specifications per Compute Capability")."""


class Product:
    """One tile of a contraction, in float32.

    ``own`` is the kernel as each of its warpgroups sees it, with rows of its own.
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
        """Shared memory for the operands, and barriers: for their arrival, and their being used up."""
        swizzled = (plgpu.TilingTransform((8, SWIZZLED)), plgpu.SwizzleTransform(128))
        buffers = [
            plgpu.SMEM((self.stages, *block), dtype, transforms=swizzled)
            for block, dtype in zip(self._blocks, self._dtypes, strict=True)
        ]
        copied = plgpu.Barrier(num_arrivals=len(buffers), num_barriers=self.stages)
        used = plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.stages)
        return [*buffers, copied, used]

    def own_position(self, position: Sequence[Any]) -> list[Any]:
        """Where this warpgroup's rows of the tile at ``position`` are, in tiles of its own."""
        own = list(position)
        own[self.row] = position[self.row] * self.warpgroups + self._warpgroup()
        return own

    def run(self, refs: BlockRefs, position: Sequence[Any], scratch: Sequence[Any]) -> Any:
        """This warpgroup's rows of the tile at ``position``."""
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
                # Each warp has waited for its own rows, but all of them read the right operand.
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
