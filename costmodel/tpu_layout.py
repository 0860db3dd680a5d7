"""How arrays lie in a TPU's memories: in tiles of 8 x 128, to which the last two dimensions are padded.

XLA gives its own programs the layout that pads least, by other dimensions than the last if need be;
a Pallas call takes arrays row-major. So a kernel of ours moves 128 / 64 of ``[1024, 12, 64]``'s bytes
and 16 / 12 of them (tests/aot/test_compiled.py::test_arrays_cross_the_boundary_padded). That XLA
may have to copy an array into that layout first depends on who made it, and is not counted.
"""

from __future__ import annotations

import math
from functools import lru_cache

from costmodel import dtypes
from costmodel.graph import Value
from costmodel.kernel import Access, KernelSpec

LANES, SUBLANES = 128, 8
"""Mosaic: the last two dimensions of a block are multiples of these, or the array's own
(Pallas TPU guide, "BlockSpec")."""

WORD_BITS = 32
"""Of a sublane of a lane; narrower types pack along the sublanes (Pallas TPU guide, array layouts)."""


def padded_size(size: int, second: int, minor: int, rows: int) -> int:
    """Elements that lie where ``size`` of them do, with so many along the last two dimensions, in tiles
    of ``rows`` x 128."""
    return size // max(minor * second, 1) * _up(minor, LANES) * _up(second, rows)


def array_bytes(spec: KernelSpec, access: Access, value: Value) -> int:
    """Bytes of the array behind ``access`` as it crosses the boundary of a Mosaic kernel."""
    return _padded_bytes(value, is_lifted(spec, access))


def least_array_bytes(value: Value) -> int:
    """``array_bytes`` at least, whatever the kernel."""
    return min(
        _padded_bytes(value, lifted) for lifted in ((False, True) if len(value.shape) > 1 else (False,))
    )


@lru_cache(maxsize=10_000)
def _padded_bytes(value: Value, lifted: bool) -> int:
    """Of few rows a tile has no more than the next power of two, and of narrow types at least a word's.
    A scalar lies in scalar memory."""
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
