"""Windows: part of a dimension of one array is a dimension of another.

Cut into pieces of equal length, the long dimension is ``(parts, rest, stride)`` and the short
one ``(count, rest)``: the short one's elements are every ``stride``-th of some consecutive parts.
So two halves of a row, or its even elements, have axes of the row: whole parts, and a rest that
is tiled like any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax import numpy as jnp

from costmodel.graph import DimMap, DimRole
from fuseplan.frontend.ops.rule import Tile

_P, _W = DimRole.PARALLEL, DimRole.WHOLE

_MOST_PIECES = 16
"""Pieces of a dimension that a Triton kernel takes apart: each is a conversion of layout."""


@dataclass(frozen=True, slots=True)
class Window:
    """Where a short dimension of ``count * rest`` lies in a long one of ``parts * rest * stride``."""

    parts: int
    rest: int
    stride: int
    first: int
    """The part that it starts with."""
    phase: int
    """The element of each ``stride`` that it takes."""
    count: int


Windows = dict[int, tuple[Window, ...]]
"""For each dimension in which short arrays differ from the long one, the window of each of them."""


def windows_in(extent: int, pieces: Sequence[tuple[int, int]], stride: int = 1) -> tuple[Window, ...]:
    """The windows of ``pieces``, each (start, elements), that take every ``stride``-th element of
    a dimension; in parts of one where ``stride`` does not divide it.

    Example:
        >>> windows_in(6, [(0, 2), (2, 4)])[1]
        Window(parts=3, rest=2, stride=1, first=1, phase=0, count=2)
    """
    units = extent // stride
    rest = max(math.gcd(units, *(n for start, size in pieces for n in (start // stride, size))), 1)
    return tuple(
        Window(units // rest, rest, stride, start // stride // rest, start % stride, size // rest)
        for start, size in pieces
    )


def window_space(
    long: Sequence[int], shorts: int, windows: Windows
) -> tuple[tuple[int, ...], tuple[DimRole, ...], DimMap, tuple[DimMap, ...]]:
    """Iteration dimensions and their roles, and how the long array and the ``shorts`` are indexed."""
    dims: list[int] = []
    roles: list[DimRole] = []

    def own(extent: int, role: DimRole) -> tuple[int, ...]:
        if extent == 1:
            return ()
        dims.append(extent)
        roles.append(role)
        return (len(dims) - 1,)

    long_map: list[tuple[int, ...]] = []
    short_maps: list[list[tuple[int, ...]]] = [[] for _ in range(shorts)]
    for d, extent in enumerate(long):
        if d not in windows:
            long_map.append(own(extent, _P))
            for short in short_maps:
                short.append(long_map[d])
            continue
        w = windows[d][0]
        parts = own(w.parts, _W)
        rest = own(w.rest, _P)
        long_map.append(parts + rest + own(w.stride, _W))
        for short, window in zip(short_maps, windows[d], strict=True):
            short.append(own(window.count, _W) + rest)
    return tuple(dims), tuple(roles), tuple(long_map), tuple(map(tuple, short_maps))


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cut(x: Any, dim: int, pieces: int) -> Sequence[Any]:
    """``x`` in equal pieces."""
    return [x] if pieces == 1 else lax.split(x, (x.shape[dim] // pieces,) * pieces, dim)


def joined(pieces: Sequence[Any], dim: int) -> Any:
    """A power of two of equal pieces side by side, by what Triton has: pairs of elements."""
    if len(pieces) == 1:
        return pieces[0]
    half = len(pieces) // 2
    pair = [joined(side, dim) for side in (pieces[:half], pieces[half:])]
    shape, last = pair[0].shape, pair[0].ndim
    both = lax.concatenate([lax.expand_dims(x, (last,)) for x in pair], last)
    both = lax.transpose(both, (*range(dim), last, *range(dim, last)))
    return lax.reshape(both, (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :]))


def _padded(pieces: Sequence[Any]) -> list[Any]:
    """As many pieces as a power of two; what is past the end is masked when it is stored."""
    return [*pieces, *[pieces[0]] * (_power(len(pieces)) - len(pieces))]


def _interleaved(x: Any, dim: int, stride: int) -> tuple[int, ...]:
    """The shape of ``x`` with ``dim`` divided into runs of ``stride``."""
    return (*x.shape[:dim], x.shape[dim] // stride, stride, *x.shape[dim + 1 :])


def _merged(x: Any, dim: int) -> Any:
    """``x`` with ``dim`` and the next merged."""
    return lax.reshape(x, (*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]))


def taken(tile: Tile, x: Any, dim: int, w: Window) -> Any:
    """The block of the short array out of the block ``x`` of the long one."""
    pieces: Sequence[Any]
    if tile.language == "triton":
        if w.stride > 1:
            x = lax.reshape(x, _interleaved(x, dim, _power(w.stride)))
            x = _merged(cut(x, dim + 1, _power(w.stride))[w.phase], dim)
        pieces = cut(x, dim, _power(w.parts))
        return joined(_padded(pieces[w.first : w.first + w.count]), dim)
    unit = x.shape[dim] // (w.parts * w.stride)
    start, size = w.first * unit, w.count * unit
    if w.stride > 1:  # Mosaic lowers no strided slice.
        x = lax.reshape(x, _interleaved(x, dim, w.stride))
        x = _merged(lax.slice_in_dim(x, w.phase, w.phase + 1, axis=dim + 1), dim)
    return lax.slice_in_dim(x, start, start + size, axis=dim)


def placed(tile: Tile, shorts: Sequence[Any], dim: int, windows: Sequence[Window], fill: Any) -> Any:
    """The block of the long array with those of ``shorts``, which are in order, in their windows and
    ``fill`` around them."""
    w, by_pairs = windows[0], tile.language == "triton"
    pieces: list[Any] = []
    end = 0
    if by_pairs:
        for x, window in zip(shorts, windows, strict=True):
            own = cut(x, dim, _power(window.count))[: window.count]
            pieces += [jnp.full_like(own[0], fill)] * (window.first - len(pieces))
            pieces += own
        pieces += [jnp.full_like(pieces[0], fill)] * (w.parts - len(pieces))
        whole = joined(_padded(pieces), dim)
    else:
        unit = shorts[0].shape[dim] // w.count
        for x, window in zip(shorts, windows, strict=True):
            pieces += [*_gap(x, dim, (window.first - end) * unit, fill), x]
            end = window.first + window.count
        pieces += _gap(shorts[0], dim, (w.parts - end) * unit, fill)
        whole = lax.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0]
    if w.stride == 1:
        return whole
    whole = lax.expand_dims(whole, (dim + 1,))
    around = jnp.full_like(whole, fill)
    runs = [whole if i == w.phase else around for i in range(w.stride)]
    return _merged(joined(_padded(runs), dim + 1) if by_pairs else lax.concatenate(runs, dim + 1), dim)


def _gap(x: Any, dim: int, size: int, fill: Any) -> list[Any]:
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return [jnp.full(shape, fill, x.dtype)] if size else []


def is_cut_in_kernels(w: Window, minor: int, language: str) -> bool:
    """Whether a backend cuts the ``minor``-th dimension from the last so."""
    if language == "triton":
        return _power(w.parts) * _power(w.stride) <= _MOST_PIECES
    # In the registers of a TPU a run of two is as long as a vector, or as many rows.
    return w.stride == 1 or minor > 2
