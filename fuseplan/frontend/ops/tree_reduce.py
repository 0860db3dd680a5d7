"""Reductions and scans that no kernel language has, of what all have: halves and pairs.

Triton cuts and joins blocks at powers of two, Mosaic anywhere; so each has the form of scan
that suits it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax

from fuseplan.frontend.ops.rule import Tile
from fuseplan.frontend.ops.windows import cut, joined

Combine = Callable[[Any, Any], Any]


def folded(tile: Tile, x: Any, dim: int, combine: Combine) -> Any:
    """``x`` combined along ``dim``, which keeps one element: halves are laid on each other."""
    rest: list[Any] = []
    while (n := x.shape[dim]) > 1:
        half = n // 2
        if tile.language == "triton":
            sides = cut(x, dim, 2)
        else:
            sides = [lax.slice_in_dim(x, i * half, (i + 1) * half, axis=dim) for i in (0, 1)]
            rest += [lax.slice_in_dim(x, n - 1, n, axis=dim)] if n % 2 else []
        x = combine(*sides)
    for one in rest:
        x = combine(x, one)
    return x


def scanned(tile: Tile, x: Any, dim: int, combine: Combine, reverse: bool) -> Any:
    """Each element of ``x`` combined with all before it along ``dim``, or behind it."""
    return (_by_blocks if tile.language == "triton" else _by_shifts)(x, dim, combine, reverse)


def _by_blocks(x: Any, dim: int, combine: Combine, reverse: bool) -> Any:
    """Blocks of a power of two, two of which become one: what one of them makes in all is combined
    with each element of the other (J. Sklansky, Conditional-Sum Addition Logic, 1960)."""
    shape, n = x.shape, x.shape[dim]
    totals, size = x, 1
    while size < n:
        pairs = n // (2 * size)
        blocks = cut(lax.reshape(x, (*shape[:dim], pairs, 2, size, *shape[dim + 1 :])), dim + 1, 2)
        ends = cut(lax.reshape(totals, (*shape[:dim], pairs, 2, 1, *shape[dim + 1 :])), dim + 1, 2)
        if reverse:
            sides = [combine(blocks[0], ends[1]), blocks[1]]
        else:
            sides = [blocks[0], combine(blocks[1], ends[0])]
        x = lax.reshape(joined(sides, dim + 1), shape)
        totals, size = combine(*ends), 2 * size
    return x


def _by_shifts(x: Any, dim: int, combine: Combine, reverse: bool) -> Any:
    """Each element with the one at a distance of one, two, four (W. D. Hillis and G. L. Steele, Data
    Parallel Algorithms, 1986)."""
    n, distance = x.shape[dim], 1
    while distance < n:
        near, far = (lax.slice_in_dim(x, start, start + n - distance, axis=dim) for start in (0, distance))
        if reverse:
            ends = [combine(near, far), lax.slice_in_dim(x, n - distance, n, axis=dim)]
        else:
            ends = [lax.slice_in_dim(x, 0, distance, axis=dim), combine(near, far)]
        x, distance = lax.concatenate(ends, dim), 2 * distance
    return x
