"""Emit a group as a Pallas Mosaic kernel (Google TPUs).

Mosaic's pipeline copies blocks between HBM and VMEM, so every access becomes a
``BlockSpec``. The grid runs in order on a core: the streamed axis is its innermost, and
accumulators stay in scratch memory from one turn to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from costmodel.graph import DimMap
from costmodel.kernel import Access, AxisRole, KernelSpec, block_shape
from fuseplan.emit import body as bodies
from fuseplan.emit.body import Body
from fuseplan.emit.naming import kernel_name
from fuseplan.lower import Lowered


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The group as one Mosaic kernel; see ``fuseplan.emit.emit``."""
    body = bodies.make_body(spec, lowered)
    grid_axes = tuple(
        a for a, axis in enumerate(spec.axes) if axis.role != AxisRole.RESIDENT and axis.n_tiles > 1
    )
    semantics = [pltpu.ARBITRARY if a == spec.streamed else pltpu.PARALLEL for a in grid_axes]
    avals = lowered.avals
    sources = bodies.live_ins(spec)

    call = pl.pallas_call(
        lambda *refs: _Program(body, grid_axes, lowered).run(refs),
        out_shape=[
            jax.ShapeDtypeStruct(_outer_shape(avals[w.value].shape), _outer_dtype(avals[w.value]))
            for w in spec.writes
        ],
        grid=tuple(spec.axes[a].n_tiles for a in grid_axes) or (1,),
        in_specs=[_block_spec(spec, r, grid_axes) for r in spec.reads],
        out_specs=[_block_spec(spec, w, grid_axes) for w in spec.writes],
        scratch_shapes=_scratch(body),
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics or [pltpu.ARBITRARY]),
        name=kernel_name(spec, lowered),
    )

    def group(*arrays: Any) -> tuple[Any, ...]:
        outer = {v: _to_outer(x, avals[v]) for v, x in zip(sources, arrays, strict=True)}
        results = call(*(outer[r.value] for r in spec.reads))
        return tuple(_from_outer(x, avals[w.value]) for x, w in zip(results, spec.writes, strict=True))

    return group


def _outer_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Arrays cross a kernel's boundary with two dimensions at least, as VMEM is laid out."""
    return (1,) * (2 - len(shape)) + tuple(shape)


def _outer_dtype(aval: Any) -> Any:
    """Booleans cross as bytes, and scalars in the 32 bits of scalar memory."""
    if aval.dtype == jnp.bool_:
        return jnp.dtype(jnp.int8 if aval.ndim else jnp.int32)
    if aval.ndim == 0 and aval.dtype.itemsize < 4:
        return jnp.dtype(jnp.float32 if jnp.issubdtype(aval.dtype, jnp.floating) else jnp.int32)
    return aval.dtype


def _to_outer(x: Any, aval: Any) -> Any:
    return lax.reshape(jnp.asarray(x).astype(_outer_dtype(aval)), _outer_shape(aval.shape))


def _from_outer(x: Any, aval: Any) -> Any:
    return lax.reshape(x.astype(aval.dtype), aval.shape)


def _block_spec(spec: KernelSpec, access: Access, grid_axes: Sequence[int]) -> Any:
    """The block of each grid step. A dimension's index counts blocks; one that merges
    axes counts them like a number with a digit an axis, which needs all but the outermost
    to divide (the schedule sees to that)."""
    if not access.axes:
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    ones = 2 - len(access.axes)

    def index_map(*steps: Any) -> tuple[Any, ...]:
        position = dict(zip(grid_axes, steps, strict=False))
        index: list[Any] = [0] * max(ones, 0)
        for axes in access.axes:
            block: Any = 0
            for a in axes:
                block = block * spec.axes[a].n_tiles + position.get(a, 0)
            index.append(block)
        return tuple(index)

    return pl.BlockSpec(_outer_shape(spec.block_shape(access)), index_map)


def _scratch(body: Body) -> list[Any]:
    """Scratch memory for every accumulator: rank-0 ones live in scalar memory."""
    shapes = []
    for step in body.accumulators:
        for axes, dtype in zip(step.out_axes, step.accumulator_dtypes(), strict=True):
            space = pltpu.VMEM if axes else pltpu.SMEM
            shapes.append(space(_outer_shape(block_shape(body.spec.axes, axes)), dtype))
    return shapes


class _Program:
    """One grid step while it is traced."""

    def __init__(self, body: Body, grid_axes: Sequence[int], lowered: Lowered) -> None:
        self.body, self.spec, self.lowered = body, body.spec, lowered
        self.position: list[Any] = [0] * len(self.spec.axes)
        for i, a in enumerate(grid_axes):
            self.position[a] = pl.program_id(i)

    def run(self, refs: Sequence[Any]) -> None:
        body, spec = self.body, self.spec
        n_in, n_out = len(spec.reads), len(spec.writes)
        self.in_refs = {(r.value, r.axes): ref for r, ref in zip(spec.reads, refs, strict=False)}
        self.out_refs = refs[n_in : n_in + n_out]
        scratch = iter(refs[n_in + n_out :])
        blocks: bodies.Blocks = {}
        bodies.evaluate(body, body.before, blocks, self.position, self._load)
        if not body.accumulators:
            self._finish(blocks)
            return
        bodies.evaluate(body, body.loop, blocks, self.position, self._load)
        carried = []
        for step in body.accumulators:
            parts = bodies.partial_results(body, step, blocks, self.position, self._load)
            carried.append(
                [(next(scratch), axes, part) for axes, part in zip(step.out_axes, parts, strict=True)]
            )
        self._accumulate(carried)
        streamed = spec.streamed
        assert streamed is not None
        turns = spec.axes[streamed].n_tiles

        @pl.when(self.position[streamed] == turns - 1)
        def _() -> None:
            final = dict(blocks)
            for step, refs_and_parts in zip(body.accumulators, carried, strict=True):
                totals = [_read(ref, axes, spec) for ref, axes, _ in refs_and_parts]
                bodies.put(step, totals, final)
            self._finish(final)

    def _accumulate(self, carried: list[list[tuple[Any, DimMap, Any]]]) -> None:
        assert self.spec.streamed is not None
        k = self.position[self.spec.streamed]

        @pl.when(k == 0)
        def _() -> None:
            for results in carried:
                for ref, _, part in results:
                    _write(ref, part)

        @pl.when(k > 0)
        def _() -> None:
            for step, results in zip(self.body.accumulators, carried, strict=True):
                for ref, axes, part in results:
                    combine = step.rule.reduction.combine  # type: ignore[union-attr]
                    _write(ref, combine(_read(ref, axes, self.spec), part))

    def _finish(self, blocks: bodies.Blocks) -> None:
        """Evaluate what comes after the loop, and store the results."""
        bodies.evaluate(self.body, self.body.after, blocks, self.position, self._load)
        for access, ref in zip(self.spec.writes, self.out_refs, strict=True):
            block = blocks[access.value, access.axes]
            _write(ref, block.astype(_outer_dtype(self.lowered.avals[access.value])))

    def _load(self, access: Access) -> Any:
        x = _read(self.in_refs[access.value, access.axes], access.axes, self.spec)
        dtype = self.lowered.avals[access.value].dtype
        if dtype == jnp.bool_:
            return x != 0
        return x.astype(dtype)


def _read(ref: Any, axes: DimMap, spec: KernelSpec) -> Any:
    if not axes:
        return ref[0, 0]
    return lax.reshape(ref[...], block_shape(spec.axes, axes))


def _write(ref: Any, block: Any) -> None:
    if not jnp.ndim(block):
        ref[0, 0] = block
    else:
        ref[...] = lax.reshape(block, ref.shape)
