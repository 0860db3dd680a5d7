"""The grid of a Mosaic TPU kernel, and the blocks that its pipeline copies between HBM and VMEM.

The grid runs in order on a core: parallel axes, then the passes over the stream if there are several, then
the stream.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from costmodel.graph import DimMap, Graph
from costmodel.kernel import Access, AxisRole, KernelSpec, block_shape, pass_count, reading_passes
from costmodel.memory import is_lifted, outer_shape

PASS = -1
"""The grid dimension that counts passes, among dimensions that are indices of axes."""


def grid_axes(spec: KernelSpec) -> tuple[int, ...]:
    """The dimensions of the grid, the outermost first: indices of axes, or ``PASS``."""
    axes = [a for a, axis in enumerate(spec.axes) if axis.role != AxisRole.RESIDENT and axis.n_tiles > 1]
    if pass_count(spec) > 1:
        axes.insert(len(axes) - (spec.streamed in axes), PASS)
    return tuple(axes)


def grid(spec: KernelSpec) -> tuple[int, ...]:
    """The number of steps along each dimension of the grid."""
    return tuple(pass_count(spec) if a == PASS else spec.axes[a].n_tiles for a in grid_axes(spec)) or (1,)


def semantics(spec: KernelSpec) -> list[Any]:
    """The semantics of each grid dimension: arbitrary for those that carry accumulators, else parallel."""
    ordered = (PASS, spec.streamed)
    return [pltpu.ARBITRARY if a in ordered else pltpu.PARALLEL for a in grid_axes(spec)] or [pltpu.ARBITRARY]


def read_specs(graph: Graph, spec: KernelSpec) -> list[Any]:
    """The block spec of each read."""
    needed = reading_passes(graph, spec)
    return [_block_spec(spec, r, needed[r]) for r in spec.reads]


def write_specs(spec: KernelSpec, passes: dict[int, int]) -> list[Any]:
    """The block spec of each write. ``passes`` has the pass that writes each value made along the stream."""
    return [_block_spec(spec, w, (passes[w.value],) if w.value in passes else ()) for w in spec.writes]


def _block_spec(spec: KernelSpec, access: Access, needed: tuple[int, ...]) -> Any:
    """The block spec of an access that the passes ``needed`` read or write.

    A dimension that merges axes has a mixed-radix block index, one digit an axis. The schedule ensures that
    the tiles of all but the outermost axis divide it.
    """
    if not access.axes:
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    ones = 2 - len(access.axes)
    lifted = is_lifted(spec, access)

    def index_map(*steps: Any) -> tuple[Any, ...]:
        position = dict(zip(grid_axes(spec), steps, strict=False))
        if spec.streamed in position and PASS in position:
            position[spec.streamed] = _stream_block(spec, position[PASS], position[spec.streamed], needed)
        index: list[Any] = [0] * max(ones, 0)
        for axes in access.axes:
            block: Any = 0
            for a in axes:
                block = block * spec.axes[a].n_tiles + position.get(a, 0)
            index.append(block)
        return (*index[:-1], 0, index[-1]) if lifted else tuple(index)

    return pl.BlockSpec(outer_shape(spec.block_shape(access), lifted), index_map)


def _stream_block(spec: KernelSpec, p: Any, k: Any, needed: tuple[int, ...]) -> Any:
    """The block index along the stream at step ``k`` of pass ``p``.

    In passes that do not need the array, the index stays at the first block of the next pass or the last
    block of the previous one, so that nothing is copied and no block is written before it is computed.
    """
    if not needed or len(needed) == pass_count(spec):
        return k
    assert spec.streamed is not None
    last = spec.axes[spec.streamed].n_tiles - 1
    index = jnp.where(p > needed[-1], jnp.int32(last), jnp.int32(0))
    for q in needed:
        index = jnp.where(p == q, k, index)
    return index


def outer_dtype(aval: Any) -> Any:
    """The dtype of an array at the kernel's boundary: booleans are bytes, scalars have 32 bits."""
    if aval.dtype == jnp.bool_:
        return jnp.dtype(jnp.int8 if aval.ndim else jnp.int32)
    if aval.ndim == 0 and aval.dtype.itemsize < 4:
        return jnp.dtype(jnp.float32 if jnp.issubdtype(aval.dtype, jnp.floating) else jnp.int32)
    return aval.dtype


def outer(spec: KernelSpec, access: Access, aval: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array at the kernel's boundary."""
    return jax.ShapeDtypeStruct(outer_shape(aval.shape, is_lifted(spec, access)), outer_dtype(aval))


def to_outer(spec: KernelSpec, access: Access, x: Any, aval: Any) -> Any:
    """An array converted to its form at the kernel's boundary."""
    crossing = outer(spec, access, aval)
    return lax.reshape(jnp.asarray(x).astype(crossing.dtype), crossing.shape)


def accumulator(spec: KernelSpec, axes: DimMap, dtype: Any) -> Any:
    """The scratch memory of an accumulator: VMEM, or scalar memory for a scalar."""
    space = pltpu.VMEM if axes else pltpu.SMEM
    return space(outer_shape(block_shape(spec.axes, axes)), dtype)


def read(ref: Any, axes: DimMap, spec: KernelSpec) -> Any:
    """The block in scratch memory, or of an array in its boundary form."""
    if not axes:
        return ref[0, 0]
    return lax.reshape(ref[...], block_shape(spec.axes, axes))


def load(ref: Any, access: Access, spec: KernelSpec, aval: Any) -> Any:
    """The block of an array, in its own dtype."""
    x = read(ref, access.axes, spec)
    # The compiler does not select rows and columns by masks of bytes.
    return x.astype(jnp.int32) != 0 if aval.dtype == jnp.bool_ else x.astype(aval.dtype)


def write(ref: Any, block: Any) -> None:
    """Store a block in scratch memory, or in a result in its boundary form, with the dtype there."""
    if block.dtype == jnp.bool_:
        # The compiler does not reshape columns of bits to rows.
        block = block.astype(jnp.int32)
    if not jnp.ndim(block):
        ref[0, 0] = block.astype(ref.dtype)
    else:
        ref[...] = lax.reshape(block, ref.shape).astype(ref.dtype)
