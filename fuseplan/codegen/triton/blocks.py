"""Load and store the blocks of one program of a Triton kernel.

The extents of blocks are powers of two. Elements past the end of an array, or of an axis inside a dimension,
are masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from costmodel.kernel import Access, KernelSpec
from fuseplan.codegen.single_pass import live_ins
from fuseplan.codegen.tile import first_index, grid_position, is_scattered, scattered_index, valid_extent
from fuseplan.frontend.lower import Lowered


class BlockRefs:
    """The arrays of a kernel, and the position of one program of its grid."""

    def __init__(
        self, spec: KernelSpec, lowered: Lowered, refs: Sequence[Any], interpret: bool = False
    ) -> None:
        self.spec, self.lowered, self._interpret = spec, lowered, interpret
        values = (*live_ins(spec), *(w.value for w in spec.writes))
        self._refs = dict(zip(values, refs, strict=True))
        # A program index is a traced zero also in a grid of one.
        self.program = pl.program_id(0)
        # With a causal mask the last programs visit the most tiles, so they start first.
        tile = math.prod(spec.grid) - 1 - self.program if spec.walked else self.program
        self.position = grid_position(spec, tile)

    def load(self, access: Access, position: Sequence[Any]) -> Any:
        """The block at ``position``, with zeros outside the array."""
        window, mask = self._window(access, position)
        dtype = self.lowered.avals[access.value].dtype
        other = None if mask is None else np.zeros((), dtype)[()]
        return plgpu.load(self._refs[access.value].at[window], mask=mask, other=other)

    def store(self, access: Access, block: Any, position: Sequence[Any]) -> None:
        """Store the elements of the block at ``position`` that are inside the array."""
        window, mask = self._window(access, position)
        plgpu.store(self._refs[access.value].at[window], block, mask=mask)

    def _window(self, access: Access, position: Sequence[Any]) -> tuple[Any, Any]:
        """The slices of an array that hold the tile's block, and the mask of elements inside the array; None
        if all are."""
        if any(is_scattered(self.spec, axes) for axes in access.axes):
            return self._scattered(access, position)
        shape = self.spec.block_shape(access)
        starts: list[Any] = []
        mask = None
        for dim, axes in enumerate(access.axes):
            start = first_index(self.spec, axes, position)
            limit = valid_extent(self.spec, axes, position)
            if limit is not None:
                inside = lax.broadcasted_iota(jnp.int32, shape, dim) < limit
                mask = inside if mask is None else mask & inside
                # Pallas refuses a slice that is statically known to reach past the end, even if masked.
                start = start + self.program * 0
            starts.append(start)
        if any(isinstance(start, int) for start in starts) and not all(isinstance(s, int) for s in starts):
            # Pallas needs indices of one type; with 64-bit types enabled, Python integers have another.
            starts = [np.int32(start) if isinstance(start, int) else start for start in starts]
        return tuple(pl.ds(start, n) for start, n in zip(starts, shape, strict=True)), mask

    def _scattered(self, access: Access, position: Sequence[Any]) -> tuple[Any, Any]:
        """As ``_window`` for a block that is not contiguous: an index for each element."""
        shape, sizes = self.spec.block_shape(access), self.lowered.avals[access.value].shape
        indices, mask = [], None
        for dim, axes in enumerate(access.axes):
            index, inside = scattered_index(self.spec, axes, position, shape, dim)
            if inside is not None:
                mask = inside if mask is None else mask & inside
                if self._interpret:  # it stores masked elements, too; outside the array they are dropped
                    index = jnp.where(inside, index, sizes[dim])
            indices.append(jnp.broadcast_to(index, shape))
        return tuple(indices), mask
