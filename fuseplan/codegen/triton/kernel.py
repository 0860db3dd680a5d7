"""Emit a group as a Pallas Triton kernel (NVIDIA GPUs).

Arrays are handed over whole, and each program loads the blocks it needs: one program
loads all that a tile reads, loops over the streamed axis if there is one with accumulators
in registers, and stores. A stream that is walked in passes has a module of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from costmodel.axes import compose
from costmodel.graph import OpKind
from costmodel.kernel import Access, KernelSpec, block_shape
from costmodel.onchip import STAGES, KernelFootprint
from fuseplan.codegen import body as bodies
from fuseplan.codegen.body import Body, Totals, accumulated
from fuseplan.codegen.nest import Nest, neutral
from fuseplan.codegen.step import kernel_name
from fuseplan.codegen.triton.blocks import BlockRefs
from fuseplan.codegen.triton.passes import Passes
from fuseplan.frontend.lower import Lowered

_ELEMENTS_A_THREAD = 16
"""Elements of the largest block that one thread holds: 16 float32 registers a live value
leaves room for a dozen of them among the 255 that a thread may have (CUDA C++ Programming
Guide, table "Technical Specifications per Compute Capability")."""

_REGISTER_BYTES = 4

_BLOCKS_A_THREAD = 8
"""So many blocks of 16 registers each thread has at once, of 255."""

_MAX_WARPS, _MAX_DOT_WARPS = 16, 8
"""A 128x128x64 bf16 matmul with its epilogue takes 128 registers a thread in 8 warps, without spills,
as the H200's ``ptxas`` counts them; 1024 threads are the limit of a block."""

_LIVE_BLOCKS, _MAX_FULL_WARPS = 2, 8
"""Of 512 threads ``ptxas`` gives each 64 registers where it can: room for so many blocks of 16 beside
addresses. Where more are alive, half as many threads hold them."""

_DEEP_STAGES = 3
"""Buffers that the compiler pipelines streamed operands through where these are small: a third hides more
latency than the two that the schedule counts on (``costmodel.onchip``)."""

_DEEP_BYTES = 128 * 1024
"""What three buffers may take: they leave 35 KiB of an A100's 163 KiB of shared memory, and 99 KiB of
an H100's, for conversions of layout in an epilogue (CUDA C++ Programming Guide, same table)."""


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The group as one Triton kernel; see ``fuseplan.codegen.emit``."""
    nest = Nest(spec, lowered) if spec.passes else None
    n_reads = len(bodies.live_ins(spec))
    out_shape = [
        jax.ShapeDtypeStruct(lowered.avals[w.value].shape, lowered.avals[w.value].dtype) for w in spec.writes
    ]
    warps, stages = _resources(spec, lowered)
    programs = math.prod(spec.grid)

    def kernel(*refs: Any) -> None:
        n_tables = 0 if nest is None else nest.n_tables
        tables, arrays = refs[n_reads : n_reads + n_tables], (*refs[:n_reads], *refs[n_reads + n_tables :])
        blocks = BlockRefs(spec, lowered, arrays, interpret)
        if nest is not None:
            Passes(nest, blocks, tables).run()
        else:
            _Program(bodies.make_body(spec, lowered), blocks).run()

    call = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(programs,),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        name=kernel_name(spec, lowered),
    )

    def group(*arrays: Any) -> tuple[Any, ...]:
        return tuple(call(*arrays, *(nest.tables(arrays) if nest is not None else ())))

    return group


class _Program:
    """One program of the grid while it is traced."""

    def __init__(self, body: Body, refs: BlockRefs) -> None:
        self.body, self.refs, self.spec = body, refs, body.spec

    def run(self) -> None:
        body, position = self.body, self.refs.position
        blocks: bodies.Blocks = {}
        load = self._loader(position)
        bodies.evaluate(body, body.before, blocks, position, load)
        if body.accumulators:
            # The compiler does not hoist loads out of loops by itself.
            for access in (*body.invariant_reads, *(seed.start for seed in body.seeds.values())):
                if (access.value, access.axes) not in blocks:
                    blocks[access.value, access.axes] = load(access)
            for i, totals in enumerate(self._loop(blocks)):
                bodies.put(body.finals(i), totals, blocks)
        bodies.evaluate(body, body.after, blocks, position, load)
        for access in self.spec.writes:
            self.refs.store(access, blocks[access.value, access.axes], position)

    def _loop(self, outer: bodies.Blocks) -> Totals:
        body, spec = self.body, self.spec
        start = [[neutral(step, block_shape(spec.axes, step.out_axes[0]))] for step in body.accumulators]
        for i, seed in body.seeds.items():
            start[i] = [seed.block(outer[seed.start.value, seed.start.axes], spec)]
        return accumulated(body, outer, self.refs.position, self.refs.load, start)

    def _loader(self, position: Sequence[Any]) -> Callable[[Access], Any]:
        return lambda access: self.refs.load(access, position)


def _resources(spec: KernelSpec, lowered: Lowered) -> tuple[int, int]:
    """Warps and pipeline stages: for the kernel's largest block, and for what fits beside each other."""
    nodes = [lowered.graph.nodes[n] for n in spec.nodes]
    accesses = [*spec.reads, *spec.writes]
    for node, own in zip(nodes, spec.node_axes, strict=True):
        accesses += [Access(v, compose(m, own)) for v, m in zip(node.outputs, node.output_maps, strict=True)]
    largest = max(math.prod(spec.block_shape(a)) for a in accesses)
    dot = any(n.kind == OpKind.OUT_ELEMENTWISE_FUSABLE for n in nodes)
    # A pack reads dozens of arrays, which are loaded long before they are needed.
    largest = max(largest, sum(math.prod(spec.block_shape(r)) for r in spec.reads) // _BLOCKS_A_THREAD)
    wanted = max(largest // (32 * _ELEMENTS_A_THREAD), 1)
    warps = min(1 << (wanted.bit_length() - 1), _MAX_DOT_WARPS if dot else _MAX_WARPS)
    need = KernelFootprint(lowered.graph, spec, stages=_DEEP_STAGES)(spec.axes)
    if not dot:
        is_full = need.register_bytes > _LIVE_BLOCKS * largest * _REGISTER_BYTES
        return min(warps, _MAX_FULL_WARPS) if is_full else warps, STAGES
    return max(warps, 4), _DEEP_STAGES if need.onchip_bytes <= _DEEP_BYTES else STAGES
