"""Blocks of arrays as a warpgroup of a Mosaic GPU kernel holds them.

Arrays are handed over whole, and threads load their elements of a block straight from memory.
In registers a block has only its axes that are longer than one (``fuseplan.schedule.addressing``). The last
tile of a ragged axis is shifted back to end where the axis ends: what two tiles write is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from costmodel.axes import compose
from costmodel.graph import DimMap, DimRole
from costmodel.kernel import Access, AxisRole, KernelSpec
from fuseplan.codegen import body as bodies
from fuseplan.codegen.block_tile import first_index
from fuseplan.frontend.lower import Lowered
from fuseplan.schedule.addressing import LANES, WARPS, block_order, held
from fuseplan.support import jax_compat

_VECTOR_BYTES = 16
"""The widest load of one thread (CUDA C++ Programming Guide, "Device Memory Accesses")."""

_WORD_BYTES = 4
_WORDS = 4
_SCRATCH_BYTES = WARPS * LANES * _WORDS * _WORD_BYTES
"""Shared memory through which warps exchange partial results, four words of a thread at a time: down
the columns of a block, a word for each of them and each warp."""


class Registers:
    """How the blocks of one kernel are dealt to threads."""

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
        """A block dealt to the threads as its axes are."""
        layout = self.layout(dim_map)
        return block if layout is None else plgpu.layout_cast(block, layout)

    def layout(self, dim_map: DimMap) -> Any:
        """The layout of a block; None of a scalar."""
        block = held(self.tiles, dim_map)
        if not block:
            return None
        missing = tuple(d for d, a in enumerate(self.order) if a not in block)
        return self._whole.reduce(missing) if missing else self._whole


def _layout(rank: int, vector: int) -> Any:
    """A warp a row and lanes along it, or all threads along a vector; ``vector`` elements each."""
    row = LANES * vector
    tiles = ((WARPS, row), (vector,)) if rank == 2 else ((WARPS * row,), (row,), (vector,))
    return plgpu.Layout.TILED(Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _vector(spec: KernelSpec, lowered: Lowered, order: tuple[int, ...]) -> int:
    """How many neighbouring elements a thread loads at once: they must be aligned in every array."""
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


def position_of(program: Any, spec: KernelSpec) -> list[Any]:
    """Tile indices of the parallel axes, the outermost slowest; 0 along the others."""
    position: list[Any] = [0] * len(spec.axes)
    for a in reversed(range(len(spec.axes))):
        axis = spec.axes[a]
        if axis.role == AxisRole.PARALLEL and axis.n_tiles > 1:
            position[a] = lax.rem(program, jnp.int32(axis.n_tiles))
            program = lax.div(program, jnp.int32(axis.n_tiles))
    return position


class BlockRefs:
    """The arrays of a kernel."""

    def __init__(self, spec: KernelSpec, registers: Registers, refs: Sequence[Any], interpret: bool) -> None:
        self.spec, self.interpret, self._registers = spec, interpret, registers
        values = (*bodies.live_ins(spec), *(w.value for w in spec.writes))
        self._refs = dict(zip(values, refs, strict=True))

    def load(self, access: Access, position: Sequence[Any]) -> Any:
        """The block at ``position``."""
        ref = self.window(access, position)
        layout = self._registers.layout(access.axes)
        if layout is None or self.interpret:  # there are no threads to deal it to
            return ref[...]
        return jax_compat.load_gmem(ref, layout)

    def store(self, access: Access, block: Any, position: Sequence[Any]) -> None:
        """Write the block at ``position``."""
        ref = self.window(access, position)
        if not block.shape or self.interpret:
            ref[...] = block
        else:
            jax_compat.store_gmem(ref, block)

    def window(self, access: Access, position: Sequence[Any]) -> Any:
        """The part of an array that is the tile's block, without dimensions of one."""
        window: list[Any] = []
        for axes in access.axes:
            start = first_index(self.spec, axes, position, shifted=True)
            extent = next((self.spec.axes[a].tile for a in axes if self.spec.axes[a].tile > 1), None)
            window.append(start if extent is None else pl.ds(start, extent))
        ref = self._refs[access.value]
        return ref.at[tuple(window)] if window else ref
