"""Emit a group as a Pallas Triton kernel (NVIDIA GPUs).

The kernel gets whole arrays, and each program loads the blocks that it needs. It computes one tile: in a
single pass over the streamed axis, if there is one, or in several passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from costmodel.axes import compose
from costmodel.graph import OpKind
from costmodel.kernel import Access, KernelSpec, block_shape, looked_up
from costmodel.onchip import STAGES, KernelFootprint
from fuseplan.codegen.pass_evaluator import Nest, PassEvaluator, Results, Totals
from fuseplan.codegen.single_pass import (
    combine_elements,
    combined_late,
    in_turns,
    live_ins,
    make_body,
    operand_axes,
    run_in_registers,
)
from fuseplan.codegen.tile import (
    Position,
    Step,
    first_index,
    grid_position,
    is_scattered,
    kernel_name,
    make_step,
    scattered_index,
    valid_extent,
)
from fuseplan.codegen.triton.unit_dims import without_unit_dims
from fuseplan.frontend.lower import Lowered
from fuseplan.schedule.nests.multipass import Pass


class _BlockRefs:
    """The arrays of a kernel, and the position of one program of its grid.

    Extents of blocks are powers of two. Elements past the end of an array, or of an axis inside a dimension,
    are masked.
    """

    def __init__(
        self, spec: KernelSpec, lowered: Lowered, refs: Sequence[Any], interpret: bool = False
    ) -> None:
        self.spec, self.lowered, self._interpret = spec, lowered, interpret
        values = (*live_ins(spec), *(w.value for w in spec.writes))
        self._refs = dict(zip(values, refs, strict=True))
        self._by_index = looked_up(lowered.graph, spec)
        # A program index is a traced zero also in a grid of one.
        self.program = pl.program_id(0)
        # With a causal mask the last programs visit the most tiles, so they start first.
        tile = math.prod(spec.grid) - 1 - self.program if spec.tiles_visited else self.program
        self.position = grid_position(spec, tile)

    def load(self, access: Access, position: Sequence[Any]) -> Any:
        """The block at ``position``, with zeros outside the array; of an array that is read by index, the
        array."""
        if access in self._by_index:
            return _InMemory(self._refs[access.value], self.lowered.avals[access.value])
        window, mask = self._window(access, position)
        dtype = self.lowered.avals[access.value].dtype
        other = None if mask is None else np.zeros((), dtype)[()]
        return plgpu.load(self._refs[access.value].at[window], mask=mask, other=other)

    def store(self, access: Access, block: Any, position: Sequence[Any]) -> None:
        """Store the elements of the block at ``position`` that are inside the array."""
        window, mask = self._window(access, position)
        plgpu.store(self._refs[access.value].at[window], block, mask=mask)

    def _window(self, access: Access, position: Sequence[Any]) -> tuple[Any, Any]:
        """The slices of an array that hold the tile's block, and the mask of elements inside the array; None
        if all are."""
        if any(is_scattered(self.spec, axes) for axes in access.axes):
            return self._scattered(access, position)
        shape = self.spec.block_shape(access)
        starts: list[Any] = []
        mask = None
        for dim, axes in enumerate(access.axes):
            start = first_index(self.spec, axes, position)
            limit = valid_extent(self.spec, axes, position)
            if limit is not None:
                inside = lax.broadcasted_iota(jnp.int32, shape, dim) < limit
                mask = inside if mask is None else mask & inside
                # Pallas refuses a slice that is statically known to reach past the end, even if masked.
                start = start + self.program * 0
            starts.append(start)
        if any(isinstance(start, int) for start in starts) and not all(isinstance(s, int) for s in starts):
            # Pallas needs indices of one type; with 64-bit types enabled, Python integers have another.
            starts = [np.int32(start) if isinstance(start, int) else start for start in starts]
        return tuple(pl.ds(start, n) for start, n in zip(starts, shape, strict=True)), mask

    def _scattered(self, access: Access, position: Sequence[Any]) -> tuple[Any, Any]:
        """As ``_window`` for a block that is not contiguous: an index for each element."""
        shape, sizes = self.spec.block_shape(access), self.lowered.avals[access.value].shape
        indices, mask = [], None
        for dim, axes in enumerate(access.axes):
            index, inside = scattered_index(self.spec, axes, position, shape, dim)
            if inside is not None:
                mask = inside if mask is None else mask & inside
                if self._interpret:  # it stores masked elements, too; outside the array they are dropped
                    index = jnp.where(inside, index, sizes[dim])
            indices.append(jnp.broadcast_to(index, shape))
        return tuple(indices), mask


@dataclass(frozen=True, slots=True)
class _InMemory:
    """An array that a kernel reads by index (``fuseplan.frontend.ops.rule.Table``)."""

    ref: Any
    aval: Any

    @property
    def ndim(self) -> int:
        return int(self.aval.ndim)

    def load(self, places: Sequence[Any], inside: Any | None) -> Any:
        other = None if inside is None else np.zeros((), self.aval.dtype)[()]
        return plgpu.load(self.ref.at[tuple(places)], mask=inside, other=other)


_ELEMENTS_A_THREAD = 16
"""Elements of the largest block in one thread: with 16 float32 registers each, a dozen blocks fit into the
255 registers of a thread (CUDA C++ Programming Guide, table "Technical Specifications per Compute
Capability")."""

_REGISTER_BYTES = 4

_BLOCKS_A_THREAD = 8
"""Blocks of 16 registers that a thread holds at once, of 255 registers."""

_MAX_WARPS, _MAX_DOT_WARPS = 16, 8
"""Warps of a program without and with a contraction. A 128x128x64 bf16 matmul with its epilogue takes 128
registers a thread in 8 warps, without spills, by ``ptxas`` for an H200."""

_WARPGROUP, _WARPGROUP_ROWS = 4, 64
"""Warps that multiply together, and the rows that they take (PTX ISA, ``wgmma.m64nNk16``): with more warps
than that some would compute what others do. On an H200 an attention of 64 queries a program took 543 us with
4 warps and 1,036 with 8."""

_LIVE_BLOCKS, _MAX_FULL_WARPS = 2, 8
"""With 512 threads ``ptxas`` gives each 64 registers, enough for two live blocks of 16 beside addresses. A
program with more live blocks has at most 8 warps, or registers spill."""

_DEEP_STAGES = 3
"""Buffers in which the compiler pipelines small streamed operands: a third hides more latency than the two
that the schedule assumes (``costmodel.onchip``)."""

_DEEP_BYTES = 128 * 1024
"""The most bytes of three buffers: they leave 35 KiB of an A100's 163 KiB of shared memory, and 99 KiB of an
H100's, for layout conversions in an epilogue (CUDA C++ Programming Guide, same table)."""

_SHARED_BYTES = 227 * 1024
"""The shared memory of an H100's core, which its programs divide: a second program hides more latency than a
third buffer. On an H200 the gradient of an attention took 2,620 us with two programs of two buffers, and
3,362 with one of three."""


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The group as one Triton kernel; see ``fuseplan.codegen.emit``."""
    nest = Nest(spec, lowered) if spec.passes else None
    n_reads = len(live_ins(spec))
    out_shape = [
        jax.ShapeDtypeStruct(lowered.avals[w.value].shape, lowered.avals[w.value].dtype) for w in spec.writes
    ]
    warps, stages = _resources(spec, lowered)
    programs = math.prod(spec.grid)

    def kernel(*refs: Any) -> None:
        n_tables = 0 if nest is None else nest.n_tables
        tables, arrays = refs[n_reads : n_reads + n_tables], (*refs[:n_reads], *refs[n_reads + n_tables :])
        blocks = _BlockRefs(spec, lowered, arrays, interpret)
        if nest is not None:
            _MultiPassProgram(nest, blocks, tables).run()
        else:
            run_in_registers(make_body(spec, lowered), blocks, blocks.position)

    def called(body: Callable[..., None]) -> Callable[..., Sequence[Any]]:
        return pl.pallas_call(
            body,
            out_shape=out_shape,
            grid=(programs,),
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
            name=kernel_name(spec, lowered),
        )

    def group(*arrays: Any) -> tuple[Any, ...]:
        operands = (*arrays, *(nest.tables(arrays) if nest is not None else ()))
        (traced,) = jax.make_jaxpr(called(kernel))(*operands).eqns
        return tuple(called(without_unit_dims(traced.params["jaxpr"]))(*operands))

    return group


class _MultiPassProgram(PassEvaluator):
    """One program of the grid that visits the stream once for each pass: a loop over tiles, with accumulators
    in registers. A later pass loads the arrays that it needs again."""

    def __init__(self, nest: Nest, refs: _BlockRefs, tables: Sequence[Any]) -> None:
        super().__init__(nest, refs.position, {})
        self.refs, self.tables = refs, tables
        self._late = {i for p in nest.program.passes for i in self._late_sinks(p)}

    def _late_sinks(self, p: Pass) -> list[int]:
        """The reductions of a pass that are ``combined_late``. The next tile is rescaled by a maximum, and a
        rescaled sum has the shape of its scale."""
        maxima = {shift.maximum for shift in self.nest.program.shifts.values()}
        alone = [i for i, scale in p.sinks if scale.shift is None and i not in maxima]
        whole = [i for i in alone if not self.nest.accumulates_outside(i)]
        late = combined_late(self.spec, [self.nest.steps[i] for i in whole], self.nest.steps)
        return [i for i, is_late in zip(whole, late, strict=True) if is_late]

    def combines_late(self, i: int) -> bool:
        return i in self._late

    def loop(self, k: int, p: Pass) -> Totals:
        stream = self.spec.streamed
        assert stream is not None
        # The compiler does not hoist loads out of loops.
        self.load_invariant(p)

        def turn(j: Any, totals: Totals) -> Totals:
            position = (*self.position[:stream], j, *self.position[stream + 1 :])
            return self.on_tile(p, position, totals, {})[0]

        start = {i: self.nest.steps[i].initial(self._total_shape(i)) for i, _ in p.sinks}
        if self.nest.ranges[k] is not None:
            first, count = self.nest.range_at(k, self.tables, self.position)
            totals: Totals = lax.fori_loop(first, first + count, turn, start)
        else:
            several = bool(start) and self._late.issuperset(start)
            totals = in_turns(self.spec.axes[stream].n_tiles, turn, start, several=several)
        for i in self._late.intersection(totals):
            totals[i] = combine_elements(self.spec, self.nest.steps[i], totals[i], self.position)
        return totals

    def _total_shape(self, i: int) -> tuple[int, ...]:
        axes = operand_axes(self.nest.steps[i]) if i in self._late else self.nest.steps[i].out_axes[0]
        return block_shape(self.spec.axes, axes)

    def contract_inner(self, step: Step, axis: int, position: Position) -> Sequence[Any]:
        block = step.rule.block
        assert block is not None

        def turn(j: Any, total: Any) -> Any:
            at = (*position[:axis], j, *position[axis + 1 :])
            operands = [self.load(access, at) for access in step.reads]
            (part,) = block(self.tile(self.spec, step, at), step.equation, operands)
            return step.combine(total, part)

        start = step.initial(block_shape(self.spec.axes, step.out_axes[0]))
        return [lax.fori_loop(0, self.spec.axes[axis].n_tiles, turn, start)]

    def load(self, access: Access, position: Position) -> Any:
        return self.refs.load(access, position)

    def store(self, results: Results, access: Access, block: Any, position: Position) -> Results:
        self.refs.store(access, block, position)
        return results


def _resources(spec: KernelSpec, lowered: Lowered) -> tuple[int, int]:
    """The number of warps, and of pipeline stages whose buffers fit on chip."""
    nodes = [lowered.graph.nodes[n] for n in spec.nodes]
    accesses = [*spec.reads, *spec.writes]
    for node, own in zip(nodes, spec.node_axes, strict=True):
        accesses += [Access(v, compose(m, own)) for v, m in zip(node.outputs, node.output_maps, strict=True)]
    largest = max(math.prod(spec.block_shape(a)) for a in accesses)
    dot = any(n.kind == OpKind.OUT_ELEMENTWISE_FUSABLE for n in nodes)
    # Horizontally fused kernels read dozens of arrays, which are loaded long before they are needed.
    largest = max(largest, sum(math.prod(spec.block_shape(r)) for r in spec.reads) // _BLOCKS_A_THREAD)
    wanted = max(largest // (32 * _ELEMENTS_A_THREAD), 1)
    warps = min(1 << (wanted.bit_length() - 1), _MAX_DOT_WARPS if dot else _MAX_WARPS)
    need = KernelFootprint(lowered.graph, spec, stages=STAGES)(spec.axes)
    if not dot:
        is_full = need.register_bytes > _LIVE_BLOCKS * largest * _REGISTER_BYTES
        return min(warps, _MAX_FULL_WARPS) if is_full else warps, STAGES
    rows = min(
        _rows(spec, lowered, i) for i, n in enumerate(nodes) if n.kind == OpKind.OUT_ELEMENTWISE_FUSABLE
    )
    warps = max(min(warps, _WARPGROUP * max(rows // _WARPGROUP_ROWS, 1)), _WARPGROUP)
    deep = KernelFootprint(lowered.graph, spec, stages=_DEEP_STAGES)(spec.axes)
    shallow_programs, programs = (_SHARED_BYTES // max(n.onchip_bytes, 1) for n in (need, deep))
    is_deep = deep.onchip_bytes <= _DEEP_BYTES and programs >= min(shallow_programs, 2)
    return warps, _DEEP_STAGES if is_deep else STAGES


def _rows(spec: KernelSpec, lowered: Lowered, i: int) -> int:
    """The rows of the left operand's block of the contraction at a position of the group."""
    step = make_step(spec, lowered, i)
    contracts, batches = step.equation.params["dimension_numbers"]
    axes = step.in_axes[0]
    assert axes is not None, "a contraction reads arrays"
    shape = block_shape(spec.axes, axes)
    return math.prod(n for d, n in enumerate(shape) if d not in contracts[0] and d not in batches[0])
