"""Where the tile of one step is: the indices of its elements, and which of them are in the array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

from costmodel.kernel import KernelSpec, block_shape
from fuseplan.codegen.step import Step
from fuseplan.schedule.addressing import is_contiguous


class BlockTile:
    """The tile of one step; see ``fuseplan.frontend.ops.rule.Tile``.

    ``position`` is the index of the current tile along every kernel axis.
    """

    def __init__(self, spec: KernelSpec, step: Step, position: Sequence[Any]) -> None:
        self.language = spec.capabilities.language
        self._spec, self._step, self._position = spec, step, position
        self.in_shapes = tuple(() if m is None else block_shape(spec.axes, m) for m in step.in_axes)
        self.out_shapes = tuple(block_shape(spec.axes, m) for m in step.out_axes)

    shifted = False
    """Whether the last tile of a ragged axis is shifted back to end where the axis ends."""

    def indices(self, shape: tuple[int, ...], dim: int, node_dim: int) -> Any:
        axes = self._step.node_axes[node_dim]
        if is_scattered(self._spec, axes):
            return scattered_index(self._spec, axes, self._position, shape, dim)[0]
        start = first_index(self._spec, axes, self._position, shifted=self.shifted)
        return lax.broadcasted_iota(jnp.int32, shape, dim) + jnp.int32(start)

    def valid(self, operand: int, dim: int) -> Any | None:
        axes = self._step.in_axes[operand]
        if axes is None:
            return None
        if is_scattered(self._spec, axes[dim]):
            return scattered_index(self._spec, axes[dim], self._position, self.in_shapes[operand], dim)[1]
        limit = valid_extent(self._spec, axes[dim], self._position)
        if limit is None:
            return None
        return lax.broadcasted_iota(jnp.int32, self.in_shapes[operand], dim) < limit


def first_index(
    spec: KernelSpec, axes: Sequence[int], position: Sequence[Any], *, shifted: bool = False
) -> Any:
    """The first index, along a dimension that merges ``axes``, of the tile at ``position``;
    with ``shifted`` no tile reaches past the end of its axis."""
    start: Any = 0
    stride = 1
    for a in reversed(axes):
        axis = spec.axes[a]
        if axis.n_tiles > 1:
            first = position[a] * axis.tile
            if shifted and axis.ragged:
                first = jnp.minimum(first, axis.size - axis.tile)
            start = start + first * stride
        stride *= axis.size
    return start


def valid_extent(spec: KernelSpec, axes: Sequence[int], position: Sequence[Any]) -> Any | None:
    """How many elements of the tile at ``position`` lie inside the array, along a
    dimension that merges ``axes``. None where every tile lies inside.

    At most one of the axes is ragged, those outside it have tiles of one and those inside
    it are whole (the schedule sees to that), so what is valid is a prefix of the block.
    """
    inner = 1
    for a in reversed(axes):
        axis = spec.axes[a]
        if axis.ragged:
            return (axis.size - position[a] * axis.tile) * inner
        inner *= axis.tile
    return None


def is_scattered(spec: KernelSpec, axes: Sequence[int]) -> bool:
    """Whether a block's elements along a dimension that merges ``axes`` are in several places."""
    sizes, tiles = [axis.size for axis in spec.axes], [axis.tile for axis in spec.axes]
    return not is_contiguous(sizes, tiles, axes)


def scattered_index(
    spec: KernelSpec, axes: Sequence[int], position: Sequence[Any], shape: tuple[int, ...], dim: int
) -> tuple[Any, Any | None]:
    """Where in the array the elements of the tile at ``position`` are along ``dim`` of a block of
    ``shape``, which merges ``axes``, and which of them are in it; None where all are."""
    at = lax.broadcasted_iota(jnp.int32, shape, dim)
    index: Any = 0
    inside: Any = None
    inner = stride = 1
    for a in reversed(axes):
        axis = spec.axes[a]
        own = lax.rem(lax.div(at, jnp.int32(inner)), jnp.int32(axis.tile))
        own = own + jnp.int32(position[a] * axis.tile)
        if axis.ragged:
            counts = own < axis.size
            inside = counts if inside is None else inside & counts
        index = index + own * jnp.int32(stride)
        inner, stride = inner * axis.tile, stride * axis.size
    return index, inside
