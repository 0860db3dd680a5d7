"""Blocks of arrays as a warpgroup of a Mosaic GPU kernel holds them in registers.

Threads load their elements of a block from global memory. In registers a block has only the axes that are
longer than one (``fuseplan.schedule.addressing``): ``squeeze_body`` gives steps the rules for such blocks.
The last tile of a ragged axis is shifted back to end where the axis ends; two tiles write equal elements
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from costmodel.axes import compose
from costmodel.graph import DimMap, DimRole, OpKind
from costmodel.kernel import Access, AxisRole, KernelSpec
from fuseplan.codegen.single_pass import Body, live_ins
from fuseplan.codegen.tile import BlockTile, Position, ShiftedTile, Step, first_index
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.ops.rule import Tile
from fuseplan.frontend.trace import Equation, Primitive
from fuseplan.schedule.addressing import LANES, WARPS, block_order, held
from fuseplan.support import jax_compat

_VECTOR_BYTES = 16
"""The widest load of one thread (CUDA C++ Programming Guide, "Device Memory Accesses")."""

_WORD_BYTES = 4
_WORDS = 4
_SCRATCH_BYTES = WARPS * LANES * _WORDS * _WORD_BYTES
"""Shared memory in which warps exchange partial results, four words of each thread at a time. Reductions down
the columns of a block need a word for each column and warp instead."""


class Registers:
    """The layouts that spread the blocks of one kernel over the threads of a warpgroup."""

    def __init__(self, spec: KernelSpec, lowered: Lowered) -> None:
        self.tiles = tuple(axis.tile for axis in spec.axes)
        nodes = [lowered.graph.nodes[n] for n in spec.nodes]
        made = [
            compose(m, own) for node, own in zip(nodes, spec.node_axes, strict=True) for m in node.output_maps
        ]
        product = any(node.flops.matrix for node in nodes)
        depth = {a for a, axis in enumerate(spec.axes) if product and axis.role != AxisRole.PARALLEL}
        exchanged = [a.axes for a in (*spec.reads, *spec.writes) if depth.isdisjoint(a.axis_set)]
        order = block_order(self.tiles, [*exchanged, *made])
        assert order is not None, "the schedule offers no block that threads cannot hold"
        self.order = order
        crossed = len(order) == 2 and any(
            role == DimRole.REDUCED and order[0] in dims
            for node, own in zip(nodes, spec.node_axes, strict=True)
            for dims, role in zip(own, node.roles, strict=True)
        )
        self.scratch_bytes = _SCRATCH_BYTES
        if product:
            self._whole = plgpu.Layout.WGMMA
        elif order:
            self._whole = _layout(
                len(order), min(_vector(spec, lowered, order), _WORDS if crossed else _VECTOR_BYTES)
            )
        if crossed:
            self.scratch_bytes = max(_SCRATCH_BYTES, WARPS * _WORD_BYTES * self.tiles[order[1]])

    def place(self, block: Any, dim_map: DimMap) -> Any:
        """The block in the layout of its axes."""
        layout = self.layout(dim_map)
        return block if layout is None else plgpu.layout_cast(block, layout)

    def layout(self, dim_map: DimMap) -> Any:
        """The layout of a block; None for a scalar."""
        block = held(self.tiles, dim_map)
        if not block:
            return None
        missing = tuple(d for d, a in enumerate(self.order) if a not in block)
        return self._whole.reduce(missing) if missing else self._whole


def _layout(rank: int, vector: int) -> Any:
    """One warp for each row and lanes along it, or all threads along a vector; ``vector`` elements each."""
    row = LANES * vector
    tiles = ((WARPS, row), (vector,)) if rank == 2 else ((WARPS * row,), (row,), (vector,))
    return plgpu.Layout.TILED(Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _vector(spec: KernelSpec, lowered: Lowered, order: tuple[int, ...]) -> int:
    """The number of adjacent elements that a thread loads at once, aligned in every array."""
    last = order[-1]
    threads = LANES if len(order) == 2 else LANES * WARPS
    limit = spec.axes[last].tile // threads
    extents = []
    for access in (*spec.reads, *spec.writes):
        aval = lowered.avals[access.value]
        limit = min(limit, _VECTOR_BYTES // aval.dtype.itemsize)
        dims = [dims for dims in access.axes if dims]
        if last in access.axis_set:
            extents += [spec.axes[last].size if dims[-1][-1] == last else 1]
    vector = 1 << max(limit, 1).bit_length() - 1
    while any(n % vector for n in (spec.axes[last].tile // threads, *extents)):
        vector //= 2
    return vector


class BlockRefs:
    """The arrays of a kernel."""

    def __init__(self, spec: KernelSpec, registers: Registers, refs: Sequence[Any], interpret: bool) -> None:
        self.spec, self.interpret, self._registers = spec, interpret, registers
        values = (*live_ins(spec), *(w.value for w in spec.writes))
        self._refs = dict(zip(values, refs, strict=True))

    def load(self, access: Access, position: Position) -> Any:
        """The block at ``position``."""
        ref = self.window(access, position)
        layout = self._registers.layout(access.axes)
        if layout is None or self.interpret:  # the interpreter has no threads
            return ref[...]
        return jax_compat.load_gmem(ref, layout)

    def store(self, access: Access, block: Any, position: Position) -> None:
        """Store the block at ``position``."""
        ref = self.window(access, position)
        if not block.shape or self.interpret:
            ref[...] = block
        else:
            jax_compat.store_gmem(ref, block)

    def window(self, access: Access, position: Position) -> Any:
        """The part of an array that is the tile's block, without dimensions of size one."""
        window: list[Any] = []
        for axes in access.axes:
            start = first_index(self.spec, axes, position, shifted=True)
            extent = next((self.spec.axes[a].tile for a in axes if self.spec.axes[a].tile > 1), None)
            window.append(start if extent is None else pl.ds(start, extent))
        ref = self._refs[access.value]
        return ref.at[tuple(window)] if window else ref


def squeezed(spec: KernelSpec, dim_map: DimMap) -> DimMap:
    """The dimensions of a block in registers: one for each axis longer than one."""
    return tuple((a,) for a in held([axis.tile for axis in spec.axes], dim_map))


Place = Callable[[Any, DimMap], Any]
"""Puts a block into the layout of its axes (``Registers.place``)."""


def squeeze_body(body: Body, place: Place) -> Body:
    """The body with rules for squeezed blocks in its steps. Each result is put into its layout by ``place``,
    which the compiler cannot infer where no loaded block has all axes."""

    def each(steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(_squeeze(body.spec, step, place) for step in steps)

    return Body(body.spec, each(body.before), each(body.loop), each(body.accumulators), each(body.after))


def _squeeze(spec: KernelSpec, step: Step, place: Place) -> Step:
    """The step with a rule for squeezed blocks. It keeps its axes, which identify its operands."""
    inner = replace(
        step,
        in_axes=tuple(None if m is None else squeezed(spec, m) for m in step.in_axes),
        out_axes=tuple(squeezed(spec, m) for m in step.out_axes),
    )

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        assert isinstance(tile, BlockTile)
        results = _evaluate(_SqueezedTile(tile.spec, inner, tile.position), inner, args)
        return [place(x, axes) for x, axes in zip(results, inner.out_axes, strict=True)]

    return replace(step, rule=replace(step.rule, block=block))


class _SqueezedTile(ShiftedTile):
    """The tile of a step on squeezed blocks."""

    def indices(self, shape: tuple[int, ...], dim: int, node_dim: int) -> Any:
        axes = self.step.node_axes[node_dim]
        start = jnp.int32(first_index(self.spec, axes, self.position, shifted=True))
        along = [d for d, own in enumerate(self.step.out_axes[0]) if own[0] in axes]
        return lax.broadcasted_iota(jnp.int32, shape, along[0]) + start if along else jnp.full(shape, start)


def _evaluate(tile: _SqueezedTile, step: Step, args: Sequence[Any]) -> Sequence[Any]:
    rule, target = step.rule, step.out_axes[0]
    assert rule.block is not None
    if rule.kind == OpKind.INJECTIVE:
        return args  # only axes of size one change
    if rule.kind == OpKind.REDUCTION:
        dropped = tuple(d for d, axes in enumerate(step.in_axes[0] or ()) if axes not in target)
        params = {**step.equation.params, "axes": dropped}
        primitive: Any = _AxisByAxis(step.equation.primitive, step.equation.primitive.name)
        eqn = replace(step.equation, params=params, primitive=primitive)
        return rule.block(tile, eqn, args)
    args = [_spread(x, axes, target, tile.out_shapes[0]) for x, axes in zip(args, step.in_axes, strict=True)]
    return args if rule.kind == OpKind.BROADCAST and args else rule.block(tile, step.equation, args)


def _spread(x: Any, axes: DimMap | None, target: DimMap, shape: tuple[int, ...]) -> Any:
    """An operand or a literal broadcast to the shape of the result."""
    if (axes or ()) == target:
        return x
    return lax.broadcast_in_dim(x, shape, [target.index(dims) for dims in axes or ()])


@dataclass(frozen=True)
class _AxisByAxis:
    """A reduction primitive that reduces one axis after the other: Mosaic GPU reduces one at a time."""

    primitive: Primitive
    name: str

    def bind(self, x: Any, *, axes: Sequence[int], **params: Any) -> Any:
        for axis in sorted(axes, reverse=True):
            x = self.primitive.bind(x, axes=(axis,), **params)
        return x
