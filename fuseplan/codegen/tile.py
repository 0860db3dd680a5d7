"""One step of a kernel on one tile: its equation, the kernel axes of its blocks, the indices of elements.

All backends share it. A kernel's last tile of a ragged axis reaches past the end of the array and is masked
(``BlockTile``), or is shifted back to end where the axis ends (``ShiftedTile``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from costmodel.axes import compose
from costmodel.graph import DimMap
from costmodel.kernel import Access, AxisRole, KernelSpec, block_shape
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.ops import rule_of
from fuseplan.frontend.ops.rule import Reduction, Rule, reshaped
from fuseplan.frontend.trace import Equation, Literal
from fuseplan.plan import kernel_names as names
from fuseplan.schedule.addressing import is_contiguous

Position = Sequence[Any]
"""The index of the current tile along each kernel axis; 0 along an axis in one tile."""


@dataclass(frozen=True, slots=True)
class Step:
    """One equation of a group, with the kernel axes of each of its operands and results.

    ``in_axes`` has None for a literal.
    """

    equation: Equation
    rule: Rule
    node_axes: tuple[tuple[int, ...], ...]
    in_axes: tuple[DimMap | None, ...]
    out_axes: tuple[DimMap, ...]
    language: str
    """The kernel language it is emitted in."""

    @property
    def reads(self) -> tuple[Access, ...]:
        """The operands that are arrays."""
        pairs = zip(self.equation.inputs, self.in_axes, strict=True)
        return tuple(Access(v, axes) for v, axes in pairs if axes is not None)  # type: ignore[arg-type]

    @property
    def reduction(self) -> Reduction:
        """How a reduction combines partial results."""
        assert self.rule.reduction is not None
        return self.rule.reduction

    def accumulator_dtype(self) -> Any:
        """The dtype of partial results."""
        return self.reduction.accumulator(self.equation.out_avals[0].dtype)

    def combine(self, total: Any, part: Any) -> Any:
        """The accumulator ``total`` with a partial result."""
        return self.reduction.combine_in(self.language, total, part)

    def initial(self, shape: tuple[int, ...]) -> Any:
        """The accumulator of a block of ``shape`` before anything is combined into it."""
        return self.reduction.init(shape, self.equation)

    def finish(self, total: Any) -> Sequence[Any]:
        """Convert the final accumulator of a reduction to its results, in their dtypes."""
        return self.reduction.finish(total, self.equation)

    def finish_parts(self, parts: Sequence[Any]) -> Sequence[Any]:
        """The results of a step whose reduced axes are whole in the tile."""
        reduction = self.rule.reduction
        return parts if reduction is None else reduction.finish_whole(parts[0], self.equation)


def make_step(spec: KernelSpec, lowered: Lowered, position: int) -> Step:
    """The step of the node at a position of the group."""
    node = lowered.graph.nodes[spec.nodes[position]]
    equation = lowered.equations[node.id]
    node_axes = spec.node_axes[position]
    arrays = iter(node.input_maps)
    return Step(
        equation,
        rule_of(equation),
        node_axes,
        tuple(None if isinstance(v, Literal) else compose(next(arrays), node_axes) for v in equation.inputs),
        tuple(compose(m, node_axes) for m in node.output_maps),
        spec.capabilities.language,
    )


def kernel_name(spec: KernelSpec, lowered: Lowered) -> str:
    """The name of an emitted kernel in profiles and compiler dumps, such as ``fuseplan_softmax_5``: the
    kernel's name in tables, in letters and digits, and its number of operations."""
    name = re.sub(r"\W+", "_", names.kernel_name(lowered.graph, spec.nodes), flags=re.ASCII).strip("_")
    return f"fuseplan_{name}_{len(spec.nodes)}"


class BlockTile:
    """The tile of one step at ``position``; implements ``fuseplan.frontend.ops.rule.Tile``."""

    shifted = False
    """Whether the last tile of a ragged axis is shifted back to end where the axis ends."""

    def __init__(self, spec: KernelSpec, step: Step, position: Position, origin: Position = ()) -> None:
        self.origin = origin
        """The index of the kernel's first element along each of its axes, if it is a part of a larger one;
        else empty."""
        self.language = spec.capabilities.language
        self.spec, self.step, self.position = spec, step, position
        self.in_shapes = tuple(() if m is None else block_shape(spec.axes, m) for m in step.in_axes)
        self.out_shapes = tuple(block_shape(spec.axes, m) for m in step.out_axes)

    def indices(self, shape: tuple[int, ...], dim: int, node_dim: int) -> Any:
        axes, (index, _) = self.step.node_axes[node_dim], self.places(shape, dim, node_dim)
        # Only the outermost axis of a dimension is split (``fuseplan.runtime.split_axes``).
        stride = math.prod(self.spec.axes[a].size for a in axes[1:])
        return index + self.origin[axes[0]] * stride if self.origin and axes else index

    def places(self, shape: tuple[int, ...], dim: int, node_dim: int) -> tuple[Any, Any | None]:
        axes = self.step.node_axes[node_dim]
        if is_scattered(self.spec, axes):
            return scattered_index(self.spec, axes, self.position, shape, dim)
        along = lax.broadcasted_iota(jnp.int32, shape, dim)
        limit = valid_extent(self.spec, axes, self.position)
        start = first_index(self.spec, axes, self.position, shifted=self.shifted)
        return along + jnp.int32(start), None if limit is None else along < limit

    def valid(self, operand: int, dim: int) -> Any | None:
        axes = self.step.in_axes[operand]
        if axes is None:
            return None
        if is_scattered(self.spec, axes[dim]):
            return scattered_index(self.spec, axes[dim], self.position, self.in_shapes[operand], dim)[1]
        limit = valid_extent(self.spec, axes[dim], self.position)
        if limit is None:
            return None
        return lax.broadcasted_iota(jnp.int32, self.in_shapes[operand], dim) < limit


class ShiftedTile(BlockTile):
    """A tile that is always full: elements that an earlier tile has covered are masked."""

    shifted = True

    def valid(self, operand: int, dim: int) -> Any | None:
        axes = self.step.in_axes[operand]
        if axes is None:
            return None
        return uncovered(self.spec, axes[dim], self.position, self.in_shapes[operand], dim)


def grid_position(spec: KernelSpec, program: Any) -> list[Any]:
    """The tile of a program of a one-dimensional grid: the parallel axes, the outermost slowest."""
    position: list[Any] = [0] * len(spec.axes)
    for a in reversed(range(len(spec.axes))):
        axis = spec.axes[a]
        if axis.role == AxisRole.PARALLEL and axis.n_tiles > 1:
            position[a] = lax.rem(program, jnp.int32(axis.n_tiles))
            program = lax.div(program, jnp.int32(axis.n_tiles))
    return position


def first_index(spec: KernelSpec, axes: Sequence[int], position: Position, *, shifted: bool = False) -> Any:
    """The first index of the tile along a dimension that merges ``axes``. With ``shifted`` no tile reaches
    past the end of its axis."""
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


def valid_extent(spec: KernelSpec, axes: Sequence[int], position: Position) -> Any | None:
    """The number of the tile's elements inside the array along a dimension that merges ``axes``; None if
    every tile lies inside.

    The schedule makes at most one of the axes ragged, gives those outside it tiles of one and leaves those
    inside it whole, so that the valid elements are a prefix of the block.
    """
    inner = 1
    for a in reversed(axes):
        axis = spec.axes[a]
        if axis.ragged:
            return (axis.size - position[a] * axis.tile) * inner
        inner *= axis.tile
    return None


def uncovered(
    spec: KernelSpec, axes: Sequence[int], position: Position, shape: tuple[int, ...], dim: int
) -> Any | None:
    """Bool array of ``shape``: the elements of a shifted tile that no earlier tile covers along ``dim``,
    which merges ``axes``; None if the tiles are disjoint. Only the outermost axis may be ragged."""
    inner = 1
    for a in reversed(axes):
        axis = spec.axes[a]
        if axis.ragged and axis.n_tiles > 1:
            first = position[a] * axis.tile
            covered = (first - jnp.minimum(first, axis.size - axis.tile)) * inner
            return lax.broadcasted_iota(jnp.int32, shape, dim) >= covered
        inner *= axis.tile
    return None


def is_scattered(spec: KernelSpec, axes: Sequence[int]) -> bool:
    """Whether a block is not contiguous along a dimension that merges ``axes``."""
    sizes, tiles = [axis.size for axis in spec.axes], [axis.tile for axis in spec.axes]
    return not is_contiguous(sizes, tiles, axes)


def scattered_index(
    spec: KernelSpec, axes: Sequence[int], position: Position, shape: tuple[int, ...], dim: int
) -> tuple[Any, Any | None]:
    """The index in the array of each element of the tile along ``dim``, which merges ``axes``, and a mask of
    the elements inside the array; None if all are. Both are of the block's ``shape``."""
    at = lax.broadcasted_iota(jnp.int32, shape, dim)
    index: Any = 0
    inside: Any = None
    inner = stride = 1
    for a in reversed(axes):
        axis = spec.axes[a]
        own = lax.rem(lax.div(at, jnp.int32(inner)), jnp.int32(axis.tile))
        own = own + jnp.int32(position[a] * axis.tile)
        if axis.ragged:
            valid = own < axis.size
            inside = valid if inside is None else inside & valid
        index = index + own * jnp.int32(stride)
        inner, stride = inner * axis.tile, stride * axis.size
    return index, inside


def align(x: Any, axes: DimMap, target: DimMap, spec: KernelSpec) -> Any:
    """The block ``x``, indexed by ``axes``, transposed and reshaped to broadcast against a block indexed by
    ``target``, which has all of its axes."""
    flat = [a for dims in axes for a in dims]
    order = [a for dims in target for a in dims]
    x = reshaped(x, tuple(spec.axes[a].tile for a in flat))
    x = x.transpose([flat.index(a) for a in order if a in flat])
    x = reshaped(x, tuple(spec.axes[a].tile if a in flat else 1 for a in order))
    if any(len(dims) > 1 for dims in target):
        x = jnp.broadcast_to(x, [spec.axes[a].tile for a in order])
        return reshaped(x, block_shape(spec.axes, target))
    return reshaped(x, tuple(spec.axes[dims[0]].tile if dims and dims[0] in flat else 1 for dims in target))
