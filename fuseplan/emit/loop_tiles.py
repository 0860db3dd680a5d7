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
from fuseplan.emit.body import Step

Position = tuple[Any, ...]
"""For each axis of the nest, the index of the current tile; 0 for an axis in one tile."""


class LoopTile:
    """The tile of one step; see ``fuseplan.ops.rule.Tile``."""

    backend = "loops"

    def __init__(self, spec: KernelSpec, step: Step, position: Position) -> None:
        self._spec, self._step, self._position = spec, step, position
        self.in_shapes = tuple(() if m is None else block_shape(spec.axes, m) for m in step.in_axes)
        self.out_shapes = tuple(block_shape(spec.axes, m) for m in step.out_axes)

    def indices(self, shape: tuple[int, ...], dim: int, node_dim: int) -> Any:
        start = first_index(self._spec, self._step.node_axes[node_dim], self._position)
        return lax.broadcasted_iota(jnp.int32, shape, dim) + jnp.int32(start)

    def valid(self, operand: int, dim: int) -> Any | None:
        axes = self._step.in_axes[operand]
        if axes is None:
            return None
        return fresh(self._spec, axes[dim], self._position, self.in_shapes[operand], dim)


def first_index(spec: KernelSpec, axes: Sequence[int], position: Position) -> Any:
    """The first index, along a dimension that merges ``axes``, of the tile at ``position``."""
    start: Any = 0
    stride = 1
    for a in reversed(axes):
        axis = spec.axes[a]
        if axis.n_tiles > 1:
            first = position[a] * axis.tile
            start = start + (jnp.minimum(first, axis.size - axis.tile) if axis.ragged else first) * stride
        stride *= axis.size
    return start


def fresh(
    spec: KernelSpec, axes: Sequence[int], position: Position, shape: tuple[int, ...], dim: int
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
    return [jnp.int32(first_index(spec, dims, position)) for dims in axes]


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
    x = x.reshape([spec.axes[a].tile for a in flat])
    x = x.transpose([flat.index(a) for a in order if a in flat])
    x = x.reshape([spec.axes[a].tile if a in flat else 1 for a in order])
    if any(len(dims) > 1 for dims in target):
        x = jnp.broadcast_to(x, [spec.axes[a].tile for a in order])
        return x.reshape(block_shape(spec.axes, target))
    shape = [spec.axes[dims[0]].tile if dims and dims[0] in flat else 1 for dims in target]
    return x.reshape(shape)
