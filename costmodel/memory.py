"""Array sizes in HBM: the peak of temporaries between kernels, and how a TPU pads arrays.

A TPU's memories are laid out in tiles of 8 x 128, to which the last two dimensions are padded. XLA gives its
own programs the layout that pads least, by other dimensions than the last if need be; a Pallas call takes
arrays row-major. So a kernel of ours moves 128 / 64 x 16 / 12 of the bytes of ``[1024, 12, 64]``. XLA may
have to copy an array into that layout first, depending on its producer; that copy is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from costmodel import dtypes
from costmodel.graph import Graph, Value
from costmodel.kernel import Access, KernelSpec

LANES, SUBLANES = 128, 8
"""Mosaic: the last two dimensions of a block are multiples of these, or the array's own
(Pallas TPU guide, "BlockSpec")."""

WORD_BITS = 32
"""Bits of one sublane of one lane; narrower types pack along the sublanes (Pallas TPU guide, array
layouts)."""


def padded_size(size: int, second: int, minor: int, rows: int) -> int:
    """The number of elements of an array of ``size`` after padding its last two dimensions (``second``,
    ``minor``) to tiles of ``rows`` x 128."""
    return size // max(minor * second, 1) * _up(minor, LANES) * _up(second, rows)


def array_bytes(spec: KernelSpec, access: Access, value: Value) -> int:
    """Bytes of the array behind ``access`` as it crosses the boundary of a Mosaic kernel."""
    return array_bytes_if(value, is_lifted(spec, access))


def least_array_bytes(value: Value) -> int:
    """Lower bound of ``array_bytes`` for any kernel."""
    return min(
        array_bytes_if(value, lifted) for lifted in ((False, True) if len(value.shape) > 1 else (False,))
    )


@lru_cache(maxsize=10_000)
def array_bytes_if(value: Value, lifted: bool) -> int:
    """Bytes of an array after padding, ``lifted`` or not (``is_lifted``). A tile of few rows has as many as
    the next power of two, and at least those of one word of a narrow type. A scalar lies in scalar memory,
    unpadded."""
    if not value.shape:
        return value.nbytes
    *_, second, minor = shape = outer_shape(value.shape, lifted)
    bits = dtypes.bits(value.dtype)
    rows = min(max(1 << (second - 1).bit_length(), WORD_BITS // max(bits, 1), 1), SUBLANES)
    return -(-padded_size(math.prod(shape), second, minor, rows) * bits // 8)


def is_lifted(spec: KernelSpec, access: Access) -> bool:
    """Whether an array crosses the boundary with one more dimension, of size one, before its last: of
    ``x[B, H, T]``, a block of one head then is one that Mosaic can address."""
    if len(access.axes) < 2:
        return False
    rows = math.prod([spec.axes[a].tile for a in access.axes[-2]])
    return rows % SUBLANES != 0 and rows != math.prod([spec.axes[a].size for a in access.axes[-2]])


def outer_shape(shape: tuple[int, ...], lifted: bool = False) -> tuple[int, ...]:
    """Arrays cross a kernel's boundary with two dimensions at least, as VMEM is laid out."""
    if lifted:
        return (*shape[:-1], 1, shape[-1])
    return (1,) * (2 - len(shape)) + tuple(shape)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def peak_bytes(graph: Graph, kernels: Sequence[KernelSpec], tile_bytes: Sequence[int] = ()) -> int:
    """The most HBM bytes that temporaries occupy at once when ``kernels`` run in order. A
    temporary is a written value that is neither an input nor an output of the graph; it is
    freed after the last kernel that reads it. A kernel of bitcasts moves nothing: its
    result is its operand's buffer. ``tile_bytes`` is what each kernel itself keeps there
    while it runs: the blocks of a CPU's loops are memory like any other."""
    buffer = buffers(graph, kernels)
    kept = set(graph.inputs) | {buffer[v] for v in graph.outputs}
    last: dict[int, int] = {}
    for step, spec in enumerate(kernels):
        for access in spec.reads + spec.writes:
            last[buffer[access.value]] = step
    dies: list[list[int]] = [[] for _ in kernels]
    for v, step in last.items():
        dies[step].append(v)
    alive: dict[int, int] = {}
    now = peak = 0
    for step, spec in enumerate(kernels):
        for access in spec.writes:
            v = buffer[access.value]
            if v not in kept and v not in alive:
                alive[v] = graph.values[v].nbytes
                now += alive[v]
        peak = max(peak, now + (tile_bytes[step] if tile_bytes else 0))
        for v in dies[step]:
            now -= alive.pop(v, 0)
    return peak


def buffers(graph: Graph, kernels: Sequence[KernelSpec]) -> list[int]:
    """For each value the value in whose buffer it lies: itself, or the operand of the bitcasts that made
    it."""
    buffer = list(range(len(graph.values)))
    for spec in kernels:
        if is_bitcast(graph, spec):
            for n in spec.nodes:
                node = graph.nodes[n]
                for v in node.outputs:
                    buffer[v] = buffer[node.inputs[0]]
    return buffer


def is_bitcast(graph: Graph, spec: KernelSpec) -> bool:
    """Whether the group only renames bytes: nothing is launched and nothing moves."""
    return not spec.axes and all(graph.nodes[n].bitcast for n in spec.nodes)
