"""Blocks of arrays as Mosaic's pipeline copies them between HBM and VMEM, and its grid.

The grid runs in order on a core: parallel axes, then the passes over the stream if there are
several, then the stream.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from costmodel.graph import DimMap, Graph
from costmodel.kernel import Access, AxisRole, KernelSpec, block_shape, pass_count, readers
from costmodel.memory import is_lifted, outer_shape

PASS = -1
"""The grid dimension that counts passes, where axes are told by their index."""


def grid_axes(spec: KernelSpec) -> tuple[int, ...]:
    """The axes that are dimensions of the grid, the outermost first."""
    axes = [a for a, axis in enumerate(spec.axes) if axis.role != AxisRole.RESIDENT and axis.n_tiles > 1]
    if pass_count(spec) > 1:
        axes.insert(len(axes) - (spec.streamed in axes), PASS)
    return tuple(axes)


def grid(spec: KernelSpec) -> tuple[int, ...]:
    """The steps along each dimension of the grid."""
    return tuple(pass_count(spec) if a == PASS else spec.axes[a].n_tiles for a in grid_axes(spec)) or (1,)


def semantics(spec: KernelSpec) -> list[Any]:
    """Which dimensions of the grid carry something from step to step."""
    ordered = (PASS, spec.streamed)
    return [pltpu.ARBITRARY if a in ordered else pltpu.PARALLEL for a in grid_axes(spec)] or [pltpu.ARBITRARY]


def table_specs(count: int) -> list[Any]:
    """How tables of numbers are read, which decide what is computed: from scalar memory."""
    return [pl.BlockSpec(memory_space=pltpu.SMEM)] * count


def read_specs(graph: Graph, spec: KernelSpec) -> list[Any]:
    """How each array is read, block by block."""
    needed = readers(graph, spec)
    return [_block_spec(spec, r, needed[r]) for r in spec.reads]


def write_specs(spec: KernelSpec, made_in: dict[int, int]) -> list[Any]:
    """How each result is written, block by block; ``made_in`` tells in which pass, of those that
    are made along the stream."""
    return [_block_spec(spec, w, (made_in[w.value],) if w.value in made_in else ()) for w in spec.writes]


def _block_spec(spec: KernelSpec, access: Access, needed: tuple[int, ...]) -> Any:
    """The block of each grid step. A dimension's index counts blocks; one that merges
    axes counts them like a number with a digit an axis, which needs all but the outermost
    to divide (the schedule sees to that). ``needed``: the passes that read or write it."""
    if not access.axes:
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    ones = 2 - len(access.axes)
    lifted = is_lifted(spec, access)

    def index_map(*steps: Any) -> tuple[Any, ...]:
        position = dict(zip(grid_axes(spec), steps, strict=False))
        if spec.streamed in position and PASS in position:
            position[spec.streamed] = _resting(spec, position[PASS], position[spec.streamed], needed)
        index: list[Any] = [0] * max(ones, 0)
        for axes in access.axes:
            block: Any = 0
            for a in axes:
                block = block * spec.axes[a].n_tiles + position.get(a, 0)
            index.append(block)
        return (*index[:-1], 0, index[-1]) if lifted else tuple(index)

    return pl.BlockSpec(outer_shape(spec.block_shape(access), lifted), index_map)


def _resting(spec: KernelSpec, p: Any, k: Any, needed: tuple[int, ...]) -> Any:
    """The block along the stream at step ``k`` of pass ``p``. In passes that do not need it, it
    stays where the next one starts, or where the last one ended: nothing is copied then, and
    no block is written before it is computed."""
    if not needed or len(needed) == pass_count(spec):
        return k
    assert spec.streamed is not None
    last = spec.axes[spec.streamed].n_tiles - 1
    index = jnp.where(p > needed[-1], jnp.int32(last), jnp.int32(0))
    for q in needed:
        index = jnp.where(p == q, k, index)
    return index


def outer_dtype(aval: Any) -> Any:
    """Booleans cross as bytes, and scalars in the 32 bits of scalar memory."""
    if aval.dtype == jnp.bool_:
        return jnp.dtype(jnp.int8 if aval.ndim else jnp.int32)
    if aval.ndim == 0 and aval.dtype.itemsize < 4:
        return jnp.dtype(jnp.float32 if jnp.issubdtype(aval.dtype, jnp.floating) else jnp.int32)
    return aval.dtype


def outer(spec: KernelSpec, access: Access, aval: Any) -> jax.ShapeDtypeStruct:
    """An array as it crosses a kernel's boundary."""
    return jax.ShapeDtypeStruct(outer_shape(aval.shape, is_lifted(spec, access)), outer_dtype(aval))


def to_outer(spec: KernelSpec, access: Access, x: Any, aval: Any) -> Any:
    """An array on its way into a kernel."""
    crossing = outer(spec, access, aval)
    return lax.reshape(jnp.asarray(x).astype(crossing.dtype), crossing.shape)


def from_outer(x: Any, aval: Any) -> Any:
    """An array on its way out of a kernel."""
    return lax.reshape(x.astype(aval.dtype), aval.shape)


def accumulator(spec: KernelSpec, axes: DimMap, dtype: Any) -> Any:
    """Scratch memory for what is carried from step to step: a scalar lives in scalar memory."""
    space = pltpu.VMEM if axes else pltpu.SMEM
    return space(outer_shape(block_shape(spec.axes, axes)), dtype)


def read(ref: Any, axes: DimMap, spec: KernelSpec) -> Any:
    """The block of scratch memory, or of an array as it crosses the boundary."""
    if not axes:
        return ref[0, 0]
    return lax.reshape(ref[...], block_shape(spec.axes, axes))


def load(ref: Any, access: Access, spec: KernelSpec, aval: Any) -> Any:
    """The block of an array, in its own dtype."""
    x = read(ref, access.axes, spec)
    # Masks of bytes choose between no rows and columns (tests/aot/test_compile_primitives.py).
    return x.astype(jnp.int32) != 0 if aval.dtype == jnp.bool_ else x.astype(aval.dtype)


def write(ref: Any, block: Any) -> None:
    """Put a block into scratch memory, or into a result as it crosses the boundary, in its dtype there."""
    if block.dtype == jnp.bool_:
        # Bits alone cannot be turned from columns into rows (tests/aot/test_compile_kernels.py).
        block = block.astype(jnp.int32)
    if not jnp.ndim(block):
        ref[0, 0] = block.astype(ref.dtype)
    else:
        ref[...] = lax.reshape(block, ref.shape).astype(ref.dtype)
