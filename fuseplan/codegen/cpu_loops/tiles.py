"""Tiles of a loop nest: where they lie in arrays, and which of their elements count.

The last tile of an axis that its tile does not divide is shifted back to end where the
axis ends: every tile is full, and what an earlier tile covered already is masked where it
would count twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from costmodel.graph import DimMap
from costmodel.kernel import KernelSpec, block_shape
from fuseplan.codegen.block_tile import BlockTile, first_index
from fuseplan.frontend.ops.rule import reshaped

Position = tuple[Any, ...]
"""For each axis of the nest, the index of the current tile; 0 for an axis in one tile."""


class LoopTile(BlockTile):
    """The tile of one step of a nest; see ``fuseplan.frontend.ops.rule.Tile``."""

    shifted = True

    def valid(self, operand: int, dim: int) -> Any | None:
        axes = self._step.in_axes[operand]
        if axes is None:
            return None
        return fresh(self._spec, axes[dim], self._position, self.in_shapes[operand], dim)


def fresh(
    spec: KernelSpec, axes: Sequence[int], position: Sequence[Any], shape: tuple[int, ...], dim: int
) -> Any | None:
    """Which elements of a block no earlier tile covered along ``dim``, which merges ``axes``;
    None where the tiles of all of them are disjoint. Only the outermost may be ragged."""
    inner = 1
    for a in reversed(axes):
        axis = spec.axes[a]
        if axis.ragged and axis.n_tiles > 1:
            first = position[a] * axis.tile
            covered = (first - jnp.minimum(first, axis.size - axis.tile)) * inner
            return lax.broadcasted_iota(jnp.int32, shape, dim) >= covered
        inner *= axis.tile
    return None


def starts(spec: KernelSpec, axes: DimMap, position: Position) -> list[Any]:
    """Where the tile at ``position`` starts in an array indexed by ``axes``."""
    return [jnp.int32(first_index(spec, dims, position, shifted=True)) for dims in axes]


def loaded(whole: Any, spec: KernelSpec, axes: DimMap, position: Position) -> Any:
    """The block at ``position`` of an array indexed by ``axes``."""
    shape = block_shape(spec.axes, axes)
    if shape == whole.shape:
        return whole
    return lax.dynamic_slice(whole, starts(spec, axes, position), shape)


def placed(whole: Any, block: Any, spec: KernelSpec, axes: DimMap, position: Position) -> Any:
    """``whole`` with ``block`` in its place."""
    if block.shape == whole.shape:
        return block
    return lax.dynamic_update_slice(whole, block, starts(spec, axes, position))


def aligned(x: Any, axes: DimMap, target: DimMap, spec: KernelSpec) -> Any:
    """``x``, whose dimensions merge ``axes``, so that it broadcasts against a block whose
    dimensions merge ``target``, which has all of them."""
    flat = [a for dims in axes for a in dims]
    order = [a for dims in target for a in dims]
    x = reshaped(x, tuple(spec.axes[a].tile for a in flat))
    x = x.transpose([flat.index(a) for a in order if a in flat])
    x = reshaped(x, tuple(spec.axes[a].tile if a in flat else 1 for a in order))
    if any(len(dims) > 1 for dims in target):
        x = jnp.broadcast_to(x, [spec.axes[a].tile for a in order])
        return reshaped(x, block_shape(spec.axes, target))
    return reshaped(x, tuple(spec.axes[dims[0]].tile if dims and dims[0] in flat else 1 for dims in target))
