"""The contraction of a Mosaic GPU kernel: operands are copied to shared memory while tensor cores
multiply what was copied before (wgmma)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from costmodel.kernel import KernelSpec
from fuseplan import _compat
from fuseplan.emit.body import Step
from fuseplan.emit.mosaic_gpu_blocks import BlockRefs
from fuseplan.lower import Lowered
from fuseplan.warpgroup import SWIZZLED, held

_STAGES, _DEEP_STAGES = 2, 3
"""Buffers of the operands: the schedule counts on two (costmodel.memory)."""

_DEEP_BYTES = 112 * 1024
"""What three buffers may take: two tiles share an SM's 227 KiB of shared memory (CUDA C++
Programming Guide, table "Technical Specifications per Compute Capability")."""


class Product:
    """One tile of a contraction, in float32."""

    def __init__(self, spec: KernelSpec, lowered: Lowered, step: Step) -> None:
        assert spec.streamed is not None
        self.spec, self.operands = spec, step.reads
        tiles = [axis.tile for axis in spec.axes]
        self._blocks = [tuple(tiles[a] for a in held(tiles, r.axes)) for r in step.reads]
        self._dtypes = [lowered.avals[r.value].dtype for r in step.reads]
        written = {a for axes in step.out_axes[0] for a in axes}
        kept_first = [held(tiles, r.axes)[0] in written for r in step.reads]
        self._transposed = (not kept_first[0], kept_first[1])
        self.shape = tuple(tiles[a] for a in held(tiles, step.out_axes[0]))
        self.turns = spec.axes[spec.streamed].n_tiles
        turn_bytes = sum(
            math.prod(b) * d.itemsize for b, d in zip(self._blocks, self._dtypes, strict=True)
        )
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
        return [*buffers, copied, plgpu.Barrier(num_barriers=self.stages)]

    def run(self, refs: BlockRefs, scratch: Sequence[Any]) -> Any:
        """The float32 block of the result."""
        return pl.run_scoped(
            lambda total: self._multiply(refs, scratch, total), plgpu.ACC(self.shape, jnp.float32)
        )

    def _multiply(self, refs: BlockRefs, scratch: Sequence[Any], total: Any) -> Any:
        *buffers, copied, used = scratch

        def copy(k: Any, stage: Any) -> None:
            for access, buffer in zip(self.operands, buffers, strict=True):
                source = refs.window(access, self._position(refs, k))
                plgpu.copy_gmem_to_smem(source, buffer.at[stage], copied.at[stage])

        def turn(k: Any, _: None) -> None:
            stage = lax.rem(k, jnp.int32(self.stages))
            plgpu.barrier_wait(copied.at[stage])
            lhs, rhs = (
                _compat.transposed(buffer.at[stage]) if transposed else buffer.at[stage]
                for buffer, transposed in zip(buffers, self._transposed, strict=True)
            )
            plgpu.wgmma(total, lhs, rhs)
            plgpu.wgmma_wait(0)

            @pl.when(k + self.stages < self.turns)
            def _() -> None:
                # Each warp waits for its own rows, and all have read the right operand.
                plgpu.barrier_arrive(used.at[stage])
                plgpu.barrier_wait(used.at[stage])
                copy(k + self.stages, stage)

        for stage in range(self.stages):
            copy(stage, stage)
        lax.fori_loop(0, self.turns, turn, None)
        return total[...]

    def _position(self, refs: BlockRefs, k: Any) -> list[Any]:
        position = list(refs.position)
        assert self.spec.streamed is not None
        position[self.spec.streamed] = k
        return position
