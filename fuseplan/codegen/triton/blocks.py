"""Blocks of arrays as one program of a Triton kernel loads and stores them.

Arrays are handed over whole. Blocks are powers of two long; what reaches past the end of an array,
or of an axis inside a dimension, is masked.
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

from costmodel.kernel import Access, AxisRole, KernelSpec
from fuseplan.codegen import body as bodies
from fuseplan.codegen.block_tile import first_index, is_scattered, scattered_index, valid_extent
from fuseplan.frontend.lower import Lowered


class BlockRefs:
    """The arrays of a kernel, and where one program of its grid is."""

    def __init__(
        self, spec: KernelSpec, lowered: Lowered, refs: Sequence[Any], interpret: bool = False
    ) -> None:
        self.spec, self.lowered, self._interpret = spec, lowered, interpret
        values = (*bodies.live_ins(spec), *(w.value for w in spec.writes))
        self._refs = dict(zip(values, refs, strict=True))
        # Of a program index, also where there is but one: a traced zero.
        self.program = pl.program_id(0)
        self.position = self._position()

    def _position(self) -> list[Any]:
        """Tile indices of the parallel axes, the outermost slowest; 0 along the others."""
        position: list[Any] = [0] * len(self.spec.axes)
        # Behind a causal mask the last programs walk most tiles: they start first.
        rest = math.prod(self.spec.grid) - 1 - self.program if self.spec.walked else self.program
        for a in reversed(range(len(self.spec.axes))):
            axis = self.spec.axes[a]
            if axis.role == AxisRole.PARALLEL and axis.n_tiles > 1:
                position[a] = lax.rem(rest, jnp.int32(axis.n_tiles))
                rest = lax.div(rest, jnp.int32(axis.n_tiles))
        return position

    def load(self, access: Access, position: Sequence[Any]) -> Any:
        """The block at ``position``, zero past the array's end."""
        window, mask = self._window(access, position)
        dtype = self.lowered.avals[access.value].dtype
        other = None if mask is None else np.zeros((), dtype)[()]
        return plgpu.load(self._refs[access.value].at[window], mask=mask, other=other)

    def store(self, access: Access, block: Any, position: Sequence[Any]) -> None:
        """Write the block at ``position``, as far as it lies inside the array."""
        window, mask = self._window(access, position)
        plgpu.store(self._refs[access.value].at[window], block, mask=mask)

    def _window(self, access: Access, position: Sequence[Any]) -> tuple[Any, Any]:
        """The slices of an array that are the tile's block, and the mask of what lies inside
        the array, or None."""
        if any(is_scattered(self.spec, axes) for axes in access.axes):
            return self._places(access, position)
        shape = self.spec.block_shape(access)
        starts: list[Any] = []
        mask = None
        for dim, axes in enumerate(access.axes):
            start = first_index(self.spec, axes, position)
            limit = valid_extent(self.spec, axes, position)
            if limit is not None:
                inside = lax.broadcasted_iota(jnp.int32, shape, dim) < limit
                mask = inside if mask is None else mask & inside
                # Pallas refuses a slice that is known to reach past the end, masked or not.
                start = start + self.program * 0
            starts.append(start)
        if any(isinstance(start, int) for start in starts) and not all(isinstance(s, int) for s in starts):
            # Pallas wants indices of one type; with 64-bit types enabled, a Python integer has another.
            starts = [np.int32(start) if isinstance(start, int) else start for start in starts]
        return tuple(pl.ds(start, n) for start, n in zip(starts, shape, strict=True)), mask

    def _places(self, access: Access, position: Sequence[Any]) -> tuple[Any, Any]:
        """As ``_window``, where a block is in several pieces of memory: an index for each element."""
        shape, sizes = self.spec.block_shape(access), self.lowered.avals[access.value].shape
        places, mask = [], None
        for dim, axes in enumerate(access.axes):
            index, inside = scattered_index(self.spec, axes, position, shape, dim)
            if inside is not None:
                mask = inside if mask is None else mask & inside
                if self._interpret:  # It stores what is masked, too: outside the array that is dropped.
                    index = jnp.where(inside, index, sizes[dim])
            places.append(jnp.broadcast_to(index, shape))
        return tuple(places), mask
